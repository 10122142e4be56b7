"""Pipelines that cannot run, and rules with which their stages would deadlock."""

from __future__ import annotations

from collections.abc import Iterator

from mesh_lm.config import TrainConfig
from mesh_lm.errors import ConfigError
from mesh_lm.parallel.engine import training_schedule
from mesh_lm.parallel.layout import divided
from mesh_lm.schedules.segments import Stack
from sharding_rules import axes_of
from sharding_rules.owner import owner_axes
from sharding_rules.rules import Kind


def pipeline_problems(config: TrainConfig) -> Iterator[str]:
    """Yields contradictions of the section `pipeline`, and why the layers or the microbatches do
    not fit it.
    """
    n_stages = config.mesh.pipeline
    pipeline = config.pipeline
    if pipeline.pair_layers and n_stages == 1:
        yield (
            "pipeline.pair_layers=True, but mesh.pipeline=1 has no stage that goes forward and "
            "backward in one tick; set it to False"
        )
    if pipeline.pair_layers and pipeline.stash == "input":
        yield (
            "pipeline.pair_layers=True runs layers one by one, whose residuals "
            "pipeline.stash=input drops; set pipeline.stash=residuals"
        )
    if n_stages == 1 or config.model.problems():
        return
    stack = config.model.stack()
    if stack.problems() or pipeline.chunks < 1 or config.train.microbatches < 1:
        return
    if pipeline.stash == "residuals":
        yield from _offload_problems(stack)
    for kind in ("params", "gradients", "optimizer"):
        entry = config.rules.column(kind).get("layers")
        if kind != "params" and owner_axes(config.rules, kind):
            continue  # see `owner_problems`
        if axes_of(entry) != ("pipeline",):
            yield (
                f"mesh.pipeline={n_stages}, but rules.{kind}['layers']={entry!r}; "
                "set this row to 'pipeline'"
            )
    try:
        divided(config.model, pipeline, n_stages)
    except ConfigError as error:
        yield str(error)
    try:
        training_schedule(pipeline, n_stages, config.train.microbatches)
    except ConfigError as error:
        yield str(error)


def _offload_problems(stack: Stack) -> Iterator[str]:
    offloaded = [segment.name for segment in stack.segments if segment.remat == "offload"]
    if not offloaded:
        return
    setting = f"remat=offload of segment {offloaded[0]!r}"
    if len(offloaded) == len(stack.segments):
        setting = "model.remat=offload"
    yield (
        f"pipeline.stash=residuals keeps on the device what {setting} moves to the host; change "
        "one of them"
    )


def permute_problems(config: TrainConfig) -> Iterator[str]:
    """Yields rules with which XLA would permute weights among devices. In a pipeline this
    deadlocks, as some stages skip the branch.
    """
    rules = config.rules
    mesh = config.mesh.sizes()
    if mesh["pipeline"] == 1:
        return
    auto_axes = set(mesh) - rules.manual_axes()

    def sharding_axes(kind: Kind, logical: str) -> tuple[str, ...]:
        row = rules.row(kind, logical)
        entry = rules.column(kind)[row] if row else None
        return tuple(axis for axis in axes_of(entry) if axis in auto_axes and mesh[axis] > 1)

    def deadlock(settings: str) -> str:
        return (
            f"mesh.pipeline={mesh['pipeline']}: {settings}; XLA would permute arrays in a branch "
            "that some stages skip, and deadlock"
        )

    for row in dict.fromkeys([*rules.params, *rules.column("gathered"), *rules.activations]):
        stored = sharding_axes("params", row)
        gathered = sharding_axes("gathered", row)
        activations = sharding_axes("activations", row)
        if stored[: len(gathered)] != gathered:
            yield deadlock(
                f"rules.params[{row!r}]={stored} "
                f"does not start with rules.gathered[{row!r}]={gathered}"
            )
        elif activations[: len(gathered)] != gathered[: len(activations)]:
            yield deadlock(
                f"rules.activations[{row!r}]={activations} and rules.gathered[{row!r}]={gathered} "
                "differ in the axes that they start with"
            )
    default = sharding_axes("activations", "seq_resid")
    for row in rules.activations:
        if not row.endswith("/seq_resid"):
            continue
        scoped = sharding_axes("activations", row)
        if scoped[: len(default)] != default[: len(scoped)]:
            yield deadlock(
                f"rules.activations[{row!r}]={scoped} and rules.activations['seq_resid']={default} "
                "do not start with the same axes"
            )
