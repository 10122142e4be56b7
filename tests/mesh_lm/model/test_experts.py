"""The parts of a mixture of experts by themselves: router, permutation, sizes of an exchange, and a
model with experts outside of training."""

from __future__ import annotations

import dataclasses
import itertools
import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from experts_model import EXPERTS, MODEL
from hypothesis import given, settings
from hypothesis import strategies as st
from support import gradients, host_batch, initial, shard_on

from mesh_lm.model import DecoderConfig, SegmentConfig, moe, token_batch
from mesh_lm.model.exchange import Exchange, Hop, chosen_share
from mesh_lm.model.experts_config import ExpertsConfig
from mesh_lm.model.permutation import Rows, add_rows, copy_tokens, sort
from mesh_lm.model.router import balance_loss, route
from mesh_lm.parallel.layout import ModelLayout
from mesh_lm.planning.experts import balanced_token_bytes, token_bytes, weight_bytes

COMPILE_BUDGET = 110


# The router.


def chosen_by_numpy(logits: np.ndarray, bias: np.ndarray, config: ExpertsConfig) -> list[set[int]]:
    """The experts of each token, one token after another."""
    chosen = []
    for row in logits.astype(np.float64):
        exponents = np.exp(row - row.max())
        is_softmax = config.score == "softmax"
        rank = (exponents / exponents.sum() if is_softmax else 1 / (1 + np.exp(-row))) + bias
        size = config.number // config.groups
        groups = np.sort(rank.reshape(config.groups, size), -1)[:, -2:].sum(-1)
        best = np.argsort(-groups)[: config.active_groups]
        allowed = [e for g in best for e in range(g * size, (g + 1) * size)]
        chosen.append(set(sorted(allowed, key=lambda e: -rank[e])[: config.active]))
    return chosen


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("groups", [(1, 1), (4, 2)])
def test_a_token_has_its_best_experts_of_its_best_groups(
    score: Any, groups: tuple[int, int]
) -> None:
    config = ExpertsConfig(
        number=16, active=3, score=score, groups=groups[0], active_groups=groups[1], scale=2.0
    )
    random = np.random.default_rng(0)
    logits = random.normal(size=(50, 16)).astype(np.float32)
    bias = random.normal(size=16).astype(np.float32) * 0.1
    choose = jax.jit(route, static_argnums=2)
    routing = choose(logits, bias, config)
    found = [set(row) for row in np.asarray(routing.experts).tolist()]
    assert found == chosen_by_numpy(logits, bias, config)
    # The bias chooses, and scales nothing.
    scores = np.take_along_axis(np.asarray(routing.scores), np.asarray(routing.experts), 1)
    np.testing.assert_allclose(routing.weights, 2 * scores / scores.sum(-1, keepdims=True), 1e-6)
    free = choose(logits, None, dataclasses.replace(config, normalised=False))
    own = np.take_along_axis(np.asarray(free.scores), np.asarray(free.experts), 1)
    np.testing.assert_allclose(free.weights, 2 * own, rtol=1e-6)


def test_balanced_routing_has_a_balance_loss_of_one() -> None:
    uniform = jnp.full((3, 8), 1 / 8)
    np.testing.assert_allclose(balance_loss(2 * uniform, uniform, active=2), 1.0, rtol=1e-6)
    alone = jax.nn.one_hot(jnp.zeros(3, int), 8)
    np.testing.assert_allclose(balance_loss(alone, alone, active=1), 8.0, rtol=1e-6)


# Permutations.


N_TOKENS, N_COLUMNS, N_ROWS = 6, 3, 8


@jax.jit
def both_ways(x: jax.Array, y: jax.Array, rows: Rows) -> tuple[jax.Array, ...]:
    """Returns (copies of x, sums of y, gradient of the copies, gradient of the sums)."""
    copied, pull_copy = jax.vjp(lambda x: copy_tokens(x, rows), x)
    added, pull_add = jax.vjp(lambda y: add_rows(y, rows), y)
    return copied, added, pull_copy(y)[0], pull_add(x)[0]


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_rows_are_copied_and_added_as_a_matrix_would(data: st.DataObject) -> None:
    """Both directions, and both gradients, equal those of the 0-1 matrix that says which token each
    row copies."""
    slots = [(token, column) for token in range(N_TOKENS) for column in range(N_COLUMNS)]
    used = data.draw(st.lists(st.sampled_from(slots), unique=True, max_size=N_ROWS))
    places = data.draw(st.permutations(range(N_ROWS)))[: len(used)]
    token = np.full(N_ROWS, -1, np.int32)
    place = np.full((N_TOKENS, N_COLUMNS), -1, np.int32)
    matrix = np.zeros((N_ROWS, N_TOKENS), np.float32)
    for (t, column), row in zip(used, places, strict=True):
        token[row] = t
        place[t, column] = row
        matrix[row, t] = 1
    random = np.random.default_rng(0)
    x = random.normal(size=(N_TOKENS, 4)).astype(np.float32)
    y = random.normal(size=(N_ROWS, 4)).astype(np.float32)
    wanted = (matrix @ x, matrix.T @ y, matrix.T @ y, matrix @ x)
    for found, array in zip(both_ways(x, y, Rows(token, place)), wanted, strict=True):
        np.testing.assert_allclose(found, array, rtol=1e-5, atol=1e-6)


def test_sorts_stably_and_counts() -> None:
    keys = np.array([2, 0, 3, 2, 0, 3], np.int32)
    order = jax.jit(sort, static_argnums=1)(keys, 3)
    assert order.by_key.tolist() == [1, 4, 0, 3, 2, 5]
    assert order.rank.tolist() == [2, 0, 4, 3, 1, 5]
    assert order.sizes.tolist() == [2, 0, 2], "3 stands for none"


# Sizes.


@pytest.mark.parametrize(("n", "k", "group"), [(8, 2, 2), (6, 3, 1), (5, 2, 5), (7, 1, 3)])
def test_the_share_of_tokens_with_an_expert_in_a_group(n: int, k: int, group: int) -> None:
    choices = list(itertools.combinations(range(n), k))
    expected = sum(min(choice) < group for choice in choices) / len(choices)
    assert chosen_share(n, k, group) == pytest.approx(expected)


def test_buffers_hold_the_worst_routing_or_a_multiple_of_balanced_routing() -> None:
    hop = Hop(("expert",), "padded", 8)
    exchange = Exchange((hop,), n_experts=128, active=8, n_tokens=4096, factor=1.25)
    share = 1 - math.comb(112, 8) / math.comb(128, 8)
    assert exchange.local_experts == 16
    assert 0 <= exchange.sent_tokens(hop, (), 4096) - 1.25 * share * 4096 < 8
    assert exchange.buffer_rows(8 * 3000) == 1.25 * 8 * 4096
    worst = dataclasses.replace(exchange, factor=0)
    assert worst.sent_tokens(hop, (), 4096) == 4096, "each token to each device, once"
    assert worst.buffer_rows(8 * 4096) == 8 * 4096 * 8
    # A buffer is never larger than what can arrive.
    few = dataclasses.replace(exchange, n_experts=8, active=1)
    assert few.buffer_rows(100) == 100


def test_closed_forms_of_what_is_sent() -> None:
    """Where a token has as many experts as there are devices, gathering all tokens sends no more
    than an all-to-all of one row for each expert of a token."""
    gather = Exchange((Hop(("expert",), "gather", 8),), 128, 8, 4096, 1.25)
    rows = 4 * 7 * 4096 * 2048 * 2  # four exchanges of bf16 rows
    assert token_bytes(gather, 2048) == pytest.approx(rows, rel=0.01)
    assert balanced_token_bytes(gather, 2048) == rows
    # 4,096 tokens of which each goes to two of eight devices, at most.
    padded = Exchange((Hop(("expert",), "padded", 8),), 8, 2, 4096, 1.0)
    assert token_bytes(padded, 2048) == pytest.approx(rows * chosen_share(8, 2, 1), rel=0.01)
    assert chosen_share(8, 2, 1) == pytest.approx(1 / 4)
    # Through two hops a token is sent to a group once, and then to each of its devices.
    two = Exchange((Hop(("data",), "padded", 2), Hop(("expert",), "gather", 4)), 8, 2, 4096, 1.0)
    sent = chosen_share(8, 2, 4) * 4096
    assert token_bytes(two, 2048) == pytest.approx(
        (sent + 3 * 2 * sent) * rows / 7 / 4096, rel=0.01
    )
    assert weight_bytes(gather, 3 * 2048 * 768) == 3 * 128 * 3 * 2048 * 768 * 2 * 7 / 8


# Layers.


def test_counts_the_parameters_and_the_active_ones() -> None:
    for config in (MODEL, dataclasses.replace(MODEL, activation="gelu", biases=True)):
        for shared in (0, 16):
            each = dataclasses.replace(
                config, experts=dataclasses.replace(config.experts, shared=shared)
            )
            arrays = initial(ModelLayout.of(each, shard_on("ddp")))
            padding = (each.padded_vocab - each.vocab_size) * each.d_model * 2
            weights = {n: x for n, x in arrays.items() if not n.endswith("experts.bias")}
            assert each.n_params() == sum(x.size for x in weights.values()) - padding
    idle = EXPERTS.number - EXPERTS.active
    more = dataclasses.replace(MODEL, experts=dataclasses.replace(EXPERTS, active=EXPERTS.number))
    per_expert = 6 * MODEL.n_layers * 3 * MODEL.d_model * EXPERTS.d_ff
    assert more.flops_per_token() - MODEL.flops_per_token() == idle * per_expert


OWN_LAYERS = """
from mesh_lm.model.dense import DenseLayer
from mesh_lm.model.moe import MoeLayer


class Sparse(MoeLayer):
    pass


class Dense(DenseLayer):
    pass
"""


def test_a_layer_derived_from_ours_has_experts(tmp_path: Path) -> None:
    file = tmp_path / "own_layers.py"
    file.write_text(OWN_LAYERS, encoding="utf-8")
    segments = (
        SegmentConfig("first", 1, f"{file}:Dense"),
        SegmentConfig("others", 1, f"{file}:Sparse"),
        SegmentConfig("last", 1, f"{file}:Missing"),
    )
    model = dataclasses.replace(MODEL, segments=segments[:2])
    ours = (SegmentConfig("first", 1), SegmentConfig("others", 1, "moe"))
    same = dataclasses.replace(MODEL, segments=ours)
    assert [segment.name for segment in model.expert_segments()] == ["others"]
    assert model.n_params() == same.n_params() and model.n_idle_params() == same.n_idle_params() > 0
    assert model.flops_per_token() == same.flops_per_token()
    assert model.problems() == []
    (problem,) = dataclasses.replace(MODEL, n_layers=3, segments=segments).problems()
    assert problem.endswith("'Missing' is not a class of the module " + repr(str(file)))


@pytest.mark.slow
def test_rows_of_no_token_reach_no_result(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a kernel leaves in rows after the last expert's, even NaN, loss and gradients are
    those without."""
    real = moe.grouped_matmul

    @jax.custom_vjp
    def poisoned(y: jax.Array, n_used: jax.Array) -> jax.Array:
        return jnp.where((jnp.arange(len(y)) < n_used)[:, None], y, jnp.nan)

    def forward(y: jax.Array, n_used: jax.Array) -> tuple[jax.Array, jax.Array]:
        return poisoned(y, n_used), n_used

    def backward(n_used: jax.Array, dy: jax.Array) -> tuple[jax.Array, None]:
        return jnp.where((jnp.arange(len(dy)) < n_used)[:, None], dy, 0), None

    poisoned.defvjp(forward, backward)

    def matmul(x: jax.Array, w: jax.Array, sizes: jax.Array, **target: Any) -> jax.Array:
        used = (jnp.arange(len(x)) < sizes.sum())[:, None]
        return poisoned(real(jnp.where(used, x, 0), w, sizes, **target), sizes.sum())

    wanted = gradients(MODEL, shard_on("experts_padded", expert=2))
    monkeypatch.setattr(moe, "grouped_matmul", matmul)
    found = gradients(MODEL, shard_on("experts_padded", expert=2), params=wanted[0])
    assert found[1]["loss"] == pytest.approx(wanted[1]["loss"], rel=1e-6)
    for name, gradient in wanted[2].items():
        np.testing.assert_allclose(found[2][name], gradient, rtol=1e-4, atol=1e-5, err_msg=name)


def _logits(rules: str, texts: np.ndarray, **mesh: int) -> np.ndarray:
    layout = ModelLayout.of(MODEL, shard_on(rules, **mesh))
    params = initial(ModelLayout.of(MODEL, shard_on("ddp")))
    shardings = layout.shardings("params")
    placed = {name: jax.device_put(x, shardings[name]) for name, x in params.items()}

    def run(placed: dict[str, jax.Array], texts: jax.Array) -> jax.Array:
        return layout.bind(placed).logits(token_batch(texts))

    return np.asarray(jax.jit(run)(placed, texts))


@pytest.mark.parametrize("rules", ["experts_gather", "experts_padded"])
def test_scores_outside_of_training_on_a_mesh(rules: str) -> None:
    texts = host_batch(1)["tokens"][0][:4]
    wanted = _logits("ddp", texts)
    found = _logits(rules, texts, expert=4)
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)


def test_a_cache_gives_the_logits_of_the_whole_text() -> None:
    texts = host_batch(1)["tokens"][0][:2]
    wanted = _logits("ddp", texts)[:, -1]
    layout = ModelLayout.of(MODEL, shard_on("ddp"))
    params = initial(layout)

    def run(params: dict[str, jax.Array], texts: jax.Array) -> jax.Array:
        model = layout.bind(params)
        cache = model.empty_cache(2, texts.shape[1])
        logits = None
        for start, end in ((0, 10), (10, 13), (13, texts.shape[1])):
            part = texts[:, start:end]
            batch = {
                "tokens": part,
                "positions": jnp.broadcast_to(jnp.arange(start, end), part.shape),
                "segment_ids": jnp.ones_like(part),
            }
            logits, cache = model.extend(batch, cache, start)
        assert logits is not None
        return logits

    found = jax.jit(run)({name: jnp.asarray(x) for name, x in params.items()}, texts)
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)


def test_bias_follows_the_loads() -> None:
    sums = {"blocks/load": jnp.asarray([[4.0, 0, 2, 2], [0, 0, 0, 0]])}
    config = DecoderConfig(
        block="moe",
        experts=ExpertsConfig(number=4, active=2, bias=True, bias_rate=0.25),
        n_layers=1,
    )
    updated = config.updated({"blocks.experts.bias": jnp.zeros((2, 4))}, sums)
    assert updated["blocks.experts.bias"].tolist() == [[-0.25, 0.25, 0, 0], [0, 0, 0, 0]]


def test_metrics_of_loads() -> None:
    segments = (SegmentConfig("a", 1, "moe"), SegmentConfig("b", 1), SegmentConfig("c", 1, "moe"))
    config = DecoderConfig(segments=segments, experts=ExpertsConfig(number=4, active=2), n_layers=3)
    sums = {"c/load": jnp.asarray([[4.0, 0, 2, 2]]), "a/load": jnp.asarray([[3.0, 2, 2, 1]])}
    metrics = config.metrics(sums)
    assert metrics["expert_loads"].tolist() == [[1.5, 1, 1, 0.5], [2, 0, 1, 1]]
    assert float(metrics["expert_load"]) == 1.75 and float(metrics["expert_idle"]) == 0.125
    assert DecoderConfig().metrics({}) == {}
