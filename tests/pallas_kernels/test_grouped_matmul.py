"""Grouped matmul against a loop over groups, forward and gradients: both loops of xla on the CPU,
the Hopper kernels in the interpreter."""

import functools
import re

import covering
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import Unsupported, grouped_matmul
from pallas_kernels.attention.occupancy import SMS
from pallas_kernels.dev import machine_code
from pallas_kernels.dev.interpreter import interpreted
from pallas_kernels.dev.limits import faults
from pallas_kernels.dev.resources import resources
from pallas_kernels.grouped import blocks, hopper, plan
from pallas_kernels.grouped_matmul import choose_grouped_matmul, describe_grouped_matmul
from sharding_rules.lab.targets import devices

COMPILE_BUDGET = 60

HOPPER = {"implementation": "mosaic", "platform": "gpu", "capability": (9, 0)}
OLD_GPU = {"platform": "gpu", "capability": (8, 0)}
SIZES = {
    "ragged, empty ones, some tokens of none": [70, 0, 101, 1, 0, 20],
    "ends on blocks": [64, 0, 128, 0],
    "one group has all": [0, 200, 0],
    "no token has a group": [0, 0],
    "one group": [200],
    "a small one before a large one": [20, 180],
}
T = 200


def case(sizes: list[int], D: int, F: int, dtype, spare: float = 0.0, T: int = T):
    random = np.random.default_rng(0)
    x, w, dy = (
        random.standard_normal(shape).astype(dtype)
        for shape in ((T, D), (len(sizes), D, F), (T, F))
    )
    x[sum(sizes) :] += spare
    return x, w, dy, np.array(sizes, np.int32)


def by_loop(x, w, dy, sizes):
    """y, dx and dw in fp64."""
    x, w, dy = (a.astype(np.float64) for a in (x, w, dy))
    y, dx, dw = np.zeros_like(dy), np.zeros_like(x), np.zeros_like(w)
    ends = np.cumsum(sizes)
    for group, (start, end) in enumerate(zip(ends - sizes, ends, strict=True)):
        rows = slice(start, end)
        y[rows], dx[rows], dw[group] = (
            x[rows] @ w[group],
            dy[rows] @ w[group].T,
            x[rows].T @ dy[rows],
        )
    return y, dx, dw


@functools.partial(jax.jit, static_argnums=4)
def ours(x, w, dy, sizes, features):
    y, back = jax.vjp(lambda x, w: grouped_matmul(x, w, sizes, **dict(features)), x, w)
    return y, *back(dy)


def check(arguments, tolerance: float, **features) -> None:
    for name, found, wanted in zip(
        ("y", "dx", "dw"),
        ours(*arguments, tuple(features.items())),
        by_loop(*arguments),
        strict=True,
    ):
        assert found.dtype == arguments[0].dtype
        assert np.abs(np.asarray(found, np.float64) - wanted).max() <= tolerance * max(
            np.abs(wanted).max(), 1
        ), name


@pytest.mark.parametrize("times", [1, 7], ids=["one block", "three blocks"])
@pytest.mark.parametrize("name", SIZES)
def test_xla(name: str, times: int) -> None:
    """The loop of GPUs, and that of CPUs, whose blocks are shorter."""
    arguments = case([times * n for n in SIZES[name]], 48, 24, np.float32, 1e3, times * T)
    for place in (OLD_GPU, {"platform": "cpu"}):
        check(arguments, 1e-5, implementation="xla", **place)


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
@pytest.mark.parametrize("place", [{"platform": "cpu"}, OLD_GPU], ids=["cpu", "gpu"])
def test_what_is_in_unused_rows_is_in_no_result(place: dict, dtype) -> None:
    """A buffer has what was in it before, in the tokens and in their gradients."""
    sizes = SIZES["ragged, empty ones, some tokens of none"]
    x, w, dy, sizes_E = case(sizes, 48, 24, dtype)
    poisoned = [a.copy() for a in (x, dy)]
    for a in poisoned:
        a[sum(sizes) :] = np.nan
    features = tuple(({"implementation": "xla"} | place).items())
    found = ours(poisoned[0], w, poisoned[1], sizes_E, features)
    clean = ours(x, w, dy, sizes_E, features)
    for result, expected in zip(found, clean, strict=True):
        assert (np.asarray(result) == np.asarray(expected)).all()
    y, dx, _ = found
    assert not np.asarray(y)[sum(sizes) :].any() and not np.asarray(dx)[sum(sizes) :].any()


@pytest.mark.parametrize("T", [100, 129])
def test_blocks_are_as_many_as_the_worst_sizes_need(T: int) -> None:
    random = np.random.default_rng(T)
    for sizes in ([T], [0, T], [1] * min(T, 9), random.multinomial(T, [0.2, 0, 0.5, 0.3])):
        found, C = jax.jit(blocks._blocks, static_argnums=1)(np.array(sizes, np.int32), T)
        covered = np.zeros(T, int)
        group_of = np.repeat(np.arange(len(sizes)), sizes)
        for group, row, stop in zip(*map(np.asarray, found), strict=True):
            assert stop <= row + C
            covered[row : max(row, stop)] += 1
            assert set(group_of[row : max(row, stop)]) <= {group}
        assert (covered[: sum(sizes)] == 1).all() and not covered[sum(sizes) :].any()


@pytest.mark.parametrize("name", SIZES)
def test_mosaic(name: str) -> None:
    """Widths that no tile divides, and tiles of different widths, in the forward and the backward
    pass."""
    with interpreted():
        check(case(SIZES[name], 320, 64, jnp.bfloat16, spare=1e3), 0.01, **HOPPER)


def test_mosaic_reuses_its_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """More steps than buffers, and more tiles than blocks of threads, forward and backward."""
    monkeypatch.setattr(plan, "SMS", 2)
    monkeypatch.setattr(plan, "STAGES", 2)
    with interpreted(seed=1):
        check(case([191, 0, 385], 384, 64, np.float16, T=600), 2e-3, **HOPPER)


def shapes(T: int = 4096, D: int = 1024, F: int = 2048, E: int = 8, dtype="bfloat16", place=None):
    structs = ((T, D), dtype), ((E, D, F), dtype), ((E,), "int32")
    return [
        jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=place) for shape, dtype in structs
    ]


REFUSED = {
    "the platform is cpu": {},
    "this GPU has 8.0": {"platform": "gpu", "capability": (8, 0)},
    "this GPU has 10.0": {"platform": "gpu", "capability": (10, 0)},
    "not float32": {"dtype": "float32"},
    "multiples of 64, not 96 and 2048": {"D": 96},
    "multiples of 64, not 1024 and 32": {"F": 32},
    "a multiple of 8 from 64 on, not 56": {"T": 56},
    "a multiple of 8 from 64 on, not 1001": {"T": 1001},
}


@pytest.mark.parametrize("reason", REFUSED)
def test_refusals(reason: str) -> None:
    words = dict(REFUSED[reason])
    place = (
        {"platform": "cpu"}
        if not words
        else {"platform": "gpu", "capability": words.pop("capability", (9, 0))}
    )
    words.pop("platform", None)
    arrays = shapes(**words)
    choice = choose_grouped_matmul(describe_grouped_matmul(*arrays, **place))
    assert (
        choice.name == "xla"
        and reason in choice.rejected["mosaic"]
        and ";" not in choice.rejected["mosaic"]
    )
    with pytest.raises(Unsupported, match=reason):
        jax.eval_shape(lambda *a: grouped_matmul(*a, implementation="mosaic", **place), *arrays)


def test_choice() -> None:
    choice = choose_grouped_matmul(
        describe_grouped_matmul(*shapes(), platform="gpu", capability=(9, 0))
    )
    assert choice.name == "mosaic" and list(choice.rejected) == ["xla"]
    assert (
        "platform is cpu"
        in choose_grouped_matmul(describe_grouped_matmul(*shapes())).rejected["mosaic"]
    )


def test_every_fault_is_named() -> None:
    x, w, sizes = np.zeros((4, 3), np.float32), np.zeros((2, 5, 6), np.float16), np.zeros(3)
    with pytest.raises(
        ValueError,
        match=(
            r"the same D, .*one dtype .*cast the weights.*group_sizes must be integers, got "
            r"float64"
        ),
    ):
        grouped_matmul(x, w, sizes)  # pyright: ignore
    with pytest.raises(ValueError, match=r"x must be \[T, D\]"):
        grouped_matmul(x[0], w, sizes)  # pyright: ignore
    with pytest.raises(
        ValueError, match="implementation must be one of mosaic, xla or None, got 'triton'"
    ):
        grouped_matmul(
            x, np.zeros((2, 3, 6), np.float32), np.zeros(2, int), implementation="triton"
        )  # pyright: ignore


def gradients(**features):
    def loss(x, w, sizes):
        return grouped_matmul(x, w, sizes, **features).astype(jnp.float32).sum()

    return jax.grad(loss, (0, 1))


def costs(**features) -> dict[str, list[tuple[int, int]]]:
    """(FLOPs, bytes) that the calls of each kernel report, forward and backward."""

    def both(x, w, sizes):
        y, back = jax.vjp(lambda x, w: grouped_matmul(x, w, sizes, **HOPPER, **features), x, w)
        return back(y)

    program = jax.jit(both).trace(*shapes(F=3072)).lower(lowering_platforms=("cuda",))
    attributes = r'kernel = "(\w+)", kernel_bytes = "(\d+)", kernel_flops = "(\d+)"'
    found: dict[str, list[tuple[int, int]]] = {}
    for kernel, moved, flops in re.findall(attributes, program.as_text()):
        found.setdefault(kernel, []).append((int(flops), int(moved)))
    return found


def test_the_cost_is_that_of_the_rows_that_are_expected() -> None:
    """Of the result, and of both gradients: what nobody fills is neither multiplied nor moved."""
    T, D, F, E = 4096, 1024, 3072, 8
    full = costs()
    assert {kernel: len(calls) for kernel, calls in full.items()} == {
        "grouped_matmul": 2,
        "grouped_matmul_weights": 1,
    }
    assert full == costs(expected_rows=2 * T)
    rows = 3277
    found = costs(expected_rows=rows)
    for kernel, calls in full.items():
        for (flops, moved), (all_flops, all_moved) in zip(found[kernel], calls, strict=True):
            assert (all_flops, flops) == (2 * T * D * F, 2 * rows * D * F)
            assert all_moved - moved == 2 * (T - rows) * (D + F)
            # The table of tiles is small.
            assert 0 <= moved - 2 * (rows * (D + F) + E * D * F) < 2**14


@pytest.mark.parametrize("implementation", ["mosaic", "xla"])
def test_an_expectation_changes_no_number(implementation: str) -> None:
    arguments = case(SIZES["a small one before a large one"], 64, 64, jnp.bfloat16)
    place = HOPPER | {"implementation": implementation}
    with interpreted():
        without = ours(*arguments, tuple(place.items()))
        found = ours(*arguments, tuple((place | {"expected_rows": 20}).items()))
    for one, other in zip(found, without, strict=True):
        assert (np.asarray(one) == np.asarray(other)).all()


def test_fewer_than_no_rows_are_a_fault() -> None:
    with pytest.raises(ValueError, match="expected_rows must be None or at least 0, got -1"):
        jax.eval_shape(lambda *a: grouped_matmul(*a, expected_rows=-1), *shapes())


@pytest.mark.deviceless
@pytest.mark.parametrize("implementation", ["mosaic", "xla"])
def test_memory_does_not_grow_with_groups(implementation: str) -> None:
    """Needs at most the tokens' gradient, and one matrix in fp32 with its product. lax.ragged_dot
    needs a copy per group."""
    place, temporaries = jax.sharding.SingleDeviceSharding(devices("h100", 1)[0]), {}
    for E in (8, 32):
        compiled = (
            jax.jit(gradients(**HOPPER | {"implementation": implementation}))
            .lower(*shapes(E=E, place=place))
            .compile()
        )
        memory = compiled.memory_analysis()
        assert memory is not None
        temporaries[E] = memory.temp_size_in_bytes
    token_gradients, matrices = 2 * 4096 * 2048, 2 * 4 * 1024 * 2048
    assert abs(temporaries[32] - temporaries[8]) < 2**20, temporaries
    assert temporaries[32] < token_gradients + matrices + 2**20, temporaries


@pytest.mark.deviceless
@pytest.mark.parametrize(("D", "F", "E"), [(2048, 1024, 64), (1408, 192, 8)])
def test_kernels_compile_well(D: int, F: int, E: int, reports: str) -> None:
    """The second shape has widths that not every tile divides."""

    def both(x, w, sizes):
        y, back = jax.vjp(lambda x, w: grouped_matmul(x, w, sizes, **HOPPER), x, w)
        return back(y)

    found = resources(both, *shapes(T=8192, D=D, F=F, E=E), cache=reports)
    assert len(found) == 3
    for kernel in found:
        assert not faults(kernel, sms=SMS), kernel
        assert kernel.wgmma and kernel.tma_loads and kernel.tma_stores
        assert kernel.set_registers == (("dec", 24), ("inc", 240))


@pytest.mark.deviceless
@pytest.mark.parametrize(
    ("name", "columns"), covering.pairs(["rows", "transposed", "weights"], [64, 128, 256, 192])
)
def test_every_plan_compiles_well(name: str, columns: int, reports: str) -> None:
    x, w, sizes = shapes(T=8192)
    [kernel] = resources(*single(name, columns, x, w, sizes), cache=reports)
    assert not faults(kernel, sms=SMS), kernel


def single(name: str, columns: int, x, w, sizes):
    """One kernel as a function, and the shapes of its arguments."""
    dy = jax.ShapeDtypeStruct((x.shape[0], w.shape[2]), x.dtype)
    if name == "weights":
        return lambda *a: hopper.weights(plan.Plan(columns), *a), x, dy, sizes
    transposed = name == "transposed"
    return (
        lambda *a: hopper.rows(plan.Plan(columns), *a, transpose=transposed),
        dy if transposed else x,
        w,
        sizes,
    )


@pytest.mark.deviceless
@pytest.mark.parametrize("name", ["rows", "transposed", "weights"])
def test_the_machine_code_keeps_a_product_in_flight(name: str) -> None:
    try:
        machine_code.tool("nvdisasm")
    except FileNotFoundError as error:
        pytest.skip(str(error))
    [code] = machine_code.machine_code(*single(name, 256, *shapes(T=8192)))
    assert code.local_memory == 0
    *tiles, steps = code.loops  # the first step of a product of rows is in the outer loop
    # the end of a tile
    assert [loop.waits for loop in tiles] == ([] if name == "weights" else [(1, 0)]), code.loops
    assert steps.waits == (1,) and steps.count(machine_code.MATMUL) == plan.STEP // 16, (
        steps.summary()
    )


@pytest.mark.parametrize(
    ("T", "D", "F", "E"),
    [
        (8192, 2048, 1024, 64),
        (8192, 2048, 768, 64),
        (8192, 4096, 1408, 64),
        (65536, 2048, 768, 128),
    ],
)
def test_balanced_groups_keep_the_sms_busy(T: int, D: int, F: int, E: int) -> None:
    sizes = plan.balanced(T, E)
    assert sum(sizes) == T and len(sizes) == E
    for kernel in (
        plan.plan_rows(sizes, F),
        plan.plan_rows(sizes, D),
        plan.plan_weights(sizes, D, F),
    ):
        assert kernel[1].efficiency >= 0.9, kernel


@pytest.mark.parametrize("name", SIZES)
def test_the_table_covers_each_row_of_its_group(name: str) -> None:
    table, [n] = jax.jit(plan.row_table, static_argnums=(1, 2))(np.array(SIZES[name]), T, 5)
    group_of = np.repeat([*range(len(SIZES[name])), -1], [*SIZES[name], T - sum(SIZES[name])])
    covered = np.zeros(T, int)
    for group, steps, first, begin, end in np.asarray(table)[:n]:
        assert first % plan.ALIGNED == 0 and first <= begin < end <= first + 128
        covered[begin:end] += 1
        owner = set(group_of[begin:end])
        assert owner <= ({group} if steps else {-1}), "rows of another group"
    assert covered.min() == covered.max() == 1 and n <= len(table)
    sizes = [*SIZES[name], T - sum(SIZES[name])]
    before = [begin % plan.ALIGNED for begin in np.cumsum([0, *sizes[:-1]])]
    assert n == sum(
        -(-(size + more) // 128) for size, more in zip(sizes, before, strict=True) if size
    ), "a tile more than the rows need"
