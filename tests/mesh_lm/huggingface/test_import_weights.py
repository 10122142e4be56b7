"""Imported weights give the logits of transformers on any mesh; damaged files are refused before
any weight is read."""

import json
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
from fixtures.huggingface_golden import FIXTURES, MESHES, NAMES, TOLERANCE, golden
from support import shard_on

from mesh_lm import huggingface
from mesh_lm.errors import ConfigError
from mesh_lm.huggingface import files
from mesh_lm.model import token_batch
from mesh_lm.model.experts_config import ExpertsConfig
from mesh_lm.parallel.layout import ModelLayout
from mesh_lm.parallel.stack import forward

COMPILE_BUDGET = 40


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", NAMES)
def test_logits_are_those_of_transformers(name: str, mesh: str) -> None:
    found = golden(name, mesh)
    assert found.error() < TOLERANCE
    assert {x.dtype for x in found.params.values()} == {np.dtype("float32")}
    assert {n: x.sharding for n, x in found.params.items()} == found.layout.shardings("params")


@pytest.mark.parametrize("name", NAMES)
def test_the_golden_logits_see_every_parameter(name: str) -> None:
    """Misplacing any parameter changes the logits."""
    found = golden(name)
    for leaf, x in found.params.items():
        moved = jax.device_put(np.roll(np.asarray(x), 1, axis=-1), x.sharding)
        assert found.error(found.params | {leaf: moved}) > 100 * TOLERANCE, leaf


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("gpt2", {"norm_eps": 1.05e-3}),
        ("llama3", {"norm_eps": 1.05e-3}),
        ("llama3", {"rope_scaling": 3.9}),
        ("llama3", {"rope_original_seq_len": 17}),
        ("llama3", {"rope_theta": 101.0}),
        ("qwen3", {"norm_eps": 1.05e-4}),
        ("qwen3", {"rope_theta": 1010.0}),
        ("mixtral", {"window": (7,)}),
        ("mixtral", {"rope_theta": 1.1e6}),
        ("mixtral", {"experts": ExpertsConfig(4, 2, 24)}),
        ("mixtral", {"experts": ExpertsConfig(4, 3, 24, normalised=False)}),
        ("qwen3_moe", {"experts": ExpertsConfig(4, 2, 24, normalised=True)}),
    ],
)
def test_the_golden_logits_see_every_number_of_the_config(
    name: str, change: dict[str, float]
) -> None:
    assert golden(name).with_config(**change).error() > TOLERANCE


def test_the_loss_gives_padding_no_probability() -> None:
    found = golden("gpt2")
    config = found.layout.config
    assert (config.vocab_size, found.params["embedding"].shape[0]) == (150, 256)
    assert not np.asarray(found.params["embedding"])[150:].any()
    labels = np.roll(found.ids, -1, axis=1)
    batch = {
        "labels": labels,
        "weights": np.ones(labels.shape, np.float32),
        "sample_ids": np.arange(8, dtype=np.uint32),
    }
    bind, segments = found.layout.bind, found.layout.segments
    sums = jax.jit(lambda p: forward(bind, segments, p, batch | token_batch(found.ids))[1])(
        found.params
    )
    z = found.wanted.astype(np.float64)
    loss = np.log(np.exp(z).sum(-1)) - np.take_along_axis(z, labels[..., None], -1)[..., 0]
    assert float(sums["loss"] / sums["weight"]) == pytest.approx(loss.mean(), rel=1e-6)


def test_each_number_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each number is read once for any number of replicas."""
    numbers, read = [], files.StoredTensor.read
    monkeypatch.setattr(
        files.StoredTensor,
        "read",
        lambda self, part: (data := read(self, part), numbers.append(data.size))[0],
    )
    layout = ModelLayout.of(
        huggingface.config_of(FIXTURES / "llama3"),
        shard_on("hsdp+megatron", data=2, fsdp=2, tensor=2),
    )
    huggingface.load(FIXTURES / "llama3", layout)
    assert sum(numbers) == layout.config.n_params()


def test_loaded_parameters_may_be_donated() -> None:
    """A train step donates the arrays; host memory that devices share must not be overwritten."""
    layout = ModelLayout.of(huggingface.config_of(FIXTURES / "gpt2"), shard_on("ddp", data=8))
    params = huggingface.load(FIXTURES / "gpt2", layout)
    before = {name: np.array(x) for name, x in params.items()}
    after = jax.jit(lambda p: {name: 2 * x + 1 for name, x in p.items()}, donate_argnums=0)(params)
    for name, x in after.items():
        for shard in x.addressable_shards:
            np.testing.assert_array_equal(shard.data, 2 * before[name] + 1)


def test_a_shorter_sequence_takes_the_first_positions() -> None:
    full, short = (
        huggingface.load(
            FIXTURES / "gpt2",
            ModelLayout.of(huggingface.config_of(FIXTURES / "gpt2", seq_len=n), shard_on("ddp")),
        )["positions"]
        for n in (32, 7)
    )
    np.testing.assert_array_equal(np.asarray(full)[:7], short)


# Other directories with the same model.


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A Llama model in two files."""
    return Path(shutil.copytree(FIXTURES / "llama3", tmp_path / "llama3"))


def tensors(directory: Path) -> dict[str, np.ndarray]:
    found, problems = files.scan(directory)
    assert not problems
    return {
        name: stored.read(tuple(slice(None) for _ in stored.shape or ()))
        for name, stored in found.items()
    }


def change(directory: Path, file: str, **changes: np.ndarray | None) -> None:
    """Rewrites a file with tensors added, replaced or (None) removed; names have __ for dots."""
    here = [s for s in files.scan(directory)[0].values() if s.shape and s.file.name == file]
    kept = {s.name: s.read((slice(None),) * len(s.shape)) for s in here}
    kept |= {name.replace("__", "."): x for name, x in changes.items()}  # type: ignore[dict-item]
    files.write(directory / file, {name: x for name, x in kept.items() if x is not None})


def load(directory: Path, **changes: object) -> dict[str, np.ndarray]:
    config = huggingface.config_of(directory)
    for name, value in changes.items():
        object.__setattr__(config, name, value)
    return {
        name: np.asarray(x)
        for name, x in huggingface.load(directory, ModelLayout.of(config, shard_on("ddp"))).items()
    }


@pytest.mark.parametrize("name", NAMES)
def test_names_without_the_prefix(name: str, tmp_path: Path) -> None:
    """Reads files of a model without its head, with a copy of the tied head and the masks of old
    files."""
    shutil.copyfile(FIXTURES / name / "config.json", tmp_path / "config.json")
    whole = {
        n.removeprefix("transformer.").removeprefix("model."): x
        for n, x in tensors(FIXTURES / name).items()
    }
    if name == "gpt2":
        whole |= {
            "h.0.attn.bias": np.ones((1, 1, 4, 4), np.float32),
            "lm_head.weight": whole["wte.weight"],
        }
    files.write(tmp_path / "model.safetensors", whole)
    wanted = load(FIXTURES / name)
    for leaf, x in load(tmp_path).items():
        np.testing.assert_array_equal(x, wanted[leaf])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64"])
def test_any_type_becomes_fp32(dtype: str, tmp_path: Path) -> None:
    shutil.copyfile(FIXTURES / "qwen3" / "config.json", tmp_path / "config.json")
    import ml_dtypes

    kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
    files.write(
        tmp_path / "model.safetensors",
        {n: x.astype(kind) for n, x in tensors(FIXTURES / "qwen3").items()},
    )
    exact = load(FIXTURES / "qwen3")
    for leaf, x in load(tmp_path).items():
        np.testing.assert_array_equal(x, exact[leaf].astype(kind).astype(np.float32))


@pytest.mark.parametrize("dtype", ["F8_E4M3", "F8_E5M2", "I8", "U8"])
def test_quantized_weights(dtype: str, copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which mean nothing without their scales, and which numpy may have no type for."""
    norm = "model.norm.weight"
    file = json.loads((copy / files.INDEX).read_text(encoding="utf-8"))["weight_map"][norm]
    data = (copy / file).read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:end])
    header[norm] |= {"dtype": dtype, "shape": [4 * header[norm]["shape"][0]]}  # as many bytes
    spelled = json.dumps(header).encode()
    (copy / file).write_bytes(len(spelled).to_bytes(8, "little") + spelled + data[end:])
    (line,) = refused(copy, monkeypatch)[1:]
    assert line.startswith(
        f"{file}: {norm} has type {dtype}; F64, F32, F16, BF16 are read: fetch the weights that "
        "are not quantized"
    )


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_numbers_that_are_not_finite(value: float, copy: Path) -> None:
    norm = "model.norm.weight"
    file = json.loads((copy / files.INDEX).read_text(encoding="utf-8"))["weight_map"][norm]
    bad = tensors(copy)[norm].copy()
    bad[3] = value
    change(copy, file, model__norm__weight=bad)
    with pytest.raises(
        ConfigError,
        match=rf"{file}: {norm} has 1 numbers that are not finite \(NaN or Inf\); fetch it again",
    ):
        load(copy)


def refused(directory: Path, monkeypatch: pytest.MonkeyPatch, **changes: object) -> list[str]:
    """Returns the lines of the error without the directory's name; no weight may be read."""
    monkeypatch.setattr(files.StoredTensor, "read", lambda *_: pytest.fail("weights were read"))
    with pytest.raises(ConfigError) as caught:
        load(directory, **changes)
    return str(caught.value).replace(str(directory), "DIR").split("\n  - ")


def test_every_problem_at_once(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    index = json.loads((copy / files.INDEX).read_text(encoding="utf-8"))
    at = dict(index["weight_map"])
    first = min(at.values())
    norm, up = "model.norm.weight", "model.layers.1.mlp.up_proj.weight"
    change(copy, at[norm], model__norm__weight=None)
    change(copy, at[up], model__layers__1__mlp__up_proj__weight=np.zeros((40, 17), np.float32))
    change(copy, first, model__layers__0__self_attn__q_proj__bias=np.zeros(16, np.float32))
    at["model.layers.0.self_attn.q_proj.bias"] = first
    change(copy, at.pop("lm_head.weight"), lm_head__weight=None)
    (copy / files.INDEX).write_text(json.dumps({"weight_map": at}), encoding="utf-8")
    assert refused(copy, monkeypatch) == [
        "DIR cannot be read as this model",
        f"{at[norm]}: {norm} is missing, but {files.INDEX} lists it",
        "lm_head.weight is missing (head)",
        f"{at[up]}: {up} has shape (40, 17), but blocks.mlp.up.weight of this config needs (40, 16)",
        f"{first}: model.layers.0.self_attn.q_proj.bias is not a tensor of this model",
    ]


def test_damaged_files(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = sorted(path for path in copy.glob("*.safetensors"))
    first.write_bytes(first.read_bytes()[:-1000])
    second.unlink()
    lines = refused(copy, monkeypatch)
    assert lines[0] == "DIR cannot be read as this model" and len(lines) == 3
    assert f"{first.name} is truncated or damaged: " in lines[1] + lines[2]
    assert f"{second.name} is missing" in lines


def test_no_weights_or_no_index(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (copy / files.INDEX).unlink()
    names = ", ".join(sorted(path.name for path in copy.glob("*.safetensors")))
    expected = f"expected one .safetensors file, or several and {files.INDEX}; there"
    assert refused(copy, monkeypatch) == [
        "DIR cannot be read as this model",
        f"{expected} are {names}",
    ]
    for path in copy.glob("*.safetensors"):
        path.unlink()
    (copy / "pytorch_model.bin").touch()
    assert refused(copy, monkeypatch) == [
        "DIR cannot be read as this model",
        f"{expected} is none; pytorch_model.bin is not read",
    ]
    (copy / files.INDEX).write_text("[]", encoding="utf-8")
    assert refused(copy, monkeypatch)[1].startswith(
        f"{files.INDEX} is not an index of tensors: ValueError: expected an object, got list"
    )


def test_another_model(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Detects differences that no shape reveals; sequence length and rotary scaling may differ."""
    lines = refused(
        copy,
        monkeypatch,
        n_heads=2,
        head_dim=8,
        n_kv_heads=1,
        norm_eps=1e-5,
        tied=True,
        softcap=3.0,
        seq_len=9,
        rope_theta=7.0,
    )
    assert lines == [
        "DIR is a different model from this config's",
        "model.n_heads=2: DIR has 4",
        "model.n_kv_heads=1: DIR has 2",
        "model.head_dim=8: DIR has 4",
        "model.norm_eps=1e-05: DIR has 0.001",
        "model.tied=True: DIR has False",
        "model.softcap=3.0: DIR has 0.0",
    ]
    monkeypatch.undo()
    gpt2 = ModelLayout.of(huggingface.config_of(FIXTURES / "gpt2"), shard_on("ddp"))
    object.__setattr__(gpt2.config, "seq_len", 33)
    with pytest.raises(ConfigError, match=r"model.seq_len=33: .* has learned 32 positions"):
        huggingface.load(FIXTURES / "gpt2", gpt2)
