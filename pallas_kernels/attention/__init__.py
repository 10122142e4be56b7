"""Attention: `api.py` is the door, `xla.py` and `cudnn.py` stand behind it, `reference.py` is what they are tested against."""

from pallas_kernels.attention.api import Choice, Unsupported, choose, flash_attention
from pallas_kernels.attention.merge import merge
from pallas_kernels.attention.problem import Problem, describe
from pallas_kernels.attention.reference import reference_attention

__all__ = ["Choice", "Problem", "Unsupported", "choose", "describe", "flash_attention", "merge", "reference_attention"]
