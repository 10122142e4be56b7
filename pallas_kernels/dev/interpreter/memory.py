"""What an interpreted kernel reads and writes: buffers that know which of their elements are in flight, barriers that count phases."""

from __future__ import annotations

import collections
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

_NAMES_ONLY = {"UntilingTransform", "UnswizzleRef", "TilingTransform", "SwizzleTransform", "IdentityTransform"}
"""Reference transforms that say how bytes lie in shared memory. Buffers here have the shape that the kernel's author sees."""
EMPTY, STORED, IN_FLIGHT = 0, 1, 2
"""What an element of shared memory is: nobody's yet, a value, or the target of a copy that nobody has waited for."""


class Fault(Exception):
    """What a kernel did wrong, before the place where it did so is known."""


@dataclass(eq=False)
class Actor:
    """Who reads and writes: a thread. What thread i did up to the time clock[i] is known to have happened before."""

    index: int
    clock: np.ndarray

    def acquire(self, clock: np.ndarray) -> None:
        np.maximum(self.clock, clock, out=self.clock)

    def release(self) -> np.ndarray:
        """What others may learn here. What this thread does next, they do not know."""
        clock = self.clock.copy()
        self.clock[self.index] += 1
        return clock


@dataclass(eq=False)
class Read:
    """An asynchronous read of shared memory that is under way: nothing may write there until it was waited for."""

    buffer: MemoryRef
    mask: np.ndarray
    what: str

    def finish(self, actor: Actor) -> None:
        """From now on others may write, if they come after now."""
        self.buffer.reads.remove(self)
        if self.buffer.shadow:
            self.buffer.shadow.read[actor.index][self.mask] = actor.clock[actor.index]


@dataclass(eq=False)
class Shadow:
    """Of each element of shared memory: EMPTY, STORED or IN_FLIGHT, and who used it when.

    unfenced is 1 + the thread whose store no commit_smem has published to the asynchronous units (TMA, tensor cores) yet, else 0.
    """

    state: np.ndarray
    unfenced: np.ndarray
    writer: np.ndarray
    written: np.ndarray
    read: np.ndarray
    """[threads, ...]: when each thread last read."""

    @classmethod
    def of(cls, shape: tuple[int, ...], threads: int) -> Shadow:
        def zeros(*shape: int, dtype: Any = np.int8) -> np.ndarray:
            return np.zeros(shape, dtype)

        return cls(zeros(*shape), zeros(*shape), zeros(*shape), zeros(*shape, dtype=np.int32), zeros(threads, *shape, dtype=np.int32))


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
        return cls(name, blank(shape, dtype), Shadow.of(shape, threads))

    def view(self, transforms: Sequence[Any]) -> np.ndarray:
        return locate(self.data, transforms, self.name)

    def positions(self) -> np.ndarray:
        """The index of each element in the flat array, for boxes that reach over the edge."""
        if self._positions is None:
            self._positions = np.arange(self.data.size, dtype=np.int64).reshape(self.data.shape)
        return self._positions

    def read(self, transforms: Sequence[Any], actor: Actor, what: str, fenced: bool = False) -> np.ndarray:
        """The elements; fenced: an asynchronous unit reads them, so stores to them must have been committed."""
        if self.shadow:
            state = locate(self.shadow.state, transforms, self.name)
            if (state == IN_FLIGHT).any():
                raise Fault(f"{what} reads {self.name} where a copy is still in flight: a barrier_wait is missing")
            if (state == EMPTY).any():
                raise Fault(f"{what} reads {self.name} where nothing was stored")
            if fenced and (late := locate(self.shadow.unfenced, transforms, self.name)).any():
                raise Fault(f"{what} reads {self.name}, which thread {late.max() - 1} stored to without a commit_smem since")
            self._check_written(transforms, actor, f"{what} reads")
            locate(self.shadow.read[actor.index], transforms, self.name)[...] = actor.clock[actor.index]
        return self.view(transforms)

    def begin_read(self, transforms: Sequence[Any], what: str) -> Read:
        mask = np.zeros(self.data.shape, bool)
        locate(mask, transforms, self.name)[...] = True
        self.reads.append(read := Read(self, mask, what))
        return read

    def _check_written(self, transforms: Sequence[Any], actor: Actor, what: str) -> None:
        assert self.shadow
        writer, written = (locate(x, transforms, self.name) for x in (self.shadow.writer, self.shadow.written))
        if (unknown := written > actor.clock[writer]).any():
            raise Fault(f"{what} {self.name}, and no barrier orders this after the store of thread {writer[unknown].max()}: a race")

    def begin_write(self, transforms: Sequence[Any], actor: Actor, what: str, state: int) -> None:
        """Faults where an asynchronous unit still reads or writes, or where nothing orders this after what other threads did."""
        if not self.shadow:
            return
        if (locate(self.shadow.state, transforms, self.name) == IN_FLIGHT).any():
            raise Fault(f"{what} overwrites {self.name} where a copy is still in flight")
        for read in self.reads:
            if locate(read.mask, transforms, self.name).any():
                raise Fault(f"{what} overwrites {self.name} while {read.what} still reads it")
        for reader, when in enumerate(self.shadow.read):
            if reader != actor.index and locate(when, transforms, self.name).max(initial=0) > actor.clock[reader]:
                raise Fault(f"{what} overwrites {self.name}, and no barrier orders this after the read of thread {reader}: a race")
        self._check_written(transforms, actor, f"{what} overwrites")
        marks = (
            (self.shadow.state, state), (self.shadow.writer, actor.index), (self.shadow.written, actor.clock[actor.index]),
            (self.shadow.unfenced, 0 if state == IN_FLIGHT else actor.index + 1),
        )  # fmt: skip
        for array, mark in marks:
            locate(array, transforms, self.name)[...] = mark

    def write(self, transforms: Sequence[Any], value: Any, actor: Actor, what: str) -> None:
        self.begin_write(transforms, actor, what, STORED)
        self.view(transforms)[...] = value


def blank(shape: Sequence[int], dtype: Any) -> np.ndarray:
    """NaN, or the least integer: what nobody wrote should show."""
    dtype = np.dtype(dtype)
    if dtype.kind in "iu":
        return np.full(shape, np.iinfo(dtype).min or np.iinfo(dtype).max, dtype)
    return np.zeros(shape, dtype) if dtype.kind == "b" else np.full(shape, np.nan).astype(dtype)


def locate(array: np.ndarray, transforms: Sequence[Any], name: str) -> np.ndarray:
    """The view of array that reference transforms select. Raises Fault where an index is out of bounds."""
    for transform in transforms:
        kind = type(transform).__name__
        if kind == "NDIndexer":
            array = array[(*_indices(transform, array.shape, name), ...)]  # the Ellipsis keeps a single element a view
        elif kind == "TransposeTransform":
            array = array.transpose(transform.permutation)
        elif kind == "ReshapeTransform":
            array = _reshaped(array, transform.shape, name)
        elif kind == "BitcastTransform":
            array = array.view(np.dtype(transform.dtype))
        elif kind not in _NAMES_ONLY:
            raise NotImplementedError(f"the interpreter does not know the reference transform {kind} ({name})")
    return array


def _reshaped(array: np.ndarray, shape: Sequence[int], name: str) -> np.ndarray:
    result = array.reshape(shape)
    if not np.shares_memory(result, array):
        raise NotImplementedError(f"{name}: reshaping {array.shape} to {tuple(shape)} would copy")
    return result


def _indices(indexer: Any, shape: tuple[int, ...], name: str) -> list[int | slice]:
    found: list[int | slice] = []
    for axis, (index, size) in enumerate(zip(indexer.indices, shape, strict=True)):
        start, length, stride = _span(index, name)
        if start < 0 or start + (length - 1) * stride >= size:
            raise Fault(f"{name}: index {start}:{start + (length - 1) * stride + 1} is out of bounds on axis {axis} of shape {shape}")
        found.append(slice(start, start + (length - 1) * stride + 1, stride) if _is_slice(index) else start)
    return found


def _is_slice(index: Any) -> bool:
    return type(index).__name__ == "Slice"


def _span(index: Any, name: str) -> tuple[int, int, int]:
    if _is_slice(index):
        return int(index.start), int(index.size), int(index.stride)
    if np.ndim(index):
        raise NotImplementedError(f"{name}: an array of {np.shape(index)} as an index (a gather)")
    return int(index), 1, 1


def box(buffer: MemoryRef, transforms: Sequence[Any]) -> np.ndarray:
    """The flat positions of a TMA box in global memory, -1 over the edge: there the hardware reads 0 and stores nothing."""
    found = buffer.positions()
    for transform in transforms:
        if type(transform).__name__ != "NDIndexer":
            found = locate(found, (transform,), buffer.name)
            continue
        spans = [_span(index, buffer.name) for index in transform.indices]
        wanted = [start + stride * np.arange(length) for start, length, stride in spans]
        inside = [(w >= 0) & (w < size) for w, size in zip(wanted, found.shape, strict=True)]
        grown = np.full([length for _, length, _ in spans], -1, np.int64)
        grown[np.ix_(*inside)] = found[np.ix_(*(w[i] for w, i in zip(wanted, inside, strict=True)))]
        found = grown[tuple(slice(None) if _is_slice(index) else 0 for index in transform.indices)]
    return found


@dataclass(eq=False)
class Copy:
    """A TMA load in flight. It lands when some thread waits for its barrier, the latest that hardware could be."""

    target: MemoryRef
    transforms: Sequence[Any]
    value: np.ndarray
    clock: np.ndarray
    what: str

    def land(self) -> None:
        self.target.view(self.transforms)[...] = self.value
        assert self.target.shadow
        locate(self.target.shadow.state, self.transforms, self.target.name)[...] = STORED


@dataclass(eq=False)
class Barrier:
    """An mbarrier: a phase is complete when `needed` arrivals were counted; each thread waits for phase after phase."""

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
        np.maximum(self.collected, clock, out=self.collected)
        self.arrived += 1
        if self.arrived == self.needed:
            self.arrived, self.completed, self.clock = 0, self.completed + 1, self.collected.copy()

    def passes(self, thread: int) -> bool:
        """Whether the phase that the thread waits for is complete. Copies land here, when somebody needs them, no earlier."""
        while self.completed <= self.waited[thread] and self.copies:
            copy = self.copies.popleft()
            copy.land()
            self.arrive(copy.clock)
        if self.completed > self.waited[thread] + 1:
            raise Fault(
                f"waits for phase {self.waited[thread]} of {self.name}, which has completed {self.completed}: the thread missed one, or"
                f" there were too many arrivals ({self.needed} make a phase). The hardware only tells odd phases from even ones"
            )
        return self.completed > self.waited[thread]

    def state(self, thread: int) -> str:
        return f"{self.name} (phase {self.waited[thread]}; {self.completed} complete, {self.arrived} of {self.needed} arrivals)"
