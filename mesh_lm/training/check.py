"""Checks whether a config can run on a number of devices. All problems are reported at once, each
with what would work.

Each room checks its own subject (`problems.py`, or `mesh_lm.parallel.problems`); the least value of
a field stands with the field (`mesh_lm.config.option`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence

from mesh_lm.checkpoint.problems import recovery_problems
from mesh_lm.config import TrainConfig
from mesh_lm.data.problems import data_problems
from mesh_lm.data.tokenizer import MIN_VOCAB
from mesh_lm.errors import ConfigError
from mesh_lm.fields import bound_problems
from mesh_lm.model.problems import head_problems
from mesh_lm.optim.problems import optimizer_problems
from mesh_lm.parallel.problems import parallel_problems
from mesh_lm.training.diloco_problems import island_problems
from sharding_rules import TABLES, MeshConfig, MeshError, unknown_scopes, would_fit

_BOUNDED_SECTIONS = (
    "train",
    "diloco",
    "data",
    "checkpoint",
    "profile",
    "launch",
    "pipeline",
    "health",
)


def check(config: TrainConfig, n_devices: int) -> TrainConfig:
    """Returns the config with its mesh resolved. Raises ConfigError that lists every problem."""
    problems = list(_section_problems(config))
    try:
        mesh = config.mesh.resolve(n_devices)
    except MeshError as error:
        fits = would_fit(_runnable(config, error.choices, n_devices))
        problems.append(error.problem + fits + _simulation(config.mesh, n_devices))
        # To check the rest.
        mesh = MeshConfig.of({axis: max(1, size) for axis, size in config.mesh.sizes().items()})
    problems += _mesh_problems(config, mesh)
    if problems:
        lines = "\n".join(f"  - {problem}" for problem in problems)
        raise ConfigError(f"this config cannot run\n{lines}")
    return dataclasses.replace(config, mesh=mesh)


def _section_problems(config: TrainConfig) -> Iterator[str]:
    """Yields problems of single sections, and of pairs of fields that do not depend on the mesh."""
    model_class = type(config.model)
    is_dataclass = "__dataclass_fields__" in vars(model_class)
    if not is_dataclass and vars(model_class).get("__annotations__"):
        yield (
            f"{model_class.__name__} has fields, but no @dataclasses.dataclass(frozen=True): they "
            "are neither options nor in the run's config.json"
        )
    model_problems = config.model.problems()
    yield from model_problems
    if not model_problems:
        stack = config.model.stack()
        yield from stack.problems()
        yield from unknown_scopes(config.rules, (*stack.names, TABLES))
    for section in _BOUNDED_SECTIONS:
        yield from bound_problems(section, getattr(config, section))
    if not 0 <= config.seed < 2**32:
        yield f"seed={config.seed} must be at least 0 and below 2^32"
    yield from optimizer_problems(config.optimizer, config.rules)
    yield from data_problems(config.data)
    yield from recovery_problems(config)
    yield from _vocabulary_problems(config)


def _vocabulary_problems(config: TrainConfig) -> Iterator[str]:
    if config.data.tokenizer or config.data.blend:
        return  # the tokenizer is there, and `mesh_lm.training.ready` reads it
    n_entries = config.data.tokenizer_vocab
    n_ids = config.model.vocab_size
    if n_entries <= n_ids:
        return
    smaller = f"data.tokenizer_vocab={n_ids}, or " if n_ids >= MIN_VOCAB else ""
    yield (
        f"data.tokenizer_vocab={n_entries} makes ids outside model.vocab_size={n_ids}; set "
        f"{smaller}model.vocab_size={n_entries} or more"
    )


def _mesh_problems(config: TrainConfig, mesh: MeshConfig) -> list[str]:
    """Returns what keeps the config from running on a mesh whose sizes are all known."""
    config = dataclasses.replace(config, mesh=mesh)
    checks = (island_problems, head_problems, parallel_problems)
    return [problem for check in checks for problem in check(config)]


def _runnable(
    config: TrainConfig, choices: Sequence[tuple[str, MeshConfig]], n_devices: int
) -> list[tuple[str, MeshConfig]]:
    """Returns the meshes on which the config has no other problem, the nearest two of each axis."""
    runnable: list[tuple[str, MeshConfig]] = []
    for axis, mesh in choices:
        n_found = sum(known_axis == axis for known_axis, _ in runnable)
        if n_found < 2 and not _mesh_problems(config, mesh.resolve(n_devices)):
            runnable.append((axis, mesh))
    return runnable


def _simulation(mesh: MeshConfig, n_devices: int) -> str:
    """Returns the end of a message about a mesh of several devices where there is one, which may be
    a CPU.
    """
    sizes = list(mesh.sizes().values())
    least = math.prod(size for size in sizes if size != -1)
    if n_devices != 1 or least < 2 or min(sizes) < -1 or sizes.count(-1) > 1:
        return ""
    return f"; without a GPU, launch.cpu_devices={least} simulates {least}"
