"""Numbers that a person reads, and collectives added up.

The screen, the page and the difference of two reports share them.
"""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from sharding_rules.lab.rates import NETWORK, NVLINK, PCIE, Link
from sharding_rules.lab.report import SCALAR, Band, Buffer, Collective, Report, location_text

Axes = tuple[str, ...]

GIB = 2**30

PREDICTED = "predicted, never measured"
"""Said wherever a step's time is first shown: a report is of a program that has not run."""

UPPER_BOUND = "≤: in a branch of a conditional, counted as if it always ran"


# Numbers in words.


def size(n: float) -> str:
    """Returns bytes in words: 4.20 GiB, 56.1 MiB, 3 KiB, 12 B."""
    for unit in _UNITS:
        if abs(n) >= _SMALLEST * unit.scale:
            return f"{unit(n)} {unit.name}"
    return f"{n:,.0f} B"


@dataclasses.dataclass(frozen=True)
class Unit:
    """The unit of a whole table of bytes, so that its rows compare.

    It suits the largest of them.
    """

    name: str
    """GiB, MiB or KiB."""
    scale: int
    digits: int

    @staticmethod
    def of(largest: float) -> Unit:
        """Returns the largest unit in which `largest` is at least 0.1, or else KiB."""
        fitting = (unit for unit in _UNITS if largest >= _SMALLEST * unit.scale)
        return next(fitting, _UNITS[-1])

    def __call__(self, n: float) -> str:
        """Returns the number in this unit, without its name."""
        return f"{n / self.scale:,.{self.digits}f}"


_UNITS = (Unit("GiB", 2**30, 2), Unit("MiB", 2**20, 1), Unit("KiB", 2**10, 0))
_SMALLEST = 0.0995
"""The smallest number that a unit shows: 0.10 GiB."""


def duration(microseconds: float) -> str:
    """Returns a time in words: 18.4 s, 56.1 ms, 3.2 µs."""
    for unit, scale in (("s", 1e6), ("ms", 1e3)):
        # From 0.9995 on three digits round to 1.
        if microseconds < 0.9995 * scale:
            continue
        if microseconds < 1e3 * scale:
            return f"{microseconds / scale:,.3g} {unit}"
        return f"{microseconds / scale:,.0f} {unit}"
    return f"{microseconds:.3g} µs"


def durations(band: Band) -> str:
    """Returns a predicted time in words, in the unit of its slow end: 3.58 to 4.02 s."""
    slow = duration(band.slow)
    fast = duration(band.fast)
    if fast == slow:
        return slow
    number, _, unit = fast.rpartition(" ")
    return f"{number if slow.endswith(f' {unit}') else fast} to {slow}"


def runs(n: float) -> str:
    """Returns how often something runs: 1,024, or 0.5 where that is an expectation."""
    return f"{n:,.10g}"


def flop(n: float) -> str:
    """Returns floating-point operations in words: 337.4 TFLOP; smaller ones in GFLOP and MFLOP."""
    for unit, scale in (("TFLOP", 1e12), ("GFLOP", 1e9)):
        if n >= 0.1 * scale:
            return f"{n / scale:,.1f} {unit}"
    return f"{n / 1e6:,.1f} MFLOP"


def amount(n: float) -> str:
    """Returns a number of parameters with four digits: 174.6 B, 124.4 M, 41.28 k."""
    for unit, scale in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if n >= scale:
            return f"{n / scale:.4g} {unit}"
    return f"{n:.0f}"


def percent(part: float, total: float) -> str:
    """Returns a share in words: 13 %; less than a half of one, but something: <1 %."""
    share = 100 * part / total if total else 0.0
    return "<1 %" if 0 < share < 0.5 else f"{share:.0f} %"


def over(axes: Sequence[str]) -> str:
    """Returns mesh axes in words: data+fsdp; none for a collective along no axis."""
    return "+".join(axes) or "none"


def signed(change: float, words: Callable[[float], str]) -> str:
    """Returns a change with its sign: + 1.0 MiB."""
    return f"{'-' if change < 0 else '+'} {words(abs(change))}"


def link(nodes: int) -> str:
    """Returns the link, network or NVLink, between the members of a group.

    nodes: the NVLink domains that the group spans.
    """
    return "network" if nodes > 1 else "NVLink"


def shapes(all_of_them: Sequence[str], most: int = 1) -> str:
    """Returns arrays in words: bf16[4096,12288] + 3 more; equal ones once: 2 x f32[768]."""
    counts = Counter(all_of_them)
    words = [f"{n} x {shape}" if n > 1 else shape for shape, n in counts.items()]
    text = " ".join(words[:most])
    return f"{text} + {len(words) - most} more" if len(words) > most else text


# A report in words.


def mesh_words(report: Report) -> str:
    """Returns the mesh, without axes of one device: data 8 x fsdp 16 x tensor 8."""
    return " x ".join(f"{axis} {n}" for axis, n in report.mesh.items() if n > 1) or "one device"


def efficiency(report: Report) -> str:
    """Returns `MFU 33 to 37 %`, or else how much of the tensor cores' peak its matmuls reach.

    The MFU needs the model's FLOPs. Empty without estimates.
    """
    band = report.step_band
    if report.mfu is not None and band is not None:
        slowest, fastest = (
            percent(report.model_flops, us / 1e6 * report.peak_flops) for us in reversed(band)
        )
        return f"MFU {fastest}" if slowest == fastest else f"MFU {slowest[:-2]} to {fastest}"
    if report.utilisation is not None:
        return f"matmuls at {percent(report.utilisation, 1)} of the peak"
    return ""


def ratio(report: Report) -> str:
    """Returns `1.51 x the model's matmuls and attention`; empty if its FLOPs are not known."""
    if report.model_ratio is None:
        return ""
    return f"{report.model_ratio:.2f} x the model's matmuls and attention"


def headline(report: Report) -> str:
    """Returns the verdict and the predicted step on one line.

    fits, 35.9 GiB free; step 3.58 to 4.02 s (predicted), 49 % exposed, MFU 14 to 16 %, 2.09 x the
    model's matmuls and attention.
    """
    line = report.timeline
    band = report.step_band
    if not line or not band:
        return verdict(report)
    step = [
        f"step {durations(band)} (predicted)",
        f"{percent(line.exposed, line.step)} exposed",
        f"{percent(line.host_exposed, line.step)} waiting for PCIe" if line.host_exposed else "",
        efficiency(report),
        ratio(report),
    ]
    return f"{verdict(report)}; {', '.join(filter(None, step))}"


def conditionals_words(report: Report) -> str:
    """Returns how conditionals are counted: 24 of extra_round with probability 0.

    Empty where none is counted with a probability.
    """
    return ", ".join(
        f"{runs(one.times)} of {one.scope} with probability {one.probability:g}"
        for one in report.conditionals
    )


def stages_words(report: Report) -> str:
    """Returns `, the mean of stages with 1.2 to 1.6 TFLOP`; empty if stages do not differ."""
    least = flop(min(report.stage_flops, default=0))
    most = flop(max(report.stage_flops, default=0))
    return f", the mean of stages with {least} to {most}" if least != most else ""


def verdict(report: Report) -> str:
    """Returns whether the program fits: fits, 35.9 GiB free; does not fit, 4.20 GiB too much; too
    tight, 1.20 GiB free.
    """
    if not report.hbm:
        return f"peak of {size(report.peak_bytes)}; the memory of these devices is not known"
    spare = report.hbm - report.peak_bytes
    if report.fits:
        return f"fits, {size(spare)} free"
    if spare < 0:
        return f"does not fit, {size(-spare)} too much"
    least = size(report.margin * report.peak_bytes)
    return f"too tight, {size(spare)} free, less than {least} ({report.margin:.0%} of the peak)"


def host_words(report: Report) -> str:
    """Returns what a device has in its host's memory, and copies over PCIe in a step.

    59.8 GiB on the host for each device (moments 59.8 GiB); 119.6 GiB copied in a step, 2.33 s of
    PCIe, 2.31 s exposed. Empty for a program that does not use the host's memory.
    """
    host = report.memory.host
    if not host.bytes and not report.host_copies:
        return ""
    parts = [f"{kind} {size(n)}" for kind, n in host.by_kind.items()]
    if host.temporaries:
        parts.append(f"temporaries {size(host.temporaries)}")
    words = f"{size(host.bytes)} on the host for each device"
    if parts:
        words += f" ({', '.join(parts)})"
    words += f"; {size(report.host_copy_bytes)} copied in a step"
    line = report.timeline
    if line:
        words += f", {duration(line.host)} of PCIe, {duration(line.host_exposed)} exposed"
    return words


def rates_words(report: Report) -> str:
    """Returns what the band of the step is between: the rates, and the assumed link that decides.

    Empty without estimates.
    """
    if report.sustained is None:
        return ""
    words = "from optimistic rates to those that one H200 sustained"
    if report.host_copies:
        words += f"; {PCIE} (assumed)"
    link = {"NVLink": NVLINK, "network": NETWORK}.get(report.deciding_link)
    if link and not _is_settled(report, link):
        words += f"; most uncertain: {link} (assumed)"
    return words


def changes_words(report: Report) -> str:
    """Returns the constants of the hardware that are not the usual ones; empty if all are."""
    return "; ".join(map(str, report.changes))


def _is_settled(report: Report, link: Link) -> bool:
    """Whether --hw, or a profile, gives the share of a link's speed that collectives reach."""
    names = {change.name for change in report.changes}
    if link is NVLINK:
        return "nvlink_share" in names or any(name.endswith("over NVLink") for name in names)
    return "nic_share" in names or any(name.endswith("over network") for name in names)


def path(name: str) -> str:
    """Returns the path of an argument, such as state['params']['embedding'], with dots."""
    return re.sub(r"\[['\"]([^]]*)['\"]\]", r".\1", name)


def whose(buffer: Buffer) -> str:
    """Returns what needs a live buffer.

    For an argument, this is its path and the mesh axes that shard it; for others, the place in the
    model.
    """
    if buffer.axes is not None:
        sharding = f"sharded over {over(buffer.axes)}" if buffer.axes else "replicated"
        return f"{path(buffer.name)}, {sharding}"
    location = buffer.where
    if location.part or location.phase or location.source or location.op:
        return location_text(location)
    return buffer.name


# Collectives added up.


@dataclasses.dataclass(frozen=True)
class Row:
    """Collectives that a table shows in one line, added up over a step."""

    collectives: tuple[Collective, ...]

    @property
    def one(self) -> Collective:
        """One of the group, for what all of them share."""
        return self.collectives[0]

    @property
    def times(self) -> float:
        """Executions of all of them in a step."""
        return sum(c.times for c in self.collectives)

    @property
    def payload(self) -> float:
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
        """Whether times, bytes and microseconds are upper bounds.

        Some of the collectives are then in branches of which nothing is known.
        """
        return any(c.bounded for c in self.collectives)

    @property
    def count(self) -> str:
        """How often they run in a step: 1,024, or ≤ 1,024 where that is an upper bound."""
        return f"≤ {runs(self.times)}" if self.bounded else runs(self.times)

    @property
    def nodes(self) -> int:
        """The most nodes that one of them spans."""
        return max(c.nodes for c in self.collectives)

    @property
    def places(self) -> str:
        """The innermost scopes and the phases in words: attention, mlp: fwd+recompute+bwd.

        The scopes that send most are first; those that send next to nothing are left out.
        """
        sent = Counter[tuple[str, str]]()
        for c in self.collectives:
            sent[_innermost(c), c.where.phase] += round(c.times * c.wire)
        large = [scope for scope, n in sent.most_common() if n >= _SMALL_SHARE * self.wire]
        parts = list(dict.fromkeys(part for part, _ in large if part))
        large_phases = {phase for _, phase in large}
        phases = []
        for phase, word in _PHASE_WORDS.items():
            # The optimizer is a part, too: it is not said twice.
            if phase in large_phases and [phase] != parts:
                phases.append(word)
        return ": ".join(filter(None, (", ".join(parts), "+".join(phases))))


_SMALL_SHARE = 0.02
"""Share of the bytes of a row that a place must have to be named."""
_PHASE_WORDS = {
    "forward": "fwd",
    "recompute": "recompute",
    "backward": "bwd",
    "optimizer": "optimizer",
}


def by_axes(one: Collective) -> tuple:
    """Returns a key that groups collectives by mesh axes, kind and dtype."""
    return (one.axes, one.kind, one.dtype)


def by_meaning(one: Collective) -> tuple:
    """Returns a key that stays the same from one compilation to the next.

    It has neither names of instructions nor source lines.
    """
    arrays = tuple(sorted(one.shapes))
    return (one.kind, one.axes, one.dtype, arrays, one.where.part, one.where.phase)


def rows(report: Report, key: Callable[[Collective], tuple]) -> list[Row]:
    """Returns collectives with the same key added up, scalars left out.

    The mesh axes that carry most are first, then the rows of each.
    """
    groups: dict[tuple, list[Collective]] = {}
    for one in report.collectives:
        if one.payload >= SCALAR:
            groups.setdefault(key(one), []).append(one)
    sent = wire_by_axes(report)
    return sorted(
        (Row(tuple(group)) for group in groups.values()),
        key=lambda row: (-sent[row.one.axes], row.one.axes, -row.wire, key(row.one)),
    )


def matrix(report: Report) -> dict[tuple[Axes, str], dict[str, Row]]:
    """Returns collectives added up, scalars left out: (mesh axes, part) -> phase -> row.

    The part of the model is the innermost. Most bytes are first.
    """
    groups: dict[tuple[Axes, str], dict[str, list[Collective]]] = {}
    for one in report.collectives:
        if one.payload >= SCALAR:
            phases = groups.setdefault((one.axes, _innermost(one)), {})
            phases.setdefault(one.where.phase, []).append(one)
    cells: dict[tuple[Axes, str], dict[str, Row]] = {}
    for key, phases in groups.items():
        cells[key] = {phase: Row(tuple(group)) for phase, group in phases.items()}
    sent = wire_by_axes(report)

    def rank(key: tuple[Axes, str]) -> tuple[float, Axes, float]:
        axes, _ = key
        return (-sent[axes], axes, -sum(row.wire for row in cells[key].values()))

    return {key: cells[key] for key in sorted(cells, key=rank)}


def _innermost(one: Collective) -> str:
    return one.where.part.split("/")[-1]


def wire_by_axes(report: Report) -> dict[Axes, float]:
    """Returns the bytes that one device sends in a step over each set of mesh axes.

    Each collective is counted once. The largest is first.
    """
    sent: dict[Axes, float] = {}
    for one in report.collectives:
        sent[one.axes] = sent.get(one.axes, 0.0) + one.times * one.wire
    return dict(sorted(sent.items(), key=lambda item: -item[1]))


def exposed_by_axes(report: Report) -> dict[str, float]:
    """Returns the predicted microseconds in a step during which compute waits, by mesh axes.

    The axes are those of the collective that it waits for (data+fsdp), the most first.
    """
    return _exposed(report, lambda one: over(one.axes))


def exposed_by_phase(report: Report) -> dict[str, float]:
    """Returns the predicted microseconds in a step during which compute waits, by phase.

    Phases are forward, backward (with what it recomputes), optimizer, other.
    """
    return _exposed(
        report,
        lambda one: "backward" if one.where.phase == "recompute" else one.where.phase or "other",
    )


def _exposed(report: Report, key: Callable[[Collective], str]) -> dict[str, float]:
    exposed: dict[str, float] = {}
    for one in report.collectives:
        if one.exposed > 0:
            exposed[key(one)] = exposed.get(key(one), 0.0) + one.exposed
    return dict(sorted(exposed.items(), key=lambda item: -item[1]))


def ratios(report: Report) -> dict[str, Any]:
    """Returns as plain data how much of the predicted step is lost.

    mfu, exposed_share and model_ratio are as in the report, None where unknown; exposed_us is by
    mesh axes and by phase.
    """
    return {
        "mfu": report.mfu,
        "exposed_share": report.exposed_share,
        "model_ratio": report.model_ratio,
        "exposed_us": {"axes": exposed_by_axes(report), "phase": exposed_by_phase(report)},
    }


def exposed_words(report: Report) -> str:
    """Returns `data 8 %, tensor 3 %; backward 10 %, forward 1 %`, as shares of the step.

    Empty where nothing is exposed.
    """
    if not (report.timeline and report.timeline.step > 0):
        return ""
    step = report.timeline.step
    lists = []
    for exposed in (exposed_by_axes(report), exposed_by_phase(report)):
        large = {name: us for name, us in exposed.items() if us > _SMALL_EXPOSED_SHARE * step}
        lists.append(", ".join(f"{name} {percent(us, step)}" for name, us in large.items()))
    return "; ".join(filter(None, lists))


_SMALL_EXPOSED_SHARE = 0.005
"""Share of the step that an exposed time must have to be named."""


def alike(buffers: Iterable[Buffer]) -> list[tuple[int, Buffer]]:
    """Returns live buffers with the same shape and place once, and how many there are.

    The most bytes in all are first. Arguments differ by their names.
    """
    groups: dict[tuple, list[Buffer]] = {}
    for buffer in buffers:
        name = buffer.name if buffer.axes is not None else ""
        key = (buffer.kind, buffer.shape, buffer.bytes, buffer.where, buffer.axes, name)
        groups.setdefault(key, []).append(buffer)
    counted = [(len(group), group[0]) for group in groups.values()]
    return sorted(counted, key=lambda item: -item[0] * item[1].bytes)
