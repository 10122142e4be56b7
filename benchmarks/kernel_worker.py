"""One task of the GPU suite about our own kernels, in a process of its own: python
benchmarks/kernel_worker.py TASK '{"key": value, ...}'

Needs jax and numpy. Results are printed as in gpu_worker.py.
"""

from __future__ import annotations

import dataclasses
import re
import shutil
import time
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from attention_cases import CASES, Case
from attention_checks import TOLERANCES, array_errors, relative, with_gradients
from attention_variants import variant_attention
from attention_worker import Timed, emit_each, interpreting
from gpu_lock import compiling, measuring
from record import Row
from tuned import use_tuned
from worker import emit, rounds, serve

from pallas_kernels import add_weight_gradient, grouped_matmul, reference_attention, stacked_matmul
from pallas_kernels.grouped_matmul import choose_grouped_matmul, describe_grouped_matmul

HOPPER: Row = {"platform": "gpu", "capability": (9, 0)}
FULL: Row = {"causal": False}
SMALL = Case("small", S=1024, N=2, K=1, B=1)
"""Long enough that every slot in shared memory is used again."""
SMOKE: dict[str, tuple[str, Case]] = {
    "forward": ("fwd as tuned", SMALL),
    "fused backward, red": ("bwd red", SMALL),
    "pair of backward kernels": ("bwd pair", SMALL),
    "fused backward, tma": ("bwd tma", SMALL),
    "forward, head dim 64": ("fwd as tuned", dataclasses.replace(SMALL, H=64)),
    "backward, head dim 64": ("bwd red", dataclasses.replace(SMALL, H=64)),
    "backward, packed": ("bwd red", dataclasses.replace(SMALL, documents=4)),
    "backward, full, uneven": ("bwd red", dataclasses.replace(SMALL, S=1000, T=777, static=FULL)),
    "backward, traced offset": (
        "bwd red",
        dataclasses.replace(SMALL, S=512, T=1024, static={"q_offset": 300}, traced_offset=True),
    ),
    "backward, all features": ("bwd red", dataclasses.replace(CASES["together"], B=1, lse=False)),
    "backward, block mask": ("bwd red", dataclasses.replace(CASES["block mask, causal"], B=1)),
    "backward, head dim 96": ("bwd red", dataclasses.replace(SMALL, H=96)),
    "backward, head dim 192, values 128": ("bwd red", dataclasses.replace(SMALL, H=192, Hv=128)),
    "backward, head dim 256": ("bwd red", dataclasses.replace(SMALL, H=256)),
    "forward, named barriers": ("fwd named barriers", SMALL),
    "forward, no automatic barriers": ("fwd no automatic barriers", SMALL),
    "forward, 3 warpgroups": ("fwd 3 warpgroups", dataclasses.replace(SMALL, H=64, static=FULL)),
    "forward, 128 rows": ("fwd 128 rows", dataclasses.replace(SMALL, H=64)),
    "forward, blocks of 192": ("fwd blocks of 192", dataclasses.replace(SMALL, H=64)),
    "forward, blocks of 256": ("fwd blocks of 256, alternating", dataclasses.replace(SMALL, H=64)),
}
"""Name -> (a variant of the kernels, the case that it runs), the most important first."""
GROUPED, STACKED = "grouped matmul", "stacked matmul"
TINY = ("backward, head dim 64",)
"""Those of a dry run."""


def kernels(dry_run: bool) -> None:
    """Emits the names of the cases of `smoke`."""
    emit(names=[*(TINY if dry_run else SMOKE), GROUPED, STACKED])


def smoke(variants: list[Row], dry_run: bool, reruns: int) -> None:
    """Runs each variant's kernel, one of SMOKE, at a small shape, compares it with the formula in
    fp32, and repeats it.

    rel: the largest |x - formula| / |formula| of the results; rerun: the largest such difference of
    a rerun from the first run.
    """

    def measure(variant: Row) -> Row:
        with interpreting(dry_run):
            if variant["kernel"] == GROUPED:
                return smoke_of_grouped(dry_run)
            if variant["kernel"] == STACKED:
                return smoke_of_stacked(dry_run)
            name, case = SMOKE[variant["kernel"]]
            return smoke_of_attention(name, case.tiny() if dry_run else case, reruns)

    emit_each(variants, measure)


def smoke_of_attention(name: str, case: Case, reruns: int) -> Row:
    """Returns the row of one variant of our attention."""
    moving, still, weights = case.arrays()
    static, forward = case.features(), name.startswith("fwd")
    attend = variant_attention(name, static)

    def call(attention: Any) -> Any:
        if forward:
            return jax.jit(lambda moving, still, weights: {"out": attention(**moving, **still)})
        return with_gradients(lambda **x: (attention(**x), None), case)

    ours = call(attend)
    start_time = time.perf_counter()
    results = jax.block_until_ready(ours(moving, still, weights))
    seconds = time.perf_counter() - start_time
    again = [array_errors(ours(moving, still, weights), results) for _ in range(reruns)]
    exact = {key: x.astype("float32") for key, x in moving.items()}
    expected = call(lambda **x: reference_attention(**{**static, **x})[0])(exact, still, weights)
    errors = array_errors(results, expected)
    limits = TOLERANCES[case.dtype]
    bad = [
        f"{key} {error:.1e}"
        for key, error in errors.items()
        if not error <= limits.get(key, limits["gradient"])
    ]
    moved = [
        f"{key} {error:.1e}"
        for one in again
        for key, error in one.items()
        if not error <= (0 if key == "out" else 1e-4)
    ]
    row: Row = {"first_run_s": seconds, "rel": float(np.max([*errors.values()]))}
    row["rerun"] = (
        float(np.max([error for one in again for error in one.values()])) if again else None
    )
    wrong = [f"too far from the formula: {', '.join(bad)}"] if bad else []
    wrong += [f"a rerun differs: {', '.join(moved)}"] if moved else []
    return row | ({"error": "; ".join(wrong)} if wrong else {})


def smoke_of_grouped(dry_run: bool) -> Row:
    """Returns the row of our grouped matmul with groups of uneven sizes: results and both
    gradients."""
    sizes = jnp.asarray([70, 0, 55, 1, 0, 20] if dry_run else [700, 0, 1010, 10, 0, 200], jnp.int32)
    T, D, F = (200, 64, 64) if dry_run else (2048, 512, 256)
    keys = jax.random.split(jax.random.key(0), 3)
    x, w, dy = (
        jax.random.normal(key, size, jnp.bfloat16)
        for key, size in zip(keys, ((T, D), (6, D, F), (T, F)), strict=True)
    )

    def products(x: jax.Array, w: jax.Array, dy: jax.Array, options: Row) -> tuple[jax.Array, ...]:
        y, pull = jax.vjp(lambda x, w: grouped_matmul(x, w, sizes, **options), x, w)
        return y, *pull(dy)

    start_time = time.perf_counter()
    results = jax.block_until_ready(
        jax.jit(partial(products, options={"implementation": "mosaic", **HOPPER}))(x, w, dy)
    )
    seconds = time.perf_counter() - start_time
    expected = jax.jit(partial(products, options={"implementation": "xla"}))(
        *(a.astype(jnp.float32) for a in (x, w, dy))
    )
    errors = [
        relative(np.asarray(a, np.float32), np.asarray(b, np.float32))
        for a, b in zip(results, expected, strict=True)
    ]
    bad = not float(np.max(errors)) <= TOLERANCES["bfloat16"]["gradient"]
    return {"first_run_s": seconds, "rel": float(np.max(errors))} | (
        {"error": f"too far from a loop: {errors}"} if bad else {}
    )


def smoke_of_stacked(dry_run: bool) -> Row:
    """Returns the row of our stacked matmul: both products and the addition, in rows that are not
    the first, with uneven edges."""
    R, T, K, N = (3, 72, 64, 128) if dry_run else (3, 1000, 832, 1600)
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = ((T, K), (T, N), (R, K, N), (R, K, N))
    x, dy, w, sums = (
        jax.random.normal(key, size, jnp.bfloat16) for key, size in zip(keys, shapes, strict=True)
    )

    def all_of(
        x: jax.Array, dy: jax.Array, w: jax.Array, sums: jax.Array, options: Row
    ) -> tuple[jax.Array, ...]:
        y, dx = (
            stacked_matmul(x, w, 1, **options),
            stacked_matmul(dy, w, 2, transposed=True, **options),
        )
        return y, dx, add_weight_gradient(sums, 1, x, dy, **options)

    start_time, exact = time.perf_counter(), [a.astype(jnp.float32) for a in (x, dy, w, sums)]
    ours = jax.jit(partial(all_of, options={"implementation": "mosaic", **HOPPER}))
    results = jax.block_until_ready(ours(x, dy, w, exact[3]))
    seconds = time.perf_counter() - start_time
    again = [ours(x, dy, w, exact[3]) for _ in range(1 if dry_run else 20)]
    expected = jax.jit(partial(all_of, options={"implementation": "xla"}))(*exact)
    errors = [
        relative(np.asarray(a, np.float32), np.asarray(b, np.float32))
        for a, b in zip(results, expected, strict=True)
    ]
    wrong = (
        []
        if float(np.max(errors)) <= TOLERANCES["bfloat16"]["gradient"]
        else [f"too far from XLA: {errors}"]
    )
    wrong += (
        []
        if bool((results[2][::2] == exact[3][::2]).all())
        else ["a row that was not asked for has changed"]
    )
    wrong += (
        []
        if all(bool((a == b).all()) for one in again for a, b in zip(one, results, strict=True))
        else ["a rerun differs"]
    )
    return {"first_run_s": seconds, "rel": float(np.max(errors))} | (
        {"error": "; ".join(wrong)} if wrong else {}
    )


def profile(shape: Row, peer: str, way: str, dry_run: bool) -> None:
    """Runs one direction of one of our kernels twice, for a profiler that looks at the second
    run."""
    with interpreting(dry_run):
        timed = Timed(peer, shape, dry_run)
        (call,) = timed.warm(way).values()
        jax.block_until_ready(call())
    emit(**shape, peer=peer, way=way)


# The grouped matmul.


def groups(variants: list[Row], dry_run: bool) -> None:
    """Times a grouped matmul and a dense one of the same FLOPs in turns. A variant has tokens,
    groups, d_in, d_out, spread.

    spread: how uneven the groups are, the largest size over the mean. chosen: whether a model would
    take this implementation. ratio: the dense matmul's time over this one's. bwd: both gradients,
    from dy.
    """

    def measure(variant: Row) -> Row:
        with interpreting(dry_run):
            return grouped_row(variant, dry_run)

    emit_each(
        variants,
        measure,
        lambda variant: "unserved" if variant["peer"] == "mosaic" and dry_run else "error",
    )


def grouped_row(variant: Row, dry_run: bool) -> Row:
    """Returns the row of one implementation at one shape."""
    T, E, D, F = (variant[name] for name in ("tokens", "groups", "d_in", "d_out"))
    sizes = jnp.asarray(group_sizes(T, E, variant["spread"]), jnp.int32)
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = ((T, D), (E, D, F), (T, F), (D, F))
    x, w, dy, one = (
        jax.random.normal(key, size, jnp.bfloat16) for key, size in zip(keys, shapes, strict=True)
    )
    options: Row = {"implementation": variant["peer"]} | (
        HOPPER if dry_run and variant["peer"] != "xla" else {}
    )

    def product(x: jax.Array, w: jax.Array) -> jax.Array:
        return grouped_matmul(x, w, sizes, **options)

    def both(f: Any) -> Any:
        return jax.jit(lambda x, w, dy: jax.vjp(f, x, w)[1](dy))

    calls = {
        "fwd": (jax.jit(product), (x, w)), "bwd": (both(product), (x, w, dy)),
        "dense fwd": (jax.jit(jnp.matmul), (x, one)), "dense bwd": (both(jnp.matmul), (x, one, dy)),
    }  # fmt: skip
    with compiling():
        for f, arrays in calls.values():
            jax.block_until_ready(f(*arrays))
    with measuring():
        times = rounds(
            {name: (lambda f=f, arrays=arrays: f(*arrays)) for name, (f, arrays) in calls.items()},
            1 if dry_run else 0,
        )
    chosen = choose_grouped_matmul(describe_grouped_matmul(x, w, sizes)).name == variant["peer"]
    row: Row = {"chosen": chosen}
    for way, flops in (("fwd", 2 * T * D * F), ("bwd", 4 * T * D * F)):
        seconds, dense = times[way].median, times[f"dense {way}"].median
        row |= {
            f"{way}_ms": 1e3 * seconds,
            f"{way}_tflops": flops / seconds / 1e12,
            f"{way}_ratio": dense / seconds,
        }
    return row


def group_sizes(T: int, E: int, spread: float) -> np.ndarray:
    """Returns E sizes that add up to T. The largest is about `spread` times the mean; 1: all
    equal."""
    shares = np.linspace(max(0.0, 2 - spread), spread, E)
    sizes = np.floor(shares / shares.sum() * T).astype(int)
    sizes[: T - sizes.sum()] += 1
    return np.random.default_rng(0).permutation(sizes)


# The stacked matmul.

CUBLAS = {"xla_gpu_enable_triton_gemm": False}
"""The compiler's options with which XLA calls cuBLAS for a matmul."""


def stacks(variants: list[Row], dry_run: bool) -> None:
    """Times a matmul with one matrix of a stack beside cuBLAS's of the same matrix alone, and
    beside XLA's form, in turns.

    A variant has tokens, K, N, rows, and form: "product", "transposed", or "add", the gradient that
    is added to fp32 sums; and tile: "as planned", or the rows x columns of the result that a block
    of our kernel computes. cublas_ms: the matmul alone, with a result in bf16; xla_ms: with the
    copy out of the stack, or with the addition of a gradient in bf16. ratio: cuBLAS's time over
    ours; xla_ratio: that of XLA's form. rel: |ours - XLA's form| / |XLA's form|.
    """

    def measure(variant: Row) -> Row:
        with interpreting(dry_run):
            return stacked_row(variant, dry_run)

    emit_each(variants, measure)


FORMS: dict[str, Any] = {
    "add": add_weight_gradient, "product": stacked_matmul,
    "transposed": partial(stacked_matmul, transposed=True),
}  # fmt: skip


def planned(variant: Row) -> Any:
    """Returns our kernel of a form, with the tiles of a variant."""
    from pallas_kernels.grouped.plan import Plan
    from pallas_kernels.stacked import hopper
    from pallas_kernels.stacked.plan import AddingPlan

    form = variant["form"]
    if not (sizes := re.fullmatch(r"(\d+) x (\d+)", variant["tile"])):
        return partial(FORMS[form], implementation="mosaic", **HOPPER)
    rows, columns = map(int, sizes.groups())
    if form == "add":
        return partial(hopper.add, AddingPlan(columns, height=rows // 2))
    return partial(hopper.product, Plan(columns, height=rows // 2), transpose=form == "transposed")


def stacked_row(variant: Row, dry_run: bool) -> Row:
    """Returns the row of one form at one shape."""
    T, K, N, R, form = (variant[name] for name in ("tokens", "K", "N", "rows", "form"))
    keys, row = jax.random.split(jax.random.key(0), 3), jnp.int32(R - 1)
    x, dy = (
        jax.random.normal(key, (T, width), jnp.bfloat16)
        for key, width in zip(keys[:2], (K, N), strict=True)
    )
    ways = {
        "ours": planned(variant),
        "xla": partial(
            FORMS[form], implementation="xla", **({"rounded": True} if form == "add" else {})
        ),
    }
    if form == "add":
        stacks = {name: jnp.zeros((R, K, N), jnp.float32) for name in ways}
        steps = {name: jax.jit(way, donate_argnums=0) for name, way in ways.items()}

        def step(name: str) -> jax.Array:
            # in place: the sums before are donated
            stacks[name] = steps[name](stacks[name], row, x, dy)
            return stacks[name]

        calls = {name: partial(step, name) for name in ways}
        alone, factors = jax.jit(lambda x, dy: x.T @ dy, compiler_options=CUBLAS), (x, dy)
    else:
        w, transposed = jax.random.normal(keys[2], (R, K, N), jnp.bfloat16), form == "transposed"
        x = dy if transposed else x
        calls = {name: partial(jax.jit(way), x, w, row) for name, way in ways.items()}
        alone = jax.jit(lambda x, w: x @ (w.T if transposed else w), compiler_options=CUBLAS)
        factors = (x, w[R - 1])
    with compiling():
        results = {name: call()[-1] if form == "add" else call() for name, call in calls.items()}
        error = float(distance(results["ours"], results["xla"]))
        jax.block_until_ready(alone(*factors))
    with measuring():
        times = rounds({**calls, "cublas": lambda: alone(*factors)}, 1 if dry_run else 0)
    ms = {name: 1e3 * each.median for name, each in times.items()}
    measured: Row = {
        "ms": ms["ours"],
        "tflops": 2 * T * K * N / ms["ours"] / 1e9,
        "cublas_ms": ms["cublas"],
        "xla_ms": ms["xla"],
    }
    measured |= {
        "ratio": ms["cublas"] / ms["ours"],
        "xla_ratio": ms["xla"] / ms["ours"],
        "rel": error,
    }
    return measured | (
        {}
        if error <= TOLERANCES["bfloat16"]["gradient"]
        else {"error": f"too far from XLA: {error:.1e}"}
    )


@jax.jit
def distance(a: jax.Array, b: jax.Array) -> jax.Array:
    """Returns |a - b| / |b|, in fp32."""
    a, b = a.astype(jnp.float32), b.astype(jnp.float32)
    return jnp.linalg.norm(a - b) / jnp.linalg.norm(b)


# Tiles.


def autotune(seconds: float, table: str, shapes: list[Row], dry_run: bool) -> None:
    """Runs `pallas_kernels.dev.autotune.measure` for `seconds`, and writes its table of tiles to
    the path `table`.

    shapes: head_dim, mask and seq to time, the most important first; empty: all of autotune's.
    dry_run: times no candidate.
    """
    from pallas_kernels.attention import tuning
    from pallas_kernels.dev import autotune as tuner

    if not tuner.CANDIDATES.exists():
        emit(
            autotune=(
                f"no {tuner.CANDIDATES.name}: python -m pallas_kernels.dev.autotune makes it, "
                "without a GPU"
            )
        )
        return
    if not Path(table).exists():
        shutil.copy(tuning.PATH, table)
    tuning.PATH = Path(table)  # a benchmark must not change the package's own table
    cases = [((row["head_dim"],) * 2, row["mask"] == "causal", row["seq"]) for row in shapes]
    with measuring():
        rows = tuner.measure(0 if dry_run else seconds, cases=cases or None)
    emit(autotune=f"{len(rows)} shapes measured", table=Path(table).name)
    for row in rows:
        tiles = {
            kernel: " ".join(f"{name} {n}" for name, n in row[kernel].items())
            for kernel in tuner.KERNELS
        }
        columns = {name: row[name] for name in ("device", "causal", "length")} | {
            "plain": row.get("plain", False)
        }
        times = {f"{name}_ms": ms for name, ms in row["measured"]["ms"].items()}
        emit(head_dims=" ".join(map(str, row["head_dims"])), **columns, **tiles, **times)


if __name__ == "__main__":
    use_tuned()
    serve({f.__name__: f for f in (kernels, smoke, profile, groups, stacks, autotune)})
