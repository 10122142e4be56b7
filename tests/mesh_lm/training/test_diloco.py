"""DiLoCo: islands and their outer step equal AdamW on each part of the batch, in a loop by hand, on
any mesh inside of the islands."""

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest
from support import GPT, assert_same_gradients, host_batch, on_devices, shard_on

from mesh_lm.config import DilocoConfig, OptimizerConfig
from mesh_lm.optim import AdamW, Optimizer
from mesh_lm.parallel.layout import ModelLayout
from mesh_lm.state import State
from mesh_lm.state.initial import init_state
from mesh_lm.training.diloco import outer_step
from mesh_lm.training.step import train_step

COMPILE_BUDGET = 60
H, STEPS = 3, 7
# eps: the gradient of the keys' bias is noise
INNER = OptimizerConfig(AdamW(eps=1e-3), learning_rate=3e-3, warmup_steps=2, weight_decay=0.1)
DILOCO = DilocoConfig(outer_steps=H, outer_learning_rate=0.7, outer_momentum=0.9)


def part(batch: dict[str, np.ndarray], island: int, n: int) -> dict[str, np.ndarray]:
    """Returns the island's rows of every microbatch."""
    return {
        name: x if x.shape[1] == 1 else np.split(x, n, axis=1)[island] for name, x in batch.items()
    }


def diloco(
    config: DilocoConfig, rules: str, microbatches: int = 2, **mesh: int
) -> tuple[State, list[dict[str, float]]]:
    """Returns the state after STEPS steps, and the metrics of each."""
    layout, optimizer, all_metrics = (
        ModelLayout.of(GPT, shard_on(rules, **mesh)),
        Optimizer(INNER, 20, config),
        [],
    )
    state, step, outer = (
        init_state(layout, optimizer, 0),
        train_step(layout, optimizer, 0),
        outer_step(layout, optimizer),
    )
    for n in range(1, STEPS + 1):
        state, metrics = step(state, on_devices(host_batch(microbatches, seed=n), layout))
        all_metrics.append({name: float(x) for name, x in metrics.items()})
        state = outer(state) if n % H == 0 else state
    return jax.tree.map(np.asarray, state), all_metrics


def by_hand(
    n_islands: int, every: int = H
) -> tuple[list[State], dict[str, np.ndarray], dict[str, np.ndarray], list[float]]:
    """Returns (states of the islands, anchor, momentum, losses of the first): AdamW on one device;
    SGD with momentum `every` few steps."""
    layout, optimizer = ModelLayout.of(GPT, shard_on("ddp")), Optimizer(INNER, 20)
    step, states, losses = (
        train_step(layout, optimizer, 0),
        [init_state(layout, optimizer, 0) for _ in range(n_islands)],
        [],
    )
    anchor = jax.tree.map(np.asarray, states[0]["params"])
    momentum: dict[str, np.ndarray] = {name: np.zeros_like(x) for name, x in anchor.items()}
    for n in range(1, STEPS + 1):
        batch = host_batch(2, seed=n)
        both = [
            step(state, on_devices(part(batch, i, n_islands), layout))
            for i, state in enumerate(states)
        ]
        states = [state for state, _ in both]
        losses.append(float(both[0][1]["loss"]))
        if n % every == 0:
            mean = {
                name: np.mean([np.asarray(state["params"][name]) for state in states], axis=0)
                for name in anchor
            }
            for name in anchor:
                gradient = anchor[name] - mean[name]
                momentum[name] = DILOCO.outer_momentum * momentum[name] + gradient
                anchor[name] = anchor[name] - DILOCO.outer_learning_rate * (
                    gradient + DILOCO.outer_momentum * momentum[name]
                )
            states = [
                state | {"params": {k: jax.device_put(x) for k, x in anchor.items()}}
                for state in states
            ]
    return [jax.tree.map(np.asarray, state) for state in states], anchor, momentum, losses


@pytest.fixture(scope="module")
def wanted() -> Any:
    return by_hand(2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rules", "mesh"),
    [
        ("diloco", {}),
        pytest.param("diloco", {"data": 2}, marks=pytest.mark.exhaustive),
        ("diloco+fsdp+megatron_sp", {"fsdp": 2, "tensor": 2}),
        pytest.param("diloco+zero1+ring", {"data": 2, "sequence": 2}, marks=pytest.mark.exhaustive),
    ],
)
def test_islands_equal_a_loop_by_hand(wanted: Any, rules: str, mesh: dict[str, int]) -> None:
    states, anchor, momentum, losses = wanted
    found, metrics = diloco(DILOCO, rules, island=2, **mesh)
    assert_same_gradients(found["params"], anchor)
    # differences of nearly equal weights
    assert_same_gradients(found["outer_momentum"], momentum, 1e-4)
    for i, state in enumerate(states):
        assert_same_gradients({name: x[i] for name, x in found["islands"].items()}, state["params"])
        assert_same_gradients({name: x[i] for name, x in found["mu"].items()}, state["mu"], 1e-4)
    np.testing.assert_allclose([each["loss"] for each in metrics], losses, rtol=1e-5)
    assert any(
        np.abs(found["islands"][name][0] - found["islands"][name][1]).max() > 1e-4
        for name in anchor
    ), "after step 7 they differ"


@pytest.mark.slow
def test_one_island_that_moves_to_its_own_weights_is_plain_adamw() -> None:
    moves = dataclasses.replace(DILOCO, outer_learning_rate=1.0, outer_momentum=0.0)
    found, metrics = diloco(moves, "diloco", data=2)
    states, _, _, losses = by_hand(1, every=STEPS + 1)
    assert_same_gradients({name: x[0] for name, x in found["islands"].items()}, states[0]["params"])
    np.testing.assert_allclose([each["loss"] for each in metrics], losses, rtol=1e-5)
