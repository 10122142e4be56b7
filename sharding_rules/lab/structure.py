"""Rules for what a loop of a compiled program does with a model's weights, as queries for tests.

Each query returns the instructions that break a rule, in words.

`weights` are the shapes of one layer's weights on one device, by any names: {"up": (12288, 6144)}.
In the program they are stacked, with the layers of a stage, its rows, as the first dimension. XLA
regroups dimensions, so (3, 16, 128) is found as (3, 2048), too.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import accumulate
from operator import mul

from sharding_rules.lab.hlo import CALLS, FUSIONS, Instruction, Module
from sharding_rules.lab.ledger import started

Shapes = Mapping[str, Sequence[int]]

_PASSED_ON = {
    "bitcast", "reshape", "copy", "transpose", "get-tuple-element", "dynamic-slice", "slice",
    "opt-barrier", "all-gather", "all-gather-start", "all-gather-done",
}  # fmt: skip
"""Opcodes whose result is a part of their operand."""
_VIEWS = {"bitcast", "reshape", "get-tuple-element", "tuple"}
_REPACKED = ("all-gather", "reduce-scatter")
"""Collectives for which XLA may transpose an operand or a result."""


def slices_of_layers(module: Module, weights: Shapes) -> list[str]:
    """Returns the dynamic slices in loops that take several layers of a stacked weight at once."""
    violations = []
    for one in _in_loops(module):
        if one.opcode != "dynamic-slice" or not _is_stack(one):
            continue
        name = _weight(one.arrays[0].dims[1:], weights)
        if name:
            violations.append(
                f"{one.name} takes {one.arrays[0].dims[0]} layers of {name}: {one.arrays[0]}, "
                f"{_location(module, one)}"
            )
    return violations


def casts_of_weights(module: Module, weights: Shapes) -> list[str]:
    """Returns the conversions in loops of a layer's whole weight, or of several, to another type.

    Conversions of gradients are left out.
    """
    violations = []
    for one in _in_loops(module):
        if one.opcode != "convert":
            continue
        dims = one.arrays[0].dims
        name = _weight(dims, weights) or _weight(dims[1:], weights)
        if name and _is_constant(module, one.operands[0]):
            violations.append(
                f"{one.name} casts {name} to {one.arrays[0]}, {_location(module, one)}"
            )
    return violations


def transposes_around(module: Module, names: Collection[str] | None = None) -> list[str]:
    """Returns the transpositions of operands or results of gathers and scatters in loops.

    names: only these collectives, `[one.name for one in report.select(axis="tensor",
    part="layers")]`; None: all of them.
    """
    violations = []
    for one in _in_loops(module, fused=False):
        collectives = started(module, one)
        kinds = [collective.opcode.removesuffix("-start") for collective in collectives]
        if not any(kind in _REPACKED for kind in kinds):
            continue
        own_names = {one.name, *(collective.name for collective in collectives)}
        if names is not None and not own_names & set(names):
            continue
        sides = {"before": _producers(module, one), "after": _consumers(module, one)}
        for side, neighbours in sides.items():
            for neighbour in neighbours:
                if _transposes(module, neighbour):
                    violations.append(
                        f"{neighbour.name} transposes {neighbour.arrays[0]} {side} {one.name} "
                        f"({kinds[0]}), {_location(module, neighbour)}"
                    )
    return violations


def adds_to_gradients(module: Module, weights: Shapes) -> list[str]:
    """Returns what differs from one addition in place for each weight.

    Looks at each loop body that adds gradients of layers. An addition in place is a fusion
    that reads one row of a stacked fp32 gradient, adds, and writes that row. Rows of one shape are
    distinguished by their number alone. A stage of one layer has no rows to address, and is not for
    this query.
    """
    violations = []
    for one in _in_loops(module):
        if one.opcode != "add" or not _is_stack(one):
            continue
        name = _weight(one.arrays[0].dims[1:], weights)
        if name:
            violations.append(
                f"{one.name} adds {one.arrays[0].dims[0]} layers of {name} at once, "
                f"{_location(module, one)}"
            )

    # Weights of one shape are counted together.
    expected = Counter(_squeezed(shape) for shape in weights.values())
    has_additions = False
    loops = (one for one in module.by_name.values() if one.opcode == "while")
    for body in dict.fromkeys(loop.body for loop in loops):
        additions, other_writes = _row_additions(module, body, weights)
        violations += other_writes
        if not additions:
            continue
        has_additions = True
        for shape, n in expected.items():
            if additions[shape] != n:
                names = "+".join(name for name, dims in weights.items() if _squeezed(dims) == shape)
                violations.append(
                    f"{additions[shape]} additions in place to {names} in {body}, not {n}"
                )
    if not has_additions:
        violations.append(f"no loop adds in place to the gradients of {', '.join(weights)}")
    return violations


def _row_additions(
    module: Module, body: str, weights: Shapes
) -> tuple[Counter[tuple[int, ...]], list[str]]:
    """Returns the additions in place of a loop body by the weight's shape, and its other writes."""
    additions = Counter[tuple[int, ...]]()
    other_writes = []
    for one in _lines(module, body):
        if one.opcode != "dynamic-update-slice" or one.arrays[0].dtype != "f32":
            continue
        stack = one.arrays[0].dims
        rows = module.by_name[one.operands[1]].arrays[0].dims
        name = _weight(stack[1:], weights)
        if not name or rows[:1] == stack[:1]:
            continue
        if rows[:1] > (1,):
            other_writes.append(
                f"{one.name} writes {rows[0]} layers of {name} at once, {_location(module, one)}"
            )
        elif _is_addition_in_place(module, one):
            additions[_squeezed(weights[name])] += 1
        else:
            other_writes.append(
                f"{one.name} writes a row of {name} that another kernel has added, "
                f"{_location(module, one)}"
            )
    return additions, other_writes


# Loops, and their instructions.


def _in_loops(module: Module, *, fused: bool = True) -> Iterator[Instruction]:
    """Yields the instructions in loops without repetitions, with those inside fusions."""
    visited = set()
    for visit in module.visits():
        if visit.loops and visit.computation not in visited and (fused or not visit.fused):
            visited.add(visit.computation)
            yield from module.computations.get(visit.computation, ())


def _lines(module: Module, computation: str) -> Iterator[Instruction]:
    """Yields the instructions of a computation and of what it calls, but not of loops in it."""
    for one in module.computations.get(computation, ()):
        yield one
        for called in (*one.called, *one.branches):
            yield from _lines(module, called)


# Weights, and their shapes.


def _is_stack(one: Instruction) -> bool:
    """Whether the first dimension of the result has several layers."""
    return one.arrays[0].dims[:1] > (1,)


def _squeezed(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(n for n in shape if n != 1)


def _weight(dims: Sequence[int], weights: Shapes) -> str:
    """Returns the first weight with these dimensions, or them regrouped; empty if none has them."""
    # A regrouped shape has products of neighbours: its cumulative products are among the other's.
    products = {*accumulate(_squeezed(dims), mul)}
    for name, shape in weights.items():
        other = {*accumulate(_squeezed(shape), mul)}
        if math.prod(dims) != math.prod(shape) or not (products <= other or other <= products):
            continue
        # A flat array is the same as a weight only if that is a vector.
        if len(products) > 1 or len(other) == 1:
            return name
    return ""


def _is_constant(module: Module, name: str) -> bool:
    """Whether a value is part of one that enters the loop and stays as it is.

    Weights do, and gradients do not.
    """
    one = module.by_name[name]
    while one.opcode in _PASSED_ON or one.opcode == "parameter":
        caller = module.callers.get(module.home[one.name])
        if one.opcode == "parameter":
            if caller is None:
                return True  # the program's own argument
            if caller.opcode not in CALLS:
                return False
            one = module.by_name[caller.operands[int(one.arguments)]]
            continue
        source = module.by_name[one.operands[0]]
        is_element = one.opcode == "get-tuple-element" and source.opcode == "parameter"
        if is_element and caller and caller.opcode == "while":
            return _is_passed_on(module, one)
        one = source
    return False


def _is_passed_on(module: Module, element: Instruction) -> bool:
    """Whether a loop's body returns this element of its carry unchanged."""
    match = re.search(r"index=(\d+)", element.text)
    root = module.computations[module.home[element.name]][-1]
    if not match or root.opcode != "tuple":
        return False
    returned = module.by_name[root.operands[int(match[1])]]
    if returned.name == element.name:
        return True
    return returned.operands == element.operands and f"index={match[1]}" in returned.text


# Neighbours of a collective.


def _producers(module: Module, one: Instruction) -> Iterator[Instruction]:
    """Yields the instructions that make an operand, seen through reshapes."""
    for name in one.operands:
        producer = module.by_name[name]
        if producer.opcode in _VIEWS:
            yield from _producers(module, producer)
        else:
            yield producer


def _consumers(module: Module, one: Instruction) -> Iterator[Instruction]:
    """Yields the instructions that read the result, seen through its done and reshapes."""
    for consumer in module.computations[module.home[one.name]]:
        if one.name not in consumer.operands:
            continue
        is_end = consumer.opcode.endswith(("-done", "-update"))
        if is_end or consumer.opcode in _VIEWS - {"tuple"}:
            yield from _consumers(module, consumer)
        else:
            yield consumer


def _transposes(module: Module, one: Instruction) -> bool:
    """Whether an instruction, or any in a fusion, moves elements to another order.

    To move dimensions of size 1 does not.
    """
    if one.opcode == "transpose":
        match = re.search(r"dimensions=\{([\d,]*)\}", one.text)
        order = [int(n) for n in re.findall(r"\d+", match[1])] if match else []
        dims = module.by_name[one.operands[0]].arrays[0].dims
        large = [n for n in order if dims[n] != 1]
        return large != sorted(large)
    if one.opcode in ("copy", "copy-start"):
        return _layout(one) != _layout(module.by_name[one.operands[0]])
    if one.opcode not in FUSIONS:
        return False
    for name in one.called:
        if any(_transposes(module, line) for line in module.computations.get(name, ())):
            return True
    return False


def _layout(one: Instruction) -> list[str]:
    """Returns the layout of the first array; empty if the text has none."""
    return re.findall(r"\{([\d,]+)", one.shape)[:1]


# Additions.


def _is_addition_in_place(module: Module, update: Instruction) -> bool:
    """Whether the row that an update writes is the same array's row with something added.

    Both are in one kernel.
    """
    array = _unreshaped(module, update.operands[0])
    kernel = module.home[update.name]
    inputs = [update.operands[1]]
    for name in inputs:  # grows while it is read
        one = module.by_name[name]
        if one.opcode == "add":
            for operand in one.operands:
                row = _unreshaped(module, operand)
                if row.opcode == "dynamic-slice" and _unreshaped(module, row.operands[0]) == array:
                    return True
        for operand in one.operands:
            if operand not in inputs and module.home[operand] == kernel:
                inputs.append(operand)
    return False


def _unreshaped(module: Module, name: str) -> Instruction:
    one = module.by_name[name]
    while one.opcode in ("bitcast", "reshape"):
        one = module.by_name[one.operands[0]]
    return one


def _location(module: Module, one: Instruction) -> str:
    frames = (frame for frame in module.stack(one) if "/site-packages/" not in frame)
    return one.op_name or next(frames, "") or f"in {module.home[one.name]}"
