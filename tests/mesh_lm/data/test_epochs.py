"""data.max_epochs: how often a run would read its text, and the refusal of a run that repeats it
too often."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from mesh_lm.config import DataConfig, TrainConfig, TrainLoop
from mesh_lm.data.corpus import known_sources, prepare
from mesh_lm.data.dataset import dataset_of
from mesh_lm.data.epochs import epochs_problems
from mesh_lm.data.indexed import write_documents
from mesh_lm.errors import ConfigError
from mesh_lm.model import DecoderConfig
from mesh_lm.training.ready import require_ready


@pytest.fixture
def text_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with 900 training tokens under `a` and 9,000 under `b`; a tenth of
    each is held out."""
    monkeypatch.chdir(tmp_path)
    for name, size in (("a", 100), ("b", 1000)):
        write_documents(name, [np.arange(size)] * 10, vocab=1000)
    return tmp_path


def config(steps: int, **data: object) -> TrainConfig:
    """80 tokens a step."""
    fields = {"split": "9,1,0", "cache": "cache"} | data
    return TrainConfig(
        model=DecoderConfig(vocab_size=1000, seq_len=8),
        output="run",
        train=TrainLoop(steps=steps, global_batch=10),
        data=DataConfig(**fields),  # pyright: ignore[reportArgumentType]
    )


def refused(config: TrainConfig, is_stored: bool = False) -> list[str]:
    text_sources = (
        known_sources(config.data) if is_stored else prepare(config.data, vocab=300).sources()
    )
    return epochs_problems(config, text_sources)


def test_the_limit_is_exact(text_directory: Path) -> None:
    """Four epochs of 900 tokens are 45 steps."""
    assert refused(config(45, blend=("a",))) == []
    assert refused(config(46, blend=("a",))) == [
        "train.steps=46 x 80 tokens a step are 3,680 from data.blend=a: 4.1 epochs of its 900 "
        "tokens, more than data.max_epochs=4; give it more text, set train.steps=45 or fewer, or "
        "set data.max_epochs=0 for no limit"
    ]
    assert refused(config(10**6, blend=("a",), max_epochs=0)) == []
    assert len(refused(config(12, blend=("a",), max_epochs=1))) == 1


def test_of_a_weighted_blend_each_prefix_has_the_limit(text_directory: Path) -> None:
    """Half of the samples are of `a`, which ends long before `b` was read once; without weights
    both are one text."""
    assert refused(config(400, blend=("a", "b"))) == []
    (problem,) = refused(config(400, blend=("1", "a", "1", "b")))
    assert problem == (
        "train.steps=400 x 80 tokens a step are 32,000, of which 16,000 from a: 17.8 epochs of its "
        "900 tokens, more than data.max_epochs=4; give it more text, set train.steps=90 or fewer, "
        "or set data.max_epochs=0 for no limit"
    )
    assert len(refused(config(10**4, blend=("1", "a", "1", "b")))) == 2


def test_what_is_known_before_anything_is_prepared(text_directory: Path) -> None:
    """Of prefixes the sizes of the files; of text nothing until it was prepared once."""
    assert known_sources(config(1, blend=("1", "a", "3", "b")).data) == {
        "a": (1000, 0.25),
        "b": (10_000, 0.75),
    }
    (text_directory / "text.txt").write_text("one two three four\n" * 50, encoding="utf-8")
    text = config(1000, path="text.txt")
    assert known_sources(text.data) == {} and refused(text, is_stored=True) == []
    require_ready(text, thorough=True)
    prepare(text.data, vocab=text.data.tokenizer_vocab)
    with pytest.raises(
        ConfigError,
        match=(
            r"^this run cannot start\n  - train.steps=1000 x 80 tokens a step are 80,000 from "
            r"corpus text-"
        ),
    ):
        require_ready(text, thorough=True)
    require_ready(
        dataclasses.replace(text, data=dataclasses.replace(text.data, max_epochs=0)), thorough=True
    )
    with pytest.raises(
        ConfigError,
        match=r"cannot start\n  - .* are 80,000 from data.blend=a: 80.0 epochs of its 1,000 tokens, ",
    ):
        require_ready(config(1000, blend=("a",)), thorough=True)


def test_tokens_that_a_run_is_given(text_directory: Path) -> None:
    require_ready(config(5), dataset_of([1] * 106), thorough=True)
    with pytest.raises(
        ConfigError,
        match=r"from corpus tokens-\w+: 4.8 epochs of its 101 tokens, more than data.max_epochs=4",
    ):
        require_ready(config(6), dataset_of([1] * 106), thorough=True)


def test_text_of_less_than_a_step(text_directory: Path) -> None:
    """There is no number of steps to suggest."""
    write_documents("tiny", [np.arange(1)] * 10, vocab=1000)
    (problem,) = refused(config(1, blend=("tiny",)))
    assert " 8.9 epochs of its 9 tokens, " in problem and problem.endswith(
        "; give it more text, or set data.max_epochs=0 for no limit"
    )
