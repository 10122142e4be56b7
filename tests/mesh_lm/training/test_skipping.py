"""Skipped steps: not finite, or outliers by recent statistics. After one, training continues as if
its batch had not existed."""

import dataclasses
import functools
import math
from typing import Any

import jax
import numpy as np
import pytest
from support import GPT, host_batch, on_devices, shard_on

from mesh_lm.config import OptimizerConfig
from mesh_lm.optim import Optimizer
from mesh_lm.parallel.layout import ModelLayout
from mesh_lm.state import State, abstract_state, initial_statistics, loss_statistics
from mesh_lm.training.step import train_step

COMPILE_BUDGET = 3

# The effects of a skipped step besides the counters: dropout and the learning rate depend on the
# step's number.
STILL = OptimizerConfig(learning_rate=0.01, warmup_steps=0, schedule="constant")
Row = dict[str, float]


class Trainer:
    """A tiny model on a mesh; NumPy makes the weights, so that only the step is compiled."""

    def __init__(self, rules: str, outlier: float, mesh: dict[str, int]) -> None:
        self.layout = ModelLayout.of(dataclasses.replace(GPT, dropout=0.0), shard_on(rules, **mesh))
        self.optimizer = Optimizer(STILL, 1000)
        self.step = train_step(self.layout, self.optimizer, seed=0, outlier=outlier)

    def fresh(self) -> State:
        random = np.random.default_rng(0)
        state = jax.tree.map(lambda s: np.zeros(s.shape, s.dtype), self.abstract())
        state["params"] = {
            name: 0.1 * random.normal(size=x.shape).astype(x.dtype)
            for name, x in state["params"].items()
        }
        return jax.tree.map(lambda x, s: jax.device_put(x, s.sharding), state, self.abstract())

    def abstract(self) -> State:
        return abstract_state(self.layout, self.optimizer)

    def run(self, state: State, batches: list[dict[str, np.ndarray]]) -> tuple[State, list[Row]]:
        rows = []
        for batch in batches:
            state, metrics = self.step(state, on_devices(batch, self.layout))
            rows.append({name: float(x) for name, x in metrics.items()})
        return jax.tree.map(np.asarray, state), rows


@functools.cache
def trainer(rules: str = "ddp", outlier: float = 4.0, **mesh: int) -> Trainer:
    return Trainer(rules, outlier, mesh)


def batch_of(seed: int) -> dict[str, np.ndarray]:
    """Text that repeats a few tokens, so that its loss falls within some steps."""
    batch = host_batch(1, seed)
    return batch | {"tokens": batch["tokens"] % 7, "labels": batch["labels"] % 7}


def nan_batch() -> dict[str, np.ndarray]:
    batch = batch_of(0)
    return batch | {"weights": batch["weights"] * np.float32(math.nan)}


def strange_batch() -> dict[str, np.ndarray]:
    """Labels that did not occur before."""
    batch = batch_of(0)
    return batch | {"labels": batch["labels"] + 100}


def assert_same(found: State, wanted: State, **counters: Any) -> None:
    """Compares two states bit by bit, except for these counters."""
    for path, x in jax.tree_util.tree_flatten_with_path(found)[0]:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        expected = (
            counters[name]
            if name in counters
            else functools.reduce(lambda tree, key: tree[key.key], path, wanted)
        )
        np.testing.assert_array_equal(x, expected, err_msg=name)


GOOD = [batch_of(seed) for seed in range(60)]


@functools.cache
def undisturbed() -> tuple[State, list[Row]]:
    return trainer().run(trainer().fresh(), GOOD)


@pytest.mark.parametrize(("bad", "at"), [(nan_batch, 1), (nan_batch, 58), (strange_batch, 55)])
def test_a_skipped_batch_leaves_no_trace(bad: Any, at: int) -> None:
    """Weights, moments, statistics and Adam's count are bit-identical to those of a run that never
    saw the batch."""
    wanted, rows = undisturbed()
    state, seen = trainer().run(trainer().fresh(), [*GOOD[:at], bad(), bad(), *GOOD[at:]])
    assert [row["skipped"] for row in seen] == [0.0] * at + [1.0] + [2.0] * (len(GOOD) - at + 1)
    assert [row["loss"] for row in (*seen[:at], *seen[at + 2 :])] == [row["loss"] for row in rows]
    assert_same(state, wanted, step=62, skipped=2)


def test_a_well_run_skips_nothing() -> None:
    """Its loss falls from 5.5 to 2 and its gradient norms vary, but none exceeds the mean by 4
    deviations."""
    _, rows = undisturbed()
    assert rows[-1]["skipped"] == 0 and rows[0]["loss"] > rows[-1]["loss"] + 1


def test_the_statistics_are_those_of_the_good_steps() -> None:
    """Up to 100 steps they equal NumPy's means and variances in float64."""
    state, rows = undisturbed()
    seen = np.array([[row["loss"], math.log(row["grad_norm"])] for row in rows], np.float64)
    np.testing.assert_allclose(state["recent"].T, [[60, 60], seen.mean(0), seen.var(0)], rtol=1e-4)


def with_recent(loss: tuple[float, float], norm: tuple[float, float], seen: int) -> State:
    """Returns a state with this mean and deviation of loss and log norm."""
    state = trainer().fresh()
    values = np.array([[seen, mean, deviation**2] for mean, deviation in (loss, norm)], np.float32)
    return state | {"recent": jax.device_put(values, state["recent"].sharding)}


@pytest.mark.parametrize(
    ("loss", "norm", "seen", "skipped"),
    [
        (-3.9, 0, 1000, 0),
        (-4.1, 0, 1000, 1),
        (0, -3.9, 1000, 0),
        (0, -4.1, 1000, 1),
        (9, 9, 1000, 0),
        (-9, -9, 49, 0),
        (-9, -9, 50, 1),
    ],
)
def test_the_threshold(loss: float, norm: float, seen: int, skipped: int) -> None:
    """Either is more than 4 deviations above its mean, after enough steps. loss, norm: the means
    relative to this step's values."""
    own = undisturbed()[1][0]
    lately = (own["loss"] + loss, 1), (math.log(own["grad_norm"]) + norm, 1)
    state, rows = trainer().run(with_recent(*lately, seen), GOOD[:1])
    assert rows[0]["skipped"] == skipped
    assert state["recent"][0, 0] == seen + 1 - skipped


def test_old_steps_are_forgotten() -> None:
    """Each step counts 1 %, so after 300 steps at another level 5 % of the statistics come from the
    steps before."""
    state = np.array([[1000, 5.0, 0.01]] * 2, np.float32)
    update = jax.jit(loss_statistics.update)
    for n in range(300):
        state = update(state, np.array([3.0 + 0.2 * (-1) ** n] * 2, np.float32))
    old = 0.99**300
    variance = old * 0.01 + (1 - old) * 0.04 + old * (1 - old) * (5 - 3) ** 2
    np.testing.assert_allclose(state, [[1300, 3 + old * (5 - 3), variance]] * 2, rtol=0.01)


@pytest.mark.slow
def test_the_same_on_a_mesh() -> None:
    mesh = trainer("hsdp", data=2, fsdp=2)
    batches = [*GOOD[:55], strange_batch(), nan_batch()]
    state, rows = mesh.run(mesh.fresh(), batches)
    alone, expected = trainer().run(trainer().fresh(), batches)
    assert [row["skipped"] for row in rows] == [row["skipped"] for row in expected] and rows[-1][
        "skipped"
    ] == 2
    np.testing.assert_allclose(state["recent"], alone["recent"], rtol=1e-3)


def test_the_leaf_lives_everywhere() -> None:
    where = trainer("hsdp", data=2, fsdp=2).abstract()["recent"]
    assert where.sharding.is_fully_replicated and (where.shape, where.dtype) == (
        initial_statistics().shape,
        initial_statistics().dtype,
    )
    assert not initial_statistics().any()
