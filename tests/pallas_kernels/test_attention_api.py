"""The public function: the choice of an implementation, the reasons against others, and errors for
wrong arguments."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import pallas_kernels
from pallas_kernels import (
    AttentionProblem,
    BlockMask,
    Unsupported,
    capability_of,
    choose_attention,
    describe_attention,
    flash_attention,
    reference_attention,
)
from pallas_kernels.attention import mosaic
from pallas_kernels.attention.api import IMPLEMENTATIONS, preferred

COMPILE_BUDGET = 5


def shapes(
    S: int = 256,
    T: int = 256,
    N: int = 8,
    K: int = 2,
    H: int = 64,
    Hv: int | None = None,
    B: int = 2,
    dtype="bfloat16",
):
    q, k, v = (B, S, N, H), (B, T, K, H), (B, T, K, H if Hv is None else Hv)
    return tuple(jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)) for shape in (q, k, v))


def ids(B: int, length: int):
    return jax.ShapeDtypeStruct((B, length), jnp.int32)


problems = st.builds(
    lambda S, T, H, Hv, causal, **rest: AttentionProblem(
        q_shape=(2, S, 4, H),
        k_shape=(2, T, 2, H),
        v_shape=(2, T, 2, Hv),
        scale=1.0,
        causal=causal,
        **rest,
    ),
    S=st.sampled_from([1, 128, 200]),
    T=st.sampled_from([1, 128, 200]),
    H=st.sampled_from([20, 64, 96, 128, 192, 256, 512]),
    Hv=st.sampled_from([64, 96, 128, 256]),
    causal=st.booleans(),
    platform=st.sampled_from(["cpu", "gpu", "tpu"]),
    capability=st.sampled_from([(7, 5), (8, 0), (9, 0), (10, 0)]),
    dtype=st.sampled_from(["bfloat16", "float16", "float32", "float64"]),
    window=st.none() | st.just(16),
    softcap=st.none() | st.just(30.0),
    q_offset=st.none() | st.sampled_from([0, 128]),
    segments=st.booleans(),
    sinks=st.booleans(),
    return_lse=st.booleans(),
)


@pytest.mark.parametrize(
    ("flags", "expected"),
    {
        "": False,
        "--xla_gpu_deterministic_ops=true": True,
        "--xla_gpu_deterministic_ops": True,
        "--xla_dump_to=/x --xla_gpu_deterministic_ops=1 --xla_y=z": True,
        "--xla_gpu_deterministic_ops=true --xla_gpu_deterministic_ops=false": False,
        "--xla_gpu_deterministic_ops_of_mine=true": False,
    }.items(),
)
def test_gradients_are_deterministic_if_xlas_operations_are(
    flags: str, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XLA_FLAGS", flags)
    assert describe_attention(*shapes()).deterministic is expected
    assert describe_attention(*shapes(), deterministic=True).deterministic
    assert not describe_attention(*shapes(), deterministic=False).deterministic


@settings(deadline=None)
@given(problems)
def test_choice_is_the_first_that_can_and_names_the_reasons_of_the_rest(
    problem: AttentionProblem,
) -> None:
    choice = choose_attention(problem)
    assert choice == choose_attention(problem)
    assert choice.name not in choice.rejected
    assert all(reason for reason in choice.rejected.values())
    order = preferred(problem)
    assert sorted(order) == sorted(IMPLEMENTATIONS)
    before = order[: order.index(choice.name)]
    assert set(before) <= set(choice.rejected)


@settings(deadline=None)
@given(problems)
def test_cudnn_serves_exactly_what_it_can(problem: AttentionProblem) -> None:
    H, features = (
        problem.q_shape[3],
        (
            problem.softcap,
            problem.segments or None,
            problem.sinks or None,
            problem.return_lse or None,
        ),
    )
    can = (
        problem.platform == "gpu"
        and problem.capability >= (8, 0)
        and problem.dtype in ("bfloat16", "float16")
        and H % 8 == 0
        and (256 if problem.capability >= (9, 0) else 128) >= H == problem.v_shape[3]
        and all(feature is None for feature in features)
        and (problem.q_offset == 0 or not problem.causal)
        and (problem.window is None or problem.q_shape[1] == problem.k_shape[1])
    )
    assert ("cudnn" not in choose_attention(problem).rejected) == can


@settings(deadline=None)
@given(problems)
def test_mosaic_serves_exactly_what_it_can(problem: AttentionProblem) -> None:
    widths = (problem.q_shape[3], problem.v_shape[3])
    can = (
        (problem.platform, problem.capability) == ("gpu", (9, 0))
        and problem.dtype in ("bfloat16", "float16")
        and max(widths) <= 256
    )
    choice = choose_attention(problem)
    assert ("mosaic" not in choice.rejected) == can
    exact = widths in [(64, 64), (96, 96), (128, 128), (192, 128), (256, 256)]
    assert (choice.name == "mosaic") == (can and (exact or "cudnn" in choice.rejected)), (
        "cudnn needs no padding"
    )


@pytest.mark.parametrize(
    ("widths", "padded"),
    [
        ((80, 80), (96, 96)),
        ((64, 64),) * 2,
        ((160, 160), (256, 256)),
        ((192, 192), (256, 256)),
        ((160, 96), (192, 128)),
        ((20, 64), (64, 64)),
    ],
)
def test_heads_are_padded_to_the_narrowest_that_the_kernel_has(
    widths: tuple[int, int], padded: tuple[int, int]
) -> None:
    assert mosaic.padded_head_dims(*widths) == padded


def test_padded_heads_give_the_same_result(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the formula in place of the kernel, which sees wide heads."""
    seen = []

    def kernel(q, k, v, problem, tiling, **sides):
        seen.append((q.shape, v.shape, problem.q_shape, problem.v_shape))
        out, lse = reference_attention(q, k, v, scale=problem.scale, **sides)
        return out.astype(q.dtype), lse

    monkeypatch.setattr("pallas_kernels.attention.hopper.attention", kernel)
    rng = np.random.default_rng(0)
    arrays = [
        jnp.asarray(rng.standard_normal((1, 64, 2, width)), jnp.bfloat16) for width in (80, 80, 72)
    ]
    on = {"implementation": "mosaic", "platform": "gpu", "capability": (9, 0)}
    out, lse = jax.jit(partial(flash_attention, return_lse=True, **on))(*arrays)
    wanted = jax.jit(reference_attention)(*arrays)
    assert seen == [((1, 64, 2, 96), (1, 64, 2, 96)) * 2] and out.shape == (1, 64, 2, 72)
    np.testing.assert_allclose(out.astype(np.float32), wanted[0], atol=0.02)
    np.testing.assert_allclose(lse, wanted[1], atol=1e-4)


class Device:
    def __init__(self, **fields: str) -> None:
        self.__dict__ |= fields


@pytest.mark.parametrize(
    ("device", "capability"),
    [
        (Device(compute_capability="9.0"), (9, 0)),
        (Device(compute_capability="gfx942"), (0, 0)),
        (Device(), (0, 0)),
    ],
)
def test_capability_of_a_device(device: Device, capability: tuple[int, int]) -> None:
    assert capability_of(device) == capability


@pytest.mark.parametrize(
    ("kwargs", "reason"),
    [
        ({"platform": "cpu"}, "needs a Hopper GPU, and the platform is cpu$"),
        ({"capability": (8, 0)}, "needs compute capability 9.0, and this GPU has 8.0$"),
        ({"capability": (10, 0)}, "this GPU has 10.0$"),
        ({}, "head dims are at most 256, not 264 with values of 264$"),
        (
            {"block_mask": BlockMask.sliding(256, size=192, blocks=1)},
            "block masks come in multiples of 128, not 192",
        ),
    ],
)
def test_mosaic_says_why_it_cannot(kwargs: dict, reason: str) -> None:
    with pytest.raises(Unsupported, match=reason):
        flash_attention(
            *shapes(H=64 if kwargs else 264),
            implementation="mosaic",
            **{"platform": "gpu", "capability": (9, 0)} | kwargs,
        )


@pytest.mark.parametrize(
    ("kwargs", "reason"),
    [
        ({"platform": "cpu"}, "NVIDIA GPU, and the platform is cpu"),
        ({"softcap": 30.0}, "no soft cap"),
        ({"segment_ids": ids(2, 256)}, "no packed documents"),
        ({"sinks": jax.ShapeDtypeStruct((8,), jnp.float32)}, "no sinks"),
        ({"q_offset": 256}, "q_offset must be 0"),
        ({"return_lse": True}, "drops the gradient"),
    ],
)
def test_an_explicit_implementation_that_cannot_serve_says_why(kwargs: dict, reason: str) -> None:
    with pytest.raises(Unsupported, match=reason):
        flash_attention(*shapes(), implementation="cudnn", **({"platform": "gpu"} | kwargs))


def test_every_reason_is_given_at_once() -> None:
    problem = describe_attention(
        *shapes(H=320, Hv=64, dtype="float32"), window=4, platform="cuda", capability=(9, 0)
    )
    reasons = choose_attention(problem).rejected["cudnn"]
    for part in ("float32", "not 320", "64 is not 320"):
        assert part in reasons
    assert "NVIDIA" not in reasons


@pytest.mark.parametrize(
    ("arrays", "kwargs", "message"),
    [
        ({"N": 6, "K": 4}, {}, "6 query heads do not divide over 4 kv heads"),
        ({"S": 0}, {}, "at least 1"),
        ({"dtype": "int8"}, {}, "one dtype of bfloat16, float16, float32, float64, got int8"),
        ({}, {"window": 0}, "window must be a whole number of at least 1"),
        ({}, {"window": 4, "causal": False}, "window=4 needs causal=True"),
        ({}, {"softcap": -1.0}, "softcap must be a positive Python number, got -1.0"),
        ({}, {"scale": np.ones(2)}, "scale must be a positive Python number"),
        ({}, {"q_offset": np.ones(2, int)}, "q_offset must be one integer"),
        ({}, {"q_offset": 1.5}, "q_offset must be one integer"),
        (
            {},
            {"segment_ids": ids(2, 255)},
            r"segment_ids must be integers of shape \(2, 256\), got int32 \(2, 255\)",
        ),
        ({}, {"kv_segment_ids": ids(2, 256)}, "kv_segment_ids needs segment_ids"),
        (
            {"T": 128},
            {"segment_ids": ids(2, 256)},
            "256 queries and 128 keys give kv_segment_ids too",
        ),
        (
            {},
            {"sinks": jax.ShapeDtypeStruct((2,), jnp.float32)},
            r"sinks must be floats of shape \(8,\)",
        ),
        (
            {},
            {"implementation": "triton"},
            "implementation must be one of mosaic, cudnn, xla or None, got 'triton'",
        ),
    ],
)
def test_wrong_arguments(arrays: dict, kwargs: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        flash_attention(*shapes(**arrays), **kwargs)


def test_all_faults_at_once() -> None:
    q, k, v = shapes()
    with pytest.raises(ValueError, match=r"same batch size.*same head dim.*softcap.*window"):
        flash_attention(
            q, jax.ShapeDtypeStruct((3, 256, 2, 32), k.dtype), v, window=-1, softcap=0.0
        )


@settings(deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 3), min_size=3, max_size=5), min_size=3, max_size=3),
    st.integers(-2, 4),
    st.booleans(),
)
def test_describe_gives_a_problem_or_a_value_error(
    dims: list[list[int]], window: int, causal: bool
) -> None:
    q, k, v = (jax.ShapeDtypeStruct(tuple(shape), jnp.float32) for shape in dims)
    try:
        problem = describe_attention(q, k, v, window=window, causal=causal)
    except ValueError as error:
        assert str(error).startswith("flash_attention: ")
    else:
        assert choose_attention(problem).name == "xla"
        assert problem.q_shape[2] % problem.k_shape[2] == 0


def test_a_traced_offset_is_unknown_and_a_number_is_not() -> None:
    offsets = []
    jax.make_jaxpr(lambda i: offsets.append(describe_attention(*shapes(), q_offset=i).q_offset))(3)
    assert offsets == [None]
    assert describe_attention(*shapes(), q_offset=np.int64(3)).q_offset == 3


def test_the_package_exports_what_it_says() -> None:
    assert all(hasattr(pallas_kernels, name) for name in pallas_kernels.__all__)


@pytest.mark.parametrize(
    ("kwargs", "config"),
    [
        ({}, {"mask_type": "CAUSAL", "sliding_window_length": "0", "fmha_scale": "0.125"}),
        ({"window": 128}, {"mask_type": "CAUSAL", "sliding_window_length": "128"}),
        ({"causal": False, "scale": 0.5}, {"mask_type": "NO_MASK", "fmha_scale": "0.5"}),
    ],
)
def test_cudnn_is_asked_for_the_same_attention(
    kwargs: dict, config: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lowered for CUDA without a GPU, the forward and backward custom calls have the mask, window
    and scale."""
    monkeypatch.setattr(
        "jax._src.cudnn.fused_attention_stablehlo.check_cudnn_version", lambda: 91000
    )

    def loss(q, k, v):
        return flash_attention(q, k, v, platform="gpu", **kwargs).astype(jnp.float32).sum()

    text = (
        jax.jit(jax.grad(loss, (0, 1, 2)))
        .trace(*shapes())
        .lower(lowering_platforms=("cuda",))
        .as_text()
    )
    calls = [line for line in text.splitlines() if "custom_call @__cudnn$fmha" in line]
    assert len(calls) == 2 and "Backward" in calls[1]
    for call in calls:
        found = dict(re.findall(r'"(\w+)": "?([\w.]+)', call.replace(r"\22", '"')))
        assert {name: found[name] for name in config} == config
