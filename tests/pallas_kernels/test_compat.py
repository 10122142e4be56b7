"""What the kernels see of jax is the same before and after each of its changes, whatever jax is
installed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import compat


def load_before_jax_0_12(
    src: Any, idx: Any, *, layout: Any = None, optimized: bool = True
) -> tuple[Any, ...]:
    return src, idx, layout, optimized


def load_since_jax_0_12(src: Any, *, layout: Any = None, optimized: bool = True) -> tuple[Any, ...]:
    return src, (), layout, optimized


@pytest.mark.parametrize("load", [load_before_jax_0_12, load_since_jax_0_12])
def test_a_load_takes_the_whole_reference(load: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plgpu, "load", load)
    assert compat.load("ref", layout="wgmma") == ("ref", (), "wgmma", True)
    assert compat.load("ref", optimized=False) == ("ref", (), None, False)


@pytest.mark.parametrize("name", ["set_max_registers_p", "set_max_registers"])
def test_a_primitive_has_one_name(name: str) -> None:
    assert (
        compat.primitive_name(SimpleNamespace(primitive=SimpleNamespace(name=name)))
        == "set_max_registers"
    )


def test_the_operands_of_a_scan_are_counted() -> None:
    def total(table: jax.Array, rows: jax.Array) -> Any:
        return lax.scan(
            lambda carry, row: ((carry[0] + table[row], carry[1] * 2), carry[0]), (0.0, 1.0), rows
        )

    jaxpr = jax.make_jaxpr(total)(np.arange(5.0, dtype=np.float32), np.arange(5))
    [scan] = [eqn for eqn in jaxpr.jaxpr.eqns if eqn.primitive.name == "scan"]
    assert compat.scan_sizes(scan.params) == (1, 2)
    assert compat.scan_sizes({"num_consts": 3, "num_carry": 2}) == (3, 2), "as jax 0.10 has them"


@pytest.mark.parametrize(
    ("version", "supported"),
    [("0.10.2", True), ("0.11.2", True), ("0.12.0.1", True), ("0.13.0", False), ("0.1.75", False)],
)
def test_the_supported_versions(
    version: str, supported: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jax, "__version__", version)
    assert compat.is_supported() is supported
    assert compat.SUPPORTED == "jax 0.10.x, 0.11.x, 0.12.x"
