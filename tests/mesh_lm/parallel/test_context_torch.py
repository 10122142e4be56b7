"""Context parallelism at 4,096 tokens against a Llama in plain PyTorch, whose attention has all
tokens on one device."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from support import assert_same_gradients, by_stage, initial, shard_on

from mesh_lm.model import DecoderConfig
from mesh_lm.parallel import engine
from mesh_lm.parallel.layout import ModelLayout
from sharding_rules import token_order

COMPILE_BUDGET = 14
pytestmark = pytest.mark.slow
S, V = 4096, 256
LLAMA = DecoderConfig(
    vocab_size=V, vocab_multiple=1, seq_len=S, n_layers=2, d_model=64, n_heads=8, n_kv_heads=4,
    d_ff=96, init_std=0.1, dtype="float32",
    positions="rotary", norm="rmsnorm", activation="swiglu", biases=False, tied=False,
    loss_chunk=1024, remat="full",
)  # fmt: skip
TEXT = np.random.default_rng(5).integers(0, V, (1, S + 1))


@pytest.fixture(scope="module")
def twin() -> tuple[float, dict[str, np.ndarray]]:
    """Loss and gradients of the same weights in PyTorch, with our names and shapes."""
    torch = pytest.importorskip("torch")
    sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))
    import torch_models

    fields = {name: getattr(LLAMA, name) for name in torch_models.FIELDS}
    model = torch_models.Decoder(fields)
    params = initial(ModelLayout.of(LLAMA, shard_on("ddp")))
    D, N, K, H, F = LLAMA.d_model, LLAMA.n_heads, LLAMA.kv_heads, LLAMA.d_head, LLAMA.d_mlp

    def set_to(parameter: Any, value: np.ndarray) -> None:
        assert parameter.shape == value.shape
        parameter.data = torch.tensor(value)

    set_to(model.embedding.weight, params["embedding"])
    set_to(model.head.weight, params["head"])
    set_to(model.norm.weight, params["norm.scale"])
    for i, block in enumerate(model.blocks):
        own = {
            name.removeprefix("blocks."): x[i]
            for name, x in params.items()
            if name.startswith("blocks.")
        }
        q, kv = own["attention.q.weight"].reshape(D, -1), own["attention.kv.weight"].reshape(D, -1)
        set_to(block.qkv.weight, np.concatenate([q, kv], axis=1).T)
        set_to(block.attention_into.weight, own["attention.out.weight"].reshape(D, -1))
        set_to(block.up.weight, own["mlp.up.weight"].reshape(D, -1).T)
        set_to(block.mlp_into.weight, own["mlp.down.weight"])
        set_to(block.norm1.weight, own["attention_norm.scale"])
        set_to(block.norm2.weight, own["mlp_norm.scale"])
    loss = model(torch.tensor(TEXT))
    loss.backward()
    grads = {name: np.zeros_like(x) for name, x in params.items()}
    grads |= {
        "embedding": model.embedding.weight.grad.numpy(),
        "head": model.head.weight.grad.numpy(),
    }
    grads["norm.scale"] = model.norm.weight.grad.numpy()
    for i, block in enumerate(model.blocks):
        qkv = block.qkv.weight.grad.numpy().T
        grads["blocks.attention.q.weight"][i] = qkv[:, : N * H].reshape(D, N, H)
        grads["blocks.attention.kv.weight"][i] = qkv[:, N * H :].reshape(D, 2, K, H)
        grads["blocks.attention.out.weight"][i] = block.attention_into.weight.grad.numpy().reshape(
            D, N, H
        )
        grads["blocks.mlp.up.weight"][i] = block.up.weight.grad.numpy().T.reshape(D, 2, F)
        grads["blocks.mlp.down.weight"][i] = block.mlp_into.weight.grad.numpy()
        for ours, theirs in (("attention_norm", block.norm1), ("mlp_norm", block.norm2)):
            grads[f"blocks.{ours}.scale"][i] = theirs.weight.grad.numpy()
    return loss.item(), grads


@pytest.mark.parametrize(
    ("rules", "mesh"),
    [
        pytest.param("context_gather", {"sequence": 8}, marks=pytest.mark.exhaustive),
        pytest.param("ulysses", {"sequence": 8}, marks=pytest.mark.exhaustive),
        ("ring", {"sequence": 8}),
        pytest.param("usp", {"sequence": 4, "extra": ("ulysses=2",)}, marks=pytest.mark.exhaustive),
    ],
)
def test_equals_pytorch(
    twin: tuple[float, dict[str, np.ndarray]], rules: str, mesh: dict[str, Any]
) -> None:
    shard = shard_on(rules, **mesh)
    layout = ModelLayout.of(LLAMA, shard)
    order = token_order(shard.rules, shard.mesh.shape, S)
    order = np.arange(S, dtype=np.int32) if order is None else order
    leaves = {
        "tokens": TEXT[:, :-1].astype(np.int32),
        "labels": TEXT[:, 1:].astype(np.int32),
        "weights": np.ones((1, S), np.float32),
    }
    batch = {name: x[None][..., order] for name, x in leaves.items()}
    batch |= {"indices": order[None, None], "sample_ids": np.zeros((1, 1), np.uint32)}
    spec = engine.batch_sharding(layout).spec
    on = {
        name: jax.device_put(x, jax.NamedSharding(shard.mesh, engine.leaf_spec(spec, x.shape)))
        for name, x in batch.items()
    }
    sums, grads = jax.jit(engine.value_and_grad(layout))(
        by_stage(layout, initial(layout)), on, jax.random.key(0)
    )
    loss, wanted = twin
    assert float(sums["loss"]) / S == pytest.approx(loss, rel=1e-5)
    assert_same_gradients(
        {name: np.asarray(g) for name, g in grads.items()}, wanted, tolerance=3e-5
    )
