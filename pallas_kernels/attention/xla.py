"""Flash attention in plain JAX: O(S) memory forward and backward, on any platform.

FlashAttention-2 (Dao, arXiv 2307.08691): online softmax over tiles of keys; the backward pass
recomputes the probabilities from the log-sum-exp. Its gradient is a `jax.custom_vjp`, since
autodiff would keep every tile.

It visits the tiles (`tiles.py`) in one of two ways:
- If S and T fit one chunk each: a few blocks of rows, each with its static range of keys, unrolled
  without a loop.
- Otherwise in one loop, with a static trip count, over the tiles in which something is visible.
  With a static `q_offset` these are known when tracing, so causal and windowed calls skip the
  others; with a traced one all tiles are visited.

A `jax.checkpoint` policy can save what the backward pass needs by the names "attention_out" and
"attention_lse".

Shape suffixes: those of `tiles.py`, H head dim (that of v for v and out).
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

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

_FLOOR = -1e30
"""Below every logit, but finite: a maximum that starts here never computes inf - inf, even in rows
that see no key."""
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

    Args:
      problem: describes these arrays, which are as in `flash_attention`.
      q_chunk, kv_chunk: the most positions of a tile.
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
    """Returns dq, dk, dv and dsinks as `attention_gradients` does; the rest is as in `attend`."""
    plan = TilePlan.of(problem, q_chunk, kv_chunk)
    sinks = None if sinks is None else sinks.astype(_accum(q))
    offset = jnp.asarray(q_offset, jnp.int32)
    residuals = _Residuals(q, k, v, sinks, segment_ids, kv_segment_ids, offset, out, lse)
    dq, dk, dv, dsinks = _unrounded_gradients(plan, residuals, dout, jnp.zeros_like(lse))
    if not problem.unrounded:
        dq, dk, dv = dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype)
    return dq, dk, dv, dsinks


class _Residuals(NamedTuple):
    """The arrays that the forward pass keeps for the backward pass."""

    q: Array
    k: Array
    v: Array
    sinks: Array | None
    segment_ids: Array | None
    kv_segment_ids: Array | None
    q_offset: Array
    out: Array
    lse: Array


# The derivative that JAX would make of the scan stores the probabilities of every tile, S x T in
# all. This one recomputes them from `lse` (FlashAttention-2, arXiv 2307.08691, algorithm 2).
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
) -> tuple[tuple[Array, Array], _Residuals]:
    N = q.shape[2]
    K = k.shape[2]
    rows, keys = sides(plan, N // K, segment_ids, kv_segment_ids, q_offset)
    q_chunks = to_rows(q, K, plan.q_chunk)
    k_chunks = to_rows(k, K, plan.kv_chunk)
    v_chunks = to_rows(v, K, plan.kv_chunk)
    initial = _initial_softmax(plan, q_chunks[0], v.shape[-1], sinks)

    def add(tile: Tile, q_BKRH: Array, softmax: _Softmax) -> _Softmax:
        i, j, start, stop = tile
        k_BKCH = take(k_chunks, j)[:, :, start:stop]
        s, _ = _logits(plan, tile, q_BKRH, k_BKCH, rows.take(i), keys.take(j, start, stop))
        return softmax.add(s, take(v_chunks, j)[:, :, start:stop])

    def add_in_place(tile: Tile, stacked: _Softmax) -> _Softmax:
        q_BKRH = take(q_chunks, tile.i)
        chunk = add(tile, q_BKRH, _Softmax(*(take(x, tile.i) for x in stacked)))
        updated = [
            jax.lax.dynamic_update_index_in_dim(x, new, tile.i, 0)
            for x, new in zip(stacked, chunk, strict=True)
        ]
        return _Softmax(*updated)

    if plan.unrolled:
        chunk_softmax: list[_Softmax] = [initial] * plan.n_q
        for tile in plan.tiles():
            q_BKRH = _ordered(q_chunks[tile.i], chunk_softmax[tile.i - 1])
            chunk_softmax[tile.i] = add(tile, q_BKRH, initial)
        softmax = _Softmax(*map(jnp.stack, zip(*chunk_softmax, strict=True)))
    else:
        stacked = jax.tree.map(lambda x: jnp.broadcast_to(x, (plan.n_q, *x.shape)), initial)
        softmax = _scan_tiles(plan, add_in_place, stacked)

    out_chunks, lse_chunks = softmax.finish()
    out = from_rows(out_chunks, plan.S, N)
    lse = from_rows(lse_chunks, plan.S, N)
    # Named, so that a policy of rematerialisation can save them.
    out = checkpoint_name(out.astype(q.dtype), "attention_out")
    lse = checkpoint_name(lse, "attention_lse")
    residuals = _Residuals(q, k, v, sinks, segment_ids, kv_segment_ids, q_offset, out, lse)
    return (out, lse), residuals


def _backward(
    plan: TilePlan, residuals: _Residuals, cotangents: tuple[Array, Array]
) -> tuple[Array | None, ...]:
    q, k, v, *_ = residuals
    dq, dk, dv, dsinks = _unrounded_gradients(plan, residuals, *cotangents)
    return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype), dsinks, None, None, None


_attention.defvjp(_forward, _backward)


def _unrounded_gradients(
    plan: TilePlan, residuals: _Residuals, dout: Array, dlse: Array
) -> tuple[Array, Array, Array, Array | None]:
    """dq, dk and dv in the dtype of the log-sum-exp, in which they are summed, and dsinks."""
    q, k, v, sinks, segment_ids, kv_segment_ids, q_offset, out, lse = residuals
    # Without this barrier XLA would keep the logits of the forward pass instead of recomputing them
    # here.
    q, lse = jax.lax.optimization_barrier((q, lse))
    N = q.shape[2]
    K = k.shape[2]
    empty = lse == -jnp.inf
    finite_lse = jnp.where(empty, 0, lse)
    delta = row_constant(dout, out, dlse, empty)

    rows, keys = sides(plan, N // K, segment_ids, kv_segment_ids, q_offset)
    q_chunks = to_rows(q, K, plan.q_chunk)
    dout_chunks = to_rows(dout, K, plan.q_chunk)
    lse_chunks = to_rows(finite_lse, K, plan.q_chunk)
    delta_chunks = to_rows(delta, K, plan.q_chunk)
    k_chunks = to_rows(k, K, plan.kv_chunk)
    v_chunks = to_rows(v, K, plan.kv_chunk)

    def tile_gradients(tile: Tile, q_BKRH: Array, dout_BKRH: Array) -> _TileGradients:
        i, j, start, stop = tile
        k_BKCH = take(k_chunks, j)[:, :, start:stop]
        v_BKCH = take(v_chunks, j)[:, :, start:stop]
        row_side = rows.take(i)
        key_side = keys.take(j, start, stop)
        s, slope = _logits(plan, tile, q_BKRH, k_BKCH, row_side, key_side)
        p = jnp.exp(s - take(lse_chunks, i)[..., None])
        dp = _dot("bkrh,bkch->bkrc", dout_BKRH, v_BKCH)
        ds = p * (dp - take(delta_chunks, i)[..., None])
        if slope is not None:
            ds = ds * slope
        ds = ds.astype(q.dtype)
        dv = _dot("bkrc,bkrh->bkch", p.astype(q.dtype), dout_BKRH)
        dq = _dot("bkrc,bkch->bkrh", ds, k_BKCH)
        dk = _dot("bkrc,bkrh->bkch", ds, q_BKRH)
        return _TileGradients(dq, dk, dv)

    def add_in_place(tile: Tile, sums: _TileGradients) -> _TileGradients:
        terms = tile_gradients(tile, take(q_chunks, tile.i), take(dout_chunks, tile.i))
        indices = (tile.i, tile.j, tile.j)
        updated = [
            jax.lax.dynamic_update_index_in_dim(x, take(x, index) + term, index, 0)
            for x, term, index in zip(sums, terms, indices, strict=True)
        ]
        return _TileGradients(*updated)

    zeros = _TileGradients(*(jnp.zeros(x.shape, lse.dtype) for x in (q_chunks, k_chunks, v_chunks)))
    if plan.unrolled:
        dq_by_chunk = list(zeros.dq)
        dk_chunks = zeros.dk
        dv_chunks = zeros.dv
        previous: Any = ()
        for tile in plan.tiles():
            q_BKRH, dout_BKRH = _ordered((q_chunks[tile.i], dout_chunks[tile.i]), previous)
            previous = tile_gradients(tile, q_BKRH, dout_BKRH)
            padding = [(0, 0), (0, 0), (tile.start, plan.T - tile.stop), (0, 0)]
            dq_by_chunk[tile.i] = previous.dq
            dk_chunks = dk_chunks + jnp.pad(previous.dk, padding)
            dv_chunks = dv_chunks + jnp.pad(previous.dv, padding)
        dq_chunks = jnp.stack(dq_by_chunk)
    else:
        dq_chunks, dk_chunks, dv_chunks = _scan_tiles(plan, add_in_place, zeros)

    dq = from_rows(dq_chunks, plan.S, N) * plan.scale
    dk = from_rows(dk_chunks, plan.T, K) * plan.scale
    dv = from_rows(dv_chunks, plan.T, K)
    dsinks = None
    if sinks is not None:
        dsinks = -(jnp.exp(sinks - finite_lse) * delta).sum((0, 1))
    return dq, dk, dv, dsinks


class _TileGradients(NamedTuple):
    """The terms of one tile, dq [B, K, R, H], dk and dv [B, K, C, H], or sums of all chunks."""

    dq: Array
    dk: Array
    dv: Array


class _Softmax(NamedTuple):
    """The state of the online softmax of some rows."""

    max: Array
    """[..., R]: the largest logit so far."""
    sum: Array
    """[..., R]: the sum of exp(logit - max)."""
    out: Array
    """[..., R, H]: the output before normalisation."""

    def add(self, s_BKRC: Array, v_BKCH: Array) -> "_Softmax":
        """The state after the logits of one more tile of keys, with their values."""
        new_max = jnp.maximum(self.max, s_BKRC.max(-1))
        p = jnp.exp(s_BKRC - new_max[..., None])
        rescale = jnp.exp(self.max - new_max)
        pv = _dot("bkrc,bkch->bkrh", p.astype(v_BKCH.dtype), v_BKCH)
        return _Softmax(new_max, self.sum * rescale + p.sum(-1), self.out * rescale[..., None] + pv)

    def finish(self) -> tuple[Array, Array]:
        """(output, log-sum-exp): 0 and -inf for rows that see no key."""
        divisor = jnp.where(self.sum == 0, 1, self.sum)
        out = self.out / divisor[..., None]
        lse = jnp.where(self.sum == 0, -jnp.inf, self.max + jnp.log(divisor))
        return out, lse


def _initial_softmax(plan: TilePlan, q_BKRH: Array, H: int, sinks_N: Array | None) -> _Softmax:
    """The state of rows before their first tile: that after their sink, if there is one.

    A sink is a key without a value.
    """
    B, K, R, _ = q_BKRH.shape
    out = jnp.zeros((B, K, R, H), _accum(q_BKRH))
    if sinks_N is None:
        return _Softmax(jnp.full_like(out[..., 0], _FLOOR), jnp.zeros_like(out[..., 0]), out)
    sink = jnp.broadcast_to(jnp.repeat(sinks_N.reshape(K, -1), plan.q_chunk, axis=1), (B, K, R))
    initial_max = jnp.maximum(sink, _FLOOR)
    return _Softmax(initial_max, jnp.exp(sink - initial_max), out)


def _logits(
    plan: TilePlan, tile: Tile, q_BKRH: Array, k_BKCH: Array, rows: Side, keys: Side
) -> tuple[Array, Array | None]:
    """(masked logits [B, K, R, C], the slope of the soft cap, if there is one)."""
    s = _dot("bkrh,bkch->bkrc", q_BKRH, k_BKCH) * plan.scale
    slope = None
    if plan.softcap is not None:
        t = jnp.tanh(s / plan.softcap)
        s = plan.softcap * t
        slope = 1 - t * t
    mask = visible(plan, tile, q_BKRH.shape[1], rows, keys)
    if mask is not None:
        s = jnp.where(mask, s, -jnp.inf)
    return s, slope


def _scan_tiles(plan: TilePlan, add: Callable[[Tile, _T], _T], sums: _T) -> _T:
    """`sums` with every tile added, in a loop."""
    indices: Any = np.array([(tile.i, tile.j) for tile in plan.tiles()], np.int32).reshape(-1, 2)

    def step(sums: _T, ij: Array) -> tuple[_T, None]:
        return add(Tile(ij[0], ij[1], 0, plan.kv_chunk), sums), None

    return jax.lax.scan(step, sums, indices)[0]


def _ordered(x: _T, previous: object) -> _T:
    """x, unavailable before `previous` is computed.

    So unrolled tiles run one by one and share memory.
    """
    return jax.lax.optimization_barrier((x, previous))[0]


def _dot(spec: str, a: Array, b: Array) -> Array:
    return jnp.einsum(spec, a, b, preferred_element_type=_accum(a))


def _accum(x: Array) -> jnp.dtype:
    """The dtype in which products of x are summed."""
    return jnp.promote_types(x.dtype, jnp.float32)
