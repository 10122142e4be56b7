"""Megatron-LM's sample order, against golden hashes made by its own code
(tests/fixtures/make_megatron_golden.py)."""

import hashlib
import json
import runpy
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mesh_lm.data import blend
from mesh_lm.data.blend import Blend, blend_index
from mesh_lm.data.gpt_dataset import (
    EpochCount,
    GPTDataset,
    build,
    sample_index,
    samples_in,
    split_ranges,
)
from mesh_lm.data.index_cache import IndexCache
from mesh_lm.data.indexed import Documents, InMemory, TokenStream
from mesh_lm.data.rows import RowReader
from mesh_lm.errors import ConfigError

FIXTURES = Path(__file__).parents[2] / "fixtures"
EOD = 0
GOLDEN = json.loads((FIXTURES / "megatron_golden.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("megatron")
    runpy.run_path(str(FIXTURES / "make_megatron_golden.py"))["corpora"](path)
    return path


def digest(order, n: int) -> str:
    checksum = hashlib.sha256()
    for first in range(0, n, 64):
        windows = order.read(np.arange(first, min(first + 64, n)))
        for tokens, labels in zip(windows.tokens, windows.labels, strict=True):
            checksum.update(tokens.astype("<i8").tobytes() + labels.astype("<i8").tobytes())
    return checksum.hexdigest()


def borders(order, n: int) -> str:
    """Position ids, loss masks and which keys are masked, with Megatron's borders between
    documents."""
    checksum = hashlib.sha256()
    rows = RowReader(order, eod=EOD, documents="megatron", mask_document_start=True)
    for first in range(0, n, 64):
        batch = rows.rows(np.arange(first, min(first + 64, n)))
        for positions, weights, segments in zip(
            batch["positions"], batch["weights"], batch["segment_ids"], strict=True
        ):
            masked = ~np.tril(segments[:, None] == segments[None, :])
            checksum.update(
                positions.astype("<i8").tobytes()
                + weights.astype("<f4").tobytes()
                + masked.tobytes()
            )
    return checksum.hexdigest()


def gpt_dataset(directory: Path, name: str, case: dict, split: int, n_samples: int) -> GPTDataset:
    documents = Documents(directory / name)
    numbers = split_ranges(case["split"], len(documents))[split]
    text = TokenStream(documents, numbers.start, numbers.stop)
    cache = IndexCache(str(directory / "cache"))
    settings = {
        "seed": case["seed"],
        "cache": cache,
        "fingerprint": documents.fingerprint(),
        "extra_token": case["extra"],
    }
    return GPTDataset(text, case["seq_len"], n_samples=n_samples, **settings)


@pytest.mark.parametrize("name", GOLDEN)
def test_order_is_megatrons(directory: Path, name: str):
    case = GOLDEN[name]
    prefixes, weights = blend.parse(case["blend"])
    weights = blend.normalized(weights) if weights else None
    epochs = [len(gpt_dataset(directory, prefix, case, 0, 1)) for prefix in prefixes]
    sizes = blend.sizes(weights, epochs, case["samples"])
    members = [
        gpt_dataset(directory, prefix, case, 0, n)
        for prefix, n in zip(prefixes, sizes, strict=True)
    ]
    order = Blend(
        members, weights or blend.normalized(epochs), case["samples"],
        consumed=[0] * len(members), start=0, cache=IndexCache(str(directory / "cache")),
    )  # fmt: skip
    assert digest(order, case["read"]) == case["train"]
    assert borders(order, case["read"]) == case["borders"]
    if case.get("length"):
        assert len(members[0]) == case["length"]
    if "valid" in case:
        n = (
            case["validation"]
            if weights is None
            else blend.sizes(weights, [0], case["validation"])[0]
        )
        assert (
            digest(gpt_dataset(directory, prefixes[-1], case, 1, n), case["validation"])
            == case["valid"]
        )
    if name.startswith("several epochs"):
        needed = EpochCount.of(case["samples"], members[0]._text.n_tokens, case["seq_len"])
        assert needed.n > 2 and needed.separate_last == name.endswith("apart")


def walked(lengths: list[int], seq_len: int, extra: bool) -> list[tuple[int, int]]:
    """Computes the sample index token by token: (document, offset) of every S-th token, or, without
    the extra one, of what follows it."""
    tokens = [
        (document, offset) for document, length in enumerate(lengths) for offset in range(length)
    ]
    if extra:
        return [(0, 0), *tokens[seq_len : len(tokens) : seq_len]]
    return [
        (0, 0),
        *(
            (document, offset + 1)
            for document, offset in tokens[seq_len - 1 : len(tokens) : seq_len]
        ),
    ]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=30), st.integers(1, 12), st.booleans())
def test_sample_index_against_a_walk(lengths: list[int], seq_len: int, extra: bool):
    if sum(lengths) == 0:
        return
    index = sample_index(np.array(lengths, np.int32), seq_len, extra)
    assert (
        index.tolist() == [list(pair) for pair in walked(lengths, seq_len, extra)]
        and index.dtype == np.int32
    )


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_reading_is_the_stream_of_the_documents(data):
    """Each sample is S + 1 consecutive tokens of the shuffled documents, and each occurs once."""
    lengths = data.draw(st.lists(st.integers(0, 9), min_size=1, max_size=20).filter(sum))
    seq_len = data.draw(st.integers(1, 12))
    n = data.draw(st.integers(0, 60))
    ends = np.concatenate(([0], np.cumsum(lengths)))
    documents = InMemory(np.arange(sum(lengths)).astype(np.uint16), ends)
    epochs = EpochCount.of(n, sum(lengths), seq_len)
    if epochs.n * sum(lengths) <= seq_len:
        with pytest.raises(
            ConfigError,
            match=rf"has {sum(lengths)} tokens .* fewer than one sample needs \({seq_len + 1}\)",
        ):
            GPTDataset(
                TokenStream(documents),
                seq_len,
                n_samples=n,
                seed=5,
                cache=Uncached(),
                fingerprint="",
            )
        return
    arrays = build(np.array(lengths, np.int32), seq_len, epochs, seed=5)
    stream = np.concatenate(
        [documents.unverified[ends[i] : ends[i + 1]] for i in arrays["documents"]]
    ).tolist()
    dataset = GPTDataset(
        TokenStream(documents), seq_len, n_samples=n, seed=5, cache=Uncached(), fingerprint=""
    )
    assert len(dataset) == samples_in(len(stream), seq_len) >= n
    windows = dataset.read(np.arange(len(dataset)))
    for row, sample in enumerate(arrays["shuffle"]):
        assert windows.tokens[row].tolist() == stream[sample * seq_len : sample * seq_len + seq_len]
        assert (
            windows.labels[row].tolist()
            == stream[sample * seq_len + 1 : sample * seq_len + seq_len + 1]
        )
    assert sorted(arrays["shuffle"].tolist()) == list(range(len(dataset)))


class Uncached(IndexCache):
    def __init__(self) -> None:
        pass

    def get(self, kind, key, compute, **size):
        return compute()


def greedy(weights: list[float], size: int) -> list[int]:
    """`build_blending_indices` of helpers.cpp in plain Python, whose doubles are those of C++."""
    counts = [0] * len(weights)
    chosen = []
    for n in range(size):
        lags = [weight * max(n, 1.0) - drawn for weight, drawn in zip(weights, counts, strict=True)]
        chosen.append(lags.index(max(lags)))
        counts[chosen[-1]] += 1
    return chosen


TIES = [
    [0.2, 0.5, 0.3],
    [0.7, 0.1, 0.1, 0.1],
    [1.0, 1.0, 1.0],
    [1.0] * 7,
    [0.6, 0.4],
    [100.0, 1.0, 0.001],
    [1.0, 1e-4, 1e-5],
]
"""Weights whose sums tie exactly, and tiny weights, for which blocks start from a wrong guess."""


@pytest.mark.parametrize("weights", TIES)
def test_blend_index_is_the_greedy_loop(weights: list[float]):
    check_blend(blend.normalized(weights), 9 * blend.BLOCK + 5)


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.one_of(st.integers(1, 9), st.floats(1e-6, 1)), min_size=1, max_size=9),
    st.integers(1, 4 * blend.BLOCK),
)
def test_blend_index_of_any_weights(weights: list[float], size: int):
    check_blend(blend.normalized(weights), size)


def check_blend(weights: list[float], size: int) -> None:
    index = blend_index(np.array(weights), size)
    expected = greedy(weights, size)
    assert index["members"].tolist() == expected
    n_drawn = [0] * len(weights)
    for n, member in enumerate(expected):
        assert index["counts"][n // blend.BLOCK, member] + index["ranks"][n] == n_drawn[member]
        n_drawn[member] += 1


def test_blocks_are_joined_across_the_chunks_computed_together(monkeypatch: pytest.MonkeyPatch):
    weights = np.array(blend.normalized([5, 3, 1e-3]))
    size = 7 * blend.BLOCK
    index = blend_index(weights, size)
    monkeypatch.setattr(blend, "_PARALLEL", 2)
    for name, array in blend_index(weights, size).items():
        assert (array == index[name]).all() and array.dtype == index[name].dtype


@pytest.mark.parametrize(
    ("split", "n", "expected"),
    [
        ("969,30,1", 1000, [(0, 969), (969, 999), (999, 1000)]),
        ("99,1", 250, [(0, 248), (248, 250), (250, 250)]),  # 247.5 rounds to even
        ("1", 7, [(0, 7), (7, 7), (7, 7)]),
        (" .5, 0 ,0.5", 3, [(0, 2), (2, 2), (2, 3)]),
    ],
)
def test_split_ranges(split: str, n: int, expected: list[tuple[int, int]]):
    assert [(numbers.start, numbers.stop) for numbers in split_ranges(split, n)] == expected


@pytest.mark.parametrize("split", ["", "0,0", "1,2,3,4", "train", "1;2", "1,-2", "1..2"])
def test_bad_splits(split: str):
    with pytest.raises(ConfigError, match=r"data\.split=.*as 969,30,1"):
        split_ranges(split, 10)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("0.3", "a", "b", "c"), "give prefixes only, or a weight before each prefix"),
        (("0.3", "a", "0.2"), "give prefixes only, or a weight before each prefix"),
        (("1", "a", "0", "b"), "weight 0 must be a number above 0"),
        (("1", "a", "nan", "b"), "weight nan must be a number above 0"),
        (("a", "b", "a"), "a is given twice; give it once, with the sum of the weights"),
    ],
)
def test_bad_blends(words: tuple[str, ...], message: str):
    with pytest.raises(ConfigError, match=f"data.blend={' '.join(words)}: {message}"):
        blend.parse(words)
    assert blend.parse(("2", "a", "1e1", "b")) == (["a", "b"], [2.0, 10.0])
    assert blend.parse(("a", "b")) == (["a", "b"], None)
