"""Where a value of a program comes from.

It is followed through tuples, loops and copies to the instruction that computes it, and on to the
parameters.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence

from sharding_rules.lab.hlo import CALLS, Instruction, Module

# Instructions whose results consist of their operands' values, and of computations' that they call.
_MOVES = frozenset({
    *CALLS, "copy", "copy-start", "convert", "transpose", "bitcast", "bitcast-convert", "reshape",
    "broadcast", "slice", "dynamic-slice", "dynamic-update-slice", "concatenate", "pad",
    "all-gather", "all-gather-start",
    "collective-permute", "collective-permute-start",
})  # fmt: skip
# Instructions that make new values; a call with one of them inside does not only move.
_MAKES = frozenset({
    "dot", "convolution", "custom-call", "gather", "scatter", "reduce", "reduce-window", "sort",
    "rng-bit-generator",
})  # fmt: skip
_FLOAT_PREFIXES = ("f", "bf", "c")

# Bytes: a smaller operand is a position to slice at, or another scalar.
_SCALAR = 8

Index = tuple[int, ...]


class Lineage:
    """Where the values of one program come from."""

    def __init__(self, module: Module, weights: Iterable[str]) -> None:
        """weights: names (op_name) of the parameters that hold a model's weights."""
        self._module = module
        self._weight_names = frozenset(weights)
        self._loops: dict[str, Instruction] = {}
        """The loop of each body."""
        self._branch_arguments: dict[str, str] = {}
        """The argument that each branch of a conditional is called with."""
        for instructions in module.computations.values():
            for instruction in instructions:
                if instruction.opcode == "while":
                    self._loops[instruction.body] = instruction
                arguments = instruction.operands[1:]
                self._branch_arguments.update(zip(instruction.branches, arguments, strict=False))
        self._known_weights: dict[tuple[str, Index], frozenset[str] | None] = {}

    def writer(self, name: str, index: Index = ()) -> tuple[Instruction, Index]:
        """Returns the instruction that computes an element of `name`, and its index there.

        For a value that a loop carries, this is what the body writes; if the body passes it on
        unchanged, what enters the loop.
        """
        passes: Counter[tuple[str, Index]] = Counter()
        while True:
            instruction = self._module.by_name[name]
            loop = self._loop(instruction)
            # An element of a loop's carry: first what the body writes. Where the trace comes back
            # to the same element, the body has passed it on.
            if loop and index and passes[loop.name, index] < 2:
                passes[loop.name, index] += 1
                if passes[loop.name, index] == 1:
                    name = self._root(loop.body)
                else:
                    name = loop.operands[0]
                continue
            step = self._step(instruction, index)
            if step is None:
                return instruction, index
            name, index = step

    def _loop(self, instruction: Instruction) -> Instruction | None:
        """Returns the loop that an instruction is, or whose carry it is."""
        if instruction.opcode == "while":
            return instruction
        if instruction.opcode == "parameter":
            return self._loops.get(self._module.home[instruction.name])
        return None

    def _root(self, computation: str) -> str:
        return self._module.computations[computation][-1].name

    def _step(self, instruction: Instruction, index: Index) -> tuple[str, Index] | None:
        """Returns where an element was before an instruction passed it on.

        None if the instruction computes it.
        """
        operands = instruction.operands
        opcode = instruction.opcode
        if opcode == "get-tuple-element":
            match = re.search(r"index=(\d+)", instruction.text)
            return operands[0], (int(match[1]) if match else 0, *index)
        if opcode == "tuple" and index:
            return operands[index[0]], index[1:]
        if opcode == "conditional":
            return self._root(self._module.dearest(instruction)), index
        if opcode == "parameter":
            argument = self._branch_arguments.get(self._module.home[instruction.name])
            if argument:
                return argument, index
        # XLA inserts copies without a name.
        is_unnamed_copy = opcode in ("copy", "bitcast") and not instruction.op_name
        is_forwarding = (
            opcode == "optimization-barrier" or opcode.endswith("-done") or is_unnamed_copy
        )
        if operands and is_forwarding:
            return operands[0], index
        return None

    def weights(self, name: str, index: Index = ()) -> frozenset[str] | None:
        """Returns the weights that a value consists of, gathered, cast, sliced or transposed.

        A constant consists of none. Returns None where anything else goes into the value.
        """
        instruction, index = self.writer(name, index)
        key = (instruction.name, index)
        if key not in self._known_weights:
            # What a loop carries may depend on itself: until it is known, on no weights.
            self._known_weights[key] = frozenset()
            self._known_weights[key] = self._trace_weights(instruction, index)
        return self._known_weights[key]

    def _trace_weights(self, instruction: Instruction, index: Index) -> frozenset[str] | None:
        if instruction.opcode == "parameter":
            in_entry = self._module.home[instruction.name] == self._module.entry
            if in_entry and instruction.op_name in self._weight_names:
                return frozenset({instruction.op_name})
            return None
        if instruction.opcode in ("constant", "iota"):
            return frozenset()
        if instruction.opcode not in _MOVES:
            return None
        inside = self._relevant_instructions(instruction, index)
        if any(line.opcode in _MAKES for line in inside):
            return None
        weights: set[str] = set()
        is_mixed = False
        for name in self._relevant_operands(instruction, index, inside):
            operand = self._module.by_name[name]
            if operand.bytes <= _SCALAR:
                continue
            if operand.arrays[0].dtype.startswith(_FLOAT_PREFIXES):
                operand_weights = self.weights(name)
                is_mixed = is_mixed or operand_weights is None
                weights |= operand_weights or frozenset()
        return None if is_mixed else frozenset(weights)

    def _relevant_instructions(
        self, instruction: Instruction, index: Index
    ) -> Sequence[Instruction]:
        """Returns what an instruction calls that an element of its result depends on.

        That is all where it has no elements. XLA fuses what has nothing in common but its operands:
        one element may be a cast weight, and the next the result of a matmul.
        """
        inside: list[Instruction] = []
        for computation in instruction.called:
            inside += self._module.computations.get(computation, ())
        if not index or not inside or inside[-1].opcode != "tuple":
            return inside
        element = inside[-1].operands[index[0]]
        reached = [element]
        for name in reached:  # which grows meanwhile
            for operand in self._module.by_name[name].operands:
                if operand not in reached:
                    reached.append(operand)
        return [self._module.by_name[name] for name in reached]

    def _relevant_operands(
        self, instruction: Instruction, index: Index, inside: Sequence[Instruction]
    ) -> Iterable[str]:
        """Returns the operands that an element of a result depends on.

        inside: the instructions that it depends on within what the instruction calls.
        """
        operands = instruction.operands
        if instruction.opcode.startswith("all-gather") and index and len(operands) > 1:
            return (operands[index[-1]],)
        if not index or not inside:
            return operands
        return {operands[int(line.arguments)] for line in inside if line.opcode == "parameter"}
