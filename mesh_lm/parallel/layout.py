"""A model without weights: its parameters' names, shapes, logical axes and shardings, and how to
bind a dict of arrays to its module.

Outside the model, parameters are a plain dict, {"blocks.mlp.up.weight": array}: optimizer,
checkpoints and tests see no Flax class.

The parameters of a segment's layers are stacked: their first logical axis is "layers". In the
module and on disk the layers are in model order. In memory each pipeline stage holds its own layers
(`mesh_lm.schedules.stages`); where that order differs, so do `shapes` and `memory_shapes`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection
from functools import cached_property
from typing import Any, cast

import jax
import jax.numpy as jnp
from flax import nnx

from mesh_lm.config import ModelConfig, PipelineConfig
from mesh_lm.errors import ConfigError
from mesh_lm.model import Model
from mesh_lm.model.buffer import Buffer
from mesh_lm.model.contract import require_model
from mesh_lm.optim.contract import ArraySpec, Params
from mesh_lm.parallel.flat import FlatLayout
from mesh_lm.parallel.relayout import canonical_sharding, to_canonical, to_memory
from mesh_lm.schedules.segments import Segment, Stack
from mesh_lm.schedules.stages import StackLayout, divide
from sharding_rules import TABLES, Shard, ShardingRuleError, unknown_scopes
from sharding_rules.owner import owner_axes
from sharding_rules.rules import Kind

MISFIT = "these rules do not fit the model"
"""The first line of an error that lists parameters."""


@dataclasses.dataclass(frozen=True, eq=False)
class ModelLayout:
    """The module that `config.make` builds, without its arrays, on the mesh of `shard`."""

    config: ModelConfig
    shard: Shard
    pipeline: PipelineConfig
    stacks: dict[str, StackLayout]
    """The layers of each segment on the pipeline stages."""
    shapes: dict[str, jax.ShapeDtypeStruct]
    """Shapes of the parameters and buffers on disk."""
    axes: dict[str, tuple[str | None, ...]]
    """Their logical axes, scoped where the rules have rows for the segment: "moe/mlp"."""
    buffers: frozenset[str]
    """Names of the buffers, which have no gradient (`mesh_lm.model.buffer.Buffer`)."""
    compute_dtypes: dict[str, Any]
    """The type that layers cast a parameter to before they use it; by default the type it is stored
    in."""
    _graph: Any
    _tree: Any

    @classmethod
    def of(
        cls, config: ModelConfig, shard: Shard, pipeline: PipelineConfig = PipelineConfig()
    ) -> ModelLayout:
        """Returns the layout of a model, from a trace of its constructor; no memory is allocated.

        Raises ShardingRuleError for a parameter whose dimensions are not all named and for a scope
        in the rules that is not a segment. Raises ConfigError for NNX state that is neither
        nnx.Param nor Buffer, for a parameter that is not stored in float32, for a stacked parameter
        outside of segments, and for a model that the pipeline cannot divide.
        """
        stacks = divided(config, pipeline, shard.mesh.shape["pipeline"])
        stack = config.stack()
        problems = unknown_scopes(shard.rules, (*stack.names, TABLES))
        if problems:
            raise ShardingRuleError("\n  - ".join([MISFIT, *problems]))
        graph, state = nnx.split(nnx.eval_shape(lambda: _make(config, shard, jax.random.key(0))))
        shapes = {}
        axes = {}
        buffers = set()
        compute_dtypes = {}
        variables, _ = jax.tree_util.tree_flatten_with_path(
            state, is_leaf=lambda v: isinstance(v, nnx.Variable)
        )
        for path, variable in variables:
            name = ".".join(str(getattr(key, "key", key)) for key in path)
            if not isinstance(variable, nnx.Param | Buffer):
                raise ConfigError(
                    f"model.{name} is a {type(variable).__name__}; mesh_lm trains models whose "
                    "only state is nnx.Param, and mesh_lm.model.buffer.Buffer for what has no "
                    "gradient"
                )
            if isinstance(variable, Buffer):
                buffers.add(name)
            value = variable.get_value()
            shapes[name] = jax.ShapeDtypeStruct(value.shape, value.dtype)
            compute_dtypes[name] = _compute_dtype(name, variable, value.dtype)
            logical_axes = variable.get_metadata().get("out_sharding")
            if logical_axes is None or len(logical_axes) != len(value.shape):
                raise ShardingRuleError(
                    f"{name} {value.shape}: its logical axes are {logical_axes}; give one name (or "
                    "None) a dimension, as in nnx.Param(value, out_sharding=('embed', 'mlp'))"
                )
            _check_stack(name, logical_axes, value.shape, stack)
            axes[name] = _scoped(name, logical_axes, shard.rules.scopes())
        return cls(
            config=config,
            shard=shard,
            pipeline=pipeline,
            stacks=stacks,
            shapes=shapes,
            axes=axes,
            buffers=frozenset(buffers),
            compute_dtypes=compute_dtypes,
            _graph=graph,
            _tree=jax.tree.structure(state),
        )

    @property
    def segments(self) -> tuple[Segment, ...]:
        """The segments of the model, in order."""
        return self.config.stack().segments

    @property
    def n_stages(self) -> int:
        """Pipeline stages; 1: there is no pipeline."""
        return self.shard.mesh.shape["pipeline"]

    @property
    def is_contiguous(self) -> bool:
        """Whether all stacked parameters have their layers in model order in memory, without
        padding.
        """
        return all(stack.is_contiguous for stack in self.stacks.values())

    def stack_of(self, name: str, kind: Kind = "params") -> StackLayout:
        """Returns the layout of a stacked parameter, or of a sum with a segment's layers as leading
        dimension.

        kind: of optimizer state, whose layers may be divided among owners, it is "optimizer".
        """
        stack = self.stacks[segment_of(name)]
        return stack.divided_among(self.n_owners) if kind == "optimizer" else stack

    @cached_property
    def n_owners(self) -> int:
        """The devices among which the layers of a stage are divided in the optimizer's state
        (`sharding_rules.owner`); 1: they are not divided.
        """
        axes = owner_axes(self.shard.rules)
        return math.prod(self.shard.mesh.shape[axis] for axis in axes)

    @property
    def stacked(self) -> frozenset[str]:
        """Names of the parameters and buffers whose layers are divided among the pipeline
        stages.
        """
        return frozenset(name for name, axes in self.axes.items() if axes[:1] == ("layers",))

    @property
    def memory_shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Shapes in memory: stacked parameters are ordered by stage, and padded if stages have
        unequal numbers of layers.
        """
        stacked = self.stacked
        shapes = {}
        for name, on_disk in self.shapes.items():
            rows = (self.stack_of(name).padded_rows,) if name in stacked else on_disk.shape[:1]
            shapes[name] = jax.ShapeDtypeStruct((*rows, *on_disk.shape[1:]), on_disk.dtype)
        return shapes

    @cached_property
    def leaves(self) -> dict[str, ArraySpec]:
        """The parameters and buffers in memory."""
        return {
            name: ArraySpec(tuple(s.shape), s.dtype, self.axes[name])
            for name, s in self.memory_shapes.items()
        }

    @cached_property
    def optimizer_leaves(self) -> dict[str, ArraySpec]:
        """The parameters and buffers as the optimizer updates them: with rows of padding where the
        layers of a stage do not divide among their owners.
        """
        leaves = {}
        for name, leaf in self.leaves.items():
            if leaf.stacked:
                rows = self.stack_of(name, "optimizer").padded_rows
                leaf = dataclasses.replace(leaf, shape=(rows, *leaf.shape[1:]))
            leaves[name] = leaf
        return leaves

    @cached_property
    def flat(self) -> FlatLayout:
        """The parameters that the optimizer keeps as flat vectors, by the rules."""
        parameters = {name: leaf for name, leaf in self.leaves.items() if name not in self.buffers}
        return FlatLayout.of(
            self.shard.rules, parameters, self.shardings("params"), self.compute_dtypes, segment_of
        )

    def init(self, key: jax.Array) -> Params:
        """Returns initial weights, layers in model order.

        Under jit with `canonical_shardings("params")` each device makes its own shards, and the
        bits do not depend on the mesh.
        """
        state = nnx.split(_make(self.config, self.shard, key))[1]
        return dict(zip(self.shapes, jax.tree.leaves(state), strict=True))

    def bind(self, params: Params) -> Model:
        """Returns the module with these parameters and buffers."""
        state = jax.tree.unflatten(self._tree, [params[name] for name in self.shapes])
        return cast(Model, nnx.merge(self._graph, state))

    def shardings(self, kind: Kind) -> dict[str, jax.NamedSharding]:
        """Returns shardings of the parameters, their gradients or moments. Raises ShardingRuleError
        with every parameter that no rule fits.
        """
        shardings = {}
        problems = []
        for name, shape in self.memory_shapes.items():
            try:
                shardings[name] = self.shard.sharding(kind, self.axes[name], shape.shape, name)
            except ShardingRuleError as error:
                problems.append(str(error))
        if problems:
            raise ShardingRuleError("\n  - ".join([MISFIT, *dict.fromkeys(problems)]))
        return shardings

    def canonical_shardings(self, kind: Kind) -> dict[str, jax.NamedSharding]:
        """Returns `shardings` for parameters with layers in model order, as they are initialised,
        saved and restored.
        """
        shapes = self.memory_shapes
        shardings = self.shardings(kind)
        for name in self.stacked & shardings.keys():
            shardings[name] = canonical_sharding(
                shardings[name], shapes[name].shape, self.stack_of(name)
            )
        return shardings

    def to_memory_order(self, tree: Params, kind: Kind) -> Params:
        """Returns parameters (gradients, moments) in the order in memory, from model order. Donates
        its input; the peak is one extra array.
        """
        return self._reordered(tree, kind, to_memory)

    def to_model_order(self, tree: Params, kind: Kind) -> Params:
        """Returns the inverse of `to_memory_order`."""
        return self._reordered(tree, kind, to_canonical)

    def _reordered(
        self,
        tree: Params,
        kind: Kind,
        move: Callable[[jax.Array, StackLayout, jax.NamedSharding], jax.Array],
    ) -> Params:
        if self.is_contiguous:
            return tree
        shardings = self.shardings(kind)
        stacked = self.stacked
        reordered = dict(tree)
        for name, x in tree.items():
            if name in stacked:
                reordered[name] = move(x, self.stack_of(name), shardings[name])
        return reordered

    def constrain(self, tree: Params, kind: Kind) -> Params:
        """Returns a dict of parameters, gradients or moments, constrained to its column of the
        rules.
        """
        return {name: self.shard.constrain(x, kind, self.axes[name]) for name, x in tree.items()}

    def to_optimizer(self, tree: Params, kind: Kind) -> Params:
        """Returns weights or gradients that are sharded as weights, with the shapes of
        `optimizer_leaves`, constrained to the column `kind` of the rules by one exchange at a time
        (`Shard.reshard`).
        """
        resharded = {}
        for name, x in tree.items():
            if x.shape != self.optimizer_leaves[name].shape:
                x = _with_rows(x, self.n_stages, self.optimizer_leaves[name].shape[0])
                # Before rows are divided: else XLA divides those without padding, and sends them
                # to where the padding moves them.
                x = self.shard.constrain(x, "params", self.axes[name])
            resharded[name] = self.shard.reshard(x, "params", kind, self.axes[name])
        return resharded

    def with_owners_padding(self, name: str, x: jax.Array) -> jax.Array:
        """Returns the rows of one stage of a parameter, with those of `optimizer_leaves`."""
        rows = self.optimizer_leaves[name].shape[0] // self.n_stages
        has_padding = name in self.stacked and x.shape[0] != rows
        return _with_rows(x, 1, rows) if has_padding else x

    def from_optimizer(self, tree: Params, kind: Kind) -> Params:
        """Returns weights that `to_optimizer` has brought to this column, with the shapes of
        `leaves`, and one exchange before they are sharded as weights (`Shard.return_path`).
        """
        returned = {}
        for name, x in tree.items():
            axes = self.axes[name]
            if x.shape == self.leaves[name].shape:
                returned[name] = self.shard.return_path(x, "params", kind, axes)
                continue
            # The last exchange, too, because not all owners have as many layers. The update is
            # complete before it: else XLA would send both operands of its last sum.
            x = self.shard.return_path(self.shard.constrain(x, kind, axes), "params", kind, axes)
            x = self.shard.constrain(x, "params", axes)
            returned[name] = _with_rows(x, self.n_stages, self.leaves[name].shape[0])
        return returned


def divided(config: ModelConfig, pipeline: PipelineConfig, stages: int) -> dict[str, StackLayout]:
    """Returns the layers of each segment on the pipeline stages. Raises ConfigError for a wrong
    stack, and for layers that cannot be divided so.
    """
    stack = config.stack()
    problems = stack.problems()
    if problems:
        raise ConfigError(
            "\n  - ".join(
                [f"{type(config).__name__}.stack() returns a stack with mistakes", *problems]
            )
        )
    if stages == 1:
        return {segment.name: StackLayout(1, (segment.n_layers,)) for segment in stack.segments}
    if not stack.segments:
        raise ConfigError(
            f"mesh.pipeline={stages}: {type(config).__name__} cannot be divided into stages (its "
            "stack() has no segments); set mesh.pipeline=1"
        )
    computed = stack.with_recomputation(stages * pipeline.chunks, pipeline.stash == "input")
    return divide(
        computed, stages, pipeline.chunks, layers=pipeline.layers, balance=pipeline.balance
    )


def _with_rows(x: jax.Array, n_stages: int, n_rows: int) -> jax.Array:
    """Returns an array with n_rows rows over all stages: rows of zeros are added at the end of each
    stage, or rows are removed there.
    """
    by_stage = x.reshape(n_stages, -1, *x.shape[1:])
    n_added = n_rows // n_stages - by_stage.shape[1]
    if n_added > 0:
        padding = [(0, 0), (0, n_added), *[(0, 0)] * (x.ndim - 1)]
        by_stage = jnp.pad(by_stage, padding)
    else:
        by_stage = by_stage[:, : n_rows // n_stages]
    return by_stage.reshape(n_rows, *x.shape[1:])


def segment_of(name: str) -> str:
    """Returns the segment (or other attribute) of a parameter or a sum: "moe" for
    "moe.mlp.up.weight" and for "moe/load".
    """
    return name.replace("/", ".").partition(".")[0]


def _scoped(
    name: str, axes: tuple[str | None, ...], scopes: Collection[str]
) -> tuple[str | None, ...]:
    """Returns the logical axes of a parameter, "moe/mlp" for "mlp" where the rules have rows for
    its segment, or for the tables outside of segments.
    """
    scope = segment_of(name) if axes[:1] == ("layers",) else TABLES
    if scope not in scopes:
        return tuple(axes)
    return tuple(axis if axis in (None, "layers") else f"{scope}/{axis}" for axis in axes)


def _compute_dtype(name: str, variable: nnx.Variable, stored: Any) -> Any:
    """Returns the type that layers cast a parameter to. Raises ConfigError for an unknown type, and
    for a parameter that is not stored in float32.
    """
    declared = variable.get_metadata().get("compute_dtype")
    if not isinstance(variable, Buffer) and stored != "float32":
        raise ConfigError(
            f"model.{name} is {stored}; store it in float32, and set compute_dtype={str(stored)!r} "
            "of its nnx.Param"
        )
    try:
        return jnp.dtype(declared or stored)
    except TypeError as error:
        raise ConfigError(
            f"model.{name}: compute_dtype={declared!r} is not a type; write it as in "
            "compute_dtype='bfloat16'"
        ) from error


def _check_stack(
    name: str, axes: tuple[str | None, ...], shape: tuple[int, ...], stack: Stack
) -> None:
    """Raises ConfigError unless a parameter of a segment has the logical axis "layers" first, and
    no other parameter does.
    """
    part = segment_of(name)
    is_stacked = axes[:1] == ("layers",)
    n_layers = {segment.name: segment.n_layers for segment in stack.segments}
    if part not in n_layers and is_stacked:
        raise ConfigError(
            f"model.{name} has a leading axis layers, but {part!r} is not a segment: "
            f"its config's stack() has {', '.join(map(repr, stack.names)) or 'none'}"
        )
    if part in n_layers and not (is_stacked and shape[0] == n_layers[part]):
        raise ConfigError(
            f"model.{name} is {shape} with the logical axes {axes}; parameters of the segment "
            f"{part!r} have its {n_layers[part]} layers first"
        )


def _make(config: ModelConfig, shard: Shard, key: jax.Array) -> nnx.Module:
    with nnx.use_eager_sharding(False):  # our rules shard the arrays, not Flax
        module = config.make(shard, nnx.Rngs(params=key))
    require_model(module)
    return module
