"""Merges the pipeline stages of a model into FSDP, for generation and scoring, which the ring of
stages cannot run.

Each device then holds a shard of every layer, as large as the layers of its stage were, so that the
weights still fit.
"""

from __future__ import annotations

import jax
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from mesh_lm.config import ModelConfig
from mesh_lm.parallel.layout import ModelLayout, Params
from sharding_rules import Rules, Shard, ShardingRuleError, axes_of, preset
from sharding_rules.presets import product

_AXIS = "pipeline"


def merged_layout(model: ModelConfig, shard: Shard) -> ModelLayout:
    """Returns the layout of the model on the same devices without stages: fsdp is multiplied by
    pipeline, and the rules shard embed and batch over fsdp.

    If the weights do not divide over that many devices, data is multiplied instead: replicas with
    `pipeline` times as much in each. Raises ShardingRuleError if the rules do not fit the model
    that way either.
    """
    if shard.mesh.shape[_AXIS] == 1:
        return ModelLayout.of(model, shard)
    rules = _with_fsdp(shard.rules)
    try:
        layout = ModelLayout.of(model, Shard(rules, _merged_into("fsdp", shard.mesh)))
        layout.shardings("params")
        return layout
    except ShardingRuleError:
        return ModelLayout.of(model, Shard(rules, _merged_into("data", shard.mesh)))


def without_pipeline(layout: ModelLayout, params: Params) -> tuple[ModelLayout, Params]:
    """Returns (`merged_layout`, the weights moved there). Donates the weights; the peak is one
    extra array.

    With one stage, both are returned unchanged.
    """
    shard = layout.shard
    if shard.mesh.shape[_AXIS] == 1:
        return layout, params
    target = merged_layout(layout.config, shard)
    params = layout.to_model_order(params, "params")
    shardings = target.shardings("params")
    old_sizes = shard.mesh.shape
    new_sizes = target.shard.mesh.shape
    grown = "fsdp" if new_sizes["fsdp"] > old_sizes["fsdp"] else "data"
    return target, {name: _moved(x, shardings[name], grown) for name, x in params.items()}


def _with_fsdp(rules: Rules) -> Rules:
    """Returns the rules with FSDP added; weights that they already shard over fsdp keep that
    dimension.
    """
    fsdp = preset("hsdp")
    if any("fsdp" in axes_of(entry) for entry in rules.params.values()):
        fsdp = fsdp.replace(fsdp.name, params={"embed": None})
    return product(rules, fsdp)


def _merged_into(axis: str, mesh: Mesh) -> Mesh:
    """Returns the mesh with its stages merged into another axis, as the inner part of it, so that
    tensor keeps its neighbours.
    """
    sizes = {**mesh.shape, _AXIS: 1, axis: mesh.shape[axis] * mesh.shape[_AXIS]}
    devices = np.moveaxis(mesh.devices, mesh.axis_names.index(_AXIS), mesh.axis_names.index(axis))
    return Mesh(devices.reshape(tuple(sizes.values())), mesh.axis_names, axis_types=mesh.axis_types)


def _moved(x: jax.Array, sharding: jax.NamedSharding, grown: str) -> jax.Array:
    """Returns an array of the mesh with stages, moved to the merged mesh, whose axis `grown` was
    (grown, pipeline): at most one all-to-all.
    """
    mesh: Mesh = x.sharding.mesh  # pyright: ignore[reportAttributeAccessIssue]
    old_axes = {axis: (axis,) for axis in mesh.axis_names}
    old_axes |= {grown: (grown, _AXIS), _AXIS: ()}
    # The new sharding in the axes of the old mesh.
    entries = [
        tuple(old for axis in axes_of(entry) for old in old_axes[axis]) for entry in sharding.spec
    ]
    target = jax.NamedSharding(mesh, PartitionSpec(*entries))
    if not x.sharding.is_equivalent_to(target, x.ndim):
        resharded = jax.jit(lambda x: x, out_shardings=target)(x)
        jax.block_until_ready(resharded)  # otherwise two arrays could exist twice at once
        x.delete()
        x = resharded
    shards = [part.data for part in x.addressable_shards]
    return jax.make_array_from_single_device_arrays(x.shape, sharding, shards)
