"""ZeRO-3: segments whose layers gather their weights, with communication beside the layers'
compute.

Each device has a shard of a flat vector per layer (`mesh_lm.parallel.flat`), the fp32 master. In
the forward pass, the weights of layer l + 1 are gathered during layer l. In the backward pass, the
weights of layer l - 1 are gathered and the gradient of layer l + 1 is summed over the replicas
during layer l. A layer has one collective each way, because more than a few at once would not be
overlapped.

The forward pass keeps the residuals of a layer that depend on its input, by the segment's remat
policy, and never its weights.

In this file, "matrices" are the gathered weights of one layer, by name; "other_params" are the
layers' parameters that are not gathered, stacked [layers, ...]; "floats" are the float arrays that
all layers share through their context, and that are differentiated, too.
"""

from __future__ import annotations

import dataclasses
from functools import cached_property, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from mesh_lm.model import Context, Model, Sums
from mesh_lm.model.contract import layer_output
from mesh_lm.parallel import stack
from mesh_lm.parallel.flat import FlatLayout
from mesh_lm.parallel.layer_collectives import LayerCollectives, row_of, with_row_added
from mesh_lm.parallel.layout import ModelLayout, Params, segment_of
from mesh_lm.parallel.remat import remat
from mesh_lm.parallel.residuals import depends_on_first, restored, saved
from mesh_lm.schedules.segments import LayerRun, Remat, Segment


def split_vectors(layout: ModelLayout, flat: FlatLayout, params: Params) -> tuple[Params, Params]:
    """Splits what the engine reads into (vectors that layers gather their matrices from, all
    parameters); of those matrices there are only the shapes.
    """
    names = [vector.name for vector in flat.vectors if vector.gathered_by_layer]
    vectors = {name: params[name] for name in names}
    other_params = {name: x for name, x in params.items() if name not in vectors}
    # In the order of the model. That of a set of names differs between processes, and the hosts of
    # a run would compile different programs.
    shapes: Any = {
        name: shape for name, shape in layout.memory_shapes.items() if name in flat.gathered_names
    }
    return vectors, {**other_params, **shapes}


def run_segment(
    layout: ModelLayout,
    vectors: Params,
    vector_totals: Params,
    model: Model,
    segment: Segment,
    x: jax.Array,
    ctx: Context,
    first_layer: int = 0,
    sinks: stack.Sinks | None = None,
) -> tuple[jax.Array, Any, Sums]:
    """`mesh_lm.parallel.stack.run_segment`, where layers gather the weights that are in `vectors`.

    vector_totals: float32, the gradients of the vectors so far: this replica's shards of the sums
    over the replicas, of earlier microbatches. They are differentiated in place of the vectors, and
    what comes back is their new value: the old one plus the gradient. So the backward loop adds to
    them in place, where a gradient of its own would be a second array of that size. {}: nothing is
    differentiated.
    """

    def of_segment(arrays: Params) -> Params:
        return {name: x for name, x in arrays.items() if segment_of(name) == segment.name}

    segment_vectors = of_segment(vectors)
    if not segment_vectors:
        return stack.run_segment(model, segment, x, ctx, first_layer, sinks=sinks)
    with jax.named_scope("layers"):
        x, ctx = stack.to_layer_order(model, segment, x, ctx)
        layers = _GatheredLayers(layout, model, segment, ctx, first_layer, x)
        x, layer_sums = layers(segment_vectors, of_segment(vector_totals), x)
    return stack.batch_first(x, ctx), ctx.cache, stack.totals(segment.name, layer_sums)


class _ForwardCarry(NamedTuple):
    """The carry of the forward loop."""

    x: jax.Array
    """The input of the next layer."""
    matrices: Params
    """The matrices of the next layer, gathered during the layer before it."""


class _BackwardCarry(NamedTuple):
    """The carry of the backward loop, which visits the layers from the last to the first."""

    dx: jax.Array
    """The gradient of the output of the next layer to visit."""
    matrices: Params
    """The matrices of that layer, unless its run keeps them from the forward pass."""
    matrix_grads: Params
    """The gradients of the layer that was visited last, not yet summed over the replicas."""
    vector_totals: Params
    """[layers, ...]: gradients of the vectors so far (`run_segment`), with this microbatch's of the
    layers visited before that one."""
    float_grads: list[jax.Array]
    """Summed over the layers visited so far."""


class _Residuals(NamedTuple):
    """The arrays that the forward pass keeps for the backward pass."""

    vectors: Params
    other_params: Params
    floats: list[jax.Array]
    last_matrices: Params
    """The matrices of the last layer, with which the backward pass starts."""
    residuals_by_run: list[Any]
    """For each run of layers, stacked by period: a pair (residuals of a layer, its matrices or {})
    for each layer of a period."""


class _GatheredLayers(LayerCollectives):
    """The layers of a segment, with a backward pass of their own."""

    def __init__(
        self,
        layout: ModelLayout,
        model: Model,
        segment: Segment,
        ctx: Context,
        first_layer: int,
        like: jax.Array,
    ) -> None:
        """like: an array with the type and shape of the layers' input."""
        super().__init__(layout, segment.name)
        self.segment = segment
        self.runs = segment.runs()
        self.ctx = ctx
        self.first_layer = first_layer
        self.like = jax.ShapeDtypeStruct(like.shape, like.dtype)
        self.x_spec = self.shard.spec("activations", ctx.residual)

        module = getattr(model, segment.name)
        self.graph, parameters, self.buffers = nnx.split(module, nnx.Param, ...)
        leaves, self.tree = jax.tree.flatten(parameters)
        names = [name for name in layout.shapes if segment_of(name) == segment.name]
        self.names = [name for name in names if name not in layout.buffers]
        weights = dict(zip(self.names, leaves, strict=True))
        gathered_names = layout.flat.gathered_names
        self.other_params: Params = {n: w for n, w in weights.items() if n not in gathered_names}

        self.shared, self.shared_tree = jax.tree.flatten(ctx.shared)
        self.floats = [leaf for leaf in self.shared if _is_float(leaf)]

    def __call__(
        self, vectors: Params, vector_totals: Params, x: jax.Array
    ) -> tuple[jax.Array, Sums]:
        """Returns (output, sums by layer: [periods, period, ...])."""

        # A custom VJP: the backward loop gathers and sums a layer ahead, which the transpose of the
        # forward loop would not.
        @jax.custom_vjp
        def run(
            vectors: Params,
            vector_totals: Params,
            other_params: Params,
            floats: list[jax.Array],
            x: jax.Array,
        ) -> tuple[jax.Array, Sums]:
            return self.forward(vectors, other_params, floats, x, save=False)[0]

        def forward(
            vectors: Params,
            vector_totals: Params,
            other_params: Params,
            floats: list[jax.Array],
            x: jax.Array,
        ) -> tuple[tuple[jax.Array, Sums], tuple[_Residuals, Params]]:
            output, residuals = self.forward(vectors, other_params, floats, x, save=True)
            return output, (residuals, vector_totals)

        def backward(
            kept: tuple[_Residuals, Params], cotangents: tuple[jax.Array, Sums]
        ) -> tuple[Any, ...]:
            residuals, vector_totals = kept
            no_gradient = None  # of the vectors, whose totals have it
            return no_gradient, *self.backward(residuals, vector_totals, *cotangents)

        run.defvjp(forward, backward)
        return run(vectors, vector_totals, self.other_params, self.floats, x)

    # The two loops.

    def forward(
        self,
        vectors: Params,
        other_params: Params,
        floats: list[jax.Array],
        x: jax.Array,
        save: bool,
    ) -> tuple[tuple[jax.Array, Sums], _Residuals]:
        """Returns ((output, sums), what the backward pass reads), without residuals of layers
        unless `save`.
        """
        last_row = self.segment.n_layers - 1

        def run_period(
            run: LayerRun, carry: _ForwardCarry, number: jax.Array
        ) -> tuple[_ForwardCarry, tuple[Sums, list[Any]]]:
            x, matrices = carry
            period_sums = []
            period_residuals = []
            for position in range(self.segment.period):
                row = number * self.segment.period + position
                # The all-gather of the next layer, beside this one's compute. The last layer's
                # matrices are gathered once more, for the backward pass; in a conditional they
                # would be waited for.
                next_row = jnp.minimum(row + 1, last_row)
                next_matrices, done = self.gather(vectors, next_row, self.finished(x, self.x_spec))

                layer = partial(self.layer, run.remat, row, position)
                inputs = (self.ordered(x, done), matrices, row_of(other_params, row), floats)
                if save:
                    (x, sums), pull = jax.vjp(layer, *inputs)
                    residuals = saved(pull, self.saves(run.remat)[position])
                    period_residuals.append((residuals, matrices if run.keep else {}))
                else:
                    x, sums = layer(*inputs)

                # The barrier makes the gather end with this layer: the next one needs it.
                x, matrices = lax.optimization_barrier((x, next_matrices))
                period_sums.append(sums)
            return _ForwardCarry(x, matrices), (stack.stacked_sums(period_sums), period_residuals)

        # The first layer's gather has no layer to hide behind.
        first_matrices, _ = self.gather(vectors, jnp.int32(0), self.finished(x, self.x_spec))
        carry = _ForwardCarry(x, first_matrices)
        run_sums = []
        residuals_by_run = []
        for run in self.runs:
            carry, (sums, run_residuals) = lax.scan(
                partial(run_period, run), carry, self.periods(run), unroll=self.segment.unroll
            )
            run_sums.append(sums)
            residuals_by_run.append(run_residuals)
        layer_sums = jax.tree.map(lambda *parts: jnp.concatenate(parts), *run_sums)
        residuals = _Residuals(vectors, other_params, floats, carry.matrices, residuals_by_run)
        return (carry.x, layer_sums), residuals

    def backward(
        self, residuals: _Residuals, vector_totals: Params, dx: jax.Array, d_sums: Sums
    ) -> tuple[Params, Params, list[jax.Array], jax.Array]:
        """Returns the new totals of the vectors' gradients, and the gradients of the other
        parameters, of the floats, and of the input.
        """
        vectors, other_params, floats, last_matrices, residuals_by_run = residuals
        n_layers = self.segment.n_layers
        period = self.segment.period

        def run_period(
            run: LayerRun, carry: _BackwardCarry, xs: tuple[jax.Array, list[Any], Sums]
        ) -> tuple[_BackwardCarry, Params]:
            dx, matrices, matrix_grads, vector_totals, float_grads = carry
            number, period_residuals, period_d_sums = xs
            period_other_grads = []
            for position in reversed(range(period)):
                row = number * period + position
                layer_residuals, kept_matrices = period_residuals[position]

                # Two collectives beside this layer's compute. The reduce-scatter is that of the
                # layer visited before; in the first iteration it sums zeros.
                reduced, done = self.reduce(matrix_grads, self.finished(dx, self.x_spec))
                if run.keep:
                    next_matrices = matrices  # the next layer has kept its own
                else:
                    next_matrices, done = self.gather(vectors, jnp.maximum(row - 1, 0), done)

                # `restored` puts the saved residuals into the vjp at an input of zeros. XLA then
                # removes what depended on that input, and recomputes only what was not saved.
                layer = partial(self.layer, run.remat, row, position)
                zeros = jnp.zeros(self.like.shape, self.like.dtype)
                layer_matrices = kept_matrices or matrices
                (_, sums), pull = jax.vjp(
                    layer, zeros, layer_matrices, row_of(other_params, row), floats
                )
                pull = restored(pull, self.saves(run.remat)[position], layer_residuals)
                layer_d_sums = {name: period_d_sums[name][position] for name in sums}
                dx, matrix_grads, other_grads, layer_float_grads = pull(
                    (self.ordered(dx, done), layer_d_sums)
                )

                # The barrier makes both collectives end with this layer.
                dx, matrix_grads, matrices, reduced = lax.optimization_barrier(
                    (self.pinned(dx), self.constrain_matrices(matrix_grads), next_matrices, reduced)
                )
                # In the first iteration row + 1 wraps around to 0, to which it adds zeros.
                vector_totals = with_row_added(vector_totals, (row + 1) % n_layers, reduced)
                float_grads = jax.tree.map(jnp.add, float_grads, layer_float_grads)
                period_other_grads.insert(0, other_grads)
            carry = _BackwardCarry(dx, matrices, matrix_grads, vector_totals, float_grads)
            return carry, jax.tree.map(lambda *rows: jnp.stack(rows), *period_other_grads)

        matrix_zeros = {name: jnp.zeros(m.shape, m.dtype) for name, m in self.abstract.items()}
        carry = _BackwardCarry(
            dx,
            last_matrices,
            self.constrain_matrices(matrix_zeros),
            vector_totals,
            jax.tree.map(jnp.zeros_like, floats),
        )
        run_other_grads = []
        later_run_keeps = False
        for run, run_residuals in zip(reversed(self.runs), reversed(residuals_by_run), strict=True):
            run_periods = slice(run.begin // period, run.end // period)
            run_d_sums = jax.tree.map(lambda s, rows=run_periods: s[rows], d_sums)
            if later_run_keeps and not run.keep:
                # The layers after this run have kept their matrices, and so gathered none for it.
                done = self.finished(carry.dx, self.x_spec)
                matrices, _ = self.gather(vectors, jnp.int32(run.end - 1), done)
                carry = carry._replace(matrices=matrices)
            later_run_keeps = run.keep
            carry, other_grads = lax.scan(
                partial(run_period, run),
                carry,
                (self.periods(run), run_residuals, run_d_sums),
                reverse=True,
                unroll=self.segment.unroll,
            )
            run_other_grads.insert(0, other_grads)

        other_grads = jax.tree.map(lambda *parts: jnp.concatenate(parts), *run_other_grads)
        # The first layer's reduce-scatter has no layer to hide behind.
        reduced, _ = self.reduce(carry.matrix_grads, self.finished(carry.dx, self.x_spec))
        vector_totals = with_row_added(carry.vector_totals, jnp.int32(0), reduced)
        # [periods, period, ...] -> [layers, ...]
        other_grads = {name: g.reshape(-1, *g.shape[2:]) for name, g in other_grads.items()}
        return vector_totals, other_grads, carry.float_grads, carry.dx

    # One layer.

    def layer(
        self,
        policy: Remat,
        row: jax.Array,
        position: int,
        x: jax.Array,
        matrices: Params,
        other_params: Params,
        floats: list[jax.Array],
    ) -> tuple[jax.Array, Sums]:
        """Returns (output, sums) of the layer in a row, the one at `position` in its period."""

        def run(
            x: jax.Array, matrices: Params, other_params: Params, floats: list[jax.Array]
        ) -> tuple[jax.Array, Sums]:
            weights = {**matrices, **other_params}
            parameters = jax.tree.unflatten(self.tree, [weights[name] for name in self.names])
            layer = nnx.merge(self.graph, parameters, row_of(self.buffers, row))
            ctx = dataclasses.replace(
                self.ctx,
                shared=self.with_floats(floats),
                number=self.first_layer + row,
                place=position,
            )
            output = stack.called(layer, self.segment, self.shard)(x, ctx)
            y, _, sums = layer_output(layer, x, output)
            return y, sums

        return remat(policy, self.segment.unroll)(run)(x, matrices, other_params, floats)

    def with_floats(self, floats: list[jax.Array]) -> Any:
        """Returns the context's shared arrays, with these floats in place of its own."""
        remaining = iter(floats)
        leaves = [next(remaining) if _is_float(leaf) else leaf for leaf in self.shared]
        return jax.tree.unflatten(self.shared_tree, leaves)

    def saves(self, policy: Remat) -> list[list[bool]]:
        """Returns, for each layer of a period and each of its residuals, whether the forward pass
        saves it.
        """

        def residuals(position: int, x: jax.Array, *inputs: Any) -> list[jax.Array]:
            layer = partial(self.layer, policy, jnp.int32(0), position)
            return jax.tree.leaves(jax.vjp(layer, x, *inputs)[1])

        other_params = jax.eval_shape(partial(row_of, row=0), self.other_params)
        inputs = (self.abstract, other_params, self.floats)
        positions = range(self.segment.period)
        return [
            depends_on_first(partial(residuals, position), self.like, *inputs)
            for position in positions
        ]

    def periods(self, run: LayerRun) -> jax.Array:
        """Returns the numbers of the periods of a run's layers."""
        return jnp.arange(run.begin // self.segment.period, run.end // self.segment.period)

    @cached_property
    def types(self) -> dict[str, Any]:
        """The types in which the layers get their matrices: float32 if gradients shall leave the
        matmuls so.
        """
        if self.shard.rules.reduction == "float32":
            return dict.fromkeys(super().types, jnp.dtype("float32"))
        return super().types

    def pinned(self, x: jax.Array) -> jax.Array:
        """Returns the gradient of an activation, sharded as the activation is."""
        return self.shard(x, *self.ctx.residual)


def _is_float(x: jax.Array) -> bool:
    return jnp.issubdtype(x.dtype, jnp.inexact)
