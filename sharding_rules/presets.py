"""Named strategies, each a table of rules.

Logical axes: batch, seq, seq_resid (the residual stream's sequence, between the matmul pairs),
embed, heads, kv_heads, head_dim, mlp, vocab, layers (the stack), fused (matrices stored side by
side: q k v, gate and up), position (rows of a learned position table), norm (scales and biases of
the residual stream, which are too small to be worth gathering).
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import get_args

from sharding_rules.mesh import AXES
from sharding_rules.rules import (
    FLAT,
    Column,
    Kind,
    MeshAxes,
    Reduction,
    Rules,
    ShardingRuleError,
    axes_of,
    did_you_mean,
    row_of,
)

_REPLICATED: Column = dict.fromkeys(
    ("vocab", "embed", "heads", "kv_heads", "head_dim", "mlp", "fused", "position", "norm")
)
# a stage holds its own layers, whatever else is sharded
_WEIGHTS: Column = {**_REPLICATED, "layers": "pipeline"}
_ACTS: Column = dict.fromkeys(
    ("batch", "seq", "seq_resid", "embed", "heads", "kv_heads", "head_dim", "mlp", "vocab", "fused")
)
_TENSOR: Column = {"heads": "tensor", "kv_heads": "tensor", "mlp": "tensor", "vocab": "tensor"}
_BOTH = ("tensor", "tensor_y")
_BY_DATA: Column = {**_WEIGHTS, "embed": "data"}
_DATA: Column = {**_ACTS, "batch": "data"}
_CONTEXT: Column = {**_DATA, "seq": "sequence", "seq_resid": "sequence"}

PRESETS: dict[str, Rules] = {
    rules.name: rules
    for rules in (
        # Data parallel: everything replicated, gradients all-reduced once per step.
        Rules("ddp", params=_WEIGHTS, activations=_DATA),
        # ZeRO stages 1 and 2 (Rajbhandari et al., arXiv 1910.02054): the moments, then also the
        # gradients, are sharded over data.
        Rules("zero1", params=_WEIGHTS, activations=_DATA, gradients=_WEIGHTS, optimizer=_BY_DATA),
        Rules("zero2", params=_WEIGHTS, activations=_DATA, gradients=_BY_DATA, optimizer=_BY_DATA),
        # Megatron-LM's distributed optimizer, ZeRO-1 for any number of replicas: the layers use a
        # copy of the weights in the compute type, and the fp32 weights and moments are padded
        # vectors that are sharded over the replicas.
        Rules("distributed", params=_WEIGHTS, activations=_DATA, optimizer={**_WEIGHTS, "flat": ("pipeline", "data")}),
        # ZeRO-3 of the layers on the same vectors: no device has a copy of a layer's matrices. Each
        # layer's are gathered during the layer before, and their gradient is summed during the next
        # one.
        Rules("zero3", params={**_WEIGHTS, "flat": "data"}, activations=_DATA, optimizer={**_WEIGHTS, "flat": ("pipeline", "data")}),
        # ZeRO-3 / FSDP (arXiv 2304.11277): weights are sharded, too; each layer gathers its own
        # when it runs.
        Rules("fsdp", params={**_WEIGHTS, "embed": "fsdp"}, activations={**_ACTS, "batch": "fsdp"}),
        # Hybrid: FSDP inside a group, replicas of the group along data.
        Rules("hsdp", params={**_WEIGHTS, "embed": "fsdp"}, activations={**_ACTS, "batch": ("data", "fsdp")}),
        # Tensor parallel (Megatron-LM, arXiv 1909.08053), with data parallel replicas.
        Rules("megatron", params={**_WEIGHTS, **_TENSOR}, activations={**_DATA, **_TENSOR}),
        # Megatron's sequence parallelism (arXiv 2205.05198): the residual stream is sharded along
        # the sequence between the matmul pairs.
        Rules("megatron_sp", params={**_WEIGHTS, **_TENSOR}, activations={**_DATA, **_TENSOR, "seq_resid": "tensor"}),
        # Two-dimensional tensor parallel: each matrix is sharded along both dimensions, and the
        # residual stream along embed. A matmul's partial sums are added over the axis that shards
        # its contracted dimension; those of queries, keys and values are scattered over their
        # heads, so that no device repeats the attention of another. Tables are used with full rows.
        Rules(
            "megatron_2d",
            params={**_WEIGHTS, **_TENSOR, "embed": "tensor_y", "tables/vocab": _BOTH, "tables/embed": None},
            activations={**_DATA, **dict.fromkeys(("heads", "kv_heads", "vocab"), _BOTH), "mlp": "tensor", "embed": "tensor_y"},
            axes={"tensor_y": "auto"},
        ),
        # Context parallel: each device has a part of every sequence, in all layers. They differ in
        # what attention exchanges.
        Rules("context_gather", params=_WEIGHTS, activations=_CONTEXT, context={"sequence": "gather"}),
        Rules("ulysses", params=_WEIGHTS, activations=_CONTEXT, context={"sequence": "ulysses"}),
        Rules("ring", params=_WEIGHTS, activations=_CONTEXT, context={"sequence": "ring"}),
        # Both (arXiv 2405.07719): Ulysses inside a node, a ring across nodes.
        Rules(
            "usp", params=_WEIGHTS,
            activations={**_CONTEXT, **dict.fromkeys(("seq", "seq_resid"), ("sequence", "ulysses"))},
            axes={"ulysses": "manual"}, context={"sequence": "ring", "ulysses": "ulysses"},
        ),
        # Replicas in two levels: gradients are reduce-scattered inside a node, and each device sums
        # its part across nodes.
        Rules("by_node", params=_WEIGHTS, activations={**_DATA, "batch": ("data", "node")}, axes={"node": "manual"}, node_axis="node"),
        # DiLoCo (arXiv 2311.08105): islands train apart, and average their weights every
        # optimizer.outer_steps steps.
        Rules("diloco", params=_WEIGHTS, activations={**_ACTS, "batch": ("island", "data")}),
    )
}  # fmt: skip
"""The strategies that `preset` knows, by name; docs/sharding.md describes each."""

REDUCTIONS: dict[str, Reduction] = {
    f"reduce_{reduction}": reduction for reduction in get_args(Reduction) if reduction != "auto"
}
"""Words of a product that are not strategies, but choose the type in which gradients are summed."""


def preset(name: str) -> Rules:
    """A preset, or a product of presets: preset("hsdp+megatron_sp"). A word of REDUCTIONS sets the
    `reduction`: "fsdp+reduce_float32".

    Raises ShardingRuleError for an unknown name, for a product without a strategy, and for two
    different reductions.
    """
    parts = [part.strip() for part in name.split("+")]
    for part in parts:
        if part not in PRESETS and part not in REDUCTIONS:
            raise ShardingRuleError(
                f"no rules preset {part!r}{did_you_mean(part, [*PRESETS, *REDUCTIONS])}"
            )
    strategies, words = (
        [part for part in parts if part in PRESETS],
        list(dict.fromkeys(part for part in parts if part in REDUCTIONS)),
    )
    if not strategies:
        raise ShardingRuleError(f"rules {name!r} have no strategy; add one, as in fsdp+{words[0]}")
    if len(words) > 1:
        raise ShardingRuleError(
            f"rules {name!r} sum gradients in two types; keep {words[0]} or {words[1]}"
        )
    # Every two of them alone, so that what contradicts has the presets' names in the message and
    # not those of products of others.
    for one, other in itertools.combinations(strategies, 2):
        product(PRESETS[one], PRESETS[other])
    rules = PRESETS[strategies[0]]
    for part in strategies[1:]:
        rules = product(rules, PRESETS[part])
    if words:
        return rules.replace("+".join(parts), reduction=REDUCTIONS[words[0]])
    # a copy: PRESETS stays as it is, whatever the caller does with its tables
    return dataclasses.replace(rules)


def product(a: Rules, b: Rules) -> Rules:
    """Both strategies combined: each row has the mesh axes of both. A scoped row of one combines
    with the plain row of the other.

    A `reduction` other than auto applies to the product. Flat vectors are sharded over the axes of
    the sequence, too, along which weights are replicated. Raises ShardingRuleError if the two
    contradict each other.
    """

    def both(kind: Kind) -> Column | None:
        if getattr(a, kind) is None and getattr(b, kind) is None:
            return None
        left, right = a.own_rows(kind), b.own_rows(kind)
        if kind == "activations":
            # The residual stream is sharded like attention's input first: axes that exchange keys
            # come before tensor, also an extra axis, which is behind tensor in the mesh.
            of_sequences = tuple(axis for axis in order if axis in context)
            return {row: union(row, left, right, first=of_sequences) for row in {**left, **right}}
        return {
            row: union(row, left, right, first=axes_in(row, params)) for row in {**left, **right}
        }

    def union(row: str, left: Column, right: Column, first: MeshAxes) -> MeshAxes:
        # Mesh order after the axes of `first`. Moments and gradients start with those of their
        # weight: the other order costs two permutes a step (measured).
        used = {*axes_of(axes_in(row, left)), *axes_of(axes_in(row, right))}
        if used and _is_flat(row):
            used |= context.keys() | ({node_axis} - {""})
        rank = {axis: n for n, axis in enumerate(axes_of(first))}
        axes = sorted(used, key=lambda axis: (rank.get(axis, len(rank)), order.index(axis)))
        return axes[0] if len(axes) == 1 else tuple(axes) or None

    def axes_in(row: str, column: Column) -> MeshAxes:
        return column[name] if (name := row_of(column, row)) else None

    if clash := [axis for axis, kind in a.axes.items() if b.axes.get(axis, kind) != kind]:
        kinds = f"as {a.axes[clash[0]]} and as {b.axes[clash[0]]}"
        raise ShardingRuleError(
            f"{a.name} and {b.name} declare the mesh axis {clash[0]!r} {kinds}; rename one of them"
        )
    if clash := [
        axis for axis, exchange in a.context.items() if b.context.get(axis, exchange) != exchange
    ]:
        kinds = f"by {a.context[clash[0]]} and by {b.context[clash[0]]}"
        raise ShardingRuleError(
            f"{a.name} and {b.name} exchange keys over {clash[0]!r} {kinds}; keep one of them"
        )
    _refuse_two_forms_of_moments(a, b)
    if "auto" not in (a.reduction, b.reduction) and a.reduction != b.reduction:
        kinds = f"in {a.reduction} and in {b.reduction}"
        raise ShardingRuleError(
            f"{a.name} and {b.name} sum gradients {kinds}; set one of them to auto: "
            "replace(reduction='auto')"
        )
    if a.node_axis and b.node_axis and a.node_axis != b.node_axis:
        kinds = f"{a.node_axis!r} and over {b.node_axis!r}"
        raise ShardingRuleError(
            f"{a.name} and {b.name} sum gradients inside a node over {kinds}; keep one of them"
        )
    node_axis = a.node_axis or b.node_axis
    reduction = a.reduction if a.reduction != "auto" else b.reduction
    axes, context = {**a.axes, **b.axes}, {**a.context, **b.context}
    used = a.mesh_axes() | b.mesh_axes()
    # undeclared axes are refused by `spec`, which has a mesh
    order = [*AXES, *axes, *sorted(used - {*AXES, *axes})]
    # Axes over which a weight is gathered before its use come last: gathering the others would
    # permute what is left.
    batch = {axis for each in (a, b) for axis in axes_of(each.activations["batch"])}
    first = tuple(axis for axis in order if axis not in batch)
    params = {row: union(row, a.params, b.params, first=first) for row in {**a.params, **b.params}}
    columns = {kind: both(kind) for kind in get_args(Kind) if kind != "params"}
    return Rules(
        f"{a.name}+{b.name}",
        params=params,
        axes=axes,
        context=context,
        reduction=reduction,
        node_axis=node_axis,
        **columns,
    )  # pyright: ignore[reportArgumentType]


def _refuse_two_forms_of_moments(a: Rules, b: Rules) -> None:
    """Raises ShardingRuleError if one shards moments by a dimension, and the layers of the other
    gather flat vectors.
    """
    for one, other in ((a, b), (b, a)):
        axis = _moments_by_dimension(one)
        if axis and any(_is_flat(row) and entry for row, entry in other.params.items()):
            raise ShardingRuleError(
                f"{a.name} and {b.name}: {one.name} shards a dimension of each matrix's moments "
                f"over {axis!r}, and {other.name} keeps them in flat vectors, which need no such "
                f"dimension; leave {one.name} out"
            )


def _moments_by_dimension(rules: Rules) -> str:
    """The first mesh axis that shards a dimension of moments or gradients but not of their weight,
    as in ZeRO; empty without one.
    """
    for kind in ("optimizer", "gradients"):
        for row, entry in (getattr(rules, kind) or {}).items():
            stored = row_of(rules.params, row)
            more = [
                axis
                for axis in axes_of(entry)
                if axis not in axes_of(rules.params[stored] if stored else None)
            ]
            if more and not _is_flat(row):
                return more[0]
    return ""


def _is_flat(row: str) -> bool:
    """Whether a row, scoped or not, is that of flat vectors."""
    return row.rpartition("/")[2] == FLAT
