"""A schedule as the integers that the engine reads: what runs in each slot, and the stash slots of
its inputs and outputs.

A tick of the engine, on every stage at once:
  1. The gradient that the next stage sent in the last tick arrives, in slot `receive_grad`.
  2. F slot: reads input `forward_input`, writes residual `forward_residual`, and sends its output
     to the next stage.
  3. B slot: reads input `backward_input`, gradient `backward_grad` and residual
     `backward_residual`, and sends its gradient to the previous stage.
  4. The output of the previous stage's F slot arrives, in slot `receive_input`.
So an input slot that B reads can be written in the same tick, and the transfers of 1 and 4 overlap
with the F and the B slot.
"""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from mesh_lm.errors import ConfigError
from mesh_lm.schedules.schedule import Op, Schedule

COLUMNS = (
    "forward_microbatch", "forward_chunk", "forward_input", "forward_residual", "receive_input",
    "backward_microbatch", "backward_chunk", "backward_input", "backward_grad", "backward_residual",
    "receive_grad",
    "forward_output", "backward_output",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Table:
    """A compiled schedule.

    Slots are numbered from 0 on each stage; -1 means idle, or nothing to read or write.
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
        """Returns the loops that run the ticks, in order: (slots "F", "FB" or "B", ticks).

        A loop has the slots that some stage needs between its first and its last tick.
        """
        forward_ticks = self._busy_ticks("forward")
        backward_ticks = self._busy_ticks("backward")
        first_backward = min(backward_ticks, default=self.ticks)
        end_forward = max(first_backward, max(forward_ticks, default=-1) + 1)
        loops = [
            ("F", slice(0, first_backward)),
            ("FB", slice(first_backward, end_forward)),
            ("B", slice(end_forward, self.ticks)),
        ]
        return [(slots, ticks) for slots, ticks in loops if ticks.stop > ticks.start]

    def _busy_ticks(self, slot: str) -> np.ndarray:
        return np.flatnonzero(np.any(self.columns[f"{slot}_microbatch"] >= 0, axis=1))


class _Pass(NamedTuple):
    """A microbatch at a virtual stage, forward and backward."""

    microbatch: int
    virtual: int


class _Lifetime(NamedTuple):
    """The first and the last tick in which a slot is in use."""

    first: int
    last: int


def compile_table(
    schedule: Schedule, drop_last_forward: bool = True, side_by_side: bool = False
) -> Table:
    """Returns the table of a valid schedule, with the fewest slots that its ticks allow.

    Args:
      drop_last_forward: whether the last virtual stage has no F, since its B recomputes it, as each
        B does with a stash of inputs only.
      side_by_side: whether the two slots of a tick run at the same time. Then B does not read what
        F writes in its tick: where it would, all B's come one tick later. B reads no inputs, and
        the last virtual stage's B, which computes the loss, reads that stage's output.

    Raises ConfigError for a schedule that splits the backward pass: the engine has no slot for
    weight gradients.
    """
    if "W" in schedule.kinds:
        raise ConfigError(
            f"pipeline schedule {schedule.name} computes weight gradients separately (W); the "
            "engine runs F and B only"
        )
    stages = schedule.stages
    last = schedule.n_virtual - 1
    has_backward = "B" in schedule.kinds
    ticks = _compiled_ticks(schedule, has_backward and drop_last_forward, side_by_side)

    # The ticks in which each value is in use. A value that another stage sends is there from the
    # next tick on.
    last_reader = "B" if has_backward and not side_by_side else "F"
    inputs: dict[_Pass, _Lifetime] = {}
    grads: dict[_Pass, _Lifetime] = {}
    residuals: dict[_Pass, _Lifetime] = {}
    outputs: dict[_Pass, _Lifetime] = {}
    for s in range(last + 1):
        for m in range(schedule.microbatches):
            key = _Pass(m, s)
            if s:
                sent = ticks[Op("F", m, s - 1)]
                inputs[key] = _Lifetime(sent + 1, ticks[Op(last_reader, m, s)])
            if not has_backward:
                continue
            backward = ticks[Op("B", m, s)]
            if s < last:
                grads[key] = _Lifetime(ticks[Op("B", m, s + 1)] + 1, backward)
            if Op("F", m, s) in ticks:
                residuals[key] = _Lifetime(ticks[Op("F", m, s)], backward)
                if s == last and side_by_side:
                    outputs[key] = residuals[key]
    input_slots, n_inputs = _allocate(inputs, stages)
    grad_slots, n_grads = _allocate(grads, stages)
    residual_slots, n_residuals = _allocate(residuals, stages)
    output_slots, n_outputs = _allocate(outputs, stages)

    n_ticks = max(ticks.values()) + 1
    columns = {name: np.full((n_ticks, stages), -1, np.int32) for name in COLUMNS}
    for op, tick in ticks.items():
        key = _Pass(op.microbatch, op.virtual)
        cells = {
            "microbatch": op.microbatch,
            "chunk": op.virtual // stages,
            "residual": residual_slots.get(key, -1),
            "output": output_slots.get(key, -1),
        }
        if op.kind == "B":
            cells["grad"] = grad_slots.get(key, -1)
        if op.kind == "F" or not side_by_side:
            cells["input"] = input_slots.get(key, -1)
        direction = "forward" if op.kind == "F" else "backward"
        for name, value in cells.items():
            columns[f"{direction}_{name}"][tick, op.virtual % stages] = value
    # Outputs arrive at the end of the tick that computes them, gradients at the beginning of the
    # next one.
    for (m, s), slot in input_slots.items():
        columns["receive_input"][ticks[Op("F", m, s - 1)], s % stages] = slot
    for (m, s), slot in grad_slots.items():
        columns["receive_grad"][ticks[Op("B", m, s + 1)] + 1, s % stages] = slot
    return Table(
        stages=stages,
        microbatches=schedule.microbatches,
        chunks=schedule.chunks,
        ticks=n_ticks,
        n_inputs=n_inputs,
        n_grads=n_grads,
        n_residuals=n_residuals,
        n_outputs=n_outputs,
        columns=columns,
    )


def _compiled_ticks(
    schedule: Schedule, drop_last_forward: bool, side_by_side: bool
) -> Mapping[Op, int]:
    """Returns the tick of each op that the engine runs."""
    ticks = schedule.ticks
    if drop_last_forward:
        last = schedule.n_virtual - 1
        ticks = {op: tick for op, tick in ticks.items() if op.kind == "B" or op.virtual < last}
        ticks = _without_idle_ticks(ticks)
    if side_by_side and any(
        ticks.get(op._replace(kind="F")) == tick for op, tick in ticks.items() if op.kind == "B"
    ):
        ticks = {op: tick + (op.kind == "B") for op, tick in ticks.items()}
    return ticks


def _without_idle_ticks(ticks: Mapping[Op, int]) -> dict[Op, int]:
    """Returns the same order without ticks in which all stages are idle."""
    numbers = {tick: number for number, tick in enumerate(sorted(set(ticks.values())))}
    return {op: numbers[tick] for op, tick in ticks.items()}


def _allocate(lifetimes: Mapping[_Pass, _Lifetime], stages: int) -> tuple[dict[_Pass, int], int]:
    """Returns (a slot for each value, the number of slots on the stage that needs the most).

    Linear-scan register allocation (Poletto and Sarkar, 1999); without spilling it uses the fewest
    slots possible.
    """
    slots: dict[_Pass, int] = {}
    free: list[list[int]] = [[] for _ in range(stages)]
    busy: list[list[tuple[int, int]]] = [[] for _ in range(stages)]  # (last tick, slot)
    n_slots = [0] * stages
    for key, lifetime in sorted(lifetimes.items(), key=lambda item: item[1]):
        stage = key.virtual % stages
        while busy[stage] and busy[stage][0][0] < lifetime.first:
            heapq.heappush(free[stage], heapq.heappop(busy[stage])[1])
        if not free[stage]:
            heapq.heappush(free[stage], n_slots[stage])
            n_slots[stage] += 1
        slots[key] = heapq.heappop(free[stage])
        heapq.heappush(busy[stage], (lifetime.last, slots[key]))
    return slots, max(n_slots)
