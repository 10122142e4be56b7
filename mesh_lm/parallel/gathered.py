"""Segments whose layers gather their weights: ZeRO-3 with communication beside the layers' compute.

Each device has a shard of a flat vector per layer (`mesh_lm.parallel.flat`), the fp32 master. In
the forward pass, the weights of layer l + 1 are gathered during layer l. In the backward pass, the
weights of layer l - 1 are gathered and the gradient of layer l + 1 is summed over the replicas
during layer l. A layer has one collective each way, because more than a few at once would not be
overlapped.

The forward pass keeps the residuals of a layer that depend on its input, by the segment's remat
policy, and never its weights.
"""

from __future__ import annotations

import dataclasses
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from mesh_lm.model import Context, Model, Sums
from mesh_lm.model.contract import layer_output
from mesh_lm.parallel import stack
from mesh_lm.parallel.flat import FlatLayout
from mesh_lm.parallel.layer_collectives import LayerCollectives, row_of, with_row
from mesh_lm.parallel.layout import ModelLayout, Params, segment_of
from mesh_lm.parallel.remat import remat
from mesh_lm.parallel.residuals import depends_on_first, restored, saved
from mesh_lm.schedules.segments import LayerRun, Remat, Segment


def divided(layout: ModelLayout, flat: FlatLayout, params: Params) -> tuple[Params, Params]:
    """(vectors that layers gather their matrices from, all parameters), of what the engine reads;
    of those matrices only the shapes.
    """
    vectors = {
        vector.name: params[vector.name] for vector in flat.vectors if vector.gathered_by_layer
    }
    # In the order of the model. That of a set of names differs between processes, and the hosts of
    # a run would compile different programs.
    shapes: Any = {
        name: shape for name, shape in layout.memory_shapes.items() if name in flat.gathered_names
    }
    return vectors, {**{name: x for name, x in params.items() if name not in vectors}, **shapes}


def run_segment(
    layout: ModelLayout,
    vectors: Params,
    model: Model,
    segment: Segment,
    x: jax.Array,
    ctx: Context,
    first: int = 0,
    sinks: stack.Sinks | None = None,
) -> tuple[jax.Array, Any, Sums]:
    """`mesh_lm.parallel.stack.run_segment` in the engine, where layers gather those weights that
    `vectors` hold.

    The gradient of a vector is this replica's shard of the sum over the replicas.
    """
    own = {name: x for name, x in vectors.items() if segment_of(name) == segment.name}
    if not own:
        return stack.run_segment(model, segment, x, ctx, first, sinks=sinks)
    with jax.named_scope("layers"):
        x, ctx = stack.as_layers_take_it(model, segment, x, ctx)
        x, by_layer = _Layers(layout, model, segment, ctx, first, x)(own, x)
    return stack.batch_first(x, ctx), ctx.cache, stack.totals(segment.name, by_layer)


class _Layers(LayerCollectives):
    """The layers of a segment, with a backward pass of their own."""

    def __init__(
        self,
        layout: ModelLayout,
        model: Model,
        segment: Segment,
        ctx: Context,
        first: int,
        like: jax.Array,
    ) -> None:
        """like: an array with the type and shape of the layers' input."""
        super().__init__(layout, segment.name)
        self.segment, self.runs, self.ctx, self.first = segment, segment.runs(), ctx, first
        self.graph, parameters, self.buffers = nnx.split(
            getattr(model, segment.name), nnx.Param, ...
        )
        leaves, self.tree = jax.tree.flatten(parameters)
        self.names = [
            name
            for name in layout.shapes
            if segment_of(name) == segment.name and name not in layout.buffers
        ]
        self.others: Params = {
            name: w
            for name, w in zip(self.names, leaves, strict=True)
            if name not in layout.flat.gathered_names
        }
        self.shared, self.shared_tree = jax.tree.flatten(ctx.shared)
        self.floats = [leaf for leaf in self.shared if jnp.issubdtype(leaf.dtype, jnp.inexact)]
        self.like = jax.ShapeDtypeStruct(like.shape, like.dtype)
        self.x_spec = self.shard.spec("activations", ctx.residual)

    def __call__(self, vectors: Params, x: jax.Array) -> tuple[jax.Array, Sums]:
        """(output, sums by layer: [periods, period, ...])."""

        @jax.custom_vjp
        def run(
            vectors: Params, others: Params, floats: list[jax.Array], x: jax.Array
        ) -> tuple[jax.Array, Sums]:
            return self.forward(vectors, others, floats, x, save=False)[0]

        def forward(
            vectors: Params, others: Params, floats: list[jax.Array], x: jax.Array
        ) -> tuple[Any, Any]:
            out, *kept = self.forward(vectors, others, floats, x, save=True)
            return out, (vectors, others, floats, *kept)

        def backward(kept: Any, d_out: tuple[jax.Array, Sums]) -> Any:
            vectors, others, floats, last, residuals = kept
            return self.backward(vectors, others, floats, last, residuals, *d_out)

        run.defvjp(forward, backward)
        return run(vectors, self.others, self.floats, x)

    # The two loops.

    def forward(
        self, vectors: Params, others: Params, floats: list[jax.Array], x: jax.Array, save: bool
    ) -> tuple[Any, Params, Any]:
        """((output, sums), the last layer's matrices, for each run of layers what is kept for the
        backward pass).
        """
        n, period = self.segment.n_layers, self.segment.period

        def step(
            run: LayerRun, carry: tuple[jax.Array, Params], number: jax.Array
        ) -> tuple[tuple[jax.Array, Params], tuple[Sums, Any]]:
            (x, used), of_layers, kept = carry, [], []
            for place in range(period):
                row = number * period + place
                # The last layer's matrices are gathered once more, for the backward pass; in a
                # conditional they would be waited for.
                after, done = self.gather(
                    vectors, jnp.minimum(row + 1, n - 1), self.finished(x, self.x_spec)
                )
                layer, arguments = (
                    partial(self.layer, run.remat, row, place),
                    (self.ordered(x, done), used, row_of(others, row), floats),
                )
                if save:
                    (x, sums), pull = jax.vjp(layer, *arguments)
                    kept.append(
                        (saved(pull, self.saves(run.remat)[place]), used if run.keep else {})
                    )
                else:
                    x, sums = layer(*arguments)
                x, used = lax.optimization_barrier((x, after))
                of_layers.append(sums)
            return (x, used), (stack.stacked_sums(of_layers), kept)

        carry, of_runs, kept = (
            (x, self.gather(vectors, jnp.int32(0), self.finished(x, self.x_spec))[0]),
            [],
            [],
        )
        for run in self.runs:
            carry, (sums, of_run) = lax.scan(
                partial(step, run), carry, self.periods(run), unroll=self.segment.unroll
            )
            of_runs.append(sums)
            kept.append(of_run)
        x, last = carry
        return (x, jax.tree.map(lambda *parts: jnp.concatenate(parts), *of_runs)), last, kept

    def backward(
        self,
        vectors: Params,
        others: Params,
        floats: list[jax.Array],
        last: Params,
        kept: Any,
        dx: jax.Array,
        d_sums: Sums,
    ) -> tuple[Params, Params, list[jax.Array], jax.Array]:
        """The gradients of the vectors, of the other parameters, of the floats that layers share,
        and of the input.
        """
        n, period = self.segment.n_layers, self.segment.period

        def step(run: LayerRun, carry: Any, xs: tuple[jax.Array, Any, Sums]) -> tuple[Any, Params]:
            (dx, used, grads, total, d_floats), (number, kept, d_sums), of_others = carry, xs, []
            for place in reversed(range(period)):
                row, (residuals, own) = number * period + place, kept[place]
                # of the layer after this one; of none at first
                summed, done = self.reduce(grads, self.finished(dx, self.x_spec))
                before, done = (
                    (used, done)
                    if run.keep
                    else self.gather(vectors, jnp.maximum(row - 1, 0), done)
                )
                layer, like = (
                    partial(self.layer, run.remat, row, place),
                    jnp.zeros(self.like.shape, self.like.dtype),
                )
                (_, sums), pull = jax.vjp(layer, like, own or used, row_of(others, row), floats)
                pull = restored(pull, self.saves(run.remat)[place], residuals)
                seeds = {name: d_sums[name][place] for name in sums}
                dx, grads, d_others, d_more = pull((self.ordered(dx, done), seeds))
                dx, grads, used, summed = lax.optimization_barrier(
                    (self.pinned(dx), self.of_matrices(grads), before, summed)
                )
                total = with_row(total, (row + 1) % n, summed)
                d_floats = jax.tree.map(jnp.add, d_floats, d_more)
                of_others.insert(0, d_others)
            return (dx, used, grads, total, d_floats), jax.tree.map(
                lambda *rows: jnp.stack(rows), *of_others
            )

        zeros = {name: jnp.zeros(like.shape, like.dtype) for name, like in self.abstract.items()}
        total = jax.tree.map(jnp.zeros_like, vectors)
        carry, of_runs = (
            (dx, last, self.of_matrices(zeros), total, jax.tree.map(jnp.zeros_like, floats)),
            [],
        )
        kept_after = False
        for run, of_run in zip(reversed(self.runs), reversed(kept), strict=True):
            seeds = jax.tree.map(
                lambda s, run=run: s[run.begin // period : run.end // period], d_sums
            )
            # the layers after these have gathered nothing
            if not run.keep and run.end < n and kept_after:
                carry = (
                    carry[0],
                    self.gather(
                        vectors, jnp.int32(run.end - 1), self.finished(carry[0], self.x_spec)
                    )[0],
                    *carry[2:],
                )
            kept_after = run.keep
            xs = self.periods(run), of_run, seeds
            carry, of_others = lax.scan(
                partial(step, run), carry, xs, reverse=True, unroll=self.segment.unroll
            )
            of_runs.insert(0, of_others)
        (dx, _, grads, total, d_floats), d_others = (
            carry,
            jax.tree.map(lambda *parts: jnp.concatenate(parts), *of_runs),
        )
        total = with_row(total, jnp.int32(0), self.reduce(grads, self.finished(dx, self.x_spec))[0])
        return (
            total,
            {name: g.reshape(-1, *g.shape[2:]) for name, g in d_others.items()},
            d_floats,
            dx,
        )

    # One layer.

    def layer(
        self,
        policy: Remat,
        row: jax.Array,
        place: int,
        x: jax.Array,
        used: Params,
        others: Params,
        floats: list[jax.Array],
    ) -> tuple[jax.Array, Sums]:
        """(output, sums) of the layer in a row. used: its matrices; others: its other
        parameters.
        """

        def run(
            x: jax.Array, used: Params, others: Params, floats: list[jax.Array]
        ) -> tuple[jax.Array, Sums]:
            weights, given = {**used, **others}, iter(floats)
            shared = [
                next(given) if jnp.issubdtype(leaf.dtype, jnp.inexact) else leaf
                for leaf in self.shared
            ]
            parameters = jax.tree.unflatten(self.tree, [weights[name] for name in self.names])
            layer = nnx.merge(self.graph, parameters, row_of(self.buffers, row))
            ctx = dataclasses.replace(
                self.ctx,
                shared=jax.tree.unflatten(self.shared_tree, shared),
                number=self.first + row,
                place=place,
            )
            y, _, sums = layer_output(
                layer, x, stack.called(layer, self.segment, self.shard)(x, ctx)
            )
            return y, sums

        return remat(policy, self.segment.unroll)(run)(x, used, others, floats)

    def saves(self, policy: Remat) -> list[list[bool]]:
        """For each layer of a period and each of its residuals, whether the forward pass saves
        it.
        """

        def residuals(place: int, x: jax.Array, *rest: Any) -> list[jax.Array]:
            return jax.tree.leaves(
                jax.vjp(partial(self.layer, policy, jnp.int32(0), place), x, *rest)[1]
            )

        rest = self.abstract, jax.eval_shape(partial(row_of, row=0), self.others), self.floats
        return [
            depends_on_first(partial(residuals, place), self.like, *rest)
            for place in range(self.segment.period)
        ]

    def periods(self, run: LayerRun) -> jax.Array:
        """The numbers of the periods of a run's layers."""
        return jnp.arange(run.begin // self.segment.period, run.end // self.segment.period)

    @cached_property
    def types(self) -> dict[str, Any]:
        """The types in which the layers get their matrices: float32 if gradients shall leave the
        matmuls so.
        """
        wide = self.shard.rules.reduction == "float32"
        return {
            name: jnp.dtype("float32") if wide else dtype for name, dtype in super().types.items()
        }

    def pinned(self, x: jax.Array) -> jax.Array:
        """The gradient of an activation, sharded as the activation is."""
        return self.shard(x, *self.ctx.residual)
