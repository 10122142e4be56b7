"""What a loop of a compiled program must not do with a model's weights, as queries for tests: each
returns the instructions that break it.

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
_MOVES = {
    "bitcast", "reshape", "copy", "transpose", "get-tuple-element", "dynamic-slice", "slice",
    "opt-barrier", "all-gather",
    "all-gather-start", "all-gather-done",
}  # fmt: skip
_VIEWS = {"bitcast", "reshape", "get-tuple-element", "tuple"}
_REPACKED = ("all-gather", "reduce-scatter")


def slices_of_layers(module: Module, weights: Shapes) -> list[str]:
    """Returns the dynamic slices in loops that take several layers' rows of a stacked weight at
    once.
    """
    return [
        (
            f"{one.name} takes {one.arrays[0].dims[0]} layers of {name}: {one.arrays[0]}, "
            f"{_where(module, one)}"
        )
        for one in _looped(module)
        if one.opcode == "dynamic-slice"
        and one.arrays[0].dims[:1] > (1,)
        and (name := _named(one.arrays[0].dims[1:], weights))
    ]


def casts_of_weights(module: Module, weights: Shapes) -> list[str]:
    """Returns the conversions in loops of a layer's whole weight, or of several, to another type.
    Those of gradients are none.
    """
    return [
        f"{one.name} casts {name} to {one.arrays[0]}, {_where(module, one)}"
        for one in _looped(module)
        if one.opcode == "convert"
        and (name := _named(one.arrays[0].dims, weights) or _named(one.arrays[0].dims[1:], weights))
        and _unchanging(module, one.operands[0])
    ]


def transposes_around(module: Module, names: Collection[str] | None = None) -> list[str]:
    """Returns the gathers and scatters in loops whose operand or result is transposed, with the
    instruction that does.

    names: only these collectives, `[one.name for one in report.select(axis="tensor",
    part="layers")]`; None: all of them.
    """
    found = []
    for one in _looped(module, fused=False):
        inside = started(module, one)
        kinds = [each.opcode.removesuffix("-start") for each in inside]
        known = names is None or bool({one.name, *(each.name for each in inside)} & set(names))
        if not known or not any(kind in _REPACKED for kind in kinds):
            continue
        for other, way in (
            *((o, "before") for o in _before(module, one)),
            *((o, "after") for o in _after(module, one)),
        ):
            if _transposes(module, other):
                found.append(
                    f"{other.name} transposes {other.arrays[0]} {way} {one.name} ({kinds[0]}), "
                    f"{_where(module, other)}"
                )
    return found


def adds_to_gradients(module: Module, weights: Shapes) -> list[str]:
    """Returns what differs from one addition in place for each weight in each loop body that adds
    gradients of layers.

    An addition in place is a fusion that reads one row of a stacked fp32 gradient, adds, and writes
    that row. Rows of one shape are distinguished by their number alone. A stage of one layer has no
    rows to address, and is not for this query.
    """
    wanted = Counter(_key(shape) for shape in weights.values())
    names = {
        key: "+".join(name for name, shape in weights.items() if _key(shape) == key)
        for key in wanted
    }
    found, adding = [], 0
    for one in _looped(module):
        if (
            one.opcode == "add"
            and one.arrays[0].dims[:1] > (1,)
            and (name := _named(one.arrays[0].dims[1:], weights))
        ):
            found.append(
                f"{one.name} adds {one.arrays[0].dims[0]} layers of {name} at once, "
                f"{_where(module, one)}"
            )
    for body in dict.fromkeys(one.body for one in module.by_name.values() if one.opcode == "while"):
        added = Counter[tuple[int, ...]]()
        for one in _own_lines(module, body):
            if one.opcode != "dynamic-update-slice" or one.arrays[0].dtype != "f32":
                continue
            row, name = module.by_name[one.operands[1]], _named(one.arrays[0].dims[1:], weights)
            if not name or row.arrays[0].dims[:1] == one.arrays[0].dims[:1]:
                continue
            if row.arrays[0].dims[:1] > (1,):
                found.append(
                    f"{one.name} writes {row.arrays[0].dims[0]} layers of {name} at once, "
                    f"{_where(module, one)}"
                )
            elif _added_in_place(module, one):
                added[_key(weights[name])] += 1
            else:
                found.append(
                    f"{one.name} writes a row of {name} that another kernel has added, "
                    f"{_where(module, one)}"
                )
        adding += bool(added)
        for key, n in wanted.items() if added else ():
            if added[key] != n:
                found.append(f"{added[key]} additions in place to {names[key]} in {body}, not {n}")
    return (
        found
        if adding
        else [*found, f"no loop adds in place to the gradients of {', '.join(weights)}"]
    )


def _looped(module: Module, *, fused: bool = True) -> Iterator[Instruction]:
    """Yields the instructions in loops, each once, with those inside fusions."""
    seen = set()
    for visit in module.visits():
        if visit.loops and visit.computation not in seen and (fused or not visit.fused):
            seen.add(visit.computation)
            yield from module.computations.get(visit.computation, ())


def _own_lines(module: Module, computation: str) -> Iterator[Instruction]:
    """Yields the instructions of a computation with those of what it calls, but not of loops in
    it.
    """
    for one in module.computations.get(computation, ()):
        yield one
        for called in (*one.called, *one.branches):
            yield from _own_lines(module, called)


def _key(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(n for n in shape if n != 1)


def _named(dims: Sequence[int], weights: Shapes) -> str:
    """The first weight that has these dimensions, or them regrouped; empty where none has."""
    own = {*accumulate(_key(dims), mul)}
    for name, shape in weights.items():
        other = {*accumulate(_key(shape), mul)}
        if (
            math.prod(dims) == math.prod(shape)
            and (own <= other or other <= own)
            and (len(own) > 1 or len(other) == 1)
        ):
            return name
    return ""


def _unchanging(module: Module, name: str) -> bool:
    """Whether a value is part of one that enters the loop and stays as it is, as weights do and
    gradients do not.
    """
    one = module.by_name[name]
    while one.opcode in _MOVES or one.opcode == "parameter":
        if one.opcode == "parameter":
            caller = module.callers.get(module.home[one.name])
            if caller is None or caller.opcode not in CALLS:
                return caller is None  # the program's own argument
            one = module.by_name[caller.operands[int(one.arguments)]]
            continue
        source = module.by_name[one.operands[0]]
        caller = module.callers.get(module.home[one.name])
        if (
            one.opcode == "get-tuple-element"
            and source.opcode == "parameter"
            and caller
            and caller.opcode == "while"
        ):
            return _passed_on(module, one)
        one = source
    return False


def _passed_on(module: Module, element: Instruction) -> bool:
    """Whether a loop's body returns this element of what it carries unchanged."""
    match = re.search(r"index=(\d+)", element.text)
    root = module.computations[module.home[element.name]][-1]
    if not match or root.opcode != "tuple":
        return False
    last = module.by_name[root.operands[int(match[1])]]
    return last.name == element.name or (
        last.operands == element.operands and f"index={match[1]}" in last.text
    )


def _before(module: Module, one: Instruction) -> Iterator[Instruction]:
    """Yields what makes an instruction's operands, seen through reshapes."""
    for name in one.operands:
        other = module.by_name[name]
        if other.opcode in _VIEWS:
            yield from _before(module, other)
        else:
            yield other


def _after(module: Module, one: Instruction) -> Iterator[Instruction]:
    """Yields what reads an instruction's result, seen through its done and reshapes."""
    for other in module.computations[module.home[one.name]]:
        if one.name in other.operands:
            if other.opcode in _VIEWS - {"tuple"} or other.opcode.endswith(("-done", "-update")):
                yield from _after(module, other)
            else:
                yield other


def _transposes(module: Module, one: Instruction) -> bool:
    """Whether an instruction, or any in a fusion, moves elements to another order; moving
    dimensions of 1 does not.
    """
    if one.opcode == "transpose":
        order = [
            int(n)
            for n in re.findall(
                r"\d+", (re.search(r"dimensions=\{([\d,]*)\}", one.text) or ["", ""])[1]
            )
        ]
        dims = module.by_name[one.operands[0]].arrays[0].dims
        kept = [n for n in order if dims[n] != 1]
        return kept != sorted(kept)
    if one.opcode in ("copy", "copy-start"):
        layouts = [
            re.findall(r"\{([\d,]+)", shape)[:1]
            for shape in (one.shape, module.by_name[one.operands[0]].shape)
        ]
        return layouts[0] != layouts[1]
    if one.opcode not in FUSIONS:
        return False
    return any(
        _transposes(module, line)
        for name in one.called
        for line in module.computations.get(name, ())
    )


def _added_in_place(module: Module, update: Instruction) -> bool:
    """Whether the row that an update writes is the same array's row with something added, in the
    same kernel.
    """
    todo, array = [update.operands[1]], _source(module, update.operands[0])
    for name in todo:
        one = module.by_name[name]
        if one.opcode == "add":
            rows = (module.by_name[_source(module, operand)] for operand in one.operands)
            if any(
                row.opcode == "dynamic-slice" and _source(module, row.operands[0]) == array
                for row in rows
            ):
                return True
        todo += [
            each
            for each in one.operands
            if each not in todo and module.home[each] == module.home[update.name]
        ]
    return False


def _source(module: Module, name: str) -> str:
    one = module.by_name[name]
    while one.opcode in ("bitcast", "reshape"):
        one = module.by_name[one.operands[0]]
    return one.name


def _where(module: Module, one: Instruction) -> str:
    source = next((line for line in module.stack(one) if "/site-packages/" not in line), "")
    return one.op_name or source or f"in {module.home[one.name]}"
