"""A report on one screen of 110 columns and 48 lines.

It is as readable in 80 columns, in a file and without colours.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.segment import Segment
from rich.style import Style
from rich.table import Table
from rich.text import Text

from sharding_rules.lab.fixes import Fix
from sharding_rules.lab.lint import Finding
from sharding_rules.lab.report import SCALAR, Location, Report, location_text
from sharding_rules.lab.segments import segment_table
from sharding_rules.lab.summary import (
    GIB,
    PREDICTED,
    UPPER_BOUND,
    Row,
    Unit,
    alike,
    by_axes,
    conditionals_words,
    duration,
    durations,
    efficiency,
    exposed_words,
    flop,
    host_words,
    link,
    mesh_words,
    over,
    percent,
    rates_words,
    ratio,
    rows,
    runs,
    shapes,
    size,
    stages_words,
    verdict,
    whose,
    wire_by_axes,
)

LINES = 48
"""Lines of a screen."""
_NARROW = 100
"""Columns below which a screen is narrow."""
_SEGMENTS = 5
"""The most rows of segments."""
_BLANK_LINES = 4
"""Lines between the parts of a screen."""
_HEADERS = 2
"""Lines of the headers of the tables of buffers and of collectives."""
_FEWEST_ROWS = 3
"""Rows that each of these tables has in any case."""
_NUMBER: dict[str, Any] = {"justify": "right"}
"""A column of numbers."""


def screen(
    report: Report,
    findings: Sequence[Finding] = (),
    fixes: Sequence[Fix] = (),
    facts: Sequence[tuple[str, str]] = (),
) -> RenderableType:
    """Returns the whole report for `rich.print`.

    What does not fit on a screen of LINES is counted, not shown.

    Args:
      report: as `compile_report` returns it.
      findings: those of `lint`, the gravest first.
      fixes: what would make it fit, or make it smaller, the best first.
      facts: (label, value) that the head shows beside the mesh: ("parameters", "174.6 B").
    """
    return _Screen(report, tuple(findings), tuple(fixes), tuple(facts))


@dataclasses.dataclass(frozen=True)
class _Screen:
    report: Report
    findings: tuple[Finding, ...]
    fixes: tuple[Fix, ...]
    facts: tuple[tuple[str, str], ...]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        def n_lines(*parts: RenderableType) -> int:
            return sum(len(console.render_lines(part, options)) for part in parts)

        report = self.report
        is_narrow = options.max_width < _NARROW
        head = _head(report, self.facts)
        memory = _memory(report)
        segments = _segments(report, is_narrow)
        sums = _sums(report)
        foot = _foot(report)

        findings = _headed("findings", "no findings", [_finding(one) for one in self.findings])
        fixes = _headed("what would help", "", [_fix(one) for one in self.fixes])
        advice = [*findings, *fixes] if report.fits else [*fixes, *findings]

        # The lines that are left after the parts of a known length: up to a half for the advice,
        # the rest for the two tables that can be shortened.
        n_left = LINES - n_lines(head, memory, sums, *segments, foot) - _BLANK_LINES
        n_advice = min(n_lines(*advice), n_left // 2)
        n_rows = n_left - n_advice - _HEADERS
        collectives = rows(report, by_axes)
        n_buffers, n_collectives = _share_rows(
            n_rows, len(alike(report.memory.buffers)), len(collectives)
        )

        # In a narrow table a row may take several lines: all that the collectives leave.
        most_lines = 1 + max(n_buffers, n_rows - min(n_collectives, len(collectives)))
        buffers = _buffers(report, n_buffers, is_narrow)
        while n_lines(buffers) > most_lines and n_buffers > _FEWEST_ROWS:
            n_buffers -= 1
            buffers = _buffers(report, n_buffers, is_narrow)

        yield Group(
            head,
            "",
            memory,
            "",
            buffers,
            "",
            _collectives(collectives, n_collectives, is_narrow),
            *segments,
            sums,
            "",
        )
        yield from _cut(advice, n_lines, n_advice, report.vocabulary.page_option)
        yield foot


def _share_rows(n_rows: int, n_buffers: int, n_collectives: int) -> tuple[int, int]:
    """Returns how many rows of buffers and of collectives are shown.

    A third is for the buffers; a table has what the other does not need.
    """
    share = max(n_rows // 3, n_rows - n_collectives)
    shown_buffers = max(_FEWEST_ROWS, min(n_buffers, share))
    return shown_buffers, max(_FEWEST_ROWS, n_rows - shown_buffers)


def _cut(
    parts: Sequence[RenderableType],
    n_lines: Callable[..., int],
    most: int,
    page_option: str,
) -> RenderResult:
    """Yields the parts that fit into `most` lines, and how many more there are."""
    for i, part in enumerate(parts):
        most -= n_lines(part)
        is_last = i == len(parts) - 1
        # All parts but the last leave a line for the number of those that do not fit.
        if most < (0 if is_last else 1):
            n_more = sum(
                not isinstance(cut_part, Text) for cut_part in parts[i:]
            )  # without headings
            hint = f" on the page: {page_option}" if page_option else ""
            yield Text(f"  and {n_more} more{hint}", style="dim")
            return
        yield part


def _head(report: Report, facts: Sequence[tuple[str, str]]) -> RenderableType:
    title = Table.grid(expand=True)
    title.add_column()
    title.add_column(justify="right", style="bold green" if report.fits else "bold red")
    devices = f" on {report.n_devices:,} x {report.target.upper() or 'device'}"
    title.add_row(Text.assemble((report.name, "bold"), devices), Text(verdict(report)))
    words = [
        Text.assemble((f"{label} ", "dim"), value)
        for label, value in [("mesh", mesh_words(report)), *facts]
    ]
    return Group(title, Text("   ").join(words))


def _memory(report: Report) -> RenderableType:
    """Returns the classes of memory, with bars.

    Each class's bar begins where that before it ended, so that the last ends at the peak.
    """
    peak = report.peak_bytes
    unit = Unit.of(peak)
    limit = report.hbm or peak
    scale = max(report.hbm, peak) or 1
    table = _table(
        ("memory at the peak", {"min_width": 16}),
        (unit.name, _NUMBER),
        ("", _NUMBER),
        (f"of {report.hbm / GIB:.1f} GiB" if report.hbm else "of the peak", {"ratio": 1}),
    )
    begin = 0
    for kind, n in report.memory.by_kind.items():
        bar = Bar(begin / scale, (begin + n) / scale, limit / scale)
        _add(table, kind, unit(n), percent(n, limit), bar)
        begin += n
    bar = Bar(0, peak / scale, limit / scale)
    _add(table, "peak", unit(peak), percent(peak, limit), bar, style="bold")
    return table


@dataclasses.dataclass(frozen=True)
class Bar:
    """A bar from `begin` to `end` on a scale of 0 to 1, with a tick at `limit`."""

    begin: float
    end: float
    limit: float

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = options.max_width
        first = round(self.begin * (width - 1))
        last = first
        if self.end > self.begin:
            last = max(round(self.end * (width - 1)), first + 1)
        tick = round(self.limit * (width - 1))
        for cell in range(width):
            if first <= cell < last:
                yield Segment("█", Style(color="red" if cell >= tick else "cyan"))
            else:
                yield Segment("│" if cell == tick else " ", Style(dim=True))


def _buffers(report: Report, most: int, is_narrow: bool) -> RenderableType:
    unit = Unit.of(report.peak_bytes)
    whose_column: dict[str, Any] = {"ratio": 1}
    if is_narrow:
        # Wrapped, so that nothing of a source line is lost.
        whose_column |= {"no_wrap": False, "overflow": "fold"}
    table = _table(
        ("live at the peak", {"min_width": 16}),
        (unit.name, _NUMBER),
        ("largest", {"max_width": 20 if is_narrow else 34}),
        ("whose", whose_column),
    )
    merged = alike(report.memory.buffers)
    n_shown = len(merged) if len(merged) <= most else most - 1
    for n, buffer in merged[:n_shown]:
        shape = f"{n} x {buffer.shape}" if n > 1 else buffer.shape
        _add(table, buffer.kind, unit(n * buffer.bytes), shape, whose(buffer))
    hidden = merged[n_shown:]
    if hidden:
        n_bytes = sum(n * buffer.bytes for n, buffer in hidden)
        _add(table, f"{sum(n for n, _ in hidden)} more", unit(n_bytes), style="dim")
    return table


def _collectives(collectives: Sequence[Row], most: int, is_narrow: bool) -> RenderableType:
    unit = Unit.of(max((row.wire for row in collectives), default=0))
    payload_column = () if is_narrow else (("payload", _NUMBER),)
    table = _table(
        ("over", {}),
        ("collective", {}),
        ("times", _NUMBER),
        *payload_column,
        (f"{unit.name} sent", _NUMBER),
        ("exposed", _NUMBER),
        ("in", {"ratio": 1}),
    )
    if not collectives:
        _add(table, "none")
        return table
    n_shown = len(collectives) if len(collectives) <= most else most - 1
    previous_axes = None
    for row in collectives[:n_shown]:
        one = row.one
        is_first = one.axes != previous_axes
        previous_axes = one.axes
        _add(
            table,
            f"{over(one.axes)}, {link(row.nodes)}" if is_first else "",
            f"{one.kind} {one.dtype}",
            row.count,
            *(() if is_narrow else (unit(row.payload),)),
            unit(row.wire),
            duration(row.exposed) if row.busy else "",
            row.places or shapes(one.shapes),
        )
    hidden = collectives[n_shown:]
    if hidden:
        _add(
            table,
            f"{len(hidden)} more",
            "",
            runs(sum(row.times for row in hidden)),
            *(() if is_narrow else ("",)),
            unit(sum(row.wire for row in hidden)),
            style="dim",
        )
    return table


def _segments(report: Report, is_narrow: bool) -> tuple[RenderableType, ...]:
    """Returns the costs of the segments between blank lines; empty if there is only one segment."""
    lines = segment_table(report, most=2 if is_narrow else 3)
    if not lines:
        return ()
    header, *segments, remainder, step = lines
    table = _table((header[0], {"min_width": 10}), *((name, _NUMBER) for name in header[1:]))
    n_shown = len(segments) if len(segments) <= _SEGMENTS else _SEGMENTS - 1
    for row in segments[:n_shown]:
        _add(table, *row)
    if n_shown < len(segments):
        _add(table, f"{len(segments) - n_shown} more", style="dim")
    _add(table, *remainder)
    _add(table, *step, style="bold")
    return "", table, ""


def _sums(report: Report) -> RenderableType:
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(style="dim", no_wrap=True, min_width=10)
    table.add_column(overflow="fold")

    sent = [f"{over(axes)} {size(n)}" for axes, n in wire_by_axes(report).items() if n >= SCALAR]
    _add(table, "sent", ", ".join(sent) or "nothing")

    phases = [f"{phase or 'other'} {flop(n)}" for phase, n in report.flops.items() if n]
    matmuls = ", ".join(phases)
    if len(phases) > 1:
        matmuls += f"; {flop(sum(report.flops.values()))} in all"
    _add(table, "matmuls", matmuls + stages_words(report) or "none")

    if any(one.bounded for one in report.collectives):
        _add(table, "times", UPPER_BOUND)
    if report.conditionals:
        _add(table, "branches", f"conditionals counted: {conditionals_words(report)}")

    host = host_words(report)
    if host:
        _add(table, "host", host)

    line = report.timeline
    band = report.step_band
    if line and band:
        step = [
            f"{durations(band)} {PREDICTED}: compute {duration(line.compute)}",
            f"network {duration(line.network)}",
            f"{duration(line.exposed)} exposed ({percent(line.exposed, line.step)})",
            efficiency(report),
            ratio(report),
        ]
        _add(table, "step", ", ".join(filter(None, step)))
        rates = rates_words(report)
        if rates:
            _add(table, "rates", rates)
        waits = exposed_words(report)
        if waits:
            _add(table, "exposed", f"{waits} of the step")
    return table


def _headed(title: str, none: str, items: list[RenderableType]) -> list[RenderableType]:
    """Returns the items under a title. Without items: the text `none`, if there is one."""
    if items:
        return [Text(title, style="dim"), *items]
    return [Text(none, style="green")] if none else []


def _finding(one: Finding) -> RenderableType:
    notice = " (notice)" if one.severity == "notice" else ""
    location = f"  in {location_text(one.where)}" if one.where != Location() else ""
    text = Text.assemble(
        (f"{one.check}{notice}: ", "yellow"),
        one.text,
        (location, "dim"),
        f"  fix: {one.fix}" if one.fix else "",
    )
    return _hanging(size(one.bytes) if one.bytes else "", text)


def _fix(one: Fix) -> RenderableType:
    step = f", step x {one.cost:.2f}" if one.cost is not None else ""
    fits = "fits" if one.fits else "does not fit"
    result = f"  {size(one.report.peak_bytes)} at the peak{step}, {fits}"
    return _hanging(f"- {size(one.saves)}", Text.assemble((one.text, "bold"), result))


def _hanging(label: str, text: Text) -> RenderableType:
    table = Table.grid(padding=(0, 1, 0, 0))
    table.add_column(justify="right", min_width=10, no_wrap=True)
    table.add_column(overflow="fold")
    table.add_row(Text(label), text)
    return table


def _foot(report: Report) -> RenderableType:
    facts = [f"compiled in {report.compile_seconds:.1f} s", f"{report.instructions:,} instructions"]
    facts += [f"{name} {version}" for name, version in report.versions.items()]
    if report.warnings:
        facts.append(f"{len(report.warnings)} warnings of the partitioner")
    return Text(", ".join(facts), style="dim")


def _table(*columns: tuple[str, dict[str, Any]]) -> Table:
    """Returns an empty table. columns: the name of each, and options of `Table.add_column`."""
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, expand=True, header_style="dim")
    for name, options in columns:
        table.add_column(name, **{"no_wrap": True, "overflow": "ellipsis"} | options)
    return table


def _add(table: Table, *cells: str | Bar, style: str = "") -> None:
    """Adds a row. Text is taken as it is: f32[b] is no markup."""
    table.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in cells), style=style)
