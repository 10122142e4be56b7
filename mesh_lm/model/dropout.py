"""Dropout whose masks depend on the step, the sample, the layer, the site and the position, and on nothing else.

A key per device, shard, stage or microbatch would make the masks change with the mesh; these do not.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class Dropout:
    """Keys for one microbatch: `keys` [B], one per sample, folded with everything known so far."""

    keys: jax.Array

    @classmethod
    def of(cls, key: jax.Array, sample_ids: jax.Array) -> Dropout:
        """From the step's key and the global sample ids uint32 [B]."""
        return cls(jax.vmap(jax.random.fold_in, (None, 0))(key, sample_ids))

    def fold(self, number: jax.Array | int) -> Dropout:
        """Keys for one layer, or for one site in it; layers are numbered through the whole model."""
        return Dropout(jax.vmap(jax.random.fold_in, (0, None))(self.keys, number))

    def __call__(self, x_BSD: jax.Array, rate: float) -> jax.Array:
        """x with a fraction `rate` of its entries zeroed and the others scaled by 1 / (1 - rate)."""
        if rate == 0:
            return x_BSD

        def mask(key: jax.Array, position: jax.Array) -> jax.Array:
            return jax.random.bernoulli(jax.random.fold_in(key, position), 1 - rate, x_BSD.shape[2:])

        keep = jax.vmap(jax.vmap(mask, (None, 0)), (0, None))(self.keys, jnp.arange(x_BSD.shape[1]))
        return jnp.where(keep, x_BSD / (1 - rate), 0).astype(x_BSD.dtype)
