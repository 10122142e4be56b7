"""The collectives of one train step: of a decoder under a strategy, or of a config.

Not here, because below 1 KiB or absent from the presets: scalars (loss sums, label weight, gradient
norm), attention sinks and q/k norms, documents kept separate (positions are then looked up), stages
of unequal layers, the expert axis, windows that end a ring early.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from mesh_lm.planning.closed_forms.context import context_forms
from mesh_lm.planning.closed_forms.fsdp import fsdp_forms
from mesh_lm.planning.closed_forms.replicas import replica_forms
from mesh_lm.planning.closed_forms.sizes import dtype_of, sizes
from mesh_lm.planning.closed_forms.stages import stage_forms
from mesh_lm.planning.closed_forms.subjects import Decoder, NoFormError, Step, Strategy
from mesh_lm.planning.closed_forms.tensor import tensor_forms
from mesh_lm.planning.closed_forms.tensor_2d import tensor_2d_forms
from mesh_lm.planning.closed_forms.terms import Form, Per, Term


def expected(model: Decoder, strategy: Strategy, sequences: int, microbatches: int) -> list[Term]:
    """Returns the collectives of one step, without groups of one device.

    sequences: of one microbatch on one batch shard. Raises NoFormError.
    """
    step = Step(model, strategy, sequences, microbatches)
    runs = _runs(step)
    bytes_of = sizes(step)
    terms = []
    for form in _forms(step):
        form = _with_idle_slots(step, runs, form)
        axes = strategy.used(form.axes)
        payload = bytes_of[form.size]
        if axes and form.count and payload:
            terms.append(_term(form, axes, strategy, payload, runs[form.per]))
    return terms


def expected_of(config: Any) -> list[Term]:
    """Returns the collectives of one step of a `mesh_lm.config.TrainConfig`, whose mesh has no axis
    of -1. Raises NoFormError for what has no form.
    """
    mesh = config.mesh
    loop = config.train
    batch_shards = mesh.data * mesh.fsdp
    sequences = loop.global_batch // (loop.microbatches * batch_shards)
    return expected(Decoder.of(config.model), _strategy_of(config), sequences, loop.microbatches)


def _strategy_of(config: Any) -> Strategy:
    mesh = config.mesh
    rules = config.rules
    pipeline = config.pipeline
    is_equal = not pipeline.layers and pipeline.balance == "equal"
    if mesh.pipeline > 1 and (pipeline.schedule != "1f1b" or not is_equal):
        raise NoFormError(
            f"no closed form for pipeline schedule {pipeline.schedule} with layers "
            f"{pipeline.layers or pipeline.balance}"
        )
    if rules.reduction == "int8" or rules.node_axis:
        raise NoFormError(f"no closed form here for {rules.name}; see closed_forms/reductions.py")
    words = rules.name.replace(" by layers", "").split("+")
    axes = mesh.sizes()
    by_layers = rules.column("optimizer").get("layers") == "data"
    return Strategy(
        preset="+".join(word for word in words if not word.startswith("reduce_")),
        data=mesh.data,
        fsdp=mesh.fsdp,
        tensor=mesh.tensor,
        zero_by="layers" if by_layers else "embed",
        pipeline=mesh.pipeline,
        virtual=pipeline.chunks,
        stash=pipeline.stash,
        reduction=rules.reduction,
        sequence=mesh.sequence,
        ulysses=axes.get("ulysses", 1),
        tensor_y=axes.get("tensor_y", 1),
    )


def _forms(step: Step) -> Iterator[Form]:
    """Yields the collectives on any mesh, those over one device as well."""
    if step.strategy.square:
        yield from tensor_2d_forms(step)
    elif step.strategy.is_tensor:
        yield from tensor_forms(step)
    yield from context_forms(step)
    yield from fsdp_forms(step)
    yield from stage_forms(step)
    yield from replica_forms(step)


def _runs(step: Step) -> dict[Per, int]:
    """Returns what a form counts by -> how often a step has it."""
    model = step.model
    strategy = step.strategy
    microbatches = step.microbatches
    forward, backward = strategy.ticks(microbatches)
    chunk_layers = step.stage_layers // strategy.virtual
    recomputed = model.layers if model.recomputed is None else model.recomputed
    regathered = model.layers - model.kept
    if 0 < model.kept < model.layers:
        regathered += 1
    return {
        "forward": chunk_layers * forward,
        "backward": chunk_layers * backward,
        "recompute": microbatches * recomputed,
        "regather": microbatches * regathered,
        "microbatch": microbatches,
        "chunk": step.loss_chunks * microbatches,
        "forward tick": forward,
        "backward tick": backward,
        "row": step.stage_layers,
        "step": 1,
    }


def _with_idle_slots(step: Step, runs: dict[Per, int], form: Form) -> Form:
    """Returns a layer's form with the part of its slots that is needed: idle stages compute, and
    send, as others do.
    """
    if not step.strategy.staged or form.per not in ("forward", "backward"):
        return form
    useful = step.microbatches * step.stage_layers / runs[form.per]
    return form._replace(
        needed=form.needed * useful, excess=form.excess or "idle slots compute, too"
    )


def _term(form: Form, axes: tuple[str, ...], strategy: Strategy, payload: float, runs: int) -> Term:
    return Term(
        part=form.part,
        kind=form.kind,
        axes=axes,
        ways=math.prod(strategy.ways(axis) for axis in axes),
        dtype=dtype_of(form.size),
        size=form.size,
        payload=payload,
        count=form.count,
        per=form.per,
        times=form.count * runs,
        why=form.why,
        needed=form.needed,
        excess=form.excess,
    )
