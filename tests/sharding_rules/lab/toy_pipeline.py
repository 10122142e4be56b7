"""A pipelined training step as small as one can be: 1F1B in closed form, stages of two layers, one
scan over ticks.

In tick t stage p runs the forward of microbatch t - p, and the backward of microbatch t - 2 (P - 1)
+ p.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as Spec

from sharding_rules.lab.report import Slot

LAYERS, D, F, V, B, S = 2, 1024, 4096, 8192, 8, 512
"""Layers of a stage, and the sizes of each; B sequences in a microbatch."""
_X = (None, None, None)
Params = dict[str, Any]


def slots(stages: int, microbatches: int) -> tuple[Slot, ...]:
    t, p = np.arange(microbatches + 2 * (stages - 1))[:, None], np.arange(stages)
    forward, backward = ((m >= 0) & (m < microbatches) for m in (t - p, t - 2 * (stages - 1) + p))
    table = {
        "forward_slot": forward,
        "backward_slot": backward,
        "backward_slot/head": backward & (p == stages - 1),
    }
    table |= {f"{slot}/embed": table[slot] & (p == 0) for slot in ("forward_slot", "backward_slot")}
    return tuple(Slot.of(scope, active) for scope, active in table.items())


def step(mesh: Mesh, microbatches: int, *, carry: bool = False) -> Callable[..., Any]:
    """(params, batch) -> (params, loss). carry: the mistake of changing stash and accumulators
    inside the conditional."""

    def run(params: Params, batch: dict[str, jax.Array]) -> tuple[Params, jax.Array]:
        specs = {"up": Spec("pipeline"), "down": Spec("pipeline"), "table": Spec()}
        engine = jax.shard_map(
            lambda weights, tokens, stage: _engine(
                weights, tokens, stage, mesh.shape["pipeline"], microbatches, carry
            ),
            mesh=mesh,
            axis_names={"pipeline", "data"},
            check_vma=False,
            in_specs=(specs, Spec(None, "data"), Spec("pipeline")),
            out_specs=(Spec(), specs),
        )
        weights = {name: w.astype(jnp.bfloat16) for name, w in params.items()}
        loss, grads = engine(weights, batch["tokens"], jnp.arange(mesh.shape["pipeline"]))
        with jax.named_scope("optimizer"):
            return {name: w - 0.1 * grads[name] for name, w in params.items()}, loss

    return jax.jit(run, donate_argnums=0)


def arguments(mesh: Mesh, microbatches: int) -> tuple[Params, dict[str, Any]]:
    def array(shape: tuple[int, ...], dtype: Any, *spec: str | None) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, Spec(*spec)))

    n = LAYERS * mesh.shape["pipeline"]
    params = {
        "up": array((n, D, F), jnp.float32, "pipeline", None, "tensor"),
        "table": array((V, D), jnp.float32, "tensor"),
    }
    params["down"] = array((n, F, D), jnp.float32, "pipeline", "tensor")
    return params, {"tokens": array((microbatches, B, S), jnp.int32, None, "data")}


def _pin(x: jax.Array, *spec: str | None) -> jax.Array:
    return lax.with_sharding_constraint(x, Spec(*spec))


def _pin_grads(grads: Params) -> Params:
    cuts = {"up": (None, None, "tensor"), "down": (None, "tensor"), "table": ("tensor",)}
    return {name: _pin(g, *cuts[name]) for name, g in grads.items()}


def _layer(x: jax.Array, weights: Params) -> tuple[jax.Array, None]:
    with jax.named_scope("mlp"):
        up, down = _pin(weights["up"], None, "tensor"), _pin(weights["down"], "tensor")
        return _pin(x + _pin(jax.nn.gelu(x @ up), None, None, "tensor") @ down, *_X), None


def _stage(layers: Params, x: jax.Array) -> jax.Array:
    with jax.named_scope("layers"):
        return lax.scan(jax.checkpoint(_layer), x, layers)[0]


def _embed(table: jax.Array, tokens: jax.Array) -> jax.Array:
    return _pin(jax.nn.one_hot(tokens, V, dtype=table.dtype) @ table, *_X)


def _loss(table: jax.Array, y: jax.Array, tokens: jax.Array) -> jax.Array:
    logits = _pin((y @ table.T).astype(jnp.float32), None, None, "tensor")
    return (jax.nn.logsumexp(logits, -1) - (logits * jax.nn.one_hot(tokens, V)).sum(-1)).mean()


def _engine(
    weights: Params,
    tokens: jax.Array,
    stage_id: jax.Array,
    stages: int,
    microbatches: int,
    carry: bool,
) -> tuple[jax.Array, Params]:
    stage, last, kept = stage_id[0], stages - 1, 2 * stages - 1
    layers, table = {name: weights[name] for name in ("up", "down")}, weights["table"]
    ring = [(one, (one + 1) % stages) for one in range(stages)]

    def read(m: jax.Array) -> jax.Array:
        return lax.dynamic_index_in_dim(tokens, jnp.clip(m, 0, microbatches - 1), 0, False)

    def enter(m: jax.Array, x: jax.Array) -> jax.Array:
        with jax.named_scope("embed"):
            return lax.cond(stage == 0, lambda: _embed(table, read(m)), lambda: _pin(x, *_X))

    def backward(m: jax.Array, x: jax.Array, dy: jax.Array) -> tuple[jax.Array, Params, jax.Array]:
        y, through = jax.vjp(_stage, layers, enter(m, x))

        def head() -> tuple[jax.Array, jax.Array, jax.Array]:
            loss, back = jax.vjp(lambda w, y: _loss(w, y, read(m)), table, y)
            dtable, dy = back(jnp.ones_like(loss))
            return loss, _pin(dtable, "tensor"), _pin(dy, *_X)

        with jax.named_scope("head"):
            idle = lambda: (jnp.float32(0), _pin(jnp.zeros_like(table), "tensor"), _pin(dy, *_X))  # noqa: E731
            loss, dtable, dy = lax.cond(stage == last, head, idle)
        dlayers, dx = through(dy)
        with jax.named_scope("embed"):
            back = lambda: _pin(  # noqa: E731
                dtable + jax.vjp(lambda w: _embed(w, read(m)), table)[1](dx)[0], "tensor"
            )
            dtable = lax.cond(stage == 0, back, lambda: _pin(dtable, "tensor"))
        return loss, _pin_grads({**dlayers, "table": dtable}), _pin(dx, *_X)

    def tick(state: Any, t: jax.Array) -> tuple[Any, None]:
        stash, y, dx, grads, total = state
        f, b = t - stage, t - 2 * last + stage
        dy = lax.ppermute(dx, "pipeline", [(to, one) for one, to in ring])
        x, x_b = stash[f % kept], stash[b % kept]
        with jax.named_scope("forward_slot"):
            y = lax.cond(
                (f >= 0) & (f < microbatches),
                lambda: _stage(layers, enter(f, x)),
                lambda: _pin(y, *_X),
            )
        received = lax.ppermute(y, "pipeline", ring)

        def add(new: Params) -> Params:
            return jax.tree.map(lambda total, g: total + g.astype(total.dtype), grads, new)

        def changed() -> Any:
            loss, new, dx = backward(b, x_b, dy)
            return (
                loss,
                add(new),
                dx,
                lax.dynamic_update_index_in_dim(stash, received, (f + 1) % kept, 0),
            )

        with jax.named_scope("backward_slot"):
            active = (b >= 0) & (b < microbatches)
            if carry:
                loss, grads, dx, stash = lax.cond(
                    active, changed, lambda: (jnp.float32(0), grads, _pin(dx, *_X), stash)
                )
            else:
                # Zeros that are made outside of the conditional live as long as the loop.
                idle = lambda: (  # noqa: E731
                    jnp.float32(0),
                    _pin_grads(jax.tree.map(jnp.zeros_like, weights)),
                    _pin(dx, *_X),
                )
                loss, new, dx = lax.cond(active, lambda: backward(b, x_b, dy), idle)
        if not carry:
            grads, stash = (
                add(new),
                lax.dynamic_update_index_in_dim(stash, received, (f + 1) % kept, 0),
            )
        return (stash, y, dx, grads, total + loss), None

    x = _pin(jnp.zeros((tokens.shape[1], S, D), table.dtype), *_X)
    start = (
        jnp.zeros((kept, *x.shape), x.dtype),
        x,
        x,
        jax.tree.map(lambda w: jnp.zeros(w.shape), weights),
        jnp.float32(0),
    )
    *_, grads, loss = lax.scan(tick, start, jnp.arange(microbatches + 2 * last))[0]
    loss, grads["table"] = lax.psum((loss, grads["table"]), ("pipeline", "data"))
    return loss, {**grads, **lax.psum({name: grads[name] for name in layers}, "data")}
