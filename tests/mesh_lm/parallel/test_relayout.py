"""Conversion between memory and disk: the same bits, one collective, and little more memory than
both forms."""

from __future__ import annotations

import math
import re
from typing import Any

import jax
import numpy as np
import pytest

from mesh_lm.parallel import relayout
from mesh_lm.schedules.stages import StackLayout
from sharding_rules import MeshConfig, ShardingRuleError, make_mesh
from sharding_rules.lab import compile_report, h100

COMPILE_BUDGET = 16

UNEVEN = StackLayout(4, (2, 2, 3, 2, 2, 3, 1, 2))
CASES: dict[str, tuple[dict[str, int], StackLayout, tuple[int, ...], jax.P, jax.P]] = {
    "uneven": ({"pipeline": 4, "fsdp": 2}, UNEVEN, (8, 6), jax.P("pipeline", None, "fsdp"), jax.P(None, "pipeline", "fsdp")),
    "permuted": (
        {"pipeline": 2, "fsdp": 2, "tensor": 2}, StackLayout(2, (2,) * 6), (8, 6),
        jax.P("pipeline", ("fsdp", "tensor")),
        jax.P(None, ("fsdp", "tensor", "pipeline"), None),
    ),
    "third dimension": (
        {"pipeline": 8}, StackLayout(8, (1,) * 7 + (2,)), (3, 16, 2), jax.P("pipeline"),
        jax.P(None, None, "pipeline", None),
    ),
    "nothing divides": ({"pipeline": 4, "tensor": 2}, UNEVEN, (6,), jax.P("pipeline", "tensor"), jax.P(None, "tensor")),
    "all on one stage": ({"pipeline": 2, "data": 2}, StackLayout(2, (0, 1, 0, 2)), (4,), jax.P("pipeline"), jax.P(None, "pipeline")),
}  # fmt: skip


def mesh_of(sizes: dict[str, int]) -> jax.sharding.Mesh:
    return make_mesh(MeshConfig(**sizes), jax.devices()[: math.prod(sizes.values())])


@pytest.mark.parametrize("case", CASES)
def test_round_trip_keeps_every_bit(case: str) -> None:
    sizes, stack, rest, spec, wanted = CASES[case]
    sharding = jax.NamedSharding(mesh_of(sizes), spec)
    bits = np.random.default_rng(0).integers(0, 2**32, (stack.n_layers, *rest), np.uint32)
    where = relayout.canonical_sharding(sharding, (stack.padded_rows, *rest), stack)
    assert where.spec == wanted
    disk = jax.device_put(bits.view(np.float32), where)  # NaNs, infinities and -0.0 too

    memory = relayout.to_memory(disk, stack, sharding)
    assert disk.is_deleted() and memory.sharding.is_equivalent_to(sharding, memory.ndim)
    layers = stack.layer_of_row()
    assert np.array_equal(
        np.asarray(memory).view(np.uint32),
        np.where((layers < 0).reshape(-1, *[1] * len(rest)), 0, bits[layers]),
    )

    back = relayout.to_canonical(memory, stack, sharding)
    assert memory.is_deleted() and back.sharding.is_equivalent_to(where, back.ndim)
    assert np.array_equal(np.asarray(back).view(np.uint32), bits)


@pytest.mark.parametrize("counts", [(2,) * 4, (2,) * 4 + (0,) * 4])
def test_where_rows_are_layers_nothing_moves(counts: tuple[int, ...]) -> None:
    even, sharding = (
        StackLayout(4, counts),
        jax.NamedSharding(mesh_of({"pipeline": 4, "fsdp": 2}), jax.P("pipeline", None, "fsdp")),
    )
    leaf = jax.device_put(np.zeros((8, 8, 6), np.float32), sharding)
    assert relayout.canonical_sharding(sharding, leaf.shape, even) is sharding
    assert (
        relayout.to_canonical(leaf, even, sharding) is leaf
        and relayout.to_memory(leaf, even, sharding) is leaf
    )


def test_rows_that_are_cut_over_another_axis_are_refused() -> None:
    sharding = jax.NamedSharding(mesh_of({"pipeline": 4, "data": 2}), jax.P(("pipeline", "data")))
    message = (
        "the dimension layers is sharded over the mesh axes ['pipeline', 'data'] in 4 pipeline "
        "stages; with uneven stages or pipeline.chunks > 1 it can be sharded over pipeline only: "
        "use the others for another dimension"
    )
    with pytest.raises(ShardingRuleError, match=f"^{re.escape(message)}$"):
        relayout.canonical_sharding(sharding, (UNEVEN.padded_rows, 8), UNEVEN)


def program(
    sharding: jax.NamedSharding, rest: tuple[int, ...], to_memory: bool
) -> tuple[Any, jax.ShapeDtypeStruct, int]:
    """(the conversion of a float32 array, its argument, the most bytes that a device should need:
    both forms and two rows)."""
    shape = (UNEVEN.padded_rows, *rest)
    canonical = relayout.canonical_sharding(sharding, shape, UNEVEN)
    disk = jax.ShapeDtypeStruct((UNEVEN.n_layers, *rest), np.float32, sharding=canonical)
    memory = jax.ShapeDtypeStruct(shape, np.float32, sharding=sharding)
    local = math.prod(sharding.shard_shape(shape))
    bytes = 4 * (
        local
        + math.prod(disk.sharding.shard_shape(disk.shape))
        + 2 * local // UNEVEN.rows_per_stage
    )
    return (
        relayout._program(UNEVEN, sharding, shape, to_memory),
        disk if to_memory else memory,
        bytes,
    )


@pytest.mark.parametrize("to_memory", [False, True])
@pytest.mark.parametrize("rest", [(64, 96), (63, 128)], ids=["second", "third"])
def test_peak_is_both_forms_and_two_rows(rest: tuple[int, ...], to_memory: bool) -> None:
    sharding = jax.NamedSharding(
        mesh_of({"pipeline": 4, "fsdp": 2}), jax.P("pipeline", None, "fsdp")
    )
    relay, argument, most = program(sharding, rest, to_memory)
    compiled = relay.lower(argument).compile()
    assert compiled.memory_analysis().peak_memory_in_bytes <= most + 2048
    assert (
        len(re.findall(r" all-to-all(?:-start)?\(", compiled.as_text())) == 1
        and "all-gather" not in compiled.as_text()
    )


@pytest.mark.deviceless
@pytest.mark.parametrize("to_memory", [False, True])
def test_on_gpus_one_all_to_all_travels_over_pipeline(reports: str, to_memory: bool) -> None:
    mesh = h100(pipeline=4, tensor=8)
    relay, argument, most = program(
        jax.NamedSharding(mesh, jax.P("pipeline", None, "tensor")), (1024, 4096), to_memory
    )
    report = compile_report(relay, argument, mesh=mesh, cache=reports)
    (one,) = report.collectives
    assert (one.kind, one.axes, one.loops) == (
        "all-to-all",
        ("pipeline",),
        (UNEVEN.rows_per_stage,),
    )
    assert report.memory.peak <= most + 4096
