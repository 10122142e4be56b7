"""Tiny models, batches, and the comparison that every parallel form must pass. Each reference is
compiled once per run."""

from __future__ import annotations

import functools
import math
from collections.abc import Hashable
from typing import Any

import jax
import numpy as np

from mesh_lm.config import ModelConfig, PipelineConfig
from mesh_lm.model import DecoderConfig
from mesh_lm.parallel import engine
from mesh_lm.parallel.layout import ModelLayout
from sharding_rules import MeshConfig, Rules, Shard, make_mesh, preset, token_order

SEQ, VOCAB, BATCH = 16, 250, 16

_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "vocab_multiple": 16,
    "seq_len": SEQ,
    "n_layers": 2,
    "d_model": 32,
    "dtype": "float32",
    "loss_chunk": 24,
}
GPT = DecoderConfig(**_SIZES, n_heads=4, dropout=0.1)
"""A model with learned positions, LayerNorm, GELU, biases, tied head, dropout, and a loss chunk
that does not divide the tokens."""
LLAMA = DecoderConfig(
    **_SIZES, n_heads=8, n_kv_heads=2, head_dim=8, init_std=0.1, positions="rotary",
    rope_scaling=8.0, rope_original_seq_len=64,
    norm="rmsnorm", activation="swiglu", biases=False, tied=False,
    z_loss=1e-3, head_softcap=5.0, softcap=0.5, window=(4, 0), sinks=True, remat="full",
)  # fmt: skip
"""A model with what GPT lacks: grouped queries, a window on every other layer, both softcaps,
sinks, z-loss, untied head, remat."""


def shard_on(rules: Rules | str, **mesh: int) -> Shard:
    """Rules on a mesh of the first CPU devices: shard_on("megatron", data=2, tensor=4)."""
    config = MeshConfig(**mesh)
    rules = preset(rules) if isinstance(rules, str) else rules
    return Shard(rules, make_mesh(config, jax.devices()[: math.prod(config.sizes().values())]))


def host_batch(microbatches: int, seed: int = 0, separate: bool = False) -> dict[str, np.ndarray]:
    """Leaves [M, B, S] of a global batch of BATCH sequences, the same for any M. Samples have from
    few to all labels."""
    random = np.random.default_rng(seed)
    text = random.integers(0, VOCAB, (BATCH, SEQ + 1))
    batch = {
        "tokens": text[:, :-1].astype(np.int32),
        "labels": text[:, 1:].astype(np.int32),
        "weights": (random.random((BATCH, SEQ)) < np.linspace(0.1, 1, BATCH)[:, None]).astype(
            np.float32
        ),
        "sample_ids": np.arange(BATCH, dtype=np.uint32) + 7,
    }
    if separate:
        starts = random.random((BATCH, SEQ)) < 0.2
        batch["segment_ids"] = np.cumsum(starts, 1).astype(np.int32)
        places = np.arange(SEQ)
        batch["positions"] = (
            places - np.maximum.accumulate(np.where(starts, places, 0), 1)
        ).astype(np.int32)
    parts = {
        name: x.reshape(microbatches, BATCH // microbatches, *x.shape[1:])
        for name, x in batch.items()
    }
    return parts | {
        "indices": np.broadcast_to(np.arange(SEQ, dtype=np.int32), (microbatches, 1, SEQ))
    }


def on_devices(batch: dict[str, np.ndarray], layout: ModelLayout) -> dict[str, jax.Array]:
    mesh, spec = layout.shard.mesh, engine.batch_sharding(layout).spec
    order = token_order(layout.shard.rules, mesh.shape, SEQ)
    if order is not None:
        batch = {name: x[..., order] if x.ndim == 3 else x for name, x in batch.items()}
    return {
        name: jax.device_put(x, jax.NamedSharding(mesh, engine.leaf_spec(spec, x.shape)))
        for name, x in batch.items()
    }


def with_flipped_bit(x: jax.Array, device: int, word: int = 0, bit: int = 0) -> jax.Array:
    """Returns the array with one bit flipped in one word of one device's shard."""
    blocks = []
    for shard in x.addressable_shards:
        block = np.array(shard.data)
        if shard.device.id == device:
            block.reshape(-1).view(f"u{block.itemsize}")[word] ^= 1 << bit
        blocks.append(jax.device_put(block, shard.device))
    return jax.make_array_from_single_device_arrays(x.shape, x.sharding, blocks)


Outcome = tuple[dict[str, np.ndarray], dict[str, Any], dict[str, np.ndarray]]
"""(initial parameters, sums, gradients) in NumPy; scalar sums as floats."""


def gradients(
    config: ModelConfig,
    shard: Shard,
    microbatches: int = 1,
    separate: bool = False,
    pipeline: PipelineConfig = PipelineConfig(),
    params: dict[str, np.ndarray] | None = None,
) -> Outcome:
    """The results of one call of the engine, with layers in model order.

    params: those of one device, where a test is not about initial bits; without them the seed-0
    initialisation is one more program.
    """
    layout = ModelLayout.of(config, shard, pipeline)
    if params is None:
        params = initial(layout)
    batch = on_devices(host_batch(microbatches, separate=separate), layout)
    sums, grads = jax.jit(engine.value_and_grad(layout))(
        by_stage(layout, params), batch, jax.random.key(3)
    )
    ordered = {
        name: in_model_order(layout, name, x) if x.ndim else float(x) for name, x in sums.items()
    }
    return params, ordered, {name: in_model_order(layout, name, x) for name, x in grads.items()}


def in_model_order(layout: ModelLayout, name: str, x: jax.Array) -> np.ndarray:
    """A gradient, or an array of sums, with its layers in model order and without padding."""
    stacked = name in layout.stacked or "/" in name
    return np.asarray(x)[layout.stack_of(name).row_of_layer()] if stacked else np.asarray(x)


_initial: dict[Hashable, dict[str, np.ndarray]] = {}


def initial(layout: ModelLayout) -> dict[str, np.ndarray]:
    """Parameters of seed 0 in model order. The program that makes them is the same for all
    schedules and microbatches."""
    where = layout.canonical_shardings("params")
    program = (layout.config, layout.shard.rules, *where.values())
    if program not in _initial:
        _initial[program] = jax.tree.map(
            np.asarray, jax.jit(layout.init, out_shardings=where)(jax.random.key(0))
        )
    return _initial[program]


def by_stage(layout: ModelLayout, params: dict[str, np.ndarray]) -> dict[str, jax.Array]:
    """Parameters in model order -> the order in memory, with NumPy, without a program to
    compile."""
    return {
        name: jax.device_put(in_memory_order(layout, name, params[name]), where)
        for name, where in layout.shardings("params").items()
    }


def in_memory_order(layout: ModelLayout, name: str, x: np.ndarray) -> np.ndarray:
    """The inverse of `in_model_order`, for a parameter, with zeros as padding."""
    if name not in layout.stacked:
        return x
    layers = layout.stack_of(name).layer_of_row()
    return np.where(layers.reshape(-1, *[1] * (x.ndim - 1)) >= 0, x[layers], 0)


@functools.cache
def reference(config: ModelConfig, separate: bool = False) -> Outcome:
    """The results on one device, in one microbatch."""
    return gradients(config, shard_on("ddp"), separate=separate)


def assert_same_gradients(
    found: dict[str, np.ndarray], wanted: dict[str, np.ndarray], tolerance: float = 1e-5
) -> None:
    """Asserts max|g - ref| <= 1e-5 max(max|ref|, 1e-3 max over all leaves) per leaf. A leaf whose
    exact gradient is 0 is only noise."""
    top = max(np.abs(w).max() for w in wanted.values())
    errors = {
        name: np.abs(found[name] - w).max() / max(np.abs(w).max(), 1e-3 * top)
        for name, w in wanted.items()
    }
    worst = max(errors, key=lambda name: np.nan_to_num(errors[name], nan=np.inf))
    assert found.keys() == wanted.keys()
    assert errors[worst] <= tolerance, f"{worst}: relative error {errors[worst]:.2e}"
