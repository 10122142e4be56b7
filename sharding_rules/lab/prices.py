"""Predicted times of single instructions and collectives of a compiled program on a GPU.

They follow from shares of the data sheet's peaks (`rates`), and from XLA's own estimates.

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
from typing import NamedTuple

from sharding_rules.lab.hlo import CALLS, Array, Instruction, Module
from sharding_rules.lab.provenance import Provenance
from sharding_rules.lab.rates import OPTIMISTIC, LinkName, Rates
from sharding_rules.lab.report import Collective
from sharding_rules.lab.targets import Target

_HOST_START = 10.0
"""Microseconds of the start of a copy to or from the host. Assumed."""

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


def collective_us(one: Collective, target: Target, rates: Rates = OPTIMISTIC) -> float:
    """Returns the microseconds of one collective alone: bytes / bandwidth plus latency.

    The bandwidth is that of its slowest link. A ring through nodes with k members in each has k
    network ports between two nodes; pairs of devices (all-to-all, permute) have one each. Only
    what leaves the node in an all-to-all passes the port, the rest passes NVLink. Latency of
    a ring is linear in the nodes; that of an all-reduce is of NCCL's double tree. A kind that a
    profile has measured over the slowest link has the bandwidth and the latency of that.
    """
    link: LinkName = "network" if one.nodes > 1 else "NVLink"
    kind = "all-to-all" if one.kind in _ALL_TO_ALL else one.kind
    measured = rates.links.get((kind, link))
    nvlink_bytes, network_bytes = link_bytes(one.kind, one.wire, one.group, one.nodes)
    latency = latency_us(one.kind, one.group, one.nodes, rates)
    nvlink_s = nvlink_bytes / (rates.nvlink.value * target.nvlink)
    network_s = network_bytes / (rates.network.value * target.network)
    if measured is None:
        return 1e6 * max(nvlink_s, network_s) + latency
    if measured.latency_us is not None:
        # The latency of another group than the measured one grows as the assumed latencies do.
        assumed = latency_us(one.kind, measured.group, measured.nodes, rates)
        latency *= measured.latency_us / assumed
    slowest_bytes = network_bytes if one.nodes > 1 else nvlink_bytes
    transfer = slowest_bytes / measured.bytes_per_s
    if measured.has_other_nvlink:
        transfer = max(transfer, nvlink_s)
    return 1e6 * transfer + latency


def link_bytes(kind: str, wire: float, group: int, nodes: int) -> tuple[float, float]:
    """Returns the bytes that a device sends over NVLink and through a network port.

    Args:
      kind: of the collective.
      wire: bytes that a device sends in a ring.
      group: devices of the group, equally many on each of its nodes.
      nodes: that the group spans.
    """
    if nodes == 1:
        return wire, 0.0
    members_per_node = max(1, group // nodes)
    if kind in _ALL_TO_ALL:
        # A device sends as much to each of the others.
        network_bytes = wire * (group - members_per_node) / (group - 1)
        return wire - network_bytes, network_bytes
    n_ports = 1 if kind in _PAIRWISE else members_per_node
    return wire, wire / n_ports


def latency_us(kind: str, group: int, nodes: int, rates: Rates) -> float:
    """Returns the assumed microseconds of a collective of no bytes, whatever was measured."""
    is_pairwise = kind in _PAIRWISE
    if kind == "all-reduce":
        network_steps = 2 * math.ceil(math.log2(nodes))
    elif is_pairwise:
        network_steps = min(nodes - 1, 1)
    else:
        network_steps = nodes - 1
    nvlink_steps = 1 if is_pairwise else max(1, group // nodes) - 1
    latency = (
        rates.start_us.value
        + rates.nvlink_step_us.value * nvlink_steps
        + rates.network_step_us.value * network_steps
    )
    if nodes > 1:
        latency += rates.between_us.value
    return latency


def host_copy_us(n_bytes: int, target: Target, rates: Rates = OPTIMISTIC) -> float:
    """Returns the microseconds of one copy between a device's memory and its host's, alone."""
    return 1e6 * n_bytes / (rates.pcie.value * target.pcie) + _HOST_START


class Kernel(NamedTuple):
    """One run of what occupies the device's own cores."""

    kind: str
    """matmul, attention, elementwise or copy."""
    us: float
    flops: int
    """FLOPs of its matmuls."""


@dataclasses.dataclass(frozen=True)
class Prices:
    """Microseconds of single instructions."""

    module: Module
    provenance: Provenance
    target: Target
    rates: Rates

    def kernel(self, instruction: Instruction, phase: str) -> Kernel:
        """Returns what an instruction does to the device's own cores."""
        flops = self.module.flops(instruction)
        shortest = self.rates.kernel_us.value
        call = self.custom(instruction)
        if call is not None:
            return self._custom(call, flops, phase)
        if flops:
            return Kernel("matmul", max(shortest, self._matmul(instruction, flops)), flops)
        is_copy = instruction.opcode.startswith("copy") or "transpose" in instruction.name
        us = self._sol(instruction) / self._memory_share(instruction) or self._memory(instruction)
        return Kernel("copy" if is_copy else "elementwise", max(shortest, us), 0)

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

    def _custom(self, call: Instruction, flops: int, phase: str) -> Kernel:
        """Returns a kernel that is a custom call.

        One of ours says its FLOPs and, perhaps, bytes and name. Any other is fused attention.
        """
        attributes = call.attributes
        name = attributes.get("kernel", "") if "kernel_flops" in attributes else "attention"
        extra_us = 0.0
        if "attention" in name:
            share = self._attention_share(call, name, phase)
        elif "grouped" in name:
            share = self.rates.grouped.value
            extra_us = self._groups(call) * self.rates.group_us.value
        else:
            share = self.rates.matmul.value
        share *= float(attributes.get("kernel_occupancy", 1))
        kernel_bytes = attributes.get("kernel_bytes", "")
        if kernel_bytes.isdecimal():
            memory = self._moving(int(kernel_bytes), "bf16")
        else:
            memory = self._memory(call)
        us = max(memory, 1e6 * flops / (share * self._peak(call))) + extra_us
        us = max(self.rates.kernel_us.value, us)
        return Kernel("attention" if "attention" in name else "matmul", us, flops)

    def _attention_share(self, call: Instruction, name: str, phase: str) -> float:
        # Of [batch, sequence, heads, head_dim] and of [batch, heads, sequence, head_dim] the longer
        # of the middle two is the sequence's, save for a few tokens.
        dims = [array.dims for array in self._operand_arrays(call) if len(array.dims) == 4]
        head_dim = dims[0][-1] if dims else 0
        n_keys = max(max(d[1:3]) for d in dims) if dims else 0
        return self.rates.attention_share(
            head_dim,
            n_keys,
            backward=phase == "backward",
            deterministic=name.endswith(("_dq", "_dkv")),
        )

    def _groups(self, call: Instruction) -> int:
        """Returns the groups of a grouped matmul, the first dimension of its matrices."""
        stacks = [a.dims[0] for a in self._operand_arrays(call) if len(a.dims) == 3]
        stacks += [a.dims[0] for a in call.arrays if len(a.dims) == 3]
        return max(stacks, default=0)

    def _operand_arrays(self, instruction: Instruction) -> list[Array]:
        by_name = self.module.by_name
        operands = [by_name[name] for name in instruction.operands if name in by_name]
        return [array for operand in operands for array in operand.arrays]

    def _matmul(self, instruction: Instruction, flops: int) -> float:
        rates = self.rates
        roofline = max(
            1e6 * flops / (rates.matmul.value * self._peak(instruction)), self._memory(instruction)
        )
        sol = self._sol(instruction) / rates.matmul_table.value
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
        dtype = self._moved_dtype(instruction)
        lines = list(self._called(instruction))
        if not lines:
            moved_bytes = instruction.bytes + sum(self._operand_bytes(instruction))
            return self._moving(moved_bytes, dtype)
        updates = [line for line in lines if line.opcode == "dynamic-update-slice"]
        n_bytes = sum(self._operand_bytes(update)[1] for update in updates) or lines[-1].bytes
        for parameter in lines:
            if parameter.opcode == "parameter":
                users = _users(lines, parameter.name)
                n_read = sum(self._bytes_read(parameter, user) for user in users)
                n_bytes += min(parameter.bytes, n_read)
        return self._moving(n_bytes, dtype)

    def _moved_dtype(self, instruction: Instruction) -> str:
        """Returns f32 if the largest array that a kernel reads or writes is f32, else bf16."""
        arrays = [*instruction.arrays, *self._operand_arrays(instruction)]
        largest = max(arrays, key=lambda array: array.bytes, default=None)
        return "f32" if largest is not None and largest.dtype == "f32" else "bf16"

    def _memory_share(self, instruction: Instruction) -> float:
        return self.rates.memory[self._moved_dtype(instruction)].value

    def _bytes_read(self, parameter: Instruction, user: Instruction) -> int:
        if user.opcode in ("dynamic-slice", "slice", "gather"):
            return user.bytes
        is_update = user.opcode == "dynamic-update-slice"
        if is_update and parameter.bytes > self._operand_bytes(user)[1]:
            return 0  # updated in place
        return parameter.bytes

    def _moving(self, n_bytes: int, dtype: str) -> float:
        return 1e6 * n_bytes / (self.rates.memory[dtype].value * self.target.hbm_bandwidth)

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
