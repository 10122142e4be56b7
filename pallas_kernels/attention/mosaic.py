"""The kernels of this project for Hopper, in Pallas Mosaic GPU (`hopper/`): limits and calls."""

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
GRID = 65_535
"""CUDA's limit for the second and third dimension of a grid."""


def unsupported_reason(problem: AttentionProblem) -> str | None:
    """Every reason why the kernel cannot serve this problem, in one line; None if it can."""
    H = problem.q_shape[3]
    Hv = problem.v_shape[3]
    mask = problem.block_mask
    on_gpu = problem.platform == "gpu"
    major, minor = problem.capability
    grid_depth = _grid_depth(problem)

    reasons = []
    if not on_gpu:
        reasons.append(f"it needs a Hopper GPU, and the platform is {problem.platform}")
    # Its instructions (wgmma) exist on sm_90a only, not on older or newer GPUs.
    if on_gpu and problem.capability != (9, 0):
        reasons.append(f"it needs compute capability 9.0, and this GPU has {major}.{minor}")
    if problem.dtype not in ("bfloat16", "float16"):
        reasons.append(f"it takes bfloat16 and float16, not {problem.dtype}")
    if padded_head_dims(H, Hv) is None:
        reasons.append(f"its head dims are at most {HEAD_DIMS[-1][0]}, not {H} with values of {Hv}")
    if mask is not None and mask.size % BLOCK != 0:
        reasons.append(f"its block masks come in multiples of {BLOCK}, not {mask.size}")
    if grid_depth > GRID:
        reasons.append(
            f"its grid takes at most {GRID:,} batch elements times sections of heads, not "
            f"{grid_depth:,}"
        )
    return "; ".join(reasons) or None


def _grid_depth(problem: AttentionProblem) -> int:
    """The largest number of batch elements times sections of heads of any kernel of a problem."""
    B, S, N, H = problem.q_shape
    _, T, K, Hv = problem.v_shape
    width = sum(padded_head_dims(H, Hv) or (H, Hv))
    query_sections = N // section_of_queries(T, N, K, width)
    key_sections = K // section_of_keys(S, N, K, width, split=False)
    split_key_sections = N // section_of_keys(S, N, K, width, split=True)
    return B * max(query_sections, key_sections, split_key_sections)


def padded_head_dims(H: int, Hv: int) -> tuple[int, int] | None:
    """The narrowest of HEAD_DIMS that heads of queries and of values fit into; None if none does.

    Heads with tiles of their own keep their widths.
    """
    fitting = [(h, hv) for h, hv in HEAD_DIMS if h >= H and hv >= Hv]
    return min(fitting, key=sum, default=None)


def pads(problem: AttentionProblem) -> bool:
    """Whether the kernel would have to pad the heads of a problem, and multiply zeros."""
    H = problem.q_shape[3]
    Hv = problem.v_shape[3]
    return padded_head_dims(H, Hv) != (H, Hv)


def as_padded(problem: AttentionProblem) -> AttentionProblem:
    """The problem with the head dims of the kernel. Raises ValueError if it has none for them."""
    widths = padded_head_dims(problem.q_shape[3], problem.v_shape[3])
    if widths is None:
        raise ValueError(str(unsupported_reason(problem)))
    H, Hv = widths
    return dataclasses.replace(
        problem,
        q_shape=(*problem.q_shape[:3], H),
        k_shape=(*problem.k_shape[:3], H),
        v_shape=(*problem.v_shape[:3], Hv),
    )


def attend(
    q: Array,
    k: Array,
    v: Array,
    problem: AttentionProblem,
    *,
    tiles: Tiling | None = None,
    **sides: Unpack[Sides],
) -> tuple[Array, Array]:
    """Serves a problem for which `unsupported_reason` is None. Arrays as in `flash_attention`.

    tiles: of each kernel; None: those of the tuning table.

    Returns out [B, S, N, Hv] in q's dtype and the log-sum-exp [B, S, N] in fp32.
    """
    # Imported here, so that no other platform loads Mosaic.
    from pallas_kernels.attention.hopper import attention
    from pallas_kernels.attention.tuning import tiling

    if not pads(problem):
        return attention(q, k, v, problem, tiles or tiling(problem), **sides)

    # Zeros add nothing to a dot product, and columns of zeros of v give columns of zeros, which are
    # dropped.
    padded = as_padded(problem)
    H = padded.q_shape[3]
    Hv = padded.v_shape[3]
    out, lse = attention(
        _padded(q, H), _padded(k, H), _padded(v, Hv), padded, tiles or tiling(padded), **sides
    )
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
    """Returns dq, dk, dv and dsinks as `attention_gradients` does; arguments as of `attend`."""
    from pallas_kernels.attention.hopper import gradients
    from pallas_kernels.attention.tuning import tiling

    padded = as_padded(problem)
    H = padded.q_shape[3]
    Hv = padded.v_shape[3]
    dq, dk, dv, dsinks = gradients(
        _padded(q, H),
        _padded(k, H),
        _padded(v, Hv),
        _padded(out, Hv),
        lse,
        _padded(dout, Hv),
        padded,
        tiles or tiling(padded),
        **sides,
    )
    return dq[..., : q.shape[3]], dk[..., : k.shape[3]], dv[..., : v.shape[3]], dsinks


def _padded(x: Array, width: int) -> Array:
    """x [..., H] with zeros up to a head dim."""
    return jnp.pad(x, [(0, 0)] * 3 + [(0, width - x.shape[3])])
