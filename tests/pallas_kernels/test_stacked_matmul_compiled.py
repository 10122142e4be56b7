"""The stacked matmul compiled for an H100 at gpt_175b's shapes: no spills, products in flight, no
copy of a weight beside it."""

import math
from collections.abc import Iterator

import covering
import jax
import jax.numpy as jnp
import pytest
from gpt_175b import LAYERS, MATRICES, TOKENS

from pallas_kernels import add_weight_gradient, stacked_matmul
from pallas_kernels.attention.occupancy import SMS
from pallas_kernels.dev import machine_code
from pallas_kernels.dev.limits import faults
from pallas_kernels.dev.resources import resources
from pallas_kernels.grouped.plan import STEP, Plan
from pallas_kernels.stacked import hopper, plan
from sharding_rules.lab import hlo
from sharding_rules.lab.targets import devices

COMPILE_BUDGET = 90

HOPPER = {"implementation": "mosaic", "platform": "gpu", "capability": (9, 0)}
FORMS = "product", "transposed", "add"
KERNEL = "mosaic_gpu_v2"
ON_CI = [("up", "add"), ("down", "product"), ("out", "transposed")]
"""Of GPT-3's matrices and the three kernels."""


def of(*shape: int, dtype="bfloat16", place=None) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=place)


def call(form: str, K: int, N: int, T: int = TOKENS, *, R: int = LAYERS, place=None, **how):
    """A function of the arrays, and their shapes."""
    x, dy, row = of(T, K, place=place), of(T, N, place=place), of(dtype="int32", place=place)
    weights = of(R, K, N, place=place)
    if form == "add":
        return (
            lambda *a: add_weight_gradient(*a, **how),
            of(R, K, N, dtype="float32", place=place),
            row,
            x,
            dy,
        )
    transposed = form == "transposed"
    return (
        lambda *a: stacked_matmul(*a, transposed=transposed, **how),
        dy if transposed else x,
        weights,
        row,
    )


@pytest.mark.deviceless
@pytest.mark.parametrize(("name", "form"), covering.pairs(MATRICES, FORMS, ON_CI))
def test_gpt_175b_compiles_well(name: str, form: str, reports: str) -> None:
    """0 spills, every limit of the hardware kept, and a block of threads for each SM."""
    [kernel] = resources(*call(form, *MATRICES[name], **HOPPER), cache=reports)
    assert not faults(kernel, sms=SMS), kernel
    assert (kernel.spill_stores, kernel.spill_loads, kernel.stack) == (0, 0, 0)
    assert kernel.wgmma and kernel.tma_loads and kernel.tma_stores
    assert kernel.registers == 168 and kernel.set_registers == (("dec", 24), ("inc", 240))


def single(
    form: str,
    tile: tuple[int, int],
    T: int = TOKENS,
    K: int = 1024,
    N: int = 2048,
    *,
    rounded: bool = False,
):
    """A kernel with any plan as a function, and the shapes of its arguments."""
    x, dy, weights, sums, row = (
        of(T, K),
        of(T, N),
        of(LAYERS, K, N),
        of(LAYERS, K, N, dtype="float32"),
        of(dtype="int32"),
    )
    if form == "add":
        return (
            lambda *a: hopper.add(plan.AddingPlan(tile[1], height=tile[0]), *a, rounded=rounded),
            sums,
            row,
            x,
            dy,
        )
    transposed = form == "transposed"
    return (
        lambda *a: hopper.product(Plan(tile[1], height=tile[0]), *a, transpose=transposed),
        dy if transposed else x,
        weights,
        row,
    )


@pytest.mark.deviceless
def test_a_rounded_sum_costs_no_spills(reports: str) -> None:
    [kernel] = resources(*single("add", (128, 192), rounded=True), cache=reports)
    assert not faults(kernel, sms=SMS), kernel


@pytest.mark.deviceless
@pytest.mark.parametrize(
    ("form", "tile"),
    covering.pairs(FORMS, plan.PLANS, [("product", (64, 256)), ("add", (128, 192))]),
)
def test_every_plan_compiles_well(form: str, tile: tuple[int, int], reports: str) -> None:
    """The second shape has edges that no tile divides, and the last is smaller than a tile."""
    for sizes in ({}, {"T": 1000, "K": 1088, "N": 2112}, {"T": 64, "K": 64, "N": 64}):
        [kernel] = resources(*single(form, tile, **sizes), cache=reports)
        assert not faults(kernel), kernel


@pytest.mark.deviceless
@pytest.mark.parametrize("form", covering.some(FORMS, ["product", "add"]))
def test_the_machine_code_keeps_a_product_in_flight(form: str) -> None:
    try:
        machine_code.tool("nvdisasm")
    except FileNotFoundError as error:
        pytest.skip(str(error))
    [code] = machine_code.machine_code(*single(form, (128, 192)))
    assert code.local_memory == 0
    [steps] = [loop for loop in code.loops if loop.waits == (1,)]
    assert steps.count(machine_code.MATMUL) == 2 * STEP // 16, steps.summary()


# Bytes.


def program(form: str, K: int, N: int, **how) -> tuple[hlo.Module, int]:
    """One call compiled for an H100, the stack donated where it is added to: the program, and the
    bytes of its temporary arrays."""
    place = jax.sharding.SingleDeviceSharding(devices("h100", 1)[0])
    function, *shapes = call(form, K, N, place=place, **how)
    compiled = (
        jax.jit(function, donate_argnums=(0,) if form == "add" else ()).lower(*shapes).compile()
    )
    memory = compiled.memory_analysis()
    assert memory is not None
    return hlo.parse(compiled.as_text() or ""), memory.temp_size_in_bytes


def lines(module: hlo.Module) -> Iterator[hlo.Instruction]:
    """Yields the kernels of a program: what is neither an argument nor free."""
    for visit in module.visits():
        if not visit.fused:
            for one in module.computations[visit.computation]:
                if one.opcode not in (
                    "parameter",
                    "bitcast",
                    "constant",
                    "tuple",
                    "get-tuple-element",
                    "while",
                ):
                    yield one


def moved(module: hlo.Module) -> dict[str, int]:
    """The bytes of device memory that each kernel of a program reads and writes, of a stack one
    matrix.

    A kernel of ours says it itself. The stack is an operand from which a fusion reads one row, or
    the result of which it writes one.
    """

    def of_one(array: hlo.Array) -> int:
        return array.bytes // (LAYERS if array.dims[:1] == (LAYERS,) else 1)

    found = {}
    for one in lines(module):
        if one.opcode == "custom-call":
            found[one.name] = int(one.attributes["kernel_bytes"])
        else:
            arrays = [
                array for name in one.operands for array in module.by_name[name].arrays
            ] + list(one.arrays)
            found[one.name] = sum(of_one(array) for array in arrays)
    return found


@pytest.mark.deviceless
@pytest.mark.parametrize("name", MATRICES)
def test_an_addition_moves_a_weight_less_in_memory(name: str) -> None:
    """XLA reads x and dy, writes the gradient in bf16, reads it, and reads and writes the sums;
    ours reads x and dy, and does the last."""
    K, N = MATRICES[name]
    factors, weight, row = 2 * TOKENS * (K + N), K * N, 4
    module, temporary = program("add", K, N, **HOPPER)
    assert list(moved(module).values()) == [factors + 8 * weight + row] and temporary == 0
    [kernel] = lines(module)
    assert kernel.target == KERNEL, "something beside the kernel"
    module, temporary = program("add", K, N, implementation="xla", rounded=True)
    by_xla = list(moved(module).values())
    assert (
        by_xla == [factors + 2 * weight, 2 * weight + 8 * weight + row] and temporary == 2 * weight
    )
    assert sum(by_xla) - (factors + 8 * weight + row) == 4 * weight


@pytest.mark.deviceless
@pytest.mark.parametrize("form", ["product", "transposed"])
def test_a_product_copies_no_weight_out_of_its_stack(form: str) -> None:
    K, N = MATRICES["up"]
    factors, weight, row = 2 * TOKENS * (K + N), K * N, 4
    module, temporary = program(form, K, N, **HOPPER)
    assert list(moved(module).values()) == [factors + 2 * weight + row] and temporary == 0
    [kernel] = lines(module)
    assert kernel.target == KERNEL, "something beside the kernel"
    module, temporary = program(form, K, N, implementation="xla")
    # read, written, and read again
    assert sum(moved(module).values()) == factors + 6 * weight + row and temporary == 2 * weight


@pytest.mark.deviceless
def test_a_loop_over_rows_carries_the_sums_in_place() -> None:
    """Forward and backward of a layer's matmul in each row, as in an engine: three kernels and
    nothing of a weight's size."""
    K, N = MATRICES["out"]
    place = jax.sharding.SingleDeviceSharding(devices("h100", 1)[0])

    def layers(sums, weights, x):
        def one(row, carry):
            sums, x = carry
            y = stacked_matmul(x, weights, row, **HOPPER)
            x = stacked_matmul(y, weights, row, transposed=True, **HOPPER)
            return add_weight_gradient(sums, row, x, y, **HOPPER), x

        return jax.lax.fori_loop(0, LAYERS, one, (sums, x))

    shapes = (
        of(LAYERS, K, N, dtype="float32", place=place),
        of(LAYERS, K, N, place=place),
        of(TOKENS, K, place=place),
    )
    compiled = jax.jit(layers, donate_argnums=(0, 2)).lower(*shapes).compile()
    found = list(lines(hlo.parse(compiled.as_text() or "")))
    assert sum(one.opcode == "custom-call" for one in found) == 3
    large = [
        one
        for one in found
        if one.opcode != "custom-call" and max(math.prod(a.dims) for a in one.arrays) >= K * N
    ]
    assert not large, [f"{one.name} {one.arrays}" for one in large]
