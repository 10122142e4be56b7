"""The gradient noise scale: that of a toy whose noise is known, the norms of replicas against
gradients of their parts, and configs that lack them."""

from __future__ import annotations

import dataclasses
import functools
import re

import jax
import numpy as np
import pytest
from noise_toy import FrequencyConfig
from support import BATCH, GPT, host_batch, initial, on_devices, shard_on

from mesh_lm.config import OptimizerConfig, TrainConfig, TrainLoop, load
from mesh_lm.errors import ConfigError
from mesh_lm.optim import Optimizer
from mesh_lm.parallel import engine
from mesh_lm.parallel.layout import ModelLayout
from mesh_lm.parallel.noise_scale import REPLICA_SQUARE, SIGNAL, TRACE, estimates
from mesh_lm.state.initial import init_state
from mesh_lm.training.check import check
from mesh_lm.training.noise_scale import RunningNoiseScale
from mesh_lm.training.step import train_step
from sharding_rules import MeshConfig, preset

COMPILE_BUDGET = 30

OPTIMIZER = Optimizer(OptimizerConfig(), 1000)


def test_the_estimates_are_those_of_the_paper() -> None:
    """Without noise the trace is 0, and without a gradient the signal is; for two batch sizes they
    are equations (A.5) of arXiv 1812.06162."""
    random = np.random.default_rng(0)
    n, batch = 4, 32
    parts = random.normal(size=(n, 10))
    gradient = parts.mean(0)
    found = estimates(np.sum((parts / n) ** 2), np.linalg.norm(gradient), batch, n)
    small_batch = batch / n
    large = np.sum(gradient**2)
    small = np.mean(np.sum(parts**2, axis=1))
    signal = (batch * large - small_batch * small) / (batch - small_batch)
    trace = (small - large) / (1 / small_batch - 1 / batch)
    assert float(found[SIGNAL]) == pytest.approx(signal, rel=1e-5)
    assert float(found[TRACE]) == pytest.approx(trace, rel=1e-5)


def test_a_toy_with_known_noise() -> None:
    """Over 200 steps of the trainer's own step, on eight replicas with two microbatches each."""
    config = FrequencyConfig(vocab_size=64, seq_len=4)
    layout = ModelLayout.of(config, shard_on("ddp", data=8))
    state = init_state(layout, OPTIMIZER, 0)
    step = train_step(layout, OPTIMIZER, 0, has_noise_scale=True)
    random = np.random.default_rng(1)
    running = RunningNoiseScale()
    shape = (2, 32, 4)
    for _ in range(200):
        tokens = random.integers(0, 64, shape, dtype=np.int32)
        batch = {
            "tokens": tokens,
            "labels": tokens,
            "weights": np.ones(shape, np.float32),
            "sample_ids": np.arange(64, dtype=np.uint32).reshape(2, 32),
            "indices": np.broadcast_to(np.arange(4, dtype=np.int32), (2, 1, 4)),
        }
        state, metrics = step(state, on_devices_in_order(batch, layout))
        running.add(float(metrics[TRACE]), float(metrics[SIGNAL]))
    assert REPLICA_SQUARE not in metrics
    assert config.noise_scale == 15.75
    assert running.value == pytest.approx(config.noise_scale, rel=0.1)


def on_devices_in_order(batch: dict[str, np.ndarray], layout: ModelLayout) -> dict[str, jax.Array]:
    mesh = layout.shard.mesh
    spec = engine.batch_sharding(layout).spec
    return {
        name: jax.device_put(x, jax.NamedSharding(mesh, engine.leaf_spec(spec, x.shape)))
        for name, x in batch.items()
    }


@functools.cache
def squares_of_parts(n_replicas: int) -> float:
    """The sum of the squared norms of the parts of a gradient, each from a device of its own."""
    layout = ModelLayout.of(GPT, shard_on("ddp"))
    run = jax.jit(engine.value_and_grad(layout))
    params = initial(layout)
    whole = host_batch(1)
    weight = whole["weights"].sum()
    total = 0.0
    for part in np.split(np.arange(BATCH), n_replicas):
        batch = {name: x[:, part] if x.shape[1] == BATCH else x for name, x in whole.items()}
        _, grads = run(params, on_devices(batch, layout), jax.random.key(3))
        share = batch["weights"].sum() / weight
        total += sum(float(np.sum(np.square(share * np.asarray(g)))) for g in grads.values())
    return total


@pytest.mark.parametrize(
    ("rules", "mesh"),
    [
        ("ddp", {"data": 2}),
        pytest.param("megatron_sp", {"data": 2, "tensor": 2}, marks=pytest.mark.slow),
        pytest.param("hsdp", {"data": 2, "fsdp": 2}, marks=pytest.mark.slow),
    ],
)
def test_norms_of_replicas(rules: str, mesh: dict[str, int]) -> None:
    """Equal those of the gradients of their parts, also where XLA shards a replica's gradient."""
    layout = ModelLayout.of(GPT, shard_on(rules, **mesh))
    batch = on_devices(host_batch(1), layout)

    def square(params: dict, batch: dict) -> jax.Array:
        run = engine.region_with_feedback(layout, batch, replica_square=True)
        (sums, _), _, _ = run(params, batch, jax.random.key(3), {})
        return sums[REPLICA_SQUARE]

    found = jax.jit(square)(initial(layout), batch)
    assert float(found) == pytest.approx(squares_of_parts(2), rel=1e-4)


def test_it_costs_no_further_collective() -> None:
    """With replicas alone: the scalar is summed with the step's other scalars. Without the option
    the metrics do not have it."""
    layout = ModelLayout.of(FrequencyConfig(vocab_size=64, seq_len=16), shard_on("ddp", data=8))
    batch = on_devices(host_batch(1) | {"tokens": host_batch(1)["tokens"] % 64}, layout)
    counts = []
    for has_noise_scale in (False, True):
        step = train_step(layout, OPTIMIZER, 0, has_noise_scale=has_noise_scale)
        lowered = step.lower(init_state(layout, OPTIMIZER, 0), batch)
        compiled = lowered.compile().as_text() or ""
        counts.append(len(re.findall(r" all-reduce(?:-start)?\(", compiled)))
        assert (TRACE in lowered.out_info[1]) == has_noise_scale
    assert counts[0] == counts[1] > 0


def test_running_means() -> None:
    running = RunningNoiseScale()
    assert running.value is None
    running.add(4.0, -1.0)
    assert running.value is None
    running.add(float("nan"), 1.0)
    running.add(2.0, 3.0)
    assert running.value == pytest.approx(3.0 / 1.0)


def config(rules: str, **mesh: int) -> TrainConfig:
    return dataclasses.replace(
        load("gpt_tiny"),
        rules=preset(rules),
        mesh=MeshConfig(**({"data": 1} | mesh)),
        train=TrainLoop(global_batch=16, noise_scale=True, microbatches=2),
    )


@pytest.mark.parametrize(
    ("rules", "mesh"),
    [
        ("ddp", {"data": 8}),
        ("distributed+megatron_sp", {"data": 4, "tensor": 2}),
        ("hsdp", {"data": 2, "fsdp": 4}),
        ("zero1+reduce_int8", {"data": 8}),
    ],
)
def test_what_can_run(rules: str, mesh: dict[str, int]) -> None:
    check(config(rules, **mesh), 8)


PROBLEMS = {
    (
        "zero3",
        "data",
    ): "rules 'zero3' sum the gradient of a layer over replicas in every microbatch",
    ("fsdp", "fsdp"): "fsdp=8 has no replicas along mesh.data; set mesh.data to 2 or more",
    ("ring", "sequence"): "only a part of its replica's gradient along mesh.sequence=8",
    ("ddp", "pipeline"): "only a part of its replica's gradient along mesh.pipeline=4",
}


@pytest.mark.parametrize("case", PROBLEMS)
def test_configs_without_the_two_norms(case: tuple[str, str]) -> None:
    rules, axis = case
    size = 4 if axis == "pipeline" else 8
    with pytest.raises(ConfigError) as raised:
        check(config(rules, **{axis: size, **({"data": 2} if size == 4 else {})}), 8)
    (problem,) = str(raised.value).split("\n  - ")[1:]
    assert PROBLEMS[case] in problem and problem.startswith("train.noise_scale=true")
