"""Data and runs that were made with a Llama 3 rank file by an older version, which had another
pattern for it, are still read."""

import base64
import contextlib
import dataclasses
import json
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import pytest

from mesh_lm.config import DataConfig, TrainConfig, TrainLoop
from mesh_lm.data import corpus
from mesh_lm.data.batches import Batches
from mesh_lm.data.prepare import run
from mesh_lm.data.prepare.run import prepare
from mesh_lm.data.tokenizer import load_tokenizer, ranks
from mesh_lm.errors import ConfigError
from mesh_lm.inference import trained
from mesh_lm.model import DecoderConfig

TEXT = "".join(f"line {i} of the text\n \n" for i in range(400))


class _Here:
    """A pool of this process, where the patterns are patched."""

    def submit(self, function: Any, *arguments: Any) -> Future:
        future = Future()
        future.set_result(function(*arguments))
        return future


@pytest.fixture
def old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> DataConfig:
    """A text that was prepared with the old pattern, as a blend and in the cache; what follows runs
    with the new one."""
    words = [*(bytes([byte]) for byte in range(256)), b"\n ", b"  "]
    file = tmp_path / "tokenizer.model"
    file.write_bytes(
        b"".join(base64.b64encode(word) + b" %d\n" % i for i, word in enumerate(words))
    )
    (tmp_path / "text.txt").write_text(TEXT, encoding="utf-8")
    monkeypatch.setattr(run, "_pool", lambda workers: contextlib.nullcontext(_Here()))
    with monkeypatch.context() as patch:
        patch.setitem(ranks._PUBLISHED, len(words), (ranks._CL100K, ranks._PUBLISHED[128000][1]))
        config = DataConfig(
            path=str(tmp_path / "text.txt"),
            tokenizer=str(file),
            cache=str(tmp_path / "cache"),
            split="90,10,0",
            threads=0,
        )
        corpus.prepare(config, vocab=300)
        prepare((config.path,), str(tmp_path / "old"), config.tokenizer, workers=1)
    monkeypatch.setitem(ranks._PUBLISHED, len(words), ranks._PUBLISHED[128000])
    return config


def test_the_former_fingerprint_is_that_of_cl100ks_pattern(old: DataConfig, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(old.tokenizer)
    (former,) = tokenizer.former_fingerprints
    assert (
        former
        == json.loads((tmp_path / "old.json").read_text(encoding="utf-8"))["tokenizer_fingerprint"]
        != tokenizer.fingerprint
    )
    assert load_tokenizer("bytes").former_fingerprints == ()


def test_prefixes_of_both_are_one_blend(old: DataConfig, tmp_path: Path) -> None:
    prepare((old.path,), str(tmp_path / "new"), old.tokenizer, workers=1)
    blend = dataclasses.replace(old, path="", blend=(str(tmp_path / "old"), str(tmp_path / "new")))
    messages = []
    # the tokenizer beside the prefix
    for config in (blend, dataclasses.replace(blend, tokenizer="")):
        messages.clear()
        assert (
            corpus.prepare(config, vocab=300, progress=messages.append).fingerprint
            == load_tokenizer(old.tokenizer).fingerprint
        )
        assert [line for line in messages if "of an older version" in line] == [
            line for line in messages if f"{tmp_path / 'old'} is" in line
        ]
        assert sum("of an older version" in line for line in messages) == 1
    other = dataclasses.replace(blend, tokenizer="bytes")
    with pytest.raises(ConfigError, match="the data was encoded with different tokenizers"):
        corpus.prepare(other, vocab=300)


def test_a_cached_corpus_is_used_again_and_its_run_goes_on(old: DataConfig, tmp_path: Path) -> None:
    messages: list[str] = []
    made = corpus.prepare(old, vocab=300, progress=messages.append)
    assert (
        len(list((tmp_path / "cache").iterdir())) == 1
        and sum("of an older version" in line for line in messages) == 1
    )
    model = DecoderConfig(vocab_size=128_300, seq_len=8)
    config = TrainConfig(
        model=model,
        output=str(tmp_path / "run"),
        train=TrainLoop(steps=9, global_batch=2),
        data=old,
    )
    sharding = jax.NamedSharding(
        jax.make_mesh((1,), ("data",), (jax.sharding.AxisType.Auto,)), jax.P(None, "data")
    )
    state = Batches(config, made, sharding).state(4)
    (former,) = load_tokenizer(old.tokenizer).former_fingerprints
    resumed = Batches(config, made, sharding, state | {"tokenizer": former}, 2)
    assert ["of an older version" in line for line in resumed.changed] == [True]
    assert resumed.state(4)["tokenizer"] == load_tokenizer(old.tokenizer).fingerprint
    with pytest.raises(ConfigError, match="was trained with another tokenizer"):
        Batches(config, made, sharding, state | {"tokenizer": "1" * 64}, 2)


def test_weights_are_accepted(
    old: DataConfig, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer = load_tokenizer(old.tokenizer)
    saved = SimpleNamespace(data={"tokenizer": tokenizer.former_fingerprints[0]})
    monkeypatch.setattr(trained.checkpoint, "find", lambda path: saved)
    trained.require_tokenizer("runs/old", tokenizer)
    assert capsys.readouterr().out.count("init_from=runs/old is of an older version") == 1
    with pytest.raises(ConfigError, match="was trained with another tokenizer"):
        trained.require_tokenizer("runs/old", load_tokenizer("bytes"))
