"""The attention of a plan: its implementation on the target, whether that can be compiled here, and
the kernels in the compiled program.
"""

from __future__ import annotations

import dataclasses
import importlib.util

from mesh_lm.config import TrainConfig
from mesh_lm.training import opening
from sharding_rules.lab import Report
from sharding_rules.lab.hlo import arrays
from sharding_rules.lab.targets import TARGETS

_KERNELS = {"mosaic_gpu": "mosaic", "__cudnn$fmha": "cudnn"}
"""Prefix of the custom call's target -> name of the implementation."""


def attention_implementations(config: TrainConfig, target: str) -> set[str]:
    """Returns the implementations that a run of this config uses on the target.

    With attention=auto there may be several, by kind of layer.
    """
    return opening.attention_implementations(config, "gpu", TARGETS[target].capability)


def with_compilable_attention(config: TrainConfig, target: str = "h100") -> TrainConfig:
    """Returns the config with an attention that can be compiled here.

    cuDNN's needs a library that the extra `aot` does not install.
    """
    if _installed("nvidia", "nvidia.cudnn"):
        return config
    if not {"cudnn", "auto"} & attention_implementations(config, target):
        return config
    model = dataclasses.replace(config.model, attention="xla")  # pyright: ignore[reportCallIssue]
    return dataclasses.replace(config, model=model)


def _installed(*packages: str) -> bool:
    """Returns whether all packages are installed.

    Parents first, because find_spec raises for a child of a missing package.
    """
    return all(importlib.util.find_spec(package) for package in packages)


def report_facts(config: TrainConfig, report: Report, target: str) -> tuple[tuple[str, str], ...]:
    """Returns a line for the report: the kernels that the compiled program calls, and their shapes.

    It also names the run's own implementation if it cannot be compiled here.
    """
    expected = getattr(config.model, "attention", "")
    if not expected:
        return ()
    text = "; ".join(dict.fromkeys(_calls(report))) or "xla, no kernel"
    implementations = attention_implementations(config, target)
    compiled = with_compilable_attention(config, target)
    if getattr(compiled.model, "attention", "") != expected:
        names = " and ".join(sorted(implementations))
        text += f": cuDNN is not installed here; the run will use {names}"
    if "mosaic" in implementations:
        text += "; own kernel, self-tested at first use"
    return (("attention", text),)


def _calls(report: Report) -> list[str]:
    """Returns the calls of fused attention in words.

    Their first operands are queries, keys and values with four axes.
    """
    calls = []
    for called, shapes, location in report.kernels:
        name = next((name for prefix, name in _KERNELS.items() if called.startswith(prefix)), "")
        if not name or location.phase == "backward":
            continue
        operands = [array for shape in shapes[:3] for array in arrays(shape)]
        if len(operands) != 3 or any(len(array.dims) != 4 for array in operands):
            continue
        q, k, _ = operands
        calls.append(f"{name} kernel, q {list(q.dims)} k {list(k.dims)} on each device")
    return calls
