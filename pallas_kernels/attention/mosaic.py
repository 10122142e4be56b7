"""The kernel of this project for Hopper, in Pallas for Mosaic GPU (`hopper/`): what it can serve, and its call."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jax import Array

from pallas_kernels.attention.problem import AttentionProblem

if TYPE_CHECKING:
    from pallas_kernels.attention.hopper.differentiable import Tiling

HEAD_DIMS = ((64, 64), (96, 96), (128, 128), (192, 128), (256, 256))
"""Widths of a query's and of a value's head that the kernel has tiles for."""
BLOCK = 128
"""Block sizes of a block mask are multiples of this, because the kernel skips complete tiles of keys."""
GRID = 65_535
"""CUDA's limit for the second and third dimension of a grid."""


def unsupported_reason(problem: AttentionProblem) -> str | None:
    """Every reason why the kernel cannot serve this problem, in one line; None if it can."""
    (B, _, N, H), Hv, mask = problem.q_shape, problem.v_shape[3], problem.block_mask
    widths = ", ".join(f"{h}" if h == hv else f"{h} with values of {hv}" for h, hv in HEAD_DIMS)
    on_gpu = problem.platform == "gpu"
    reasons = {
        f"it needs a Hopper GPU, and the platform is {problem.platform}": not on_gpu,
        # Its instructions (wgmma) exist on sm_90a only, not on older or newer GPUs.
        f"it needs compute capability 9.0, and this GPU has {problem.capability[0]}.{problem.capability[1]}": on_gpu
        and problem.capability != (9, 0),
        f"it takes bfloat16 and float16, not {problem.dtype}": problem.dtype not in ("bfloat16", "float16"),
        f"its head dims are {widths}, not {H} with values of {Hv}": (H, Hv) not in HEAD_DIMS,
        f"its block masks come in multiples of {BLOCK}, not {mask and mask.size}": mask is not None and mask.size % BLOCK != 0,
        f"its grid takes at most {GRID:,} batch elements and heads, not {B:,} and {N:,}": max(B, N) > GRID,
    }
    return "; ".join(reason for reason, holds in reasons.items() if holds) or None


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
    tiles: Tiling | None = None,
) -> tuple[Array, Array]:
    """Serves a problem for which `unsupported_reason` is None. Arrays as in `flash_attention`; tiles: None means those of the table.

    Returns out [B, S, N, Hv] in q's dtype and the log-sum-exp [B, S, N] in fp32.
    """
    from pallas_kernels.attention.hopper import attention  # here, so that no other platform loads Mosaic
    from pallas_kernels.attention.tuning import tiling

    sides = {"segment_ids": segment_ids, "kv_segment_ids": kv_segment_ids, "q_offset": q_offset, "sinks": sinks}
    return attention(q, k, v, problem, tiles or tiling(problem), **sides)
