"""Measures how fast this machine is now: the seconds of a fixed numpy loop and of a fixed compilation by XLA.

With the seconds of the tests divided by these, a slow machine is not mistaken for slow tests. Prints one line of JSON.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable

SIZE = 1024
PRODUCTS = 50
LAYERS = 7
SCANNED_LAYERS = 4
WIDTH = 64


def main() -> int:
    """Prints {"matmul": seconds, "compile": seconds}."""
    # What the environment says of XLA must not change what is compiled; this is read when jax is imported.
    os.environ["XLA_FLAGS"] = "--xla_backend_optimization_level=0"
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"
    seconds = {"matmul": measure(matmul_loop(PRODUCTS), matmul_loop(1)), "compile": measure(compilation(LAYERS), compilation(1))}
    print(json.dumps({name: round(value, 2) for name, value in seconds.items()}))
    return 0


def measure(work: Callable[[], object], warm_up: Callable[[], object]) -> float:
    """Returns the seconds of `work()`, after a smaller work of the same kind, which starts threads and loads libraries."""
    warm_up()
    started_at = time.perf_counter()
    work()
    return time.perf_counter() - started_at


def matmul_loop(products: int) -> Callable[[], object]:
    """Returns a loop of matrix products, on all cores."""
    import numpy as np

    matrix = np.random.default_rng(0).random((SIZE, SIZE), np.float32)

    def run() -> object:
        product = matrix
        for _ in range(products):
            product = product @ matrix
            product /= product.max()  # else it overflows
        return product

    return run


def compilation(layers: int) -> Callable[[], object]:
    """Returns the compilation of the gradient of some layers, each with a scan and an attention of its own."""
    import jax
    import jax.numpy as jnp

    def layer(x: jax.Array, weights: dict[str, jax.Array], number: int) -> jax.Array:
        queries = jnp.tanh(x @ weights["in"])
        scores = jax.nn.softmax(queries @ queries.T / (number + 1.0))
        return x + jax.nn.gelu(scores @ queries @ weights["out"])

    def loss(all_weights: list[dict[str, jax.Array]], x: jax.Array) -> jax.Array:
        for number, weights in enumerate(all_weights):
            x, _ = jax.lax.scan(lambda x, _, w=weights, n=number: (layer(x, w, n), None), x, None, length=SCANNED_LAYERS)
        return (x**2).mean()

    matrix = jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)
    lowered = jax.jit(jax.value_and_grad(loss)).lower([{"in": matrix, "out": matrix}] * layers, matrix)
    return lowered.compile


if __name__ == "__main__":
    sys.exit(main())
