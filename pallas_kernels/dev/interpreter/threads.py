"""Warpgroups and blocks: what an interpreted thread has under way, and what it may wait for."""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from jax._src import source_info_util

from pallas_kernels.dev.interpreter.memory import Actor, Barrier, Fault, MemoryRef, Read


class KernelError(RuntimeError):
    """A kernel that would go wrong on the hardware, or one that the interpreter cannot run. Says where."""


@dataclass(frozen=True)
class Wait:
    """What a thread waits for. `ready` may be asked again and again."""

    ready: Callable[[], bool]
    what: Callable[[], str]


Steps = Generator[Wait | None, None, Any]
"""A part of a thread's run: yields a Wait to be resumed when it is ready, None where another thread may go first."""


@dataclass(eq=False)
class Thread(Actor):
    """A warpgroup. wgmmas and stores are its asynchronous operations not yet waited for, oldest first.

    visits: how often it has come to each run_scoped, by the identity of the equation: threads meet where their visits are equal.
    """

    axes: dict[Any, int]
    block: Block
    wgmmas: list[tuple[MemoryRef, list[Read]]] = field(default_factory=list)
    stores: list[list[Read]] = field(default_factory=list)
    uncommitted: list[Read] = field(default_factory=list)
    visits: dict[int, int] = field(default_factory=dict)

    def await_wgmmas(self, allowed: int) -> None:
        while len(self.wgmmas) > allowed:
            for read in self.wgmmas.pop(0)[1]:
                read.finish(self)

    def await_stores(self, allowed: int) -> None:
        while len(self.stores) > allowed:
            for read in self.stores.pop(0):
                read.finish(self)

    def check_done(self) -> None:
        if self.wgmmas:
            raise Fault(f"thread {self.index} ends before it waits for {len(self.wgmmas)} wgmma")
        if any(self.stores) or self.uncommitted:
            first = next(read for group in (*self.stores, self.uncommitted) for read in group)
            raise Fault(f"thread {self.index} ends before it waits for {first.what}")


@dataclass(eq=False)
class Block:
    """A CUDA block: what its threads allocated, and where they met.

    scopes: what a visit to a run_scoped that all threads share has allocated. arrivals: what each thread that has come there knew.
    """

    where: str
    barriers: list[Barrier] = field(default_factory=list)
    shared: list[MemoryRef] = field(default_factory=list)
    scopes: dict[tuple[int, int], list[Any]] = field(default_factory=dict)
    arrivals: dict[tuple[int, int], list[np.ndarray]] = field(default_factory=dict)

    def check_done(self) -> None:
        for barrier in self.barriers:
            if barrier.copies:
                raise Fault(f"the block ends before any thread waits for {barrier.copies[0].what} on {barrier.name}")


def place_of(eqn: Any) -> str:
    """The line of the kernel that an equation comes from."""
    return source_info_util.summarize(eqn.source_info)
