"""Attention.

`api.py` has the public functions, `mosaic.py`, `cudnn.py` and `xla.py` their implementations, and
`reference.py` the formula.
"""

from pallas_kernels.attention.api import (
    attention_gradients,
    choose_attention,
    choose_trusted_attention,
    flash_attention,
)
from pallas_kernels.attention.block_mask import BlockMask
from pallas_kernels.attention.merge import merge
from pallas_kernels.attention.problem import AttentionProblem, capability_of, describe_attention
from pallas_kernels.attention.reference import reference_attention

__all__ = [
    "AttentionProblem",
    "BlockMask",
    "attention_gradients",
    "capability_of",
    "choose_attention",
    "choose_trusted_attention",
    "describe_attention",
    "flash_attention",
    "merge",
    "reference_attention",
]
