"""The attention of a plan: its implementation on the target, whether that can be compiled here, and
the kernels in the compiled program.
"""

from __future__ import annotations

import dataclasses
import importlib.util

from mesh_lm.config import TrainConfig
from mesh_lm.training import opening
from sharding_rules.lab import Report
from sharding_rules.lab.hlo import Array, arrays
from sharding_rules.lab.targets import TARGETS

_KERNELS = {"mosaic_gpu": "mosaic", "__cudnn$fmha": "cudnn"}
"""Prefix of the custom call's target -> name."""


def attention_implementations(config: TrainConfig, target: str) -> set[str]:
    """Returns the implementations that attention=auto chooses on the target, by kind of layer; else
    the one that the model names.
    """
    return opening.attention_implementations(config, "gpu", TARGETS[target].capability)


def with_compilable_attention(config: TrainConfig, target: str = "h100") -> TrainConfig:
    """Returns the config with an attention that can be compiled here: cuDNN's needs a library that
    the extra `aot` does not install.
    """
    if _installed("nvidia", "nvidia.cudnn") or not {"cudnn", "auto"} & attention_implementations(
        config, target
    ):
        return config
    return dataclasses.replace(config, model=dataclasses.replace(config.model, attention="xla"))  # pyright: ignore[reportCallIssue]


def _installed(*packages: str) -> bool:
    """Returns whether all packages are installed. Parents first, because find_spec raises for a
    child of a missing package.
    """
    return all(importlib.util.find_spec(package) for package in packages)


def report_facts(config: TrainConfig, report: Report, target: str) -> tuple[tuple[str, str], ...]:
    """Returns a line for the report: the kernel that the compiled program calls, its shapes, and
    the run's own kernel if it differs.
    """
    if not (wanted := getattr(config.model, "attention", "")):
        return ()
    text = "; ".join(dict.fromkeys(_calls(report))) or "xla, no kernel"
    if getattr(with_compilable_attention(config, target).model, "attention", "") != wanted:
        text += (
            ": cuDNN is not installed here; the run will use "
            f"{' and '.join(sorted(attention_implementations(config, target)))}"
        )
    if "mosaic" in attention_implementations(config, target):
        text += "; own kernel, self-tested at first use"
    return (("attention", text),)


def _calls(report: Report) -> list[str]:
    """Describes the calls of fused attention, whose first operands are queries, keys and values
    with four axes.
    """
    calls = []
    for called, shapes, where in report.kernels:
        name = next((name for begin, name in _KERNELS.items() if called.startswith(begin)), "")
        first = [array for shape in shapes[:3] for array in arrays(shape)]
        if (
            name
            and where.phase != "backward"
            and len(first) == 3
            and all(len(array.dims) == 4 for array in first)
        ):
            calls.append(f"{name} kernel, q {_dims(first[0])} k {_dims(first[1])} on each device")
    return calls


def _dims(array: Array) -> str:
    return str(list(array.dims))
