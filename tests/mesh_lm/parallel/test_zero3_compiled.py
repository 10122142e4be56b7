"""Layers that gather their own weights, compiled for H100s: one collective a layer each way, beside
the layer's matmuls."""

import dataclasses

import pytest

from mesh_lm.config import LaunchConfig, TrainConfig, load
from mesh_lm.planning.program import compile_config
from sharding_rules import MeshConfig, preset
from sharding_rules.lab import Report
from sharding_rules.lab.flags import options
from sharding_rules.lab.report import Collective

COMPILE_BUDGET = 10
pytestmark = pytest.mark.deviceless
LAYERS = 4


def report_of(
    reports: str, rules: str, mesh: MeshConfig, flags: str = "overlap_two", **model: object
) -> Report:
    """Of LAYERS layers of megatron_16b, a sequence on each GPU."""
    config: TrainConfig = load("configs/megatron_16b.py")
    fields = {"n_layers": LAYERS, "remat": "save_names", "unroll": False}
    config = dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, **(fields | model)),
        mesh=mesh,
        rules=preset(rules),
        train=dataclasses.replace(config.train, global_batch=16),
        launch=LaunchConfig(compile_cache=reports),
    )
    return compile_config(config, "h100", 16, options(flags))


def of_layers(report: Report) -> list[Collective]:
    """The collectives over data in a loop over the layers, but for those of vectors and scalars."""
    return [
        one
        for one in report.collectives
        if one.loops == (LAYERS,) and one.axes == ("data",) and one.payload > 2**24
    ]


@pytest.mark.parametrize(
    ("rules", "remat"),
    [
        ("zero3", "save_names"),
        pytest.param("zero3", "full", marks=pytest.mark.exhaustive),
        pytest.param("zero3", "none", marks=pytest.mark.exhaustive),
        pytest.param("zero3+reduce_bfloat16", "save_names", marks=pytest.mark.slow),
    ],
)
def test_a_layer_has_one_collective_each_way_beside_its_matmuls(
    reports: str, rules: str, remat: str
) -> None:
    report = report_of(reports, rules, MeshConfig(data=16), remat=remat)
    found, width = of_layers(report), 6144
    matrices = 12 * width**2
    assert sorted((one.kind, one.where.phase, one.dtype, one.payload) for one in found) == [
        ("all-gather", "backward", "bf16", 2 * matrices),
        ("all-gather", "forward", "bf16", 2 * matrices),
        (
            "reduce-scatter",
            "backward",
            *(("bf16", 2 * matrices) if "bfloat16" in rules else ("f32", 4 * matrices)),
        ),
    ]
    forward = 2 * 4096 * matrices  # FLOPs of the matmuls of one sequence
    assert all(one.asynchronous and one.flops_hidden_behind > 0.5 * forward for one in found), found
    assert report.timeline
    assert sum(one.exposed for one in found) <= 0.01 * report.timeline.step
    # No layer's weights, or more, are copied in a loop, and no device holds all of them.
    assert not [one for one in report.copies if one.loops and one.bytes >= 2 * matrices]
    assert not [
        one
        for one in report.memory.buffers
        if one.kind == "weights in use" and one.bytes >= 2 * LAYERS * matrices
    ]


def test_nothing_is_replicated_over_tensor(reports: str) -> None:
    """Beside tensor parallelism a device sends its part of a layer over data, and over tensor the
    same as with copies of the weights."""
    mesh = MeshConfig(data=8, tensor=2)
    report, copied = (
        report_of(reports, rules, mesh)
        for rules in ("zero3+megatron_sp", "distributed+megatron_sp")
    )
    assert {one.payload for one in of_layers(report)} == {half := 12 * 6144**2, 2 * half}
    assert len(of_layers(report)) == 3 and all(
        one.asynchronous and one.flops_hidden_behind for one in of_layers(report)
    )
    assert report.wire_bytes(["tensor"]) == pytest.approx(copied.wire_bytes(["tensor"]), rel=1e-3)


@pytest.mark.slow
def test_halves_hide_what_tensor_parallelism_sends(reports: str) -> None:
    """The same bytes in twice as many collectives, beside the matmuls of the other half."""
    mesh = MeshConfig(data=8, tensor=2)
    plain, halves = (
        report_of(reports, "zero3+megatron_sp", mesh, batch_halves=each) for each in (False, True)
    )
    assert halves.wire_bytes(["tensor"]) == pytest.approx(plain.wire_bytes(["tensor"]), rel=1e-3)
    assert halves.wire_bytes(["data"]) == pytest.approx(plain.wire_bytes(["data"]), rel=1e-3)
    looped, of_halves = (
        [
            one
            for one in report.select(axis="tensor")
            if one.loops == (LAYERS,) and one.payload > 2**20
        ]
        for report in (plain, halves)
    )
    assert sum(one.times for one in of_halves) == 2 * sum(one.times for one in looped) > 0
    assert 0 < sum(one.exposed for one in of_halves) <= 0.6 * sum(one.exposed for one in looped)


@pytest.mark.exhaustive
def test_sums_in_bfloat16_begin_before_the_last_collective_of_tensor_parallelism(
    reports: str,
) -> None:
    """With three collectives at once a layer's gather and sums go beside more of its matmuls than
    with two."""
    rules, hidden = "zero3+megatron_sp+reduce_bfloat16", []
    for flags in ("layers", "layers_bfloat16"):
        report = report_of(reports, rules, MeshConfig(data=8, tensor=2), flags, remat="full")
        hidden.append(
            [one.flops_hidden_behind for one in of_layers(report) if one.where.phase == "backward"]
        )
    two, three = hidden
    assert len(two) == len(three) == 2 and min(three) > 1.3 * max(two) > 0, hidden
