"""Differentiable attention on Hopper: pads to complete tiles, selects the blocks that each tile
visits, runs the kernels.

Shape suffixes: B batch, S query sequence, T key sequence, N heads, K kv heads.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from pallas_kernels.attention.hopper.backward import backward
from pallas_kernels.attention.hopper.forward import forward
from pallas_kernels.attention.hopper.fused_tiles import FusedTiles
from pallas_kernels.attention.hopper.spec import ForwardTiles, Spec, Tiles
from pallas_kernels.attention.hopper.walk import lists, table
from pallas_kernels.attention.problem import AttentionProblem
from pallas_kernels.attention.softmax_gradient import row_constant

_FAR = 2**30
"""Longer than any sequence, and twice as much is still an int32."""


@dataclasses.dataclass(frozen=True)
class Tiling:
    """The tiles of each kernel."""

    forward: ForwardTiles
    dq: Tiles
    """Rows are queries, blocks are of keys."""
    dkv: Tiles
    """Rows are keys, blocks are of queries."""
    fused: FusedTiles | None = None
    """The fused backward pass uses these, unless sums must have a fixed order; None: the two
    kernels above serve all calls."""


def attention(
    q: Array,
    k: Array,
    v: Array,
    problem: AttentionProblem,
    tiling: Tiling,
    *,
    segment_ids: Array | None = None,
    kv_segment_ids: Array | None = None,
    q_offset: int | Array = 0,
    sinks: Array | None = None,
) -> tuple[Array, Array]:
    """Returns out [B, S, N, Hv] in q's dtype and the log-sum-exp [B, S, N] in fp32.

    problem: describes these arrays, which are as in `flash_attention`. A `jax.checkpoint` policy
    can save what the backward pass needs by the names "attention_out" and "attention_lse".
    """
    sinks, ids, offset = _inputs(sinks, segment_ids, kv_segment_ids, q_offset)
    return _attention(_spec(problem), tiling, q, k, v, sinks, ids, offset)


def gradients(
    q: Array,
    k: Array,
    v: Array,
    out: Array,
    lse: Array,
    dout: Array,
    problem: AttentionProblem,
    tiling: Tiling,
    *,
    segment_ids: Array | None = None,
    kv_segment_ids: Array | None = None,
    q_offset: int | Array = 0,
    sinks: Array | None = None,
) -> tuple[Array, Array, Array, Array | None]:
    """Returns dq, dk, dv and dsinks as `attention_gradients` does. problem, tiling: as for
    `attention`.
    """
    sinks, ids, offset = _inputs(sinks, segment_ids, kv_segment_ids, q_offset)
    dq, dk, dv, dsinks, *_ = _backward(
        _spec(problem), tiling, (q, k, v, sinks, ids, offset, out, lse), (dout, jnp.zeros_like(lse))
    )
    return dq, dk, dv, dsinks


def _spec(problem: AttentionProblem) -> Spec:
    return Spec(
        S=problem.q_shape[1],
        T=problem.k_shape[1],
        scale=problem.scale,
        causal=problem.causal,
        window=None if problem.window is None else min(problem.window, _FAR),
        softcap=problem.softcap,
        q_offset=(None if problem.q_offset is None else max(-_FAR, min(problem.q_offset, _FAR)))
        if problem.causal
        else 0,
        segments=problem.segments,
        sinks=problem.sinks,
        block_mask=problem.block_mask,
        deterministic=problem.deterministic,
        unrounded=problem.unrounded,
    )


def _inputs(
    sinks: Array | None,
    segment_ids: Array | None,
    kv_segment_ids: Array | None,
    q_offset: int | Array,
) -> tuple[Array | None, tuple[Array, Array] | None, Array]:
    ids = (
        None
        if segment_ids is None or kv_segment_ids is None
        else (segment_ids.astype(jnp.int32), kv_segment_ids.astype(jnp.int32))
    )
    return (
        None if sinks is None else sinks.astype(jnp.float32),
        ids,
        jnp.asarray(q_offset, jnp.int32),
    )


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attention(
    spec: Spec,
    tiling: Tiling,
    q: Array,
    k: Array,
    v: Array,
    sinks: Array | None,
    ids: tuple[Array, Array] | None,
    offset: Array,
) -> tuple[Array, Array]:
    return _forward(spec, tiling, q, k, v, sinks, ids, offset)[0]


def _forward(
    spec: Spec,
    tiling: Tiling,
    q: Array,
    k: Array,
    v: Array,
    sinks: Array | None,
    ids: tuple[Array, Array] | None,
    offset: Array,
) -> tuple[tuple[Array, Array], tuple]:
    tiles = tiling.forward
    queries, keys = partial(_padded, multiple=tiles.rows), partial(_padded, multiple=tiles.block)
    sides = {"sinks": sinks, **_sides(spec, tiles, ids, offset, queries, keys)}
    out, lse = forward(spec, tiles, queries(q), keys(k), keys(v), sides)
    out, lse = (
        checkpoint_name(out[:, : spec.S], "attention_out"),
        checkpoint_name(lse.swapaxes(1, 2)[:, : spec.S], "attention_lse"),
    )
    return (out, lse), (q, k, v, sinks, ids, offset, out, lse)


def _backward(
    spec: Spec, tiling: Tiling, residuals: tuple, cotangents: tuple[Array, Array]
) -> tuple:
    q, k, v, sinks, ids, offset, out, lse = residuals
    dout, dlse = cotangents
    empty = lse == -jnp.inf
    delta = row_constant(dout, out, dlse, empty)
    # Complete tiles of all kernels: the rows of one are the blocks of the other, and a tile's rows
    # are a multiple of every block.
    queries = keys = partial(_padded, multiple=tiling.dq.rows)
    # +inf makes every probability of a row 0, for rows that see no key and for padding.
    lse_BNS = queries(jnp.where(empty, jnp.inf, lse), fill=jnp.inf).swapaxes(1, 2)
    dq, dk, dv = backward(
        spec,
        (tiling.fused, tiling.dq, tiling.dkv),
        queries(q),
        keys(k),
        keys(v),
        queries(dout.astype(q.dtype)),
        lse_BNS,
        queries(delta).swapaxes(1, 2),
        lambda tiles, by_key: _sides(spec, tiles, ids, offset, queries, keys, by_key),
    )
    dsinks = (
        None
        if sinks is None
        else -(jnp.exp(sinks - jnp.where(empty, jnp.inf, lse)) * delta).sum((0, 1))
    )
    return dq[:, : spec.S], dk[:, : spec.T], dv[:, : spec.T], dsinks, None, None


_attention.defvjp(_forward, _backward)


def _padded(x: Array, multiple: int, fill: float = 0) -> Array:
    """x with its sequence (dim 1) padded to a multiple."""
    missing = -x.shape[1] % multiple
    return (
        jnp.pad(x, [(0, 0), (0, missing)] + [(0, 0)] * (x.ndim - 2), constant_values=fill)
        if missing
        else x
    )


def _sides(
    spec: Spec,
    tiles: Tiles | FusedTiles,
    ids: tuple[Array, Array] | None,
    offset: Array,
    queries: Any,
    keys: Any,
    by_key: bool = False,
) -> dict[str, Array | None]:
    """The inputs of a kernel besides the matrices. by_key: whether its rows are keys."""
    sides: dict[str, Array | None] = dict.fromkeys(
        ("table", "counts", "blocks", "offset", "q_ids", "k_ids")
    )
    if spec.traced:
        sides["offset"] = offset.reshape(1)
    if ids is not None:
        sides["q_ids"], sides["k_ids"] = queries(ids[0]), keys(ids[1])
    band = spec.band(offset if spec.traced else None)
    n_rows, n_columns, row_and_column_ids = spec.S, spec.T, ids or (None, None)
    how = {}
    if by_key:
        # Padding queries have probability 0 (see _backward).
        band, n_rows, n_columns, how = band.transposed, spec.T, spec.S, {"pad_is_harmless": True}
        row_and_column_ids = row_and_column_ids[::-1]
    if spec.block_mask is not None:
        visible = spec.block_mask.visible.swapaxes(1, 2) if by_key else spec.block_mask.visible
        static = None if spec.tabled else band
        counts, blocks = lists(
            visible, spec.block_mask.size, static, n_rows, n_columns, tiles.rows, tiles.block, **how
        )
        sides["counts"], sides["blocks"] = jnp.asarray(counts), jnp.asarray(blocks)
    elif spec.tabled:
        sides["table"] = table(
            band, n_rows, n_columns, tiles.rows, tiles.block, *row_and_column_ids, **how
        )
    return sides
