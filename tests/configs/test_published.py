"""The published table as configs: parameters, devices, batch, tensor and pipeline parallelism of
each row."""

import ast
import math
from pathlib import Path

import pytest
from support import shard_on

from mesh_lm.config import load
from mesh_lm.model import DecoderConfig
from mesh_lm.parallel.layout import ModelLayout, divided
from mesh_lm.training.check import check

MEGATRON = {
    # heads, d_model, layers, tensor, pipeline, GPUs, batch: NVIDIA/Megatron-LM,
    # images/model_table.png
    "1.7": (16, 2048, 24, 1, 1, 48, 192),
    "7.1": (32, 4096, 30, 2, 1, 96, 192),
    "16": (48, 6144, 32, 4, 1, 192, 192),
    "32": (56, 7168, 48, 8, 1, 384, 192),
    "70": (64, 8192, 84, 8, 2, 768, 384),
    "119": (80, 10240, 92, 8, 4, 1536, 768),
    "177": (96, 12288, 96, 8, 6, 2304, 1152),
    "314": (128, 16384, 96, 8, 8, 3072, 1536),
    "462": (144, 18432, 112, 8, 16, 6144, 3072),
}
LLAMA = {
    # heads, kv heads, d_model, d_ff, layers, devices, batch, parameters as released: arXiv
    # 2407.21783, table 3
    "8": (32, 8, 4096, 14_336, 32, 64, 512, 8_030_261_248),
    "70": (64, 8, 8192, 28_672, 80, 1024, 1024, 70_553_706_496),
    "405": (128, 8, 16_384, 53_248, 126, 16_384, 2048, 405_853_388_800),
}


def counted(model: DecoderConfig) -> int:
    """Parameters in the arrays of the model as built; no memory is touched."""
    return sum(math.prod(s.shape) for s in ModelLayout.of(model, shard_on("ddp")).shapes.values())


def published(count: int, name: str) -> bool:
    """Whether a count rounds to the name, in billions with as many decimals."""
    return f"{count / 1e9:.{len(name.partition('.')[2])}f}" == name


@pytest.mark.parametrize("name", MEGATRON)
def test_megatron(name: str) -> None:
    heads, h, layers, tensor, pipeline, devices, batch = MEGATRON[name]
    config = check(load(f"configs/megatron_{name.replace('.', '_')}b.py"), devices)
    model, mesh = config.model, config.mesh
    assert isinstance(model, DecoderConfig)
    assert (model.n_heads, model.d_model, model.n_layers, model.seq_len, model.vocab_size) == (
        heads,
        h,
        layers,
        4096,
        131_072,
    )
    assert math.prod(mesh.sizes().values()) == devices and config.train.global_batch == batch
    # Where a faster mesh than the published one was found, its docstring says so; the published one
    # can still run.
    published_mesh = (tensor, pipeline, 48)
    assert (
        mesh.tensor,
        mesh.pipeline,
        mesh.data,
    ) == published_mesh or "where Megatron-LM has" in config_docstring(name)
    chunk = layers // (mesh.pipeline * config.pipeline.chunks)
    assert divided(model, config.pipeline, mesh.pipeline)["blocks"].layer_counts == (chunk,) * (
        layers // chunk
    )

    # Narayanan et al. (arXiv 2104.04473), equation 2: 12 l h^2 (1 + 13 / 12h + (V + s) / 12 l h),
    # the last norm that it leaves out, and an untied head: with a tied one no name of the nine
    # would be right.
    V, s = model.padded_vocab, 4096
    exact = 12 * layers * h**2 + 13 * layers * h + (V + s) * h + 2 * h + V * h
    assert counted(model) == model.n_params() == exact
    # the table's name is 0.05 B short
    assert published(exact, name) or (name, round(exact / 1e9, 3)) == ("1.7", 1.754)


def config_docstring(name: str) -> str:
    return (
        ast.get_docstring(
            ast.parse(
                Path(f"configs/megatron_{name.replace('.', '_')}b.py").read_text(encoding="utf-8")
            )
        )
        or ""
    )


def test_gpt_175b_is_cut_as_published() -> None:
    """Korthikanti et al., arXiv 2205.05198: tensor 8, pipeline 8; 6 chunks on each stage instead of
    3."""
    config = check(load("configs/gpt_175b.py"), 1024)
    assert (config.mesh.tensor, config.mesh.pipeline, config.pipeline.chunks) == (8, 8, 6)


@pytest.mark.parametrize("name", LLAMA)
def test_llama(name: str) -> None:
    heads, kv_heads, d, f, layers, devices, batch, released = LLAMA[name]
    config = check(load(f"configs/llama3_{name}b.py"), devices)
    model = config.model
    assert isinstance(model, DecoderConfig)
    assert (model.n_heads, model.n_kv_heads, model.d_model, model.d_ff, model.n_layers) == (
        heads,
        kv_heads,
        d,
        f,
        layers,
    )
    assert (model.seq_len, model.rope_theta, config.train.global_batch) == (8192, 500_000, batch)
    block = d * d * 2 + 2 * d * (d // heads) * kv_heads + 3 * d * f + 2 * d
    assert counted(model) == model.n_params() == layers * block + d + 2 * 128_256 * d == released
    assert released // 10**9 == int(name)
