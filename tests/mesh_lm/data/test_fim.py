from collections.abc import Iterable, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from in_memory import Tokens

from mesh_lm.data.fim import FillInMiddle
from mesh_lm.data.rows import RowReader
from mesh_lm.data.sequences import Sequences
from mesh_lm.errors import ConfigError

EOD = 256
PREFIX = 257
MIDDLE = 258
SUFFIX = 259


class Codec:
    """A byte tokenizer with the three special tokens in one spelling."""

    eod = EOD
    joins = True

    def __init__(self, spelling: str = "<|fim_{}|>") -> None:
        self._ids = {
            spelling.format(part): i
            for part, i in (("prefix", PREFIX), ("middle", MIDDLE), ("suffix", SUFFIX))
        }

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [np.frombuffer(text.encode(), np.uint8).astype(np.int32) for text in texts]

    def decode(self, ids: Iterable[int]) -> str:
        return bytes(list(ids)).decode(errors="replace")

    def special(self, name: str) -> int | None:
        return self._ids.get(name)


def make(
    rate: float = 1.0, spm_rate: float = 0.5, seed: int = 0, codec: Codec | None = None
) -> FillInMiddle:
    return FillInMiddle(codec or Codec(), rate=rate, spm_rate=spm_rate, seed=seed)


def restored(document: list[int]) -> list[int]:
    """Returns the original document."""
    if PREFIX not in document:
        return document
    m = document.index(MIDDLE)
    s = document.index(SUFFIX)
    assert document[0] == PREFIX
    if s == 1:  # <prefix> <suffix> suffix <middle> prefix middle
        return document[m + 1 :] + document[2:m]
    return document[1:s] + document[m + 1 :] + document[s + 1 : m]


def split(window: list[int]) -> list[list[int]]:
    documents: list[list[int]] = [[]]
    for token in window:
        if token == EOD:
            documents.append([])
        else:
            documents[-1].append(token)
    return documents


@settings(max_examples=150, deadline=None)
@given(st.lists(st.text("abcdeö", max_size=12), min_size=1, max_size=5), st.integers(0, 2**40))
def test_documents_come_back_from_their_parts(texts: list[str], g: int):
    window = np.array(
        [t for i, text in enumerate(texts) for t in ([EOD] * (i > 0) + [*text.encode()])], np.int32
    )
    room = np.full(len(window) + 3 * len(texts), EOD, np.int32)
    room[: len(window)] = window  # empty documents follow
    arranged = room.copy()
    assert make()(arranged, g) == len(room)
    documents = split(arranged.tolist())[: len(texts)]
    expected = [list(text.encode()) for text in texts]
    assert [restored(document) for document in documents][:-1] == expected[:-1]
    assert all(
        (PREFIX in document) == bool(text) for document, text in zip(documents, texts, strict=True)
    )


def windows(rate: float, spm_rate: float, n: int = 400) -> list[list[int]]:
    out = []
    for g in range(n):
        window = np.array([*b"abcdefghij", *[EOD] * 4], np.int32)
        make(rate, spm_rate)(window, g)
        out.append(split(window.tolist())[0])
    return out


def test_rates():
    assert not any(PREFIX in window for window in windows(0, 0.5))
    some = [window for window in windows(0.3, 0.25, 1000) if PREFIX in window]
    assert 240 < len(some) < 360
    assert (
        0.17 < sum(window[1] == SUFFIX and window[2:3] != [] for window in some) / len(some) < 0.42
    )
    assert all(window[1] == SUFFIX for window in windows(1, 1))
    lengths = {window.index(SUFFIX) - 1 for window in windows(1, 0)}
    assert lengths == set(range(11))  # a split can be at any position, the ends included


def test_length_is_kept_and_padding_does_not_count():
    class Shorter(Codec):
        def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
            return [ids[::4] for ids in super().encode_batch(texts)]

    long = np.array([*b"a" * 20], np.int32)
    assert make()(long, 1) == 20 and PREFIX in long
    window = np.array([*b"abcdefgh" * 4, EOD, *b"xy"], np.int32)
    n = make(codec=Shorter())(window, 1)
    assert n < 35 and (window[n:] == EOD).all() and window[n - 1] != EOD


def test_a_split_character_is_left_alone():
    window = np.array([*"höher".encode()[2:], EOD, *b"abc", EOD, EOD, EOD, EOD], np.int32)
    arranged = window.copy()
    make()(arranged, 3)
    assert arranged[:5].tolist() == window[:5].tolist() and arranged[5] == PREFIX


def test_rows_depend_on_seed_and_position_alone():
    order = Sequences(
        Tokens([*b"some text ", EOD, *b"more of it", EOD] * 9), 24, eod=EOD, seed=None, pad=True
    )
    rows = RowReader(order, eod=EOD, fill_in_middle=make(0.7, seed=5))
    all_rows = rows.rows(np.arange(20))
    for picked in ([3], [19, 2, 3]):
        for name, leaf in rows.rows(np.array(picked)).items():
            assert (leaf == all_rows[name][picked]).all()
    assert (all_rows["tokens"][:, 1:] == all_rows["labels"][:, :-1]).all()
    assert (
        all_rows["tokens"][0] != all_rows["tokens"][9]
    ).any()  # another epoch, another arrangement
    other = RowReader(order, eod=EOD, fill_in_middle=make(0.7, seed=6)).rows(np.arange(20))
    assert (other["labels"] != all_rows["labels"]).any()


def test_special_tokens():
    for spelling in ("<fim_{}>", "<fim-{}>"):
        make(codec=Codec(spelling))
    with pytest.raises(
        ConfigError,
        match=(
            r"data\.fim_rate=1\.0: the tokenizer lacks the special tokens <\|fim_prefix\|>, "
            r"<\|fim_middle\|>"
        ),
    ):
        make(codec=Codec("<{}>"))
    spaced = Codec()
    spaced.joins = False
    with pytest.raises(
        ConfigError,
        match=r"data\.fim_rate=1\.0: the tokenizer puts a space before each part of a split document",
    ):
        make(codec=spaced)
    with pytest.raises(
        ConfigError,
        match=r"data\.fim_rate=1\.0 splits documents between characters, which needs data\.tokenizer",
    ):
        FillInMiddle(None, rate=1.0, spm_rate=0.5, seed=0)
