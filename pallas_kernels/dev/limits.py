"""Checks of a compiled kernel against the limits of an H100, which the interpreter ignores.

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
GRID = (2**31 - 1, 65_535, 65_535)
"""The most blocks by axis: x, y, z."""
NOTES = {
    "C7512": "serialised: ptxas waits for each wgmma before it issues the next",
    "C7513": "serialised: ordinary instructions write registers that a wgmma in flight reads",
    "C7517": (
        "drained: ptxas has put a wait for all wgmmas where the kernel has none, because it uses "
        "their registers"
    ),
}
"""Notes of ptxas about idle tensor cores. C7519, an injected warpgroup.arrive, is harmless: it
costs one instruction."""


def faults(kernel: KernelResources, *, sms: int = 0) -> list[str]:
    """The faults of a kernel.

    It has none if it runs, keeps its values in registers and its wgmmas in flight.

    sms: SMs that its grid should fill with at least one block each; 0: not checked, because the
    shape is a small one.
    """
    messages = [
        *_registers(kernel),
        *_notes(kernel),
        *_memory(kernel),
        *_barriers(kernel),
        *_grid(kernel, sms),
    ]
    for tensor_map in kernel.tensor_maps:
        messages += _tensor_map(tensor_map)
    return messages


def _registers(kernel: KernelResources) -> Iterator[str]:
    n_warpgroups = kernel.threads // WARPGROUP
    launch_registers = kernel.registers * kernel.threads
    if launch_registers > REGISTERS:
        yield (
            f"registers: {kernel.threads} threads of {kernel.registers} are {launch_registers:,}, "
            f"and an SM has {REGISTERS:,}"
        )
    spilled = kernel.spill_stores + kernel.spill_loads
    if spilled:
        yield f"spills: {spilled} bytes of each thread's registers go through local memory"
    if not kernel.set_registers:
        return

    decreases = [n for direction, n in kernel.set_registers if direction == "dec"]
    increases = [n for direction, n in kernel.set_registers if direction == "inc"]
    # Code that several warpgroups share is there once, so those that do not give registers back
    # take the most that any takes.
    budget = decreases + [max(increases, default=kernel.registers)] * (
        n_warpgroups - len(decreases)
    )
    if sum(budget) > kernel.registers * n_warpgroups:
        yield (
            f"register budget: warpgroups that set {', '.join(map(str, budget))} registers a "
            f"thread need {WARPGROUP * sum(budget):,}, and the block is launched with "
            f"{WARPGROUP * n_warpgroups * kernel.registers:,}, so setmaxnreg would hang"
        )
    for n in decreases + increases:
        if n % 8 or not 24 <= n <= 256:
            yield f"setmaxnreg: {n} is not a multiple of 8 from 24 to 256"
    if any(n > kernel.registers for n in decreases) or any(n < kernel.registers for n in increases):
        yield (
            f"setmaxnreg: {kernel.set_registers} does not fit the {kernel.registers} registers at "
            "launch"
        )


def _notes(kernel: KernelResources) -> Iterator[str]:
    codes = set(re.findall(r"\((C\d+)\)", "\n".join(kernel.warnings)))
    for code in sorted(codes & set(NOTES)):
        lines = [line for line in kernel.warnings if f"({code})" in line]
        yield f"{NOTES[code]} ({len(lines)} x {code})"
    has_code = any("(C751" in line for line in kernel.warnings)
    if not has_code and any("serialized" in line for line in kernel.warnings):
        yield "serialised, without a number that is known here"


def _memory(kernel: KernelResources) -> Iterator[str]:
    shared = kernel.dynamic_shared + kernel.static_shared
    if shared > SHARED_MEMORY:
        yield f"shared memory: {shared:,} bytes, and a block may have {SHARED_MEMORY:,}"


def _barriers(kernel: KernelResources) -> Iterator[str]:
    # With Mosaic's lane semantics, which the kernels use, all threads of a warpgroup arrive, and a
    # copy's arrival is also theirs.
    for count in sorted(set(kernel.barriers)):
        if not 1 <= count <= ARRIVALS:
            yield f"barrier: {count:,} arrivals are not from 1 to {ARRIVALS:,}"
        elif count % WARPGROUP:
            yield (
                f"barrier: {count} arrivals are no whole number of warpgroups, of which all "
                f"{WARPGROUP} threads arrive"
            )


def _grid(kernel: KernelResources, sms: int) -> Iterator[str]:
    for axis, n, limit in zip("xyz", kernel.grid, GRID, strict=True):
        if not 1 <= n <= limit:
            yield f"grid: {n:,} blocks along {axis}, and there may be {limit:,}"
    blocks = math.prod(kernel.grid)
    if blocks < sms:
        yield f"grid: {blocks} blocks leave {sms - blocks} of {sms} SMs without work"


def _tensor_map(tma: TensorMap) -> Iterator[str]:
    box = "x".join(map(str, tma.box))
    shape = "x".join(map(str, tma.shape))
    subject = f"TMA of {box} from {shape} {tma.dtype}"
    row_bytes = tma.box[-1] * tma.itemsize
    if not 1 <= len(tma.shape) <= 5:
        yield f"{subject}: {len(tma.shape)} axes, and there may be 5"
    if any(not 1 <= n <= 256 for n in tma.box):
        yield f"{subject}: a box has 1 to 256 elements along an axis"
    if row_bytes % 16 or (tma.swizzle and row_bytes > tma.swizzle):
        yield (
            f"{subject}: a row of {row_bytes} bytes is not a multiple of 16 up to the swizzle of "
            f"{tma.swizzle or 'none'}"
        )
    if tma.swizzle not in (0, 32, 64, 128):
        yield f"{subject}: a swizzle of {tma.swizzle} bytes"
    if tma.strides[-1] != 1 or any(stride * tma.itemsize % 16 for stride in tma.strides[:-1]):
        yield (
            f"{subject}: strides of {', '.join(map(str, tma.strides))} elements are not aligned to "
            "16 bytes"
        )
    if tma.offset * tma.itemsize % 16:
        yield f"{subject}: it begins {tma.offset} elements into the array, not aligned to 16 bytes"
