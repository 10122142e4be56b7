"""The time of square matmuls in bf16 on one device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
from jax import lax

from mesh_lm.measure.collectives import median_us
from mesh_lm.report.flops import peak_flops
from sharding_rules.lab.profile import Matmul


def measured(sizes: Sequence[int], *, seconds: float = 1.0, samples: int = 3) -> Iterator[Matmul]:
    """Yields each matmul [size, size] x [size, size], with its share of the device's peak.

    Args:
      sizes: of the matrices.
      seconds: that one sample lasts at least: long enough that a GPU comes to its power limit.
      samples: of each size, of which the median counts.
    """
    peak = peak_flops(jax.local_devices()[0].device_kind)
    for size in sorted(set(sizes)):
        keys = jax.random.split(jax.random.key(0), 2)
        left, right = (jax.random.normal(key, (size, size), jnp.bfloat16) for key in keys)
        result = jnp.zeros((size, size), jnp.bfloat16)
        run = jax.jit(_repeated, donate_argnums=(0, 1, 2))
        us, _ = median_us(run, (left, right, result), seconds, samples)
        flops_per_s = 2e6 * size**3 / us
        yield Matmul(size, us, flops_per_s, flops_per_s / peak if peak else None)


def _repeated(
    left: jax.Array, right: jax.Array, result: jax.Array, n_runs: jax.Array
) -> tuple[jax.Array, ...]:
    return lax.fori_loop(0, n_runs, _once, (left, right, result))


def _once(_: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    left, right, _ = carry
    # The barrier keeps XLA from moving the matmul, which is the same each time, out of the loop.
    return lax.optimization_barrier((left, right, left @ right))
