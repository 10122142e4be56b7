"""The tick of a pipeline: a forward slot, a backward slot, and two hops around the ring of stages.

Every stage runs this same program; which microbatch and which chunk of its layers a slot works on, if any, is read from its column of the
schedule's table. A hop is sent beside a slot that does not need it: gradients travel during the forward slot, activations during the
backward slot. XLA starts a hop as late as it takes to hide it, by its own guess of the network, so a write to a stash behind the slot would
do: barriers have the hop end with the slot, before such writes, and the slot is then all that it can lie beside.

What waits (inputs, gradients) lies in stashes of as many slots as the table says, and one more, into which goes what nobody needs.
Stashes and sums of gradients are read before a conditional and written after it: XLA copies whole what a conditional passes through.
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
from mesh_lm.parallel.stage import Gradients, StageProgram, Work
from mesh_lm.schedules.table import Table

Columns = Mapping[str, Any]
"""One stage's columns of a table, int32 [T] each; in a tick its row, int32 scalars."""


class Carry(NamedTuple):
    """From tick to tick.

    inputs and upstream (gradients of outputs): [slots + 1, B, S, D]; residuals: a tree of [slots + 1, ...]. y and dx, [B, S, D], are what
    the last slots made: a stage without work sends them again, and nobody keeps them. grads and arrays: of this stage, with its layers in
    the rows that its parameters have.
    """

    inputs: jax.Array
    upstream: jax.Array
    residuals: Any
    y: jax.Array
    dx: jax.Array
    grads: Params
    sums: Sums
    arrays: Sums


def gradients(program: StageProgram, table: Table, columns: Columns) -> tuple[Sums, Params]:
    """Sums over this device's share of the batch, and its share of the gradients: of its own layers, and of all other parameters."""
    x = program.zero_input
    left = jax.eval_shape(program.forward, Work(jnp.int32(0), jnp.int32(0)), x)[1]
    trained = {name: w for name, w in {**program.layers, **program.shared}.items() if name not in program.layout.buffers}
    zeros = {name: jnp.zeros(w.shape, jnp.float32) for name, w in trained.items()}
    height = {name: program.layout.stack_of(name).rows_per_stage for name in program.zero_arrays}
    start = Carry(
        _stash(table.n_inputs, x), _stash(table.n_grads, x), _stash(table.n_residuals, left), x, x,
        program.layout.constrain(zeros, "params"), program.zero_sums,
        {name: jnp.zeros((height[name], *x.shape[1:]), x.dtype) for name, x in program.zero_arrays.items()},
    )  # fmt: skip
    end = lax.scan(partial(_tick, program, table), start, dict(columns))[0]
    return {**end.sums, **end.arrays}, end.grads


def sums(program: StageProgram, table: Table, columns: Columns) -> Sums:
    """Scalar sums over this device's share of the batch, by a table of forward slots alone."""
    slot = _slot(program)

    def tick(carry: tuple[jax.Array, jax.Array, Sums], row: Columns) -> tuple[Any, None]:
        inputs, y, total = carry
        work, stashed = _work(row, "forward"), _read(inputs, row["forward_input"])
        with jax.named_scope("forward_slot"):
            y, more = slot(work.microbatch >= 0, partial(program.evaluate, work, stashed), lambda: (y, program.zero_sums))
        return (_write(inputs, _hop(table, y, 1), row["receive_input"]), y, jax.tree.map(jnp.add, total, more)), None

    x = program.zero_input
    return lax.scan(tick, (_stash(table.n_inputs, x), x, program.zero_sums), dict(columns))[0][-1]


def _tick(program: StageProgram, table: Table, carry: Carry, row: Columns) -> tuple[Carry, None]:
    forward, backward, slot = _work(row, "forward"), _work(row, "backward"), _slot(program)
    x_forward, x_backward = _read(carry.inputs, row["forward_input"]), _read(carry.inputs, row["backward_input"])

    arrived = _hop(table, carry.dx, -1)
    with jax.named_scope("forward_slot"):
        run, idle = partial(program.forward, forward, x_forward), lambda: (carry.y, _blank(carry.residuals))
        y, left = slot(forward.microbatch >= 0, run, idle)
    arrived, y, left = lax.optimization_barrier((arrived, y, left))
    # The last virtual stage reads what was just written. Without the barrier XLA reads from before the write, and copies the stash for it.
    residuals = lax.optimization_barrier(_write(carry.residuals, left, row["forward_residual"]))

    onward = _hop(table, y, 1)
    upstream = _write(carry.upstream, arrived, row["receive_grad"])
    dy, left = _read(upstream, row["backward_grad"]), _read(residuals, row["backward_residual"])
    with jax.named_scope("backward_slot"):
        run, idle = partial(program.backward, backward, x_backward, left, dy), lambda: program.nothing(carry.dx)
        made: Gradients = slot(backward.microbatch >= 0, run, idle)
    onward, made = lax.optimization_barrier((onward, made))
    with jax.named_scope("accumulate"):
        grads, arrays = _accumulated(program, carry, made, backward)
    inputs = _write(carry.inputs, onward, row["receive_input"])
    return Carry(inputs, upstream, residuals, y, made.x, grads, jax.tree.map(jnp.add, carry.sums, made.sums), arrays), None


def _accumulated(program: StageProgram, carry: Carry, made: Gradients, work: Work) -> tuple[Params, Sums]:
    def rows(name: str, held: jax.Array, more: jax.Array) -> jax.Array:
        if held.shape == more.shape:
            return held + more
        return lax.dynamic_update_slice_in_dim(held, program.rows(work, name, held) + more, program.at(segment_of(name), "start", work), 0)

    total = carry.grads | {name: rows(name, carry.grads[name], g) for name, g in made.layers.items()}
    for more in (made.shared, made.loss, made.embed):
        total = total | {name: total[name] + g for name, g in more.items()}
    arrays = {name: rows(name, carry.arrays[name], x) for name, x in made.arrays.items()}
    return program.layout.constrain(total, "params"), arrays


def _slot(program: StageProgram) -> Callable[[jax.Array, Callable[[], Any], Callable[[], Any]], Any]:
    """f(whether there is work, run, idle) -> what `run` makes where this stage has work, else `idle`."""
    return _masked if program.permutes or program.layout.pipeline.idle == "mask" else lax.cond


def _masked(working: jax.Array, run: Callable[[], Any], idle: Callable[[], Any]) -> Any:
    return jax.tree.map(lambda made, kept: jnp.where(working, made, kept), run(), idle())


def _work(row: Columns, slot: str) -> Work:
    return Work(row[f"{slot}_microbatch"], row[f"{slot}_chunk"])


def _hop(table: Table, x: jax.Array, step: int) -> jax.Array:
    """To the stage `step` on in the ring; what that one sends, from the other side."""
    return lax.ppermute(x, "pipeline", [(stage, (stage + step) % table.stages) for stage in range(table.stages)])


def _stash(slots: int, like: Any) -> Any:
    """Room for `slots` of them, and for one that nobody reads."""
    return jax.tree.map(lambda x: jnp.zeros((slots + 1, *x.shape), x.dtype), like)


def _blank(stash: Any) -> Any:
    """Zeros like what is in it. Reading them from it would put all of it into the conditional."""
    return jax.tree.map(lambda held: jnp.broadcast_to(lax.optimization_barrier(jnp.zeros((), held.dtype)), held.shape[1:]), stash)


def _read(stash: Any, slot: jax.Array) -> Any:
    """stash[slot]; -1, for nothing, is its last."""
    return jax.tree.map(lambda held: lax.dynamic_index_in_dim(held, slot, keepdims=False), stash)


@jax.named_scope("stash")
def _write(stash: Any, value: Any, slot: jax.Array) -> Any:
    def one(held: jax.Array, x: jax.Array) -> jax.Array:
        return lax.dynamic_update_index_in_dim(held, x, jnp.where(slot < 0, held.shape[0] - 1, slot), 0)

    return jax.tree.map(one, stash, value)
