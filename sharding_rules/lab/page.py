"""A report as one HTML file: tables and charts, nothing fetched from anywhere, readable without
JavaScript and on paper.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from html import escape

from sharding_rules.lab.charts import Share, colours, legend, schedule, stack, swatch
from sharding_rules.lab.fixes import Fix
from sharding_rules.lab.lint import Finding
from sharding_rules.lab.markup import Number, amount, code, document, section, table
from sharding_rules.lab.report import KINDS, Location, Report, location_text
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
    duration,
    efficiency,
    exposed_words,
    flop,
    link,
    matrix,
    mesh_words,
    over,
    path,
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

_BUFFERS = 16
_PIECES = 0.004
"""Share of the step below which a piece of the schedule is not drawn."""
_PHASES = {
    "forward": "--p0",
    "recompute": "--p1",
    "backward": "--p2",
    "optimizer": "--p3",
    "": "--rest",
}


def page(
    report: Report,
    findings: Sequence[Finding] = (),
    fixes: Sequence[Fix] = (),
    facts: Sequence[tuple[str, str]] = (),
) -> str:
    """The whole page. Everything from the report is escaped.

    Args:
      findings: of `lint`, the gravest first.
      fixes: what would make it fit, or make it smaller, the best first.
      facts: (label, value) that the head shows beside the mesh: ("parameters", "174.6 B").
    """
    in_schedule = pieces(report.timeline) if report.timeline else []
    parts = _colours_of_parts(report, in_schedule)
    sections = [
        section("memory", "Memory at the peak", _memory(report)),
        section("network", "What travels", _network(report, parts)),
        section("segments", "By segment", _segments(report)) if len(report.segments) > 1 else "",
        section("schedule", "The schedule", _schedule(report, in_schedule, parts)),
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
    of = f" of {size(report.hbm)}" if report.hbm else ""
    fits = verdict(report)
    told = [
        f"<strong class={'good' if report.fits else 'bad'}>{escape(fits[0].upper() + fits[1:])}.</strong>"
    ]
    told.append(f"The peak is {size(report.peak_bytes)}{of} on each device.")
    if line := report.timeline:
        rates = efficiency(report), ratio(report)
        told.append(
            f"A step takes {duration(line.step)} ({PREDICTED}), of which {duration(line.exposed)} "
            f"({percent(line.exposed, line.step)}) wait for the "
            f"network{': ' * any(rates)}{', '.join(filter(None, rates))}."
        )
    n = len(findings)
    told.append(f'<a href="#findings">{n} finding{"s" * (n > 1)}</a>.' if n else "No findings.")
    known = [
        ("devices", f"{report.n_devices:,} x {report.target.upper() or 'as they are'}"),
        ("mesh", mesh_words(report)),
        *facts,
    ]
    items = "".join(
        f"<div><dt>{escape(label)}</dt><dd>{escape(value)}</dd></div>" for label, value in known
    )
    return (
        f"<header>\n<h1>{escape(report.name)}</h1>\n<p "
        f'class="verdict">{" ".join(told)}</p>\n<dl>{items}</dl>\n</header>'
    )


def _memory(report: Report) -> str:
    kinds = report.memory.by_kind
    colour = {kind: f"--m{i}" for i, kind in enumerate(KINDS)}
    whole, unit = report.hbm or report.peak_bytes, Unit.of(report.peak_bytes)
    shares = [
        Share(
            f"{kind} {n / unit.scale:.1f}",
            n,
            colour.get(kind, "--rest"),
            f"{kind}\n{size(n)}, {percent(n, whole)} of {'HBM' if report.hbm else 'the peak'}",
        )
        for kind, n in kinds.items()
    ]
    scale = max(whole, report.peak_bytes) or 1
    chart = stack(
        shares,
        scale,
        label=f"memory by class: {verdict(report)}",
        height=34,
        limit=report.hbm,
        limit_label=f"{size(report.hbm)} of HBM",
    )
    lines = [
        (swatch(colour.get(kind, "--rest")) + f" {kind}", amount(n, unit), percent(n, whole))
        for kind, n in kinds.items()
    ]
    classes = table(
        ["class", unit.name, ""],
        lines,
        foot=("peak", amount(report.peak_bytes, unit), percent(report.peak_bytes, whole)),
    )
    merged = alike(report.memory.buffers)
    lines = [
        (
            swatch(colour.get(b.kind, "--rest")),
            amount(n * b.bytes, unit),
            code(f"{n} x {b.shape}" if n > 1 else b.shape),
            escape(whose(b)),
        )
        for n, b in merged[:_BUFFERS]
    ]
    rest = merged[_BUFFERS:]
    foot = (
        (
            "",
            amount(sum(n * b.bytes for n, b in rest), unit),
            f"{sum(n for n, _ in rest):,} more",
            "",
        )
        if rest
        else None
    )
    buffers = table(["", unit.name, "array", "live for"], lines, foot=foot)
    return (
        f'<figure>{chart}</figure>\n<div class="beside"><div>{classes}</div><div '
        f'class="wide">{buffers}</div></div>'
    )


def _network(report: Report, parts: dict[str, str]) -> str:
    listed = rows(report, by_meaning)
    if not listed:
        return "<p>Nothing: the program has no collectives.</p>"
    sent = wire_by_axes(report)
    widest = max(sent.values())
    bars = []
    for axes in dict.fromkeys(row.one.axes for row in listed):
        mine = [row for row in listed if row.one.axes == axes]
        by_part = Counter[str]()
        for row in mine:
            by_part[_scope(row.one.where.part)] += round(row.wire)
        where = link(max(row.nodes for row in mine))
        shares = [
            Share(
                "",
                by_part[part],
                parts.get(part, "--rest"),
                f"{part or 'unnamed'}\n{size(by_part[part])} over {over(axes)}",
            )
            for part in sorted(by_part, key=list(parts).index)
        ]
        chart = stack(shares, widest, label=f"{size(sent[axes])} over {over(axes)}", height=18)
        group = max(row.one.group for row in mine)
        label = f"<span>{escape(over(axes))}<small>{where}, {group} devices</small></span>"
        bars.append(f'<div class="bar">{label}{chart}<b>{size(sent[axes])}</b></div>')
    lead = "<p>Bytes that one device sends in a step, by mesh axis and part of the model.</p>"
    chips = "".join(
        f'<button type="button" data-axis="{escape(over(axes))}">{escape(over(axes))}</button>'
        for axes in sent
        if any(r.one.axes == axes for r in listed)
    )
    filters = (
        '<p class="chips" hidden>over <button type="button" data-axis="" '
        f'aria-pressed="true">all</button>{chips}</p>'
    )
    chart = f"<figure>{''.join(bars)}{legend(parts, 'unnamed')}</figure>"
    return f"{lead}{chart}\n{_matrix(report)}<h3>Collectives</h3>\n{filters}{_collectives(listed)}"


def _matrix(report: Report) -> str:
    """Bytes by mesh axes and part, with a column for each phase, and their time; that of each cell
    shows under the pointer.
    """
    cells = matrix(report)
    phases = [phase for phase in _PHASES if any(phase in row for row in cells.values())]
    unit = Unit.of(max(row.wire for each in cells.values() for row in each.values()))
    lines, tags = [], []
    for (axes, part), by_phase in cells.items():
        every = [by_phase.get(phase) for phase in phases]
        sent = (amount(row.wire, unit) if row else Number(0, show="") for row in every)
        busy, exposed = (
            sum(getattr(row, name) for row in by_phase.values()) / 1e3
            for name in ("busy", "exposed")
        )
        lines.append(
            (
                escape(over(axes)),
                escape(part or "unnamed"),
                *sent,
                Number(busy, 1),
                Number(exposed, 1),
            )
        )
        told = (
            f"{name or 'no phase'}: {size(row.wire)}, {duration(row.exposed)} exposed"
            for name, row in by_phase.items()
        )
        tags.append(f'data-tip="{escape(chr(10).join([f"{over(axes)}, {part}", *told]))}"')
    names = [
        "over",
        "part",
        *(f"{phase or 'no phase'}, {unit.name}" for phase in phases),
        "ms",
        "ms exposed",
    ]
    return f"<h3>By axis, part and phase</h3>\n{table(names, lines, tags=tags, cls='sortable')}"


def _collectives(listed: Sequence[Row]) -> str:
    most = max(row.wire for row in listed) or 1
    unit = Unit.of(most)
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
    lines, tags = [], []
    for row in listed:
        one = row.one
        every = "\n".join(
            f"{c.name}: {' x '.join(map(str, c.loops)) or 1} times, {location_text(c.where)}"
            for c in row.collectives[:12]
        )
        lines.append(
            (
                escape(over(one.axes)), link(row.nodes),
                escape(one.kind) + (" (part of the axis)" if one.partial else ""),
                code(shapes(one.shapes)), escape(one.where.part), escape(one.where.phase),
                Number(row.times, before="≤ " * row.bounded),
                Number(one.payload / 2**20, 1),
                amount(row.wire, unit, bar=row.wire / most),
                Number(row.busy / 1e3, 1), Number(row.exposed / 1e3, 1),
            )
        )  # fmt: skip
        tags.append(f'data-axis="{escape(over(one.axes))}" data-tip="{escape(every)}"')
    foot = (
        *[""] * 6,
        Number(sum(r.times for r in listed)),
        "",
        amount(sum(r.wire for r in listed), unit),
        Number(sum(r.busy for r in listed) / 1e3, 1),
        Number(sum(r.exposed for r in listed) / 1e3, 1),
    )
    return table(names, lines, tags=tags, foot=foot, cls="collectives sortable") + _NOTE


_NOTE = (
    '<p class="note">Payload: the whole array, once. Sent: by one device in a step, in a ring. '
    f"The milliseconds are {PREDICTED}: those of the network, and those of them during which "
    f"compute waits. {UPPER_BOUND.capitalize()}.</p>"
)


def _segments(report: Report) -> str:
    cells = ([Number(0, show=cell) for cell in row] for row in segment_table(report))
    header, *lines, step = ([escape(row[0]), *row[1:]] for row in cells)
    note = (
        f"Times are {PREDICTED}. The rest: embedding, loss and optimizer, and what XLA has merged "
        "from several segments, "
    )
    note += "such as the sum of all gradients."
    return f'{table(header, lines, foot=step)}<p class="note">{note}</p>'


def _schedule(report: Report, found: Sequence[Piece], parts: dict[str, str]) -> str:
    line = report.timeline
    if not line or not found:
        return "<p>There are no estimates for these devices.</p>"
    drawn = [piece for piece in found if piece.total >= _PIECES * line.step]
    shares = []
    for i, piece in enumerate(drawn):
        tip = (
            f"{piece.name}\n{piece.times:,} x {duration(piece.duration)} = {duration(piece.total)}"
        )
        shares.append(
            Share(
                f"{'abcdefghijklmnopqrstuvwxyz'[i % 26]}",
                max(piece.total - piece.waiting, 0),
                f"--s{i % 2}",
                f"{tip}\ncompute",
            )
        )
        shares.append(
            Share(
                "",
                piece.waiting,
                "--wait",
                f"{tip}\nof it {duration(piece.waiting)} waiting for the network",
            )
        )
    whole = max(sum(share.value for share in shares), 1e-9)
    waits = (
        f" By mesh axes and by phase: {exposed_words(report)} of the step."
        if exposed_words(report)
        else ""
    )
    lead = (
        f"<p>The schedule replayed with estimates, XLA's and the data sheets', {PREDICTED}: "
        f"{duration(line.step)} a step, compute {duration(line.compute)}, network "
        f"{duration(line.network)}, of which {duration(line.exposed)} are exposed: compute waits "
        f"for them ({swatch('--wait')}).{waits} Below, one trip of each piece at its own scale: "
        "compute above the axis, matmuls tall; the network below it.</p>"
    )
    chart = f"<figure>{stack(shares, whole, label='the step, piece by piece', height=18)}</figure>"
    panels = []
    for i, piece in enumerate(drawn):
        often = (
            f"{piece.times:,} x {duration(piece.duration)} = {duration(piece.total)}"
            if piece.times > 1
            else duration(piece.total)
        )
        share = (
            f"{percent(piece.total, line.step)} of the step, {percent(piece.waiting, piece.total)} "
            "of it waiting"
        )
        caption = (
            f"<b>{'abcdefghijklmnopqrstuvwxyz'[i % 26]}</b> {escape(piece.name)} <small>{often}, "
            f"{share}</small>"
        )
        panels.append(
            f'<figure class="piece"><figcaption>{caption}</figcaption>{schedule(piece, parts)}</figure>'
        )
    return lead + chart + legend(parts, "unnamed") + "".join(panels)


def _matmuls(report: Report) -> str:
    known = {phase: n for phase, n in report.flops.items() if n}
    whole = sum(known.values())
    if not whole:
        return "<p>None.</p>"
    shares = [
        Share(
            f"{phase or 'no phase'} {flop(n)}",
            n,
            _PHASES.get(phase, "--rest"),
            f"{phase or 'no phase'}\n{flop(n)}, {percent(n, whole)}",
        )
        for phase, n in known.items()
    ]
    chart = f"<figure>{stack(shares, whole, label='FLOPs of matmuls by phase', height=18)}</figure>"
    kernels = Counter((target, where.part, where.phase) for target, _, where in report.kernels)
    lines = [
        (Number(n), code(target), escape(part), escape(phase))
        for (target, part, phase), n in kernels.most_common()
    ]
    listed = (
        f"<details><summary>{len(report.kernels)} custom "
        f"calls</summary>{table(['', 'kernel', 'part', 'phase'], lines)}</details>"
    )
    return (
        f"<p>{flop(whole)} on each device in a "
        f"step{stages_words(report)}.</p>{chart}{listed if lines else ''}"
    )


def _findings(report: Report, findings: Sequence[Finding]) -> str:
    items = []
    for one in findings:
        where = location_text(one.where) if one.where != Location() else ""
        cls = ' class="notice"' if one.severity == "notice" else ""
        cost = f"<b>{size(one.bytes)}</b>" if one.bytes else ""
        fix = f'<p class="fix">{escape(one.fix)}</p>' if one.fix else ""
        at = f"<small>{escape(where)}</small>" if where else ""
        items.append(
            f'<li{cls}><div class="check">{escape(one.check)}{cost}</div><div><p>{escape(one.text)} {at}</p>{fix}</div></li>'
        )
    said = "".join(f"<li>{code(line)}</li>" for line in report.warnings)
    warned = (
        (
            f"<details><summary>{len(report.warnings)} warnings of XLA's "
            f"partitioner</summary><ul>{said}</ul></details>"
        )
        if said
        else ""
    )
    return (f'<ol class="findings">{"".join(items)}</ol>' if items else "<p>None.</p>") + warned


def _fixes(fixes: Sequence[Fix]) -> str:
    lines = []
    for fix in fixes:
        step = f"x {fix.cost:.2f}" if fix.cost is not None else "not known"
        fits = (
            '<span class="good">fits</span>'
            if fix.fits
            else '<span class="bad">does not fit</span>'
        )
        lines.append(
            (
                code(fix.text),
                escape(fix.kind),
                Number(fix.saves / GIB, 2),
                Number(fix.report.peak_bytes / GIB, 2),
                step,
                fits,
            )
        )
    lead = (
        "<p>Each was compiled. The step is the predicted time divided by that of the program as it "
        "is.</p>"
    )
    return lead + table(["change", "kind", "GiB less", "GiB at the peak", "step", ""], lines)


def _arguments(report: Report) -> str:
    lines = [
        (
            escape(path(a.name)),
            escape(a.kind),
            code(f"{a.dtype}[{','.join(map(str, a.shape))}]"),
            escape(over(a.axes)) if a.axes else "replicated",
            Number(a.bytes / 2**20, 1),
        )
        for a in sorted(report.arguments, key=lambda a: -a.bytes)
    ]
    total = sum(a.bytes for a in report.arguments)
    summary = f"<summary>{len(lines)} arrays, {size(total)} on each device</summary>"
    return f"<details>{summary}{table(['argument', 'class', 'whole array', 'sharded over', 'MiB'], lines, cls='sortable')}</details>"


def _foot(report: Report) -> str:
    about = [f"Compiled in {report.compile_seconds:.1f} s", f"{report.instructions:,} instructions"]
    about += [f"{name} {version}" for name, version in report.versions.items()] + [
        f"{name}={value}" for name, value in report.options.items()
    ]
    return f"<footer>{escape(', '.join(about))}</footer>"


def _colours_of_parts(report: Report, found: Sequence[Piece]) -> dict[str, str]:
    """Innermost scopes: those with most predicted time and traffic first, so that they get the
    colours.
    """
    weight = Counter[str]()
    step = report.timeline.step if report.timeline else 1
    for piece in found:
        for span in piece.spans:
            weight[_scope(span.where.part)] += round(
                1e9 * span.duration * piece.times / max(step, 1e-9)
            )
    sent = sum(wire_by_axes(report).values()) or 1
    for one in report.collectives:
        weight[_scope(one.where.part)] += round(1e9 * one.times * one.wire / sent)
    return colours(part for part, _ in weight.most_common())


def _scope(part: str) -> str:
    return part.split("/")[-1]
