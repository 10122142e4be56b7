"""What changed from one report to another, and golden ledgers: a program's collectives as text that
changes only when its meaning does.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping

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
    """Collectives of one meaning in a step; two lines are about the same thing where `meaning` is
    equal.
    """

    kind: str
    over: str
    """Mesh axes, outermost first: data+fsdp."""
    shapes: str
    """Shapes of the whole arrays with their dtypes, sorted."""
    where: str
    """backward of layers/attention."""
    times: int
    wire: int
    """Bytes that one device sends in a step."""

    @property
    def meaning(self) -> tuple[str, ...]:
        """What two collectives must share to be paired; sizes and counts may differ."""
        return (self.over, self.where, self.kind, self.shapes)

    def __str__(self) -> str:
        return (
            f"{self.kind} over {self.over} of {self.shapes} in {self.where}: {self.times} x, "
            f"{self.wire} bytes"
        )


_LINE = re.compile(
    r"(?P<kind>\S+) over (?P<over>\S+) of (?P<shapes>.+) in (?P<where>.+): (?P<times>\d+) x, "
    r"(?P<wire>\d+) bytes"
)


@dataclasses.dataclass(frozen=True)
class Change:
    """A line that appeared (`before` is None), vanished (`after` is None), or became another."""

    before: Line | None
    after: Line | None

    @property
    def wire(self) -> int:
        """Bytes in a step that are sent now and were not."""
        return (self.after.wire if self.after else 0) - (self.before.wire if self.before else 0)

    def __str__(self) -> str:
        """+ all-gather of bf16[12288,6144] over tensor, 96 x, in recompute of layers/mlp: + 4.20
        GiB.
        """
        old, new = self.before, self.after
        bytes_ = signed(self.wire, size) if self.wire else "as many bytes"
        if old and new and old.meaning == new.meaning:
            return (
                f"~ {new.kind} of {new.shapes} over {new.over} in {new.where}: {old.times} x -> "
                f"{new.times} x, {bytes_}"
            )
        if old and new:
            became = [
                f"{a} -> {b}"
                for a, b in ((old.kind, new.kind), (old.shapes, new.shapes), (old.over, new.over))
                if a != b
            ]
            return (
                f"~ {old.kind} of {old.shapes} over {old.over}, {old.times} x, in {old.where}: "
                f"{', '.join(became)}, {bytes_}"
            )
        sign, one = ("+", new) if new else ("-", old)
        assert one
        return (
            f"{sign} {one.kind} of {one.shapes} over {one.over}, {one.times} x, in {one.where}: "
            f"{bytes_}"
        )


@dataclasses.dataclass(frozen=True)
class Difference:
    """From one report to another. Every table holds (before, after) of what is not equal; `str` is
    the text for a pull request.
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
        return bool(
            self.meshes[0] != self.meshes[1]
            or self.memory
            or self.wire
            or self.collectives
            or self.flops
            or self.step
        )

    def __str__(self) -> str:
        a, b = self.names
        if not self:
            return f"{a} and {b}: no difference"
        lines = [f"{a} -> {b}"]
        if self.meshes[0] != self.meshes[1]:
            lines.append(f"mesh: {self.meshes[0]} -> {self.meshes[1]}")
        lines += _table("memory at the peak", self.memory, size) + _table(
            "sent in a step over", self.wire, size
        )
        if self.collectives:
            lines += ["collectives", *(f"  {change}" for change in self.collectives)]
        lines += _table("matmuls", self.flops, flop)
        times = {"step": self.step, "exposed": self.exposed}
        lines += _table(PREDICTED, {name: both for name, both in times.items() if both}, duration)
        return "\n".join(lines)


def diff(a: Report, b: Report) -> Difference:
    """Returns what changed from `a` to `b`. Collectives are the same if kind, axes, shapes, part
    and phase are; scalars do not count.
    """
    steps = (a.timeline.step, b.timeline.step) if a.timeline and b.timeline else None
    waits = (a.timeline.exposed, b.timeline.exposed) if a.timeline and b.timeline else None
    return Difference(
        names=(a.name, b.name),
        meshes=(mesh_words(a), mesh_words(b)),
        memory=_unequal(
            {**a.memory.by_kind, "peak": a.peak_bytes}, {**b.memory.by_kind, "peak": b.peak_bytes}
        ),
        wire=_unequal(_wire(a), _wire(b), least=SCALAR),
        collectives=_changes(_ledger(a), _ledger(b)),
        flops=_unequal(_flops(a), _flops(b)),
        step=steps if steps and steps[0] != steps[1] else None,
        exposed=waits
        if waits and steps and steps[0] != steps[1] and waits[0] != waits[1]
        else None,
    )


def ledger_text(report: Report) -> str:
    """The collectives of a program for a golden file: what a device sends, how often and for which
    part of the model, scalars left out.

    Neither names of instructions nor lines of source: only a change of meaning changes it.
    `explain` says what such a change is.
    """
    lines = sorted(_ledger(report), key=lambda line: line.meaning)
    return "\n".join([f"mesh {mesh_words(report)}", *map(str, lines)]) + "\n"


def explain(golden: str, now: str) -> str:
    """Returns what changed between two texts of `ledger_text`, in words; empty if nothing did.
    Raises LabError for any other text.
    """
    (mesh_a, a), (mesh_b, b) = _parse(golden), _parse(now)
    said = [f"mesh: {mesh_a} -> {mesh_b}"] if mesh_a != mesh_b else []
    changes = _changes(a, b)
    said += map(str, changes)
    sent = _unequal(_sent(a), _sent(b)) if changes else {}
    return "\n".join(said + _table("sent in a step over", sent, size))


def _ledger(report: Report) -> list[Line]:
    result = []
    for row in rows(report, by_meaning):
        where = location_text(Location(row.one.where.part, row.one.where.phase))
        result.append(
            Line(
                row.one.kind,
                over(row.one.axes),
                " ".join(sorted(row.one.shapes)),
                where,
                row.times,
                round(row.wire),
            )
        )
    return result


def _parse(text: str) -> tuple[str, list[Line]]:
    mesh, *lines = text.strip().splitlines() or [""]
    if not mesh.startswith("mesh "):
        raise LabError(f"{mesh!r} does not begin a ledger; its first line is: mesh AXIS N x AXIS N")
    result = []
    for line in lines:
        if not (match := _LINE.fullmatch(line)):
            raise LabError(f"{line!r} is no line of a ledger")
        result.append(
            Line(**{**match.groupdict(), "times": int(match["times"]), "wire": int(match["wire"])})
        )
    return mesh.removeprefix("mesh "), result


def _changes(a: Iterable[Line], b: Iterable[Line]) -> tuple[Change, ...]:
    """The most bytes first. A line that vanished while one appeared that differs in a single word
    became that.
    """
    before, after = ({line.meaning: line for line in lines} for lines in (a, b))
    changes = [
        Change(before[m], after[m]) for m in before.keys() & after.keys() if before[m] != after[m]
    ]
    gone = sorted((before[m] for m in before.keys() - after.keys()), key=str)
    for new in sorted((after[m] for m in after.keys() - before.keys()), key=str):
        was = next((old for old in gone if _became(old, new)), None)
        if was:
            gone.remove(was)
        changes.append(Change(was, new))
    changes += [Change(old, None) for old in gone]
    return tuple(sorted(changes, key=lambda c: (-abs(c.wire), str(c))))


def _became(old: Line, new: Line) -> bool:
    words = [(old.kind, new.kind), (old.over, new.over), (old.shapes, new.shapes)]
    return old.where == new.where and old.times == new.times and sum(a != b for a, b in words) == 1


def _wire(report: Report) -> dict[str, float]:
    return {over(axes): n for axes, n in wire_by_axes(report).items()}


def _flops(report: Report) -> dict[str, int]:
    return {phase or "no phase": n for phase, n in report.flops.items()}


def _sent(lines: Iterable[Line]) -> dict[str, int]:
    total: dict[str, int] = {}
    for line in lines:
        total[line.over] = total.get(line.over, 0) + line.wire
    return total


def _unequal(a: Mapping, b: Mapping, least: float = 1) -> dict:
    both = {
        key: (a.get(key, 0), b.get(key, 0)) for key in (*a, *(key for key in b if key not in a))
    }
    return {key: (x, y) for key, (x, y) in both.items() if abs(x - y) >= least}


def _table(
    title: str, rows: Mapping[str, tuple[float, float]], words: Callable[[float], str]
) -> list[str]:
    """Before, after and the change, in columns."""
    cells = [
        (f"  {name}", words(a), words(b), signed(b - a, words)) for name, (a, b) in rows.items()
    ]
    wide = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = [
        f"{n:<{wide[0]}}  {a:>{wide[1]}} -> {b:>{wide[2]}}  {c:>{wide[3]}}" for n, a, b, c in cells
    ]
    return [title, *lines] if lines else []
