"""Where a value of a program comes from: through tuples, loops and copies to the instruction that
computes it, and on to the parameters.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence

from sharding_rules.lab.hlo import CALLS, Instruction, Module

_MOVES = frozenset({
    *CALLS, "copy", "copy-start", "convert", "transpose", "bitcast", "bitcast-convert", "reshape",
    "broadcast", "slice", "dynamic-slice", "dynamic-update-slice", "concatenate", "pad",
    "all-gather", "all-gather-start",
    "collective-permute", "collective-permute-start",
})  # fmt: skip
_MAKES = frozenset(
    [
        "dot",
        "convolution",
        "custom-call",
        "gather",
        "scatter",
        "reduce",
        "reduce-window",
        "sort",
        "rng-bit-generator",
    ]
)
_FLOATS = ("f", "bf", "c")


class Lineage:
    """Where the values of one program come from. weights: names (op_name) of the parameters that
    hold a model's weights.
    """

    def __init__(self, module: Module, weights: Iterable[str]) -> None:
        self._module, self._names = module, frozenset(weights)
        self._loops = {
            one.body: one
            for lines in module.computations.values()
            for one in lines
            if one.opcode == "while"
        }
        everything = [one for lines in module.computations.values() for one in lines]
        self._given = {
            branch: name
            for one in everything
            for branch, name in zip(one.branches, one.operands[1:], strict=False)
        }
        """The arguments that each branch of a conditional is called with."""
        self._known: dict[tuple[str, tuple[int, ...]], frozenset[str] | None] = {}

    def writer(self, name: str, index: tuple[int, ...] = ()) -> tuple[Instruction, tuple[int, ...]]:
        """The instruction that computes an element of `name`, and which of its elements that is.

        For a value that a loop carries, this is what the body writes; if the body passes it on
        unchanged, what enters the loop.
        """
        passed: Counter[tuple[str, tuple[int, ...]]] = Counter()
        while True:
            one = self._module.by_name[name]
            loop = (
                one
                if one.opcode == "while"
                else self._loops.get(self._module.home[name])
                if one.opcode == "parameter"
                else None
            )
            if loop and index and passed[loop.name, index] < 2:
                passed[loop.name, index] += 1
                name = (
                    self._module.computations[loop.body][-1].name
                    if passed[loop.name, index] == 1
                    else loop.operands[0]
                )
            elif one.opcode == "get-tuple-element":
                match = re.search(r"index=(\d+)", one.text)
                name, index = one.operands[0], (int(match[1]) if match else 0, *index)
            elif one.opcode == "tuple" and index:
                name, index = one.operands[index[0]], index[1:]
            elif one.opcode == "conditional":
                name = self._module.computations[self._module.dearest(one)][-1].name
            elif one.opcode == "parameter" and (given := self._given.get(self._module.home[name])):
                name = given
            elif one.operands and (
                one.opcode == "optimization-barrier"
                or one.opcode.endswith("-done")
                or _unnamed_copy(one)
            ):
                name = one.operands[0]
            else:
                return one, index

    def weights(self, name: str, index: tuple[int, ...] = ()) -> frozenset[str] | None:
        """The weights that the value consists of, gathered, cast, sliced or in another layout. A
        constant consists of none.

        Returns None where anything else goes into the value.
        """
        one, index = self.writer(name, index)
        key = one.name, index
        if key not in self._known:
            self._known[key] = frozenset()  # what a loop carries may depend on itself
            self._known[key] = self._weights_of(one, index)
        return self._known[key]

    def _weights_of(self, one: Instruction, index: tuple[int, ...]) -> frozenset[str] | None:
        if one.opcode == "parameter":
            given = self._module.home[one.name] == self._module.entry and one.op_name in self._names
            return frozenset({one.op_name}) if given else None
        if one.opcode in ("constant", "iota"):
            return frozenset()
        inside = self._inside(one, index)
        if one.opcode not in _MOVES or {each.opcode for each in inside} & _MAKES:
            return None
        operands = [self._module.by_name[name] for name in self._inputs(one, index, inside)]
        # Positions to slice at and other scalars do not count.
        result = [
            self.weights(each.name)
            for each in operands
            if each.bytes > 8 and each.arrays[0].dtype.startswith(_FLOATS)
        ]
        return None if None in result else frozenset().union(*filter(None, result))

    def _inside(self, one: Instruction, index: tuple[int, ...]) -> Sequence[Instruction]:
        """The lines of what an instruction calls that an element of its result depends on; all of
        them where it has no elements.

        XLA fuses what has nothing in common but its operands: one element may be a cast weight, and
        the next the result of a matmul.
        """
        lines = [
            line for called in one.called for line in self._module.computations.get(called, ())
        ]
        if not index or not lines or lines[-1].opcode != "tuple":
            return lines
        found = [lines[-1].operands[index[0]]]
        for name in found:
            found += [each for each in self._module.by_name[name].operands if each not in found]
        return [self._module.by_name[name] for name in found]

    def _inputs(
        self, one: Instruction, index: tuple[int, ...], inside: Sequence[Instruction]
    ) -> Iterable[str]:
        """The operands that an element of what an instruction makes depends on, given the lines
        inside that it depends on.
        """
        if one.opcode.startswith("all-gather") and index and len(one.operands) > 1:
            return (one.operands[index[-1]],)
        if not index or not inside:
            return one.operands
        return {one.operands[int(line.arguments)] for line in inside if line.opcode == "parameter"}


def _unnamed_copy(one: Instruction) -> bool:
    return one.opcode in ("copy", "bitcast") and not one.op_name
