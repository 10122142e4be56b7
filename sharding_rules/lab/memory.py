"""A device's memory at its peak: every buffer, its class and its place in the model.

XLA says where each value lies (buffer assignment) and from when to when it lives (live ranges);
memory in use at a time is the union of the two. The section "Live ranges at N (peak)" of XLA's own
dump is no use: it sees the carries of a loop only while their first value lives, and so names a
wrong time (gpt_175b: one in the forward that needs 2.6 GB less).
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import math
import re
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from sharding_rules.lab import hlo
from sharding_rules.lab.lineage import Lineage
from sharding_rules.lab.provenance import Provenance
from sharding_rules.lab.report import KINDS, Argument, Buffer, HostMemory, Location, Memory

SMALL = 2**20
"""Buffers of fewer bytes are merged, one for each kind."""

_ALLOCATION = re.compile(r"^allocation \d+: size (\d+),(.*)$")
_VALUE = re.compile(
    r"^ value: <\d+ ([\w.\-]+)(?:\{([\d, ]*)\})? (?:\(phi\) )?@\d+> "
    r"\(size=(\d+),offset=(\d+)\): "
    r"(.*)$"
)
_RANGE = re.compile(r"^\s+([\w.\-]+)\{([\d, ]*)\}:(\d+)-(\d+)$", re.M)
_SCHEDULED = re.compile(r"^\s+\d+:([\w.\-]+)$", re.M)
_HOST_MEMORY = "color 5"


@dataclasses.dataclass(frozen=True)
class _Value:
    """A value in an allocation that XLA lays out over time."""

    name: str
    index: tuple[int, ...]
    """Index in the tuple that the instruction makes."""
    shape: str
    size: int
    offset: int
    start: int
    end: int
    """First and last moment at which it lives, in the order of the program."""


class _Occupied(NamedTuple):
    """A value, and the bytes that it does not share with another."""

    value: _Value
    bytes: int


def memory(
    module: hlo.Module,
    provenance: Provenance,
    stats: Any,
    assignment: str,
    live_ranges: str,
    arguments: tuple[Argument, ...],
) -> Memory:
    """Returns the memory of one device, with all that is live at the peak.

    Args:
      module: the compiled program.
      provenance: that of the module.
      stats: `compiled.memory_analysis()`.
      assignment: XLA's dump `*buffer-assignment.txt`.
      live_ranges: XLA's dump `*live-range.txt`. Without the two, all temporaries are one buffer.
      arguments: of the program; those that the program does not use take no memory.
    """
    schedule = _SCHEDULED.findall(live_ranges.partition("BufferLiveRange:")[0])
    classifier = _Classifier(module, provenance, arguments, schedule)
    buffers = list(classifier.arguments())
    temporaries = _at_peak(_heaps(assignment, _ranges(live_ranges)))
    host = _host_memory(stats, classifier.host_bytes())
    if host.bytes:
        peak = _device_peak(stats, temporaries)
    else:
        peak = int(stats.peak_memory_in_bytes)
    buffers += [classifier.buffer(value, size) for value, size in temporaries]
    if not temporaries:
        size = peak - sum(buffer.bytes for buffer in buffers)
        buffers.append(Buffer("temporaries", "other", "", size, Location()))
    return Memory(
        arguments=int(stats.argument_size_in_bytes),
        outputs=int(stats.output_size_in_bytes - stats.alias_size_in_bytes),
        temporaries=int(stats.temp_size_in_bytes),
        peak=peak,
        buffers=_complete(buffers, peak),
        host=host,
    )


def _host_memory(stats: Any, by_kind: dict[str, int]) -> HostMemory:
    """Returns the host's part. by_kind: bytes of its arguments."""

    def size(name: str) -> int:
        # Reports of programs from before this had no such fields.
        return int(getattr(stats, f"host_{name}_size_in_bytes", 0))

    return HostMemory(
        arguments=size("argument"),
        outputs=size("output") - size("alias"),
        temporaries=size("temp"),
        by_kind=dict(sorted(by_kind.items(), key=lambda item: -item[1])),
    )


def _device_peak(stats: Any, temporaries: list[_Occupied]) -> int:
    """Returns the peak of a program with arrays on the host, which XLA's own peak includes."""
    outputs = stats.output_size_in_bytes - stats.alias_size_in_bytes
    at_peak = sum(value.bytes for value in temporaries) or stats.temp_size_in_bytes
    return int(stats.argument_size_in_bytes + outputs + at_peak)


# 1. The values that are live at the peak.


def _ranges(text: str) -> dict[tuple[str, str], tuple[int, int]]:
    """Returns (start, end) of each value, by its name and the text of its index."""
    section = text.partition("BufferLiveRange:")[2].partition("Live ranges at")[0]
    ranges = {}
    for name, index, start, end in _RANGE.findall(section):
        ranges[name, index] = (int(start), int(end))
    return ranges


def _heaps(text: str, ranges: dict[tuple[str, str], tuple[int, int]]) -> list[list[_Value]]:
    """Returns the values of every allocation that XLA lays out over time, on the device."""
    heaps: list[list[_Value]] = []
    is_heap = False
    for line in text.splitlines():
        allocation = _ALLOCATION.match(line)
        if allocation:
            is_heap = "preallocated-temp" in allocation[2] and _HOST_MEMORY not in allocation[2]
            if is_heap:
                heaps.append([])
            continue
        match = _VALUE.match(line) if is_heap else None
        if not match:
            continue
        name, index, size, offset, shape = match.groups(default="")
        if (name, index) in ranges:
            start, end = ranges[name, index]
            value = _Value(
                name=name,
                index=tuple(map(int, re.findall(r"\d+", index))),
                shape="tuple" if shape.startswith("(") else str(hlo.arrays(shape)[0]),
                size=int(size),
                offset=int(offset),
                start=start,
                end=end,
            )
            heaps[-1].append(value)
    return heaps


def _at_peak(heaps: list[list[_Value]]) -> list[_Occupied]:
    """Returns the values that are live when most memory is in use."""
    times = sorted({value.start for heap in heaps for value in heap})
    occupied: list[list[_Occupied]] = [[] for _ in times]
    for heap in heaps:
        live: list[list[_Value]] = [[] for _ in times]
        for value in sorted(heap, key=lambda value: (value.offset, -value.size, -value.start)):
            # A value is there at its end, too, when its successor is already allocated.
            first = bisect.bisect_left(times, value.start)
            last = bisect.bisect_right(times, value.end)
            for moment in range(first, last):
                live[moment].append(value)
        for moment, values in enumerate(live):
            occupied[moment] += _union(values)
    return max(occupied, key=lambda values: sum(value.bytes for value in values), default=[])


def _union(values: list[_Value]) -> list[_Occupied]:
    """Returns the values that occupy bytes of their own; views drop out.

    values: in the order of their offsets.
    """
    occupied = []
    end = 0
    for value in values:
        value_end = value.offset + value.size
        n_bytes = value_end - max(end, value.offset)
        if n_bytes > 0:
            occupied.append(_Occupied(value, n_bytes))
            end = value_end
    return occupied


def _complete(buffers: list[Buffer], peak: int) -> tuple[Buffer, ...]:
    """Returns buffers that add up to the peak, largest first.

    Small ones are merged, and holes are a buffer of their own.
    """
    small_bytes: dict[str, int] = dict.fromkeys(KINDS, 0)
    for buffer in buffers:
        if buffer.bytes < SMALL:
            small_bytes[buffer.kind] = small_bytes.get(buffer.kind, 0) + buffer.bytes
    # XLA counts some scalars once that two values hold, so that a few bytes may be missing.
    missing = peak - sum(buffer.bytes for buffer in buffers)
    small_bytes["fragmentation" if missing > 0 else "other"] += missing

    complete = [buffer for buffer in buffers if buffer.bytes >= SMALL]
    for kind, size in small_bytes.items():
        if size:
            name = kind if kind == "fragmentation" else f"small {kind}"
            complete.append(Buffer(name, kind, "", size, Location()))
    return tuple(sorted(complete, key=lambda buffer: -buffer.bytes))


# 2. Their classes, and their places in the model.


class _Parameter(NamedTuple):
    """A parameter of the model, and its shape on one device."""

    argument: Argument
    local: tuple[int, ...]


class _Classifier:
    """Makes buffers from values: what each is for, and where in the model it is made."""

    def __init__(
        self,
        module: hlo.Module,
        provenance: Provenance,
        arguments: tuple[Argument, ...],
        schedule: list[str],
    ) -> None:
        """schedule: the names of all instructions in their order."""
        self._module = module
        self._provenance = provenance
        self._arguments = {argument.name: argument for argument in arguments}
        self._inputs = [
            one for one in module.computations[module.entry] if one.opcode == "parameter"
        ]
        params = []
        for one in self._inputs:
            argument = self._arguments.get(one.op_name)
            if argument and argument.kind == "params":
                params.append(_Parameter(argument, one.arrays[0].dims))
        self._lineage = Lineage(module, (param.argument.name for param in params))

        vocabulary = provenance.vocabulary
        self._loss = set(vocabulary.loss_parts)
        self._stash = set(vocabulary.stash_parts)
        self._gradient_forms: set[tuple[int, ...]] = set()
        self._vocabulary_sizes: set[int] = set()
        for param in params:
            self._gradient_forms.update(_gradient_forms(param.argument.shape, param.local))
            if _is_table(param, vocabulary.tables):
                # The vocabulary, whole and sharded, is the larger of the two dimensions.
                dim = param.argument.shape.index(max(param.argument.shape))
                self._vocabulary_sizes |= {param.argument.shape[dim], param.local[dim]}
        self._outer = _asynchronous_instructions(schedule, module)

    def arguments(self) -> Iterator[Buffer]:
        """Yields a buffer for each argument that the program uses, without those on the host."""
        for one in self._inputs:
            if one.arrays[0].on_host:
                continue
            argument = self._arguments.get(one.op_name)
            yield Buffer(
                name=one.op_name or one.name,
                kind=argument.kind if argument else "other",
                shape=str(one.arrays[0]),
                bytes=one.bytes,
                where=Location(),
                axes=argument.axes if argument else None,
            )

    def host_bytes(self) -> dict[str, int]:
        """Returns the bytes of arguments on the host, by their class."""
        by_kind: dict[str, int] = {}
        for one in self._inputs:
            if not one.arrays[0].on_host:
                continue
            argument = self._arguments.get(one.op_name)
            kind = argument.kind if argument else "other"
            by_kind[kind] = by_kind.get(kind, 0) + one.bytes
        return by_kind

    def buffer(self, value: _Value, size: int) -> Buffer:
        """Returns the buffer of a value. size: its bytes."""
        label = value.name
        if value.index:
            label += f"{{{','.join(map(str, value.index))}}}"
        name = value.name if value.name in self._module.by_name else self._outer.get(value.name, "")
        if not name:
            return Buffer(label, "other", value.shape, size, Location())
        index = value.index if name == value.name else ()
        writer, _ = self._lineage.writer(name, index)
        weights = self._lineage.weights(name, index)
        location = self._provenance.of(writer)
        if weights:
            label += f" of {', '.join(sorted(weights))}"
            # What XLA itself makes of a weight before the program's first line has no place in the
            # model.
            if not writer.op_name and self._module.home[writer.name] == self._module.entry:
                location = Location(op="layout")
        kind = self._kind(value, location, is_weight=bool(weights))
        return Buffer(label, kind, value.shape, size, location)

    def _kind(self, value: _Value, location: Location, is_weight: bool) -> str:
        if value.shape == "tuple":
            return "other"
        if is_weight:
            return "weights in use"
        dims = hlo.arrays(value.shape)[0].dims
        parts = set(location.part.split("/"))
        # A loss may make its gradients in the forward.
        makes_gradients = location.phase in ("backward", "") or parts & self._loss
        if makes_gradients and _form(dims) in self._gradient_forms:
            return "gradients"
        is_forward = location.phase in ("forward", "recompute")
        if is_forward and location.op == "dynamic_update_slice" and len(dims) > 2:
            return "residuals"
        if parts & self._stash:
            return "residuals"
        if parts & self._loss and self._vocabulary_sizes & set(dims):
            return "logits"
        return "activations" if is_forward or location.phase == "backward" else "other"


def _form(dims: Iterable[int]) -> tuple[int, ...]:
    """Returns dimensions in any order, without those of size 1: a shape however it is laid out."""
    return tuple(sorted(d for d in dims if d > 1))


def _gradient_forms(
    global_shape: tuple[int, ...], local_shape: tuple[int, ...]
) -> Iterator[tuple[int, ...]]:
    """Yields the forms that gradients of a parameter take.

    They are those of the parameter as it is stored and of one layer of it, either with dimensions
    that are not yet scattered.
    """
    yield _form(local_shape)
    for first_dim in (0, 1):  # 1: one layer
        sizes = list(zip(global_shape[first_dim:], local_shape[first_dim:], strict=True))
        for dims in itertools.product(*({w, n} for w, n in sizes)):
            # A whole vector, and a replicated table, have the shapes of activations.
            is_sharded = any(d == n != w for d, (w, n) in zip(dims, sizes, strict=True))
            is_layer = first_dim == 1 and len(global_shape) >= 3
            if len(dims) < 2 or not (is_sharded or is_layer):
                continue
            yield _form(dims)
            # As a matrix, whose rows or columns are several dimensions.
            for n_rows in range(1, len(dims)):
                yield _form((math.prod(dims[:n_rows]), math.prod(dims[n_rows:])))


def _is_table(param: _Parameter, words: tuple[str, ...]) -> bool:
    name = param.argument.name
    if len(param.local) != 2 or "bias" in name:
        return False
    return any(word in name.lower() for word in words)


def _asynchronous_instructions(schedule: list[str], module: hlo.Module) -> dict[str, str]:
    """Returns the asynchronous instruction around each one that the program's text leaves out.

    It is the next in the schedule that the text has.
    """
    outer = {}
    following = ""
    for name in reversed(schedule):
        if name in module.by_name:
            following = name
        elif following:
            outer[name] = following
    return outer
