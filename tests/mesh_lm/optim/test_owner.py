"""Muon with the state divided by layers (`owner`): gradients, losses and weights are those of one
device, and what cannot be divided is refused."""

import dataclasses
import functools
from typing import Any, ClassVar, NamedTuple

import jax
import numpy as np
import pytest
from support import (
    GPT,
    assert_same_gradients,
    by_stage,
    host_batch,
    in_model_order,
    initial,
    on_devices,
    shard_on,
)

from mesh_lm.config import OptimizerConfig, PipelineConfig, load
from mesh_lm.errors import ConfigError
from mesh_lm.optim import ArraySpec, ArraySpecs, Muon, Optimizer, Params, Slots
from mesh_lm.parallel.layout import ModelLayout
from mesh_lm.state import abstract_state, parts
from mesh_lm.state.disk_form import from_disk, to_disk
from mesh_lm.training.check import check
from mesh_lm.training.step import train_step
from sharding_rules import MeshConfig, preset

COMPILE_BUDGET = 45
MODEL = dataclasses.replace(GPT, n_layers=4)
SLOW = pytest.mark.slow
MESHES: dict[str, tuple[str, dict[str, int]]] = {
    "one device": ("ddp", {}),
    "data": ("zero2+owner", {"data": 4}),
    "fsdp": ("fsdp+owner", {"fsdp": 4}),
    "data x tensor": ("zero2+megatron+owner", {"data": 2, "tensor": 2}),
    "pipeline": ("hsdp+owner", {"data": 2, "fsdp": 2, "pipeline": 2}),
}


@dataclasses.dataclass(frozen=True)
class Recorded:
    """Muon, with the gradients that it was given as one more slot."""

    elementwise: ClassVar[bool] = False
    muon: Muon = Muon()

    def slots(self, leaves: ArraySpecs) -> dict[str, dict[str, ArraySpec]]:
        return self.muon.slots(leaves) | {"gradient": dict(leaves)}

    def direction(
        self, grads: Params, slots: Slots, params: Params, *, count: jax.Array, leaves: ArraySpecs
    ) -> tuple[Params, Slots]:
        own = {name: slot for name, slot in slots.items() if name != "gradient"}
        directions, new_slots = self.muon.direction(grads, own, params, count=count, leaves=leaves)
        return directions, new_slots | {"gradient": grads}


OPTIMIZER = Optimizer(
    OptimizerConfig(Recorded(), learning_rate=0.01, warmup_steps=0, clip_norm=0.0), 9
)


class Trained(NamedTuple):
    layout: ModelLayout
    losses: list[float]
    gradients: dict[str, np.ndarray]
    """Of the first step."""
    state: dict[str, Any]


@functools.cache
def trained(where: str) -> Trained:
    """Three steps in two microbatches."""
    rules, mesh = MESHES[where]
    layout = ModelLayout.of(MODEL, shard_on(rules, **mesh))
    state = jax.tree.map(
        lambda x: jax.device_put(np.zeros(x.shape, x.dtype), x.sharding),
        abstract_state(layout, OPTIMIZER),
    )
    state |= {"params": by_stage(layout, initial(layout))}
    step = train_step(layout, OPTIMIZER, seed=0)
    losses = []
    gradients: dict[str, np.ndarray] = {}
    for seed in (0, 1, 0):
        state, metrics = step(state, on_devices(host_batch(2, seed=seed), layout))
        losses.append(float(metrics["loss"]))
        if not gradients:
            gradients = {
                name: in_model_order(layout, name, x) for name, x in state["gradient"].items()
            }
    return Trained(layout, losses, gradients, state)


@pytest.mark.parametrize(
    "where",
    [
        "data",
        "data x tensor",
        pytest.param("fsdp", marks=SLOW),
        pytest.param("pipeline", marks=SLOW),
    ],
)
def test_equals_one_device(where: str) -> None:
    wanted = trained("one device")
    found = trained(where)
    assert wanted.losses[2] < wanted.losses[0] - 0.1
    np.testing.assert_allclose(found.losses, wanted.losses, rtol=1e-6)
    assert_same_gradients(found.gradients, wanted.gradients)
    for name, x in wanted.state["params"].items():
        mine = in_model_order(found.layout, name, found.state["params"][name])
        # A rounding of a small gradient is a rounding of its direction, of size 0.2.
        np.testing.assert_allclose(mine, np.asarray(x), rtol=0, atol=2e-4, err_msg=name)


@pytest.mark.parametrize("where", ["data", "data x tensor", "pipeline"])
def test_a_device_has_complete_matrices_of_its_layers(where: str) -> None:
    rules, mesh = MESHES[where]
    layout = ModelLayout.of(MODEL, shard_on(rules, **mesh))
    n_owners = {"data": 4, "data x tensor": 4, "pipeline": 4}[where]
    for slot, part in parts(layout, OPTIMIZER).items():
        if slot == "params":
            continue
        for name, leaf in part.leaves.items():
            shard = part.shardings[name].shard_shape(leaf.shape)
            if leaf.stacked:
                assert shard == (leaf.shape[0] // n_owners, *leaf.shape[1:]), f"{slot}/{name}"
            elif name == "embedding":
                assert shard[1] < leaf.shape[1], "tables are divided by their width"


def test_a_state_by_layers_is_saved_as_any_other() -> None:
    """Its form on disk is that of one device, bit for bit."""
    layout = ModelLayout.of(MODEL, shard_on("fsdp+owner", fsdp=4))
    random = np.random.default_rng(0)
    state = jax.tree.map(
        lambda x: jax.device_put(random.normal(size=x.shape).astype(x.dtype), x.sharding),
        abstract_state(layout, OPTIMIZER),
    )
    wanted = jax.tree.map(np.asarray, state)
    tree, digests = to_disk(layout, OPTIMIZER, state)
    for name, x in wanted["mu"].items():
        assert np.asarray(tree["mu"][name]).tobytes() == x.tobytes(), name
    restored, mismatches = from_disk(layout, OPTIMIZER, tree, digests)
    assert not mismatches
    for name, x in wanted["mu"].items():
        assert np.asarray(restored["mu"][name]).tobytes() == x.tobytes(), name


@pytest.mark.parametrize(
    ("rules", "mesh", "pipeline", "problem"),
    [
        (
            "zero2+owner",
            {"data": 8},
            PipelineConfig(),
            "rules 'zero2+owner' divide the optimizer state by layers: 4 layers of segment "
            "'blocks' are not divisible by mesh.data=8 owners; choose a mesh whose owners divide "
            "4, or leave owner out",
        ),
        (
            "fsdp+megatron+owner",
            {"fsdp": 2, "tensor": 2, "pipeline": 2},
            PipelineConfig(),
            "rules 'fsdp+megatron+owner' divide the optimizer state by layers: 2 layers of segment "
            "'blocks' on a stage are not divisible by mesh.fsdp=2 x mesh.tensor=2 owners; choose a "
            "mesh whose owners divide 2, or leave owner out",
        ),
        (
            "fsdp+owner",
            {"fsdp": 2, "pipeline": 2},
            PipelineConfig(chunks=2),
            "rules 'fsdp+owner' divide the optimizer state by layers, which the stages of segment "
            "'blocks' do not have in the order of the model; set pipeline.chunks=1 and a number of "
            "layers that mesh.pipeline divides, or leave owner out",
        ),
        ("fsdp+megatron+owner", {"fsdp": 2, "tensor": 2}, PipelineConfig(), ""),
        ("hsdp+owner", {"data": 2, "fsdp": 2, "pipeline": 2}, PipelineConfig(), ""),
    ],
)
def test_layers_that_do_not_divide_are_refused(
    rules: str, mesh: dict[str, int], pipeline: PipelineConfig, problem: str
) -> None:
    config = load("configs/gpt_tiny.py")
    config = dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, n_layers=4),
        rules=preset(rules),
        mesh=dataclasses.replace(MeshConfig(data=1), **mesh),
        pipeline=pipeline,
        optimizer=OptimizerConfig(Muon()),
        train=dataclasses.replace(config.train, microbatches=2),
    )
    n_devices = 1
    for size in mesh.values():
        n_devices *= size
    if not problem:
        check(config, n_devices)
        return
    with pytest.raises(ConfigError) as caught:
        check(config, n_devices)
    assert str(caught.value).split("\n  - ")[1:] == [problem]
