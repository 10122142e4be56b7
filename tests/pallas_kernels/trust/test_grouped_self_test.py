"""The self-test of the grouped matmul: its kinds, and what it finds; our kernels in the interpreter
at a small shape."""

import importlib
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import Choice, grouped_matmul
from pallas_kernels.dev.interpreter import interpreted
from pallas_kernels.grouped import self_test
from pallas_kernels.grouped.self_test import by_xla, faults, kind_of
from pallas_kernels.grouped_matmul import (
    GroupedMatmulProblem,
    choose_trusted_grouped_matmul,
    describe_grouped_matmul,
)
from pallas_kernels.trust import Verdict, settle
from pallas_kernels.trust.self_test import FAMILIES

COMPILE_BUDGET = 44
SMALL: dict[str, Any] = {
    "dtype": "bfloat16",
    "columns": [64, 64, 64],
    "tokens": 200,
    "widths": [64, 128],
    "groups": 5,
}


def problem(
    T: int = 8192, D: int = 2048, F: int = 1024, E: int = 64, dtype: Any = jnp.bfloat16
) -> GroupedMatmulProblem:
    shapes = (
        jax.ShapeDtypeStruct((T, D), dtype),
        jax.ShapeDtypeStruct((E, D, F), dtype),
        jax.ShapeDtypeStruct((E,), jnp.int32),
    )
    return describe_grouped_matmul(*shapes, platform="gpu", capability=(9, 0))


@pytest.fixture
def few_reruns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(self_test, "RERUNS", 1)


@pytest.mark.usefixtures("few_reruns")
def test_our_kernels_pass() -> None:
    phases: list[str] = []
    with interpreted():
        assert faults(SMALL, phases.append) == []
    assert phases == ["ready", "compiled"]


@pytest.mark.usefixtures("few_reruns")
def test_one_wrong_row_and_one_empty_group_are_found() -> None:
    def planted(x, w, dy, sizes):
        y, dx, dw = by_xla(x, w, dy, sizes)
        return y.at[70].multiply(1.1), dx, dw.at[1, 0, 0].set(1e-3)

    wrong = [fault.partition(" (")[0] for fault in faults(SMALL, lambda phase: None, planted)]
    assert wrong == [
        "the result is too far from the reference",
        "the gradient of w is too far from the reference",
    ]


def test_a_kind_has_what_decides_the_code() -> None:
    base = kind_of(problem())
    assert (
        kind_of(problem(T=16_384, E=64)).values["widths"]
        == base.values["widths"]
        == [768 + 512, 1024]
    )
    assert max(base.values["widths"]) < 1536 and base.family in FAMILIES
    others = [
        kind_of(problem(T=8200)),
        kind_of(problem(dtype=jnp.float16)),
        kind_of(problem(F=1088)),
        kind_of(problem(E=1)),
    ]
    assert len({base, *others}) == 5


def test_a_kernel_that_failed_gives_way_to_the_loop() -> None:
    settle([(kind_of(problem()), Verdict("failed", "it did not finish within 60 s"))])
    choice = choose_trusted_grouped_matmul(problem())
    assert choice == Choice("xla", {"mosaic": "it did not finish within 60 s"})
    settle([(kind_of(problem()), Verdict("passed", ""))])
    assert choose_trusted_grouped_matmul(problem()).name == "mosaic"


def test_calls_for_other_devices_are_not_tested(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[GroupedMatmulProblem] = []
    # the package's attribute is the function
    module = importlib.import_module("pallas_kernels.grouped_matmul")
    monkeypatch.setattr(
        module,
        "choose_trusted_grouped_matmul",
        lambda problem: asked.append(problem) or Choice("xla", {}),
    )
    x, w, sizes = jnp.ones((8, 4)), jnp.ones((2, 4, 4)), jnp.array([3, 5])
    jax.eval_shape(lambda: grouped_matmul(x, w, sizes, platform="cpu"))
    jax.eval_shape(lambda: grouped_matmul(x, w, sizes, implementation="xla"))
    assert not asked
    jax.eval_shape(lambda: grouped_matmul(x, w, sizes))
    assert len(asked) == 1
