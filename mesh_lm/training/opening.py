"""The first lines of a run's log: its size, its data, and which attention serves it."""

from __future__ import annotations

import math

import jax

from mesh_lm.config import TrainConfig
from mesh_lm.data.dataset import Dataset
from mesh_lm.model import DecoderConfig
from mesh_lm.parallel.layout import ModelLayout
from mesh_lm.training import own_kernels
from pallas_kernels import capability_of, choose_attention, choose_trusted_attention

_MANY_EPOCHS = 10.0
"""From this many on, a model learns its data by heart rather than anything general."""


def opening(config: TrainConfig, layout: ModelLayout, data: Dataset) -> list[str]:
    """Returns the first lines of a run's log."""
    device = jax.devices()[0]
    n_params = sum(math.prod(shape.shape) for shape in layout.shapes.values())
    epochs = config.train.steps * config.tokens_per_step / data.train_tokens
    repetition = ""
    if epochs >= _MANY_EPOCHS:
        repetition = (
            ": the same text again and again; more of it, or fewer steps, would teach a model more"
        )
    n_idle = getattr(config.model, "n_idle_params", int)()
    active = f" ({count(n_params - n_idle)} active)" if n_idle else ""
    lines = [
        f"{count(n_params)} parameters{active}, {config.tokens_per_step:,} tokens a step, rules "
        f"{config.rules.name}, {jax.device_count()} {device.device_kind} ({config.mesh})",
        f"corpus {data.name}: {data.train_tokens:,} training tokens, {epochs:.2f} epochs"
        f"{repetition}",
        *_warm_up_warning(config),
    ]
    if data.loss_of_bytes:
        lines.append(f"warning: {data.loss_of_bytes}")

    capability = capability_of(device) if device.platform == "gpu" else None
    if getattr(config.model, "attention", "") != "auto":
        return lines + own_kernels.described(config, [], capability)
    problems = own_kernels.attention_problems(config, device.platform, capability)
    choices = [choose_trusted_attention(problem) for problem in problems]
    if choices:
        lines += own_kernels.described(config, choices, capability)
    return lines


def _warm_up_warning(config: TrainConfig) -> list[str]:
    steps = config.train.steps
    warmup_steps = config.optimizer.warmup_steps
    if not warmup_steps or steps >= 2 * warmup_steps:
        return []
    effect = "most of the run is warm-up"
    if steps < warmup_steps:
        effect = "the run ends before the learning rate reaches its peak"
    return [
        f"warning: optimizer.warmup_steps={warmup_steps} is more than half of train.steps={steps}: "
        f"{effect}; set optimizer.warmup_steps={steps // 10}"
    ]


def count(n: int) -> str:
    """Returns a number of parameters with three digits: 41.3 k, 1.36 M, 124 M, 175 B."""
    for unit, size in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if n >= size:
            return f"{n / size:#.3g}".rstrip(".") + f" {unit}"
    return str(n)


def attention_implementations(
    config: TrainConfig, platform: str, capability: tuple[int, int] | None
) -> set[str]:
    """Returns the implementations that attention=auto chooses on such a device, by kind of layer;
    else the one that the model names, if any.
    """
    attention = getattr(config.model, "attention", "")
    if attention != "auto" or not isinstance(config.model, DecoderConfig):
        return {attention} if attention else set()
    problems = own_kernels.attention_problems(config, platform, capability)
    return {choose_attention(problem).name for problem in problems}
