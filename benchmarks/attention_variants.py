"""Variants of our forward against each other, in a process of its own: python benchmarks/attention_variants.py variants '{...}'

Needs jax and numpy. Results are printed as in gpu_worker.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from attention_cases import forward_flops, timed_case
from attention_worker import interpreting
from gpu_lock import measuring
from record import Row
from worker import emit, rounds, serve

from pallas_kernels import describe_attention
from pallas_kernels.attention import tuning
from pallas_kernels.attention.hopper import ForwardTiles, attention
from pallas_kernels.dev.autotune import as_data, passing

DRY = (ForwardTiles(64, 2), ForwardTiles(64, 2, named_barriers=True), ForwardTiles(64, 2, height=128))


def variants(shapes: list[Row], dry_run: bool) -> None:
    """Times the forward with every schedule and tile size that compiles well, in turns. differs: its largest difference to the first's
    result, as a share of the largest number: another order of sums, so some roundings.
    """
    for shape in shapes:
        case = timed_case(shape, "bfloat16", tiny=dry_run)
        keys = jax.random.split(jax.random.key(case.S), 3)
        q, k, v = (
            jax.random.normal(key, (case.B, case.S, n, case.H), jnp.bfloat16) for key, n in zip(keys, (case.N, case.K, case.K), strict=True)
        )
        plain = "causal" if case.static["causal"] else "full"
        tried = (
            DRY if dry_run else [one.tiles for one in passing("forward", (case.H, case.H), plain) if isinstance(one.tiles, ForwardTiles)]
        )
        with interpreting(dry_run), ThreadPoolExecutor(8) as pool:
            build = partial(_built, q, k, v, case.static)
            started: list[Any] = [partial(build, tiles) if dry_run else pool.submit(build, tiles).result for tiles in tried]
            calls: dict[str, Callable[[], jax.Array]] = {}
            for tiles, result in zip(tried, started, strict=True):
                name = " ".join(f"{field} {value}" for field, value in as_data(tiles).items())
                try:
                    calls[name] = partial(result(), q, k, v)
                    calls[name]().block_until_ready()
                except Exception as error:
                    emit(**shape, variant=name, error=f"{type(error).__name__}: {error}"[:600])
                    calls.pop(name, None)
            with measuring():
                times = rounds(calls, 1 if dry_run else 0)
            first = next(iter(calls.values()))().astype(jnp.float32)
            for name, call in calls.items():
                differs = float(jnp.abs(call().astype(jnp.float32) - first).max() / jnp.abs(first).max())
                ms, tflops = 1e3 * times[name].median, forward_flops(case, None) / times[name].median / 1e12
                wrong = {} if differs < 0.01 else {"error": f"differs from the first by {differs:.1e}"}
                emit(**shape, variant=name, fwd_ms=ms, fwd_tflops=tflops, fwd_spread=times[name].spread, differs=differs, **wrong)


def _built(q: jax.Array, k: jax.Array, v: jax.Array, static: Row, tiles: ForwardTiles) -> Callable[..., jax.Array]:
    """The forward with these tiles, compiled."""
    problem = describe_attention(q, k, v, platform="gpu", capability=(9, 0), **static)
    with_tiles = dataclasses.replace(tuning.tiling(problem), forward=tiles)
    return jax.jit(lambda q, k, v: attention(q, k, v, problem, with_tiles)[0]).lower(q, k, v).compile()


if __name__ == "__main__":
    serve({"variants": variants})
