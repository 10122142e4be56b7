"""The cost of a replayed step (health.replay_every): the time of ordinary steps and of steps that
are made twice, alternating.

A replayed step copies the state to host memory and back, digests it four times, and runs the step's
program once more. On a CPU the copies stay in the same memory; on a GPU they cross PCIe.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
import tempfile
import time
from pathlib import Path

import jax
import numpy as np
import tiny
from local_copies import MODEL
from record import Record, options

from mesh_lm.data.batches import Batches
from mesh_lm.data.corpus import prepare
from mesh_lm.optim import Optimizer
from mesh_lm.parallel.engine import batch_sharding
from mesh_lm.state.digest import digests
from mesh_lm.state.host_copy import copied
from mesh_lm.state.initial import init_state
from mesh_lm.training.replay import ReplayedStep
from mesh_lm.training.step import train_step

EVERY = 2


class Counter:
    """Stands in for the run and its monitor."""

    step = 0

    def paused(self) -> contextlib.nullcontext[None]:
        return contextlib.nullcontext()


def main() -> int:
    arguments = options(__doc__ or "").parse_args()
    record = Record(
        f"replay_cost{'-quick' * arguments.quick}",
        arguments.output,
        device=jax.devices()[0].device_kind,
    )
    rounds, load = (2 if arguments.quick else 12), os.getloadavg()[0]
    rows = []
    with tempfile.TemporaryDirectory(prefix="replay-cost-") as directory:
        run = tiny.config(Path(directory), arguments.quick, 10**6)
        model = run.model if arguments.quick else dataclasses.replace(run.model, **MODEL)
        run = dataclasses.replace(
            run, model=model, train=dataclasses.replace(run.train, global_batch=4)
        )
        layout, optimizer, counter = (
            tiny.layout(run),
            Optimizer(run.optimizer, run.train.steps, run.diloco),
            Counter(),
        )
        state = init_state(layout, optimizer, run.seed)
        step = ReplayedStep(train_step(layout, optimizer, run.seed), EVERY, counter, counter)
        with contextlib.redirect_stdout(None):
            batches = Batches(
                run, prepare(run.data, vocab=run.data.tokenizer_vocab), batch_sharding(layout)
            )
        with contextlib.closing(batches.train()) as training:
            for n in range(-1, rounds):
                seconds = []
                for _ in range(EVERY):
                    _, batch = next(training)
                    start_time = time.perf_counter()
                    state, metrics = step(state, batch)
                    jax.block_until_ready((state, metrics))
                    seconds.append(time.perf_counter() - start_time)
                    counter.step += 1
                start_time = time.perf_counter()
                digests(state)
                digested = time.perf_counter()
                copied(state)
                copy = time.perf_counter() - digested
                rows.append({"round": n, "step_ms": 1e3 * seconds[0], "replayed_ms": 1e3 * seconds[1],
                             "digest_ms": 1e3 * (digested - start_time),
                             "copy_ms": 1e3 * copy})  # fmt: skip
        size = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    rows = rows[1:]  # the first ones compile
    plain_ms, replayed_ms = (
        float(np.median([row[name] for row in rows])) for name in ("step_ms", "replayed_ms")
    )
    note = (
        f"{size / 1e6:.0f} MB of state; medians of {rounds} rounds, load average on "
        f"{os.cpu_count()} cores before: {load:.1f}. A replayed step takes {replayed_ms:.0f} ms "
        f"instead of {plain_ms:.0f} ms: with health.replay_every=100 that is "
        f"{(replayed_ms / plain_ms - 1) / 100:.2%} of the time."
    )
    record.table("Cost of a replayed step", rows, note)
    record.write()
    return 0


if __name__ == "__main__":
    sys.exit(main())
