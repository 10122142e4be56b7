"""Which strategy to use where, and why: sentences from the rows of `strategies`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from mesh_lm.planning.studies.strategies import PURE, TIE, StrategyRow, points_of, winner


class Advice(NamedTuple):
    """Numbers of GPUs, one after the other, on which a model uses one strategy."""

    size: str
    first_gpus: int
    last_gpus: int
    strategy: str
    """Empty where nothing fits."""
    reason: str
    options: str
    """The words of a command line that set the batch and the layout on the first number of GPUs."""
    mfu: tuple[float, float] | None
    """The slow and the fast end, on the first number of GPUs."""


def advice(rows: Iterable[StrategyRow]) -> list[Advice]:
    """Returns which strategy to use for each size of model, by ranges of numbers of GPUs."""
    found: list[Advice] = []
    for (size, gpus), of_point in points_of(rows).items():
        best = winner(of_point)
        strategy = best.strategy if best else ""
        last = found[-1] if found else None
        if last and (last.size, last.strategy) == (size, strategy):
            found[-1] = last._replace(last_gpus=gpus)
            continue
        found.append(
            Advice(
                size=size,
                first_gpus=gpus,
                last_gpus=gpus,
                strategy=strategy,
                reason=reason(of_point),
                options=best.options if best else "",
                mfu=best.mfu if best else None,
            )
        )
    return found


def reason(rows: Sequence[StrategyRow]) -> str:
    """Returns why one strategy is used at a point: what is wrong with those with fewer decisions;
    or what is missing where nothing fits.
    """
    best = winner(rows)
    if best is None:
        least = min((row.peak_gib for row in rows if row.peak_gib is not None), default=None)
        if least is None:
            return "no layout divides the model and the batch"
        return f"nothing fits: the smallest layout needs {least:,.0f} GiB"
    simpler = list(rows[: rows.index(best)])
    fastest = min(rows, key=lambda row: row.seconds)
    clauses = [*_unserved(simpler), *_too_large(simpler), *_slower(simpler, fastest)]
    if clauses:
        return "; ".join(clauses)
    if fastest is best:
        return "nothing is faster"
    gain = best.seconds / fastest.seconds - 1
    return f"the fewest decisions; the fastest, {fastest.strategy}, would gain {gain:.0%}"


def _unserved(rows: Sequence[StrategyRow]) -> Iterator[str]:
    """Yields why strategies have no layout, those with the same reason together."""
    by_status: dict[str, list[str]] = {}
    for row in rows:
        has_layout = row.peak_gib is not None or row.state_gib is not None
        if not has_layout:
            by_status.setdefault(row.status, []).append(row.strategy)
    for status, names in by_status.items():
        if all(name in PURE for name in names):
            yield f"pure data parallelism: {status}"
        else:
            yield f"{_listed(names)}: {status}"


def _too_large(rows: Sequence[StrategyRow]) -> Iterator[str]:
    """Yields which strategies do not fit, and what the smallest of their layouts needs."""
    large = [row for row in rows if row.peak_gib is not None and not row.fits]
    if large:
        least = min(row.peak_gib or 0 for row in large)
        verb = "does" if len(large) == 1 else "do"
        names = _listed([row.strategy for row in large])
        yield f"{names} {verb} not fit ({least:,.0f} GiB at least)"


def _slower(rows: Sequence[StrategyRow], fastest: StrategyRow) -> Iterator[str]:
    """Yields by how much strategies are slower than the fastest, and what they wait for."""
    slow = [row for row in rows if row.fits and row.seconds > (1 + TIE) * fastest.seconds]
    if not slow:
        return
    excesses = [row.seconds / fastest.seconds - 1 for row in slow]
    verb = "takes" if len(slow) == 1 else "take"
    names = _listed([row.strategy for row in slow])
    text = f"{names} {verb} {_percents(excesses)} longer than {fastest.strategy}"
    waits = [row.waits for row in slow if row.waits is not None]
    if waits and min(waits) > TIE:
        text += f", and waits for the network are {_percents(waits)} of the step"
    yield text


def _percents(shares: Sequence[float]) -> str:
    low = f"{min(shares):.0%}"
    high = f"{max(shares):.0%}"
    return low if low == high else f"{low} to {high}"


def _listed(names: Sequence[str]) -> str:
    if len(names) == 1:
        return names[0]
    return f"{', '.join(names[:-1])} and {names[-1]}"
