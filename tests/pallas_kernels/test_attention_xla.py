"""The chunked attention against its formula: every feature, forward and gradients, with and without
a loop."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_formula import assert_close, chunked, normal, values_and_grads

from pallas_kernels import flash_attention, merge, reference_attention

COMPILE_BUDGET = 16

SEGMENTS = np.sort(np.random.default_rng(1).integers(0, 4, (2, 40)))
LONG_SEGMENTS = np.sort(np.random.default_rng(2).integers(0, 4, (2, 150)))

# B = 2, N = 4. `loop` cuts into chunks of 16; `unrolled` has the default chunks, so that the square
# is one of them.
CASES = {
    "loop: causal, groups, padded": {"S": 40, "T": 40, "K": 2},
    "loop: not causal, one kv head, wide values, padded keys, softcap, scale": {
        "S": 40,
        "T": 33,
        "K": 1,
        "Hv": 16,
        "causal": False,
        "softcap": 1.5,
        "scale": 0.7,
    },
    "loop: window, sinks, softcap": {
        "S": 40,
        "T": 40,
        "K": 4,
        "window": 9,
        "sinks": True,
        "softcap": 2.0,
    },
    "loop: packed documents, sinks": {
        "S": 40,
        "T": 40,
        "K": 2,
        "segment_ids": SEGMENTS,
        "sinks": True,
    },
    "loop: rows that see nothing, chunks skipped": {
        "S": 40,
        "T": 50,
        "K": 2,
        "q_offset": -20,
        "window": 12,
    },
    "loop: traced offset, other segments on the keys": {
        "S": 33,
        "T": 40,
        "K": 4,
        "traced": -7,
        "window": 30,
        "segment_ids": SEGMENTS[:, :33],
        "kv_segment_ids": np.roll(SEGMENTS, -9, 1),
    },
    "loop: nothing is visible": {"S": 40, "T": 40, "K": 2, "q_offset": -99, "sinks": True},
    "unrolled: causal, groups, padded": {"S": 150, "T": 150, "K": 2},
    "unrolled: offset, window, sinks, softcap, wide values": {
        "S": 130,
        "T": 150,
        "K": 4,
        "Hv": 16,
        "q_offset": 60,
        "window": 70,
        "sinks": True,
        "softcap": 2.0,
        "scale": 0.5,
    },
    "unrolled: packed documents, not causal": {
        "S": 150,
        "T": 150,
        "K": 1,
        "segment_ids": LONG_SEGMENTS,
        "causal": False,
        "sinks": True,
    },
    "unrolled: rows that see nothing, traced offset": {
        "S": 40,
        "T": 33,
        "K": 2,
        "traced": -10,
        "window": 5,
    },
}


def check(case: dict, chunk: int, dtype=np.float32, tolerance: float = 1e-5):
    case = dict(case)
    S, T, K, Hv, traced = (
        case.pop(name, default)
        for name, default in (("S", 40), ("T", 40), ("K", 2), ("Hv", 8), ("traced", None))
    )
    arrays = [
        x.astype(dtype)
        for x in (normal(2, S, 4, 8), normal(2, T, K, 8, seed=3), normal(2, T, K, Hv, seed=1))
    ]
    arrays += [normal(4)] if case.pop("sinks", False) else []
    weights = normal(2, S, 4, Hv, seed=2), normal(2, S, 4, seed=2)

    def both(offset, *arrays):
        features = case if traced is None else case | {"q_offset": offset}

        def attention(f):
            return lambda q, k, v, sinks=None: f(q, k, v, sinks=sinks, **features)

        ours = attention(functools.partial(chunked, chunk=chunk))
        return values_and_grads(ours, weights, arrays), values_and_grads(
            attention(reference_attention), weights, arrays
        )

    ours, ref = jax.jit(both)(np.int32(traced or 0), *arrays)
    assert_close(ours, ref, tolerance)
    return ours


@pytest.mark.parametrize("name", CASES)
def test_equals_the_formula(name: str) -> None:
    check(CASES[name], chunk=16 if name.startswith("loop") else 512)


@pytest.mark.parametrize("S", [40, 100], ids=["loop", "unrolled"])
def test_bf16(S: int) -> None:
    """2 % of the largest value: a few roundings of 2^-9."""
    (out, lse), grads = check(
        {"S": S, "T": S, "window": 30, "sinks": True},
        16 if S == 40 else 512,
        jnp.bfloat16,
        tolerance=0.02,
    )
    assert (out.dtype, lse.dtype) == (jnp.bfloat16, jnp.float32)
    assert [g.dtype for g in grads] == [jnp.bfloat16] * 3 + [jnp.float32]


def test_merge_of_parts_is_the_whole() -> None:
    """A small ring attention: some rows see no key in the first parts, and in the head without a
    sink (-inf) none at all."""
    q, k, v, sinks = (
        normal(2, 24, 4, 8),
        normal(2, 30, 2, 8),
        normal(2, 30, 2, 8, seed=1),
        normal(4),
    )
    weights = normal(2, 24, 4, 8, seed=2), normal(2, 24, 4, seed=2)
    sinks[0] = -np.inf

    def ring(offset, q, k, v, sinks):
        parts = [
            flash_attention(
                q,
                k[:, i : i + 10],
                v[:, i : i + 10],
                q_offset=offset - i,
                sinks=sinks if i == 20 else None,
                return_lse=True,
            )
            for i in (0, 10, 20)
        ]
        return functools.reduce(lambda a, b: merge(*a, *b), parts)

    def both(offset, *arrays):
        def whole(q, k, v, sinks):
            return reference_attention(q, k, v, q_offset=offset, sinks=sinks)

        return values_and_grads(functools.partial(ring, offset), weights, arrays), values_and_grads(
            whole, weights, arrays
        )

    assert_close(*jax.jit(both)(np.int32(-5), q, k, v, sinks), 1e-5)


def avals(jaxpr):
    for eqn in jaxpr.eqns:
        yield from (x.aval for x in (*eqn.invars, *eqn.outvars))
        for param in jax.tree.leaves(
            eqn.params, is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")
        ):
            inner = getattr(param, "jaxpr", param)
            if hasattr(inner, "eqns"):
                yield from avals(inner)


def grad_of_long_attention(S: int):
    x = jax.ShapeDtypeStruct((1, S, 1, 8), jnp.float32)

    def loss(q, k, v):
        out, lse = chunked(q, k, v, chunk=64)
        return out.sum() + lse.sum()

    return jax.grad(loss, (0, 1, 2)), (x, x, x)


def test_no_array_grows_with_the_square_of_the_length() -> None:
    largest = {}
    for S in (1024, 2048):
        grad, shapes = grad_of_long_attention(S)
        largest[S] = max(
            math.prod(aval.shape)
            for aval in avals(jax.make_jaxpr(grad)(*shapes).jaxpr)
            if hasattr(aval, "shape")
        )
    assert largest[1024] <= 1024 * 8 < 1024 * 1024
    assert largest[2048] <= 2 * largest[1024]


def test_the_compiled_program_needs_memory_in_proportion_to_the_length() -> None:
    S = 2048
    grad, shapes = grad_of_long_attention(S)
    memory = jax.jit(grad).lower(*shapes).compile().memory_analysis()
    assert memory.temp_size_in_bytes < S * S * 4 / 16


def test_remat_by_name_keeps_the_backward_from_running_the_forward_again() -> None:
    x = jax.ShapeDtypeStruct((1, 32, 2, 8), jnp.float32)

    def matmuls(policy):
        f = jax.checkpoint(
            lambda q, k, v: flash_attention(q, k, v, causal=False).sum(), policy=policy
        )
        return str(jax.make_jaxpr(jax.grad(f, (0, 1, 2)))(x, x, x)).count("dot_general")

    assert (
        matmuls(jax.checkpoint_policies.save_only_these_names("attention_out", "attention_lse"))
        == 2 + 5
    )
    assert matmuls(jax.checkpoint_policies.nothing_saveable) == 2 + 2 + 5


def test_sequence_sharded_queries_in_a_shard_map() -> None:
    """Context parallelism with gathered keys: the offset comes from the axis index, the shapes are
    local."""
    if jax.device_count() < 4:
        pytest.skip("needs 4 devices (tests/conftest.py forces 8 on the CPU)")
    mesh = jax.make_mesh(
        (4,), ("sequence",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:4]
    )
    rows, everywhere = jax.sharding.PartitionSpec(None, "sequence"), jax.sharding.PartitionSpec()
    arrays = normal(2, 40, 4, 8), normal(2, 40, 2, 8), normal(2, 40, 2, 8, seed=1)
    weights = normal(2, 40, 4, 8, seed=2), normal(2, 40, 4, seed=2)

    @functools.partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=(rows, everywhere, everywhere),
        out_specs=(rows, rows),
        check_vma=False,
    )
    def sharded(q, k, v):
        return flash_attention(
            q, k, v, q_offset=jax.lax.axis_index("sequence") * q.shape[1], return_lse=True
        )

    both = jax.jit(
        lambda *x: (
            values_and_grads(sharded, weights, x),
            values_and_grads(reference_attention, weights, x),
        )
    )
    assert_close(*both(*arrays), 1e-5)
