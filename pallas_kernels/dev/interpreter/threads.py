"""Interpreted warpgroups and blocks: their asynchronous operations in flight, and their waits."""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from jax._src import source_info_util

from pallas_kernels.dev.interpreter.memory import Actor, Barrier, Fault, MemoryRef, Read


class KernelError(RuntimeError):
    """Raised for a kernel that would fail on the hardware, or that the interpreter cannot run.

    The message has the block, the thread and the source line.
    """


@dataclass(frozen=True)
class Wait:
    """A condition that a thread waits for."""

    ready: Callable[[], bool]
    """May be called repeatedly."""
    description: Callable[[], str]


Steps = Generator[Wait | None, None, Any]
"""The execution of a thread: yields a Wait to be resumed when it is ready, and None where other
threads may run."""


@dataclass(eq=False)
class Thread(Actor):
    """A warpgroup."""

    axes: dict[Any, int]
    """Its position in the grid and in its block, by axis name."""
    block: Block
    wgmmas: list[tuple[MemoryRef, list[Read]]] = field(default_factory=list)
    """In flight, oldest first: the accumulator, and the reads of operands."""
    stores: list[list[Read]] = field(default_factory=list)
    """Committed groups of stores in flight, oldest first."""
    uncommitted: list[Read] = field(default_factory=list)
    """Stores that belong to no group yet."""
    visits: dict[int, int] = field(default_factory=dict)
    """The number of times that it has reached each run_scoped, by the identity of the equation:
    threads meet if their visits are equal."""

    def await_wgmmas(self, allowed: int) -> None:
        """Waits until at most `allowed` wgmmas are in flight."""
        while len(self.wgmmas) > allowed:
            _, reads = self.wgmmas.pop(0)
            for read in reads:
                read.finish(self)

    def await_stores(self, allowed: int) -> None:
        """Waits until at most `allowed` groups of stores are in flight."""
        while len(self.stores) > allowed:
            for read in self.stores.pop(0):
                read.finish(self)

    def check_done(self) -> None:
        """Raises Fault if asynchronous operations are in flight at the end of the thread."""
        if self.wgmmas:
            raise Fault(f"thread {self.index} ends before it waits for {len(self.wgmmas)} wgmma")
        for group in (*self.stores, self.uncommitted):
            for read in group:
                raise Fault(f"thread {self.index} ends before it waits for {read.operation}")


@dataclass(eq=False)
class NamedBarrier:
    """A barrier of two warpgroups, one that waits and one that only arrives."""

    arrived_threads: set[int] = field(default_factory=set)
    completed: int = 0
    """The number of times that both have arrived."""


@dataclass(eq=False)
class Block:
    """A CUDA block: the allocations of its threads, and their meetings."""

    location: str
    """The kernel and the block, for messages."""
    barriers: list[Barrier] = field(default_factory=list)
    shared: list[MemoryRef] = field(default_factory=list)
    scopes: dict[tuple[int, int], list[Any]] = field(default_factory=dict)
    """The allocations of each visit to a collective run_scoped."""
    arrivals: dict[tuple[int, int], list[np.ndarray]] = field(default_factory=dict)
    """The clocks of the threads that have reached such a visit."""
    named_barriers: dict[int, NamedBarrier] = field(default_factory=dict)
    """The named barriers in use, by number."""

    def meet(self, number: int, thread: Thread) -> NamedBarrier:
        """Returns the named barrier of this number, after the arrival of a thread.

        Raises Fault if the hardware would take the arrival for that of another thread.
        """
        barrier = self.named_barriers.setdefault(number, NamedBarrier())
        if thread.index in barrier.arrived_threads:
            raise Fault(
                f"arrives twice at named barrier {number}, which another warpgroup has not "
                "reached: the barrier would let go"
            )
        barrier.arrived_threads.add(thread.index)
        if len(barrier.arrived_threads) == 2:
            barrier.arrived_threads.clear()
            barrier.completed += 1
        return barrier

    def check_done(self) -> None:
        """Raises Fault if copies are in flight at the end of the block."""
        for barrier in self.barriers:
            if barrier.copies:
                raise Fault(
                    f"the block ends before any thread waits for {barrier.copies[0].operation} on "
                    f"{barrier.name}"
                )


def source_line(eqn: Any) -> str:
    """The source line of an equation."""
    return source_info_util.summarize(eqn.source_info)
