"""A model of your own: a language model without attention, of gated linear recurrences (minGRU;
Feng et al., arXiv 2410.01201).

Train it with `mesh-lm train docs/custom_model.py`; docs/custom_model.md walks through it.
Sizes: B batch, S sequence, D embed, G gates, E recurrent state.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from mesh_lm.config import (
    DataConfig,
    LaunchConfig,
    ModelConfig,
    OptimizerConfig,
    TrainConfig,
    TrainLoop,
)
from mesh_lm.model import Batch, Context, Sums, positions_of
from mesh_lm.model.dropout import Dropout
from mesh_lm.model.embedding import lookup
from mesh_lm.model.loss import cross_entropy
from mesh_lm.parallel.stack import hidden_states
from mesh_lm.schedules.segments import Segment, Stack
from sharding_rules import MeshConfig, Shard, preset


@dataclasses.dataclass(frozen=True)
class RecurrentConfig(ModelConfig):
    """Every field can be set on the command line, as in --model.d_state=512."""

    n_layers: int = 4
    """Recurrent blocks."""
    d_model: int = 128
    """Width of the residual stream."""
    d_state: int = 256
    """Width of the recurrent state."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of matmuls and activations; the recurrence itself is fp32."""

    def make(self, shard: Shard, rngs: nnx.Rngs) -> nnx.Module:
        return Recurrent(self, shard, rngs)

    def sizes(self) -> dict[str, tuple[str, int]]:
        sizes = {
            "seq_resid": "seq_len",
            "embed": "d_model",
            "state": "d_state",
            "vocab": "vocab_size",
        }
        return {axis: (field, getattr(self, field)) for axis, field in sizes.items()}

    def stack(self) -> Stack:
        layer, head = 4 * self.d_model * self.d_state, self.vocab_size * self.d_model
        return Stack((Segment("blocks", self.n_layers, cost=6 * layer),), head=6 * head)

    def flops_per_token(self) -> float:
        return self.n_layers * self.stack().segments[0].cost + self.stack().head


class Recurrent(nnx.Module):
    """Embedding -> n_layers blocks -> norm -> the embedding again, as the head."""

    def __init__(self, config: RecurrentConfig, shard: Shard, rngs: nnx.Rngs) -> None:
        self.config, self.shard = config, shard
        self.embedding = normal(
            rngs, 0.02, (config.vocab_size, config.d_model), ("vocab", "embed"), config.dtype
        )
        self.blocks = Block(config, shard, rngs)

    def prepare(self, batch: Batch) -> jax.Array:
        return positions_of(batch) == 0  # the starts of documents, where they are kept separate

    def embed(self, batch: Batch, dropout: Dropout | None) -> jax.Array:
        return lookup(
            self.embedding[...], batch["tokens"], self.shard, ("vocab", "embed"), self.config.dtype
        )

    def loss(self, x_BSD: jax.Array, batch: Batch, dropout: Dropout | None) -> Sums:
        x_BSD, head_VD, vocab_size = self.normed(x_BSD), self.embedding[...], self.config.vocab_size
        return cross_entropy(
            x_BSD, head_VD, batch["labels"], batch["weights"], self.shard, vocab_size=vocab_size
        )

    def normed(self, x_BSD: jax.Array) -> jax.Array:
        return self.shard(rms_norm(x_BSD).astype(self.config.dtype), "batch", "seq_resid", "embed")

    def logits(self, batch: Batch) -> jax.Array:
        x_BSD = self.normed(hidden_states(self, self.config.stack().segments, batch)[0])
        head_VD = self.shard.weight(self.embedding[...].astype(self.config.dtype), "vocab", "embed")
        return self.shard(
            jnp.einsum("bsd,vd->bsv", x_BSD, head_VD), "batch", "seq", "vocab"
        ).astype(jnp.float32)


class Block(nnx.Module):
    """x + out(recurrence(gates(norm(x)))): one layer, whose parameters have all layers in front."""

    def __init__(self, config: RecurrentConfig, shard: Shard, rngs: nnx.Rngs) -> None:
        self.dtype, self.shard = config.dtype, shard
        L, D, E = config.n_layers, config.d_model, config.d_state
        self.scale = nnx.Param(jnp.ones((L, D)), out_sharding=("layers", "norm"))
        self.gates = normal(
            rngs, D**-0.5, (L, D, 3, E), ("layers", "embed", "gate", "state"), config.dtype
        )
        self.out = normal(
            rngs, (2 * L * E) ** -0.5, (L, E, D), ("layers", "state", "embed"), config.dtype
        )

    def __call__(self, x_BSD: jax.Array, ctx: Context) -> tuple[jax.Array, None, Sums]:
        shard, dtype, starts_BS = self.shard, self.dtype, ctx.shared
        h_BSD = shard((self.scale[...] * rms_norm(x_BSD)).astype(dtype), "batch", "seq", "embed")
        gates_BSGE = jnp.einsum(
            "bsd,dge->bsge",
            h_BSD,
            shard.weight(self.gates[...].astype(dtype), "embed", "gate", "state"),
        )
        update, new, output = jnp.moveaxis(
            shard(gates_BSGE, "batch", "seq", "gate", "state").astype(jnp.float32), 2, 0
        )
        keep = jnp.where(starts_BS[..., None], 0, jax.nn.sigmoid(-update))
        h_BSE = recurrence(keep, jax.nn.sigmoid(update) * new) * jax.nn.silu(output)
        y_BSD = shard(h_BSE.astype(dtype), "batch", "seq", "state") @ shard.weight(
            self.out[...].astype(dtype), "state", "embed"
        )
        return x_BSD + shard(y_BSD, "batch", "seq_resid", "embed"), None, {}


def normal(
    rngs: nnx.Rngs, std: float, shape: tuple[int, ...], axes: tuple[str, ...], dtype: str
) -> nnx.Param:
    """Stored in fp32, and cast to this type before it is used."""
    return nnx.Param(
        std * jax.random.normal(rngs.params(), shape), out_sharding=axes, compute_dtype=dtype
    )


def recurrence(keep_BSE: jax.Array, new_BSE: jax.Array) -> jax.Array:
    """h_t = keep_t h_{t-1} + new_t along S, in log2(S) parallel rounds, because two such steps make
    one step of the same form."""

    def then(
        a: tuple[jax.Array, jax.Array], b: tuple[jax.Array, jax.Array]
    ) -> tuple[jax.Array, jax.Array]:
        return a[0] * b[0], a[1] * b[0] + b[1]

    return lax.associative_scan(then, (keep_BSE, new_BSE), axis=1)[1]


def rms_norm(x_BSD: jax.Array) -> jax.Array:
    x_BSD = x_BSD.astype(jnp.float32)
    return x_BSD * lax.rsqrt(jnp.square(x_BSD).mean(-1, keepdims=True) + 1e-6)


def get_config() -> TrainConfig:
    mine = {"gate": None, "state": "tensor"}
    return TrainConfig(
        model=RecurrentConfig(vocab_size=4096, seq_len=256),
        output="runs/custom_model",
        mesh=MeshConfig(fsdp=-1, tensor=2),
        rules=preset("fsdp+megatron").replace("fsdp+state", params=mine, activations=mine),
        train=TrainLoop(steps=300, global_batch=16, eval_every=100, eval_sequences=64),
        optimizer=OptimizerConfig(learning_rate=3e-3, warmup_steps=30),
        data=DataConfig(path="stdlib", tokenizer_vocab=4096),
        launch=LaunchConfig(cpu_devices=8),
    )
