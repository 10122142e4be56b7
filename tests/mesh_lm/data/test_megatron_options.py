"""What a Megatron user brings along: data without a held-out part, blends per split, and Megatron's
borders between documents."""

import dataclasses
import hashlib
import json
import re
import tracemalloc
from contextlib import closing
from pathlib import Path

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from in_memory import Tokens

from mesh_lm.config import DataConfig, TrainConfig, TrainLoop
from mesh_lm.data.batches import Batches
from mesh_lm.data.corpus import prepare
from mesh_lm.data.dataset import TokenArray
from mesh_lm.data.digests import digests_path
from mesh_lm.data.gpt_dataset import GPTDataset, split_ranges
from mesh_lm.data.index_cache import IndexCache
from mesh_lm.data.indexed import Documents, TokenStream, write_documents
from mesh_lm.data.megatron_corpus import _no_validation
from mesh_lm.data.rows import RowReader
from mesh_lm.data.sequences import Sequences
from mesh_lm.errors import ConfigError
from mesh_lm.model import DecoderConfig
from mesh_lm.training.check import check

SEQ = 16
VOCAB = 500
EOD = 0


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("data")
    chance = np.random.default_rng(0)
    for name, n in (("a", 60), ("b", 40), ("v", 30)):
        write_documents(
            directory / name,
            (np.append(chance.integers(1, VOCAB, k), EOD) for k in chance.integers(0, 30, n)),
            vocab=VOCAB,
        )
        description = {
            "eod": 0,
            "bytes": 7000 if name == "v" else 4000,
            "lost_bytes": 0,
            "tokens": 1000,
        }
        (directory / f"{name}.json").write_text(json.dumps(description), encoding="utf-8")
    return directory


def config(data: Path, *blend: str, **fields: object) -> TrainConfig:
    words = tuple(str(data / word) if word.isalpha() else word for word in blend)
    return TrainConfig(
        model=DecoderConfig(vocab_size=VOCAB, seq_len=SEQ), output=str(data / "run"),
        train=TrainLoop(steps=5, global_batch=4),
        data=DataConfig(blend=words, cache=str(data / "cache"), threads=0, **fields),  # pyright: ignore[reportArgumentType]
    )  # fmt: skip


def batches(train_config: TrainConfig, corpus=None, saved: dict | None = None) -> Batches:
    sharding = jax.NamedSharding(
        jax.make_mesh((1,), ("data",), (jax.sharding.AxisType.Auto,)), jax.P(None, "data")
    )
    return Batches(
        train_config,
        prepare(train_config.data, vocab=300) if corpus is None else corpus,
        sharding,
        saved,
    )


def ltor_masks_and_position_ids(
    row: np.ndarray, eod: int
) -> tuple[list[float], list[int], np.ndarray]:
    """Megatron's `_get_ltor_masks_and_position_ids` with all three resets, token by token, from its
    definition.

    Returns the loss mask (0 where a token is EOD), the position ids, and which keys each query
    attends to, bool [S, S].
    """
    positions = list(range(len(row)))
    may_attend = np.tril(np.ones((len(row), len(row)), bool))
    previous = 0
    for i, token in enumerate(row):
        if token == eod:
            may_attend[i + 1 :, : i + 1] = False
            for j in range(i + 1, len(row)):
                positions[j] -= i + 1 - previous
            previous = i + 1
    return [0.0 if token == eod else 1.0 for token in row], positions, may_attend


def attends(segment_ids: np.ndarray) -> np.ndarray:
    return np.tril(segment_ids[:, None] == segment_ids[None, :])


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 3), min_size=9, max_size=60), st.integers(1, 9))
def test_borders_are_megatrons(tokens: list[int], seq_len: int):
    """Also with documents of one EOD, an EOD first or last in a row, and none."""
    rows = RowReader(
        Sequences(Tokens(tokens), seq_len, eod=EOD, seed=None),
        eod=EOD,
        documents="megatron",
        mask_document_start=True,
    )
    for row in (rows.sample(g) for g in range(len(rows))):
        mask, positions, may_attend = ltor_masks_and_position_ids(row["tokens"], EOD)
        assert row["weights"].tolist() == mask and row["positions"].tolist() == positions
        assert (attends(row["segment_ids"]) == may_attend).all()


def digest(rows: list[np.ndarray]) -> str:
    return hashlib.sha256(b"".join(np.asarray(row, "<i8").tobytes() for row in rows)).hexdigest()


def test_hashes_of_a_corpus_are_megatrons_and_separate_ones_are_not(data: Path):
    """Position ids and loss masks of a complete epoch in Megatron's sample order."""
    documents = Documents(data / "a")
    order = GPTDataset(
        TokenStream(documents),
        SEQ,
        n_samples=50,
        seed=1234,
        cache=IndexCache(str(data / "cache")),
        fingerprint="a",
    )
    rows_by_kind = {
        kind: [
            RowReader(order, eod=EOD, documents=kind, mask_document_start=True).sample(g)
            for g in range(len(order))
        ]
        for kind in ("megatron", "separate")
    }
    oracle = [ltor_masks_and_position_ids(row["tokens"], EOD) for row in rows_by_kind["megatron"]]
    masks = digest([mask for mask, _, _ in oracle])
    positions = digest([position for _, position, _ in oracle])
    for kind, rows in rows_by_kind.items():
        assert digest([row["weights"] for row in rows]) == masks
        assert (digest([row["positions"] for row in rows]) == positions) == (kind == "megatron")


def test_held_out_text_has_the_same_borders(data: Path):
    train_config = config(data, "a", documents="megatron", split="50,50")
    batch = next(batches(train_config).heldout())
    for tokens, positions in zip(
        np.asarray(batch["tokens"])[0], np.asarray(batch["positions"])[0], strict=True
    ):
        assert positions.tolist() == ltor_masks_and_position_ids(tokens, EOD)[1]
    with pytest.raises(
        ConfigError,
        match=(
            r"data\.documents=megatron: the end-of-document token of this data is not known; set "
            r"data\.tok"
        ),
    ):
        RowReader(
            Sequences(Tokens(range(40)), 2, eod=None, seed=None), eod=None, documents="megatron"
        )


def test_a_validation_blend_of_its_own(data: Path):
    train_config = config(data, "0.6", "a", "0.4", "b", valid_blend=("1", str(data / "v")))
    corpus = prepare(train_config.data, vocab=0)
    sizes = {name: len(Documents(data / name).tokens) for name in "abv"}
    assert corpus.train_tokens == sizes["a"] + sizes["b"] and corpus.heldout_tokens == sizes["v"], (
        "complete prefixes"
    )
    assert (corpus.heldout_bytes, corpus.train_bytes) == (
        7 * sizes["v"],
        4 * corpus.train_tokens,
    ), "each by its own files"
    assert corpus.name == "Megatron prefixes, all documents"
    order = corpus.heldout_order(train_config)
    windows = order.read(np.arange(len(order)))
    assert windows.labels[windows.weights > 0].tolist() == Documents(data / "v").tokens.tolist(), (
        "each token once, in order"
    )
    assert batches(train_config).has_heldout


def test_the_last_partial_sequence_is_left_out(data: Path):
    """Megatron's default; ours pads it, so that each held-out token is a label once."""
    padded, train_config = (
        config(data, "a", valid_blend=(str(data / "v"),), megatron=habits)
        for habits in ((), ("drop_last_partial",))
    )
    tokens = Documents(data / "v").tokens
    order = prepare(train_config.data, vocab=0).heldout_order(train_config)
    windows = order.read(np.arange(len(order)))
    n = len(tokens) // SEQ * SEQ
    assert (
        n < len(tokens)
        and len(order) == n // SEQ == len(prepare(padded.data, vocab=0).heldout_order(padded)) - 1
    )
    assert windows.labels.ravel().tolist() == tokens[:n].tolist() and windows.weights.sum() == n
    long = dataclasses.replace(
        train_config, model=dataclasses.replace(train_config.model, seq_len=len(tokens) + 1)
    )
    with pytest.raises(
        ConfigError,
        match=(
            r"data\.megatron=drop_last_partial leaves no held-out sequence: no text has "
            r"model\.seq_len="
        ),
    ):
        prepare(train_config.data, vocab=0).heldout_order(long)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"valid_blend": ("v",), "split": "9,1"},
            r"data\.split=9,1 has no effect with data\.valid_blend.*leave one of them out",
        ),
        (
            {"valid_blend": ("v",), "blend": (), "path": "x"},
            r"data\.valid_blend=v is the held-out text of a data\.blend; set that, too",
        ),
        (
            {"valid_blend": ("1", "v"), "blend": ("1", "w", "1", "v")},
            r"data\.valid_blend: v is in data\.blend, too, so that it would be",
        ),
        (
            {"valid_blend": ("0.5", "v", "w")},
            r"data\.valid_blend=0\.5 v w: give prefixes only, or a weight before each prefix",
        ),
    ],
)
def test_the_check_of_a_validation_blend(data: Path, fields: dict, message: str):
    train_config = config(data, "a")
    with pytest.raises(ConfigError, match=message):
        check(
            dataclasses.replace(
                train_config, data=dataclasses.replace(train_config.data, **fields)
            ),
            1,
        )


@pytest.mark.parametrize(
    "fields", [{"documents": "packed"}, {"fim_rate": 0.5}, {"blend": (), "path": "x"}]
)
def test_where_the_extra_token_cannot_be_left_out(data: Path, fields: dict):
    train_config = config(data, "a", megatron=("no_extra_token",))
    check(train_config, 1)
    with pytest.raises(
        ConfigError,
        match=(
            r"data\.megatron=no_extra_token is for a data\.blend without packed documents and "
            r"without data\.fim"
        ),
    ):
        check(
            dataclasses.replace(
                train_config, data=dataclasses.replace(train_config.data, **fields)
            ),
            1,
        )


def test_without_the_extra_token_sequences_do_not_overlap(data: Path):
    with closing(
        batches(config(data, "a", megatron=("no_extra_token",), split="1")).train()
    ) as loader:
        batch = {name: np.asarray(leaf)[0] for name, leaf in next(loader)[1].items()}
    assert (batch["weights"][:, -1] == 0).all() and (batch["weights"][:, :-1] == 1).all()
    stream = Documents(data / "a").tokens
    assert len(prepare(config(data, "a", split="1").data, vocab=0).train()[0].offsets) == 61
    saved = batches(config(data, "a", split="1")).state(4)
    assert len(stream) and "no extra token" not in saved["corpus"]
    with pytest.raises(
        ConfigError,
        match=(
            r"was trained on corpus Megatron prefixes, split 1 .*, this config reads .*, no extra "
            r"token"
        ),
    ):
        batches(config(data, "a", megatron=("no_extra_token",), split="1"), saved=saved)


def test_offsets_are_those_of_an_array_and_need_no_memory(tmp_path: Path):
    lengths = np.random.default_rng(0).integers(0, 3, 50_000)
    write_documents(tmp_path / "x", (np.ones(n, np.int64) for n in lengths), vocab=VOCAB)
    digests_path(tmp_path / "x").unlink()
    tracemalloc.start()
    documents = Documents(tmp_path / "x")
    text = TokenStream(documents, 7, 49_000)
    n_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert n_bytes < 50_000, f"{n_bytes} bytes are held for 50,000 documents"
    all_offsets = np.concatenate(([0], np.cumsum(lengths)))
    part = all_offsets[7:49_001] - all_offsets[7]
    for offsets, array in ((documents.sequences, all_offsets), (text.offsets, part)):
        assert (
            len(offsets) == len(array)
            and (np.asarray(offsets) == array).all()
            and np.asarray(offsets).dtype == np.int64
        )
        for index in (
            0,
            len(array) - 1,
            np.array([5, 0, len(array) - 1]),
            np.array([[3]]),
            np.array([], int),
            slice(2, 9),
            slice(None, -1, 7),
        ):
            assert np.array_equal(offsets[index], array[index])
    assert np.array_equal(documents.offsets, all_offsets)


def test_tokenizers_of_the_validation_blend_count(data: Path, tmp_path: Path):
    for name, fingerprint in (("a", "1"), ("v", "2")):
        for suffix in (".bin", ".idx"):
            (tmp_path / f"{name}{suffix}").write_bytes((data / f"{name}{suffix}").read_bytes())
        (tmp_path / f"{name}.json").write_text(
            f'{{"tokenizer_fingerprint": "{fingerprint * 64}"}}', encoding="utf-8"
        )
    with pytest.raises(
        ConfigError, match=r"different tokenizers\n  - .*/a: 1{16}\n  - .*/v: 2{16}"
    ):
        prepare(config(tmp_path, "a", valid_blend=(str(tmp_path / "v"),)).data, vocab=0)


def test_nothing_held_out(data: Path, tmp_path: Path):
    """Prefixes, an array, and text of which no document falls in the held-out part."""
    (tmp_path / "x.jsonl").write_text(
        '{"text": "one document alone, long enough for a few sequences: ' + "words " * 50 + '"}\n',
        encoding="utf-8",
    )
    text = dataclasses.replace(
        config(data),
        data=DataConfig(path=str(tmp_path / "x.jsonl"), cache=str(tmp_path), threads=0),
    )
    text = dataclasses.replace(text, train=TrainLoop(steps=1, global_batch=1))
    for train_config, corpus in (
        (config(data, "a", split="1"), None),
        (config(data, ""), TokenArray(range(400), [])),
        (text, None),
    ):
        made = batches(train_config, corpus)
        assert not made.has_heldout and [*made.heldout()] == [], train_config
    corpus = prepare(config(data, "a", split="1").data, vocab=0)
    assert (
        corpus.heldout_tokens == 0
        and corpus.heldout_bytes is None
        and corpus.train_bytes == 4 * corpus.train_tokens
    )
    assert corpus.why_no_heldout == (
        "data.split=1 gives validation none of the documents (the largest prefix has 60); in a run "
        "with a new output, set data.split=19,1,0, or name held-out text in data.valid_blend"
    )
    divided = prepare(config(data, "a", split="19,1,0").data, vocab=0)
    assert not divided.why_no_heldout and divided.heldout_tokens


@pytest.mark.parametrize("n", [2, 3, 6, 19, 20, 21, 25, 30, 33, 1000])
def test_the_split_that_is_advised_holds_something_out(n: int):
    advised = re.search(r"set data\.split=([\d,]+), or", _no_validation("969,30,1", n))
    assert advised and all(map(len, split_ranges(advised[1], n)[:2]))
