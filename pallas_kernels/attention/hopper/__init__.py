"""Flash attention for Hopper GPUs (sm_90a) in Pallas Mosaic GPU.

`walk.py` says which tiles of the square are visited, `spec.py` what a kernel is compiled for, `forward.py` and `backward*.py` are the
kernels, `differentiable.py` puts them together.
"""

from pallas_kernels.attention.hopper.differentiable import Tiling, attention
from pallas_kernels.attention.hopper.spec import Tiles

__all__ = ["Tiles", "Tiling", "attention"]
