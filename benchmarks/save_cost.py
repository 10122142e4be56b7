"""The cost of checkpoints: train.py's loop with 400 MB of state, alternating intervals of 50 steps
with and without a save.

The save is the real one: digests of every leaf, the copy off the device, and Orbax's background
write, which on a CPU takes cores from the steps. The digests are also timed separately.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import tempfile
import time
from pathlib import Path

import jax
import numpy as np
import tiny
from record import Record, options

from mesh_lm.checkpoint import Checkpoints
from mesh_lm.config import CheckpointConfig, TrainConfig
from mesh_lm.data.batches import Batches
from mesh_lm.data.corpus import prepare
from mesh_lm.optim import Optimizer
from mesh_lm.parallel.engine import batch_sharding
from mesh_lm.state import State
from mesh_lm.state.digest import digests
from mesh_lm.state.initial import init_state
from mesh_lm.training.step import train_step

TARGET = 0.05
EVERY = 50
MODEL = {"n_layers": 10, "d_model": 512, "n_heads": 8, "seq_len": 128}


def config(directory: Path, quick: bool) -> TrainConfig:
    run = tiny.config(directory, quick, 10**6)
    model = run.model if quick else dataclasses.replace(run.model, **MODEL)
    train = dataclasses.replace(run.train, global_batch=4)
    return dataclasses.replace(
        run, model=model, train=train, checkpoint=CheckpointConfig(every=EVERY)
    )


def measure(
    run: TrainConfig, pairs: int, every: int
) -> tuple[np.ndarray, list[float], list[float], State]:
    """Returns the seconds of each interval [pairs, without and with], of each save's blocking part,
    of each full digest; and the state."""
    layout, optimizer = tiny.layout(run), Optimizer(run.optimizer, run.train.steps, run.diloco)
    step, state = train_step(layout, optimizer, run.seed), init_state(layout, optimizer, run.seed)
    batches = Batches(
        run, prepare(run.data, vocab=run.data.tokenizer_vocab), batch_sharding(layout)
    )
    seconds, blocking, digesting, n = np.zeros((pairs + 1, 2)), [], [], 0
    with Checkpoints(run) as checkpoints, contextlib.closing(batches.train()) as training:
        for pair in seconds:
            for saving in (0, 1):
                start_time = time.perf_counter()
                for i in range(every):
                    position, batch = next(training)
                    state, metrics = step(state, batch)
                    n += 1
                    # at the first step, so that the background write is inside the interval
                    if saving and i == 0:
                        save_start = time.perf_counter()
                        state = checkpoints.save(
                            n,
                            jax.block_until_ready(state),
                            batches.state(position),
                            layout,
                            optimizer,
                        )
                        blocking.append(time.perf_counter() - save_start)
                    checkpoints.poll(n)
                    jax.block_until_ready(metrics)
                pair[saving] = time.perf_counter() - start_time
            save_start = time.perf_counter()
            digests(state)
            digesting.append(time.perf_counter() - save_start)
    return seconds[1:], blocking[1:], digesting[1:], state


def main() -> int:
    arguments = options(__doc__ or "").parse_args()
    record = Record(
        f"save_cost{'-quick' * arguments.quick}",
        arguments.output,
        device=jax.devices()[0].device_kind,
    )
    pairs, every = (1, 5) if arguments.quick else (4, EVERY)
    with tempfile.TemporaryDirectory(prefix="save-cost-") as directory:
        run = config(Path(directory), arguments.quick)
        with (
            (Path(directory) / "log").open("w", encoding="utf-8") as log,
            contextlib.redirect_stdout(log),
        ):
            seconds, blocking, digesting, state = measure(run, pairs, every)
        size = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    rows = [
        {"interval": i, "without_s": float(a), "with_save_s": float(b), "cost_percent": float(100 * (b / a - 1)),
         "blocking_ms": 1e3 * stopped, "digests_ms": 1e3 * digest}
        for i,
        ((a, b), stopped, digest) in enumerate(zip(seconds, blocking, digesting, strict=True))
    ]  # fmt: skip
    cost = float(seconds[:, 1].sum() / seconds[:, 0].sum() - 1)
    note = (
        f"{size / 1e6:.0f} MB of state, a save every {every} steps of "
        f"{1e3 * seconds[:, 0].mean() / every:.0f} ms. Over all intervals a save costs {cost:.1%} "
        f"of the time; target {TARGET:.0%}: {'met' if cost <= TARGET else 'MISSED'}. The digests "
        f"of all leaves are {1e3 * float(np.median(digesting)):.0f} ms of it, "
        f"{float(np.median(digesting)) / (size / 1e9):.2f} s per GB."
    )
    record.table("Cost of saving", rows, note)
    record.write()
    return 0


if __name__ == "__main__":
    sys.exit(main())
