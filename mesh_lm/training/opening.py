"""What a run says of itself before its first step: its size, its data, and which attention serves it."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from mesh_lm.config import TrainConfig
from mesh_lm.data.dataset import Dataset
from mesh_lm.model import DecoderConfig
from mesh_lm.parallel.layout import ModelLayout
from pallas_kernels import capability_of, choose_attention, describe_attention

_MANY = 10.0
"""Epochs from which a model rather learns its data by heart."""


def opening(config: TrainConfig, layout: ModelLayout, data: Dataset) -> list[str]:
    """The first lines of a run's log."""
    device, n_params = jax.devices()[0], sum(math.prod(shape.shape) for shape in layout.shapes.values())
    epochs = config.train.steps * config.tokens_per_step / data.train_tokens
    lines = [
        f"{count(n_params)} parameters, {config.tokens_per_step:,} tokens a step, rules {config.rules.name}, "
        f"{jax.device_count()} {device.device_kind} ({config.mesh})",
        f"corpus {data.name}: {data.train_tokens:,} training tokens, {epochs:.2f} epochs"
        + (": the same text again and again; more of it, or fewer steps, would teach a model more" if epochs >= _MANY else ""),
    ]
    capability = capability_of(device) if device.platform == "gpu" else None
    if names := attention_implementations(config, device.platform, capability):
        lines.append(f"attention: {' and '.join(sorted(names))} (model.attention={getattr(config.model, 'attention', '')})")
    return lines


def count(n: int) -> str:
    """A number of parameters with three digits: 41.3 k, 1.36 M, 124 M, 175 B."""
    for unit, size in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if n >= size:
            return f"{n / size:#.3g}".rstrip(".") + f" {unit}"
    return str(n)


def attention_implementations(config: TrainConfig, platform: str, capability: tuple[int, int] | None) -> set[str]:
    """The implementations that attention=auto chooses on such a device, by kind of layer; else the one that the model names, if any."""
    model, wanted = config.model, getattr(config.model, "attention", "")
    if wanted != "auto" or not isinstance(model, DecoderConfig):
        return {wanted} if wanted else set()
    S = model.seq_len
    q, k = (jax.ShapeDtypeStruct((1, S, heads, model.d_head), jnp.dtype(model.dtype)) for heads in (model.n_heads, model.kv_heads))
    ids = None if config.data.documents == "joined" else jax.ShapeDtypeStruct((1, S), jnp.int32)
    sinks = jax.ShapeDtypeStruct((model.n_heads,), jnp.float32) if model.sinks else None
    on = {"platform": platform, "capability": capability, "softcap": model.softcap or None, "segment_ids": ids, "sinks": sinks}
    return {choose_attention(describe_attention(q, k, k, window=window, **on)).name for window in model.windows()}
