"""Covering arrays: enough of a product of cases for CI, which leaves out the exhaustive rest."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import pytest


def pairs(
    first: Iterable[Any],
    second: Iterable[Any],
    chosen: Collection[tuple[Any, Any]] = (),
    *,
    mark: Any = pytest.mark.slow,
) -> list[Any]:
    """Every pair as parameters: the chosen ones are marked `mark`, and all others exhaustive.

    Without `chosen`, those on a diagonal, which has each value of both. Raises ValueError if a
    chosen one is not a pair.
    """
    first, second = list(first), list(second)
    every = [(a, b) for a in first for b in second]
    unknown = [pair for pair in chosen if pair not in every]
    if unknown:
        raise ValueError(f"{unknown} of {every}")
    size = min(len(first), len(second))
    diagonal = [
        (a, b) for i, a in enumerate(first) for j, b in enumerate(second) if i % size == j % size
    ]
    marked = chosen or diagonal
    return [
        pytest.param(
            *pair,
            marks=mark if pair in marked else pytest.mark.exhaustive,
            id=f"{pair[0]}-{pair[1]}",
        )
        for pair in every
    ]


def some(cases: Iterable[Any], chosen: Iterable[Any], *, mark: Any = pytest.mark.slow) -> list[Any]:
    """All cases as parameters: the chosen ones are marked `mark`, and all others exhaustive. Raises
    ValueError if one is not a case."""
    cases, chosen = list(cases), list(chosen)
    if unknown := [case for case in chosen if case not in cases]:
        raise ValueError(f"{unknown} of {cases}")
    names = ["-".join(map(str, case)) if isinstance(case, tuple) else str(case) for case in cases]
    marks = [mark if case in chosen else pytest.mark.exhaustive for case in cases]
    return [
        pytest.param(case, marks=own, id=name)
        for case, own, name in zip(cases, marks, names, strict=True)
    ]


Row = dict[str, Any]
"""A value of each factor."""
Constraint = tuple[tuple[str, ...], Callable[..., bool]]
"""(factors, whether values of them fit together)."""


def array(factors: Mapping[str, Sequence[Any]], *levels: Sequence[Constraint]) -> list[list[Row]]:
    """A covering array of strength 2: for every two factors, each pair of their values is in some
    row.

    The rows are the same in every process. They are chosen greedily: one that has an uncovered
    pair, and then as many others as a few tries find. So the first rows cover the most pairs.

    Returns:
      For each level, rows that fit its constraints and cover what the rows before do not; and last,
      rows for the pairs that fit none.
    """
    draw = random.Random(0)
    missing = _all_pairs(factors)
    return [_cover(factors, missing, constraints, draw) for constraints in (*levels, ())]


def pairs_of(row: Row) -> set[tuple[Any, ...]]:
    """The pairs (factor, value, another factor, its value) that a row covers, with the factors in
    the order of the row."""
    return {(a, row[a], b, row[b]) for a, b in itertools.combinations(row, 2)}


_TRIES = 12
"""Rows of which the one that covers the most is taken."""
_PATIENCE = 60
"""Attempts at a row with a given pair after which the pair counts as one that cannot fit."""


def _all_pairs(factors: Mapping[str, Sequence[Any]]) -> dict[tuple[Any, ...], None]:
    """All pairs of values, in an order that is the same in every process."""
    found = {}
    for a, b in itertools.combinations(factors, 2):
        found |= {(a, first, b, second): None for first in factors[a] for second in factors[b]}
    return found


def _cover(
    factors: Mapping[str, Sequence[Any]],
    missing: dict[tuple[Any, ...], None],
    constraints: Sequence[Constraint],
    draw: random.Random,
) -> list[Row]:
    """Rows for the pairs that are missing, which it removes. Those that fit in no row stay."""
    rows: list[Row] = []
    for pair in list(missing):
        if pair not in missing:
            continue
        candidates: list[Row] = []
        for attempt in range(_PATIENCE):
            # At random after a while: what covers the most may rule out, again and again, what the
            # pair needs.
            wanted = missing if attempt < _PATIENCE // 2 else {}
            candidate = _filled(factors, pair, wanted, constraints, draw)
            if candidate:
                candidates.append(candidate)
            if len(candidates) == _TRIES or (candidates and not wanted):
                break
        if not candidates:
            continue
        row = max(candidates, key=lambda candidate: len(pairs_of(candidate) & missing.keys()))
        for covered in pairs_of(row):
            missing.pop(covered, None)
        rows.append(row)
    return rows


def _filled(
    factors: Mapping[str, Sequence[Any]],
    pair: tuple[Any, ...],
    missing: Mapping[Any, None],
    constraints: Sequence[Constraint],
    draw: random.Random,
) -> Row | None:
    """A row with this pair whose other factors, in a random order, get the values that cover the
    most; None: it broke a constraint."""
    first, first_value, second, second_value = pair
    row = {first: first_value, second: second_value}
    if not _fits(row, row, constraints):
        return None
    place = {name: n for n, name in enumerate(factors)}
    others = [name for name in factors if name not in row]
    for name in draw.sample(others, len(others)):
        best: list[Any] = []
        most = -1
        for value in factors[name]:
            if not _fits(row | {name: value}, (name,), constraints):
                continue
            covered = 0
            for other, held in row.items():
                key = (
                    (name, value, other, held)
                    if place[name] < place[other]
                    else (other, held, name, value)
                )
                covered += key in missing
            if covered > most:
                best, most = [], covered
            if covered == most:
                best.append(value)
        if not best:
            return None
        row[name] = draw.choice(best)
    return {name: row[name] for name in factors}


def _fits(row: Row, changed: Collection[str], constraints: Sequence[Constraint]) -> bool:
    """Whether a row that may lack factors fits those constraints of the changed ones whose factors
    it all has."""
    for names, holds in constraints:
        if (
            row.keys() >= {*names}
            and not {*names}.isdisjoint(changed)
            and not holds(*(row[name] for name in names))
        ):
            return False
    return True
