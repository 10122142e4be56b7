"""What lint knows beside the report: which arrays are weights and which activations, and which collectives the rules ask for."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Literal

from sharding_rules.lab.hlo import Array, arrays
from sharding_rules.lab.report import Argument, Collective, Location, Report, location_text
from sharding_rules.lab.vocabulary import Vocabulary
from sharding_rules.presets import PRESETS
from sharding_rules.rules import Kind, Rules, axes_of

SUMS = ("all-reduce", "reduce-scatter")
LogicalAxes = Mapping[str, Sequence[str | None]]
LARGE_WIRE = 0.01
"""Of the step's wire bytes: with less, a collective is not worth a finding."""
LARGE_MEMORY = 0.05
"""Of the memory at the peak: with less, an array may be whole."""


@dataclasses.dataclass(frozen=True)
class Finding:
    """Something in a program that nobody asked for."""

    check: str
    """Which of `lint.CHECKS` found it."""
    bytes: int
    """Of a step on one device: sent along the network, or of memory for nothing."""
    where: Location
    text: str
    fix: str
    """The rule or line to change."""
    severity: Literal["error", "notice"] = "error"
    """A notice may be the price of what was asked for."""

    def __str__(self) -> str:
        return f"{self.severity}: {self.check}: {self.text}\n    in {location_text(self.where)}\n    fix: {self.fix}"


@dataclasses.dataclass(frozen=True, eq=False)
class Subject:
    """One report, and what its rules promise."""

    report: Report
    rules: Rules | None
    axes: LogicalAxes
    """Of each parameter, by its own name; empty where the caller does not know them."""

    @property
    def vocabulary(self) -> Vocabulary:
        """The names that the program's trainer uses."""
        return self.report.vocabulary

    @cached_property
    def manual_axes(self) -> set[str]:
        """Mesh axes whose strategies move activations by hand: stages, experts and rings permute and exchange, and no rule says when."""
        return set(self.vocabulary.manual_axes)

    @cached_property
    def large(self) -> float:
        return LARGE_WIRE * sum(one.times * one.wire for one in self.report.collectives)

    # Sizes of the model and its batch.

    @cached_property
    def _tokens(self) -> Argument | None:
        """The batch's largest array: [M, B, S] or [B, S]."""
        batch = [a for a in self.report.arguments if a.kind == "batch" and 2 <= len(a.shape) <= 3]
        return max(batch, key=lambda a: (len(a.shape), math.prod(a.shape)), default=None)

    @property
    def microbatches(self) -> int:
        return self._tokens.shape[0] if self._tokens and len(self._tokens.shape) == 3 else 1

    @property
    def staged(self) -> bool:
        """Devices along the pipeline's axis run different layers, and take different branches."""
        return self.report.mesh.get(self.vocabulary.pipeline_axis, 1) > 1

    def each_microbatch(self, one: Collective) -> bool:
        """In the loop over microbatches, which in a pipeline is that over ticks, or in a branch that runs in some of them."""
        slots = self.report.slots
        counts = {n for slot in slots for n in (slot.trips, *map(slot.runs, range(len(slot.stages))))}
        return one.loops[:1] == (self.microbatches,) or (bool(one.loops) and one.loops[0] in counts)

    @property
    def batch(self) -> tuple[int, int]:
        """[B, S] of a microbatch; zeros where there is no batch."""
        return (self._tokens.shape[-2], self._tokens.shape[-1]) if self._tokens else (0, 0)

    @cached_property
    def local_batch(self) -> tuple[int, int]:
        """The part of it on one device. The sequence is sharded by its own axis alone."""
        sequence = {self.vocabulary.sequence_axis}
        cut = {a for a in self._tokens.axes if a in self.report.mesh} if self._tokens else set()
        rows = self.ways(cut - sequence)
        return self.batch[0] // rows, self.batch[1] // self.ways(cut & sequence)

    @cached_property
    def width(self) -> int:
        """D: the size of "embed", else the size that most parameters share."""
        named = {a.shape[dim] for a in self.params for dim, axis in enumerate(self.logical(a)) if axis == "embed"}
        if named:
            return named.pop()
        dims = [d for a in self.params for d in set(a.shape[1:] or a.shape)]
        return max(dims, key=lambda d: (dims.count(d), d), default=0)

    def is_activation(self, array: Array) -> bool:
        """Has a dimension (or two) of this device's tokens."""
        b, s = self.local_batch
        dims = array.dims
        return b * s > 0 and (b * s in dims or (s in dims and (b == 1 or b in dims)))

    def is_residual(self, array: Array) -> bool:
        return self.width in array.dims and self.is_activation(array) and math.prod(array.dims) == math.prod(self.local_batch) * self.width

    # Parameters.

    @cached_property
    def params(self) -> tuple[Argument, ...]:
        return tuple(a for a in self.report.arguments if a.kind == "params")

    @cached_property
    def depth(self) -> dict[str, int]:
        """By parameter, how many layers' weights a device holds: what a loop of as many trips takes slices of."""
        trips = {loop for one in self.report.collectives for loop in one.loops[-1:]}
        stages = {a.name: self.ways({self.vocabulary.pipeline_axis} & set(a.axes)) for a in self.params}
        named = {a.name: a.shape[self.logical(a).index("layers")] // stages[a.name] for a in self.params if "layers" in self.logical(a)}
        firsts = {a.name: a.shape[0] // stages[a.name] for a in self.params if len(a.shape) > 1}
        return named if self.axes else {a.name: n if (n := firsts.get(a.name, 1)) in trips else 1 for a in self.params}

    def stacked(self, argument: Argument) -> bool:
        """Holds weights of several layers; a device may have one of them."""
        return self.depth.get(argument.name, 1) > 1 or self.vocabulary.pipeline_axis in argument.axes

    def logical(self, argument: Argument) -> Sequence[str | None]:
        """Names of its dimensions; none where they are not known."""
        return self.axes.get(short(argument), ())

    def weights(self, along: Sequence[str], array: Array) -> list[Argument]:
        """Parameters cut over one of these mesh axes whose dimensions this array has when it is whole along them: a layer's or the stack's.

        In any order, as XLA may transpose; whatever else cuts the parameter may be gathered already.
        """
        along = tuple(along)
        if along not in self._known:
            found = self._known[along] = {}
            for a in self.params:
                if set(a.axes) & set(along):
                    rest = [self.report.mesh[axis] for axis in a.axes if axis not in along]
                    depth = self.depth.get(a.name, 1)
                    for dims in _cut(a.shape, rest) | (_cut(a.shape[1:], rest) if depth > 1 else set()):
                        found.setdefault(dims, []).append(a)
        return self._known[along].get(_dims(array.dims), [])

    @cached_property
    def _known(self) -> dict[tuple[str, ...], dict[tuple[int, ...], list[Argument]]]:
        return {}

    def is_gradient(self, array: Array) -> bool:
        """Of what is summed over the batch: whether it is no activation, or shaped like a parameter, whatever of its cuts is gathered."""
        return _dims(array.dims) in self._shapes or not self.is_activation(array)

    @cached_property
    def _shapes(self) -> set[tuple[int, ...]]:
        cuts = {a.name: [self.report.mesh[axis] for axis in a.axes] for a in self.params}
        return {dims for a in self.params for shape in (a.shape, a.shape[1:]) for dims in _cut(shape, cuts[a.name])}

    # What the rules promise; without rules, what the arguments show.

    def ways(self, axes: set[str] | Sequence[str]) -> int:
        return math.prod(self.report.mesh.get(axis, 1) for axis in axes)

    @cached_property
    def cuts_params(self) -> set[str]:
        return {axis for a in self.params for axis in a.axes}

    @cached_property
    def cuts_batch(self) -> set[str]:
        named = set(axes_of(self.rules.activations["batch"])) if self.rules else set()
        return self._real(named or set(self._tokens.axes if self._tokens else ()) - {self.vocabulary.sequence_axis})

    @cached_property
    def gathers_weights(self) -> set[str]:
        """Axes along which weights are gathered where they are used."""
        if self.rules is None:
            return self.cuts_params & self.cuts_batch
        return self._real(self._rows("params") - self._rows("gathered"))

    @cached_property
    def gathers_updates(self) -> set[str]:
        """Axes along which new weights are gathered after the update (ZeRO)."""
        if self.rules is None:
            return {axis for a in self.report.arguments if a.kind == "moments" for axis in a.axes} - self.cuts_params
        return self._real((self._rows("optimizer") | self._rows("gradients")) - self._rows("params"))

    @cached_property
    def gathers_residual(self) -> set[str]:
        """Axes that cut the residual stream's sequence between the matmul pairs."""
        if self.rules is None:
            return self.cuts_params - self.cuts_batch
        seq = self.rules.activations.get
        return self._real(set(axes_of(seq("seq_resid"))) - set(axes_of(seq("seq"))))

    def _rows(self, kind: Kind) -> set[tuple[str, str]]:
        assert self.rules is not None
        return {(row, axis) for row, entry in self.rules.column(kind).items() for axis in axes_of(entry)}

    def _real(self, found: set[str] | set[tuple[str, str]]) -> set[str]:
        axes = {one if isinstance(one, str) else one[1] for one in found}
        return {axis for axis in axes if self.report.mesh.get(axis, 1) > 1}

    def row(self, argument: Argument, axes: Sequence[str]) -> str:
        """The row of rules.params that cuts it along one of these axes, as it is written; the table where the row is not known."""
        column = self.rules.params if self.rules else {}
        for logical in self.logical(argument):
            if logical and set(axes_of(column.get(logical))) & set(axes):
                return f"rules.params[{logical!r}]"
        return "rules.params"

    # Bytes.

    def pieces(self) -> Iterator[tuple[Collective, Array, float]]:
        """Every array of every collective, with its share of the wire bytes of a step."""
        for one in self.report.collectives:
            found = arrays(" ".join(one.shapes))
            for array in found:
                yield one, array, one.times * one.wire * array.bytes / max(1, sum(a.bytes for a in found))


def _dims(dims: Sequence[int]) -> tuple[int, ...]:
    """Without order, and without those of size 1."""
    return tuple(sorted(d for d in dims if d > 1))


def _cut(dims: Sequence[int], ways: Sequence[int]) -> set[tuple[int, ...]]:
    """What is left of an array's dimensions after none, some or all of these cuts, each of one dimension."""
    found = {_dims(dims)}
    for n in ways:
        found |= {_dims((*d[:i], d[i] // n, *d[i + 1 :])) for d in found for i in range(len(d)) if d[i] % n == 0}
    return found


def short(argument: Argument) -> str:
    """Its own name: blocks.mlp.up.weight of state['params']['blocks.mlp.up.weight']."""
    keys = re.findall(r"\['([^']*)'\]|\.(\w+)$", argument.name)
    return next(filter(None, keys[-1]), argument.name) if keys else argument.name


def customary(kind: Kind) -> set[tuple[str, str]]:
    """(logical axis, mesh axis) that some preset cuts."""
    return {(row, axis) for rules in PRESETS.values() for row, entry in rules.column(kind).items() for axis in axes_of(entry)}
