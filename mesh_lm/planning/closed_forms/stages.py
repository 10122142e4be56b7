"""What pipeline stages send: hops around the ring of stages, and the sums of what every stage has,
over stages and replicas at once.

Stages differ at the ends: of each collective it is the stage that runs it most.
"""

from __future__ import annotations

from collections.abc import Iterator

from mesh_lm.planning.closed_forms.replicas import (
    FP32_WEIGHTS,
    FULL_SUM,
    ZERO_WEIGHTS,
    needed_of_zero,
    stepwise_sums,
    vector_forms,
)
from mesh_lm.planning.closed_forms.subjects import Step
from mesh_lm.planning.closed_forms.terms import REPLICAS, Form, Group

HOP = Group("hop", ("pipeline",))
SHARED = ("pipeline", *REPLICAS)
"""The axes over which what every stage has is summed."""
GRADIENTS = Group("gradients", SHARED)

_IDLE = "idle stages send, too"
_SUMMED = "gradients of what every stage has, summed once after the last microbatch"
_TABLES = f"{_SUMMED}: tables and positions"
_LAST_NORM = f"{_SUMMED}: the last norm"


def stage_forms(step: Step) -> Iterator[Form]:
    """Yields the collectives over pipeline; none without stages."""
    strategy = step.strategy
    if not strategy.staged:
        return
    yield from _hops(step)
    if strategy.distributed:
        why = f"{_TABLES}, each part where its moments are"
        yield from vector_forms(strategy, SHARED, "J", "step", why)
        yield GRADIENTS.all_reduce("S-Y", 1, "step", _LAST_NORM)
    else:
        yield from _whole_tables(step)


def _hops(step: Step) -> Iterator[Form]:
    strategy = step.strategy
    work = step.microbatches * strategy.virtual
    # With two stages, the last one of the model sends to itself every other time.
    needed = work if strategy.pipeline > 2 else work - step.microbatches / 2
    forward = strategy.forward_hops(step.microbatches)
    _, backward = strategy.ticks(step.microbatches)
    why = "forward: a stage's output, to the next one"
    yield HOP.permute("H", 1, "forward tick", why, needed / forward, _IDLE)
    why = "backward: the gradient of a stage's input, to the one before"
    yield HOP.permute("H", 1, "backward tick", why, needed / backward, _IDLE)


def _whole_tables(step: Step) -> Iterator[Form]:
    """Yields the sums of tables, positions and the last norm that every stage has in full.

    Half of an all-reduce is the reduce-scatter; the other half gives all replicas what was summed,
    and in vain if ZeRO shards it.
    """
    strategy = step.strategy
    yield from _table_sums(step)
    if strategy.zero and strategy.zero_by == "embed" and strategy.data > 1:
        needed = needed_of_zero(strategy, strategy.pipeline * strategy.replicas)
        why = "new tables and positions, on every stage"
        yield ZERO_WEIGHTS.all_gather("Y", 1, "step", why, needed, FP32_WEIGHTS)


def _table_sums(step: Step) -> Iterator[Form]:
    strategy = step.strategy
    in_bf16 = strategy.reduction == "bfloat16"
    cuts_tables = bool(strategy.zero) and strategy.zero_by == "embed"
    if not in_bf16 and not cuts_tables and not strategy.sums_in_steps:
        yield GRADIENTS.all_reduce("S", 1, "step", _SUMMED, 0.75, FULL_SUM)
        return

    tables = "Y/2" if in_bf16 else "Y"
    if strategy.sums_in_steps:
        yield from stepwise_sums(strategy, SHARED, "t", _TABLES)
    elif cuts_tables and strategy.data > 1:
        excess = "reduce-scattered over stages and replicas, it would be half"
        yield GRADIENTS.all_reduce(tables, 1, "step", _TABLES, 0.5, excess)
    elif in_bf16:
        yield GRADIENTS.all_reduce(tables, 1, "step", _TABLES)
    else:
        yield GRADIENTS.all_reduce(tables, 1, "step", _TABLES, 0.75, FULL_SUM)
    yield GRADIENTS.all_reduce("S-Y", 1, "step", _LAST_NORM)
