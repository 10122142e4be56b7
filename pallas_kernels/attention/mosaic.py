"""The kernel of this project for Hopper, in Pallas for Mosaic GPU (`hopper/`): what it can serve,
and its call.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Unpack

import jax.numpy as jnp
from jax import Array

from pallas_kernels.attention.occupancy import section_of_keys, section_of_queries
from pallas_kernels.attention.problem import AttentionProblem, Sides

if TYPE_CHECKING:
    from pallas_kernels.attention.hopper.differentiable import Tiling

HEAD_DIMS = ((64, 64), (96, 96), (128, 128), (192, 128), (256, 256))
"""Widths of a query's and of a value's head that the kernel has tiles for. Other heads are padded
with zeros to the next of them."""
BLOCK = 128
"""Block sizes of a block mask are multiples of this, because the kernel skips complete tiles of
keys."""
_SHAPES = "q_shape", "k_shape", "v_shape"
GRID = 65_535
"""CUDA's limit for the second and third dimension of a grid."""


def unsupported_reason(problem: AttentionProblem) -> str | None:
    """Every reason why the kernel cannot serve this problem, in one line; None if it can."""
    (B, S, N, H), (_, T, K, Hv), mask = problem.q_shape, problem.v_shape, problem.block_mask
    width = sum(padded_head_dims(H, Hv) or (H, Hv))
    on_gpu = problem.platform == "gpu"
    by_keys, by_heads = (section_of_keys(S, N, K, width, split=split) for split in (False, True))
    along_z = B * max(N // section_of_queries(T, N, K, width), K // by_keys, N // by_heads)
    reasons = {
        f"it needs a Hopper GPU, and the platform is {problem.platform}": not on_gpu,
        # Its instructions (wgmma) exist on sm_90a only, not on older or newer GPUs.
        (
            "it needs compute capability 9.0, and this GPU has "
            f"{problem.capability[0]}.{problem.capability[1]}"
        ): on_gpu and problem.capability != (9, 0),
        f"it takes bfloat16 and float16, not {problem.dtype}": problem.dtype
        not in ("bfloat16", "float16"),
        f"its head dims are at most {HEAD_DIMS[-1][0]}, not {H} with values of {Hv}": padded_head_dims(
            H, Hv
        )
        is None,
        f"its block masks come in multiples of {BLOCK}, not {mask and mask.size}": mask is not None
        and mask.size % BLOCK != 0,
        f"its grid takes at most {GRID:,} batch elements times sections of heads, not {along_z:,}": along_z
        > GRID,
    }
    return "; ".join(reason for reason, holds in reasons.items() if holds) or None


def padded_head_dims(H: int, Hv: int) -> tuple[int, int] | None:
    """The narrowest of HEAD_DIMS that heads of queries and of values fit into, which are their own
    if there are such; None if none is.
    """
    return min(((h, hv) for h, hv in HEAD_DIMS if h >= H and hv >= Hv), key=sum, default=None)


def pads(problem: AttentionProblem) -> bool:
    """Whether the kernel would have to pad the heads of a problem, and multiply zeros."""
    H, Hv = problem.q_shape[3], problem.v_shape[3]
    return padded_head_dims(H, Hv) != (H, Hv)


def as_padded(problem: AttentionProblem) -> AttentionProblem:
    """The problem with the head dims of the kernel. Raises ValueError if it has none for them."""
    if (widths := padded_head_dims(problem.q_shape[3], problem.v_shape[3])) is None:
        raise ValueError(str(unsupported_reason(problem)))
    shapes = {
        name: (*getattr(problem, name)[:3], width)
        for name, width in zip(_SHAPES, (widths[0], *widths), strict=True)
    }
    return dataclasses.replace(problem, **shapes)


def attend(
    q: Array,
    k: Array,
    v: Array,
    problem: AttentionProblem,
    *,
    tiles: Tiling | None = None,
    **sides: Unpack[Sides],
) -> tuple[Array, Array]:
    """Serves a problem for which `unsupported_reason` is None. Arrays as in `flash_attention`;
    tiles: None means those of the table.

    Returns out [B, S, N, Hv] in q's dtype and the log-sum-exp [B, S, N] in fp32.
    """
    # here, so that no other platform loads Mosaic
    from pallas_kernels.attention.hopper import attention
    from pallas_kernels.attention.tuning import tiling

    if not pads(problem):
        return attention(q, k, v, problem, tiles or tiling(problem), **sides)
    # Zeros add nothing to a dot product, and columns of zeros of v give columns of zeros, which are
    # dropped.
    wide = as_padded(problem)
    q, k, v = _widened(wide, q, k, v)
    out, lse = attention(q, k, v, wide, tiles or tiling(wide), **sides)
    return out[..., : problem.v_shape[3]], lse


def gradients(
    q: Array,
    k: Array,
    v: Array,
    out: Array,
    lse: Array,
    dout: Array,
    problem: AttentionProblem,
    *,
    tiles: Tiling | None = None,
    **sides: Unpack[Sides],
) -> tuple[Array, Array, Array, Array | None]:
    """Returns dq, dk, dv and dsinks as `attention_gradients` does, for a problem that `attend`
    serves.
    """
    from pallas_kernels.attention.hopper import gradients
    from pallas_kernels.attention.tuning import tiling

    wide = as_padded(problem)
    (qw, kw, vw), (_, _, out), (_, _, dout) = (
        _widened(wide, q, k, last) for last in (v, out, dout)
    )
    dq, dk, dv, dsinks = gradients(qw, kw, vw, out, lse, dout, wide, tiles or tiling(wide), **sides)
    return dq[..., : q.shape[3]], dk[..., : k.shape[3]], dv[..., : v.shape[3]], dsinks


def _widened(wide: AttentionProblem, *arrays: Array) -> list[Array]:
    """q, k and v (or an array like the output) with zeros up to the head dims of a problem."""
    widths = (getattr(wide, name)[3] for name in _SHAPES)
    return [
        jnp.pad(x, [(0, 0)] * 3 + [(0, width - x.shape[3])])
        for x, width in zip(arrays, widths, strict=True)
    ]
