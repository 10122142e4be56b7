"""Models with experts: files without some of them, files of all in one tensor, meshes that shard
them, runs made of them, and the texts that they generate."""

import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fixtures.huggingface_golden import FIXTURES, TOLERANCE, Golden, golden
from support import shard_on

from mesh_lm import huggingface
from mesh_lm.commands import huggingface as command
from mesh_lm.errors import ConfigError
from mesh_lm.huggingface import files
from mesh_lm.inference import Engine, Sampling
from mesh_lm.inference.trained import TrainedModel
from mesh_lm.parallel.layout import ModelLayout

COMPILE_BUDGET = 100
NAMES = ("mixtral", "qwen3_moe")


def tensors(directory: Path) -> dict[str, np.ndarray]:
    found, problems = files.scan(directory)
    assert not problems
    return {
        name: stored.read((slice(None),) * len(stored.shape or ()))
        for name, stored in found.items()
    }


def refused(directory: Path) -> list[str]:
    layout = ModelLayout.of(huggingface.config_of(directory), shard_on("ddp"))
    with pytest.raises(ConfigError) as caught:
        huggingface.reader(directory, layout)
    return str(caught.value).replace(str(directory), "DIR").split("\n  - ")


def with_tensors(name: str, directory: Path, stored: dict[str, np.ndarray]) -> Path:
    """Returns a directory with the config of a fixture, and these tensors."""
    shutil.copyfile(FIXTURES / name / "config.json", directory / "config.json")
    files.write(directory / files.SINGLE, stored)
    return directory


def test_a_missing_expert_is_named_once(tmp_path: Path) -> None:
    stored = tensors(FIXTURES / "mixtral")
    absent = "model.layers.1.block_sparse_moe.experts.3"
    stored = {name: x for name, x in stored.items() if not name.startswith(absent)}
    directory = with_tensors("mixtral", tmp_path, stored)
    head = "DIR cannot be read as this model"
    assert refused(directory) == [head, f"{absent} is missing: expert 3 of layer 1"]

    half = "model.layers.0.block_sparse_moe.experts.2.w2.weight"
    del stored[half]
    files.write(directory / files.SINGLE, stored)
    assert refused(directory) == [
        head,
        f"{absent} is missing: expert 3 of layer 1",
        f"{half} is missing (blocks.experts.down)",
    ]


def test_more_experts_than_the_config_has(tmp_path: Path) -> None:
    stored = tensors(FIXTURES / "qwen3_moe")
    extra = "model.layers.2.mlp.experts.4.down_proj.weight"
    stored[extra] = stored[extra.replace(".4.", ".3.")]
    assert refused(with_tensors("qwen3_moe", tmp_path, stored))[1:] == [
        f"{files.SINGLE}: {extra} is not a tensor of this model"
    ]


@pytest.mark.parametrize("name", NAMES)
def test_all_experts_of_a_layer_in_one_tensor(name: str, tmp_path: Path) -> None:
    """As `save_pretrained(..., save_original_format=False)` of transformers 5 writes them."""
    stored = tensors(FIXTURES / name)
    if name == "mixtral":
        layers, mlp, matrices = (0, 1), "block_sparse_moe", ("w1", "w3", "w2")
    else:
        layers, mlp, matrices = (1, 2), "mlp", ("gate_proj", "up_proj", "down_proj")
    for layer in layers:
        prefix = f"model.layers.{layer}."
        gates, ups, downs = (
            np.stack([stored.pop(f"{prefix}{mlp}.experts.{i}.{matrix}.weight") for i in range(4)])
            for matrix in matrices
        )
        stored[f"{prefix}mlp.experts.gate_up_proj"] = np.concatenate([gates, ups], axis=1)
        stored[f"{prefix}mlp.experts.down_proj"] = downs
        stored[f"{prefix}mlp.gate.weight"] = stored.pop(f"{prefix}{mlp}.gate.weight")
    directory = with_tensors(name, tmp_path, stored)
    expected = golden(name)
    found = huggingface.load(directory, expected.layout)
    for param, x in expected.params.items():
        np.testing.assert_array_equal(found[param], x, err_msg=param)

    del stored["model.layers.1.mlp.experts.down_proj"]
    files.write(directory / files.SINGLE, stored)
    (line,) = refused(directory)[1:]
    assert line.startswith("model.layers.1.mlp.experts.down_proj is missing (")


@pytest.mark.parametrize("name", NAMES)
def test_experts_on_several_devices(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each number is read once, and the logits are those of transformers."""
    numbers = []
    read = files.StoredTensor.read

    def counted(self: files.StoredTensor, part: tuple[slice, ...]) -> np.ndarray:
        array = read(self, part)
        numbers.append(array.size)
        return array

    monkeypatch.setattr(files.StoredTensor, "read", counted)
    expected = golden(name)
    numbers.clear()
    layout = ModelLayout.of(expected.layout.config, shard_on("experts_gather", data=2, expert=4))
    params = huggingface.load(FIXTURES / name, layout)
    assert sum(numbers) == layout.config.n_params()
    assert Golden(layout, params, expected.ids, expected.wanted).error() < TOLERANCE


def test_layers_of_another_kind_are_another_model() -> None:
    config = golden("qwen3").layout.config
    layout = ModelLayout.of(config, shard_on("ddp"))
    with pytest.raises(ConfigError) as caught:
        huggingface.reader(FIXTURES / "qwen3_moe", layout)
    assert f"model.n_layers=2: {FIXTURES / 'qwen3_moe'} has 3" in str(caught.value)
    mixtral = golden("mixtral").layout
    object.__setattr__(mixtral.config, "block", "dense")
    try:
        with pytest.raises(ConfigError, match=r"model.block='dense': .*mixtral has 'moe'"):
            huggingface.reader(FIXTURES / "mixtral", mixtral)
    finally:
        object.__setattr__(mixtral.config, "block", "moe")


@pytest.mark.slow
def test_a_run_made_of_it_and_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the commands, and without the loss of a bit; the run generates what the directory does."""
    monkeypatch.chdir(tmp_path)
    config = huggingface.config_of(FIXTURES / "qwen3_moe", vocab_size=260)
    params = _with_rows(golden("qwen3_moe"), config.padded_vocab)
    huggingface.save("start", config, params, dtype="float32")
    card = Path("start/README.md").read_text(encoding="utf-8")
    assert "\n| experts | 4 in a layer, 2 of them for each token |\n| longest text" in card
    words = ["start", "--output=run", "--tokenizer=bytes"]
    assert command.main(["import", *words]) == 0
    assert command.main(["export", "run", "--output=out", "--dtype=float32"]) == 0
    started = tensors(Path("start"))
    exported = tensors(Path("out"))
    assert exported.keys() == started.keys()
    for tensor, x in started.items():
        np.testing.assert_array_equal(exported[tensor], x, err_msg=tensor)
    assert huggingface.config_of("out") == huggingface.config_of("start")

    texts = [
        TrainedModel.load(path, tokenizer="bytes", dtype="float32").generate(
            "The sea", 8, temperature=0.0
        )
        for path in ("start", "run")
    ]
    assert texts[0] == texts[1]


def _with_rows(model: Golden, n_rows: int) -> dict[str, jax.Array]:
    """Returns parameters whose tables have rows for more tokens than those of the fixture."""
    params = dict(model.params)
    for name in ("embedding", "head"):
        table = np.asarray(params[name])[: model.layout.config.vocab_size]
        params[name] = jnp.asarray(np.resize(table, (n_rows, table.shape[1])))
    return params


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_greedy_texts_are_those_of_transformers(name: str) -> None:
    """With our cache and theirs: 20 tokens after prompts of several lengths, beyond the window."""
    torch = pytest.importorskip(
        "torch", reason="the oracle needs torch: pip install -e '.[oracle]'"
    )
    transformers = pytest.importorskip(
        "transformers", reason="the oracle needs transformers: pip install -e '.[oracle]'"
    )
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        FIXTURES / name, dtype=torch.float32, attn_implementation="eager"
    )
    config = huggingface.config_of(FIXTURES / name, dtype="float32")
    layout = ModelLayout.of(config, shard_on("experts_gather", expert=2))
    params = huggingface.load(FIXTURES / name, layout)
    prompts = [golden(name).ids[0, :n].tolist() for n in (3, 11, 24)]
    session = Engine(layout, params, Sampling(temperature=0.0)).start(prompts, 20)
    ours = [[token for token, _ in row] for row in session.advance()]
    for prompt, row in zip(prompts, ours, strict=True):
        expected = theirs.generate(
            torch.tensor([prompt]), max_new_tokens=20, do_sample=False, eos_token_id=None
        )
        assert row == expected[0, len(prompt) :].tolist()
