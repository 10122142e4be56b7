"""Bugs that were planted after lint was written, to see what it says of mistakes that it was not
written for.

At first it named four of the six. Of the moments it names the exchange and the line, not the
moments. The accuracy it did not see: of a program without rules it took the width of the vocabulary
for that of the residual stream.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from mesh_lm.model import attention, layers
from sharding_rules import MeshConfig, Shard, preset
from tests.sharding_rules.lab.plants import plain, trainer
from tests.sharding_rules.lab.plants.plain import Arrays, Plain, mesh_of, pin
from tests.sharding_rules.lab.plants.program import Plant

FSDP = trainer.Step(
    "llama, fsdp", trainer.LLAMA, preset("fsdp"), MeshConfig(data=1, fsdp=16), rows=32
)
F32, BF16 = jnp.float32, jnp.bfloat16


def heads_not_sharded(patch: pytest.MonkeyPatch) -> trainer.Step:
    call = Shard.__call__

    def forgetful(self: Shard, x: jax.Array, *axes: str | None) -> jax.Array:
        return call(self, x, *(None if axis == "heads" else axis for axis in axes))

    patch.setattr(Shard, "__call__", forgetful)
    return trainer.HSDP


def keys_of_the_whole_batch(patch: pytest.MonkeyPatch) -> trainer.Step:
    attend = attention.Attention._attend

    def with_all_keys(self: Any, q: jax.Array, k: jax.Array, *rest: Any, **more: Any) -> jax.Array:
        scale = jnp.square(self.shard(k, None, "seq", "kv_heads", "head_dim").astype(F32)).max(
            0, keepdims=True
        )
        return attend(self, q / (1 + scale.mean()).astype(q.dtype), k, *rest, **more)

    patch.setattr(attention.Attention, "_attend", with_all_keys)
    return FSDP


def norm_in_f32(patch: pytest.MonkeyPatch) -> trainer.Step:
    call = layers.Norm.__call__

    def wide(self: layers.Norm, x: jax.Array) -> jax.Array:
        return lax.optimization_barrier(call(self, x).astype(F32))

    patch.setattr(layers.Norm, "__call__", wide)
    return trainer.HSDP


def up_replicated(_: pytest.MonkeyPatch) -> Plain:
    params = plain.TP | {"up": ((plain.L, plain.D, plain.F), F32, P())}
    return dataclasses.replace(plain.TENSOR_PARALLEL, arguments=(params, params, plain.ACTIVATIONS))


def moments_along_another_dimension(_: pytest.MonkeyPatch) -> Plain:
    mu = {name: (*leaf[:2], P(None, None, "shard")) for name, leaf in plain.FSDP.items()}
    step = plain.fsdp_step(plain.fsdp_loss, P(None, None, "shard"))
    return dataclasses.replace(
        plain.FULLY_SHARDED, step=step, arguments=(plain.FSDP, mu, plain.FULLY_SHARDED.arguments[2])
    )


def classifier(mesh: Mesh, accuracy: bool) -> Any:
    """accuracy: the likeliest class is looked for in logits that every device has in full."""

    def of(params: Arrays, batch: Arrays) -> tuple[jax.Array, jax.Array]:
        z = pin(
            mesh,
            jnp.einsum("bsd,dv->bsv", batch["x"], params["head"].astype(BF16)),
            "dp",
            None,
            "tp",
        ).astype(F32)
        picked = jnp.einsum("bsv,bsv->bs", z, jax.nn.one_hot(batch["labels"], z.shape[-1]))
        right = (
            (pin(mesh, z, "dp", None, None).argmax(-1) == batch["labels"]).mean()
            if accuracy
            else jnp.zeros(())
        )
        return (jax.nn.logsumexp(z, -1) - picked).mean(), right

    return jax.value_and_grad(of, has_aux=True)


CLASSES = Plain(
    "classifier", partial(mesh_of, dp=2, tp=8), lambda mesh: classifier(mesh, accuracy=False),
    (
        {"head": ((plain.D, 32768), F32, P(None, "tp"))},
        {"x": ((8, plain.S, plain.D), BF16, P("dp")), "labels": ((8, plain.S), jnp.int32, P("dp"))},
    ),
)  # fmt: skip


def accuracy_of_gathered_logits(_: pytest.MonkeyPatch) -> Plain:
    return dataclasses.replace(CLASSES, step=lambda mesh: classifier(mesh, accuracy=True))


HELD_OUT = (
    Plant("heads not sharded", "The attention's activations are pinned to rows without 'heads'.",
          trainer.HSDP, heads_not_sharded, {"wire": 1.1}, "reshard", ("heads", "tensor")),
    Plant("keys of the whole batch", "The attention scales its queries by a statistic of all keys, of a batch that fsdp shards.",
          FSDP, keys_of_the_whole_batch, {"wire": 1.05}, "reshard",
          ("activation", "fsdp", "batch")),
    Plant("norm in f32", "The norms return float32, which is what enters the blocks.",
          trainer.HSDP, norm_in_f32, {"wire": 1.1}, "f32-collective",
          ("activation", "tensor", "cast")),
    Plant("up replicated", "The first matrix of an MLP is given to every device, which uses its own columns.",
          plain.TENSOR_PARALLEL, up_replicated, {"peak": 1.2}, "replicated|reshard", ("up", "tp")),
    Plant("moments along another dimension", "Moments are sharded along another dimension than their parameters.",
          plain.FULLY_SHARDED, moments_along_another_dimension, {"wire": 1.03, "step": 1.09},
          "reshard", ("all-to-all", "shard")),
    Plant("accuracy of gathered logits", "The accuracy is computed of logits that every device has in full.",
          CLASSES, accuracy_of_gathered_logits, {"wire": 1.5}, "reshard",
          ("activation", "gathered over tp")),
)  # fmt: skip
