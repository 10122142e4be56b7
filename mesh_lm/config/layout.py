"""The layout of a run as fields of its config, and in a file: `mesh-lm plan --best` writes one, and
`mesh="plan.json"` in a config, or --mesh=plan.json, reads it. Nothing is searched at a start.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from mesh_lm.config.run import TrainConfig
from mesh_lm.errors import ConfigError
from mesh_lm.user_code import in_directories
from sharding_rules import ShardingRuleError, preset

Fields = dict[str, Any]
"""section.field of a config -> value; of `rules` the name."""

_FORMAT = "mesh_lm layout 1"
LAYOUT_OF_MODEL = ("remat", "remat_layers", "kept_layers", "unroll", "batch_halves")
"""Fields of a decoder that say how it is computed, not what."""


def with_fields(config: TrainConfig, fields: Mapping[str, Any]) -> TrainConfig:
    """Returns the config with other values."""
    for name, value in fields.items():
        if name == "rules":
            config = dataclasses.replace(config, rules=preset(value))
            continue
        section_name, _, field = name.rpartition(".")
        section = dataclasses.replace(getattr(config, section_name), **{field: value})
        config = dataclasses.replace(config, **{section_name: section})
    return config


def saved_layout(
    config: TrainConfig, fields: Fields, n_devices: int, facts: Mapping[str, Any]
) -> str:
    """Returns the text of a file with a layout of this run.

    facts: what else the file says, such as the predicted step; a run does not read it.
    """
    data = {
        "format": _FORMAT,
        "model": _digest(config),
        "devices": n_devices,
        "jax": version("jax"),
        "fields": fields,
        **facts,
    }
    return json.dumps(data, indent=1) + "\n"


def with_layout(config: TrainConfig, file: str) -> TrainConfig:
    """Returns the config with a layout that `saved_layout` has made of the same run.

    Raises ConfigError for a file that is missing or no layout, that was made for another model or
    batch, or under another version of jax.
    """
    data = _read(file)
    again = "make it again: mesh-lm plan FILE --best --save=" + file
    if data.get("model") != _digest(config):
        raise ConfigError(
            f"mesh={file}: the layout is for another model, batch, optimizer.rule or "
            f"rules.reduction than this run's; {again}"
        )
    if data.get("jax") != version("jax"):
        raise ConfigError(
            f"mesh={file}: the layout was found with jax {data.get('jax')}, whose programs need "
            f"other memory than those of jax {version('jax')}; {again}"
        )
    fields = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in data["fields"].items()
    }
    default = dataclasses.replace(config, mesh=type(config).mesh)
    try:
        return with_fields(default, fields)
    except (AttributeError, TypeError, ShardingRuleError) as error:
        raise ConfigError(
            f"mesh={file}: a field of the layout is wrong: {error}; {again}"
        ) from error


def _read(file: str) -> dict[str, Any]:
    """Returns what a file says, which is looked for where configs are (`files.load`)."""
    path = in_directories(Path(file).expanduser())
    if path is None:
        raise ConfigError(
            f"mesh={file}: no such file; mesh-lm plan FILE --best --save={file} writes one"
        )
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"mesh={file}: the file of the layout cannot be read: {error}") from error
    if not isinstance(data, dict) or data.get("format") != _FORMAT:
        raise ConfigError(f"mesh={file}: not a layout that mesh-lm plan --best has saved")
    return data


def _digest(config: TrainConfig) -> str:
    """Returns what a layout is made for: the model, its batch, its optimizer's rule, and the type
    in which gradients are summed.
    """
    model = {
        field.name: repr(getattr(config.model, field.name))
        for field in dataclasses.fields(config.model)
        if field.name not in LAYOUT_OF_MODEL
    }
    identity = [
        type(config.model).__qualname__,
        sorted(model.items()),
        config.train.global_batch,
        # Its state is a part of the memory.
        type(config.optimizer.rule).__qualname__,
        config.rules.reduction,
    ]
    return hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:16]
