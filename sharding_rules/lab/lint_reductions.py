"""How a program sums over devices: gradients too often, too much of them, or in another type than
its rules ask for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from sharding_rules.lab import lint_reshards
from sharding_rules.lab.lint_context import (
    SUMS,
    Finding,
    LintContext,
    Piece,
    names_of,
    short,
    words_of,
)
from sharding_rules.lab.report import SCALAR, Argument, Collective, Location, Report
from sharding_rules.lab.summary import size
from sharding_rules.rules import Rules

_HALF = ("bf16", "f16")
_INT8 = ("s8", "u8")
"""Sums in these are no all-reduces: devices exchange parts, add what they receive in fp32, and
gather the sums."""
_VECTOR = 32
"""Times the model's width: a parameter with fewer elements in a layer does not count as a matrix;
the largest bias has seven."""
_SMALL = 0.02
"""Share of the bytes of all sums of gradients: axes and dtypes with less are not worth a
finding."""


def gradient_sums(context: LintContext) -> Iterator[Piece]:
    """Every array of every sum over devices that have other parts of the batch; in int8, of the
    exchanges that make a sum.
    """
    tokens = context.shards_batch | {context.vocabulary.sequence_axis}
    for piece in context.pieces:
        rounded = (
            piece.array.dtype in _INT8
            and piece.one.kind in ("all-to-all", "all-gather")
            and piece.one.where.phase != "forward"
        )
        summed = (piece.one.kind in SUMS or rounded) and tokens & set(piece.one.axes)
        if summed and piece.array.bytes > SCALAR and context.is_gradient(piece.array):
            yield piece


def reduction_dtype(context: LintContext) -> Iterator[Finding]:
    """Gradients of matrices that are summed in another type than rules.reduction asks for. Without
    rules nothing is asked for.
    """
    asked = context.rules.reduction if context.rules else None
    if asked in ("bfloat16", "int8"):
        yield from _too_wide(context, asked)
    if asked and asked != "int8":
        yield from _too_narrow(context, asked)


def _too_narrow(context: LintContext, asked: str) -> Iterator[Finding]:
    """With `auto`, only sums after all loops can be checked: those in a loop are the microbatches'
    and have the dtype of the matmul.
    """
    total: dict[tuple[Location, str, tuple[str, ...], str], float] = {}
    for piece in gradient_sums(context):
        one, array = piece.one, piece.array
        half = asked == "float32" or (asked == "auto" and _once(context, one) and not one.loops)
        if array.dtype in _INT8 or (array.dtype in _HALF and half):
            key = (one.where, _whose(context.weights(one.axes, array)), one.axes, array.dtype)
            total[key] = total.get(key, 0) + piece.bytes
    fix = (
        "let the gradient leave its matmul in float32: shard.einsum(equation, x, w, axes), with "
        "the weight as it is stored"
    )
    if asked == "auto":
        fix = (
            "cast gradients to float32 before they are summed, or say that it is meant: "
            "rules.replace(reduction='bfloat16')"
        )
    wanted = "bfloat16" if asked == "bfloat16" else "float32"
    for (where, whose, axes, dtype), bytes in total.items():
        if bytes >= context.large:
            text = (
                f"gradients{whose} are summed in {dtype} over {' and '.join(axes)}; "
                f"rules.reduction={asked!r} asks for {wanted}"
            )
            by_rule = "leave rounding to the rules: rules.replace(reduction='int8')"
            severity = "notice" if asked == "auto" and dtype in _HALF else "error"
            yield Finding(
                "reduction-dtype",
                int(bytes),
                where,
                text,
                by_rule if dtype in _INT8 else fix,
                severity,
            )


def _too_wide(context: LintContext, asked: str) -> Iterator[Finding]:
    """Vectors are summed in fp32: what is more than those is of matrices. XLA may have joined all
    of them in one array.
    """
    wide = ("f32", *_HALF) if asked == "int8" else ("f32",)
    found: dict[tuple[str, ...], list[Piece]] = {}
    for piece in gradient_sums(context):
        if _once(context, piece.one) and piece.array.dtype in wide:
            found.setdefault(piece.one.axes, []).append(piece)
    vectors = sum(
        a.bytes / 4
        for a in context.params
        if math.prod(a.shape[context.stacked(a) :]) < _VECTOR * context.width
    )
    for axes, each in found.items():
        elements = sum(piece.one.times * math.prod(piece.array.dims) for piece in each)
        bytes = sum(piece.bytes for piece in each) * max(0.0, 1 - vectors / elements)
        if bytes >= context.large:
            largest, along = max(each, key=lambda piece: piece.bytes), " and ".join(axes)
            text = (
                f"gradients of matrices are summed in {largest.array.dtype} over {along}; "
                f"rules.reduction={asked!r} asks for {asked}"
            )
            fix = (
                f"cast them to bfloat16 before they are summed over {along}"
                if asked == "bfloat16"
                else "sum them by the engine's region"
            )
            fix += ", or ask for float32: rules.replace(reduction='auto')"
            yield Finding("reduction-dtype", int(bytes), largest.one.where, text, fix)


def _whose(weights: list[Argument]) -> str:
    """Names the weights that a gradient may belong to; two with the same dimensions cannot be
    distinguished.
    """
    return f" of {' or '.join(dict.fromkeys(map(short, weights)))}" if weights else ""


def _once(context: LintContext, one: Collective) -> bool:
    """Along an axis that a step sums over once."""
    return context.rules is not None and bool(context.rules.manual_axes() & set(one.axes))


def reduced(report: Report, rules: Rules | None = None) -> str:
    """In words, by mesh axes: "f32 (24.20 GiB) over data, bf16 (1.12 GiB) and f32 (0.39 GiB) over
    fsdp". Empty where nothing is summed.

    Bytes are those that a device sends in a step; along an axis the type with most of them comes
    first.
    """
    found: dict[tuple[str, ...], dict[str, float]] = {}
    for piece in gradient_sums(LintContext(report, rules, {})):
        by_type = found.setdefault(piece.one.axes, {})
        by_type[piece.array.dtype] = by_type.get(piece.array.dtype, 0) + piece.bytes
    least = _SMALL * sum(sum(by_type.values()) for by_type in found.values())
    order = list(report.mesh)
    words = []
    for axes, by_type in sorted(
        found.items(), key=lambda item: [order.index(axis) for axis in item[0]]
    ):
        kept = sorted(
            ((bytes, dtype) for dtype, bytes in by_type.items() if bytes >= least), reverse=True
        )
        if kept:
            words.append(
                f"{' and '.join(f'{dtype} ({size(bytes)})' for bytes, dtype in kept)} over "
                f"{' and '.join(axes)}"
            )
    return ", ".join(words)


def microbatch_reductions(context: LintContext) -> Iterator[Finding]:
    """Sums of gradients inside the loop over microbatches, along an axis that shards no parameter:
    one after the loop would do.
    """
    whole = context.shards_batch - context.shards_params - context.manual_axes
    found: dict[tuple[str, ...], list[Piece]] = {}
    for piece in context.pieces if context.microbatches > 1 else ():
        axes = tuple(axis for axis in piece.one.axes if axis in whole)
        summed = (
            piece.one.kind in SUMS
            and piece.one.where.phase != "forward"
            and context.is_gradient(piece.array)
        )
        if axes and summed and context.each_microbatch(piece.one):
            found.setdefault(axes, []).append(piece)
    for axes, pieces in found.items():
        bytes = int(sum(piece.bytes for piece in pieces))
        if bytes >= context.large:
            largest, along = max(pieces, key=lambda piece: piece.bytes), " and ".join(axes)
            fix = (
                f"add gradients up in the loop and sum them over {along} once after it, in a "
                f"region that is manual over {along}"
            )
            fix += " (jax.shard_map); or shard the parameters along it"
            text = (
                f"gradients are summed over {along} in each of {context.microbatches} microbatches"
            )
            text += f" ({largest.one.kind} over {largest.along})"
            yield Finding(
                "microbatch-reduction",
                bytes,
                largest.one.where,
                text,
                fix,
                collectives=_instructions(pieces),
            )


def whole_gradients(context: LintContext) -> Iterator[Finding]:
    """Gradients that are all-reduced over axes along which the rules shard them: each device needs
    its own part of the sum alone.
    """
    if context.rules is None or not context.axes:
        return
    told = {name for finding in microbatch_reductions(context) for name in finding.collectives}
    found: dict[tuple[str, ...], list[Piece]] = {}
    for piece in (
        piece
        for piece in context.pieces
        if piece.one.kind == "all-reduce" and piece.one.name not in told
    ):
        over_batch = set(piece.one.axes) & context.shards_batch and not context.in_matrix_optimizer(
            piece.one
        )
        if over_batch and context.is_gradient(piece.array):
            found.setdefault(piece.one.axes, []).append(piece)
    for axes, pieces in found.items():
        excess = [
            piece.bytes * max(0.0, 1 - _lawful(context, piece) / math.prod(piece.array.dims))
            for piece in pieces
        ]
        bytes = int(sum(excess))
        if bytes >= context.large:
            largest = pieces[excess.index(max(excess))]
            whose, along = names_of(_summed_whole(context, largest)), " and ".join(axes)
            text = (
                f"gradients{f' of {whose}' if whose else ''} are all-reduced in full over {along}, "
                "along which the rules shard them"
            )
            fix = (
                "a reduce-scatter sends half: pin the sum to rules.gradients (Shard.constrain), or "
                "lax.psum_scatter in place of lax.psum"
            )
            yield Finding(
                "all-reduce-of-shards",
                bytes,
                largest.one.where,
                text,
                fix,
                collectives=_instructions(pieces),
            )


def _lawful(context: LintContext, piece: Piece) -> int:
    """Returns the elements of the gradients that need not be sharded along these axes: XLA may have
    joined all of them in one array.

    They are those that the rules leave replicated there. In a sum over stages they are also those
    that every stage has: no rule shards these along the pipeline, and one sum over stages and
    replicas is what a tied table costs (docs/closed_forms.md).
    """
    axes, total = set(piece.one.axes), 0
    for a in context.params:
        promised = context.promised(a, "gradients")
        on_all_stages = context.vocabulary.pipeline_axis in axes - (promised or set())
        if promised is None or on_all_stages or not promised & axes:
            total += math.prod(a.shape) // context.ways((promised or set()) - axes)
    return total


def _summed_whole(context: LintContext, piece: Piece) -> list[Argument]:
    """The weights whose gradients it may hold, of those that the rules shard along the axes of the
    sum.
    """
    axes, trips = set(piece.one.axes), piece.one.loops[-1:]
    wanted = [a for a in context.params if (context.promised(a, "gradients") or set()) & axes]
    same = [a for a in wanted if a in context.weights(piece.one.axes, piece.array)]
    # XLA has joined those of several weights: of the layers where it is in their loop.
    in_layers = any(trips == (depth,) for depth in context.depth.values() if depth > 1)
    return same or [a for a in wanted if not piece.one.loops or context.stacked(a) == in_layers]


def residual_not_sharded(context: LintContext) -> Iterator[Finding]:
    """With sequence parallelism, a residual stream that is summed in full on each device: every
    device keeps and adds all of it.
    """
    if context.rules is None or not context.gathers_residual:
        return
    told = {word for finding in lint_reshards.reshards(context) for word in words_of(finding.where)}
    sums = [
        piece
        for piece in context.pieces
        if piece.one.kind == "all-reduce" and set(piece.one.axes) <= context.gathers_residual
    ]
    pieces = [
        piece
        for piece in sums
        if context.is_residual(piece.array) and not told & words_of(piece.one.where)
    ]
    bytes = int(sum(piece.bytes for piece in pieces))
    if pieces and bytes >= context.large:
        largest = max(pieces, key=lambda piece: piece.bytes)
        text = (
            f"the residual stream {largest.array} is all-reduced in full over {largest.along}, "
            "along which rules.activations['seq_resid'] "
        )
        text += "shards it: every device keeps all of it"
        here = largest.one.where.source or largest.one.where.part
        fix = (
            f"pin what is added to it, and the sum, before and after {here}: shard(x, 'batch', "
            "'seq_resid', 'embed')"
        )
        yield Finding(
            "residual-not-sharded",
            bytes,
            largest.one.where,
            text,
            fix,
            collectives=_instructions(pieces),
        )


def _instructions(pieces: list[Piece]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(piece.one.name for piece in pieces))


CHECKS: tuple[Callable[[LintContext], Iterator[Finding]], ...] = (
    reduction_dtype,
    microbatch_reductions,
    whole_gradients,
    residual_not_sharded,
)
