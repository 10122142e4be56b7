"""A model of one's own: a language model without attention, of gated linear recurrences (minGRU; Feng et al., arXiv 2410.01201).

Train it with `python train.py --config=docs/custom_model.py`; docs/custom_model.md walks through it.
Sizes: B batch, S sequence, D embed, G gates, E recurrent state.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from mesh_lm.config import DataConfig, LaunchConfig, ModelConfig, OptimizerConfig, TrainConfig, TrainLoop
from mesh_lm.loss import cross_entropy
from mesh_lm.model import Batch, Sums
from mesh_lm.model.dropout import Dropout
from mesh_lm.model.embedding import lookup
from sharding_rules import MeshConfig, Shard, preset


@dataclasses.dataclass(frozen=True)
class RecurrentConfig(ModelConfig):
    """Every field can be set on the command line, as in --config.model.d_state=512."""

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
        sizes = {"seq_resid": "seq_len", "embed": "d_model", "state": "d_state", "vocab": "vocab_size"}
        return {axis: (field, getattr(self, field)) for axis, field in sizes.items()}

    def flops_per_token(self) -> float:
        return 6 * (self.n_layers * 4 * self.d_model * self.d_state + self.vocab_size * self.d_model)


class Recurrent(nnx.Module):
    """Embedding -> n_layers blocks -> norm -> the embedding again, as the head."""

    def __init__(self, config: RecurrentConfig, shard: Shard, rngs: nnx.Rngs) -> None:
        self.config, self.shard = config, shard
        L, V, D, E = config.n_layers, config.vocab_size, config.d_model, config.d_state

        def normal(std: float, shape: tuple[int, ...], axes: tuple[str, ...]) -> nnx.Param:
            return nnx.Param(std * jax.random.normal(rngs.params(), shape), out_sharding=axes)

        self.embedding = normal(0.02, (V, D), ("vocab", "embed"))
        self.scale = nnx.Param(jnp.ones((L, D)), out_sharding=("layers", "norm"))
        self.gates = normal(D**-0.5, (L, D, 3, E), ("layers", "embed", "gate", "state"))
        self.out = normal((2 * L * E) ** -0.5, (L, E, D), ("layers", "state", "embed"))

    def __call__(self, batch: Batch, dropout: Dropout | None) -> Sums:
        x_BSD = self.hidden(batch)
        return cross_entropy(x_BSD, self.embedding[...], batch["labels"], batch["weights"], self.shard, vocab_size=self.config.vocab_size)

    def hidden(self, batch: Batch) -> jax.Array:
        starts_BS = batch["positions"] == 0 if "positions" in batch else None  # of documents, where they are kept separate
        x_BSD = lookup(self.embedding[...], batch["tokens"], self.shard, ("vocab", "embed"), self.config.dtype)
        stacked = (self.scale[...], self.gates[...], self.out[...])
        x_BSD, _ = lax.scan(lambda x, weights: (x + self.block(x, starts_BS, *weights), None), x_BSD, stacked)
        return self.shard(rms_norm(x_BSD).astype(self.config.dtype), "batch", "seq_resid", "embed")

    def block(self, x_BSD: jax.Array, starts_BS: jax.Array | None, *weights: jax.Array) -> jax.Array:
        scale_D, gates_DGE, out_ED = weights
        shard, dtype = self.shard, self.config.dtype
        h_BSD = shard((scale_D * rms_norm(x_BSD)).astype(dtype), "batch", "seq", "embed")
        gates_BSGE = jnp.einsum("bsd,dge->bsge", h_BSD, shard.weight(gates_DGE.astype(dtype), "embed", "gate", "state"))
        update, new, output = jnp.moveaxis(shard(gates_BSGE, "batch", "seq", "gate", "state").astype(jnp.float32), 2, 0)
        keep = jax.nn.sigmoid(-update) if starts_BS is None else jnp.where(starts_BS[..., None], 0, jax.nn.sigmoid(-update))
        h_BSE = recurrence(keep, jax.nn.sigmoid(update) * new) * jax.nn.silu(output)
        y_BSD = shard(h_BSE.astype(dtype), "batch", "seq", "state") @ shard.weight(out_ED.astype(dtype), "state", "embed")
        return shard(y_BSD, "batch", "seq_resid", "embed")

    def logits(self, batch: Batch) -> jax.Array:
        head_VD = self.shard.weight(self.embedding[...].astype(self.config.dtype), "vocab", "embed")
        return self.shard(jnp.einsum("bsd,vd->bsv", self.hidden(batch), head_VD), "batch", "seq", "vocab").astype(jnp.float32)


def recurrence(keep_BSE: jax.Array, new_BSE: jax.Array) -> jax.Array:
    """h_t = keep_t h_{t-1} + new_t along S, in log2(S) parallel rounds, because two such steps make one step of the same form."""

    def then(a: tuple[jax.Array, jax.Array], b: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
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
