"""Stacked matmul against NumPy: XLA's form on the CPU, the Hopper kernels in the interpreter; its
plans, choice and errors."""

import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gpt_175b import LAYERS, MATRICES, TOKENS
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pallas_kernels import Choice, Unsupported, add_weight_gradient, stacked_matmul
from pallas_kernels.attention.occupancy import SMS
from pallas_kernels.dev import clocks
from pallas_kernels.dev.interpreter import interpreted
from pallas_kernels.grouped import plan as grouped_plan
from pallas_kernels.grouped.plan import Plan
from pallas_kernels.stacked import hopper, plan
from pallas_kernels.stacked_matmul import (
    EXPERIMENTAL,
    choose_stacked_matmul,
    describe_stacked_matmul,
    describe_weight_gradient,
)

COMPILE_BUDGET = 60

HOPPER = {"implementation": "mosaic", "platform": "gpu", "capability": (9, 0)}
XLA = {"implementation": "xla"}
R = 3
RESULTS = next(
    (Path(__file__).parents[2] / "benchmarks/results").glob("gpu_suite_2026-11-26_*.json")
)
MEASURED = json.loads(RESULTS.read_text(encoding="utf-8"))["tables"]["Stacked matmul"]["rows"]
"""The times of two tiles of the result at the shapes of gpt_175b, on an H200."""


def arrays(T: int, K: int, N: int, dtype="bfloat16"):
    """x, dy, weights and sums."""
    random = np.random.default_rng(0)
    x, dy, w = (
        random.standard_normal(shape).astype(jnp.dtype(dtype))
        for shape in ((T, K), (T, N), (R, K, N))
    )
    return x, dy, w, random.standard_normal((R, K, N)).astype(np.float32)


@functools.partial(jax.jit, static_argnums=5)
def ours(x, dy, w, sums, row, features):
    how = dict(features)
    y = stacked_matmul(x, w, row, **how)
    dx = stacked_matmul(dy, w, row, transposed=True, **how)
    added, rounded = (
        add_weight_gradient(sums, row, x, dy, rounded=rounded, **how) for rounded in (False, True)
    )
    return y, dx, added, rounded


def by_numpy(x, dy, w, sums, row):
    """What `ours` computes, in fp64."""
    x, dy, w, sums = (a.astype(np.float64) for a in (x, dy, w, sums))
    added = sums.copy()
    added[row] += x.T @ dy
    return x @ w[row], dy @ w[row].T, added, added


def check(case, row: int, inside: int | None = None, **how) -> None:
    """Compares with NumPy, and the rows that were not asked for with what they were, bit by bit."""
    inside = row if inside is None else inside
    x, _, _, sums = case
    limits = {
        "float32": (1e-6,) * 4,
        "float16": (2e-3, 2e-3, 1e-6, 2e-3),
        "bfloat16": (0.01, 0.01, 1e-6, 0.01),
    }[str(x.dtype)]
    found = ours(*case, jnp.int32(row), tuple(how.items()))
    for name, one, wanted, limit in zip(
        ("y", "dx", "added", "rounded"), found, by_numpy(*case, inside), limits, strict=True
    ):
        assert one.dtype == (x.dtype if name in ("y", "dx") else np.float32), name
        assert np.abs(np.asarray(one, np.float64) - wanted).max() <= limit * np.abs(wanted).max(), (
            name
        )
    for one in map(np.asarray, found[2:]):
        others = np.arange(R) != inside
        assert (one[others].view(np.int32) == sums[others].view(np.int32)).all(), (
            "another row has changed"
        )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_xla(dtype: str) -> None:
    check(arrays(30, 24, 40, dtype), 1, **XLA)


@pytest.mark.parametrize("row", [0, 2])
def test_mosaic(row: int) -> None:
    """More than one tile either way, whose last one has 64 rows or fewer columns, and a last step
    of 8 tokens."""
    with interpreted():
        check(arrays(200, 192, 320), row, **HOPPER)


def test_mosaic_reuses_its_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """More steps than buffers, and more tiles than blocks of threads, in two bands; warpgroups
    alternate at random."""
    monkeypatch.setattr(plan, "SMS", 2)
    monkeypatch.setattr(plan, "BAND", 256)
    monkeypatch.setattr(grouped_plan, "STAGES", 2)
    with interpreted(seed=1):
        check(arrays(392, 448, 384, "float16"), 1, **HOPPER)


@pytest.mark.slow
@settings(max_examples=12, deadline=None, derandomize=True)
@example(64, 64, 64, (64, 64), 1)
@example(136, 128, 64, (64, 256), 5)
@example(264, 320, 256, (128, 192), 2)
@given(
    T=st.integers(8, 34).map(lambda n: 8 * n),
    K=st.integers(1, 5).map(lambda n: 64 * n),
    N=st.integers(1, 5).map(lambda n: 64 * n),
    tile=st.sampled_from(plan.PLANS),
    blocks=st.integers(1, 5),
)
def test_any_size_with_any_plan(T: int, K: int, N: int, tile: tuple[int, int], blocks: int) -> None:
    case = arrays(T, K, N)
    plain, adding, row = (
        *(kind(tile[1], blocks, tile[0]) for kind in (Plan, plan.AddingPlan)),
        jnp.int32(1),
    )

    @jax.jit
    def all_of(x, dy, w, sums):
        y, dx = (
            hopper.product(plain, x, w, row, transpose=False),
            hopper.product(plain, dy, w, row, transpose=True),
        )
        return y, dx, hopper.add(adding, sums, row, x, dy)

    with interpreted():
        found = [np.asarray(a, np.float64) for a in all_of(*case)]
    for one, wanted, limit in zip(found, by_numpy(*case, 1), (0.01, 0.01, 1e-6), strict=False):
        assert np.abs(one - wanted).max() <= limit * np.abs(wanted).max()
    assert (found[2][[0, 2]] == case[3][[0, 2]]).all()


@pytest.mark.parametrize(("row", "inside"), [(-1, 0), (R, R - 1), (10**6, R - 1)])
def test_a_row_outside_of_the_stack_counts_as_the_nearest(row: int, inside: int) -> None:
    case = arrays(64, 64, 64)
    check(case, row, inside, **XLA)
    with interpreted():
        check(case, row, inside, **HOPPER)


def test_a_rounded_sum_equals_a_rounded_matmul_bit_by_bit() -> None:
    """With whole numbers every order of addition gives the same sum, of which bf16 keeps 8 bits."""
    random = np.random.default_rng(0)
    x, dy = (random.integers(-9, 9, (64, 128)).astype(jnp.bfloat16) for _ in range(2))
    sums = np.zeros((R, 128, 128), np.float32)
    exact = x.astype(np.float32).T @ dy.astype(np.float32)
    rounded = exact.astype(jnp.bfloat16).astype(np.float32)
    assert (exact != rounded).any()
    for how in (XLA, HOPPER):
        with interpreted():
            call = jax.jit(
                lambda *a, how=how: [
                    add_weight_gradient(*a, rounded=rounded, **how)[1] for rounded in (False, True)
                ]
            )
            found = [np.asarray(one) for one in call(sums, jnp.int32(1), x, dy)]
        assert (found[0] == exact).all() and (found[1] == rounded).all()


@pytest.mark.parametrize("transposed", [False, True])
def test_gradients_are_those_of_a_plain_matmul(transposed: bool) -> None:
    x, dy, w, _ = arrays(64, 128, 64)
    x, dy = (dy, x) if transposed else (x, dy)

    def gradients(f):
        return jax.jit(lambda x, w, dy: jax.vjp(f, x, w)[1](dy))(x, w, dy)

    wanted = gradients(
        lambda x, w: jnp.matmul(
            x, w[1].T if transposed else w[1], preferred_element_type=jnp.float32
        ).astype(x.dtype)
    )
    for how in (XLA, HOPPER):
        with interpreted():
            found = gradients(
                lambda x, w, how=how: stacked_matmul(x, w, 1, transposed=transposed, **how)
            )
            for one, other in zip(found, wanted, strict=True):
                one, other = (np.asarray(a, np.float32) for a in (one, other))
                assert np.abs(one - other).max() <= 0.01 * np.abs(other).max()


def test_a_loop_over_rows_adds_to_each_once() -> None:
    x, dy, _, sums = arrays(64, 64, 128)

    @jax.jit
    def loop(sums, x, dy):
        return jax.lax.fori_loop(
            0, R, lambda row, sums: add_weight_gradient(sums, row, x, dy, **HOPPER), sums
        )

    with interpreted():
        found = np.asarray(loop(sums, x, dy))
    wanted = sums + x.astype(np.float32).T @ dy.astype(np.float32)
    assert np.abs(found - wanted).max() <= 1e-6 * np.abs(wanted).max()


# The choice, and what is refused.


def structs(T: int = 4096, K: int = 1024, N: int = 2048, dtype="bfloat16"):
    def of(*shape, dtype=dtype):
        return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))

    return of(T, K), of(T, N), of(R, K, N), of(R, K, N, dtype="float32"), of(dtype="int32")


REFUSED = {
    "it needs a Hopper GPU, and the platform is cpu": {},
    "it needs compute capability 9.0, and this GPU has 8.0": {"capability": (8, 0)},
    "it needs compute capability 9.0, and this GPU has 10.0": {"capability": (10, 0)},
    "it takes bfloat16 and float16, not float32": {"dtype": "float32"},
    "its widths are multiples of 64, not 96 and 2048; pad to 128 and 2048": {"K": 96},
    "its widths are multiples of 64, not 1024 and 32; pad to 1024 and 64": {"N": 32},
    "its tokens are a multiple of 8 from 64 on, not 56; pad to 64": {"T": 56},
    "its tokens are a multiple of 8 from 64 on, not 1001; pad to 1008": {"T": 1001},
}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_mosaic_cannot_serve_is_refused_word_for_word(reason: str) -> None:
    words = dict(REFUSED[reason])
    place = (
        {"platform": "gpu", "capability": words.pop("capability", (9, 0))}
        if words
        else {"platform": "cpu"}
    )
    x, dy, w, sums, row = structs(**words)
    for problem in (
        describe_stacked_matmul(x, w, row, **place),
        describe_weight_gradient(sums, row, x, dy, **place),
    ):
        assert choose_stacked_matmul(problem) == Choice("xla", {"mosaic": reason})
    with pytest.raises(Unsupported) as error:
        jax.eval_shape(lambda *a: stacked_matmul(*a, implementation="mosaic", **place), x, w, row)
    assert (
        str(error.value)
        == f"stacked_matmul: implementation='mosaic' cannot serve this call: {reason}"
    )
    with pytest.raises(Unsupported) as error:
        jax.eval_shape(
            lambda *a: add_weight_gradient(*a, implementation="mosaic", **place), sums, row, x, dy
        )
    assert (
        str(error.value)
        == f"add_weight_gradient: implementation='mosaic' cannot serve this call: {reason}"
    )


def test_mosaic_serves_nothing_unasked() -> None:
    x, _, w, _, row = structs()
    hopper = describe_stacked_matmul(x, w, row, platform="gpu", capability=(9, 0))
    assert choose_stacked_matmul(hopper) == Choice("xla", {"mosaic": EXPERIMENTAL})
    assert EXPERIMENTAL == (
        "it is experimental until a GPU measures 0.95 of cuBLAS's rate; implementation='mosaic' "
        "asks for it"
    )
    text = str(
        jax.make_jaxpr(lambda *a: stacked_matmul(*a, platform="gpu", capability=(9, 0)))(x, w, row)
    )
    assert "dot_general" in text and "mpmd" not in text


WRONG = {
    "stacked_matmul: x must be [T, K] and weights [R, K, N], got x (4, 3, 1) and weights (2, 3, 5)": ((4, 3, 1), (2, 3, 5), {}),
    ("stacked_matmul: x [T, K] and weights [R, K, N] must have the same K, got x (4, 5) and "
        "weights "
    "(2, 3, 5)"): ((4, 5), (2, 3, 5), {}),
    ("stacked_matmul: x [T, N] and weights [R, K, N] must have the same N, got x (4, 3) and "
        "weights "
    "(2, 3, 5)"): (
        (4, 3), (2, 3, 5), {"transposed": True}
    ),
    "stacked_matmul: every dim must be at least 1, got x (0, 3) and weights (2, 3, 5)": ((0, 3), (2, 3, 5), {}),
    "stacked_matmul: implementation must be one of mosaic, xla or None, got 'triton'": ((4, 3), (2, 3, 5), {"implementation": "triton"}),
}  # fmt: skip


@pytest.mark.parametrize("says", WRONG)
def test_wrong_arguments_of_a_product(says: str) -> None:
    x, w, how = WRONG[says]
    with pytest.raises(ValueError) as error:
        stacked_matmul(np.zeros(x, np.float32), np.zeros(w, np.float32), 0, **how)  # pyright: ignore
    assert str(error.value) == says


def test_every_fault_is_named() -> None:
    x, w, sums = (
        np.zeros((4, 3), np.float32),
        np.zeros((2, 5, 6), np.float16),
        np.zeros((2, 5, 6), np.float16),
    )
    with pytest.raises(ValueError) as error:
        stacked_matmul(x, w, np.zeros(2))  # pyright: ignore
    assert str(error.value) == (
        "stacked_matmul: x [T, K] and weights [R, K, N] must have the same K, got x (4, 3) and "
        "weights (2, 5, 6); x and weights must have one dtype of bfloat16, float16, float32, got "
        "float32 and float16; cast one to the other's; row must be one integer, got float64[2]"
    )
    with pytest.raises(ValueError) as error:
        add_weight_gradient(sums, 1.5, x, x)  # pyright: ignore
    assert str(error.value) == (
        "add_weight_gradient: sums [R, K, N], x [T, K] and dy [T, N] must have the same T, K and "
        "N, got sums (2, 5, 6), x (4, 3) and dy (4, 3); sums must be float32, got float16; row "
        "must be one integer, got float32[]"
    )
    with pytest.raises(
        ValueError, match=r"sums must be \[R, K, N\], x \[T, K\] and dy \[T, N\], got sums \(5, 6\)"
    ):
        add_weight_gradient(sums[0], 0, x, x)  # pyright: ignore


# Plans.


def test_the_sizes_are_those_that_were_priced() -> None:
    assert MATRICES == {
        "qkv": (12_288, 4608),
        "out": (1536, 12_288),
        "up": (12_288, 6144),
        "down": (6144, 12_288),
    }
    assert (LAYERS, TOKENS) == (12, 8192)


@pytest.mark.parametrize("name", MATRICES)
def test_the_sms_and_their_tensor_cores_have_work_at_gpt_175b(name: str) -> None:
    """An estimate, whose choice of tiles is that of the times measured on an H200. Without
    persistent blocks, each tile would wait for its first operands."""
    K, N = MATRICES[name]
    for form, height, width, depth in (
        ("product", TOKENS, N, K),
        ("transposed", TOKENS, K, N),
        ("add", K, N, TOKENS),
    ):
        chosen, about = (plan.plan_to_add if form == "add" else plan.plan_for)(height, width, depth)
        times = {
            row["tile"]: row["ms"] / row["cublas_ms"]
            for row in MEASURED
            if (row["matrix"], row["form"]) == (name, form)
        }
        fastest = min(times, key=lambda tile: times[tile])
        # as planned at that time
        assert f"{2 * chosen.height} x {chosen.columns}" == {"as planned": "256 x 192"}.get(
            fastest, fastest
        )
        assert chosen.blocks == SMS <= about.tiles
        assert about.occupancy >= 0.96 and about.tensor >= 0.9, about
        assert plan.estimate(chosen, height, width, depth, persistent=False).clocks > about.clocks


def test_the_estimate_of_a_step_is_that_of_its_matmuls() -> None:
    """The products of both warpgroups, and their operands, which come from the L2 cache and are
    written to shared memory once."""
    for height, columns in plan.PLANS:
        one, units = (
            clocks.wgmma(height, columns, 64),
            plan.step_clocks(Plan(columns, height=height)),
        )
        loaded = 2 * 64 * (2 * height + columns)
        assert units == {
            "tensor": 2 * one.tensor,
            "shared": 2 * one.shared + loaded / clocks.SHARED,
            "cache": pytest.approx(loaded / 48),
        }
    many, few = (plan.estimate(Plan(192, 1, 128), 256, 192, 64 * n) for n in (11, 10))
    assert many.clocks - few.clocks == 1536


def test_the_two_largest_tiles_are_bound_by_the_tensor_cores() -> None:
    """A half of 49,152 or 32,768 numbers is in the registers of each warpgroup. Smaller tiles wait
    for shared memory or the L2 cache."""
    units = {
        (height, columns): plan.step_clocks(Plan(columns, height=height))
        for height, columns in plan.PLANS
    }
    bound = {tile for tile, each in units.items() if max(each.values()) == each["tensor"]}
    assert bound == {(128, 192), (64, 256)}
    with pytest.raises(
        ValueError, match="a warpgroup has 64 rows, or 128 of up to 192 columns, not 128 of 256"
    ):
        Plan(256, height=128)


@pytest.mark.parametrize("rows", [128, 256])
@pytest.mark.parametrize(("down", "across"), [(1, 1), (5, 3), (16, 24), (37, 7), (12, 64)])
def test_every_tile_has_one_number(down: int, across: int, rows: int) -> None:
    found = jax.jit(jax.vmap(lambda n: jnp.stack(plan.place(n, down, across, rows))))(
        np.arange(down * across)
    )
    assert sorted(map(tuple, found.tolist())) == [
        (row, column) for row in range(down) for column in range(across)
    ]


def test_tiles_computed_together_read_few_rows_and_columns() -> None:
    """The first 132 of 24 x 64 tiles of 256 x 192. Row by row they would read 3 rows and all 64
    columns."""
    found = np.asarray(
        jax.jit(jax.vmap(lambda n: jnp.stack(plan.place(n, 24, 64, 256))))(np.arange(SMS))
    )
    rows, columns = (len(set(found[:, i])) for i in (0, 1))
    assert (rows, columns) == (8, 17) and 256 * rows + 192 * columns < (256 * 3 + 192 * 64) / 2.4
