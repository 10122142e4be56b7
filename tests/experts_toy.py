"""A kind of layer that the project does not have yet: a mixture of experts, with array sums and a
matrix that layers share.

Every expert computes every token, so that only the model contract is tested. Sizes: B batch, S
sequence, D embed, E experts, F mlp.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from support import GPT

from mesh_lm.model import Batch, Context, DecoderConfig, SegmentConfig, Sums
from mesh_lm.model import dense as dense_kind
from mesh_lm.model.decoder import Decoder
from mesh_lm.model.kinds import KINDS
from mesh_lm.model.layers import Weights
from sharding_rules import Rules, Shard, preset

KINDS |= {"experts": "experts_toy", "sharing": "sharing_toy", "balanced": "balanced_toy"}

EXPERTS, ACTIVE, D_EXPERT = 4, 2, 24


@dataclasses.dataclass(frozen=True)
class ExpertsConfig(DecoderConfig):
    def make(self, shard: Shard, rngs: nnx.Rngs) -> nnx.Module:
        return ExpertsDecoder(self, shard, rngs)


class ExpertsDecoder(Decoder):
    """A decoder with a matrix that all layers of both segments use."""

    def __init__(self, config: ExpertsConfig, shard: Shard, rngs: nnx.Rngs) -> None:
        super().__init__(config, shard, rngs)
        self.mixer = Weights(config, rngs)(
            (config.d_model, config.d_model), ("embed", "fused"), 0.3
        )

    def prepare(self, batch: Batch) -> jax.Array:
        return self.shard.weight(self.mixer[...].astype(self.config.dtype), "embed", "fused")


class Layer(dense_kind.Layer):
    """A dense layer with an MLP of another size, and experts in parallel with it."""

    def __init__(self, config: DecoderConfig, weights: Weights, shard: Shard) -> None:
        super().__init__(dataclasses.replace(config, d_ff=config.d_model), weights, shard)
        d, e, f = config.d_model, EXPERTS, D_EXPERT
        self.router = weights((d, e), ("embed", "experts"), 0.5)
        self.up = weights((e, d, f), ("experts", "embed", "mlp"))
        self.down_experts = weights((e, d, f), ("experts", "embed", "mlp"), weights.residual_std)

    def __call__(self, x_BSD: jax.Array, ctx: Context) -> tuple[jax.Array, Any, Sums]:
        h_BSD = self._enter(self.mlp_norm(x_BSD), ctx)
        y_BSD, sums = self.experts(jnp.tanh(h_BSD @ ctx.shared), ctx.batch["weights"])
        x_BSD, cache, _ = super().__call__(x_BSD, dataclasses.replace(ctx, shared=None))
        return (
            self._add(x_BSD, y_BSD, ctx.dropout.fold(ctx.number) if ctx.dropout else None, 2, ctx),
            cache,
            sums,
        )

    def experts(self, x_BSD: jax.Array, weights_BS: jax.Array) -> tuple[jax.Array, Sums]:
        shard, dtype = self.shard, x_BSD.dtype
        logits_BSE = jnp.einsum(
            "bsd,de->bse",
            x_BSD.astype(jnp.float32),
            shard.weight(self.router[...], "embed", "experts"),
        )
        p_BSE = jax.nn.sigmoid(logits_BSE)
        chosen = jax.lax.top_k(jax.lax.stop_gradient(self.ranked(p_BSE)), ACTIVE)[1]
        mask_BSE = jax.nn.one_hot(chosen, EXPERTS).sum(-2)
        gate_BSE = (p_BSE * mask_BSE / (p_BSE * mask_BSE).sum(-1, keepdims=True)).astype(dtype)
        up, down = (
            shard.weight(w[...].astype(dtype), "experts", "embed", "mlp")
            for w in (self.up, self.down_experts)
        )
        h_BSEF = jax.nn.silu(jnp.einsum("bsd,edf->bsef", x_BSD, up))
        z_loss = 1e-2 * (weights_BS * jax.nn.logsumexp(logits_BSE, -1) ** 2).sum()
        load_E = (weights_BS[..., None] * mask_BSE).sum((0, 1))
        return jnp.einsum("bsef,edf,bse->bsd", h_BSEF, down, gate_BSE), {
            "objective": z_loss,
            "router_z": z_loss,
            "load": load_E,
        }

    def ranked(self, p_BSE: jax.Array) -> jax.Array:
        """The logits that select the experts of a token."""
        return p_BSE


def n_params(config: DecoderConfig) -> int:
    d = config.d_model
    return dense_kind.n_params(dataclasses.replace(config, d_ff=d)) + EXPERTS * (
        d + 2 * d * D_EXPERT
    )


def flops_per_token(config: DecoderConfig) -> float:
    d = config.d_model
    return dense_kind.flops_per_token(dataclasses.replace(config, d_ff=d)) + 6 * (
        EXPERTS * d + EXPERTS * 2 * d * D_EXPERT
    )


MODEL = ExpertsConfig(
    **{field.name: getattr(GPT, field.name) for field in dataclasses.fields(GPT) if field.init} | {
        "n_layers": 6, "d_model": 16, "n_heads": 2, "remat": "full",
        "segments": (SegmentConfig("dense", 2, "sharing", remat="none"), SegmentConfig("moe", 4, "experts")),
    }
)  # fmt: skip
"""Two dense layers, then four with experts."""


def rules(name: str) -> Rules:
    """A preset with a row for this model's own axis."""
    base = preset(name)
    more = {
        kind: {"experts": None}
        for kind in ("gradients", "optimizer")
        if getattr(base, kind) is not None
    }
    return base.replace(name, params={"experts": None}, activations={"experts": None}, **more)
