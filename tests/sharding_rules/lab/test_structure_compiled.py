"""The queries of a program's structure on what XLA makes of a loop over layers for eight H100s,
once as it should be and with mistakes."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as Spec

from sharding_rules.lab import compile_module, h100
from sharding_rules.lab.hlo import Module
from sharding_rules.lab.structure import (
    adds_to_gradients,
    casts_of_weights,
    slices_of_layers,
    transposes_around,
)

COMPILE_BUDGET = 3
pytestmark = pytest.mark.deviceless

LAYERS, B, S, D = 6, 4, 1024, 2048
WEIGHTS = {"w": (D, D // 8)}
"""On one of eight devices."""


def compiled(
    *, dtype: Any = jnp.bfloat16, rows: int = 1, whole: bool = False, batch_first: bool = False
) -> Module:
    """A loop that multiplies with each layer's weight, and adds to its gradient. The residual's
    sequence is sharded.

    dtype: of the stored weights. rows: layers that are sliced at once. whole: gradients of all
    layers are added at once.
    """
    mesh = h100(tensor=8)
    spec = Spec(None, "tensor") if batch_first else Spec("tensor")

    def pin(x: jax.Array, *axes: str | None) -> jax.Array:
        return lax.with_sharding_constraint(x, NamedSharding(mesh, Spec(*axes)))

    def step(weights: jax.Array, sums: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        def layer(i: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            x, sums = carry
            w = lax.dynamic_slice_in_dim(weights, i * rows, rows)
            w = lax.optimization_barrier(w).sum(0) if rows > 1 else w[0].astype(jnp.bfloat16)
            full = pin(jax.nn.gelu(x))
            y = pin(full @ w.astype(jnp.bfloat16), None, None, "tensor")
            dw = pin(jnp.einsum("abd,abf->df", full, y).astype(jnp.float32), None, "tensor")
            if whole:
                sums = sums + jnp.where((jnp.arange(LAYERS) == i)[:, None, None], dw, 0)
            else:
                sums = sums.at[i].add(dw)
            back = jnp.einsum("abf,df->abd", y, w.astype(jnp.bfloat16))
            return lax.with_sharding_constraint(back, NamedSharding(mesh, spec)), sums

        return lax.fori_loop(0, LAYERS // rows, layer, (x, sums))

    def array(shape: tuple[int, ...], dtype: Any, spec: Spec) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))

    stacked = Spec(None, None, "tensor")
    tokens = (B, S, D) if batch_first else (S, B, D)
    arguments = (
        array((LAYERS, D, D), dtype, stacked),
        array((LAYERS, D, D), jnp.float32, stacked),
        array(tokens, jnp.bfloat16, spec),
    )
    return compile_module(jax.jit(step, donate_argnums=1), *arguments, mesh=mesh)


def test_a_loop_as_it_should_be() -> None:
    module = compiled()
    assert any(one.opcode.startswith("all-gather") for one in module.by_name.values())
    assert slices_of_layers(module, WEIGHTS) == [] and casts_of_weights(module, WEIGHTS) == []
    assert transposes_around(module) == [] and adds_to_gradients(module, WEIGHTS) == []


def test_weights_that_are_cast_in_the_loop_and_a_sequence_that_is_not_first() -> None:
    module = compiled(dtype=jnp.float32, batch_first=True)
    assert casts_of_weights(module, WEIGHTS)
    assert transposes_around(module)
    assert slices_of_layers(module, WEIGHTS) == [] and adds_to_gradients(module, WEIGHTS) == []


def test_several_layers_at_once() -> None:
    module = compiled(rows=2, whole=True)
    assert " takes 2 layers of w: " in slices_of_layers(module, WEIGHTS)[0]
    assert " adds 6 layers of w at once" in adds_to_gradients(module, WEIGHTS)[0]
