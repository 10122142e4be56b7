"""How far the formulas of the planner are from compiled programs, and their constants fitted again.

The programs are those of the newest results of `best_layouts` and `random_layouts`, which were
priced before they were compiled. A fit minimises the squared logarithms of paper over compiled step
and peak, and stays close to the present constants where the programs say nothing (ridge). `--write`
puts the fitted values into mesh_lm/planning/paper/constants.py. Needs no compiler.
"""

from __future__ import annotations

import dataclasses
import re
import statistics
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from layout_pools import PROGRAMS, newest
from plan_table import TARGET
from random_layouts import random_problem
from record import ROOT, Record, Row, options
from scipy.optimize import least_squares
from scipy.stats import spearmanr

POOLS = ("best_layouts", "random_layouts")
CONSTANTS = ROOT / "mesh_lm" / "planning" / "paper" / "constants.py"
_RIDGE = 0.15
"""Weight of the distance to the present constants, in shares of their scales."""
_TIE = 0.03
_FULL = 67.0
"""GiB from which on a program on an H100 may be slow for lack of memory."""


class Pool(NamedTuple):
    """The programs of one model on one number of GPUs."""

    name: str
    sizes: Any
    layouts: Any
    steps: np.ndarray
    """Compiled steps, in seconds."""
    peaks: np.ndarray
    """Compiled peaks, in bytes."""
    paper_steps: np.ndarray
    """As priced before they were compiled."""
    paper_peaks: np.ndarray
    fits: np.ndarray
    """Whether they fit with some memory to spare: where it is short, XLA's schedule hides less, so
    that the steps of others say nothing."""


def pools() -> list[Pool]:
    """Returns the programs of the newest results, by model."""
    by_name: dict[str, list[Row]] = {}
    for benchmark in POOLS:
        for row in newest(benchmark).get(PROGRAMS, []):
            by_name.setdefault(row["config"], []).append(row)
    return [_pool(name, rows) for name, rows in by_name.items()]


def _pool(name: str, rows: Sequence[Row]) -> Pool:
    from mesh_lm.config import load
    from mesh_lm.planning.paper.layouts import Layouts
    from mesh_lm.planning.paper.sizes import ModelSizes

    is_random = "/" in name
    config = random_problem(int(name.partition("/")[2])).config() if is_random else load(name)
    columns = Layouts.names()
    return Pool(
        name,
        ModelSizes.of(config),
        Layouts.of([{column: row[column] for column in columns} for row in rows]),
        np.array([row["step_s"] or np.nan for row in rows]),
        np.array([row["peak_gib"] for row in rows]) * 2**30,
        np.array([row["paper_step_s"] for row in rows]),
        np.array([row["paper_peak_gib"] for row in rows]) * 2**30,
        np.array([row["peak_gib"] < _FULL and row["step_s"] is not None for row in rows]),
    )


# Constants as a vector.


def to_vector(constants: Any) -> np.ndarray:
    """Returns the values of all constants, one after the other."""
    values: list[float] = []
    for field in dataclasses.fields(constants):
        value = getattr(constants, field.name)
        values += value if isinstance(value, tuple) else (value,)
    return np.array(values)


def from_vector(vector: np.ndarray, like: Any) -> Any:
    """Returns constants with these values."""
    values = iter(float(value) for value in vector)
    changed = {}
    for field in dataclasses.fields(like):
        value = getattr(like, field.name)
        if isinstance(value, tuple):
            changed[field.name] = tuple(next(values) for _ in value)
        else:
            changed[field.name] = next(values)
    return dataclasses.replace(like, **changed)


def upper_bounds(like: Any) -> np.ndarray:
    """Returns the greatest value of each constant: 1 for a share, else ten times the present."""
    vector = to_vector(like)
    is_share: list[bool] = []
    for field in dataclasses.fields(like):
        value = getattr(like, field.name)
        n_values = len(value) if isinstance(value, tuple) else 1
        words = ("hidden", "window", "exposed", "share")
        is_share += [any(word in field.name for word in words)] * n_values
    return np.where(is_share, 1.0, np.maximum(10 * vector, 20.0))


# Prices and errors.


def on_paper(pool: Pool, constants: Any) -> Any:
    """Returns the formulas' prices of a pool (`mesh_lm.planning.paper.price.Price`)."""
    from mesh_lm.planning.best import hardware_of
    from mesh_lm.planning.paper.price import price

    return price(pool.sizes, pool.layouts, hardware_of(TARGET), constants)


def fitted(fit_to: Sequence[Pool], start: Any, near: Any = None) -> Any:
    """Returns the constants that predict the steps and peaks of these pools best.

    near: a fit to almost the same pools, from which a few iterations suffice.
    """
    x0 = to_vector(start)
    upper = upper_bounds(start)
    scale = np.maximum(np.abs(x0), 0.1 * upper)

    def residuals(vector: np.ndarray) -> np.ndarray:
        constants = from_vector(vector, start)
        errors: list[np.ndarray] = []
        for pool in fit_to:
            paper = on_paper(pool, constants)
            # Each model counts alike, however many of its programs were compiled.
            weight = 1 / np.sqrt(max(1, pool.fits.sum()))
            errors.append(weight * np.log(paper.seconds / pool.steps)[pool.fits])
            errors.append(weight * np.log(paper.peak / pool.peaks)[pool.fits])
        return np.concatenate([*errors, _RIDGE * (vector - x0) / scale / np.sqrt(len(x0))])

    inside = np.clip(to_vector(near or start), 1e-6 * upper, (1 - 1e-6) * upper)
    result = least_squares(
        residuals,
        inside,
        bounds=(np.zeros_like(upper), upper),
        x_scale=scale,
        max_nfev=8 if near else None,
    )
    return from_vector(result.x, start)


def errors_of(pool: Pool, steps: np.ndarray) -> np.ndarray:
    """Returns |paper / compiled - 1| of the programs that fit."""
    return np.abs(steps / pool.steps - 1)[pool.fits]


def rank_correlation(pool: Pool, steps: np.ndarray) -> float | None:
    """Returns Spearman's coefficient of paper and compiled steps, of one of each group of programs
    whose compiled steps are within 3 %; None for fewer than four of them.
    """
    kept: list[int] = []
    for i in np.argsort(pool.steps):
        is_new = not kept or pool.steps[i] > (1 + _TIE) * pool.steps[kept[-1]]
        if pool.fits[i] and is_new:
            kept.append(int(i))
    if len(kept) < 4:
        return None
    return float(spearmanr(steps[kept], pool.steps[kept]).statistic)


def main() -> int:
    parser = options(__doc__ or "")
    parser.add_argument("--write", action="store_true", help="into constants.py")
    args = parser.parse_args()
    from mesh_lm.planning.paper.constants import FITTED

    data = pools()[:2] if args.quick else pools()
    if not data:
        print("no results of best_layouts or random_layouts to fit to")
        return 1
    constants = fitted(data, FITTED)
    rows = [_row(pool, data, constants, FITTED) for pool in data]
    record = Record(f"fit_formulas{'-quick' * args.quick}", args.output)
    record.table(
        "Errors by model",
        rows,
        "predicted: before anything was compiled. fitted: with constants fitted to all models. "
        "left out: fitted to all models but this one. Errors are |paper / compiled - 1|, of "
        "programs that fit.",
    )
    record.table("Errors", _summary(data), "Programs with and without stages.")
    record.table(
        "Spearman's coefficients by model",
        _ranks(rows),
        "Of models with at least four programs whose compiled steps differ by 3 %.",
    )
    record.table("Constants", _constants_table(constants, FITTED))
    record.write()
    if args.write:
        write(constants)
    return 0


def _row(pool: Pool, data: Sequence[Pool], constants: Any, start: Any) -> Row:
    others = [other for other in data if other is not pool]
    without = on_paper(pool, fitted(others, start, near=constants)) if others else None
    left_out = errors_of(pool, without.seconds) if without else None
    now = on_paper(pool, constants)
    predicted = errors_of(pool, pool.paper_steps)
    peak = np.abs(pool.paper_peaks / pool.peaks - 1)
    return {
        "config": pool.name,
        "programs": len(pool.steps),
        "fit": int(pool.fits.sum()),
        "predicted_mean": _mean(predicted),
        "predicted_max": _max(predicted),
        "fitted_mean": _mean(errors_of(pool, now.seconds)),
        "left_out_mean": _mean(left_out),
        "left_out_max": _max(left_out),
        "spearman": rank_correlation(pool, pool.paper_steps),
        "spearman_fitted": rank_correlation(pool, now.seconds),
        "peak_mean": _mean(peak),
        "peak_max": _max(peak),
        "peak_fitted_mean": _mean(np.abs(now.peak / pool.peaks - 1)),
        "peak_left_out_mean": _mean(np.abs(without.peak / pool.peaks - 1)) if without else None,
    }


def _summary(data: Sequence[Pool]) -> list[Row]:
    summary: list[Row] = []
    for kind, has_stages in (("without stages", False), ("with stages", True)):
        steps: list[float] = []
        peaks: list[float] = []
        for pool in data:
            of_kind = (pool.layouts.pipeline > 1) == has_stages
            errors = np.abs(pool.paper_steps / pool.steps - 1)
            steps += errors[of_kind & pool.fits].tolist()
            peaks += np.abs(pool.paper_peaks / pool.peaks - 1)[of_kind].tolist()
        summary.append(
            {
                "programs": kind,
                "number": len(peaks),
                "step_mean": _mean(steps),
                "step_max": _max(steps),
                "peak_mean": _mean(peaks),
                "peak_max": _max(peaks),
            }
        )
    return summary


def _ranks(rows: Sequence[Row]) -> list[Row]:
    """Returns how far Spearman's coefficients go, as predicted and as fitted."""
    found: list[Row] = []
    for name, column in (("predicted", "spearman"), ("fitted", "spearman_fitted")):
        ranks = [row[column] for row in rows if row[column] is not None]
        if ranks:
            found.append(
                {
                    "formulas": name,
                    "models": len(ranks),
                    "least": min(ranks),
                    "median": statistics.median(ranks),
                }
            )
    return found


def _mean(errors: Any) -> float | None:
    return float(np.mean(errors)) if errors is not None and len(errors) else None


def _max(errors: Any) -> float | None:
    return float(np.max(errors)) if errors is not None and len(errors) else None


def _constants_table(constants: Any, before: Any) -> list[Row]:
    from mesh_lm.planning.paper.layouts import REMAT

    rows: list[Row] = []
    for field in dataclasses.fields(constants):
        new, old = getattr(constants, field.name), getattr(before, field.name)
        if isinstance(new, tuple):
            rows += [
                {"constant": f"{field.name}, {word}", "now": b, "fitted": a}
                for word, a, b in zip(REMAT, new, old, strict=True)
            ]
        else:
            rows.append({"constant": field.name, "now": old, "fitted": new})
    return rows


def write(constants: Any) -> None:
    """Puts the values into constants.py, with three digits."""
    text = CONSTANTS.read_text(encoding="utf-8")
    for field in dataclasses.fields(constants):
        value = getattr(constants, field.name)
        if isinstance(value, tuple):
            new = "(" + ", ".join(_digits(one) for one in value) + ")"
        else:
            new = _digits(value)
        pattern = rf"^(    {field.name}: \w+ = ).*$"
        text = re.sub(pattern, lambda match, new=new: match[1] + new, text, flags=re.MULTILINE)
    CONSTANTS.write_text(text, encoding="utf-8")


def _digits(value: float) -> str:
    return repr(float(f"{value:.3g}"))


if __name__ == "__main__":
    sys.exit(main())
