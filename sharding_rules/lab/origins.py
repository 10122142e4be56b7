"""Where the collectives of a program come from, and their arrays.

A collective is its author's or is inserted by XLA's partitioner; an array is made of arguments.
"""

from __future__ import annotations

import dataclasses
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence

from sharding_rules.lab.hlo import FUSIONS, Instruction, Module
from sharding_rules.lab.lineage import Lineage
from sharding_rules.lab.provenance import COLLECTIVES, alternatives
from sharding_rules.lab.report import Argument, Collective

_PRIMITIVES = re.compile(
    r"psum\w*|p(min|max|mean|permute|broadcast|gather)|all_(gather|reduce|to_all)\w*"
    r"|reduce_scatter|psum_scatter|ragged_all_to_all"
)
"""The last word of an op_name where the collective is one of JAX's own, which somebody called.

The partitioner's have another's name.
"""
_NEVER_INSERTED = ("ragged-all-to-all", "collective-broadcast")
"""Kinds that the partitioner does not insert."""
_MOST_INSTRUCTIONS = 40
"""Instructions to look at for the next matmul before giving up."""
_LARGE = 2**20
"""Bytes: of a smaller argument it is not worth knowing how much of it is used."""


def with_origins(
    module: Module, arguments: Sequence[Argument], sent: Sequence[Collective]
) -> tuple[Collective, ...]:
    """Returns the collectives with `by_hand`, `made_of` and `beside` filled in."""
    graph = _Graph(module, arguments)
    return tuple(graph.with_origins(collective) for collective in sent)


class _Graph:
    """The values of a program, from those that make them to those that use them."""

    def __init__(self, module: Module, arguments: Sequence[Argument]) -> None:
        self._module = module
        self._lineage = Lineage(module, [argument.name for argument in arguments])
        self._params = {argument.name for argument in arguments if argument.kind == "params"}
        self._users: dict[str, list[Instruction]] = defaultdict(list)
        for one in module.by_name.values():
            for operand in one.operands:
                self._users[operand].append(one)

    def with_origins(self, collective: Collective) -> Collective:
        start = self._module.by_name.get(collective.name)
        if start is None:
            return collective
        weight_names = []
        for operand in start.operands:
            weight_names.append(" ".join(sorted(self._lineage.weights(operand) or ())))
        beside = [
            *self._matmul_params(start, self._producers),
            *self._matmul_params(start, self._consumers),
        ]
        return dataclasses.replace(
            collective,
            by_hand=collective.kind in _NEVER_INSERTED or self._is_called(start),
            made_of=tuple(weight_names),
            beside=tuple(dict.fromkeys(beside)),
        )

    def _is_called(self, start: Instruction) -> bool:
        """Whether the program's author called the collective."""
        op_name = start.op_name
        if not op_name and start.opcode == "async-start":
            # The name may be left on the collective in the asynchronous wrapper.
            for line in self._called(start):
                if line.opcode in COLLECTIVES:
                    op_name = line.op_name
                    break
        if op_name:
            return all(map(_is_primitive, alternatives(op_name)))

        # Where XLA has joined several in one, their names are left on what takes the results apart.
        users = [start]
        paths: list[str] = []
        for one in users:  # grows while it is read
            if len(users) >= _MOST_INSTRUCTIONS:
                break
            for user in self._users[one.name]:
                if user.op_name:
                    paths += alternatives(user.op_name)
                else:
                    users.append(user)
        return any(map(_is_primitive, paths))

    def _matmul_params(
        self, start: Instruction, step: Callable[[Instruction], Iterable[Instruction]]
    ) -> Iterator[str]:
        """Yields the parameters that the nearest matmuls in one direction multiply with."""
        visited = {start.name}
        frontier = [start]
        while frontier and len(visited) < _MOST_INSTRUCTIONS:
            neighbours = [neighbour for one in frontier for neighbour in step(one)]
            frontier = []
            for one in neighbours:
                if one.name in visited:
                    continue
                visited.add(one.name)
                if not self._module.flops(one) or one.opcode in ("while", "conditional"):
                    frontier.append(one)
                    continue
                names: list[str] = []
                for operand in one.operands:
                    names += self._lineage.weights(operand) or ()
                yield from sorted(name for name in names if name in self._params)

    def _producers(self, one: Instruction) -> Iterable[Instruction]:
        instructions = self._module.by_name
        return [instructions[name] for name in one.operands if name in instructions]

    def _consumers(self, one: Instruction) -> Iterable[Instruction]:
        return self._users[one.name]

    def _called(self, one: Instruction) -> Iterator[Instruction]:
        for name in one.called:
            yield from self._module.computations.get(name, ())


def _is_primitive(path: str) -> bool:
    """Whether a path of scopes ends in a collective of JAX."""
    return bool(_PRIMITIVES.fullmatch(path.rpartition("/")[2]))


def used_in_part(module: Module, arguments: Sequence[Argument]) -> tuple[Argument, ...]:
    """Returns the arguments with `used_ways` filled in.

    It is more than 1 for arguments that every device holds whole, and takes only its own slice of.
    """
    inputs = {
        one.op_name: one for one in module.computations[module.entry] if one.opcode == "parameter"
    }
    result = []
    for argument in arguments:
        parameter = inputs.get(argument.name)
        used_ways = 1
        if parameter and not argument.axes and argument.bytes >= _LARGE:
            used_ways = _used_ways(module, parameter)
        result.append(dataclasses.replace(argument, used_ways=used_ways))
    return tuple(result)


def _used_ways(module: Module, parameter: Instruction) -> int:
    """Returns the bytes of an argument / those of the largest slice of it that is used.

    1 where a use takes all of it, or does not depend on the device.
    """
    sizes: list[int] = []
    for use in module.computations[module.entry]:
        if parameter.name in use.operands:
            sizes += _slice_sizes(module, use, parameter.name)
    return parameter.bytes // max(sizes) if sizes and all(sizes) else 1


def _slice_sizes(module: Module, use: Instruction, name: str) -> list[int]:
    """Returns the bytes of the slices that an instruction takes of an operand.

    Only slices by the device's number count; 0 stands for another use.
    """
    operands = [module.by_name[operand] for operand in use.operands if operand in module.by_name]
    if not any(operand.opcode == "partition-id" for operand in operands):
        return [0]
    if use.opcode == "dynamic-slice":
        return [use.bytes if use.operands[0] == name else 0]
    if use.opcode not in FUSIONS:
        return [0]
    lines = module.computations.get(use.called[0], ())
    parameters = set()
    for line in lines:
        if line.opcode == "parameter" and use.operands[int(line.arguments)] == name:
            parameters.add(line.name)
    sizes = []
    for line in lines:
        if parameters.isdisjoint(line.operands):
            continue
        is_slice = line.opcode == "dynamic-slice" and line.operands[0] in parameters
        sizes.append(line.bytes if is_slice else 0)
    return sizes or [0]
