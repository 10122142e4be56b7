"""One task of the GPU suite about training, in a process of its own: python
benchmarks/gpu_worker.py TASK '{"key": value, ...}'

Every result is printed immediately as a line "ROW {json}", so that a crash or a time limit loses
only later results. Needs jax, flax, optax, orbax-checkpoint and numpy; the training text is
synthetic.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import importlib
import math
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from gpu_lock import compiling, measuring
from record import Row
from tuned import use_tuned
from worker import emit, reported, serve, serve_turns

from mesh_lm.config import TrainConfig
from mesh_lm.configs import gpt2_124m
from mesh_lm.data.indexed import Documents, TokenStream, bin_path, idx_path, write_documents
from mesh_lm.data.rows import RowReader
from mesh_lm.data.sequences import Sequences
from mesh_lm.distributed import gpu
from mesh_lm.optim import Optimizer
from mesh_lm.parallel.engine import batch_sharding, leaf_spec
from mesh_lm.parallel.layout import ModelLayout
from mesh_lm.report.flops import mfu, peak_flops
from mesh_lm.state import State, abstract_state
from mesh_lm.state.initial import init_state
from mesh_lm.training.check import check
from mesh_lm.training.step import train_step
from pallas_kernels.dev.interpreter import interpreted
from sharding_rules import Shard, make_mesh, preset
from sharding_rules.lab.flags import options

EOD = 0
MODELS = ("gpt2_124m", "gpt_1_3b", "llama3_8b")
"""Configs whose train step the suite times."""


@contextlib.contextmanager
def hopper(interpret: bool) -> Iterator[None]:
    """A context in which, if requested, a model's calls of our kernel are interpreted on the CPU as
    if it were a Hopper GPU."""
    if not interpret:
        yield
        return
    from mesh_lm.model import context

    door = context.flash_attention

    def interpreted_door(*arrays: Any, **features: Any) -> Any:
        device = (
            {"platform": "gpu", "capability": (9, 0)}
            if features["implementation"] == "mosaic"
            else {}
        )
        return door(*arrays, **{**features, **device})

    context.flash_attention = interpreted_door
    try:
        with interpreted():
            yield
    finally:
        context.flash_attention = door


# The run: a config with some fields changed, on the first device or devices.


class Run:
    """A config, ready to step on the first devices."""

    def __init__(
        self,
        directory: str,
        changes: dict[str, dict[str, Any]],
        rules: str = "ddp",
        devices: int = 1,
        name: str = "gpt2_124m",
    ) -> None:
        """Takes the arguments of `configured`."""
        config = configured(directory, changes, rules, name)
        self.config: TrainConfig = check(config, n_devices=devices)
        shard = Shard(config.rules, make_mesh(self.config.mesh, jax.devices()[:devices]))
        self.layout = ModelLayout.of(config.model, shard, config.pipeline)
        self.optimizer = Optimizer(config.optimizer, config.train.steps, config.diloco)
        self.step = train_step(self.layout, self.optimizer, config.seed)
        self.sequences = text(Path(directory), config)

    def state(self) -> State:
        return init_state(self.layout, self.optimizer, self.config.seed)

    def batch(self, position: int) -> dict[str, jax.Array]:
        """Returns the global batch that starts at a sample position, as leaves [M, B, ...], like
        `Loader` but without threads."""
        return self.placed(
            self.sequences.rows(position + np.arange(self.config.train.global_batch))
        )

    def placed(self, rows: dict[str, np.ndarray]) -> dict[str, jax.Array]:
        """Puts the rows of a global batch, and the tokens' indices, on the devices."""
        parts, size = self.config.train.microbatches, self.config.train.global_batch
        sharding, length = batch_sharding(self.layout), rows["tokens"].shape[1]
        shaped = {name: x.reshape(parts, size // parts, *x.shape[1:]) for name, x in rows.items()}
        shaped["indices"] = np.broadcast_to(np.arange(length, dtype=np.int32), (parts, 1, length))
        shardings = {
            name: jax.NamedSharding(sharding.mesh, leaf_spec(sharding.spec, x.shape))
            for name, x in shaped.items()
        }
        return {name: jax.device_put(x, shardings[name]) for name, x in shaped.items()}

    def steps(self, state: State, n: int, first: int = 0) -> tuple[State, list[dict[str, float]]]:
        """Runs n steps from step `first` on. Returns the state and their metrics."""
        history = []
        for i in range(first, first + n):
            state, metrics = self.step(state, self.batch(i * self.config.train.global_batch))
            history.append({name: float(value) for name, value in metrics.items()})
        return state, history


def configured(
    directory: str, changes: dict[str, dict[str, Any]], rules: str, name: str = "gpt2_124m"
) -> TrainConfig:
    """Returns a config. name: a file of configs/, whose mesh is dropped. changes: section of the
    config -> field -> value."""
    config = importlib.import_module(f"mesh_lm.configs.{name}").get_config()
    config = dataclasses.replace(
        config,
        output=str(Path(directory) / "run"),
        rules=preset(rules),
        mesh=gpt2_124m.get_config().mesh,
    )
    for section, fields in changes.items():
        config = dataclasses.replace(
            config, **{section: dataclasses.replace(getattr(config, section), **fields)}
        )
    vocab = min(config.data.tokenizer_vocab, config.model.vocab_size)
    return dataclasses.replace(config, data=dataclasses.replace(config.data, tokenizer_vocab=vocab))


def text(directory: Path, config: TrainConfig) -> RowReader:
    """Returns sequences of the text of `text_prefix`."""
    documents = Documents(text_prefix(directory, config))
    return RowReader(
        Sequences(TokenStream(documents), config.model.seq_len, eod=EOD, seed=config.seed), eod=EOD
    )


def text_prefix(directory: Path, config: TrainConfig) -> Path:
    """Returns a learnable text that is the same on all machines: of its 500 tokens, nine in ten
    follow from the one before."""
    vocab, S = config.model.vocab_size, config.model.seq_len
    prefix, n_documents, length = (
        directory / f"text-{vocab}-{S}",
        64 if S < 256 else 256,
        max(1024, S),
    )
    if not (bin_path(prefix).exists() and idx_path(prefix).exists()):
        random, common = np.random.Generator(np.random.PCG64(0)), min(vocab - 1, 500)
        tokens = np.empty((n_documents, length), np.int64)
        tokens[:, 0] = random.integers(1, 1 + common, n_documents)
        for i in range(1, length):
            follows = (5 * tokens[:, i - 1] + 7) % common + 1
            tokens[:, i] = np.where(
                random.random(n_documents) < 0.9, follows, random.integers(1, vocab, n_documents)
            )
        tokens[:, -1] = EOD
        starts = random.integers(0, length // 2, n_documents)
        write_documents(
            prefix,
            (document[start:] for document, start in zip(tokens, starts, strict=True)),
            vocab=vocab,
        )
    return prefix


def digests(state: State) -> dict[str, str]:
    """Returns leaf -> the start of the SHA-256 of its bytes."""
    leaves = jax.tree_util.tree_flatten_with_path(state)[0]
    return {
        jax.tree_util.keystr(path): hashlib.sha256(np.asarray(x).tobytes()).hexdigest()[:16]
        for path, x in leaves
    }


# The tasks.


def shapes(models: dict[str, dict[str, Any]], device_kind: str) -> None:
    """Emits, for a twin in another framework, the shape of each config with these fields of the
    model changed."""
    for name, fields in models.items():
        model: Any = dataclasses.replace(
            importlib.import_module(f"mesh_lm.configs.{name}").get_config().model, **fields
        )
        field_names = (
            "seq_len",
            "n_layers",
            "d_model",
            "n_heads",
            "positions",
            "rope_theta",
            "norm",
            "activation",
            "biases",
            "tied",
            "norm_eps",
        )
        derived = {
            "vocab_size": model.padded_vocab,
            "n_kv_heads": model.kv_heads,
            "d_ff": model.d_mlp,
        }
        fields = {field: getattr(model, field) for field in field_names} | derived
        peak = peak_flops(device_kind)
        emit(
            model=name,
            fields=fields,
            n_params=model.n_params(),
            flops_per_token=model.flops_per_token(),
            peak_flops=peak,
        )


def prefix(directory: str, changes: dict[str, dict[str, Any]]) -> None:
    """Writes the text of `text` as a .bin and .idx for data.blend."""
    path = text_prefix(Path(directory), configured(directory, changes, "ddp"))
    emit(prefix=str(path))


def speed(
    directory: str,
    changes: dict[str, dict],
    variants: list[dict[str, Any]],
    steps: int,
    interpret: bool = False,
) -> None:
    """Time, memory and compilation of the train step.

    A variant has fields of the model; or "config" (a name), "microbatches" and "changes" (of that
    config, instead of those for all).
    """
    for variant in variants:
        shown = {name: value for name, value in variant.items() if name != "changes"}
        with reported(**shown), hopper(interpret):
            model = {
                name: value
                for name, value in shown.items()
                if name not in ("microbatches", "config")
            }
            train = {"microbatches": variant.get("microbatches", 1)}
            base = variant.get("changes", changes)
            base = {**base, "model": base["model"] | model, "train": base["train"] | train}
            emit(
                **shown,
                **timed(Run(directory, base, name=variant.get("config", "gpt2_124m")), steps),
            )


class Steps:
    """A run's train step: compiled, with its state on the device."""

    def __init__(self, run: Run) -> None:
        self.run = run
        size = run.config.train.global_batch
        self.batches = [run.batch(i * size) for i in range(4)]
        with compiling():
            start_time = time.perf_counter()
            lowered = run.step.lower(abstract_state(run.layout, run.optimizer), self.batches[0])  # pyright: ignore[reportFunctionMemberAccess]
            traced = time.perf_counter()
            self.compiled = lowered.compile()
            compiled = time.perf_counter()
            self.state = jax.block_until_ready(run.state())
        self.compiling: Row = {"trace_s": traced - start_time, "compile_s": compiled - traced}
        self.losses: list[float] = []

    def step(self) -> float:
        """Makes a step. Returns its seconds."""
        start_time = time.perf_counter()
        self.state, metrics = self.compiled(self.state, self.batches[len(self.losses) % 4])
        jax.block_until_ready((self.state, metrics))
        seconds = time.perf_counter() - start_time
        self.losses.append(float(metrics["loss"]))
        return seconds

    def memory(self) -> Row:
        """Returns GiB of the program, of its temporary arrays, of its peak, and of the process so
        far, on the fullest device."""
        memory = self.compiled.memory_analysis()
        program = (
            memory.argument_size_in_bytes
            + memory.output_size_in_bytes
            - memory.alias_size_in_bytes
            + memory.temp_size_in_bytes
        )
        devices = self.run.layout.shard.mesh.devices.flat
        peak = max((device.memory_stats() or {}).get("peak_bytes_in_use", 0) for device in devices)
        row = {
            "program_gib": program,
            "temp_gib": memory.temp_size_in_bytes,
            "peak_gib": memory.peak_memory_in_bytes,
        }
        return {name: size / 2**30 for name, size in row.items()} | {
            "high_water_gib": peak / 2**30 or None
        }

    def rates(self, times: list[float]) -> Row:
        """Returns tokens_per_s and the like of steps that took these seconds."""
        seconds = statistics.median(times)
        config = self.run.config
        rate = config.tokens_per_step / seconds
        kind = jax.devices()[0].device_kind
        share = mfu(rate, config.model.flops_per_token(), self.run.layout.shard.mesh.size, kind)
        return {
            "tokens_per_s": rate,
            "step_ms": 1e3 * seconds,
            "slowest_ms": 1e3 * max(times),
            "mfu": share,
        }


def timed(run: Run, steps: int) -> Row:
    """Measures time, memory and compilation of the run's train step."""
    made = Steps(run)
    with measuring():
        for _ in range(3):
            made.step()
        start_time = time.time()
        times = [made.step() for _ in range(steps)]
        ended = time.time()
    first = made.losses[0]
    last = made.losses[-1]
    row = {
        **made.rates(times),
        **made.memory(),
        **made.compiling,
        "loss_first": first,
        "loss_last": last,
        "began": start_time,
        "ended": ended,
    }
    return row | (
        {} if last < first else {"error": f"the loss does not fall in {len(made.losses)} steps"}
    )


def turns(
    directory: str, variants: list[dict[str, Any]], seconds: float, interpret: bool = False
) -> None:
    """The train step of each variant, in turns with another process: see `worker.serve_turns`. A
    variant has "config" and "changes"."""
    for variant in variants:
        shown = {name: value for name, value in variant.items() if name != "changes"}
        with reported(**shown), hopper(interpret):
            steps = Steps(Run(directory, variant["changes"], name=variant["config"]))
            serve_turns(
                shown,
                steps.step,
                seconds,
                {**steps.compiling, "program_gib": steps.memory()["program_gib"]},
                steps.losses,
            )


def traced(
    directory: str, changes: dict[str, dict], name: str, rules: str, steps: int, trace: str
) -> None:
    """Times some train steps, with the XLA flags and the share of memory that train.py sets, and
    then traces one into a directory."""
    config = configured(directory, changes, rules, name)
    flags = gpu.set_flags(config.launch.xla_flags)
    gpu.set_memory()
    with reported(flags=flags):
        made = Steps(Run(directory, changes, rules, name=name))
        with measuring():
            warm_up = [made.step() for _ in range(2)]
            times = [made.step() for _ in range(steps)] or warm_up
        emit(flags=flags, **made.rates(times), **made.memory(), **made.compiling)
        with measuring(), jax.profiler.trace(trace, profiler_options=_profiler_options()):
            seconds = made.step()
        emit(traced_step_ms=1e3 * seconds)


def _profiler_options() -> Any:
    """Returns options with which the trace has the device's kernels, and few events of the host:
    those of Python slow a step down."""
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    # a CPU's operations are events of the host
    options.host_tracer_level = 2 if jax.default_backend() == "cpu" else 1
    return options


def predicted(directory: str, changes: dict[str, dict], name: str, rules: str, target: str) -> None:
    """Emits the lab's prediction for the train step of a config on one GPU of this kind, without
    using it."""
    # imported here, because no other task needs the lab
    from mesh_lm.planning.program import compile_config, flags_of
    from sharding_rules.lab import timeline

    timeline.SPANS = 10**6  # all spans, because they are summed by kind
    config = configured(directory, changes, rules, name)
    start_time = time.perf_counter()
    with reported(target=target):
        report = compile_config(config, target, 1, options(flags_of(config, target)))
        assert report.timeline is not None
        emit(
            target=target, predicted_step_s=report.timeline.step / 1e6,
            predicted_peak_gib=report.peak_bytes / 2**30, fits=report.fits,
            predicted_matmul_tflop=sum(report.flops.values()) / 1e12,
            lab_s=time.perf_counter() - start_time, kinds=kinds(report.timeline),
        )  # fmt: skip


def kinds(line: Any) -> Row:
    """Returns the predicted milliseconds and kernels of each kind in a timeline: matmul, attention,
    elementwise, copy, and collectives."""
    totals: Row = {}
    for span in line.spans:
        times = math.prod(span.loops)
        ms, n = totals.get(span.kind, (0.0, 0))
        totals[span.kind] = (ms + times * span.duration / 1e3, n + times)
    return {kind: {"ms": ms, "kernels": n} for kind, (ms, n) in totals.items()}


def stepped(directory: str, changes: dict[str, dict], name: str, rules: str, steps: int) -> None:
    """Runs the same train step with the XLA flags and the share of memory that train.py sets."""
    config = configured(directory, changes, rules, name)
    flags = gpu.set_flags(config.launch.xla_flags)
    gpu.set_memory()
    with reported(flags=flags):
        emit(flags=flags, **timed(Run(directory, changes, rules, name=name), steps))


def losses(
    directory: str, changes: dict[str, dict], variants: list[dict[str, str]], steps: int
) -> None:
    """Emits the metrics of the first steps. A variant has the model's dtype and attention, and
    JAX's matmul precision for fp32."""
    for variant in variants:
        precision = None if variant["precision"] == "default" else variant["precision"]
        with reported(**variant), jax.default_matmul_precision(precision):
            run = Run(
                directory,
                {
                    **changes,
                    "model": changes["model"]
                    | {"dtype": variant["dtype"], "attention": variant["attention"]},
                },
            )
            history = run.steps(run.state(), steps)[1]
            emit(
                **variant,
                losses=[m["loss"] for m in history],
                grad_norms=[m["grad_norm"] for m in history],
            )


def rerun(directory: str, changes: dict[str, dict], steps: int) -> None:
    """Runs the same steps twice with one compiled program."""
    run = Run(directory, changes)
    for _ in range(2):
        state, history = run.steps(run.state(), steps)
        emit(digests=digests(state), loss=history[-1]["loss"])


def train(directory: str, changes: dict[str, dict], steps: int, save_at: int) -> None:
    """Trains to step `steps`, from the newest checkpoint if there is one, as train.py does; saves
    after step `save_at`."""
    from mesh_lm.checkpoint import Checkpoints  # imported here, because Orbax takes a while

    run, state = Run(directory, changes), None
    size = run.config.train.global_batch
    with Checkpoints(run.config) as checkpoints:
        saved = checkpoints.newest()
        state = saved.resumed(run.layout, run.optimizer) if saved else run.state()
        first, position = (saved.step, saved.data["position"]) if saved else (0, 0)
        for n in range(first + 1, steps + 1):
            state, _ = run.step(state, run.batch(position))
            position += size
            if n == save_at:
                state = checkpoints.save(
                    n, state, {"position": position}, run.layout, run.optimizer
                )
        emit(resumed_at=first, digests=digests(state))


if __name__ == "__main__":
    use_tuned()
    serve(
        {
            f.__name__: f
            for f in (
                shapes,
                prefix,
                speed,
                turns,
                traced,
                predicted,
                stepped,
                losses,
                rerun,
                train,
            )
        }
    )
