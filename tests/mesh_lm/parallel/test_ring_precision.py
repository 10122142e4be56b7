"""Ring attention in bf16: its gradients are as exact as those of one device, however many devices
the keys pass.

The shards are a mapped axis on one device, where collectives are what they are over a mesh axis, so
that 16 ways need no 16 devices.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_formula import normal

from mesh_lm.model.ring_attention import ring_attention
from pallas_kernels import flash_attention, reference_attention
from sharding_rules import preset, token_order

COMPILE_BUDGET = 44
B, S, K, H = 1, 256, 2, 16
LIMIT = 1.2
"""The largest error of a ring, as a multiple of one device's."""


def gradients(
    attend: Any, arrays: list[jax.Array], dy: jax.Array, dtype: Any = np.float32
) -> list[np.ndarray]:
    """The gradients of the arrays, in this type."""
    run = jax.jit(lambda arrays, dy: jax.vjp(attend, *arrays)[1](dy))
    return [np.asarray(x, dtype) for x in run(arrays, dy)]


def by_ring(
    ways: int,
    features: dict[str, Any],
    arrays: list[jax.Array],
    dy: jax.Array,
    dtype: Any = np.float32,
) -> list[np.ndarray]:
    """The same of ring attention over so many shards, with all tokens in their own order."""
    order = token_order(preset("ring"), {"sequence": ways}, S)
    assert order is not None

    def shards(x: jax.Array) -> jax.Array:
        return jnp.moveaxis(x[:, order].reshape(B, ways, S // ways, *x.shape[2:]), 1, 0)

    def whole(x: jax.Array) -> jax.Array:
        return jnp.moveaxis(x, 0, 1).reshape(B, S, *x.shape[3:])[:, np.argsort(order)]

    def shard(dy: jax.Array, q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, ...]:
        def attend(q: jax.Array, k: jax.Array, v: jax.Array, *sinks: jax.Array) -> jax.Array:
            return ring_attention("sequence", q, k, v, None, sinks[0] if sinks else None, features)

        return jax.vjp(attend, q, k, v, *arrays[3:])[1](dy)

    found = jax.jit(jax.vmap(shard, axis_name="sequence"))(*map(shards, (dy, *arrays[:3])))
    of_matrices = [np.asarray(whole(x), dtype) for x in found[:3]]
    return of_matrices + [np.asarray(x).sum(0) for x in found[3:]]


@pytest.mark.parametrize(
    ("ways", "heads", "features"),
    [
        (16, 2, {}),
        pytest.param(8, 2, {}, marks=pytest.mark.slow),
        pytest.param(8, 4, {"window": 40}, marks=pytest.mark.slow),
        pytest.param(16, 4, {"sinks": True, "softcap": 3.0}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_the_error_is_that_of_one_device(ways: int, heads: int, features: dict[str, Any]) -> None:
    """At most 1.2 times as large, in the norm of the whole array."""
    features = dict(features)
    arrays = [
        jnp.asarray(normal(B, S, n, H, seed=seed), jnp.bfloat16)
        for seed, n in enumerate((heads, K, K))
    ]
    if features.pop("sinks", False):
        arrays.append(jnp.asarray(normal(heads)))
    dy = jnp.asarray(normal(B, S, heads, H, seed=3), jnp.bfloat16)

    def named(attend: Any) -> Any:
        return lambda q, k, v, *sinks: attend(
            q, k, v, sinks=sinks[0] if sinks else None, **features
        )

    exact = [x.astype(jnp.float32) for x in arrays]
    wanted = gradients(
        named(lambda *x, **how: reference_attention(*x, **how)[0]), exact, dy.astype(jnp.float32)
    )
    alone = gradients(named(flash_attention), arrays, dy)
    found = by_ring(ways, features, arrays, dy)

    def errors(found: list[np.ndarray]) -> list[float]:
        return [
            float(np.linalg.norm(x - y) / np.linalg.norm(y))
            for x, y in zip(found, wanted, strict=True)
        ]

    for name, error, limit in zip(
        ("q", "k", "v", "sinks"), errors(found), errors(alone), strict=False
    ):
        assert error <= LIMIT * limit, (
            f"{name}: {error:.2e} over {ways} ways, {limit:.2e} on one device"
        )


def test_in_fp64_all_sums_are_in_fp64() -> None:
    """As a reference of other tests, or of a user."""
    with jax.enable_x64(True):
        arrays = [
            jnp.asarray(normal(B, S, n, H, seed=seed), jnp.float64)
            for seed, n in enumerate((2, K, K))
        ]
        dy = jnp.asarray(normal(B, S, 2, H, seed=3), jnp.float64)
        found = by_ring(4, {}, arrays, dy, np.float64)
        wanted = gradients(lambda *x: reference_attention(*x)[0], arrays, dy, np.float64)
        for one, other in zip(found, wanted, strict=True):
            np.testing.assert_allclose(one, other, rtol=0, atol=1e-12)
