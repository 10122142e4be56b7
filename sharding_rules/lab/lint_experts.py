"""Lint of a mixture of experts, whose devices hold different experts.

Tokens are exchanged so that each reaches the devices of its experts.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator

from sharding_rules.lab.hlo import arrays
from sharding_rules.lab.lint_context import (
    EXCHANGES,
    LARGE_MEMORY,
    Finding,
    LintContext,
    Piece,
    instructions,
    largest,
    name_list,
    wire_bytes,
)
from sharding_rules.lab.report import Argument, Location
from sharding_rules.rules import Kind, axes_of, row_of

_EXPERTS = "experts"
"""The logical axis of the parameters of several experts."""

# A dimension of fewer elements may be anything, such as gate and up.
_SEVERAL = 4

# FLOPs that are recomputed, as a share of those of the forward pass: with less, the results of
# matmuls are saved.
_SMALL_RECOMPUTE = 0.1


# Exchanges of tokens.


def exchange_repeated(context: LintContext) -> Iterator[Finding]:
    """Exchanges of tokens that the recompute repeats, though the results of matmuls are saved.

    Where everything is recomputed, this includes the exchanges, and is the price of that policy.
    """
    if not _saves_matmuls(context):
        return
    repeated = []
    for piece in context.pieces:
        if piece.collective.where.phase == "recompute" and _is_token_exchange(context, piece):
            repeated.append(piece)
    if not repeated or not context.is_large(repeated):
        return
    worst = largest(repeated)
    yield Finding(
        check="exchange-repeated",
        bytes=wire_bytes(repeated),
        where=worst.collective.where,
        text=(
            f"the {worst.collective.kind} of {worst.array} over {worst.along} for the experts is "
            f"repeated in the recompute, {worst.collective.times:.10g} times in a step, although "
            "the results of matmuls are saved"
        ),
        fix=context.vocabulary.fix(
            "exchange-repeated",
            "give what the exchange returns a name, checkpoint_name(x, NAME), that the policy of "
            "jax.checkpoint saves",
        ),
        collectives=instructions(repeated),
    )


def _saves_matmuls(context: LintContext) -> bool:
    """Whether the backward pass recomputes less than the results of matmuls."""
    flops = context.report.flops
    return flops.get("recompute", 0) < _SMALL_RECOMPUTE * flops.get("forward", 0)


def _is_token_exchange(context: LintContext, piece: Piece) -> bool:
    """Whether an array holds tokens that are sent to devices with other experts."""
    collective = piece.collective
    if not _is_in_experts(context, collective.where):
        return False
    if context.piece_weights(piece):
        return False
    if collective.kind in EXCHANGES:
        return True
    # Other gathers of tokens are those of sequence parallelism.
    return collective.kind == "all-gather" and bool(_exchange_axes(context) & set(collective.axes))


def _is_in_experts(context: LintContext, where: Location) -> bool:
    return context.vocabulary.experts_part in re.split(r"[/+]", where.part)


# Experts' weights.


def experts_replicated(context: LintContext) -> Iterator[Finding]:
    """Experts that each device has, or gathers, although a mesh axis is there to shard them.

    The check needs the names of the parameters' dimensions.
    """
    yield from _gathered_experts(context)
    yield from _unsharded_experts(context)


def _gathered_experts(context: LintContext) -> Iterator[Finding]:
    """Weights of experts that are gathered along an axis on which tokens are exchanged."""
    axes = _exchange_axes(context)
    gathers = []
    weights = []
    for piece in context.pieces:
        collective = piece.collective
        if collective.kind != "all-gather" or collective.where.phase in ("optimizer", ""):
            continue
        if not axes & set(collective.axes) or not piece.arguments:
            continue
        experts = [param for param in context.piece_weights(piece) if _has_experts(context, param)]
        if experts:
            gathers.append(piece)
            weights += experts
    if not gathers or not context.is_large(gathers):
        return
    worst = largest(gathers)
    yield Finding(
        check="experts-replicated",
        bytes=wire_bytes(gathers),
        where=worst.collective.where,
        text=(
            f"all experts of {name_list(weights)} are gathered over {worst.along}, along which "
            "the rules shard them: each device holds and computes those of the others, too"
        ),
        fix=(
            "use the local experts, and send them the tokens; in a shard_map, give the weights the "
            "spec shard.spec('params', ('experts', ...))"
        ),
        collectives=instructions(gathers),
    )


def _unsharded_experts(context: LintContext) -> Iterator[Finding]:
    """Parameters of experts that are replicated along the mesh axis for experts."""
    axis = context.vocabulary.expert_axis
    ways = context.report.mesh.get(axis, 1)
    if context.rules is None or ways == 1:
        return
    # Experts may be sharded along other axes, while this one shards the batch. Where it shards
    # nothing, another check says so.
    if _expert_axes(context, "params") or axis not in context.batch_axes:
        return
    replicated = []
    for param in context.params:
        if not _has_experts(context, param) or axis in param.axes:
            continue
        if _n_experts(context, param) % ways == 0:
            replicated.append(param)
    wasted = sum(param.bytes for param in replicated) * (ways - 1) // ways
    if not replicated or wasted < LARGE_MEMORY * context.report.peak_bytes:
        return
    yield Finding(
        check="experts-replicated",
        bytes=wasted,
        where=Location(),
        text=(
            f"{name_list(replicated)} are replicated along {axis}, whose {ways} devices could each "
            "hold some of the experts: each holds and computes all of them"
        ),
        fix=f"put {axis!r} into rules.params['experts'] and rules.activations['experts']",
    )


# Matmuls with experts.


def dense_experts(context: LintContext) -> Iterator[Finding]:
    """Temporaries that hold each row once for every expert of the device.

    A grouped matmul needs each row once. The check needs the names of the parameters' dimensions.
    """
    n_experts = _n_local_experts(context)
    if n_experts < _SEVERAL:
        return
    # With fewer elements, a row may be there once, and the first dimension number the experts.
    smallest = n_experts * _largest_rows(context)
    weight_sizes = _weight_sizes(context)
    dense = []
    for buffer in context.report.memory.buffers:
        if buffer.kind != "activations" or not _is_in_experts(context, buffer.where):
            continue
        for array in arrays(buffer.shape):
            size = math.prod(array.dims)
            if n_experts in array.dims and size >= smallest and size not in weight_sizes:
                dense.append(buffer)
    wasted = sum(buffer.bytes for buffer in dense) * (n_experts - 1) // n_experts
    if not dense or wasted < LARGE_MEMORY * context.report.peak_bytes:
        return
    worst = max(dense, key=lambda buffer: buffer.bytes)
    yield Finding(
        check="dense-experts",
        bytes=wasted,
        where=worst.where,
        text=(
            f"{worst.shape} holds every row once for each of the {n_experts} experts of a device, "
            "which are then all multiplied"
        ),
        fix=context.vocabulary.fix(
            "dense-experts",
            "sort the rows by expert and multiply them by a grouped kernel; jax.lax.ragged_dot "
            "becomes a dense matmul on GPUs",
        ),
    )


def _n_local_experts(context: LintContext) -> int:
    """Returns the experts of a layer that a device uses; 0 where they are not known.

    They are not known either if a device has as many layers.
    """
    ways = context.ways(_exchange_axes(context))
    sizes = set()
    for param in context.params:
        if _has_experts(context, param):
            sizes.add(_n_experts(context, param) // ways)
    if len(sizes) != 1 or sizes & set(context.depth.values()):
        return 0
    return sizes.pop()


def _largest_rows(context: LintContext) -> int:
    """Returns the elements of the tokens that a device sends or receives, at least its own."""
    sizes = [context.residual_size]
    for piece in context.pieces:
        if _is_token_exchange(context, piece):
            sizes.append(math.prod(piece.array.dims))
    return max(sizes)


def _weight_sizes(context: LintContext) -> set[int]:
    """Returns the elements of the experts' weights in a layer, as stored and as used."""
    exchange_axes = _exchange_axes(context)
    sizes = set()
    for param in context.params:
        if not _has_experts(context, param):
            continue
        layer_size = math.prod(param.shape) // context.depth[param.name]
        for axes in (param.axes, exchange_axes & set(param.axes)):
            sizes.add(layer_size // context.ways(axes))
    return sizes


def _n_experts(context: LintContext, param: Argument) -> int:
    """Returns the experts of a layer in a parameter that has them."""
    names = list(map(_name, context.logical_axes(param)))
    return param.shape[names.index(_EXPERTS)]


def _has_experts(context: LintContext, param: Argument) -> bool:
    return _EXPERTS in map(_name, context.logical_axes(param))


def _name(logical: str | None) -> str:
    """Returns a logical axis without its segment: experts for moe/experts."""
    return (logical or "").rpartition("/")[2]


def _exchange_axes(context: LintContext) -> set[str]:
    """Returns the mesh axes along which devices use different experts.

    Along the other axes that shard experts, weights are gathered before use, as FSDP does.
    """
    return _expert_axes(context, "params") & _expert_axes(context, "gathered")


def _expert_axes(context: LintContext, kind: Kind) -> set[str]:
    """Returns the mesh axes of more than one device along which the rules shard experts."""
    if context.rules is None:
        return set()
    column = context.rules.column(kind)
    name = f"{context.segment}/{_EXPERTS}" if context.segment else _EXPERTS
    row = row_of(column, name)
    axes = axes_of(column[row]) if row else ()
    return {axis for axis in axes if context.report.mesh.get(axis, 1) > 1}


CHECKS: tuple[Callable[[LintContext], Iterator[Finding]], ...] = (
    exchange_repeated,
    experts_replicated,
    dense_experts,
)
