"""A model that was trained in stages, without them, for what the ring cannot run: generating and scoring text.

The stages' devices go to FSDP. Each then holds a part of every layer, as large as its whole layers were, so that the weights still fit.
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
    """The model on the devices of a mesh without its stages: the mesh with fsdp * pipeline, and rules that cut embed and batch over fsdp.

    Where FSDP cannot cut the weights so often, the devices become replicas (data * pipeline), which hold `pipeline` times as much.
    Raises ShardingRuleError where the rules do not fit the model even so.
    """
    if shard.mesh.shape[_AXIS] == 1:
        return ModelLayout.of(model, shard)
    rules = _with_fsdp(shard.rules)
    try:
        layout = ModelLayout.of(model, Shard(rules, _given_to("fsdp", shard.mesh)))
        layout.shardings("params")
        return layout
    except ShardingRuleError:
        return ModelLayout.of(model, Shard(rules, _given_to("data", shard.mesh)))


def without_pipeline(layout: ModelLayout, params: Params) -> tuple[ModelLayout, Params]:
    """`merged_layout`, with the weights moved there. It takes them over: memory grows by one of them at a time.

    Where there is one stage, both are what they were.
    """
    shard = layout.shard
    if shard.mesh.shape[_AXIS] == 1:
        return layout, params
    target = merged_layout(layout.config, shard)
    params, where = layout.to_model_order(params, "params"), target.shardings("params")
    grown = next(axis for axis in ("fsdp", "data") if target.shard.mesh.shape[axis] > shard.mesh.shape[axis])
    return target, {name: _moved(x, where[name], grown) for name, x in params.items()}


def _with_fsdp(rules: Rules) -> Rules:
    """FSDP's cuts beside their own; weights that they already cut over fsdp keep their dimension."""
    fsdp = preset("hsdp")
    if any("fsdp" in axes_of(entry) for entry in rules.params.values()):
        fsdp = fsdp.replace(fsdp.name, params={"embed": None})
    return product(rules, fsdp)


def _given_to(axis: str, mesh: Mesh) -> Mesh:
    """The mesh with its stages inside another axis, innermost: tensor, inside a node, keeps its neighbours."""
    sizes = {**mesh.shape, _AXIS: 1, axis: mesh.shape[axis] * mesh.shape[_AXIS]}
    devices = np.moveaxis(mesh.devices, mesh.axis_names.index(_AXIS), mesh.axis_names.index(axis))
    return Mesh(devices.reshape(tuple(sizes.values())), mesh.axis_names, axis_types=mesh.axis_types)


def _moved(x: jax.Array, where: jax.NamedSharding, grown: str) -> jax.Array:
    """An array of the mesh in stages to the folded one, on which `grown` is what (grown, pipeline) was: one all-to-all at most."""
    mesh: Mesh = x.sharding.mesh  # pyright: ignore[reportAttributeAccessIssue]
    was = {axis: (axis,) for axis in mesh.axis_names} | {grown: (grown, _AXIS), _AXIS: ()}
    same = jax.NamedSharding(mesh, PartitionSpec(*(tuple(a for axis in axes_of(entry) for a in was[axis]) for entry in where.spec)))
    if not x.sharding.is_equivalent_to(same, x.ndim):
        old, x = x, jax.jit(lambda x: x, out_shardings=same)(x)
        jax.block_until_ready(x)  # lest the next array be there twice as well
        old.delete()
    return jax.make_array_from_single_device_arrays(x.shape, where, [part.data for part in x.addressable_shards])
