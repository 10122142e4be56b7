"""The copies of a compiled program between a device's memory and its host's.

XLA copies either an array (`copy-start`) or a slice of a stack, which a fusion reads from the host
or writes to it (`fusion-start` of a dynamic-slice or a dynamic-update-slice).
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from sharding_rules.lab.hlo import CALLS, FUSIONS, Array, Instruction, Module
from sharding_rules.lab.prices import host_copy_us
from sharding_rules.lab.provenance import Provenance
from sharding_rules.lab.report import HostCopy
from sharding_rules.lab.targets import Target

Direction = Literal["to host", "from host", "within host"]


class Transfer(NamedTuple):
    """What one instruction copies."""

    direction: Direction
    array: Array


def host_copies(
    module: Module, provenance: Provenance, target: Target | None
) -> tuple[HostCopy, ...]:
    """Returns the copies that touch the host's memory, in the order of the program.

    target: the GPU, whose link to the host prices them; None: they are not priced.
    """
    if not module.uses_host:
        return ()
    found = []
    for visit in module.visits():
        if visit.fused:
            continue
        for one in module.computations.get(visit.computation, ()):
            # What a call or an asynchronous wrapper runs is visited itself.
            if one.opcode in CALLS and one.opcode not in FUSIONS:
                continue
            copy = transfer(module, one)
            if copy is None:
                continue
            found.append(
                HostCopy(
                    name=one.name,
                    direction=copy.direction,
                    shape=str(copy.array),
                    bytes=copy.array.bytes,
                    loops=visit.loops,
                    where=provenance.of(one),
                    duration=host_copy_us(copy.array.bytes, target) if target else 0.0,
                )
            )
    return tuple(found)


def transfer(module: Module, instruction: Instruction) -> Transfer | None:
    """Returns what an instruction copies to, from or within the host's memory; None: nothing."""
    if instruction.opcode in CALLS:
        for name in instruction.called:
            for line in module.computations.get(name, ()):
                copy = transfer(module, line)
                if copy is not None:
                    return copy
        return None
    if instruction.opcode in ("copy", "copy-start", "dynamic-slice"):
        source = _operand(module, instruction, 0)
        result = instruction.arrays[0]
        return _between(source, result, result)
    if instruction.opcode == "dynamic-update-slice":
        update = _operand(module, instruction, 1)
        return _between(update, instruction.arrays[0], update)
    return None


def _operand(module: Module, instruction: Instruction, number: int) -> Array | None:
    operand = module.by_name.get(instruction.operands[number])
    return operand.arrays[0] if operand and operand.arrays else None


def _between(source: Array | None, result: Array, copied: Array | None) -> Transfer | None:
    if source is None or copied is None or not (source.on_host or result.on_host):
        return None
    if source.on_host and result.on_host:
        return Transfer("within host", copied)
    return Transfer("from host" if source.on_host else "to host", copied)
