"""Muon with the state divided by layers (`owner`): gradients, losses and weights are those of one
device, and what cannot be divided is refused."""

import dataclasses
import functools
import math
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
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

from mesh_lm.config import DilocoConfig, OptimizerConfig, PipelineConfig, load
from mesh_lm.errors import ConfigError
from mesh_lm.model import ExpertsConfig
from mesh_lm.optim import ArraySpec, ArraySpecs, Muon, Optimizer, Params, Slots
from mesh_lm.optim.contract import is_matrix
from mesh_lm.optim.muon import matrix_dims
from mesh_lm.parallel.layout import ModelLayout
from mesh_lm.state import State, abstract_state, counters, parts
from mesh_lm.state.disk_form import from_disk, stored, to_disk
from mesh_lm.training.check import check
from mesh_lm.training.step import train_step
from sharding_rules import MeshConfig, preset

COMPILE_BUDGET = 90
SLOW = pytest.mark.slow
EXHAUSTIVE = pytest.mark.exhaustive


MOE = dataclasses.replace(
    GPT, biases=False, dropout=0.0, block="moe", experts=ExpertsConfig(number=4, active=2)
)


class Case(NamedTuple):
    rules: str
    mesh: dict[str, int]
    n_layers: int = 4
    stages: tuple[int, ...] = ()
    """Layers of the stages; empty: as many on each."""
    experts: bool = False

    def layout(self) -> ModelLayout:
        return ModelLayout.of(
            dataclasses.replace(MOE if self.experts else GPT, n_layers=self.n_layers),
            shard_on(self.rules, **self.mesh),
            PipelineConfig(layers=self.stages),
        )


CASES: dict[str, Case] = {
    "one device": Case("ddp", {}),
    "data": Case("zero2+owner", {"data": 4}),
    "fsdp": Case("fsdp+owner", {"fsdp": 4}),
    "data x tensor": Case("zero2+megatron+owner", {"data": 2, "tensor": 2}),
    "pipeline": Case("hsdp+owner", {"data": 2, "fsdp": 2, "pipeline": 2}),
    "one device, experts": Case("ddp", {}, 2, experts=True),
    "experts": Case("experts_gather+zero2+owner", {"data": 2, "expert": 2}, 2, experts=True),
    "experts, padded": Case(
        "experts_gather+zero2+owner", {"data": 4, "expert": 2}, 2, experts=True
    ),
    # Layers that do not divide among their owners.
    "one device, padded": Case("ddp", {}, 3),
    "data, padded": Case("zero2+owner", {"data": 8}, 3),
    "fsdp, padded": Case("fsdp+owner", {"fsdp": 2}, 3),
    "data x tensor, padded": Case("zero2+megatron+owner", {"data": 2, "tensor": 2}, 3),
    # Owners of the first stage have 2 layers and 1, those of the second 1 and none.
    "pipeline, padded": Case("fsdp+owner", {"fsdp": 2, "pipeline": 2}, 4, (3, 1)),
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
    gradients: list[dict[str, np.ndarray]]
    """By step, and by parameter."""
    state: dict[str, Any]
    initial: dict[str, np.ndarray]
    """The parameters before the first step."""


def of_optimizer(layout: ModelLayout, name: str, x: jax.Array) -> np.ndarray:
    """An array that is divided among owners, with its layers in model order and without padding."""
    if name not in layout.stacked:
        return np.asarray(x)
    return np.asarray(x)[layout.stack_of(name, "optimizer").row_of_layer()]


@functools.cache
def trained(where: str) -> Trained:
    """Five steps in two microbatches."""
    layout = CASES[where].layout()
    state = jax.tree.map(
        lambda x: jax.device_put(np.zeros(x.shape, x.dtype), x.sharding),
        abstract_state(layout, OPTIMIZER),
    )
    before = initial(layout)
    state |= {"params": by_stage(layout, before)}
    step = train_step(layout, OPTIMIZER, seed=0)
    losses = []
    gradients = []
    for seed in (0, 1, 0, 1, 0):
        state, metrics = step(state, on_devices(host_batch(2, seed=seed), layout))
        losses.append(float(metrics["loss"]))
        gradients.append(
            {name: of_optimizer(layout, name, x) for name, x in state["gradient"].items()}
        )
    return Trained(layout, losses, gradients, state, before)


@pytest.mark.parametrize(
    "where",
    [
        "data",
        "data x tensor",
        pytest.param("fsdp", marks=EXHAUSTIVE),
        pytest.param("pipeline", marks=EXHAUSTIVE),
        pytest.param("data, padded", marks=SLOW),
        pytest.param("fsdp, padded", marks=SLOW),
        pytest.param("data x tensor, padded", marks=SLOW),
        pytest.param("pipeline, padded", marks=SLOW),
        pytest.param("experts", marks=EXHAUSTIVE),
        pytest.param("experts, padded", marks=SLOW),
    ],
)
def test_equals_one_device(where: str) -> None:
    case = CASES[where]
    same_model = [
        one
        for one, other in CASES.items()
        if not other.mesh and (other.n_layers, other.experts) == (case.n_layers, case.experts)
    ]
    wanted = trained(*same_model)
    found = trained(where)
    assert wanted.losses[4] < wanted.losses[0] - 0.3
    np.testing.assert_allclose(found.losses, wanted.losses, rtol=1e-6)
    assert_same_gradients(found.gradients[0], wanted.gradients[0])
    for name, x in wanted.state["params"].items():
        mine = in_model_order(found.layout, name, found.state["params"][name])
        # A rounding of a small gradient is a rounding of its direction, of size 0.2.
        np.testing.assert_allclose(mine, np.asarray(x), rtol=0, atol=2e-4, err_msg=name)


@pytest.mark.parametrize(
    "where",
    [
        "data",
        "data x tensor",
        pytest.param("pipeline, padded", marks=SLOW),
        pytest.param("experts", marks=SLOW),
    ],
)
def test_equals_a_twin_in_float64(where: str) -> None:
    """Five updates by their formulas, of the gradients that the parallel program has had."""
    run = trained(where)
    leaves = run.layout.leaves
    wanted = twin({name: x.astype(np.float64) for name, x in run.initial.items()}, run)
    for name, x in wanted.items():
        found = in_model_order(run.layout, name, run.state["params"][name])
        moved = np.abs(x - run.initial[name]).max()
        assert moved > 0.01 or not np.any(run.gradients[0][name]), name
        # Newton-Schulz makes the small singular values of a matrix, and their roundings, up to 485
        # times as large.
        tolerance = 1e-4 if matrix_dims(name, leaves[name]) else 1e-5
        np.testing.assert_allclose(found, x, rtol=0, atol=tolerance * moved, err_msg=name)


def twin(params: dict[str, np.ndarray], run: Trained) -> dict[str, np.ndarray]:
    """The parameters after the updates of a run in float64: Muon and AdamW, as in
    docs/optimizers.md."""
    muon = Muon()
    config = OPTIMIZER.config
    mu = {name: np.zeros_like(x) for name, x in params.items()}
    nu = {name: np.zeros_like(x) for name, x in params.items()}
    for step, gradients in enumerate(run.gradients):
        rate = float(OPTIMIZER.learning_rate(step))
        for name, gradient in gradients.items():
            leaf = run.layout.leaves[name]
            gradient = gradient.astype(np.float64)
            dims = matrix_dims(name, leaf)
            if dims:
                beta = muon.momentum
                mu[name] = beta * mu[name] + (1 - beta) * gradient
                momentum = mu[name] / (1 - beta ** (step + 2))
                nesterov = beta * momentum + (1 - beta) * gradient / (1 - beta ** (step + 1))
                direction = orthogonalized(nesterov, dims)
            else:
                mu[name] = muon.beta1 * mu[name] + (1 - muon.beta1) * gradient
                nu[name] = muon.beta2 * nu[name] + (1 - muon.beta2) * gradient**2
                mean = mu[name] / (1 - muon.beta1 ** (step + 1))
                variance = nu[name] / (1 - muon.beta2 ** (step + 1))
                direction = mean / (np.sqrt(variance) + muon.eps)
            if is_matrix(name, leaf.axes):
                direction = direction + config.weight_decay * params[name]
            params[name] = params[name] - rate * direction
    return params


def orthogonalized(x: np.ndarray, dims: Any) -> np.ndarray:
    """Five iterations of Newton-Schulz on each matrix, with a root mean square of about 0.2."""
    (rows,) = dims.reduction_axis
    columns = dims.output_axis
    batch = tuple(dim for dim in range(x.ndim) if dim not in (rows, *columns))
    order = (*batch, rows, *columns)
    ordered = x.transpose(order)
    n_rows = x.shape[rows]
    matrices = ordered.reshape(-1, n_rows, math.prod(x.shape[dim] for dim in columns))
    made = []
    for matrix in matrices:
        matrix = matrix / (np.linalg.norm(matrix) + Muon().eps)
        for _ in range(5):
            square = matrix @ matrix.T
            matrix = 3.4445 * matrix + (-4.7750 * square + 2.0315 * square @ square) @ matrix
        made.append(0.2 * np.sqrt(max(matrix.shape)) * matrix)
    return np.stack(made).reshape(ordered.shape).transpose(np.argsort(order))


@pytest.mark.parametrize(
    ("where", "rows"),
    [
        ("data", 1),
        ("data x tensor", 1),
        ("pipeline", 1),
        ("data, padded", 1),
        ("fsdp, padded", 2),
        ("pipeline, padded", 2),
    ],
)
def test_a_device_has_complete_matrices_of_its_layers(where: str, rows: int) -> None:
    layout = CASES[where].layout()
    for slot, part in parts(layout, OPTIMIZER).items():
        if slot == "params":
            continue
        for name, leaf in part.leaves.items():
            shard = part.shardings[name].shard_shape(leaf.shape)
            if leaf.stacked:
                assert shard == (rows, *leaf.shape[1:]), f"{slot}/{name}"
            elif name == "embedding":
                assert shard[1] < leaf.shape[1] or "data" not in where, "tables stay as they were"


def host_arrays(tree: State) -> dict[str, dict[str, np.ndarray]]:
    """The parts of a tree on the host."""
    arrays = jax.tree.map(np.asarray, tree)
    return {part: arrays[part] for part in arrays if isinstance(arrays[part], dict)}


def assert_same_bits(found: State, wanted: State) -> None:
    assert found.keys() == wanted.keys()
    for part, arrays in wanted.items():
        assert found[part].keys() == arrays.keys()
        for name, x in arrays.items():
            assert found[part][name].tobytes() == x.tobytes(), f"{part}/{name}"


def test_a_state_by_layers_is_saved_as_any_other() -> None:
    """Its form on disk is that of one device, bit for bit."""
    layout = CASES["fsdp"].layout()
    random = np.random.default_rng(0)
    state = jax.tree.map(
        lambda x: jax.device_put(random.normal(size=x.shape).astype(x.dtype), x.sharding),
        abstract_state(layout, OPTIMIZER),
    )
    wanted = host_arrays(state)
    tree, digests = to_disk(layout, OPTIMIZER, state)
    assert_same_bits(host_arrays(tree), wanted)
    restored, mismatches = from_disk(layout, OPTIMIZER, tree, digests)
    assert not mismatches
    assert_same_bits(host_arrays(restored), wanted)


@pytest.mark.parametrize(
    ("where", "others"),
    [
        ("fsdp, padded", ["one device, padded", "data, padded"]),
        ("pipeline, padded", ["one device", "pipeline"]),
    ],
)
def test_padding_is_not_saved(where: str, others: list[str]) -> None:
    """What owners with rows of padding save is restored on meshes with other owners, bit for bit,
    and those save the same again."""
    optimizer = Optimizer(OptimizerConfig(Muon()), 9)
    layout = CASES[where].layout()
    state = random_state(layout, optimizer)
    wanted: State = {}
    for part in parts(layout, optimizer):
        ordered = in_model_order if part == "params" else of_optimizer
        wanted[part] = {name: ordered(layout, name, x) for name, x in state[part].items()}
    tree, digests = to_disk(layout, optimizer, state)
    on_disk = host_arrays(tree)
    assert_same_bits(on_disk, wanted)

    for other in others:
        other_layout = CASES[other].layout()
        places = stored(other_layout, optimizer)
        other_tree: State = {name: jnp.asarray(x) for name, x in counters().items()}
        for part, arrays in on_disk.items():
            other_tree[part] = jax.tree.map(
                lambda x, place: jax.device_put(x, place.sharding), arrays, places[part]
            )
        restored, mismatches = from_disk(other_layout, optimizer, other_tree, digests)
        assert not mismatches
        again, other_digests = to_disk(other_layout, optimizer, restored)
        assert_same_bits(host_arrays(again), wanted)
        assert other_digests == digests


def random_state(layout: ModelLayout, optimizer: Optimizer) -> State:
    """A state of random numbers, with zeros in rows of padding."""
    random = np.random.default_rng(0)
    state: State = {name: jnp.asarray(x) for name, x in counters().items()}
    for part, arrays in abstract_state(layout, optimizer).items():
        if part in state:
            continue
        state[part] = {}
        for name, x in arrays.items():
            values = random.normal(size=x.shape).astype(x.dtype)
            if name in layout.stacked:
                stack = layout.stack_of(name, "params" if part == "params" else "optimizer")
                values[stack.layer_of_row() < 0] = 0
            state[part][name] = jax.device_put(values, x.sharding)
    return state


@pytest.mark.parametrize(
    ("rules", "mesh", "pipeline", "problem"),
    [
        (
            "fsdp+owner",
            {"fsdp": 2, "pipeline": 2},
            PipelineConfig(chunks=2),
            "rules 'fsdp+owner' divide the optimizer state by layers, and the layers of a stage of "
            "pipeline.chunks=2 are not next to each other in the model, so that a checkpoint could "
            "not be saved; set pipeline.chunks=1, or leave owner out",
        ),
        (
            "diloco+zero2+owner",
            {"island": 2, "data": 8},
            PipelineConfig(),
            "rules 'diloco+zero2+owner' divide the optimizer state by layers: 4 layers of segment "
            "'blocks' are not divisible by mesh.data=8 owners, and an island's state is saved "
            "without padding; choose a mesh whose owners divide 4, or leave owner out",
        ),
        ("zero2+owner", {"data": 8}, PipelineConfig(), ""),
        ("fsdp+owner", {"fsdp": 2, "pipeline": 2}, PipelineConfig(layers=(3, 1)), ""),
        ("fsdp+megatron+owner", {"fsdp": 2, "tensor": 2}, PipelineConfig(), ""),
        ("hsdp+owner", {"data": 2, "fsdp": 2, "pipeline": 2}, PipelineConfig(), ""),
    ],
)
def test_what_owners_cannot_divide_is_refused(
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
        diloco=DilocoConfig(outer_steps=config.train.steps if "island" in mesh else 0),
        train=dataclasses.replace(config.train, global_batch=32, microbatches=2),
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
