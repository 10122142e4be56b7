"""Everything that a run reads but prepared tokens, as `damage.Target`s: small files of each kind,
and the reader that a run uses."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from fault.damage import Target
from fixtures.huggingface_golden import FIXTURES, golden
from jax.experimental.compilation_cache import compilation_cache
from support import shard_on

from mesh_lm import huggingface
from mesh_lm.checkpoint import Checkpoints
from mesh_lm.checkpoint.reader import differences
from mesh_lm.config import CheckpointConfig, DataConfig, TrainConfig, as_dict, load
from mesh_lm.data import corpus
from mesh_lm.data.prepare.run import prepare
from mesh_lm.data.tokenizer import Tokenizer, load_tokenizer, train_tokenizer
from mesh_lm.distributed import compile_cache
from mesh_lm.distributed.phases import Phases
from mesh_lm.inference.trained import TOKENIZER, TrainedModel
from mesh_lm.model import DecoderConfig
from mesh_lm.optim import Optimizer
from mesh_lm.parallel.layout import ModelLayout
from mesh_lm.report import rows
from mesh_lm.report.writer import Writer
from mesh_lm.state.initial import init_state
from mesh_lm.training.check import check
from mesh_lm.training.goodput import Goodput, describe, total

MODEL = DecoderConfig(
    vocab_size=512, vocab_multiple=1, seq_len=8, n_layers=2, d_model=16, n_heads=2, dtype="float32"
)
TEXT = "".join(f"def line_{i}(x):\n    return x + {i}  # caf\u00e9\n" for i in range(60))


def files_in(*directories: Path) -> list[Path]:
    return sorted(
        path for directory in directories for path in directory.rglob("*") if path.is_file()
    )


def same(tree: Any, wanted: Any) -> bool:
    return all(
        np.array_equal(a, b)
        for a, b in zip(jax.tree.leaves(tree), jax.tree.leaves(wanted), strict=True)
    )


def trained() -> Tokenizer:
    return train_tokenizer([TEXT], 300)


def _saved(
    root: Path, policy: CheckpointConfig, steps: Sequence[int], tokenizer: Tokenizer
) -> tuple[Callable[[], Any], dict[int, Any]]:
    """Saves steps of a run in root / "run". Returns a function that restores the newest, and the
    states by step."""
    config = TrainConfig(model=MODEL, output=str(root / "run"), checkpoint=policy)
    optimizer, layout, states = (
        Optimizer(config.optimizer, config.train.steps, config.diloco),
        ModelLayout.of(MODEL, shard_on("ddp")),
        {},
    )
    with Checkpoints(config) as checkpoints:
        checkpoints.restore(layout, optimizer)
        for step in steps:
            state = init_state(layout, optimizer, seed=step)
            states[step] = jax.tree.map(np.array, state)
            checkpoints.save(
                step,
                state,
                {"position": step, "tokenizer": tokenizer.fingerprint},
                layout,
                optimizer,
            )

    def restored() -> Any:
        with Checkpoints(config) as checkpoints:
            saved, state = checkpoints.restore(layout, optimizer)
        return (saved.step, state) if saved else (None, None)

    return restored, states


def checkpoint(root: Path) -> Target:
    """Two steps: the arrays, their metadata and the descriptions of both."""
    read, states = _saved(root, CheckpointConfig(), (1, 2), load_tokenizer("bytes"))
    newest = root / "run" / "checkpoints"

    def right(found: Any, said: str) -> bool:
        step, state = found
        return (step == 2 or (step == 1 and "renamed to 2.damaged" in said)) and same(
            state, states[step]
        )

    return Target(root, lambda: files_in(newest), read, right, "is damaged")


def node_local(root: Path) -> Target:
    """A durable step, two newer ones on the node's disk, and the mark that tells whose they are."""
    policy = CheckpointConfig(every=10, local=str(root / "local"), local_every=1)
    read, states = _saved(root, policy, (10, 11, 12), load_tokenizer("bytes"))

    def right(found: Any, said: str) -> bool:
        step, state = found
        return step is not None and (step == 12 or bool(said)) and same(state, states[step])

    mark = root / "run" / "checkpoints" / ".local"
    return Target(root, lambda: [*files_in(root / "local"), mark], read, right, "ocal checkpoint")


def compiled(root: Path) -> Target:
    """Entries of JAX's compilation cache, read by JAX."""
    x = jnp.arange(64.0).reshape(8, 8)
    before = {
        name: getattr(jax.config, name)
        for name in ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    }

    def read() -> list[np.ndarray]:
        try:
            compile_cache.use(str(root))
            jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
            compilation_cache.reset_cache()
            found = []
            for n in (1, 2):
                jax.clear_caches()
                found.append(
                    np.asarray(jax.jit(lambda x, n=n: jnp.tanh(x @ x.T / (40.0 * n)).sum(0) * n)(x))
                )
            return found
        finally:
            for name, value in before.items():
                jax.config.update(name, value)
            compilation_cache.reset_cache()

    wanted = read()
    return Target(
        root,
        lambda: sorted((root / "verified").glob("*-cache")),
        read,
        lambda found, _: same(found, wanted),
        "compile cache",
    )


def run_tokenizer(root: Path) -> Target:
    """The tokenizer that a run's output keeps, read to generate text."""
    tokenizer = trained()
    _saved(root, CheckpointConfig(), (1,), tokenizer)
    (kept := root / "run" / TOKENIZER).mkdir()
    tokenizer.save(kept)
    return Target(
        root, lambda: files_in(kept), lambda: TrainedModel.load(root / "run").tokenizer,
        lambda found,
        _: (found.encode_batch([TEXT])[0].tolist(), found.eod) == (tokenizer.encode_batch([TEXT])[0].tolist(), tokenizer.eod),
        "",
    )  # fmt: skip


def _about(data: Any) -> Any:
    return [
        data.train_bytes, data.heldout_bytes, data.train_tokens, data.heldout_tokens, data.eod,
        data.fingerprint, data.loss_of_bytes,
        data.gzip_bits_per_byte, data.xz_bits_per_byte, data.tokenizer().fingerprint,
    ]  # fmt: skip


def cached_text(root: Path) -> Target:
    """The description and the tokenizer of text that a run has prepared."""
    (root / "text.txt").write_text(TEXT, encoding="utf-8")
    config = DataConfig(path=str(root / "text.txt"), cache=str(root / "cache"), tokenizer_vocab=300)
    wanted = _about(corpus.prepare(config, vocab=300))
    small = lambda: [path for path in files_in(root / "cache") if path.suffix == ".json"]  # noqa: E731
    return Target(
        root,
        small,
        lambda: _about(corpus.prepare(config, vocab=300)),
        lambda found, _: found == wanted,
        "",
    )


def prefix(root: Path) -> Target:
    """The description and the tokenizer beside a prefix that `mesh-lm prepare` wrote."""
    (root / "lines.jsonl").write_text(
        "".join(json.dumps({"text": f"{line}\n"}) + "\n" for line in TEXT.split("\n")),
        encoding="utf-8",
    )
    (root / "tokenizer").mkdir()
    with (root / "log").open("w", encoding="utf-8") as log:
        prepare(
            (str(root / "lines.jsonl"),),
            str(root / "x"),
            str(trained().save(root / "tokenizer")),
            workers=1,
            output=log,
        )
    config = DataConfig(blend=(str(root / "x"),), split="8,2,0", cache=str(root / "cache"))
    wanted = _about(corpus.prepare(config, vocab=300))
    small = lambda: [  # noqa: E731
        path for path in [root / "x.json", *files_in(root / "x.tokenizer")] if path.exists()
    ]
    return Target(
        root, small, lambda: _about(corpus.prepare(config, vocab=300, progress=print)),
        lambda found,
        said: found == wanted or (bool(said) and found[2:4] + found[5:6] == wanted[2:4] + wanted[5:6]),
        "the bytes are estimated",
    )  # fmt: skip


CONFIG = """\
from mesh_lm.config import CheckpointConfig, DataConfig, OptimizerConfig, TrainConfig, TrainLoop
from mesh_lm.model import DecoderConfig

LAYERS = 2


def get_config() -> TrainConfig:
    # Two layers.
    return TrainConfig(
        model=DecoderConfig(vocab_size=512, seq_len=64, n_layers=LAYERS, d_model=32, n_heads=4, dropout=0.1),
        output="runs/one",
        train=TrainLoop(steps=100, global_batch=8),
        optimizer=OptimizerConfig(learning_rate=1e-3, warmup_steps=10),
        data=DataConfig(path="text.txt", tokenizer_vocab=512),
        checkpoint=CheckpointConfig(every=10),
    )
"""


def config_file(root: Path) -> Target:
    """A config file, and the config in the checkpoint that the run resumes, which is compared with
    it."""
    (root / "one.py").write_text(CONFIG, encoding="utf-8")
    saved = json.loads(json.dumps(as_dict(load(str(root / "one.py")))))

    def read() -> dict[str, Any]:
        shutil.rmtree(root / "__pycache__", ignore_errors=True)
        force = json.loads(json.dumps(as_dict(load(str(root / "one.py")))))
        check(load(str(root / "one.py")), 1)
        # as `SavedCheckpoint.changed` says at a resume
        print("\n".join(f"changed since: {line}" for line in differences(saved, force)))
        return force

    return Target(
        root,
        lambda: [root / "one.py"],
        read,
        lambda found, said: found == saved or bool(said),
        "changed since: ",
    )


def goodput(root: Path) -> Target:
    """The records of three lives of a run."""
    for n in range(3):
        phases = Phases()
        phases.step = 10 * n + 5
        record = Goodput(root / "run", phases, 10 * n)
        record._born, record._path = (
            100.0 * n + 1,
            root / "run" / "goodput" / f"{100 * n}.000-{n}.json",
        )
        record.write(force=True)
    wanted = total(root / "run" / "goodput")

    def read() -> dict[str, Any]:
        found = total(root / "run" / "goodput")
        print(describe(found))
        return found

    return Target(
        root,
        lambda: files_in(root / "run"),
        read,
        lambda found, said: found == wanted or bool(said),
        "left out",
    )


def metrics(root: Path) -> Target:
    """The metrics of a run, which a resume keeps up to its step."""
    with Writer(root) as writer:
        for step in range(1, 13):
            writer.write(step, {"loss": 6 / step, "lr": step / 1000})
            if step % 4 == 0:
                writer.write(step, {"heldout_loss": 5 / step})
    wanted, _ = rows.read(root / rows.METRICS)
    shutil.rmtree(root / "tensorboard")

    def read() -> list[dict[str, Any]]:
        with Writer(root, start_step=12) as writer:
            if writer.damaged:
                print(f"{writer.damaged} earlier rows")  # as the monitor does
        return rows.read(root / rows.METRICS)[0]

    def right(found: Any, said: str) -> bool:
        return found == wanted or (bool(said) and all(row in wanted for row in found))

    return Target(
        root, lambda: [root / rows.METRICS, root / rows.DIGESTS], read, right, "earlier rows"
    )


def exported(root: Path) -> Target:
    """A Hugging Face directory that an export wrote: config, weights, tokenizer and digests."""
    model, tokenizer = golden("llama3"), trained()
    huggingface.save(
        root / "model",
        model.layout,
        model.params,
        dtype="float32",
        max_shard_bytes=20_000,
        tokenizer=tokenizer,
    )
    assert FIXTURES

    def read() -> Any:
        config = huggingface.config_of(
            root / "model", dtype="float32", seq_len=model.layout.config.seq_len
        )
        params = huggingface.load(root / "model", ModelLayout.of(config, model.layout.shard))
        return config, params, load_tokenizer(root / "model").fingerprint

    wanted = read()

    def right(found: Any, said: str) -> bool:
        return found[0] == wanted[0] and found[2] == wanted[2] and same(found[1], wanted[1])

    return Target(root, lambda: files_in(root / "model"), read, right, "")


@dataclasses.dataclass(frozen=True)
class Kind:
    """A row of the table."""

    what: str
    make: Callable[[Path], Target]
    times: int


KINDS = {
    "checkpoint": Kind("checkpoint: arrays, their metadata, descriptions", checkpoint, 150),
    "local": Kind("node-local checkpoint and its mark", node_local, 100),
    "compiled": Kind("entry of the compile cache", compiled, 150),
    "tokenizer": Kind("tokenizer in a run's output", run_tokenizer, 100),
    "text": Kind("description and tokenizer of cached text", cached_text, 400),
    "prefix": Kind("description and tokenizer of a prefix", prefix, 400),
    "config": Kind("config file of a run that is resumed", config_file, 300),
    "goodput": Kind("records of goodput", goodput, 400),
    "metrics": Kind("metrics.jsonl and its digests", metrics, 400),
    "export": Kind("exported Hugging Face directory", exported, 200),
}
