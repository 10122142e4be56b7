"""Compares our attention with its formula in fp32, and with cuDNN if that supports the case:
results, gradients, reruns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attention_peers as peers
import jax
import jax.numpy as jnp
import numpy as np
from attention_cases import Case
from record import Row

from pallas_kernels import (
    choose_attention,
    describe_attention,
    flash_attention,
    reference_attention,
)

TOLERANCES = {
    "bfloat16": {"lse": 1e-4, "out": 4e-3, "gradient": 8e-3},
    "float16": {"lse": 1e-4, "out": 5e-4, "gradient": 1e-3},
}
"""Largest |ours - reference| / |reference| (norms over the full array) if cuDNN does not support a
case. A CPU gave half as much."""
NOISE = 1.1
"""Our error may be this many times cuDNN's and still count as equal, because the two round in
different places."""


def compared(case: Case, dry_run: bool, reruns: int) -> Row:
    moving, still, weights = case.arrays()
    static = case.features()
    hopper_options = peers.HOPPER if dry_run else {}
    exact = {name: x.astype("float32") for name, x in moving.items()}
    expected = _values(
        lambda **x: reference_attention(**{**static, **x}), case, exact, still, weights
    )

    def ours(deterministic: bool) -> Callable[..., dict[str, jax.Array]]:
        return with_gradients(
            lambda **x: _door(
                case,
                **{**static, **x, **hopper_options},
                implementation="mosaic",
                deterministic=deterministic,
            ),
            case,
        )

    fixed = ours(deterministic=True)
    runs = [fixed(moving, still, weights) for _ in range(1 + reruns)]
    errors, nondeterministic_errors = (
        array_errors(results, expected)
        for results in (runs[0], ours(deterministic=False)(moving, still, weights))
    )
    # nan if either is
    errors = {
        name: float(np.maximum(error, nondeterministic_errors[name]))
        for name, error in errors.items()
    }
    row: Row = {"dtype": case.dtype}
    try:
        theirs = _cudnn_errors(case, static, moving, still, weights, expected)
    except Exception as error:  # in cuDNN's attention
        theirs, row["cudnn_fails"] = {}, f"{type(error).__name__}: {error}"[:200]
    limits = TOLERANCES[case.dtype]
    worse = {name: errors[name] / theirs[name] for name in theirs}
    bad = [
        f"{name} {error:.2e}"
        for name, error in errors.items()
        if not error <= _limit(name, limits, theirs, "softcap" in case.static)
    ]
    differ = [
        name
        for name in runs[0]
        for run in runs[1:]
        if np.asarray(runs[0][name]).tobytes() != np.asarray(run[name]).tobytes()
    ]
    row |= {
        "reruns_differ": len(differ),
        **{f"rel_{name}": error for name, error in errors.items()},
    }
    if worse:
        row["cudnn"] = max(worse.values())
    wrong = [f"too far from the reference: {', '.join(bad)}"] if bad else []
    wrong += [f"reruns differ: {', '.join(differ)}"] if differ else []
    return row | ({"error": "; ".join(wrong)} if wrong else {})


def _limit(name: str, limits: dict[str, float], theirs: dict[str, float], capped: bool) -> float:
    """Returns the largest allowed error: cuDNN's, or that of rounding. capped: a soft cap uses the
    hardware's tanh, accurate to 2^-11."""
    least = limits.get(name, limits["gradient"]) * (3 if capped and name == "lse" else 1)
    return max(NOISE * theirs[name], least / 2) if name in theirs else least


def _door(case: Case, **keywords: Any) -> tuple[jax.Array, jax.Array | None]:
    return (
        flash_attention(**keywords, return_lse=True)
        if case.lse
        else (flash_attention(**keywords), None)
    )


def with_gradients(
    attend: Callable[..., tuple[jax.Array, jax.Array | None]], case: Case
) -> Callable[..., dict[str, jax.Array]]:
    """Returns (arrays with gradients, the others, weights) -> out, lse if the case has it, and
    gradients of a loss of both."""

    def loss(
        moving: dict[str, jax.Array], still: dict[str, jax.Array], weights: dict[str, jax.Array]
    ) -> Any:
        out, lse = attend(**moving, **still)
        total = (out.astype(jnp.float32) * weights["out"]).sum()
        if not case.lse:
            return total, {"out": out}
        assert lse is not None
        finite_lse = jnp.where(lse == -jnp.inf, 0, lse)
        return total + (jnp.sin(finite_lse) * weights["lse"]).sum(), {"out": out, "lse": lse}

    def values(moving: Any, still: Any, weights: Any) -> dict[str, jax.Array]:
        gradients, outputs = jax.grad(loss, has_aux=True)(moving, still, weights)
        return {**outputs, **{f"d{name}": x for name, x in gradients.items()}}

    return jax.jit(values)


def _values(attend: Callable[..., Any], case: Case, *arrays: Any) -> dict[str, jax.Array]:
    return with_gradients(attend, case)(*arrays)


def array_errors(results: dict[str, jax.Array], expected: dict[str, jax.Array]) -> dict[str, float]:
    return {
        name: relative(np.asarray(results[name], np.float32), np.asarray(x, np.float32))
        for name, x in expected.items()
    }


def relative(result: np.ndarray, expected: np.ndarray) -> float:
    """Returns |result - expected| / |expected|; nan if they differ in where they are not finite,
    or in the sign of an infinity."""
    finite = np.isfinite(expected)
    if (np.where(finite, 0, result) != np.where(finite, 0, expected)).any():
        return float("nan")
    return float(
        np.linalg.norm(result[finite] - expected[finite])
        / max(np.linalg.norm(expected[finite]), 1e-30)
    )


def _cudnn_errors(
    case: Case, static: dict[str, Any], moving: Any, still: Any, weights: Any, expected: Any
) -> dict[str, float]:
    """Returns cuDNN's errors by array; empty if it does not support the case."""
    if (
        "cudnn"
        in choose_attention(
            describe_attention(**moving, **{**static, **still}, return_lse=case.lse)
        ).rejected
    ):
        return {}
    return array_errors(
        _values(
            lambda **x: _door(case, **{**static, **x}, implementation="cudnn"),
            case,
            moving,
            still,
            weights,
        ),
        expected,
    )
