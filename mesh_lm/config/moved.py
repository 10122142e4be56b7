"""Fields that have another name than in release 0.1. The descriptions of configs that it wrote, in
a run's config.json and in checkpoints, are read as today's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mesh_lm.optim.rules import RULES
from sharding_rules.presets import EXPERT_ROWS

_HYPERPARAMETERS = {
    "adamw": ("beta1", "beta2", "eps"),
    "lion": ("beta1", "beta2"),
    "muon": ("momentum", "beta1", "beta2", "eps"),
}
"""The fields of the section `optimizer` that a rule read; those of a custom rule are unknown."""
_OUTER = ("outer_steps", "outer_learning_rate", "outer_momentum")
_MEGATRON = {
    "add_extra_token": (False, "no_extra_token"),
    "drop_last_partial": (True, "drop_last_partial"),
    "mask_document_start": (True, "mask_document_start"),
}
"""A switch of the section `data` -> (its value, the word of data.megatron that stands for it)."""

_MOVED = {
    "optimizer.name": "optimizer.rule",
    "optimizer.beta1": "optimizer.rule.beta1",
    "optimizer.beta2": "optimizer.rule.beta2",
    "optimizer.eps": "optimizer.rule.eps",
    "optimizer.momentum": "optimizer.rule.momentum",
    **{f"optimizer.{name}": f"diloco.{name}" for name in _OUTER},
}
"""section.field of release 0.1 -> the field that has its value now."""


def todays(path: str, text: str | None) -> tuple[str, str | None] | None:
    """Returns today's field for a field of release 0.1, and its value as it is typed; None: it has
    not moved. The value is None where it is today's default.

    path: section.field. text: the value that was typed; None: none was, which is true for a switch.
    """
    section, _, field = path.rpartition(".")
    if section == "data" and field in _MEGATRON:
        value, word = _MEGATRON[field]
        is_meant = (text or "true").lower() == str(value).lower()
        return "data.megatron", word if is_meant else None
    if path in _MOVED:
        return _MOVED[path], text or ""
    return None


def migrated(plain: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the description of a config (`mesh_lm.config.as_dict`) with today's fields. One that
    has them already stays as it is.
    """
    config = dict(plain)
    optimizer = config.get("optimizer")
    if isinstance(optimizer, Mapping) and "rule" not in optimizer:
        config["optimizer"] = _optimizer(optimizer)
    if isinstance(optimizer, Mapping) and "outer_steps" in optimizer:
        outer = {name: optimizer[name] for name in _OUTER if name in optimizer}
        config["diloco"] = {"class": "DilocoConfig", **outer}
    checkpoint = config.get("checkpoint")
    if isinstance(checkpoint, Mapping) and "alarm" in checkpoint:  # a constant now
        config["checkpoint"] = {name: x for name, x in checkpoint.items() if name != "alarm"}
    rules = config.get("rules")
    if isinstance(rules, Mapping):
        config["rules"] = {key: _with_experts(value) for key, value in rules.items()}
    data = config.get("data")
    if isinstance(data, Mapping) and _MEGATRON.keys() & data.keys():
        config["data"] = _data(data)
    return config


def _optimizer(plain: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the section `optimizer` with the rule as a section of its own."""
    name = plain.get("name", "adamw")  # the first versions had no other
    module, _, class_name = str(RULES.get(name, name)).rpartition(":")
    rule = {"class": class_name, "module": module}
    for field in _HYPERPARAMETERS.get(name, ()):
        if field in plain:
            rule[field] = plain[field]
    moved = {path.removeprefix("optimizer.") for path in _MOVED}
    other_fields = {field: value for field, value in plain.items() if field not in moved}
    return {"class": other_fields.pop("class", "OptimizerConfig"), "rule": rule, **other_fields}


def _with_experts(column: Any) -> Any:
    """Returns a column of rules with the rows of experts, which those of release 0.1 lack: an
    expert's width is sharded as that of an MLP. Anything else stays as it is.
    """
    if not isinstance(column, Mapping) or "embed" not in column or "expert_mlp" in column:
        return column
    new_rows: dict[str, Any] = {row: [] for row in EXPERT_ROWS}
    new_rows["expert_mlp"] = column.get("mlp", [])
    # The order of today's presets, so that the text of the config is today's, too.
    rows: dict[str, Any] = {}
    for row, axes in column.items():
        if row == "layers":
            rows |= new_rows
        rows[row] = axes
        if row == "fused" and "layers" not in column:
            rows |= new_rows
    return rows | new_rows


def _data(plain: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the section `data` with Megatron's switches as one list."""
    other_fields = {field: value for field, value in plain.items() if field not in _MEGATRON}
    words = [word for field, (value, word) in _MEGATRON.items() if plain.get(field) is value]
    return {**other_fields, "megatron": words}
