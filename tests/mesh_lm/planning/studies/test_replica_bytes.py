"""Figure 1: what data parallelism sends, against arithmetic."""

from __future__ import annotations

import dataclasses

import pytest

from mesh_lm.config import load
from mesh_lm.errors import ConfigError
from mesh_lm.model import DecoderConfig
from mesh_lm.planning.studies.ranges import gpu_counts, model_sizes, size_word
from mesh_lm.planning.studies.replica_bytes import (
    EXPERT_REPLICAS,
    REPLICAS,
    BytesRow,
    replica_bytes,
)

COUNTS = [2**i for i in range(9)]


@pytest.fixture(scope="module")
def rows() -> dict[tuple[str, int], BytesRow]:
    made = replica_bytes(load("gpt_1_3b"), COUNTS)
    return {(row.strategy, row.gpus): row for row in made}


def test_every_strategy_has_a_row_for_every_count(rows: dict[tuple[str, int], BytesRow]) -> None:
    assert list(rows) == [(one.label, n) for one in REPLICAS for n in COUNTS]


def test_ddp_sends_its_gradients_around_a_ring(rows: dict[tuple[str, int], BytesRow]) -> None:
    """2 (n - 1) / n of fp32 gradients, exactly: of all weights, with the vocabulary's padding."""
    model = load("gpt_1_3b").model
    n_params = dataclasses.replace(model, vocab_size=model.padded_vocab).n_params()
    for n in COUNTS:
        assert rows["DDP", n].sent == pytest.approx(2 * (n - 1) / n * 4 * n_params, rel=1e-12)


def test_what_others_send(rows: dict[tuple[str, int], BytesRow]) -> None:
    """Bytes for each parameter on many GPUs, padding and vectors aside."""
    expected = {
        "DDP": 8, "DDP, bf16 sums": 4, "DDP, int8 sums": 2, "DDP in two levels": 8, "ZeRO-1": 12,
        "ZeRO-2": 8, "distributed": 6, "distributed, int8 sums": 3,
    }  # fmt: skip
    ring = 255 / 256
    for strategy, n_bytes in expected.items():
        assert rows[strategy, 256].per_parameter == pytest.approx(ring * n_bytes, rel=0.025)


def test_two_levels_send_an_eighth_between_nodes(rows: dict[tuple[str, int], BytesRow]) -> None:
    row = rows["DDP in two levels", 256]
    assert row.sent == pytest.approx(row.inside + row.between)
    assert row.between == pytest.approx(rows["DDP", 32].sent / 8, rel=5e-3)
    assert rows["DDP in two levels", 8].status == "two levels need several nodes of 8 GPUs"


def test_one_gpu_sends_nothing_and_a_node_sends_inside(
    rows: dict[tuple[str, int], BytesRow],
) -> None:
    for one in REPLICAS:
        assert rows[one.label, 1].sent == 0
        assert rows[one.label, 8].between == 0
        row = rows[one.label, 16]
        assert row.status or row.between > 0


def test_microbatches_count_where_layers_gather() -> None:
    config = load("gpt_1_3b")
    once = {row.strategy: row.sent for row in replica_bytes(config, [64])}
    four_times = {row.strategy: row.sent for row in replica_bytes(config, [64], microbatches=4)}
    for strategy, sent in once.items():
        gathers = strategy in ("ZeRO-3", "FSDP")
        assert (four_times[strategy] > 3 * sent) if gathers else (four_times[strategy] == sent)


def test_counts_that_do_not_divide_are_marked() -> None:
    rows = {row.strategy: row for row in replica_bytes(load("gpt_1_3b"), [24])}
    assert rows["FSDP"].status == "d_model=2048 does not divide by 24"
    assert rows["DDP"].status == ""


def test_experts_send_tokens() -> None:
    """Each GPU of a node has an eighth of the experts: it sums their gradients with one GPU of each
    other node, and exchanges tokens inside of the node."""
    config = load("mixtral_8x7b")
    rows = {(row.strategy, row.gpus): row for row in replica_bytes(config, [8, 64])}
    assert {name for name, _ in rows} == {one.label for one in EXPERT_REPLICAS}
    model = config.model
    assert isinstance(model, DecoderConfig)
    experts = model.n_layers * model.experts.number * 3 * model.d_model * model.d_expert
    around_nodes = 2 * 7 / 8 * 4 * experts / 8
    others = 2 * 63 / 64 * 4 * (model.n_params() - experts)
    padded = rows["EP, padded", 64]
    assert padded.between == pytest.approx(around_nodes + others, rel=0.01)
    assert padded.inside > 0 and padded.sent < rows["DDP", 64].sent / 4
    # Twice the microbatches, twice the tokens.
    twice = {row.strategy: row for row in replica_bytes(config, [64], microbatches=2)}
    assert twice["EP, padded"].inside == pytest.approx(2 * padded.inside, rel=0.01)
    assert rows["EP, padded", 8].between == pytest.approx(0, abs=1)


def test_a_model_without_forms_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"no closed form for this model: model\.dtype=float32"):
        replica_bytes(load("gpt_tiny"), [8])


def test_ranges() -> None:
    assert gpu_counts("1..16", "--gpus") == [1, 2, 4, 8, 16]
    assert gpu_counts("96..400", "--gpus") == [96, 192, 384, 400]
    assert gpu_counts("96..400", "--gpus", [48, 144, 288, 576]) == [144, 288]
    assert gpu_counts("576,96,96", "--gpus") == [96, 576]
    assert gpu_counts("8", "--gpus") == [8]
    assert model_sizes("1b..1t", "--sizes") == [1e9, 3e9, 1e10, 3e10, 1e11, 3e11, 1e12]
    assert model_sizes("70b,1.7B", "--sizes") == [1.7e9, 7e10]
    assert [size_word(n) for n in (1e9, 1.7e9, 3e11, 1e12, 1.24e8)] == [
        *("1b", "1.7b", "300b", "1t", "124m")
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("8..4", "--gpus=8..4: these numbers of GPUs fall; write 4..8"),
        ("8..", "--gpus=8..: expected a range of GPUs, as 8..64, or numbers, as 96,144,288"),
        ("0..8", "expected a range of GPUs"),
        ("many", "expected a range of GPUs"),
        ("8..9999999", "the GPUs of a study are at most 1,048,576"),
    ],
)
def test_other_ranges_of_gpus(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        gpu_counts(text, "--gpus")
    assert message in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1b..", "--sizes=1b..: expected a range of sizes, as 1b..1t, or sizes, as 7b,70b"),
        ("7", "expected a range of sizes"),
        ("70b..7b", "these sizes of models fall; write 7b..70b"),
        ("1m", "expected models of 300m to 10t parameters"),
    ],
)
def test_other_ranges_of_sizes(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        model_sizes(text, "--sizes")
    assert message in str(refused.value)
