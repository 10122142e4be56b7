"""The time of a schedule under three clocks, its bubble, and what it keeps in memory. Imports no
jax.

Clocks, from the least to the most coupled:
  async a stage waits only for the inputs of its next op neighbour a stage starts a tick when it and
  its neighbours in the ring have ended the last one, as with send and receive lockstep all stages
  start a tick together
An SPMD program that communicates in each tick is between the last two. Transfers take no time here:
they are assumed to be hidden.
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
    """Times for one microbatch, in any unit. forward and backward are those of one stage, divided
    evenly among its chunks.

    Raises ConfigError for times that are not positive, and for a weight_share outside of 0 to 1.
    """

    forward: float = 1.0
    backward: float = 2.0
    """The backward pass, including a recomputed forward pass (remat, or a stash of inputs only):
    then 3, counting matmuls only."""
    weight_share: float = 0.5
    """The fraction of backward that is W, in a schedule that splits it."""
    embed: float = 0.0
    """Additional time of the first virtual stage in F; its backward takes backward / forward times
    as long."""
    head: float = 0.0
    """Forward pass of head and loss, in the B of the last virtual stage, with a backward of twice
    that; in F if there is no B."""

    def __post_init__(self) -> None:
        for field in ("forward", "backward"):
            if not 0 < (value := getattr(self, field)) < float("inf"):
                raise ConfigError(f"{field}={value:g} must be above 0")
        for field, most in (("weight_share", 1.0), ("embed", float("inf")), ("head", float("inf"))):
            if not 0 <= (value := getattr(self, field)) <= most or value == float("inf"):
                raise ConfigError(
                    f"{field}={value:g} must be at least 0"
                    + (" and at most 1" if most == 1 else "")
                )

    def of(self, op: Op, schedule: Schedule) -> float:
        """The time that an op takes."""
        kind, _, s = op
        first, last = s == 0, s == schedule.n_virtual - 1
        if kind == "F":
            return (
                self.forward / schedule.chunks
                + first * self.embed
                + last * self.head * (schedule.kinds == "F")
            )
        backward = (
            self.backward / schedule.chunks + first * self.embed * self.backward / self.forward
        )
        if kind == "W":
            return backward * self.weight_share
        return backward * (1 - self.weight_share * ("W" in schedule.kinds)) + last * 3 * self.head


@dataclasses.dataclass(frozen=True)
class Timeline:
    """The start and end of each op of a schedule, under one clock."""

    schedule: Schedule
    clock: Clock
    spans: Mapping[Op, tuple[float, float]]
    """(start, end) of each op in the unit of `Durations`, from 0; without dropped ops."""

    @property
    def span(self) -> float:
        """Time from the first start to the last end."""
        return max(end for _, end in self.spans.values())

    @property
    def busy(self) -> tuple[float, ...]:
        """Time that each stage computes."""
        total = [0.0] * self.schedule.stages
        for op, (start, end) in self.spans.items():
            total[op.virtual % len(total)] += end - start
        return tuple(total)

    @property
    def bubble(self) -> float:
        """Idle time divided by compute time, of the busiest stage: 0.1 means that the step takes 10
        % longer than that stage computes.
        """
        return self.span / max(self.busy) - 1


def timeline(
    schedule: Schedule,
    durations: Durations,
    clock: Clock = "lockstep",
    *,
    drop_last_forward: bool = False,
) -> Timeline:
    """The timeline of a valid schedule.

    drop_last_forward: as in `compile_table`: the last virtual stage has no F if there is a B.
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
        start = max(
            [free[stage], *(spans[needed][1] for needed, _ in needs(op, schedule.n_virtual))]
        )
        free[stage] = start + lengths[op]
        spans[op] = (start, free[stage])
    return spans


def _by_tick(
    schedule: Schedule, lengths: Mapping[Op, float], clock: Clock
) -> dict[Op, tuple[float, float]]:
    work = np.zeros((schedule.n_ticks, schedule.stages))
    before: dict[Op, float] = {}
    for op, tick in schedule.in_order():
        before[op] = work[tick, op.virtual % schedule.stages]
        work[tick, op.virtual % schedule.stages] += lengths[op]
    starts = np.zeros_like(work)
    for tick in range(1, schedule.n_ticks):
        ends = starts[tick - 1] + work[tick - 1]
        starts[tick] = (
            ends.max()
            if clock == "lockstep"
            else np.maximum(ends, np.maximum(np.roll(ends, 1), np.roll(ends, -1)))
        )
    begin = {
        op: float(starts[tick, op.virtual % schedule.stages] + before[op])
        for op, tick in schedule.ticks.items()
    }
    return {op: (start, start + lengths[op]) for op, start in begin.items()}


def in_flight(schedule: Schedule) -> tuple[int, ...]:
    """For each stage, the maximum number of passes in flight: forward started, last backward op not
    ended. 0 without backward.
    """
    final = schedule.kinds[-1]
    now, most = [0] * schedule.stages, [0] * schedule.stages
    for op, _ in schedule.in_order() if final != "F" else ():
        stage = op.virtual % schedule.stages
        now[stage] += (op.kind == "F") - (op.kind == final)
        most[stage] = max(most[stage], now[stage])
    return tuple(most)


def stash_bytes(table: Table, input_bytes: int) -> int:
    """Bytes of the stashes of inputs and gradients on each device, if one input of a stage takes
    `input_bytes`.
    """
    return (table.n_inputs + table.n_grads) * input_bytes
