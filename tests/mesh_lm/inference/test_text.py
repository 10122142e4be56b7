"""Tests of text generation: stop strings, streaming, batches of several sizes."""

import dataclasses
import functools

import jax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import GPT, shard_on

from mesh_lm.data.tokenizer import load_tokenizer
from mesh_lm.errors import ConfigError
from mesh_lm.inference import Generator, Sampling
from mesh_lm.inference.text import CompletionWriter, as_typed, document_start
from mesh_lm.parallel.layout import ModelLayout
from mesh_lm.training.evaluation import sample

COMPILE_BUDGET = 20
BYTES = load_tokenizer("bytes")
CONFIG = dataclasses.replace(GPT, vocab_size=272, seq_len=48, init_std=0.3)
PROMPTS = ["def ", "", "a longer one", "x", "the fifth"]
NEW = 20


@functools.cache
def generator(batch: int = 2) -> Generator:
    layout = ModelLayout.of(CONFIG, shard_on("ddp"))
    params = jax.jit(layout.init)(jax.random.key(4))
    return Generator(layout, params, BYTES, Sampling(temperature=2.0, top_k=0), batch=batch)


@functools.cache
def texts(**options) -> list:
    return generator().complete(PROMPTS, NEW, seed=3, **options)


def test_a_text_depends_on_its_row_alone() -> None:
    """Batches of two, one stream or many pieces give the same texts."""
    made = texts()
    assert [len(c.tokens) for c in made if c.reason == "length"] == [NEW] * sum(
        c.reason == "length" for c in made
    )
    assert len({c.text for c in made}) == len(PROMPTS)
    pieces = list(generator().stream(PROMPTS[0], NEW, seed=3))
    assert "".join(pieces) == made[0].text and len(pieces) > 5
    for completion in made:
        ids = completion.tokens[:-1] if completion.reason == "stop" else completion.tokens
        assert completion.text == BYTES.decode(ids) and len(completion.logprobs) == len(
            completion.tokens
        )
        assert all(p <= 0 for p in completion.logprobs)


def test_stop_strings() -> None:
    """Each text ends where its stop string starts, even if that spans tokens, and rows end
    independently."""
    whole = texts()
    stop = tuple(c.text[at : at + 3] for c, at in zip(whole, (4, 9, 2, 7, 5), strict=True))
    found = texts(stop=stop)
    for completion, before in zip(found, whole, strict=True):
        end = min(before.text.find(s) for s in stop if s in before.text)
        assert (completion.text, completion.reason) == (before.text[:end], "stop")
        assert (
            completion.tokens == before.tokens[: len(completion.tokens)]
            and len(completion.tokens) < NEW
        )
    assert "".join(generator().stream(PROMPTS[0], NEW, seed=3, stop=stop)) == found[0].text


def test_the_end_of_a_document() -> None:
    """The EOD ends a text if it is a stop id, and is spelled out otherwise."""
    eod = CompletionWriter(BYTES, [65], stop_ids=[BYTES.eod])
    eod.push([(66, -1.0), (BYTES.eod, -2.0), (67, -3.0)])
    assert dataclasses.astuple(eod.completion()) == ("B", [66, BYTES.eod], [-1.0, -2.0], "stop")
    through = CompletionWriter(BYTES, [65])
    through.push([(66, -1.0), (BYTES.eod, -2.0), (67, -3.0)])
    assert dataclasses.astuple(through.completion()) == (
        "B<|endoftext|>C",
        [66, BYTES.eod, 67],
        [-1.0, -2.0, -3.0],
        "length",
    )


@settings(max_examples=100, deadline=None)
@given(
    st.text("abé", max_size=12),
    st.lists(st.text("abé", min_size=1, max_size=4), max_size=3),
    st.data(),
)
def test_pieces_make_the_text(text: str, stop: list[str], data: st.DataObject) -> None:
    """For any pieces, shown text is never revised and ends at the first complete stop string."""
    tokens = [(token, 0.0) for token in BYTES.encode_batch([text])[0].tolist()]
    writer, shown = CompletionWriter(BYTES, [], stop), ""
    while tokens and writer.reason == "length":
        n = data.draw(st.integers(1, len(tokens)))
        shown += writer.push(tokens[:n])
        assert text.startswith(shown)
        tokens = tokens[n:]
    shown += writer.finish()
    complete = [(text.find(s) + len(s), text.find(s)) for s in stop if s in text]
    first = min(end for end, _ in complete) if complete else None
    wanted = text if first is None else text[: min(at for end, at in complete if end == first)]
    assert shown == writer.completion().text == wanted
    assert (writer.reason == "stop") == bool(complete)


def test_half_a_character_at_the_end() -> None:
    writer = CompletionWriter(BYTES, [])
    assert (
        writer.push([(0xC3, 0.0)]) == "" and writer.finish() == "\ufffd" == writer.completion().text
    )


def test_the_sample_at_the_end_of_a_run() -> None:
    layout, params = ModelLayout.of(CONFIG, shard_on("ddp")), generator().engine.params
    text = sample(layout, params, BYTES, 1000, seed=1)
    assert text and text == sample(layout, params, BYTES, 47, seed=1)
    assert sample(layout, params, BYTES, 0, seed=1) is None


def test_mistakes() -> None:
    with pytest.raises(ConfigError, match="an empty stop string ends every text before it starts"):
        generator().complete(["a"], 2, stop=("b", ""))
    started = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(generator().engine), "start", lambda *_, **__: started.append(1))
        with pytest.raises(
            ConfigError, match="prompt 4 has length 47 and 2 new tokens were requested"
        ):
            generator().complete([*"abcd", "e" * 47], 2)
    assert not started, (
        "the first of many prompts are not answered before the last is known to be wrong"
    )
    small = ModelLayout.of(dataclasses.replace(CONFIG, vocab_size=256), shard_on("ddp"))
    with pytest.raises(
        ConfigError,
        match=(
            "the tokenizer has 257 ids and the model 256: the model was trained with another "
            "tokenizer"
        ),
    ):
        Generator(small, {}, BYTES)


def test_words_that_the_locale_took_for_something_else() -> None:
    """With LC_ALL=C and without Python's UTF-8 mode, bytes that are not ASCII become surrogates."""
    for text in ("na\u00efve \u65e5", "plain", ""):
        assert as_typed(text.encode().decode("ascii", "surrogateescape")) == as_typed(text) == text
    for word in ("\udcff", "\ud800"):  # not UTF-8, and not even a byte
        assert as_typed(word) == word
    with pytest.raises(ConfigError, match="the tokenizer has no such special token"):
        document_start(BYTES, "\ud800")
