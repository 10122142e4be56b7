"""A model with features that the decoder lacks: sequences sharded over a mesh axis, an auxiliary
loss, layers that permute.

Instead of attention, each token reads its sequence's mean (an all-gather) or the previous token (a
collective-permute). Sizes: L layers, B batch, S sequence, D embed, V vocabulary.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from support import SEQ, VOCAB

from mesh_lm.config import ModelConfig
from mesh_lm.model import Batch, Context, Sums
from mesh_lm.model.dropout import Dropout
from mesh_lm.schedules.segments import Segment, Stack
from sharding_rules import Shard, preset

AXIS = "sequence"
SEQUENCE = preset("ddp").replace("sequence", activations={"seq": AXIS, "seq_resid": AXIS})


@dataclasses.dataclass(frozen=True)
class ToyConfig(ModelConfig):
    vocab_size: int = VOCAB
    seq_len: int = SEQ
    n_layers: int = 8
    d_model: int = 16
    permutes: bool = False
    """Whether a layer sends to its neighbour along the sequence."""

    def make(self, shard: Shard, rngs: nnx.Rngs) -> nnx.Module:
        return Toy(self, shard, rngs)

    def stack(self) -> Stack:
        return Stack((Segment("layers", self.n_layers, cost=2.0),), head=1.0)


class ToyLayer(nnx.Module):
    def __init__(self, config: ToyConfig, rngs: nnx.Rngs) -> None:
        self.permutes, (L, D) = config.permutes, (config.n_layers, config.d_model)
        self.weight = nnx.Param(
            0.3 * jax.random.normal(rngs.params(), (L, D, D)),
            out_sharding=("layers", "embed", "mlp"),
        )

    def __call__(self, x: jax.Array, ctx: Context) -> tuple[jax.Array, None, Sums]:
        y = jnp.tanh((x + self.mixed(x)) @ self.weight[...])
        balance = (ctx.batch["weights"] * jnp.square(y).mean(-1)).sum()
        return x + y, None, {"objective": 0.1 * balance, "balance": balance}

    def mixed(self, x: jax.Array) -> jax.Array:
        parts = lax.axis_size(AXIS) if AXIS in jax.sharding.get_abstract_mesh().manual_axes else 1
        if self.permutes:
            last = x[:, -1:]
            before = (
                lax.ppermute(last, AXIS, [(i, i + 1) for i in range(parts - 1)])
                if parts > 1
                else jnp.zeros_like(last)
            )
            return jnp.concatenate([before, x[:, :-1]], axis=1)
        whole = lax.all_gather(x, AXIS, axis=1, tiled=True) if parts > 1 else x
        return whole.mean(1, keepdims=True)


class Toy(nnx.Module):
    def __init__(self, config: ToyConfig, shard: Shard, rngs: nnx.Rngs) -> None:
        self.config, self.shard = config, shard
        table = jax.random.normal(rngs.params(), (config.vocab_size, config.d_model))
        self.table = nnx.Param(table, out_sharding=("vocab", "embed"))
        self.layers = ToyLayer(config, rngs)

    def prepare(self, batch: Batch) -> None:
        return None

    def embed(self, batch: Batch, dropout: Dropout | None) -> jax.Array:
        return jnp.einsum(
            "bsv,vd->bsd", jax.nn.one_hot(batch["tokens"], self.config.vocab_size), self.table[...]
        )

    def loss(self, x: jax.Array, batch: Batch, dropout: Dropout | None) -> Sums:
        logits = jnp.einsum("bsd,vd->bsv", x, self.table[...])
        hit = (
            jax.nn.one_hot(batch["labels"], self.config.vocab_size) * jax.nn.log_softmax(logits)
        ).sum(-1)
        loss = -(batch["weights"] * hit).sum()
        return {"objective": loss, "loss": loss, "weight": batch["weights"].sum()}
