"""The memory of interpreted kernels: references that track which elements are in flight, and
barriers that count phases.
"""

from __future__ import annotations

import collections
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

_NAMES_ONLY = {
    "UntilingTransform",
    "UnswizzleRef",
    "TilingTransform",
    "SwizzleTransform",
    "IdentityTransform",
}
"""Reference transforms of the layout in shared memory. Arrays here have the shape that the kernel's
author sees."""
EMPTY, STORED, IN_FLIGHT = 0, 1, 2
"""States of an element of shared memory: uninitialised, a value, or the target of a copy that no
thread has waited for."""


class Fault(Exception):
    """An error of a kernel, before its source line is added."""


@dataclass(eq=False)
class Actor:
    """A thread that reads and writes, with a vector clock: what thread i did up to time clock[i]
    happened before.
    """

    index: int
    clock: np.ndarray

    def acquire(self, clock: np.ndarray) -> None:
        """Adds what another thread had released to what happened before."""
        np.maximum(self.clock, clock, out=self.clock)

    def release(self) -> np.ndarray:
        """The clock for others to acquire. It does not cover what this thread does next."""
        clock = self.clock.copy()
        self.clock[self.index] += 1
        return clock


@dataclass(eq=False)
class Read:
    """An asynchronous read of shared memory in flight: no thread may write there until one has
    waited for it.
    """

    buffer: MemoryRef
    mask: np.ndarray
    what: str

    def finish(self, actor: Actor) -> None:
        """Ends the read: threads whose actions are ordered after this may write."""
        self.buffer.reads.remove(self)
        if self.buffer.shadow:
            self.buffer.shadow.read[actor.index][self.mask] = actor.clock[actor.index]


@dataclass(eq=False)
class Shadow:
    """For each element of shared memory, its state (EMPTY, STORED or IN_FLIGHT), and which threads
    accessed it when.

    unfenced: 1 + the thread whose store is not yet published to the asynchronous units (TMA, tensor
    cores) by a commit_smem, else 0.
    """

    state: np.ndarray
    unfenced: np.ndarray
    writer: np.ndarray
    written: np.ndarray
    read: np.ndarray
    """[threads, ...]: the time of each thread's last read."""

    @classmethod
    def of(cls, shape: tuple[int, ...], threads: int) -> Shadow:
        """The record of memory that no thread has touched."""

        def zeros(*shape: int, dtype: Any = np.int8) -> np.ndarray:
            return np.zeros(shape, dtype)

        return cls(
            zeros(*shape),
            zeros(*shape),
            zeros(*shape),
            zeros(*shape, dtype=np.int32),
            zeros(threads, *shape, dtype=np.int32),
        )


@dataclass(eq=False)
class MemoryRef:
    """An array in global memory, shared memory or registers. Only shared memory has a shadow."""

    name: str
    data: np.ndarray
    shadow: Shadow | None = None
    reads: list[Read] = field(default_factory=list)
    _positions: np.ndarray | None = None

    @classmethod
    def shared(cls, name: str, shape: tuple[int, ...], dtype: Any, threads: int) -> MemoryRef:
        """A shared-memory array whose elements are not initialised."""
        return cls(name, blank(shape, dtype), Shadow.of(shape, threads))

    def view(self, transforms: Sequence[Any]) -> np.ndarray:
        """The elements that reference transforms select."""
        return locate(self.data, transforms, self.name)

    def positions(self) -> np.ndarray:
        """The index of each element in the flat array, for boxes that extend beyond the array."""
        if self._positions is None:
            self._positions = np.arange(self.data.size, dtype=np.int64).reshape(self.data.shape)
        return self._positions

    def read(
        self, transforms: Sequence[Any], actor: Actor, what: str, fenced: bool = False
    ) -> np.ndarray:
        """The selected elements. fenced: an asynchronous unit reads them, so stores to them must
        have been committed.
        """
        if self.shadow:
            state = locate(self.shadow.state, transforms, self.name)
            if (state == IN_FLIGHT).any():
                raise Fault(
                    f"{what} reads {self.name} where a copy is still in flight: a barrier_wait is "
                    "missing"
                )
            if (state == EMPTY).any():
                raise Fault(f"{what} reads {self.name} where nothing was stored")
            if fenced and (late := locate(self.shadow.unfenced, transforms, self.name)).any():
                raise Fault(
                    f"{what} reads {self.name}, which thread {late.max() - 1} stored to without a "
                    "commit_smem since"
                )
            self._check_written(transforms, actor, f"{what} reads")
            locate(self.shadow.read[actor.index], transforms, self.name)[...] = actor.clock[
                actor.index
            ]
        return self.view(transforms)

    def begin_read(self, transforms: Sequence[Any], what: str) -> Read:
        """Starts an asynchronous read."""
        mask = np.zeros(self.data.shape, bool)
        locate(mask, transforms, self.name)[...] = True
        self.reads.append(read := Read(self, mask, what))
        return read

    def _check_written(self, transforms: Sequence[Any], actor: Actor, what: str) -> None:
        assert self.shadow
        writer, written = (
            locate(x, transforms, self.name) for x in (self.shadow.writer, self.shadow.written)
        )
        if (unknown := written > actor.clock[writer]).any():
            raise Fault(
                f"{what} {self.name}, and no barrier orders this after the store of thread "
                f"{writer[unknown].max()}: a race"
            )

    def begin_write(self, transforms: Sequence[Any], actor: Actor, what: str, state: int) -> None:
        """Starts a write. Raises Fault for elements in use by an asynchronous unit, and for a race
        with another thread.
        """
        if not self.shadow:
            return
        if (locate(self.shadow.state, transforms, self.name) == IN_FLIGHT).any():
            raise Fault(f"{what} overwrites {self.name} where a copy is still in flight")
        for read in self.reads:
            if locate(read.mask, transforms, self.name).any():
                raise Fault(f"{what} overwrites {self.name} while {read.what} still reads it")
        for reader, when in enumerate(self.shadow.read):
            if (
                reader != actor.index
                and locate(when, transforms, self.name).max(initial=0) > actor.clock[reader]
            ):
                raise Fault(
                    f"{what} overwrites {self.name}, and no barrier orders this after the read of "
                    f"thread {reader}: a race"
                )
        self._check_written(transforms, actor, f"{what} overwrites")
        marks = (
            (self.shadow.state, state), (self.shadow.writer, actor.index),
            (self.shadow.written, actor.clock[actor.index]),
            (self.shadow.unfenced, 0 if state == IN_FLIGHT else actor.index + 1),
        )  # fmt: skip
        for array, mark in marks:
            locate(array, transforms, self.name)[...] = mark

    def write(self, transforms: Sequence[Any], value: Any, actor: Actor, what: str) -> None:
        """Stores a value."""
        self.begin_write(transforms, actor, what, STORED)
        self.view(transforms)[...] = value


def blank(shape: Sequence[int], dtype: Any) -> np.ndarray:
    """An uninitialised array, filled with NaN or the least integer, so that reading it is visible
    in results.
    """
    dtype = np.dtype(dtype)
    if dtype.kind in "iu":
        return np.full(shape, np.iinfo(dtype).min or np.iinfo(dtype).max, dtype)
    return np.zeros(shape, dtype) if dtype.kind == "b" else np.full(shape, np.nan).astype(dtype)


def locate(array: np.ndarray, transforms: Sequence[Any], name: str) -> np.ndarray:
    """The view of an array that reference transforms select. Raises Fault for an index out of
    bounds.
    """
    for transform in transforms:
        kind = type(transform).__name__
        if kind == "NDIndexer":
            # the Ellipsis keeps a single element a view
            array = array[(*_indices(transform, array.shape, name), ...)]
        elif kind == "TransposeTransform":
            array = array.transpose(transform.permutation)
        elif kind == "ReshapeTransform":
            array = _reshaped(array, transform.shape, name)
        elif kind == "BitcastTransform":
            array = array.view(np.dtype(transform.dtype))
        elif kind not in _NAMES_ONLY:
            raise NotImplementedError(
                f"the interpreter does not know the reference transform {kind} ({name})"
            )
    return array


def _reshaped(array: np.ndarray, shape: Sequence[int], name: str) -> np.ndarray:
    result = array.reshape(shape)
    if not np.shares_memory(result, array):
        raise NotImplementedError(f"{name}: reshaping {array.shape} to {tuple(shape)} would copy")
    return result


def _indices(indexer: Any, shape: tuple[int, ...], name: str) -> list[int | slice]:
    indices: list[int | slice] = []
    for axis, (index, size) in enumerate(zip(indexer.indices, shape, strict=True)):
        start, length, stride = _span(index, name)
        if start < 0 or start + (length - 1) * stride >= size:
            raise Fault(
                f"{name}: index {start}:{start + (length - 1) * stride + 1} is out of bounds on "
                f"axis {axis} of shape {shape}"
            )
        indices.append(
            slice(start, start + (length - 1) * stride + 1, stride) if _is_slice(index) else start
        )
    return indices


def _is_slice(index: Any) -> bool:
    return type(index).__name__ == "Slice"


def _span(index: Any, name: str) -> tuple[int, int, int]:
    if _is_slice(index):
        return int(index.start), int(index.size), int(index.stride)
    if np.ndim(index):
        raise NotImplementedError(f"{name}: an array of {np.shape(index)} as an index (a gather)")
    return int(index), 1, 1


def box(buffer: MemoryRef, transforms: Sequence[Any], tiling: Sequence[int] = ()) -> np.ndarray:
    """The flat positions of a TMA box in global memory; -1 outside the array, where the hardware
    reads 0 and stores nothing.

    tiling: of the array in shared memory on the other side of the copy. Raises Fault for a box that
    does not start on a multiple of it: Mosaic copies complete tiles, and of one that starts inside
    a tile the hardware drops the rest (measured on an H200).
    """
    positions = buffer.positions()
    for transform in transforms:
        if type(transform).__name__ != "NDIndexer":
            positions = locate(positions, (transform,), buffer.name)
            continue
        spans = [_span(index, buffer.name) for index in transform.indices]
        starts = [
            span[0]
            for span, index in zip(spans, transform.indices, strict=True)
            if _is_slice(index)
        ][-len(tiling) :]
        if tiling and any(start % size for start, size in zip(starts, tiling, strict=True)):
            raise Fault(
                f"a copy of {buffer.name} starts at {starts}, not on a multiple of the tiles "
                f"{list(tiling)} in shared memory"
            )
        wanted = [start + stride * np.arange(length) for start, length, stride in spans]
        inside = [(w >= 0) & (w < size) for w, size in zip(wanted, positions.shape, strict=True)]
        grown = np.full([length for _, length, _ in spans], -1, np.int64)
        grown[np.ix_(*inside)] = positions[
            np.ix_(*(w[i] for w, i in zip(wanted, inside, strict=True)))
        ]
        positions = grown[
            tuple(slice(None) if _is_slice(index) else 0 for index in transform.indices)
        ]
    return positions


def tiling_of(transforms: Sequence[Any]) -> tuple[int, ...]:
    """The tiling of an array in shared memory, from its reference transforms; empty without one."""
    return next(
        (tuple(t.tiling) for t in transforms if type(t).__name__ == "UntilingTransform"), ()
    )


@dataclass(eq=False)
class Copy:
    """A TMA load in flight. It arrives when a thread waits for its barrier, the latest time
    possible on hardware.
    """

    target: MemoryRef
    transforms: Sequence[Any]
    value: np.ndarray
    clock: np.ndarray
    what: str

    def land(self) -> None:
        """Writes the loaded values."""
        self.target.view(self.transforms)[...] = self.value
        assert self.target.shadow
        locate(self.target.shadow.state, self.transforms, self.target.name)[...] = STORED


@dataclass(eq=False)
class Barrier:
    """An mbarrier: a phase is complete after `needed` arrivals. Each thread waits for one phase
    after another.
    """

    name: str
    needed: int
    threads: int
    arrived: int = 0
    completed: int = 0
    copies: collections.deque[Copy] = field(default_factory=collections.deque)

    def __post_init__(self) -> None:
        self.waited = [0] * self.threads
        self.collected, self.clock = np.zeros((2, self.threads), np.int32)

    def arrive(self, clock: np.ndarray) -> None:
        """Counts an arrival of a thread with this clock."""
        np.maximum(self.collected, clock, out=self.collected)
        self.arrived += 1
        if self.arrived == self.needed:
            self.arrived, self.completed, self.clock = 0, self.completed + 1, self.collected.copy()

    def passes(self, thread: int) -> bool:
        """Whether the phase that the thread waits for is complete. Copies arrive here, when a
        thread needs them, not before.
        """
        while self.completed <= self.waited[thread] and self.copies:
            copy = self.copies.popleft()
            copy.land()
            self.arrive(copy.clock)
        if self.completed > self.waited[thread] + 1:
            raise Fault(
                f"waits for phase {self.waited[thread]} of {self.name}, which has completed "
                f"{self.completed}: the thread missed one, or there were too many arrivals "
                f"({self.needed} make a phase). The hardware only tells odd phases from even ones"
            )
        return self.completed > self.waited[thread]

    def state(self, thread: int) -> str:
        """A description of the barrier for errors."""
        return (
            f"{self.name} (phase {self.waited[thread]}; {self.completed} complete, {self.arrived} "
            f"of {self.needed} arrivals)"
        )
