"""Grouped matmul against a loop over groups, forward and gradients: xla on the CPU, the Hopper kernels in the interpreter."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import Unsupported, grouped_matmul
from pallas_kernels.dev.interpreter import interpreted
from pallas_kernels.dev.resources import resources
from pallas_kernels.grouped_matmul import choose_grouped_matmul, describe_grouped_matmul
from sharding_rules.lab.targets import devices

COMPILE_BUDGET = 24

HOPPER = {"implementation": "mosaic", "platform": "gpu", "capability": (9, 0)}
SIZES = {
    "ragged, empty ones, some tokens of none": [70, 0, 101, 1, 0, 20],
    "ends on blocks": [64, 0, 128, 0],
    "one group has all": [0, 200, 0],
    "no token has a group": [0, 0],
    "one group": [200],
}
T = 200


def case(sizes: list[int], D: int, F: int, dtype, spare: float = 0.0, T: int = T):
    random = np.random.default_rng(0)
    x, w, dy = (random.standard_normal(shape).astype(dtype) for shape in ((T, D), (len(sizes), D, F), (T, F)))
    x[sum(sizes) :] += spare
    return x, w, dy, np.array(sizes, np.int32)


def by_loop(x, w, dy, sizes):
    """y, dx and dw in fp64."""
    x, w, dy = (a.astype(np.float64) for a in (x, w, dy))
    y, dx, dw = np.zeros_like(dy), np.zeros_like(x), np.zeros_like(w)
    ends = np.cumsum(sizes)
    for group, (start, end) in enumerate(zip(ends - sizes, ends, strict=True)):
        rows = slice(start, end)
        y[rows], dx[rows], dw[group] = x[rows] @ w[group], dy[rows] @ w[group].T, x[rows].T @ dy[rows]
    return y, dx, dw


@functools.partial(jax.jit, static_argnums=4)
def ours(x, w, dy, sizes, features):
    y, back = jax.vjp(lambda x, w: grouped_matmul(x, w, sizes, **dict(features)), x, w)
    return y, *back(dy)


def check(arguments, tolerance: float, **features) -> None:
    for name, found, wanted in zip(("y", "dx", "dw"), ours(*arguments, tuple(features.items())), by_loop(*arguments), strict=True):
        assert found.dtype == arguments[0].dtype
        assert np.abs(np.asarray(found, np.float64) - wanted).max() <= tolerance * max(np.abs(wanted).max(), 1), name


@pytest.mark.parametrize("times", [1, 7], ids=["one block", "three blocks"])
@pytest.mark.parametrize("name", SIZES)
def test_xla(name: str, times: int) -> None:
    check(case([times * n for n in SIZES[name]], 48, 24, np.float32, spare=1e3, T=times * T), 1e-5, implementation="xla")


@pytest.mark.parametrize("name", SIZES)
def test_mosaic(name: str) -> None:
    """One wide side with tiles of 128 and one of 64, the other way round in the backward."""
    with interpreted():
        check(case(SIZES[name], 256, 64, jnp.bfloat16, spare=1e3), 0.01, **HOPPER)


def test_mosaic_reuses_its_buffers() -> None:
    """More steps than buffers, forward and backward: without the wait that is added, a copy lands in what a wgmma still reads."""
    with interpreted(seed=1):
        check(case([191, 0, 385], 384, 64, np.float16, T=600), 2e-3, **HOPPER)


def shapes(T: int = 4096, D: int = 1024, F: int = 2048, E: int = 8, dtype="bfloat16", place=None):
    structs = ((T, D), dtype), ((E, D, F), dtype), ((E,), "int32")
    return [jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=place) for shape, dtype in structs]


REFUSED = {
    "the platform is cpu": {},
    "this GPU has 8.0": {"platform": "gpu", "capability": (8, 0)},
    "this GPU has 10.0": {"platform": "gpu", "capability": (10, 0)},
    "not float32": {"dtype": "float32"},
    "multiples of 64, not 96 and 2048": {"D": 96},
    "multiples of 64, not 1024 and 32": {"F": 32},
    "128 tokens or more, not 64": {"T": 64},
}


@pytest.mark.parametrize("reason", REFUSED)
def test_refusals(reason: str) -> None:
    words = dict(REFUSED[reason])
    place = {"platform": "cpu"} if not words else {"platform": "gpu", "capability": words.pop("capability", (9, 0))}
    words.pop("platform", None)
    arrays = shapes(**words)
    choice = choose_grouped_matmul(describe_grouped_matmul(*arrays, **place))
    assert choice.name == "xla" and reason in choice.rejected["mosaic"] and ";" not in choice.rejected["mosaic"]
    with pytest.raises(Unsupported, match=reason):
        jax.eval_shape(lambda *a: grouped_matmul(*a, implementation="mosaic", **place), *arrays)


def test_choice() -> None:
    choice = choose_grouped_matmul(describe_grouped_matmul(*shapes(), platform="gpu", capability=(9, 0)))
    assert choice.name == "xla" and "not been compared" in choice.rejected["mosaic"]
    assert "platform is cpu" in choose_grouped_matmul(describe_grouped_matmul(*shapes())).rejected["mosaic"]


def test_every_fault_is_named() -> None:
    x, w, sizes = np.zeros((4, 3), np.float32), np.zeros((2, 5, 6), np.float16), np.zeros(3)
    with pytest.raises(ValueError, match=r"the same D, .*one dtype .*cast the weights.*group_sizes must be integers, got float64"):
        grouped_matmul(x, w, sizes)  # pyright: ignore
    with pytest.raises(ValueError, match=r"x must be \[T, D\]"):
        grouped_matmul(x[0], w, sizes)  # pyright: ignore
    with pytest.raises(ValueError, match="implementation must be one of mosaic, xla or None, got 'triton'"):
        grouped_matmul(x, np.zeros((2, 3, 6), np.float32), np.zeros(2, int), implementation="triton")  # pyright: ignore


def gradients(**features):
    def loss(x, w, sizes):
        return grouped_matmul(x, w, sizes, **features).astype(jnp.float32).sum()

    return jax.grad(loss, (0, 1))


@pytest.mark.deviceless
@pytest.mark.parametrize("implementation", ["mosaic", "xla"])
def test_memory_does_not_grow_with_groups(implementation: str) -> None:
    """At most the tokens' gradient, which the loss gives, and one matrix in fp32 with its product. lax.ragged_dot has a copy for each."""
    place, temporaries = jax.sharding.SingleDeviceSharding(devices("h100", 1)[0]), {}
    for E in (8, 32):
        compiled = jax.jit(gradients(**HOPPER | {"implementation": implementation})).lower(*shapes(E=E, place=place)).compile()
        memory = compiled.memory_analysis()
        assert memory is not None
        temporaries[E] = memory.temp_size_in_bytes
    token_gradients, matrices = 2 * 4096 * 2048, 2 * 4 * 1024 * 2048
    assert abs(temporaries[32] - temporaries[8]) < 2**20, temporaries
    assert temporaries[32] < token_gradients + matrices + 2**20, temporaries


@pytest.mark.deviceless
def test_kernels_compile_well(reports: str) -> None:
    def both(x, w, sizes):
        y, back = jax.vjp(lambda x, w: grouped_matmul(x, w, sizes, **HOPPER), x, w)
        return back(y)

    found = resources(both, *shapes(), cache=reports)
    assert len(found) == 3
    for kernel in found:
        assert (kernel.spill_stores, kernel.spill_loads) == (0, 0) and kernel.wgmma and kernel.tma_loads, kernel
        assert not any("serialized" in warning for warning in kernel.warnings), kernel
