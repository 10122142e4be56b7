"""What changed from one report to another, and golden ledgers.

A golden ledger is a program's collectives as text that changes only when its meaning does.
"""

from __future__ import annotations

import dataclasses
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence

from sharding_rules.lab.report import LabError, Location, Report, location_text
from sharding_rules.lab.summary import (
    PREDICTED,
    SCALAR,
    by_meaning,
    duration,
    flop,
    mesh_words,
    over,
    rows,
    signed,
    size,
    wire_by_axes,
)


@dataclasses.dataclass(frozen=True)
class Line:
    """Collectives of one meaning in a step."""

    kind: str
    over: str
    """Mesh axes, outermost first: data+fsdp."""
    shapes: str
    """Shapes of the whole arrays with their dtypes, sorted."""
    where: str
    """backward of layers/attention."""
    times: float
    wire: int
    """Bytes that one device sends in a step."""

    @property
    def meaning(self) -> tuple[str, ...]:
        """What two collectives must share to be paired; sizes and counts may differ."""
        return (self.over, self.where, self.kind, self.shapes)

    def __str__(self) -> str:
        return (
            f"{self.kind} over {self.over} of {self.shapes} in {self.where}: {self.times:.10g} x, "
            f"{self.wire} bytes"
        )


# `str` of a Line.
_LINE = re.compile(
    r"(?P<kind>\S+) over (?P<over>\S+) of (?P<shapes>.+) in (?P<where>.+): "
    r"(?P<times>\d+(?:\.\d+)?) x, (?P<wire>\d+) bytes"
)


@dataclasses.dataclass(frozen=True)
class Change:
    """A line that appeared (`old` is None), vanished (`new` is None), or became another."""

    old: Line | None
    new: Line | None

    @property
    def wire(self) -> int:
        """Bytes in a step that are sent now and were not."""
        old = self.old.wire if self.old else 0
        new = self.new.wire if self.new else 0
        return new - old

    def __str__(self) -> str:
        """Returns a line of a pull request.

        + all-gather of bf16[12288,6144] over tensor, 96 x, in recompute of layers/mlp: + 4.20 GiB
        """
        old = self.old
        new = self.new
        sent = signed(self.wire, size) if self.wire else "as many bytes"
        if old is None and new is not None:
            return f"+ {_in_words(new)}: {sent}"
        assert old
        if new is None:
            return f"- {_in_words(old)}: {sent}"
        if old.meaning == new.meaning:
            return (
                f"~ {new.kind} of {new.shapes} over {new.over} in {new.where}: "
                f"{old.times:.10g} x -> {new.times:.10g} x, {sent}"
            )
        words = [f"{a} -> {b}" for a, b in _changed_words(old, new)]
        return f"~ {_in_words(old)}: {', '.join(words)}, {sent}"


def _in_words(line: Line) -> str:
    return f"{line.kind} of {line.shapes} over {line.over}, {line.times:.10g} x, in {line.where}"


def _changed_words(old: Line, new: Line) -> list[tuple[str, str]]:
    words = [(old.kind, new.kind), (old.shapes, new.shapes), (old.over, new.over)]
    return [(a, b) for a, b in words if a != b]


@dataclasses.dataclass(frozen=True)
class Difference:
    """The difference between two reports; `str` is the text for a pull request.

    Every table holds (before, after) of what is not equal.
    """

    names: tuple[str, str]
    meshes: tuple[str, str]
    memory: dict[str, tuple[int, int]]
    """Bytes at the peak by class, and `peak`."""
    wire: dict[str, tuple[float, float]]
    """Bytes that a device sends in a step by mesh axes."""
    collectives: tuple[Change, ...]
    flops: dict[str, tuple[int, int]]
    """FLOPs of matmuls by phase."""
    step: tuple[float, float] | None
    """Predicted microseconds; None where they are equal or one of them is unknown."""
    exposed: tuple[float, float] | None = None
    """Predicted microseconds during which compute waits for the network; None as for `step`."""

    def __bool__(self) -> bool:
        """Whether anything is not equal."""
        return bool(
            self.meshes[0] != self.meshes[1]
            or self.memory
            or self.wire
            or self.collectives
            or self.flops
            or self.step
        )

    def __str__(self) -> str:
        old_name, new_name = self.names
        if not self:
            return f"{old_name} and {new_name}: no difference"
        lines = [f"{old_name} -> {new_name}"]
        if self.meshes[0] != self.meshes[1]:
            lines.append(f"mesh: {self.meshes[0]} -> {self.meshes[1]}")
        lines += _table("memory at the peak", self.memory, size)
        lines += _table("sent in a step over", self.wire, size)
        if self.collectives:
            lines.append("collectives")
            lines += [f"  {change}" for change in self.collectives]
        lines += _table("matmuls", self.flops, flop)
        times = {}
        if self.step:
            times["step"] = self.step
        if self.exposed:
            times["exposed"] = self.exposed
        lines += _table(PREDICTED, times, duration)
        return "\n".join(lines)


def _table(
    title: str, rows: Mapping[str, tuple[float, float]], words: Callable[[float], str]
) -> list[str]:
    """Returns a line for each row, with before, after and the change in columns."""
    if not rows:
        return []
    cells = []
    for name, (old, new) in rows.items():
        cells.append((f"  {name}", words(old), words(new), signed(new - old, words)))
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = [title]
    for name, old, new, change in cells:
        lines.append(
            f"{name:<{widths[0]}}  {old:>{widths[1]}} -> {new:>{widths[2]}}  {change:>{widths[3]}}"
        )
    return lines


def diff(a: Report, b: Report) -> Difference:
    """Returns what changed from `a` to `b`.

    Collectives are the same if kind, axes, shapes, part and phase are; scalars do not count.
    """
    step = None
    exposed = None
    if a.timeline and b.timeline and a.timeline.step != b.timeline.step:
        step = (a.timeline.step, b.timeline.step)
        if a.timeline.exposed != b.timeline.exposed:
            exposed = (a.timeline.exposed, b.timeline.exposed)
    return Difference(
        names=(a.name, b.name),
        meshes=(mesh_words(a), mesh_words(b)),
        memory=_unequal(_peak_memory(a), _peak_memory(b)),
        wire=_unequal(wire_table(a), wire_table(b), least=SCALAR),
        collectives=_changes(_ledger(a), _ledger(b)),
        flops=_unequal(flops_table(a), flops_table(b)),
        step=step,
        exposed=exposed,
    )


def _peak_memory(report: Report) -> dict[str, int]:
    return {**report.memory.by_kind, "peak": report.peak_bytes}


def wire_table(report: Report) -> dict[str, float]:
    """Returns the bytes that a device sends in a step, by mesh axes in words."""
    return {over(axes): n for axes, n in wire_by_axes(report).items()}


def flops_table(report: Report) -> dict[str, int]:
    """Returns the FLOPs of matmuls by phase in words."""
    return {phase or "no phase": n for phase, n in report.flops.items()}


def _unequal(a: Mapping, b: Mapping, least: float = 1) -> dict:
    """Returns both values of each key where they differ by `least`; a missing value is 0."""
    unequal = {}
    for key in dict.fromkeys([*a, *b]):
        old = a.get(key, 0)
        new = b.get(key, 0)
        if abs(old - new) >= least:
            unequal[key] = (old, new)
    return unequal


# Ledgers.


def ledger_text(report: Report) -> str:
    """Returns the collectives of a program for a golden file.

    What a device sends, how often and for which part of the model, scalars left out. There are
    neither names of instructions nor lines of source, so that only a change of meaning changes it.
    `explain` says what such a change is.
    """
    lines = sorted(_ledger(report), key=lambda line: line.meaning)
    return "\n".join([f"mesh {mesh_words(report)}", *map(str, lines)]) + "\n"


def explain(golden: str, current: str) -> str:
    """Returns what changed between two texts of `ledger_text`, in words; empty if nothing did.

    Raises LabError for any other text.
    """
    old_mesh, old_lines = _parse(golden)
    new_mesh, new_lines = _parse(current)
    text = []
    if old_mesh != new_mesh:
        text.append(f"mesh: {old_mesh} -> {new_mesh}")
    changes = _changes(old_lines, new_lines)
    text += map(str, changes)
    if changes:
        sent = _unequal(_wire_bytes(old_lines), _wire_bytes(new_lines))
        text += _table("sent in a step over", sent, size)
    return "\n".join(text)


def _ledger(report: Report) -> list[Line]:
    lines = []
    for row in rows(report, by_meaning):
        collective = row.one
        location = Location(collective.where.part, collective.where.phase)  # without a source line
        lines.append(
            Line(
                kind=collective.kind,
                over=over(collective.axes),
                shapes=" ".join(sorted(collective.shapes)),
                where=location_text(location),
                times=row.times,
                wire=round(row.wire),
            )
        )
    return lines


def _parse(text: str) -> tuple[str, list[Line]]:
    """Returns the mesh and the lines of a golden ledger."""
    mesh, *lines = text.strip().splitlines() or [""]
    if not mesh.startswith("mesh "):
        raise LabError(f"{mesh!r} does not begin a ledger; its first line is: mesh AXIS N x AXIS N")
    return mesh.removeprefix("mesh "), [_parse_line(line) for line in lines]


def _parse_line(text: str) -> Line:
    match = _LINE.fullmatch(text)
    if not match:
        raise LabError(f"{text!r} is no line of a ledger")
    return Line(
        kind=match["kind"],
        over=match["over"],
        shapes=match["shapes"],
        where=match["where"],
        times=float(match["times"]),
        wire=int(match["wire"]),
    )


def _wire_bytes(lines: Iterable[Line]) -> dict[str, int]:
    wire_bytes: dict[str, int] = defaultdict(int)
    for line in lines:
        wire_bytes[line.over] += line.wire
    return wire_bytes


def _changes(a: Sequence[Line], b: Sequence[Line]) -> tuple[Change, ...]:
    """Returns the changes from `a` to `b`, the most bytes first.

    A line that vanished while one appeared that differs in a single word became that.
    """
    old = {line.meaning: line for line in a}
    new = {line.meaning: line for line in b}
    changes = []
    for meaning in old.keys() & new.keys():
        if old[meaning] != new[meaning]:
            changes.append(Change(old[meaning], new[meaning]))

    vanished = sorted((old[meaning] for meaning in old.keys() - new.keys()), key=str)
    appeared = sorted((new[meaning] for meaning in new.keys() - old.keys()), key=str)
    for line in appeared:
        origin = next((candidate for candidate in vanished if _became(candidate, line)), None)
        if origin is not None:
            vanished.remove(origin)
        changes.append(Change(origin, line))
    changes += [Change(line, None) for line in vanished]
    return tuple(sorted(changes, key=lambda change: (-abs(change.wire), str(change))))


def _became(old: Line, new: Line) -> bool:
    """Whether two lines are the same but for a single word."""
    if old.where != new.where or old.times != new.times:
        return False
    return len(_changed_words(old, new)) == 1
