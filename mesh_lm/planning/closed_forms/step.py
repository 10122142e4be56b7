"""The collectives of one train step of a decoder under a strategy.

Not here, because below 1 KiB or nearly so: scalars (loss sums, label weight, gradient norm),
attention sinks and q/k norms.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

from mesh_lm.planning.closed_forms.context import context_forms
from mesh_lm.planning.closed_forms.experts import expert_forms
from mesh_lm.planning.closed_forms.fsdp import fsdp_forms
from mesh_lm.planning.closed_forms.replicas import outer_forms, replica_forms
from mesh_lm.planning.closed_forms.sizes import dtype_of, sizes
from mesh_lm.planning.closed_forms.stages import stage_forms
from mesh_lm.planning.closed_forms.subjects import Decoder, Step, Strategy
from mesh_lm.planning.closed_forms.tensor import tensor_forms
from mesh_lm.planning.closed_forms.tensor_2d import tensor_2d_forms
from mesh_lm.planning.closed_forms.terms import Form, Per, Term


def expected(model: Decoder, strategy: Strategy, sequences: int, microbatches: int) -> list[Term]:
    """Returns the collectives of one step, without groups of one device.

    sequences: of one microbatch on one batch shard. Raises NoFormError.
    """
    step = Step(model, strategy, sequences, microbatches)
    return _terms(step, _forms(step))


def expected_outer(model: Decoder, strategy: Strategy) -> list[Term]:
    """Returns the collectives of an outer step of islands."""
    return _terms(Step(model, strategy, 1, 1), outer_forms())


def _terms(step: Step, forms: Iterable[Form]) -> list[Term]:
    """Returns the terms of forms over more than one device."""
    strategy = step.strategy
    runs = _runs(step)
    bytes_of = sizes(step)
    terms = []
    for form in forms:
        form = _with_idle_slots(step, runs, form)
        axes = strategy.used(form.axes)
        payload = bytes_of[form.size]
        if axes and form.count and payload:
            terms.append(_term(form, axes, strategy, payload, runs[form.per]))
    return terms


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
    yield from expert_forms(step)


def _runs(step: Step) -> dict[Per, int]:
    """Returns what a form counts by -> how often a step has it."""
    model = step.model
    strategy = step.strategy
    microbatches = step.microbatches
    forward, backward = strategy.ticks(microbatches)
    recomputed = model.layers if model.recomputed is None else model.recomputed
    return {
        "forward": step.chunk_layers * forward,
        "backward": step.chunk_layers * backward,
        "recompute": microbatches * recomputed,
        "gather": microbatches * _gathers(model),
        "regather": microbatches * _regathers(model),
        "microbatch": microbatches,
        "chunk": step.loss_chunks * microbatches,
        "forward tick": strategy.forward_hops(microbatches),
        "backward tick": backward,
        "row": step.stage_layers,
        "step": 1,
    }


def _gathers(model: Decoder) -> int:
    """Returns the gathers of a microbatch's forward pass, besides the first layer's: of the next
    layer's matrices, and in the last layer of its own for the backward pass.

    A layer that keeps its matrices does that in vain, which XLA sees where it is not in a loop.
    """
    is_looped = not model.unrolled and model.kept != 1
    return model.layers if is_looped or not model.kept else model.layers - 1


def _regathers(model: Decoder) -> int:
    """Returns the gathers of a microbatch's backward pass: of layers that have not kept their
    matrices, but for the last layer, and one before the first of these.

    In a loop the first layer gathers in vain.
    """
    if model.kept == model.layers:
        return 0
    n_layers = model.layers - model.kept
    in_vain = 0 if model.unrolled else 1
    return n_layers - 1 + in_vain + (model.kept > 0)


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
    times = form.count * runs * form.share
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
        times=round(times),
        why=form.why,
        needed=form.needed,
        excess=form.excess,
    )
