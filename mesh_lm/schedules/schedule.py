"""Pipeline schedules: what each stage does at each tick. Imports no jax.

The model is divided into stages * chunks *virtual stages*. Virtual stage s is chunk s // stages of
stage s % stages, so that the output of one goes to the next stage of the ring. Time is divided into
*ticks*: in one tick, a stage does at most one op of each kind, in the order F, B, W, and the output
of an op arrives one tick later. `Schedule.check` validates any schedule, including a user's own.

Each tick has an F slot before a B slot, and 1f1b has the warm-up of interleaved 1F1B (Narayanan et
al., arXiv 2104.04473) even with one chunk ("eager 1F1B", Xhebraj et al., JaxPP, arXiv 2412.14374).
Then stages that wait for each other at each tick are as fast as stages that wait only for their
inputs: see `mesh_lm.schedules.cost`.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from mesh_lm.errors import ConfigError

KINDS = "FBW"
"""Forward, backward, and weight gradient (if a schedule splits it from the backward pass), in their
order in a tick."""
WORDS = {"F": "forward", "B": "backward", "W": "weight gradient"}


class Op(NamedTuple):
    """One pass of one microbatch through one virtual stage. As in PyTorch's tables, 2F3 is the
    forward of microbatch 3 at stage 2.
    """

    kind: str
    microbatch: int
    virtual: int

    def __str__(self) -> str:
        return f"{self.virtual}{self.kind}{self.microbatch}"


class ScheduleError(ConfigError):
    """Raised for a schedule that cannot run. `word` is the op at fault as written in a file, if
    there is one.
    """

    def __init__(self, message: str, word: object = "") -> None:
        super().__init__(message)
        self.word = str(word)


@dataclasses.dataclass(frozen=True)
class Schedule:
    """The tick of each op, counted from 0."""

    name: str
    stages: int
    microbatches: int
    chunks: int
    ticks: Mapping[Op, int]

    @property
    def n_virtual(self) -> int:
        """Virtual stages."""
        return self.stages * self.chunks

    @property
    def n_ticks(self) -> int:
        """The number of ticks."""
        return max(self.ticks.values()) + 1

    @functools.cached_property
    def kinds(self) -> str:
        """The kinds of op that occur, in the order of `KINDS`: F in evaluation, FBW if the backward
        pass is split.
        """
        return "".join(kind for kind in KINDS if any(op.kind == kind for op in self.ticks))

    def in_order(self) -> list[tuple[Op, int]]:
        """(op, tick) sorted by tick, slot and stage: each op comes after those it needs."""
        return sorted(
            self.ticks.items(),
            key=lambda item: (item[1], KINDS.index(item[0].kind), item[0].virtual % self.stages),
        )

    def check(self) -> None:
        """Raises ScheduleError unless each op occurs, alone in its slot, after the ops that it
        needs.
        """
        taken: dict[tuple[int, int, str], Op] = {}
        for op, tick in self.in_order():
            stage = op.virtual % self.stages
            where = f"tick {tick}, stage {stage}: {op}"
            if not (
                0 <= op.microbatch < self.microbatches
                and 0 <= op.virtual < self.n_virtual
                and tick >= 0
            ):
                known = (
                    f"there are microbatches 0 to {self.microbatches - 1}, virtual stages 0 to "
                    f"{self.n_virtual - 1}, and ticks from 0"
                )
                raise ScheduleError(f"{where}: no such op; {known}", op)
            other = taken.setdefault((tick, stage, op.kind), op)
            if other != op:
                raise ScheduleError(
                    f"{where} and {other} share a tick: a stage does one {WORDS[op.kind]} a tick",
                    op,
                )
            for needed, gap in needs(op, self.n_virtual):
                if needed not in self.ticks:
                    raise ScheduleError(f"{where} needs {needed}, which the schedule lacks", op)
                if tick < self.ticks[needed] + gap:
                    why = "; a stage's output arrives one tick later" if gap else ""
                    raise ScheduleError(
                        f"{where} needs {needed}, which is at tick {self.ticks[needed]}{why}", op
                    )
        kinds = self.kinds or "F"
        if absent := len(kinds) * self.microbatches * self.n_virtual - len(self.ticks):
            every = (
                Op(kind, m, s)
                for kind in kinds
                for m in range(self.microbatches)
                for s in range(self.n_virtual)
            )
            first = next(op for op in every if op not in self.ticks)
            more = f" and {absent - 1} more ops are" if absent > 1 else " is"
            raise ScheduleError(
                (
                    f"{first} ({WORDS[first.kind]} on stage {first.virtual % self.stages}){more} "
                    "missing"
                ),
                first,
            )


def needs(op: Op, n_virtual: int) -> tuple[tuple[Op, int], ...]:
    """The ops that an op depends on, each with the least number of ticks between them: 1 if it is
    on another virtual stage.
    """
    kind, m, s = op
    if kind == "F":
        return ((Op("F", m, s - 1), 1),) if s else ()
    if kind == "W":
        return ((Op("B", m, s), 0),)
    own = (Op("F", m, s), 0)
    return (own, (Op("B", m, s + 1), 1)) if s < n_virtual - 1 else (own,)


@dataclasses.dataclass(frozen=True)
class _Named:
    """A named schedule: each stage runs its warm-up of forwards, then alternates one forward and
    one backward.
    """

    warmup: Callable[[int, int, int], int | None]
    """(stage, stages, chunks) -> forwards before the first pair; None: all of them."""
    about: str
    packed: bool = True
    """Whether a tick has one slot of each kind, or one op only."""
    chunked: bool = True
    backward: bool = True
    split: bool = False
    """Whether weight gradients are separate ops, each `stage` microbatches after its backward."""


NAMES: Mapping[str, _Named] = {
    "1f1b": _Named(lambda p, P, V: 2 * (P - 1 - p) + (V - 1) * P, "eager 1F1B; interleaved with chunks > 1 (arXiv 2104.04473, 2412.14374)"),
    "gpipe": _Named(lambda p, P, V: None, "all forwards, then all backwards (GPipe, arXiv 1811.06965)"),
    "classic_1f1b": _Named(
        lambda p, P, V: P - 1 - p,
        "1F1B with the least in flight (PipeDream-flush, arXiv 2006.09503)", packed=False,
        chunked=False
    ),
    "zb_h1": _Named(
        lambda p, P, V: P - 1 - p, "zero bubble H1 (arXiv 2401.10241), for study", packed=False,
        chunked=False, split=True
    ),
    "forward": _Named(lambda p, P, V: None, "forwards only, for evaluation", backward=False),
}  # fmt: skip
"""The schedules that `make_schedule` makes."""


def make_schedule(
    name: str, stages: int, microbatches: int, chunks: int = 1, *, packed: bool | None = None
) -> Schedule:
    """The named schedule: each stage runs its ops in the schedule's order, each op as early as its
    inputs allow.

    packed: whether a tick has one slot of each kind, or one op only; None: the default of the
    schedule, best under the lockstep clock.

    Raises ConfigError for an unknown name and for sizes that the schedule does not support.
    """
    if name not in NAMES:
        near = difflib.get_close_matches(name, NAMES, n=1)
        hint = (
            "1f1b with chunks > 1 is interleaved"
            if "interleaved" in name
            else f"did you mean {near[0]!r}?"
            if near
            else ""
        )
        raise ConfigError(f"no pipeline schedule {name!r}; {hint or 'known: ' + ', '.join(NAMES)}")
    for field, size in (("stages", stages), ("microbatches", microbatches), ("chunks", chunks)):
        if size < 1:
            raise ConfigError(f"pipeline schedule {name}: {field}={size} must be at least 1")
    named = NAMES[name]
    if chunks > 1 and not named.chunked:
        able = ", ".join(other for other, known in NAMES.items() if known.chunked)
        raise ConfigError(
            f"pipeline schedule {name}: chunks={chunks}, but it has one chunk a stage; with more: "
            f"{able}"
        )
    if chunks > 1 and microbatches % stages and named.backward:
        near = " or ".join(
            str(m)
            for m in (microbatches // stages * stages, -(-microbatches // stages) * stages)
            if m
        )
        fits = f"a multiple of stages={stages}, as {near} is"
        raise ConfigError(
            f"pipeline schedule {name}: with chunks={chunks}, microbatches={microbatches} must be "
            f"{fits}"
        )
    orders = [_order(named, stage, stages, microbatches, chunks) for stage in range(stages)]
    schedule = Schedule(
        name,
        stages,
        microbatches,
        chunks,
        assign_ticks(orders, named.packed if packed is None else packed),
    )
    schedule.check()
    return schedule


def _order(named: _Named, stage: int, stages: int, microbatches: int, chunks: int) -> Iterable[Op]:
    """The ops of one stage, in order. Microbatches go through the chunks in groups of `stages`
    (arXiv 2104.04473).
    """
    groups = [
        range(first, min(first + stages, microbatches)) for first in range(0, microbatches, stages)
    ]
    passes = [(m, chunk) for group in groups for chunk in range(chunks) for m in group]
    forwards = deque(Op("F", m, chunk * stages + stage) for m, chunk in passes)
    backwards = (
        [Op("B", m, (chunks - 1 - chunk) * stages + stage) for m, chunk in passes]
        if named.backward
        else []
    )
    warmup = named.warmup(stage, stages, chunks)
    for _ in range(len(forwards) if warmup is None else min(warmup, len(forwards))):
        yield forwards.popleft()
    weights: deque[Op] = deque()
    for op in backwards:
        if forwards:
            yield forwards.popleft()
        yield op
        if named.split:
            weights.append(op._replace(kind="W"))
            if len(weights) > stage:
                yield weights.popleft()
    yield from weights


def assign_ticks(orders: Sequence[Iterable[Op]], packed: bool = True) -> dict[Op, int]:
    """The tick of each op. The ops of each stage run in the given order, each as early as its
    inputs allow.

    Raises ScheduleError for orders that deadlock.
    """
    queues = [deque(order) for order in orders]
    n_virtual = 1 + max((op.virtual for queue in queues for op in queue), default=-1)
    ticks: dict[Op, int] = {}
    tick = 0
    while any(queues):
        before = len(ticks)
        for queue in queues:
            slot = -1
            while queue and KINDS.index(queue[0].kind) > slot and (packed or slot < 0):
                if any(
                    ticks.get(needed, tick + 1) + gap > tick
                    for needed, gap in needs(queue[0], n_virtual)
                ):
                    break
                slot = KINDS.index(queue[0].kind)
                ticks[queue.popleft()] = tick
        if len(ticks) == before:
            waiting = ", ".join(
                f"stage {stage} at {queue[0]}" for stage, queue in enumerate(queues) if queue
            )
            raise ScheduleError(
                f"deadlock at tick {tick}: every stage waits for another: {waiting}",
                next(queue[0] for queue in queues if queue),
            )
        tick += 1
    return ticks
