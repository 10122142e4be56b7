"""The tick of a pipeline: a forward slot, a backward slot, and two hops around the ring of stages.

Every stage runs the same program. The microbatch and the chunk of layers that a slot works on, if any, come from the stage's columns of the
schedule's table. A hop overlaps with a slot that does not need it: gradients are sent during the forward slot, activations during the
backward slot. XLA starts a hop as late as it can while hiding it, by its own estimate of the network, and would accept a write to a stash
after the slot as enough to hide it. Barriers make the hop end with the slot, before such writes, so that only the slot can hide it.

Inputs and gradients that wait for their slot are in stashes, which have as many slots as the table says plus one scratch slot for values
that are not needed. Stashes and sums of gradients are read before a conditional and written after it, because XLA copies in full what
passes through a conditional.
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
"""One stage's columns of a table, int32 [T] each, or in one tick their values, int32 scalars."""


class Carry(NamedTuple):
    """The state of the scan over ticks.

    inputs and upstream (gradients of outputs) are stashes [slots + 1, B, S, D], residuals a tree of [slots + 1, ...]. y and dx, [B, S, D],
    are the results of the last slots; an idle stage sends them again, and the receiver discards them. grads and arrays are those of this
    stage, with its layers in the same rows as in its parameters.
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
    """(sums over this device's sequences, gradients of this stage's layers and of all other parameters), not reduced over devices."""
    x = program.zero_input
    saved = jax.eval_shape(program.forward, Work(jnp.int32(0), jnp.int32(0)), x)[1]
    trained = {name: w for name, w in {**program.layers, **program.shared}.items() if name not in program.layout.buffers}
    zeros = {name: jnp.zeros(w.shape, jnp.float32) for name, w in trained.items()}
    height = {name: program.layout.stack_of(name).rows_per_stage for name in program.zero_arrays}
    start = Carry(
        _stash(table.n_inputs, x), _stash(table.n_grads, x), _stash(table.n_residuals, saved), x, x,
        program.layout.constrain(zeros, "params"), program.zero_sums,
        {name: jnp.zeros((height[name], *x.shape[1:]), x.dtype) for name, x in program.zero_arrays.items()},
    )  # fmt: skip
    end = lax.scan(partial(_tick, program, table), start, dict(columns))[0]
    return {**end.sums, **end.arrays}, end.grads


def sums(program: StageProgram, table: Table, columns: Columns) -> Sums:
    """Scalar sums over this device's sequences, by a table with forward slots only."""
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
        y, saved = slot(forward.microbatch >= 0, run, idle)
    arrived, y, saved = lax.optimization_barrier((arrived, y, saved))
    # The last virtual stage reads what was just written. Without the barrier XLA reads the old stash, and copies it for that.
    residuals = lax.optimization_barrier(_write(carry.residuals, saved, row["forward_residual"]))

    onward = _hop(table, y, 1)
    upstream = _write(carry.upstream, arrived, row["receive_grad"])
    dy, saved = _read(upstream, row["backward_grad"]), _read(residuals, row["backward_residual"])
    with jax.named_scope("backward_slot"):
        run, idle = partial(program.backward, backward, x_backward, saved, dy), lambda: program.zero_gradients(carry.dx)
        result: Gradients = slot(backward.microbatch >= 0, run, idle)
    onward, result = lax.optimization_barrier((onward, result))
    with jax.named_scope("accumulate"):
        grads, arrays = _accumulate(program, carry, result, backward)
    inputs = _write(carry.inputs, onward, row["receive_input"])
    return Carry(inputs, upstream, residuals, y, result.x, grads, jax.tree.map(jnp.add, carry.sums, result.sums), arrays), None


def _accumulate(program: StageProgram, carry: Carry, result: Gradients, work: Work) -> tuple[Params, Sums]:
    def rows(name: str, held: jax.Array, more: jax.Array) -> jax.Array:
        if held.shape == more.shape:
            return held + more
        return lax.dynamic_update_slice_in_dim(held, program.rows(work, name, held) + more, program.at(segment_of(name), "start", work), 0)

    total = carry.grads | {name: rows(name, carry.grads[name], g) for name, g in result.layers.items()}
    for more in (result.shared, result.loss, result.embed):
        total = total | {name: total[name] + g for name, g in more.items()}
    arrays = {name: rows(name, carry.arrays[name], x) for name, x in result.arrays.items()}
    return program.layout.constrain(total, "params"), arrays


def _slot(program: StageProgram) -> Callable[[jax.Array, Callable[[], Any], Callable[[], Any]], Any]:
    """A function f(has_work, run, idle) that returns `run()` if this stage has work, else `idle()`."""
    return _run_both if program.permutes or program.layout.pipeline.idle == "mask" else lax.cond


def _run_both(working: jax.Array, run: Callable[[], Any], idle: Callable[[], Any]) -> Any:
    return jax.tree.map(lambda x, y: jnp.where(working, x, y), run(), idle())


def _work(row: Columns, slot: str) -> Work:
    return Work(row[f"{slot}_microbatch"], row[f"{slot}_chunk"])


def _hop(table: Table, x: jax.Array, step: int) -> jax.Array:
    """Sends x to the stage `step` further in the ring, and returns what the stage `step` before sent."""
    return lax.ppermute(x, "pipeline", [(stage, (stage + step) % table.stages) for stage in range(table.stages)])


def _stash(slots: int, like: Any) -> Any:
    """A stash of `slots` arrays like these and one scratch slot."""
    return jax.tree.map(lambda x: jnp.zeros((slots + 1, *x.shape), x.dtype), like)


def _blank(stash: Any) -> Any:
    """Zeros like one slot of a stash. Reading them from the stash would make it an operand of the conditional."""
    return jax.tree.map(lambda held: jnp.broadcast_to(lax.optimization_barrier(jnp.zeros((), held.dtype)), held.shape[1:]), stash)


def _read(stash: Any, slot: jax.Array) -> Any:
    """stash[slot]. -1, for no slot, reads the scratch slot."""
    return jax.tree.map(lambda held: lax.dynamic_index_in_dim(held, slot, keepdims=False), stash)


@jax.named_scope("stash")
def _write(stash: Any, value: Any, slot: jax.Array) -> Any:
    """The stash with stash[slot] replaced. -1, for no slot, writes to the scratch slot."""

    def write(held: jax.Array, x: jax.Array) -> jax.Array:
        return lax.dynamic_update_index_in_dim(held, x, jnp.where(slot < 0, held.shape[0] - 1, slot), 0)

    return jax.tree.map(write, stash, value)
