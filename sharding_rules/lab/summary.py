"""What the screen, the page and the difference share: numbers that a person reads, and collectives
added up.
"""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from sharding_rules.lab.report import SCALAR, Buffer, Collective, Report, location_text

GIB = 2**30


_UNITS = (("GiB", 2**30, 2), ("MiB", 2**20, 1), ("KiB", 2**10, 0))


def size(n: float) -> str:
    """Bytes: 4.20 GiB, 56.1 MiB, 3 KiB, 12 B."""
    for unit, scale, digits in _UNITS:
        if abs(n) >= 0.0995 * scale or (unit == "KiB" and abs(n) >= 2**10):
            return f"{n / scale:,.{digits}f} {unit}"
    return f"{n:,.0f} B"


@dataclasses.dataclass(frozen=True)
class Unit:
    """The unit of a whole table of bytes, so that its rows compare: that which suits the largest of
    them.
    """

    name: str
    """GiB, MiB or KiB."""
    scale: int
    digits: int

    @staticmethod
    def of(largest: float) -> Unit:
        """The largest unit in which `largest` is at least 0.1, to show it and smaller numbers."""
        return next(
            (Unit(*unit) for unit in _UNITS if largest >= 0.0995 * unit[1]), Unit(*_UNITS[-1])
        )

    def __call__(self, n: float) -> str:
        """The number in this unit, without its name."""
        return f"{n / self.scale:,.{self.digits}f}"


PREDICTED = "predicted, never measured"
"""Said wherever a step's time is first shown, as long as no GPU has confirmed one
(benchmarks/gpu_truth.py)."""


UPPER_BOUND = "≤: in a branch of a conditional, counted as if it always ran"


def duration(microseconds: float) -> str:
    """18.4 s, 56.1 ms, 3.2 µs."""
    for unit, scale in (("s", 1e6), ("ms", 1e3)):
        if microseconds >= 0.9995 * scale:
            return (
                f"{microseconds / scale:,.3g} {unit}"
                if microseconds < 1e3 * scale
                else f"{microseconds / scale:,.0f} {unit}"
            )
    return f"{microseconds:.3g} µs"


def flop(n: float) -> str:
    """337.4 TFLOP; smaller programs in GFLOP and MFLOP."""
    for unit, scale in (("TFLOP", 1e12), ("GFLOP", 1e9)):
        if n >= 0.1 * scale:
            return f"{n / scale:,.1f} {unit}"
    return f"{n / 1e6:,.1f} MFLOP"


def amount(n: float) -> str:
    """A number of parameters with four digits: 174.6 B, 124.4 M, 41.28 k."""
    for unit, scale in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if n >= scale:
            return f"{n / scale:.4g} {unit}"
    return f"{n:.0f}"


def percent(part: float, whole: float) -> str:
    """13 %; less than a half of one, but something: <1 %."""
    share = 100 * part / whole if whole else 0.0
    return "<1 %" if 0 < share < 0.5 else f"{share:.0f} %"


def over(axes: Sequence[str]) -> str:
    """Mesh axes in words: data+fsdp; one that moves nothing along any axis: none."""
    return "+".join(axes) or "none"


def signed(change: float, words: Callable[[float], str]) -> str:
    """A change with its sign: + 1.0 MiB."""
    return f"{'-' if change < 0 else '+'} {words(abs(change))}"


def link(nodes: int) -> str:
    """Returns the link that carries the bytes of a group that spans `nodes` NVLink domains: network
    or NVLink.
    """
    return "network" if nodes > 1 else "NVLink"


def shapes(all_of_them: Sequence[str], most: int = 1) -> str:
    """bf16[4096,12288] + 3 more; equal ones once: 2 x f32[768]."""
    counted = [f"{n} x {shape}" if n > 1 else shape for shape, n in Counter(all_of_them).items()]
    more = len(counted) - most
    return " ".join(counted[:most]) + (f" + {more} more" if more > 0 else "")


def mesh_words(report: Report) -> str:
    """data 8 x fsdp 16 x tensor 8; axes of one device left out."""
    return " x ".join(f"{axis} {n}" for axis, n in report.mesh.items() if n > 1) or "one device"


def efficiency(report: Report) -> str:
    """`MFU 37 %`; without the model's FLOPs what share of the tensor cores' peak the program's
    matmuls reach; empty without estimates.
    """
    if report.mfu is not None:
        return f"MFU {percent(report.mfu, 1)}"
    return (
        f"matmuls at {percent(report.utilisation, 1)} of the peak"
        if report.utilisation is not None
        else ""
    )


def ratio(report: Report) -> str:
    """`1.51 x the model's matmuls and attention`; empty where the model's FLOPs are not known."""
    return (
        f"{report.model_ratio:.2f} x the model's matmuls and attention"
        if report.model_ratio is not None
        else ""
    )


def headline(report: Report) -> str:
    """The verdict and the predicted step on one line: fits, 35.9 GiB free; step 3.58 s (predicted),
    49 % exposed, MFU 16 %, 2.09 x the model's matmuls and attention.
    """
    line = report.timeline
    if not line:
        return verdict(report)
    said = [
        f"step {duration(line.step)} (predicted)",
        f"{percent(line.exposed, line.step)} exposed",
        efficiency(report),
        ratio(report),
    ]
    return f"{verdict(report)}; {', '.join(filter(None, said))}"


def stages_words(report: Report) -> str:
    """Returns `, the mean of stages with 1.2 to 1.6 TFLOP` if stages differ in their matmuls, else
    nothing.
    """
    least, most = min(report.stage_flops, default=0), max(report.stage_flops, default=0)
    return (
        f", the mean of stages with {flop(least)} to {flop(most)}"
        if flop(least) != flop(most)
        else ""
    )


def verdict(report: Report) -> str:
    """fits, 35.9 GiB free; does not fit, 4.20 GiB too much."""
    if not report.hbm:
        return f"peak of {size(report.peak_bytes)}; the memory of these devices is not known"
    spare = report.hbm - report.peak_bytes
    return f"fits, {size(spare)} free" if report.fits else f"does not fit, {size(-spare)} too much"


def path(name: str) -> str:
    """state['params']['embedding'] with dots."""
    return re.sub(r"\[['\"]([^]]*)['\"]\]", r".\1", name)


def whose(buffer: Buffer) -> str:
    """Returns who needs a live buffer: the path of an argument and the mesh axes that shard it,
    else the place in the model.
    """
    if buffer.axes is not None:
        return f"{path(buffer.name)}, " + (
            f"sharded over {over(buffer.axes)}" if buffer.axes else "replicated"
        )
    known = buffer.where.part or buffer.where.phase or buffer.where.source or buffer.where.op
    return location_text(buffer.where) if known else buffer.name


@dataclasses.dataclass(frozen=True)
class Row:
    """Collectives that a table shows in one line, added up over a step."""

    collectives: tuple[Collective, ...]

    @property
    def one(self) -> Collective:
        """One of the group, for what all of them share."""
        return self.collectives[0]

    @property
    def times(self) -> int:
        """Executions of all of them in a step."""
        return sum(c.times for c in self.collectives)

    @property
    def payload(self) -> int:
        """Bytes of the whole arrays in a step."""
        return sum(c.times * c.payload for c in self.collectives)

    @property
    def wire(self) -> float:
        """Bytes that one device sends in a step."""
        return sum(c.times * c.wire for c in self.collectives)

    @property
    def busy(self) -> float:
        """Predicted microseconds in a step during which the network carries them."""
        return sum(c.times * c.duration for c in self.collectives)

    @property
    def exposed(self) -> float:
        """Predicted microseconds in a step during which compute waits for them."""
        return sum(c.exposed for c in self.collectives)

    @property
    def bounded(self) -> bool:
        """Some are in branches of which nothing is known, so that times, bytes and microseconds are
        upper bounds.
        """
        return any(c.bounded for c in self.collectives)

    @property
    def count(self) -> str:
        """How often they run in a step: 1,024, or ≤ 1,024 where that is an upper bound."""
        return f"{'≤ ' * self.bounded}{self.times:,}"

    @property
    def nodes(self) -> int:
        """The most nodes that one of them spans."""
        return max(c.nodes for c in self.collectives)

    @property
    def places(self) -> str:
        """attention, mlp: fwd+recompute+bwd. The innermost scopes, those that send most first;
        crumbs are left out.
        """
        sent = Counter[tuple[str, str]]()
        for c in self.collectives:
            sent[c.where.part.split("/")[-1], c.where.phase] += round(c.times * c.wire)
        large = [meaning for meaning, n in sent.most_common() if n >= _CRUMB * self.wire]
        parts = list(dict.fromkeys(part for part, _ in large if part))
        phases = [
            short
            for phase, short in _SHORT.items()
            if phase in {phase for _, phase in large} and [phase] != parts
        ]
        return ": ".join(filter(None, (", ".join(parts), "+".join(phases))))


_CRUMB = 0.02
_SHORT = {"forward": "fwd", "recompute": "recompute", "backward": "bwd", "optimizer": "optimizer"}


def by_axes(one: Collective) -> tuple:
    """A key that groups collectives by mesh axes, kind and dtype."""
    return (one.axes, one.kind, one.dtype)


def by_meaning(one: Collective) -> tuple:
    """Returns a key that stays the same from one compilation to the next: it has neither names of
    instructions nor source lines.
    """
    return (
        one.kind,
        one.axes,
        one.dtype,
        tuple(sorted(one.shapes)),
        one.where.part,
        one.where.phase,
    )


def rows(report: Report, key: Callable[[Collective], tuple]) -> list[Row]:
    """Collectives with the same key added up, scalars left out: the mesh axes that carry most
    first, then the rows of each.
    """
    groups: dict[tuple, list[Collective]] = {}
    for one in report.collectives:
        if one.payload >= SCALAR:
            groups.setdefault(key(one), []).append(one)
    carried = wire_by_axes(report)
    return sorted(
        (Row(tuple(g)) for g in groups.values()),
        key=lambda r: (-carried[r.one.axes], r.one.axes, -r.wire, key(r.one)),
    )


def matrix(report: Report) -> dict[tuple[tuple[str, ...], str], dict[str, Row]]:
    """(mesh axes, innermost part of the model) -> phase -> its collectives added up, scalars left
    out; most bytes first.
    """
    cells: dict[tuple[tuple[str, ...], str], dict[str, list[Collective]]] = {}
    for one in report.collectives:
        if one.payload >= SCALAR:
            cells.setdefault((one.axes, one.where.part.split("/")[-1]), {}).setdefault(
                one.where.phase, []
            ).append(one)
    table = {
        key: {phase: Row(tuple(each)) for phase, each in phases.items()}
        for key, phases in cells.items()
    }
    carried = wire_by_axes(report)
    return dict(
        sorted(
            table.items(),
            key=lambda item: (
                -carried[item[0][0]],
                item[0][0],
                -sum(row.wire for row in item[1].values()),
            ),
        )
    )


def wire_by_axes(report: Report) -> dict[tuple[str, ...], float]:
    """Bytes that one device sends in a step over each set of mesh axes (each collective counted
    once), the largest first.
    """
    total: dict[tuple[str, ...], float] = {}
    for one in report.collectives:
        total[one.axes] = total.get(one.axes, 0.0) + one.times * one.wire
    return dict(sorted(total.items(), key=lambda item: -item[1]))


def exposed_by_axes(report: Report) -> dict[str, float]:
    """Predicted microseconds in a step during which compute waits, by the mesh axes of what it
    waits for (data+fsdp), the most first.
    """
    return _exposed(report, lambda one: over(one.axes))


def exposed_by_phase(report: Report) -> dict[str, float]:
    """The same by phase: forward, backward (with what it recomputes), optimizer, other."""
    return _exposed(
        report,
        lambda one: "backward" if one.where.phase == "recompute" else one.where.phase or "other",
    )


def _exposed(report: Report, key: Callable[[Collective], str]) -> dict[str, float]:
    total: dict[str, float] = {}
    for one in report.collectives:
        if one.exposed > 0:
            total[key(one)] = total.get(key(one), 0.0) + one.exposed
    return dict(sorted(total.items(), key=lambda item: -item[1]))


def ratios(report: Report) -> dict[str, Any]:
    """Returns what of the predicted step is lost, as plain data: mfu, exposed_share and model_ratio
    as in the report, None where unknown; exposed_us by mesh axes and by phase.
    """
    shares = {name: getattr(report, name) for name in ("mfu", "exposed_share", "model_ratio")}
    return shares | {
        "exposed_us": {"axes": exposed_by_axes(report), "phase": exposed_by_phase(report)}
    }


def exposed_words(report: Report) -> str:
    """Returns `data 8 %, tensor 3 %; backward 10 %, forward 1 %`, as shares of the step; empty
    where nothing is exposed.
    """
    if not (report.timeline and report.timeline.step > 0):
        return ""
    step = report.timeline.step
    listed = (
        ", ".join(
            f"{name} {percent(us, step)}" for name, us in each.items() if us > _CRUMB / 4 * step
        )
        for each in (exposed_by_axes(report), exposed_by_phase(report))
    )
    return "; ".join(filter(None, listed))


def alike(buffers: Iterable[Buffer]) -> list[tuple[int, Buffer]]:
    """Live buffers with the same shape and place once, and how many there are; the most bytes in
    all first.
    """
    counted: dict[tuple, list[Buffer]] = {}
    for b in buffers:
        counted.setdefault(
            (b.kind, b.shape, b.bytes, b.where, b.axes, b.name if b.axes is not None else ""), []
        ).append(b)
    return sorted(
        ((len(same), same[0]) for same in counted.values()),
        key=lambda item: -item[0] * item[1].bytes,
    )
