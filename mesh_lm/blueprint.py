"""A model before it has weights: its parameters' names, shapes and logical axes, and how to make a module of a dict of arrays.

Outside the model everything is a plain dict, {"blocks.mlp.up.weight": array}: optimizer, checkpoints and tests see no Flax class.

A stacked parameter, one with the logical axis "layers" in front, has its layers in model order in the module and on disk. In memory each
stage of a pipeline has its own (`mesh_lm.pipeline.stages`); where that is another order, `shapes` and `in_memory` differ.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, cast

import jax
from flax import nnx

from mesh_lm.config import ConfigError, ModelConfig, PipelineConfig
from mesh_lm.model import Model
from mesh_lm.pipeline.relayout import canonical_sharding, to_canonical, to_memory
from mesh_lm.pipeline.stages import Stages, divide
from sharding_rules import Shard, ShardingRuleError
from sharding_rules.rules import Kind

Params = dict[str, jax.Array]


@dataclasses.dataclass(frozen=True, eq=False)
class Blueprint:
    """The same module as `config.make` builds, with its arrays left out."""

    config: ModelConfig
    shard: Shard
    pipeline: PipelineConfig
    stages: Stages
    shapes: dict[str, jax.ShapeDtypeStruct]
    axes: dict[str, tuple[str | None, ...]]
    _graph: Any
    _tree: Any

    @classmethod
    def of(cls, config: ModelConfig, shard: Shard, pipeline: PipelineConfig = PipelineConfig()) -> Blueprint:
        """Traces the constructor; no memory is touched.

        Raises ShardingRuleError for a parameter whose dimensions are not all named, and ConfigError for NNX state that is not nnx.Param or
        a model that the pipeline cannot cut.
        """
        stages = divided(config, pipeline, shard.mesh.shape["pipeline"])
        graph, state = nnx.split(nnx.eval_shape(lambda: _make(config, shard, jax.random.key(0))))
        shapes, axes = {}, {}
        for path, variable in jax.tree_util.tree_flatten_with_path(state, is_leaf=lambda v: isinstance(v, nnx.Variable))[0]:
            name = ".".join(str(getattr(key, "key", key)) for key in path)
            if not isinstance(variable, nnx.Param):
                raise ConfigError(f"model.{name} is a {type(variable).__name__}; mesh_lm trains models whose only state is nnx.Param")
            shapes[name] = jax.ShapeDtypeStruct(variable.get_value().shape, variable.get_value().dtype)
            axes[name] = variable.get_metadata().get("out_sharding")
            if axes[name] is None or len(axes[name]) != len(shapes[name].shape):
                raise ShardingRuleError(
                    f"{name} {shapes[name].shape}: its logical axes are {axes[name]}; give one name (or None) a dimension, "
                    "as in nnx.Param(value, out_sharding=('embed', 'mlp'))"
                )
        return cls(config, shard, pipeline, stages, shapes, axes, graph, jax.tree.structure(state))

    @property
    def stacked(self) -> frozenset[str]:
        """Names of the parameters that a pipeline's stages divide."""
        return frozenset(name for name, axes in self.axes.items() if axes[:1] == ("layers",))

    @property
    def in_memory(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Shapes as the engine has them: stacked parameters by stage, padded where stages have unequal numbers of layers."""
        if self.stages.identity:
            return self.shapes
        rows = self.stages.rows
        return {n: jax.ShapeDtypeStruct((rows, *s.shape[1:]), s.dtype) if n in self.stacked else s for n, s in self.shapes.items()}

    def init(self, key: jax.Array) -> Params:
        """Initial weights, layers in model order.

        Under jit with `canonical_shardings("params")` each device makes its own part, and the bits do not depend on the mesh.
        """
        state = nnx.split(_make(self.config, self.shard, key))[1]
        return dict(zip(self.shapes, jax.tree.leaves(state), strict=True))

    def bind(self, params: Params) -> Model:
        """The module with these weights."""
        return cast(Model, nnx.merge(self._graph, jax.tree.unflatten(self._tree, [params[name] for name in self.shapes])))

    def shardings(self, kind: Kind) -> dict[str, jax.NamedSharding]:
        """Where each parameter (or its gradient, or its moments) lives. Raises ShardingRuleError with every parameter that no rule fits."""
        out, problems = {}, []
        for name, shape in self.in_memory.items():
            try:
                out[name] = self.shard.sharding(kind, self.axes[name], shape.shape, name)
            except ShardingRuleError as error:
                problems.append(str(error))
        if problems:
            raise ShardingRuleError("\n  - ".join(["these rules do not fit the model", *dict.fromkeys(problems)]))
        return out

    def canonical_shardings(self, kind: Kind) -> dict[str, jax.NamedSharding]:
        """The same of parameters whose layers are in model order: as they are initialised, saved and restored."""
        shapes = self.in_memory
        where = self.shardings(kind).items()
        return {n: canonical_sharding(s, shapes[n].shape, self.stages) if n in self.stacked else s for n, s in where}

    def by_stage(self, tree: Params, kind: Kind) -> Params:
        """Parameters (gradients, moments) in model order -> as the engine has them. Takes them over: there is one twice at a time."""
        return self._relaid(tree, kind, to_memory)

    def in_model_order(self, tree: Params, kind: Kind) -> Params:
        """The inverse of `by_stage`."""
        return self._relaid(tree, kind, to_canonical)

    def _relaid(self, tree: Params, kind: Kind, move: Callable[[jax.Array, Stages, jax.NamedSharding], jax.Array]) -> Params:
        if self.stages.identity:
            return tree
        where = self.shardings(kind)
        return {name: move(x, self.stages, where[name]) if name in self.stacked else x for name, x in tree.items()}

    def constrain(self, tree: Params, kind: Kind) -> Params:
        """Pins a dict of parameters, gradients or moments to its column of the rules."""
        return {name: self.shard.constrain(x, kind, self.axes[name]) for name, x in tree.items()}


def divided(config: ModelConfig, pipeline: PipelineConfig, stages: int) -> Stages:
    """The layers of a model on the stages of a mesh. Raises ConfigError where they do not fit."""
    stack = config.stack()
    if stages == 1:
        return Stages(1, (stack.n_layers if stack else 1,))
    if stack is None:
        raise ConfigError(
            f"mesh.pipeline={stages}: {type(config).__name__} cannot be cut into stages (its stack() is None); set mesh.pipeline=1"
        )
    costs = stack.run(stages * pipeline.chunks, pipeline.stash == "input")
    return divide(
        stack.n_layers, stages, pipeline.chunks, layers=pipeline.layers, balance=pipeline.balance, period=stack.period, costs=costs
    )


def _make(config: ModelConfig, shard: Shard, key: jax.Array) -> nnx.Module:
    with nnx.use_eager_sharding(False):  # our rules place the arrays, not Flax's
        return config.make(shard, nnx.Rngs(params=key))
