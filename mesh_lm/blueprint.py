"""A model before it has weights: its parameters' names, shapes and logical axes, and how to make a module of a dict of arrays.

Outside the model everything is a plain dict, {"blocks.mlp.up.weight": array}: optimizer, checkpoints and tests see no Flax class.
"""

from __future__ import annotations

import dataclasses
from typing import Any, cast

import jax
from flax import nnx

from mesh_lm.config import ConfigError, ModelConfig
from mesh_lm.model import Model
from sharding_rules import Shard, ShardingRuleError
from sharding_rules.rules import Kind

Params = dict[str, jax.Array]


@dataclasses.dataclass(frozen=True, eq=False)
class Blueprint:
    """The same module as `config.make` builds, with its arrays left out."""

    config: ModelConfig
    shard: Shard
    shapes: dict[str, jax.ShapeDtypeStruct]
    axes: dict[str, tuple[str | None, ...]]
    _graph: Any
    _tree: Any

    @classmethod
    def of(cls, config: ModelConfig, shard: Shard) -> Blueprint:
        """Traces the constructor; no memory is touched.

        Raises ShardingRuleError for a parameter whose dimensions are not all named, and ConfigError for NNX state that is not nnx.Param.
        """
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
        return cls(config, shard, shapes, axes, graph, jax.tree.structure(state))

    def init(self, key: jax.Array) -> Params:
        """Initial weights. Under jit with `shardings("params")` each device makes its own part, and the bits do not depend on the mesh."""
        state = nnx.split(_make(self.config, self.shard, key))[1]
        return dict(zip(self.shapes, jax.tree.leaves(state), strict=True))

    def bind(self, params: Params) -> Model:
        """The module with these weights."""
        return cast(Model, nnx.merge(self._graph, jax.tree.unflatten(self._tree, [params[name] for name in self.shapes])))

    def shardings(self, kind: Kind) -> dict[str, jax.NamedSharding]:
        """Where each parameter (or its gradient, or its moments) lives. Raises ShardingRuleError with every parameter that no rule fits."""
        out, problems = {}, []
        for name, shape in self.shapes.items():
            try:
                out[name] = self.shard.sharding(kind, self.axes[name], shape.shape, name)
            except ShardingRuleError as error:
                problems.append(str(error))
        if problems:
            raise ShardingRuleError("\n  - ".join(["these rules do not fit the model", *dict.fromkeys(problems)]))
        return out

    def constrain(self, tree: Params, kind: Kind) -> Params:
        """Pins a dict of parameters, gradients or moments to its column of the rules."""
        return {name: self.shard.constrain(x, kind, self.axes[name]) for name, x in tree.items()}


def _make(config: ModelConfig, shard: Shard, key: jax.Array) -> nnx.Module:
    with nnx.use_eager_sharding(False):  # our rules place the arrays, not Flax's
        return config.make(shard, nnx.Rngs(params=key))
