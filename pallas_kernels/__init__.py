"""Attention kernels behind one door. Stands alone: needs jax and numpy only.

from pallas_kernels import flash_attention
out_BSNH = flash_attention(q_BSNH, k_BTKH, v_BTKH, causal=True)
"""

from pallas_kernels.attention import Choice, Problem, Unsupported, choose, describe, flash_attention, merge, reference_attention

__all__ = ["Choice", "Problem", "Unsupported", "choose", "describe", "flash_attention", "merge", "reference_attention"]
