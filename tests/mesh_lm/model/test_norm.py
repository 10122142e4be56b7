"""LayerNorm's gradient, which sums over a row in one pass, against that which JAX finds for the formula, in fp64."""

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mesh_lm.model import layers

COMPILE_BUDGET = 12

CONFIG: Any = SimpleNamespace(norm="layernorm", norm_eps=1e-5, dtype="float32")
D = 256


def row_of(kind: str, random: np.random.Generator) -> np.ndarray:
    """Rows whose mean is far from 0, rows with one large value, and ordinary ones."""
    x = random.standard_normal((2, 8, D))
    if kind == "a mean of 100 standard deviations":
        x += 100 * random.standard_normal((2, 8, 1))
    if kind == "one large value":
        x[..., 0] *= 300
    return x


def exact(x: Any, scale: Any, bias: Any, dy: Any) -> tuple[Any, ...]:
    """The gradients in fp64, by NumPy."""
    c = x - x.mean(-1, keepdims=True)
    inverse = 1 / np.sqrt((c * c).mean(-1, keepdims=True) + CONFIG.norm_eps)
    normal, g = c * inverse, dy * scale
    dx = inverse * (g - g.mean(-1, keepdims=True) - normal * (g * normal).mean(-1, keepdims=True))
    return dx, (dy * normal).sum((0, 1)), dy.sum((0, 1))


@pytest.mark.parametrize("kind", ["ordinary", "a mean of 100 standard deviations", "one large value"])
def test_the_gradient_is_as_accurate_as_that_of_jax(kind: str) -> None:
    random = np.random.default_rng(0)
    wide = row_of(kind, random), *random.standard_normal((2, D)), random.standard_normal((2, 8, D))
    x, scale, bias, dy = (a.astype(np.float32) for a in wide)
    wanted = exact(*(a.astype(np.float64) for a in (x, scale, bias, dy)))

    def gradients(function: Any) -> Any:
        return jax.jit(lambda x, scale, bias, dy: jax.vjp(lambda *args: function(*args, CONFIG), x, scale, bias)[1](dy))(x, scale, bias, dy)

    ours, jaxs = gradients(layers._normalise), gradients(layers.layer_norm)
    for ideal, found, other in zip(wanted, ours, jaxs, strict=True):
        error, usual = (np.abs(np.asarray(a) - ideal).max() / np.abs(ideal).max() for a in (found, other))
        assert error <= max(3 * usual, 1e-6), (error, usual)


def test_without_a_bias_and_in_bf16() -> None:
    """In fp32 inside: the result differs from the exact one by its own rounding only."""
    random = np.random.default_rng(1)
    x, scale, dy = random.standard_normal((2, 8, D)), random.standard_normal(D).astype(np.float32), random.standard_normal((2, 8, D))
    x, dy = (a.astype(jnp.bfloat16) for a in (x, dy))
    config: Any = SimpleNamespace(**vars(CONFIG) | {"dtype": "bfloat16"})
    norm = jax.jit(lambda x, scale, dy: jax.vjp(lambda x, scale: layers._normalise(x, scale, None, config), x, scale)[1](dy))
    dx, dscale = norm(x, scale, dy)
    wanted = exact(x.astype(np.float64), scale, None, dy.astype(np.float64))
    assert dx.dtype == jnp.bfloat16 and dscale.dtype == jnp.float32
    assert np.abs(np.asarray(dx, np.float64) - wanted[0]).max() <= 2**-8 * np.abs(wanted[0]).max()
    assert np.abs(np.asarray(dscale) - wanted[1]).max() <= 1e-5 * np.abs(wanted[1]).max()
