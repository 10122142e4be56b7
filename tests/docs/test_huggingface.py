"""docs/huggingface.md, typed in from top to bottom beside a tiny model of the name that the page
uses."""

import argparse
import dataclasses
import inspect
import re
import shlex
from pathlib import Path

import jax
import numpy as np
import pytest
from support import shard_on

import train
from mesh_lm import huggingface
from mesh_lm.checkpoint import find
from mesh_lm.commands import command_line, generate
from mesh_lm.commands import huggingface as command
from mesh_lm.data.tokenizer import load_tokenizer, train_tokenizer
from mesh_lm.data.tokenizer.companions import Companions
from mesh_lm.errors import ConfigError
from mesh_lm.huggingface import files
from mesh_lm.huggingface.configs import family_for
from mesh_lm.huggingface.families import FAMILIES
from mesh_lm.model import DecoderConfig
from mesh_lm.parallel.layout import ModelLayout

COMPILE_BUDGET = 50
PAGE = (Path(__file__).parents[2] / "docs" / "huggingface.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
COMMANDS = [shlex.split(text) for kind, text in BLOCKS if kind == "sh"]
CONFIG = next(text for kind, text in BLOCKS if kind == "python" and "get_config" in text)
START = "Llama-3.2-1B"
COMPANIONS = Companions(
    {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|endoftext|>",
        "pad_token": "<|endoftext|>",
        "padding_side": "left",
    },
    chat_template="{{ messages }}",
    generation={"eos_token_id": 0, "temperature": 0.6},
)


def tensors(directory: str) -> dict[str, np.ndarray]:
    found, problems = files.scan(Path(directory))
    assert found and not problems
    return {
        name: stored.read((slice(None),) * len(stored.shape or ()))
        for name, stored in found.items()
    }


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the page's model, text and config file."""
    directory, text = tmp_path_factory.mktemp("here"), inspect.getsource(argparse)
    tokenizer = train_tokenizer([text], 300)
    tokenizer.companions = COMPANIONS
    model = DecoderConfig(
        vocab_size=tokenizer.vocab_size, vocab_multiple=16, seq_len=64, n_layers=2, d_model=32,
        n_heads=4, n_kv_heads=2, d_ff=64,
        positions="rotary", rope_scaling=8.0, rope_original_seq_len=16, norm="rmsnorm",
        activation="swiglu", biases=False,
    )  # fmt: skip
    layout = ModelLayout.of(model, shard_on("ddp"))
    params = jax.jit(layout.init)(jax.random.key(0))
    huggingface.save(directory / START, layout, params, dtype="float32", tokenizer=tokenizer)
    (directory / "corpus.txt").write_text(text, encoding="utf-8")
    (directory / "finetune.py").write_text(CONFIG, encoding="utf-8")
    return directory


@pytest.mark.slow
def test_the_page(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """Trained with a learning rate of 0, what is exported is what was imported, in bf16; train gets
    the options of a tiny run."""
    monkeypatch.chdir(here)
    tiny = {"data.path": "corpus.txt", "data.cache": here, "launch.compile_cache": "", "model.seq_len": 16, "model.dtype": "float32",
            "train.global_batch": 8, "train.steps": 2, "train.sample_tokens": 0,
            "optimizer.learning_rate": 0.0,
            "train.eval_sequences": 8, "optimizer.warmup_steps": 0}  # fmt: skip
    mains = {
        "train": (train.main, [f"--config.{field}={value}" for field, value in tiny.items()]),
        # docs/generation.md runs it
        "generate": (lambda argv: print(command_line.command(generate.Arguments, argv, "")), []),
        "export": (lambda argv: command.main(["export", *argv]), []),
        "import": (lambda argv: command.main(["import", *argv]), []),
    }
    for words in COMMANDS:
        _, subcommand, *rest = words
        main, more = mains[subcommand]
        assert main([*rest, *more]) in (0, None), words
    capsys.readouterr()

    started, given = tensors(START), tensors(f"{START}-notes")
    assert given.keys() == started.keys()
    for name, x in started.items():
        np.testing.assert_array_equal(given[name], x.astype(given[name].dtype), err_msg=name)
    assert {str(x.dtype) for x in given.values()} == {"bfloat16"}
    assert load_tokenizer(f"{START}-notes").fingerprint == load_tokenizer(START).fingerprint
    assert load_tokenizer(f"{START}-notes").companions == COMPANIONS
    assert huggingface.config_of(f"{START}-notes") == dataclasses.replace(
        huggingface.config_of(START), seq_len=128
    )

    imported = find("runs/llama")
    assert imported is not None and imported.step == 0
    with pytest.raises(ConfigError, match="already holds step 0"):
        command.main(["import", f"--input={START}", "--output=runs/llama"])
    assert (
        command.main(["export", "--checkpoint=runs/llama", "--output=again", "--dtype=float32"])
        == 0
    )
    assert load_tokenizer("again").companions == COMPANIONS
    for name, x in tensors("again").items():
        np.testing.assert_array_equal(x, started[name], err_msg=name)


def test_the_error_shown() -> None:
    model = DecoderConfig(
        positions="rotary",
        norm="rmsnorm",
        activation="swiglu",
        biases=False,
        softcap=30.0,
        window=(1024, 0),
    )
    with pytest.raises(ConfigError) as caught:
        family_for(model)
    assert next(text for kind, text in BLOCKS if kind == "text") == f"error: {caught.value}\n"


def test_the_table() -> None:
    rows = dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", PAGE, re.MULTILINE))
    assert list(rows) == [family.architecture for family in FAMILIES]
    told: dict[str, object] = {}
    for family in FAMILIES:
        fields = dict(re.findall(r'`(\w+)="?(\w+)"?`', rows[family.architecture]))
        told = told | fields if "as Llama" in rows[family.architecture] else fields
        assert all(str(family.fixed[name]) == value for name, value in told.items())
        assert {"positions", "norm", "activation", "biases"} <= told.keys()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "nothing given; expected export or import"),
        (["exprt"], "exprt given; expected export or import"),
        (
            ["export", "--chekpoint=a"],
            "--chekpoint: there is no such option; did you mean --checkpoint?",
        ),
        (["import", "--input=nowhere", "--output=a"], "nowhere"),
    ],
)
def test_mistakes(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        command.main(words)
    assert message in str(caught.value)
