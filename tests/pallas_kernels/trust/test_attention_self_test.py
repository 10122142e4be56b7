"""The self-test's comparison with our real kernels, in the interpreter in place of a GPU, at a
small shape."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import describe_attention
from pallas_kernels.attention import mosaic
from pallas_kernels.attention.self_test import faults, kind_of
from pallas_kernels.dev.interpreter import interpreted

COMPILE_BUDGET = 40


def facts(H: int = 64, unrounded: bool = False, **features: Any) -> dict[str, Any]:
    q, k = (jax.ShapeDtypeStruct((1, 1024, heads, H), jnp.bfloat16) for heads in (2, 1))
    ids = jax.ShapeDtypeStruct((1, 1024), jnp.int32)
    problem = describe_attention(
        q, k, k, platform="gpu", capability=(9, 0), segment_ids=ids, **features
    )
    return kind_of(dataclasses.replace(problem, unrounded=unrounded)).values | {
        "shapes": [[1, 136, 136, 2, 1]]
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [{}, {"H": 80, "window": 30}, {"q_offset": None, "softcap": 10.0}, {"unrounded": True}],
)
def test_our_kernels_pass(changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pallas_kernels.attention.self_test.RERUNS", 1)
    if "q_offset" in changes:
        changes = changes | {"q_offset": jax.ShapeDtypeStruct((), jnp.int32)}
    phases: list[str] = []
    with interpreted():
        assert faults(facts(**changes), phases.append) == []
    assert phases == ["ready", "compiled"]


@pytest.mark.slow
def test_a_fault_in_a_kernel_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pallas_kernels.attention.self_test.RERUNS", 0)

    def half(q, k, v, problem, **how):
        return mosaic.attend(q, k, v, dataclasses.replace(problem, scale=problem.scale / 2), **how)

    with interpreted():
        found = faults(facts(), lambda phase: None, half)
    assert [fault.partition(" is")[0] for fault in found] == [
        "lse", "out", "the gradient of k", "the gradient of q", "the gradient of v"
    ]  # fmt: skip
