"""The Hopper kernels compiled by ptxas for an H100: no spills, asynchronous wgmmas, memory
proportional to S."""

import covering
import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import BlockMask, attention_gradients, flash_attention
from pallas_kernels.attention import tuning
from pallas_kernels.attention.mosaic import HEAD_DIMS
from pallas_kernels.dev.autotune import EVERYTHING, KERNELS, Candidate, compiles_well
from pallas_kernels.dev.resources import resources
from sharding_rules.lab.targets import devices

COMPILE_BUDGET = 60

HOPPER = {"implementation": "mosaic", "platform": "gpu", "capability": (9, 0)}
TILES = list(
    dict.fromkeys(
        (Candidate(name, row.head_dims, getattr(row.tiling, name)), row.causal if row.plain and name == "forward" else None)
        for row in tuning.entries() for name in KERNELS
    )
)  # fmt: skip
"""Each kernel with the tiles of an entry, and the mask of the calls to which the entry is
confined."""
ON_CI = [
    case
    for case in TILES
    if case[0].head_dims == (128, 128) and case[0].kernel in ("forward", "fused")
]
"""The tiles that most calls have. Other widths and masks, and the kernels of a deterministic
backward pass, are exhaustive."""


def grad_of(**features):
    """The gradients of attention with respect to q, k and v; its other array arguments come after
    those."""
    names = [name for name, x in features.items() if isinstance(x, jax.ShapeDtypeStruct)]
    static = {name: x for name, x in features.items() if name not in names}

    def loss(q, k, v, *rest):
        return (
            flash_attention(q, k, v, **static, **dict(zip(names, rest, strict=True)), **HOPPER)
            .astype(jnp.float32)
            .sum()
        )

    return jax.grad(loss, (0, 1, 2)), [features[name] for name in names]


def qkv(S: int, N: int, K: int, H: int, Hv: int, dtype="bfloat16", B: int = 2):
    return [
        jax.ShapeDtypeStruct((B, S, heads, width), jnp.dtype(dtype))
        for heads, width in ((N, H), (K, H), (K, Hv))
    ]


@pytest.mark.deviceless
@pytest.mark.parametrize("case", covering.some(TILES, ON_CI))
def test_every_entry_of_the_table_compiles_well(
    case: tuple[Candidate, bool | None], reports: str
) -> None:
    candidate, causal = case
    for features in ({}, EVERYTHING) if causal is None else ({"causal": causal},):
        passes, about = compiles_well(candidate, cache=reports, **features)
        assert passes, about
        assert about["wgmma"] > 0 and about["tma"] > 0


def test_every_width_has_tiles() -> None:
    assert {row.head_dims for row in tuning.entries()} == set(HEAD_DIMS)


FEATURES = {
    "full, fp16": {"causal": False, "dtype": "float16"},
    "window, softcap": {"window": 300, "softcap": 30.0},
    "traced offset": {"q_offset": jax.ShapeDtypeStruct((), jnp.int32)},
    "sparse": {"block_mask": BlockMask.bigbird(1024)},
}  # fmt: skip


@pytest.mark.exhaustive
@pytest.mark.deviceless
@pytest.mark.parametrize("name", FEATURES)
def test_features_cost_no_spills(name: str, reports: str) -> None:
    features = dict(FEATURES[name])
    dtype = features.pop("dtype", "bfloat16")
    grad, rest = grad_of(**features)
    found = resources(grad, *qkv(1024, 4, 2, 128, 128, dtype), *rest, cache=reports)
    assert [kernel.name for kernel in found] == ["flash_attention_forward", "flash_attention_bwd"]
    for kernel in found:
        assert (kernel.spill_stores, kernel.spill_loads) == (0, 0), kernel
        assert not any("serialized" in warning for warning in kernel.warnings), kernel
        assert kernel.wgmma and kernel.tma_loads


@pytest.mark.slow
@pytest.mark.deviceless
def test_memory_is_in_proportion_to_the_length() -> None:
    """Forward and backward of 128k tokens on one device need, besides arguments and results, less
    than five arrays of that size."""
    place = jax.sharding.SingleDeviceSharding(devices("h100", 1)[0])
    temporaries = {}
    for S in (65536, 131072):
        placed = [
            jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place)
            for x in qkv(S, 2, 2, 128, 128, B=1)
        ]
        grad, _ = grad_of()
        temporaries[S] = jax.jit(grad).lower(*placed).compile().memory_analysis().temp_size_in_bytes
    array = 131072 * 2 * 128 * 2
    assert temporaries[131072] <= 5 * array, temporaries
    assert temporaries[131072] == pytest.approx(2 * temporaries[65536], rel=0.02)


@pytest.mark.deviceless
def test_the_row_constant_is_that_of_the_rounded_gradient() -> None:
    """XLA computes with the fp32 numbers that were rounded to bf16 for the kernel, unless it is
    told not to."""
    place = jax.sharding.SingleDeviceSharding(devices("h100", 1)[0])
    arrays = [
        jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place) for x in qkv(256, 1, 1, 128, 128)
    ]
    weights = jax.ShapeDtypeStruct(arrays[0].shape, jnp.float32, sharding=place)

    def loss(q, k, v, weights):
        return (flash_attention(q, k, v, **HOPPER).astype(jnp.float32) * weights).sum()

    program = jax.jit(jax.grad(loss)).lower(*arrays, weights).compile().as_text()
    assert program.count("exponent_bits=8, mantissa_bits=7") == 1


@pytest.mark.exhaustive
@pytest.mark.deviceless
@pytest.mark.parametrize("deterministic", [False, True])
def test_gradients_that_are_not_rounded_cost_no_spills(deterministic: bool, reports: str) -> None:
    """They are stored from registers, and not through shared memory."""
    arrays = qkv(1024, 4, 2, 128, 128)
    q, lse = arrays[0], jax.ShapeDtypeStruct((2, 1024, 4), jnp.float32)

    def run(q, k, v, out, lse, dout):
        return attention_gradients(
            q, k, v, out, lse, dout, unrounded=True, deterministic=deterministic, **HOPPER
        )[:3]

    found = resources(run, *arrays, q, lse, q, cache=reports)
    names = (
        ["flash_attention_dq", "flash_attention_dkv"] if deterministic else ["flash_attention_bwd"]
    )
    assert sorted(kernel.name for kernel in found) == sorted(names)
    for kernel in found:
        assert (kernel.spill_stores, kernel.spill_loads) == (0, 0), kernel
        assert not any("serialized" in warning for warning in kernel.warnings), kernel
