"""Attention: `api.py` is the door; `mosaic.py`, `cudnn.py` and `xla.py` stand behind it; `reference.py` is what they are tested against."""

from pallas_kernels.attention.api import Choice, Unsupported, choose, flash_attention
from pallas_kernels.attention.block_mask import BlockMask
from pallas_kernels.attention.merge import merge
from pallas_kernels.attention.problem import Problem, capability_of, describe
from pallas_kernels.attention.reference import reference_attention

__all__ = [
    "BlockMask",
    "Choice",
    "Problem",
    "Unsupported",
    "capability_of",
    "choose",
    "describe",
    "flash_attention",
    "merge",
    "reference_attention",
]
