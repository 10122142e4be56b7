"""How the trainer runs a model: embed -> segments -> loss, with a scan over the layers of each
segment. It adds up all sums.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from mesh_lm.model.contract import Batch, Context, Layer, Model, Sums, layer_output, require_sums
from mesh_lm.model.dropout import Dropout
from mesh_lm.parallel.halves import in_halves
from mesh_lm.parallel.remat import remat
from mesh_lm.schedules.segments import LayerRun, Segment
from sharding_rules import Shard


def forward(
    bind: Callable[[Any], Model],
    segments: Sequence[Segment],
    params: Any,
    batch: Batch,
    dropout: Dropout | None = None,
    scale: jax.Array | float = 1.0,
    sinks: Any = None,
    shared: Any = None,
    own: Any = None,
    run: Callable | None = None,
) -> tuple[jax.Array, Sums]:
    """(objective * scale, sums) of one microbatch. Arrays among the sums have a segment's layers as
    leading dimension: "moe/load" [L, E].

    Args:
      bind: makes the module from its parameters and buffers, a dict by name. segments: those of the
      model, in order. sinks: zeros that receive the gradients of stacked parameters, see `Sinks`.
      shared: other parameters to differentiate, which replace those in `params`. run: runs a
      segment, with `own` as its first argument and then those of `run_segment`; None:
      `run_segment`. own: what `run` reads besides the model, to differentiate, too.
    """
    params = {**params, **(shared or {})}
    model, total, first = bind(params), {}, 0
    sunk = Sinks(bind({**params, **sinks})) if sinks else None
    ctx = Context(batch, dropout, model.prepare(batch))
    x = model.embed(batch, dropout)
    for segment in segments:
        with segment_scope(segment, segments):
            x, _, sums = (partial(run, own) if run else run_segment)(
                model, segment, x, ctx, first, sinks=sunk
            )
        total, first = add_sums(total, sums), first + segment.n_layers
    total = add_sums(total, loss_sums(model, x, batch, dropout))
    return total["objective"] * scale, total


def used_outside(
    bind: Callable[[Any], Model], params: Any, layers: Collection[str], batch: Batch
) -> list[str]:
    """The names of those parameters of layers that the model also uses in prepare, embed or
    loss.
    """

    def ends(inside: Any) -> Sums:
        model = bind({**params, **inside})
        model.prepare(batch)
        return model.loss(model.embed(batch, None), batch, None)

    jaxpr = jax.make_jaxpr(ends)({name: params[name] for name in sorted(layers)}).jaxpr
    used = {id(operand) for equation in jaxpr.eqns for operand in equation.invars}
    return [
        name for name, taken in zip(sorted(layers), jaxpr.invars, strict=True) if id(taken) in used
    ]


def loss_sums(model: Model, x: jax.Array, batch: Batch, dropout: Dropout | None) -> Sums:
    """The sums that the model's loss returns. Raises ConfigError for missing sums, and for arrays:
    layers may return them.
    """
    sums = model.loss(x, batch, dropout)
    require_sums(model, sums)
    return sums


def hidden_states(
    model: Model,
    segments: Sequence[Segment],
    batch: Batch,
    cache: Any = None,
    start: int | jax.Array = 0,
) -> tuple[jax.Array, Any]:
    """(activations after the last layer, cache), without dropout, for generation and scoring.
    cache, start: as in `Context`.

    batch: its weights default to 0, since no loss is computed.
    """
    batch = {"weights": jnp.zeros(batch["tokens"].shape, jnp.float32), **batch}
    x, first, ctx = (
        model.embed(batch, None),
        0,
        Context(batch, None, model.prepare(batch), cache=cache, start=start),
    )
    for segment in segments:
        x, cache, _ = run_segment(model, segment, x, dataclasses.replace(ctx, cache=cache), first)
        first += segment.n_layers
    return x, cache


def segment_scope(
    segment: Segment, segments: Collection[Any]
) -> contextlib.AbstractContextManager[Any]:
    """The named scope around a segment's layers, by which the lab tells segments apart; none in a
    model that has only one.
    """
    return jax.named_scope(segment.name) if len(segments) > 1 else contextlib.nullcontext()


def add_sums(a: Sums, b: Sums) -> Sums:
    """The sum of two dicts of sums, entry by entry. A missing entry counts as zero."""
    return {
        name: a[name] + b[name] if name in a and name in b else (a | b)[name] for name in (a | b)
    }


@dataclasses.dataclass(frozen=True)
class RowRange:
    """The rows of a segment's stacked parameters that a pass reads, and which of them are its
    layers; int32 arrays in a pipeline.
    """

    start: int | jax.Array
    """The first row that is read."""
    size: int
    """The number of rows that are read."""
    skip: int | jax.Array = 0
    """The number of leading rows that belong to earlier layers."""
    count: int | jax.Array | None = None
    """The number of layers after those; remaining rows are skipped. None: all rows are layers."""


@dataclasses.dataclass(frozen=True)
class Sinks:
    """Float32 zeros, in memory like the stacked parameters, that are differentiated in their place.

    They make gradients float32 whatever type the parameters have. Each layer reads its own row of
    them, so the transpose of that read adds the layer's gradient in place, if the caller keeps the
    sum in a `jax.Ref` (`VJP.with_refs`). The zeros themselves are never used.
    """

    model: Model
    """The model with the zeros in place of its stacked parameters."""
    working: jax.Array | None = None
    """False where the pass has no work, as in an idle slot of a pipeline: its gradients, finite or
    not, count as zero."""


RETURNED = jax.ad.GradValue()  # pyright: ignore[reportPrivateImportUsage]
"""An argument of `VJP.with_refs`, in place of a Ref: the gradient is returned."""


@jax.named_scope("layers")
def run_segment(
    model: Model,
    segment: Segment,
    x: jax.Array,
    ctx: Context,
    first: int | jax.Array = 0,
    rows: RowRange | None = None,
    sinks: Sinks | None = None,
) -> tuple[jax.Array, Any, Sums]:
    """(x, cache, sums) after a segment: applies its layers, whose parameters the model holds, one
    after another.

    Args:
      x: [B, S, D], sharded like the residual stream. first: the number of the first of these layers
      in the whole model. rows: the rows of the stacked parameters to read; None: all, and all are
      layers. sinks: what receives the gradients of the segment's parameters, which themselves then
      have none.
    """
    if rows is None and ctx.cache is None and len(runs := segment.runs()) > 1:
        return _run_each(model, segment, runs, x, ctx, first, sinks)
    x, ctx = as_layers_take_it(model, segment, x, ctx)
    stacked = nnx.split(getattr(model, segment.name), nnx.Param, ...)[1]
    rows = rows or RowRange(0, jax.tree.leaves(stacked)[0].shape[0])
    n, own = rows.size, None
    if segment.remat == "none":
        # The scan slices the weights, and the backward pass reads the stack itself.
        own = _by_period(
            segment.period,
            jax.tree.map(
                lambda w: w if len(w) == n else lax.dynamic_slice_in_dim(w, rows.start, n), stacked
            ),
        )
    run = one_period(model, segment, ctx, first, rows, sinks)
    (x, cache), by_layer = lax.scan(
        run, (x, ctx.cache), (jnp.arange(0, n, segment.period), own), unroll=segment.unroll
    )
    return batch_first(x, ctx), cache, totals(segment.name, by_layer)


def one_period(
    model: Model,
    segment: Segment,
    ctx: Context,
    first: int | jax.Array,
    rows: RowRange,
    sinks: Sinks | None = None,
) -> Callable[[tuple[jax.Array, Any], tuple[jax.Array, Any]], tuple[tuple[jax.Array, Any], Sums]]:
    """A function ((x, cache), (row, own)) -> ((x, cache), sums) for `lax.scan` that applies the
    layers of one period, the first of which is in that row.

    x and ctx: as the layers take them. row: counted from the first that the pass reads. own: the
    parameters of these layers; None: each layer reads its row inside the rematerialised function.
    Read outside, the weights would be saved as residuals, a copy of the model.
    """
    graph, stacked, buffers = nnx.split(getattr(model, segment.name), nnx.Param, ...)
    period, wide = segment.period, model.shard.rules.reduction == "float32"
    zeros, working = (
        (nnx.split(getattr(sinks.model, segment.name), nnx.Param, ...)[1], sinks.working)
        if sinks
        else (None, None)
    )

    # XLA:CPU deadlocks at permutes in a conditional that some devices skip, so layers with a ring
    # run in padding rows, too.
    ring_axes = (axis for axis, exchange in model.shard.rules.context.items() if exchange == "ring")
    masked = any(model.shard.mesh.shape[axis] > 1 for axis in ring_axes)

    # The conditional is inside the rematerialised function, too, so that it saves no weights.
    def layer(
        x: jax.Array, cache: Any, stack: Any, row: jax.Array, i: int, by_row: bool
    ) -> tuple[jax.Array, Any, Sums]:
        def of_layer(tree: Any) -> Any:
            return jax.tree.map(
                lambda w: lax.dynamic_index_in_dim(w, rows.start + row + i, keepdims=False), tree
            )

        weights = (
            of_layer(stack)
            if by_row
            else stack
            if period == 1
            else jax.tree.map(lambda w: w[i], stack)
        )
        if sinks is not None:
            weights = jax.tree.map(
                lambda w, sink: _with_sink(w, sink, working, wide), weights, of_layer(zeros)
            )
        layer_ctx = dataclasses.replace(
            ctx, number=first + (row + i - rows.skip), place=i, cache=cache
        )

        def module() -> Layer:
            return nnx.merge(graph, weights, of_layer(buffers))

        if rows.count is None:
            return layer_output(
                built := module(), x, called(built, segment, model.shard)(x, layer_ctx)
            )

        def run() -> tuple[jax.Array, Any, Sums]:
            return pinned(
                *layer_output(
                    built := module(), x, called(built, segment, model.shard)(x, layer_ctx)
                )
            )

        def idle() -> tuple[jax.Array, Any, Sums]:
            return pinned(
                x,
                cache,
                jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), jax.eval_shape(run)[2]),
            )

        active = (row + i >= rows.skip) & (row + i < rows.skip + rows.count)
        if not masked:
            return lax.cond(active, run, idle)
        y, after, sums = run()
        x, cache = jax.tree.map(
            lambda new, old: jnp.where(active, new, old), (y, after), (x, cache)
        )
        return pinned(x, cache, jax.tree.map(lambda s: jnp.where(active, s, 0), sums))

    # branches must agree on the sharding
    def pinned(x: jax.Array, cache: Any, sums: Sums) -> tuple[jax.Array, Any, Sums]:
        return model.shard(x, *ctx.residual), cache, sums

    def run_period(
        carry: tuple[jax.Array, Any], scanned: tuple[jax.Array, Any]
    ) -> tuple[tuple[jax.Array, Any], Sums]:
        (x, cache), (row, own), of_layers = carry, scanned, []
        by_row = own is None
        for i in range(period):
            x, cache, sums = remat(segment.remat, segment.unroll)(
                partial(layer, i=i, by_row=by_row)
            )(x, cache, stacked if by_row else own, row)
            of_layers.append(sums)
        return (x, cache), stacked_sums(of_layers)

    return run_period


def called(
    layer: Layer, segment: Segment, shard: Shard
) -> Callable[[jax.Array, Context], tuple[jax.Array, Any, Sums]]:
    """The layer as it is called: in two halves of the sequences if its segment asks for that."""
    return partial(in_halves, layer, shard) if segment.batch_halves else layer


def _run_each(
    model: Model,
    segment: Segment,
    runs: Sequence[LayerRun],
    x: jax.Array,
    ctx: Context,
    first: int | jax.Array,
    sinks: Sinks | None,
) -> tuple[jax.Array, Any, Sums]:
    """`run_segment` of layers with different policies of rematerialisation, a run of layers at a
    time.
    """
    by_run = []
    for run in runs:
        alike = dataclasses.replace(segment, remat=run.remat, remat_layers=None, kept_layers=0)
        x, _, sums = run_segment(
            model, alike, x, ctx, first + run.begin, RowRange(run.begin, run.end - run.begin), sinks
        )
        by_run.append(sums)
    joined = {
        name: jnp.concatenate([sums[name] for sums in by_run])
        for name, value in by_run[0].items()
        if value.ndim
    }
    return (
        x,
        None,
        {
            **functools.reduce(
                add_sums, ({n: v for n, v in sums.items() if not v.ndim} for sums in by_run)
            ),
            **joined,
        },
    )


def as_layers_take_it(
    model: Model, segment: Segment, x: jax.Array, ctx: Context
) -> tuple[jax.Array, Context]:
    """The segment's input [B, S, D] and context as its layers take them: [S, B, D] under the
    conditions of `Layer`.
    """
    supported = vars(type(getattr(model, segment.name))).get("sequence_first", False)
    if supported and ctx.cache is None and model.shard.axes_for("seq_resid"):
        return x.swapaxes(0, 1), dataclasses.replace(ctx, tokens=("seq", "batch"))
    return x, ctx


def batch_first(x: jax.Array, ctx: Context) -> jax.Array:
    """The output of a segment's layers as [B, S, D]."""
    return x.swapaxes(0, 1) if ctx.tokens[0] == "seq" else x


def _by_period(period: int, tree: Any) -> Any:
    """A tree of stacks [n, ...] as [n / period, period, ...]; unchanged for a period of 1."""
    return (
        tree if period == 1 else jax.tree.map(lambda w: w.reshape(-1, period, *w.shape[1:]), tree)
    )


def stacked_sums(of_layers: Sequence[Sums]) -> Sums:
    """The sums of the layers of a period, [period, ...]; zeros where a layer has none of that
    name.
    """
    like = {name: jnp.zeros_like(value) for sums in of_layers for name, value in sums.items()}
    return {
        name: jnp.stack([sums.get(name, zero) for sums in of_layers]) for name, zero in like.items()
    }


def totals(segment: str, by_layer: Sums) -> Sums:
    """The sums of a segment, from those of its layers, [periods, period, ...]: scalars added up,
    arrays with the layers in front.
    """
    scalars = {name: values.sum() for name, values in by_layer.items() if values.ndim == 2}
    return scalars | {
        f"{segment}/{name}": values.reshape(-1, *values.shape[2:])
        for name, values in by_layer.items()
        if values.ndim > 2
    }


@partial(jax.custom_jvp, nondiff_argnums=(3,))
def _with_sink(
    weight: jax.Array, sink: jax.Array, working: jax.Array | None, wide: bool
) -> jax.Array:
    """The weight, as float32 if `wide`. Its gradient goes to the sink, or nowhere if `working` is
    False.
    """
    return weight.astype(jnp.float32) if wide else weight


@_with_sink.defjvp
def _(
    wide: bool, primals: tuple[Any, ...], tangents: tuple[Any, ...]
) -> tuple[jax.Array, jax.Array]:
    (weight, _, working), tangent = primals, tangents[1]
    out = weight.astype(jnp.float32) if wide else weight
    return out, (tangent if working is None else jnp.where(working, tangent, 0)).astype(out.dtype)
