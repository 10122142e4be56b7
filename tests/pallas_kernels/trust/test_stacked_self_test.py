"""The self-test of the stacked matmul: its kinds, and what it finds; our kernels in the interpreter
at a small shape."""

import importlib
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import Choice, stacked_matmul
from pallas_kernels.dev.interpreter import interpreted
from pallas_kernels.stacked import self_test
from pallas_kernels.stacked.self_test import by_xla, faults, kind_of
from pallas_kernels.stacked_matmul import (
    StackedMatmulProblem,
    choose_stacked_matmul,
    choose_trusted_stacked_matmul,
    describe_stacked_matmul,
    describe_weight_gradient,
)
from pallas_kernels.trust import Verdict, settle
from pallas_kernels.trust.self_test import FAMILIES

COMPILE_BUDGET = 68
FORMS = "product", "transposed", "add"
# the package's attribute is the function
module = importlib.import_module("pallas_kernels.stacked_matmul")


def small(form: str, dtype: str = "bfloat16", rounded: bool = False) -> dict[str, Any]:
    return {
        "form": form,
        "dtype": dtype,
        "tile": [64, 64],
        "sizes": [72, 64, 128],
        "rounded": rounded,
    }


def problem(
    T: int = 8192, K: int = 12_288, N: int = 6144, dtype: Any = jnp.bfloat16, **how: Any
) -> StackedMatmulProblem:
    shapes = (
        jax.ShapeDtypeStruct((T, N if how.get("transposed") else K), dtype),
        jax.ShapeDtypeStruct((12, K, N), dtype),
        jax.ShapeDtypeStruct((), jnp.int32),
    )
    return describe_stacked_matmul(*shapes, platform="gpu", capability=(9, 0), **how)


def addition(rounded: bool = False) -> StackedMatmulProblem:
    x, dy, sums = (
        jax.ShapeDtypeStruct(shape, jnp.bfloat16)
        for shape in ((8192, 12_288), (8192, 6144), (12, 12_288, 6144))
    )
    return describe_weight_gradient(
        sums.update(dtype=jnp.float32), 0, x, dy, rounded=rounded, platform="gpu", capability=(9, 0)
    )


@pytest.fixture
def few_reruns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(self_test, "RERUNS", 1)


@pytest.fixture
def proven(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if a GPU had measured what EXPERIMENTAL waits for."""
    monkeypatch.setattr(module, "EXPERIMENTAL", "")


@pytest.mark.usefixtures("few_reruns")
@pytest.mark.parametrize(
    "facts", [*map(small, FORMS), small("add", "float16", rounded=True)], ids=str
)
def test_our_kernels_pass(facts: dict[str, Any]) -> None:
    phases: list[str] = []
    with interpreted():
        assert faults(facts, phases.append) == []
    assert phases == ["ready", "compiled"]


@pytest.mark.usefixtures("few_reruns")
def test_each_fault_is_found() -> None:
    def planted(stack, row, x, y):
        found = by_xla("add", stack, row, x.astype(jnp.float32), y.astype(jnp.float32))
        return found.at[1, 3, 4].multiply(1.01).at[2, 0, 0].add(1e-3)

    about = " (add, T, K, N [72, 64, 128], bfloat16)"
    wrong = ["the result is too far from the reference", "a row that was not asked for has changed"]
    assert faults(small("add"), lambda phase: None, planted) == [fault + about for fault in wrong]
    for form in FORMS[:2]:
        wrong = faults(
            small(form),
            lambda phase: None,
            lambda *a, form=form: by_xla(form, *a).at[0, 0].set(jnp.nan),
        )
        assert wrong[0].startswith("the result is too far from the reference (")


def test_a_kind_has_what_decides_the_code() -> None:
    base = kind_of(problem())
    assert kind_of(problem(T=8192 + 3072)) == base and base.family in FAMILIES
    assert base.values["sizes"] == [3072 + 2048, 3072, 3072] and base.values["tile"] == [64, 256]
    others = [
        problem(T=8200),
        problem(N=6208),
        problem(dtype=jnp.float16),
        problem(transposed=True),
        addition(),
        addition(rounded=True),
    ]
    assert len({base, *map(kind_of, others)}) == 7


def test_it_is_not_tested_while_it_is_experimental(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "trusted", lambda kind: pytest.fail("a self-test"))
    assert choose_trusted_stacked_matmul(problem()) == choose_stacked_matmul(problem())
    assert choose_stacked_matmul(problem()).name == "xla"


@pytest.mark.usefixtures("proven")
def test_a_kernel_that_failed_gives_way_to_xla() -> None:
    assert (
        choose_stacked_matmul(problem()).name == choose_stacked_matmul(addition()).name == "mosaic"
    )
    settle([(kind_of(problem()), Verdict("failed", "it did not finish within 60 s"))])
    assert choose_trusted_stacked_matmul(problem()) == Choice(
        "xla", {"mosaic": "it did not finish within 60 s"}
    )
    settle([(kind_of(problem()), Verdict("passed", ""))])
    assert choose_trusted_stacked_matmul(problem()).name == "mosaic"


def test_calls_for_other_devices_are_not_tested(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[StackedMatmulProblem] = []
    monkeypatch.setattr(
        module,
        "choose_trusted_stacked_matmul",
        lambda problem: asked.append(problem) or Choice("xla", {}),
    )
    x, w = jnp.ones((8, 4)), jnp.ones((2, 4, 4))
    jax.eval_shape(lambda: stacked_matmul(x, w, 0, platform="cpu"))
    jax.eval_shape(lambda: stacked_matmul(x, w, 0, implementation="xla"))
    assert not asked
    jax.eval_shape(lambda: stacked_matmul(x, w, 0))
    assert len(asked) == 1
