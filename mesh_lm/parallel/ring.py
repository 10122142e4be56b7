"""The tick of a pipeline: a forward slot, a backward slot, and two hops around the ring of stages.

Every stage runs the same program, a loop over ticks in up to three parts: those in which no stage
goes backward yet, those in which some do, and those in which no stage goes forward any more. In its
part of the loop a slot runs on every stage in every tick. Where it has no work it computes on the
scratch slots of the stashes, and counts as zero. That costs no time, because in each tick some
stage works and the others wait for it; and there is no conditional around a slot, which would copy
in full the sums of gradients that pass through it.

A hop overlaps with a slot that does not need it: gradients are sent during the forward slot,
activations during the backward slot. XLA starts a hop as late as it can while hiding it, by its own
estimate of the network, and would accept a write to a stash after the slot as enough to hide it.
Barriers make the hop end with the slot, before such writes, so that only the slot can hide it.

Inputs and gradients that wait for their slot are in stashes, which have as many slots as the table
says plus one scratch slot for values that are not needed. The gradients of layers are summed in
place, in Refs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from mesh_lm.model import Sums
from mesh_lm.parallel.layout import Params, segment_of
from mesh_lm.parallel.stage import StageProgram, Work
from mesh_lm.parallel.stage_transfers import StageTransfers
from mesh_lm.schedules.table import Table
from mesh_lm.schedules.transfers import loops

Columns = Mapping[str, Any]
"""One stage's columns of a table, int32 [T] each, or in one tick their values, int32 scalars."""


class Carry(NamedTuple):
    """The state of the loop over ticks.

    inputs and upstream (gradients of outputs) are stashes [slots + 1, B, S, D], residuals a tree of
    [slots + 1, ...]. y and dx, [B, S, D], are the results of the last slots; what an idle stage
    sends, the receiver discards. grads are those of the parameters outside of the segments; arrays
    are those of this stage, with its layers in the same rows as in its parameters.
    """

    inputs: jax.Array
    upstream: jax.Array
    residuals: Any
    y: jax.Array
    dx: jax.Array
    grads: Params
    sums: Sums
    arrays: Sums


def gradients(
    program: StageProgram,
    table: Table,
    columns: Columns,
    transfers: StageTransfers,
    tick: Callable | None = None,
    residuals: Any = None,
) -> tuple[Sums, Params]:
    """(sums over this device's sequences, gradients), not reduced over devices, of this stage's
    layers and of all other parameters.

    Of matrices that the stage gathers, there are the gradients of the vectors instead: this
    replica's shards of the sums.

    tick: what runs in a tick, and residuals: its stash of them; None: the two slots one after the
    other (`_tick`).
    """
    x, layout = program.zero_input, program.layout
    if residuals is None:
        residuals = stash(
            table.n_residuals,
            jax.eval_shape(program.forward, Work(jnp.int32(0), jnp.int32(0)), x)[1],
        )
    zeros = {
        name: jnp.zeros(w.shape, jnp.float32)
        for name, w in program.shared.items()
        if name not in layout.buffers
    }
    height = {name: layout.stack_of(name).rows_per_stage for name in program.zero_arrays}
    carry = Carry(
        stash(table.n_inputs, x), stash(table.n_grads, x), residuals, x, x,
        layout.constrain(zeros, "params"), program.zero_sums,
        {name: jnp.zeros((height[name], *x.shape[1:]), x.dtype) for name, x in program.zero_arrays.items()},
    )  # fmt: skip
    of_layers, totals = program.new_sums_of_layers(), transfers.zeros()
    for loop in loops(table, list(transfers.plans.values())):
        rows = {name: column[loop.first : loop.end] for name, column in columns.items()}
        one = partial(tick or _tick, table, loop.slots, of_layers)
        numbered = jnp.arange(loop.first, loop.end), rows
        if loop.moves == "gathers":
            carry, layers = lax.scan(
                partial(_gathering_tick, program, transfers, one), (carry, program.layers), numbered
            )[0]
            program = program.with_layers(layers)
        elif loop.moves == "sums":
            carry, totals = lax.scan(
                partial(_summing_tick, program, transfers, one, of_layers),
                (carry, totals),
                numbered,
            )[0]
        else:
            carry = lax.scan(partial(one, program), carry, rows)[0]
    layers = layout.constrain({name: jax.freeze(ref) for name, ref in of_layers.items()}, "params")
    return {**carry.sums, **carry.arrays}, {
        **carry.grads,
        **layers,
        **transfers.last_sums(totals, layers),
    }


def sums(program: StageProgram, table: Table, columns: Columns) -> Sums:
    """Scalar sums over this device's sequences, by a table with forward slots only."""

    def tick(carry: tuple[jax.Array, Sums], row: Columns) -> tuple[Any, None]:
        inputs, total = carry
        with jax.named_scope("forward_slot"):
            y, more = program.evaluate(work_of(row, "forward"), read(inputs, row["forward_input"]))
        return (
            write(inputs, hop(table, y, 1), row["receive_input"]),
            jax.tree.map(jnp.add, total, more),
        ), None

    return lax.scan(
        tick, (stash(table.n_inputs, program.zero_input), program.zero_sums), dict(columns)
    )[0][-1]


def _gathering_tick(
    program: StageProgram,
    transfers: StageTransfers,
    tick: Callable,
    state: tuple[Carry, Params],
    xs: tuple[jax.Array, Columns],
) -> tuple[tuple[Carry, Params], None]:
    """A tick during which a row of weights is gathered, for later ticks. The state has the stage's
    layers besides the carry.
    """
    (carry, layers), (number, row) = state, xs
    carry = tick(program.with_layers(layers), carry, row)[0]
    gathered = transfers.gather(number, transfers.finished(carry.inputs[0]))
    # the row is written once the layers have been read
    y, gathered = lax.optimization_barrier((carry.y, gathered))
    return (carry._replace(y=y), transfers.with_gathered(layers, number, gathered)), None


def _summing_tick(
    program: StageProgram,
    transfers: StageTransfers,
    tick: Callable,
    of_layers: Mapping[str, Any],
    state: tuple[Carry, Params],
    xs: tuple[jax.Array, Columns],
) -> tuple[tuple[Carry, Params], None]:
    """A tick during which the gradients of a row are summed over the replicas, to which no later
    tick adds.
    """
    (carry, totals), (number, row) = state, xs
    done = transfers.gradients(number, {name: ref[...] for name, ref in of_layers.items()})
    carry = tick(program, carry, row)[0]
    dx, summed = lax.optimization_barrier(
        (carry.dx, transfers.sum(done, transfers.finished(carry.dx)))
    )
    return (carry._replace(dx=dx), transfers.with_sums(totals, number, summed)), None


def _tick(
    table: Table,
    slots: str,
    of_layers: Mapping[str, Any],
    program: StageProgram,
    carry: Carry,
    row: Columns,
) -> tuple[Carry, None]:
    inputs, upstream, residuals, y, dx, grads, total, arrays = carry
    forward, backward = work_of(row, "forward"), work_of(row, "backward")
    x_forward, x_backward = read(inputs, row["forward_input"]), read(inputs, row["backward_input"])
    arrived = hop(table, dx, -1) if "B" in slots else dx
    if "F" in slots:
        with jax.named_scope("forward_slot"):
            y, saved = program.forward(forward, x_forward)
        arrived, y, saved = lax.optimization_barrier((arrived, y, saved))
        # The last virtual stage reads what was just written. Without the barrier XLA reads the old
        # stash, and copies it for that.
        residuals = lax.optimization_barrier(write(residuals, saved, row["forward_residual"]))
    onward = hop(table, y, 1) if "F" in slots else y
    if "B" in slots:
        upstream = write(upstream, arrived, row["receive_grad"])
        dy, saved = read(upstream, row["backward_grad"]), read(residuals, row["backward_residual"])
        with jax.named_scope("backward_slot"):
            result = program.backward(backward, x_backward, saved, dy, of_layers)
        onward, result = lax.optimization_barrier((onward, result))
        with jax.named_scope("accumulate"):
            grads = summed(program, grads, result.shared, result.loss, result.embed)
            arrays = with_arrays(program, arrays, result.arrays, backward)
        dx, total = result.x, jax.tree.map(jnp.add, total, result.sums)
    if "F" in slots:
        inputs = write(inputs, onward, row["receive_input"])
    return Carry(inputs, upstream, residuals, y, dx, grads, total, arrays), None


def summed(program: StageProgram, total: Params, *more: Params) -> Params:
    """Gradients of parameters outside of the segments, with more of some of them added."""
    for grads in more:
        total = total | {name: total[name] + g for name, g in grads.items()}
    return program.layout.constrain(total, "params")


def with_arrays(program: StageProgram, total: Sums, more: Sums, work: Work) -> Sums:
    """Arrays of sums of this stage's layers, with those of one pass added, [rows_per_pass, ...]."""

    def rows(name: str, held: jax.Array, more: jax.Array) -> jax.Array:
        if held.shape == more.shape:
            return held + more
        start = program.at(segment_of(name), "start", work)
        return lax.dynamic_update_slice_in_dim(
            held, lax.dynamic_slice_in_dim(held, start, len(more)) + more, start, 0
        )

    return {name: rows(name, total[name], x) for name, x in more.items()}


def work_of(row: Columns, slot: str) -> Work:
    """The work of a slot, "forward" or "backward", in one tick."""
    return Work(row[f"{slot}_microbatch"], row[f"{slot}_chunk"])


def hop(table: Table, x: jax.Array, step: int) -> jax.Array:
    """Sends x to the stage `step` further in the ring, and returns what the stage `step` before
    sent.
    """
    return lax.ppermute(
        x, "pipeline", [(stage, (stage + step) % table.stages) for stage in range(table.stages)]
    )


def stash(slots: int, like: Any) -> Any:
    """A stash of `slots` arrays like these and one scratch slot."""
    return jax.tree.map(lambda x: jnp.zeros((slots + 1, *x.shape), x.dtype), like)


def read(stash: Any, slot: jax.Array) -> Any:
    """stash[slot]. -1, for no slot, reads the scratch slot."""
    return jax.tree.map(lambda held: lax.dynamic_index_in_dim(held, slot, keepdims=False), stash)


@jax.named_scope("stash")
def write(stash: Any, value: Any, slot: jax.Array) -> Any:
    """The stash with stash[slot] replaced. -1, for no slot, writes to the scratch slot."""

    def write(held: jax.Array, x: jax.Array) -> jax.Array:
        return lax.dynamic_update_index_in_dim(
            held, x, jnp.where(slot < 0, held.shape[0] - 1, slot), 0
        )

    return jax.tree.map(write, stash, value)
