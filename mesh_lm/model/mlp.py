"""The MLP of a decoder. Sizes: B batch, S sequence, D embed, F mlp, G gate and up."""

from __future__ import annotations

import math

import jax
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from mesh_lm.model.config import DecoderConfig
from mesh_lm.model.layers import Linear, Weights, recomputed
from sharding_rules import Shard


@recomputed
def swiglu(up_BSGF: jax.Array) -> jax.Array:
    """Returns silu(gate) * up, [B, S, F]."""
    return jax.nn.silu(up_BSGF[:, :, 0]) * up_BSGF[:, :, 1]


@recomputed
def gelu(up: jax.Array) -> jax.Array:
    """Returns the tanh GELU (arXiv 1606.08415) of each element: x (1 + tanh y) / 2 =
    x sigmoid(2 y), with y = sqrt(2 / pi) (x + 0.044715 x^3).

    On a GPU XLA expands tanh to a long polynomial, which takes longer to compute than x takes to
    read; the sigmoid has one exponential.
    """
    return up * jax.nn.sigmoid(2 * math.sqrt(2 / math.pi) * (up + 0.044715 * up**3))


class Mlp(nnx.Module):
    """GELU or SwiGLU between two matmuls. One matmul makes both gate and up."""

    def __init__(self, config: DecoderConfig, weights: Weights, shard: Shard) -> None:
        self.config = config
        self.shard = shard
        d = config.d_model
        f = config.d_mlp
        if config.activation == "swiglu":
            self.up = Linear("bsd,dgf->bsgf", weights, (d, 2, f), ("embed", "fused", "mlp"), shard)
        else:
            self.up = Linear("bsd,df->bsf", weights, (d, f), ("embed", "mlp"), shard)
        self.down = Linear(
            "bsf,df->bsd",
            weights,
            (d, f),
            ("embed", "mlp"),
            shard,
            std=weights.residual_std,
            bias_axes=("norm",),
        )

    def __call__(self, x_BSD: jax.Array, tokens: tuple[str, str] = ("batch", "seq")) -> jax.Array:
        """Returns down(activation(up(x))), like x. tokens: as in `Context`."""
        # remat=save_names saves it; the nonlinearity is recomputed.
        up = checkpoint_name(self.up(x_BSD, tokens), "mlp_up")
        h = swiglu(up) if self.config.activation == "swiglu" else gelu(up)
        return self.down(self.shard(h, *tokens, "mlp"), tokens)
