from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mesh_lm.config import ConfigError
from mesh_lm.data.tokenizer import EOD, Tokenizer

TEXTS = ["def f(x):\n    return x + 1\n", "the cat sat on the mat. " * 20]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.train(TEXTS, 280)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.text(), max_size=4))
@example([f"a {EOD}b", " \r\n\t x", "\ufeff\0", "naïve 日本語 🎉 e\u0301"])
def test_round_trip(tokenizer: Tokenizer, texts: list[str]):
    ids = tokenizer.encode_batch(texts)
    assert [tokenizer.decode(i) for i in ids] == texts
    for i in ids:
        assert i.dtype == np.int32
        assert tokenizer.eod not in i  # a document cannot end itself
        assert ((i >= 0) & (i < tokenizer.vocab_size)).all()


def test_sizes(tokenizer: Tokenizer):
    assert tokenizer.eod == 0
    assert tokenizer.vocab_size == 280
    assert Tokenizer.train(["ab"], 300).vocab_size == 258  # there is one pair to merge


def test_it_compresses(tokenizer: Tokenizer):
    (ids,) = tokenizer.encode_batch([TEXTS[1]])
    assert len(ids) < len(TEXTS[1]) / 2


def test_save_and_load(tokenizer: Tokenizer, tmp_path: Path):
    tokenizer.save(tmp_path / "tokenizer.json")
    assert [p.name for p in tmp_path.iterdir()] == ["tokenizer.json"]
    loaded = Tokenizer.load(tmp_path / "tokenizer.json")
    text = f"the cat {EOD} def"
    assert (loaded.vocab_size, loaded.eod) == (tokenizer.vocab_size, tokenizer.eod)
    assert loaded.encode_batch([text])[0].tolist() == tokenizer.encode_batch([text])[0].tolist()
    assert loaded.decode([loaded.eod]) == EOD


def test_training_is_a_function_of_the_texts(tmp_path: Path):
    saved = []
    for name in "ab":
        Tokenizer.train(TEXTS * 3, 400).save(tmp_path / name)
        saved.append((tmp_path / name).read_bytes())
    assert saved[0] == saved[1]


def test_errors(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"data\.tokenizer_vocab=256.*257"):
        Tokenizer.train(TEXTS, 256)
    assert Tokenizer.train(TEXTS, 257).vocab_size == 257
    (tmp_path / "bad.json").write_text('{"version": "1.0"')
    with pytest.raises(ConfigError, match=r"bad\.json"):
        Tokenizer.load(tmp_path / "bad.json")
    with pytest.raises(ConfigError, match=r"missing\.json"):
        Tokenizer.load(tmp_path / "missing.json")
