"""The memory of interpreted kernels.

References track which elements are in flight, and barriers count phases.
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
EMPTY = 0
"""State of an element of shared memory: uninitialised."""
STORED = 1
"""State of an element of shared memory: it has a value."""
IN_FLIGHT = 2
"""State of an element of shared memory: the target of a copy that no thread has waited for."""


class Fault(Exception):
    """An error of a kernel, before its source line is added."""


@dataclass(eq=False)
class Actor:
    """A thread that reads and writes, with a vector clock (Lamport's happened-before)."""

    index: int
    clock: np.ndarray
    """[threads]: the actions of thread i up to time clock[i] happened before this thread's."""

    def acquire(self, clock: np.ndarray) -> None:
        """Orders the actions that another thread released before this thread's next ones."""
        np.maximum(self.clock, clock, out=self.clock)

    def release(self) -> np.ndarray:
        """The clock for others to acquire. It does not cover this thread's next actions."""
        clock = self.clock.copy()
        self.clock[self.index] += 1
        return clock


@dataclass(eq=False)
class Read:
    """An asynchronous read of shared memory in flight.

    No thread may write to its elements until one has waited for it.
    """

    buffer: MemoryRef
    mask: np.ndarray
    """The elements that are read."""
    operation: str
    """For messages."""

    def finish(self, actor: Actor) -> None:
        """Ends the read: threads whose actions are ordered after this may write."""
        self.buffer.reads.remove(self)
        if self.buffer.shadow:
            self.buffer.shadow.read[actor.index][self.mask] = actor.clock[actor.index]


@dataclass(eq=False)
class Shadow:
    """The history of each element of an array in shared memory."""

    state: np.ndarray
    """EMPTY, STORED or IN_FLIGHT."""
    unfenced: np.ndarray
    """1 + the thread whose store is not yet published to the asynchronous units (TMA, tensor cores)
    by a commit_smem, else 0."""
    writer: np.ndarray
    """The thread that wrote last."""
    written: np.ndarray
    """The writer's time then."""
    read: np.ndarray
    """[threads, ...]: the time of each thread's last read."""

    @classmethod
    def of(cls, shape: tuple[int, ...], threads: int) -> Shadow:
        """The record of memory that no thread has touched."""
        return cls(
            state=np.zeros(shape, np.int8),
            unfenced=np.zeros(shape, np.int8),
            writer=np.zeros(shape, np.int8),
            written=np.zeros(shape, np.int32),
            read=np.zeros((threads, *shape), np.int32),
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
        self, transforms: Sequence[Any], actor: Actor, operation: str, fenced: bool = False
    ) -> np.ndarray:
        """The selected elements. Raises Fault for elements without a value, and for a race.

        fenced: an asynchronous unit reads them, so stores to them must have been committed.
        """
        if self.shadow:
            state = locate(self.shadow.state, transforms, self.name)
            if (state == IN_FLIGHT).any():
                raise Fault(
                    f"{operation} reads {self.name} where a copy is still in flight: a "
                    "barrier_wait is missing"
                )
            if (state == EMPTY).any():
                raise Fault(f"{operation} reads {self.name} where nothing was stored")
            unfenced = locate(self.shadow.unfenced, transforms, self.name)
            if fenced and unfenced.any():
                raise Fault(
                    f"{operation} reads {self.name}, which thread {unfenced.max() - 1} stored to "
                    "without a commit_smem since"
                )
            self._check_written(transforms, actor, f"{operation} reads")
            times = locate(self.shadow.read[actor.index], transforms, self.name)
            times[...] = actor.clock[actor.index]
        return self.view(transforms)

    def begin_read(self, transforms: Sequence[Any], operation: str) -> Read:
        """Starts an asynchronous read."""
        mask = np.zeros(self.data.shape, bool)
        locate(mask, transforms, self.name)[...] = True
        read = Read(self, mask, operation)
        self.reads.append(read)
        return read

    def _check_written(self, transforms: Sequence[Any], actor: Actor, access: str) -> None:
        """Raises Fault if the last store to an element is not ordered before an access to it."""
        assert self.shadow
        writer = locate(self.shadow.writer, transforms, self.name)
        written = locate(self.shadow.written, transforms, self.name)
        unordered = written > actor.clock[writer]
        if unordered.any():
            raise Fault(
                f"{access} {self.name}, and no barrier orders this after the store of thread "
                f"{writer[unordered].max()}: a race"
            )

    def begin_write(
        self, transforms: Sequence[Any], actor: Actor, operation: str, state: int
    ) -> None:
        """Starts a write. `state`: that of the elements afterwards.

        Raises Fault for elements in use by an asynchronous unit, and for a race with another
        thread.
        """
        shadow = self.shadow
        if not shadow:
            return
        if (locate(shadow.state, transforms, self.name) == IN_FLIGHT).any():
            raise Fault(f"{operation} overwrites {self.name} where a copy is still in flight")
        for read in self.reads:
            if locate(read.mask, transforms, self.name).any():
                raise Fault(
                    f"{operation} overwrites {self.name} while {read.operation} still reads it"
                )
        for reader, times in enumerate(shadow.read):
            if reader == actor.index:
                continue
            last_read = locate(times, transforms, self.name).max(initial=0)
            if last_read > actor.clock[reader]:
                raise Fault(
                    f"{operation} overwrites {self.name}, and no barrier orders this after the "
                    f"read of thread {reader}: a race"
                )
        self._check_written(transforms, actor, f"{operation} overwrites")

        unfenced = 0 if state == IN_FLIGHT else actor.index + 1
        locate(shadow.state, transforms, self.name)[...] = state
        locate(shadow.writer, transforms, self.name)[...] = actor.index
        locate(shadow.written, transforms, self.name)[...] = actor.clock[actor.index]
        locate(shadow.unfenced, transforms, self.name)[...] = unfenced

    def write(self, transforms: Sequence[Any], value: Any, actor: Actor, operation: str) -> None:
        """Stores a value."""
        self.begin_write(transforms, actor, operation, STORED)
        self.view(transforms)[...] = value


def blank(shape: Sequence[int], dtype: Any) -> np.ndarray:
    """An uninitialised array, filled so that reading it is visible in results.

    The numbers are NaN, or the least integer, or the largest of an unsigned type.
    """
    dtype = np.dtype(dtype)
    if dtype.kind in "iu":
        return np.full(shape, np.iinfo(dtype).min or np.iinfo(dtype).max, dtype)
    if dtype.kind == "b":
        return np.zeros(shape, dtype)
    return np.full(shape, np.nan).astype(dtype)


def locate(array: np.ndarray, transforms: Sequence[Any], name: str) -> np.ndarray:
    """The view of an array that reference transforms select.

    Raises Fault for an index out of bounds.
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
    """The indexer's indices for NumPy."""
    indices: list[int | slice] = []
    for axis, (index, size) in enumerate(zip(indexer.indices, shape, strict=True)):
        start, length, stride = _span(index, name)
        stop = start + (length - 1) * stride + 1
        if start < 0 or stop > size:
            raise Fault(
                f"{name}: index {start}:{stop} is out of bounds on axis {axis} of shape {shape}"
            )
        indices.append(slice(start, stop, stride) if is_slice(index) else start)
    return indices


def is_slice(index: Any) -> bool:
    """Whether an index of a reference is one of Pallas's slices."""
    return type(index).__name__ == "Slice"


def _span(index: Any, name: str) -> tuple[int, int, int]:
    """(start, length, stride) of an index."""
    if is_slice(index):
        return int(index.start), int(index.size), int(index.stride)
    if np.ndim(index):
        raise NotImplementedError(f"{name}: an array of {np.shape(index)} as an index (a gather)")
    return int(index), 1, 1


def box(buffer: MemoryRef, transforms: Sequence[Any], tiling: Sequence[int] = ()) -> np.ndarray:
    """The flat positions of a TMA box in global memory.

    They are -1 outside the array, where the hardware reads 0 and stores nothing.

    tiling: of the array in shared memory on the other side of the copy. Raises Fault for a box that
    does not start on a multiple of it: Mosaic copies complete tiles, and of one that starts inside
    a tile the hardware drops the rest (measured on an H200).
    """
    positions = buffer.positions()
    for transform in transforms:
        if type(transform).__name__ == "NDIndexer":
            positions = _box_of_indices(positions, transform.indices, buffer.name, tiling)
        else:
            positions = locate(positions, (transform,), buffer.name)
    return positions


def _box_of_indices(
    positions: np.ndarray, indices: Sequence[Any], name: str, tiling: Sequence[int]
) -> np.ndarray:
    """The positions that indices select, with -1 outside the array."""
    spans = [_span(index, name) for index in indices]
    sliced = [is_slice(index) for index in indices]
    starts = [start for (start, _, _), in_slice in zip(spans, sliced, strict=True) if in_slice]
    starts = starts[-len(tiling) :]
    if tiling and any(start % size for start, size in zip(starts, tiling, strict=True)):
        raise Fault(
            f"a copy of {name} starts at {starts}, not on a multiple of the tiles {list(tiling)} "
            "in shared memory"
        )

    # For each axis, the selected indices, and whether they are in the array.
    selected = [start + stride * np.arange(length) for start, length, stride in spans]
    inside = [(i >= 0) & (i < size) for i, size in zip(selected, positions.shape, strict=True)]
    inner = [i[mask] for i, mask in zip(selected, inside, strict=True)]
    result = np.full([length for _, length, _ in spans], -1, np.int64)
    result[np.ix_(*inside)] = positions[np.ix_(*inner)]
    return result[tuple(slice(None) if in_slice else 0 for in_slice in sliced)]


def shared_tiling(transforms: Sequence[Any]) -> tuple[int, ...]:
    """The tiling of an array in shared memory, from its reference transforms; empty without one."""
    for transform in transforms:
        if type(transform).__name__ == "UntilingTransform":
            return tuple(transform.tiling)
    return ()


@dataclass(eq=False)
class Copy:
    """A TMA load in flight.

    It arrives when a thread waits for its barrier, the latest time possible on hardware.
    """

    target: MemoryRef
    transforms: Sequence[Any]
    numbers: np.ndarray
    clock: np.ndarray
    """The clock of the thread that issued it."""
    operation: str
    """For messages."""

    def land(self) -> None:
        """Writes the loaded values."""
        self.target.view(self.transforms)[...] = self.numbers
        assert self.target.shadow
        locate(self.target.shadow.state, self.transforms, self.target.name)[...] = STORED


@dataclass(eq=False)
class Barrier:
    """An mbarrier: a phase is complete after `needed` arrivals.

    Each thread waits for one phase after another.
    """

    name: str
    needed: int
    threads: int
    arrived: int = 0
    """Arrivals in the current phase."""
    completed: int = 0
    """Complete phases."""
    copies: collections.deque[Copy] = field(default_factory=collections.deque)
    """Copies that have yet to arrive."""

    def __post_init__(self) -> None:
        # The number of phases that each thread has waited for.
        self.waited = [0] * self.threads
        # The clock of all arrivals so far, and of those up to the last complete phase.
        self.arrival_clock = np.zeros(self.threads, np.int32)
        self.clock = np.zeros(self.threads, np.int32)

    def arrive(self, clock: np.ndarray) -> None:
        """Counts an arrival of a thread with this clock."""
        np.maximum(self.arrival_clock, clock, out=self.arrival_clock)
        self.arrived += 1
        if self.arrived == self.needed:
            self.arrived = 0
            self.completed += 1
            self.clock = self.arrival_clock.copy()

    def passes(self, thread: int) -> bool:
        """Whether the phase that the thread waits for is complete.

        Copies arrive here, when a thread needs them, not before.
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
