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
from mesh_lm.training import replicas
from mesh_lm.training.replicas import yield_to_the_blamed
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
        self._step = step
        self._every = every
        self._run = run
        self._monitor = monitor

    def __call__(self, state: State, batch: Batch) -> tuple[State, dict[str, jax.Array]]:
        """Returns the result of the step; donates the state. Raises StepsDiffer on all processes,
        which must all call it.
        """
        step_number = self._run.step + 1
        if step_number % self._every:
            return self._step(state, batch)
        with self._monitor.paused():
            old_digests = shard_digests(state)
            abstract = jax.tree.map(
                lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state
            )
            host_copy = copied(state)
            first_result, _ = self._step(state, batch)
            first_digests = shard_digests(first_result)
            for leaf in jax.tree.leaves(first_result):
                leaf.delete()
            state = put_back(host_copy, abstract)
            restored_digests = shard_digests(state)
            # Here the watchdogs are patient with a process whose host memory is slow; in the step,
            # which follows, they are not.
            distributed.gather_from_all(None)
        state, metrics = self._step(state, batch)
        jax.block_until_ready(metrics)
        with self._monitor.paused():
            second_digests = shard_digests(state)
            _require_equal(
                step_number,
                abstract,
                [(old_digests, restored_digests), (first_digests, second_digests)],
            )
        return state, metrics


def shard_digests(state: State) -> Digests:
    """Returns the digests of this process's shards of the state, device by device, in the order of
    its leaves. It waits for the arrays.
    """
    digests = replicas.shard_digests(jax.tree.leaves(state))
    return {shard.device: np.asarray(shard.data)[0] for shard in digests.addressable_shards}


def _require_equal(step: int, tree: State, pairs: list[tuple[Digests, Digests]]) -> None:
    """Raises StepsDiffer on all processes if any finds a difference. pairs: of the state before the
    step, and of that after it.
    """
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    names = [leaf_name(path) for path, _ in leaves]
    # For each process, the lines about the restored state and those about the results.
    lines_by_process = distributed.gather_from_all([_differing(names, *pair) for pair in pairs])
    restored_lines = [lines for lines, _ in lines_by_process]
    result_lines = [lines for _, lines in lines_by_process]
    if any(restored_lines):
        blamed_lines = restored_lines
        problem = (
            f"the state before step {step} came back from host memory with other bits, or was not "
            "the same on all of its replicas"
        )
    elif any(result_lines):
        blamed_lines = result_lines
        problem = (
            f"step {step} was made twice from the same state and batch, and the results differ"
        )
    else:
        return
    lines = [line for process_lines in blamed_lines for line in process_lines]
    message = listed(f"{problem}; a device, its memory or a link is faulty", lines)
    yield_to_the_blamed(
        [process for process, process_lines in enumerate(blamed_lines) if process_lines]
    )
    n_devices = leaves[0][1].sharding.mesh.size
    if blamed_lines is result_lines and len(lines) == n_devices > 1:
        message += (
            f"\nall {n_devices} devices differ, as after a gradient that one of them computed "
            "wrongly: this does not show which one"
        )
    raise StepsDiffer(
        f"{message}\nneither result was saved: continue from the newest checkpoint, without that "
        "device if it is named again"
    )


def _differing(names: list[str], first: Digests, second: Digests) -> list[str]:
    """Returns a line for each device of this process whose digests differ."""
    lines = []
    for device, digests in first.items():
        differs = (digests != second[device]).any(-1)
        leaves = [names[i] for i in np.flatnonzero(differs)]
        if not leaves:
            continue
        shown = ", ".join(leaves[:_NAMED])
        if len(leaves) > _NAMED:
            shown += f" and {len(leaves) - _NAMED} more"
        process = f"process {device.process_index} on {socket.gethostname()}"
        lines.append(f"device {device.id} ({process}, {device}): {shown}")
    return lines
