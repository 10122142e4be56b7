"""Attention and grouped matmul, each with one public function. Depends on jax and numpy only.

from pallas_kernels import flash_attention, grouped_matmul
out_BSNH = flash_attention(q_BSNH, k_BTKH, v_BTKH, causal=True)
out_TF = grouped_matmul(x_TD, w_EDF, group_sizes_E)
"""

from pallas_kernels.attention import (
    AttentionProblem,
    BlockMask,
    Choice,
    Unsupported,
    capability_of,
    choose_attention,
    choose_trusted_attention,
    describe_attention,
    flash_attention,
    merge,
    reference_attention,
)
from pallas_kernels.grouped_matmul import grouped_matmul

__all__ = [
    "AttentionProblem",
    "BlockMask",
    "Choice",
    "Unsupported",
    "capability_of",
    "choose_attention",
    "choose_trusted_attention",
    "describe_attention",
    "flash_attention",
    "grouped_matmul",
    "merge",
    "reference_attention",
]
