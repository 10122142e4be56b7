"""Which ticks of a pipeline's table each loop of a program runs: one scan over all of them, or
several in a row, each with a part.

An engine may divide its scan over ticks into several, for example into ticks with only forward
passes, with both, and with only backward passes. A Slot is about all ticks, and a loop about its
own trips, so each conditional needs the window of the table that its loop runs. Loops are matched
in program order: their trips sum to the table's ticks. XLA removes a loop of one trip; what was in
it counts as one tick.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from itertools import combinations
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sharding_rules.lab.hlo import Instruction, Module

_PASSED_OVER = 2
"""The most loops without a conditional that may belong to the table, too."""


@dataclasses.dataclass(frozen=True)
class Window:
    """The ticks, from `begin` to before `end`, that the loop around a conditional runs."""

    begin: int
    end: int
    loops: tuple[int, ...]
    """Trips of all the loops that share the table; their sum is the number of ticks, or else the
    slots do not fit this program."""
    alone: bool = False
    """No loop is around it."""


@dataclasses.dataclass
class _Unit:
    """A loop, or the remains of one that XLA has removed."""

    trips: int
    conditionals: list[str]
    """Names of the conditionals with a slot in it."""
    alone: bool = False
    scopes: frozenset[str] = frozenset()
    sends: bool = False
    """It sends from device to device, as a tick does."""


def windows(module: Module) -> dict[str, Window]:
    """Returns the window of each conditional that has a slot, by its name."""
    found: dict[str, Window] = {}
    for total in {slot.trips for slot in module.slots}:
        for computation, looped in _computations(module, module.entry, looped=False):
            units = _units(module, computation, looped, total)
            for group in _groups(units, total):
                begin, trips = 0, tuple(unit.trips for unit in group)
                for unit in group:
                    window = Window(begin, begin + unit.trips, trips, unit.alone)
                    found.update(dict.fromkeys(unit.conditionals, window))
                    begin += unit.trips
    return found


def _computations(module: Module, name: str, looped: bool) -> Iterator[tuple[str, bool]]:
    """Yields the computations that the schedule reaches, and whether what they run directly is in a
    loop or a branch.
    """
    yield name, looped
    for one in module.computations.get(name, ()):
        if one.opcode == "while":
            yield from _computations(module, one.body, True)
        for branch in one.branches:
            yield from _computations(module, branch, True)
        if one.opcode == "call":
            for called in one.called:
                yield from _computations(module, called, looped)


def _units(module: Module, computation: str, looped: bool, total: int) -> list[_Unit]:
    """The loops of a computation in program order, and between them the conditionals that are in
    none.
    """
    units: list[_Unit] = []
    for one in module.computations.get(computation, ()):
        if one.opcode == "while":
            inside = [name for name, slot in module.named_slots_in(one.body) if slot.trips == total]
            units.append(_Unit(one.trips or 1, inside, sends=_sends(module, one)))
        elif (
            one.opcode == "conditional"
            and not looped
            and (slot := module.named_slot(one))
            and slot.trips == total
        ):
            inside = [
                one.name,
                *(name for branch in one.branches for name, _ in module.named_slots_in(branch)),
            ]
            # Where XLA removed the loop over ticks, its conditionals are separated by the loops
            # over layers.
            before = next((unit for unit in reversed(units) if unit.conditionals), None)
            if before and before.alone and slot.scope not in before.scopes:
                before.conditionals += inside
                before.scopes |= {slot.scope}
            else:
                units.append(_Unit(1, inside, alone=True, scopes=frozenset({slot.scope})))
    return units


def _sends(module: Module, loop: Instruction) -> bool:
    return any(
        one.opcode.startswith("collective-permute")
        for one in module.computations.get(loop.body, ())
    )


def _groups(units: Sequence[_Unit], total: int) -> list[list[_Unit]]:
    """Units that run one table together. Where no sum is `total`, each is a group of its own, and
    begins at the first tick.
    """
    slotted = [unit for unit in units if unit.conditionals]
    if not slotted:
        return []
    others = sorted(
        (unit for unit in units if not unit.conditionals and unit.trips < total),
        key=lambda unit: not unit.sends,
    )
    for n in range(_PASSED_OVER + 1):
        for more in combinations(others, n):
            chosen = [
                unit for unit in units if unit.conditionals or any(unit is each for each in more)
            ]
            if groups := _divided(chosen, total):
                return groups
    return [[unit] for unit in slotted]


def _divided(units: Sequence[_Unit], total: int) -> list[list[_Unit]]:
    """The units in groups of neighbours, each of `total` trips; empty where they do not divide
    so.
    """
    groups: list[list[_Unit]] = [[]]
    for unit in units:
        groups[-1].append(unit)
        trips = sum(each.trips for each in groups[-1])
        if trips > total:
            return []
        if trips == total:
            groups.append([])
    return [] if groups.pop() else groups
