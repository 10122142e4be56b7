"""Named strategies, each a table of rules.

Logical axes: batch, seq, seq_resid (the residual stream's sequence, between the matmul pairs),
embed, heads, kv_heads, head_dim, mlp, vocab, layers (the stack), fused (matrices stored side by
side: q k v, gate and up), position (rows of a learned position table), norm (scales and biases of
the residual stream, which are too small to be worth gathering), experts, expert_mlp (the width of
an expert), router (the scores of all experts, which each token needs: never sharded).
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import get_args

from sharding_rules.mesh import AXES
from sharding_rules.owner import OWNER, with_owners
from sharding_rules.rules import (
    FLAT,
    AxisType,
    Column,
    Exchange,
    Kind,
    MeshAxes,
    Reduction,
    Rules,
    ShardingRuleError,
    TokenExchange,
    axes_of,
    did_you_mean,
    row_of,
)

EXPERT_ROWS = ("experts", "router", "expert_mlp")
"""The logical axes of a mixture of experts. Rules of release 0.1 have no rows for them."""

# Columns that several presets share.

_REPLICATED: Column = dict.fromkeys(
    (
        *("vocab", "embed", "heads", "kv_heads", "head_dim", "mlp", "fused", "position", "norm"),
        *EXPERT_ROWS,
    )
)
# A stage holds its own layers, whatever else is sharded.
_WEIGHTS: Column = {**_REPLICATED, "layers": "pipeline"}
_ACTIVATIONS: Column = dict.fromkeys(
    (
        *("batch", "seq", "seq_resid", "embed", "heads", "kv_heads", "head_dim", "mlp", "vocab"),
        *("fused", *EXPERT_ROWS),
    )
)
_DATA: Column = {**_ACTIVATIONS, "batch": "data"}

_EMBED_OVER_DATA: Column = {**_WEIGHTS, "embed": "data"}
_FLAT_OVER_DATA: Column = {**_WEIGHTS, "flat": ("pipeline", "data")}
_EMBED_OVER_FSDP: Column = {**_WEIGHTS, "embed": "fsdp"}
_TENSOR: Column = dict.fromkeys(("heads", "kv_heads", "mlp", "expert_mlp", "vocab"), "tensor")
_TENSOR_2D = ("tensor", "tensor_y")
_CONTEXT: Column = {**_DATA, "seq": "sequence", "seq_resid": "sequence"}
_USP = ("sequence", "ulysses")
_EXPERTS: Column = {**_WEIGHTS, "experts": "expert"}
_DATA_AND_EXPERTS: Column = {**_DATA, "batch": ("data", "expert"), "experts": "expert"}

_STRATEGIES = (
    #
    # Data parallelism.
    #
    # ddp: the batch is sharded over data, everything else is replicated. Gradients are all-reduced
    # once a step.
    Rules("ddp", params=_WEIGHTS, activations=_DATA),
    # zero1: ZeRO stage 1 (Rajbhandari et al., arXiv 1910.02054). The moments are sharded over data:
    # gradients are all-reduced, and the weights that each device has updated are all-gathered.
    Rules(
        "zero1",
        params=_WEIGHTS,
        activations=_DATA,
        gradients=_WEIGHTS,
        optimizer=_EMBED_OVER_DATA,
    ),
    # zero2: ZeRO stage 2. The gradients are sharded like the moments: a reduce-scatter takes the
    # place of the all-reduce.
    Rules(
        "zero2",
        params=_WEIGHTS,
        activations=_DATA,
        gradients=_EMBED_OVER_DATA,
        optimizer=_EMBED_OVER_DATA,
    ),
    # distributed: Megatron-LM's distributed optimizer, ZeRO-1 for any number of replicas. The
    # layers use a copy of the weights in the compute type. The fp32 weights and the moments are
    # padded vectors that are sharded over the replicas: gradients are reduce-scattered, and the
    # copy is all-gathered, once a step.
    Rules("distributed", params=_WEIGHTS, activations=_DATA, optimizer=_FLAT_OVER_DATA),
    # zero3: ZeRO-3 of the layers on the same vectors. Without a pipeline no device has a copy of a
    # layer's matrices: in every microbatch they are all-gathered during the layer before, and their
    # gradient is reduce-scattered during the next one. A pipeline stage does both once a step, and
    # keeps what it has gathered until then.
    Rules(
        "zero3",
        params={**_WEIGHTS, "flat": "data"},
        activations=_DATA,
        optimizer=_FLAT_OVER_DATA,
    ),
    # fsdp: ZeRO-3 / FSDP (arXiv 2304.11277). Weights are sharded along embed, too. In every
    # microbatch each layer all-gathers its own in the forward and again in the backward, and their
    # gradient is reduce-scattered.
    Rules("fsdp", params=_EMBED_OVER_FSDP, activations={**_ACTIVATIONS, "batch": "fsdp"}),
    # hsdp: hybrid sharding. FSDP inside a group, with replicas of the group along data, over which
    # gradients are all-reduced once a step.
    Rules("hsdp", params=_EMBED_OVER_FSDP, activations={**_ACTIVATIONS, "batch": ("data", "fsdp")}),
    #
    # Tensor parallelism.
    #
    # megatron: Megatron-LM (arXiv 1909.08053), with data-parallel replicas. Heads, MLP and
    # vocabulary are sharded over tensor. The second matmul of each pair leaves partial sums, which
    # are all-reduced.
    Rules("megatron", params={**_WEIGHTS, **_TENSOR}, activations={**_DATA, **_TENSOR}),
    # megatron_sp: Megatron's sequence parallelism (arXiv 2205.05198). Between the matmul pairs the
    # residual stream is sharded along the sequence, so that the all-reduce becomes a reduce-scatter
    # behind a pair and an all-gather before the next one.
    Rules(
        "megatron_sp",
        params={**_WEIGHTS, **_TENSOR},
        activations={**_DATA, **_TENSOR, "seq_resid": "tensor"},
    ),
    # megatron_2d: each matrix is sharded along both dimensions, and the residual stream along
    # embed. A matmul's partial sums are added over the axis that shards its contracted dimension;
    # those of queries, keys and values are scattered over their heads, so that no device repeats
    # the attention of another. Tables are used with full rows.
    Rules(
        "megatron_2d",
        params={
            **_WEIGHTS,
            **_TENSOR,
            "embed": "tensor_y",
            "tables/vocab": _TENSOR_2D,
            "tables/embed": None,
        },
        activations={
            **_DATA,
            "heads": _TENSOR_2D,
            "kv_heads": _TENSOR_2D,
            "vocab": _TENSOR_2D,
            "mlp": "tensor",
            "expert_mlp": "tensor",
            "embed": "tensor_y",
        },
        axes={"tensor_y": "auto"},
    ),
    #
    # Context parallelism: each device has a part of every sequence, in all layers, and weights are
    # replicated. The presets differ in what attention exchanges.
    #
    # context_gather: keys and values are all-gathered over sequence.
    Rules(
        "context_gather",
        params=_WEIGHTS,
        activations=_CONTEXT,
        context={"sequence": "gather"},
    ),
    # ulysses: an all-to-all exchanges parts of the sequence for parts of the heads, and another one
    # changes back.
    Rules("ulysses", params=_WEIGHTS, activations=_CONTEXT, context={"sequence": "ulysses"}),
    # ring: keys and values travel from device to device, beside the attention to those that arrived
    # earlier.
    Rules("ring", params=_WEIGHTS, activations=_CONTEXT, context={"sequence": "ring"}),
    # usp: both (arXiv 2405.07719). Ulysses inside a node, a ring across nodes.
    Rules(
        "usp",
        params=_WEIGHTS,
        activations={**_CONTEXT, "seq": _USP, "seq_resid": _USP},
        axes={"ulysses": "manual"},
        context={"sequence": "ring", "ulysses": "ulysses"},
    ),
    #
    # Expert parallelism: each device holds some of the experts of a layer, and shards the batch
    # with the others of its group. Everything else is replicated over expert, as over data. The
    # presets differ in how tokens reach the devices of their experts.
    #
    # experts_gather: tokens are all-gathered, and the results reduce-scattered.
    Rules(
        "experts_gather",
        params=_EXPERTS,
        activations=_DATA_AND_EXPERTS,
        exchange={"expert": "gather"},
    ),
    # experts_padded: an all-to-all sends tokens to the devices of their experts, and another one
    # returns the results.
    Rules(
        "experts_padded",
        params=_EXPERTS,
        activations=_DATA_AND_EXPERTS,
        exchange={"expert": "padded"},
    ),
    #
    # Slow networks.
    #
    # by_node: replicas in two levels. Gradients are reduce-scattered inside a node, each device
    # sums its part across nodes, and the sums are all-gathered inside the node.
    Rules(
        "by_node",
        params=_WEIGHTS,
        activations={**_DATA, "batch": ("data", "node")},
        axes={"node": "manual"},
        node_axis="node",
    ),
    # diloco: DiLoCo (arXiv 2311.08105). Islands train apart, as ddp does, and average their weights
    # every diloco.outer_steps steps.
    Rules("diloco", params=_WEIGHTS, activations={**_ACTIVATIONS, "batch": ("island", "data")}),
)

PRESETS: dict[str, Rules] = {rules.name: rules for rules in _STRATEGIES}
"""The strategies that `preset` knows, by name; docs/sharding.md describes each."""

REDUCTIONS: dict[str, Reduction] = {
    f"reduce_{reduction}": reduction for reduction in get_args(Reduction) if reduction != "auto"
}
"""Words of a product that are not strategies, but choose the type in which gradients are summed."""


def preset(name: str) -> Rules:
    """Returns a preset, or a product of presets: preset("hsdp+megatron_sp").

    A word of REDUCTIONS sets the `reduction`: "fsdp+reduce_float32". The word OWNER divides the
    optimizer state by layers: "zero2+owner" (`with_owners`). Raises ShardingRuleError for an
    unknown name, for a product without a strategy, for two different reductions, and as
    `with_owners` does.
    """
    words = [word.strip() for word in name.split("+")]
    for word in words:
        known = [*PRESETS, *REDUCTIONS, OWNER]
        if word not in known:
            raise ShardingRuleError(f"there is no rules preset {word!r}{did_you_mean(word, known)}")
    strategies = [PRESETS[word] for word in words if word in PRESETS]
    reductions = list(dict.fromkeys(word for word in words if word in REDUCTIONS))
    if not strategies:
        raise ShardingRuleError(f"rules {name!r} have no strategy; add one, as in fsdp+{words[0]}")
    if len(reductions) > 1:
        raise ShardingRuleError(
            f"rules {name!r} sum gradients in two types; keep {reductions[0]} or {reductions[1]}"
        )

    # First each pair on its own, so that a message about two that contradict has the names of
    # presets, and not that of a product.
    for a, b in itertools.combinations(strategies, 2):
        product(a, b)
    # A copy: PRESETS stays as it is, whatever the caller does with its tables.
    rules = dataclasses.replace(strategies[0])
    for strategy in strategies[1:]:
        rules = product(rules, strategy)
    if reductions:
        rules = rules.replace("+".join(words), reduction=REDUCTIONS[reductions[0]])
    if OWNER in words:
        rules = with_owners(rules, "+".join(words))
    return rules


def product(a: Rules, b: Rules) -> Rules:
    """Returns both strategies combined: each row has the mesh axes of both.

    A scoped row of one combines with the plain row of the other. A `reduction` other than auto
    applies to the product. Flat vectors are sharded over the axes of the sequence and of the
    experts, too, along which other weights are replicated. Raises ShardingRuleError if the two
    contradict each other.
    """
    _require_compatible(a, b)
    axes: dict[str, AxisType] = {**a.axes, **b.axes}
    context: dict[str, Exchange] = {**a.context, **b.context}
    exchange: dict[str, TokenExchange] = {**a.exchange, **b.exchange}
    reduction = a.reduction if a.reduction != "auto" else b.reduction
    node_axis = a.node_axis or b.node_axis

    # Undeclared axes are refused by `spec`, which has a mesh.
    undeclared = (a.mesh_axes() | b.mesh_axes()) - {*AXES, *axes}
    mesh_order = (*AXES, *axes, *sorted(undeclared))
    flat_axes = {*context, *exchange, node_axis} - {""}

    def union(row: str, left: Column, right: Column, leading: Sequence[str]) -> MeshAxes:
        """Returns the mesh axes of both rows: first those of `leading`, then in mesh order."""
        union_axes = {*_axes_in_row(left, row), *_axes_in_row(right, row)}
        if union_axes and _is_flat(row):
            union_axes |= flat_axes
        rank = {axis: position for position, axis in enumerate(leading)}
        ordered = sorted(
            union_axes, key=lambda axis: (rank.get(axis, len(rank)), mesh_order.index(axis))
        )
        return ordered[0] if len(ordered) == 1 else tuple(ordered) or None

    # Axes over which a weight is gathered before its use come last: gathering the others would
    # permute what is left.
    batch = {*axes_of(a.activations["batch"]), *axes_of(b.activations["batch"])}
    stored_axes = [axis for axis in mesh_order if axis not in batch]
    params = {row: union(row, a.params, b.params, stored_axes) for row in {**a.params, **b.params}}
    columns: dict[Kind, Column] = {"params": params}

    # The residual stream is sharded like attention's input first: axes that exchange keys come
    # before tensor, also an extra axis, which is behind tensor in the mesh.
    sequence_axes = tuple(axis for axis in mesh_order if axis in context)
    for kind in get_args(Kind):
        if kind == "params" or (getattr(a, kind) is None and getattr(b, kind) is None):
            continue
        left = a.own_rows(kind)
        right = b.own_rows(kind)
        column = {}
        for row in {**left, **right}:
            # Moments and gradients start with the axes of their weight: the other order costs two
            # permutes a step (measured).
            leading = sequence_axes if kind == "activations" else _axes_in_row(params, row)
            column[row] = union(row, left, right, leading)
        columns[kind] = column
    return Rules(
        f"{a.name}+{b.name}",
        axes=axes,
        context=context,
        exchange=exchange,
        reduction=reduction,
        node_axis=node_axis,
        **columns,  # pyright: ignore[reportArgumentType]
    )


def _axes_in_row(column: Column, logical: str) -> tuple[str, ...]:
    row = row_of(column, logical)
    return axes_of(column[row]) if row else ()


def _require_compatible(a: Rules, b: Rules) -> None:
    """Raises ShardingRuleError if two strategies contradict each other."""
    for axis, axis_type in a.axes.items():
        if b.axes.get(axis, axis_type) != axis_type:
            raise ShardingRuleError(
                f"{a.name} and {b.name} both declare the mesh axis {axis!r} as {axis_type} and as "
                f"{b.axes[axis]}; rename one of them"
            )
    for axis, exchange in a.context.items():
        if b.context.get(axis, exchange) != exchange:
            raise ShardingRuleError(
                f"{a.name} and {b.name} both exchange keys over {axis!r} by {exchange} and by "
                f"{b.context[axis]}; keep one of them"
            )
    for axis, exchange in a.exchange.items():
        if b.exchange.get(axis, exchange) != exchange:
            raise ShardingRuleError(
                f"{a.name} and {b.name} both exchange tokens over {axis!r} by {exchange} and by "
                f"{b.exchange[axis]}; keep one of them"
            )
    for rules, other in ((a, b), (b, a)):
        axis = _moments_axis(rules)
        if axis and any(_is_flat(row) and entry for row, entry in other.params.items()):
            raise ShardingRuleError(
                f"{a.name} and {b.name}: {rules.name} shards a dimension of each matrix's moments "
                f"over {axis!r}, and {other.name} keeps them in flat vectors, which need no such "
                f"dimension; leave {rules.name} out"
            )
    if "auto" not in (a.reduction, b.reduction) and a.reduction != b.reduction:
        raise ShardingRuleError(
            f"{a.name} and {b.name} sum gradients in {a.reduction} and in {b.reduction}; set one "
            "of them to auto: replace(reduction='auto')"
        )
    if a.node_axis and b.node_axis and a.node_axis != b.node_axis:
        raise ShardingRuleError(
            f"{a.name} and {b.name} sum gradients inside a node over {a.node_axis!r} and over "
            f"{b.node_axis!r}; keep one of them"
        )


def _moments_axis(rules: Rules) -> str:
    """Returns the first mesh axis that shards moments or gradients but not their weight.

    ZeRO has one. Empty if there is none, or if only flat vectors are sharded.
    """
    for column in (rules.optimizer or {}, rules.gradients or {}):
        for row, entry in column.items():
            weight_axes = _axes_in_row(rules.params, row)
            for axis in axes_of(entry):
                if axis not in weight_axes and not _is_flat(row):
                    return axis
    return ""


def _is_flat(row: str) -> bool:
    return row.rpartition("/")[2] == FLAT
