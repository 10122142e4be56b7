"""Checks whether islands (DiLoCo) can train apart with this config, and come together again."""

from __future__ import annotations

import math
from collections.abc import Iterator

from mesh_lm.config import TrainConfig
from sharding_rules import ISLAND, axes_of
from sharding_rules.rules import FLAT


def island_problems(config: TrainConfig) -> Iterator[str]:
    """Settings of the outer step that contradict others, and parts of the trainer that do not work
    with islands.
    """
    optimizer, rules, n = config.optimizer, config.rules, config.mesh.island
    if not 0 < optimizer.outer_learning_rate < math.inf:
        yield (
            f"optimizer.outer_learning_rate={optimizer.outer_learning_rate} must be a number above "
            "0"
        )
    if not 0 <= optimizer.outer_momentum < 1:
        yield f"optimizer.outer_momentum={optimizer.outer_momentum} must be in [0, 1)"
    for kind in ("gradients", "optimizer"):  # `_unsupported_rows` looks at the other columns
        for row, entry in (getattr(rules, kind) or {}).items():
            if ISLAND in axes_of(entry):
                yield f"rules.{kind}[{row!r}]={entry!r}: each island has its own; remove {ISLAND!r}"
    if ISLAND in axes_of(entry := rules.activations["batch"])[1:]:
        rest = tuple(axis for axis in axes_of(entry) if axis != ISLAND)
        yield (
            f"rules.activations['batch']={entry!r}: {ISLAND} is the outermost axis; set it to "
            f"{(ISLAND, *rest)!r}"
        )
    if not (every := optimizer.outer_steps):
        if n > 1:
            fix = (
                "set optimizer.outer_steps=100, or use mesh.data for replicas that sum their "
                "gradients in every step"
            )
            yield (
                f"mesh.island={n}, but optimizer.outer_steps=0 never averages the islands' "
                f"weights; {fix}"
            )
        return
    if every > 0 and (steps := config.train.steps) % every:
        below = steps // every * every
        fits = f"{below} or {below + every}" if below else str(every)
        yield (
            f"train.steps={steps} is not a multiple of optimizer.outer_steps={every}: the last "
            f"steps would not count; it can be {fits}"
        )
    what = f"optimizer.outer_steps={every}"
    if (stages := config.mesh.pipeline) > 1:
        yield (
            f"{what}: an island cannot have pipeline stages yet, and mesh.pipeline={stages}; set "
            "mesh.pipeline=1, and use mesh.fsdp"
        )
    for kind in ("params", "optimizer"):
        for row, entry in rules.column(kind).items():
            if (
                row.rpartition("/")[2] == FLAT
                and entry
                and (kind == "params" or not rules.params.get(row))
            ):
                fix = "use diloco with ddp, zero1, zero2, fsdp or hsdp"
                yield (
                    f"{what}: the state of islands cannot be flat vectors yet, and "
                    f"rules.{kind}[{row!r}]={entry!r}; {fix}"
                )
    if rules.reduction == "int8":
        fix = "use +reduce_bfloat16, or rules without +reduce_int8"
        yield (
            f"{what}: islands do not keep the error feedback of sums in int8 yet, and "
            f"rules.reduction='int8'; {fix}"
        )
    if rewinds := config.health.rewinds:
        fix = "set health.rewinds=0; a step that is not finite is skipped on its island only"
        yield (
            f"{what}: islands skip steps on their own, so a run cannot roll back as one, and "
            f"health.rewinds={rewinds}; {fix}"
        )
    if config.checkpoint.local:
        yield (
            f"{what}: node-local checkpoints do not know islands yet; leave checkpoint.local "
            "empty, and save to the output"
        )
