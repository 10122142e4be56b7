"""Estimated clocks of one step of each attention kernel, by unit of an SM: which unit binds, and
how busy the tensor cores can be at most.

    python -m pallas_kernels.dev.clocks   # prints a table for every entry of tuning.json

A step is one block of columns for both warpgroups that compute. The tensor cores, shared memory,
the exponentials (MUFU) and the schedulers work side by side, so a step takes at least as long as
the busiest of them, and as the chain of what one warpgroup must do in order. What this leaves out
makes a real step longer: warpgroups that want one unit at the same time, branches, and masks.
Nothing was measured.

Rates of an H100, for each clock of an SM: 4,096 FLOPs of bf16 in the tensor cores (its data sheet's
989 TFLOP/s at 132 SMs and 1.83 GHz), 128 bytes of shared memory, 16 exponentials, and one
instruction of a warp on each of four schedulers.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator
from typing import Any

from pallas_kernels.attention import tuning
from pallas_kernels.attention.hopper.backward import parts

FLOPS, SHARED, EXPONENTIALS = 4096, 128, 16
"""For each clock of an SM."""
ROWS, GROUPS = 64, 2
"""Rows of a warpgroup, and the warpgroups that compute."""
WAIT, MEETING = 30, 100
"""Clocks until a warpgroup goes on after a wgmma that it waits for; and for a store to shared
memory, its fence, and a barrier. Assumed."""


@dataclasses.dataclass(frozen=True)
class Work:
    """Clocks of each unit for one warpgroup's part of a step. `+` adds them up."""

    tensor: float = 0
    shared: float = 0
    exponentials: float = 0
    instructions: float = 0

    def __add__(self, other: Work) -> Work:
        return Work(
            *(
                a + b
                for a, b in zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)
            )
        )


@dataclasses.dataclass(frozen=True)
class Clocks:
    """The clocks of a step by unit, for both warpgroups. chain: what one warpgroup does one after
    another.
    """

    kernel: str
    tensor: float
    shared: float
    exponentials: float
    issue: float
    chain: float

    @property
    def bound(self) -> tuple[str, float]:
        """The unit that binds, and the clocks of a step. Of equal ones the tensor cores."""
        units = {
            name: getattr(self, name)
            for name in ("tensor", "shared", "exponentials", "issue", "chain")
        }
        name = max(units, key=lambda unit: units[unit])
        return name, units[name]

    @property
    def utilisation(self) -> float:
        """The share of the time in which the tensor cores work, at most."""
        return self.tensor / self.bound[1]


def wgmma(m: int, n: int, k: int, *, registers: bool = False) -> Work:
    """[m, k] @ [k, n] of 16-bit numbers. registers: the first operand is in registers, else both
    are read from shared memory.

    An instruction has 64 rows and 16 of k, and reads its operands again.
    """
    count = m // ROWS * k // 16
    read = (0 if registers else ROWS * 16 * 2) + n * 16 * 2
    return Work(tensor=2 * m * n * k / FLOPS, shared=count * read / SHARED, instructions=count)


def _moved(size: float) -> Work:
    """A copy or a store of bytes into or out of shared memory."""
    return Work(shared=size / SHARED)


def _elementwise(elements: int, each: float, fixed: float = 0, *, exponentials: int = 0) -> Work:
    """`each` instructions for every element, divided among 128 threads, and `fixed` ones for
    all.
    """
    return Work(
        exponentials=exponentials / EXPONENTIALS, instructions=each * elements / 128 + fixed
    )


def _clocks(kernel: str, work: Work, chain: float) -> Clocks:
    # Each scheduler has one warp of each warpgroup.
    return Clocks(kernel, *(GROUPS * x for x in dataclasses.astuple(work)), chain=chain)


def forward(H: int, V: int, block: int) -> Clocks:
    """The forward pass: S = Q K^T of a block while the last one's P V is in flight, then the
    softmax; 400 instructions at 128 columns.
    """
    elements = ROWS * block
    s, pv = wgmma(ROWS, block, H), wgmma(ROWS, V, block, registers=True)
    softmax = _elementwise(elements, 4.5, V / 2 + 50, exponentials=elements)
    work = s + pv + softmax + _moved(2 * block * (H + V) / GROUPS)
    return _clocks(
        "forward",
        work,
        s.tensor + WAIT + max(pv.tensor, softmax.exponentials + softmax.instructions / 2) + WAIT,
    )


def dq(H: int, V: int, block: int) -> Clocks:
    """The gradient of queries alone: S, dP and dS K, the first two of which the other kernel of the
    pair computes again.
    """
    elements = ROWS * block
    s, dp, product = (
        wgmma(ROWS, block, H),
        wgmma(ROWS, block, V),
        wgmma(ROWS, H, block, registers=True),
    )
    middle = _elementwise(elements, 5, 100, exponentials=elements)
    work = s + dp + product + middle + _moved(2 * block * (H + V) / GROUPS)
    chain = s.tensor + max(dp.tensor, middle.exponentials) + middle.instructions + 2 * WAIT
    return _clocks("dq", work, chain)


def dkv(H: int, V: int, block: int, part: str) -> Clocks:
    """The gradients of keys and values without that of queries: S^T, dP^T, P^T dO and dS^T Q; or
    one of the two.
    """
    elements = ROWS * block
    s, dp = wgmma(ROWS, block, H), Work() if part == "dv" else wgmma(ROWS, block, V)
    products = Work() if part == "dk" else wgmma(ROWS, V, block, registers=True)
    products += Work() if part == "dv" else wgmma(ROWS, H, block, registers=True)
    middle = _elementwise(elements, 3 if part == "dv" else 5, 100, exponentials=elements)
    work = s + dp + products + middle + _moved(2 * block * (H + V) / GROUPS)
    chain = s.tensor + max(dp.tensor, middle.exponentials) + middle.instructions + 2 * WAIT
    return _clocks({"both": "dkv"}.get(part, part), work, chain)


def fused(H: int, V: int, block: int, *, add: str = "red", with_dv: bool = True) -> Clocks:
    """The backward pass in one kernel, with each warpgroup making half of the columns of dQ.

    add: "red" adds dQ to global memory from registers, "tma" through shared memory. In the machine
    code of the kernel that this follows, a step with heads of 128 and 64 queries had 445
    instructions with red, and 504 with tma.
    """
    elements, sums = ROWS * block, block * H // GROUPS
    s, dp = wgmma(ROWS, block, H), wgmma(ROWS, block, V)
    dv = wgmma(ROWS, V, block, registers=True) if with_dv else Work()
    dk, product = wgmma(ROWS, H, block, registers=True), wgmma(block, H // GROUPS, ROWS * GROUPS)
    p, ds = _elementwise(elements, 3, 40, exponentials=elements), _elementwise(elements, 4, 80)
    adding = _elementwise(sums, 1.5 if add == "red" else 3, 10) + (
        _moved(2 * 4 * sums) if add == "tma" else Work()
    )
    work = (
        s
        + dp
        + dv
        + dk
        + product
        + p
        + ds
        + adding
        + _moved(2 * elements)
        + _moved(2 * block * (H + V) / GROUPS)
    )
    chain = (
        s.tensor
        + WAIT
        + p.exponentials
        + ds.instructions
        + MEETING
        + product.tensor
        + WAIT
        + adding.instructions
    )
    return _clocks(f"fused, {add}", work, chain + (MEETING if add == "tma" else 0))


def of_entry(row: tuning.TuningEntry) -> Iterator[Clocks]:
    """The clocks of each kernel of an entry of the table of tiles."""
    (H, V), tiles = row.head_dims, row.tiling
    yield forward(H, V, tiles.forward.block)
    yield dq(H, V, tiles.dq.block)
    for part in parts(H, V):
        yield dkv(H, V, tiles.dkv.block, part)
    if (one := getattr(tiles, "fused", None)) is not None:
        yield fused(H, V, one.block, add=one.add, with_dv=len(parts(H, V)) == 1)


def lines(rows: Any = None) -> Iterator[str]:
    """A table in Markdown, one line for each kernel of each entry."""
    yield (
        "| head dims | kernel | tensor | shared | exponentials | issue | chain | binds | tensor "
        "cores busy, at most |"
    )
    yield "| --- | --- | --- | --- | --- | --- | --- | --- | --- |"
    for row in tuning.entries() if rows is None else rows:
        for one in of_entry(row):
            units = " | ".join(
                f"{x:,.0f}"
                for x in (one.tensor, one.shared, one.exponentials, one.issue, one.chain)
            )
            yield (
                f"| {row.head_dims[0]}, {row.head_dims[1]} | {one.kernel} | {units} | "
                f"{one.bound[0]} | {one.utilisation:.2f} |"
            )


if __name__ == "__main__":
    sys.stdout.write("\n".join(lines()) + "\n")
