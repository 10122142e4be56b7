"""How long a schedule takes under three clocks, how much of that is waiting, and what it keeps in memory. Imports no jax.

Clocks, from the least to the most coupled:
  async      a stage waits for what its next op needs, and for nothing else
  neighbour  a stage starts a tick when it and its neighbours in the ring have ended the last, as in send and receive
  lockstep   all stages start a tick together
One program on all devices that sends in each tick is between the last two. Transfers take no time here: compute is to hide them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Literal, get_args

import numpy as np

from mesh_lm.errors import ConfigError
from mesh_lm.schedules.schedule import Op, Schedule, needs
from mesh_lm.schedules.table import Table

Clock = Literal["async", "neighbour", "lockstep"]
CLOCKS: tuple[Clock, ...] = get_args(Clock)


@dataclasses.dataclass(frozen=True)
class Durations:
    """Time for one microbatch, in any unit. forward and backward are of one stage, which its chunks share evenly.

    Raises ConfigError for times that are not positive, and for a weight_share outside of 0 to 1.
    """

    forward: float = 1.0
    backward: float = 2.0
    """With the forward pass that it repeats, where there is remat or a stash of inputs only: 3 then, for matmuls alone."""
    weight_share: float = 0.5
    """The part of backward that is W in a schedule that splits it."""
    embed: float = 0.0
    """What the first virtual stage does besides: in its F, and backward / forward times as long in its backward pass."""
    head: float = 0.0
    """The forward pass of head and loss: in the last virtual stage's B, with its backward pass of twice that; without B, in its F."""

    def __post_init__(self) -> None:
        for field in ("forward", "backward"):
            if not 0 < (value := getattr(self, field)) < float("inf"):
                raise ConfigError(f"{field}={value:g} must be above 0")
        for field, most in (("weight_share", 1.0), ("embed", float("inf")), ("head", float("inf"))):
            if not 0 <= (value := getattr(self, field)) <= most or value == float("inf"):
                raise ConfigError(f"{field}={value:g} must be at least 0" + (" and at most 1" if most == 1 else ""))

    def of(self, op: Op, schedule: Schedule) -> float:
        """How long an op takes."""
        kind, _, s = op
        first, last = s == 0, s == schedule.n_virtual - 1
        if kind == "F":
            return self.forward / schedule.chunks + first * self.embed + last * self.head * (schedule.kinds == "F")
        backward = self.backward / schedule.chunks + first * self.embed * self.backward / self.forward
        if kind == "W":
            return backward * self.weight_share
        return backward * (1 - self.weight_share * ("W" in schedule.kinds)) + last * 3 * self.head


@dataclasses.dataclass(frozen=True)
class Timeline:
    """When each op starts and ends. `clock` is the one it was made with."""

    schedule: Schedule
    clock: Clock
    spans: Mapping[Op, tuple[float, float]]
    """In the unit of `Durations`, from 0; without the ops that are dropped."""

    @property
    def span(self) -> float:
        """From the first start to the last end."""
        return max(end for _, end in self.spans.values())

    @property
    def busy(self) -> tuple[float, ...]:
        """How long each stage computes."""
        total = [0.0] * self.schedule.stages
        for op, (start, end) in self.spans.items():
            total[op.virtual % len(total)] += end - start
        return tuple(total)

    @property
    def bubble(self) -> float:
        """Waiting over work, on the stage that has the most work: 0.1 means that the step takes 10 % longer than that stage computes."""
        return self.span / max(self.busy) - 1


def timeline(schedule: Schedule, durations: Durations, clock: Clock = "lockstep", *, drop_last_forward: bool = False) -> Timeline:
    """A valid schedule in time.

    drop_last_forward: as in `compile_table`: the last virtual stage has no F of its own where there is a B.
    """
    last = schedule.n_virtual - 1
    drop = drop_last_forward and "B" in schedule.kinds
    dropped = {op for op in schedule.ticks if drop and op.kind == "F" and op.virtual == last}
    lengths = {op: 0.0 if op in dropped else durations.of(op, schedule) for op in schedule.ticks}
    spans = _async(schedule, lengths) if clock == "async" else _by_tick(schedule, lengths, clock)
    return Timeline(schedule, clock, {op: span for op, span in spans.items() if op not in dropped})


def _async(schedule: Schedule, lengths: Mapping[Op, float]) -> dict[Op, tuple[float, float]]:
    free = [0.0] * schedule.stages
    spans: dict[Op, tuple[float, float]] = {}
    for op, _ in schedule.in_order():
        stage = op.virtual % schedule.stages
        start = max([free[stage], *(spans[needed][1] for needed, _ in needs(op, schedule.n_virtual))])
        free[stage] = start + lengths[op]
        spans[op] = (start, free[stage])
    return spans


def _by_tick(schedule: Schedule, lengths: Mapping[Op, float], clock: Clock) -> dict[Op, tuple[float, float]]:
    work = np.zeros((schedule.n_ticks, schedule.stages))
    before: dict[Op, float] = {}
    for op, tick in schedule.in_order():
        before[op] = work[tick, op.virtual % schedule.stages]
        work[tick, op.virtual % schedule.stages] += lengths[op]
    starts = np.zeros_like(work)
    for tick in range(1, schedule.n_ticks):
        ends = starts[tick - 1] + work[tick - 1]
        starts[tick] = ends.max() if clock == "lockstep" else np.maximum(ends, np.maximum(np.roll(ends, 1), np.roll(ends, -1)))
    begin = {op: float(starts[tick, op.virtual % schedule.stages] + before[op]) for op, tick in schedule.ticks.items()}
    return {op: (start, start + lengths[op]) for op, start in begin.items()}


def in_flight(schedule: Schedule) -> tuple[int, ...]:
    """For each stage, the most passes whose forward has begun and whose last backward op has not ended. 0 without backward."""
    final = schedule.kinds[-1]
    now, most = [0] * schedule.stages, [0] * schedule.stages
    for op, _ in schedule.in_order() if final != "F" else ():
        stage = op.virtual % schedule.stages
        now[stage] += (op.kind == "F") - (op.kind == final)
        most[stage] = max(most[stage], now[stage])
    return tuple(most)


def stash_bytes(table: Table, input_bytes: int) -> int:
    """Bytes that inputs and gradients in the stashes take on each device, where one input of a stage takes `input_bytes` there."""
    return (table.n_inputs + table.n_grads) * input_bytes
