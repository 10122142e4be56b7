"""Model FLOPs utilisation, and the peak FLOP/s of devices."""

from __future__ import annotations

from sharding_rules.lab.targets import TARGETS

PEAK_BF16: tuple[tuple[str, float], ...] = (
    ("H100 PCIe", 756e12),
    ("H100 NVL", 835.5e12),
    ("GB200", 2500e12),
    *((name, target.flops["bf16"]) for name, target in TARGETS.items()),
)
"""Part of jax's device_kind -> dense bf16 FLOP/s of one device, without sparsity (NVIDIA's data
sheets). The first match counts."""


def peak_flops(device_kind: str) -> float | None:
    """Returns the dense bf16 FLOP/s of one device; None if unknown, as for a CPU."""
    for part, peak in PEAK_BF16:
        if part.lower() in device_kind.lower():
            return peak
    return None


def mfu(
    tokens_per_second: float, flops_per_token: float, n_devices: int, device_kind: str
) -> float | None:
    """Returns the model FLOPs utilisation, 0 to 1: tokens_per_second * flops_per_token / (n_devices
    * peak).

    `flops_per_token` counts the model's forward and backward without recomputation, so
    rematerialisation lowers the figure. None if the peak or `flops_per_token` is unknown. Source:
    PaLM, arXiv 2204.02311, appendix B.
    """
    peak = peak_flops(device_kind)
    if not peak or not flops_per_token:
        return None
    return tokens_per_second * flops_per_token / (n_devices * peak)
