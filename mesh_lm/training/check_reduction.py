"""Checks whether gradients can be summed as the rules say: in int8, and in two levels by node."""

from __future__ import annotations

from collections.abc import Iterator

from mesh_lm.config import TrainConfig
from sharding_rules import axes_of, setting
from sharding_rules.rules import FLAT


def reduction_problems(config: TrainConfig) -> Iterator[str]:
    """Rules with which sums of gradients would not be rounded, or not be in two levels, as they ask
    for.
    """
    rules, sizes = config.rules, config.mesh.sizes()
    summed = {
        axis: size
        for axis, size in sizes.items()
        if axis in rules.manual_axes() - {"pipeline"} and size > 1
    }
    if node := rules.node_axis:
        if node not in axes_of(rules.activations["batch"]) and node not in rules.context:
            yield (
                f"rules.node_axis={node!r}, but rules.activations['batch'] is not sharded over "
                f"{node!r}; add it there"
            )
        column = rules.column("gradients")
        cut = [
            row
            for row, entry in column.items()
            if set(axes_of(entry)) & set(summed) and row.rpartition("/")[2] != FLAT
        ]
        if cut and sizes.get(node, 1) > 1:
            where = f"rules.gradients[{cut[0]!r}]={column[cut[0]]!r}"
            yield (
                f"rules.node_axis={node!r}: {where} shards the sum; use ddp, zero1, distributed or "
                "zero3 with by_node"
            )
    if rules.reduction != "int8":
        return
    what = "rules.reduction='int8'"
    if not summed and sizes["fsdp"] > 1:
        fix = (
            f"{setting('data', 2)} or more, along which gradients are summed once a step, or leave "
            "reduce_int8 out"
        )
        yield f"{what}: XLA sums gradients over fsdp itself, in the type of the matmul; set {fix}"
    if node and sizes.get(node, 1) > 1:
        yield (
            f"{what} with rules.node_axis={node!r}: sums in two levels are not rounded; leave "
            "by_node or reduce_int8 out"
        )
    gathered = [
        row
        for row, entry in rules.params.items()
        if row.rpartition("/")[2] == FLAT and axes_of(entry)
    ]
    if gathered:
        where = f"rules.params[{gathered[0]!r}]={rules.params[gathered[0]]!r}"
        yield (
            f"{what}: {where} sums each layer's gradient in every microbatch, without a place for "
            "what is left out; use distributed"
        )
        return
    rows = rules.column("gradients")
    if cut := [row for row, entry in rows.items() if set(axes_of(entry)) & set(summed)]:
        where = f"rules.gradients[{cut[0]!r}]={rows[cut[0]]!r}"
        yield (
            f"{what}: {where} leaves the reduce-scatter to XLA, which cannot round it; use ddp, "
            "zero1 or distributed"
        )
