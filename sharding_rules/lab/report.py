"""A compiled program as data: collectives, memory, matmuls, timeline.

Everything else in the lab makes a report or reads one. A report is for one device of the mesh (all
run the same program) and one run of the program, in bytes and microseconds.
"""

from __future__ import annotations

import base64
import dataclasses
import json
import lzma
import math
import re
from collections.abc import Collection, Iterator
from functools import cache, cached_property
from importlib.metadata import version
from typing import Any, Literal, NamedTuple

from sharding_rules.lab.vocabulary import NEUTRAL, Vocabulary

Phase = Literal["forward", "recompute", "backward", "optimizer", ""]
"""The phase of a training step; empty: none of them, or XLA does not say."""

MARGIN = 0.05
"""`Report.margin` of a program that the installed jax has compiled."""
MARGIN_OF_OTHER_JAX = 0.1
"""The same of a report that another version of jax has made."""
SCALAR = 1024
"""Bytes: collectives with less payload are norms, counts and losses. No count and no table lists
them."""


class Band(NamedTuple):
    """A predicted time, in microseconds."""

    fast: float
    """At the optimistic rates, save where a measured rate is above them."""
    slow: float
    """At the sustained rates."""


@dataclasses.dataclass(frozen=True)
class Change:
    """A constant of a target that is not the usual one."""

    name: str
    """As --hw has it: nvlink, nic, matmul."""
    usual: str
    """The value that the target has, with its unit."""
    value: str
    """The value that the predictions use instead, with its unit."""
    origin: str
    """Who says so: given, or the profile."""

    def __str__(self) -> str:
        return f"{self.name} {self.value} instead of {self.usual} ({self.origin})"


class LabError(ValueError):
    """A program that cannot be compiled or does not keep its budget.

    The text is the whole message.
    """


class CompilerMissing(LabError):
    """XLA's compiler for CUDA is not installed.

    `subject` says what is missing; the message adds `fix`, what to install.
    """

    def __init__(self, subject: str, fix: str) -> None:
        super().__init__(f"{subject}; {fix}")
        self.subject = subject


@dataclasses.dataclass(frozen=True)
class Slot:
    """The trips of a loop in which a conditional runs. XLA does not know them.

    A pipeline's forward slot, for example, is idle while the pipeline fills and drains. Raises
    LabError where `stages` is no table.
    """

    scope: str
    """The named scope around the conditional, `forward_slot`, or several, `backward_slot/head`; the
    innermost that fits counts."""
    stages: tuple[str, ...]
    """By stage (devices that take the same branches), a letter for each trip: "1" it runs, "0" it
    is skipped. The trips are those of the loop, or of the loops that run the same table one after
    another."""

    def __post_init__(self) -> None:
        if len(set(map(len, self.stages))) != 1 or set("".join(self.stages)) - {"0", "1"}:
            raise LabError(
                f"slot {self.scope!r} needs for each stage a text of equal length, of 0 and 1, not "
                f"{self.stages}"
            )

    @staticmethod
    def of(scope: str, active: Any) -> Slot:
        """Returns a slot from a table [trips, stages], true where the conditional runs.

        `Slot.of("forward_slot", microbatch >= 0)`.
        """
        stages = []
        for stage in zip(*active, strict=True):
            stages.append("".join("1" if runs else "0" for runs in stage))
        return Slot(scope, tuple(stages))

    @property
    def trips(self) -> int:
        """Trips of the loop around the conditional."""
        return len(self.stages[0])

    def within(self, begin: int, end: int) -> Slot:
        """Returns the slot of a loop that runs only the trips from `begin` to before `end`."""
        return Slot(self.scope, tuple(stage[begin:end] for stage in self.stages))

    def runs(self, stage: int) -> int:
        """Returns how often it runs on a stage in one execution of the loop."""
        return self.stages[stage].count("1")


@dataclasses.dataclass(frozen=True)
class Conditional:
    """The conditionals of one named scope, which are counted with a probability."""

    scope: str
    probability: float
    """How likely the branch with the most FLOPs runs."""
    times: float
    """How often the program comes to one of them in a step."""


@dataclasses.dataclass(frozen=True)
class Location:
    """The place of an instruction in the model that was traced."""

    part: str = ""
    """Named scopes (jax.named_scope), outermost first: layers/attention."""
    phase: Phase = ""
    source: str = ""
    """file:line of the innermost frame outside installed packages."""
    op: str = ""
    """The JAX primitive, or what made it: dot_general, sharding_constraint."""


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective instruction of the program."""

    name: str
    kind: str
    """all-gather, all-reduce, reduce-scatter, all-to-all, collective-permute, ..."""
    axes: tuple[str, ...]
    """Mesh axes along which its groups lie, in mesh order."""
    group: int
    """Devices in a group; less than the product of `axes` where the group is only a part of
    them."""
    nodes: int
    """NVLink domains that one group spans."""
    shapes: tuple[str, ...]
    """The whole arrays (gathered, or before they are scattered), as dtype[dims]."""
    dtype: str
    payload: int
    """Bytes of the whole arrays."""
    wire: float
    """Bytes that a device sends in a ring: (n-1)/n of the payload, twice that for an all-reduce,
    all of it for a permute."""
    loops: tuple[float, ...]
    """Trip counts of the loops around it, outermost first; in a branch with a Slot, its runs there
    on the stage that has the most, and in one with a probability, its expected runs."""
    conditional: bool
    """In a branch that may not be taken."""
    where: Location
    asynchronous: bool
    flops_hidden_behind: int
    """FLOPs of the matmuls scheduled between its start and its done, in one run."""
    partial: bool = False
    """The group is a part of its axes."""
    by_hand: bool = False
    """The program's author called it (lax.psum and its like); XLA's partitioner inserts the
    others."""
    made_of: tuple[str, ...] = ()
    """By array, the arguments whose values it holds, gathered, cast or sliced, with a space
    between; "" where anything else goes in."""
    beside: tuple[str, ...] = ()
    """Parameters that the nearest matmuls multiply with, before the collective and after it."""
    bounded: bool = False
    """In a branch without a Slot or a probability: it counts as if the branch were always taken, so
    that `times` is an upper bound."""
    duration: float = 0.0
    """Predicted microseconds of one run alone; 0 where the target is not known."""
    exposed: float = 0.0
    """Predicted microseconds in a step, all runs together, during which compute waits for it."""

    @property
    def times(self) -> float:
        """How often it runs in a step: the product of the trips of the loops around it.

        It is an integer unless a probability makes it an expectation.
        """
        return math.prod(self.loops)


@dataclasses.dataclass(frozen=True)
class Copy:
    """A whole array that a loop of conditionals changes, copied in its trips."""

    name: str
    shape: str
    bytes: int
    """Bytes of the array. A copy reads as many and writes as many."""
    loops: tuple[float, ...]
    where: Location

    @property
    def times(self) -> float:
        """How often it runs in a step: the product of the trips of the loops around it."""
        return math.prod(self.loops)


@dataclasses.dataclass(frozen=True)
class HostCopy:
    """A copy between a device's memory and that of its host, or inside of the latter."""

    name: str
    direction: Literal["to host", "from host", "within host"]
    shape: str
    bytes: int
    """Bytes that are copied in one run: of a slice, not of the stack around it."""
    loops: tuple[float, ...]
    where: Location
    duration: float = 0.0
    """Predicted microseconds of one run alone; 0 where the target is not known."""

    @property
    def times(self) -> float:
        """How often it runs in a step: the product of the trips of the loops around it."""
        return math.prod(self.loops)


@dataclasses.dataclass(frozen=True)
class Argument:
    """An input of the program."""

    name: str
    """Its path: state['params']['embedding']."""
    kind: str
    """params, moments, batch, other."""
    shape: tuple[int, ...]
    """Shape of the whole array."""
    dtype: str
    bytes: int
    """On one device."""
    axes: tuple[str, ...]
    """Mesh axes that shard it."""
    used_ways: int = 1
    """For a replicated array, how many different slices of it are used, one on each device. 1: each
    device uses all of it."""


@dataclasses.dataclass(frozen=True)
class Buffer:
    """Memory that is live at the peak."""

    name: str
    kind: str
    """One of KINDS."""
    shape: str
    bytes: int
    where: Location
    axes: tuple[str, ...] | None = None
    """Mesh axes that shard it, if that is known (arguments)."""


KINDS = (
    "params",
    "moments",
    "gradients",
    "weights in use",
    "residuals",
    "activations",
    "logits",
    "batch",
    "other",
    "fragmentation",
)
"""Classes of memory. `weights in use`: gathered, cast or in another layout. `residuals`: what the
forward pass stores for the backward pass, row by row of a loop over layers, or in a pipeline's
stash. `fragmentation`: the heap's holes at the peak."""


@dataclasses.dataclass(frozen=True)
class HostMemory:
    """Bytes of one device's arrays in its host's pinned memory."""

    arguments: int = 0
    outputs: int = 0
    """Bytes of outputs that do not reuse the memory of an argument."""
    temporaries: int = 0
    by_kind: dict[str, int] = dataclasses.field(default_factory=dict)
    """Bytes of the arguments by their class, largest first."""

    @property
    def bytes(self) -> int:
        """All of them: what the host must have for each of its devices."""
        return self.arguments + self.outputs + self.temporaries


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes on one device, as XLA's own buffer assignment has them; those on its host are apart,
    in `host`.
    """

    arguments: int
    outputs: int
    """Bytes of outputs that do not reuse the memory of an argument."""
    temporaries: int
    peak: int
    """The most at any time on the device: what must fit. XLA's peak_memory_in_bytes without what it
    counts of the host's memory."""
    buffers: tuple[Buffer, ...]
    """Live at the peak, largest first; their bytes add up to `peak`."""
    host: HostMemory = HostMemory()

    @cached_property
    def by_kind(self) -> dict[str, int]:
        """Bytes at the peak, in the order of KINDS, without classes that have none."""
        bytes_by_kind: dict[str, int] = dict.fromkeys(KINDS, 0)
        for buffer in self.buffers:
            if buffer.kind in bytes_by_kind:
                bytes_by_kind[buffer.kind] += buffer.bytes
        return {kind: n for kind, n in bytes_by_kind.items() if n}


@dataclasses.dataclass(frozen=True)
class Span:
    """Something on the predicted timeline."""

    name: str
    stream: Literal["compute", "network", "host"]
    kind: str
    """matmul, attention, elementwise, copy, the kind of a collective, or the direction of a copy to
    or from the host."""
    start: float
    duration: float
    """Microseconds, one time."""
    loops: tuple[float, ...]
    """The trip counts around the span, of which the timeline shows one trip each; in a Slot, the
    trips in which it is waited for."""
    where: Location


@dataclasses.dataclass(frozen=True)
class Timeline:
    """The schedule replayed with XLA's own estimates. A second opinion, not a measurement.

    There is one compute stream, there are several of the network, and one has the copies between
    the device and its host. In a program with Slots each
    trip of the loop lasts as long as on its slowest stage, and the streams are those of that stage.
    """

    step: float
    """Microseconds for the whole program, all loops unrolled."""
    compute: float
    network: float
    exposed: float
    """Microseconds of the network's time during which compute waits."""
    spans: tuple[Span, ...]
    waits: dict[str, float] = dataclasses.field(default_factory=dict)
    """`exposed` by the name of the collective that the network is busy with while compute waits."""
    parts: dict[str, float] = dataclasses.field(default_factory=dict)
    """`compute` by the part of the model, as in Location."""
    kinds: dict[str, float] = dataclasses.field(default_factory=dict)
    """`compute` by the kind of kernel: matmul, attention, elementwise, copy."""
    flops: dict[str, float] = dataclasses.field(default_factory=dict)
    """FLOPs of the matmuls in kernels of a kind."""
    host: float = 0.0
    """Microseconds during which the link to the host is busy."""
    host_exposed: float = 0.0
    """Microseconds of `host` during which compute waits."""

    def model_us(self, flops: float, attention: float) -> float:
        """Returns the microseconds that a model's own FLOPs would take at the speeds of this
        timeline's kernels, with nothing else: no recomputation, no bubble, no network, no memory.

        attention: the part of the FLOPs that is attention's. 0 for FLOPs of which the timeline has
        no kernels.
        """
        us = 0.0
        for kind, n in (("matmul", flops - attention), ("attention", attention)):
            # Attention without a kernel of its own consists of matmuls.
            kind = kind if self.flops.get(kind) else "matmul"
            if n > 0 and self.flops.get(kind):
                us += n / self.flops[kind] * self.kinds[kind]
        return us


@dataclasses.dataclass(frozen=True)
class Report:
    """What the compiler made of a program for one mesh.

    `report.count("reduce-scatter", "tensor")`, `report.wire_bytes("fsdp")`.
    """

    name: str
    target: str
    """Name of the target it was compiled for; empty for real devices."""
    hbm: int
    """Bytes that a program may take on a device; 0 where unknown."""
    mesh: dict[str, int]
    """Size of each mesh axis, outermost first."""
    axis_nodes: dict[str, int]
    """NVLink domains that the devices along each axis span, others fixed."""
    collectives: tuple[Collective, ...]
    memory: Memory
    arguments: tuple[Argument, ...]
    flops: dict[str, int]
    """FLOPs of matmuls by phase on the mean device, those in kernels included; the phase is ""
    where XLA does not name it."""
    kernels: tuple[tuple[str, tuple[str, ...], Location], ...]
    """Custom calls (attention kernels, cuDNN, Pallas): target, operand shapes, place."""
    warnings: tuple[str, ...]
    """Warnings of the partitioner, and of the lab about loops and slots."""
    timeline: Timeline | None
    """At the optimistic rates (`rates`)."""
    instructions: int
    """Lines of the program."""
    text_bytes: int
    """Length of the program's text."""
    compile_seconds: float
    versions: dict[str, str]
    options: dict[str, Any]
    slots: tuple[Slot, ...] = ()
    """The trips in which conditionals run, as far as they are known."""
    conditionals: tuple[Conditional, ...] = ()
    """The conditionals that are counted with a probability."""
    tick_loops: tuple[int, ...] = ()
    """Trips of the loops that run the table of the slots, one after another; empty without
    slots."""
    stage_flops: tuple[int, ...] = ()
    """FLOPs of matmuls on a device of each stage; one number if there are no slots."""
    copies: tuple[Copy, ...] = ()
    host_copies: tuple[HostCopy, ...] = ()
    """Copies between the device's memory and its host's."""
    model_flops: float = 0.0
    """FLOPs that the model itself needs of one device in a step, without what the program computes
    twice; 0 where unknown."""
    attention_flops: float = 0.0
    """The part of `model_flops` that is attention's."""
    model_us: float = 0.0
    """Predicted microseconds of `model_flops` alone, at the speeds of the timeline's matmuls and
    attention; 0 where unknown."""
    sustained: Timeline | None = None
    """The same schedule at the sustained rates, without spans: the slow end of predicted times."""
    peak_flops: float = 0.0
    """FLOP/s of the target's tensor cores in bf16, by its data sheet; 0 where unknown."""
    vocabulary: Vocabulary = NEUTRAL
    """The names that the program's trainer uses."""
    logical: dict[str, tuple[str | None, ...]] = dataclasses.field(default_factory=dict)
    """The logical axes of each parameter by name, for lint; empty where the trainer did not give
    them."""
    segments: dict[str, int] = dataclasses.field(default_factory=dict)
    """Layers of each segment of the model, by the named scope around them; empty where they are not
    known."""
    changes: tuple[Change, ...] = ()
    """The constants of the target that are not those of its data sheet or of the lab's rates."""
    watts: float = 0.0
    """Power limit of one device; 0: that of the target."""
    node: int = 0
    """Devices of a node; 0: those of the target."""
    program: str = ""
    """The compiled program, packed (`packed`), from which the timeline is replayed at other speeds;
    empty in reports of older versions."""

    @property
    def n_devices(self) -> int:
        """Devices of the mesh."""
        return math.prod(self.mesh.values())

    @property
    def peak_bytes(self) -> int:
        """The most memory in use on one device, arguments included."""
        return self.memory.peak

    @property
    def host_bytes(self) -> int:
        """Bytes of the host's pinned memory that one device's arrays take."""
        return self.memory.host.bytes

    @property
    def host_copy_bytes(self) -> float:
        """Bytes that one device copies to and from its host in a step, both directions together."""
        return sum(
            copy.times * copy.bytes for copy in self.host_copies if copy.direction != "within host"
        )

    def select(
        self,
        kind: str | None = None,
        axis: str | Collection[str] | None = None,
        *,
        phase: str | None = None,
        part: str | None = None,
    ) -> Iterator[Collective]:
        """Yields the collectives that match.

        Args:
          kind: "all-gather" and the like.
          axis: mesh axes along which the groups vary. A name: that axis among others; several
            names: exactly those.
          phase: as in Location.
          part: a named scope, or a word of one that XLA has merged from several.
        """
        for one in self.collectives:
            if kind not in (None, one.kind) or phase not in (None, one.where.phase):
                continue
            if part is not None and part not in re.split(r"[/+]", one.where.part):
                continue
            if isinstance(axis, str):
                along = axis in one.axes
            else:
                along = axis is None or set(axis) == set(one.axes)
            if along:
                yield one

    def count(
        self,
        kind: str | None = None,
        axis: str | Collection[str] | None = None,
        *,
        at_least: int = SCALAR,
        **location: str,
    ) -> float:
        """Returns how many times the collectives that `select` finds run in a step.

        at_least: bytes of payload; collectives with less (scalars) are left out.
        """
        return sum(
            one.times for one in self.select(kind, axis, **location) if one.payload >= at_least
        )

    def wire_bytes(
        self, axis: str | Collection[str] | None = None, kind: str | None = None, **location: str
    ) -> float:
        """Returns the bytes that one device sends in a step."""
        return sum(one.times * one.wire for one in self.select(kind, axis, **location))

    def payload_bytes(
        self, axis: str | Collection[str] | None = None, kind: str | None = None, **location: str
    ) -> float:
        """Returns the bytes of the whole arrays that collectives work on in a step."""
        return sum(one.times * one.payload for one in self.select(kind, axis, **location))

    @property
    def mfu(self) -> float | None:
        """Predicted model FLOP utilisation, 0 to 1; None if it is not known.

        The model's FLOPs over those that the tensor cores could do in the predicted step.
        """
        return self._utilisation(self.model_flops)

    @property
    def utilisation(self) -> float | None:
        """The same for all FLOPs of the program's matmuls, those that recompute included."""
        return self._utilisation(sum(self.flops.values()))

    def _utilisation(self, flops: float) -> float | None:
        if not (flops and self.peak_flops and self._step):
            return None
        return flops / (self._step / 1e6 * self.peak_flops)

    @property
    def exposed_share(self) -> float | None:
        """Share, 0 to 1, of the predicted step during which compute waits for the network."""
        return self.timeline.exposed / self._step if self.timeline and self._step else None

    @property
    def model_ratio(self) -> float | None:
        """The predicted step over the time of the model's own matmuls and attention.

        1 is a step without recomputation, bubble, traffic, memory: the floor of this timeline.
        None if it is not known.
        """
        return self._step / self.model_us if self._step and self.model_us > 0 else None

    @property
    def _step(self) -> float:
        """Predicted microseconds of the step; 0 if they are not known."""
        return max(self.timeline.step, 0.0) if self.timeline else 0.0

    @property
    def step_band(self) -> Band | None:
        """Predicted microseconds of the step, between the optimistic and the sustained rates; None
        if they are not known.
        """
        if not self._step:
            return None
        other = self.sustained.step if self.sustained else self._step
        return Band(min(self._step, other), max(self._step, other))

    @property
    def deciding_link(self) -> Literal["", "NVLink", "network"]:
        """The link of assumed speed for which the step waits most at the sustained rates; empty if
        it waits for less than a hundredth of the step.
        """
        line = self.sustained or self.timeline
        if not line:
            return ""
        crosses = {one.name: one.nodes > 1 for one in self.collectives}
        outside = sum(us for name, us in line.waits.items() if crosses.get(name))
        inside = sum(us for name, us in line.waits.items() if not crosses.get(name, True))
        if outside + inside < 0.01 * line.step:
            return ""
        return "network" if outside >= inside else "NVLink"

    @property
    def margin(self) -> float:
        """Share of the peak that must be free besides it.

        One GPU has used 1.5 % more than the program compiled for it, and 4.7 % more than that
        compiled without it; XLA of another jax version planned 5 % more
        (benchmarks/results/gpu_truth_2026-11-26_h200-jax-0.11.2.md).
        """
        is_of_this_jax = self.versions.get("jax", _installed_jax()) == _installed_jax()
        return MARGIN if is_of_this_jax else MARGIN_OF_OTHER_JAX

    @property
    def limit(self) -> int:
        """The highest peak that fits, in bytes; 0 where the device's memory is not known."""
        return int(self.hbm / (1 + self.margin))

    @property
    def fits(self) -> bool:
        """True if the peak and the margin fit into the device's memory, or if that is not
        known.
        """
        return not self.hbm or self.peak_bytes <= self.limit

    def to_json(self) -> str:
        """Returns the report as JSON, from which from_json makes an equal one."""
        return json.dumps(dataclasses.asdict(self))

    @staticmethod
    def from_json(text: str) -> Report:
        """Returns the report that to_json has written.

        Raises ValueError, KeyError, TypeError or AttributeError for anything else.
        """
        return _build(Report, json.loads(text))


_PRESET = 1
"""Its dictionary of 1 MiB holds a whole attention kernel, which a program repeats in each layer."""


def packed(text: str) -> str:
    """Returns a program's text compressed, as letters that JSON keeps as they are."""
    return base64.b85encode(lzma.compress(text.encode(), preset=_PRESET)).decode()


def unpacked(program: str) -> str:
    """Returns the text that `packed` has compressed. Raises LabError if it is damaged."""
    try:
        return lzma.decompress(base64.b85decode(program)).decode()
    except (ValueError, lzma.LZMAError) as error:
        raise LabError(f"the program in the report is damaged: {error}") from error


@cache
def _installed_jax() -> str:
    return version("jax")


def location_text(location: Location) -> str:
    """Returns the location in words: backward of layers/attention (model/layers.py:107)."""
    words = (
        " of ".join(dict.fromkeys(filter(None, [location.phase, location.part])))
        or location.op
        or "?"
    )
    return f"{words} ({location.source})" if location.source else words


_FIELDS = {
    "where": Location, "memory": Memory, "timeline": Timeline, "sustained": Timeline,
    "vocabulary": Vocabulary,
}  # fmt: skip
"""Fields that are a dataclass."""
_ELEMENTS: dict[tuple[type, str], type] = {
    (Report, "collectives"): Collective,
    (Report, "arguments"): Argument,
    (Report, "slots"): Slot,
    (Report, "conditionals"): Conditional,
    (Report, "copies"): Copy,
    (Report, "changes"): Change,
    (Report, "host_copies"): HostCopy,
    (Memory, "buffers"): Buffer,
    (Timeline, "spans"): Span,
}
"""Fields that are tuples of a dataclass."""


def _build(cls: type, data: dict[str, Any]) -> Any:
    """Returns a dataclass of this file from its asdict, after a trip through JSON."""
    values = {}
    for field in dataclasses.fields(cls):
        has_default = (field.default, field.default_factory) != (
            dataclasses.MISSING,
            dataclasses.MISSING,
        )
        if field.name not in data and has_default:
            continue  # an older report, without this field
        value = data[field.name]
        if field.name == "logical":
            value = {name: tuple(axes) for name, axes in value.items()}
        elif field.name == "kernels":
            value = tuple(
                (name, tuple(shapes), _build(Location, location))
                for name, shapes, location in value
            )
        elif (cls, field.name) == (Memory, "host"):
            value = _build(HostMemory, value)
        elif field.name in _FIELDS and value is not None:
            value = _build(_FIELDS[field.name], value)
        elif isinstance(value, list):
            element = _ELEMENTS.get((cls, field.name))
            value = tuple(_build(element, item) if element else item for item in value)
        values[field.name] = value
    return cls(**values)
