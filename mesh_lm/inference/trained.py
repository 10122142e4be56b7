"""Loads a trained model from a run's checkpoint or from a Hugging Face directory."""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, get_type_hints, overload

import jax

from mesh_lm import checkpoint, distributed, huggingface
from mesh_lm.config import ModelConfig, PipelineConfig, TrainConfig
from mesh_lm.config.resolved import rules_from
from mesh_lm.data.atomic import write_files
from mesh_lm.data.tokenizer import FORMER, Tokenizer, companions, load_tokenizer
from mesh_lm.errors import ConfigError, hub_hint
from mesh_lm.inference import Generator, Sampling, Scorer
from mesh_lm.inference.perplexity import Perplexity, measure_perplexity
from mesh_lm.model import DecoderConfig, SegmentConfig
from mesh_lm.parallel.layout import ModelLayout, Params
from mesh_lm.parallel.merge_stages import merged_layout
from sharding_rules import MeshConfig, MeshError, Rules, Shard, make_mesh

TOKENIZER = "tokenizer"
"""The directory in a run's output that stores its tokenizer."""


@dataclasses.dataclass(frozen=True, eq=False)
class TrainedModel:
    """Weights on a mesh, with their config, layout and tokenizer."""

    config: TrainConfig
    """The config of the training run; for a Hugging Face directory, all but `model` are
    defaults."""
    layout: ModelLayout
    params: Params
    tokenizer: Tokenizer
    step: int
    """Optimizer steps that made the weights; 0 for a Hugging Face directory."""
    _generators: dict[Sampling, Generator] = dataclasses.field(
        default_factory=dict, init=False, repr=False
    )

    @classmethod
    def load(
        cls,
        path: Path | str,
        *,
        mesh: MeshConfig | None = None,
        rules: Rules | None = None,
        tokenizer: str = "",
        model: ModelConfig | None = None,
        dtype: str = "",
    ) -> TrainedModel:
        """Loads a model; each device reads its own shard.

        Args:
          path: a run's output directory (the newest checkpoint), one step in its `checkpoints`, or
          a Hugging Face model directory. mesh, rules: None: those of training if they fit the
          visible devices, else data parallelism. Pipeline stages are merged into FSDP
            (`mesh_lm.parallel.merge_stages`).
          tokenizer: as `data.tokenizer`; empty: the one stored with the checkpoint or the weights.
          model: the model's config; required for a custom model class, whose code is not stored in
          checkpoints. dtype: overrides the config's compute dtype.

        Raises:
          ConfigError: the checkpoint is missing or of another model, or the tokenizer is missing or
          not that of training. ShardingRuleError: the rules do not fit the model on this mesh.
        """
        saved = checkpoint.find(path)
        if saved is None and not huggingface.is_huggingface(path):
            raise ConfigError(_holds_nothing(path))
        if saved:
            config = config_from(saved.metadata["config"], model, str(saved.path))
        else:
            config = TrainConfig(model=model or huggingface.config_of(path), output=str(path))
        changes = {"dtype": dtype} if dtype else {}
        config = dataclasses.replace(config, model=dataclasses.replace(config.model, **changes))
        mesh, rules = _placement(config, mesh, rules)
        # first, because its errors come fast
        loaded_tokenizer = _tokenizer(tokenizer, saved, Path(path))
        layout = merged_layout(config.model, Shard(rules, make_mesh(mesh)))
        mesh, rules = MeshConfig.of(layout.shard.mesh.shape), layout.shard.rules
        config = dataclasses.replace(config, mesh=mesh, rules=rules, pipeline=PipelineConfig())
        return cls(
            config,
            layout,
            _weights(saved, path, layout)(),
            loaded_tokenizer,
            saved.step if saved else 0,
        )

    @overload
    def generate(self, prompt: str, tokens: int = ..., **options: Any) -> str: ...
    @overload
    def generate(self, prompt: Sequence[str], tokens: int = ..., **options: Any) -> list[str]: ...
    def generate(  # pyright: ignore[reportInconsistentOverload]  # the options of both are those here
        self,
        prompt: str | Sequence[str] = "",
        tokens: int = 128,
        *,
        temperature: float = Sampling.temperature,
        top_k: int = Sampling.top_k,
        top_p: float = Sampling.top_p,
        seed: int = 0,
        stop: Sequence[str] = (),
        stop_at_eod: bool = True,
    ) -> str | list[str]:
        """The text that follows a prompt, or a list of them for several prompts; an empty prompt
        begins a new document.

        Args:
          tokens: new tokens at most. temperature, top_k, top_p: see `Sampling`; temperature 0
          always takes the likeliest token. seed: the same seed gives the same text, on any mesh.
          stop: a text ends before the first of these strings, or, with stop_at_eod, where the model
          ends the document.

        Raises:
          ConfigError: the model cannot generate, or a prompt leaves no room for the new tokens.
          `Generator` also gives log-probabilities.
        """
        sampling = Sampling(temperature, top_k, top_p)
        if sampling not in self._generators:  # which keeps what it has compiled
            self._generators[sampling] = Generator(
                self.layout, self.params, self.tokenizer, sampling
            )
        prompts = [prompt] if isinstance(prompt, str) else list(prompt)
        done = self._generators[sampling].complete(
            prompts, tokens, seed=seed, stop=stop, stop_at_eod=stop_at_eod
        )
        texts = [each.text for each in done]
        return texts[0] if isinstance(prompt, str) else texts

    def score(self, text: str | Sequence[str], *, stride: int = 0, batch: int = 8) -> Perplexity:
        """What the text costs, or each of several: `summary()` has nats per token, perplexity and
        bits per byte.

        stride: new tokens in each window of a long text after the first; 0: half the model's
        seq_len. batch: windows at once. Raises ConfigError where there is no text, or the model
        cannot score any.
        """
        scorer = Scorer(self.layout, self.params, batch)
        texts = [text] if isinstance(text, str) else text
        stride = stride or max(1, self.layout.config.seq_len // 2)
        return measure_perplexity(
            scorer, self.tokenizer, texts, stride=stride, start=self.tokenizer.eod
        )


def _holds_nothing(path: Path | str) -> str:
    hint = "" if Path(path).expanduser().exists() else hub_hint(str(path))
    return (
        f"{path} holds neither checkpoints of a run nor a Hugging Face model (config.json and "
        f".safetensors){hint}"
    )


def weights(path: Path | str, layout: ModelLayout) -> Callable[[], Params]:
    """Returns a function that reads the parameters of a run's checkpoint or of a Hugging Face
    directory, layers in model order.

    Raises ConfigError immediately if there are none, or those of another model.
    """
    return _weights(checkpoint.find(path), path, layout)


def _weights(
    saved: checkpoint.SavedCheckpoint | None, path: Path | str, layout: ModelLayout
) -> Callable[[], Params]:
    if saved:
        saved.require_model(layout)
        return lambda: saved.params(layout)
    if huggingface.is_huggingface(path):
        return huggingface.reader(path, layout)
    raise ConfigError(_holds_nothing(path))


def require_tokenizer(path: Path | str, tokenizer: Tokenizer) -> None:
    """Raises ConfigError if the weights in `path` were trained with another tokenizer, as far as
    that is known.
    """
    if saved := checkpoint.find(path):
        fingerprint = saved.data.get("tokenizer")
    else:
        fingerprint = None
        with contextlib.suppress(ConfigError):  # weights may come without one
            fingerprint = load_tokenizer(str(path)).fingerprint
    if not _is_of(fingerprint, tokenizer, f"init_from={path}"):
        raise ConfigError(
            f"init_from={path} was trained with another tokenizer than this data's (fingerprint "
            f"{str(fingerprint)[:12]}, not {tokenizer.fingerprint[:12]}): the ids have other "
            "meanings; set data.tokenizer to the original one"
        )


def _is_of(fingerprint: str | None, tokenizer: Tokenizer, what: str) -> bool:
    """Returns whether a fingerprint is unknown, or that of a tokenizer; prints a warning for a
    former one of it.
    """
    if former := fingerprint in tokenizer.former_fingerprints:
        distributed.print_on_process0(FORMER.format(what))
    return former or fingerprint in (None, tokenizer.fingerprint)


def keep_tokenizer(
    output: str, tokenizer: Tokenizer | None, init_from: str = ""
) -> Tokenizer | None:
    """Stores the tokenizer in a run's output (on process 0), so that the directory suffices to
    generate text. Returns the tokenizer.

    init_from: the model that the run starts from, whose settings for generation are stored where
    the tokenizer comes without any.
    """
    if tokenizer is None or jax.process_index() > 0:
        return tokenizer
    kept = Path(output).expanduser() / TOKENIZER
    with contextlib.suppress(ConfigError):
        if load_tokenizer(str(kept)).fingerprint == tokenizer.fingerprint:
            return tokenizer
    if kept.exists():
        print(
            (
                f"warning: the tokenizer in {kept} is damaged, or not that of the data; that of "
                "the data is stored there again"
            ),
            flush=True,
        )
    try:
        shutil.rmtree(kept, ignore_errors=True)
        kept.mkdir(parents=True)
        tokenizer.save(kept)
        if init_from and not tokenizer.companions.generation:
            _keep_generation(kept, init_from)
    except OSError as error:
        raise ConfigError(f"cannot store the tokenizer in {kept}: {error.strerror}") from error
    return tokenizer


def _keep_generation(kept: Path, init_from: str) -> None:
    """Copies the settings for generation of another model, if it has any, to the directory of a
    tokenizer. Raises OSError.

    Process 0 calls it alone, so that it must not call `checkpoint.find`.
    """
    output = checkpoint.output_of(init_from)
    directory = output / TOKENIZER if output else Path(init_from).expanduser()
    write_files(kept, companions.generation_of(directory).generation_file())


def _placement(
    config: TrainConfig, mesh: MeshConfig | None, rules: Rules | None
) -> tuple[MeshConfig, Rules]:
    """Returns mesh and rules for the visible devices. Axes that only the rules have get size 1."""
    rules = rules or config.rules
    try:
        resolved = (mesh or config.mesh).resolve(jax.device_count())
    except MeshError as error:
        if mesh is not None:
            raise ConfigError(str(error)) from error
        resolved = MeshConfig(data=-1).resolve(jax.device_count())
    return MeshConfig.of({**dict.fromkeys(rules.axes, 1), **resolved.sizes()}), rules


def _tokenizer(spec: str, saved: checkpoint.SavedCheckpoint | None, path: Path) -> Tokenizer:
    kept = saved.directory.parent / TOKENIZER if saved else path
    if not spec and saved and not kept.exists():
        raise ConfigError(
            f"no tokenizer is stored in {kept}; name the one that {saved.path} was trained with: "
            "--tokenizer=..."
        )
    tokenizer = load_tokenizer(spec or str(kept))
    if spec and not tokenizer.companions.generation:  # settings for generation are the model's
        generation = companions.generation_of(kept.expanduser()).generation
        tokenizer.companions = dataclasses.replace(tokenizer.companions, generation=generation)
    trained_with = saved.data.get("tokenizer") if saved else None
    if not _is_of(trained_with, tokenizer, str(path)):
        raise ConfigError(
            f"{spec or kept} is not the tokenizer that {path} was trained with: its ids have other "
            f"meanings (fingerprint {tokenizer.fingerprint[:12]}, not {str(trained_with)[:12]})"
        )
    return tokenizer


def config_from(plain: dict[str, Any], model: ModelConfig | None, where: str) -> TrainConfig:
    """Returns the config that `as_dict` described. Unknown fields are ignored, except those of the
    model.
    """
    if model is None:
        if (name := plain["model"]["class"]) != "DecoderConfig":
            raise ConfigError(
                f"{where} is a {name}, which is not a class of mesh_lm; name the config file that "
                "creates it: --config=FILE.py (config= in Python)"
            )
        fields = {f.name for f in dataclasses.fields(DecoderConfig)}
        if unknown := plain["model"].keys() - fields - {"class"}:
            raise ConfigError(
                f"{where}: its model has fields that this version does not know: "
                f"{', '.join(sorted(unknown))}"
            )
        runs = tuple(
            SegmentConfig(**_known(SegmentConfig, run))
            for run in plain["model"].get("segments", ())
        )
        known: dict[str, Any] = {**_known(DecoderConfig, plain["model"]), "segments": runs}
        model = DecoderConfig(**known)
    hints = get_type_hints(TrainConfig)
    sections = {
        name: hints[name]
        for name in plain
        if dataclasses.is_dataclass(hints.get(name)) and name not in ("model", "rules")
    }
    built = {name: section(**_known(section, plain[name])) for name, section in sections.items()}
    rest = {
        name: value
        for name, value in _known(TrainConfig, plain).items()
        if not isinstance(value, dict)
    }
    return TrainConfig(**rest, **built, model=model, rules=rules_from(plain["rules"]))


def _known(section: type, plain: dict[str, Any]) -> dict[str, Any]:
    """Returns the entries of `plain` that are fields, with lists as tuples."""
    names = {f.name for f in dataclasses.fields(section)}
    return {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in plain.items()
        if name in names
    }
