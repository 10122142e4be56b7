"""Settings with which islands (DiLoCo) cannot train apart, or not come together again."""

from __future__ import annotations

from collections.abc import Iterator

from mesh_lm.config import TrainConfig
from sharding_rules import ISLAND, axes_of
from sharding_rules.rules import FLAT


def island_problems(config: TrainConfig) -> Iterator[str]:
    """Yields settings of the outer step that contradict others, and parts of the trainer that do
    not work with islands.
    """
    yield from _row_problems(config)
    if config.diloco.outer_steps:
        yield from _step_problems(config)
        yield from _unsupported(config)
    elif config.mesh.island > 1:
        yield (
            f"mesh.island={config.mesh.island}, but diloco.outer_steps=0 never averages the "
            "islands' weights; set diloco.outer_steps=100, or use mesh.data for replicas that "
            "sum their gradients in every step"
        )


def _row_problems(config: TrainConfig) -> Iterator[str]:
    rules = config.rules
    for kind in ("gradients", "optimizer"):  # `row_problems` looks at the other columns
        for row, entry in (getattr(rules, kind) or {}).items():
            if ISLAND in axes_of(entry):
                yield f"rules.{kind}[{row!r}]={entry!r}: each island has its own; remove {ISLAND!r}"
    entry = rules.activations["batch"]
    if ISLAND in axes_of(entry)[1:]:
        other_axes = tuple(axis for axis in axes_of(entry) if axis != ISLAND)
        yield (
            f"rules.activations['batch']={entry!r}: {ISLAND} is the outermost axis; set it to "
            f"{(ISLAND, *other_axes)!r}"
        )


def _step_problems(config: TrainConfig) -> Iterator[str]:
    outer_steps = config.diloco.outer_steps
    steps = config.train.steps
    if outer_steps < 0 or steps % outer_steps == 0:
        return
    below = steps // outer_steps * outer_steps
    fitting = f"{below} or {below + outer_steps}" if below else str(outer_steps)
    yield (
        f"train.steps={steps} is not a multiple of diloco.outer_steps={outer_steps}: the last "
        f"steps would not count; it can be {fitting}"
    )


def _unsupported(config: TrainConfig) -> Iterator[str]:
    rules = config.rules
    setting = f"diloco.outer_steps={config.diloco.outer_steps}"
    if config.mesh.pipeline > 1:
        yield (
            f"{setting}: an island cannot have pipeline stages yet, and "
            f"mesh.pipeline={config.mesh.pipeline}; set mesh.pipeline=1, and use mesh.fsdp"
        )
    for kind in ("params", "optimizer"):
        for row, entry in rules.column(kind).items():
            if row.rpartition("/")[2] != FLAT or not entry:
                continue
            if kind == "optimizer" and rules.params.get(row):
                continue  # reported for params
            yield (
                f"{setting}: the state of islands cannot be flat vectors yet, and "
                f"rules.{kind}[{row!r}]={entry!r}; use diloco with ddp, zero1, zero2, fsdp or hsdp"
            )
    if rules.reduction == "int8":
        yield (
            f"{setting}: islands do not keep the error feedback of sums in int8 yet, and "
            "rules.reduction='int8'; use +reduce_bfloat16, or rules without +reduce_int8"
        )
    if config.health.rewinds:
        yield (
            f"{setting}: islands skip steps on their own, so a run cannot roll back as one, and "
            f"health.rewinds={config.health.rewinds}; set health.rewinds=0; a step that is not "
            "finite is skipped on its island only"
        )
    if config.checkpoint.local:
        yield (
            f"{setting}: node-local checkpoints do not know islands yet; leave checkpoint.local "
            "empty, and save to the output"
        )
