"""The key-value cache: generating one more token reads that token alone.

Sizes: L layers, B batch, S new tokens, T slots of the cache, K kv heads, H head width.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from mesh_lm.model.config import DecoderConfig
from mesh_lm.model.contract import Context
from sharding_rules import Shard

Cache = dict[str, jax.Array]
"""k, v [L, B, T, K, H] in the model's dtype, sharded like activations; segment_ids int32 [B, T]: a
query sees slots of its own only."""

_AXES = (None, "batch", "seq", "kv_heads", "head_dim")


def empty(config: DecoderConfig, shard: Shard, rows: int, length: int) -> Cache:
    """Returns an empty cache for `rows` texts of at most `length` tokens, padding included."""
    shape = (config.n_layers, rows, length, config.kv_heads, config.d_head)
    dtypes = [config.within(segment).dtype for segment in config.segment_configs()]
    widest_dtype = jnp.result_type(*dtypes)
    return {
        "k": shard(jnp.zeros(shape, widest_dtype), *_AXES),
        "v": shard(jnp.zeros(shape, widest_dtype), *_AXES),
        "segment_ids": shard(jnp.zeros((rows, length), jnp.int32), "batch", "seq"),
    }


@dataclasses.dataclass(frozen=True)
class Past:
    """The view of the cache that the attention of one layer has: the new tokens take the slots from
    `start` on.
    """

    cache: Cache
    layer: int | jax.Array
    start: int | jax.Array

    @classmethod
    def of(cls, ctx: Context) -> Past | None:
        """Returns the view of the layer of this context; None outside of generation."""
        return cls(ctx.cache, ctx.number, ctx.start) if ctx.cache else None

    def put(self, k_BSKH: jax.Array, v_BSKH: jax.Array, shard: Shard) -> Past:
        """Returns the view after the keys and values of the new tokens are in their slots."""
        first_slot = (self.layer, 0, self.start, 0, 0)

        def written(slots: jax.Array, x: jax.Array) -> jax.Array:
            x = x.astype(slots.dtype)[None]
            return shard(lax.dynamic_update_slice(slots, x, first_slot), *_AXES)

        k = written(self.cache["k"], k_BSKH)
        v = written(self.cache["v"], v_BSKH)
        return dataclasses.replace(self, cache=self.cache | {"k": k, "v": v})

    def keys_and_values(self) -> tuple[jax.Array, jax.Array]:
        """Returns keys and values of all slots, [B, T, K, H] each. The causal mask hides slots that
        are not written yet.
        """
        k = lax.dynamic_index_in_dim(self.cache["k"], self.layer, keepdims=False)
        v = lax.dynamic_index_in_dim(self.cache["v"], self.layer, keepdims=False)
        return k, v
