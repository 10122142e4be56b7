"""Predicted times of single instructions and collectives of a compiled program on a GPU.

They follow from shares of the data sheet's peaks, and from XLA's own estimates.

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

# Shares of a data sheet's peak (`targets`), without unit. All are assumed.

MATMUL = 0.77
"""Share of the tensor cores' peak FLOP/s that large matmuls reach (cuBLAS)."""
MEMORY = 0.9
"""Share of the memory's peak bandwidth that copies reach."""
NVLINK = 0.78
"""Share of NVLink's peak bandwidth that collectives reach inside a node (NCCL's bus bandwidth)."""
NETWORK = 0.84
"""Share of the network port's peak bandwidth that collectives reach between nodes (the same)."""
ATTENTION = 0.62
"""Share of the tensor cores' peak FLOP/s that the forward of a fused attention kernel reaches.

This share and ATTENTION_BACKWARD are a little under FlashAttention-3's published 640 and 540
TFLOP/s on an H100. They are assumed of ours, too, which has never been measured: that it reaches
these shares of the FLOPs that it reports, the recomputed ones of its backward included, times the
share of the SMs that, by its own estimate, its grid keeps busy. The published figures are of grids
that fill them.
"""
ATTENTION_BACKWARD = 0.52
"""The same share for the backward of a fused attention kernel."""

# Times, in microseconds.

KERNEL = 1.5
"""The time of the shortest kernel."""

# Latency of a collective. Assumed.
_START = 8.0
_START_BETWEEN_NODES = 7.0
"""Added once to `_START` for groups that span nodes."""
_NVLINK_STEP = 1.5
_NETWORK_STEP = 6.0

FREE = {
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id",
    "replica-id", "opt-barrier", "add-dependency", "domain", "iota", "copy-start", "send", "recv",
    "infeed", "outfeed",
}  # fmt: skip
"""Opcodes that take no time."""

_ALL_TO_ALL = ("all-to-all", "ragged-all-to-all")
_PAIRWISE = (*_ALL_TO_ALL, "collective-permute")
_SOL = re.compile(r'"exec_time_us":"?([\d.eE+\-]+)"?[^}]*?"name":"sol"')
_SOL_LIMIT = 2.0
"""XLA's estimate of a matmul is not believed beyond this many times its roofline."""


def model_us(flops: float, attention: float, target: Target) -> float:
    """Returns the microseconds that a model's own FLOPs take on one device, with nothing else.

    That is: no recomputation, no bubble, no network, no memory. flops: of all its matmuls, forward
    and backward. attention: the part of them that is attention's; its backward has two thirds.
    """
    matmul = (flops - attention) / MATMUL
    forward = attention / 3 / ATTENTION
    backward = attention * 2 / 3 / ATTENTION_BACKWARD
    return 1e6 / target.flops["bf16"] * (matmul + forward + backward)


def collective_us(one: Collective, target: Target) -> float:
    """Returns the microseconds of one collective alone: bytes / bandwidth plus latency.

    The bandwidth is that of its slowest link. A ring through nodes with k members in each has k
    network ports between two nodes; pairs of devices (all-to-all, permute) have one each. Only
    what leaves the node in an all-to-all passes the port, the rest passes NVLink. Latency of
    a ring is linear in the nodes; that of an all-reduce is of NCCL's double tree.
    """
    is_pairwise = one.kind in _PAIRWISE
    members_per_node = max(1, one.group // one.nodes)

    # Bytes that a device sends, per link.
    nvlink_bytes = one.wire
    network_bytes = 0.0
    if one.kind in _ALL_TO_ALL and one.nodes > 1:
        # A device sends as much to each of the others.
        network_bytes = one.wire * (one.group - members_per_node) / (one.group - 1)
        nvlink_bytes = one.wire - network_bytes
    elif one.nodes > 1:
        n_ports = 1 if is_pairwise else members_per_node
        network_bytes = one.wire / n_ports
    transfer = max(
        nvlink_bytes / (NVLINK * target.nvlink), network_bytes / (NETWORK * target.network)
    )

    if one.kind == "all-reduce":
        network_steps = 2 * math.ceil(math.log2(one.nodes))
    elif is_pairwise:
        network_steps = min(one.nodes - 1, 1)
    else:
        network_steps = one.nodes - 1
    nvlink_steps = 1 if is_pairwise else members_per_node - 1
    latency = _START + _NVLINK_STEP * nvlink_steps + _NETWORK_STEP * network_steps
    if one.nodes > 1:
        latency += _START_BETWEEN_NODES
    return 1e6 * transfer + latency


@dataclasses.dataclass(frozen=True)
class Prices:
    """Microseconds of single instructions."""

    module: Module
    provenance: Provenance
    target: Target

    def kernel(self, instruction: Instruction, phase: str) -> tuple[str, float]:
        """Returns the kind and the microseconds of what runs on the device's own cores."""
        flops = self.module.flops(instruction)
        call = self.custom(instruction)
        if call is not None:
            return self._custom(call, flops, phase)
        if flops:
            return "matmul", max(KERNEL, self._matmul(instruction, flops))
        is_copy = instruction.opcode.startswith("copy") or "transpose" in instruction.name
        us = self._sol(instruction) / MEMORY or self._memory(instruction)
        return "copy" if is_copy else "elementwise", max(KERNEL, us)

    def custom(self, instruction: Instruction) -> Instruction | None:
        """Returns the kernel with matmuls that an instruction calls; None if it calls none.

        The kernel is the instruction itself, or is in a fusion that slices its operands.
        """
        if instruction.opcode == "custom-call":
            is_cublas = instruction.target.startswith("__cublas$")
            has_matmuls = not is_cublas and self.module.flops(instruction) > 0
            return instruction if has_matmuls else None
        if instruction.opcode not in CALLS:
            return None
        for line in self._called(instruction):
            kernel = self.custom(line)
            if kernel is not None:
                return kernel
        return None

    def _custom(self, call: Instruction, flops: int, phase: str) -> tuple[str, float]:
        """Returns the kind and the microseconds of a kernel that is a custom call.

        One of ours says its FLOPs and, perhaps, bytes and name. Any other is fused attention.
        """
        attributes = call.attributes
        is_ours = "kernel_flops" in attributes
        is_attention = not is_ours or "attention" in attributes.get("kernel", "")
        if not is_attention:
            share = MATMUL
        elif phase == "backward":
            share = ATTENTION_BACKWARD
        else:
            share = ATTENTION
        share *= float(attributes.get("kernel_occupancy", 1))
        kernel_bytes = attributes.get("kernel_bytes", "")
        if kernel_bytes.isdecimal():
            memory = self._moving(int(kernel_bytes))
        else:
            memory = self._memory(call)
        us = max(KERNEL, memory, 1e6 * flops / (share * self._peak(call)))
        return "attention" if is_attention else "matmul", us

    def _matmul(self, instruction: Instruction, flops: int) -> float:
        roofline = max(1e6 * flops / (MATMUL * self._peak(instruction)), self._memory(instruction))
        sol = self._sol(instruction)
        return sol if 0 < sol <= _SOL_LIMIT * roofline else roofline

    def _peak(self, instruction: Instruction) -> float:
        """Returns the FLOP/s of the tensor cores for the operands' type."""
        dots = (line for line in self._called(instruction) if line.opcode == "dot")
        dot = next(dots, instruction)
        operand = self.module.by_name.get(dot.operands[0])
        dtype = operand.arrays[0].dtype if operand and operand.arrays else "bf16"
        if dtype.startswith("f8"):
            dtype = "f8"
        return self.target.flops.get(dtype, self.target.flops["bf16"])

    def _memory(self, instruction: Instruction) -> float:
        """Returns the microseconds of reading the operands and writing the result once.

        An array that a fusion only slices or updates in place counts with the slice alone.
        """
        lines = list(self._called(instruction))
        if not lines:
            return self._moving(instruction.bytes + sum(self._operand_bytes(instruction)))
        updates = [line for line in lines if line.opcode == "dynamic-update-slice"]
        n_bytes = sum(self._operand_bytes(update)[1] for update in updates) or lines[-1].bytes
        for parameter in lines:
            if parameter.opcode == "parameter":
                users = _users(lines, parameter.name)
                n_read = sum(self._bytes_read(parameter, user) for user in users)
                n_bytes += min(parameter.bytes, n_read)
        return self._moving(n_bytes)

    def _bytes_read(self, parameter: Instruction, user: Instruction) -> int:
        if user.opcode in ("dynamic-slice", "slice", "gather"):
            return user.bytes
        is_update = user.opcode == "dynamic-update-slice"
        if is_update and parameter.bytes > self._operand_bytes(user)[1]:
            return 0  # updated in place
        return parameter.bytes

    def _moving(self, n_bytes: int) -> float:
        return 1e6 * n_bytes / (MEMORY * self.target.hbm_bandwidth)

    def _operand_bytes(self, instruction: Instruction) -> list[int]:
        instructions = self.module.by_name
        return [
            instructions[name].bytes if name in instructions else 0 for name in instruction.operands
        ]

    def _called(self, instruction: Instruction) -> Iterator[Instruction]:
        for name in instruction.called:
            yield from self.module.computations.get(name, ())

    @staticmethod
    def _sol(instruction: Instruction) -> float:
        match = _SOL.search(instruction.text)
        return float(match[1]) if match else 0.0


def _users(computation: Iterable[Instruction], name: str) -> Iterator[Instruction]:
    """Yields the instructions that read a value, directly or reshaped."""
    for instruction in computation:
        if name not in instruction.operands:
            continue
        if instruction.opcode in ("bitcast", "reshape"):
            yield from _users(computation, instruction.name)
        else:
            yield instruction
