"""Flash attention for Hopper GPUs (sm_90a) in Pallas Mosaic GPU.

`walk.py` selects the tiles that are visited, `spec.py` has the static part of a call, `forward.py`
and `backward*.py` the kernels, and `differentiable.py` the function with its gradient.
"""

from pallas_kernels.attention.hopper.differentiable import Tiling, attention, gradients
from pallas_kernels.attention.hopper.spec import ForwardTiles, Tiles

__all__ = ["ForwardTiles", "Tiles", "Tiling", "attention", "gradients"]
