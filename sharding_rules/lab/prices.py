"""What one instruction or collective of a compiled program costs on a GPU: shares of the data
sheet's peaks, and XLA's own estimates.

XLA's estimate is called `sol` (speed of light). For kernels bound by memory it is bytes / peak
bandwidth. For matmuls it is a measured table where operands and result are bf16 (750 TFLOP/s for
large ones on an H100) and nonsense elsewhere: a bf16 matmul with an f32 result comes out 60 times
too slow. So a matmul that XLA calls more than twice as slow as its roofline gets the roofline.
Collectives are priced here, because XLA assumes another network and stops at 5 ms.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable, Iterator

from sharding_rules.lab.hlo import CALLS, Instruction, Module
from sharding_rules.lab.provenance import Provenance
from sharding_rules.lab.report import Collective
from sharding_rules.lab.targets import Target

MATMUL, MEMORY, NVLINK, NETWORK = 0.77, 0.9, 0.78, 0.84
"""Share of a data sheet's peak that large matmuls (cuBLAS), copies, and collectives (NCCL's bus
bandwidth) are taken to reach. Assumed."""
ATTENTION, ATTENTION_BACKWARD = 0.62, 0.52
"""The same of fused attention kernels: a little under FlashAttention-3's published 640 and 540
TFLOP/s on an H100. Assumed of ours too.

Our kernel has never been measured. It is assumed to reach these shares of the FLOPs that it
reports, the recomputed ones of its backward included, times the share of the SMs that, by its own
estimate, its grid keeps busy. The published figures are of grids that fill them.
"""
KERNEL = 1.5
"""Microseconds that the shortest kernel takes."""

FREE = {
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id",
    "replica-id", "opt-barrier",
    "add-dependency", "domain", "iota", "copy-start", "send", "recv", "infeed", "outfeed",
}  # fmt: skip
_SOL = re.compile(r'"exec_time_us":"?([\d.eE+\-]+)"?[^}]*?"name":"sol"')


def model_us(flops: float, attention: float, target: Target) -> float:
    """Microseconds that a model's own FLOPs take on one device, with nothing else: no
    recomputation, no bubble, no network, no memory.

    flops: of all its matmuls, forward and backward. attention: those of them that are attention's,
    of which the backward has two thirds.
    """
    peak = target.flops["bf16"]
    return (
        1e6
        / peak
        * (
            (flops - attention) / MATMUL
            + attention / 3 / ATTENTION
            + attention * 2 / 3 / ATTENTION_BACKWARD
        )
    )


def collective_us(one: Collective, target: Target) -> float:
    """Microseconds of one collective alone: bytes / bandwidth of its slowest link, plus latency.

    A ring through nodes with k members in each has k network ports between two nodes; pairs of
    devices (all-to-all, permute) have one each. Latency of a ring is linear in the nodes, an
    all-reduce's that of NCCL's double tree; its microseconds are assumed.
    """
    pairwise = one.kind in ("all-to-all", "ragged-all-to-all", "collective-permute")
    ports = 1 if pairwise else max(1, one.group // one.nodes)
    bandwidth = NVLINK * target.nvlink
    if one.nodes > 1:
        bandwidth = min(bandwidth, ports * NETWORK * target.network)
    inside = max(1, one.group // one.nodes) - 1
    across = (
        2 * math.ceil(math.log2(one.nodes))
        if one.kind == "all-reduce"
        else min(one.nodes - 1, 1)
        if pairwise
        else one.nodes - 1
    )
    latency = 8 + 1.5 * (1 if pairwise else inside) + (7 if one.nodes > 1 else 0) + 6 * across
    return 1e6 * one.wire / bandwidth + latency


@dataclasses.dataclass(frozen=True)
class Prices:
    """Microseconds of single instructions."""

    module: Module
    provenance: Provenance
    target: Target

    def kernel(self, instruction: Instruction, phase: str) -> tuple[str, float]:
        """Kind and microseconds of what runs on the device's own cores."""
        flops = self.module.flops(instruction)
        if call := self.custom(instruction):
            return self._custom(call, flops, phase)
        if flops:
            return "matmul", max(KERNEL, self._matmul(instruction, flops))
        kind = (
            "copy"
            if instruction.opcode.startswith("copy") or "transpose" in instruction.name
            else "elementwise"
        )
        return kind, max(KERNEL, self._sol(instruction) / MEMORY or self._memory(instruction))

    def custom(self, instruction: Instruction) -> Instruction | None:
        """Returns the kernel with matmuls that an instruction calls: itself, or the one in a fusion
        that slices its operands; else None.
        """
        if instruction.opcode == "custom-call":
            own = (
                not instruction.target.startswith("__cublas$")
                and self.module.flops(instruction) > 0
            )
            return instruction if own else None
        if instruction.opcode not in CALLS:
            return None
        inside = (
            one for name in instruction.called for one in self.module.computations.get(name, ())
        )
        return next(filter(None, map(self.custom, inside)), None)

    def _custom(self, call: Instruction, flops: int, phase: str) -> tuple[str, float]:
        """A kernel that says its FLOPs and, perhaps, bytes and name, or fused attention, known by
        its operands.
        """
        said = call.attributes
        kind = (
            "attention"
            if "kernel_flops" not in said or "attention" in said.get("kernel", "")
            else "matmul"
        )
        share = (
            MATMUL if kind == "matmul" else ATTENTION_BACKWARD if phase == "backward" else ATTENTION
        )
        share *= float(said.get("kernel_occupancy", 1))
        moved = said.get("kernel_bytes", "")
        memory = self._moving(int(moved)) if moved.isdecimal() else self._memory(call)
        return kind, max(KERNEL, memory, 1e6 * flops / (share * self._peak(call)))

    def _matmul(self, instruction: Instruction, flops: int) -> float:
        roofline = max(1e6 * flops / (MATMUL * self._peak(instruction)), self._memory(instruction))
        sol = self._sol(instruction)
        return sol if 0 < sol <= 2 * roofline else roofline

    def _peak(self, instruction: Instruction) -> float:
        """FLOP/s of the tensor cores for the operands' type."""
        inside = (
            one
            for name in instruction.called
            for one in self.module.computations.get(name, ())
            if one.opcode == "dot"
        )
        left = self.module.by_name.get(next(inside, instruction).operands[0])
        dtype = left.arrays[0].dtype if left and left.arrays else "bf16"
        return self.target.flops.get(
            "f8" if dtype.startswith("f8") else dtype, self.target.flops["bf16"]
        )

    def _memory(self, instruction: Instruction) -> float:
        """Returns the microseconds of reading the operands and writing the result once. For an
        array that a fusion only slices or updates in place, only the slice counts.
        """
        inside = [
            one for name in instruction.called for one in self.module.computations.get(name, ())
        ]
        if not inside:
            return self._moving(instruction.bytes + sum(self._operand_bytes(instruction)))
        moved = (
            sum(
                self._operand_bytes(one)[1]
                for one in inside
                if one.opcode == "dynamic-update-slice"
            )
            or inside[-1].bytes
        )
        for parameter in (one for one in inside if one.opcode == "parameter"):
            moved += min(
                parameter.bytes,
                sum(self._read(parameter, user) for user in _users(inside, parameter.name)),
            )
        return self._moving(moved)

    def _read(self, parameter: Instruction, user: Instruction) -> int:
        if user.opcode in ("dynamic-slice", "slice", "gather"):
            return user.bytes
        in_place = (
            user.opcode == "dynamic-update-slice" and parameter.bytes > self._operand_bytes(user)[1]
        )
        return 0 if in_place else parameter.bytes

    def _moving(self, size: int) -> float:
        return 1e6 * size / (MEMORY * self.target.hbm_bandwidth)

    def _operand_bytes(self, instruction: Instruction) -> list[int]:
        known = self.module.by_name
        return [known[name].bytes if name in known else 0 for name in instruction.operands]

    @staticmethod
    def _sol(instruction: Instruction) -> float:
        match = _SOL.search(instruction.text)
        return float(match[1]) if match else 0.0


def _users(computation: Iterable[Instruction], name: str) -> Iterator[Instruction]:
    """Yields the instructions that read a value, directly or reshaped."""
    for one in computation:
        if name in one.operands and one.opcode in ("bitcast", "reshape"):
            yield from _users(computation, one.name)
        elif name in one.operands:
            yield one
