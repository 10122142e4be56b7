"""Sums around a ring, in two levels and in int8, on eight CPU devices."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import P
from jax.extend.core import jaxprs_in_params

from mesh_lm.parallel import reductions

COMPILE_BUDGET = 16
N = 8


def mesh(**sizes: int) -> jax.sharding.Mesh:
    """The first CPU devices."""
    devices = jax.devices()[: math.prod(sizes.values())]
    return jax.sharding.Mesh(
        np.array(devices).reshape(*sizes.values()),
        tuple(sizes),
        axis_types=(jax.sharding.AxisType.Auto,) * len(sizes),
    )


def on_each(f, over: jax.sharding.Mesh):
    """f(an array of one device) of arrays [devices, ...] -> the results, [devices, ...]."""
    spec = P(tuple(over.axis_names))
    one = lambda *given: jax.tree.map(lambda y: y[None], f(*(x[0] for x in given)))  # noqa: E731
    return jax.jit(jax.shard_map(one, mesh=over, in_specs=spec, out_specs=spec, check_vma=False))


def numbers(shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def permuted_bytes(jaxpr) -> int:
    """Bytes that one device sends in the permutes of a program."""
    return sum(
        x.aval.size * x.aval.dtype.itemsize * (equation.primitive.name == "ppermute")
        for equation in jaxpr.eqns
        for x in equation.invars
        if hasattr(x, "aval")
    ) + sum(
        permuted_bytes(inner)
        for equation in jaxpr.eqns
        for inner in jaxprs_in_params(equation.params)
    )


@pytest.mark.parametrize("shape", [(64,), (5, 7), ()], ids=str)
def test_the_ring_equals_psum(shape: tuple[int, ...]) -> None:
    x, over = numbers((N, *shape)), mesh(data=N)
    found = on_each(lambda x: reductions.ring_sum(x, "data"), over)(x)
    wanted = on_each(lambda x: jax.lax.psum(x, "data"), over)(x)
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)
    assert all(np.array_equal(np.asarray(found)[0], each) for each in np.asarray(found)), (
        "all devices get the same bits"
    )


def test_what_the_ring_sends() -> None:
    """2 (n - 1) / n of the array's bytes."""
    program = on_each(lambda x: reductions.ring_sum(x, "data"), mesh(data=N))
    assert (
        permuted_bytes(jax.make_jaxpr(program)(numbers((N, 64))).jaxpr) == 2 * (N - 1) / N * 64 * 4
    )


@pytest.mark.parametrize("outer", [("data",), ()])
def test_two_levels_equal_psum(outer: tuple[str, ...]) -> None:
    over, x = mesh(data=2, node=4), numbers((N, 5, 7))
    found = on_each(lambda x: reductions.two_level_sum(x, "node", outer), over)(x)
    wanted = on_each(lambda x: jax.lax.psum(x, (*outer, "node")), over)(x)
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)


@jax.jit
def there_and_back(x: jax.Array) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
    """(what is sent of x, what arrives)."""
    sent = reductions.quantised(x)
    return sent, reductions.dequantised(*sent, x.shape[-1])


def test_a_block_is_wrong_by_half_its_scale_at_most() -> None:
    x = numbers((3, 1000)) * np.float32(10.0) ** np.arange(-30, 0, 10, dtype=np.float32)[:, None]
    (q, scale), back = there_and_back(x)
    error = np.abs(back - x)
    bound = np.repeat(np.asarray(scale)[..., 0], reductions.BLOCK, axis=-1)[:, :1000] / 2
    assert q.dtype == jnp.int8 and q.shape == (3, 4, 256) and (error <= bound * (1 + 1e-6)).all()
    assert not np.asarray(there_and_back(np.zeros(10, np.float32))[1]).any()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_number_that_is_not_finite_stays_so(bad: float) -> None:
    """So that the step is skipped."""
    x = np.zeros(300, np.float32)
    x[3] = bad
    back = np.asarray(there_and_back(x)[1])
    assert np.isnan(back[:256]).all() and np.isfinite(back[256:]).all()


STEPS, SIZE = 5, 700
OVER = {"data": 4}


@functools.cache
def int8_sum():
    """(gradients, what was left out so far) of all devices -> (sums, what is left out)."""
    return on_each(lambda g, r: reductions.int8_sum(g + r, ("data",)), mesh(**OVER))


def transmitted(grads: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(what each of the steps [steps, devices, k] sends [steps, k], what is left out after the last
    step [devices, k])."""
    left_out, sent = np.zeros_like(grads[0]), []
    for g in grads:
        total, left_out = map(np.asarray, int8_sum()(g, left_out))
        assert (total == total[0]).all(), "all devices get the same bits"
        sent.append(total[0].astype(np.float64))
    return np.array(sent), left_out.astype(np.float64)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**31), st.lists(st.integers(-6, 6), min_size=STEPS, max_size=STEPS))
def test_error_feedback(seed: int, magnitudes: list[int]) -> None:
    """Over any number of steps, what was sent differs from the gradients by one step's rounding:
    the errors do not add up.

    Exactly: by the sum of what the devices have left out, half a scale at most each; the device
    that rounds a sum has that error, too.
    """
    grads = (
        numbers((STEPS, OVER["data"], SIZE), seed)
        * np.float32(10.0) ** np.array(magnitudes, np.float32)[:, None, None]
    )
    n = OVER["data"]
    for last in (1, STEPS):
        sent, left_out = transmitted(grads[:last])
        gap = grads[:last].astype(np.float64).sum((0, 1)) - sent.sum(0)
        largest = np.abs(grads[:last]).max()
        np.testing.assert_allclose(gap, left_out.sum(0), atol=1e-5 * largest * last * n)
    # A scale is at most (the last gradient + what was left out before) / 127.
    steps = np.abs(grads).max((1, 2))
    bound, carried = 0.0, 0.0
    for top in steps:
        scale = (top + carried) / 127
        of_sum = n * (top + carried + scale / 2) / 127
        carried = scale / 2 + of_sum / 2
        bound = n * scale / 2 + of_sum / 2
    assert np.abs(left_out).max() <= carried * (1 + 1e-4)
    assert np.abs(gap).max() <= bound * (1 + 1e-4) + 1e-5 * largest * n * STEPS
