from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mesh_lm.data.index_cache import IndexCache
from mesh_lm.data.indexed import TokenStream, write_documents
from mesh_lm.data.packing import PackedSequences, best_fit, pack
from mesh_lm.data.rows import RowReader
from mesh_lm.errors import ConfigError

EOD = 0


def packed(
    directory: Path,
    documents: list[np.ndarray],
    seq_len: int,
    *,
    seed: int = 3,
    vocab: int | None = None,
) -> PackedSequences:
    written = write_documents(directory / "x", documents, vocab=60_000)
    text = TokenStream(written, vocab=vocab)
    return PackedSequences(
        text,
        seq_len,
        eod=EOD,
        seed=seed,
        cache=IndexCache(str(directory)),
        fingerprint=written.fingerprint(),
    )


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(0, 20), min_size=1, max_size=30).filter(any),
    st.integers(1, 12),
    st.booleans(),
)
def test_every_token_is_a_label_once_with_its_own_document_before_it(
    tmp_path_factory, lengths: list[int], seq_len: int, eods: bool
):
    numbers = iter(range(1, sum(lengths) + 1))
    documents = [np.array([next(numbers) for _ in range(n)], np.int32) for n in lengths]
    if eods:
        for document in documents:
            document[-1:] = EOD
    order = packed(tmp_path_factory.mktemp("packed"), documents, seq_len)
    rows = RowReader(order, eod=EOD, documents="packed").rows(np.arange(len(order)))
    pieces = []
    for tokens, labels, weights, segments, positions in zip(
        *(rows[name] for name in ("tokens", "labels", "weights", "segment_ids", "positions")),
        strict=True,
    ):
        for segment in np.unique(segments):
            slots = np.flatnonzero(segments == segment)
            assert (np.diff(slots) == 1).all() and positions[slots].tolist() == list(
                range(len(slots))
            )
            assert len(set(weights[slots])) == 1
            if weights[slots[0]]:
                pieces.append((tokens[slots].tolist(), labels[slots].tolist()))
            else:
                assert slots[-1] == seq_len - 1 and (labels[slots] == EOD).all()
    expected = []
    for document in documents:
        inputs = [EOD, *document.tolist()]
        for first in range(0, len(document), seq_len):
            labels = document[first : first + seq_len].tolist()
            expected.append((inputs[first : first + len(labels)], labels))
    assert sorted(pieces) == sorted(expected)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 16), max_size=60))
def test_best_fit_against_a_search(sizes: list[int]):
    rooms: list[int] = []
    for size, number in zip(sizes, best_fit(sizes, 16), strict=True):
        fitting = [room for room in rooms if room >= size]
        if fitting:
            assert rooms[number] == min(fitting)
        else:
            assert number == len(rooms)
            rooms.append(16)
        rooms[number] -= size
        assert rooms[number] >= 0


def test_fill_rate():
    """At least 95% of slots are filled for lognormal lengths of median 300, as in web text."""
    lengths = np.exp(np.random.default_rng(0).normal(np.log(300), 1.1, 20_000)).astype(np.int64) + 1
    for seq_len in (512, 2048, 8192):
        plan = pack(np.concatenate(([0], np.cumsum(lengths))), seq_len, seed=0)
        assert plan["sizes"].sum() == lengths.sum()
        assert lengths.sum() / (seq_len * (len(plan["bounds"]) - 1)) > 0.97


def test_epochs_differ_in_order_alone_and_positions_say_everything(tmp_path: Path):
    random = np.random.default_rng(0)
    documents = [random.integers(1, 99, n) for n in random.integers(1, 40, 200)]
    order = packed(tmp_path, documents, 32)
    n = len(order)
    epochs = [
        [row.tobytes() for row in order.read(np.arange(e * n, (e + 1) * n)).labels]
        for e in range(2)
    ]
    assert (
        epochs[0] != epochs[1]
        and sorted(epochs[0]) == sorted(epochs[1])
        and len(set(epochs[0])) == n
    )
    again = packed(tmp_path, documents, 32)
    assert [row.tobytes() for row in again.read(np.arange(2 * n)[::-1]).labels][::-1] == epochs[
        0
    ] + epochs[1]
    assert [
        row.tobytes() for row in packed(tmp_path, documents, 32, seed=4).read(np.arange(n)).labels
    ] != epochs[0]


def test_the_plan_never_changes(tmp_path: Path):
    """A change here changes the sample order of every packed run."""
    order = packed(tmp_path, [np.full(n, n) for n in (3, 5, 9, 2, 4)], 8)
    assert order.read(np.arange(len(order))).labels.tolist() == [
        [4, 4, 4, 4, 9, 2, 2, 0],
        [9, 9, 9, 9, 9, 9, 9, 9],
        [3, 3, 3, 5, 5, 5, 5, 5],
    ]


def test_errors(tmp_path: Path):
    with pytest.raises(
        ConfigError, match=r"x has no tokens in this split \(1 documents from document 0 on\)"
    ):
        packed(tmp_path, [np.zeros(0)], 8)
    with pytest.raises(
        ConfigError,
        match=r"x\.bin, document 1: token id 70, but model\.vocab_size=50 has ids 0 to 49",
    ):
        order = packed(tmp_path, [np.full(3, 4), np.array([1, 70, 2]), np.full(5, 9)], 8, vocab=50)
        order.read(np.arange(len(order)))
