"""State of a model that no gradient changes. Apart from the contract, so that reading a config costs no Flax import."""

from __future__ import annotations

from flax import nnx


class Buffer(nnx.Variable):
    """State without a gradient, such as the bias by which a router balances its experts.

    Its dimensions are named as a parameter's are: `Buffer(value, out_sharding=("layers", "experts"))`. After each step the config's
    `updated` makes the next value of what the layers returned (`mesh_lm.config.ModelConfig`); checkpoints keep it.
    """
