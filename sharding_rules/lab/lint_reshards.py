"""Lint of arrays that are sharded one way where they are made and another where they are used.

What the rules and the weights explain is lawful: weights are gathered along the axes of the batch,
new weights after ZeRO's update, the residual stream along those of sequence parallelism. Every
other exchange or gather that XLA's partitioner inserted is an error. What the program's author
called (lax.all_gather and its like) is left alone.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from typing import NamedTuple

from sharding_rules.lab.lint_context import (
    EXCHANGES,
    SUMS,
    Finding,
    LintContext,
    MeshAxes,
    Piece,
    instructions,
    largest,
    name_list,
    short_name,
    wire_bytes,
)
from sharding_rules.lab.lint_state import misplaced_moments
from sharding_rules.lab.report import Argument, Collective, Location
from sharding_rules.owner import owner_axes
from sharding_rules.rules import axes_of, row_of


class _Reshard(NamedTuple):
    """One array of a collective that neither rules nor weights explain."""

    piece: Piece
    text: str
    """What is wrong; empty for a gather of weights in the optimizer, see `_is_for_update`."""
    fix: str


@dataclasses.dataclass(frozen=True)
class _Cause:
    """A mistake that explains reshards, which are then no findings of their own."""

    text: str
    """Empty where another check reports it."""
    fix: str
    explains: Callable[[Piece], bool]
    certain: bool = False
    """Names are swapped: a finding even where no collective comes of it. It explains all in a part
    of the model where it explains one."""


# The checks.


def reshards(context: LintContext) -> Iterator[Finding]:
    """Arrays that are sharded in two ways.

    There is one finding for each known cause. Reshards that no cause explains have one for the
    optimizer, and one for each part of the model and set of mesh axes.
    """
    unexplained = []
    for piece in context.pieces:
        if context.is_for_matrix_optimizer(piece.collective):
            continue
        reshard = _reshard(context, piece)
        if reshard is not None:
            unexplained.append(reshard)

    for cause in _causes(context):
        explained = _explained(cause, unexplained)
        unexplained = [reshard for reshard in unexplained if reshard not in explained]
        pieces = [reshard.piece for reshard in explained]
        if cause.text and (cause.certain or context.is_large(pieces)):
            yield Finding(
                check="swapped-names" if cause.certain else "reshard",
                bytes=wire_bytes(pieces),
                where=largest(pieces).collective.where if pieces else Location(),
                text=cause.text,
                fix=cause.fix,
                collectives=instructions(pieces),
            )

    updates = [reshard for reshard in unexplained if _is_for_update(context, reshard.piece)]
    yield from _update_gathers(context, [reshard.piece for reshard in updates])

    for group in _grouped([reshard for reshard in unexplained if reshard not in updates]):
        pieces = [reshard.piece for reshard in group]
        if not context.is_large(pieces):
            continue
        worst = max(group, key=lambda reshard: reshard.piece.bytes)
        n_others = len({(piece.collective.name, str(piece.array)) for piece in pieces}) - 1
        plural = "s" if n_others > 1 else ""
        also = f" (and {n_others} other array{plural} there)" if n_others else ""
        yield Finding(
            check="reshard",
            bytes=wire_bytes(pieces),
            where=worst.piece.collective.where,
            text=f"{worst.text}{also}",
            fix=worst.fix,
            collectives=instructions(pieces),
        )


def _update_gathers(context: LintContext, pieces: list[Piece]) -> Iterator[Finding]:
    """Weights that are gathered in the optimizer before the update."""
    if not context.is_large(pieces):
        return
    weights = name_list(weight for piece in pieces for weight in context.piece_weights(piece))
    yield Finding(
        check="reshard",
        bytes=wire_bytes(pieces),
        where=largest(pieces).collective.where,
        text=f"{weights}, sharded along {_axes(context, pieces)}, are gathered in the optimizer",
        fix=(
            "update each device's own shard: pin the weights there to rules.optimizer, or leave "
            "them as they are"
        ),
        collectives=instructions(pieces),
    )


def divided_matrices(context: LintContext) -> Iterator[Finding]:
    """Matrices that the optimizer multiplies although a device has only a part of each.

    Muon gathers them again in every iteration of Newton-Schulz.
    """
    pieces = []
    matrices: list[Argument] = []
    for piece in context.pieces:
        if not _is_product_of_optimizer(context, piece):
            continue
        moments = _gathered_moments(context, piece)
        stacked = [moment for moment in moments if "layers" in context.logical_axes(moment)]
        if moments and context.axes and not stacked:
            continue  # a new table, which XLA gathers in the same collective
        pieces.append(piece)
        matrices += stacked or moments
    if not context.is_large(pieces):
        return
    collectives = {piece.collective.name: piece.collective for piece in pieces}
    n_times = round(sum(collective.times for collective in collectives.values()))
    names = f" ({name_list(matrices)})" if matrices else ""
    fix = (
        "divide the optimizer's state by layers, so that a device has complete matrices "
        "(sharding_rules.owner.with_owners)"
    )
    rules = context.rules.name if context.rules else ""
    if not rules.endswith("(changed)"):  # of which no command line has a name
        fix = context.vocabulary.fix("divided-matrices", fix, rules=rules)
    yield Finding(
        check="divided-matrices",
        bytes=wire_bytes(pieces),
        where=largest(pieces).collective.where,
        text=(
            f"the optimizer multiplies matrices{names} of which a device has a part, and gathers "
            f"or sums them over {_axes(context, pieces)} in {n_times} collectives"
        ),
        fix=fix,
        severity="error" if context.rules else "notice",
        collectives=instructions(pieces),
    )


def _is_product_of_optimizer(context: LintContext, piece: Piece) -> bool:
    """Whether an array is an operand or the result of a matmul in the optimizer."""
    collective = piece.collective
    if not context.is_for_matrix_optimizer(collective):
        return False
    return collective.where.op == "dot_general" and collective.kind in ("all-gather", *SUMS)


def _gathered_moments(context: LintContext, piece: Piece) -> list[Argument]:
    """Returns the moments of as many elements as an array, gathered along its axes. XLA merges and
    transposes the dimensions of what it multiplies.
    """
    along = set(piece.collective.axes)
    n_elements = math.prod(piece.array.dims)
    moments = []
    for argument in context.report.arguments:
        if argument.kind != "moments" or not along & set(argument.axes):
            continue
        other_ways = context.ways(set(argument.axes) - along)
        if math.prod(argument.shape) == n_elements * other_ways:
            moments.append(argument)
    return moments


def matrix_optimizers(context: LintContext) -> Iterator[Finding]:
    """Arrays that are moved for an optimizer that multiplies matrices.

    They are the price of what was asked for, and worth knowing. Those that `divided_matrices` finds
    are not among them, nor those that the rules move to the owners of layers.
    """
    owners = set(owner_axes(context.rules)) if context.rules else set()
    pieces = []
    for piece in context.pieces:
        collective = piece.collective
        if not context.is_for_matrix_optimizer(collective):
            continue
        if _is_product_of_optimizer(context, piece):
            continue
        if collective.kind == "all-to-all" and set(collective.axes) <= owners:
            continue
        if _reshard(context, piece) is not None:
            pieces.append(piece)
    if not context.is_large(pieces):
        return
    yield Finding(
        check="optimizer-matmuls",
        bytes=wire_bytes(pieces),
        where=largest(pieces).collective.where,
        text=(
            f"the optimizer multiplies matrices, and XLA moves {len(pieces)} arrays over "
            f"{_axes(context, pieces)} for it"
        ),
        fix=(
            "an optimizer that works on each element (AdamW), or gradients, moments and update "
            "pinned to one sharding for it"
        ),
        severity="notice",
        collectives=instructions(pieces),
    )


def _axes(context: LintContext, pieces: list[Piece]) -> str:
    """The mesh axes of these arrays' collectives, in words."""
    axes = {axis for piece in pieces for axis in piece.collective.axes}
    return " and ".join(axis for axis in context.report.mesh if axis in axes)


# Grouping.


def _explained(cause: _Cause, reshards: list[_Reshard]) -> list[_Reshard]:
    """Returns the reshards that a cause explains."""
    explained = [reshard for reshard in reshards if cause.explains(reshard.piece)]
    if cause.certain:
        parts = {_model_part(reshard.piece.collective) for reshard in explained}
        explained += [
            reshard
            for reshard in reshards
            if reshard not in explained and _model_part(reshard.piece.collective) in parts
        ]
    return explained


def _model_part(collective: Collective) -> str:
    """Returns the part of the model, or the line of a program without named scopes."""
    return collective.where.part or collective.where.source


@dataclasses.dataclass
class _Group:
    keys: set[tuple[MeshAxes, str]]
    reshards: list[_Reshard]


def _grouped(reshards: list[_Reshard]) -> list[list[_Reshard]]:
    """Returns groups along one set of mesh axes.

    Two reshards are in one group if they share the part of the model, the line of the source, or a
    weight.
    """
    groups: list[_Group] = []
    for reshard in reshards:
        collective = reshard.piece.collective
        words = (collective.where.part, collective.where.source, *reshard.piece.arguments)
        keys = {(collective.axes, word) for word in words if word} or {(collective.axes, "")}
        merged = _Group(keys, [reshard])
        # Every group that it has a key in common with becomes one.
        separate = []
        for group in groups:
            if group.keys & keys:
                merged.keys = merged.keys | group.keys
                merged.reshards = group.reshards + merged.reshards
            else:
                separate.append(group)
        groups = [*separate, merged]
    return [group.reshards for group in groups]


# What explains an array.


def _reshard(context: LintContext, piece: Piece) -> _Reshard | None:
    """Returns what is wrong with an array; None if nothing is, or nothing says what it is."""
    collective = piece.collective
    axes = set(collective.axes)
    if collective.by_hand or not axes or axes & context.manual_axes:
        return None
    if collective.partial:
        return _Reshard(
            piece,
            text=(
                f"{collective.kind} of {_in_words(context, piece)} between a part of the devices "
                f"along {piece.along}"
            ),
            fix=_pin(context, collective, "along dimensions whose sizes divide"),
        )
    if collective.kind in EXCHANGES:
        return _Reshard(
            piece,
            text=(
                f"{collective.kind} of {_in_words(context, piece)} along {piece.along}: it is "
                "sharded along one dimension where it is made and another where it is used"
                f"{_next_to(context, collective)}"
            ),
            fix=_pin(context, collective, "the same way before and after it"),
        )
    if collective.kind == "all-gather":
        return _unexplained_gather(context, piece)
    return None


def _unexplained_gather(context: LintContext, piece: Piece) -> _Reshard | None:
    collective = piece.collective
    axes = set(collective.axes)

    # New weights after ZeRO's update.
    in_update = collective.where.phase == "optimizer" or not collective.loops
    update_axes = context.update_gather_axes
    if in_update and axes & update_axes and axes <= update_axes | context.weight_gather_axes:
        return None
    if _is_for_update(context, piece):
        return _Reshard(piece, text="", fix="")

    # Weights.
    weights = context.piece_weights(piece)
    if weights:
        if axes <= context.weight_gather_axes:
            return None
        return _gathered_weight(context, piece, weights)

    # Operands of a matmul, and the residual stream.
    if axes <= _operand_gather_axes(context, context.adjacent_weights(collective)):
        return None
    residual_axes = context.residual_gather_axes | set(context.activation_axes("embed"))
    if axes <= residual_axes and context.is_residual(piece.array):
        return None

    if context.is_activation(piece.array, collective.axes):
        return _gathered_activation(context, piece)
    # Nothing says what it is; an optimizer may work on whole matrices.
    if context.rules is None or (in_update and axes <= context.weight_gather_axes):
        return None
    return _gathered_activation(context, piece)


def _is_for_update(context: LintContext, piece: Piece) -> bool:
    """Whether it gathers weights, and nothing but weights, in the optimizer.

    It is before the update: what is gathered after it is new, and no argument.
    """
    if piece.collective.where.phase != "optimizer" or not piece.arguments:
        return False
    return bool(context.piece_weights(piece))


def _operand_gather_axes(context: LintContext, weights: list[Argument]) -> set[str]:
    """Returns the mesh axes along which a matmul with these weights gathers its other operand.

    They shard the weights, and what they are multiplied with along another dimension, as heads in
    preset megatron_2d. Without weights, as where layers gather theirs from flat vectors, they are
    those of any weight, by the rules.
    """
    column = context.rules.column("gathered") if context.rules else {}
    if weights:
        logical_axes = {axis for weight in weights for axis in context.logical_axes(weight)}
        sharded = {axis for weight in weights for axis in weight.axes}
    else:
        logical_axes = set()
        sharded = {axis for entry in column.values() for axis in axes_of(entry)}
    gathered: set[str] = set()
    for logical_axis in logical_axes or column:
        row = row_of(column, logical_axis) if logical_axis else None
        if row:
            activation_axes = context.activation_axes(row.rpartition("/")[2])
            gathered |= set(activation_axes) - set(axes_of(column[row]))
    return gathered & sharded


def _gathered_weight(context: LintContext, piece: Piece, weights: list[Argument]) -> _Reshard:
    location = piece.collective.where
    row = context.sharding_row(weights[0], piece.collective.axes)
    activation_row = row.replace("params", "activations") if context.rules else "a constraint"
    return _Reshard(
        piece,
        text=(
            f"{name_list(weights)} is gathered over {piece.along}, along which {row} shards it "
            "for good"
        ),
        fix=(
            f"shard what it is multiplied with along {piece.along} too, by {activation_row}; and "
            f"pin the weight at {location.source or location.part}: shard.weight(w, ...)"
        ),
    )


def _gathered_activation(context: LintContext, piece: Piece) -> _Reshard:
    collective = piece.collective
    gather = f"{_in_words(context, piece)} is gathered over {piece.along}"
    neighbours = _next_to(context, collective)
    if set(collective.axes) & context.batch_axes:
        verb = "shards" if len(collective.axes) == 1 else "shard"
        sharding = "with its batch sharded"
        if context.rules:
            sharding += " ('batch' in its row, not None)"
        return _Reshard(
            piece,
            text=f"{gather}, which {verb} the batch{neighbours}",
            fix=_pin(context, collective, sharding),
        )

    row = _gathered_row(context, piece)
    if row:
        reason = f"along which rules.activations[{row!r}] shards it"
    else:
        reason = "which is not the residual stream entering a block"
    pin = _pin(context, collective, "the same way before and after it")
    return _Reshard(
        piece,
        text=f"{gather}, {reason}{neighbours}",
        fix=(
            f"{pin}; where it is a reshape of a sharded dimension, store the weight unjoined: "
            "[D, 3, N, H], not [D, 3N, H]"
        ),
    )


# Arrays and places in words.


def _in_words(context: LintContext, piece: Piece) -> str:
    """Returns "activation bf16[4,512,8192] (batch, seq, vocab)", a weight's name, or the shape."""
    weights = context.piece_weights(piece)
    if weights:
        return f"{name_list(weights)} {piece.array}"
    if not context.is_activation(piece.array, piece.collective.axes):
        return str(piece.array)

    local_rows, local_columns = context.local_batch
    gathered_batch_axes = set(piece.collective.axes) & context.batch_axes
    row_sizes = (local_rows, local_rows * context.ways(gathered_batch_axes))
    dims = []
    for size in piece.array.dims:
        names = [name for name, sizes in _activation_sizes(context).items() if size in sizes]
        if size == local_columns:
            dims.append("seq")
        elif size in row_sizes:
            dims.append("batch")
        elif names:
            dims.append(names[0])
    if not context.axes or len(dims) != len(piece.array.dims):
        return f"activation {piece.array}"
    return f"activation {piece.array} ({', '.join(dims)})"


def _activation_sizes(context: LintContext) -> dict[str, set[int]]:
    """Returns the full sizes of the logical axes of activations.

    They are those of weights of the same name, which may differ.
    """
    activations = context.rules.activations if context.rules else {}
    sizes: dict[str, set[int]] = defaultdict(set)
    for param in context.params:
        for axis, size in zip(context.logical_axes(param), param.shape, strict=False):
            if axis and row_of(activations, axis):
                sizes[axis].add(size)
    return sizes


def _gathered_row(context: LintContext, piece: Piece) -> str:
    """Returns the row of rules.activations whose dimension was gathered; "" if no size says so."""
    activations = context.rules.activations if context.rules else {}
    for name, sizes in _activation_sizes(context).items():
        row = row_of(activations, name)
        if not row or not sizes & set(piece.array.dims):
            continue
        if set(axes_of(activations[row])) & set(piece.collective.axes):
            return row
    return ""


def _next_to(context: LintContext, collective: Collective) -> str:
    weights = context.adjacent_weights(collective)
    return f", next to the matmul with {name_list(weights)}" if weights else ""


def _pin(context: LintContext, collective: Collective, sharding: str) -> str:
    location = collective.where.source or collective.where.part or "its maker"
    if context.rules:
        call = "by rules.activations: shard(x, ...)"
    else:
        call = "with jax.lax.with_sharding_constraint"
    return f"at {location} pin the array {sharding}, {call}"


# Causes that are known before any collective is looked at.


def _causes(context: LintContext) -> Iterator[_Cause]:
    yield from _swapped_names(context)
    yield from _one_sided_rows(context)
    # Gradients and weights are gathered for the update of moments that are not sharded as they
    # should be.
    if misplaced_moments(context):
        yield _Cause("", "", lambda piece: piece.collective.where.phase == "optimizer")


def _swapped_names(context: LintContext) -> Iterator[_Cause]:
    """Weights whose dimensions are named in the wrong order: their sizes are each other's."""
    sizes: dict[str, Counter[int]] = defaultdict(Counter)
    for param in context.params:
        for axis, size in _named_dims(context, param):
            sizes[axis][size] += 1
    usual_size = {axis: counts.most_common(1)[0][0] for axis, counts in sizes.items()}

    swapped: dict[tuple[str, str], list[Argument]] = defaultdict(list)
    for param in context.params:
        dims = _named_dims(context, param)
        for axis, size in dims:
            if size == usual_size[axis]:
                continue
            for other, other_size in dims:
                if other != axis and other_size == usual_size[axis]:
                    swapped[axis, other].append(param)

    # Each weight is in one cause.
    explained: set[str] = set()
    for (axis, other), params in swapped.items():
        weights = [param for param in params if param.name not in explained]
        explained.update(weight.name for weight in weights)
        if not weights:
            continue
        examples = ", ".join(f"{short_name(weight)} {list(weight.shape)}" for weight in weights[:2])
        yield _Cause(
            text=(
                f"the names {axis!r} and {other!r} are swapped in {examples}: {axis!r} has "
                f"{usual_size[axis]} elsewhere"
            ),
            fix=(
                f"name the dimensions in the order in which the weight has them: {other!r} where "
                f"{axis!r} stands, and the reverse"
            ),
            explains=_concerns(context, weights),
            certain=True,
        )


def _named_dims(context: LintContext, param: Argument) -> list[tuple[str, int]]:
    """Returns the name and size of each dimension of one layer."""
    dims = zip(context.logical_axes(param), param.shape, strict=False)
    return [(axis, size) for axis, size in dims if axis and axis != "layers"]


def _concerns(context: LintContext, weights: list[Argument]) -> Callable[[Piece], bool]:
    """Whether a collective moves one of these weights, its gradient, or what it multiplies."""
    scopes = {word for weight in weights for word in short_name(weight).split(".")}
    names = {weight.name for weight in weights}
    layer_sizes = {
        math.prod(weight.shape) // context.depth.get(weight.name, 1) for weight in weights
    }

    def explains(piece: Piece) -> bool:
        if names & {*piece.arguments, *piece.collective.beside}:
            return True
        if scopes & set(re.split(r"[/+]", piece.collective.where.part)):
            return True
        if context.is_activation(piece.array):
            return False
        # A shard of such a weight.
        n_elements = math.prod(piece.array.dims)
        for size in layer_sizes:
            if size % n_elements == 0 and size // n_elements <= context.report.n_devices:
                return True
        return False

    return explains


def _one_sided_rows(context: LintContext) -> Iterator[_Cause]:
    """Rows by which weights are sharded for good, and activations of the same name are not."""
    if context.rules is None:
        return
    params = context.rules.column("params")
    activations = context.rules.column("activations")
    for row, entry in params.items():
        missing = {axis for axis in axes_of(entry) if context.report.mesh.get(axis, 1) > 1}
        missing -= context.batch_axes | context.manual_axes
        activation_row = row_of(activations, row)
        if activation_row:
            missing -= set(axes_of(activations[activation_row]))
        if not missing:
            continue
        weights = []
        for param in context.params:
            rows = {row_of(params, axis) for axis in context.logical_axes(param) if axis}
            if row in rows:
                weights.append(param)
        for axis in sorted(missing):
            yield _Cause(
                text=(
                    f"rules.params[{row!r}] shards {name_list(weights)} along {axis}, and "
                    f"rules.activations[{row!r}] does not: what they are multiplied with is "
                    "gathered, or they are"
                ),
                fix=f"rules.activations[{row!r}] = {axis!r}, or None in both columns",
                explains=_multiplies(weights, axis),
            )


def _multiplies(weights: list[Argument], axis: str) -> Callable[[Piece], bool]:
    """Whether it is along a mesh axis, and moves one of these weights or what it multiplies."""
    names = {weight.name for weight in weights}

    def explains(piece: Piece) -> bool:
        if axis not in piece.collective.axes:
            return False
        return bool(names & {*piece.arguments, *piece.collective.beside})

    return explains


CHECKS = (reshards, divided_matrices, matrix_optimizers)
