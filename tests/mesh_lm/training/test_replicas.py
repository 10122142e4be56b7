"""Replicas that should hold the same bits: one flipped bit is found and its device named, on any
mesh, before and after a step."""

import dataclasses
import functools
import re

import jax
import numpy as np
import pytest
from support import GPT, host_batch, on_devices, shard_on, with_flipped_bit

from mesh_lm.config import OptimizerConfig
from mesh_lm.optim import Optimizer
from mesh_lm.parallel.layout import ModelLayout
from mesh_lm.state import State, abstract_state
from mesh_lm.training import replicas
from mesh_lm.training.replicas import ReplicasDiffer, differing, program, require_equal
from mesh_lm.training.step import Step, train_step
from sharding_rules.lab import h100

COMPILE_BUDGET = 14
UP = "blocks.mlp.up.weight"


def mesh_of(**axes: int) -> jax.sharding.Mesh:
    return jax.make_mesh(
        tuple(axes.values()), tuple(axes), axis_types=(jax.sharding.AxisType.Auto,) * len(axes)
    )


def made(mesh: jax.sharding.Mesh, **specs: jax.P) -> dict[str, jax.Array]:
    random = np.random.default_rng(0)
    return {
        name: jax.device_put(
            random.normal(size=(8, 16)).astype(np.float32), jax.NamedSharding(mesh, s)
        )
        for name, s in specs.items()
    }


def test_the_device_that_differs_is_named() -> None:
    mesh = mesh_of(data=8)
    state = {
        "params": made(mesh, a=jax.P(), b=jax.P()),
        "step": jax.device_put(np.int32(7), jax.NamedSharding(mesh, jax.P())),
    }
    assert differing(state) == []
    state["params"]["b"] = with_flipped_bit(state["params"]["b"], device=3, word=100, bit=31)
    assert differing(state) == [
        "params/b: device 3 (process 0, cpu:3) differs from the 7 other replicas"
    ]
    state["params"]["b"] = with_flipped_bit(state["params"]["b"], device=5, word=99)
    state["step"] = with_flipped_bit(state["step"], device=0, bit=12)
    assert differing(state) == [
        (
            "params/b: device 3 (process 0, cpu:3), device 5 (process 0, cpu:5) differ from the 6 "
            "other replicas"
        ),
        "step: device 0 (process 0, cpu:0) differs from the 7 other replicas",
    ]


def test_copies_of_parts() -> None:
    """Sharded over fsdp and tensor, replicated over data: each shard has its own majority, and of
    two replicas neither is trusted."""
    mesh = mesh_of(data=2, fsdp=2, tensor=2)
    state = made(
        mesh,
        twice=jax.P("fsdp", "tensor"),
        four=jax.P(None, "tensor"),
        once=jax.P(("data", "fsdp"), "tensor"),
    )
    assert differing(state) == []
    state = {name: with_flipped_bit(x, device=6, word=3) for name, x in state.items()}
    assert differing(state) == [
        "four: device 6 (process 0, cpu:6) differs from the 3 other replicas",
        (
            "twice: device 2 (process 0, cpu:2), device 6 (process 0, cpu:6) hold different bits, "
            "and no majority shows which are right"
        ),
    ]


def test_nothing_to_compare_compiles_nothing() -> None:
    assert differing(made(mesh_of(fsdp=8), a=jax.P("fsdp"))) == []
    assert (
        differing({"a": jax.device_put(np.ones(3), jax.NamedSharding(mesh_of(data=1), jax.P()))})
        == []
    )
    assert differing({}) == []


def test_every_bit_of_every_copy() -> None:
    """Any bit, in a leaf with words of 2 bytes."""
    mesh = mesh_of(data=8)
    x = jax.device_put(np.arange(4, dtype=np.float16), jax.NamedSharding(mesh, jax.P()))
    for place in range(0, 8 * 4 * 16, 7):
        device, word, bit = place // 64, place // 16 % 4, place % 16
        assert [
            f"device {device} " in line
            for line in differing({"x": with_flipped_bit(x, device, word, bit)})
        ] == [True]


COLLECTIVE = re.compile(r"all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter")


def test_no_collective_is_in_the_program() -> None:
    mesh, specs = (
        mesh_of(data=2, fsdp=4),
        {"a": jax.P(), "b": jax.P("fsdp"), "c": jax.P(None, "fsdp")},
    )
    text = (
        program(mesh, tuple(specs.values()))
        .lower(*made(mesh, **specs).values())
        .compile()
        .as_text()
    )
    assert not COLLECTIVE.search(text)


@pytest.mark.deviceless
def test_gpus_send_and_copy_nothing() -> None:
    """16 H100s, each with 0.6 GB of state: the comparison needs only some MiB more."""
    mesh, specs = h100(data=2, fsdp=8), (jax.P(None, "fsdp"), jax.P())
    shardings = [jax.NamedSharding(mesh, spec) for spec in specs]
    leaves = [
        jax.ShapeDtypeStruct((8, 4096, 4096), t, sharding=s)
        for s, t in zip(shardings, ("bfloat16", "float32"), strict=True)
    ]
    compiled = program(mesh, specs).lower(*leaves).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 16 * 2**20
    assert not COLLECTIVE.search(compiled.as_text())


@functools.cache
def trainer(rules: str) -> tuple[ModelLayout, Optimizer, Step]:
    layout, optimizer = (
        ModelLayout.of(dataclasses.replace(GPT, dropout=0.0), shard_on(rules, data=8)),
        Optimizer(OptimizerConfig(warmup_steps=0), 4),
    )
    return layout, optimizer, train_step(layout, optimizer, seed=0)


def after_one_step(
    rules: str, part: str = "", device: int = 0, word: int = 0, bit: int = 0
) -> State:
    """Returns the result of a real, donated training step from a state with one flipped bit in a
    replica of params or mu ("": none)."""
    layout, optimizer, step = trainer(rules)
    random = np.random.default_rng(0)
    state = jax.tree.map(
        lambda s: jax.device_put(np.zeros(s.shape, s.dtype), s.sharding),
        abstract_state(layout, optimizer),
    )
    weights = {
        name: 0.1 * random.normal(size=x.shape).astype(np.float32)
        for name, x in state["params"].items()
    }
    state["params"] = {
        name: jax.device_put(weights[name], x.sharding) for name, x in state["params"].items()
    }
    if part:
        state[part][UP] = with_flipped_bit(state[part][UP], device, word, bit)
    assert [line.split(":")[0] for line in differing(state)] == ([f"{part}/{UP}"] if part else [])
    return step(state, on_devices(host_batch(1), layout))[0]


@pytest.mark.parametrize(
    ("part", "bit"), [pytest.param("params", 20, marks=pytest.mark.slow), ("mu", 30)]
)
def test_a_step_does_not_repair_it(part: str, bit: int) -> None:
    """Under DDP each device updates its own replica: a difference before a step is still there
    after it, in that leaf and device alone."""
    lines = differing(after_one_step("ddp", part, device=3, word=9, bit=bit))
    found = {"params": [f"params/{UP}"], "mu": [f"mu/{UP}", f"params/{UP}"]}[part]
    assert lines == [
        f"{leaf}: device 3 (process 0, cpu:3) differs from the 7 other replicas" for leaf in found
    ]


def test_a_step_of_well_devices_leaves_them_equal() -> None:
    state = after_one_step("ddp")
    assert differing(state) == []
    require_equal(state)


@pytest.mark.slow
@pytest.mark.parametrize(("word", "fate"), [(0, "everywhere"), (-1, "gone")])
def test_a_step_of_zero_hides_it(word: int, fate: str) -> None:
    """Weights are gathered from the device that updates each, so after a step a flipped bit has
    spread or is gone."""
    well, sick = (
        after_one_step("zero2"),
        after_one_step("zero2", "params", device=0, word=word, bit=30),
    )
    assert differing(sick) == []
    one, other = (
        np.asarray(state["params"][UP].addressable_shards[5].data).reshape(-1)[word]
        for state in (well, sick)
    )
    assert (abs(one - other) > 1) == (fate == "everywhere")


def test_the_error_names_the_device_and_what_to_do() -> None:
    x = jax.device_put(np.ones((4, 4), np.float32), jax.NamedSharding(mesh_of(data=8), jax.P()))
    state = {"params": {str(n): with_flipped_bit(x, device=2) for n in range(10)}}
    with pytest.raises(
        ReplicasDiffer, match=r"(?s)params/0: device 2 .*params/7: .*and 2 more.*checkpoint"
    ) as error:
        require_equal(state)
    assert "params/8" not in str(error.value)


def test_the_process_of_the_faulty_device_fails_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """The launcher blames the node whose process fails first."""
    waits: list[float] = []
    monkeypatch.setattr(replicas.time, "sleep", waits.append)
    for processes in ([], [0], [0, 1]):
        replicas.yield_to_the_blamed(processes)
    assert waits == []
    replicas.yield_to_the_blamed([1])
    assert waits == [2.0]
    x = jax.device_put(np.ones((4, 4), np.float32), jax.NamedSharding(mesh_of(data=8), jax.P()))
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    with pytest.raises(ReplicasDiffer):
        require_equal({"params": {"0": with_flipped_bit(x, device=2)}})
    assert waits == [2.0, 2.0], "all devices are those of process 0"
