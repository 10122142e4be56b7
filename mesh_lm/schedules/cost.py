"""The time of a schedule under three clocks, its bubble, and what it keeps in memory. Imports no
jax.

Clocks, from the least to the most coupled:
  async      a stage waits only for the inputs of its next op
  neighbour  a stage starts a tick when it and its neighbours in the ring have ended the last one,
             as with send and receive
  lockstep   all stages start a tick together
An SPMD program that communicates in each tick is between the last two. Transfers take no time here:
they are assumed to be hidden.
"""

from __future__ import annotations

import dataclasses
import math
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
    """Times for one microbatch, in any unit.

    `forward` and `backward` are those of one stage, divided evenly among its chunks.

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
            time = getattr(self, field)
            if not 0 < time < math.inf:
                raise ConfigError(f"{field}={time:g} must be a finite time above 0")
        if not 0 <= self.weight_share <= 1:
            raise ConfigError(
                f"weight_share={self.weight_share:g} must be at least 0 and at most 1"
            )
        for field in ("embed", "head"):
            time = getattr(self, field)
            if not 0 <= time < math.inf:
                raise ConfigError(f"{field}={time:g} must be a finite time of at least 0")

    def of(self, op: Op, schedule: Schedule) -> float:
        """Returns the time that an op takes."""
        embed = self.embed if op.virtual == 0 else 0.0
        head = self.head if op.virtual == schedule.n_virtual - 1 else 0.0
        if op.kind == "F":
            forward = self.forward / schedule.chunks + embed
            return forward + head if schedule.kinds == "F" else forward

        backward = self.backward / schedule.chunks + embed * self.backward / self.forward
        if op.kind == "W":
            return backward * self.weight_share
        if "W" in schedule.kinds:
            backward *= 1 - self.weight_share
        return backward + 3 * head  # the head's forward, and a backward of twice that


@dataclasses.dataclass(frozen=True)
class Timeline:
    """The start and end of each op of a schedule, under one clock."""

    schedule: Schedule
    clock: Clock
    spans: Mapping[Op, tuple[float, float]]
    """(start, end) of each op in the unit of `Durations`, from 0; without dropped ops."""

    @property
    def span(self) -> float:
        """The time from the first start to the last end."""
        return max(end for _, end in self.spans.values())

    @property
    def busy(self) -> tuple[float, ...]:
        """The time that each stage computes."""
        times = [0.0] * self.schedule.stages
        for op, (start, end) in self.spans.items():
            times[op.virtual % len(times)] += end - start
        return tuple(times)

    @property
    def bubble(self) -> float:
        """Idle time divided by compute time, of the busiest stage.

        0.1 means that the step takes 10 % longer than that stage computes.
        """
        return self.span / max(self.busy) - 1


def timeline(
    schedule: Schedule,
    durations: Durations,
    clock: Clock = "lockstep",
    *,
    drop_last_forward: bool = False,
) -> Timeline:
    """Returns the timeline of a valid schedule.

    drop_last_forward: as in `compile_table`: the last virtual stage has no F if there is a B.
    """
    dropped: set[Op] = set()
    if drop_last_forward and "B" in schedule.kinds:
        last = schedule.n_virtual - 1
        dropped = {op for op in schedule.ticks if op.kind == "F" and op.virtual == last}
    lengths = {op: 0.0 if op in dropped else durations.of(op, schedule) for op in schedule.ticks}
    if clock == "async":
        starts = _async_starts(schedule, lengths)
    else:
        starts = _tick_starts(schedule, lengths, clock)
    spans = {op: (start, start + lengths[op]) for op, start in starts.items() if op not in dropped}
    return Timeline(schedule, clock, spans)


def _async_starts(schedule: Schedule, lengths: Mapping[Op, float]) -> dict[Op, float]:
    """The start of each op, as soon as its stage is free and its inputs are there."""
    free_times = [0.0] * schedule.stages
    starts: dict[Op, float] = {}
    for op, _ in schedule.in_order():
        stage = op.virtual % schedule.stages
        start = free_times[stage]
        for needed, _ in needs(op, schedule.n_virtual):
            start = max(start, starts[needed] + lengths[needed])
        free_times[stage] = start + lengths[op]
        starts[op] = start
    return starts


def _tick_starts(schedule: Schedule, lengths: Mapping[Op, float], clock: Clock) -> dict[Op, float]:
    """The start of each op, if stages wait for all others or for their neighbours in each tick."""
    work = np.zeros((schedule.n_ticks, schedule.stages))
    offsets: dict[Op, float] = {}  # from the start of the op's tick
    for op, tick in schedule.in_order():
        stage = op.virtual % schedule.stages
        offsets[op] = work[tick, stage]
        work[tick, stage] += lengths[op]

    tick_starts = np.zeros_like(work)
    for tick in range(1, schedule.n_ticks):
        ends = tick_starts[tick - 1] + work[tick - 1]
        if clock == "lockstep":
            tick_starts[tick] = ends.max()
        else:
            neighbours = np.maximum(np.roll(ends, 1), np.roll(ends, -1))
            tick_starts[tick] = np.maximum(ends, neighbours)
    return {
        op: float(tick_starts[tick, op.virtual % schedule.stages] + offsets[op])
        for op, tick in schedule.ticks.items()
    }


def in_flight(schedule: Schedule) -> tuple[int, ...]:
    """Returns the maximum number of passes in flight on each stage, 0 without backward.

    A pass is in flight from the start of its forward to the end of its last backward op.
    """
    most = [0] * schedule.stages
    last_kind = schedule.kinds[-1]
    if last_kind == "F":
        return tuple(most)
    n_passes = [0] * schedule.stages
    for op, _ in schedule.in_order():
        stage = op.virtual % schedule.stages
        n_passes[stage] += (op.kind == "F") - (op.kind == last_kind)
        most[stage] = max(most[stage], n_passes[stage])
    return tuple(most)


def stash_bytes(table: Table, input_bytes: int) -> int:
    """Returns the bytes of the stashes of inputs and gradients on each device.

    input_bytes: the bytes of one input of a stage.
    """
    return (table.n_inputs + table.n_grads) * input_bytes
