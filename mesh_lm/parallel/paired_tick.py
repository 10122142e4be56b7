"""A pipeline's tick whose slots run side by side: layer i of the forward pass beside layer n - 1 -
i of the backward pass.

With tensor parallelism each layer waits for collectives between its matmuls. The two passes of a
tick do not depend on each other, so XLA can hide the collectives of one layer behind the matmuls of
the other if both layers are in one loop body. Therefore the engine, not the model, loops over the
layers here, and no pass goes backward in the tick of its own forward pass (`compile_table`,
side_by_side).

Each iteration reads the residuals of its backward layer from their stash, and writes those of its
forward layer. A segment whose layers repeat a pattern goes by one period each iteration.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from mesh_lm.model import Context, Model, Sums
from mesh_lm.parallel import tick
from mesh_lm.parallel.layout import Params, segment_of
from mesh_lm.parallel.residuals import depends_on_first, restored, saved
from mesh_lm.parallel.stack import (
    RETURNED,
    Sinks,
    add_sums,
    batch_first,
    one_period,
    segment_scope,
    to_layer_order,
    totals,
)
from mesh_lm.parallel.stage import StageProgram, Work
from mesh_lm.parallel.stage_transfers import StageTransfers
from mesh_lm.parallel.tick import Carry, Columns
from mesh_lm.schedules.segments import Segment
from mesh_lm.schedules.table import Table

Stashes = dict[str, list[jax.Array]]
"""By segment, the residuals of its periods, each [slots + 1, periods, ...]."""


class Stretch(NamedTuple):
    """Iterations in which the forward pass stays in one segment and the backward pass in one,
    perhaps another.
    """

    forward: str
    first: int
    """The period in which the forward pass begins; it goes up."""
    backward: str
    last: int
    """The period in which the backward pass begins; it goes down."""
    length: int


class Pass(NamedTuple):
    """One pass through a chunk."""

    work: Work
    model: Model
    ctx: Context
    floats: list[jax.Array]
    """The arrays of `ctx.shared` that are differentiated: all floats, if layers use parameters
    through them."""
    pull: Callable[[list[jax.Array]], Params]
    """Gradients of `floats` -> gradients of the parameters that they depend on."""


class PassPair(NamedTuple):
    """The two passes of a tick, and the slots of the stashes for their residuals."""

    forward: Pass
    backward: Pass
    forward_slot: jax.Array
    backward_slot: jax.Array


class LayersCarry(NamedTuple):
    """The carry of the loop over the layers of a tick."""

    x: jax.Array
    """The input of the next forward layer."""
    dy: jax.Array
    """The gradient of the output of the next backward layer."""
    float_grads: list[jax.Array]
    """The gradients of the backward pass's `floats`, summed over the layers so far."""
    stashes: Stashes


def gradients(
    program: PairedProgram, table: Table, columns: Columns, transfers: StageTransfers
) -> tuple[Sums, Params]:
    """Returns `mesh_lm.parallel.tick.gradients`, with slots side by side."""
    residuals = tick.stash(table.n_outputs, program.zero_input), program.stashes(table.n_residuals)
    return tick.gradients(program, table, columns, transfers, _tick, residuals)


def _tick(
    table: Table,
    slots: str,
    stacked_grads: Mapping[str, Any],
    program: PairedProgram,
    carry: Carry,
    row: Columns,
) -> tuple[Carry, None]:
    """Runs a forward and a backward slot side by side. slots: which of them, "F", "FB" or "B"."""
    inputs, upstream, (outputs, stashes), y, dx, grads, total, arrays = carry
    pair = PassPair(
        program.new_pass(tick.work_of(row, "forward")),
        program.new_pass(tick.work_of(row, "backward")),
        row["forward_residual"],
        row["backward_residual"],
    )
    forward_work = pair.forward.work
    backward_work = pair.backward.work
    loss_grads: Params = {}
    loss_sums: Sums = {}

    # 1. Where the passes begin: the backward pass at the loss, the forward pass at the embedding.
    if "B" in slots:
        upstream = tick.write(upstream, dx, row["receive_grad"])
        with jax.named_scope("backward_slot"):
            output = tick.read(outputs, row["backward_output"])
            dy = tick.read(upstream, row["backward_grad"])
            loss_sums, loss_grads, dx = program.loss_gradient(backward_work, output, dy)
    if "F" in slots:
        with jax.named_scope("forward_slot"):
            y = program.input(forward_work, tick.read(inputs, row["forward_input"]))

    # 2. The layers of both.
    y, dx, stashes, sums, float_grads = program.run_layers(
        slots, pair, y, dx, stashes, stacked_grads
    )

    # 3. Where they end: hops to the next stage and to the one before, sums, gradients.
    if "F" in slots:
        inputs = tick.write(inputs, tick.hop(table, y, 1), row["receive_input"])
        outputs = tick.write(outputs, y, row["forward_output"])
        scalars, pass_arrays = program.split_sums(forward_work, sums)
        total = jax.tree.map(jnp.add, total, scalars)
        arrays = tick.with_arrays(program, arrays, pass_arrays, forward_work)
    if "B" in slots:
        with jax.named_scope("backward_slot"):
            shared_grads = program.shared_gradient(pair.backward, float_grads)
            embed_grads = program.embed_gradient(backward_work, dx)
        dx = tick.hop(table, dx, -1)
        with jax.named_scope("accumulate"):
            grads = tick.added(program, grads, shared_grads, loss_grads, embed_grads)
        total = jax.tree.map(jnp.add, total, loss_sums)
    return Carry(inputs, upstream, (outputs, stashes), y, dx, grads, total, arrays), None


class PairedProgram(StageProgram):
    """The program of one stage, whose passes run layer by layer."""

    @cached_property
    def segments(self) -> dict[str, Segment]:
        """The model's segments, by name, in order."""
        return {segment.name: segment for segment in self.layout.segments}

    @cached_property
    def periods(self) -> dict[str, int]:
        """The number of periods of each segment in one pass, padding included."""
        return {
            name: self.layout.stacks[name].rows_per_pass // segment.period
            for name, segment in self.segments.items()
        }

    def new_pass(self, work: Work) -> Pass:
        """Returns the pass that a slot does."""
        batch, dropout = self._microbatch(work)
        model = self._module({**self.shared, **self.layers})
        ctx = Context(batch, dropout, model.prepare(batch))
        if not self.layer_params:
            return Pass(work, model, ctx, [], lambda float_grads: {})

        def floats(inputs: Params) -> list[jax.Array]:
            shared = self._module({**self.shared, **inputs, **self.layers}).prepare(batch)
            return [x for x in jax.tree.leaves(shared) if _is_float(x)]

        _, shared_params = self._differentiated()
        values, pull = jax.vjp(floats, shared_params)
        return Pass(work, model, ctx, values, lambda float_grads: pull(float_grads)[0])

    def stashes(self, slots: int) -> Stashes:
        """Returns stashes of residuals with this number of slots and a scratch slot."""
        like: dict[str, list[jax.ShapeDtypeStruct]] = {}
        for name, (_, residuals) in self.saved.items():
            n_periods = self.periods[name]
            like[name] = [jax.ShapeDtypeStruct((n_periods, *x.shape), x.dtype) for x in residuals]
        return tick.stash(slots, like)

    def input(self, work: Work, stashed: jax.Array) -> jax.Array:
        """Returns the chunk's input, [B, S, D]. stashed: as `forward` takes it."""
        return self._input(work, stashed)

    def split_sums(self, work: Work, sums: Sums) -> tuple[Sums, Sums]:
        """Returns (all scalar sums, arrays of sums) of a forward pass's layers, zero where its slot
        is idle.
        """
        scalars = {name: x for name, x in sums.items() if x.ndim == 0}
        arrays = {name: x for name, x in sums.items() if x.ndim > 0}
        return self._full(self._unless_idle(work, scalars)), self._unless_idle(work, arrays)

    def shared_gradient(self, one: Pass, float_grads: list[jax.Array]) -> Params:
        """Returns the gradients of the other parameters that layers use, zero where the slot is
        idle.
        """
        return self._unless_idle(one.work, self._pin_params(one.pull(float_grads)))

    def run_layers(
        self,
        slots: str,
        pair: PassPair,
        x: jax.Array,
        dy: jax.Array,
        stashes: Stashes,
        stacked_grads: Mapping[str, Any],
    ) -> tuple[jax.Array, jax.Array, Stashes, Sums, list[jax.Array]]:
        """Returns (output of the forward pass, gradient of the backward pass's input, stashes, sums
        of the forward pass, gradients of the backward pass's `floats`).

        Args:
          slots: which run, "F", "FB" or "B"; the result of the other is what it was.
          x, dy: the input of the forward pass, and the gradient of the output of the backward pass,
            [B, S, D].
          stacked_grads: Refs to which the gradients of layers are added.
        """
        float_grads = jax.tree.map(jnp.zeros_like, pair.backward.floats)
        segment_sums: dict[str, list[Sums]] = {}
        for stretch in stretches(self.periods):
            up = self.segments[stretch.forward]
            down = self.segments[stretch.backward]
            x, forward_ctx = to_layer_order(pair.forward.model, up, x, pair.forward.ctx)
            dy, backward_ctx = to_layer_order(pair.backward.model, down, dy, pair.backward.ctx)
            ordered_pair = pair._replace(
                forward=pair.forward._replace(ctx=forward_ctx),
                backward=pair.backward._replace(ctx=backward_ctx),
            )
            (x, dy, float_grads, stashes), sums = lax.scan(
                partial(self._run_pair, slots, stretch, ordered_pair, stacked_grads),
                LayersCarry(x, dy, float_grads, stashes),
                jnp.arange(stretch.length),
                unroll=up.unroll or down.unroll,
            )
            x = batch_first(x, forward_ctx)
            dy = batch_first(dy, backward_ctx)
            segment_sums.setdefault(stretch.forward, []).append(sums)
        total: Sums = {}
        for name, parts in segment_sums.items():
            layer_sums = jax.tree.map(lambda *x: jnp.concatenate(x), *parts)
            total = add_sums(total, totals(name, layer_sums))
        return self._pin(x), self._pin(dy), stashes, total, float_grads

    def _run_pair(
        self,
        slots: str,
        stretch: Stretch,
        pair: PassPair,
        stacked_grads: Mapping[str, Any],
        carry: LayersCarry,
        i: jax.Array,
    ) -> tuple[LayersCarry, Sums]:
        """Runs one iteration of a stretch. Returns also the sums of the forward layers."""
        x, dy, float_grads, stashes = carry
        forward, backward, forward_slot, backward_slot = pair
        forward_period = stretch.first + i
        backward_period = stretch.last - i
        sums: Sums = {}
        backward_residuals: list[jax.Array] = []
        if "B" in slots:
            backward_residuals = [
                _read(residual, backward_slot, backward_period)
                for residual in stashes[stretch.backward]
            ]
            # Without the barrier XLA may write the forward layer's residuals first, and copies the
            # stash to read it as it was.
            backward_residuals, stashes = lax.optimization_barrier((backward_residuals, stashes))
        if "F" in slots:
            with jax.named_scope("forward_slot"):
                (x, sums), pull = self._vjp(forward, stretch.forward, forward_period, x)
            save, _ = self.saved[stretch.forward]
            residuals = zip(stashes[stretch.forward], saved(pull, save), strict=True)
            written = [
                _write(stash, residual, forward_slot, forward_period)
                for stash, residual in residuals
            ]
            stashes = stashes | {stretch.forward: written}
            x = self._pinned(forward, x)
        if "B" in slots:
            with jax.named_scope("backward_slot"):
                # The vjp at zeros, with the saved residuals in place of its own: XLA removes what
                # only those needed.
                zeros = jnp.zeros_like(dy)
                (_, layer_sums), pull = self._vjp(
                    backward, stretch.backward, backward_period, zeros
                )
                refs = {
                    name: ref
                    for name, ref in stacked_grads.items()
                    if segment_of(name) == stretch.backward
                }
                save, _ = self.saved[stretch.backward]
                pull = restored(pull, save, backward_residuals)
                pull = pull.with_refs(refs, [RETURNED] * len(float_grads), RETURNED)
                _, layer_float_grads, dy = pull((dy, self._cotangents(layer_sums)))
            float_grads = jax.tree.map(jnp.add, float_grads, layer_float_grads)
            dy = self._pinned(backward, dy)
        return LayersCarry(x, dy, float_grads, stashes), sums

    def _vjp(
        self, one: Pass, segment: str, period: jax.Array, x: jax.Array
    ) -> tuple[tuple[jax.Array, Sums], Any]:
        """Returns `jax.vjp` of a period: ((output, sums by layer), function from their gradients to
        those of sinks, floats and x).
        """
        leaves, tree = jax.tree.flatten(one.ctx.shared)

        @jax.named_scope("layers")
        def run(sinks: Params, floats: list[jax.Array], x: jax.Array) -> tuple[jax.Array, Sums]:
            remaining = iter(floats)
            shared = [next(remaining) if floats and _is_float(leaf) else leaf for leaf in leaves]
            ctx = dataclasses.replace(one.ctx, shared=jax.tree.unflatten(tree, shared))
            bound_sinks = Sinks(
                self._module({**self.shared, **self.layers, **sinks}), one.work.microbatch >= 0
            )
            first_layer, rows = self.rows(segment, one.work)
            run_period = one_period(
                one.model, self.segments[segment], ctx, first_layer, rows, bound_sinks
            )
            row = period * self.segments[segment].period
            (y, _), sums = run_period((x, None), (row, None))
            return y, sums

        sinks = {name: zero for name, zero in self._sinks().items() if segment_of(name) == segment}
        with segment_scope(self.segments[segment], self.segments):
            return jax.vjp(run, sinks, one.floats, x)

    def _saved(self, any_work: Work) -> dict[str, tuple[list[bool], list[jax.ShapeDtypeStruct]]]:
        """Returns, by segment, for each residual of a period whether it depends on the input and is
        saved, and the shapes of the saved ones.
        """

        def residuals(name: str, x: jax.Array, work: Work, period: jax.Array) -> list[jax.Array]:
            one = self.new_pass(work)
            x, ctx = to_layer_order(one.model, self.segments[name], x, one.ctx)
            return jax.tree.leaves(self._vjp(one._replace(ctx=ctx), name, period, x)[1])

        saved_by_segment = {}
        for name in self.segments:
            arguments = partial(residuals, name), self.zero_input, any_work, jnp.int32(0)
            save = depends_on_first(*arguments)
            shapes = zip(jax.eval_shape(*arguments), save, strict=True)
            saved_by_segment[name] = save, [shape for shape, is_saved in shapes if is_saved]
        return saved_by_segment

    def _pinned(self, one: Pass, x: jax.Array) -> jax.Array:
        """Returns an activation between layers, sharded like the residual stream."""
        return self.layout.shard(x, *one.ctx.residual)


def stretches(periods: Mapping[str, int]) -> Iterator[Stretch]:
    """Yields what the two passes do side by side, given the periods of each segment in a pass, in
    model order.
    """
    up = [(name, period) for name, n in periods.items() for period in range(n)]
    pairs = zip(up, reversed(up), strict=True)
    for (forward, backward), run in itertools.groupby(pairs, lambda pair: (pair[0][0], pair[1][0])):
        iterations = list(run)
        (_, first), (_, last) = iterations[0]
        yield Stretch(forward, first, backward, last, len(iterations))


def _is_float(x: jax.Array) -> bool:
    return jnp.issubdtype(x.dtype, jnp.inexact)


def _read(stash: jax.Array, slot: jax.Array, period: jax.Array) -> jax.Array:
    """Returns stash[slot, period]. Slot -1, for none, is the scratch slot."""
    start = _start(stash, slot, period)
    return lax.dynamic_slice(stash, start, (1, 1, *stash.shape[2:])).reshape(stash.shape[2:])


@jax.named_scope("stash")
def _write(stash: jax.Array, value: jax.Array, slot: jax.Array, period: jax.Array) -> jax.Array:
    """Returns the stash with stash[slot, period] replaced."""
    return lax.dynamic_update_slice(stash, value[None, None], _start(stash, slot, period))


def _start(stash: jax.Array, slot: jax.Array, period: jax.Array) -> Sequence[Any]:
    return jnp.where(slot < 0, stash.shape[0] - 1, slot), period, *[0] * (stash.ndim - 2)
