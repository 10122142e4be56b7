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
from mesh_lm.parallel import ring
from mesh_lm.parallel.layout import Params, segment_of
from mesh_lm.parallel.residuals import depends_on_first, restored, saved
from mesh_lm.parallel.ring import Carry, Columns
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


def gradients(
    program: PairedProgram, table: Table, columns: Columns, transfers: StageTransfers
) -> tuple[Sums, Params]:
    """`mesh_lm.parallel.ring.gradients` with slots side by side."""
    residuals = ring.stash(table.n_outputs, program.zero_input), program.stashes(table.n_residuals)
    return ring.gradients(program, table, columns, transfers, _tick, residuals)


def _tick(
    table: Table,
    slots: str,
    of_layers: Mapping[str, Any],
    program: PairedProgram,
    carry: Carry,
    row: Columns,
) -> tuple[Carry, None]:
    inputs, upstream, (outputs, stashes), y, dx, grads, total, arrays = carry
    forward, backward = (
        program.new_pass(ring.work_of(row, slot)) for slot in ("forward", "backward")
    )
    d_loss, of_loss = {}, {}
    if "B" in slots:
        upstream = ring.write(upstream, dx, row["receive_grad"])
        with jax.named_scope("backward_slot"):
            last, dy = (
                ring.read(outputs, row["backward_output"]),
                ring.read(upstream, row["backward_grad"]),
            )
            of_loss, d_loss, dx = program.loss_gradient(backward.work, last, dy)
    if "F" in slots:
        with jax.named_scope("forward_slot"):
            y = program.input(forward.work, ring.read(inputs, row["forward_input"]))
    at = row["forward_residual"], row["backward_residual"]
    y, dx, stashes, sums, d_floats = program.layers_of_tick(
        slots, (forward, backward), (y, dx), at, stashes, of_layers
    )
    if "F" in slots:
        inputs = ring.write(inputs, ring.hop(table, y, 1), row["receive_input"])
        outputs = ring.write(outputs, y, row["forward_output"])
        scalars, of_rows = program.counted(forward.work, sums)
        total, arrays = (
            jax.tree.map(jnp.add, total, scalars),
            ring.with_arrays(program, arrays, of_rows, forward.work),
        )
    if "B" in slots:
        with jax.named_scope("backward_slot"):
            d_shared, d_embed = (
                program.shared_gradient(backward, d_floats),
                program.embed_gradient(backward.work, dx),
            )
        dx = ring.hop(table, dx, -1)
        with jax.named_scope("accumulate"):
            grads = ring.summed(program, grads, d_shared, d_loss, d_embed)
        total = jax.tree.map(jnp.add, total, of_loss)
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
        """The pass that a slot does."""
        (batch, dropout), model = (
            self._microbatch(work),
            self._module({**self.shared, **self.layers}),
        )
        shared = model.prepare(batch)

        def floats(used: Params) -> list[jax.Array]:
            return [
                x
                for x in jax.tree.leaves(
                    self._module({**self.shared, **used, **self.layers}).prepare(batch)
                )
                if _is_float(x)
            ]

        values, pull = (
            jax.vjp(floats, self._differentiated()[1]) if self.of_layers else ([], lambda _: ({},))
        )
        return Pass(
            work, model, Context(batch, dropout, shared), values, lambda d_floats: pull(d_floats)[0]
        )

    def stashes(self, slots: int) -> Stashes:
        """Stashes of residuals with this number of slots and a scratch slot."""
        like = {
            name: [
                jax.ShapeDtypeStruct((self.periods[name], *each.shape), each.dtype)
                for each in shapes
            ]
            for name, (_, shapes) in self.saved.items()
        }
        return ring.stash(slots, like)

    def input(self, work: Work, stashed: jax.Array) -> jax.Array:
        """The chunk's input, [B, S, D]. stashed: as `forward` takes it."""
        return self._input(work, stashed)

    def counted(self, work: Work, sums: Sums) -> tuple[Sums, Sums]:
        """(all scalar sums, arrays of sums) of a forward pass's layers, zero where its slot is
        idle.
        """
        scalars, arrays = (
            {name: x for name, x in sums.items() if bool(x.ndim) is wanted}
            for wanted in (False, True)
        )
        return self._full(self._unless_idle(work, scalars)), self._unless_idle(work, arrays)

    def shared_gradient(self, one: Pass, d_floats: list[jax.Array]) -> Params:
        """The gradients of the other parameters that layers use, zero where the slot is idle."""
        return self._unless_idle(one.work, self._pin_params(one.pull(d_floats)))

    def layers_of_tick(
        self, slots: str, passes: tuple[Pass, Pass], ends: tuple[jax.Array, jax.Array],
        at: tuple[jax.Array, jax.Array],
        stashes: Stashes, of_layers: Mapping[str, Any],
    ) -> tuple[jax.Array, jax.Array, Stashes, Sums, list[jax.Array]]:  # fmt: skip
        """(output of the forward pass, gradient of the backward pass's input, stashes, sums of the
        one, gradients of the other's `floats`).

        Args:
          slots: which run, "F", "FB" or "B"; the result of the other is what it was. passes:
          forward and backward. ends: the input of the forward pass, and the gradient of the output
          of the backward pass, [B, S, D]. at: the slots of the stashes for their residuals.
          of_layers: Refs to which the gradients of layers are added.
        """
        (x, dy), by_layer = ends, {}
        d_floats = jax.tree.map(jnp.zeros_like, passes[1].floats)
        for each in stretches(self.periods):
            x, up = to_layer_order(passes[0].model, self.segments[each.forward], x, passes[0].ctx)
            dy, down = to_layer_order(
                passes[1].model, self.segments[each.backward], dy, passes[1].ctx
            )
            as_taken = passes[0]._replace(ctx=up), passes[1]._replace(ctx=down)
            step = partial(self._pair, slots, each, as_taken, at, of_layers)
            unroll = self.segments[each.forward].unroll or self.segments[each.backward].unroll
            (x, dy, d_floats, stashes), sums = lax.scan(
                step, (x, dy, d_floats, stashes), jnp.arange(each.length), unroll=unroll
            )
            x, dy = batch_first(x, up), batch_first(dy, down)
            by_layer.setdefault(each.forward, []).append(sums)
        total: Sums = {}
        for name, parts in by_layer.items():
            total = add_sums(
                total, totals(name, jax.tree.map(lambda *x: jnp.concatenate(x), *parts))
            )
        return self._pin(x), self._pin(dy), stashes, total, d_floats

    def _pair(
        self,
        slots: str,
        each: Stretch,
        passes: tuple[Pass, Pass],
        at: tuple[jax.Array, jax.Array],
        of_layers: Mapping[str, Any],
        carry: Any,
        i: jax.Array,
    ) -> tuple[Any, Sums]:
        """One iteration of a stretch: the carry (x, dy, gradients of floats, stashes), and the sums
        of the forward layers.
        """
        (x, dy, d_floats, stashes), (forward, backward) = carry, passes
        up, down, sums, kept = each.first + i, each.last - i, {}, []
        if "B" in slots:
            # Without the barrier XLA may write the forward layer's residuals first, and copies the
            # stash to read it as it was.
            kept, stashes = lax.optimization_barrier(
                ([_read(x, at[1], down) for x in stashes[each.backward]], stashes)
            )
        if "F" in slots:
            with jax.named_scope("forward_slot"):
                (x, sums), pull = self._vjp(forward, each.forward, up, x)
            residuals = zip(
                stashes[each.forward], saved(pull, self.saved[each.forward][0]), strict=True
            )
            stashes, x = (
                stashes | {each.forward: [_write(held, new, at[0], up) for held, new in residuals]},
                self._pinned(forward, x),
            )
        if "B" in slots:
            with jax.named_scope("backward_slot"):
                (_, like), pull = self._vjp(backward, each.backward, down, jnp.zeros_like(dy))
                refs = {
                    name: ref
                    for name, ref in of_layers.items()
                    if segment_of(name) == each.backward
                }
                pull = restored(pull, self.saved[each.backward][0], kept)
                _, more, dy = pull.with_refs(refs, [RETURNED] * len(d_floats), RETURNED)(
                    (dy, self._seeds(like))
                )
            d_floats, dy = jax.tree.map(jnp.add, d_floats, more), self._pinned(backward, dy)
        return (x, dy, d_floats, stashes), sums

    def _vjp(
        self, one: Pass, segment: str, period: jax.Array, x: jax.Array
    ) -> tuple[tuple[jax.Array, Sums], Any]:
        """`jax.vjp` of a period: ((output, sums by layer), function from their gradients to those
        of sinks, floats and x).
        """
        leaves, tree = jax.tree.flatten(one.ctx.shared)

        @jax.named_scope("layers")
        def run(sinks: Params, floats: list[jax.Array], x: jax.Array) -> tuple[jax.Array, Sums]:
            given = iter(floats)
            shared = jax.tree.unflatten(
                tree, [next(given) if floats and _is_float(leaf) else leaf for leaf in leaves]
            )
            sunk = Sinks(
                self._module({**self.shared, **self.layers, **sinks}), one.work.microbatch >= 0
            )
            ctx, what = dataclasses.replace(one.ctx, shared=shared), self.segments[segment]
            run_period = one_period(one.model, what, ctx, *self.rows(segment, one.work), sunk)
            (y, _), sums = run_period((x, None), (period * what.period, None))
            return y, sums

        sinks = {name: zero for name, zero in self._sinks().items() if segment_of(name) == segment}
        with segment_scope(self.segments[segment], self.segments):
            return jax.vjp(run, sinks, one.floats, x)

    def _saved(self, any_work: Work) -> dict[str, tuple[list[bool], list[jax.ShapeDtypeStruct]]]:
        """By segment, for each residual of a period, whether it depends on the input and is saved,
        and the shapes of those that are.
        """

        def residuals(name: str, x: jax.Array, work: Work, period: jax.Array) -> list[jax.Array]:
            one = self.new_pass(work)
            x, ctx = to_layer_order(one.model, self.segments[name], x, one.ctx)
            return jax.tree.leaves(self._vjp(one._replace(ctx=ctx), name, period, x)[1])

        found = {}
        for name in self.segments:
            arguments = partial(residuals, name), self.zero_input, any_work, jnp.int32(0)
            save = depends_on_first(*arguments)
            found[name] = (
                save,
                [s for s, wanted in zip(jax.eval_shape(*arguments), save, strict=True) if wanted],
            )
        return found

    def _pinned(self, one: Pass, x: jax.Array) -> jax.Array:
        """An activation between layers, sharded like the residual stream."""
        return self.layout.shard(x, *one.ctx.residual)


def stretches(periods: Mapping[str, int]) -> Iterator[Stretch]:
    """Yields what the two passes do side by side, given the periods of each segment in a pass, in
    model order.
    """
    up = [(name, period) for name, n in periods.items() for period in range(n)]
    for (forward, backward), run in itertools.groupby(
        zip(up, reversed(up), strict=True), lambda pair: (pair[0][0], pair[1][0])
    ):
        ((_, first), (_, last)), *more = run
        yield Stretch(forward, first, backward, last, 1 + len(more))


def _is_float(x: jax.Array) -> bool:
    return jnp.issubdtype(x.dtype, jnp.inexact)


def _read(stash: jax.Array, slot: jax.Array, period: jax.Array) -> jax.Array:
    """stash[slot, period]. Slot -1, for none, is the scratch slot."""
    start = _start(stash, slot, period)
    return lax.dynamic_slice(stash, start, (1, 1, *stash.shape[2:])).reshape(stash.shape[2:])


@jax.named_scope("stash")
def _write(stash: jax.Array, value: jax.Array, slot: jax.Array, period: jax.Array) -> jax.Array:
    """The stash with stash[slot, period] replaced."""
    return lax.dynamic_update_slice(stash, value[None, None], _start(stash, slot, period))


def _start(stash: jax.Array, slot: jax.Array, period: jax.Array) -> Sequence[Any]:
    return jnp.where(slot < 0, stash.shape[0] - 1, slot), period, *[0] * (stash.ndim - 2)
