"""Flash attention in plain JAX: O(S) memory forward and backward, on any platform.

FlashAttention-2 (Dao, arXiv 2307.08691): online softmax over tiles of keys; the backward pass
recomputes the probabilities from the log-sum-exp. Written by hand under `jax.custom_vjp`, since
autodiff would keep every tile.

It visits the tiles (`tiles.py`) in one of two ways:
- If S and T fit one chunk each: a few blocks of rows, each with its static range of keys, unrolled
  without a loop.
- Otherwise in one loop over the tiles in which something is visible. With a static `q_offset` these
  are known when
  tracing, so causal and windowed calls skip the others; with a traced one all tiles are visited.
  The trip count is static.

A `jax.checkpoint` policy can save what the backward pass needs by the names "attention_out" and
"attention_lse".

Shape suffixes: those of `tiles.py`, H head dim (that of v for v and out).
"""

import functools
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from pallas_kernels.attention.problem import AttentionProblem
from pallas_kernels.attention.softmax_gradient import row_constant
from pallas_kernels.attention.tiles import (
    Side,
    Tile,
    TilePlan,
    from_rows,
    sides,
    take,
    to_rows,
    visible,
)

# Below every logit, but finite: a maximum that starts here never computes inf - inf, even in rows
# that see no key.
_FLOOR = -1e30
_T = TypeVar("_T")


def unsupported_reason(problem: AttentionProblem) -> str | None:
    """None: this implementation serves every valid problem."""
    return None


def attend(
    q: Array,
    k: Array,
    v: Array,
    problem: AttentionProblem,
    *,
    segment_ids: Array | None = None,
    kv_segment_ids: Array | None = None,
    q_offset: int | Array = 0,
    sinks: Array | None = None,
    q_chunk: int = 512,
    kv_chunk: int = 512,
) -> tuple[Array, Array]:
    """Returns out [B, S, N, Hv] in q's dtype and the log-sum-exp [B, S, N] in fp32 (fp64 for fp64).

    problem: describes these arrays, which are as in `flash_attention`. `q_chunk` and `kv_chunk` are
    in positions.
    """
    plan = TilePlan.of(problem, q_chunk, kv_chunk)
    sinks = None if sinks is None else sinks.astype(_accum(q))
    return _attention(
        plan, q, k, v, sinks, segment_ids, kv_segment_ids, jnp.asarray(q_offset, jnp.int32)
    )


def gradients(
    q: Array,
    k: Array,
    v: Array,
    out: Array,
    lse: Array,
    dout: Array,
    problem: AttentionProblem,
    *,
    segment_ids: Array | None = None,
    kv_segment_ids: Array | None = None,
    q_offset: int | Array = 0,
    sinks: Array | None = None,
    q_chunk: int = 512,
    kv_chunk: int = 512,
) -> tuple[Array, Array, Array, Array | None]:
    """Returns dq, dk, dv and dsinks as `attention_gradients` does. The other arguments are those of
    `attend`.
    """
    sinks = None if sinks is None else sinks.astype(_accum(q))
    residuals = (
        q,
        k,
        v,
        sinks,
        segment_ids,
        kv_segment_ids,
        jnp.asarray(q_offset, jnp.int32),
        out,
        lse,
    )
    dq, dk, dv, dsinks = _sums(
        TilePlan.of(problem, q_chunk, kv_chunk), residuals, (dout, jnp.zeros_like(lse))
    )
    if not problem.unrounded:
        dq, dk, dv = dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype)
    return dq, dk, dv, dsinks


def _accum(x: Array) -> jnp.dtype:
    return jnp.promote_types(x.dtype, jnp.float32)


def _dot(spec: str, a: Array, b: Array) -> Array:
    return jnp.einsum(spec, a, b, preferred_element_type=_accum(a))


class _State(NamedTuple):
    """Online softmax of some rows: running maximum and sum [..., R], output before normalisation
    [..., R, H].
    """

    m: Array
    l: Array
    acc: Array

    def add(self, s_BKRC: Array, v_BKCH: Array) -> "_State":
        m = jnp.maximum(self.m, s_BKRC.max(-1))
        p, keep = jnp.exp(s_BKRC - m[..., None]), jnp.exp(self.m - m)
        pv = _dot("bkrc,bkch->bkrh", p.astype(v_BKCH.dtype), v_BKCH)
        return _State(m, self.l * keep + p.sum(-1), self.acc * keep[..., None] + pv)

    def finish(self) -> tuple[Array, Array]:
        """(output, log-sum-exp): 0 and -inf for rows that see no key."""
        l = jnp.where(self.l == 0, 1, self.l)
        return self.acc / l[..., None], jnp.where(self.l == 0, -jnp.inf, self.m + jnp.log(l))


def _start(plan: TilePlan, q_BKRH: Array, H: int, sinks_N: Array | None) -> _State:
    """The initial state of rows. A sink is a key without a value, which is the state that its rows
    start from.
    """
    B, K, R, _ = q_BKRH.shape
    acc = jnp.zeros((B, K, R, H), _accum(q_BKRH))
    if sinks_N is None:
        return _State(jnp.full_like(acc[..., 0], _FLOOR), jnp.zeros_like(acc[..., 0]), acc)
    sink = jnp.broadcast_to(jnp.repeat(sinks_N.reshape(K, -1), plan.q_chunk, axis=1), (B, K, R))
    m = jnp.maximum(sink, _FLOOR)
    return _State(m, jnp.exp(sink - m), acc)


def _logits(
    plan: TilePlan, tile: Tile, q_BKRH: Array, k_BKCH: Array, rows: Side, keys: Side
) -> tuple[Array, Array | None]:
    """(masked logits [B, K, R, C], the slope of the soft cap, if there is one)."""
    s, slope = _dot("bkrh,bkch->bkrc", q_BKRH, k_BKCH) * plan.scale, None
    if plan.softcap is not None:
        t = jnp.tanh(s / plan.softcap)
        s, slope = plan.softcap * t, 1 - t * t
    mask = visible(plan, tile, q_BKRH.shape[1], rows, keys)
    return s if mask is None else jnp.where(mask, s, -jnp.inf), slope


def _walk(plan: TilePlan, add: Callable[[Tile, _T], _T], sums: _T) -> _T:
    """`sums` with every tile added, in a loop."""
    tiles = np.array([(tile.i, tile.j) for tile in plan.tiles()], np.int32).reshape(-1, 2)
    return jax.lax.scan(
        lambda y, ij: (add(Tile(ij[0], ij[1], 0, plan.kv_chunk), y), None), sums, tiles
    )[0]


def _after(x: _T, previous: object) -> _T:
    """x, unavailable before `previous` is computed, so that unrolled tiles run one by one and share
    memory.
    """
    return jax.lax.optimization_barrier((x, previous))[0]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(
    plan: TilePlan,
    q: Array,
    k: Array,
    v: Array,
    sinks: Array | None,
    segment_ids: Array | None,
    kv_segment_ids: Array | None,
    q_offset: Array,
) -> tuple[Array, Array]:
    return _forward(plan, q, k, v, sinks, segment_ids, kv_segment_ids, q_offset)[0]


def _forward(
    plan: TilePlan,
    q: Array,
    k: Array,
    v: Array,
    sinks: Array | None,
    segment_ids: Array | None,
    kv_segment_ids: Array | None,
    q_offset: Array,
) -> tuple[tuple[Array, Array], tuple]:
    N, K = q.shape[2], k.shape[2]
    rows, keys = sides(plan, N // K, segment_ids, kv_segment_ids, q_offset)
    qs, ks, vs = (
        to_rows(q, K, plan.q_chunk),
        to_rows(k, K, plan.kv_chunk),
        to_rows(v, K, plan.kv_chunk),
    )
    start = _start(plan, qs[0], v.shape[-1], sinks)

    def add(tile: Tile, q_i: Array, state: _State) -> _State:
        i, j, a, b = tile
        s, _ = _logits(plan, tile, q_i, take(ks, j)[:, :, a:b], rows.take(i), keys.take(j, a, b))
        return state.add(s, take(vs, j)[:, :, a:b])

    def add_in_place(tile: Tile, state: _State) -> _State:
        row = add(tile, take(qs, tile.i), _State(*(take(y, tile.i) for y in state)))
        return _State(
            *(
                jax.lax.dynamic_update_index_in_dim(y, z, tile.i, 0)
                for y, z in zip(state, row, strict=True)
            )
        )

    if plan.unrolled:
        done: list[_State] = [start] * plan.n_q
        for tile in plan.tiles():
            done[tile.i] = add(tile, _after(qs[tile.i], done[tile.i - 1]), start)
        state = _State(*map(jnp.stack, zip(*done, strict=True)))
    else:
        state = _walk(
            plan,
            add_in_place,
            jax.tree.map(lambda y: jnp.broadcast_to(y, (plan.n_q, *y.shape)), start),
        )
    out, lse = (from_rows(y, plan.S, N) for y in state.finish())
    out, lse = (
        checkpoint_name(out.astype(q.dtype), "attention_out"),
        checkpoint_name(lse, "attention_lse"),
    )
    return (out, lse), (q, k, v, sinks, segment_ids, kv_segment_ids, q_offset, out, lse)


def _backward(plan: TilePlan, residuals: tuple, cotangents: tuple[Array, Array]) -> tuple:
    q, k, v, *_ = residuals
    dq, dk, dv, dsinks = _sums(plan, residuals, cotangents)
    return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype), dsinks, None, None, None


def _sums(
    plan: TilePlan, residuals: tuple, cotangents: tuple[Array, Array]
) -> tuple[Array, Array, Array, Array | None]:
    """dq, dk and dv in the type of the log-sum-exp, in which they are summed, and dsinks."""
    q, k, v, sinks, segment_ids, kv_segment_ids, q_offset, out, lse = residuals
    # Without this barrier XLA would keep the logits of the forward pass instead of recomputing them
    # here.
    q, lse = jax.lax.optimization_barrier((q, lse))
    dout, dlse = cotangents
    N, K = q.shape[2], k.shape[2]
    empty = lse == -jnp.inf
    lse_safe = jnp.where(empty, 0, lse)
    delta = row_constant(dout, out, dlse, empty)
    rows, keys = sides(plan, N // K, segment_ids, kv_segment_ids, q_offset)
    qs, douts, lses, deltas = (to_rows(y, K, plan.q_chunk) for y in (q, dout, lse_safe, delta))
    ks, vs = (to_rows(y, K, plan.kv_chunk) for y in (k, v))

    def grads(tile: Tile, q_i: Array, dout_i: Array) -> tuple[Array, Array, Array]:
        i, j, a, b = tile
        k_j, v_j = take(ks, j)[:, :, a:b], take(vs, j)[:, :, a:b]
        s, slope = _logits(plan, tile, q_i, k_j, rows.take(i), keys.take(j, a, b))
        p = jnp.exp(s - take(lses, i)[..., None])
        ds = p * (_dot("bkrh,bkch->bkrc", dout_i, v_j) - take(deltas, i)[..., None])
        ds = (ds if slope is None else ds * slope).astype(q.dtype)
        dv = _dot("bkrc,bkrh->bkch", p.astype(q.dtype), dout_i)
        return _dot("bkrc,bkch->bkrh", ds, k_j), _dot("bkrc,bkrh->bkch", ds, q_i), dv

    def add_in_place(tile: Tile, sums: tuple[Array, ...]) -> tuple[Array, ...]:
        parts = grads(tile, take(qs, tile.i), take(douts, tile.i))
        places = zip(sums, parts, (tile.i, tile.j, tile.j), strict=True)
        return tuple(
            jax.lax.dynamic_update_index_in_dim(y, take(y, at) + part, at, 0)
            for y, part, at in places
        )

    zeros = [jnp.zeros(y.shape, lse.dtype) for y in (qs, ks, vs)]
    if plan.unrolled:
        dqs, part = list(zeros[0]), ()
        dk, dv = zeros[1:]
        for tile in plan.tiles():
            part = grads(tile, *_after((qs[tile.i], douts[tile.i]), part))
            pad = [(0, 0), (0, 0), (tile.start, plan.T - tile.stop), (0, 0)]
            dqs[tile.i], dk, dv = part[0], dk + jnp.pad(part[1], pad), dv + jnp.pad(part[2], pad)
        dq = jnp.stack(dqs)
    else:
        dq, dk, dv = _walk(plan, add_in_place, tuple(zeros))
    dq, dk, dv = (
        from_rows(dq, plan.S, N) * plan.scale,
        from_rows(dk, plan.T, K) * plan.scale,
        from_rows(dv, plan.T, K),
    )
    dsinks = None if sinks is None else -(jnp.exp(sinks - lse_safe) * delta).sum((0, 1))
    return dq, dk, dv, dsinks


_attention.defvjp(_forward, _backward)
