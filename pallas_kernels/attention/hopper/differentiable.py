"""Attention on Hopper, differentiable: pads to whole tiles, finds what each tile visits, runs the kernels.

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
from pallas_kernels.attention.hopper.spec import Spec, Tiles
from pallas_kernels.attention.hopper.walk import lists, table
from pallas_kernels.attention.problem import AttentionProblem

_FAR = 2**30
"""Beyond every sequence, and twice that is still an int32."""


@dataclasses.dataclass(frozen=True)
class Tiling:
    """The cut of each kernel."""

    forward: Tiles
    dq: Tiles
    """Rows are queries, blocks are of keys."""
    dkv: Tiles
    """Rows are keys, blocks are of queries."""


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
    """Serves a checked `problem`. Arrays as in `flash_attention`.

    Returns out [B, S, N, Hv] in q's dtype and the log-sum-exp [B, S, N] in fp32. A `jax.checkpoint` policy can keep what the backward
    pass needs by the names "attention_out" and "attention_lse".
    """
    spec = Spec(
        S=problem.q_shape[1],
        T=problem.k_shape[1],
        scale=problem.scale,
        causal=problem.causal,
        window=None if problem.window is None else min(problem.window, _FAR),
        softcap=problem.softcap,
        q_offset=(None if problem.q_offset is None else max(-_FAR, min(problem.q_offset, _FAR))) if problem.causal else 0,
        segments=segment_ids is not None,
        sinks=sinks is not None,
        block_mask=problem.block_mask,
    )
    sinks = None if sinks is None else sinks.astype(jnp.float32)
    ids = None if segment_ids is None or kv_segment_ids is None else (segment_ids.astype(jnp.int32), kv_segment_ids.astype(jnp.int32))
    return _attention(spec, tiling, q, k, v, sinks, ids, jnp.asarray(q_offset, jnp.int32))


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attention(
    spec: Spec, tiling: Tiling, q: Array, k: Array, v: Array, sinks: Array | None, ids: tuple[Array, Array] | None, offset: Array
) -> tuple[Array, Array]:
    return _forward(spec, tiling, q, k, v, sinks, ids, offset)[0]


def _forward(
    spec: Spec, tiling: Tiling, q: Array, k: Array, v: Array, sinks: Array | None, ids: tuple[Array, Array] | None, offset: Array
) -> tuple[tuple[Array, Array], tuple]:
    cut = tiling.forward
    queries, keys = partial(_padded, multiple=cut.rows), partial(_padded, multiple=cut.block)
    sides = {"sinks": sinks, **_sides(spec, cut, ids, offset, queries, keys)}
    out, lse = forward(spec, cut, queries(q), keys(k), keys(v), sides)
    out, lse = checkpoint_name(out[:, : spec.S], "attention_out"), checkpoint_name(lse.swapaxes(1, 2)[:, : spec.S], "attention_lse")
    return (out, lse), (q, k, v, sinks, ids, offset, out, lse)


def _backward(spec: Spec, tiling: Tiling, residuals: tuple, cotangents: tuple[Array, Array]) -> tuple:
    q, k, v, sinks, ids, offset, out, lse = residuals
    dout, dlse = cotangents
    empty = lse == -jnp.inf
    # dL/ds = p * (dp - delta): the log-sum-exp's own gradient, p * dlse, joins the row constant of the paper.
    delta = (dout.astype(jnp.float32) * out.astype(jnp.float32)).sum(-1) - jnp.where(empty, 0, dlse)
    # Whole tiles of both kernels: what are rows to one are blocks to the other, and a tile's rows are a multiple of every block.
    queries = keys = partial(_padded, multiple=tiling.dq.rows)
    # +inf makes every probability of a row 0: of one that saw nothing, or that is not there.
    lse_BNS = queries(jnp.where(empty, jnp.inf, lse), fill=jnp.inf).swapaxes(1, 2)
    sides = _sides(spec, tiling.dq, ids, offset, queries, keys)
    sides |= {f"{name}_kv": x for name, x in _sides(spec, tiling.dkv, ids, offset, queries, keys, by_key=True).items() if name in _WALKS}
    dq, dk, dv = backward(
        spec,
        tiling.dq,
        tiling.dkv,
        queries(q),
        keys(k),
        keys(v),
        queries(dout.astype(q.dtype)),
        lse_BNS,
        queries(delta).swapaxes(1, 2),
        sides,
    )
    dsinks = None if sinks is None else -(jnp.exp(sinks - jnp.where(empty, jnp.inf, lse)) * delta).sum((0, 1))
    return dq[:, : spec.S], dk[:, : spec.T], dv[:, : spec.T], dsinks, None, None


_attention.defvjp(_forward, _backward)
_WALKS = ("table", "counts", "blocks")


def _padded(x: Array, multiple: int, fill: float = 0) -> Array:
    """x with its sequence (dim 1) filled up to a multiple."""
    missing = -x.shape[1] % multiple
    return jnp.pad(x, [(0, 0), (0, missing)] + [(0, 0)] * (x.ndim - 2), constant_values=fill) if missing else x


def _sides(
    spec: Spec, cut: Tiles, ids: tuple[Array, Array] | None, offset: Array, queries: Any, keys: Any, by_key: bool = False
) -> dict[str, Array | None]:
    """What a kernel is given beside the matrices. by_key: its rows are keys."""
    sides: dict[str, Array | None] = dict.fromkeys(("table", "counts", "blocks", "offset", "q_ids", "k_ids"))
    if spec.traced:
        sides["offset"] = offset.reshape(1)
    if ids is not None:
        sides["q_ids"], sides["k_ids"] = queries(ids[0]), keys(ids[1])
    band = spec.band(offset if spec.traced else None)
    n_rows, n_columns, found = spec.S, spec.T, ids or (None, None)
    how = {}
    if by_key:
        # Queries that are not there have probability 0 (see _backward).
        band, n_rows, n_columns, found, how = band.transposed, spec.T, spec.S, found[::-1], {"pad_is_harmless": True}
    if spec.block_mask is not None:
        visible = spec.block_mask.visible.swapaxes(1, 2) if by_key else spec.block_mask.visible
        static = None if spec.tabled else band
        counts, blocks = lists(visible, spec.block_mask.size, static, n_rows, n_columns, cut.rows, cut.block, **how)
        sides["counts"], sides["blocks"] = jnp.asarray(counts), jnp.asarray(blocks)
    elif spec.tabled:
        sides["table"] = table(band, n_rows, n_columns, cut.rows, cut.block, *found, **how)
    return sides
