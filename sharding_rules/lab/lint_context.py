"""What lint knows beside the report: which arrays are weights and which activations, and which
collectives the rules ask for.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any, Literal

from sharding_rules.lab.hlo import Array, arrays
from sharding_rules.lab.report import Argument, Collective, Location, Report, location_text
from sharding_rules.lab.vocabulary import Vocabulary
from sharding_rules.presets import PRESETS
from sharding_rules.rules import Kind, Rules, axes_of, row_of

SUMS = ("all-reduce", "reduce-scatter")
EXCHANGES = ("all-to-all", "ragged-all-to-all", "collective-permute")
LogicalAxes = Mapping[str, Sequence[str | None]]
LARGE_WIRE = 0.01
"""Share of the step's wire bytes: a collective with less is not worth a finding."""
LARGE_MEMORY = 0.05
"""Share of the memory at the peak: an array with less may be replicated."""


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
        inside = (
            f", segment{'s' * (len(self.segments) > 1)} {' and '.join(self.segments)}"
            if self.segments
            else ""
        )
        return (
            f"{self.severity}: {self.check}: {self.text}\n    in "
            f"{location_text(self.where)}{inside}\n    fix: {self.fix}"
        )


@dataclasses.dataclass(frozen=True)
class Piece:
    """One array of a collective. XLA combines collectives, so that one may have arrays of several
    layers and parts.
    """

    one: Collective
    array: Array
    bytes: float
    """Its share of the wire bytes of a step."""
    made_of: tuple[str, ...] = ()
    """The arguments whose values it holds; empty where anything else goes in."""

    @property
    def along(self) -> str:
        """The mesh axes in words."""
        return " and ".join(self.one.axes)


@dataclasses.dataclass(frozen=True, eq=False)
class LintContext:
    """One report, and what its rules promise."""

    report: Report
    rules: Rules | None
    axes: LogicalAxes
    """The logical axes of each parameter, by its own name; empty where the caller does not know
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

    @cached_property
    def manual_axes(self) -> set[str]:
        """Mesh axes whose strategies move activations by hand: stages, experts and rings permute
        and exchange, and no rule says when.
        """
        return set(self.vocabulary.manual_axes)

    @cached_property
    def large(self) -> float:
        """Wire bytes from which on a collective is worth a finding."""
        return LARGE_WIRE * sum(
            one.times * one.wire for one in (self.step or self.report).collectives
        )

    @cached_property
    def pieces(self) -> tuple[Piece, ...]:
        """Every array of every collective."""
        found = []
        for one in self.report.collectives:
            sent = arrays(" ".join(one.shapes))
            total = max(1, sum(array.bytes for array in sent))
            made_of = one.made_of if len(one.made_of) == len(sent) else ("",) * len(sent)
            for array, names in zip(sent, made_of, strict=True):
                found.append(
                    Piece(
                        one, array, one.times * one.wire * array.bytes / total, tuple(names.split())
                    )
                )
        return tuple(found)

    # Sizes of the model and its batch.

    @cached_property
    def _batch_shape(self) -> tuple[Argument | None, tuple[int, int, int]]:
        """The largest array of the batch, and (M, B, S): microbatches, and rows and columns of one.

        Tokens are integers [M, B, S] or [B, S]; activations are floats [M, B, S, D], [B, S, D] or
        [tokens, D].
        """
        batch = [a for a in self.report.arguments if a.kind == "batch" and len(a.shape) >= 2]
        tokens = [a for a in batch if "int" in a.dtype and len(a.shape) <= 3]
        largest = max(
            tokens or batch, key=lambda a: (len(a.shape), math.prod(a.shape)), default=None
        )
        if largest is None:
            return None, (1, 0, 0)
        leading = largest.shape if tokens else largest.shape[:-1]
        return largest, (1, *leading, 1)[-3:] if len(leading) == 1 else (1, *leading)[-3:]  # pyright: ignore[reportReturnType]

    @property
    def microbatches(self) -> int:
        """Microbatches of a step; zero where there is no batch."""
        return self._batch_shape[1][0]

    @property
    def batch(self) -> tuple[int, int]:
        """[B, S] of a microbatch; zeros where there is no batch."""
        return self._batch_shape[1][1:]

    @property
    def staged(self) -> bool:
        """Devices along the pipeline's axis run different layers, and take different branches."""
        return self.stages > 1

    @property
    def stages(self) -> int:
        """Devices along the pipeline's axis."""
        return self.report.mesh.get(self.vocabulary.pipeline_axis, 1)

    def in_matrix_optimizer(self, one: Collective) -> bool:
        """Whether it is in an optimizer that multiplies matrices, as Muon does: it needs them in
        full, and no rule says how.
        """
        return one.where.phase == "optimizer" and self.report.flops.get("optimizer", 0) > 0

    def each_microbatch(self, one: Collective) -> bool:
        """In the loop over microbatches, which in a pipeline is that over ticks, or in a branch
        that runs in some of them.
        """
        slots = self.report.slots
        counts = {
            n for slot in slots for n in (slot.trips, *map(slot.runs, range(len(slot.stages))))
        } | {*self.report.tick_loops}
        # 1: of any loop
        return one.loops[:1] == (self.microbatches,) or (
            bool(one.loops) and one.loops[0] in counts - {1}
        )

    @cached_property
    def local_batch(self) -> tuple[int, int]:
        """The part of the batch on one device. The sequence is sharded by its own axis alone."""
        largest, (_, rows, columns) = self._batch_shape
        sequence = {self.vocabulary.sequence_axis}
        sharded = {a for a in largest.axes if a in self.report.mesh} if largest else set()
        return rows // self.ways(sharded - sequence), columns // self.ways(sharded & sequence)

    @cached_property
    def width(self) -> int:
        """D: the size of "embed", else of the batch's last dimension where it is one of
        activations, else what most parameters share.
        """
        named = {
            a.shape[dim]
            for a in self.params
            for dim, axis in enumerate(self.logical(a))
            if _plain(axis) == "embed"
        }
        if named:
            return named.pop()
        batch = self._batch_shape[0]
        if batch is not None and "int" not in batch.dtype:
            return batch.shape[-1]
        dims = [d for a in self.params for d in set(a.shape[self.stacked(a) :]) if d > 1]
        return max(dims, key=lambda d: (dims.count(d), -d), default=0)

    def is_activation(self, array: Array, along: Sequence[str] = ()) -> bool:
        """Whether it has a dimension (or two) of this device's tokens, or of all tokens of the
        devices along some mesh axes.
        """
        b, s = self.local_batch
        found = {b, b * self.ways(set(along) & self.shards_batch)}
        dims = array.dims
        return b * s > 0 and any(
            n * s in dims or (s in dims and (n == 1 or n in dims)) for n in found
        )

    def is_residual(self, array: Array) -> bool:
        """Whether it has as many elements as the residual stream of this device's tokens, with full
        sequences.
        """
        return (
            self.width in array.dims
            and self.is_activation(array)
            and math.prod(array.dims) == self.residual_size
        )

    @property
    def residual_size(self) -> int:
        """Elements of the residual stream of this device's tokens, with full sequences."""
        return math.prod(self.local_batch) * self.width

    # Parameters.

    @cached_property
    def params(self) -> tuple[Argument, ...]:
        """The arguments that are parameters."""
        return tuple(a for a in self.report.arguments if a.kind == "params")

    @cached_property
    def by_name(self) -> dict[str, Argument]:
        """Parameters by their whole names."""
        return {a.name: a for a in self.params}

    @cached_property
    def depth(self) -> dict[str, int]:
        """By parameter, how many layers' weights a device holds: what a loop of as many trips takes
        slices of.
        """
        trips = {loop for one in self.report.collectives for loop in one.loops[-1:]}
        stages = {
            a.name: self.ways({self.vocabulary.pipeline_axis} & set(a.axes)) for a in self.params
        }
        named = {
            a.name: a.shape[self.logical(a).index("layers")] // stages[a.name]
            for a in self.params
            if "layers" in self.logical(a)
        }
        firsts = {a.name: a.shape[0] // stages[a.name] for a in self.params if len(a.shape) > 1}
        return (
            named
            if self.axes
            else {a.name: n if (n := firsts.get(a.name, 1)) in trips else 1 for a in self.params}
        )

    def stacked(self, argument: Argument) -> bool:
        """Whether it holds weights of several layers; a device may have one of them."""
        return (
            self.depth.get(argument.name, 1) > 1 or self.vocabulary.pipeline_axis in argument.axes
        )

    def logical(self, argument: Argument) -> Sequence[str | None]:
        """Names of its dimensions; none where they are not known, or where an optimizer keeps
        something of another shape under the name.
        """
        found = self.axes.get(short(argument), ())
        return found if len(found) == len(argument.shape) else ()

    def weights_of(self, piece: Piece) -> list[Argument]:
        """The parameters that an array holds: exactly those where the report knows them, else all
        that have its shape.
        """
        if piece.made_of:
            found = [self.by_name[name] for name in piece.made_of if name in self.by_name]
            return found if len(found) == len(piece.made_of) else []
        along = piece.one.axes if self.knows_origins else ()
        return (
            []
            if self.is_activation(piece.array, along)
            else self.weights(piece.one.axes, piece.array)
        )

    @cached_property
    def knows_origins(self) -> bool:
        """Whether the report knows the origin of any collective's values; then a weight's shape
        alone proves nothing.
        """
        return any(any(one.made_of) for one in (self.step or self.report).collectives)

    def beside(self, one: Collective) -> list[Argument]:
        """The parameters that the matmuls next to a collective multiply with."""
        return [self.by_name[name] for name in one.beside if name in self.by_name]

    def weights(self, along: Sequence[str], array: Array) -> list[Argument]:
        """Parameters sharded over one of these mesh axes whose dimensions this array has when it is
        gathered along them: a layer's or the stack's.

        In any order, as XLA may transpose; whatever else shards the parameter may be gathered
        already.
        """
        along = tuple(along)
        if along not in self._known:
            found = self._known[along] = {}
            for a in self.params:
                if set(a.axes) & set(along):
                    rest = [self.report.mesh[axis] for axis in a.axes if axis not in along]
                    depth = self.depth.get(a.name, 1)
                    for dims in _sharded(a.shape, rest) | (
                        _sharded(a.shape[1:], rest) if depth > 1 else set()
                    ):
                        found.setdefault(dims, []).append(a)
        return self._known[along].get(_dims(array.dims), [])

    @cached_property
    def _known(self) -> dict[tuple[str, ...], dict[tuple[int, ...], list[Argument]]]:
        return {}

    def holds_all_layers(self, argument: Argument, piece: Piece) -> bool:
        """Whether an array of a stacked parameter has all layers of it at once."""
        rest = self.ways(set(argument.axes) - set(piece.one.axes))
        return self.depth.get(argument.name, 1) > 1 and math.prod(
            piece.array.dims
        ) * rest == math.prod(argument.shape)

    def is_gradient(self, array: Array) -> bool:
        """Whether an array that is summed over the batch has a parameter's shape, sharded or
        gathered, or is not an activation.
        """
        return _dims(array.dims) in self._shapes or not self.is_activation(array)

    @cached_property
    def _shapes(self) -> set[tuple[int, ...]]:
        ways = {a.name: [self.report.mesh[axis] for axis in a.axes] for a in self.params}
        return {
            dims
            for a in self.params
            for shape in (a.shape, a.shape[1:])
            for dims in _sharded(shape, ways[a.name])
        }

    # What the rules promise; without rules, what the arguments show.

    def ways(self, axes: Iterable[str]) -> int:
        """How many parts these mesh axes make."""
        return math.prod(self.report.mesh.get(axis, 1) for axis in axes)

    def promised(self, argument: Argument, kind: Kind) -> set[str] | None:
        """The mesh axes that the rules shard an array of this kind along; None where they are not
        known.
        """
        logical = self.logical(argument)
        if self.rules is None or not logical:
            return None
        column = self.rules.column(kind)
        rows = (row_of(column, axis) for axis in logical if axis)
        return self._real({axis for row in rows if row for axis in axes_of(column[row])})

    @cached_property
    def shards_params(self) -> set[str]:
        """Mesh axes that parameters are sharded along, also those that layers gather from flat
        vectors.
        """
        return {axis for a in self.params for axis in a.axes} | (
            self.gathers_weights if self.rules else set()
        )

    @cached_property
    def shards_batch(self) -> set[str]:
        """Mesh axes that the batch is sharded along."""
        named = set(axes_of(self.rules.activations["batch"])) if self.rules else set()
        largest = self._batch_shape[0]
        return self._real(
            named or set(largest.axes if largest else ()) - {self.vocabulary.sequence_axis}
        )

    @cached_property
    def gathers_weights(self) -> set[str]:
        """Axes along which weights are gathered where they are used."""
        if self.rules is None:
            return self.shards_params & self.shards_batch
        return self._real(self._rows("params") - self._rows("gathered"))

    @cached_property
    def gathers_updates(self) -> set[str]:
        """Axes along which new weights are gathered after the update (ZeRO)."""
        if self.rules is None:
            return {
                axis for a in self.report.arguments if a.kind == "moments" for axis in a.axes
            } - self.shards_params
        stored = {
            (row, axis) for row, axis in self._rows("params") if row.rpartition("/")[2] != "flat"
        }
        return self._real((self._rows("optimizer") | self._rows("gradients")) - stored)

    @cached_property
    def gathers_residual(self) -> set[str]:
        """Axes that shard the residual stream's sequence between the matmul pairs."""
        if self.rules is None:
            return self.shards_params - self.shards_batch
        return self._real(
            set(self.shards_activation("seq_resid")) - set(self.shards_activation("seq"))
        )

    def shards_activation(self, logical: str) -> tuple[str, ...]:
        """The mesh axes that the rules shard a dimension of activations along, in this segment;
        none without rules.
        """
        column = self.rules.activations if self.rules else {}
        row = row_of(column, f"{self.segment}/{logical}" if self.segment else logical)
        return axes_of(column[row]) if row else ()

    def _rows(self, kind: Kind) -> set[tuple[str, str]]:
        assert self.rules is not None
        column = self.rules.column(kind)
        if self.segment:  # its own rows before plain ones, and none of other segments
            rows = {
                row
                for logical in column
                if (row := row_of(column, f"{self.segment}/{_plain(logical)}"))
            }
            column = {row: column[row] for row in rows}
        return {(row, axis) for row, entry in column.items() for axis in axes_of(entry)}

    def _real(self, found: set[str] | set[tuple[str, str]]) -> set[str]:
        axes = {one if isinstance(one, str) else one[1] for one in found}
        return {axis for axis in axes if self.report.mesh.get(axis, 1) > 1}

    def row(self, argument: Argument, axes: Sequence[str]) -> str:
        """The row of rules.params that shards it along one of these axes, as it is written; the
        table where the row is not known.
        """
        column = self.rules.params if self.rules else {}
        for logical in self.logical(argument):
            row = row_of(column, logical) if logical else None
            if row and set(axes_of(column[row])) & set(axes):
                return f"rules.params[{row!r}]"
        return "rules.params" if self.rules else "its sharding"


def sent_fields(pieces: Sequence[Piece], text: str, fix: str) -> dict[str, Any]:
    """The fields of a finding about some arrays, but its name."""
    where = max(pieces, key=lambda piece: piece.bytes).one.where if pieces else Location()
    names = tuple(dict.fromkeys(piece.one.name for piece in pieces))
    return {
        "bytes": int(sum(piece.bytes for piece in pieces)),
        "where": where,
        "text": text,
        "fix": fix,
        "collectives": names,
    }


def names_of(arguments: Iterable[Argument]) -> str:
    """At most three of them by their own names."""
    names = list(dict.fromkeys(map(short, arguments)))
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def words_of(where: Location) -> set[str]:
    """The innermost named scopes of a place: attention and mlp of layers/attention+mlp."""
    return set(where.part.rpartition("/")[2].split("+")) - {""}


def and_more(count: int, what: str) -> str:
    """The words `(and 2 other arrays there)` after a space, or nothing for none."""
    return f" (and {count} other {what}{'s' * (count > 1)} there)" if count else ""


def short(argument: Argument) -> str:
    """Its own name: blocks.mlp.up.weight of state['params']['blocks.mlp.up.weight']."""
    keys = re.findall(r"\['([^']*)'\]|\.(\w+)$", argument.name)
    return next(filter(None, keys[-1]), argument.name) if keys else argument.name


def customary(kind: Kind) -> set[tuple[str, str]]:
    """(logical axis, mesh axis) that some preset shards."""
    return {
        (row, axis)
        for rules in PRESETS.values()
        for row, entry in rules.column(kind).items()
        for axis in axes_of(entry)
    }


def _plain(logical: str | None) -> str:
    """The name of a logical axis without its scope."""
    return (logical or "").rpartition("/")[2]


def _dims(dims: Sequence[int]) -> tuple[int, ...]:
    """Without order, and without those of size 1."""
    return tuple(sorted(d for d in dims if d > 1))


def _sharded(dims: Sequence[int], ways: Sequence[int]) -> set[tuple[int, ...]]:
    """What is left of an array's dimensions after none, some or all of these divisions, each of one
    dimension.
    """
    found = {_dims(dims)}
    for n in ways:
        found |= {
            _dims((*d[:i], d[i] // n, *d[i + 1 :]))
            for d in found
            for i in range(len(d))
            if d[i] % n == 0
        }
    return found
