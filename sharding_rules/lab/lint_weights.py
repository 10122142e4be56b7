"""Lint of weights that are gathered too early, too often or in too wide a type.

Also of activations that are sent in too wide a type.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

from sharding_rules.lab.hlo import arrays
from sharding_rules.lab.lint_context import (
    EXCHANGES,
    SUMS,
    Finding,
    LintContext,
    MeshAxes,
    Piece,
    innermost_scopes,
    instructions,
    largest,
    name_list,
    wire_bytes,
)
from sharding_rules.lab.lint_pipeline import is_hop
from sharding_rules.lab.lint_reshards import reshards
from sharding_rules.lab.report import SCALAR, Argument

# Too early.


def gathered_early(context: LintContext) -> Iterator[Finding]:
    """All layers of stacked weights gathered at once: they stay in memory while the loop runs."""
    stacks_by_axes: dict[MeshAxes, list[tuple[Piece, Argument]]] = defaultdict(list)
    for piece, weight in _gathered_stacks(context):
        stacks_by_axes[piece.collective.axes].append((piece, weight))

    for axes, stacks in stacks_by_axes.items():
        pieces = [piece for piece, _ in stacks]
        weights = [weight for _, weight in stacks]
        if not context.is_large(pieces):
            continue
        depth = max(context.depth[weight.name] for weight in weights)
        stack_bytes = {
            (piece.collective.name, weight.name): piece.array.bytes for piece, weight in stacks
        }
        yield Finding(
            check="gathered-early",
            # Of memory: all layers but the one in use.
            bytes=sum(stack_bytes.values()) * (depth - 1) // depth,
            where=largest(pieces).collective.where,
            text=(
                f"all {depth} layers of {name_list(weights)} are gathered over "
                f"{' and '.join(axes)} at once"
            ),
            fix=(
                "gather the weights of one layer at a time, in the loop over layers: "
                "shard.weight(w, ...) where the layer uses them"
            ),
            collectives=instructions(pieces),
        )


def _gathered_stacks(context: LintContext) -> Iterator[tuple[Piece, Argument]]:
    """Yields each array that holds all layers of a stacked weight, with the weight."""
    for piece in context.pieces:
        if not _is_weight_gather(context, piece) or not piece.arguments:
            continue
        for weight in context.piece_weights(piece):
            if context.holds_all_layers(weight, piece):
                yield piece, weight


def _is_weight_gather(context: LintContext, piece: Piece) -> bool:
    """Whether it is a gather, in the forward or backward pass, along axes that gather weights."""
    collective = piece.collective
    if collective.kind != "all-gather" or collective.where.phase in ("optimizer", ""):
        return False
    return set(collective.axes) <= context.weight_gather_axes


# Too often.


class _Gather(NamedTuple):
    """Gathers that one use of some weights explains."""

    weights: tuple[Argument, ...]
    is_forward: bool
    part: str
    """The part of the model, for weights outside the stack; they may serve two, as a tied embedding
    serves the head."""
    axes: MeshAxes


class _Excess(NamedTuple):
    """Gathers that run more often than they are needed."""

    weights: tuple[Argument, ...]
    pieces: list[Piece]
    wasted_bytes: float


def gathered_twice(context: LintContext) -> Iterator[Finding]:
    """More gathers of a weight than one for the forward pass and one for the backward pass.

    The one for the backward pass may be for what it recomputes.
    """
    # By mesh axes, and by how often the gathers run and would have to, in words.
    excess_by_axes: dict[MeshAxes, dict[str, list[_Excess]]] = defaultdict(
        lambda: defaultdict(list)
    )
    for gather, pieces in _weight_gathers(context).items():
        times = sum(piece.collective.times for piece in pieces)
        needed = _needed_gathers(context, gather)
        if times <= needed:
            continue
        wasted_bytes = sum(piece.bytes for piece in pieces) * (times - needed) / times
        if wasted_bytes < context.large_wire_bytes:
            continue
        run = "forward" if gather.is_forward else "backward"
        in_words = (
            f"{times:.10g} times over {' and '.join(gather.axes)} in the {run}, {needed} would do"
        )
        excess = _Excess(gather.weights, pieces, wasted_bytes)
        excess_by_axes[gather.axes][in_words].append(excess)

    for excess_by_words in excess_by_axes.values():
        excesses = [excess for group in excess_by_words.values() for excess in group]
        weights = [weight for excess in excesses for weight in excess.weights]
        pieces = [piece for excess in excesses for piece in excess.pieces]
        most_frequent = max(pieces, key=lambda piece: piece.collective.times)
        source = most_frequent.collective.where.source or "its matmul"
        yield Finding(
            check="gathered-twice",
            bytes=int(sum(excess.wasted_bytes for excess in excesses)),
            where=largest(pieces).collective.where,
            text=f"{name_list(weights)} gathered {'; '.join(excess_by_words)}",
            fix=(
                "cast the weight, pin it as it is used, use that: "
                f"shard.weight(w.astype(x.dtype), ...) before {source}"
            ),
            collectives=instructions(pieces),
        )


def _needed_gathers(context: LintContext, gather: _Gather) -> int:
    """Returns the gathers of a step that one for each microbatch and layer explains."""
    n_layers = sum(context.depth.get(weight.name, 1) for weight in gather.weights)
    n_parts = 1 + gather.part.count("+")
    needed = context.microbatches * n_layers * n_parts
    if context.n_stages <= 1 or not any(map(context.is_stacked, gather.weights)):
        return needed
    # Idle stages compute, too, at most as often as there are other stages. A backward slot may run
    # the forward pass again.
    n_ticks = context.microbatches + context.n_stages - 1
    n_passes = 1 if gather.is_forward else 2
    return needed * n_ticks // context.microbatches * n_passes


def _weight_gathers(context: LintContext) -> dict[_Gather, list[Piece]]:
    """Returns the gathers of weights in a step's two passes, without those of whole stacks."""
    stacks = {(piece.collective.name, weight.name) for piece, weight in _gathered_stacks(context)}
    gathers: dict[_Gather, list[Piece]] = defaultdict(list)
    for piece in context.pieces:
        if not _is_weight_gather(context, piece):
            continue
        collective = piece.collective
        weights = context.piece_weights(piece)
        if not weights or any((collective.name, weight.name) in stacks for weight in weights):
            continue
        part = "" if any(map(context.is_stacked, weights)) else collective.where.part
        is_forward = collective.where.phase == "forward"
        gathers[_Gather(tuple(weights), is_forward, part, collective.axes)].append(piece)
    return gathers


# Too wide.


class _WideKind(NamedTuple):
    """The arrays that one finding about a wide type is about."""

    axes: MeshAxes
    dtype: str
    content: str
    """In words; "weights" for all weights together."""


def wide_collectives(context: LintContext) -> Iterator[Finding]:
    """fp32 activations or weights on the wire of a bf16 program.

    Gradients are summed in fp32 on purpose, and new weights are fp32.
    """
    if not _is_bf16(context):
        return
    scopes: set[str] = set()
    names: set[str] = set()
    for check in (reshards, gathered_early, gathered_twice):
        for finding in check(context):
            scopes |= innermost_scopes(finding.where)
            names.update(finding.collectives)

    pieces_by_kind: dict[_WideKind, list[Piece]] = defaultdict(list)
    for piece in context.pieces:
        collective = piece.collective
        if collective.name in names or scopes & innermost_scopes(collective.where):
            continue
        content = _too_wide(context, piece)
        if not content:
            continue
        if context.piece_weights(piece):
            content = "weights"
        pieces_by_kind[_WideKind(collective.axes, piece.array.dtype, content)].append(piece)

    for kind, pieces in pieces_by_kind.items():
        if not context.is_large(pieces):
            continue
        content = kind.content
        if content == "weights":
            content = name_list(
                weight for piece in pieces for weight in context.piece_weights(piece)
            )
        location = largest(pieces).collective.where
        collective_kinds = " and ".join(dict.fromkeys(piece.collective.kind for piece in pieces))
        yield Finding(
            check="f32-collective",
            bytes=wire_bytes(pieces),
            where=location,
            text=f"{collective_kinds} of {content} in {kind.dtype} over {' and '.join(kind.axes)}",
            fix=(
                f"cast to bf16 before {location.source or location.part}, then "
                "lax.optimization_barrier, or XLA moves the cast behind the "
                f"{collective_kinds}"
            ),
            collectives=instructions(pieces),
        )


def _is_bf16(context: LintContext) -> bool:
    """Whether a program computes in bf16: it sends, stores or passes to a kernel such arrays."""
    report = context.report
    shapes = [buffer.shape for buffer in report.memory.buffers]
    for collective in report.collectives:
        if collective.payload > SCALAR:
            shapes += collective.shapes
    for _, operands, _ in report.kernels:
        shapes += operands
    for shape in shapes:
        if any(array.dtype == "bf16" and array.bytes > SCALAR for array in arrays(shape)):
            return True
    return False


def _too_wide(context: LintContext, piece: Piece) -> str:
    """Returns what is sent in a wider type than it is used in; empty for all that may be."""
    collective = piece.collective
    array = piece.array
    if array.dtype not in ("f32", "f64"):
        return ""
    if is_hop(context, collective):
        is_residual = math.prod(array.dims) in _hop_sizes(context)
        return f"activation {array}" if is_residual else ""
    if collective.where.phase == "optimizer":
        return _new_weights(context, piece)
    if collective.kind in EXCHANGES or not collective.where.phase or not collective.loops:
        return ""
    if collective.by_hand and not piece.arguments:
        return ""

    weights = context.piece_weights(piece)
    if weights:
        return "" if collective.kind in SUMS else name_list(weights)
    if collective.kind in SUMS:
        is_batch_sum = set(collective.axes) <= context.batch_axes
        if is_batch_sum and context.is_gradient(array):
            return ""
    return f"activation {array}" if context.is_activation(array) else ""


def _hop_sizes(context: LintContext) -> set[int]:
    """Returns the elements that one stage may send to the next.

    They are the residual stream, whole or sharded along the sequence.
    """
    ways = max(1, context.ways(context.residual_gather_axes))
    return {context.residual_size, context.residual_size // ways}


def _new_weights(context: LintContext, piece: Piece) -> str:
    """New weights that are gathered after the update in a wider type than they are stored in."""
    collective = piece.collective
    if collective.kind != "all-gather" or not set(collective.axes) <= context.update_gather_axes:
        return ""
    narrow_dtypes = []
    n_wide_elements = 0
    for param in context.params:
        if param.dtype in ("bfloat16", "float16"):
            narrow_dtypes.append(param.dtype)
        else:
            n_wide_elements += math.prod(param.shape)
    if not narrow_dtypes:
        return ""
    # Of more elements than all wide weights have, some are those of narrow weights.
    ways = context.ways(context.param_axes)
    n_elements = collective.times * math.prod(piece.array.dims) * ways
    return f"new weights, stored in {narrow_dtypes[0]}," if n_elements > n_wide_elements else ""


CHECKS = (gathered_early, gathered_twice, wide_collectives)
