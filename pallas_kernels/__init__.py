"""Attention, grouped matmul, and matmuls with one matrix of a stack. Depends on jax and numpy only.

from pallas_kernels import add_weight_gradient, flash_attention, grouped_matmul, stacked_matmul
out_BSNH = flash_attention(q_BSNH, k_BTKH, v_BTKH, causal=True)
out_TF = grouped_matmul(x_TD, w_EDF, group_sizes_E)
out_TN = stacked_matmul(x_TK, weights_RKN, row)
sums_RKN = add_weight_gradient(sums_RKN, row, x_TK, dy_TN)
"""

from pallas_kernels.attention import (
    AttentionProblem,
    BlockMask,
    attention_gradients,
    capability_of,
    choose_attention,
    choose_trusted_attention,
    describe_attention,
    flash_attention,
    merge,
    reference_attention,
)
from pallas_kernels.choice import Choice, Unsupported
from pallas_kernels.grouped_matmul import grouped_matmul
from pallas_kernels.stacked_matmul import add_weight_gradient, stacked_matmul

__all__ = [
    "AttentionProblem",
    "BlockMask",
    "Choice",
    "Unsupported",
    "add_weight_gradient",
    "attention_gradients",
    "capability_of",
    "choose_attention",
    "choose_trusted_attention",
    "describe_attention",
    "flash_attention",
    "grouped_matmul",
    "merge",
    "reference_attention",
    "stacked_matmul",
]
