"""What transformers keeps beside a tokenizer goes from the original directory through training and
import to an export."""

import base64
import io
import json
import shutil
from pathlib import Path
from typing import Any

import jax
import pytest
import sentencepiece
import tokenizers
from support import shard_on
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from mesh_lm import distributed, huggingface
from mesh_lm.data.tokenizer import Tokenizer, load_tokenizer
from mesh_lm.errors import ConfigError
from mesh_lm.huggingface.model_card import model_card
from mesh_lm.inference.trained import _load_tokenizer as tokenizer_of
from mesh_lm.inference.trained import keep_tokenizer
from mesh_lm.model import DecoderConfig
from mesh_lm.parallel.layout import ModelLayout

COMPILE_BUDGET = 110
SPECIAL = ["<|begin|>", "<|endoftext|>", "<|pad|>", "<|unk|>"]
CONFIG = {
    "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<|begin|>",
    "eos_token": "<|endoftext|>", "pad_token": "<|pad|>",
    "unk_token": {"__type": "AddedToken", "content": "<|unk|>", "lstrip": False, "normalized": False, "rstrip": False, "special": True},
    "model_max_length": 64, "padding_side": "left", "clean_up_tokenization_spaces": False,
}  # fmt: skip
TEMPLATE = "{% for message in messages %}<|begin|>{{ message['content'] }}é{% endfor %}"
GENERATION = {
    "bos_token_id": 0,
    "eos_token_id": [1, 3],
    "pad_token_id": 2,
    "do_sample": True,
    "temperature": 0.6,
    "top_p": 0.9,
}
MODEL = DecoderConfig(
    vocab_size=300, seq_len=16, n_layers=1, d_model=16, n_heads=2, dtype="float32"
)


def write(directory: Path, **changes: Any) -> Path:
    """Writes a tokenizer with a beginning that it adds to every text, and the files beside it; None
    leaves one out."""
    bpe = tokenizers.Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=280, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator(["the sea was calm. " * 20], trainer)
    bpe.post_processor = processors.TemplateProcessing(
        single="<|begin|> $A", special_tokens=[("<|begin|>", 0)]
    )
    directory.mkdir(parents=True, exist_ok=True)
    bpe.save(str(directory / "tokenizer.json"))
    files = {
        "tokenizer_config.json": CONFIG,
        "generation_config.json": GENERATION,
        "chat_template.jinja": TEMPLATE,
    } | changes
    for name, content in files.items():
        if content is None:
            continue
        (directory / name).parent.mkdir(exist_ok=True)
        (directory / name).write_text(
            content if isinstance(content, str) else json.dumps(content), encoding="utf-8"
        )
    return directory


def saved(tokenizer: Tokenizer, directory: Path) -> Path:
    directory.mkdir(parents=True)
    tokenizer.save(directory)
    return directory


def read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def export(tokenizer: Tokenizer, directory: Path, model: DecoderConfig = MODEL) -> Path:
    layout = ModelLayout.of(model, shard_on("ddp"))
    huggingface.save(
        directory,
        layout,
        jax.jit(layout.init)(jax.random.key(0)),
        dtype="float32",
        tokenizer=tokenizer,
    )
    return directory


def test_every_file_survives_training_and_export(tmp_path: Path) -> None:
    """By way of a prepared corpus and a run's output."""
    more = {
        "special_tokens_map.json": {"unk_token": "<|unk|>"},
        "added_tokens.json": {"<|tool|>": 280},
    }
    source = write(tmp_path / "source", **more)
    corpus = saved(load_tokenizer(source), tmp_path / "corpus")
    keep_tokenizer(str(tmp_path / "run"), load_tokenizer(corpus))
    out = export(load_tokenizer(tmp_path / "run" / "tokenizer"), tmp_path / "out")
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json", *more):
        assert read(out / name) == read(source / name)
    assert (out / "chat_template.jinja").read_text(encoding="utf-8") == TEMPLATE
    described = read(out / "config.json")
    assert {name: described[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")} == {
        name: GENERATION[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")
    }
    listed = {
        line.split()[1] for line in (out / "SHA256SUMS").read_text(encoding="utf-8").splitlines()
    }
    assert listed == {path.name for path in out.iterdir()} - {"SHA256SUMS", "README.md"}
    assert load_tokenizer(out).fingerprint == load_tokenizer(source).fingerprint


def test_names_alone_give_ids(tmp_path: Path) -> None:
    """Of settings for generation, and of a model's config.json."""
    tokenizer = load_tokenizer(write(tmp_path / "source", **{"generation_config.json": None}))
    assert tokenizer.token_ids() == {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
    out = export(tokenizer, tmp_path / "out")
    assert read(out / "generation_config.json") == tokenizer.token_ids()
    assert read(out / "config.json").items() >= tokenizer.token_ids().items()


def test_the_model_beside_a_tokenizer_names_what_it_does_not(tmp_path: Path) -> None:
    """GPT-2's published tokenizer_config.json has one line; <|endoftext|> is also its bos, and
    config.json has the ids."""
    model = {"model_type": "gpt2", "bos_token_id": 1, "eos_token_id": 1}
    changes = {
        "generation_config.json": None,
        "chat_template.jinja": None,
        "tokenizer_config.json": {"model_max_length": 1024},
    }
    tokenizer = load_tokenizer(write(tmp_path / "source", **changes, **{"config.json": model}))
    assert tokenizer.companions.generation == {"bos_token_id": 1, "eos_token_id": 1}
    assert read(saved(tokenizer, tmp_path / "out") / "tokenizer_config.json") == {
        "tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 1024,
        "eos_token": "<|endoftext|>",
        "bos_token": "<|endoftext|>", "unk_token": "<|endoftext|>",
    }  # fmt: skip


def test_a_class_in_a_file_of_the_directory(tmp_path: Path) -> None:
    """Which is not kept, so that transformers would not find it."""
    auto_map = {
        "AutoTokenizer": ["tokenization_own.OwnTokenizer", "tokenization_own_fast.OwnTokenizerFast"]
    }
    for name, kept in (
        ("OwnTokenizerFast", "PreTrainedTokenizerFast"),
        ("GPT2Tokenizer", "GPT2Tokenizer"),
    ):
        config = CONFIG | {"tokenizer_class": name, "auto_map": auto_map}
        tokenizer = load_tokenizer(write(tmp_path / name, **{"tokenizer_config.json": config}))
        assert read(
            saved(tokenizer, tmp_path / f"out {name}") / "tokenizer_config.json"
        ) == CONFIG | {"tokenizer_class": kept}


def test_more_chat_templates(tmp_path: Path) -> None:
    """Those of a directory become a list in tokenizer_config.json, which every version of
    transformers reads."""
    more = {"additional_chat_templates/tools.jinja": "tools"}
    tokenizer = load_tokenizer(write(tmp_path / "source", **more))
    out = saved(tokenizer, tmp_path / "out")
    templates = [{"name": "default", "template": TEMPLATE}, {"name": "tools", "template": "tools"}]
    assert read(out / "tokenizer_config.json") == CONFIG | {"chat_template": templates}
    assert not (out / "chat_template.jinja").exists()


def test_generation_settings_of_the_model_that_a_run_starts_from(tmp_path: Path) -> None:
    model = write(tmp_path / "model")
    tokenizer = load_tokenizer(write(tmp_path / "tokenizer", **{"generation_config.json": None}))
    keep_tokenizer(str(tmp_path / "run"), tokenizer, init_from=str(model))
    assert read(tmp_path / "run" / "tokenizer" / "generation_config.json") == GENERATION


def test_generation_settings_of_another_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Process 0 reads them alone: the others would not take part in an exchange of values, and
    never answer."""
    (tmp_path / "first" / "checkpoints" / "5").mkdir(parents=True)
    write(tmp_path / "first" / "tokenizer")
    tokenizer = load_tokenizer(write(tmp_path / "tokenizer", **{"generation_config.json": None}))
    monkeypatch.setattr(
        distributed, "broadcast_from_process0", lambda value: pytest.fail("an exchange of values")
    )
    for init_from in ("first", "first/checkpoints", "first/checkpoints/5"):
        keep_tokenizer(
            str(tmp_path / init_from / "run"), tokenizer, init_from=str(tmp_path / init_from)
        )
        assert (
            read(tmp_path / init_from / "run" / "tokenizer" / "generation_config.json")
            == GENERATION
        )


def test_generation_settings_whatever_the_tokenizer(tmp_path: Path) -> None:
    """--tokenizer names one without settings, which are the model's: those of tiktoken and of bytes
    have none of their own."""
    model = write(tmp_path / "model")
    lines = [base64.b64encode(bytes([byte])) + b" %d\n" % byte for byte in range(256)]
    (tmp_path / "a.tiktoken").write_bytes(b"".join(lines))
    bare = saved(
        load_tokenizer(write(tmp_path / "source", **{"generation_config.json": None})),
        tmp_path / "bare",
    )
    for number, spec in enumerate([str(bare), str(tmp_path / "a.tiktoken"), "bytes"]):
        tokenizer = tokenizer_of(spec, None, model)
        run = saved(tokenizer, tmp_path / f"run {number}")
        assert (
            read(export(load_tokenizer(run), tmp_path / f"out {number}") / "generation_config.json")
            == GENERATION
        )


def test_a_name_that_is_not_utf_8(tmp_path: Path) -> None:
    """As any with other than ASCII characters is for Python with LC_ALL=C."""
    out = export(load_tokenizer(write(tmp_path / "source")), tmp_path / "caf\udce9")
    assert (out / "README.md").read_text(encoding="utf-8").count("caf\\xe9") == 3


def test_a_damaged_file(tmp_path: Path) -> None:
    for name in ("tokenizer_config.json", "generation_config.json", "special_tokens_map.json"):
        source = write(tmp_path / name, **{name: "{"})
        with pytest.raises(
            ConfigError,
            match=f"cannot read {source / name}, which describes the tokenizer beside it",
        ):
            load_tokenizer(source)


@pytest.mark.parametrize("kind", ["bytes", "ranks"])
def test_a_tokenizer_that_transformers_lacks(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    tokenizer = load_tokenizer("bytes")
    if kind == "ranks":
        lines = [base64.b64encode(bytes([byte])) + b" %d\n" % byte for byte in range(256)]
        (tmp_path / "a.tiktoken").write_bytes(b"".join(lines))
        tokenizer = load_tokenizer(tmp_path / "a.tiktoken")
    out = export(tokenizer, tmp_path / "out")
    name = {"bytes": "plain bytes", "ranks": "a tiktoken rank file"}[kind]
    assert capsys.readouterr().out == (
        f"warning: transformers cannot load the tokenizer of this export ({name}), only the model; "
        "mesh_lm.data.tokenizer.load_tokenizer reads it\n"
    )
    assert "transformers cannot load the tokenizer" in (out / "README.md").read_text(
        encoding="utf-8"
    )
    assert read(out / "generation_config.json") == {"eos_token_id": 256}


def test_the_model_card(tmp_path: Path) -> None:
    card = model_card(
        "small", "GPT2LMHeadModel", MODEL, "bfloat16", load_tokenizer(write(tmp_path))
    )
    assert f"A `GPT2LMHeadModel` with {MODEL.n_params():,} parameters in bfloat16" in card
    assert 'tokenizer = AutoTokenizer.from_pretrained("small")' in card


@pytest.mark.slow
def test_transformers_reads_a_sentencepiece_model(tmp_path: Path) -> None:
    """In an export of a family whose own tokenizers are of another kind."""
    transformers = pytest.importorskip(
        "transformers", reason="the oracle needs transformers: pip install -e '.[oracle]'"
    )
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["the sea was calm at dawn"] * 50), model_writer=model,
        vocab_size=290, model_type="bpe", byte_fallback=True,
        hard_vocab_limit=False, normalization_rule_name="identity", remove_extra_whitespaces=False,
        minloglevel=2,
    )  # fmt: skip
    (tmp_path / "tokenizer.model").write_bytes(model.getvalue())
    tokenizer = load_tokenizer(tmp_path / "tokenizer.model")
    out = export(tokenizer, tmp_path / "out")
    theirs = transformers.AutoTokenizer.from_pretrained(out)
    for text in ("the sea was calm", " the  sea\n\u65e5 x"):
        assert (
            theirs(text, add_special_tokens=False).input_ids
            == tokenizer.encode_batch([text])[0].tolist()
        )
    assert theirs.eos_token_id == tokenizer.eod


@pytest.mark.slow
@pytest.mark.parametrize("place", ["inline", "own file", "named", "legacy map"])
def test_transformers_sees_no_difference(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    transformers = pytest.importorskip(
        "transformers", reason="the oracle needs transformers: pip install -e '.[oracle]'"
    )
    changes: dict[str, Any] = {
        "chat_template.jinja": None,
        "config.json": {"model_type": "gpt2", "vocab_size": 300},
    }
    config = dict(CONFIG)
    if place == "inline":
        config["chat_template"] = TEMPLATE
    elif place == "own file":
        del changes["chat_template.jinja"]
    elif place == "named":
        changes |= {
            "chat_template.jinja": TEMPLATE,
            "additional_chat_templates/tools.jinja": "tools",
        }
    else:
        roles = ("bos_token", "eos_token", "pad_token", "unk_token")
        changes["special_tokens_map.json"] = {role: config.pop(role) for role in roles}
    source = write(tmp_path / "source", **changes, **{"tokenizer_config.json": config})
    keep_tokenizer(str(tmp_path / "run"), load_tokenizer(source))
    out = export(load_tokenizer(tmp_path / "run" / "tokenizer"), tmp_path / "out")
    shutil.rmtree(tmp_path / "run")

    wanted, found = (
        transformers.AutoTokenizer.from_pretrained(directory) for directory in (source, out)
    )
    for name in (
        "bos_token",
        "eos_token",
        "pad_token",
        "unk_token",
        "padding_side",
        "model_max_length",
        "chat_template",
        "vocab_size",
    ):
        assert getattr(found, name) == getattr(wanted, name), name
    assert found.bos_token == "<|begin|>"
    texts = ["the sea was calm", "é"]
    assert found(texts, padding=True).input_ids == wanted(texts, padding=True).input_ids
    settings = [
        transformers.GenerationConfig.from_pretrained(directory).to_dict()
        for directory in (source, out)
    ]
    assert settings[0] == settings[1] and settings[1]["temperature"] == 0.6
