"""What a run says of itself before its first step: its size, its data, and which attention serves
it.
"""

from __future__ import annotations

import math

import jax

from mesh_lm.config import TrainConfig
from mesh_lm.data.dataset import Dataset
from mesh_lm.model import DecoderConfig
from mesh_lm.parallel.layout import ModelLayout
from mesh_lm.training import own_kernels
from pallas_kernels import capability_of, choose_attention, choose_trusted_attention

_MANY = 10.0
"""Epochs from which a model rather learns its data by heart."""


def opening(config: TrainConfig, layout: ModelLayout, data: Dataset) -> list[str]:
    """The first lines of a run's log."""
    device, n_params = (
        jax.devices()[0],
        sum(math.prod(shape.shape) for shape in layout.shapes.values()),
    )
    epochs = config.train.steps * config.tokens_per_step / data.train_tokens
    lines = [
        f"{count(n_params)} parameters, {config.tokens_per_step:,} tokens a step, rules "
        f"{config.rules.name}, {jax.device_count()} {device.device_kind} ({config.mesh})",
        f"corpus {data.name}: {data.train_tokens:,} training tokens, {epochs:.2f} epochs"
        + (
            ": the same text again and again; more of it, or fewer steps, would teach a model more"
            if epochs >= _MANY
            else ""
        ),
    ]
    steps, warmup_steps = config.train.steps, config.optimizer.warmup_steps
    if warmup_steps and steps < 2 * warmup_steps:
        lines.append(
            (
                f"warning: optimizer.warmup_steps={warmup_steps} is more than half of "
                f"train.steps={steps}: "
            )
            + (
                "the run ends before the learning rate reaches its peak"
                if steps < warmup_steps
                else "most of the run is warm-up"
            )
            + f"; set optimizer.warmup_steps={steps // 10}"
        )
    if told := data.loss_of_bytes:
        lines.append(f"warning: {told}")
    capability = capability_of(device) if device.platform == "gpu" else None
    automatic = getattr(config.model, "attention", "") == "auto"
    problems = (
        own_kernels.attention_problems(config, device.platform, capability) if automatic else []
    )
    choices = [choose_trusted_attention(problem) for problem in problems]
    lines += own_kernels.described(config, choices, capability) if choices or not automatic else []
    return lines


def count(n: int) -> str:
    """A number of parameters with three digits: 41.3 k, 1.36 M, 124 M, 175 B."""
    for unit, size in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if n >= size:
            return f"{n / size:#.3g}".rstrip(".") + f" {unit}"
    return str(n)


def attention_implementations(
    config: TrainConfig, platform: str, capability: tuple[int, int] | None
) -> set[str]:
    """The implementations that attention=auto chooses on such a device, by kind of layer; else the
    one that the model names, if any.
    """
    model, wanted = config.model, getattr(config.model, "attention", "")
    if wanted != "auto" or not isinstance(model, DecoderConfig):
        return {wanted} if wanted else set()
    return {
        choose_attention(problem).name
        for problem in own_kernels.attention_problems(config, platform, capability)
    }
