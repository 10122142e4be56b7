"""A report as one HTML file with tables and charts.

Nothing is fetched from anywhere, and it is readable without JavaScript and on paper.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from html import escape

from sharding_rules.lab.charts import Share, colours, legend, schedule, stack, swatch
from sharding_rules.lab.fixes import Fix
from sharding_rules.lab.lint import Finding
from sharding_rules.lab.markup import Number, amount, code, document, section, table
from sharding_rules.lab.report import KINDS, Location, Report, Timeline, location_text
from sharding_rules.lab.schedule import Piece, pieces
from sharding_rules.lab.segments import segment_table
from sharding_rules.lab.summary import (
    GIB,
    PREDICTED,
    UPPER_BOUND,
    Row,
    Unit,
    alike,
    by_meaning,
    conditionals_words,
    duration,
    durations,
    efficiency,
    exposed_words,
    flop,
    host_words,
    link,
    matrix,
    mesh_words,
    over,
    path,
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

_BUFFERS = 16
"""The most rows of buffers."""
_INSTRUCTIONS = 12
"""The most instructions that the tip of a row of collectives lists."""
_SMALLEST_PIECE = 0.004
"""Share of the step below which a piece of the schedule is not drawn."""
_LETTERS = "abcdefghijklmnopqrstuvwxyz"
"""Names of pieces, in the chart of the step and below it."""

# Variables of page.css.
_OTHER_COLOUR = "--rest"
_WAIT_COLOUR = "--wait"
_PHASE_COLOURS = {
    "forward": "--p0",
    "recompute": "--p1",
    "backward": "--p2",
    "optimizer": "--p3",
    "": _OTHER_COLOUR,
}
_KIND_COLOURS = {kind: f"--m{i}" for i, kind in enumerate(KINDS)}


def page(
    report: Report,
    findings: Sequence[Finding] = (),
    fixes: Sequence[Fix] = (),
    facts: Sequence[tuple[str, str]] = (),
) -> str:
    """Returns the whole page. Everything from the report is escaped.

    Args:
      report: as `compile_report` returns it.
      findings: those of `lint`, the gravest first.
      fixes: what would make it fit, or make it smaller, the best first.
      facts: (label, value) that the head shows beside the mesh: ("parameters", "174.6 B").
    """
    schedule_pieces = pieces(report.timeline) if report.timeline else []
    part_colours = _part_colours(report, schedule_pieces)
    sections = [
        section("memory", "Memory at the peak", _memory(report)),
        section("network", "What travels", _network(report, part_colours)),
        section("segments", "By segment", _segments(report)) if len(report.segments) > 1 else "",
        section("schedule", "The schedule", _schedule(report, schedule_pieces, part_colours)),
        section("matmuls", "Matmuls", _matmuls(report)),
        section("findings", "Findings", _findings(report, findings)),
        section("fixes", "What would help", _fixes(fixes)) if fixes else "",
        section("arguments", "Arguments", _arguments(report)),
    ]
    return document(
        f"{report.name}: {verdict(report)}",
        _head(report, findings, facts),
        "".join(sections),
        _foot(report),
    )


def _head(report: Report, findings: Sequence[Finding], facts: Sequence[tuple[str, str]]) -> str:
    fits = verdict(report)
    cls = "good" if report.fits else "bad"
    hbm = f" of {size(report.hbm)}" if report.hbm else ""
    sentences = [
        f"<strong class={cls}>{escape(fits[0].upper() + fits[1:])}.</strong>",
        f"The peak is {size(report.peak_bytes)}{hbm} on each device.",
    ]
    line = report.timeline
    band = report.step_band
    if line and band:
        step = (
            f"A step takes {durations(band)} ({PREDICTED}), of which {duration(line.exposed)} "
            f"({percent(line.exposed, line.step)}) wait for the network at the optimistic rates"
        )
        shares = ", ".join(filter(None, (efficiency(report), ratio(report))))
        sentences.append(f"{step}; {shares}." if shares else f"{step}.")
    n = len(findings)
    if n:
        sentences.append(f'<a href="#findings">{n} finding{"s" if n > 1 else ""}</a>.')
    else:
        sentences.append("No findings.")
    labelled = [
        ("devices", f"{report.n_devices:,} x {report.target.upper() or 'as they are'}"),
        ("mesh", mesh_words(report)),
        *facts,
    ]
    rates = rates_words(report)
    if rates:
        labelled.append(("times", rates))
    host = host_words(report)
    if host:
        labelled.append(("host", host))
    if report.conditionals:
        labelled.append(("conditionals counted", conditionals_words(report)))
    items = "".join(
        f"<div><dt>{escape(label)}</dt><dd>{escape(value)}</dd></div>" for label, value in labelled
    )
    return (
        f"<header>\n<h1>{escape(report.name)}</h1>\n"
        f'<p class="verdict">{" ".join(sentences)}</p>\n<dl>{items}</dl>\n</header>'
    )


# Memory.


def _memory(report: Report) -> str:
    peak = report.peak_bytes
    unit = Unit.of(peak)
    limit = report.hbm or peak
    limit_name = "HBM" if report.hbm else "the peak"
    shares = []
    lines = []
    for kind, n in report.memory.by_kind.items():
        colour = _KIND_COLOURS.get(kind, _OTHER_COLOUR)
        tip = f"{kind}\n{size(n)}, {percent(n, limit)} of {limit_name}"
        shares.append(Share(f"{kind} {n / unit.scale:.1f}", n, colour, tip))
        lines.append((f"{swatch(colour)} {kind}", amount(n, unit), percent(n, limit)))
    chart = stack(
        shares,
        max(limit, peak) or 1,
        label=f"memory by class: {verdict(report)}",
        height=34,
        limit=report.hbm,
        limit_label=f"{size(report.hbm)} of HBM",
    )
    foot = ("peak", amount(peak, unit), percent(peak, limit))
    classes = table(["class", unit.name, ""], lines, foot=foot)
    return (
        f'<figure>{chart}</figure>\n<div class="beside"><div>{classes}</div>'
        f'<div class="wide">{_buffers(report, unit)}</div></div>'
    )


def _buffers(report: Report, unit: Unit) -> str:
    merged = alike(report.memory.buffers)
    lines = []
    for n, buffer in merged[:_BUFFERS]:
        cells = (
            swatch(_KIND_COLOURS.get(buffer.kind, _OTHER_COLOUR)),
            amount(n * buffer.bytes, unit),
            code(f"{n} x {buffer.shape}" if n > 1 else buffer.shape),
            escape(whose(buffer)),
        )
        lines.append(cells)
    foot = None
    hidden = merged[_BUFFERS:]
    if hidden:
        n_bytes = sum(n * buffer.bytes for n, buffer in hidden)
        foot = ("", amount(n_bytes, unit), f"{sum(n for n, _ in hidden):,} more", "")
    return table(["", unit.name, "array", "live for"], lines, foot=foot)


# Network.


def _network(report: Report, part_colours: dict[str, str]) -> str:
    collectives = rows(report, by_meaning)
    if not collectives:
        return "<p>Nothing: the program has no collectives.</p>"
    sent = wire_by_axes(report)
    largest = max(sent.values())
    bars = []
    chips = []
    for axes in dict.fromkeys(row.one.axes for row in collectives):
        same_axes = [row for row in collectives if row.one.axes == axes]
        bars.append(_bar(same_axes, sent[axes], largest, part_colours))
    for axes in sent:
        if any(row.one.axes == axes for row in collectives):
            name = escape(over(axes))
            chips.append(f'<button type="button" data-axis="{name}">{name}</button>')
    lead = "<p>Bytes that one device sends in a step, by mesh axis and part of the model.</p>"
    chart = f"<figure>{''.join(bars)}{legend(part_colours, 'unnamed')}</figure>"
    filters = (
        '<p class="chips" hidden>over <button type="button" data-axis="" '
        f'aria-pressed="true">all</button>{"".join(chips)}</p>'
    )
    return (
        f"{lead}{chart}\n{_matrix(report)}<h3>Collectives</h3>\n{filters}"
        f"{_collectives(collectives)}"
    )


def _bar(
    same_axes: Sequence[Row], sent: float, largest: float, part_colours: dict[str, str]
) -> str:
    """Returns the traffic over some mesh axes, divided by part. largest: that of any axes."""
    axes = over(same_axes[0].one.axes)
    part_bytes = Counter[str]()
    for row in same_axes:
        part_bytes[_innermost(row.one.where.part)] += round(row.wire)
    shares = []
    for part in sorted(part_bytes, key=list(part_colours).index):
        tip = f"{part or 'unnamed'}\n{size(part_bytes[part])} over {axes}"
        shares.append(Share("", part_bytes[part], part_colours.get(part, _OTHER_COLOUR), tip))
    chart = stack(shares, largest, label=f"{size(sent)} over {axes}", height=18)
    slowest_link = link(max(row.nodes for row in same_axes))
    group = max(row.one.group for row in same_axes)
    label = f"<span>{escape(axes)}<small>{slowest_link}, {group} devices</small></span>"
    return f'<div class="bar">{label}{chart}<b>{size(sent)}</b></div>'


def _matrix(report: Report) -> str:
    """Returns bytes and times by mesh axes and part, with a column for each phase.

    The time of each cell shows under the pointer.
    """
    cells = matrix(report)
    phases = [phase for phase in _PHASE_COLOURS if any(phase in row for row in cells.values())]
    largest = max(row.wire for row_by_phase in cells.values() for row in row_by_phase.values())
    unit = Unit.of(largest)
    lines = []
    tags = []
    for (axes, part), row_by_phase in cells.items():
        sent = []
        for phase in phases:
            row = row_by_phase.get(phase)
            sent.append(amount(row.wire, unit) if row else Number(0, show=""))
        busy = sum(row.busy for row in row_by_phase.values()) / 1e3
        exposed = sum(row.exposed for row in row_by_phase.values()) / 1e3
        lines.append(
            (
                escape(over(axes)),
                escape(part or "unnamed"),
                *sent,
                Number(busy, 1),
                Number(exposed, 1),
            )
        )
        tip = [f"{over(axes)}, {part}"]
        for phase, row in row_by_phase.items():
            tip.append(f"{phase or 'no phase'}: {size(row.wire)}, {duration(row.exposed)} exposed")
        tags.append(_tip(tip))
    names = [
        "over",
        "part",
        *(f"{phase or 'no phase'}, {unit.name}" for phase in phases),
        "ms",
        "ms exposed",
    ]
    return f"<h3>By axis, part and phase</h3>\n{table(names, lines, tags=tags, cls='sortable')}"


def _collectives(collectives: Sequence[Row]) -> str:
    largest = max(row.wire for row in collectives) or 1
    unit = Unit.of(largest)
    names = [
        "over",
        "by",
        "collective",
        "array",
        "part",
        "phase",
        "times",
        "payload MiB",
        f"{unit.name} sent",
        "ms",
        "ms exposed",
    ]
    lines = []
    tags = []
    for row in collectives:
        one = row.one
        cells = (
            escape(over(one.axes)),
            link(row.nodes),
            escape(one.kind) + (" (part of the axis)" if one.partial else ""),
            code(shapes(one.shapes)),
            escape(one.where.part),
            escape(one.where.phase),
            Number(row.times, show=row.count),
            Number(one.payload / 2**20, 1),
            amount(row.wire, unit, bar=row.wire / largest),
            Number(row.busy / 1e3, 1),
            Number(row.exposed / 1e3, 1),
        )
        lines.append(cells)
        tip = []
        for collective in row.collectives[:_INSTRUCTIONS]:
            times = " x ".join(map(runs, collective.loops)) or 1
            tip.append(f"{collective.name}: {times} times, {location_text(collective.where)}")
        tags.append(f'data-axis="{escape(over(one.axes))}" {_tip(tip)}')
    n_runs = sum(row.times for row in collectives)
    foot = (
        *[""] * names.index("times"),
        Number(n_runs, show=runs(n_runs)),
        "",
        amount(sum(row.wire for row in collectives), unit),
        Number(sum(row.busy for row in collectives) / 1e3, 1),
        Number(sum(row.exposed for row in collectives) / 1e3, 1),
    )
    return table(names, lines, tags=tags, foot=foot, cls="collectives sortable") + _NOTE


_NOTE = (
    '<p class="note">Payload: the whole array, once. Sent: by one device in a step, in a ring. '
    f"The milliseconds are {PREDICTED}: those of the network, and those of them during which "
    f"compute waits. {UPPER_BOUND.capitalize()}.</p>"
)


def _segments(report: Report) -> str:
    lines = []
    for name, *costs in segment_table(report):
        lines.append([escape(name), *(Number(0, show=cost) for cost in costs)])
    header, *segments, step = lines
    note = (
        f"Times are {PREDICTED}. The rest: embedding, loss and optimizer, and what XLA has merged "
        "from several segments, such as the sum of all gradients."
    )
    return f'{table(header, segments, foot=step)}<p class="note">{note}</p>'


# Schedule.


def _schedule(
    report: Report, schedule_pieces: Sequence[Piece], part_colours: dict[str, str]
) -> str:
    line = report.timeline
    if not line or not schedule_pieces:
        return "<p>There are no estimates for these devices.</p>"
    shares = []
    panels = []
    drawn = [piece for piece in schedule_pieces if piece.total >= _SMALLEST_PIECE * line.step]
    for i, piece in enumerate(drawn):
        letter = _LETTERS[i % len(_LETTERS)]
        trips = f"{runs(piece.times)} x {duration(piece.duration)} = {duration(piece.total)}"
        waiting = f"of it {duration(piece.waiting)} waiting for the network"
        compute = max(piece.total - piece.waiting, 0)
        tip = f"{piece.name}\n{trips}"
        shares.append(Share(letter, compute, f"--s{i % 2}", f"{tip}\ncompute"))
        shares.append(Share("", piece.waiting, _WAIT_COLOUR, f"{tip}\n{waiting}"))
        caption = (
            f"<b>{letter}</b> {escape(piece.name)} "
            f"<small>{trips if piece.times > 1 else duration(piece.total)}, "
            f"{percent(piece.total, line.step)} of the step, "
            f"{percent(piece.waiting, piece.total)} of it waiting</small>"
        )
        panels.append(
            f'<figure class="piece"><figcaption>{caption}</figcaption>'
            f"{schedule(piece, part_colours)}</figure>"
        )
    words = exposed_words(report)
    waits = f" By mesh axes and by phase: {words} of the step." if words else ""
    lead = (
        f"<p>The schedule replayed with estimates, XLA's and the data sheets', {PREDICTED}: "
        f"{duration(line.step)} a step at the optimistic rates, compute {duration(line.compute)}, "
        f"network {duration(line.network)}, of which {duration(line.exposed)} are exposed: compute "
        f"waits for them ({swatch(_WAIT_COLOUR)}).{waits}{_host_copies(line)} Below, one trip of "
        "each piece at its own scale: compute above the axis, matmuls tall; the network and PCIe "
        "below it.</p>"
    )
    total = max(sum(share.value for share in shares), 1e-9)
    chart = f"<figure>{stack(shares, total, label='the step, piece by piece', height=18)}</figure>"
    return lead + chart + legend(part_colours, "unnamed") + "".join(panels)


def _host_copies(line: Timeline) -> str:
    if not line.host:
        return ""
    return (
        f" Copies to and from the host take {duration(line.host)}, of which "
        f"{duration(line.host_exposed)} are exposed."
    )


def _matmuls(report: Report) -> str:
    total = sum(report.flops.values())
    if not total:
        return "<p>None.</p>"
    shares = []
    for phase, n in report.flops.items():
        if n:
            name = phase or "no phase"
            colour = _PHASE_COLOURS.get(phase, _OTHER_COLOUR)
            tip = f"{name}\n{flop(n)}, {percent(n, total)}"
            shares.append(Share(f"{name} {flop(n)}", n, colour, tip))
    chart = f"<figure>{stack(shares, total, label='FLOPs of matmuls by phase', height=18)}</figure>"
    lead = f"<p>{flop(total)} on each device in a step{stages_words(report)}.</p>"
    if not report.kernels:
        return f"{lead}{chart}"

    kernels = Counter(
        (target, location.part, location.phase) for target, _, location in report.kernels
    )
    lines = []
    for (target, part, phase), n in kernels.most_common():
        lines.append((Number(n), code(target), escape(part), escape(phase)))
    return (
        f"{lead}{chart}<details><summary>{len(report.kernels)} custom calls</summary>"
        f"{table(['', 'kernel', 'part', 'phase'], lines)}</details>"
    )


# Advice.


def _findings(report: Report, findings: Sequence[Finding]) -> str:
    items = []
    for one in findings:
        cls = ' class="notice"' if one.severity == "notice" else ""
        cost = f"<b>{size(one.bytes)}</b>" if one.bytes else ""
        location = ""
        if one.where != Location():
            location = f"<small>{escape(location_text(one.where))}</small>"
        fix = f'<p class="fix">{escape(one.fix)}</p>' if one.fix else ""
        items.append(
            f'<li{cls}><div class="check">{escape(one.check)}{cost}</div>'
            f"<div><p>{escape(one.text)} {location}</p>{fix}</div></li>"
        )
    text = f'<ol class="findings">{"".join(items)}</ol>' if items else "<p>None.</p>"
    if report.warnings:
        warnings = "".join(f"<li>{code(line)}</li>" for line in report.warnings)
        text += (
            f"<details><summary>{len(report.warnings)} warnings of XLA's partitioner</summary>"
            f"<ul>{warnings}</ul></details>"
        )
    return text


def _fixes(fixes: Sequence[Fix]) -> str:
    lines = []
    for fix in fixes:
        if fix.fits:
            fits = '<span class="good">fits</span>'
        else:
            fits = '<span class="bad">does not fit</span>'
        cells = (
            code(fix.text),
            escape(fix.kind),
            Number(fix.saves / GIB, 2),
            Number(fix.report.peak_bytes / GIB, 2),
            f"x {fix.cost:.2f}" if fix.cost is not None else "not known",
            fits,
        )
        lines.append(cells)
    lead = (
        "<p>Each was compiled. The step is the predicted time divided by that of the program as it "
        "is.</p>"
    )
    return lead + table(["change", "kind", "GiB less", "GiB at the peak", "step", ""], lines)


def _arguments(report: Report) -> str:
    lines = []
    for argument in sorted(report.arguments, key=lambda argument: -argument.bytes):
        dims = ",".join(map(str, argument.shape))
        cells = (
            escape(path(argument.name)),
            escape(argument.kind),
            code(f"{argument.dtype}[{dims}]"),
            escape(over(argument.axes)) if argument.axes else "replicated",
            Number(argument.bytes / 2**20, 1),
        )
        lines.append(cells)
    total = sum(argument.bytes for argument in report.arguments)
    names = ["argument", "class", "whole array", "sharded over", "MiB"]
    return (
        f"<details><summary>{len(lines)} arrays, {size(total)} on each device</summary>"
        f"{table(names, lines, cls='sortable')}</details>"
    )


def _foot(report: Report) -> str:
    facts = [f"Compiled in {report.compile_seconds:.1f} s", f"{report.instructions:,} instructions"]
    facts += [f"{name} {version}" for name, version in report.versions.items()]
    facts += [f"{name}={value}" for name, value in report.options.items()]
    return f"<footer>{escape(', '.join(facts))}</footer>"


def _part_colours(report: Report, schedule_pieces: Sequence[Piece]) -> dict[str, str]:
    """Returns the colours of innermost scopes.

    Scopes with most predicted time and traffic are first, so that they get the colours.
    """
    # Billionths of the step and of the traffic, as integers.
    weights = Counter[str]()
    step = max(report.timeline.step if report.timeline else 1, 1e-9)
    for piece in schedule_pieces:
        for span in piece.spans:
            weights[_innermost(span.where.part)] += round(1e9 * span.duration * piece.times / step)
    sent = sum(wire_by_axes(report).values()) or 1
    for one in report.collectives:
        weights[_innermost(one.where.part)] += round(1e9 * one.times * one.wire / sent)
    return colours(part for part, _ in weights.most_common())


def _innermost(part: str) -> str:
    return part.split("/")[-1]


def _tip(lines: Sequence[str]) -> str:
    """Returns the attribute of an element that shows lines of text under the pointer."""
    text = "\n".join(lines)
    return f'data-tip="{escape(text)}"'
