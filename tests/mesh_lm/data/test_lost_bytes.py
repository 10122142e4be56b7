"""Text that a tokenizer drops or rewrites is counted, left out of bits per byte, reported, and
refused beyond a threshold."""

import base64
import contextlib
import dataclasses
import functools
import io
import json
import math
import unicodedata
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from mesh_lm.commands import evaluate
from mesh_lm.config import DataConfig
from mesh_lm.data import corpus, lost_bytes
from mesh_lm.data.prepare import plan, run, unfinished
from mesh_lm.data.prepare.run import prepare
from mesh_lm.data.problems import data_problems
from mesh_lm.data.tokenizer import EOD, Tokenizer, load_tokenizer
from mesh_lm.data.tokenizer.hugging_face import HuggingFace
from mesh_lm.errors import ConfigError
from mesh_lm.inference import Scorer, perplexity

TEXT = "".join(f"abc line {i}: caf\u00e9\n" for i in range(90))


@functools.cache
def byte_level(normalizer: str = "", alphabet: str = "") -> HuggingFace:
    """Returns a byte-level BPE with the whole alphabet, or with these bytes' characters alone."""
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    if normalizer:
        made.normalizer = getattr(normalizers, normalizer)()
    characters = [alphabet] if alphabet else pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        [alphabet or TEXT],
        trainers.BpeTrainer(initial_alphabet=characters, special_tokens=[EOD], vocab_size=280),
    )
    return HuggingFace(made.to_str(), Path("tokenizer.json"))


def lost(tokenizer: Tokenizer, text: str) -> int:
    return tokenizer.lost_bytes(text, tokenizer.encode_batch([text])[0])


def sentencepiece_model() -> bytes:
    import sentencepiece

    model = io.BytesIO()
    lines = iter(["the cat sat on the mat"] * 9)
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=lines,
        model_writer=model,
        vocab_size=40,
        model_type="unigram",
        hard_vocab_limit=False,
        minloglevel=2,
    )
    return model.getvalue()


@given(st.text())
def test_a_whole_alphabet_loses_nothing(text: str) -> None:
    assert lost(byte_level(), text) == lost(load_tokenizer("bytes"), text) == 0


def test_what_is_known_to_lose_nothing(tmp_path: Path) -> None:
    """A tokenizer.json is, unless one of its rules may drop or rewrite text, or it lacks a byte."""

    def changed(change: Callable[[dict[str, Any]], Any]) -> bool:
        data = json.loads(byte_level()._text)
        change(data)
        return HuggingFace(json.dumps(data), tmp_path).is_lossless

    split = {"type": "Split", "pattern": {"Regex": r"\s+"}, "behavior": "Isolated", "invert": False}
    bytewise = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": False,
    }
    sequence = {"type": "Sequence", "pretokenizers": [split, bytewise]}
    removing = {"type": "Sequence", "pretokenizers": [split | {"behavior": "Removed"}, bytewise]}
    spaced = {
        "id": 280,
        "content": "<x>",
        "special": False,
        "single_word": False,
        "lstrip": True,
        "rstrip": False,
        "normalized": False,
    }
    assert (
        byte_level().is_lossless
        and load_tokenizer("bytes").is_lossless
        and changed(lambda data: data.update(pre_tokenizer=sequence))
    )
    assert not changed(lambda data: data.update(pre_tokenizer=removing)) and not changed(
        lambda data: data.update(pre_tokenizer=split)
    )
    assert not changed(lambda data: data["added_tokens"].append(spaced))
    assert not any(
        tokenizer.is_lossless
        for tokenizer in (byte_level("NFC"), byte_level("Strip"), byte_level(alphabet="abc"))
    )
    (tmp_path / "tokenizer.model").write_bytes(sentencepiece_model())
    assert not load_tokenizer(tmp_path / "tokenizer.model").is_lossless
    file = tmp_path / "x.tiktoken"
    file.write_bytes(b"".join(base64.b64encode(bytes([i])) + b" %d\n" % i for i in range(256)))
    assert load_tokenizer(file).is_lossless


@given(st.text("abcde\u00e9\u65e5"))
def test_dropped_characters_are_counted(text: str) -> None:
    """An alphabet of three letters drops all others: the bytes that are left are those that
    decoding gives."""
    tokenizer = byte_level(alphabet="abc")
    assert lost(tokenizer, text) == sum(len(c.encode()) for c in text if c not in "abc")
    assert tokenizer.decode(tokenizer.encode_batch([text])[0]) == "".join(
        c for c in text if c in "abc"
    )


def test_normalisation_is_a_loss_only_where_it_is_not_canonical() -> None:
    accents = unicodedata.normalize("NFD", "caf\u00e9 na\u00efve \uac00")
    assert lost(byte_level("NFC"), accents) == lost(byte_level("NFD"), accents) == 0
    assert lost(byte_level("Lowercase"), "A Text of Cats") == 3, "case is lost"
    assert lost(byte_level("NFKC"), "\ufb01ne") == 3, (
        "a ligature is another character than its letters"
    )
    assert lost(byte_level("Strip"), "  ab ") == 3


def test_runs_of_spaces_that_are_tokens_of_their_own() -> None:
    """Gemma's: added to a model that was converted from SentencePiece, so that its \u2581 is a
    space there, too."""
    space = "\u2581"
    pieces = ["<unk>", EOD, space, *map(chr, range(33, 127)), "\n", 2 * space, 4 * space]
    merges = [(space, space), (2 * space, 2 * space)]
    made = tokenizers.Tokenizer(
        models.BPE(
            {piece: i for i, piece in enumerate(pieces)}, merges, unk_token="<unk>", fuse_unk=True
        )
    )
    made.normalizer = normalizers.Replace(" ", space)
    made.decoder = decoders.Sequence([decoders.Replace(space, " "), decoders.Fuse()])
    made.add_special_tokens([EOD])
    made.add_tokens([tokenizers.AddedToken(piece, normalized=False) for piece in pieces[-2:]])
    tokenizer = HuggingFace(made.to_str(), Path("tokenizer.json"))
    text = "def f(x):\n    return x\n"
    ids = tokenizer.encode_batch([text])[0]
    assert (
        pieces.index(4 * space) in ids
        and tokenizer.decode(ids) == text
        and tokenizer.lost_bytes(text, ids) == 0
    )


def test_an_unknown_token_spells_nothing(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(sentencepiece_model())
    tokenizer = load_tokenizer(str(tmp_path / "tokenizer.model"))
    assert lost(tokenizer, "the cat sat") == 0
    assert lost(tokenizer, "the \u65e5\u672c cat") == 6
    assert lost(tokenizer, "\u2047 the cat") == 3, (
        "decoding spells an unknown piece as this character"
    )
    assert lost(tokenizer, "the cat\nsat") == 1, "the line's end became a space"


class _Constant(Scorer):
    """Gives each token one nat."""

    def __init__(self) -> None:
        self.layout: Any = SimpleNamespace(config=SimpleNamespace(vocab_size=300, seq_len=8))
        self.batch = 1

    def __call__(self, sequences: Any) -> list[Any]:
        return [SimpleNamespace(logprobs=-np.ones(len(ids) - 1)) for ids in sequences]


class _Here:
    """A pool of this process."""

    def submit(self, function: Any, *arguments: Any) -> Future:
        future = Future()
        future.set_result(function(*arguments))
        return future


def of_text(tmp_path: Path, tokenizer: HuggingFace, **fields: float) -> DataConfig:
    (tmp_path / "text.txt").write_text(TEXT, encoding="utf-8")
    (tmp_path / "tokenizer").mkdir(exist_ok=True)
    return DataConfig(
        path=str(tmp_path / "text.txt"),
        tokenizer=str(tokenizer.save(tmp_path / "tokenizer")),
        cache=str(tmp_path / "cache"),
        **fields,
    )


def test_a_corpus_counts_what_its_tokens_spell(tmp_path: Path) -> None:
    """Three of four bytes are dropped: it is refused, with the setting that would accept it."""
    config = of_text(tmp_path, byte_level(alphabet="abc"))
    with pytest.raises(ConfigError) as refused:
        corpus.prepare(config, vocab=300)
    n_bytes = len(TEXT.encode())
    n_spelled = sum(TEXT.count(c) for c in "abc")
    assert f"the tokenizer loses {n_bytes - n_spelled:,} of {n_bytes:,} bytes of text" in str(
        refused.value
    )
    assert str(refused.value).endswith("accept the loss with data.max_lost_bytes=0.74")
    made = corpus.prepare(dataclasses.replace(config, max_lost_bytes=0.74), vocab=300)
    assert made.train_bytes + made.heldout_bytes == n_spelled
    assert made.loss_of_bytes == lost_bytes.described(n_bytes - n_spelled, n_bytes)
    assert corpus.prepare(of_text(tmp_path, byte_level()), vocab=300).loss_of_bytes == ""


def test_a_corpus_of_an_older_version_has_no_bits_per_byte(tmp_path: Path) -> None:
    """It did not count what was lost; a tokenizer that can lose nothing, such as one that was
    trained on the text, lost nothing."""
    config = of_text(tmp_path, byte_level())
    folded = tmp_path / "folded"
    folded.mkdir()
    lossy = dataclasses.replace(config, tokenizer=str(byte_level("Lowercase").save(folded)))
    cases = (
        (lossy, False),
        (config, True),
        *((dataclasses.replace(config, tokenizer=each), True) for each in ("", "bytes")),
    )
    for settings, is_counted in cases:
        made = corpus.prepare(settings, vocab=300)
        facts = json.loads((made.directory / "corpus.json").read_text(encoding="utf-8"))
        del facts["lost_bytes"], facts["sealed"]
        (made.directory / "corpus.json").write_text(json.dumps(facts), encoding="utf-8")
        old = corpus.prepare(settings, vocab=300)
        assert (old.heldout_bytes, old.train_bytes) == (
            (made.heldout_bytes, made.train_bytes) if is_counted else (None, None)
        )
        assert ("did not count what the tokenizer loses" in old.loss_of_bytes) is not is_counted


def test_perplexity_does_not_count_lost_bytes() -> None:
    """A model that gives each token one nat, on a text of which the tokens spell four bytes of
    eight."""
    tokenizer = byte_level(alphabet="abc")
    texts = ["abcx\u65e5", "", "a"]
    measure = functools.partial(
        perplexity.measure_perplexity, _Constant(), tokenizer, texts, stride=4, start=tokenizer.eod
    )
    with pytest.raises(
        ConfigError,
        match=r"loses 4 of 8 bytes of text .* accept the loss with --max-lost-bytes=0\.5",
    ):
        measure()
    measured = measure(max_lost_bytes=0.5)
    assert (measured.n_bytes, measured.lost_bytes, measured.texts) == (4, 4, 2)
    assert measured.summary()["bits_per_byte"] == pytest.approx(measured.tokens / math.log(2) / 4)


def test_prepare_refuses_and_reports(tmp_path: Path) -> None:
    config = of_text(tmp_path, byte_level(alphabet="abc"))
    output = io.StringIO()
    arguments = ((config.path,), str(tmp_path / "out"), config.tokenizer)
    with pytest.raises(ConfigError, match=r"accept the loss with --max-lost-bytes=0\.74"):
        prepare(*arguments, workers=1, output=output)
    facts = prepare(*arguments, workers=1, output=output, max_lost_bytes=0.74)
    assert facts["bytes"] == len(TEXT.encode()) and facts["bytes"] - facts["lost_bytes"] == sum(
        TEXT.count(c) for c in "abc"
    )
    assert lost_bytes.described(facts["lost_bytes"], facts["bytes"]) in output.getvalue()
    blend = DataConfig(blend=(str(tmp_path / "out"),), split="0,1,0", cache=str(tmp_path / "cache"))
    read = corpus.prepare(dataclasses.replace(blend, split="0,1,0"), vocab=300)
    assert read.heldout_bytes == facts["bytes"] - facts["lost_bytes"] and read.loss_of_bytes
    facts = json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))
    del facts["lost_bytes"]  # of an older version: the tokens are decoded
    (tmp_path / "out.digests").unlink()
    (tmp_path / "out.json").write_text(json.dumps(facts), encoding="utf-8")
    assert corpus.prepare(blend, vocab=300).heldout_bytes == read.heldout_bytes


@pytest.mark.parametrize("limit", [-0.01, 1.01, 5.0, math.nan])
def test_a_limit_that_is_no_fraction_is_refused(tmp_path: Path, limit: float) -> None:
    with pytest.raises(
        ConfigError,
        match=(
            r"--max-lost-bytes=\S+ must be a fraction of the text's bytes, in \[0, 1\], such as "
            r"0\.01"
        ),
    ):
        prepare((str(tmp_path),), str(tmp_path / "out"), "bytes", max_lost_bytes=limit)
    with pytest.raises(ConfigError, match=r"--max-lost-bytes=.* must be a fraction"):
        evaluate.parse(["--checkpoint=x", "--text=y", f"--max-lost-bytes={limit}"])
    assert list(data_problems(DataConfig(max_lost_bytes=limit))) == [
        f"data.max_lost_bytes={limit} must be a fraction in [0, 1]"
    ]
    assert not list(data_problems(DataConfig(max_lost_bytes=1)))


def test_an_unfinished_preparation_of_an_older_version_does_not_know_its_loss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The journal's lines of that version have no lost bytes: what is resumed has no sum, rather
    than one of its newer shards."""
    config = of_text(tmp_path, byte_level(alphabet="abc"))
    arguments = ((config.path,), str(tmp_path / "out"), config.tokenizer)
    append = unfinished.Appender.append
    appended = []

    def dies(self: unfinished.Appender, *shard: Any) -> unfinished.Totals:
        if len(appended) == 3:
            raise KeyboardInterrupt
        appended.append(append(self, *shard))
        return appended[-1]

    monkeypatch.setattr(plan, "SHARD", 200)
    monkeypatch.setattr(run, "_pool", lambda workers: contextlib.nullcontext(_Here()))
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(unfinished.Appender, "append", dies)
        prepare(*arguments, output=io.StringIO(), max_lost_bytes=1)
    journal = tmp_path / "out.parts" / "journal.jsonl"
    lines = [json.loads(line) for line in journal.read_text(encoding="utf-8").splitlines()]
    assert all(line.pop("lost_bytes") for line in lines)
    journal.write_text("".join(f"{json.dumps(line)}\n" for line in lines), encoding="utf-8")
    facts = prepare(*arguments, output=io.StringIO())
    assert (
        "lost_bytes" not in facts
        and facts["bytes"] == len(TEXT.encode())
        and facts == json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))
    )
