"""The self-test of our attention kernels: a comparison with the reference on a GPU.

Calls that run the same kernels are of one kind (`kind_of`), and each kind is tested once.

Shape suffixes: B batch, S query sequence, T key sequence, N heads, K kv heads, H head dim (Hv: of
v).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from pallas_kernels.attention import mosaic
from pallas_kernels.attention.block_mask import BlockMask
from pallas_kernels.attention.problem import AttentionProblem, Sides, describe_attention
from pallas_kernels.attention.reference import reference_attention
from pallas_kernels.attention.tuning import TuningEntry, tiling
from pallas_kernels.trust.kind import Kind

TOLERANCES = {
    "bfloat16": {"out": 8e-3, "gradient": 1.6e-2},
    "float16": {"out": 1e-3, "gradient": 2e-3},
}
"""Largest |ours - reference| / |reference| (norms over the full array): twice those of
benchmarks/attention_checks.py, so that a correct kernel never fails. The error of a faulty one is
far larger."""
LSE = 1e-3
"""The tolerance of the log-sum-exp, which is fp32; a soft cap uses the hardware's tanh, accurate to
2^-11."""
RERUNS = 10
SHORT = 128
"""Sequences shorter than this, as in decoding, are tested with one tile that is not complete."""
NAMES = ("q", "k", "v", "sinks")
Attend = Callable[..., tuple[Array, Array]]
"""A function that is called like `mosaic.attend`, or like `reference_attention`."""


def kind_of(problem: AttentionProblem, device: str | None = None) -> Kind:
    """The kind of a problem that `mosaic` can serve. device: as in `tuning.tiling`.

    Lengths, batch and heads are replaced by small ones. With grouped queries there are two shapes,
    because the backward pass has a grid of query heads where there are few blocks, and one of kv
    heads where there are many.
    """
    problem = mosaic.as_padded(problem)
    S, N = problem.q_shape[1:3]
    T, K = problem.k_shape[1:3]
    grouped = N > K
    shapes = [[2, _test_length(S, 512), _test_length(T, 512), 8 if grouped else 2, 2]]
    if grouped and not problem.deterministic and not problem.unrounded:
        # 528 tiles of keys or more: four for each SM
        shapes.append([264, _test_length(S, 256), _test_length(T, 256), 4, 2])

    offset = "none"
    if problem.q_offset is None:
        offset = "traced"
    elif problem.q_offset:
        offset = "static"
    block_mask = None
    if problem.block_mask is not None:
        block_mask = "by head" if len(problem.block_mask.visible) > 1 else "shared"
    facts: dict[str, Any] = {
        "head_dims": [problem.q_shape[3], problem.v_shape[3]],
        "dtype": problem.dtype,
        "causal": problem.causal,
        "window": 100 if problem.window else None,
        "softcap": 5.0 if problem.softcap else None,
        "offset": offset,
        "segments": problem.segments,
        "sinks": problem.sinks,
        "block_mask": block_mask,
        "deterministic": problem.deterministic,
        "shapes": shapes,
        "tiling": dataclasses.asdict(tiling(problem, device)),
    }
    if problem.unrounded:
        # Absent where it is false, so that verdicts from before it existed remain valid.
        facts["unrounded"] = True
    return Kind.of("attention", facts)


def _test_length(length: int, complete: int) -> int:
    """A small length for a test, made of complete tiles if `length` is: then it is `complete`."""
    if length == 1:
        return 1
    if length < SHORT:
        return 72
    return complete if length % 128 == 0 else complete + 72


def faults(
    facts: dict[str, Any], say: Callable[[str], None], attend: Attend | None = None
) -> list[str]:
    """Returns the faults of our kernels for a kind's facts.

    A fault is a difference from `reference_attention` in fp32, or between reruns.

    Args:
      say: called with "ready" after the references are computed and with "compiled" before a kernel
        runs.
      attend: a function to test instead of `mosaic.attend`.
    """
    calls = [_Call(facts, shape) for shape in facts["shapes"]]
    references = [jax.block_until_ready(jax.jit(call.reference)(*call.exact)) for call in calls]
    say("ready")
    kernels = []
    for call in calls:
        kernels.append(jax.jit(partial(call.run, attend)).lower(*call.arrays).compile())
    say("compiled")

    call_faults = []
    for call, kernel, reference in zip(calls, kernels, references, strict=True):
        first = jax.block_until_ready(kernel(*call.arrays))
        messages = _differences(first, reference, facts)
        reproducible = first if facts["deterministic"] else ("out", "lse")
        for _ in range(RERUNS):
            rerun = jax.block_until_ready(kernel(*call.arrays))
            for name in reproducible:
                if not _same(first[name], rerun[name]):
                    messages.append(f"{name} differs when it is computed again")
            messages += _differences(rerun, reference, facts)
        call_faults += [f"{message} ({call.description})" for message in dict.fromkeys(messages)]
    return call_faults


def _differences(
    results: dict[str, Array], references: dict[str, Array], facts: dict[str, Any]
) -> list[str]:
    """A message for each result that is too far from its reference."""
    tolerances = TOLERANCES[facts["dtype"]]
    limits = {"lse": LSE, "out": tolerances["out"]}
    messages = []
    for name, reference in references.items():
        limit = limits.get(name, tolerances["gradient"])
        error = float(_relative_error(results[name], reference))
        if not error <= limit:  # nan, too
            messages.append(f"{name} is too far from the reference: over {limit:g}")
    return messages


@jax.jit
def _relative_error(result: Array, reference: Array) -> Array:
    """|result - reference| / |reference|; nan if they differ in where they are not finite."""
    result = result.astype(jnp.float32)
    finite = jnp.isfinite(reference)
    comparable = jnp.where(finite, jnp.isfinite(result), result == reference).all()
    difference = jnp.linalg.norm(jnp.where(finite, result - reference, 0))
    norm = jnp.linalg.norm(jnp.where(finite, reference, 0))
    return jnp.where(comparable, difference / jnp.maximum(norm, 1e-30), jnp.nan)


@jax.jit
def _same(a: Array, b: Array) -> Array:
    """Whether two arrays have the same values; -0 equals 0."""
    return ((a == b) | (jnp.isnan(a) & jnp.isnan(b))).all()


class _Call:
    """A call with random arrays for one of a kind's shapes.

    Attributes:
      arrays: q, k, v and sinks (or None), in the kind's dtype.
      exact: the same values in fp32.
      weights: factors of out and of sin(lse) in the loss.
      description: the shape, for messages.
    """

    def __init__(self, facts: dict[str, Any], shape: list[int]) -> None:
        B, S, T, N, K = shape
        H, Hv = facts["head_dims"]
        rng = np.random.default_rng(0)
        dtype = jnp.dtype(facts["dtype"])
        sinks = None
        if facts["sinks"]:
            sinks = jnp.asarray(rng.standard_normal(N), jnp.float32)
        sizes = ((B, S, N, H), (B, T, K, H), (B, T, K, Hv))
        q, k, v = (jnp.asarray(rng.standard_normal(size), dtype) for size in sizes)
        self.arrays = (q, k, v, sinks)
        self.exact = tuple(None if x is None else x.astype(jnp.float32) for x in self.arrays)
        out_weights = jnp.asarray(rng.standard_normal((B, S, N, Hv)), jnp.float32)
        lse_weights = jnp.asarray(rng.standard_normal((B, S, N)), jnp.float32)

        self.q_ids: Array | None = None
        self.k_ids: Array | None = None
        if facts["segments"]:
            # A token in a hundred begins a document.
            self.q_ids, self.k_ids = (
                jnp.asarray(np.cumsum(rng.random((B, length)) < 0.01, 1), jnp.int32)
                for length in (S, T)
            )
            if S == T:
                self.q_ids = self.k_ids
        self.tiling = TuningEntry.of(facts["tiling"] | {"head_dims": [H, Hv]}).tiling
        self.traced = facts["offset"] == "traced"
        self.q_offset = 0 if facts["offset"] == "none" else max(T - S, 37)
        self.static = {
            "causal": facts["causal"],
            "window": facts["window"],
            "softcap": facts["softcap"],
            "block_mask": _random_mask(facts["block_mask"], S, T, N, rng),
        }
        self.deterministic = facts["deterministic"]
        self.unrounded = facts.get("unrounded", False)
        if self.unrounded:
            # `attention_gradients` has no gradient of the log-sum-exp.
            lse_weights = jnp.zeros_like(lse_weights)
        self.weights = (out_weights, lse_weights)
        self.description = f"q {[B, S, N, H]}, k {[B, T, K, H]}, {facts['dtype']}"

    def run(self, attend: Attend | None, *arrays: Array | None) -> dict[str, Array]:
        """Results and gradients of `attend`; None: of `mosaic.attend` with the kind's tiles."""
        serve: Attend = attend or partial(mosaic.attend, tiles=self.tiling)

        def kernel(q: Array, k: Array, v: Array, sinks: Array | None) -> tuple[Array, Array]:
            problem, sides = self._describe(q, k, v, sinks)
            return serve(q, k, v, problem, **sides)

        if not self.unrounded:
            return self._values(kernel, *arrays)
        q, k, v, sinks = arrays
        assert q is not None and k is not None and v is not None
        problem, sides = self._describe(q, k, v, sinks)
        out, lse = kernel(q, k, v, sinks)
        dout = self.weights[0].astype(q.dtype)
        problem = dataclasses.replace(problem, unrounded=True)
        gradients = mosaic.gradients(q, k, v, out, lse, dout, problem, tiles=self.tiling, **sides)
        values = {"out": out, "lse": lse}
        for name, gradient in zip(NAMES, gradients, strict=True):
            if gradient is not None:
                values[f"the gradient of {name}"] = gradient
        return values

    def reference(self, *arrays: Array | None) -> dict[str, Array]:
        """Results and gradients of `reference_attention`."""

        def attend(q: Array, k: Array, v: Array, sinks: Array | None) -> tuple[Array, Array]:
            return reference_attention(
                q,
                k,
                v,
                sinks=sinks,
                segment_ids=self.q_ids,
                kv_segment_ids=self.k_ids,
                q_offset=self.q_offset,
                **self.static,
            )

        return self._values(attend, *arrays)

    def _describe(
        self, q: Array, k: Array, v: Array, sinks: Array | None
    ) -> tuple[AttentionProblem, Sides]:
        offset = jnp.asarray(self.q_offset, jnp.int32) if self.traced else self.q_offset
        sides: Sides = {
            "segment_ids": self.q_ids,
            "kv_segment_ids": self.k_ids,
            "q_offset": offset,
            "sinks": sinks,
        }
        problem = describe_attention(
            q, k, v, deterministic=self.deterministic, return_lse=True, **sides, **self.static
        )
        return problem, sides

    def _values(self, attend: Attend, *arrays: Array | None) -> dict[str, Array]:
        """out, lse, and the gradients of a weighted sum of both, by the names of messages."""
        inputs = {name: x for name, x in zip(NAMES, arrays, strict=True) if x is not None}
        out_weights, lse_weights = self.weights

        def loss(inputs: dict[str, Array]) -> tuple[Array, dict[str, Array]]:
            out, lse = attend(inputs["q"], inputs["k"], inputs["v"], inputs.get("sinks"))
            finite_lse = jnp.where(lse == -jnp.inf, 0, lse)
            out_loss = (out.astype(jnp.float32) * out_weights).sum()
            lse_loss = (jnp.sin(finite_lse) * lse_weights).sum()
            return out_loss + lse_loss, {"out": out, "lse": lse}

        gradients, values = jax.grad(loss, has_aux=True)(inputs)
        return values | {f"the gradient of {name}": x for name, x in gradients.items()}


def _random_mask(
    form: str | None, S: int, T: int, N: int, rng: np.random.Generator
) -> BlockMask | None:
    """A random block mask in which most queries see something. form: None, "by head", "shared"."""
    if form is None:
        return None
    heads = N if form == "by head" else 1
    visible = rng.random((heads, -(-S // 128), -(-T // 128))) < 0.5
    visible[:, :, 0] = True
    return BlockMask(visible, 128)
