"""Covering arrays: enough of a product of cases for CI, which leaves out the exhaustive rest."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def pairs(
    first: Iterable[Any], second: Iterable[Any], chosen: Collection[tuple[Any, Any]] = (), *, mark: Any = pytest.mark.slow
) -> list[Any]:
    """Every pair as parameters: the chosen ones are marked `mark`, and all others exhaustive.

    Without `chosen`, those on a diagonal, which has each value of both. Raises ValueError if a chosen one is not a pair.
    """
    first, second = list(first), list(second)
    every = [(a, b) for a in first for b in second]
    unknown = [pair for pair in chosen if pair not in every]
    if unknown:
        raise ValueError(f"{unknown} of {every}")
    size = min(len(first), len(second))
    diagonal = [(a, b) for i, a in enumerate(first) for j, b in enumerate(second) if i % size == j % size]
    marked = chosen or diagonal
    return [pytest.param(*pair, marks=mark if pair in marked else pytest.mark.exhaustive, id=f"{pair[0]}-{pair[1]}") for pair in every]


def some(cases: Iterable[Any], chosen: Iterable[Any], *, mark: Any = pytest.mark.slow) -> list[Any]:
    """All cases as parameters: the chosen ones are marked `mark`, and all others exhaustive. Raises ValueError if one is not a case."""
    cases, chosen = list(cases), list(chosen)
    if unknown := [case for case in chosen if case not in cases]:
        raise ValueError(f"{unknown} of {cases}")
    names = ["-".join(map(str, case)) if isinstance(case, tuple) else str(case) for case in cases]
    marks = [mark if case in chosen else pytest.mark.exhaustive for case in cases]
    return [pytest.param(case, marks=own, id=name) for case, own, name in zip(cases, marks, names, strict=True)]
