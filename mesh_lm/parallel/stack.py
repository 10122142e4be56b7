"""How the trainer runs a model: embed -> segments -> loss, with a scan over the layers of each
segment. It adds up all sums.
"""

from __future__ import annotations

import contextlib
import dataclasses
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

LayerCarry = tuple[jax.Array, Any]
"""(activations [B, S, D] or [S, B, D], cache), which go from layer to layer."""


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


def forward(
    bind: Callable[[Any], Model],
    segments: Sequence[Segment],
    params: Any,
    batch: Batch,
    dropout: Dropout | None = None,
    scale: jax.Array | float = 1.0,
    sinks: Any = None,
    shared: Any = None,
    vector_totals: Any = None,
    run: Callable | None = None,
) -> tuple[jax.Array, Sums]:
    """Returns (objective * scale, sums) of one microbatch.

    Arrays among the sums have a segment's layers as leading dimension: "moe/load" [L, E].

    Args:
      bind: makes the module from its parameters and buffers, a dict by name.
      segments: those of the model, in order.
      sinks: zeros that receive the gradients of stacked parameters, see `Sinks`.
      shared: other parameters to differentiate, which replace those in `params`.
      vector_totals: sums of gradients to which `run` adds, and which are differentiated for that
        (`mesh_lm.parallel.zero3.run_segment`).
      run: runs a segment, with `vector_totals` as its first argument and then those of
        `run_segment`; None: `run_segment`.
    """
    params = {**params, **(shared or {})}
    model = bind(params)
    bound_sinks = Sinks(bind({**params, **sinks})) if sinks else None
    ctx = Context(batch, dropout, model.prepare(batch))
    x = model.embed(batch, dropout)
    total: Sums = {}
    first_layer = 0
    run_layers = partial(run, vector_totals) if run else run_segment
    for segment in segments:
        with segment_scope(segment, segments):
            x, _, sums = run_layers(model, segment, x, ctx, first_layer, sinks=bound_sinks)
        total = add_sums(total, sums)
        first_layer += segment.n_layers
    total = add_sums(total, loss_sums(model, x, batch, dropout))
    return total["objective"] * scale, total


def hidden_states(
    model: Model,
    segments: Sequence[Segment],
    batch: Batch,
    cache: Any = None,
    start: int | jax.Array = 0,
) -> tuple[jax.Array, Any]:
    """Returns (activations after the last layer, cache), without dropout, for generation and
    scoring.

    batch: its weights default to 0, since no loss is computed. cache, start: as in `Context`.
    """
    batch = {"weights": jnp.zeros(batch["tokens"].shape, jnp.float32), **batch}
    x = model.embed(batch, None)
    ctx = Context(batch, None, model.prepare(batch), cache=cache, start=start)
    first_layer = 0
    for segment in segments:
        ctx = dataclasses.replace(ctx, cache=cache)
        x, cache, _ = run_segment(model, segment, x, ctx, first_layer)
        first_layer += segment.n_layers
    return x, cache


def used_outside(
    bind: Callable[[Any], Model], params: Any, layers: Collection[str], batch: Batch
) -> list[str]:
    """Returns the names of those parameters of layers that the model also uses in prepare, embed or
    loss.
    """

    def without_layers(layer_params: Any) -> Sums:
        model = bind({**params, **layer_params})
        model.prepare(batch)
        return model.loss(model.embed(batch, None), batch, None)

    names = sorted(layers)
    jaxpr = jax.make_jaxpr(without_layers)({name: params[name] for name in names}).jaxpr
    operands = {id(operand) for equation in jaxpr.eqns for operand in equation.invars}
    return [name for name, x in zip(names, jaxpr.invars, strict=True) if id(x) in operands]


def loss_sums(model: Model, x: jax.Array, batch: Batch, dropout: Dropout | None) -> Sums:
    """Returns the sums that the model's loss returns. Raises ConfigError for missing sums, and for
    arrays: layers may return them.
    """
    sums = model.loss(x, batch, dropout)
    require_sums(model, sums)
    return sums


def segment_scope(
    segment: Segment, segments: Collection[Any]
) -> contextlib.AbstractContextManager[Any]:
    """Returns the named scope around a segment's layers, by which the lab tells segments apart;
    none in a model that has only one.
    """
    return jax.named_scope(segment.name) if len(segments) > 1 else contextlib.nullcontext()


# One segment.


@jax.named_scope("layers")
def run_segment(
    model: Model,
    segment: Segment,
    x: jax.Array,
    ctx: Context,
    first_layer: int | jax.Array = 0,
    rows: RowRange | None = None,
    sinks: Sinks | None = None,
) -> tuple[jax.Array, Any, Sums]:
    """Returns (x, cache, sums) after a segment: applies its layers, whose parameters the model
    holds, one after another.

    Args:
      x: [B, S, D], sharded like the residual stream.
      first_layer: the number of the first of these layers in the whole model.
      rows: the rows of the stacked parameters to read; None: all, and all are layers.
      sinks: what receives the gradients of the segment's parameters, which themselves then have
        none.
    """
    if rows is None and ctx.cache is None:
        runs = segment.runs()
        if len(runs) > 1:
            return _run_by_policy(model, segment, runs, x, ctx, first_layer, sinks)
    x, ctx = to_layer_order(model, segment, x, ctx)
    stacked = nnx.split(getattr(model, segment.name), nnx.Param, ...)[1]
    if rows is None:
        rows = RowRange(0, jax.tree.leaves(stacked)[0].shape[0])
    weights = None
    if segment.remat == "none":
        # The scan slices the weights, and the backward pass reads the stack itself.
        weights = _by_period(segment.period, _read_rows(stacked, rows))
    run_period = one_period(model, segment, ctx, first_layer, rows, sinks)
    periods = jnp.arange(0, rows.size, segment.period), weights
    (x, cache), layer_sums = lax.scan(run_period, (x, ctx.cache), periods, unroll=segment.unroll)
    return batch_first(x, ctx), cache, totals(segment.name, layer_sums)


def one_period(
    model: Model,
    segment: Segment,
    ctx: Context,
    first_layer: int | jax.Array,
    rows: RowRange,
    sinks: Sinks | None = None,
) -> Callable[[LayerCarry, tuple[jax.Array, Any]], tuple[LayerCarry, Sums]]:
    """Returns a function ((x, cache), (row, weights)) -> ((x, cache), sums) for `lax.scan` that
    applies the layers of one period, the first of which is in that row.

    x and ctx: as the layers take them. row: counted from the first that the pass reads. weights:
    the parameters of these layers; None: each layer reads its row inside the rematerialised
    function. Read outside, the weights would be saved as residuals, a copy of the model.
    """
    graph, stacked, buffers = nnx.split(getattr(model, segment.name), nnx.Param, ...)
    period = segment.period
    stacked_sinks = working = None
    if sinks:
        stacked_sinks = nnx.split(getattr(sinks.model, segment.name), nnx.Param, ...)[1]
        working = sinks.working
    keep_float32 = model.shard.rules.reduction == "float32"

    # XLA:CPU deadlocks at permutes in a conditional that some devices skip, so layers with a ring
    # run in padding rows, too.
    ring_axes = (axis for axis, exchange in model.shard.rules.context.items() if exchange == "ring")
    runs_padding = any(model.shard.mesh.shape[axis] > 1 for axis in ring_axes)

    # The conditional is inside the rematerialised function, too, so that it saves no weights.
    def layer(
        x: jax.Array, cache: Any, weights: Any, row: jax.Array, i: int, is_stack: bool
    ) -> tuple[jax.Array, Any, Sums]:
        def read_row(tree: Any) -> Any:
            return jax.tree.map(
                lambda w: lax.dynamic_index_in_dim(w, rows.start + row + i, keepdims=False), tree
            )

        if is_stack:
            weights = read_row(weights)
        elif period > 1:
            weights = jax.tree.map(lambda w: w[i], weights)
        if sinks is not None:
            attach_sink = partial(_with_sink, working=working, keep_float32=keep_float32)
            weights = jax.tree.map(attach_sink, weights, read_row(stacked_sinks))
        number = first_layer + (row + i - rows.skip)
        layer_ctx = dataclasses.replace(ctx, number=number, place=i, cache=cache)

        def build() -> Layer:
            return nnx.merge(graph, weights, read_row(buffers))

        if rows.count is None:
            module = build()
            return layer_output(module, x, called(module, segment, model.shard)(x, layer_ctx))

        # Branches must agree on the sharding.
        def pinned(x: jax.Array, cache: Any, sums: Sums) -> tuple[jax.Array, Any, Sums]:
            return model.shard(x, *ctx.residual), cache, sums

        def run() -> tuple[jax.Array, Any, Sums]:
            module = build()
            output = called(module, segment, model.shard)(x, layer_ctx)
            return pinned(*layer_output(module, x, output))

        def idle() -> tuple[jax.Array, Any, Sums]:
            return pinned(x, cache, _zeros(jax.eval_shape(run)[2]))

        is_layer = (row + i >= rows.skip) & (row + i < rows.skip + rows.count)
        if not runs_padding:
            return lax.cond(is_layer, run, idle)
        new_x, new_cache, sums = run()
        x, cache = jax.tree.map(
            lambda new, old: jnp.where(is_layer, new, old), (new_x, new_cache), (x, cache)
        )
        return pinned(x, cache, jax.tree.map(lambda s: jnp.where(is_layer, s, 0), sums))

    def run_period(carry: LayerCarry, scanned: tuple[jax.Array, Any]) -> tuple[LayerCarry, Sums]:
        x, cache = carry
        row, weights = scanned
        is_stack = weights is None
        layer_sums = []
        for i in range(period):
            run = remat(segment.remat, segment.unroll)(partial(layer, i=i, is_stack=is_stack))
            x, cache, sums = run(x, cache, stacked if is_stack else weights, row)
            layer_sums.append(sums)
        return (x, cache), stacked_sums(layer_sums)

    return run_period


def called(
    layer: Layer, segment: Segment, shard: Shard
) -> Callable[[jax.Array, Context], tuple[jax.Array, Any, Sums]]:
    """Returns the layer as it is called: in two halves of the sequences if its segment asks for
    that.
    """
    return partial(in_halves, layer, shard) if segment.batch_halves else layer


def _run_by_policy(
    model: Model,
    segment: Segment,
    runs: Sequence[LayerRun],
    x: jax.Array,
    ctx: Context,
    first_layer: int | jax.Array,
    sinks: Sinks | None,
) -> tuple[jax.Array, Any, Sums]:
    """`run_segment` of layers with different policies of rematerialisation, a run of layers with
    the same policy at a time.
    """
    run_sums = []
    for run in runs:
        part = dataclasses.replace(segment, remat=run.remat, remat_layers=None, kept_layers=0)
        rows = RowRange(run.begin, run.end - run.begin)
        x, _, sums = run_segment(model, part, x, ctx, first_layer + run.begin, rows, sinks)
        run_sums.append(sums)
    arrays = {
        name: jnp.concatenate([sums[name] for sums in run_sums])
        for name, value in run_sums[0].items()
        if value.ndim > 0
    }
    scalars: Sums = {}
    for sums in run_sums:
        scalars = add_sums(
            scalars, {name: value for name, value in sums.items() if value.ndim == 0}
        )
    return x, None, scalars | arrays


def to_layer_order(
    model: Model, segment: Segment, x: jax.Array, ctx: Context
) -> tuple[jax.Array, Context]:
    """Returns the segment's input [B, S, D] and context as its layers take them: [S, B, D] under
    the conditions of `Layer`.
    """
    supported = vars(type(getattr(model, segment.name))).get("sequence_first", False)
    if supported and ctx.cache is None and model.shard.axes_for("seq_resid"):
        return x.swapaxes(0, 1), dataclasses.replace(ctx, tokens=("seq", "batch"))
    return x, ctx


def batch_first(x: jax.Array, ctx: Context) -> jax.Array:
    """Returns the output of a segment's layers as [B, S, D]."""
    return x.swapaxes(0, 1) if ctx.tokens[0] == "seq" else x


def _read_rows(stacked: Any, rows: RowRange) -> Any:
    """Returns the rows of each array that a pass reads."""

    def read(w: jax.Array) -> jax.Array:
        if len(w) == rows.size:
            return w
        return lax.dynamic_slice_in_dim(w, rows.start, rows.size)

    return jax.tree.map(read, stacked)


def _by_period(period: int, tree: Any) -> Any:
    """Returns a tree of stacks [n, ...] as [n / period, period, ...]; unchanged for a period of
    1.
    """
    if period == 1:
        return tree
    return jax.tree.map(lambda w: w.reshape(-1, period, *w.shape[1:]), tree)


def _zeros(like: Any) -> Any:
    return jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), like)


# Sums.


def add_sums(a: Sums, b: Sums) -> Sums:
    """Returns the sum of two dicts of sums, entry by entry. A missing entry counts as zero."""
    total = a | b
    for name in a:
        if name in b:
            total[name] = a[name] + b[name]
    return total


def stacked_sums(layer_sums: Sequence[Sums]) -> Sums:
    """Returns the sums of the layers of a period, [period, ...]; zeros where a layer has none of
    that name.
    """
    zeros = {name: jnp.zeros_like(value) for sums in layer_sums for name, value in sums.items()}
    return {
        name: jnp.stack([sums.get(name, zero) for sums in layer_sums])
        for name, zero in zeros.items()
    }


def totals(segment: str, layer_sums: Sums) -> Sums:
    """Returns the sums of a segment, from those of its layers, [periods, period, ...]: scalars
    added up, arrays with the layers in front.
    """
    total = {name: x.sum() for name, x in layer_sums.items() if x.ndim == 2}
    for name, x in layer_sums.items():
        if x.ndim > 2:
            total[f"{segment}/{name}"] = x.reshape(-1, *x.shape[2:])
    return total


# The derivative is that of the sink alone, which has the weight's place (`Sinks`).
@partial(jax.custom_jvp, nondiff_argnums=(3,))
def _with_sink(
    weight: jax.Array, sink: jax.Array, working: jax.Array | None, keep_float32: bool
) -> jax.Array:
    """Returns the weight, as float32 if `keep_float32`. Its gradient goes to the sink, or nowhere
    if `working` is False.
    """
    return weight.astype(jnp.float32) if keep_float32 else weight


@_with_sink.defjvp
def _(
    keep_float32: bool, primals: tuple[Any, ...], tangents: tuple[Any, ...]
) -> tuple[jax.Array, jax.Array]:
    weight, _, working = primals
    tangent = tangents[1]
    out = weight.astype(jnp.float32) if keep_float32 else weight
    if working is not None:
        tangent = jnp.where(working, tangent, 0)
    return out, tangent.astype(out.dtype)
