"""Measures how fast this machine is now: the seconds of a fixed numpy loop and of a fixed
compilation by XLA.

With the seconds of the tests divided by these, a slow machine is not mistaken for slow tests.
Prints one line of JSON.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable

SIZE = 1024
PRODUCTS = 40
LAYERS = 12
SCANNED_LAYERS = 4
WIDTH = 64
ENVIRONMENT = {
    "OPENBLAS_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    # As the tests have it, and nothing else that the machine's environment says of XLA.
    "XLA_FLAGS": "--xla_backend_optimization_level=0",
    "JAX_PLATFORMS": "cpu",
    "JAX_ENABLE_COMPILATION_CACHE": "false",
}


def main() -> int:
    """Prints {"matmul": seconds, "compile": seconds}, the means of one process for each core, as
    the tests use all cores, too.
    """
    if sys.argv[1:] == ["--one-core"]:
        print(
            json.dumps(
                {
                    "matmul": measure(matmul_loop(PRODUCTS), matmul_loop(1)),
                    "compile": measure(compilation(LAYERS), compilation(1)),
                }
            )
        )
        return 0
    environment = os.environ | ENVIRONMENT
    command = [sys.executable, __file__, "--one-core"]
    processes = [
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
        for _ in range(os.cpu_count() or 1)
    ]
    outputs = [process.communicate()[0] for process in processes]
    if any(process.returncode != 0 for process in processes):
        return 1
    print(json.dumps(mean([json.loads(output) for output in outputs])))
    return 0


def mean(seconds: list[dict[str, float]]) -> dict[str, float]:
    """Returns the mean of each work's seconds."""
    return {
        work: round(sum(one_core[work] for one_core in seconds) / len(seconds), 2)
        for work in seconds[0]
    }


def measure(work: Callable[[], object], warm_up: Callable[[], object]) -> float:
    """Returns the seconds of `work()`, after a smaller work of the same kind, which starts threads
    and loads libraries.
    """
    warm_up()
    started_at = time.perf_counter()
    work()
    return time.perf_counter() - started_at


def matmul_loop(products: int) -> Callable[[], object]:
    """Returns a loop of matrix products."""
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
    """Returns the compilation of the gradient of some layers, each with a scan and an attention of
    its own.
    """
    import jax
    import jax.numpy as jnp

    def layer(x: jax.Array, weights: dict[str, jax.Array], number: int) -> jax.Array:
        queries = jnp.tanh(x @ weights["in"])
        scores = jax.nn.softmax(queries @ queries.T / (number + 1.0))
        return x + jax.nn.gelu(scores @ queries @ weights["out"])

    def loss(all_weights: list[dict[str, jax.Array]], x: jax.Array) -> jax.Array:
        for number, weights in enumerate(all_weights):
            x, _ = jax.lax.scan(
                lambda x, _, w=weights, n=number: (layer(x, w, n), None),
                x,
                None,
                length=SCANNED_LAYERS,
            )
        return (x**2).mean()

    matrix = jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)
    lowered = jax.jit(jax.value_and_grad(loss)).lower(
        [{"in": matrix, "out": matrix}] * layers, matrix
    )
    return lowered.compile


if __name__ == "__main__":
    sys.exit(main())
