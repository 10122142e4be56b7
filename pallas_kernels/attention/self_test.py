"""The self-test of our attention kernels: which calls run the same kernels, and the comparison with
the reference on a GPU.

Shape suffixes: B batch, S query sequence, T key sequence, N heads, K kv heads, H head dim (Hv that
of v).
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
benchmarks/attention_checks.py, so that a correct kernel never fails. A wrong one is off by far
more."""
LSE = 1e-3
"""The same for the log-sum-exp, which is fp32; a soft cap uses the hardware's tanh, accurate to
2^-11."""
RERUNS = 10
SHORT = 128
"""Sequences shorter than this, as in decoding, are tested with one tile that is not complete."""
Attend = Callable[..., tuple[Array, Array]]


def kind_of(problem: AttentionProblem, device: str | None = None) -> Kind:
    """The kind of a problem that `mosaic` can serve. device: as in `tuning.tiling`.

    Lengths, batch and heads are replaced by small ones. With grouped queries there are two shapes,
    because the backward pass has a grid of query heads where there are few blocks, and one of kv
    heads where there are many.
    """
    problem = mosaic.as_padded(problem)
    (_, S, N, _), (_, T, K, _), mask = problem.q_shape, problem.k_shape, problem.block_mask
    grouped = N > K
    shapes = [[2, _length(S, 512), _length(T, 512), 8 if grouped else 2, 2]]
    if grouped and not problem.deterministic and not problem.unrounded:
        # 528 tiles of keys or more: four for each SM
        shapes.append([264, _length(S, 256), _length(T, 256), 4, 2])
    return Kind.of(
        "attention",
        {
            "head_dims": [problem.q_shape[3], problem.v_shape[3]],
            "dtype": problem.dtype,
            "causal": problem.causal,
            "window": 100 if problem.window else None,
            "softcap": 5.0 if problem.softcap else None,
            "offset": "traced"
            if problem.q_offset is None
            else "static"
            if problem.q_offset
            else "none",
            "segments": problem.segments,
            "sinks": problem.sinks,
            "block_mask": None
            if mask is None
            else "by head"
            if len(mask.visible) > 1
            else "shared",
            "deterministic": problem.deterministic,
            "shapes": shapes,
            "tiling": dataclasses.asdict(tiling(problem, device)),
            # Left out where it is false, so that a verdict of before it existed still counts.
            **({"unrounded": True} if problem.unrounded else {}),
        },
    )


def _length(n: int, complete: int) -> int:
    """A small length for one of n: `complete` if n is made of complete tiles, otherwise one that is
    not.
    """
    if n < SHORT:
        return 1 if n == 1 else 72
    return complete if n % 128 == 0 else complete + 72


def faults(
    facts: dict[str, Any], say: Callable[[str], None], attend: Attend | None = None
) -> list[str]:
    """What is wrong with our kernels for a kind's facts: each difference from `reference_attention`
    in fp32, and between reruns.

    say: called with "ready" after the references are computed and with "compiled" before a kernel
    runs. attend: a function to test instead of `mosaic.attend`.
    """
    calls = [_Call(facts, shape) for shape in facts["shapes"]]
    wanted = [jax.block_until_ready(jax.jit(call.by_reference)(*call.exact)) for call in calls]
    say("ready")
    kernels = [jax.jit(partial(call.by, attend)).lower(*call.arrays).compile() for call in calls]
    say("compiled")
    found = []
    for call, kernel, reference in zip(calls, kernels, wanted, strict=True):
        first = jax.block_until_ready(kernel(*call.arrays))
        wrong = _differences(first, reference, facts)
        exact = first if facts["deterministic"] else {name: first[name] for name in ("out", "lse")}
        for _ in range(RERUNS):
            again = jax.block_until_ready(kernel(*call.arrays))
            wrong += [
                f"{name} differs when it is computed again"
                for name in exact
                if not _same(first[name], again[name])
            ]
            wrong += _differences(again, reference, facts)
        found += [f"{fault} ({call.about})" for fault in dict.fromkeys(wrong)]
    return found


def _differences(
    found: dict[str, Array], wanted: dict[str, Array], facts: dict[str, Any]
) -> list[str]:
    limits = {"lse": LSE, "out": TOLERANCES[facts["dtype"]]["out"]}
    wrong = []
    for name, reference in wanted.items():
        error, limit = (
            float(_relative(found[name], reference)),
            limits.get(name, TOLERANCES[facts["dtype"]]["gradient"]),
        )
        if not error <= limit:  # nan, too
            wrong.append(f"{name} is too far from the reference: over {limit:g}")
    return wrong


@jax.jit
def _relative(found: Array, wanted: Array) -> Array:
    """|found - wanted| / |wanted|; nan if they differ in where they are not finite."""
    found, finite = found.astype(jnp.float32), jnp.isfinite(wanted)
    equal = jnp.where(finite, jnp.isfinite(found), found == wanted).all()
    error = jnp.linalg.norm(jnp.where(finite, found - wanted, 0)) / jnp.maximum(
        jnp.linalg.norm(jnp.where(finite, wanted, 0)), 1e-30
    )
    return jnp.where(equal, error, jnp.nan)


@jax.jit
def _same(a: Array, b: Array) -> Array:
    """Whether two arrays have the same values; -0 equals 0."""
    return ((a == b) | (jnp.isnan(a) & jnp.isnan(b))).all()


class _Call:
    """A call with random arrays for one of a kind's shapes.

    Attributes:
      arrays, exact: q, k, v and sinks (or None), in the kind's dtype, and the same values in fp32.
      about: the shape, for messages.
    """

    def __init__(self, facts: dict[str, Any], shape: list[int]) -> None:
        (B, S, T, N, K), (H, Hv) = shape, facts["head_dims"]
        rng = np.random.default_rng(0)
        dtype = jnp.dtype(facts["dtype"])
        sizes = (B, S, N, H), (B, T, K, H), (B, T, K, Hv)
        sinks = jnp.asarray(rng.standard_normal(N), jnp.float32) if facts["sinks"] else None
        self.arrays = *(jnp.asarray(rng.standard_normal(size), dtype) for size in sizes), sinks
        self.exact = tuple(None if x is None else x.astype(jnp.float32) for x in self.arrays)
        self.weights = (
            jnp.asarray(rng.standard_normal((B, S, N, Hv)), jnp.float32),
            jnp.asarray(rng.standard_normal((B, S, N)), jnp.float32),
        )
        self.ids = None
        if facts["segments"]:
            self.ids = tuple(
                jnp.asarray(np.cumsum(rng.random((B, length)) < 0.01, 1), jnp.int32)
                for length in (S, T)
            )
            self.ids = (self.ids[1], self.ids[1]) if S == T else self.ids
        self.tiling = TuningEntry.of(facts["tiling"] | {"head_dims": [H, Hv]}).tiling
        self.traced = facts["offset"] == "traced"
        self.q_offset = 0 if facts["offset"] == "none" else max(T - S, 37)
        self.static = {
            "causal": facts["causal"],
            "window": facts["window"],
            "softcap": facts["softcap"],
        }
        self.static["block_mask"] = _pattern(facts["block_mask"], S, T, N, rng)
        self.deterministic = facts["deterministic"]
        self.unrounded = facts.get("unrounded", False)
        if self.unrounded:
            # those gradients have no part of the log-sum-exp's
            self.weights = self.weights[0], jnp.zeros_like(self.weights[1])
        self.about = f"q {[B, S, N, H]}, k {[B, T, K, H]}, {facts['dtype']}"

    def by(self, attend: Attend | None, *arrays: Array | None) -> dict[str, Array]:
        """Results and gradients of a function that is called like `mosaic.attend`, by default of
        that with the kind's tiles.
        """
        serve: Attend = attend or partial(mosaic.attend, tiles=self.tiling)
        ids = self.ids or (None, None)

        def described(
            q: Array, k: Array, v: Array, sinks: Array | None
        ) -> tuple[AttentionProblem, Sides]:
            offset = jnp.asarray(self.q_offset, jnp.int32) if self.traced else self.q_offset
            problem = describe_attention(
                q, k, v, segment_ids=ids[0], kv_segment_ids=ids[1], sinks=sinks, q_offset=offset,
                deterministic=self.deterministic,
                return_lse=True, **self.static,
            )  # fmt: skip
            return problem, {
                "segment_ids": ids[0],
                "kv_segment_ids": ids[1],
                "q_offset": offset,
                "sinks": sinks,
            }

        def kernel(q: Array, k: Array, v: Array, sinks: Array | None) -> tuple[Array, Array]:
            problem, sides = described(q, k, v, sinks)
            return serve(q, k, v, problem, **sides)

        if not self.unrounded:
            return self._values(kernel, *arrays)
        q, k, v, sinks = arrays
        assert q is not None and k is not None and v is not None
        problem, sides = described(q, k, v, sinks)
        out, lse = kernel(q, k, v, sinks)
        dout = self.weights[0].astype(q.dtype)
        problem = dataclasses.replace(problem, unrounded=True)
        gradients = mosaic.gradients(q, k, v, out, lse, dout, problem, tiles=self.tiling, **sides)
        named = {
            f"the gradient of {name}": x
            for name, x in zip(("q", "k", "v", "sinks"), gradients, strict=True)
            if x is not None
        }
        return {"out": out, "lse": lse, **named}

    def by_reference(self, *arrays: Array | None) -> dict[str, Array]:
        """Results and gradients of `reference_attention`."""
        ids = self.ids or (None, None)
        about = {
            "segment_ids": ids[0],
            "kv_segment_ids": ids[1],
            "q_offset": self.q_offset,
            **self.static,
        }
        return self._values(
            lambda q, k, v, sinks: reference_attention(q, k, v, sinks=sinks, **about), *arrays
        )

    def _values(self, attend: Attend, *arrays: Array | None) -> dict[str, Array]:
        moving = {
            name: x
            for name, x in zip(("q", "k", "v", "sinks"), arrays, strict=True)
            if x is not None
        }

        def loss(moving: dict[str, Array]) -> tuple[Array, dict[str, Array]]:
            out, lse = attend(moving["q"], moving["k"], moving["v"], moving.get("sinks"))
            seen = jnp.where(lse == -jnp.inf, 0, lse)
            return (out.astype(jnp.float32) * self.weights[0]).sum() + (
                jnp.sin(seen) * self.weights[1]
            ).sum(), {"out": out, "lse": lse}

        gradients, found = jax.grad(loss, has_aux=True)(moving)
        return found | {f"the gradient of {name}": x for name, x in gradients.items()}


def _pattern(
    which: str | None, S: int, T: int, N: int, rng: np.random.Generator
) -> BlockMask | None:
    """A random block mask in which most queries see something."""
    if which is None:
        return None
    visible = rng.random((N if which == "by head" else 1, -(-S // 128), -(-T // 128))) < 0.5
    visible[:, :, 0] = True
    return BlockMask(visible, 128)
