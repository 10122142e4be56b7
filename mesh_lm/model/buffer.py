"""State of a model that has no gradient. It has a module of its own, so that reading a config does
not import Flax.
"""

from __future__ import annotations

from flax import nnx


class Buffer(nnx.Variable):
    """State without a gradient, such as the bias by which a router balances its experts.

    Its dimensions are named as those of a parameter: `Buffer(value, out_sharding=("layers",
    "experts"))`. After each step the config's `updated` (`mesh_lm.config.ModelConfig`) computes its
    next value from the layers' sums. Checkpoints save it.
    """
