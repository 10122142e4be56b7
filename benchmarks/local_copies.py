"""The cost of a local checkpoint, and of its copy on another node: a training loop in intervals
without a save, with one, with a copy.

The save and the copy are those of a run (checkpoint.local, checkpoint.local_copies). The other node
is a process on this machine, so its work takes cores from the steps as well, and the network is the
loopback interface: a cluster pays less for the first, and more for the second. The files go to a
temporary directory. The blocking part of a save is timed separately.
"""

from __future__ import annotations

import contextlib
import dataclasses
import multiprocessing
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
import tiny
from record import Record, options

from mesh_lm.checkpoint.copies import Sender, Server
from mesh_lm.checkpoint.node_local import NodeLocalCheckpoints
from mesh_lm.config import CheckpointConfig, LaunchConfig, TrainConfig
from mesh_lm.data.batches import Batches
from mesh_lm.data.corpus import prepare
from mesh_lm.network.secret import Secret
from mesh_lm.network.wire import LOOPBACK
from mesh_lm.optim import Optimizer
from mesh_lm.parallel.engine import batch_sharding
from mesh_lm.state.digest import digests
from mesh_lm.state.initial import init_state
from mesh_lm.training.step import train_step

MODEL = {"n_layers": 6, "d_model": 384, "n_heads": 6, "seq_len": 128}
KINDS = ("without", "saved", "copied")
SECRET = b"the secret of this benchmark"


class Copies(Sender):
    """Stands in for the copies of a run: one process, which sends its files to one other node."""

    stored_processes = frozenset({0})


def serve(directory: str, ports: Any) -> None:
    """The other node: keeps the newest two steps, as a run does."""
    root = Path(directory)

    def prune(process: int) -> None:
        for old in sorted(int(path.name) for path in root.iterdir() if path.name.isdecimal())[:-2]:
            for file in (root / str(old)).rglob("*.*"):
                file.unlink()

    server = Server(
        Secret(SECRET),
        LOOPBACK,
        lambda step, process: root / str(step) / f"{process}-of-1",
        prune,
        1,
    )
    ports.put(server.port)
    time.sleep(10**6)


def measure(
    run: TrainConfig, rounds: int, every: int, port: int, peer: Path
) -> tuple[np.ndarray, dict[str, list[float]], list[float], int]:
    """Returns the seconds of each interval [rounds, kinds], of each save's blocking part by kind,
    and of each copy; and a copy's bytes."""
    layout, optimizer = tiny.layout(run), Optimizer(run.optimizer, run.train.steps, run.diloco)
    step, state = train_step(layout, optimizer, run.seed), init_state(layout, optimizer, run.seed)
    batches = Batches(
        run, prepare(run.data, vocab=run.data.tokenizer_vocab), batch_sharding(layout)
    )
    (output := Path(run.output) / "checkpoints").mkdir(parents=True)
    local = NodeLocalCheckpoints(run.checkpoint, output, LaunchConfig())
    sender = Copies(
        Secret(SECRET), [(LOOPBACK, port)], lambda step: local.directory / str(step) / "0-of-1", 0
    )
    seconds, blocking, copying, n = (
        np.zeros((rounds + 1, len(KINDS))),
        {kind: [] for kind in KINDS[1:]},
        [],
        0,
    )
    with contextlib.closing(batches.train()) as training:
        for row in seconds:
            for number, kind in enumerate(KINDS):
                local._copies = sender if kind == "copied" else None  # pyright: ignore[reportAttributeAccessIssue]
                start_time = time.perf_counter()
                for i in range(every):
                    position, batch = next(training)
                    state, metrics = step(state, batch)
                    n += 1
                    # at the first step, so that all background work is inside the interval
                    if kind != "without" and i == 0:
                        block_start = time.perf_counter()
                        jax.block_until_ready(state)
                        waited = time.perf_counter()
                        local.save(
                            n,
                            state,
                            batches.state(position),
                            layout,
                            lambda tree: {"digests": digests(tree)},
                        )
                        blocking[kind].append(time.perf_counter() - waited)
                    jax.block_until_ready(metrics)
                row[number] = time.perf_counter() - start_time
                local._finish()
                if kind == "copied":
                    assert sender.wait(600), "the copy took longer than the interval"
                    assert (peer / str(n - every + 1)).exists(), "nothing arrived"
        step_directory = local.directory / str(n - every + 1) / "0-of-1"
        for _ in range(3):  # alone
            block_start = time.perf_counter()
            sender.send(int(step_directory.parent.name))
            assert sender.wait(600)
            copying.append(time.perf_counter() - block_start)
    return (
        seconds[1:],
        {kind: times[1:] for kind, times in blocking.items()},
        copying,
        sum(f.stat().st_size for f in step_directory.iterdir()),
    )


def main() -> int:
    arguments = options(__doc__ or "").parse_args()
    record = Record(
        f"local_copies{'-quick' * arguments.quick}",
        arguments.output,
        device=jax.devices()[0].device_kind,
    )
    rounds, every = (1, 5) if arguments.quick else (3, 100)
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="local-copies-") as directory:
        ports = context.Queue()
        (peer := Path(directory) / "peer").mkdir()
        other = context.Process(target=serve, args=(str(peer), ports), daemon=True)
        other.start()
        run = tiny.config(Path(directory), arguments.quick, 10**6)
        model = run.model if arguments.quick else dataclasses.replace(run.model, **MODEL)
        policy = CheckpointConfig(local=str(Path(directory) / "local"), local_every=every)
        run = dataclasses.replace(
            run,
            model=model,
            checkpoint=policy,
            train=dataclasses.replace(run.train, global_batch=4),
        )
        load = os.getloadavg()[0]
        with (
            (Path(directory) / "log").open("w", encoding="utf-8") as log,
            contextlib.redirect_stdout(log),
        ):
            seconds, blocking, copying, size = measure(run, rounds, every, ports.get(), peer)
        other.kill()
    rows = [
        {"round": i, **{f"{kind}_s": float(x) for kind, x in zip(KINDS, row, strict=True)},
         "blocked_saving_ms": 1e3 * blocking["saved"][i],
         "blocked_copying_ms": 1e3 * blocking["copied"][i]}
        for i, row in enumerate(seconds)
    ]  # fmt: skip
    total = np.median(seconds, axis=0)
    saving, copied = (float(total[i] / total[0] - 1) for i in (1, 2))
    alone = float(np.median(copying))
    note = (
        f"{size / 1e6:.0f} MB for each local step, one every {every} steps of "
        f"{1e3 * total[0] / every:.0f} ms (medians of {rounds} rounds; load average on "
        f"{os.cpu_count()} cores before: {load:.1f}). A local save adds {total[1] - total[0]:.2f} "
        f"s, {saving:.1%} of the time, and with a copy {total[2] - total[0]:.2f} s, {copied:.1%}, "
        "the work of the receiving process on the same cores included. Alone, a copy takes "
        f"{alone:.2f} s, {size / 1e6 / alone:.0f} MB/s with SHA-256 at both ends and fsync."
    )
    record.table("Cost of a local save and of its copy", rows, note)
    record.write()
    return 0


if __name__ == "__main__":
    sys.exit(main())
