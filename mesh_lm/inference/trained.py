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
from mesh_lm.config import ModelConfig, OptimizerConfig, PipelineConfig, TrainConfig
from mesh_lm.config.resolved import rule_from, rules_from
from mesh_lm.data.atomic import write_files
from mesh_lm.data.tokenizer import FORMER, Tokenizer, companions, load_tokenizer
from mesh_lm.errors import ConfigError, hub_hint
from mesh_lm.inference import Generator, Sampling, Scorer
from mesh_lm.inference.perplexity import Perplexity, measure_perplexity
from mesh_lm.model import DecoderConfig, SegmentConfig
from mesh_lm.model.experts_config import ExpertsConfig
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
            a Hugging Face model directory.
          mesh, rules: None: those of training if they fit the visible devices, else data
            parallelism. Pipeline stages are merged into FSDP (`mesh_lm.parallel.merge_stages`).
          tokenizer: as `data.tokenizer`; empty: the one stored with the checkpoint or the weights.
          model: the model's config; required for a custom model class, whose code is not stored in
            checkpoints.
          dtype: overrides the config's compute dtype.

        Raises:
          ConfigError: the checkpoint is missing or of another model, or the tokenizer is missing or
            not that of training.
          ShardingRuleError: the rules do not fit the model on this mesh.
        """
        saved = checkpoint.find(path)
        if saved is None and not huggingface.is_huggingface(path):
            raise _no_model(path)
        if saved:
            config = config_from(saved.config, model, str(saved.path))
        else:
            config = TrainConfig(model=model or huggingface.config_of(path), output=str(path))
        if dtype:
            config = dataclasses.replace(
                config, model=dataclasses.replace(config.model, dtype=dtype)
            )
        mesh, rules = _placement(config, mesh, rules)
        # The tokenizer is loaded first, because its errors come fast.
        loaded_tokenizer = _load_tokenizer(tokenizer, saved, Path(path))
        layout = merged_layout(config.model, Shard(rules, make_mesh(mesh)))
        config = dataclasses.replace(
            config,
            mesh=MeshConfig.of(layout.shard.mesh.shape),
            rules=layout.shard.rules,
            pipeline=PipelineConfig(),
        )
        params = _weights(saved, path, layout)()
        return cls(config, layout, params, loaded_tokenizer, saved.step if saved else 0)

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
        """Returns the text that follows a prompt, or a list of texts for several prompts; an empty
        prompt begins a new document. `Generator` also gives log-probabilities.

        Args:
          tokens: new tokens at most.
          temperature, top_k, top_p: see `Sampling`; temperature 0 always takes the likeliest token.
          seed: the same seed gives the same text, on any mesh.
          stop: a text ends before the first of these strings.
          stop_at_eod: whether a text also ends where the model ends the document.

        Raises:
          ConfigError: the model cannot generate, or a prompt leaves no room for the new tokens.
        """
        sampling = Sampling(temperature, top_k, top_p)
        # A generator is kept for its compiled programs.
        if sampling not in self._generators:
            self._generators[sampling] = Generator(
                self.layout, self.params, self.tokenizer, sampling
            )
        prompts = [prompt] if isinstance(prompt, str) else list(prompt)
        completions = self._generators[sampling].complete(
            prompts, tokens, seed=seed, stop=stop, stop_at_eod=stop_at_eod
        )
        texts = [completion.text for completion in completions]
        return texts[0] if isinstance(prompt, str) else texts

    def score(self, text: str | Sequence[str], *, stride: int = 0, batch: int = 8) -> Perplexity:
        """Returns the perplexity of a text, or of several together; `summary()` has nats per token,
        perplexity and bits per byte.

        Args:
          stride: new tokens in each window of a long text after the first; 0: half the model's
            seq_len.
          batch: windows at once.

        Raises:
          ConfigError: there is no text, or the model cannot score any.
        """
        scorer = Scorer(self.layout, self.params, batch)
        texts = [text] if isinstance(text, str) else text
        stride = stride or max(1, self.layout.config.seq_len // 2)
        return measure_perplexity(
            scorer, self.tokenizer, texts, stride=stride, start=self.tokenizer.eod
        )


def weights(path: Path | str, layout: ModelLayout) -> Callable[[], Params]:
    """Returns a function that reads the parameters of a run's checkpoint or of a Hugging Face
    directory, layers in model order.

    Raises ConfigError immediately if there are none, or those of another model.
    """
    return _weights(checkpoint.find(path), path, layout)


def require_tokenizer(path: Path | str, tokenizer: Tokenizer) -> None:
    """Raises ConfigError if the weights in `path` were trained with another tokenizer, as far as
    that is known.
    """
    saved = checkpoint.find(path)
    fingerprint = None
    if saved:
        fingerprint = saved.data.get("tokenizer")
    else:
        with contextlib.suppress(ConfigError):  # weights may come without one
            fingerprint = load_tokenizer(str(path)).fingerprint
    if not _accepts(tokenizer, fingerprint, f"init_from={path}"):
        raise ConfigError(
            f"init_from={path} was trained with another tokenizer than this data's (fingerprint "
            f"{str(fingerprint)[:12]}, not {tokenizer.fingerprint[:12]}): the ids have other "
            "meanings; set data.tokenizer to the original one"
        )


def keep_tokenizer(
    output: str, tokenizer: Tokenizer | None, init_from: str = ""
) -> Tokenizer | None:
    """Stores the tokenizer in a run's output (on process 0), so that the directory suffices to
    generate text. Returns the tokenizer.

    init_from: the model that the run starts from, whose settings for generation are stored if the
    tokenizer comes without any.
    """
    if tokenizer is None or jax.process_index() > 0:
        return tokenizer
    directory = Path(output).expanduser() / TOKENIZER
    with contextlib.suppress(ConfigError):
        if load_tokenizer(str(directory)).fingerprint == tokenizer.fingerprint:
            return tokenizer
    if directory.exists():
        print(
            f"warning: the tokenizer in {directory} is damaged, or not that of the data; that of "
            "the data is stored there again",
            flush=True,
        )
    try:
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(parents=True)
        tokenizer.save(directory)
        if init_from and not tokenizer.companions.generation:
            _copy_generation(init_from, directory)
    except OSError as error:
        raise ConfigError(f"cannot store the tokenizer in {directory}: {error.strerror}") from error
    return tokenizer


def config_from(plain: dict[str, Any], model: ModelConfig | None, source: str) -> TrainConfig:
    """Returns the config that `as_dict` has converted to `plain`. Unknown fields are ignored,
    except those of the model.

    Args:
      model: the config of the model, whatever `plain` has; None: that of `plain`.
      source: of `plain`, for messages.

    Raises:
      ConfigError: the model is of a custom class, or has unknown fields.
    """
    if model is None:
        model = _model_from(plain["model"], source)
    hints = get_type_hints(TrainConfig)
    fields: dict[str, Any] = {}
    for name, value in _fields_of(TrainConfig, plain).items():
        if not isinstance(value, dict):
            fields[name] = value
        elif dataclasses.is_dataclass(hints[name]) and name not in ("model", "rules"):
            section: Any = hints[name]
            fields[name] = section(**_fields_of(section, value))
    fields["optimizer"] = _optimizer_from(fields.get("optimizer", OptimizerConfig()))
    return TrainConfig(**fields, model=model, rules=rules_from(plain["rules"]))


def _optimizer_from(section: OptimizerConfig) -> OptimizerConfig:
    """Returns the section with its rule, whose description it has. A rule that cannot be imported
    is replaced by the default: the weights do not need it.
    """
    if not isinstance(section.rule, dict):
        return section
    rule = OptimizerConfig().rule
    with contextlib.suppress(ValueError):
        rule = rule_from(section.rule, "optimizer.rule")
    return dataclasses.replace(section, rule=rule)


def _model_from(plain: dict[str, Any], source: str) -> DecoderConfig:
    """Returns the model's config in a config that `as_dict` has converted."""
    name = plain["class"]
    if name != "DecoderConfig":
        raise ConfigError(
            f"{source} is a {name}, which is not a class of mesh_lm; name the config file that "
            "creates it: --config=FILE.py (config= in Python)"
        )
    names = {field.name for field in dataclasses.fields(DecoderConfig)}
    unknown = plain.keys() - names - {"class"}
    if unknown:
        raise ConfigError(
            f"{source}: its model has fields that this version does not know: "
            f"{', '.join(sorted(unknown))}"
        )
    fields = _fields_of(DecoderConfig, plain)
    fields["segments"] = tuple(
        SegmentConfig(**_fields_of(SegmentConfig, segment)) for segment in plain.get("segments", ())
    )
    fields["experts"] = ExpertsConfig(**_fields_of(ExpertsConfig, plain.get("experts", {})))
    return DecoderConfig(**fields)


def _fields_of(config_class: type, plain: dict[str, Any]) -> dict[str, Any]:
    """Returns the entries of `plain` that are fields of a class, with lists as tuples."""
    fields = {}
    for field in dataclasses.fields(config_class):
        if field.name in plain:
            value = plain[field.name]
            fields[field.name] = tuple(value) if isinstance(value, list) else value
    return fields


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


def _load_tokenizer(spec: str, saved: checkpoint.SavedCheckpoint | None, path: Path) -> Tokenizer:
    """Returns the tokenizer of a spec, or the one beside the weights if that is empty.

    Raises ConfigError if there is none, or it is not that of training.
    """
    stored = saved.directory.parent / TOKENIZER if saved else path
    if not spec and saved and not stored.exists():
        raise ConfigError(
            f"no tokenizer is stored in {stored}; name the one that {saved.path} was trained with: "
            "--tokenizer=..."
        )
    tokenizer = load_tokenizer(spec or str(stored))
    if spec and not tokenizer.companions.generation:  # settings for generation are the model's
        generation = companions.generation_of(stored.expanduser()).generation
        tokenizer.companions = dataclasses.replace(tokenizer.companions, generation=generation)
    fingerprint = saved.data.get("tokenizer") if saved else None
    if not _accepts(tokenizer, fingerprint, str(path)):
        raise ConfigError(
            f"{spec or stored} is not the tokenizer that {path} was trained with: its ids have "
            f"other meanings (fingerprint {tokenizer.fingerprint[:12]}, not "
            f"{str(fingerprint)[:12]})"
        )
    return tokenizer


def _accepts(tokenizer: Tokenizer, fingerprint: str | None, source: str) -> bool:
    """Returns whether a fingerprint is the tokenizer's or unknown; prints a warning if it is a
    former one.
    """
    if fingerprint in tokenizer.former_fingerprints:
        distributed.print_on_process0(FORMER.format(source))
        return True
    return fingerprint in (None, tokenizer.fingerprint)


def _copy_generation(init_from: str, directory: Path) -> None:
    """Copies the settings for generation of a model, if it has any, to the directory of a
    tokenizer. Raises OSError.

    Process 0 calls it alone, so that it must not call `checkpoint.find`.
    """
    output = checkpoint.output_of(init_from)
    source = output / TOKENIZER if output else Path(init_from).expanduser()
    write_files(directory, companions.generation_of(source).generation_file())


def _weights(
    saved: checkpoint.SavedCheckpoint | None, path: Path | str, layout: ModelLayout
) -> Callable[[], Params]:
    if saved:
        saved.require_model(layout)
        return lambda: saved.params(layout)
    if huggingface.is_huggingface(path):
        return huggingface.reader(path, layout)
    raise _no_model(path)


def _no_model(path: Path | str) -> ConfigError:
    """Returns the error for a path that has no weights."""
    hint = "" if Path(path).expanduser().exists() else hub_hint(str(path))
    return ConfigError(
        f"{path} holds neither checkpoints of a run nor a Hugging Face model (config.json and "
        f".safetensors){hint}"
    )
