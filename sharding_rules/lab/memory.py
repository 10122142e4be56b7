"""What is in a device's memory when the most of it is: every buffer, its class and its place in the
model.

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
from typing import Any

from sharding_rules.lab import hlo
from sharding_rules.lab.lineage import Lineage
from sharding_rules.lab.provenance import Provenance
from sharding_rules.lab.report import KINDS, Argument, Buffer, Location, Memory

SMALL = 2**20
"""Buffers of fewer bytes are merged, one for each kind."""

_ALLOCATION = re.compile(r"^allocation \d+: size (\d+),(.*)$")
_VALUE = re.compile(
    r"^ value: <\d+ ([\w.\-]+)(?:\{([\d, ]*)\})? (?:\(phi\) )?@\d+> "
    r"\(size=(\d+),offset=(\d+)\): "
    r"(.*)$"
)
_RANGE = re.compile(r"^\s+([\w.\-]+)\{([\d, ]*)\}:(\d+)-(\d+)$", re.M)
_PLACE = re.compile(r"^\s+\d+:([\w.\-]+)$", re.M)


@dataclasses.dataclass(frozen=True)
class _Value:
    name: str
    index: tuple[int, ...]
    """Index in the tuple that the instruction makes."""
    shape: str
    size: int
    offset: int
    start: int
    end: int
    """First and last moment at which it lives, in the order of the program."""


def memory(
    module: hlo.Module,
    provenance: Provenance,
    stats: Any,
    assignment: str,
    live_ranges: str,
    arguments: tuple[Argument, ...],
) -> Memory:
    """The memory of one device, with all that is live at the peak.

    Args:
      stats: `compiled.memory_analysis()`.
      assignment: XLA's dump `*buffer-assignment.txt`.
      live_ranges: XLA's dump `*live-range.txt`. Without the two, all temporaries are one buffer.
      arguments: of the program; those that the program does not use take no memory.
    """
    namer = _Namer(
        module, provenance, arguments, _PLACE.findall(live_ranges.partition("BufferLiveRange:")[0])
    )
    temporaries = _at_peak(_heaps(assignment, _ranges(live_ranges)))
    result = [*namer.arguments(), *(namer.buffer(value, size) for value, size in temporaries)]
    peak = int(stats.peak_memory_in_bytes)
    if not temporaries:
        result.append(
            Buffer("temporaries", "other", "", peak - sum(b.bytes for b in result), Location())
        )
    return Memory(
        arguments=int(stats.argument_size_in_bytes),
        outputs=int(stats.output_size_in_bytes - stats.alias_size_in_bytes),
        temporaries=int(stats.temp_size_in_bytes),
        peak=peak,
        buffers=_complete(result, peak),
    )


def _ranges(text: str) -> dict[tuple[str, str], tuple[int, int]]:
    section = text.partition("BufferLiveRange:")[2].partition("Live ranges at")[0]
    return {
        (name, index): (int(start), int(end)) for name, index, start, end in _RANGE.findall(section)
    }


def _heaps(text: str, ranges: dict[tuple[str, str], tuple[int, int]]) -> list[list[_Value]]:
    """The values of every allocation that XLA lays out over time, on the device."""
    heaps: list[list[_Value]] = []
    inside = False
    for line in text.splitlines():
        if match := _ALLOCATION.match(line):
            # 5: memory of the host
            inside = "preallocated-temp" in match[2] and "color 5" not in match[2]
            heaps += [[]] if inside else []
        elif (
            inside
            and (match := _VALUE.match(line))
            and (lives := ranges.get((match[1], match[2] or "")))
        ):
            index = tuple(int(i) for i in re.findall(r"\d+", match[2] or ""))
            shape = "tuple" if match[5].startswith("(") else str(hlo.arrays(match[5])[0])
            heaps[-1].append(_Value(match[1], index, shape, int(match[3]), int(match[4]), *lives))
    return heaps


def _at_peak(heaps: list[list[_Value]]) -> list[tuple[_Value, int]]:
    """Returns the values that are live when most memory is in use, each with the bytes that it does
    not share with another.
    """
    times = sorted({value.start for heap in heaps for value in heap})
    live: list[list[list[_Value]]] = [[[] for _ in heaps] for _ in times]
    for number, heap in enumerate(heaps):
        for value in sorted(heap, key=lambda v: (v.offset, -v.size, -v.start)):
            for at in range(
                bisect.bisect_left(times, value.start), bisect.bisect_right(times, value.end)
            ):
                live[at][number].append(value)
    used = [[each for heap in moment for each in _union(heap)] for moment in live]
    return max(used, key=lambda moment: sum(size for _, size in moment), default=[])


def _union(values: list[_Value]) -> list[tuple[_Value, int]]:
    """Returns those of the values, in the order of their offsets, that occupy bytes of their own,
    and how many; views drop out.
    """
    found, end = [], 0
    for value in values:
        if (own := value.offset + value.size - max(end, value.offset)) > 0:
            found.append((value, own))
            end = value.offset + value.size
    return found


def _complete(found: list[Buffer], peak: int) -> tuple[Buffer, ...]:
    """Buffers that add up to the peak, largest first: the small ones merged, and holes as a buffer
    of their own.
    """
    merged = {
        kind: sum(b.bytes for b in found if b.kind == kind and b.bytes < SMALL) for kind in KINDS
    }
    rest = peak - sum(b.bytes for b in found)
    # XLA counts some scalars once that two values hold, so that a few bytes may be missing.
    merged["fragmentation" if rest > 0 else "other"] += rest
    small = (
        Buffer(f"small {kind}" if kind != "fragmentation" else kind, kind, "", size, Location())
        for kind, size in merged.items()
        if size
    )
    return tuple(sorted([*(b for b in found if b.bytes >= SMALL), *small], key=lambda b: -b.bytes))


class _Namer:
    """Buffers from values: what each is for, and where in the model."""

    def __init__(
        self,
        module: hlo.Module,
        provenance: Provenance,
        arguments: tuple[Argument, ...],
        order: list[str],
    ) -> None:
        self._module, self._provenance = module, provenance
        self._given = {argument.name: argument for argument in arguments}
        self._inputs = [
            one for one in module.computations[module.entry] if one.opcode == "parameter"
        ]
        weights = [
            (given, one.arrays[0].dims)
            for one in self._inputs
            if (given := self._given.get(one.op_name)) and given.kind == "params"
        ]
        self._lineage = Lineage(module, (given.name for given, _ in weights))
        self._forms = {form for given, local in weights for form in _forms(given.shape, local)}
        names = provenance.vocabulary
        self._loss, self._stash = set(names.loss_parts), set(names.stash_parts)
        self._vocabulary = {
            size for given, local in weights for size in _vocabulary(given, local, names.tables)
        }
        self._outer = _outer(order, module)

    def arguments(self) -> Iterator[Buffer]:
        for one in self._inputs:
            given = self._given.get(one.op_name)
            axes = given.axes if given else None
            yield Buffer(
                one.op_name or one.name,
                given.kind if given else "other",
                str(one.arrays[0]),
                one.bytes,
                Location(),
                axes,
            )

    def buffer(self, value: _Value, size: int) -> Buffer:
        label = value.name + (f"{{{','.join(map(str, value.index))}}}" if value.index else "")
        name = value.name if value.name in self._module.by_name else self._outer.get(value.name, "")
        if not name:
            return Buffer(label, "other", value.shape, size, Location())
        index = value.index if name == value.name else ()
        writer, _ = self._lineage.writer(name, index)
        made_of = self._lineage.weights(name, index)
        # What XLA itself makes of a weight before the program's first line has no place in the
        # model.
        outside = (
            made_of and not writer.op_name and self._module.home[writer.name] == self._module.entry
        )
        where = Location(op="layout") if outside else self._provenance.of(writer)
        return Buffer(
            label + (f" of {', '.join(sorted(made_of))}" if made_of else ""),
            self._kind(value, where, made_of),
            value.shape,
            size,
            where,
        )

    def _kind(self, value: _Value, where: Location, made_of: frozenset[str] | None) -> str:
        if value.shape == "tuple":
            return "other"
        if made_of:
            return "weights in use"
        dims, parts = hlo.arrays(value.shape)[0].dims, set(where.part.split("/"))
        # A loss may make its gradients in the forward.
        if _form(dims) in self._forms and (where.phase in ("backward", "") or parts & self._loss):
            return "gradients"
        stored = (
            where.op == "dynamic_update_slice"
            and where.phase in ("forward", "recompute")
            and len(dims) > 2
        )
        if parts & self._stash or stored:
            return "residuals"
        if parts & self._loss and self._vocabulary & set(dims):
            return "logits"
        return "activations" if where.phase in ("forward", "recompute", "backward") else "other"


def _form(dims: Iterable[int]) -> tuple[int, ...]:
    """Dimensions in any order, those of size 1 left out: a shape however it is laid out."""
    return tuple(sorted(d for d in dims if d > 1))


def _forms(whole: tuple[int, ...], local: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """The forms that gradients of a parameter take: as it is stored, one layer of it, either with
    dimensions that are not yet scattered.
    """
    yield _form(local)
    for first in (0, 1):
        for dims in itertools.product(
            *({w, n} for w, n in zip(whole[first:], local[first:], strict=True))
        ):
            # A whole vector, and a replicated table, have the shapes of activations.
            kept = any(
                d == n != w for d, w, n in zip(dims, whole[first:], local[first:], strict=True)
            )
            if len(dims) >= 2 and (kept or (first and len(whole) >= 3)):
                yield _form(dims)
                for at in range(1, len(dims)):
                    yield _form((math.prod(dims[:at]), math.prod(dims[at:])))


def _vocabulary(given: Argument, local: tuple[int, ...], tables: tuple[str, ...]) -> Iterator[int]:
    """Yields the sizes of the vocabulary, whole and sharded, if the parameter is a table: the
    larger of its two dimensions.
    """
    if (
        len(local) == 2
        and "bias" not in given.name
        and any(word in given.name.lower() for word in tables)
    ):
        at = given.shape.index(max(given.shape))
        yield from {given.shape[at], local[at]}


def _outer(order: list[str], module: hlo.Module) -> dict[str, str]:
    """The asynchronous instruction around each one that the program's text leaves out: the next in
    the schedule that it does not.
    """
    found, after = {}, ""
    for name in reversed(order):
        if name in module.by_name:
            after = name
        elif after:
            found[name] = after
    return found
