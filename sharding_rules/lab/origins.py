"""Where the arrays of a program's collectives come from: from its author or from XLA's partitioner,
and from which arguments.
"""

from __future__ import annotations

import dataclasses
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence

from sharding_rules.lab.hlo import FUSIONS, Instruction, Module
from sharding_rules.lab.lineage import Lineage
from sharding_rules.lab.provenance import COLLECTIVES, alternatives
from sharding_rules.lab.report import Argument, Collective

_PRIMITIVES = re.compile(
    r"psum\w*|p(min|max|mean|permute|broadcast|gather)|all_(gather|reduce|to_all)\w*|reduce_scatter|psum_scatter|ragged_all_to_all"
)
"""The last word of an op_name where the collective is one of JAX's own, which somebody called; the
partitioner's have another's name."""
_NEVER_MADE = ("ragged-all-to-all", "collective-broadcast")
"""Kinds that the partitioner does not insert."""
_FAR = 40
"""Instructions to look at for the next matmul before giving up."""
_LARGE = 2**20
"""Bytes: of a smaller argument it is not worth knowing how much of it is used."""


def with_origins(
    module: Module, arguments: Sequence[Argument], sent: Sequence[Collective]
) -> tuple[Collective, ...]:
    """The collectives with `by_hand`, `made_of` and `beside` filled in."""
    graph = _Graph(module, arguments)
    return tuple(dataclasses.replace(one, **graph.origins(one)) for one in sent)


def _is_call(path: str) -> bool:
    """Whether a path of scopes ends in a collective of JAX."""
    return bool(_PRIMITIVES.fullmatch(path.rpartition("/")[2]))


class _Graph:
    def __init__(self, module: Module, arguments: Sequence[Argument]) -> None:
        self._module = module
        self._lineage = Lineage(module, [a.name for a in arguments])
        self._params = {a.name for a in arguments if a.kind == "params"}
        self._users: dict[str, list[Instruction]] = defaultdict(list)
        for one in module.by_name.values():
            for operand in one.operands:
                self._users[operand].append(one)

    def origins(self, sent: Collective) -> dict[str, object]:
        start = self._module.by_name.get(sent.name)
        if start is None:
            return {}
        made_of = [self._lineage.weights(name) for name in start.operands]
        return {
            "by_hand": sent.kind in _NEVER_MADE or self._by_hand(start),
            "made_of": tuple(" ".join(sorted(names or ())) for names in made_of),
            "beside": tuple(
                dict.fromkeys(
                    [*self._next(start, self._operands), *self._next(start, self._consumers)]
                )
            ),
        }

    def _by_hand(self, start: Instruction) -> bool:
        wrapped = (
            line for name in start.called for line in self._module.computations.get(name, ())
        )
        inside = (
            next((line for line in wrapped if line.opcode in COLLECTIVES), start)
            if start.opcode == "async-start"
            else start
        )
        if own := start.op_name or inside.op_name:
            return all(map(_is_call, alternatives(own)))
        # Where XLA has joined several in one, their names are left on what takes the results apart.
        todo, names = [start], []
        for one in todo:
            for user in self._users[one.name] if len(todo) < _FAR else ():
                if user.op_name:
                    names.append(user.op_name)
                else:
                    todo.append(user)
        return any(_is_call(path) for name in names for path in alternatives(name))

    def _next(
        self, start: Instruction, step: Callable[[Instruction], Iterator[Instruction]]
    ) -> Iterator[str]:
        """Parameters that the nearest matmuls in one direction multiply with."""
        seen, todo = {start.name}, [start]
        while todo and len(seen) < _FAR:
            following: list[Instruction] = []
            for one in (near for each in todo for near in step(each)):
                if one.name in seen:
                    continue
                seen.add(one.name)
                if self._module.flops(one) and one.opcode not in ("while", "conditional"):
                    found = (self._lineage.weights(name) for name in one.operands)
                    yield from sorted(
                        name for names in found for name in names or () if name in self._params
                    )
                else:
                    following.append(one)
            todo = following

    def _operands(self, one: Instruction) -> Iterator[Instruction]:
        yield from (
            self._module.by_name[name] for name in one.operands if name in self._module.by_name
        )

    def _consumers(self, one: Instruction) -> Iterator[Instruction]:
        yield from self._users[one.name]


def used_in_part(module: Module, arguments: Sequence[Argument]) -> tuple[Argument, ...]:
    """The arguments, with `used_ways` filled in for those that every device holds whole and takes
    only its own slice of.
    """
    known = {
        one.op_name: one for one in module.computations[module.entry] if one.opcode == "parameter"
    }
    found = []
    for argument in arguments:
        given = known.get(argument.name)
        ways = (
            _used_ways(module, given)
            if given and not argument.axes and argument.bytes >= _LARGE
            else 1
        )
        found.append(dataclasses.replace(argument, used_ways=ways))
    return tuple(found)


def _used_ways(module: Module, given: Instruction) -> int:
    """The whole of an argument / the largest slice of it that is used; 1 where a use takes all of
    it, or does not depend on the device.
    """
    uses = [one for one in module.computations[module.entry] if given.name in one.operands]
    slices = [each for use in uses for each in _slices(module, use, given.name)]
    return given.bytes // max(slices) if slices and all(slices) else 1


def _slices(module: Module, use: Instruction, name: str) -> list[int]:
    """Bytes of the slices that an instruction takes of an operand by the device's number; 0 stands
    for another use.
    """
    operands = [module.by_name[each] for each in use.operands if each in module.by_name]
    if not any(one.opcode == "partition-id" for one in operands):
        return [0]
    if use.opcode == "dynamic-slice":
        return [use.bytes if use.operands[0] == name else 0]
    inside = module.computations.get(use.called[0], ()) if use.opcode in FUSIONS else ()
    own = {
        one.name
        for one in inside
        if one.opcode == "parameter" and use.operands[int(one.arguments)] == name
    }
    takers = [one for one in inside if own & {*one.operands}]
    return [
        one.bytes if one.opcode == "dynamic-slice" and one.operands[0] in own else 0
        for one in takers
    ] or [0]
