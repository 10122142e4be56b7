"""Tests of all kinds of tokenizers, trained here, against the decoders of Hugging Face,
SentencePiece and tiktoken."""

import base64
import functools
import io
import itertools
import json
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import regex
import sentencepiece
import tiktoken
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mesh_lm.data.tokenizer import (
    EOD,
    Tokenizer,
    load_tokenizer,
    ranks,
    smaller_than_asked,
    train_tokenizer,
)
from mesh_lm.data.tokenizer.hugging_face import HuggingFace
from mesh_lm.errors import ConfigError

TEXTS = [
    "def f(x):\n    return x + 1\n",
    "the cat sat on the mat. " * 20,
    "naïve 日本語 🎉 e\u0301\n\n  1234567 don't",
]
NASTY = [
    f"a {EOD}b </s> <s> <unk> <0x0A> <|end_of_text|>",
    " \r\n\t x",
    "\ufeff\0",
    "",
    "  ",
    "\u2581x",
    *TEXTS,
]
KINDS = ("trained", "llama2_json", "sentencepiece", "tiktoken", "bytes")
BYTE_LEVEL = ("trained", "tiktoken", "bytes")


@functools.cache
def trained() -> Tokenizer:
    return train_tokenizer(TEXTS * 9, 300)


@functools.cache
def sentencepiece_model(**options: Any) -> bytes:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter("\n".join(TEXTS * 9).splitlines()), model_writer=model,
        vocab_size=400, model_type="bpe", byte_fallback=True,
        hard_vocab_limit=False, normalization_rule_name="identity", remove_extra_whitespaces=False,
        minloglevel=2, **options,
    )  # fmt: skip
    return model.getvalue()


def rank_file(n_merges: int = 40) -> bytes:
    """Returns a BPE in tiktoken's format: bytes in an order of their own, then merges."""
    words = [bytes([byte]) for byte in sorted(range(256), key=lambda byte: byte * 7 % 256)]
    text = "".join(TEXTS).encode()
    for size in (2, 3, 4):
        words += [
            w
            for w in sorted({text[i : i + size] for i in range(len(text) - size)})
            if w[:-1] in words and w not in words
        ]
    return b"".join(
        base64.b64encode(word) + b" %d\n" % rank
        for rank, word in enumerate(words[: 256 + n_merges])
    )


def llama2_json() -> str:
    """Returns a SentencePiece vocabulary in Hugging Face's format, as transformers converts Llama
    2: spaces and bytes are decoder steps."""
    model = sentencepiece.SentencePieceProcessor(model_proto=sentencepiece_model())
    pieces = [model.id_to_piece(i) for i in range(model.get_piece_size())]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    merges = sorted(
        (-model.get_score(i), [piece[:cut], piece[cut:]])
        for i, piece in enumerate(pieces) if i >= 259
        for cut in range(1, len(piece)) if piece[:cut] in vocab and piece[cut:] in vocab
    )  # fmt: skip
    added = [{"id": i, "content": pieces[i], "special": True, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
             for i in range(3)]  # fmt: skip
    return json.dumps({
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": added,
        "post_processor": None, "pre_tokenizer": None,
        "normalizer": {"type": "Sequence", "normalizers": [
            {"type": "Prepend", "prepend": "▁"},
            {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}]},
        "decoder": {"type": "Sequence", "decoders": [
            {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
            {"type": "ByteFallback"}, {"type": "Fuse"},
            {"type": "Strip", "content": " ", "start": 1, "stop": 0}]},
        "model": {"type": "BPE", "unk_token": "<unk>", "byte_fallback": True, "fuse_unk": True, "vocab": vocab,
                  "merges": [pair for _, pair in merges]},
    })  # fmt: skip


@functools.cache
def made(kind: str, directory: Path) -> Tokenizer:
    directory.mkdir(parents=True, exist_ok=True)
    match kind:
        case "trained":
            return trained()
        case "bytes":
            return load_tokenizer("bytes")
        case "llama2_json":
            path = directory / "tokenizer.json"
            path.write_text(llama2_json(), encoding="utf-8")
        case "sentencepiece":
            path = directory / "spiece.model"
            path.write_bytes(sentencepiece_model())
        case _:
            path = directory / "tokenizer.model"  # as Llama 3 names it
            path.write_bytes(rank_file())
    return load_tokenizer(str(path))


@pytest.fixture(scope="module", params=KINDS)
def tokenizer(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Tokenizer:
    return made(request.param, tmp_path_factory.getbasetemp() / "kinds" / request.param)


@pytest.fixture(scope="module", params=BYTE_LEVEL)
def byte_level(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Tokenizer:
    return made(request.param, tmp_path_factory.getbasetemp() / "kinds" / request.param)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.text(), max_size=4))
@example(NASTY)
def test_byte_level_round_trip(byte_level: Tokenizer, texts: list[str]):
    ids = byte_level.encode_batch(texts)
    assert [byte_level.decode(i) for i in ids] == texts
    assert byte_level.joins
    if ids:
        assert byte_level.decode(np.concatenate(ids)) == "".join(texts)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.text(), max_size=4))
@example(NASTY)
def test_ids(tokenizer: Tokenizer, texts: list[str]):
    for ids in tokenizer.encode_batch(texts):
        assert ids.dtype == np.int32
        assert tokenizer.eod not in ids  # a document cannot end itself
        assert ((ids >= 0) & (ids < tokenizer.vocab_size)).all()


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_a_stream_says_the_same_in_pieces(tokenizer: Tokenizer, data: st.DataObject):
    """Holds for any ids, including invalid UTF-8: no piece ends inside a character, so no output is
    revised."""
    ids = data.draw(st.lists(st.integers(-1, tokenizer.vocab_size + 3), max_size=30))
    stream = tokenizer.stream()
    pieces = [stream.push(i) for i in ids]
    assert "".join(pieces) + stream.flush() == tokenizer.decode(ids)
    assert stream.flush() == ""


def test_a_stream_waits_for_whole_characters(tmp_path: Path):
    stream = load_tokenizer("bytes").stream()
    assert [stream.push(i) for i in "é🎉a".encode()] == ["", "é", "", "", "", "🎉", "a"]
    stream.push(0xF0)
    assert (stream.flush(), stream.push(ord("b"))) == ("\ufffd", "b")


@settings(max_examples=200, deadline=None)
@given(st.text())
def test_decoders_agree_with_the_libraries(tmp_path_factory: pytest.TempPathFactory, text: str):
    base = tmp_path_factory.getbasetemp() / "kinds"
    ours = {kind: made(kind, base / kind) for kind in KINDS}
    json_ = tokenizers.Tokenizer.from_str(llama2_json_cached())
    ids = ours["llama2_json"].encode_batch([text])[0].tolist()
    assert ours["llama2_json"].decode(ids) == json_.decode(ids, skip_special_tokens=False)
    model = sentencepiece.SentencePieceProcessor(model_proto=sentencepiece_model())
    ids = ours["sentencepiece"].encode_batch([text])[0].tolist()
    assert ids == model.encode(text)
    assert ours["sentencepiece"].decode(ids) == model.decode(ids)


llama2_json_cached = functools.cache(llama2_json)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(0, 299), max_size=30))
def test_byte_level_decoding_of_any_ids_agrees_with_hugging_face(ids: list[int]):
    tokenizer = trained()
    assert isinstance(tokenizer, HuggingFace) and tokenizer.vocab_size == 300
    assert tokenizer.decode(ids) == tokenizer._tokenizer.decode(ids, skip_special_tokens=False)


def test_save_and_load(tokenizer: Tokenizer, tmp_path: Path):
    file = tokenizer.save(tmp_path)
    for spec in (tmp_path, file, str(file)):
        loaded = load_tokenizer(spec)
        assert (loaded.fingerprint, loaded.vocab_size, loaded.eod) == (
            tokenizer.fingerprint,
            tokenizer.vocab_size,
            tokenizer.eod,
        )
    for ours, theirs in zip(
        tokenizer.encode_batch(NASTY), load_tokenizer(tmp_path).encode_batch(NASTY), strict=True
    ):
        assert ours.tolist() == theirs.tolist()
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_fingerprints_tell_kinds_apart(tmp_path_factory: pytest.TempPathFactory):
    base = tmp_path_factory.getbasetemp() / "kinds"
    assert len({made(kind, base / kind).fingerprint for kind in KINDS}) == len(KINDS)


def test_fingerprints_follow_the_meaning(tmp_path: Path):
    trained().save(tmp_path)
    path = tmp_path / "tokenizer.json"
    data = json.loads(path.read_text(encoding="utf-8"))
    moved = tmp_path / "moved" / "other.json"
    moved.parent.mkdir()
    merges = [" ".join(pair) for pair in data["model"]["merges"]]
    truncation = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    moved.write_text(
        json.dumps(
            data | {"truncation": truncation, "model": data["model"] | {"merges": merges}}, indent=3
        ),
        encoding="utf-8",
    )
    assert load_tokenizer(moved).fingerprint == trained().fingerprint
    # and not truncated to 2
    assert (
        load_tokenizer(moved).encode_batch(TEXTS)[1].tolist()
        == trained().encode_batch(TEXTS)[1].tolist()
    )
    data["model"]["merges"][0], data["model"]["merges"][5] = (
        data["model"]["merges"][5],
        data["model"]["merges"][0],
    )
    moved.write_text(json.dumps(data), encoding="utf-8")
    assert load_tokenizer(moved).fingerprint != trained().fingerprint


def test_sizes():
    assert (trained().eod, trained().vocab_size) == (0, 300)
    assert trained().decode([trained().eod]) == EOD
    assert train_tokenizer(["ab"], 300).vocab_size == 258  # there is one pair to merge
    assert (load_tokenizer("bytes").eod, load_tokenizer("bytes").vocab_size) == (256, 257)
    assert len(trained().encode_batch([TEXTS[1]])[0]) < len(TEXTS[1]) / 2


def test_training_is_a_function_of_the_texts():
    saved = {train_tokenizer(TEXTS * 3, 400).fingerprint for _ in range(2)}
    assert len(saved) == 1


def with_eos(directory: Path, *added: str, **config: object) -> Path:
    """Returns a model directory whose tokenizer.json has these special tokens instead of
    <|endoftext|>."""
    directory.mkdir(exist_ok=True)
    data = json.loads(trained().save(directory).read_text(encoding="utf-8"))
    shutil.rmtree(directory)
    directory.mkdir()
    data["model"]["vocab"]["<unused>"] = data["model"]["vocab"].pop(EOD)
    token = {
        "special": True,
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
    }
    data["added_tokens"] = [
        token | {"id": 300 + i, "content": name} for i, name in enumerate(added)
    ]
    (directory / "tokenizer.json").write_text(json.dumps(data), encoding="utf-8")
    if config:
        (directory / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return directory


def test_end_of_document_token_of_a_model_directory(tmp_path: Path):
    assert load_tokenizer(with_eos(tmp_path / "a", "<s>", "</s>")).eod == 301
    assert load_tokenizer(with_eos(tmp_path / "b", "</s>", "<|end_of_text|>")).eod == 301
    assert (
        load_tokenizer(with_eos(tmp_path / "c", "</s>", "<|im_end|>", eos_token="<|im_end|>")).eod
        == 301
    )
    assert (
        load_tokenizer(
            with_eos(tmp_path / "d", "</s>", "<|im_end|>", eos_token={"content": "<|im_end|>"})
            / "tokenizer.json"
        ).eod
        == 301
    )
    assert load_tokenizer(with_eos(tmp_path / "e", "</s>", eos_token=None)).eod == 300
    kept = tmp_path / "kept"
    kept.mkdir()
    load_tokenizer(tmp_path / "c").save(kept)
    assert load_tokenizer(kept).eod == 301


def test_a_token_that_is_not_special_still_ends_no_document(tmp_path: Path):
    path = with_eos(tmp_path / "a", "</s>", "<think>") / "tokenizer.json"
    path.write_text(
        path.read_text(encoding="utf-8").replace('"special": true', '"special": false'),
        encoding="utf-8",
    )
    tokenizer = load_tokenizer(path)
    (ids,) = tokenizer.encode_batch(["a</s><think>"])
    assert 300 not in ids
    assert ids[-1] == 301  # tokens that the file declares as text are text
    assert tokenizer.decode(ids) == "a</s><think>"


def test_special_tokens_by_name(tmp_path: Path, tokenizer: Tokenizer):
    assert tokenizer.special("the") is None
    assert tokenizer.special("<|no_such|>") is None
    names = {EOD, "</s>"}
    assert {tokenizer.special(name) for name in names} == {tokenizer.eod, None}
    assert (
        load_tokenizer(with_eos(tmp_path / "a", "</s>", "<|fim_prefix|>")).special("<|fim_prefix|>")
        == 301
    )


@pytest.mark.parametrize(
    ("n", "eod", "size", "text", "words"),
    [
        (50256, 50256, 50257, "12345 it's", [b"12345", b" it", b"'s"]),
        (100256, 100257, 100277, "12345 it's", [b"123", b"45", b" it", b"'s"]),
        (128000, 128001, 128256, "12345 it's", [b"123", b"45", b" it", b"'s"]),
        (199998, 199999, 200019, "12345 it's", [b"123", b"45", b" it's"]),
        (300, 300, 301, "12345 it's", [b"123", b"45", b" it", b"'s"]),
    ],
)
def test_published_rank_files_are_known_by_their_size(
    n: int, eod: int, size: int, text: str, words: list[bytes], tmp_path: Path
):
    first = [
        *(bytes([byte]) for byte in range(256)),
        b"12",
        b"123",
        b"1234",
        b"12345",
        b"45",
        b" i",
        b" it",
        b"'s",
        b" it'",
        b" it's",
    ]
    filler = (b"\xff" + i.to_bytes(3, "big") for i in range(n))
    ordered = [*first, *(next(filler) for _ in range(n - len(first)))]
    path = tmp_path / "x.tiktoken"
    path.write_bytes(
        b"".join(base64.b64encode(word) + b" %d\n" % rank for rank, word in enumerate(ordered))
    )
    tokenizer = load_tokenizer(path)
    assert (tokenizer.eod, tokenizer.vocab_size) == (eod, size)
    assert [ordered[i] for i in tokenizer.encode_batch([text])[0]] == words
    assert tokenizer.special("<|eot_id|>") == (128009 if n == 128000 else None)


def test_patterns_are_tiktokens_own():
    """Compares with cl100k and o200k of tiktoken_ext.openai_public, without downloading their
    ranks."""
    source = (
        Path(tiktoken.__file__)
        .parents[1]
        .joinpath("tiktoken_ext", "openai_public.py")
        .read_text(encoding="utf-8")
    )
    assert ranks._GPT2 in source
    assert ranks._CL100K in source
    for part in ranks._O200K.split("|\\p")[0].replace("|[^\\r", "\n[^\\r").split("\n"):
        assert part in source


LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| "
    r"?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""Of meta-llama/llama3, llama/tokenizer.py."""


def test_llama_3_splits_words_as_meta_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Against the `regex` library and byte pairs merged by hand, on random strings, with merges
    over every kind of white space."""
    pairs = [
        b"\n ",
        b"  ",
        b"\n\n",
        b" \n",
        b"\r\n",
        b"\t ",
        b"'s",
        b"ab",
        b" a",
        b"!\n",
        b"12",
        b"\n  ",
        b"   ",
        b"123",
        b" ab",
        b"\n\n ",
    ]
    ordered = [*(bytes([byte]) for byte in range(256)), *pairs]
    rank_of = {word: rank for rank, word in enumerate(ordered)}
    monkeypatch.setitem(ranks._PUBLISHED, len(ordered), ranks._PUBLISHED[128000])
    (path := tmp_path / "tokenizer.model").write_bytes(
        b"".join(base64.b64encode(w) + b" %d\n" % i for w, i in rank_of.items())
    )
    tokenizer = load_tokenizer(path)

    def merged(word: bytes) -> list[int]:
        parts = [word[i : i + 1] for i in range(len(word))]
        while joined := [
            (rank_of[a + b], i)
            for i, (a, b) in enumerate(itertools.pairwise(parts))
            if a + b in rank_of
        ]:
            i = min(joined)[1]
            parts[i : i + 2] = [parts[i] + parts[i + 1]]
        return [rank_of[part] for part in parts]

    draw = random.Random(0)
    texts = [
        "".join(draw.choices(" \n\r\tab'sS1234!.\u00e9\u65e5\u00a0\u017f", k=draw.randrange(12)))
        for _ in range(5000)
    ]
    wanted = [
        [i for word in regex.findall(LLAMA3, text) for i in merged(word.encode())] for text in texts
    ]
    assert [ids.tolist() for ids in tokenizer.encode_batch(texts)] == wanted
    assert tokenizer.encode_batch(["\n "])[0].tolist() == [10, 32], "cl100k has one token, 256"


@pytest.mark.parametrize("character", [" ", "a", "^", "\n", "1", "\u0301"])
def test_a_long_run_of_one_character(byte_level: Tokenizer, character: str):
    text = "x" + character * 100_000
    assert byte_level.decode(byte_level.encode_batch([text])[0]) == text


def test_errors(tmp_path: Path):
    def fails(path: Path | str, message: str, contents: bytes | str | None = None) -> None:
        if contents is not None:
            Path(path).write_bytes(contents.encode() if isinstance(contents, str) else contents)
        with pytest.raises(ConfigError, match=message):
            load_tokenizer(str(path))

    with pytest.raises(ConfigError, match=r"data\.tokenizer_vocab=256.*257"):
        train_tokenizer(TEXTS, 256)
    fails(
        tmp_path / "no.json",
        r"no\.json: no such tokenizer file or directory; give a tokenizer\.json or.*the word bytes",
    )
    fails(tmp_path, "expected one tokenizer in this directory, found none; give")
    fails(tmp_path / "bad.json", r"cannot load the tokenizer .*bad\.json", '{"version": "1.0"')
    fails(
        tmp_path / "bad.json",
        r"cannot load the tokenizer .*bad\.json: it is not",
        '{"version": "1.0"}',
    )
    fails(
        tmp_path / "bad.json",
        r"bad\.json has no end-of-document token",
        '{"model": {"type": "BPE"}}',
    )
    fails(tmp_path / "bad.json", r"cannot load the tokenizer .*bad\.json", b"\xff")
    fails(
        tmp_path / "bad.json",
        r"bad\.json: ",
        '{"model": {"type": "X"}, "added_tokens": [{"id": 0, "content": "</s>"}]}',
    )
    fails(
        with_eos(tmp_path / "a", "</s>", eos_token="<end>"),
        "no token '<end>', which the files beside it name",
    )
    fails(
        with_eos(tmp_path / "b", "<s>"),
        "none of <.endoftext.>, .*name one of them as eos_token in a tokenizer_config.json",
    )
    wordpiece = json.loads((tmp_path / "a" / "tokenizer.json").read_text(encoding="utf-8")) | {
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True}
    }
    fails(
        tmp_path / "wp.json",
        r"wp\.json: a tokenizer with decoder step WordPiece is not supported; byte-level ones",
        json.dumps(wordpiece),
    )
    fails(
        tmp_path / "x.model",
        r"x\.model is neither a SentencePiece model nor a tiktoken rank file",
        b"\x0a\x05hello",
    )
    fails(
        tmp_path / "y.model",
        r"y\.model has no end-of-sentence piece",
        sentencepiece_model(eos_id=-1),
    )
    fails(tmp_path, r"found several: x\.model, y\.model; name one")
    fails(
        tmp_path / "z.tiktoken",
        r"z\.tiktoken, line 3: expected a token in base64",
        b"YQ== 0\nYg== 1\nYg\n",
    )
    fails(
        tmp_path / "z.tiktoken",
        r"z\.tiktoken has no rank for 4 of the 256 bytes.*truncated",
        b"".join(rank_file().splitlines(True)[4:]),
    )
    fails(
        tmp_path / "z.tiktoken",
        "297 tokens, but only 296 of their ranks are different",
        rank_file() + b"Zm9vYmFy 7\n",
    )
    fails(tmp_path / "z.txt", r"files of type \.txt are not read as tokenizers; give", "hello")


def test_a_text_that_is_too_small_for_the_vocabulary() -> None:
    tokenizer = train_tokenizer(["one two one two"], 400)
    said = smaller_than_asked(tokenizer, 400)
    assert said.startswith(
        f"the tokenizer has {tokenizer.vocab_size} entries instead of 400, because no other pair "
        "of tokens occurs"
    )
    assert tokenizer.vocab_size < 300 and said.endswith(
        f"; model.vocab_size={tokenizer.vocab_size} would be enough"
    )
    assert smaller_than_asked(tokenizer, tokenizer.vocab_size) == ""
