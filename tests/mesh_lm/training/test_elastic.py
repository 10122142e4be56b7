"""The config for fewer devices: it can always run, never needs more memory per device, and never
changes the global batch."""

import dataclasses
import json
import math
import os

import hypothesis.strategies as st
import pytest
from hypothesis import assume, given, settings

from configs import gpt_tiny, llama3_8b
from mesh_lm import distributed
from mesh_lm.config import TrainConfig
from mesh_lm.errors import ConfigError
from mesh_lm.training.check import check
from mesh_lm.training.elastic import fit, fitted, on_nodes
from sharding_rules import MeshConfig, preset

COMPILE_BUDGET = 0
AXES = ("pipeline", "expert", "sequence", "tensor")


def config(mesh: MeshConfig, batch: int = 64, microbatches: int = 1) -> TrainConfig:
    base = gpt_tiny.get_config()
    train = dataclasses.replace(base.train, global_batch=batch, microbatches=microbatches)
    return dataclasses.replace(base, mesh=mesh, rules=preset("hsdp+megatron"), train=train)


def sequences(config: TrainConfig) -> float:
    """Returns the sequences of a microbatch on a device."""
    return config.train.global_batch / (
        config.train.microbatches * config.mesh.data * config.mesh.fsdp
    )


def sizes(config: TrainConfig) -> tuple[int, int, int]:
    return config.mesh.data, config.mesh.fsdp, config.train.microbatches


@settings(max_examples=60)
@given(
    data=st.sampled_from([1, 2, 3, 4, 8]), fsdp=st.sampled_from([1, 2, 4, 8]),
    tensor=st.sampled_from([1, 2, 4]),
    batch=st.sampled_from([16, 48, 96, 192]), microbatches=st.sampled_from([1, 2, 4]),
    devices=st.integers(1, 300),
)  # fmt: skip
def test_what_fits_can_run_and_is_the_same_training(
    data: int, fsdp: int, tensor: int, batch: int, microbatches: int, devices: int
) -> None:
    whole = config(MeshConfig(data=data, fsdp=fsdp, tensor=tensor), batch, microbatches)
    assume(batch % (microbatches * data * fsdp) == 0)
    if devices < tensor:
        with pytest.raises(
            ConfigError, match=f"fits on {devices} devices: it needs at least {tensor}"
        ):
            fitted(whole, devices)
        return
    found = fitted(whole, devices)
    size = math.prod(found.mesh.sizes().values())
    assert check(found, size) == found and size <= devices
    assert all(getattr(found.mesh, axis) == getattr(whole.mesh, axis) for axis in AXES)
    assert found.mesh.data <= data and found.mesh.fsdp <= fsdp
    assert found.train.global_batch == batch and sequences(found) <= sequences(whole)
    assert dataclasses.replace(found, mesh=whole.mesh, train=whole.train) == whole, (
        "nothing else changes"
    )
    if devices >= data * fsdp * tensor:
        assert found == whole
    for more in range(size + 1, min(devices, data * fsdp * tensor) + 1):  # no larger one could run
        for d, f in (
            (d, more // tensor // d) for d in range(1, data + 1) if more % (tensor * d) == 0
        ):
            assert f > fsdp or batch % (d * f) or f not in (1, 2, 4, 8), (d, f)


def test_microbatches_make_up_for_devices() -> None:
    whole = config(MeshConfig(data=4, fsdp=2), batch=64, microbatches=2)
    assert [sizes(fitted(whole, n)) for n in (8, 7, 4, 3, 1)] == [
        (4, 2, 2),
        (2, 2, 4),
        (2, 2, 4),
        (1, 2, 8),
        (1, 1, 16),
    ]


def test_seven_nodes_of_eight() -> None:
    """Llama 3 8B, written for any number of nodes: 512 sequences are divisible by four, but not by
    seven."""
    found, nodes = on_nodes(llama3_8b.get_config(), full=8, nodes=7, per_node=8)
    assert nodes == 4 and sizes(found) == (4, 8, 16)
    assert sequences(found) == 512 / (8 * 64) == 1
    found, nodes = on_nodes(llama3_8b.get_config(), full=8, nodes=8, per_node=8)
    assert nodes == 8 and sizes(found) == (8, 8, 8)


def test_whole_nodes_only() -> None:
    whole = config(MeshConfig(data=3, fsdp=2), batch=96)
    found, nodes = on_nodes(whole, full=3, nodes=2, per_node=2)
    assert nodes == 2 and sizes(found) == (2, 2, 2), "(3, 1) has three devices, and (2, 2) four"
    with pytest.raises(
        ConfigError,
        match="no mesh that data=3 x tensor=2 can shrink to fills whole nodes of 3 devices, out of 1",
    ):
        on_nodes(config(MeshConfig(data=3, tensor=2), batch=6), full=2, nodes=1, per_node=3)


@pytest.mark.parametrize(
    ("mesh", "devices", "message"),
    [
        (
            MeshConfig(data=2, tensor=4),
            3,
            (
                "data=2 x tensor=4 cannot shrink to a mesh that fits on 3 devices: it needs at "
                "least 4"
            ),
        ),
        (
            MeshConfig(tensor=-1),
            3,
            (
                "mesh.tensor=-1 would change with the number of devices, which only data and fsdp "
                "may do"
            ),
        ),
        (
            MeshConfig(data=2, tensor=3),
            4,
            "is not divisible by its number of shards, mesh.tensor=3",
        ),
    ],
)
def test_what_does_not_fit(mesh: MeshConfig, devices: int, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        fitted(config(mesh), devices)
    assert message in str(caught.value)


def test_a_worker_asks_for_fewer_nodes() -> None:
    """Eight devices, as if on four nodes of two, out of more or fewer."""
    whole = config(MeshConfig(data=4, fsdp=4), batch=64)
    assert fit(whole, {}) == whole, "without --min-nodes nothing changes"
    environment = {"MESH_LM_ELASTIC": "8", "MESH_LM_NODES": "4"}
    assert sizes(fit(whole, environment)) == (2, 4, 2)
    assert sizes(fit(whole, environment | {"MESH_LM_LEAST": "1"})) == (2, 4, 2)
    with pytest.raises(
        ConfigError,
        match=(
            "--min-nodes=1 is too few nodes for this config: data=4 x tensor=4 cannot "
            "shrink to a mesh that fits on 2 devices"
        ),
    ):
        fit(config(MeshConfig(data=4, tensor=4)), environment | {"MESH_LM_LEAST": "1"})
    ours, theirs = os.pipe()
    with pytest.raises(distributed.FewerNodes):
        fit(
            config(MeshConfig(fsdp=4)),
            environment | {"MESH_LM_ELASTIC": "2", "MESH_LM_HEARTBEAT": str(theirs)},
        )
    os.close(theirs)
    with open(ours, encoding="utf-8") as lines:
        assert json.loads(lines.read()) == {"nodes": 2}
