"""Digests: equal for the same array in any sharding, different for any other array."""

import re
from collections.abc import Callable
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from mesh_lm.state import digest as module
from mesh_lm.state.digest import combined, digests, host_digest

COMPILE_BUDGET = 10

DTYPES = [
    np.float32,
    np.int32,
    np.uint32,
    ml_dtypes.bfloat16,
    np.float16,
    ml_dtypes.float8_e4m3fn,
    np.int8,
    np.uint8,
    np.bool_,
]
SHAPES = [(), (1,), (16,), (8, 24), (2, 4, 8), (8, 0)]


def noise(shape: tuple[int, ...], dtype: Any, seed: int = 0) -> np.ndarray:
    """Returns random bits, including NaNs and infinities."""
    random = np.random.default_rng(seed)
    if dtype == np.bool_:
        return random.random(shape) < 0.5
    itemsize = np.dtype(dtype).itemsize
    return np.frombuffer(random.bytes(int(np.prod(shape)) * itemsize), dtype).reshape(shape)


def bits(x: np.ndarray) -> np.ndarray:
    return x.view(f"u{x.dtype.itemsize}")


def test_devices_and_numpy_agree_on_any_dtype_and_shape() -> None:
    tree = {
        f"{np.dtype(dtype)}{shape}": noise(shape, dtype) for dtype in DTYPES for shape in SHAPES
    }
    assert digests(jax.device_put(tree)) == {name: host_digest(x) for name, x in tree.items()}


def test_eight_bytes_are_two_words() -> None:
    tree = {"float": noise((4, 8), np.float64), "int": noise((), np.int64)}
    with jax.enable_x64(True):
        assert digests(jax.device_put(tree)) == {name: host_digest(x) for name, x in tree.items()}


def test_the_value_is_for_ever() -> None:
    """Digests are stored in checkpoints: a change of the formula would make all of them
    unreadable."""
    assert host_digest(np.arange(1000, dtype=np.float32).reshape(10, 100)) == "d6c0524c20e4d310"
    assert host_digest(np.zeros((), np.int32)) == "ae6f80f12aba6323"
    assert combined({"b": "2", "a": "1"}) == combined({"a": "1", "b": "2"}) == "ddc7523b594d0dff"


@settings(max_examples=5)
@given(
    dims=st.lists(st.tuples(*[st.integers(0, 3)] * 3), min_size=8, max_size=8),
    seed=st.integers(0, 99),
)
def test_no_sharding_changes_it(dims: list[tuple[int, int, int]], seed: int) -> None:
    """dims: the dimension of each leaf that each mesh axis shards; 3: none."""
    mesh = jax.make_mesh(
        (2, 2, 2), ("data", "tensor", "fsdp"), axis_types=(jax.sharding.AxisType.Auto,) * 3
    )
    sharded = {}
    expected = {}
    for n, sharded_dims in enumerate(dims):
        axes: list[list[str]] = [[], [], [], []]
        for axis, dim in zip(mesh.axis_names, sharded_dims, strict=True):
            axes[dim].append(axis)
        spec = jax.P(*(tuple(names) for names in axes[:3]))
        x = noise((8, 16, 8), DTYPES[(seed + n) % len(DTYPES)], seed)
        sharded[str(n)] = jax.device_put(x, jax.NamedSharding(mesh, spec))
        expected[str(n)] = host_digest(x)
    assert digests(sharded) == expected


def test_devices_exchange_words_and_copy_nothing() -> None:
    mesh = jax.make_mesh((2, 4), ("data", "fsdp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    x = jax.ShapeDtypeStruct(
        (64, 512, 128), np.float32, sharding=jax.NamedSharding(mesh, jax.P("fsdp", "data"))
    )
    compiled = (
        jax.jit(module.digest, out_shardings=jax.NamedSharding(mesh, jax.P())).lower(x).compile()
    )
    sent = re.findall(r"= u32\[([\d,]*)\]\S* (?:all|reduce|collective)-\w+\(", compiled.as_text())
    assert sent and all(np.prod([int(n) for n in shape.split(",")]) <= 8 for shape in sent)
    assert compiled.memory_analysis().temp_size_in_bytes < 4096


@given(
    dtype=st.sampled_from([d for d in DTYPES if d != np.bool_]),
    seed=st.integers(0, 2**32 - 1),
    position=st.integers(0, 10**9),
)
def test_every_flipped_bit_changes_it(dtype: Any, seed: int, position: int) -> None:
    x = noise((3, 5, 7), dtype, seed)
    flipped = x.copy()
    word, bit = divmod(position, 8 * x.dtype.itemsize)
    bits(flipped).reshape(-1)[word % x.size] ^= np.array(1 << bit).astype(f"u{x.dtype.itemsize}")
    assert host_digest(flipped) != host_digest(x)


def with_one_bit_flipped(x: np.ndarray) -> list[np.ndarray]:
    """Returns an array for each bit."""
    arrays = []
    for word in range(x.size):
        for bit in range(8 * x.dtype.itemsize):
            flipped = x.copy()
            bits(flipped)[word] ^= bits(x).dtype.type(1 << bit)
            arrays.append(flipped)
    return arrays


def test_all_flips_of_one_bit_differ_on_the_devices_too() -> None:
    """All 1,024 arrays and the original have different digests."""
    x = noise((32,), np.float32)
    arrays = np.stack([x, *with_one_bit_flipped(x)])
    rows = np.asarray(jax.jit(jax.vmap(module.digest))(arrays))
    assert len({tuple(row) for row in rows}) == 1 + 32 * 32


CHANGES: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "two signs": lambda x: (
        x * np.where(np.isin(np.arange(x.size), (3, 77)), -1, 1).astype(x.dtype).reshape(x.shape)
    ),
    "all signs": lambda x: -x,
    "two rows swapped": lambda x: x[[1, 0, *range(2, len(x))]],
    "shifted by a word": lambda x: np.roll(x, 1),
    "a block of zeros": lambda x: np.where(np.arange(x.size).reshape(x.shape) // 64 == 3, 0, x),
    "transposed": lambda x: x.T,
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_damage_looks_like_is_found(change: str) -> None:
    for seed in range(50):
        x = np.random.default_rng(seed).normal(size=(16, 16)).astype(np.float32)
        assert host_digest(CHANGES[change](x).astype(np.float32)) != host_digest(x)


@given(seed=st.integers(0, 2**32 - 1), a=st.integers(0, 104), b=st.integers(0, 104))
def test_swapped_words_change_it(seed: int, a: int, b: int) -> None:
    x = noise((105,), np.int32, seed)
    assume(x[a] != x[b])
    swapped = x.copy()
    swapped[[a, b]] = x[[b, a]]
    assert host_digest(swapped) != host_digest(x)


@given(shape=st.lists(st.integers(0, 9), min_size=1, max_size=4), chunk=st.integers(1, 200))
@settings(max_examples=30)
def test_the_size_of_a_chunk_does_not_matter(shape: list[int], chunk: int) -> None:
    x = noise(tuple(shape), np.float32)
    expected = host_digest(x)
    default_chunk = module._CHUNK
    try:
        module._CHUNK = chunk
        assert host_digest(x) == expected == host_digest(np.asfortranarray(x))
    finally:
        module._CHUNK = default_chunk


def test_positions_of_a_huge_array() -> None:
    """Positions are exact up to 2^32 words; beyond, every axis still counts, even if its stride is
    a multiple of 2^32."""
    assert module._strides((4, 5, 6)) == [30, 6, 1]
    assert module._strides((2**16, 2**16)) == [2**16, 1]
    assert module._strides((80, 2**16, 2**16)) == [1, 2**16 + 1, 1]
    assert all(stride % 2 for stride in module._strides((80, 2**15, 2**16)))


def test_one_program_for_a_tree_and_none_for_the_next() -> None:
    tree = jax.device_put(
        {
            "params": {"a": np.ones((4, 4)), "b.c": np.zeros(3, ml_dtypes.bfloat16)},
            "step": np.int32(7),
        }
    )
    first = digests(tree)
    assert list(first) == ["params/a", "params/b.c", "step"]
    assert all(len(value) == 16 for value in first.values())
    assert digests(tree) == first
    assert digests({}) == {}
    assert combined(first) != combined(first | {"step": first["params/a"]})
    assert len(combined(first)) == 16
