"""Problems of optimizer state that is divided by layers (`sharding_rules.owner`)."""

from __future__ import annotations

import math
from collections.abc import Iterator

from mesh_lm.config import TrainConfig
from mesh_lm.errors import ConfigError
from mesh_lm.parallel.layout import divided
from sharding_rules import ISLAND
from sharding_rules.owner import owner_axes


def owner_problems(config: TrainConfig) -> Iterator[str]:
    """Yields stages whose rows are not in model order, which owners cannot divide, and islands on
    which owners would need padding.
    """
    sizes = config.mesh.sizes()
    axes = [axis for axis in owner_axes(config.rules) if sizes.get(axis, 1) > 1]
    if not axes or config.model.problems() or config.model.stack().problems():
        return
    n_stages = sizes["pipeline"]
    try:
        stacks = divided(config.model, config.pipeline, n_stages)
    except ConfigError:
        return  # see `pipeline_problems`
    if n_stages > 1 and config.pipeline.chunks > 1:
        yield (
            f"rules {config.rules.name!r} divide the optimizer state by layers, and the layers of "
            f"a stage of pipeline.chunks={config.pipeline.chunks} are not next to each other in "
            "the model, so that a checkpoint could not be saved; set pipeline.chunks=1, or leave "
            "owner out"
        )
        return
    if sizes.get(ISLAND, 1) == 1:
        return
    product = " x ".join(f"mesh.{axis}={sizes[axis]}" for axis in axes)
    n_owners = math.prod(sizes[axis] for axis in axes)
    for segment, stack in stacks.items():
        if stack.rows_per_stage % n_owners:
            yield (
                f"rules {config.rules.name!r} divide the optimizer state by layers: "
                f"{stack.rows_per_stage} layers of segment {segment!r} are not divisible by "
                f"{product} owners, and an island's state is saved without padding; choose a mesh "
                f"whose owners divide {stack.rows_per_stage}, or leave owner out"
            )
