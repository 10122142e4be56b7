"""Which ticks of a pipeline's table each loop of a program runs.

One scan may run all of them, or several in a row, each with a part. An engine may divide its scan
over ticks into several, for example into ticks with only forward passes, with both, and with only
backward passes. A Slot is about all ticks, and a loop about its own trips, so each conditional
needs the window of the table that its loop runs. Loops are matched in program order: their trips
sum to the table's ticks. XLA removes a loop of one trip; what was in it counts as one tick.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import combinations
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sharding_rules.lab.hlo import Instruction, Module

_MOST_OTHER_LOOPS = 2
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
    """No loop is around the conditionals."""
    scopes: Counter[str] = dataclasses.field(default_factory=Counter)
    """Scopes of the slots, if `alone`, with the number of conditionals in each."""
    sends: bool = False
    """It sends from device to device, as a tick does."""


def windows(module: Module) -> dict[str, Window]:
    """Returns the window of each conditional that has a slot, by its name."""
    windows: dict[str, Window] = {}
    for n_ticks in {slot.trips for slot in module.slots}:
        for computation, is_looped in _computations(module, module.entry, is_looped=False):
            units = _units(module, computation, is_looped, n_ticks)
            for group in _groups(units, n_ticks):
                loops = tuple(unit.trips for unit in group)
                begin = 0
                for unit in group:
                    end = begin + unit.trips
                    window = Window(begin, end, loops, unit.alone)
                    windows.update(dict.fromkeys(unit.conditionals, window))
                    begin = end
    return windows


def _computations(module: Module, name: str, is_looped: bool) -> Iterator[tuple[str, bool]]:
    """Yields the computations that the schedule reaches.

    With each, whether what it runs directly is in a loop or a branch.
    """
    yield name, is_looped
    for one in module.computations.get(name, ()):
        if one.opcode == "while":
            yield from _computations(module, one.body, True)
        for branch in one.branches:
            yield from _computations(module, branch, True)
        if one.opcode == "call":
            for called in one.called:
                yield from _computations(module, called, is_looped)


def _units(module: Module, computation: str, is_looped: bool, n_ticks: int) -> list[_Unit]:
    """Returns the units of a computation in program order.

    They are its loops, and between them the conditionals that are in none.
    """
    units: list[_Unit] = []
    most = _most_in_a_tick(module, computation, n_ticks)
    for one in module.computations.get(computation, ()):
        if one.opcode == "while":
            slots = module.named_slots_in(one.body)
            conditionals = [name for name, slot in slots if slot.trips == n_ticks]
            units.append(_Unit(one.trips or 1, conditionals, sends=_sends(module, one)))
            continue
        if one.opcode != "conditional" or is_looped:
            continue
        slot = module.named_slot(one)
        if not slot or slot.trips != n_ticks:
            continue
        conditionals = [one.name]
        for branch in one.branches:
            conditionals += [name for name, _ in module.named_slots_in(branch)]
        # Where XLA removed the loop over ticks, its conditionals are separated by the loops over
        # layers. A scope that is there as often as in any tick begins the next one.
        previous = next((unit for unit in reversed(units) if unit.conditionals), None)
        most_here = max(most[slot.scope], 1)
        if previous and previous.alone and previous.scopes[slot.scope] < most_here:
            previous.conditionals += conditionals
            previous.scopes[slot.scope] += 1
        else:
            units.append(_Unit(1, conditionals, alone=True, scopes=Counter({slot.scope: 1})))
    return units


def _most_in_a_tick(module: Module, computation: str, n_ticks: int) -> Counter[str]:
    """Returns scope -> the most conditionals that a loop of a computation has in it.

    A slot that runs a forward pass again, for example, looks up tokens twice.
    """
    most: Counter[str] = Counter()
    for one in module.computations.get(computation, ()):
        if one.opcode == "while":
            slots = module.named_slots_in(one.body)
            most |= Counter(slot.scope for _, slot in slots if slot.trips == n_ticks)
    return most


def _sends(module: Module, loop: Instruction) -> bool:
    lines = module.computations.get(loop.body, ())
    return any(line.opcode.startswith("collective-permute") for line in lines)


def _groups(units: Sequence[_Unit], n_ticks: int) -> list[list[_Unit]]:
    """Returns the units that run one table together.

    Where no sum is `n_ticks`, each is a group of its own, and begins at the first tick.
    """
    slotted = [unit for unit in units if unit.conditionals]
    if not slotted:
        return []
    # Loops without a conditional may be ticks, too: first those that send as ticks do.
    candidates = [unit for unit in units if not unit.conditionals and unit.trips < n_ticks]
    candidates.sort(key=lambda unit: not unit.sends)
    for n in range(_MOST_OTHER_LOOPS + 1):
        for chosen_loops in combinations(candidates, n):
            chosen = [
                unit
                for unit in units
                if unit.conditionals or any(unit is other for other in chosen_loops)
            ]
            groups = _divided(chosen, n_ticks)
            if groups:
                return groups
    return [[unit] for unit in slotted]


def _divided(units: Sequence[_Unit], n_ticks: int) -> list[list[_Unit]]:
    """Returns the units in groups of neighbours, each of `n_ticks` trips; empty if impossible."""
    groups: list[list[_Unit]] = [[]]
    trips = 0
    for unit in units:
        groups[-1].append(unit)
        trips += unit.trips
        if trips > n_ticks:
            return []
        if trips == n_ticks:
            groups.append([])
            trips = 0
    incomplete = groups.pop()
    return [] if incomplete else groups
