"""Host time per step: train.py's loop with a device step that does nothing. Target: 2 ms.

The loader, the monitor, the checkpoints and the SIGTERM handler are those of configs/gpt_tiny.py,
used as train.py uses them; the step takes the real batch and returns metrics with the real names.
No work on the device hides the host's, so this is the worst case.
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import tiny
from record import Record, Row, options

from mesh_lm import distributed
from mesh_lm.checkpoint import Checkpoints
from mesh_lm.config import TrainConfig
from mesh_lm.data.batches import Batches
from mesh_lm.data.corpus import prepare
from mesh_lm.distributed.phases import Phases
from mesh_lm.optim import Optimizer
from mesh_lm.parallel.engine import batch_sharding
from mesh_lm.parallel.layout import ModelLayout
from mesh_lm.state import State, abstract_state
from mesh_lm.training.monitor import Monitor
from mesh_lm.training.step import train_step

TARGET_MS = 2.0
PARTS = ("next batch", "dispatch step", "monitor", "poll checkpoint and SIGTERM")

Batch = dict[str, jax.Array]
Metrics = dict[str, jax.Array]


def no_op_step(
    config: TrainConfig, layout: ModelLayout, batch: Batch
) -> Callable[[State, Batch], tuple[State, Metrics]]:
    """Returns a jitted step that only counts; its metrics have the names, shapes and types of the
    real one's, and are all 1."""
    optimizer = Optimizer(config.optimizer, config.train.steps, config.diloco)
    metrics = jax.eval_shape(
        train_step(layout, optimizer, config.seed), abstract_state(layout, optimizer), batch
    )[1]

    @jax.jit
    def step(state: State, batch: Batch) -> tuple[State, Metrics]:
        return {"step": state["step"] + 1}, {
            name: jnp.ones(m.shape, m.dtype) for name, m in metrics.items()
        }

    return step


def measure(config: TrainConfig, warm_up: int) -> np.ndarray:
    """Returns the seconds of each part of each step, [steps - warm_up, parts]."""
    layout, marks = tiny.layout(config), np.zeros((config.train.steps, len(PARTS) + 1))
    clock = time.perf_counter
    with distributed.StopOnSignal(Phases()) as stop, Checkpoints(config) as checkpoints:
        corpus = prepare(config.data, vocab=config.data.tokenizer_vocab)
        batches = Batches(config, corpus, batch_sharding(layout))
        training = batches.train()
        position, batch = next(training)
        step, state = no_op_step(config, layout, batch), {"step": jnp.int32(0)}
        with contextlib.closing(training), Monitor(config, layout, corpus, Phases(), 0) as monitor:
            for n, mark in enumerate(marks, 1):
                mark[0] = clock()
                position, batch = next(training)
                mark[1] = clock()
                state, metrics = step(state, batch)
                mark[2] = clock()
                monitor.step(n, metrics)
                mark[3] = clock()
                checkpoints.poll(n)
                if stop.poll() or checkpoints.due(n):
                    state = checkpoints.save(
                        n,
                        state,
                        batches.state(position),
                        layout,
                        Optimizer(config.optimizer, config.train.steps, config.diloco),
                    )
                mark[4] = clock()
    return np.diff(marks, axis=1)[warm_up:]


def rows_of(seconds: np.ndarray) -> list[Row]:
    """Returns statistics of each part, and of their sum."""
    columns = dict(zip(PARTS, seconds.T, strict=True)) | {"whole step": seconds.sum(1)}
    return [
        {
            "part": name,
            "median_ms": float(np.median(t)),
            "mean_ms": float(t.mean()),
            "p99_ms": float(np.quantile(t, 0.99)),
        }
        for name, t in ((name, 1e3 * t) for name, t in columns.items())
    ]


def main() -> int:
    arguments = options(__doc__ or "").parse_args()
    record = Record(
        f"host_cost{'-quick' * arguments.quick}",
        arguments.output,
        device=jax.devices()[0].device_kind,
    )
    steps, warm_up = (60, 10) if arguments.quick else (3000, 200)
    with tempfile.TemporaryDirectory(prefix="host-cost-") as directory:
        config = tiny.config(Path(directory), arguments.quick, warm_up + steps)
        with (
            (Path(directory) / "log").open("w", encoding="utf-8") as log,
            contextlib.redirect_stdout(log),
        ):
            rows = rows_of(measure(config, warm_up))
    holds = "met" if rows[-1]["median_ms"] <= TARGET_MS else "MISSED"
    note = (
        f"{steps} steps of {config.tokens_per_step:,} tokens, {config.data.threads} reader "
        f"threads, a line of metrics every {config.train.log_every} steps. Target: a median of "
        f"{TARGET_MS:g} ms: {holds}."
    )
    record.table("Host cost of a step", rows, note)
    record.write()
    return 0


if __name__ == "__main__":
    sys.exit(main())
