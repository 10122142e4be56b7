"""Sums of gradients that cannot be made as the rules say: in int8, and in two levels by node."""

from __future__ import annotations

from collections.abc import Iterator

from mesh_lm.config import TrainConfig
from mesh_lm.parallel.problems.rows import name_of
from sharding_rules import axes_of, setting
from sharding_rules.rules import FLAT


def reduction_problems(config: TrainConfig) -> Iterator[str]:
    """Yields rules with which sums of gradients would not be rounded, or not be in two levels, as
    they ask for.
    """
    if config.rules.node_axis:
        yield from _node_problems(config)
    if config.rules.reduction == "int8":
        yield from _int8_problems(config)


def _summed_axes(config: TrainConfig) -> set[str]:
    """Returns the mesh axes over which the engine sums gradients."""
    axes = config.rules.manual_axes() - {"pipeline"}
    return {axis for axis, size in config.mesh.sizes().items() if axis in axes and size > 1}


def _node_problems(config: TrainConfig) -> Iterator[str]:
    rules = config.rules
    node = rules.node_axis
    if node not in axes_of(rules.activations["batch"]) and node not in rules.context:
        yield (
            f"rules.node_axis={node!r}, but rules.activations['batch'] is not sharded over "
            f"{node!r}; add it there"
        )
    if config.mesh.sizes().get(node, 1) <= 1:
        return
    column = rules.column("gradients")
    for row, entry in column.items():
        if name_of(row) == FLAT or not set(axes_of(entry)) & _summed_axes(config):
            continue
        if name_of(row) == "experts":
            yield (
                f"rules.node_axis={node!r}: sums in two levels are not built beside experts over "
                f"{axes_of(entry)[0]!r}; leave by_node out"
            )
        else:
            yield (
                f"rules.node_axis={node!r}: rules.gradients[{row!r}]={entry!r} shards the sum; use "
                "ddp, zero1, distributed or zero3 with by_node"
            )
        return


def _int8_problems(config: TrainConfig) -> Iterator[str]:
    rules = config.rules
    sizes = config.mesh.sizes()
    node = rules.node_axis
    summed_axes = _summed_axes(config)
    if not summed_axes and sizes["fsdp"] > 1:
        yield (
            "rules.reduction='int8': XLA sums gradients over fsdp itself, in the type of the "
            f"matmul; set {setting('data', 2)} or more, along which gradients are summed once a "
            "step, or leave reduce_int8 out"
        )
    if node and sizes.get(node, 1) > 1:
        yield (
            f"rules.reduction='int8' with rules.node_axis={node!r}: sums in two levels are not "
            "rounded; leave by_node or reduce_int8 out"
        )
    for row, entry in rules.params.items():
        if name_of(row) == FLAT and axes_of(entry):
            yield (
                f"rules.reduction='int8': rules.params[{row!r}]={entry!r} sums each layer's "
                "gradient by itself, without a place for what is left out; use distributed"
            )
            return
    for row, entry in rules.column("gradients").items():
        if not set(axes_of(entry)) & summed_axes:
            continue
        if name_of(row) == "experts":
            yield (
                "rules.reduction='int8': sums in int8 are not built beside experts over "
                f"{axes_of(entry)[0]!r}; leave reduce_int8 out"
            )
        else:
            yield (
                f"rules.reduction='int8': rules.gradients[{row!r}]={entry!r} leaves the "
                "reduce-scatter to XLA, which cannot round it; use ddp, zero1 or distributed"
            )
        return
