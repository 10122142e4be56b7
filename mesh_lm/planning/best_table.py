"""The result of a search for a layout in words: a row for each layout that was compiled."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from mesh_lm.config.typed import TypedRun
from mesh_lm.planning.best import TIE, Fields, Found, Trial, options
from sharding_rules.lab import Report
from sharding_rules.lab.summary import durations, exposed_by_axes, percent

GIB = 2**30
_SMALL = 0.01
"""Share of the step from which on a cost is named."""


def found_table(found: Found) -> RenderableType:
    """Returns the table, and what follows from it."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for header, justify in (("", "right"), ("step", "left"), ("peak, GiB", "right")):
        table.add_column(header, justify=justify, no_wrap=True)  # pyright: ignore
    table.add_column("layout", overflow="fold")
    table.add_column("what the step pays for", overflow="fold")
    if found.committed:
        _add(table, "0", found.committed, "the config as it is")
    best = found.best
    for i, trial in enumerate(found.trials, start=1):
        _add(table, _mark(i, trial, best), trial, layout_words(trial.changes))
    return Group(table, "", *(Text(line) for line in _conclusion(found)))


def _add(table: Table, mark: str, trial: Trial, layout: str) -> None:
    report = trial.report
    band = report.step_band
    step = durations(band) if band else "?"
    peak = f"{report.peak_bytes / GIB:.1f}"
    style = None
    if not report.fits:
        peak += " does not fit"
        style = "dim"
    table.add_row(mark, step, peak, layout, ", ".join(payments(report)), style=style)


def _mark(number: int, trial: Trial, best: Trial | None) -> str:
    """Returns the number of a row, with = if it is as fast as the best for all that is known."""
    is_tie = best is not None and trial is not best and trial.report.fits
    is_tie = is_tie and best is not None and trial.seconds <= (1 + TIE) * best.seconds
    return f"= {number}" if is_tie else str(number)


def layout_words(fields: Fields) -> str:
    """Returns the fields that a layout changes, without their sections: rules=zero3 data=8."""
    words = (option.removeprefix("--").rpartition("=") for option in options(fields))
    return " ".join(f"{name.rpartition('.')[2]}={value}" for name, _, value in words)


def payments(report: Report) -> Iterator[str]:
    """Yields what a step takes besides the model's own matmuls and attention, as shares of it:
    recompute 21 %, idle stages 5 %, other kernels 17 %, waits for data 3 %.
    """
    line = report.timeline
    if line is None or not line.step:
        return
    multiplying = line.kinds.get("matmul", 0.0) + line.kinds.get("attention", 0.0)
    flops = sum(line.flops.values())
    mean_flops = sum(report.flops.values())
    if flops and mean_flops:
        # The timeline is that of the slowest stage in each tick, the FLOPs are of the mean stage.
        busy = min(1.0, mean_flops / flops)
        # A fused backward pass of attention has five matmuls, and the model's FLOPs count four.
        needed = report.model_flops + report.attention_flops / 6
        shares = {
            "recompute": max(0.0, 1 - needed / mean_flops) * busy,
            "idle stages": 1 - busy,
        }
        for name, share in shares.items():
            if share * multiplying > _SMALL * line.step:
                yield f"{name} {percent(share * multiplying, line.step)}"
    others = line.kinds.get("elementwise", 0.0) + line.kinds.get("copy", 0.0)
    if others > _SMALL * line.step:
        yield f"other kernels {percent(others, line.step)}"
    for axes, us in exposed_by_axes(report).items():
        if us > _SMALL * line.step:
            yield f"waits for {axes} {percent(us, line.step)}"


def _at_slow_end(best: Trial, committed: Trial) -> str:
    """Returns words for a best that is slower than the config at the sustained rates."""
    band = best.report.step_band
    other = committed.report.step_band
    if not band or not other or band.slow <= other.slow:
        return ""
    change = band.slow / other.slow - 1
    return f"; but {change:+.1%} at the slow ends of the bands, so measure both"


def command_of(found: Found, typed: TypedRun) -> str:
    """Returns the command that trains a run with the best layout; empty if none is faster than the
    config as it is.
    """
    best = found.best
    if best is None or best is found.committed:
        return ""
    fields = typed.fields_to_type(best.fields, best.changes)
    return typed.train_command(dict(zip(fields, options(fields), strict=True)))


def _conclusion(found: Found) -> Iterator[str]:
    n_compiled = len(found.trials) + bool(found.committed)
    if found.no_formulas:
        yield f"no layout was priced on paper: {found.no_formulas}"
        priced = ""
    else:
        priced = f"{found.considered:,} layouts priced on paper, "
    yield f"{priced}{n_compiled} compiled: the best of these, not the best there is"
    best = found.best
    committed = found.committed
    if committed and not found.committed_agrees:
        yield "row 0 does not have what --keep and --max-tensor ask for, and is no candidate"
    if not found.trials:
        yield "no other layout was compiled"
        return
    if best is None:
        yield "none of them fits"
        return
    if any(_mark(0, trial, best) == "= 0" for trial in found.trials):
        yield f"=: within {TIE:.0%} of the best, which no prediction tells apart"
    fits = committed is not None and committed.report.fits
    if committed and fits and committed.seconds <= best.seconds and found.committed_agrees:
        yield "no layout is faster than the config as it is"
        return
    if committed and fits:
        ratio = best.seconds / committed.seconds
        change = f"{ratio - 1:+.1%}"
        tie = ", a tie" if 1 - TIE < ratio <= 1 + TIE else ""
        slow_end = _at_slow_end(best, committed) if ratio < 1 else ""
        yield f"step of the best, against the config as it is: {change}{tie}{slow_end}"
