"""What the checks of lint share: findings, and the facts about a program that checks read.

A check is a function from a LintContext to findings. The context tells it which arrays are weights
and which activations, and which collectives the rules ask for.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Literal, NamedTuple

from sharding_rules.lab.hlo import Array, arrays
from sharding_rules.lab.report import Argument, Collective, Location, Report, location_text
from sharding_rules.lab.vocabulary import Vocabulary
from sharding_rules.presets import PRESETS
from sharding_rules.rules import Kind, Rules, axes_of, row_of

SUMS = ("all-reduce", "reduce-scatter")
EXCHANGES = ("all-to-all", "ragged-all-to-all", "collective-permute")

# Share of the step's wire bytes: a collective with less is not worth a finding.
LARGE_WIRE = 0.01
# Share of the memory at the peak: an array with less may be replicated.
LARGE_MEMORY = 0.05

LogicalAxes = Mapping[str, Sequence[str | None]]
MeshAxes = tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Finding:
    """Something in a program that its rules do not explain."""

    check: str
    """The name of what was found, such as "reshard"."""
    bytes: int
    """Bytes of a step on one device: sent through the network, or of memory that is wasted."""
    where: Location
    text: str
    fix: str
    """The rule or line to change."""
    severity: Literal["error", "notice"] = "error"
    """An error is a mistake in the program or its rules. A notice may be the price of what was
    asked for."""
    collectives: tuple[str, ...] = ()
    """The instructions that it is about."""
    segments: tuple[str, ...] = ()
    """The segments of the model that they are in; empty outside of layers, and for a model that has
    only one."""

    def __str__(self) -> str:
        segments = ""
        if self.segments:
            plural = "s" if len(self.segments) > 1 else ""
            segments = f", segment{plural} {' and '.join(self.segments)}"
        return (
            f"{self.severity}: {self.check}: {self.text}\n"
            f"    in {location_text(self.where)}{segments}\n"
            f"    fix: {self.fix}"
        )


@dataclasses.dataclass(frozen=True)
class Piece:
    """One array of a collective.

    XLA combines collectives, so that one may have arrays of several layers and parts.
    """

    collective: Collective
    array: Array
    bytes: float
    """Its share of the wire bytes of a step."""
    arguments: tuple[str, ...] = ()
    """The arguments whose values it holds; empty where anything else goes in."""

    @property
    def along(self) -> str:
        """The mesh axes in words."""
        return " and ".join(self.collective.axes)


class _Batch(NamedTuple):
    """The largest array of the batch, and its shape without features."""

    argument: Argument | None
    microbatches: int
    rows: int
    """B of a microbatch."""
    columns: int
    """S, the tokens of a row."""


@dataclasses.dataclass(frozen=True, eq=False)
class LintContext:
    """Facts about one program: its report, its rules, and what follows from both.

    `lint` builds it once, and once more for each segment of a model with several. Checks only read
    it. Facts are computed when the first check asks for them.
    """

    report: Report
    rules: Rules | None
    """None: the program is compared with how its arguments are sharded."""
    axes: LogicalAxes
    """The logical axes of each parameter, by its short name; empty where the caller does not know
    them."""
    segment: str = ""
    """The segment that the report is restricted to, see `lint_segments`; empty: the whole program,
    or what is in no segment."""
    step: Report | None = None
    """The whole program's report, where `report` is only a part of it."""

    @property
    def vocabulary(self) -> Vocabulary:
        """The names that the program's trainer uses."""
        return self.report.vocabulary

    # What the program sends.

    @cached_property
    def large_wire_bytes(self) -> float:
        """Bytes that a device must send in a step for a finding about it."""
        step = self.step or self.report
        return LARGE_WIRE * sum(
            collective.times * collective.wire for collective in step.collectives
        )

    def is_large(self, pieces: Sequence[Piece]) -> bool:
        """Whether these arrays together are worth a finding."""
        # One device sends nothing, and then no sum is too small.
        return bool(pieces) and sum(piece.bytes for piece in pieces) >= self.large_wire_bytes

    @cached_property
    def pieces(self) -> tuple[Piece, ...]:
        """Every array of every collective."""
        pieces = []
        for collective in self.report.collectives:
            sent = arrays(" ".join(collective.shapes))
            total_bytes = max(1, sum(array.bytes for array in sent))
            arguments_by_array = collective.made_of
            if len(arguments_by_array) != len(sent):
                arguments_by_array = ("",) * len(sent)
            for array, arguments in zip(sent, arguments_by_array, strict=True):
                wire_bytes = collective.times * collective.wire * array.bytes / total_bytes
                pieces.append(Piece(collective, array, wire_bytes, tuple(arguments.split())))
        return tuple(pieces)

    @cached_property
    def manual_axes(self) -> set[str]:
        """Mesh axes whose strategies move activations by hand.

        Stages, experts and rings permute and exchange, and no rule says when.
        """
        return set(self.vocabulary.manual_axes)

    def is_for_matrix_optimizer(self, collective: Collective) -> bool:
        """Whether it is in an optimizer that multiplies matrices, as Muon does.

        Such an optimizer needs whole matrices, and no rule says how it gets them.
        """
        return collective.where.phase == "optimizer" and self.report.flops.get("optimizer", 0) > 0

    def runs_per_microbatch(self, collective: Collective) -> bool:
        """Whether it is in the loop over microbatches or, in a pipeline, over ticks.

        In a branch, it may run in some of the ticks only.
        """
        if not collective.loops:
            return False
        trips = collective.loops[0]
        if trips == self.microbatches:
            return True
        tick_trips = set(self.report.tick_loops)
        for slot in self.report.slots:
            tick_trips.add(slot.trips)
            tick_trips.update(slot.runs(stage) for stage in range(len(slot.stages)))
        # Any loop may have one trip.
        return trips != 1 and trips in tick_trips

    # Sizes of the mesh, the batch and the model.

    def ways(self, axes: Iterable[str]) -> int:
        """Returns the number of shards that these mesh axes make."""
        return math.prod(self.report.mesh.get(axis, 1) for axis in axes)

    @property
    def n_stages(self) -> int:
        """Devices along the pipeline's axis. They run different layers and branches."""
        return self.report.mesh.get(self.vocabulary.pipeline_axis, 1)

    @cached_property
    def _batch(self) -> _Batch:
        """The batch, which has tokens or activations.

        Tokens are integers [M, B, S] or [B, S]; activations are floats [M, B, S, D], [B, S, D] or
        [tokens, D].
        """
        batch = [a for a in self.report.arguments if a.kind == "batch" and len(a.shape) >= 2]
        tokens = [a for a in batch if "int" in a.dtype and len(a.shape) <= 3]
        largest = max(
            tokens or batch, key=lambda a: (len(a.shape), math.prod(a.shape)), default=None
        )
        if largest is None:
            return _Batch(None, 1, 0, 0)
        leading = largest.shape if tokens else largest.shape[:-1]
        if len(leading) == 1:
            return _Batch(largest, 1, leading[0], 1)
        microbatches, rows, columns = (1, *leading)[-3:]
        return _Batch(largest, microbatches, rows, columns)

    @property
    def microbatches(self) -> int:
        """Microbatches of a step."""
        return self._batch.microbatches

    @property
    def batch_rows(self) -> int:
        """B of a microbatch; 0 where there is no batch."""
        return self._batch.rows

    @cached_property
    def local_batch(self) -> tuple[int, int]:
        """[B, S] of a microbatch on one device; the sequence is sharded by its own axis alone."""
        batch = self._batch
        sharded: set[str] = set()
        if batch.argument is not None:
            sharded = {axis for axis in batch.argument.axes if axis in self.report.mesh}
        sequence = {self.vocabulary.sequence_axis}
        rows = batch.rows // self.ways(sharded - sequence)
        columns = batch.columns // self.ways(sharded & sequence)
        return rows, columns

    @cached_property
    def width(self) -> int:
        """D: the size of "embed".

        Where no dimension has that name: the last dimension of a batch of activations, else the
        size that most parameters share.
        """
        widths = set()
        for param in self.params:
            for axis, size in zip(self.logical_axes(param), param.shape, strict=False):
                if _without_scope(axis) == "embed":
                    widths.add(size)
        if widths:
            return widths.pop()

        batch = self._batch.argument
        if batch is not None and "int" not in batch.dtype:
            return batch.shape[-1]

        sizes: list[int] = []
        for param in self.params:
            layer_shape = param.shape[self.is_stacked(param) :]
            sizes += [size for size in set(layer_shape) if size > 1]
        return max(sizes, key=lambda size: (sizes.count(size), -size), default=0)

    def is_activation(self, array: Array, along: Sequence[str] = ()) -> bool:
        """Whether it has a dimension, or two, of this device's tokens.

        along: mesh axes; the tokens of all devices along them will do, too.
        """
        rows, columns = self.local_batch
        if rows * columns <= 0:
            return False
        dims = array.dims
        for n in {rows, rows * self.ways(set(along) & self.batch_axes)}:
            if n * columns in dims:
                return True
            if columns in dims and (n == 1 or n in dims):
                return True
        return False

    def is_residual(self, array: Array) -> bool:
        """Whether it has the size of this device's residual stream, with full sequences."""
        if self.width not in array.dims or not self.is_activation(array):
            return False
        return math.prod(array.dims) == self.residual_size

    @property
    def residual_size(self) -> int:
        """Elements of the residual stream of this device's tokens, with full sequences."""
        return math.prod(self.local_batch) * self.width

    # Parameters, and arrays that hold them.

    @cached_property
    def params(self) -> tuple[Argument, ...]:
        """The arguments that are parameters."""
        return tuple(a for a in self.report.arguments if a.kind == "params")

    @cached_property
    def _params_by_name(self) -> dict[str, Argument]:
        return {param.name: param for param in self.params}

    def logical_axes(self, argument: Argument) -> Sequence[str | None]:
        """Returns the names of its dimensions; none where they are not known.

        They are not known either where an optimizer keeps something of another shape under a
        parameter's name.
        """
        names = self.axes.get(short_name(argument), ())
        return names if len(names) == len(argument.shape) else ()

    @cached_property
    def depth(self) -> dict[str, int]:
        """By parameter, the layers whose weights a device holds, of which a loop takes slices."""
        collectives = self.report.collectives
        loop_trips = {collective.loops[-1] for collective in collectives if collective.loops}
        depth = {}
        for param in self.params:
            n_stages = self.ways({self.vocabulary.pipeline_axis} & set(param.axes))
            if self.axes:
                logical = self.logical_axes(param)
                if "layers" in logical:
                    depth[param.name] = param.shape[logical.index("layers")] // n_stages
                continue
            # Without names, a first dimension is that of layers if some loop has as many trips.
            n_layers = param.shape[0] // n_stages if len(param.shape) > 1 else 1
            depth[param.name] = n_layers if n_layers in loop_trips else 1
        return depth

    def is_stacked(self, argument: Argument) -> bool:
        """Whether it holds weights of several layers, even if a device has those of one only."""
        if self.depth.get(argument.name, 1) > 1:
            return True
        return self.vocabulary.pipeline_axis in argument.axes

    def piece_weights(self, piece: Piece) -> list[Argument]:
        """Returns the parameters that an array holds.

        They are exact where the report knows them; otherwise all that have the array's shape.
        """
        if piece.arguments:
            if not all(name in self._params_by_name for name in piece.arguments):
                return []
            return [self._params_by_name[name] for name in piece.arguments]
        collective = piece.collective
        along = collective.axes if self._knows_origins else ()
        if self.is_activation(piece.array, along):
            return []
        return self.matching_weights(collective.axes, piece.array)

    @cached_property
    def _knows_origins(self) -> bool:
        """Whether the report knows where any collective's values come from.

        A weight's shape alone then proves nothing.
        """
        step = self.step or self.report
        return any(any(collective.made_of) for collective in step.collectives)

    def adjacent_weights(self, collective: Collective) -> list[Argument]:
        """Returns the parameters that the matmuls next to a collective multiply with."""
        names = [name for name in collective.beside if name in self._params_by_name]
        return [self._params_by_name[name] for name in names]

    def matching_weights(self, along: Sequence[str], array: Array) -> list[Argument]:
        """Returns the parameters that an array may hold, gathered along these mesh axes.

        These are the parameters that are sharded over one of the axes and have the array's
        dimensions, for one layer or the whole stack, in any order, because XLA may transpose.
        Whatever else shards the parameter may be gathered already.
        """
        axes = tuple(along)
        if axes not in self._weights_by_dims:
            self._weights_by_dims[axes] = self._gathered_shapes(axes)
        return self._weights_by_dims[axes].get(_sorted_dims(array.dims), [])

    @cached_property
    def _weights_by_dims(self) -> dict[MeshAxes, dict[tuple[int, ...], list[Argument]]]:
        """The cache of `matching_weights`."""
        return {}

    def _gathered_shapes(self, along: MeshAxes) -> dict[tuple[int, ...], list[Argument]]:
        weights: dict[tuple[int, ...], list[Argument]] = {}
        for param in self.params:
            if not set(param.axes) & set(along):
                continue
            other_ways = [self.report.mesh[axis] for axis in param.axes if axis not in along]
            shapes = _shard_shapes(param.shape, other_ways)
            if self.depth.get(param.name, 1) > 1:
                shapes |= _shard_shapes(param.shape[1:], other_ways)
            for dims in shapes:
                weights.setdefault(dims, []).append(param)
        return weights

    def holds_all_layers(self, argument: Argument, piece: Piece) -> bool:
        """Whether an array of a stacked parameter has all layers of it at once."""
        if self.depth.get(argument.name, 1) <= 1:
            return False
        other_ways = self.ways(set(argument.axes) - set(piece.collective.axes))
        return math.prod(piece.array.dims) * other_ways == math.prod(argument.shape)

    def is_gradient(self, array: Array) -> bool:
        """Whether an array that is summed over the batch may be a gradient.

        It has a parameter's shape, sharded or gathered, or is not an activation.
        """
        return _sorted_dims(array.dims) in self._param_shapes or not self.is_activation(array)

    @cached_property
    def _param_shapes(self) -> set[tuple[int, ...]]:
        """The sorted dimensions that parameters and their layers may have on a device."""
        shapes = set()
        for param in self.params:
            ways = [self.report.mesh[axis] for axis in param.axes]
            shapes |= _shard_shapes(param.shape, ways) | _shard_shapes(param.shape[1:], ways)
        return shapes

    # What the rules promise; without rules, what the arguments show.

    def promised_axes(self, argument: Argument, kind: Kind) -> set[str] | None:
        """Returns the mesh axes that the rules shard an array of this kind along.

        None where they are not known.
        """
        logical = self.logical_axes(argument)
        if self.rules is None or not logical:
            return None
        column = self.rules.column(kind)
        axes: set[str] = set()
        for logical_axis in logical:
            row = row_of(column, logical_axis) if logical_axis else None
            if row:
                axes.update(axes_of(column[row]))
        return self._dividing(axes)

    @cached_property
    def param_axes(self) -> set[str]:
        """Mesh axes that shard parameters, also those that layers gather from flat vectors."""
        axes = {axis for param in self.params for axis in param.axes}
        if self.rules:
            axes |= self.weight_gather_axes
        return axes

    @cached_property
    def batch_axes(self) -> set[str]:
        """Mesh axes that shard the batch."""
        axes = set(axes_of(self.rules.activations["batch"])) if self.rules else set()
        batch = self._batch.argument
        if not axes and batch is not None:
            axes = set(batch.axes) - {self.vocabulary.sequence_axis}
        return self._dividing(axes)

    @cached_property
    def weight_gather_axes(self) -> set[str]:
        """Mesh axes along which weights are gathered where they are used."""
        if self.rules is None:
            return self.param_axes & self.batch_axes
        return self._dividing(axis for _, axis in self._rows("params") - self._rows("gathered"))

    @cached_property
    def update_gather_axes(self) -> set[str]:
        """Mesh axes along which new weights are gathered after the update (ZeRO)."""
        if self.rules is None:
            moments = [a for a in self.report.arguments if a.kind == "moments"]
            return {axis for moment in moments for axis in moment.axes} - self.param_axes
        stored = {
            (row, axis) for row, axis in self._rows("params") if _without_scope(row) != "flat"
        }
        updated = self._rows("optimizer") | self._rows("gradients")
        return self._dividing(axis for _, axis in updated - stored)

    @cached_property
    def residual_gather_axes(self) -> set[str]:
        """Mesh axes that shard the residual stream's sequence between the pairs of matmuls."""
        if self.rules is None:
            return self.param_axes - self.batch_axes
        return self._dividing(
            set(self.activation_axes("seq_resid")) - set(self.activation_axes("seq"))
        )

    def activation_axes(self, logical: str) -> MeshAxes:
        """Returns the mesh axes that the rules shard a dimension of activations along.

        They are those of this segment; none without rules.
        """
        column = self.rules.activations if self.rules else {}
        row = row_of(column, f"{self.segment}/{logical}" if self.segment else logical)
        return axes_of(column[row]) if row else ()

    def _rows(self, kind: Kind) -> set[tuple[str, str]]:
        """Returns each (row, mesh axis) of a column that counts in this segment."""
        assert self.rules is not None
        column = self.rules.column(kind)
        rows: Iterable[str] = column
        if self.segment:
            # The segment's own rows before plain ones, and none of other segments.
            scoped = [row_of(column, f"{self.segment}/{_without_scope(row)}") for row in column]
            rows = [row for row in scoped if row]
        return {(row, axis) for row in rows for axis in axes_of(column[row])}

    def _dividing(self, axes: Iterable[str]) -> set[str]:
        """Returns the axes that have more than one device."""
        return {axis for axis in axes if self.report.mesh.get(axis, 1) > 1}

    def sharding_row(self, argument: Argument, axes: Sequence[str]) -> str:
        """Returns the row of rules.params that shards it along one of these axes, as it is written.

        Where the row is not known, it is the table.
        """
        if self.rules is None:
            return "its sharding"
        column = self.rules.params
        for logical_axis in self.logical_axes(argument):
            row = row_of(column, logical_axis) if logical_axis else None
            if row and set(axes_of(column[row])) & set(axes):
                return f"rules.params[{row!r}]"
        return "rules.params"


# The fields of a finding about some arrays.


def largest(pieces: Sequence[Piece]) -> Piece:
    """Returns the array with most wire bytes."""
    return max(pieces, key=lambda piece: piece.bytes)


def wire_bytes(pieces: Iterable[Piece]) -> int:
    """Returns the bytes that a device sends of all these arrays in a step."""
    return int(sum(piece.bytes for piece in pieces))


def instructions(pieces: Iterable[Piece]) -> tuple[str, ...]:
    """Returns the names of the arrays' collectives, without duplicates."""
    return tuple(dict.fromkeys(piece.collective.name for piece in pieces))


# Names in words.


def name_list(arguments: Iterable[Argument]) -> str:
    """Returns at most three short names, and the number of the others: "a, b, c and 2 more"."""
    names = list(dict.fromkeys(short_name(argument) for argument in arguments))
    in_words = ", ".join(names[:3])
    return f"{in_words} and {len(names) - 3} more" if len(names) > 3 else in_words


def short_name(argument: Argument) -> str:
    """Returns blocks.mlp.up.weight for state['params']['blocks.mlp.up.weight']."""
    keys = re.findall(r"\['([^']*)'\]|\.(\w+)$", argument.name)
    if not keys:
        return argument.name
    key, attribute = keys[-1]
    return key or attribute or argument.name


def innermost_scopes(location: Location) -> set[str]:
    """Returns {attention, mlp} for layers/attention+mlp."""
    return set(_without_scope(location.part).split("+")) - {""}


def preset_rows(kind: Kind) -> set[tuple[str, str]]:
    """Returns each (logical axis, mesh axis) that a preset shards."""
    rows = set()
    for rules in PRESETS.values():
        for row, entry in rules.column(kind).items():
            rows |= {(row, axis) for axis in axes_of(entry)}
    return rows


def _without_scope(path: str | None) -> str:
    """Returns the last word of a scoped name: embed for moe/embed."""
    return (path or "").rpartition("/")[2]


def _sorted_dims(dims: Sequence[int]) -> tuple[int, ...]:
    """Returns the dimensions in a canonical order, without those of size 1."""
    return tuple(sorted(d for d in dims if d > 1))


def _shard_shapes(dims: Sequence[int], ways: Sequence[int]) -> set[tuple[int, ...]]:
    """Returns the sorted dimensions of an array after none, some or all of these divisions.

    Each divides one dimension.
    """
    shapes = {_sorted_dims(dims)}
    for n in ways:
        divided = set()
        for shape in shapes:
            for i, size in enumerate(shape):
                if size % n == 0:
                    divided.add(_sorted_dims((*shape[:i], size // n, *shape[i + 1 :])))
        shapes |= divided
    return shapes
