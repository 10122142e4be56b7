"""The dense layer, with the shared matrix of `experts_toy.ExpertsDecoder` before its MLP. Layers of
two segments share the matrix."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from mesh_lm.model import Context, Sums
from mesh_lm.model import dense as dense_kind
from mesh_lm.model.dense import flops_per_token as flops_per_token
from mesh_lm.model.dense import n_params as n_params


class Layer(dense_kind.Layer):
    sequence_first = True

    def __call__(self, x_TD: jax.Array, ctx: Context) -> tuple[jax.Array, Any, Sums]:
        x_TD = x_TD + self.shard(0.1 * jnp.tanh(self._enter(x_TD, ctx) @ ctx.shared), *ctx.residual)
        return super().__call__(x_TD, dataclasses.replace(ctx, shared=None))
