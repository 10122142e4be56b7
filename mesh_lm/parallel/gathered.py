"""Segments whose layers gather their weights: ZeRO-3 with communication beside the layers' compute.

Each device has a shard of a flat vector per layer (`mesh_lm.optim.flat`), the fp32 master. In the forward pass, the weights of layer l + 1
are gathered during layer l. In the backward pass, the weights of layer l - 1 are gathered and the gradient of layer l + 1 is summed over
the replicas during layer l. A layer has one collective each way, because more than a few at once would not be overlapped.

The forward pass keeps the residuals of a layer that depend on its input, by the segment's remat policy, and never its weights.
"""

from __future__ import annotations

import dataclasses
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec

from mesh_lm.model import Context, Model, Sums, stack
from mesh_lm.model.remat import remat
from mesh_lm.model.residuals import depends_on_first, restored, saved
from mesh_lm.optim.flat import FlatLayout, FlatVector
from mesh_lm.parallel.layout import ModelLayout, Params, segment_of
from mesh_lm.schedules.segments import Segment


def divided(layout: ModelLayout, flat: FlatLayout, params: Params) -> tuple[Params, Params]:
    """(vectors that layers gather their matrices from, all parameters), of what the engine reads; of those matrices only the shapes."""
    vectors = {vector.name: params[vector.name] for vector in flat.vectors if vector.gathered_by_layer}
    shapes: Any = {name: layout.memory_shapes[name] for name in flat.gathered_names}
    return vectors, {**{name: x for name, x in params.items() if name not in vectors}, **shapes}


def local_spec(layout: ModelLayout, vector: FlatVector) -> PartitionSpec:
    """The spec of a vector in the engine's region: sharded over the axes that XLA handles."""
    auto = frozenset(layout.shard.mesh.axis_names) - layout.shard.rules.manual_axes()
    return PartitionSpec(*(None,) * bool(vector.rows), tuple(a for a in vector.shard_axes if a in auto) or None)


def run_segment(
    layout: ModelLayout, vectors: Params, model: Model, segment: Segment, x: jax.Array, ctx: Context, first: int = 0,
    sinks: stack.Sinks | None = None,
) -> tuple[jax.Array, Any, Sums]:  # fmt: skip
    """`mesh_lm.model.stack.run_segment` in the engine, where layers gather those weights that `vectors` hold.

    The gradient of a vector is this replica's shard of the sum over the replicas.
    """
    own = {name: x for name, x in vectors.items() if segment_of(name) == segment.name}
    if not own:
        return stack.run_segment(model, segment, x, ctx, first, sinks=sinks)
    with jax.named_scope("layers"):
        x, ctx = stack.as_layers_take_it(model, segment, x, ctx)
        x, by_layer = _Layers(layout, model, segment, ctx, first, x)(own, x)
    return stack.batch_first(x, ctx), ctx.cache, stack.totals(segment.name, by_layer)


class _Layers:
    """The layers of a segment, with a backward pass of their own."""

    def __init__(self, layout: ModelLayout, model: Model, segment: Segment, ctx: Context, first: int, like: jax.Array) -> None:
        """like: an array with the type and shape of the layers' input."""
        self.layout, self.shard, self.segment, self.ctx, self.first = layout, model.shard, segment, ctx, first
        self.vectors = layout.flat.gathered_by(segment.name)
        self.graph, parameters, self.buffers = nnx.split(getattr(model, segment.name), nnx.Param, ...)
        leaves, self.tree = jax.tree.flatten(parameters)
        self.names = [name for name in layout.shapes if segment_of(name) == segment.name and name not in layout.buffers]
        self.others: Params = {name: w for name, w in zip(self.names, leaves, strict=True) if name not in layout.flat.gathered_names}
        self.shared, self.shared_tree = jax.tree.flatten(ctx.shared)
        self.floats = [leaf for leaf in self.shared if jnp.issubdtype(leaf.dtype, jnp.inexact)]
        self.like = jax.ShapeDtypeStruct(like.shape, like.dtype)
        self.x_spec = self.shard.spec("activations", ctx.residual)

    def __call__(self, vectors: Params, x: jax.Array) -> tuple[jax.Array, Sums]:
        """(output, sums by layer: [periods, period, ...])."""

        @jax.custom_vjp
        def run(vectors: Params, others: Params, floats: list[jax.Array], x: jax.Array) -> tuple[jax.Array, Sums]:
            return self.forward(vectors, others, floats, x, save=False)[0]

        def forward(vectors: Params, others: Params, floats: list[jax.Array], x: jax.Array) -> tuple[Any, Any]:
            out, *kept = self.forward(vectors, others, floats, x, save=True)
            return out, (vectors, others, floats, *kept)

        def backward(kept: Any, d_out: tuple[jax.Array, Sums]) -> Any:
            vectors, others, floats, last, residuals = kept
            return self.backward(vectors, others, floats, last, residuals, *d_out)

        run.defvjp(forward, backward)
        return run(vectors, self.others, self.floats, x)

    # The two loops.

    def forward(self, vectors: Params, others: Params, floats: list[jax.Array], x: jax.Array, save: bool) -> tuple[Any, Params, Any]:
        """((output, sums), the last layer's matrices, residuals by period)."""
        n, period = self.segment.n_layers, self.segment.period

        def step(carry: tuple[jax.Array, Params], number: jax.Array) -> tuple[tuple[jax.Array, Params], tuple[Sums, Any]]:
            (x, used), of_layers, kept = carry, [], []
            for place in range(period):
                row = number * period + place
                # The last layer's matrices are gathered once more, for the backward pass; in a conditional they would be waited for.
                after, done = self.gather(vectors, jnp.minimum(row + 1, n - 1), self.finished(x))
                layer, arguments = partial(self.layer, row, place), (self.ordered(x, done), used, _at(others, row), floats)
                if save:
                    (x, sums), pull = jax.vjp(layer, *arguments)
                    kept.append(saved(pull, self.saves[place]))
                else:
                    x, sums = layer(*arguments)
                x, used = lax.optimization_barrier((x, after))
                of_layers.append(sums)
            return (x, used), (stack.stacked_sums(of_layers), kept)

        start = x, self.gather(vectors, jnp.int32(0), self.finished(x))[0]
        (x, last), (sums, kept) = lax.scan(step, start, jnp.arange(n // period))
        return (x, sums), last, kept

    def backward(
        self, vectors: Params, others: Params, floats: list[jax.Array], last: Params, kept: Any, dx: jax.Array, d_sums: Sums
    ) -> tuple[Params, Params, list[jax.Array], jax.Array]:
        """The gradients of the vectors, of the other parameters, of the floats that layers share, and of the input."""
        n, period = self.segment.n_layers, self.segment.period

        def step(carry: Any, xs: tuple[jax.Array, Any, Sums]) -> tuple[Any, Params]:
            (dx, used, grads, total, d_floats), (number, kept, d_sums), of_others = carry, xs, []
            for place in reversed(range(period)):
                row = number * period + place
                summed, done = self.reduce(grads, self.finished(dx))  # of the layer after this one; of none at first
                before, done = self.gather(vectors, jnp.maximum(row - 1, 0), done)
                layer, like = partial(self.layer, row, place), jnp.zeros(self.like.shape, self.like.dtype)
                (_, sums), pull = jax.vjp(layer, like, used, _at(others, row), floats)
                pull = restored(pull, self.saves[place], kept[place])
                seeds = {name: d_sums[name][place] for name in sums}
                dx, grads, d_others, d_more = pull((self.ordered(dx, done), seeds))
                dx, grads, used, summed = lax.optimization_barrier((self.pinned(dx), self.of_matrices(grads), before, summed))
                total = _with_row(total, (row + 1) % n, summed)
                d_floats = jax.tree.map(jnp.add, d_floats, d_more)
                of_others.insert(0, d_others)
            return (dx, used, grads, total, d_floats), jax.tree.map(lambda *rows: jnp.stack(rows), *of_others)

        zeros = {name: jnp.zeros(like.shape, like.dtype) for name, like in self.abstract.items()}
        total = jax.tree.map(jnp.zeros_like, vectors)
        start = dx, last, self.of_matrices(zeros), total, jax.tree.map(jnp.zeros_like, floats)
        (dx, _, grads, total, d_floats), d_others = lax.scan(step, start, (jnp.arange(n // period), kept, d_sums), reverse=True)
        total = _with_row(total, jnp.int32(0), self.reduce(grads, self.finished(dx))[0])
        return total, {name: g.reshape(-1, *g.shape[2:]) for name, g in d_others.items()}, d_floats, dx

    # One layer.

    def layer(
        self, row: jax.Array, place: int, x: jax.Array, used: Params, others: Params, floats: list[jax.Array]
    ) -> tuple[jax.Array, Sums]:
        """(output, sums) of the layer in a row. used: its matrices; others: its other parameters."""

        def run(x: jax.Array, used: Params, others: Params, floats: list[jax.Array]) -> tuple[jax.Array, Sums]:
            weights, given = {**used, **others}, iter(floats)
            shared = [next(given) if jnp.issubdtype(leaf.dtype, jnp.inexact) else leaf for leaf in self.shared]
            parameters = jax.tree.unflatten(self.tree, [weights[name] for name in self.names])
            layer = nnx.merge(self.graph, parameters, _at(self.buffers, row))
            ctx = dataclasses.replace(self.ctx, shared=jax.tree.unflatten(self.shared_tree, shared), number=self.first + row, place=place)
            y, _, sums = layer(x, ctx)
            return y, sums

        return remat(self.segment.remat)(run)(x, used, others, floats)

    @cached_property
    def saves(self) -> list[list[bool]]:
        """For each layer of a period and each of its residuals, whether the forward pass saves it."""

        def residuals(place: int, x: jax.Array, *rest: Any) -> list[jax.Array]:
            return jax.tree.leaves(jax.vjp(partial(self.layer, jnp.int32(0), place), x, *rest)[1])

        rest = self.abstract, jax.eval_shape(partial(_at, row=0), self.others), self.floats
        return [depends_on_first(partial(residuals, place), self.like, *rest) for place in range(self.segment.period)]

    # Collectives, on local shards: XLA would replicate what they return over the axes that it handles.

    def gather(self, vectors: Params, row: jax.Array, after: jax.Array) -> tuple[Params, jax.Array]:
        """(the matrices of the layer in a row, `finished` of them)."""

        def on_device(vectors: Params, row: jax.Array, after: jax.Array) -> tuple[Params, jax.Array]:
            out: Params = {}
            for vector in self.vectors:
                shard = lax.dynamic_index_in_dim(vectors[vector.name], row, keepdims=False)
                out |= vector.all_gather_row(self.ordered(shard, after))
                after = self._finished(out[vector.matrices[0].name], after)
            return out, after

        specs = {vector.name: local_spec(self.layout, vector) for vector in self.vectors}
        run = self.shard.shard_map(on_device, (specs, PartitionSpec(), PartitionSpec()), (self.specs, PartitionSpec()))
        used, after = run(vectors, row, after)
        return {name: w.astype(self.types[name]) for name, w in used.items()}, after

    def reduce(self, grads: Params, after: jax.Array) -> tuple[Params, jax.Array]:
        """(this replica's shards of a layer's gradients, summed over the replicas, `finished` of them)."""
        dtype = jnp.bfloat16 if self.shard.rules.reduction == "bfloat16" else jnp.float32

        def on_device(grads: Params, after: jax.Array) -> tuple[Params, jax.Array]:
            out: Params = {}
            for vector in self.vectors:
                own = {m.name: self.ordered(grads[m.name], after) for m in vector.matrices}
                out[vector.name] = vector.reduce_scatter_row(own, dtype)
                after = self._finished(out[vector.name], after)
            return out, after

        specs = {vector.name: PartitionSpec(*local_spec(self.layout, vector)[1:]) for vector in self.vectors}
        return self.shard.shard_map(on_device, (self.specs, PartitionSpec()), (specs, PartitionSpec()))(grads, after)

    # XLA:CPU starts independent collectives in any order, so that devices may wait for one another: there, each waits for those before it.

    def finished(self, x: jax.Array) -> jax.Array:
        """On CPUs, a number that exists once x does."""
        if not self.on_cpu:
            return jnp.float32(0)
        return self.shard.shard_map(lambda x: self._finished(x, jnp.float32(0)), self.x_spec, PartitionSpec())(x)

    def ordered(self, x: jax.Array, after: jax.Array) -> jax.Array:
        """x, on CPUs not before `after` exists. It keeps its bits if what comes before is finite; if it is not, the step is skipped."""
        return x * (1 + 0 * after).astype(x.dtype) if self.on_cpu else x

    def _finished(self, x: jax.Array, after: jax.Array) -> jax.Array:
        return x.ravel()[0].astype(jnp.float32) if self.on_cpu else after

    @property
    def on_cpu(self) -> bool:
        """Whether the program is for CPUs."""
        return self.shard.mesh.devices.flat[0].platform == "cpu"

    # Shapes and shardings.

    def pinned(self, x: jax.Array) -> jax.Array:
        """The gradient of an activation, sharded as the activation is."""
        return self.shard(x, *self.ctx.residual)

    def of_matrices(self, tree: Params) -> Params:
        """Matrices of one layer, or their gradients, sharded as the layer uses them."""
        return {name: lax.with_sharding_constraint(x, self.specs[name]) for name, x in tree.items()}

    @cached_property
    def types(self) -> dict[str, Any]:
        """The types in which the layers get their matrices: float32 if gradients shall leave the matmuls so."""
        wide = self.shard.rules.reduction == "float32"
        return {m.name: jnp.dtype("float32") if wide else v.dtype for v in self.vectors for m in v.matrices}

    @cached_property
    def specs(self) -> dict[str, PartitionSpec]:
        """The specs of one layer's matrices over the axes that XLA handles."""
        auto = frozenset(self.shard.mesh.axis_names) - self.shard.rules.manual_axes()
        return {name: self.shard.restrict(PartitionSpec(*self.layout.flat.specs[name][1:]), auto) for name in self.types}

    @cached_property
    def abstract(self) -> dict[str, jax.ShapeDtypeStruct]:
        """The matrices of one layer."""
        by_hand = self.shard.rules.manual_axes()
        out = {}
        for name, dtype in self.types.items():
            where = jax.NamedSharding(self.shard.mesh, self.shard.restrict(self.layout.flat.specs[name], by_hand))
            out[name] = jax.ShapeDtypeStruct(where.shard_shape(self.layout.memory_shapes[name].shape)[1:], dtype)
        return out


def _at(tree: Any, row: jax.Array | int) -> Any:
    return jax.tree.map(lambda w: lax.dynamic_index_in_dim(w, row, keepdims=False), tree)


def _with_row(vectors: Params, row: jax.Array, values: Params) -> Params:
    return {name: lax.dynamic_update_index_in_dim(x, values[name], row, 0) for name, x in vectors.items()}
