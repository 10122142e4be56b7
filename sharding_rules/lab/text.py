"""A report on one screen: 110 columns, 48 lines, and as readable in 80 columns, in a file and
without colours.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
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
    Unit,
    alike,
    by_axes,
    duration,
    efficiency,
    exposed_words,
    flop,
    link,
    mesh_words,
    over,
    percent,
    ratio,
    rows,
    shapes,
    size,
    stages_words,
    verdict,
    whose,
    wire_by_axes,
)

LINES = 48
_NARROW = 100
_SEGMENTS = 5
"""The most rows of segments."""


def screen(
    report: Report,
    findings: Sequence[Finding] = (),
    fixes: Sequence[Fix] = (),
    facts: Sequence[tuple[str, str]] = (),
) -> RenderableType:
    """The whole report for `rich.print`. What does not fit on a screen of LINES is counted, not
    shown.

    Args:
      findings: of `lint`, the gravest first.
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
        def lines(*parts: RenderableType) -> int:
            return sum(len(console.render_lines(part, options)) for part in parts)

        width, report = options.max_width, self.report
        head, foot = _head(report, self.facts), _foot(report)
        memory, sums, segments = (
            _memory(report),
            _sums(report),
            _segments(report, options.max_width),
        )
        found = _headed("findings", "no findings", map(_finding, self.findings))
        helps = _headed("what would help", "", map(_fix, self.fixes))
        advice = [*found, *helps] if report.fits else [*helps, *found]
        left = LINES - lines(head, memory, sums, *segments, foot) - 4  # the blank lines
        of_advice = min(lines(*advice), left // 2)
        tables = (report.memory.buffers, rows(report, by_axes))
        n_buffers, n_rows = _share(left - of_advice - 2, len(alike(tables[0])), len(tables[1]))
        narrow = width < _NARROW
        tables_of_buffers = (
            _buffers(report, most, narrow=narrow) for most in range(n_buffers, 2, -1)
        )
        # In a narrow table a row may take several lines: all those that the collectives leave.
        most_lines = 1 + max(n_buffers, left - of_advice - 2 - min(n_rows, len(tables[1])))
        live = next(
            (table for table in tables_of_buffers if lines(table) <= most_lines),
            _buffers(report, 3, narrow=narrow),
        )
        yield Group(
            head,
            "",
            memory,
            "",
            live,
            "",
            _collectives(tables[1], width, n_rows),
            *segments,
            sums,
            "",
        )
        yield from _until(advice, lines, of_advice, report.vocabulary.page_option)
        yield foot


def _share(lines: int, buffers: int, collectives: int) -> tuple[int, int]:
    """How many rows of each table fit: a third of the lines for the buffers, and what one does not
    need is the other's.
    """
    first = max(3, min(buffers, max(lines // 3, lines - collectives)))
    return first, max(3, lines - first)


def _until(
    parts: Sequence[RenderableType], lines: Any, most: int, page_option: str
) -> RenderResult:
    hint = f" on the page: {page_option}" if page_option else ""
    for i, part in enumerate(parts):
        if (most := most - lines(part)) < (i < len(parts) - 1):
            yield Text(
                f"  and {sum(not isinstance(one, Text) for one in parts[i:])} more{hint}",
                style="dim",
            )
            return
        yield part


def _head(report: Report, facts: Sequence[tuple[str, str]]) -> RenderableType:
    n = report.n_devices
    title = Table.grid(expand=True)
    title.add_column()
    title.add_column(justify="right", style="bold green" if report.fits else "bold red")
    name = Text.assemble((report.name, "bold"), f" on {n:,} x {report.target.upper() or 'device'}")
    title.add_row(name, Text(verdict(report)))
    known = [("mesh", mesh_words(report)), *facts]
    return Group(
        title,
        Text("   ").join(Text.assemble((f"{label} ", "dim"), value) for label, value in known),
    )


def _table(*columns: tuple[str, dict[str, Any]]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, expand=True, header_style="dim")
    for name, how in columns:
        table.add_column(name, **{"no_wrap": True, "overflow": "ellipsis"} | how)
    return table


_NUMBER = {"justify": "right"}


def _add(table: Table, *cells: str | Bar, style: str = "") -> None:
    """A row. Text is taken as it is: f32[b] is no markup."""
    table.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in cells), style=style)


def _memory(report: Report) -> RenderableType:
    """Each class's bar begins where that before it ended, so that the last ends at the peak."""
    of, unit = (
        f"of {report.hbm / GIB:.1f} GiB" if report.hbm else "of the peak",
        Unit.of(report.peak_bytes),
    )
    table = _table(
        ("memory at the peak", {"min_width": 16}),
        (unit.name, _NUMBER),
        ("", _NUMBER),
        (of, {"ratio": 1}),
    )
    scale, begin = max(report.hbm, report.peak_bytes) or 1, 0
    whole = report.hbm or report.peak_bytes
    for kind, n in report.memory.by_kind.items():
        _add(
            table,
            kind,
            unit(n),
            percent(n, whole),
            Bar(begin / scale, (begin + n) / scale, whole / scale),
        )
        begin += n
    peak = report.peak_bytes
    _add(
        table,
        "peak",
        unit(peak),
        percent(peak, whole),
        Bar(0, peak / scale, whole / scale),
        style="bold",
    )
    return table


@dataclasses.dataclass(frozen=True)
class Bar:
    """A bar from `begin` to `end` on a scale of 0 to 1, with a tick at `limit`."""

    begin: float
    end: float
    limit: float

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = options.max_width
        first, last = (round(x * (width - 1)) for x in (self.begin, self.end))
        at = round(self.limit * (width - 1))
        last = max(last, first + 1) if self.end > self.begin else first
        for cell in range(width):
            if first <= cell < last:
                yield Segment("█", Style(color="red" if cell >= at else "cyan"))
            else:
                yield Segment("│" if cell == at else " ", Style(dim=True))


def _buffers(report: Report, most: int, *, narrow: bool) -> RenderableType:
    """narrow: the column that names source lines is wrapped, so that none of it is lost."""
    merged, unit = alike(report.memory.buffers), Unit.of(report.peak_bytes)
    largest, whose_column = (
        {"max_width": 20 if narrow else 34},
        {"ratio": 1} | ({"no_wrap": False, "overflow": "fold"} if narrow else {}),
    )
    table = _table(
        ("live at the peak", {"min_width": 16}),
        (unit.name, _NUMBER),
        ("largest", largest),
        ("whose", whose_column),
    )
    shown = merged if len(merged) <= most else merged[: most - 1]
    for n, buffer in shown:
        _add(
            table,
            buffer.kind,
            unit(n * buffer.bytes),
            f"{n} x {buffer.shape}" if n > 1 else buffer.shape,
            whose(buffer),
        )
    if rest := merged[len(shown) :]:
        count, total = sum(n for n, _ in rest), sum(n * b.bytes for n, b in rest)
        _add(table, f"{count} more", unit(total), style="dim")
    return table


def _collectives(all_rows: Sequence[Any], width: int, most: int) -> RenderableType:
    narrow, unit = width < _NARROW, Unit.of(max((row.wire for row in all_rows), default=0))
    sent = f"{unit.name} sent"
    columns = [
        ("over", {}),
        ("collective", {}),
        ("times", _NUMBER),
        ("payload", _NUMBER),
        (sent, _NUMBER),
        ("exposed", _NUMBER),
    ]
    table = _table(
        *(c for c in columns if not (narrow and c[0] == "payload")), ("in", {"ratio": 1})
    )
    shown = all_rows if len(all_rows) <= most else all_rows[: most - 1]
    before = None
    for row in shown:
        one = row.one
        first = one.axes != before
        before = one.axes
        cells = {
            "over": f"{over(one.axes)}, {link(row.nodes)}" if first else "",
            "collective": f"{one.kind} {one.dtype}",
            "times": row.count, "payload": unit(row.payload), sent: unit(row.wire),
            "exposed": duration(row.exposed) if row.busy else "",
            "in": row.places or shapes(one.shapes),
        }  # fmt: skip
        _add(table, *(cells[str(column.header)] for column in table.columns))
    if rest := all_rows[len(shown) :]:
        cells = {
            "over": f"{len(rest)} more",
            "times": f"{sum(r.times for r in rest):,}",
            sent: unit(sum(r.wire for r in rest)),
        }
        _add(table, *(cells.get(str(column.header), "") for column in table.columns), style="dim")
    if not all_rows:
        _add(table, "none")
    return table


def _segments(report: Report, width: int) -> tuple[RenderableType, ...]:
    """The costs of the segments between blank lines; nothing for a model that has only one."""
    found = segment_table(report, most=2 if width < _NARROW else 3)
    if not found:
        return ()
    header, *rows_of_segments, rest, step = found
    table = _table((header[0], {"min_width": 10}), *((name, _NUMBER) for name in header[1:]))
    n = len(rows_of_segments)
    for row in rows_of_segments if n <= _SEGMENTS else rows_of_segments[: _SEGMENTS - 1]:
        _add(table, *row)
    if n > _SEGMENTS:
        _add(table, f"{n - _SEGMENTS + 1} more", style="dim")
    _add(table, *rest)
    _add(table, *step, style="bold")
    return "", table, ""


def _sums(report: Report) -> RenderableType:
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(style="dim", no_wrap=True, min_width=10)
    table.add_column(overflow="fold")
    _add(
        table,
        "sent",
        ", ".join(
            f"{over(axes)} {size(n)}" for axes, n in wire_by_axes(report).items() if n >= SCALAR
        )
        or "nothing",
    )
    phases = [f"{phase or 'other'} {flop(n)}" for phase, n in report.flops.items() if n]
    whole = f"; {flop(sum(report.flops.values()))} in all" if len(phases) > 1 else ""
    _add(table, "matmuls", ", ".join(phases) + whole + stages_words(report) or "none")
    if any(one.bounded for one in report.collectives):
        _add(table, "times", UPPER_BOUND)
    if line := report.timeline:
        said = (
            f"{duration(line.step)} {PREDICTED}: compute {duration(line.compute)}, network "
            f"{duration(line.network)}"
        )
        rates = "".join(f", {each}" for each in (efficiency(report), ratio(report)) if each)
        _add(
            table,
            "step",
            f"{said}, {duration(line.exposed)} exposed ({percent(line.exposed, line.step)}){rates}",
        )
        if waits := exposed_words(report):
            _add(table, "exposed", f"{waits} of the step")
    return table


def _headed(title: str, none: str, items: Any) -> list[RenderableType]:
    result = list(items)
    heading = [Text(title, style="dim")] if result else [Text(none, style="green")] if none else []
    return [*heading, *result]


def _finding(one: Finding) -> RenderableType:
    where = f"  in {location_text(one.where)}" if one.where != Location() else ""
    check = (f"{one.check}{' (notice)' if one.severity == 'notice' else ''}: ", "yellow")
    return _hanging(
        size(one.bytes) if one.bytes else "",
        Text.assemble(check, one.text, (where, "dim"), f"  fix: {one.fix}" if one.fix else ""),
    )


def _fix(one: Fix) -> RenderableType:
    step = f", step x {one.cost:.2f}" if one.cost is not None else ""
    said = (
        f"  {size(one.report.peak_bytes)} at the peak{step}, "
        f"{'fits' if one.fits else 'does not fit'}"
    )
    return _hanging(f"- {size(one.saves)}", Text.assemble((one.text, "bold"), said))


def _hanging(label: str, text: Text) -> RenderableType:
    table = Table.grid(padding=(0, 1, 0, 0))
    table.add_column(justify="right", min_width=10, no_wrap=True)
    table.add_column(overflow="fold")
    table.add_row(Text(label), text)
    return table


def _foot(report: Report) -> RenderableType:
    about = [f"compiled in {report.compile_seconds:.1f} s", f"{report.instructions:,} instructions"]
    about += [f"{name} {version}" for name, version in report.versions.items()]
    about += [f"{len(report.warnings)} warnings of the partitioner"] if report.warnings else []
    return Text(", ".join(about), style="dim")
