"""The model of custom_model.py with experts, kept in balance by a bias that no gradient changes
(Wang et al., arXiv 2408.15664).

Train it with `mesh-lm train docs/router_bias.py`; docs/custom_model.md walks through it.
Sizes: B batch, S sequence, D embed, X experts, E state of an expert.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx

from docs import custom_model
from docs.custom_model import Block, Recurrent, RecurrentConfig, normal, rms_norm
from mesh_lm.config import TrainConfig
from mesh_lm.model import Context, Sums
from mesh_lm.model.buffer import Buffer
from sharding_rules import Shard, preset


@dataclasses.dataclass(frozen=True)
class RoutedConfig(RecurrentConfig):
    n_experts: int = 4
    """Experts of a block, one of which each token takes."""
    bias_rate: float = 1e-3
    """What a step adds to the bias of an expert with fewer tokens than the mean, and takes from one
    with more."""

    def make(self, shard: Shard, rngs: nnx.Rngs) -> nnx.Module:
        model = Recurrent(self, shard, rngs)
        model.blocks = Routed(self, shard, rngs)
        return model

    def updated(
        self, buffers: dict[str, jax.Array], sums: dict[str, jax.Array]
    ) -> dict[str, jax.Array]:
        load_LX = sums["blocks/load"]
        step_LX = self.bias_rate * jnp.sign(load_LX.mean(-1, keepdims=True) - load_LX)
        return {"blocks.bias": buffers["blocks.bias"] + step_LX}


class Routed(Block):
    """A recurrent block, then for each token an expert. Here every expert computes every token, and
    what is not chosen is dropped."""

    def __init__(self, config: RoutedConfig, shard: Shard, rngs: nnx.Rngs) -> None:
        super().__init__(config, shard, rngs)
        L, D, E, X = config.n_layers, config.d_model, config.d_state, config.n_experts
        self.router = normal(rngs, D**-0.5, (L, D, X), ("layers", "embed", "experts"), "float32")
        self.up = normal(
            rngs, D**-0.5, (L, X, D, E), ("layers", "experts", "embed", "state"), config.dtype
        )
        self.down = normal(
            rngs,
            (2 * L * E) ** -0.5,
            (L, X, E, D),
            ("layers", "experts", "state", "embed"),
            config.dtype,
        )
        self.bias = Buffer(jnp.zeros((L, X)), out_sharding=("layers", "experts"))

    def __call__(self, x_BSD: jax.Array, ctx: Context) -> tuple[jax.Array, None, Sums]:
        x_BSD, _, sums = super().__call__(x_BSD, ctx)
        shard, dtype = self.shard, self.dtype
        h_BSD = shard(rms_norm(x_BSD), "batch", "seq", "embed")
        p_BSX = jax.nn.sigmoid(h_BSD @ shard.weight(self.router[...], "embed", "experts"))
        # the bias chooses, and scales nothing
        chosen_BSX = jax.nn.one_hot(jnp.argmax(p_BSX + self.bias[...], -1), p_BSX.shape[-1])
        up_XDE = shard.weight(self.up[...].astype(dtype), "experts", "embed", "state")
        down_XED = shard.weight(self.down[...].astype(dtype), "experts", "state", "embed")
        h_BSXE = jax.nn.silu(jnp.einsum("bsd,xde->bsxe", h_BSD.astype(dtype), up_XDE))
        y_BSD = jnp.einsum(
            "bsxe,xed,bsx->bsd", h_BSXE, down_XED, (p_BSX * chosen_BSX).astype(dtype)
        )
        load_X = (ctx.batch["weights"][..., None] * chosen_BSX).sum((0, 1))
        return x_BSD + shard(y_BSD, "batch", "seq_resid", "embed"), None, {**sums, "load": load_X}


def get_config() -> TrainConfig:
    mine = {"gate": None, "state": "tensor", "experts": None}
    config = custom_model.get_config()
    rules = preset("fsdp+megatron").replace("fsdp+state", params=mine, activations=mine)
    return dataclasses.replace(
        config,
        model=RoutedConfig(vocab_size=4096, seq_len=256),
        rules=rules,
        output="runs/router_bias",
    )
