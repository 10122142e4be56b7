"""Differentiable attention on Hopper: pads to complete tiles and runs the kernels.

It also selects the blocks that each tile visits, as tables or lists, where the kernels cannot
compute them.

Shape suffixes: B batch, S query sequence, T key sequence, N heads, K kv heads.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from pallas_kernels.attention.hopper.backward import BackwardTiles, backward
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
    """For the fused backward pass, which serves calls whose sums need no fixed order; None: dq and
    dkv serve all calls."""


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
    sides = _sides(sinks, segment_ids, kv_segment_ids, q_offset)
    return _attention(_spec(problem), tiling, q, k, v, sides)


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
    """Returns dq, dk, dv and dsinks as `attention_gradients` does; arguments as of `attention`."""
    sides = _sides(sinks, segment_ids, kv_segment_ids, q_offset)
    residuals = _Residuals(q, k, v, sides, out, lse)
    return _gradients(_spec(problem), tiling, residuals, dout, jnp.zeros_like(lse))


def _spec(problem: AttentionProblem) -> Spec:
    q_offset = problem.q_offset
    if not problem.causal:
        q_offset = 0
    elif q_offset is not None:
        q_offset = max(-_FAR, min(q_offset, _FAR))
    return Spec(
        S=problem.q_shape[1],
        T=problem.k_shape[1],
        scale=problem.scale,
        causal=problem.causal,
        window=None if problem.window is None else min(problem.window, _FAR),
        softcap=problem.softcap,
        q_offset=q_offset,
        segments=problem.segments,
        sinks=problem.sinks,
        block_mask=problem.block_mask,
        deterministic=problem.deterministic,
        unrounded=problem.unrounded,
    )


class _Sides(NamedTuple):
    """The arrays of a call besides q, k and v."""

    sinks: Array | None
    q_ids: Array | None
    k_ids: Array | None
    offset: Array


class _Residuals(NamedTuple):
    """The arrays that the forward pass keeps for the backward pass."""

    q: Array
    k: Array
    v: Array
    sides: _Sides
    out: Array
    lse: Array


def _sides(
    sinks: Array | None,
    segment_ids: Array | None,
    kv_segment_ids: Array | None,
    q_offset: int | Array,
) -> _Sides:
    q_ids = k_ids = None
    if segment_ids is not None and kv_segment_ids is not None:
        q_ids = segment_ids.astype(jnp.int32)
        k_ids = kv_segment_ids.astype(jnp.int32)
    if sinks is not None:
        sinks = sinks.astype(jnp.float32)
    return _Sides(sinks, q_ids, k_ids, jnp.asarray(q_offset, jnp.int32))


# A Mosaic GPU kernel has no derivative rule: the backward pass has kernels of its own.
@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attention(
    spec: Spec, tiling: Tiling, q: Array, k: Array, v: Array, sides: _Sides
) -> tuple[Array, Array]:
    return _forward(spec, tiling, q, k, v, sides)[0]


def _forward(
    spec: Spec, tiling: Tiling, q: Array, k: Array, v: Array, sides: _Sides
) -> tuple[tuple[Array, Array], _Residuals]:
    tiles = tiling.forward
    pad_queries = partial(_padded, multiple=tiles.rows)
    pad_keys = partial(_padded, multiple=tiles.block)
    inputs = {"sinks": sides.sinks, **_side_inputs(spec, tiles, sides, pad_queries, pad_keys)}
    out, lse_BNS = forward(spec, tiles, pad_queries(q), pad_keys(k), pad_keys(v), inputs)
    # Named, so that a policy of rematerialisation can save them: with both the backward pass needs
    # no second forward kernel.
    out = checkpoint_name(out[:, : spec.S], "attention_out")
    lse = checkpoint_name(lse_BNS.swapaxes(1, 2)[:, : spec.S], "attention_lse")
    return (out, lse), _Residuals(q, k, v, sides, out, lse)


def _backward(
    spec: Spec, tiling: Tiling, residuals: _Residuals, cotangents: tuple[Array, Array]
) -> tuple[Array, Array, Array, _Sides]:
    dq, dk, dv, dsinks = _gradients(spec, tiling, residuals, *cotangents)
    # None: integers have no gradient.
    d_sides: Any = _Sides(dsinks, None, None, None)  # pyright: ignore[reportArgumentType]
    return dq, dk, dv, d_sides


_attention.defvjp(_forward, _backward)


def _gradients(
    spec: Spec, tiling: Tiling, residuals: _Residuals, dout: Array, dlse: Array
) -> tuple[Array, Array, Array, Array | None]:
    """(dq, dk, dv, dsinks), the last of which is None without sinks."""
    q, k, v, sides, out, lse = residuals
    empty = lse == -jnp.inf
    delta = row_constant(dout, out, dlse, empty)
    # Complete tiles of all kernels: the rows of one are the blocks of the other, and a tile's rows
    # are a multiple of every block.
    pad = partial(_padded, multiple=tiling.dq.rows)
    # +inf makes every probability of a row 0, for rows that see no key and for padding.
    lse_BNS = pad(jnp.where(empty, jnp.inf, lse), fill=jnp.inf).swapaxes(1, 2)

    def side_inputs(tiles: Tiles | FusedTiles, rows_are_keys: bool) -> dict[str, Array | None]:
        return _side_inputs(spec, tiles, sides, pad, pad, rows_are_keys)

    dq, dk, dv = backward(
        spec,
        BackwardTiles(tiling.fused, tiling.dq, tiling.dkv),
        pad(q),
        pad(k),
        pad(v),
        pad(dout.astype(q.dtype)),
        lse_BNS,
        pad(delta).swapaxes(1, 2),
        side_inputs,
    )
    dsinks = None
    if sides.sinks is not None:
        p_sinks = jnp.exp(sides.sinks - jnp.where(empty, jnp.inf, lse))
        dsinks = -(p_sinks * delta).sum((0, 1))
    return dq[:, : spec.S], dk[:, : spec.T], dv[:, : spec.T], dsinks


def _padded(x: Array, multiple: int, fill: float = 0) -> Array:
    """x with its sequence (dim 1) padded to a multiple."""
    n_missing = -x.shape[1] % multiple
    if not n_missing:
        return x
    padding = [(0, 0), (0, n_missing)] + [(0, 0)] * (x.ndim - 2)
    return jnp.pad(x, padding, constant_values=fill)


def _side_inputs(
    spec: Spec,
    tiles: Tiles | FusedTiles,
    sides: _Sides,
    pad_queries: Any,
    pad_keys: Any,
    rows_are_keys: bool = False,
) -> dict[str, Array | None]:
    """The inputs of a kernel besides the matrices. rows_are_keys: whether its rows are keys."""
    inputs: dict[str, Array | None] = dict.fromkeys(
        ("table", "counts", "blocks", "offset", "q_ids", "k_ids")
    )
    if spec.traced:
        inputs["offset"] = sides.offset.reshape(1)
    if sides.q_ids is not None and sides.k_ids is not None:
        inputs["q_ids"] = pad_queries(sides.q_ids)
        inputs["k_ids"] = pad_keys(sides.k_ids)

    band = spec.band(sides.offset if spec.traced else None)
    n_rows = spec.S
    n_columns = spec.T
    row_ids = sides.q_ids
    column_ids = sides.k_ids
    if rows_are_keys:
        band = band.transposed
        n_rows = spec.T
        n_columns = spec.S
        row_ids = sides.k_ids
        column_ids = sides.q_ids
    # Padding queries, the columns of a tile of keys, have probability 0 (see `_gradients`).
    pad_is_harmless = rows_are_keys

    if spec.block_mask is not None:
        visible = spec.block_mask.visible
        if rows_are_keys:
            visible = visible.swapaxes(1, 2)
        counts, blocks = lists(
            visible,
            spec.block_mask.size,
            None if spec.tabled else band,
            n_rows,
            n_columns,
            tiles.rows,
            tiles.block,
            pad_is_harmless=pad_is_harmless,
        )
        inputs["counts"] = jnp.asarray(counts)
        inputs["blocks"] = jnp.asarray(blocks)
    elif spec.tabled:
        inputs["table"] = table(
            band,
            n_rows,
            n_columns,
            tiles.rows,
            tiles.block,
            row_ids,
            column_ids,
            pad_is_harmless=pad_is_harmless,
        )
    return inputs
