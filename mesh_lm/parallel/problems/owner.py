"""Problems of optimizer state that is divided by layers (`sharding_rules.owner`)."""

from __future__ import annotations

import math
from collections.abc import Iterator

from mesh_lm.config import TrainConfig
from mesh_lm.errors import ConfigError
from mesh_lm.parallel.layout import divided
from sharding_rules import Rules, axes_of
from sharding_rules.rules import Kind


def owner_axes(rules: Rules, kind: Kind) -> tuple[str, ...]:
    """Returns the mesh axes that divide layers of one stage among their owners; empty: none do."""
    first, *others = axes_of(rules.column(kind).get("layers")) or ("pipeline",)
    return tuple(others) if first == "pipeline" else ()


def owner_problems(config: TrainConfig) -> Iterator[str]:
    """Yields numbers of layers that do not divide among their owners, and stages whose rows are not
    in model order, in which owners cannot be saved.
    """
    sizes = config.mesh.sizes()
    axes = [axis for axis in owner_axes(config.rules, "optimizer") if sizes.get(axis, 1) > 1]
    if not axes or config.model.problems() or config.model.stack().problems():
        return
    n_stages = sizes["pipeline"]
    try:
        stacks = divided(config.model, config.pipeline, n_stages)
    except ConfigError:
        return  # see `pipeline_problems`
    product = " x ".join(f"mesh.{axis}={sizes[axis]}" for axis in axes)
    n_owners = math.prod(sizes[axis] for axis in axes)
    for segment, stack in stacks.items():
        if not stack.is_contiguous:
            yield (
                f"rules {config.rules.name!r} divide the optimizer state by layers, which the "
                f"stages of segment {segment!r} do not have in the order of the model; set "
                "pipeline.chunks=1 and a number of layers that mesh.pipeline divides, or leave "
                "owner out"
            )
            continue
        n_layers = stack.n_layers // n_stages
        if n_layers % n_owners:
            on_stage = " on a stage" if n_stages > 1 else ""
            yield (
                f"rules {config.rules.name!r} divide the optimizer state by layers: {n_layers} "
                f"layers of segment {segment!r}{on_stage} are not divisible by {product} owners; "
                f"choose a mesh whose owners divide {n_layers}, or leave owner out"
            )
