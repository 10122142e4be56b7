"""Exported weights are bit-identical to the imported ones, and transformers loads them."""

import dataclasses
import json
from pathlib import Path

import jax
import numpy as np
import pytest
from fixtures.huggingface_golden import FIXTURES, NAMES, TOLERANCE, golden
from support import shard_on

from mesh_lm import huggingface
from mesh_lm.config import PipelineConfig
from mesh_lm.data.tokenizer import load_tokenizer
from mesh_lm.errors import ConfigError
from mesh_lm.huggingface import export_weights as weights_out
from mesh_lm.huggingface import files
from mesh_lm.model import DecoderConfig, SegmentConfig, token_batch
from mesh_lm.model.experts_config import ExpertsConfig
from mesh_lm.parallel.layout import ModelLayout

COMPILE_BUDGET = 130


def tensors(directory: Path) -> dict[str, np.ndarray]:
    found, problems = files.scan(directory)
    assert not problems
    return {
        name: stored.read(tuple(slice(None) for _ in stored.shape or ()))
        for name, stored in found.items()
    }


def same(found: dict[str, np.ndarray], wanted: dict[str, np.ndarray]) -> None:
    assert found.keys() == wanted.keys()
    for name, x in wanted.items():
        assert found[name].dtype == x.dtype
        np.testing.assert_array_equal(found[name], x, err_msg=name)


@pytest.mark.parametrize("name", NAMES)
def test_there_and_back_is_bitwise(name: str, tmp_path: Path) -> None:
    """Exports from a mesh to several files."""
    found = golden(name, "2 x 4")
    huggingface.save(
        tmp_path / "out", found.layout, found.params, dtype="float32", max_shard_bytes=16_000
    )
    wanted = tensors(FIXTURES / name)
    same(tensors(tmp_path / "out"), {n: x[:24] if "wpe" in n else x for n, x in wanted.items()})
    index = json.loads((tmp_path / "out" / files.INDEX).read_text(encoding="utf-8"))
    assert index["metadata"]["total_size"] == sum(
        x.nbytes for x in tensors(tmp_path / "out").values()
    )
    sizes = [path.stat().st_size for path in (tmp_path / "out").glob("*.safetensors")]
    assert len(sizes) > 1 and max(sizes) < 16_000 + 3000  # and a header
    assert huggingface.config_of(tmp_path / "out").n_params() == found.layout.config.n_params()
    assert (
        len({path.stat().st_mode for path in (tmp_path / "out").iterdir() if path.is_file()}) == 1
    ), "a colleague can read them all"
    assert not list(tmp_path.glob(".*"))


def test_stages_of_a_pipeline_do_not_show(tmp_path: Path) -> None:
    """Layers are written and read in model order; each device reads its shard."""
    config = dataclasses.replace(golden("gpt2").layout.config, n_layers=3)
    layout = ModelLayout.of(
        config, shard_on("fsdp", pipeline=2, fsdp=2), PipelineConfig(layers=(1, 2))
    )
    params = jax.jit(layout.init, out_shardings=layout.canonical_shardings("params"))(
        jax.random.key(0)
    )
    huggingface.save(tmp_path / "out", layout, params, dtype="float32")
    found = huggingface.load(tmp_path / "out", layout)
    assert {name: x.sharding for name, x in found.items()} == layout.canonical_shardings("params")
    # padding of the vocabulary is 0
    row = np.arange(layout.shapes["embedding"].shape[0])[:, None] < config.vocab_size
    for name, x in params.items():
        np.testing.assert_array_equal(
            found[name], np.where(row, x, 0) if name == "embedding" else x
        )


def test_segments_do_not_show(tmp_path: Path) -> None:
    found = golden("llama3")
    segments = (SegmentConfig("early", 1), SegmentConfig("late", 1))
    config = dataclasses.replace(found.layout.config, segments=segments)
    layout = ModelLayout.of(config, shard_on("ddp"))
    params = huggingface.load(FIXTURES / "llama3", layout)
    huggingface.save(tmp_path / "out", layout, params, dtype="float32")
    same(tensors(tmp_path / "out"), tensors(FIXTURES / "llama3"))


def test_bfloat16_in_one_file(tmp_path: Path) -> None:
    found = golden("qwen3")
    (tmp_path / "out").mkdir()
    huggingface.save(
        tmp_path / "out", found.layout.config, found.params, tokenizer=load_tokenizer("bytes")
    )
    import ml_dtypes

    same(
        tensors(tmp_path / "out"),
        {n: x.astype(ml_dtypes.bfloat16) for n, x in tensors(FIXTURES / "qwen3").items()},
    )
    described = json.loads((tmp_path / "out" / "config.json").read_text(encoding="utf-8"))
    assert (described["torch_dtype"], described["eos_token_id"]) == (
        "bfloat16",
        load_tokenizer("bytes").eod,
    )
    assert load_tokenizer(tmp_path / "out").fingerprint == load_tokenizer("bytes").fingerprint


def test_a_killed_export_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A killed export leaves no model: config.json is written last, and then the directory is
    renamed into place."""
    found, order = golden("gpt2"), []
    real = files.write

    def write(path: Path, tensors: dict[str, np.ndarray]) -> None:
        order.append(sorted(p.name for p in path.parent.iterdir()))
        assert not (tmp_path / "out").exists()
        if len(order) == 3:
            raise OSError(28, "No space left on device")
        real(path, tensors)

    monkeypatch.setattr(files, "write", write)
    with pytest.raises(ConfigError, match=r"cannot write .*out: No space left on device"):
        huggingface.save(tmp_path / "out", found.layout, found.params, max_shard_bytes=4_000)
    assert not any("config.json" in names for names in order) and len(order[-1]) == 2
    assert not list(tmp_path.iterdir())


def test_a_flipped_bit_is_found_by_the_digests(tmp_path: Path) -> None:
    """An export lists the digests of all its files, and an import of any directory with such a list
    compares them."""
    found = golden("qwen3")
    huggingface.save(tmp_path / "out", found.layout, found.params, dtype="float32")
    listed = {
        line.split()[1]
        for line in (tmp_path / "out" / "SHA256SUMS").read_text(encoding="utf-8").splitlines()
    }
    assert listed == {"config.json", "model.safetensors"}
    data = bytearray((tmp_path / "out" / "model.safetensors").read_bytes())
    data[-100] ^= 1
    (tmp_path / "out" / "model.safetensors").write_bytes(data)
    with pytest.raises(
        ConfigError, match=r"model\.safetensors is not as SHA256SUMS has it: one of them is damaged"
    ):
        huggingface.load(tmp_path / "out", found.layout)
    (tmp_path / "out" / "SHA256SUMS").write_text(
        "# of another tool\n" + "0" * 64 + "  another.bin\n", encoding="utf-8"
    )
    huggingface.load(tmp_path / "out", found.layout)


def test_numbers_that_the_type_does_not_hold(tmp_path: Path) -> None:
    found = golden("qwen3")
    large = found.params | {"embedding": found.params["embedding"] * 1e7}
    with pytest.raises(
        ConfigError,
        match=(
            r"model.embed_tokens.weight has [\d,]+ numbers that are not finite as float16; .* "
            r"choose --dtype=bfloat16"
        ),
    ):
        huggingface.save(tmp_path / "out", found.layout, large, dtype="float16")
    assert not list(tmp_path.iterdir())
    huggingface.save(tmp_path / "out", found.layout, large, dtype="bfloat16")


def test_refusals(tmp_path: Path) -> None:
    found = golden("gpt2")
    (tmp_path / "a").touch()
    with pytest.raises(ConfigError, match="exists and is not an empty directory; name another one"):
        huggingface.save(tmp_path, found.layout, found.params)
    with pytest.raises(
        ConfigError, match="dtype=int8: expected one of the types bfloat16, float16, float32"
    ):
        huggingface.save(tmp_path / "b", found.layout, found.params, dtype="int8")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"model.head_softcap=0.0, not 2.0"):
        huggingface.save(
            tmp_path / "b", dataclasses.replace(found.layout.config, head_softcap=2.0), found.params
        )
    with pytest.raises(ConfigError, match="cannot create a directory beside"):
        huggingface.save(tmp_path / "a" / "b", found.layout, found.params)


def test_files_are_filled_in_order() -> None:
    sizes = [("a", 3), ("b", 4), ("c", 4), ("d", 99), ("e", 1)]
    assert weights_out._split_into_files(sizes, 8) == [
        {"a": 3, "b": 4},
        {"c": 4},
        {"d": 99},
        {"e": 1},
    ]


_ROTARY = {"vocab_size": 70, "vocab_multiple": 64, "seq_len": 16, "n_layers": 3, "d_model": 32, "n_heads": 4, "d_ff": 48,
           "dtype": "float32", "positions": "rotary", "norm": "rmsnorm", "activation": "swiglu",
           "biases": False, "init_std": 0.2}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    "config",
    [
        DecoderConfig(
            vocab_size=70,
            seq_len=16,
            n_layers=3,
            d_model=32,
            n_heads=4,
            dtype="float32",
            init_std=0.2,
        ),
        DecoderConfig(
            vocab_size=70,
            seq_len=16,
            n_layers=1,
            d_model=32,
            n_heads=4,
            d_ff=48,
            tied=False,
            dtype="float32",
            init_std=0.2,
        ),
        DecoderConfig(**_ROTARY, tied=True, rope_theta=500.0),
        DecoderConfig(
            **_ROTARY, tied=False, n_kv_heads=1, rope_scaling=8.0, rope_original_seq_len=8
        ),
        DecoderConfig(**_ROTARY, tied=True, n_kv_heads=2, head_dim=16, qk_norm=True),
        DecoderConfig(
            **_ROTARY, tied=False, qk_norm=True, rope_scaling=2.0, rope_original_seq_len=16
        ),
        DecoderConfig(
            **_ROTARY, tied=False, n_kv_heads=2, window=(5,), block="moe",
            experts=ExpertsConfig(number=4, active=2),
        ),
        DecoderConfig(
            **_ROTARY, tied=True, n_kv_heads=2, head_dim=16, qk_norm=True, block="moe",
            experts=ExpertsConfig(number=8, active=3, d_ff=16),
        ),
        DecoderConfig(
            **_ROTARY, tied=False, qk_norm=True,
            segments=(SegmentConfig("first", 1), SegmentConfig("rest", 2, "moe")),
            experts=ExpertsConfig(number=4, active=2, d_ff=16, normalised=False),
        ),
    ],
    ids=["gpt2", "gpt2 untied", "llama", "llama3 untied", "qwen3", "qwen3 untied", "mixtral",
         "qwen3_moe tied", "qwen3_moe with a dense layer"],
)  # fmt: skip
def test_transformers_loads_it_and_computes_the_same(config: DecoderConfig, tmp_path: Path) -> None:
    torch = pytest.importorskip(
        "torch", reason="the oracle needs torch: pip install -e '.[oracle]'"
    )
    transformers = pytest.importorskip(
        "transformers", reason="the oracle needs transformers: pip install -e '.[oracle]'"
    )
    layout = ModelLayout.of(
        config, shard_on("hsdp+megatron" if config.kv_heads > 1 else "hsdp", fsdp=2)
    )
    params = jax.jit(layout.init, out_shardings=layout.shardings("params"))(jax.random.key(0))
    # Norms and biases that are not 1 and 0.
    noise = np.random.default_rng(0)
    params = {
        n: jax.device_put(
            np.asarray(x) + 0.1 * noise.standard_normal(x.shape, np.float32), x.sharding
        )
        for n, x in params.items()
    }
    ids = noise.integers(0, config.vocab_size, (4, config.seq_len)).astype(np.int32)
    ours = np.asarray(jax.jit(lambda p: layout.bind(p).logits(token_batch(ids)))(params))
    huggingface.save(tmp_path / "out", layout, params, dtype="float32", max_shard_bytes=20_000)

    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")), (
        info
    )
    with torch.no_grad():
        theirs = model(torch.from_numpy(ids).long()).logits.numpy()
    difference = np.abs(ours - theirs).max()
    print(f"max |difference| {difference:.2e}, max |logit| {np.abs(theirs).max():.2f}")
    assert difference < TOLERANCE * max(1, np.abs(theirs).max() / 4)
