"""The fused backward pass compiled for an H100: five matmuls, no spills in any feature, and
products in flight behind the arithmetic."""

import dataclasses
import math
import re

import covering
import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.attention import tuning
from pallas_kernels.attention.hopper.backward_fused import backward_fused
from pallas_kernels.attention.hopper.fused_tiles import FusedTiles
from pallas_kernels.attention.hopper.spec import Spec
from pallas_kernels.dev import machine_code
from pallas_kernels.dev.resources import resources, write_ptx
from sharding_rules.lab.targets import devices

COMPILE_BUDGET = 150

TILES = {row.head_dims: row.tiling.fused for row in tuning.entries() if row.device is None}
DRAINED = "C7512", "C7513", "C7517"
"""Notes of ptxas: wgmmas are serialised, their registers are defined by other instructions, waits
are added."""
S, SHORT = 8192, 1024


def call(
    tiles: FusedTiles, H: int, V: int, *, S: int = S, N: int = 8, K: int = 8, B: int = 2, **features
):
    """The backward pass as a function, and the shapes of its arguments. With S = 8192, a block of
    threads serves a group of heads."""
    traced, lists = features.pop("traced", False), features.pop("lists", False)
    T = features.pop("T", S)
    spec = Spec(S, T, 1 / math.sqrt(H), **features, **({"q_offset": None} if traced else {}))
    padded = -(-T // 128) * 128

    def array(*shape: int, dtype="bfloat16") -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))

    def ints(*shape: int) -> jax.ShapeDtypeStruct:
        return array(*shape, dtype="int32")

    sides = {}
    if traced:
        sides["offset"] = ints(1)
    if spec.segments:
        sides |= {"q_ids": ints(B, S), "k_ids": ints(B, padded)}
    if lists:
        sides |= {
            "counts": ints(N, padded // 128, 2),
            "blocks": ints(N, padded // 128, S // tiles.block),
        }
    elif spec.tabled:
        sides["table"] = ints(B, padded // 128, 4)
    vectors = [array(B, N, S, dtype="float32")] * 2
    arrays = [
        array(B, S, N, H),
        array(B, padded, K, H),
        array(B, padded, K, V),
        array(B, S, N, V),
        *vectors,
    ]

    def run(sides, *arrays):
        return list(backward_fused(spec, tiles.fitting(spec), *arrays, sides).values())

    return run, sides, *arrays


def assert_clean(kernel) -> None:
    assert (kernel.spill_stores, kernel.spill_loads) == (0, 0), kernel
    assert not [
        line
        for line in kernel.warnings
        if any(note in line for note in DRAINED) or "serialized" in line
    ], kernel


@pytest.mark.deviceless
@pytest.mark.parametrize("head_dims", covering.some(TILES, [(128, 128), (256, 256)]))
def test_the_loop_has_the_products_of_five_matmuls(head_dims: tuple[int, int], tmp_path) -> None:
    """S, dP, dV, dK, dQ, and nothing twice. Wide heads leave dV, and S for it, to another kernel:
    six matmuls."""
    (H, V), tiles = head_dims, TILES[head_dims]
    [path] = write_ptx(str(tmp_path), *call(tiles, H, V))
    columns = [
        int(n)
        for n in re.findall(
            r"\bwgmma\.mma_async\.sync\.aligned\.m64n(\d+)k16\.", path.read_text(encoding="utf-8")
        )
    ]
    width = 3 * H + 2 * V if H + V <= 256 else 3 * H + V
    # of a warpgroup: 64 keys, a block of queries
    assert 64 * 16 * sum(columns) == 64 * tiles.block * width


@pytest.mark.deviceless
@pytest.mark.parametrize("head_dims", covering.some(TILES, [(128, 128), (256, 256)]))
def test_the_machine_code_keeps_products_in_flight(head_dims: tuple[int, int]) -> None:
    (H, V), tiles = head_dims, TILES[head_dims]
    try:
        machine_code.tool("nvdisasm")
    except FileNotFoundError as error:
        pytest.skip(str(error))
    [code] = machine_code.machine_code(*call(tiles, H, V))
    [loop] = [loop for loop in code.loops if loop.count(machine_code.MATMUL)]
    assert code.local_memory == 0
    assert (
        loop.count(machine_code.MATMUL)
        == sum((H, V, tiles.block * (1 + (H + V <= 256)), 128)) // 16
    )
    assert loop.count(machine_code.EXP2) == tiles.block // 2  # of 64 keys, in 128 threads
    # of dP, at least; without dV, ptxas moves some of the exponentials behind it
    flying = loop.in_flight(machine_code.EXP2)
    assert sum(n >= 1 for n in flying) >= len(flying) * (1 if H + V <= 256 else 0.5), loop.summary()
    # Without dV, nothing is behind dP. With one slot for queries, dK must end with its step.
    assert loop.waits.count(0) == (H + V > 256) + (tiles.stages == 1), loop.summary()


@pytest.mark.deviceless
@pytest.mark.parametrize(("K", "sums"), [(8, 1), (1, 3)])
def test_xla_fills_the_sums_with_zeros_and_converts_them_in_one_pass(K: int, sums: int) -> None:
    """No copy of an fp32 sum: dq, and with a block of threads for each query head dk and dv,
    too."""
    place = jax.sharding.SingleDeviceSharding(devices("h100", 1)[0])
    run, sides, *shapes = call(TILES[128, 128], 128, 128, B=1, N=8, K=K)
    placed = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place) for x in shapes]
    text = jax.jit(lambda *arrays: run(sides, *arrays)).lower(*placed).compile().as_text()
    entry = text[text.index("\nENTRY") :]
    assert len(re.findall(r"custom-call\(.*mosaic_gpu", entry)) == 1 and " copy(" not in entry
    assert len(re.findall(r"= bf16\[\S+ fusion\(%mpmd_map", entry)) == sums


FEATURES = {
    "causal": {},
    "full": {"causal": False},
    "full, keys with padding": {"causal": False, "T": SHORT - 100},
    "window": {"window": 300},
    "traced offset, window": {"traced": True, "window": 300},
    "documents": {"segments": True},
    "documents, window": {"segments": True, "window": 300},
    "soft cap": {"softcap": 30.0},
    "everything": {"segments": True, "window": 300, "softcap": 30.0, "traced": True},
    "sparse, documents, window": {"lists": True, "segments": True, "window": 300},
}
ON_CI = [
    ((128, 128), "everything"),
    ((64, 64), "causal"),
    ((256, 256), "sparse, documents, window"),
]
"""The features that need most registers, the widest heads, and what most models are."""


@pytest.mark.deviceless
@pytest.mark.parametrize(("add", "name"), covering.pairs(["red", "tma"], ["causal", "full"]))
def test_heads_of_128_spill_nothing(name: str, add, reports: str) -> None:
    tiles = dataclasses.replace(TILES[128, 128], stages=2, add=add)
    [kernel] = resources(*call(tiles, 128, 128, **FEATURES[name]), cache=reports)
    assert_clean(kernel)
    assert kernel.set_registers == (("dec", 24), ("inc", 240))


@pytest.mark.deviceless
@pytest.mark.parametrize(("head_dims", "name"), covering.pairs(TILES, FEATURES, ON_CI))
def test_no_feature_spills(head_dims: tuple[int, int], name: str, reports: str) -> None:
    # a block of threads for each query head, and for each group
    for walk in ({"N": 4, "K": 2, "S": SHORT}, {"N": 16, "K": 8}):
        features = dict(FEATURES[name])
        if "T" in features and "S" not in walk:
            features["T"] = S - 100
        if features.get("lists") and "S" not in walk:
            # heads of one group have lists of different lengths, and blocks of their own
            walk = {"N": 8, "K": 8}
        [kernel] = resources(*call(TILES[head_dims], *head_dims, **walk, **features), cache=reports)
        assert_clean(kernel)
