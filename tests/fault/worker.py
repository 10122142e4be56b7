"""Runs train.py with faults: real signals, hangs and bit flips, each once, at a step and in a
process chosen by the test.

MESH_LM_FAULTS is a directory. A file `process-step-what` in it is a fault to come; it is removed as
it strikes, so that a restarted run is spared. MESH_LM_PACE: seconds that a step takes at least, so
that a test can act between two of them.
"""

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import train
from mesh_lm import distributed
from mesh_lm.checkpoint import Checkpoints
from mesh_lm.data.loader import Loader
from mesh_lm.training import post_step, replicas, session
from mesh_lm.training.monitor import Monitor

FAULTS = Path(os.environ["MESH_LM_FAULTS"])


def strikes(step: int, what: str) -> bool:
    fault = FAULTS / f"{jax.process_index()}-{step}-{what}"
    if found := fault.exists():
        fault.unlink()
    return found


def after_step(step: int) -> None:
    time.sleep(float(os.environ.get("MESH_LM_PACE", "0")))
    (FAULTS / f"at-{jax.process_index()}").write_text(str(step), encoding="utf-8")
    if strikes(step, "kill"):
        os.kill(os.getpid(), signal.SIGKILL)
    if strikes(step, "stop"):
        os.kill(os.getpid(), signal.SIGSTOP)
    if strikes(step, "hang"):
        while True:  # the process stays alive and keeps sending heartbeats
            time.sleep(1)
    if strikes(step, "yesterday"):
        before, time.time = time.time, lambda: before() - 86_400


def flipped(state: Any) -> Any:
    """Flips one bit of one device's copy of a weight."""
    name, leaf = next(
        (name, leaf) for name, leaf in state["params"].items() if leaf.is_fully_replicated
    )
    parts = [np.array(shard.data) for shard in leaf.addressable_shards]
    parts[-1].reshape(-1).view(np.uint32)[0] ^= 1 << 9
    arrays = [
        jax.device_put(part, shard.device)
        for part, shard in zip(parts, leaf.addressable_shards, strict=True)
    ]
    broken = jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, arrays)
    return state | {"params": state["params"] | {name: broken}}


def corrupted(state: Any) -> Any:
    """Flips one bit in one device's shard of the largest array that every rule may shard: the
    optimizer's first moment."""
    part = "mu"
    name, leaf = max(state[part].items(), key=lambda each: each[1].size)
    parts = [np.array(shard.data) for shard in leaf.addressable_shards]
    parts[-1].reshape(-1).view(np.uint32)[3] ^= 1 << 9
    arrays = [
        jax.device_put(each, shard.device)
        for each, shard in zip(parts, leaf.addressable_shards, strict=True)
    ]
    return state | {
        part: state[part]
        | {name: jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, arrays)}
    }


def miscomputed(step: Any) -> Any:
    """Returns the step; where `miscompute` strikes, its result has one wrong bit on one device. The
    strike is for one execution."""

    def run(state: Any, batch: Any) -> Any:
        if not any(FAULTS.glob("*-miscompute")):
            return step(state, batch)
        n = int(state["step"]) + 1
        state, metrics = step(state, batch)
        return (corrupted(state) if strikes(n, "miscompute") else state), metrics

    run.lower = step.lower  # pyright: ignore[reportFunctionMemberAccess]  # the processes compare what it lowers
    return run


def install() -> None:
    """Puts the faults between the steps of mesh_lm.training.loop."""
    step, save, batch, compare = (
        Monitor.step,
        Checkpoints.save,
        Loader.__next__,
        replicas.require_equal,
    )

    def stepped(self: Monitor, n: int, metrics: Any) -> Any:
        late = step(self, n, metrics)
        after_step(n)
        return late

    def saved(self: Checkpoints, n: int, *rest: Any, **options: Any) -> Any:
        state = save(self, n, *rest, **options)
        if strikes(n, "kill_in_save"):
            time.sleep(float(os.environ.get("MESH_LM_DELAY", "0")))
            os.kill(os.getpid(), signal.SIGKILL)
        if strikes(n, "stop_in_save"):
            os.kill(os.getpid(), signal.SIGSTOP)
        return state

    def loaded(self: Loader) -> Any:
        position, found = batch(self)
        if strikes(position, "nan"):
            found = found | {"weights": found["weights"] * jnp.nan}
        return position, found

    def compared(state: Any) -> None:
        compare(flipped(state) if strikes(int(state["step"]), "flip") else state)

    Monitor.step, Checkpoints.save, Loader.__next__, post_step.require_equal = (
        stepped,
        saved,
        loaded,
        compared,
    )
    made = session.train_step
    session.train_step = lambda *given, **named: miscomputed(made(*given, **named))


if __name__ == "__main__":
    install()
    sys.exit(distributed.run(train.main, sys.argv[1:]))
