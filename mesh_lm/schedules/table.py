"""A schedule as the integers that the engine reads: what runs in each slot, and the stash slots of
its inputs and outputs.

A tick of the engine, on every stage at once:
  1. the gradient that the next stage sent in the last tick arrives, in slot `receive_grad`
  2. F slot: reads input `forward_input`, writes residual `forward_residual`; sends its output to
     the next stage
  3. B slot: reads input `backward_input`, gradient `backward_grad`, residual `backward_residual`;
     sends its gradient to the previous stage
  4. the output of the previous stage's F slot arrives, in slot `receive_input`
So an input slot that B reads can be written in the same tick, and the transfers of 1 and 4 overlap
with the F and the B slot.
"""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Mapping

import numpy as np

from mesh_lm.errors import ConfigError
from mesh_lm.schedules.schedule import Op, Schedule

COLUMNS = (
    "forward_microbatch", "forward_chunk", "forward_input", "forward_residual", "receive_input",
    "backward_microbatch", "backward_chunk", "backward_input", "backward_grad", "backward_residual",
    "receive_grad",
    "forward_output", "backward_output",
)  # fmt: skip
_Intervals = dict[tuple[int, int], tuple[int, int]]
"""(microbatch, virtual stage) -> the first and the last tick in which its slot is in use."""


@dataclasses.dataclass(frozen=True)
class Table:
    """A compiled schedule. Slots are numbered from 0 on each stage; -1 means idle, or nothing to
    read or write.
    """

    stages: int
    microbatches: int
    chunks: int
    ticks: int
    n_inputs: int
    """Slots for inputs of virtual stages, on the stage that needs the most."""
    n_grads: int
    """Slots for gradients of outputs of virtual stages."""
    n_residuals: int
    """Slots for the residuals that a forward pass saves for its backward pass."""
    n_outputs: int
    """Slots for outputs of the last virtual stage that wait for the loss, if slots run side by
    side."""
    columns: Mapping[str, np.ndarray]
    """`COLUMNS`, each int32 [ticks, stages]. An input of -1 comes from the embedding, a
    backward_grad of -1 from the head."""

    def loops(self) -> list[tuple[str, slice]]:
        """The loops that run the ticks, in order: the slots that each has, "F", "FB" or "B", and
        its ticks.

        A loop has the slots that some stage needs between its first and its last tick.
        """
        forward, backward = (
            np.flatnonzero(np.any(self.columns[f"{slot}_microbatch"] >= 0, axis=1))
            for slot in ("forward", "backward")
        )
        first = min(backward, default=self.ticks)
        end = max(first, max(forward, default=-1) + 1)
        parts = ("F", slice(0, first)), ("FB", slice(first, end)), ("B", slice(end, self.ticks))
        return [(slots, ticks) for slots, ticks in parts if ticks.stop > ticks.start]


def compile_table(
    schedule: Schedule, drop_last_forward: bool = True, side_by_side: bool = False
) -> Table:
    """The table of a valid schedule, with the fewest slots that its ticks allow.

    Args:
      drop_last_forward: whether the last virtual stage has no F, since its B recomputes it, as each
      B does with a stash of inputs only. side_by_side: whether the two slots of a tick run at the
      same time. Then B does not read what F writes in its tick: where it would,
        all B's come one tick later. B reads no inputs, and the last virtual stage's B, which
        computes the loss, reads that stage's output.

    Raises ConfigError for a schedule that splits the backward pass: the engine has no slot for
    weight gradients.
    """
    if "W" in schedule.kinds:
        raise ConfigError(
            f"pipeline schedule {schedule.name} computes weight gradients separately (W); the "
            "engine runs F and B only"
        )
    at, last, stages = schedule.ticks, schedule.n_virtual - 1, schedule.stages
    backward = "B" in schedule.kinds
    if backward and drop_last_forward:
        at = _without_idle_ticks(
            {op: tick for op, tick in at.items() if op.kind == "B" or op.virtual < last}
        )
    if side_by_side and any(
        at.get(Op("F", op.microbatch, op.virtual)) == tick
        for op, tick in at.items()
        if op.kind == "B"
    ):
        at = {op: tick + (op.kind == "B") for op, tick in at.items()}
    final = "B" if backward and not side_by_side else "F"
    passes = [(m, s) for s in range(last + 1) for m in range(schedule.microbatches)]
    inputs = {(m, s): (at[Op("F", m, s - 1)] + 1, at[Op(final, m, s)]) for m, s in passes if s}
    grads = {
        (m, s): (at[Op("B", m, s + 1)] + 1, at[Op("B", m, s)])
        for m, s in passes
        if s < last and backward
    }
    residuals = {
        (m, s): (at[Op("F", m, s)], at[Op("B", m, s)])
        for m, s in passes
        if backward and Op("F", m, s) in at
    }
    input_slot, n_inputs = _allocate(inputs, stages)
    grad_slot, n_grads = _allocate(grads, stages)
    residual_slot, n_residuals = _allocate(residuals, stages)
    output_slot, n_outputs = _allocate(
        {(m, s): ticks for (m, s), ticks in residuals.items() if s == last and side_by_side}, stages
    )

    ticks = max(at.values()) + 1
    columns = {name: np.full((ticks, stages), -1, np.int32) for name in COLUMNS}
    for (kind, m, s), tick in at.items():
        slots = {
            "microbatch": m,
            "chunk": s // stages,
            "residual": residual_slot.get((m, s), -1),
            "output": output_slot.get((m, s), -1),
        }
        if kind == "B":
            slots["grad"] = grad_slot.get((m, s), -1)
        if kind == "F" or not side_by_side:
            slots["input"] = input_slot.get((m, s), -1)
        for name, value in slots.items():
            columns[f"{'forward' if kind == 'F' else 'backward'}_{name}"][tick, s % stages] = value
    for (m, s), slot in input_slot.items():
        columns["receive_input"][at[Op("F", m, s - 1)], s % stages] = slot
    for (m, s), slot in grad_slot.items():
        columns["receive_grad"][at[Op("B", m, s + 1)] + 1, s % stages] = slot
    return Table(
        stages,
        schedule.microbatches,
        schedule.chunks,
        ticks,
        n_inputs,
        n_grads,
        n_residuals,
        n_outputs,
        columns,
    )


def _without_idle_ticks(at: Mapping[Op, int]) -> dict[Op, int]:
    """The same order without ticks in which all stages are idle."""
    number = {tick: new for new, tick in enumerate(sorted(set(at.values())))}
    return {op: number[tick] for op, tick in at.items()}


def _allocate(intervals: _Intervals, stages: int) -> tuple[dict[tuple[int, int], int], int]:
    """(a slot for each interval, the number of slots on the stage that needs the most).

    Linear-scan register allocation (Poletto and Sarkar, 1999); without spilling it uses the fewest
    slots possible.
    """
    slots: dict[tuple[int, int], int] = {}
    free: list[list[int]] = [[] for _ in range(stages)]
    busy: list[list[tuple[int, int]]] = [[] for _ in range(stages)]
    count = [0] * stages
    for key, (start, end) in sorted(intervals.items(), key=lambda item: item[1]):
        stage = key[1] % stages
        while busy[stage] and busy[stage][0][0] < start:
            heapq.heappush(free[stage], heapq.heappop(busy[stage])[1])
        if not free[stage]:
            heapq.heappush(free[stage], count[stage])
            count[stage] += 1
        slots[key] = heapq.heappop(free[stage])
        heapq.heappush(busy[stage], (end, slots[key]))
    return slots, max(count)
