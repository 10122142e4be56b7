"""Documents of .bin/.idx files that no EOD ends: their borders are those of the .idx, in every
sample."""

import dataclasses
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mesh_lm.config import DataConfig, TrainConfig, TrainLoop
from mesh_lm.data.fim import FillInMiddle
from mesh_lm.data.gpt_dataset import GPTDataset
from mesh_lm.data.index_cache import IndexCache
from mesh_lm.data.indexed import Documents, TokenStream
from mesh_lm.data.megatron_corpus import MegatronCorpus
from mesh_lm.data.rows import RowReader
from mesh_lm.data.sequences import Sequences
from mesh_lm.model import DecoderConfig

EOD = 0
Sentences = list[list[int]]


def write(prefix: Path, documents: list[Sentences]) -> Documents:
    """Writes documents of several sequences each, as Megatron's preprocess_data.py does with
    --split-sentences."""
    sequences = [sentence for document in documents for sentence in document]
    lengths = np.array([len(sentence) for sentence in sequences], "<i4")
    ends = np.cumsum(lengths, dtype="<i8") * 2
    first = np.cumsum([0, *map(len, documents)]).astype("<i8")
    header = struct.pack("<9sQBQQ", b"MMIDIDX\x00\x00", 1, 8, len(sequences), len(first))
    prefix.with_suffix(".idx").write_bytes(
        header + lengths.tobytes() + (ends - 2 * lengths).astype("<i8").tobytes() + first.tobytes()
    )
    prefix.with_suffix(".bin").write_bytes(
        np.array([token for sentence in sequences for token in sentence], "<u2").tobytes()
    )
    return Documents(prefix)


@dataclasses.dataclass
class Token:
    """One token of the text as it is read, and whether it is the first after the end of a document
    that has no EOD."""

    id: int
    begins: bool


def text_of(documents: list[Sentences], order: list[int]) -> list[Token]:
    """The sequences of a file in some order, one token after the other."""
    sequences = [
        (sentence, i == len(document) - 1)
        for document in documents
        for i, sentence in enumerate(document)
    ]
    text: list[Token] = []
    has_ended = False
    for number in order:
        sentence, is_last = sequences[number]
        for i, token in enumerate(sentence):
            text.append(Token(token, i == 0 and has_ended and text[-1].id != EOD))
            has_ended = False
        has_ended = bool(text) and (has_ended or is_last)
    return text


def expected(window: list[Token], kind: str) -> tuple[list[int], list[int], list[float]]:
    """Segments, positions and weights of the inputs, all but the last token, by their
    definition."""
    segments = []
    positions = []
    weights = []
    segment = position = 0
    for i, token in enumerate(window[:-1]):
        after_eod = i > 0 and window[i - 1].id == EOD
        starts = (token.begins and i > 0) or (after_eod if kind == "megatron" else token.id == EOD)
        segment, position = (segment + 1, 0) if starts else (segment, position)
        segments.append(segment)
        positions.append(position)
        weights.append(0.0 if token.id == EOD or window[i + 1].begins else 1.0)
        position += 1
    return segments, positions, weights


def assert_rows_are(rows: RowReader, windows: list[list[Token]], kind: str) -> None:
    batch = rows.rows(np.arange(len(windows)))
    for i, window in enumerate(windows):
        segments, positions, weights = expected(window, kind)
        assert batch["tokens"][i].tolist() == [token.id for token in window[:-1]]
        # Only equality of segment ids means something: the first input may begin a segment or
        # continue one.
        segment_ids = batch["segment_ids"][i] - batch["segment_ids"][i, 0]
        assert segment_ids.tolist() == [segment - segments[0] for segment in segments]
        assert batch["positions"][i].tolist() == positions
        assert batch["weights"][i].tolist() == weights


sentence = st.lists(st.integers(0, 4), max_size=7)
files = st.lists(
    st.lists(sentence, min_size=1, max_size=3) | sentence.map(lambda tokens: [tokens]),
    min_size=3,
    max_size=12,
)


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(files, st.integers(1, 9), st.sampled_from(["separate", "megatron"]))
def test_training_and_held_out_rows_are_those_of_their_definition(
    tmp_path: Path, documents: list[Sentences], seq_len: int, kind
) -> None:
    """With EOD at the end of some documents, of all and of none, inside of documents, sentence by
    sentence, and empty documents."""
    documents = [*documents, [[1, 2, 3, 4, 1, 2, 3, 4, 1, 2]]]
    text = TokenStream(write(tmp_path / "file", documents))
    name = f"{hash(str(documents))}"
    order = GPTDataset(
        text,
        seq_len,
        n_samples=20,
        seed=1,
        cache=IndexCache(str(tmp_path / "cache")),
        fingerprint=name,
        eod=EOD,
    )
    tokens = text_of(documents, order._documents.tolist())
    windows = [tokens[k * seq_len : k * seq_len + seq_len + 1] for k in order._shuffle.tolist()]
    assert_rows_are(
        RowReader(order, eod=EOD, documents=kind, mask_document_start=True), windows, kind
    )

    stored = [Token(EOD, False), *text_of(documents, list(range(len(text))))]
    stored[1].begins = False
    sequences = Sequences(text, seq_len, eod=EOD, seed=None)
    windows = [stored[k * seq_len : k * seq_len + seq_len + 1] for k in range(len(sequences))]
    assert_rows_are(
        RowReader(sequences, eod=EOD, documents=kind, mask_document_start=True), windows, kind
    )


@pytest.mark.parametrize("extra", [True, False])
def test_a_blend_in_which_one_prefix_has_no_eod(tmp_path: Path, extra: bool) -> None:
    """Ten tokens a document: each row of 40 has the same borders, wherever its documents are
    from."""
    chance = np.random.default_rng(0)
    bodies = [chance.integers(1, 50, 9).tolist() for _ in range(60)]
    write(tmp_path / "with", [[[*body, EOD]] for body in bodies])
    write(tmp_path / "without", [[[*body, 7]] for body in bodies])
    for name in ("with", "without"):
        (tmp_path / f"{name}.json").write_text('{"eod": 0}', encoding="utf-8")
    blend = tuple(str(tmp_path / name) for name in ("with", "without"))
    data = DataConfig(
        blend=blend,
        split="80,20",
        documents="megatron",
        megatron=("mask_document_start",) if extra else ("mask_document_start", "no_extra_token"),
        cache=str(tmp_path / "cache"),
    )
    config = TrainConfig(
        DecoderConfig(vocab_size=50, seq_len=40),
        str(tmp_path / "run"),
        data=data,
        train=TrainLoop(global_batch=4, steps=5),
    )
    corpus = MegatronCorpus(data)
    for order, is_training in (
        (corpus.training_order(config, None, 20), True),
        (corpus.heldout_order(config), False),
    ):
        rows = RowReader(order, eod=corpus.eod, documents="megatron", mask_document_start=True)
        batch = rows.rows(np.arange(len(order) if not is_training else 20))
        n_full = 20 if is_training else len(order) - 1  # the last row of held-out text is padded
        lengths = {len(set(ids.tolist())) for ids in batch["segment_ids"][:n_full]}
        assert lengths <= {4, 5}
        ends = (batch["weights"] == 0).sum(axis=1)[:n_full]
        assert set(ends.tolist()) <= {4, 5}


def test_fill_in_the_middle_stays_within_documents(tmp_path: Path) -> None:
    """The parts of a rearranged document are its own, and its border moves with it."""

    class Codec:
        eod = EOD
        joins = True

        def decode(self, ids: np.ndarray) -> str:
            return "".join(map(chr, ids))

        def encode_batch(self, texts: list[str]) -> list[np.ndarray]:
            return [np.array([*map(ord, text)], np.int32) for text in texts]

        def special(self, name: str) -> int | None:
            return {"<|fim_prefix|>": 201, "<|fim_middle|>": 202, "<|fim_suffix|>": 203}.get(name)

    write(tmp_path / "file", [[[100 + i] * 5] for i in range(40)])
    text = TokenStream(Documents(tmp_path / "file"))
    order = GPTDataset(
        text,
        40,
        n_samples=4,
        seed=1,
        cache=IndexCache(str(tmp_path / "cache")),
        fingerprint="",
        eod=EOD,
    )
    fill = FillInMiddle(Codec(), rate=1.0, spm_rate=0.5, seed=0)
    batch = RowReader(order, eod=EOD, documents="separate", fill_in_middle=fill).rows(np.arange(4))
    for tokens, segments in zip(batch["tokens"], batch["segment_ids"], strict=True):
        parts = [tokens[segments == segment] for segment in np.unique(segments)]
        assert len(parts) >= 5
        for part in parts:
            assert len({*part.tolist()} - {201, 202, 203}) == 1, tokens
        for part in parts[:-1]:
            assert sorted(token for token in part.tolist() if token > 200) == [201, 202, 203]


def test_offsets_are_searched_as_by_numpy(tmp_path: Path) -> None:
    offsets = TokenStream(write(tmp_path / "file", [[[1] * n] for n in (3, 0, 0, 5, 1)])).offsets
    values = np.arange(-1, 11)
    assert offsets.search(values).tolist() == np.searchsorted(np.asarray(offsets), values).tolist()
    assert Documents(tmp_path / "file").ends_document(np.arange(5)).all()
