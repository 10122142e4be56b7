"""One task of the GPU suite about attention, in a process of its own: python
benchmarks/attention_worker.py TASK '{"key": value, ...}'

Needs jax and numpy. Results are printed as in gpu_worker.py. After a CUDA error, which leaves it
unusable, the process exits with RESTART.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path
from typing import Any

import attention_peers as peers
import jax
import jax.numpy as jnp
import numpy as np
from attention_cases import CASES, Case, document_ids, forward_flops, timed_case
from attention_checks import TOLERANCES, compared, relative
from gpu_lab import RESTART
from gpu_lock import compiling, measuring
from record import Row
from tuned import use_tuned
from worker import emit, rounds, serve, sustained

from pallas_kernels import flash_attention, reference_attention
from pallas_kernels.dev.interpreter import interpreted


def emit_each(
    variants: list[Row],
    measure: Callable[[Row], Row],
    fault: Callable[[Row], str] = lambda variant: "error",
) -> None:
    """Emits a row for each variant. fault: the column that reports an exception."""
    for variant in variants:
        try:
            emit(**variant, **measure(variant))
        except Exception as error:
            emit(**variant, **{fault(variant): f"{type(error).__name__}: {error}"[:600]})
            try:
                jax.block_until_ready(jnp.arange(8) + 1)
            except Exception:
                sys.stdout.flush()
                os._exit(RESTART)  # a clean exit would wait for a GPU that does not answer


def interpreting(dry_run: bool) -> contextlib.AbstractContextManager[None]:
    return interpreted() if dry_run else contextlib.nullcontext()


# Speed.


def plan(headline: list[Row], shapes: list[Row], dry_run: bool) -> None:
    """Emits what to time: "peers" in JAX, and for those in another framework "flops" of the
    forward, "window" and "lengths"."""
    for row in [*headline, *shapes]:
        case = timed_case(row, "bfloat16", tiny=dry_run)
        ids = packed_ids(case)
        names = peers.available(row["mask"], row["head_dim"], row["heads"] // row["kv_heads"])
        names = (
            [
                name if name != "cudnn" else "xla"
                for name in names
                if name not in ("mgpu", "tokamax")
            ]
            if dry_run
            else names
        )
        # the headline has those
        names = [
            name
            for name in names
            if row not in headline or name not in (peers.OURS, "cudnn", "xla")
        ]
        lengths = None if ids is None else [np.bincount(one).tolist() for one in ids]
        emit(
            shape=row,
            peers=names,
            flops=forward_flops(case, ids),
            window=case.static.get("window"),
            lengths=lengths,
        )


def packed_ids(case: Case) -> np.ndarray | None:
    return (
        document_ids(np.random.default_rng(case.S), case.B, case.S, case.documents)
        if case.documents
        else None
    )


def headline(size: int, shapes: list[Row], names: list[str], dry_run: bool) -> None:
    """Times the matmul roof, then the implementations of each shape in turns, so that all have the
    same temperature and clocks."""
    roof(size, 0.0 if dry_run else 4.0)
    with ThreadPoolExecutor(len(names) * len(shapes)) as pool:  # interpretation is set per thread
        start: Any = _Done if dry_run else pool.submit
        with interpreting(dry_run):
            built = [
                (shape, {name: start(Timed, name, shape, dry_run) for name in names})
                for shape in shapes
            ]
        if not dry_run:
            # nothing may compile during the timing
            wait(future for _, entrants in built for future in entrants.values())
        for shape, entrants in built:
            duel(shape, entrants, dry_run)


def roof(size: int, seconds: float) -> None:
    """Times a bf16 matmul of random data, size^3, for seconds: the rate that the GPU sustains
    without a kernel's other work."""
    a, b = (
        jax.random.normal(key, (size, size), jnp.bfloat16)
        for key in jax.random.split(jax.random.key(0))
    )
    matmul = jax.jit(jnp.matmul)
    with compiling():
        jax.block_until_ready(matmul(a, b))
    times = sustained(partial(matmul, a, b), seconds)
    emit(
        matmul=f"{size}^3 bf16",
        seconds=seconds,
        ms=1e3 * times.median,
        tflops=2 * size**3 / times.median / 1e12,
        spread=times.spread,
    )


class _Done:
    """A future that does its work when the result is requested."""

    def __init__(self, f: Callable[..., Any], *arguments: Any) -> None:
        self.f, self.arguments = f, arguments

    def result(self) -> Any:
        return self.f(*self.arguments)


def duel(shape: Row, entrants: dict[str, Any], dry_run: bool) -> None:
    """Times implementations of one shape in turns. entrants: name -> a future with a `Timed`."""
    with interpreting(dry_run):
        built: dict[str, Timed] = {}
        for name, future in entrants.items():
            try:
                built[name] = future.result()
            except Exception as error:
                emit(**shape, peer=name, error=f"{type(error).__name__}: {error}"[:600])
        with measuring():
            ways: dict[tuple[str, str], Callable[[], Any]] = {}
            for name, timed in [*built.items()]:
                try:
                    ways |= {(name, way): f for way, f in timed.warm().items()}
                except Exception as error:
                    emit(**shape, peer=name, error=f"{type(error).__name__}: {error}"[:600])
                    del built[name]
            start_time = time.time()
            times = rounds(ways, 1 if dry_run else 0) if ways else {}
            ended = time.time()
    for name, timed in built.items():
        own_times = {way: times[other, way] for other, way in times if other == name}
        emit(**shape, peer=name, **timed.row(own_times), began=start_time, ended=ended)


def speed(variants: list[Row], dry_run: bool) -> None:
    """Times each variant, which is a shape and a peer, and perhaps a way, fwd or bwd; else both."""

    def measure(variant: Row) -> Row:
        with interpreting(dry_run):
            # Only XLA's own attention runs matmuls on the GPU while it compiles.
            with compiling() if variant["peer"] == "xla" else contextlib.nullcontext():
                timed = Timed(variant["peer"], variant, dry_run)
            with measuring():
                return timed.row(rounds(timed.warm(variant.get("way", "")), 1 if dry_run else 0))

    emit_each(
        variants, measure, lambda variant: "error" if variant["peer"] == peers.OURS else "unserved"
    )


def smoke(variants: list[Row], dry_run: bool) -> None:
    """Compares one direction of one implementation at one shape with the formula in fp32 on the
    same data, then times it.

    A variant is a shape, a peer and a way, fwd or bwd. rel: |x - formula| / |formula|, of out or of
    the gradients.
    """
    timed_by_peer: dict[str, Timed] = {}

    def measure(variant: Row) -> Row:
        peer, way = variant["peer"], variant["way"]
        with interpreting(dry_run):
            with compiling():
                timed = timed_by_peer[peer] = timed_by_peer.get(peer) or Timed(
                    peer, variant, dry_run
                )
            call = timed.warm(way)[way]
            errors = against_formula(timed, way, call())
            with measuring():
                row = timed.row(rounds({way: call}, 1 if dry_run else 0))
        limit = (
            TOLERANCES[timed.case.dtype]["out" if way == "fwd" else "gradient"]
            if peer == peers.OURS
            else float("inf")
        )
        bad = [f"{name} {error:.2e}" for name, error in errors.items() if not error <= limit]
        row |= {f"rel_{name}": error for name, error in errors.items()}
        return row | ({"error": f"too far from the formula: {', '.join(bad)}"} if bad else {})

    emit_each(variants, measure)


def against_formula(timed: Timed, way: str, results: Any) -> dict[str, float]:
    """Returns the errors of one direction's results for the data of `Timed.data`."""
    *qkv, dout = (x.astype(jnp.float32) for x in timed.data())
    attend = partial(reference_attention, causal=timed.case.static["causal"])

    @jax.jit
    def formula(q: jax.Array, k: jax.Array, v: jax.Array, dout: jax.Array) -> Any:
        out, pull = jax.vjp(lambda *qkv: attend(*qkv)[0], q, k, v)
        return (out,) if way == "fwd" else pull(dout)

    names = ("out",) if way == "fwd" else ("dq", "dk", "dv")
    pairs = zip(names, jax.tree.leaves(results), formula(*qkv, dout), strict=True)
    return {
        name: relative(np.asarray(x, np.float32), np.asarray(expected))
        for name, x, expected in pairs
    }


class Timed:
    """One implementation at one shape. It compiles without using the GPU, so that others can be
    timed meanwhile; `warm` runs it once."""

    def __init__(self, peer: str, shape: Row, dry_run: bool) -> None:
        self.case = case = timed_case(shape, peers.DTYPES.get(peer, "bfloat16"), tiny=dry_run)
        self.ids, self.scaled = packed_ids(case), peer == "mgpu"  # which has no softmax scale
        self.flops = forward_flops(case, self.ids)
        self.sizes = [(case.B, case.S, n, case.H) for n in (case.N, case.K, case.K, case.N)]
        *qkv, dout = (jax.ShapeDtypeStruct(size, jnp.dtype(case.dtype)) for size in self.sizes)
        still = (
            {}
            if self.ids is None
            else {"segment_ids": jax.ShapeDtypeStruct(self.ids.shape, self.ids.dtype)}
        )
        attend = peers.attention(peer, case.static, dry_run)
        self.forward = (
            jax.jit(lambda q, k, v, still: attend(q, k, v, **still)).lower(*qkv, still).compile()
        )
        self.backward = None
        if not peers.forward_only(peer, shape["mask"]):
            lowered = jax.jit(
                lambda q, k, v, still: jax.vjp(partial(attend, **still), q, k, v)
            ).lower(*qkv, still)
            self.kept = lowered.compile()
            _, pull = jax.tree.map(
                lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), lowered.out_info
            )
            self.backward = jax.jit(lambda pull, dout: pull(dout)).lower(pull, dout).compile()

    def data(self) -> list[jax.Array]:
        """Returns q, k, v and the gradient of the result: random, the same for every
        implementation."""
        keys = jax.random.split(jax.random.key(self.case.S + self.case.H), 4)
        return [
            jax.random.normal(key, size, self.case.dtype)
            for key, size in zip(keys, self.sizes, strict=True)
        ]

    def warm(self, way: str = "") -> dict[str, Callable[[], Any]]:
        """Returns functions that call the forward and the backward alone (or one of them), after
        calling each once."""
        q, k, v, dout = self.data()
        qkv = (q / self.case.H**0.5 if self.scaled else q, k, v)
        still = {} if self.ids is None else {"segment_ids": jnp.asarray(self.ids)}
        ways: dict[str, Callable[[], Any]] = {}
        self.norms: Row = {}
        if way != "bwd":
            ways["fwd"] = partial(self.forward, *qkv, still)
            self.norms |= {"out_norm": _norm(ways["fwd"]())}
        if self.backward and way != "fwd":
            _, pull = self.kept(*qkv, still)
            ways["bwd"] = partial(self.backward, pull, dout)
            self.norms |= {
                f"d{name}_norm": _norm(x) for name, x in zip("qkv", ways["bwd"](), strict=True)
            }
        return ways

    def row(self, times: dict[str, Any]) -> Row:
        columns: Row = {}
        for way, flops in (("fwd", self.flops), ("bwd", 2.5 * self.flops)):
            if way in times:
                columns |= {
                    f"{way}_ms": 1e3 * times[way].median,
                    f"{way}_tflops": flops / times[way].median / 1e12,
                }
                columns |= {f"{way}_spread": times[way].spread}
        return columns | self.norms


def _norm(x: jax.Array) -> float:
    return float(jnp.linalg.norm(x.astype(jnp.float32).ravel()))


# Correctness.


def cases() -> None:
    emit(names=list(CASES))


def correct(variants: list[Row], dry_run: bool, reruns: int) -> None:
    """Compares our attention with the formula in fp32. A variant names one of CASES.

    rel: |x - reference| / |reference| of out, log-sum-exp and gradients; cudnn: the largest ratio
    of our error to cuDNN's, if supported.
    """

    def measure(variant: Row) -> Row:
        case = CASES[variant["case"]].tiny() if dry_run else CASES[variant["case"]]
        with interpreting(dry_run), compiling():
            return compared(case, dry_run, reruns)

    emit_each(variants, measure)


# A program compiled without a GPU.


def _block(x: jax.Array, into: jax.Array, out: jax.Array, options: dict[str, Any]) -> jax.Array:
    """A small attention block, with a loss."""
    q, k, v = jnp.moveaxis(jnp.einsum("bsd,dfnh->bsfnh", x, into), 2, 0)
    y = flash_attention(q, k, v, implementation="mosaic", **options)
    return jnp.square(jnp.einsum("bsnh,dnh->bsd", y, out).astype(jnp.float32)).mean()


def _program(options: dict[str, Any]) -> Callable[..., Any]:
    return jax.jit(jax.value_and_grad(partial(_block, options=options), argnums=(0, 1, 2)))


def _block_shapes(tiny: bool) -> list[tuple[int, ...]]:
    B, S, D, N, H = (1, 128, 64, 1, 64) if tiny else (2, 4096, 1024, 8, 128)
    return [(B, S, D), (D, 3, N, H), (D, N, H)]


def deviceless(path: str, target: str, tiny: bool) -> None:
    """Compiles for a GPU that this process does not see, and serialises the program. target: cpu is
    a dry run for this machine."""
    from jax.experimental import serialize_executable

    from sharding_rules.lab.targets import devices

    start_time = time.perf_counter()
    device = jax.devices()[0] if target == "cpu" else devices(target, 1)[0]
    sharding = jax.sharding.SingleDeviceSharding(device)
    arguments = [
        jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=sharding)
        for shape in _block_shapes(tiny)
    ]
    compiled = (
        _program({"platform": "gpu", "capability": (9, 0)}).lower(*arguments).compile()
        if target != "cpu"
        else _on_cpu(arguments)
    )
    serialised, _, _ = serialize_executable.serialize(compiled)
    Path(path).write_bytes(serialised)
    emit(target=target, compile_s=time.perf_counter() - start_time, bytes=len(serialised))


def _on_cpu(arguments: list[jax.ShapeDtypeStruct]) -> Any:
    """The block with XLA's attention: an interpreted kernel calls back into Python, which cannot be
    serialised."""
    return jax.jit(jax.value_and_grad(_plain_block, argnums=(0, 1, 2))).lower(*arguments).compile()


def _plain_block(x: jax.Array, into: jax.Array, out: jax.Array) -> jax.Array:
    q, k, v = jnp.moveaxis(jnp.einsum("bsd,dfnh->bsfnh", x, into), 2, 0)
    return jnp.square(
        jnp.einsum("bsnh,dnh->bsd", flash_attention(q, k, v), out).astype(jnp.float32)
    ).mean()


def load(path: str, tiny: bool) -> None:
    """Loads the program of `deviceless`, runs it, and compares it with the same program compiled
    here."""
    from jax.experimental import serialize_executable

    keys = jax.random.split(jax.random.key(0), 3)
    shapes = zip(keys, _block_shapes(tiny), strict=True)
    arguments = [
        jax.random.normal(key, shape, jnp.bfloat16) / shape[0] ** 0.5 for key, shape in shapes
    ]
    into = jax.tree.structure((tuple(arguments), {}))
    out = jax.tree.structure((0, (0, 0, 0)))
    start_time = time.perf_counter()
    device = jax.devices()[0]
    program = serialize_executable.deserialize_and_load(
        Path(path).read_bytes(), into, out, device.client, [device]
    )
    loaded = time.perf_counter() - start_time
    results = jax.block_until_ready(program(*arguments))
    start_time = time.perf_counter()
    recompiled = (
        _program({})
        if device.platform == "gpu"
        else jax.jit(jax.value_and_grad(_plain_block, argnums=(0, 1, 2)))
    )
    with compiling():
        expected = jax.block_until_ready(recompiled(*arguments))
    compiled = time.perf_counter() - start_time
    pairs = zip(jax.tree.leaves(results), jax.tree.leaves(expected), strict=True)
    errors = [relative(np.asarray(a, np.float32), np.asarray(b, np.float32)) for a, b in pairs]
    with measuring():
        times = rounds(
            {"loaded": lambda: program(*arguments), "here": lambda: recompiled(*arguments)},
            1 if tiny else 0,
        )
    row = {
        "load_s": loaded,
        "compile_here_s": compiled,
        "ms": 1e3 * times["loaded"].median,
        "ms_compiled_here": 1e3 * times["here"].median,
    }
    bad = not max(errors) <= 1e-2
    emit(
        **row,
        rel_difference=max(errors),
        **(
            {"error": f"differs from the program compiled here by {max(errors):.1e}"} if bad else {}
        ),
    )


if __name__ == "__main__":
    use_tuned()
    serve({f.__name__: f for f in (plan, headline, speed, smoke, cases, correct, deviceless, load)})
