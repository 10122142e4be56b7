"""A head beside the embedding of a model that config.json calls tied: tied if it is a copy, and a
weight of its own if it is not."""

import json
import shutil
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from fixtures.huggingface_golden import FIXTURES, NAMES
from support import shard_on

from mesh_lm import huggingface
from mesh_lm.data.tokenizer import load_tokenizer
from mesh_lm.errors import ConfigError
from mesh_lm.huggingface import files
from mesh_lm.huggingface.configs import family_of
from mesh_lm.inference import Scorer
from mesh_lm.inference.trained import TrainedModel, weights
from mesh_lm.parallel.layout import ModelLayout

COMPILE_BUDGET = 40
HEAD = "lm_head.weight"


def stored(directory: Path) -> dict[str, np.ndarray]:
    found, problems = files.scan(directory)
    assert not problems
    return {
        name: tensor.read(tuple(slice(None) for _ in tensor.shape or ()))
        for name, tensor in found.items()
    }


def write(directory: Path, name: str, head: str, **changes: Any) -> dict[str, np.ndarray]:
    """Writes a fixture as a tied model with a head: "copy" of the embedding, or "another". Returns
    its tensors."""
    described = json.loads((FIXTURES / name / "config.json").read_text(encoding="utf-8")) | {
        "tie_word_embeddings": True
    }
    if name == "gpt2":
        del described["tie_word_embeddings"]  # the default of GPT-2
    (directory / "config.json").write_text(json.dumps(described | changes), encoding="utf-8")
    tensors = stored(FIXTURES / name)
    embedding = tensors[family_of(directory).embedding]
    tensors[HEAD] = embedding.copy() if head == "copy" else embedding[::-1].copy()
    files.write(directory / "model.safetensors", tensors)
    return tensors


def load(directory: Path) -> dict[str, np.ndarray]:
    layout = ModelLayout.of(huggingface.config_of(directory), shard_on("ddp"))
    return {name: np.asarray(x) for name, x in huggingface.load(directory, layout).items()}


@pytest.mark.parametrize("name", NAMES)
def test_a_copy_is_tied(name: str, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    write(tmp_path, name, "copy")
    assert huggingface.config_of(tmp_path).tied
    assert "head" not in load(tmp_path)
    assert not capsys.readouterr().out


@pytest.mark.parametrize("name", NAMES)
def test_another_head_is_loaded(name: str, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    tensors = write(tmp_path, name, "another")
    assert not huggingface.config_of(tmp_path).tied
    params = load(tmp_path)
    n = len(tensors[HEAD])
    np.testing.assert_array_equal(params["head"][:n], tensors[HEAD])
    np.testing.assert_array_equal(params["embedding"][:n], tensors[HEAD][::-1])
    assert capsys.readouterr().out == (
        f"warning: {tmp_path}/config.json ties the head to the embedding, but the files have "
        "another lm_head.weight: the head is not tied, as in transformers\n"
    )


def test_an_export_is_untied(tmp_path: Path) -> None:
    tensors = write(tmp_path, "gpt2", "another")
    layout = ModelLayout.of(huggingface.config_of(tmp_path), shard_on("ddp"))
    huggingface.save(tmp_path / "out", layout, huggingface.load(tmp_path, layout), dtype="float32")
    assert (
        json.loads((tmp_path / "out" / "config.json").read_text(encoding="utf-8"))[
            "tie_word_embeddings"
        ]
        is False
    )
    np.testing.assert_array_equal(stored(tmp_path / "out")[HEAD], tensors[HEAD])


def test_one_bit_in_the_last_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors are compared a few rows at a time."""
    monkeypatch.setattr(files, "_COMPARED_BYTES", 1000)
    tensors = write(tmp_path, "qwen3", "copy")
    assert huggingface.config_of(tmp_path).tied
    tensors[HEAD].view(np.uint32)[-1, -1] ^= 1
    files.write(tmp_path / "model.safetensors", tensors)
    assert not huggingface.config_of(tmp_path).tied


def test_several_files(tmp_path: Path) -> None:
    """The fixture has an embedding and a head in different files."""
    shutil.copytree(FIXTURES / "llama3", tmp_path, dirs_exist_ok=True)
    described = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    (tmp_path / "config.json").write_text(
        json.dumps(described | {"tie_word_embeddings": True}), encoding="utf-8"
    )
    wanted = load(FIXTURES / "llama3")
    found = load(tmp_path)
    assert found.keys() == wanted.keys()
    np.testing.assert_array_equal(found["head"], wanted["head"])


def test_a_head_that_the_index_does_not_list(tmp_path: Path) -> None:
    """transformers reads all of each file that the index names."""
    tensors = write(tmp_path, "qwen3", "another")
    (tmp_path / "model.safetensors").rename(tmp_path / "a.safetensors")
    listed = {name: "a.safetensors" for name in tensors if name != HEAD}
    (tmp_path / files.INDEX).write_text(json.dumps({"weight_map": listed}), encoding="utf-8")
    np.testing.assert_array_equal(load(tmp_path)["head"][: len(tensors[HEAD])], tensors[HEAD])


def test_one_file_precedes_an_index(tmp_path: Path) -> None:
    """As in transformers: an index may be left of an earlier save, with files that are still there
    or not."""
    tensors = write(tmp_path, "qwen3", "another")
    files.write(
        tmp_path / "old.safetensors", {name: tensor + 1 for name, tensor in tensors.items()}
    )
    (tmp_path / files.INDEX).write_text(
        json.dumps({"weight_map": dict.fromkeys(tensors, "old.safetensors")}), encoding="utf-8"
    )
    for _ in range(2):
        np.testing.assert_array_equal(load(tmp_path)["head"][: len(tensors[HEAD])], tensors[HEAD])
        (tmp_path / "old.safetensors").unlink(missing_ok=True)


def test_an_embedding_under_two_names(tmp_path: Path) -> None:
    tensors = write(tmp_path, "qwen3", "copy")
    files.write(
        tmp_path / "model.safetensors", tensors | {"embed_tokens.weight": tensors[HEAD] + 1}
    )
    with pytest.raises(
        ConfigError, match=r"embed_tokens\.weight is also there as model\.embed_tokens\.weight$"
    ):
        load(tmp_path)


def test_types_that_differ(tmp_path: Path) -> None:
    """The numbers are compared as float32, the type of the weights here."""
    tensors = write(tmp_path, "qwen3", "copy")
    rounded = tensors[HEAD].astype(ml_dtypes.bfloat16)
    files.write(tmp_path / "model.safetensors", tensors | {HEAD: rounded})
    assert not huggingface.config_of(tmp_path).tied
    embedding = family_of(tmp_path).embedding
    files.write(
        tmp_path / "model.safetensors",
        tensors | {HEAD: rounded, embedding: rounded.astype(np.float32)},
    )
    assert huggingface.config_of(tmp_path).tied


def test_a_head_without_an_embedding_is_both(tmp_path: Path) -> None:
    tensors = write(tmp_path, "qwen3", "another")
    del tensors[family_of(tmp_path).embedding]
    files.write(tmp_path / "model.safetensors", tensors)
    params = load(tmp_path)
    assert "head" not in params
    np.testing.assert_array_equal(params["embedding"][: len(tensors[HEAD])], tensors[HEAD])


def test_an_untied_model_without_its_head(tmp_path: Path) -> None:
    """For which transformers would draw random numbers."""
    tensors = write(tmp_path, "qwen3", "another", tie_word_embeddings=False)
    del tensors[HEAD]
    files.write(tmp_path / "model.safetensors", tensors)
    with pytest.raises(ConfigError, match=r"lm_head\.weight is missing \(head\)$"):
        load(tmp_path)


def test_a_head_of_another_shape(tmp_path: Path) -> None:
    tensors = write(tmp_path, "qwen3", "another")
    tensors[HEAD] = tensors[HEAD][:-1]
    files.write(tmp_path / "model.safetensors", tensors)
    with pytest.raises(
        ConfigError, match=r"lm_head\.weight has shape .*, but head of this config needs"
    ):
        load(tmp_path)


def test_null_is_neither(tmp_path: Path) -> None:
    write(tmp_path, "qwen3", "another", tie_word_embeddings=None, rms_norm_eps=None)
    with pytest.raises(
        ConfigError,
        match=r"rms_norm_eps=null should be float\n  - tie_word_embeddings=null should be bool",
    ):
        huggingface.config_of(tmp_path)


def test_every_command_loads_the_same(tmp_path: Path) -> None:
    """`TrainedModel.load` is what import, generate and evaluate call, and `weights` what init_from
    calls."""
    tensors = write(tmp_path, "qwen3", "another")
    load_tokenizer("bytes").save(tmp_path)
    trained = TrainedModel.load(tmp_path)
    started = weights(tmp_path, trained.layout)()
    for params in (trained.params, started):
        np.testing.assert_array_equal(
            np.asarray(params["head"])[: len(tensors[HEAD])], tensors[HEAD]
        )


@pytest.mark.slow
@pytest.mark.parametrize("head", ["copy", "another", "alone"])
@pytest.mark.parametrize("name", ["gpt2", "llama3"])
def test_as_transformers(name: str, head: str, tmp_path: Path) -> None:
    torch = pytest.importorskip(
        "torch", reason="the oracle needs torch: pip install -e '.[oracle]'"
    )
    transformers = pytest.importorskip(
        "transformers", reason="the oracle needs transformers: pip install -e '.[oracle]'"
    )
    tensors = write(tmp_path, name, head)
    if head == "alone":
        del tensors[family_of(tmp_path).embedding]
        files.write(tmp_path / "model.safetensors", tensors)
    load_tokenizer("bytes").save(tmp_path)
    trained = TrainedModel.load(tmp_path, dtype="float32")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert trained.config.model.tied == (
        model.get_output_embeddings().weight is model.get_input_embeddings().weight
    )  # type: ignore[attr-defined]
    ids = [5, 40, 77, 101, 12, 9]
    with torch.no_grad():
        theirs = model(torch.tensor([ids])).logits[0].log_softmax(-1)
    wanted = [theirs[i, token].item() for i, token in enumerate(ids[1:])]
    assert Scorer(trained.layout, trained.params)([ids])[0].logprobs == pytest.approx(
        wanted, abs=1e-5
    )
