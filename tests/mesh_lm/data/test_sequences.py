import struct
import threading
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from in_memory import Tokens

from mesh_lm.data.indexed import Documents, TokenStream, bin_path, idx_path, write_documents
from mesh_lm.data.rows import RowReader
from mesh_lm.data.sequences import Sequences
from mesh_lm.errors import ConfigError

EOD = 0


def make(
    tokens, seq_len, *, seed=0, shuffle=False, mode="joined", mask=False, pad=False
) -> RowReader:
    order = Sequences(Tokens(tokens), seq_len, eod=EOD, seed=seed if shuffle else None, pad=pad)
    return RowReader(order, eod=EOD, documents=mode, mask_document_start=mask)


def oracle(tokens: list[int], seq_len: int, number: int, mask: bool) -> dict[str, list]:
    """Returns sequence `number`, computed token by token."""
    stream = [EOD, *tokens]
    out: dict[str, list] = {
        "tokens": [],
        "labels": [],
        "weights": [],
        "segment_ids": [],
        "positions": [],
    }
    segment = 0
    position = 0
    for i in range(number * seq_len, (number + 1) * seq_len):
        token = stream[i] if i < len(stream) else EOD
        label = stream[i + 1] if i + 1 < len(stream) else EOD
        if token == EOD:
            segment = segment + 1
            position = 0
        counts = i + 1 < len(stream) and not (mask and token == EOD)
        for name, value in zip(out, (token, label, float(counts), segment, position), strict=True):
            out[name].append(value)
        position += 1
    return out


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_rows_match_the_oracle(data):
    tokens = data.draw(st.lists(st.integers(0, 4), min_size=1, max_size=60))
    seq_len = data.draw(st.integers(1, 12))
    pad = data.draw(st.booleans())
    mask = data.draw(st.booleans())
    n = -(-len(tokens) // seq_len) if pad else len(tokens) // seq_len
    if n == 0:
        with pytest.raises(ConfigError):
            make(tokens, seq_len, pad=pad)
        return
    sequences = make(tokens, seq_len, mode="separate", mask=mask, pad=pad)
    assert len(sequences) == n
    g = np.array(data.draw(st.lists(st.integers(0, 3 * n), min_size=1, max_size=8)))
    rows = sequences.rows(g)
    for row, position in enumerate(g):
        for name, expected in oracle(tokens, seq_len, position % n, mask).items():
            assert rows[name][row].tolist() == expected, name
    joined = make(tokens, seq_len, mask=mask, pad=pad).rows(g)
    assert set(joined) == {"tokens", "labels", "weights", "sample_ids"}
    for name in joined:
        assert (joined[name] == rows[name]).all()


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 4), min_size=1, max_size=60), st.integers(1, 12), st.booleans())
def test_heldout_predicts_every_token_once(tokens: list[int], seq_len: int, shuffle: bool):
    sequences = make(tokens, seq_len, shuffle=shuffle, pad=True)
    rows = sequences.rows(np.arange(len(sequences)))
    assert Counter(rows["labels"][rows["weights"] > 0].tolist()) == Counter(tokens)
    assert rows["weights"].sum() == len(tokens)
    if not shuffle:
        assert rows["labels"][rows["weights"] > 0].tolist() == tokens


def test_types_and_sample():
    sequences = make(range(1, 50), 4, shuffle=True, mode="separate")
    rows = sequences.rows(np.array([3, 2**32 + 5]))
    assert {k: v.dtype.name for k, v in rows.items()} == {
        "tokens": "int32", "labels": "int32", "weights": "float32", "sample_ids": "uint32",
        "segment_ids": "int32", "positions": "int32",
    }  # fmt: skip
    assert rows["sample_ids"].tolist() == [3, 5]
    sample = sequences.sample(2**32 + 5)
    for name, row in sample.items():
        assert (row == rows[name][1]).all()


def order(sequences: RowReader, start: int, n: int) -> list[int]:
    """Returns sequence numbers, derived from the labels of a stream 1, 2, 3, ..."""
    return [
        (int(label) - 1) // sequences.seq_len
        for label in sequences.rows(np.arange(start, start + n))["labels"][:, 0]
    ]


def test_each_epoch_is_a_permutation_of_its_own():
    n = 40
    sequences = make(range(1, n * 3 + 1), 3, seed=7, shuffle=True)
    epochs = [order(sequences, e * n, n) for e in range(5)]
    for epoch in epochs:
        assert sorted(epoch) == list(range(n))
    assert len({tuple(e) for e in epochs}) == 5
    # across two ends of epochs
    assert order(sequences, n - 5, 2 * n) == (epochs[0] + epochs[1] + epochs[2])[n - 5 : 3 * n - 5]
    assert order(make(range(1, n * 3 + 1), 3, seed=7, shuffle=True), 3 * n, n) == epochs[3]
    for seed in (8, -7):
        assert order(make(range(1, n * 3 + 1), 3, seed=seed, shuffle=True), 0, n) != epochs[0]
    assert order(make(range(1, n * 3 + 1), 3), 0, 2 * n) == list(range(n)) * 2


def test_order_never_changes():
    """A change here changes the sample order of every run, which could then not be resumed or
    compared."""
    sequences = make(range(1, 17), 2, seed=1234, shuffle=True)
    assert order(sequences, 0, 16) == [5, 6, 3, 7, 4, 1, 2, 0, 2, 0, 7, 6, 1, 4, 5, 3]


def test_threads_read_the_same_and_keep_two_epochs():
    n = 50
    sequences = make(range(1, n + 1), 1, shuffle=True)
    single = make(range(1, n + 1), 1, shuffle=True)
    results: dict[int, list[int]] = {}
    starts = [(7 * i) % (6 * n) for i in range(60)]
    threads = [
        threading.Thread(target=lambda s=s: results.update({s: order(sequences, s, 20)}))
        for s in starts
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {s: order(single, s, 20) for s in starts}
    assert len(sequences.order._epochs._orders) <= 2


def test_corpora_beyond_2_31_tokens_and_memory(tmp_path: Path):
    """On a sparse file of 6 GB, only the requested rows are read and no index overflows."""
    half = 3 * 2**29
    header = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, 2, 3)
    idx_path(tmp_path / "x").write_bytes(
        header + struct.pack("<2i2q3q", half, half, 0, 2 * half, 0, 1, 2)
    )
    with open(bin_path(tmp_path / "x"), "wb") as file:
        file.truncate(4 * half)
        file.seek(4 * half - 8)
        file.write(struct.pack("<4H", 1, 2, 3, 4))
    sequences = RowReader(
        Sequences(TokenStream(Documents(tmp_path / "x")), 2**10, eod=9, seed=None), eod=9
    )
    last = sequences.sample(len(sequences) - 1)
    assert last["labels"][-4:].tolist() == [1, 2, 3, 4]
    assert last["tokens"][-4:].tolist() == [0, 1, 2, 3]


def test_too_little_text():
    with pytest.raises(ConfigError, match=r"7 tokens.*\(8\)"):
        make(range(7), 8)
    sequences = make(range(24), 8)
    sequences.require(3)
    with pytest.raises(ConfigError, match=r"3 sequences of 8 tokens.*global_batch=4"):
        sequences.require(4)


def test_an_unknown_eod_costs_the_first_label():
    rows = RowReader(Sequences(Tokens([5, 6, 7]), 2, eod=None, seed=None, pad=True), eod=None).rows(
        np.arange(2)
    )
    assert rows["labels"][rows["weights"] > 0].tolist() == [6, 7]
    assert rows["tokens"].tolist() == [[0, 5], [6, 7]]
    for options in ({"documents": "separate"}, {"mask_document_start": True}):
        with pytest.raises(
            ConfigError,
            match=r"end-of-document token of this data is not known; set data\.tokenizer",
        ):
            RowReader(Sequences(Tokens(range(9)), 2, eod=None, seed=None), eod=None, **options)


def test_ids_beyond_the_vocabulary_are_named(tmp_path: Path):
    documents = write_documents(
        tmp_path / "x", [np.arange(5), np.arange(0), np.array([3, 70, 2])], vocab=100
    )
    stored = Sequences(TokenStream(documents, vocab=70), 4, eod=0, seed=None, pad=True)
    with pytest.raises(ConfigError) as error:
        stored.read(np.array([1, 0]))
    assert str(error.value) == (
        f"{tmp_path}/x.bin, document 2: token id 70, but model.vocab_size=70 has ids 0 to 69; set "
        "the vocab_size of this data's tokenizer, or give data of that tokenizer"
    )
    stored.read(np.array([0]))
    with pytest.raises(ConfigError, match=r"document 2: token id 70"):
        Sequences(TokenStream(documents, 1, 3, vocab=70), 3, eod=0, seed=None).read(np.array([0]))
    Sequences(TokenStream(documents, vocab=71), 4, eod=0, seed=None, pad=True).read(np.arange(2))
