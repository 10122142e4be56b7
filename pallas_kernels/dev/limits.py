"""What a compiled kernel asks of the hardware that an H100 cannot give, or gives slowly. The
interpreter knows nothing of it.

Limits are those of compute capability 9.0 (CUDA C++ Programming Guide, technical specifications),
of the PTX instructions setmaxnreg and mbarrier.init, and of cuTensorMapEncodeTiled of the CUDA
driver.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

from pallas_kernels.dev.resources import KernelResources, TensorMap

WARPGROUP = 128
"""Threads."""
REGISTERS = 65_536
"""Registers of an SM, each of 32 bits."""
SHARED_MEMORY = 232_448
"""Bytes that a block may have."""
ARRIVALS = 2**20 - 1
"""The most that a barrier counts."""
GRID = 2**31 - 1, 65_535, 65_535
"""The most blocks by axis: x, y, z."""
NOTES = {
    "C7512": "serialised: ptxas waits for each wgmma before it issues the next",
    "C7513": "serialised: ordinary instructions write registers that a wgmma in flight reads",
    "C7517": (
        "drained: ptxas has put a wait for all wgmmas where the kernel has none, because it uses "
        "their registers"
    ),
}
"""Notes of ptxas that say that tensor cores will be idle. C7519, an injected warpgroup.arrive, is
harmless: it costs one instruction."""


def faults(kernel: KernelResources, *, sms: int = 0) -> list[str]:
    """What is wrong with a kernel; nothing if it runs, and keeps what it computes in registers and
    its wgmmas in flight.

    sms: those that its grid should fill with a block each at least; 0: do not ask, because the
    shape is a small one.
    """
    found = [
        *_registers(kernel),
        *_notes(kernel),
        *_memory(kernel),
        *_barriers(kernel),
        *_grid(kernel, sms),
    ]
    return found + [fault for one in kernel.tensor_maps for fault in _tensor_map(one)]


def _registers(kernel: KernelResources) -> Iterator[str]:
    groups = kernel.threads // WARPGROUP
    if (wanted := kernel.registers * kernel.threads) > REGISTERS:
        yield (
            f"registers: {kernel.threads} threads of {kernel.registers} are {wanted:,}, and an SM "
            f"has {REGISTERS:,}"
        )
    if spilled := kernel.spill_stores + kernel.spill_loads:
        yield f"spills: {spilled} bytes of each thread's registers go through local memory"
    if not kernel.set_registers:
        return
    fewer, more = (
        [n for way, n in kernel.set_registers if way == direction] for direction in ("dec", "inc")
    )
    # Code that several warpgroups share is there once, so those that do not give registers back
    # take the most that any takes.
    budget = fewer + [max(more, default=kernel.registers)] * (groups - len(fewer))
    if sum(budget) > kernel.registers * groups:
        yield (
            f"register budget: warpgroups that set {', '.join(map(str, budget))} registers a "
            f"thread need {WARPGROUP * sum(budget):,}, and the block is launched with "
            f"{WARPGROUP * groups * kernel.registers:,}, so setmaxnreg would hang"
        )
    for n in fewer + more:
        if n % 8 or not 24 <= n <= 256:
            yield f"setmaxnreg: {n} is not a multiple of 8 from 24 to 256"
    if any(n > kernel.registers for n in fewer) or any(n < kernel.registers for n in more):
        yield (
            f"setmaxnreg: {kernel.set_registers} does not fit the {kernel.registers} registers at "
            "launch"
        )


def _notes(kernel: KernelResources) -> Iterator[str]:
    for code in sorted(set(re.findall(r"\((C\d+)\)", "\n".join(kernel.warnings))) & set(NOTES)):
        lines = [line for line in kernel.warnings if f"({code})" in line]
        yield f"{NOTES[code]} ({len(lines)} x {code})"
    if not any("(C751" in line for line in kernel.warnings) and any(
        "serialized" in line for line in kernel.warnings
    ):
        yield "serialised, without a number that is known here"


def _memory(kernel: KernelResources) -> Iterator[str]:
    if (wanted := kernel.dynamic_shared + kernel.static_shared) > SHARED_MEMORY:
        yield f"shared memory: {wanted:,} bytes, and a block may have {SHARED_MEMORY:,}"


def _barriers(kernel: KernelResources) -> Iterator[str]:
    """With a thread's own semantics, which the kernels use, all threads of a warpgroup arrive, and
    a copy's arrival is also theirs.
    """
    for count in sorted(set(kernel.barriers)):
        if not 1 <= count <= ARRIVALS:
            yield f"barrier: {count:,} arrivals are not from 1 to {ARRIVALS:,}"
        elif count % WARPGROUP:
            yield (
                f"barrier: {count} arrivals are no whole number of warpgroups, of which all "
                f"{WARPGROUP} threads arrive"
            )


def _grid(kernel: KernelResources, sms: int) -> Iterator[str]:
    for axis, n, most in zip("xyz", kernel.grid, GRID, strict=True):
        if not 1 <= n <= most:
            yield f"grid: {n:,} blocks along {axis}, and there may be {most:,}"
    if (blocks := math.prod(kernel.grid)) < sms:
        yield f"grid: {blocks} blocks leave {sms - blocks} of {sms} SMs without work"


def _tensor_map(one: TensorMap) -> Iterator[str]:
    what = f"TMA of {'x'.join(map(str, one.box))} from {'x'.join(map(str, one.shape))} {one.dtype}"
    inner = one.box[-1] * one.itemsize
    if not 1 <= len(one.shape) <= 5:
        yield f"{what}: {len(one.shape)} axes, and there may be 5"
    if any(not 1 <= n <= 256 for n in one.box):
        yield f"{what}: a box has 1 to 256 elements along an axis"
    if inner % 16 or (one.swizzle and inner > one.swizzle):
        yield (
            f"{what}: a row of {inner} bytes is not a multiple of 16 up to the swizzle of "
            f"{one.swizzle or 'none'}"
        )
    if one.swizzle not in (0, 32, 64, 128):
        yield f"{what}: a swizzle of {one.swizzle} bytes"
    if one.strides[-1] != 1 or any(stride * one.itemsize % 16 for stride in one.strides[:-1]):
        yield (
            f"{what}: strides of {', '.join(map(str, one.strides))} elements are not aligned to 16 "
            "bytes"
        )
    if one.offset * one.itemsize % 16:
        yield f"{what}: it begins {one.offset} elements into the array, not aligned to 16 bytes"
