"""The collectives of one train step of a config, or what in it has no closed form."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mesh_lm.planning.closed_forms.step import expected, expected_outer
from mesh_lm.planning.closed_forms.subjects import Decoder, NoFormError, Strategy
from mesh_lm.planning.closed_forms.terms import Term
from mesh_lm.schedules.stages import divide

_SCHEDULES = ("1f1b", "gpipe", "classic_1f1b")
_OWNER = "owner"  # the word of `sharding_rules.owner`, which needs JAX; the formulas do without it
_ELEMENTWISE_RULES = ("AdamW", "Lion")
"""Classes of optimizer rules that update each element by itself, and so send nothing."""


def expected_of(config: Any) -> list[Term]:
    """Returns the collectives of one step of a `mesh_lm.config.TrainConfig`, whose mesh has no axis
    of -1.

    Raises NoFormError for what has no form.
    """
    _require_forms(config)
    loop = config.train
    strategy = _strategy(config)
    batch_shards = strategy.data * strategy.fsdp * strategy.node * strategy.expert * strategy.island
    sequences = loop.global_batch // (loop.microbatches * batch_shards)
    return expected(Decoder.of(config.model), strategy, sequences, loop.microbatches)


def expected_outer_of(config: Any) -> list[Term]:
    """Returns the collectives of an outer step, which comes once in `diloco.outer_steps` steps.

    There are none without islands. Raises as `expected_of`.
    """
    _require_forms(config)
    return expected_outer(Decoder.of(config.model), _strategy(config))


def models_without_form(config: Any) -> Iterator[str]:
    """Yields what in the model of a `TrainConfig` has no form, whatever its rules and its mesh."""
    model = config.model
    if not hasattr(model, "segment_configs"):
        yield f"a model of the class {type(model).__name__}"
        return
    if len(model.segment_configs()) > 1:
        yield f"{len(model.segments)} segments of layers"
    for segment in model.segment_configs():
        if segment.kind not in ("dense", "moe"):
            yield f"layers of the kind {segment.kind}"
    if model.has_experts and model.experts.shared:
        yield f"model.experts.shared={model.experts.shared}"
    if model.dtype != "bfloat16":
        yield f"model.dtype={model.dtype}"
    if model.batch_halves:
        yield "model.batch_halves"
    if config.data.documents != "joined" and model.positions == "learned":
        yield f"data.documents={config.data.documents} with learned positions, which are looked up"


def _require_forms(config: Any) -> None:
    problems = [
        *models_without_form(config),
        *_rules_without_form(config),
        *_stages_without_form(config),
    ]
    if problems:
        raise NoFormError(f"this config has no closed form for {' and '.join(problems)}")


def _rules_without_form(config: Any) -> Iterator[str]:
    rule = type(config.optimizer.rule).__name__
    sends_nothing = rule == "Muon" and _OWNER in config.rules.name.split("+")
    if rule not in _ELEMENTWISE_RULES and not sends_nothing:
        yield f"optimizer.rule={rule}"


def _stages_without_form(config: Any) -> Iterator[str]:
    if config.mesh.pipeline == 1:
        return
    pipeline = config.pipeline
    if pipeline.schedule not in _SCHEDULES:
        yield f"pipeline.schedule={pipeline.schedule}"


def _strategy(config: Any) -> Strategy:
    """Returns the strategy of a config whose rules are a product of presets."""
    mesh = config.mesh
    axes = mesh.sizes()
    words = config.rules.name.replace(" by layers", "").split("+")
    by_layers = config.rules.column("optimizer").get("layers") == "data"
    presets = [word for word in words if not word.startswith("reduce_") and word != _OWNER]
    return Strategy(
        preset="+".join(presets),
        data=mesh.data,
        fsdp=mesh.fsdp,
        tensor=mesh.tensor,
        zero_by="layers" if by_layers else "embed",
        pipeline=mesh.pipeline,
        virtual=config.pipeline.chunks,
        stash=config.pipeline.stash,
        reduction=config.rules.reduction,
        sequence=mesh.sequence,
        ulysses=axes.get("ulysses", 1),
        tensor_y=axes.get("tensor_y", 1),
        schedule=config.pipeline.schedule,
        layer_counts=_layer_counts(config),
        node=axes.get("node", 1),
        expert=axes.get("expert", 1),
        island=axes.get("island", 1),
        owner=_OWNER in words,
    )


def _layer_counts(config: Any) -> tuple[int, ...]:
    """Returns the layers of each virtual stage; empty if they are the same."""
    pipeline = config.pipeline
    stages = config.mesh.pipeline
    if stages == 1:
        return ()
    computed = config.model.stack().with_recomputation(
        stages * pipeline.chunks, pipeline.stash == "input"
    )
    stacks = divide(
        computed,
        stages,
        pipeline.chunks,
        layers=pipeline.layers,
        balance=pipeline.balance,
    )
    (stack,) = stacks.values()
    return stack.layer_counts if len(set(stack.layer_counts)) > 1 else ()
