"""Lint of sums over devices: too many, too large, or in another type than the rules ask for."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import NamedTuple

from sharding_rules.lab import lint_reshards
from sharding_rules.lab.lint_context import (
    SUMS,
    Finding,
    LintContext,
    MeshAxes,
    Piece,
    innermost_scopes,
    instructions,
    largest,
    name_list,
    short_name,
    wire_bytes,
)
from sharding_rules.lab.report import SCALAR, Argument, Collective, Location, Report
from sharding_rules.lab.summary import size
from sharding_rules.rules import Rules

_HALF_DTYPES = ("bf16", "f16")
# A sum in int8 is not an all-reduce: devices exchange parts, add what they receive in fp32, and
# gather the sums.
_INT8_DTYPES = ("s8", "u8")
_INT8_EXCHANGES = ("all-to-all", "all-gather")

# A parameter with fewer elements in a layer than this many times the model's width is a vector, not
# a matrix. The largest bias has seven times the width.
_VECTOR_WIDTHS = 32

# Share of the bytes of all sums of gradients. Axes and dtypes with less are not worth a mention.
_SMALL = 0.02

PiecesByAxes = dict[MeshAxes, list[Piece]]


def gradient_sums(context: LintContext) -> Iterator[Piece]:
    """Yields every array of every sum of gradients over devices that have other tokens.

    For sums in int8, these are the arrays of the exchanges that make the sum.
    """
    token_axes = context.batch_axes | {context.vocabulary.sequence_axis}
    for piece in context.pieces:
        if not token_axes & set(piece.collective.axes):
            continue
        if piece.collective.kind not in SUMS and not _is_int8_exchange(piece):
            continue
        if piece.array.bytes > SCALAR and context.is_gradient(piece.array):
            yield piece


def _is_int8_exchange(piece: Piece) -> bool:
    if piece.array.dtype not in _INT8_DTYPES or piece.collective.where.phase == "forward":
        return False
    return piece.collective.kind in _INT8_EXCHANGES


# Dtypes.


def reduction_dtype(context: LintContext) -> Iterator[Finding]:
    """Gradients of matrices that are summed in another type than `rules.reduction` asks for."""
    if context.rules is None:
        return
    reduction = context.rules.reduction
    if reduction in ("bfloat16", "int8"):
        yield from _too_wide(context, reduction)
    if reduction != "int8":
        yield from _too_narrow(context, reduction)


class _Sum(NamedTuple):
    """Sums of gradients that one finding is about."""

    location: Location
    weights: str
    """The weights whose gradients they may be, in words."""
    axes: MeshAxes
    dtype: str


def _too_narrow(context: LintContext, reduction: str) -> Iterator[Finding]:
    """Gradients that are summed with fewer bits than the rules ask for."""
    total_bytes: dict[_Sum, float] = defaultdict(float)
    for piece in gradient_sums(context):
        if _is_too_narrow(context, piece, reduction):
            axes = piece.collective.axes
            weights = _possible_weights(context.matching_weights(axes, piece.array))
            narrow_sum = _Sum(piece.collective.where, weights, axes, piece.array.dtype)
            total_bytes[narrow_sum] += piece.bytes

    expected = "bfloat16" if reduction == "bfloat16" else "float32"
    for narrow_sum, bytes in total_bytes.items():
        if bytes < context.large_wire_bytes:
            continue
        if narrow_sum.dtype in _INT8_DTYPES:
            fix = "leave rounding to the rules: rules.replace(reduction='int8')"
        elif reduction == "auto":
            fix = (
                "cast gradients to float32 before they are summed, or say that it is meant: "
                "rules.replace(reduction='bfloat16')"
            )
        else:
            fix = (
                "let the gradient leave its matmul in float32: "
                "shard.einsum(equation, x, w, axes), with the weight as it is stored"
            )
        may_be_meant = reduction == "auto" and narrow_sum.dtype in _HALF_DTYPES
        yield Finding(
            check="reduction-dtype",
            bytes=int(bytes),
            where=narrow_sum.location,
            text=(
                f"gradients{narrow_sum.weights} are summed in {narrow_sum.dtype} over "
                f"{' and '.join(narrow_sum.axes)}; rules.reduction={reduction!r} asks for "
                f"{expected}"
            ),
            fix=fix,
            severity="notice" if may_be_meant else "error",
        )


def _is_too_narrow(context: LintContext, piece: Piece, reduction: str) -> bool:
    if piece.array.dtype in _INT8_DTYPES:
        return True
    if piece.array.dtype not in _HALF_DTYPES:
        return False
    if reduction == "float32":
        return True
    # With "auto", a sum inside a loop belongs to a microbatch or a layer, and has the dtype of its
    # matmul. Only sums after all loops can be checked.
    if reduction != "auto" or piece.collective.loops:
        return False
    return _sums_once(context, piece.collective)


def _too_wide(context: LintContext, reduction: str) -> Iterator[Finding]:
    """Gradients of matrices that are summed with more bits than the rules ask for."""
    wide_dtypes = ("f32", *_HALF_DTYPES) if reduction == "int8" else ("f32",)
    pieces_by_axes: PiecesByAxes = defaultdict(list)
    for piece in gradient_sums(context):
        if _sums_once(context, piece.collective) and piece.array.dtype in wide_dtypes:
            pieces_by_axes[piece.collective.axes].append(piece)

    # Vectors are summed in fp32 by design. XLA may have joined them with matrices in one array, so
    # their elements are subtracted from the total.
    n_vector_elements = sum(
        param.bytes / 4 for param in context.params if _is_vector(context, param)
    )
    for axes, pieces in pieces_by_axes.items():
        n_elements = sum(piece.collective.times * math.prod(piece.array.dims) for piece in pieces)
        matrix_share = max(0.0, 1 - n_vector_elements / n_elements)
        bytes = sum(piece.bytes for piece in pieces) * matrix_share
        if bytes < context.large_wire_bytes:
            continue
        worst = largest(pieces)
        along = " and ".join(axes)
        if reduction == "bfloat16":
            fix = f"cast them to bfloat16 before they are summed over {along}"
        else:
            fix = "sum them by the engine's region"
        yield Finding(
            check="reduction-dtype",
            bytes=int(bytes),
            where=worst.collective.where,
            text=(
                f"gradients of matrices are summed in {worst.array.dtype} over {along}; "
                f"rules.reduction={reduction!r} asks for {reduction}"
            ),
            fix=f"{fix}, or ask for float32: rules.replace(reduction='auto')",
        )


def _is_vector(context: LintContext, param: Argument) -> bool:
    layer_shape = param.shape[context.is_stacked(param) :]
    return math.prod(layer_shape) < _VECTOR_WIDTHS * context.width


def _sums_once(context: LintContext, collective: Collective) -> bool:
    """Whether it sums over an axis that a step sums over once, after all microbatches."""
    if context.rules is None:
        return False
    return bool(context.rules.manual_axes() & set(collective.axes))


def _possible_weights(weights: list[Argument]) -> str:
    """The weights that a gradient may belong to, in words.

    Two weights with the same dimensions cannot be distinguished.
    """
    if not weights:
        return ""
    names = dict.fromkeys(short_name(weight) for weight in weights)
    return f" of {' or '.join(names)}"


def reduced(report: Report, rules: Rules | None = None) -> str:
    """Returns the sums of gradients in words, by mesh axes; empty where nothing is summed.

    As in "f32 (24.20 GiB) over data, bf16 (1.12 GiB) and f32 (0.39 GiB) over fsdp". Bytes are those
    that a device sends in a step. Of one axis, the dtype with most bytes comes first.
    """
    bytes_by_axes: dict[MeshAxes, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for piece in gradient_sums(LintContext(report, rules, {})):
        bytes_by_axes[piece.collective.axes][piece.array.dtype] += piece.bytes

    least = _SMALL * sum(sum(bytes_by_dtype.values()) for bytes_by_dtype in bytes_by_axes.values())
    mesh_order = list(report.mesh)
    phrases = []
    for axes in sorted(bytes_by_axes, key=lambda axes: [mesh_order.index(axis) for axis in axes]):
        bytes_by_dtype = bytes_by_axes[axes].items()
        sums = sorted(((bytes, dtype) for dtype, bytes in bytes_by_dtype), reverse=True)
        sizes = [f"{dtype} ({size(bytes)})" for bytes, dtype in sums if bytes >= least]
        if sizes:
            phrases.append(f"{' and '.join(sizes)} over {' and '.join(axes)}")
    return ", ".join(phrases)


# Too many, or too large.


def microbatch_reductions(context: LintContext) -> Iterator[Finding]:
    """Sums of gradients in the loop over microbatches, along an axis that shards no parameter.

    One sum after the loop would do.
    """
    if context.microbatches <= 1:
        return
    replicated_axes = context.batch_axes - context.param_axes - context.manual_axes
    pieces_by_axes: PiecesByAxes = defaultdict(list)
    for piece in context.pieces:
        collective = piece.collective
        if collective.kind not in SUMS or collective.where.phase == "forward":
            continue
        axes = tuple(axis for axis in collective.axes if axis in replicated_axes)
        if not axes or not context.is_gradient(piece.array):
            continue
        if context.runs_per_microbatch(collective):
            pieces_by_axes[axes].append(piece)

    for axes, pieces in pieces_by_axes.items():
        bytes = wire_bytes(pieces)
        if bytes < context.large_wire_bytes:
            continue
        worst = largest(pieces)
        along = " and ".join(axes)
        yield Finding(
            check="microbatch-reduction",
            bytes=bytes,
            where=worst.collective.where,
            text=(
                f"gradients are summed over {along} in each of {context.microbatches} microbatches "
                f"({worst.collective.kind} over {worst.along})"
            ),
            fix=(
                f"add gradients up in the loop and sum them over {along} once after it, in a "
                f"region that is manual over {along} (jax.shard_map); or shard the parameters "
                "along it"
            ),
            collectives=instructions(pieces),
        )


def whole_gradients(context: LintContext) -> Iterator[Finding]:
    """Gradients that are all-reduced although the rules shard them along the same axes.

    Each device needs its own shard of the sum only: a reduce-scatter would do.
    """
    if context.rules is None or not context.axes:
        return
    in_other_findings = {
        name for finding in microbatch_reductions(context) for name in finding.collectives
    }
    pieces_by_axes: PiecesByAxes = defaultdict(list)
    for piece in context.pieces:
        collective = piece.collective
        if collective.kind != "all-reduce" or collective.name in in_other_findings:
            continue
        if not set(collective.axes) & context.batch_axes:
            continue
        if context.is_for_matrix_optimizer(collective):
            continue
        if context.is_gradient(piece.array):
            pieces_by_axes[collective.axes].append(piece)

    for axes, pieces in pieces_by_axes.items():
        excess_bytes = [_excess_bytes(context, piece) for piece in pieces]
        bytes = int(sum(excess_bytes))
        if bytes < context.large_wire_bytes:
            continue
        worst = pieces[excess_bytes.index(max(excess_bytes))]
        names = name_list(_sharded_weights(context, worst))
        yield Finding(
            check="all-reduce-of-shards",
            bytes=bytes,
            where=worst.collective.where,
            text=(
                f"gradients{f' of {names}' if names else ''} are all-reduced in full over "
                f"{' and '.join(axes)}, along which the rules shard them"
            ),
            fix=(
                "a reduce-scatter sends half: pin the sum to rules.gradients (Shard.constrain), "
                "or lax.psum_scatter in place of lax.psum"
            ),
            collectives=instructions(pieces),
        )


def _excess_bytes(context: LintContext, piece: Piece) -> float:
    """The bytes of an all-reduce that are not explained by replicated gradients."""
    n_elements = math.prod(piece.array.dims)
    return piece.bytes * max(0.0, 1 - _n_replicated_elements(context, piece) / n_elements)


def _n_replicated_elements(context: LintContext, piece: Piece) -> int:
    """Returns the elements of all gradients that the rules leave replicated along the sum's axes.

    XLA may have joined all of them in one array. In a sum over stages they are also those that
    every stage has: no rule shards these along the pipeline, and one sum over stages and replicas
    is what a tied table costs (docs/closed_forms.md).
    """
    axes = set(piece.collective.axes)
    n_elements = 0
    for param in context.params:
        # None: the rules say nothing about this parameter.
        promised = context.promised_axes(param, "gradients")
        sharded_axes = promised or set()
        on_all_stages = context.vocabulary.pipeline_axis in axes - sharded_axes
        if promised is None or on_all_stages or not sharded_axes & axes:
            n_elements += math.prod(param.shape) // context.ways(sharded_axes - axes)
    return n_elements


def _sharded_weights(context: LintContext, piece: Piece) -> list[Argument]:
    """The weights that the rules shard along the sum's axes and whose gradients it may hold."""
    axes = piece.collective.axes
    sharded = []
    for param in context.params:
        promised = context.promised_axes(param, "gradients")
        if promised and promised & set(axes):
            sharded.append(param)
    candidates = context.matching_weights(axes, piece.array)
    same_shape = [param for param in sharded if param in candidates]
    if same_shape:
        return same_shape
    # XLA has joined the gradients of several weights: inside a loop over layers, those of layers.
    if not piece.collective.loops:
        return sharded
    depths = [depth for depth in context.depth.values() if depth > 1]
    in_layers = piece.collective.loops[-1] in depths
    return [param for param in sharded if context.is_stacked(param) == in_layers]


def residual_not_sharded(context: LintContext) -> Iterator[Finding]:
    """With sequence parallelism, a residual stream that is all-reduced in full.

    Every device then keeps and adds all of it.
    """
    if context.rules is None or not context.residual_gather_axes:
        return
    in_other_findings = set()
    for finding in lint_reshards.reshards(context):
        in_other_findings |= innermost_scopes(finding.where)
    pieces = []
    for piece in context.pieces:
        collective = piece.collective
        if collective.kind != "all-reduce":
            continue
        if not set(collective.axes) <= context.residual_gather_axes:
            continue
        if in_other_findings & innermost_scopes(collective.where):
            continue
        if context.is_residual(piece.array):
            pieces.append(piece)

    bytes = wire_bytes(pieces)
    if not pieces or bytes < context.large_wire_bytes:
        return
    worst = largest(pieces)
    location = worst.collective.where.source or worst.collective.where.part
    yield Finding(
        check="residual-not-sharded",
        bytes=bytes,
        where=worst.collective.where,
        text=(
            f"the residual stream {worst.array} is all-reduced in full over {worst.along}, "
            "along which rules.activations['seq_resid'] shards it: every device keeps all of it"
        ),
        fix=(
            f"pin what is added to it, and the sum, before and after {location}: "
            "shard(x, 'batch', 'seq_resid', 'embed')"
        ),
        collectives=instructions(pieces),
    )


CHECKS: tuple[Callable[[LintContext], Iterator[Finding]], ...] = (
    reduction_dtype,
    microbatch_reductions,
    whole_gradients,
    residual_not_sharded,
)
