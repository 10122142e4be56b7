"""Measures a GPU without any model, in a process of its own: python benchmarks/device_worker.py
TASK '{"key": value, ...}'

Needs jax and numpy. Results are printed as in gpu_worker.py.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from gpu_lock import compiling
from record import Row
from worker import emit, reported, serve, sustained

from pallas_kernels.attention.api import IMPLEMENTATIONS
from sharding_rules.lab.rates import OPTIMISTIC
from sharding_rules.lab.targets import TARGETS, Target


def probe() -> None:
    device = jax.devices()[0]
    stats = device.memory_stats() or {}
    emit(
        platform=device.platform, device_kind=device.device_kind, devices=jax.device_count(),
        backend=device.client.platform_version,
        memory_limit_gib=stats.get("bytes_limit", 0) / 2**30, implementations=list(IMPLEMENTATIONS),
        xla_flags=os.environ.get("XLA_FLAGS", ""),
    )  # fmt: skip


def matmul(variants: list[Row]) -> None:
    """Times bf16 matmuls of random data, back to back: those of two weights of a layer in a
    training step.

    A variant has tokens, d_model, seconds, and width, a number or a list that is used in turn. With
    x [tokens, d_model] and weights up and down there are four matmuls: x up, (x up) down, and the
    two products over the tokens that give the weights' gradients.
    """
    target = here()
    for variant in variants:
        shown = {
            name: " ".join(map(str, value)) if isinstance(value, list) else value
            for name, value in variant.items()
        }
        with reported(**shown):
            widths = variant["width"] if isinstance(variant["width"], list) else [variant["width"]]
            tokens, D = variant["tokens"], variant["d_model"]
            call = chain(tokens, D, widths)
            with compiling():
                jax.block_until_ready(call())
            times = sustained(call, variant["seconds"])
            rate = sum(4 * 2 * tokens * D * width for width in widths) / times.median
            peak = target.flops["bf16"] if target else None
            shares = (
                {"share_of_peak": rate / peak, "lab_assumes": OPTIMISTIC.matmul.value}
                if peak
                else {}
            )
            emit(**shown, ms=1e3 * times.median, spread=times.spread, tflops=rate / 1e12, **shares)


def chain(tokens: int, D: int, widths: list[int]) -> Callable[[], Any]:
    """Returns a call of one program with the matmuls of all widths, one after the other."""
    first, *keys = jax.random.split(jax.random.key(0), 1 + 2 * len(widths))

    def normal(key: jax.Array, rows: int, columns: int) -> jax.Array:
        return jax.random.normal(key, (rows, columns), jnp.bfloat16) / math.sqrt(rows)

    weights = [
        (normal(keys[2 * i], D, width), normal(keys[2 * i + 1], width, D))
        for i, width in enumerate(widths)
    ]

    def program(x: jax.Array, weights: list[tuple[jax.Array, jax.Array]]) -> Any:
        gradients = []
        for up, down in weights:
            y = x @ up
            z = y @ down
            gradients.append((x.T @ y, y.T @ z))
            x = z
        return x, gradients

    return partial(jax.jit(program), jax.random.normal(first, (tokens, D), jnp.bfloat16), weights)


def elementwise(variants: list[Row]) -> None:
    """Times y = a x + b, which reads one array and writes another. A variant has dtype, seconds and
    gib, the size of one of the two."""
    target = here()
    for variant in variants:
        with reported(**variant):
            dtype = jnp.dtype(variant["dtype"])
            n = int(variant["gib"] * 2**30) // dtype.itemsize
            x = (jnp.arange(n, dtype=jnp.int32) % 251).astype(dtype)
            call = partial(jax.jit(lambda x: x * 0.75 + 1.5), x)
            with compiling():
                jax.block_until_ready(call())
            times = sustained(call, variant["seconds"])
            rate = 2 * n * dtype.itemsize / times.median
            shares = (
                {
                    "share_of_peak": rate / target.hbm_bandwidth,
                    "lab_assumes": OPTIMISTIC.memory["bf16"].value,
                }
                if target
                else {}
            )
            emit(
                **variant, ms=1e3 * times.median, spread=times.spread, gb_per_s=rate / 1e9, **shares
            )


def here() -> Target | None:
    """Returns the GPU that JAX uses, if the lab knows it."""
    kind = jax.devices()[0].device_kind
    return next((target for target in TARGETS.values() if target.description == kind), None)


if __name__ == "__main__":
    serve({f.__name__: f for f in (probe, matmul, elementwise)})
