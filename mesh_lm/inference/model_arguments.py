"""Loads the model that a command line, or lm-evaluation-harness's --model_args, names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mesh_lm import distributed
from mesh_lm.config import LaunchConfig, ModelConfig, TrainConfig, files
from mesh_lm.errors import ConfigError
from mesh_lm.inference.trained import TrainedModel
from sharding_rules import AXES, MeshConfig, preset


def load(
    checkpoint: str,
    mesh: str = "",
    rules: str = "",
    tokenizer: str = "",
    config: str = "",
    dtype: str = "trained",
    cpu_devices: int = 0,
    compile_cache: str = LaunchConfig().compile_cache,
    *,
    command: Mapping[str, Any] | None = None,
) -> TrainedModel:
    """Sets up JAX and reads the weights, each device its own part.

    The other arguments are documented in `mesh_lm.commands.model_arguments`. Raises ConfigError and
    ShardingRuleError as `TrainedModel.load` does.

    Args:
      command: options that must be the same on all processes of the run (default: none but this
        model and its mesh).
    """
    mesh_config = _parse_mesh(mesh)
    rules_table = preset(rules) if rules else None
    model = files.load(config).model if config else None
    launch = LaunchConfig(cpu_devices=cpu_devices, compile_cache=compile_cache)
    distributed.start(
        TrainConfig(model=model or ModelConfig(), output=checkpoint, launch=launch), command
    )
    return TrainedModel.load(
        checkpoint,
        mesh=mesh_config,
        rules=rules_table,
        tokenizer=tokenizer,
        model=model,
        dtype="" if dtype == "trained" else dtype,
    )


def _parse_mesh(text: str) -> MeshConfig | None:
    """Parses a mesh such as `data=2,tensor=4`; None for an empty text."""
    if not text:
        return None
    sizes: dict[str, int] = {}
    for word in text.split(","):
        axis, _, size = word.strip().partition("=")
        if axis not in AXES or axis in sizes or not size.removeprefix("-").isdigit():
            raise ConfigError(
                f"--mesh={text}: {word!r} is not a mesh axis and its size; give some of "
                f"{', '.join(AXES)}, as in data=2,tensor=4"
            )
        sizes[axis] = int(size)
    return MeshConfig.of(sizes)
