"""Makes a step twice, every N steps, and compares the bits: a device that computes wrongly now and
then is found under any rules.

The step's program runs twice on the same state and batch, and each device digests its own shards of
both results. So nothing has to be replicated: shards of FSDP, ZeRO's moments and the flat vectors
of a distributed optimizer are compared, too. Between the two runs the state waits in host memory,
because the step donates it; the devices never hold more than one state.

It does not find a device that makes the same error each time, nor errors in steps that are not
replayed. A gradient that one device computes wrongly enters a sum, and then the shards of all
devices differ.
"""

from __future__ import annotations

import socket
from contextlib import AbstractContextManager
from typing import Any, Protocol

import jax
import numpy as np

from mesh_lm import distributed
from mesh_lm.errors import listed
from mesh_lm.model import Batch
from mesh_lm.state import State
from mesh_lm.state.digest import leaf_name
from mesh_lm.state.host_copy import copied, put_back
from mesh_lm.training.replicas import program, yield_to_the_blamed
from mesh_lm.training.step import Step

_NAMED = 3
"""Arrays of a device that a message names."""

Digests = dict[jax.Device, np.ndarray]
"""Digests of a device's shards, uint32 [leaves, 2], for the devices of this process."""


class StepsDiffer(RuntimeError):
    """A step that was made twice had two results: neither may be trusted or saved."""


class _Progress(Protocol):
    @property
    def step(self) -> int: ...


class _Pauses(Protocol):
    def paused(self) -> AbstractContextManager[Any]: ...


class ReplayedStep:
    """A step that is made twice if its number is a multiple of `every`; its result is that of the
    second run, with the same bits.
    """

    def __init__(self, step: Step, every: int, run: _Progress, monitor: _Pauses) -> None:
        """run: has the steps done so far. monitor: what is done within `monitor.paused()` is not
        counted as training.
        """
        self._step, self._every, self._run, self._monitor = step, every, run, monitor

    def __call__(self, state: State, batch: Batch) -> tuple[State, dict[str, jax.Array]]:
        """As the step; donates the state. Raises StepsDiffer on all processes, which must all call
        it.
        """
        n = self._run.step + 1
        if n % self._every:
            return self._step(state, batch)
        with self._monitor.paused():
            before = shard_digests(state)
            abstract = jax.tree.map(
                lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state
            )
            copy = copied(state)
            once, _ = self._step(state, batch)
            first = shard_digests(once)
            for leaf in jax.tree.leaves(once):
                leaf.delete()
            state = put_back(copy, abstract)
            again = shard_digests(state)
            # Here the watchdogs are patient with a process whose host memory is slow; in the step,
            # which follows, they are not.
            distributed.gather_from_all(None)
        state, metrics = self._step(state, batch)
        jax.block_until_ready(metrics)
        with self._monitor.paused():
            _require_equal(n, abstract, [(before, again), (first, shard_digests(state))])
        return state, metrics


def shard_digests(state: State) -> Digests:
    """Returns the digests of this process's shards of the state, device by device, in the order of
    its leaves. It waits for the arrays.
    """
    arrays = jax.tree.leaves(state)
    digests = program(arrays[0].sharding.mesh, tuple(x.sharding.spec for x in arrays))(*arrays)
    return {shard.device: np.asarray(shard.data)[0] for shard in digests.addressable_shards}


def _require_equal(step: int, tree: State, pairs: list[tuple[Digests, Digests]]) -> None:
    """Raises StepsDiffer on all processes if any finds a difference. pairs: of the state before the
    step, and of that after it.
    """
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    names = [leaf_name(path) for path, _ in leaves]
    found = distributed.gather_from_all([_differing(names, *pair) for pair in pairs])
    moved, made = (
        [line for lines in column for line in lines] for column in zip(*found, strict=True)
    )
    if moved:
        head = (
            f"the state before step {step} came back from host memory with other bits, or was not "
            "the same on all of its replicas"
        )
    elif made:
        head = f"step {step} was made twice from the same state and batch, and the results differ"
    else:
        return
    told = listed(f"{head}; a device, its memory or a link is faulty", moved or made)
    yield_to_the_blamed(
        [process for process, (before, after) in enumerate(found) if (before if moved else after)]
    )
    n_devices = leaves[0][1].sharding.mesh.size
    if not moved and len(made) == n_devices > 1:
        told += (
            f"\nall {n_devices} devices differ, as after a gradient that one of them computed "
            "wrongly: this does not show which one"
        )
    raise StepsDiffer(
        f"{told}\nneither result was saved: continue from the newest checkpoint, without that "
        "device if it is named again"
    )


def _differing(names: list[str], one: Digests, other: Digests) -> list[str]:
    """Returns a line for each device of this process whose digests differ."""
    lines = []
    for device, digests in one.items():
        if wrong := [names[i] for i in np.flatnonzero((digests != other[device]).any(-1))]:
            more = f" and {len(wrong) - _NAMED} more" if len(wrong) > _NAMED else ""
            where = f"process {device.process_index} on {socket.gethostname()}, {device}"
            lines.append(f"device {device.id} ({where}): {', '.join(wrong[:_NAMED])}{more}")
    return lines
