"""Changes of a config that may make it fit. They follow from its fields; none is written for a
particular model.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any, get_args

from mesh_lm.config import TrainConfig
from mesh_lm.errors import ConfigError
from mesh_lm.training.check import check
from sharding_rules import PRESETS, REDUCTIONS, ShardingRuleError, axes_of, preset
from sharding_rules.lab import Report
from sharding_rules.lab.fixes import Candidate
from sharding_rules.lab.targets import NODE
from sharding_rules.rules import Kind


def candidates(
    config: TrainConfig, n_devices: int, compiled: Callable[[TrainConfig], Report]
) -> Iterator[Candidate]:
    """Every change that passes `check`, and every pair of changes of different kinds, as what to
    type and how to compile it.
    """
    config = check(config, n_devices)
    seen = [_effect(config)]
    held = _held(config)

    def candidate(*changes: Change) -> Candidate | None:
        fields = {name: value for _, each in changes for name, value in each.items()}
        if len(fields) < sum(len(each) for _, each in changes):
            return None  # both change the same field
        try:
            changed = check(_replace(config, fields), n_devices)
        except (ConfigError, ShardingRuleError):
            return None
        effect = _effect(changed)
        if effect in seen:
            return None
        seen.append(effect)
        kinds = [kind for kind, _ in changes]
        parts = tuple(_words(each) for _, each in changes) if len(changes) > 1 else ()
        return Candidate(
            "+".join(kinds), _words(fields), lambda: compiled(changed),
            scale=_held(changed) / held, parts=parts, first=set(kinds) <= {"remat", "microbatch"},
        )  # fmt: skip

    singles = []
    for change in itertools.chain(
        _remat(config), _microbatches(config), _rules(config), _meshes(config), _loss(config)
    ):
        if one := candidate(change):
            singles.append(change)
            yield one
    for first, second in itertools.combinations(singles, 2):
        if (
            first[0] != second[0]
            and not {first[0], second[0]} <= {"remat", "offload"}
            and (one := candidate(first, second))
        ):
            yield one


def _held(config: TrainConfig) -> float:
    """Sequences that a device has at once."""
    ways = math.prod(config.mesh.sizes()[a] for a in axes_of(config.rules.activations["batch"]))
    return config.train.global_batch / config.train.microbatches / ways


def _words(fields: dict[str, Any]) -> str:
    return " ".join(f"--config.{name}={value}" for name, value in fields.items())


def _effect(config: TrainConfig) -> tuple[TrainConfig, Any]:
    """Returns a key that differs for different programs. Rules count only as far as they shard over
    axes that this mesh has.
    """
    size = config.mesh.sizes()
    columns = {kind: config.rules.column(kind) for kind in get_args(Kind)}
    sharded = {
        k: {row: [a for a in axes_of(entry) if size.get(a, 1) > 1] for row, entry in col.items()}
        for k, col in columns.items()
    }
    return dataclasses.replace(config, rules=PRESETS["ddp"]), (sharded, config.rules.reduction)


Change = tuple[str, dict[str, Any]]
"""A kind, and the fields that change."""


def _remat(config: TrainConfig) -> Iterator[Change]:
    """Rematerialise more, beginning with the cheapest; or offload to the host."""
    policies = ("none", "save_names", "save_attention", "full")
    now = getattr(config.model, "remat", None)
    if any(segment.remat != now for segment in config.model.stack().segments):
        return  # model.remat does not apply to a segment with its own policy
    if now in policies:
        for policy in policies[policies.index(now) + 1 :]:
            yield "remat", {"model.remat": policy}
        if now != "full":
            yield "offload", {"model.remat": "offload"}


def _microbatches(config: TrainConfig) -> Iterator[Change]:
    """Fewer sequences at once: each number that divides those of now, down to one on each
    device.
    """
    each = int(_held(config))
    for b in (b for b in range(each - 1, 0, -1) if each % b == 0):
        yield "microbatch", {"train.microbatches": config.train.microbatches * each // b}


def _rules(config: TrainConfig) -> Iterator[Change]:
    """Other presets that use each axis of the same mesh."""
    used = {axis for axis, size in config.mesh.sizes().items() if size > 1}
    names = [
        *PRESETS,
        *(
            f"{a}+{b}"
            for a in ("zero1", "zero2", "distributed", "hsdp", "fsdp")
            for b in ("megatron", "megatron_sp", "megatron_2d")
        ),
    ]
    for name in names:
        if name != config.rules.name and used <= preset(name).mesh_axes():
            yield "rule", {"rules": _with_reduction(config, name)}


def _with_reduction(config: TrainConfig, name: str) -> str:
    """Returns the name of these rules, extended by the config's own `reduction`, for the command
    line.
    """
    words = [word for word, reduction in REDUCTIONS.items() if reduction == config.rules.reduction]
    return "+".join(dict.fromkeys([*name.split("+"), *words]))


def _meshes(config: TrainConfig) -> Iterator[Change]:
    """Weights sharded over part of the replicas (HSDP), and more tensor parallelism inside a
    node.
    """
    mesh = config.mesh.sizes()
    tensor = (
        "megatron_2d"
        if mesh.get("tensor_y", 1) > 1
        else "megatron_sp"
        if mesh["tensor"] > 1
        else ""
    )
    for factor in (2, 8):
        if mesh["data"] % factor == 0:
            rules = "+".join(filter(None, ["hsdp", tensor]))
            yield (
                "mesh",
                {
                    "rules": _with_reduction(config, rules),
                    "mesh.data": mesh["data"] // factor,
                    "mesh.fsdp": mesh["fsdp"] * factor,
                },
            )
    for axis in ("data", "fsdp"):
        if mesh["tensor"] * mesh.get("tensor_y", 1) * 2 <= NODE and mesh[axis] % 2 == 0:
            rules = (
                {}
                if "megatron" in config.rules.name
                else {"rules": _with_reduction(config, f"{config.rules.name}+megatron_sp")}
            )
            yield (
                "mesh",
                {**rules, f"mesh.{axis}": mesh[axis] // 2, "mesh.tensor": mesh["tensor"] * 2},
            )


def _loss(config: TrainConfig) -> Iterator[Change]:
    """Smaller chunks of logits in the loss."""
    if chunk := getattr(config.model, "loss_chunk", 0):
        yield "loss", {"model.loss_chunk": max(128, chunk // 4)}


def _replace(config: TrainConfig, fields: dict[str, Any]) -> TrainConfig:
    for name, value in fields.items():
        section, _, field = name.rpartition(".")
        if name == "rules":
            config = dataclasses.replace(config, rules=preset(value))
        else:
            config = dataclasses.replace(
                config, **{section: dataclasses.replace(getattr(config, section), **{field: value})}
            )
    return config
