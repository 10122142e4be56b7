"""The forward pass alone: its variants against the formula in the interpreter, and the overlap of
its machine code."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_formula import assert_close, normal

from pallas_kernels import describe_attention, reference_attention
from pallas_kernels.attention import tuning
from pallas_kernels.attention.hopper import ForwardTiles, Tiles, Tiling, attention
from pallas_kernels.attention.hopper import forward as forward_module
from pallas_kernels.attention.hopper.forward import Overlapped
from pallas_kernels.dev import machine_code
from pallas_kernels.dev.autotune import EVERYTHING, Candidate, call
from pallas_kernels.dev.interpreter import KernelError, interpreted

COMPILE_BUDGET = 90

VARIANTS = {
    "named barriers": ForwardTiles(64, 2, named_barriers=True),
    "three warpgroups": ForwardTiles(64, 2, warpgroups=3),
    "128 rows": ForwardTiles(64, 2, height=128),
    "alternating, wide": ForwardTiles(256, 2, overlapped=False),
}
SLOW = {
    "no automatic barriers": ForwardTiles(64, 2, automatic_barriers=False),
    "three warpgroups, named barriers, 4 slots": ForwardTiles(128, 4, warpgroups=3, named_barriers=True),
    "alternating": ForwardTiles(64, 3, overlapped=False),
    "wide": ForwardTiles(192, 2),
}  # fmt: skip
PACKED = {
    "segment_ids": np.sort(np.random.default_rng(1).integers(0, 4, (1, 450))),
    "window": 120,
    "softcap": 5.0,
}


def check(tiles: ForwardTiles, S: int, seed: int | None = None, **features: Any) -> None:
    """Compares with the formula, with two query heads for each kv head."""
    q = normal(1, S, 2, 64, seed=0).astype(jnp.bfloat16)
    k = normal(1, S, 1, 64, seed=3).astype(jnp.bfloat16)
    v = normal(1, S, 1, 64, seed=1).astype(jnp.bfloat16)
    problem = describe_attention(
        q, k, v, return_lse=True, platform="gpu", capability=(9, 0), **features
    )
    tiling = Tiling(tiles, Tiles(64, 2), Tiles(64, 2))
    sides = {}
    if "segment_ids" in features:
        ids = features["segment_ids"]
        sides = {"segment_ids": ids, "kv_segment_ids": ids}
    with interpreted(seed):
        kernel = jax.jit(lambda q, k, v: attention(q, k, v, problem, tiling, **sides))
        results = jax.block_until_ready(kernel(q, k, v))
    formula = jax.jit(functools.partial(reference_attention, **features))
    expected = formula(*(np.asarray(x, np.float32) for x in (q, k, v)))
    assert_close(results, expected, 0.01)
    assert_close(results[1], expected[1], 1e-5)


@pytest.mark.parametrize("name", VARIANTS)
def test_variants_equal_the_formula(name: str) -> None:
    check(VARIANTS[name], 450)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [None, 1])
@pytest.mark.parametrize("name", [*VARIANTS, *SLOW])
def test_variants_equal_the_formula_with_features_and_in_any_order(
    name: str, seed: int | None
) -> None:
    tiles = (VARIANTS | SLOW)[name]
    check(tiles, 450, seed, **PACKED)
    check(tiles, 450, seed, causal=False)


def compiled(tiles: ForwardTiles, H: int, V: int, **features: Any) -> machine_code.Loop:
    """The loop over blocks of keys in the machine code of the forward pass alone."""
    try:
        machine_code.tool("nvdisasm")
    except FileNotFoundError as error:
        pytest.skip(str(error))
    candidate = Candidate("forward", (H, V), tiles)
    kernel, arguments = call(candidate, **features)
    [code] = machine_code.machine_code(kernel, *arguments)
    assert code.local_memory == 0
    [loop] = code.loops
    return loop


def assert_overlapped(loop: machine_code.Loop, tiles: ForwardTiles, H: int) -> None:
    """The loop waits for QK with PV in flight, computes every exponential meanwhile, and then waits
    for PV alone."""
    assert loop.count("HGMMA") == tiles.height // 64 * (H + tiles.block) // 16
    assert loop.waits == (1, 0)
    # One for each logit, one for each of the rows that a thread has.
    n_exponentials = tiles.height // 64 * (tiles.block // 2 + 2)
    assert loop.in_flight("MUFU.EX2") == (1,) * n_exponentials
    assert loop.count("LDL", "STL") == 0
    assert loop.count("BAR") == (2 if tiles.named_barriers else 0)


@pytest.mark.deviceless
def test_the_softmax_overlaps_with_the_matmul_in_the_machine_code() -> None:
    tiles = next(row.tiling.forward for row in tuning.entries() if row.head_dims == (128, 128))
    assert_overlapped(compiled(tiles, 128, 128), tiles, 128)


@pytest.mark.deviceless
def test_without_the_overlap_nothing_is_in_flight_during_the_softmax() -> None:
    """What the test above would see if ptxas undid it: this schedule waits for each product before
    it goes on."""
    tiles = ForwardTiles(128, 2, overlapped=False)
    loop = compiled(tiles, 128, 128, causal=False)
    assert loop.waits == (0, 0) and set(loop.in_flight("MUFU.EX2")) == {0}
    with pytest.raises(AssertionError):
        assert_overlapped(loop, tiles, 128)


def served() -> list[Any]:
    """The overlapped entries of the table with what each must serve: an entry marked plain serves
    no features, and its own mask."""
    features = {"causal": {}, "full": {"causal": False}, "everything": EVERYTHING}
    causal = {"causal": (None, True), "full": (None, False), "everything": ()}
    rows = [
        (number, row)
        for number, row in enumerate(tuning.entries())
        if row.tiling.forward.overlapped
    ]
    cases = [
        (number, name)
        for number, row in rows
        for name in features
        if not row.plain or row.causal in causal[name]
    ]
    hardest = dict(cases)  # everything, or the one mask of a plain entry
    on_ci = {
        (number, hardest[number]) for number, row in rows if row.head_dims in ((128, 128), (64, 64))
    }
    marks = {case: pytest.mark.slow if case in on_ci else pytest.mark.exhaustive for case in cases}
    return [
        pytest.param(number, features[name], marks=marks[number, name], id=f"{number}-{name}")
        for number, name in cases
    ]


@pytest.mark.deviceless
@pytest.mark.parametrize(("number", "features"), served())
def test_every_entry_of_the_table_overlaps(number: int, features: dict[str, Any]) -> None:
    row = tuning.entries()[number]
    tiles = row.tiling.forward
    loop = compiled(tiles, *row.head_dims, **features)
    assert_overlapped(loop, tiles, row.head_dims[0])
    assert set(loop.in_flight("MUFU.TANH")) == ({1} if "softcap" in features else set())


@pytest.mark.slow
@pytest.mark.deviceless
def test_named_barriers_replace_those_in_shared_memory() -> None:
    tiles = ForwardTiles(128, 2, named_barriers=True, automatic_barriers=False)
    assert_overlapped(compiled(tiles, 128, 128, causal=False), tiles, 128)


class Impatient(Overlapped):
    """Lets the other warpgroup issue twice."""

    def pass_turn(self, wg: Any) -> None:
        super().pass_turn(wg)
        super().pass_turn(wg)


def test_a_named_barrier_that_is_reached_twice_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forward_module, "Overlapped", Impatient)
    with pytest.raises(KernelError, match=r"arrives twice at named barrier 8"):
        check(ForwardTiles(64, 2, named_barriers=True), 256)
