"""Weights that are gathered too early, too often, or in too wide a type; and activations that are
sent in one.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator

from sharding_rules.lab.hlo import arrays
from sharding_rules.lab.lint_context import (
    EXCHANGES,
    SUMS,
    Finding,
    LintContext,
    Piece,
    names_of,
    sent_fields,
    words_of,
)
from sharding_rules.lab.lint_reshards import reshards
from sharding_rules.lab.report import SCALAR, Argument, Collective


def gathered_early(context: LintContext) -> Iterator[Finding]:
    """All layers of stacked weights gathered at once: they stay in memory while the loop runs."""
    found: dict[tuple[str, ...], list[tuple[Piece, Argument]]] = {}
    for piece, weight in _stacks_gathered(context):
        found.setdefault(piece.one.axes, []).append((piece, weight))
    for axes, each in found.items():
        if sum(piece.bytes for piece, _ in each) < context.large:
            continue
        wasted = {(piece.one.name, weight.name): piece.array.bytes for piece, weight in each}
        depth = max(context.depth[weight.name] for _, weight in each)
        text = (
            f"all {depth} layers of {names_of(weight for _, weight in each)} are gathered over "
            f"{' and '.join(axes)} at once"
        )
        fix = (
            "gather the weights of one layer at a time, in the loop over layers: shard.weight(w, "
            "...) where the layer uses them"
        )
        finding = Finding("gathered-early", **sent_fields([piece for piece, _ in each], text, fix))
        yield dataclasses.replace(finding, bytes=sum(wasted.values()) * (depth - 1) // depth)


def _stacks_gathered(context: LintContext) -> Iterator[tuple[Piece, Argument]]:
    for piece in context.pieces:
        if (
            piece.one.kind == "all-gather"
            and piece.one.where.phase not in ("optimizer", "")
            and piece.made_of
        ):
            for weight in context.weights_of(piece):
                if set(piece.one.axes) <= context.gathers_weights and context.holds_all_layers(
                    weight, piece
                ):
                    yield piece, weight


def gathered_twice(context: LintContext) -> Iterator[Finding]:
    """More gathers of a weight than one for the forward pass and one for the backward pass (or for
    what it recomputes).
    """
    found: dict[
        tuple[str, tuple[str, ...], int, int], list[tuple[list[Argument], list[Piece], float]]
    ] = {}
    for (weights, forward, part, axes), pieces in _gathers(context).items():
        stacked = any(map(context.stacked, weights))
        wanted = (
            context.microbatches
            * sum(context.depth.get(a.name, 1) for a in weights)
            * (1 + part.count("+"))
        )
        if context.staged and stacked:
            # Idle stages compute, too, at most as often as there are other stages. A backward slot
            # may run the forward pass again.
            wanted = (
                wanted
                * (context.microbatches + context.stages - 1)
                // context.microbatches
                * (1 if forward else 2)
            )
        times = sum(piece.one.times for piece in pieces)
        wasted = sum(piece.bytes for piece in pieces) * (times - wanted) / max(1, times)
        if times > wanted and wasted >= context.large:
            key = "forward" if forward else "backward", axes, times, wanted
            found.setdefault(key, []).append((list(weights), pieces, wasted))
    for axes in dict.fromkeys(axes for _, axes, _, _ in found):
        each = {key: more for key, more in found.items() if key[1] == axes}
        weights = [a for groups in each.values() for own, _, _ in groups for a in own]
        pieces = [piece for groups in each.values() for _, more, _ in groups for piece in more]
        runs = dict.fromkeys(
            f"{times} times over {' and '.join(axes)} in the {run}, {wanted} would do"
            for run, _, times, wanted in each
        )
        source = max(pieces, key=lambda piece: piece.one.times).one.where.source
        fix = (
            "cast the weight, pin it as it is used, use that: shard.weight(w.astype(x.dtype), ...) "
            f"before {source or 'its matmul'}"
        )
        finding = Finding(
            "gathered-twice",
            **sent_fields(pieces, f"{names_of(weights)} gathered {'; '.join(runs)}", fix),
        )
        yield dataclasses.replace(
            finding, bytes=int(sum(wasted for groups in each.values() for *_, wasted in groups))
        )


def _gathers(
    context: LintContext,
) -> dict[tuple[tuple[Argument, ...], bool, str, tuple[str, ...]], list[Piece]]:
    """The gathers of weights in a step's two passes: by weights, pass, part of the model and mesh
    axes.
    """
    early = {(piece.one.name, weight.name) for piece, weight in _stacks_gathered(context)}
    found: dict[tuple[tuple[Argument, ...], bool, str, tuple[str, ...]], list[Piece]] = {}
    for piece in context.pieces:
        one, weights = piece.one, context.weights_of(piece)
        if (
            one.kind != "all-gather"
            or one.where.phase in ("optimizer", "")
            or not set(one.axes) <= context.gathers_weights
        ):
            continue
        if weights and not any((one.name, weight.name) in early for weight in weights):
            # Weights outside the stack may serve two parts: the embedding and the head.
            part = "" if any(map(context.stacked, weights)) else one.where.part
            found.setdefault(
                (tuple(weights), one.where.phase == "forward", part, one.axes), []
            ).append(piece)
    return found


def wide_collectives(context: LintContext) -> Iterator[Finding]:
    """fp32 activations or weights on the wire of a bf16 program. Gradients are summed in fp32 on
    purpose; new weights are fp32.
    """
    if not _is_bf16(context):
        return
    told = [
        finding
        for check in (reshards, gathered_early, gathered_twice)
        for finding in check(context)
    ]
    places = {word for finding in told for word in words_of(finding.where)}
    names = {name for finding in told for name in finding.collectives}
    found: dict[tuple[tuple[str, ...], str, str], list[tuple[Piece, str]]] = {}
    for piece in context.pieces:
        if (
            (what := _too_wide(context, piece))
            and piece.one.name not in names
            and not places & words_of(piece.one.where)
        ):
            key = (
                piece.one.axes,
                piece.array.dtype,
                "weights" if context.weights_of(piece) else what,
            )
            found.setdefault(key, []).append((piece, what))
    for (axes, dtype, what), each in found.items():
        pieces = [piece for piece, _ in each]
        if sum(piece.bytes for piece in pieces) < context.large:
            continue
        what = (
            names_of(a for piece in pieces for a in context.weights_of(piece))
            if what == "weights"
            else what
        )
        here = max(pieces, key=lambda piece: piece.bytes).one.where
        kinds = " and ".join(dict.fromkeys(piece.one.kind for piece in pieces))
        fix = (
            f"cast to bf16 before {here.source or here.part}, then lax.optimization_barrier, or "
            f"XLA moves the cast behind the {kinds}"
        )
        yield Finding(
            "f32-collective",
            **sent_fields(pieces, f"{kinds} of {what} in {dtype} over {' and '.join(axes)}", fix),
        )


def _is_bf16(context: LintContext) -> bool:
    report = context.report
    shapes = [shape for one in report.collectives if one.payload > SCALAR for shape in one.shapes]
    shapes += [buffer.shape for buffer in report.memory.buffers] + [
        shape for _, operands, _ in report.kernels for shape in operands
    ]
    return any(
        array.dtype == "bf16" and array.bytes > SCALAR
        for shape in shapes
        for array in arrays(shape)
    )


def _too_wide(context: LintContext, piece: Piece) -> str:
    """What is sent in a wider type than it is used in; empty for all that may be."""
    one, array = piece.one, piece.array
    if array.dtype not in ("f32", "f64"):
        return ""
    if _is_hop(context, one):
        return f"activation {array}" if math.prod(array.dims) in _hop_sizes(context) else ""
    if one.where.phase == "optimizer":
        return _new_weights(context, piece)
    if one.kind in EXCHANGES or not one.where.phase or not one.loops:
        return ""
    weights = context.weights_of(piece)
    if one.by_hand and not piece.made_of:
        return ""
    gradient = weights or (set(one.axes) <= context.shards_batch and context.is_gradient(array))
    if (one.kind in SUMS and gradient) or not (weights or context.is_activation(array)):
        return ""
    return names_of(weights) or f"activation {array}"


def _is_hop(context: LintContext, one: Collective) -> bool:
    return one.kind == "collective-permute" and context.vocabulary.pipeline_axis in one.axes


def _hop_sizes(context: LintContext) -> Iterable[int]:
    """Elements of what one stage sends to the next: the residual stream, whole or sharded along the
    sequence.
    """
    return {
        context.residual_size,
        context.residual_size // max(1, context.ways(context.gathers_residual)),
    }


def _new_weights(context: LintContext, piece: Piece) -> str:
    """New weights that are gathered after the update in a wider type than they are stored in."""
    narrow = [a for a in context.params if a.dtype in ("bfloat16", "float16")]
    wide = sum(math.prod(a.shape) for a in context.params if a not in narrow)
    if (
        not narrow
        or piece.one.kind != "all-gather"
        or not set(piece.one.axes) <= context.gathers_updates
    ):
        return ""
    elements = piece.one.times * math.prod(piece.array.dims) * context.ways(context.shards_params)
    return f"new weights, stored in {narrow[0].dtype}," if elements > wide else ""


CHECKS = (gathered_early, gathered_twice, wide_collectives)
