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
    """The state of the loop over ticks."""

    inputs: jax.Array
    """A stash [slots + 1, B, S, D] of inputs that wait for their forward slot, and that a backward
    slot reads again."""
    upstream: jax.Array
    """A stash [slots + 1, B, S, D] of gradients of outputs that wait for their backward slot."""
    residuals: Any
    """A stash: a tree of [slots + 1, ...]."""
    y: jax.Array
    """[B, S, D], the result of the last forward slot. The receiver discards what an idle stage
    sends."""
    dx: jax.Array
    """[B, S, D], the result of the last backward slot."""
    grads: Params
    """The gradients of the parameters outside of the segments."""
    sums: Sums
    """Scalars."""
    arrays: Sums
    """Arrays of sums of this stage, with its layers in the same rows as in its parameters."""


def gradients(
    program: StageProgram,
    table: Table,
    columns: Columns,
    transfers: StageTransfers,
    tick: Callable | None = None,
    residuals: Any = None,
) -> tuple[Sums, Params]:
    """Returns (sums over this device's sequences, gradients), not reduced over devices, of this
    stage's layers and of all other parameters.

    In place of the gradients of matrices that the stage gathers, there are those of the vectors:
    this replica's shards of the sums.

    Args:
      tick: runs one tick; None: the two slots one after the other (`_tick`).
      residuals: the stash of residuals that `tick` expects; None: that of `_tick`.
    """
    x = program.zero_input
    layout = program.layout
    if residuals is None:
        any_work = Work(jnp.int32(0), jnp.int32(0))
        _, layer_residuals = jax.eval_shape(program.forward, any_work, x)
        residuals = stash(table.n_residuals, layer_residuals)
    shared_zeros = {
        name: jnp.zeros(w.shape, jnp.float32)
        for name, w in program.shared.items()
        if name not in layout.buffers
    }
    rows = {name: layout.stack_of(name).rows_per_stage for name in program.zero_arrays}
    carry = Carry(
        inputs=stash(table.n_inputs, x),
        upstream=stash(table.n_grads, x),
        residuals=residuals,
        y=x,
        dx=x,
        grads=layout.constrain(shared_zeros, "params"),
        sums=program.zero_sums,
        arrays={
            name: jnp.zeros((rows[name], *a.shape[1:]), a.dtype)
            for name, a in program.zero_arrays.items()
        },
    )
    stacked_grads = program.new_stacked_grads()
    vector_grads = transfers.zeros()
    # Up to three loops, which differ in the slots that they run and in the transfers beside them.
    for loop in loops(table, list(transfers.plans.values())):
        loop_columns = {name: column[loop.first : loop.end] for name, column in columns.items()}
        loop_tick = partial(tick or _tick, table, loop.slots, stacked_grads)
        numbered = jnp.arange(loop.first, loop.end), loop_columns
        if loop.moves == "gather":
            gathering_tick = partial(_gathering_tick, program, transfers, loop_tick)
            (carry, layers), _ = lax.scan(gathering_tick, (carry, program.layers), numbered)
            program = program.with_layers(layers)
        elif loop.moves == "reduce":
            reducing_tick = partial(_reducing_tick, program, transfers, loop_tick, stacked_grads)
            (carry, vector_grads), _ = lax.scan(reducing_tick, (carry, vector_grads), numbered)
        else:
            carry, _ = lax.scan(partial(loop_tick, program), carry, loop_columns)
    layer_grads = layout.constrain(
        {name: jax.freeze(ref) for name, ref in stacked_grads.items()}, "params"
    )
    grads = {**carry.grads, **layer_grads, **transfers.reduce_last(vector_grads, layer_grads)}
    return {**carry.sums, **carry.arrays}, grads


def sums(program: StageProgram, table: Table, columns: Columns) -> Sums:
    """Returns the scalar sums over this device's sequences, by a table with forward slots only."""

    def tick(carry: tuple[jax.Array, Sums], row: Columns) -> tuple[Any, None]:
        inputs, total = carry
        with jax.named_scope("forward_slot"):
            x = read(inputs, row["forward_input"])
            y, tick_sums = program.evaluate(work_of(row, "forward"), x)
        inputs = write(inputs, hop(table, y, 1), row["receive_input"])
        return (inputs, jax.tree.map(jnp.add, total, tick_sums)), None

    carry = stash(table.n_inputs, program.zero_input), program.zero_sums
    (_, total), _ = lax.scan(tick, carry, dict(columns))
    return total


def _gathering_tick(
    program: StageProgram,
    transfers: StageTransfers,
    tick: Callable,
    state: tuple[Carry, Params],
    xs: tuple[jax.Array, Columns],
) -> tuple[tuple[Carry, Params], None]:
    """Runs a tick during which a row of weights is gathered, for later ticks.

    state: the carry and the stage's layers.
    """
    carry, layers = state
    number, row = xs
    carry, _ = tick(program.with_layers(layers), carry, row)
    gathered = transfers.gather(number, transfers.finished(carry.inputs[0]))
    # The row is written once the layers have been read.
    y, gathered = lax.optimization_barrier((carry.y, gathered))
    layers = transfers.with_gathered(layers, number, gathered)
    return (carry._replace(y=y), layers), None


def _reducing_tick(
    program: StageProgram,
    transfers: StageTransfers,
    tick: Callable,
    stacked_grads: Mapping[str, Any],
    state: tuple[Carry, Params],
    xs: tuple[jax.Array, Columns],
) -> tuple[tuple[Carry, Params], None]:
    """Runs a tick during which the gradients of a row are summed over the replicas, to which no
    later tick adds.

    state: the carry and the gradients of vectors.
    """
    carry, vector_grads = state
    number, row = xs
    row_grads = transfers.gradients(number, {name: ref[...] for name, ref in stacked_grads.items()})
    carry, _ = tick(program, carry, row)
    reduced = transfers.reduce(row_grads, transfers.finished(carry.dx))
    # The sum ends with the tick beside which it runs.
    dx, reduced = lax.optimization_barrier((carry.dx, reduced))
    vector_grads = transfers.with_reduced(vector_grads, number, reduced)
    return (carry._replace(dx=dx), vector_grads), None


def _tick(
    table: Table,
    slots: str,
    stacked_grads: Mapping[str, Any],
    program: StageProgram,
    carry: Carry,
    row: Columns,
) -> tuple[Carry, None]:
    """Runs a forward slot, then a backward slot. slots: which of them, "F", "FB" or "B"."""
    inputs, upstream, residuals, y, dx, grads, total, arrays = carry
    forward = work_of(row, "forward")
    backward = work_of(row, "backward")
    x_forward = read(inputs, row["forward_input"])
    x_backward = read(inputs, row["backward_input"])

    # Gradients hop to the stage before during the forward slot, which does not need them.
    received_grad = hop(table, dx, -1) if "B" in slots else dx
    if "F" in slots:
        with jax.named_scope("forward_slot"):
            y, saved = program.forward(forward, x_forward)
        # The hop ends with the slot, so that only the slot can hide it.
        received_grad, y, saved = lax.optimization_barrier((received_grad, y, saved))
        # The last virtual stage reads what was just written. Without the barrier XLA reads the old
        # stash, and copies it for that.
        residuals = lax.optimization_barrier(write(residuals, saved, row["forward_residual"]))

    # Activations hop to the next stage during the backward slot.
    received_input = hop(table, y, 1) if "F" in slots else y
    if "B" in slots:
        upstream = write(upstream, received_grad, row["receive_grad"])
        dy = read(upstream, row["backward_grad"])
        saved = read(residuals, row["backward_residual"])
        with jax.named_scope("backward_slot"):
            result = program.backward(backward, x_backward, saved, dy, stacked_grads)
        # The hop ends with the slot, as above.
        received_input, result = lax.optimization_barrier((received_input, result))
        with jax.named_scope("accumulate"):
            grads = added(program, grads, result.shared, result.loss, result.embed)
            arrays = with_arrays(program, arrays, result.arrays, backward)
        dx = result.x
        total = jax.tree.map(jnp.add, total, result.sums)
    if "F" in slots:
        inputs = write(inputs, received_input, row["receive_input"])
    return Carry(inputs, upstream, residuals, y, dx, grads, total, arrays), None


def added(program: StageProgram, total: Params, *addends: Params) -> Params:
    """Returns gradients of parameters outside of the segments, plus those of some of them."""
    for grads in addends:
        total = total | {name: total[name] + g for name, g in grads.items()}
    return program.layout.constrain(total, "params")


def with_arrays(program: StageProgram, total: Sums, arrays: Sums, work: Work) -> Sums:
    """Returns arrays of sums of this stage's layers, with those of one pass added,
    [rows_per_pass, ...].
    """
    new_total: Sums = {}
    for name, array in arrays.items():
        stage_array = total[name]
        if stage_array.shape == array.shape:
            new_total[name] = stage_array + array
            continue
        start = program.chunk_number(segment_of(name), "start", work)
        rows = lax.dynamic_slice_in_dim(stage_array, start, len(array))
        new_total[name] = lax.dynamic_update_slice_in_dim(stage_array, rows + array, start, 0)
    return new_total


def work_of(row: Columns, slot: str) -> Work:
    """Returns the work of a slot, "forward" or "backward", in one tick."""
    return Work(row[f"{slot}_microbatch"], row[f"{slot}_chunk"])


def hop(table: Table, x: jax.Array, step: int) -> jax.Array:
    """Sends x to the stage `step` further in the ring, and returns what the stage `step` before
    sent.
    """
    pairs = [(stage, (stage + step) % table.stages) for stage in range(table.stages)]
    return lax.ppermute(x, "pipeline", pairs)


def stash(slots: int, like: Any) -> Any:
    """Returns a stash of `slots` arrays like these and one scratch slot."""
    return jax.tree.map(lambda x: jnp.zeros((slots + 1, *x.shape), x.dtype), like)


def read(stash: Any, slot: jax.Array) -> Any:
    """Returns stash[slot]. -1, for no slot, reads the scratch slot."""
    return jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, slot, keepdims=False), stash)


@jax.named_scope("stash")
def write(stash: Any, value: Any, slot: jax.Array) -> Any:
    """Returns the stash with stash[slot] replaced. -1, for no slot, writes to the scratch slot."""

    def write_array(slots: jax.Array, x: jax.Array) -> jax.Array:
        index = jnp.where(slot < 0, slots.shape[0] - 1, slot)
        return lax.dynamic_update_index_in_dim(slots, x, index, 0)

    return jax.tree.map(write_array, stash, value)
