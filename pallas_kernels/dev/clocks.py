"""Estimated clocks of one step of each attention kernel, by unit of an SM.

They show which unit binds, and how busy the tensor cores can be at most.

    python -m pallas_kernels.dev.clocks   # prints a table for every entry of tuning.json

A step is one block of columns for both warpgroups that compute. The tensor cores, shared memory,
the exponentials (MUFU) and the schedulers work side by side, so a step takes at least as long as
the busiest of them, and as the chain of one warpgroup's dependent operations. A real step takes
longer: warpgroups compete for units, and there are branches and masks. Nothing was measured.

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

FLOPS = 4096
"""FLOPs of the tensor cores for each clock of an SM."""
SHARED = 128
"""Bytes of shared memory for each clock of an SM."""
EXPONENTIALS = 16
"""Exponentials for each clock of an SM."""
ROWS = 64
"""Rows of a warpgroup."""
GROUPS = 2
"""Warpgroups that compute."""
WAIT = 30
"""Clocks until a warpgroup continues after a wgmma that it waits for. Assumed."""
MEETING = 100
"""Clocks of a store to shared memory, its fence, and a barrier. Assumed."""


@dataclasses.dataclass(frozen=True)
class Work:
    """Clocks of each unit for one warpgroup's part of a step. `+` adds them up."""

    tensor: float = 0
    shared: float = 0
    exponentials: float = 0
    instructions: float = 0

    def __add__(self, other: Work) -> Work:
        return Work(
            tensor=self.tensor + other.tensor,
            shared=self.shared + other.shared,
            exponentials=self.exponentials + other.exponentials,
            instructions=self.instructions + other.instructions,
        )


@dataclasses.dataclass(frozen=True)
class Clocks:
    """The clocks of a step by unit, for both warpgroups."""

    kernel: str
    tensor: float
    shared: float
    exponentials: float
    issue: float
    """The schedulers' clocks."""
    chain: float
    """The clocks of operations of one warpgroup that depend on each other."""

    @property
    def bound(self) -> tuple[str, float]:
        """The unit that binds, and the clocks of a step. Of equal ones the tensor cores."""
        units = ("tensor", "shared", "exponentials", "issue", "chain")
        busiest = max(units, key=lambda unit: getattr(self, unit))
        return busiest, getattr(self, busiest)

    @property
    def utilisation(self) -> float:
        """The share of the time in which the tensor cores work, at most."""
        return self.tensor / self.bound[1]


def wgmma(m: int, n: int, k: int, *, registers: bool = False) -> Work:
    """[m, k] @ [k, n] of 16-bit numbers.

    An instruction has 64 rows and 16 of k, and reads its operands again.

    registers: the first operand is in registers, else both are read from shared memory.
    """
    n_instructions = m // ROWS * k // 16
    bytes_read = (0 if registers else ROWS * 16 * 2) + n * 16 * 2
    return Work(
        tensor=2 * m * n * k / FLOPS,
        shared=n_instructions * bytes_read / SHARED,
        instructions=n_instructions,
    )


def _copied(n_bytes: float) -> Work:
    """A copy or a store of bytes into or out of shared memory."""
    return Work(shared=n_bytes / SHARED)


def _loaded(block: int, H: int, V: int) -> Work:
    """One warpgroup's part of the arrival of a block's two operands."""
    return _copied(2 * block * (H + V) / GROUPS)


def _elementwise(
    elements: int, per_element: float, fixed: float = 0, *, exponentials: int = 0
) -> Work:
    """Instructions for every element, divided among 128 threads, and `fixed` ones for all."""
    return Work(
        exponentials=exponentials / EXPONENTIALS,
        instructions=per_element * elements / 128 + fixed,
    )


def _clocks(kernel: str, work: Work, chain: float) -> Clocks:
    # Each scheduler has one warp of each warpgroup.
    return Clocks(
        kernel,
        tensor=GROUPS * work.tensor,
        shared=GROUPS * work.shared,
        exponentials=GROUPS * work.exponentials,
        issue=GROUPS * work.instructions,
        chain=chain,
    )


def forward(H: int, V: int, block: int) -> Clocks:
    """The forward pass: S = Q K^T of a block while the last one's P V is in flight, then softmax.

    The softmax has 400 instructions at 128 columns.
    """
    elements = ROWS * block
    s = wgmma(ROWS, block, H)
    pv = wgmma(ROWS, V, block, registers=True)
    softmax = _elementwise(elements, 4.5, V / 2 + 50, exponentials=elements)
    work = s + pv + softmax + _loaded(block, H, V)
    softmax_clocks = softmax.exponentials + softmax.instructions / 2
    chain = s.tensor + WAIT + max(pv.tensor, softmax_clocks) + WAIT
    return _clocks("forward", work, chain)


def dq(H: int, V: int, block: int) -> Clocks:
    """The gradient of queries alone: S, dP and dS K.

    The other kernel of the pair computes S and dP again.
    """
    elements = ROWS * block
    s = wgmma(ROWS, block, H)
    dp = wgmma(ROWS, block, V)
    product = wgmma(ROWS, H, block, registers=True)
    ds = _elementwise(elements, 5, 100, exponentials=elements)
    work = s + dp + product + ds + _loaded(block, H, V)
    chain = s.tensor + max(dp.tensor, ds.exponentials) + ds.instructions + 2 * WAIT
    return _clocks("dq", work, chain)


def dkv(H: int, V: int, block: int, part: str) -> Clocks:
    """The gradients of keys and values without that of queries, or one of the two.

    They take S^T, dP^T, P^T dO and dS^T Q.
    """
    elements = ROWS * block
    s = wgmma(ROWS, block, H)
    dp = Work() if part == "dv" else wgmma(ROWS, block, V)
    dv = Work() if part == "dk" else wgmma(ROWS, V, block, registers=True)
    dk = Work() if part == "dv" else wgmma(ROWS, H, block, registers=True)
    ds = _elementwise(elements, 3 if part == "dv" else 5, 100, exponentials=elements)
    work = s + dp + dv + dk + ds + _loaded(block, H, V)
    chain = s.tensor + max(dp.tensor, ds.exponentials) + ds.instructions + 2 * WAIT
    return _clocks("dkv" if part == "both" else part, work, chain)


def fused(H: int, V: int, block: int, *, add: str = "red", computes_dv: bool = True) -> Clocks:
    """The backward pass in one kernel, with each warpgroup making half of the columns of dQ.

    In the machine code of the kernel that this follows, a step with heads of 128 and 64 queries had
    445 instructions with red, and 504 with tma.

    add: "red" adds dQ to global memory from registers, "tma" through shared memory.
    """
    elements = ROWS * block
    dq_elements = block * H // GROUPS
    s = wgmma(ROWS, block, H)
    dp = wgmma(ROWS, block, V)
    dv = wgmma(ROWS, V, block, registers=True) if computes_dv else Work()
    dk = wgmma(ROWS, H, block, registers=True)
    dq = wgmma(block, H // GROUPS, ROWS * GROUPS)
    p = _elementwise(elements, 3, 40, exponentials=elements)
    ds = _elementwise(elements, 4, 80)
    if add == "red":
        addition = _elementwise(dq_elements, 1.5, 10)
    else:
        addition = _elementwise(dq_elements, 3, 10) + _copied(2 * 4 * dq_elements)
    products = s + dp + dv + dk + dq
    work = products + p + ds + addition + _copied(2 * elements) + _loaded(block, H, V)
    chain = (
        s.tensor
        + WAIT
        + p.exponentials
        + ds.instructions
        + MEETING
        + dq.tensor
        + WAIT
        + addition.instructions
    )
    if add == "tma":
        chain += MEETING
    return _clocks(f"fused, {add}", work, chain)


def of_entry(entry: tuning.TuningEntry) -> Iterator[Clocks]:
    """The clocks of each kernel of an entry of the table of tiles."""
    H, V = entry.head_dims
    tiling = entry.tiling
    yield forward(H, V, tiling.forward.block)
    yield dq(H, V, tiling.dq.block)
    for part in parts(H, V):
        yield dkv(H, V, tiling.dkv.block, part)
    if tiling.fused is not None:
        computes_dv = len(parts(H, V)) == 1
        yield fused(H, V, tiling.fused.block, add=tiling.fused.add, computes_dv=computes_dv)


def lines(entries: Any = None) -> Iterator[str]:
    """A table in Markdown, one line for each kernel of each entry."""
    yield (
        "| head dims | kernel | tensor | shared | exponentials | issue | chain | binds | tensor "
        "cores busy, at most |"
    )
    yield "| --- | --- | --- | --- | --- | --- | --- | --- | --- |"
    for entry in tuning.entries() if entries is None else entries:
        H, V = entry.head_dims
        for kernel in of_entry(entry):
            clocks = (
                kernel.tensor,
                kernel.shared,
                kernel.exponentials,
                kernel.issue,
                kernel.chain,
            )
            units = " | ".join(f"{x:,.0f}" for x in clocks)
            unit, _ = kernel.bound
            yield (f"| {H}, {V} | {kernel.kernel} | {units} | {unit} | {kernel.utilisation:.2f} |")


if __name__ == "__main__":
    sys.stdout.write("\n".join(lines()) + "\n")
