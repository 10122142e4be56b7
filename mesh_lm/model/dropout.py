"""Dropout whose masks depend on the step, the sample, the layer, the site and the position only,
and so are the same on every mesh.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class Dropout:
    """Keys for one microbatch: `keys` [B], one per sequence, folded with everything known so
    far.
    """

    keys: jax.Array
    indices: jax.Array
    """The number of each token in its sequence: int32 [B, S], or [1, S] if it is the same for all
    sequences."""

    @classmethod
    def of(cls, key: jax.Array, sample_ids: jax.Array, indices: jax.Array) -> Dropout:
        """Returns keys from the step's key, the global sample ids uint32 [B] and the indices of the
        tokens.
        """
        return cls(jax.vmap(jax.random.fold_in, (None, 0))(key, sample_ids), indices)

    def fold(self, number: jax.Array | int) -> Dropout:
        """Returns keys for one layer, or for one site in it; layers are numbered through the whole
        model.
        """
        keys = jax.vmap(jax.random.fold_in, (0, None))(self.keys, number)
        return dataclasses.replace(self, keys=keys)

    def __call__(self, x: jax.Array, rate: float, batch_dim: int = 0) -> jax.Array:
        """Returns x with a fraction `rate` of its entries zeroed and the others scaled by
        1 / (1 - rate).

        x: [B, S, ...], or [S, B, ...] if batch_dim is 1.
        """
        if rate == 0:
            return x

        def mask(key: jax.Array, index: jax.Array) -> jax.Array:
            return jax.random.bernoulli(jax.random.fold_in(key, index), 1 - rate, x.shape[2:])

        sequence_mask = jax.vmap(mask, (None, 0))
        if len(self.indices) == 1:
            keep = jax.vmap(sequence_mask, (0, None), batch_dim)(self.keys, self.indices[0])
        else:
            keep = jax.vmap(sequence_mask, out_axes=batch_dim)(self.keys, self.indices)
        return jnp.where(keep, x / (1 - rate), 0).astype(x.dtype)
