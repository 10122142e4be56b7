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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from mesh_lm.errors import ConfigError

KINDS = "FBW"
"""Forward, backward and, if a schedule splits it from the backward pass, weight gradient: the order
in a tick."""
WORDS = {"F": "forward", "B": "backward", "W": "weight gradient"}


class Op(NamedTuple):
    """One pass of one microbatch through one virtual stage.

    It is written as in the tables of PyTorch: 2F3 is the forward of microbatch 3 at virtual stage
    2.
    """

    kind: str
    microbatch: int
    virtual: int

    def __str__(self) -> str:
        return f"{self.virtual}{self.kind}{self.microbatch}"


class Dependency(NamedTuple):
    """An op that another one needs."""

    op: Op
    gap: int
    """The least number of ticks between the two: 1 if they are on different virtual stages."""


class ScheduleError(ConfigError):
    """Raised for a schedule that cannot run.

    `word` is the op at fault as a file spells it, empty if no op is.
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
        """The number of virtual stages."""
        return self.stages * self.chunks

    @property
    def n_ticks(self) -> int:
        """The number of ticks."""
        return max(self.ticks.values()) + 1

    @functools.cached_property
    def kinds(self) -> str:
        """The kinds of op that occur, in the order of `KINDS`.

        F in evaluation, FBW if the backward pass is split.
        """
        present = {op.kind for op in self.ticks}
        return "".join(kind for kind in KINDS if kind in present)

    def in_order(self) -> list[tuple[Op, int]]:
        """(op, tick) sorted by tick, slot and stage: each op comes after those it needs."""

        def position(item: tuple[Op, int]) -> tuple[int, int, int]:
            op, tick = item
            return tick, KINDS.index(op.kind), op.virtual % self.stages

        return sorted(self.ticks.items(), key=position)

    def check(self) -> None:
        """Raises ScheduleError unless the schedule can run.

        Each op must occur, alone in its slot, after the ops that it needs.
        """
        ops_by_slot: dict[tuple[int, int, str], Op] = {}
        for op, tick in self.in_order():
            stage = op.virtual % self.stages
            location = f"tick {tick}, stage {stage}: {op}"
            if tick < 0 or not self._has_op(op):
                raise ScheduleError(
                    f"{location}: no such op; there are microbatches 0 to "
                    f"{self.microbatches - 1}, virtual stages 0 to {self.n_virtual - 1}, and "
                    "ticks from 0",
                    op,
                )
            other = ops_by_slot.setdefault((tick, stage, op.kind), op)
            if other != op:
                raise ScheduleError(
                    f"{location} and {other} share a tick: a stage does one {WORDS[op.kind]} a "
                    "tick",
                    op,
                )
            for needed, gap in needs(op, self.n_virtual):
                if needed not in self.ticks:
                    raise ScheduleError(f"{location} needs {needed}, which the schedule lacks", op)
                if tick < self.ticks[needed] + gap:
                    reason = "; a stage's output arrives one tick later" if gap else ""
                    raise ScheduleError(
                        f"{location} needs {needed}, "
                        f"which comes only at tick {self.ticks[needed]}{reason}",
                        op,
                    )
        self._check_complete()

    def _has_op(self, op: Op) -> bool:
        return 0 <= op.microbatch < self.microbatches and 0 <= op.virtual < self.n_virtual

    def _check_complete(self) -> None:
        # A schedule without any op is one of forwards that are missing.
        kinds = self.kinds or "F"
        n_missing = len(kinds) * self.microbatches * self.n_virtual - len(self.ticks)
        if not n_missing:
            return
        # Lazy: a file may name a microbatch that is far too large.
        every_op = (
            Op(kind, m, s)
            for kind in kinds
            for m in range(self.microbatches)
            for s in range(self.n_virtual)
        )
        first = next(op for op in every_op if op not in self.ticks)
        remainder = f" and {n_missing - 1} more ops are" if n_missing > 1 else " is"
        raise ScheduleError(
            f"{first} ({WORDS[first.kind]} on stage {first.virtual % self.stages})"
            f"{remainder} missing from the schedule",
            first,
        )


def needs(op: Op, n_virtual: int) -> tuple[Dependency, ...]:
    """Returns the ops that an op depends on."""
    kind, m, s = op
    if kind == "F":
        return (Dependency(Op("F", m, s - 1), 1),) if s else ()
    if kind == "W":
        return (Dependency(Op("B", m, s), 0),)
    forward = Dependency(Op("F", m, s), 0)
    if s == n_virtual - 1:
        return (forward,)
    return (forward, Dependency(Op("B", m, s + 1), 1))


def _eager_warmup(p: int, P: int, V: int) -> int:
    """Stage p of P with V chunks: interleaved 1F1B (arXiv 2104.04473), eager with one chunk.

    The loop of a microbatch from stage p to the last stage and back takes 2 (P - 1 - p) ticks, and
    V - 1 earlier chunks have P forwards each.
    """
    return 2 * (P - 1 - p) + (V - 1) * P


def _least_warmup(p: int, P: int, V: int) -> int:
    """Stage p of P: one forward for each later stage, the fewest that keep all stages busy."""
    return P - 1 - p


@dataclasses.dataclass(frozen=True)
class _Definition:
    """A named schedule: a warm-up of forwards, then one forward and one backward in turn."""

    warmup: Callable[[int, int, int], int] | None
    """(stage, stages, chunks) -> forwards before the first pair; None: all of them."""
    summary: str
    packed: bool = True
    """Whether a tick has one slot of each kind, or one op only."""
    chunked: bool = True
    """Whether a stage may have several chunks."""
    backward: bool = True
    """Whether there are backward passes."""
    split: bool = False
    """Whether weight gradients are separate ops, each `stage` microbatches after its backward."""


NAMES: Mapping[str, _Definition] = {
    "1f1b": _Definition(
        _eager_warmup, "eager 1F1B; interleaved with chunks > 1 (arXiv 2104.04473, 2412.14374)"
    ),
    "gpipe": _Definition(None, "all forwards, then all backwards (GPipe, arXiv 1811.06965)"),
    "classic_1f1b": _Definition(
        _least_warmup,
        "1F1B with the least in flight (PipeDream-flush, arXiv 2006.09503)",
        packed=False,
        chunked=False,
    ),
    "zb_h1": _Definition(
        _least_warmup,
        "zero bubble H1 (arXiv 2401.10241), for study",
        packed=False,
        chunked=False,
        split=True,
    ),
    "forward": _Definition(None, "forwards only, for evaluation", backward=False),
}
"""The schedules that `make_schedule` makes."""


def make_schedule(
    name: str, stages: int, microbatches: int, chunks: int = 1, *, packed: bool | None = None
) -> Schedule:
    """Returns the named schedule: each stage runs its ops in order, each as early as inputs allow.

    Args:
      packed: whether a tick has one slot of each kind, or one op only. None is the default of the
        schedule, which is best under the lockstep clock.

    Raises ConfigError for an unknown name and for sizes that the schedule does not support.
    """
    if name not in NAMES:
        raise ConfigError(f"there is no pipeline schedule {name!r}; {_name_hint(name)}")
    definition = NAMES[name]
    for field, size in (("stages", stages), ("microbatches", microbatches), ("chunks", chunks)):
        if size < 1:
            raise ConfigError(
                f"pipeline schedule {name}: {field}={size} is too small; it must be at least 1"
            )
    if chunks > 1 and not definition.chunked:
        chunked = ", ".join(other for other, schedule in NAMES.items() if schedule.chunked)
        raise ConfigError(
            f"pipeline schedule {name}: chunks={chunks}, but it has one chunk a stage; with more: "
            f"{chunked}"
        )
    if chunks > 1 and microbatches % stages and definition.backward:
        below = microbatches // stages * stages
        multiples = f"{below} or {below + stages}" if below else f"{stages}"
        raise ConfigError(
            f"pipeline schedule {name}: with chunks={chunks}, microbatches={microbatches} "
            f"must be a multiple of stages={stages}, as {multiples} is"
        )

    orders = [_order(definition, stage, stages, microbatches, chunks) for stage in range(stages)]
    if packed is None:
        packed = definition.packed
    schedule = Schedule(name, stages, microbatches, chunks, assign_ticks(orders, packed))
    schedule.check()
    return schedule


def _name_hint(name: str) -> str:
    if "interleaved" in name:
        return "1f1b with chunks > 1 is interleaved"
    similar = difflib.get_close_matches(name, NAMES, n=1)
    return f"did you mean {similar[0]!r}?" if similar else f"known: {', '.join(NAMES)}"


def _order(
    definition: _Definition, stage: int, stages: int, microbatches: int, chunks: int
) -> Iterator[Op]:
    """Yields the ops of one stage, in order."""
    # Microbatches go through the chunks in groups of `stages` (arXiv 2104.04473).
    passes = []
    for first in range(0, microbatches, stages):
        group = range(first, min(first + stages, microbatches))
        passes += [(m, chunk) for chunk in range(chunks) for m in group]
    forwards = deque(Op("F", m, chunk * stages + stage) for m, chunk in passes)
    backwards = []
    if definition.backward:
        backwards = [Op("B", m, (chunks - 1 - chunk) * stages + stage) for m, chunk in passes]

    n_warmup = len(forwards)
    if definition.warmup is not None:
        n_warmup = min(definition.warmup(stage, stages, chunks), n_warmup)
    for _ in range(n_warmup):
        yield forwards.popleft()

    weights: deque[Op] = deque()
    for op in backwards:
        if forwards:
            yield forwards.popleft()
        yield op
        if definition.split:
            weights.append(op._replace(kind="W"))
            if len(weights) > stage:
                yield weights.popleft()
    yield from weights


def assign_ticks(orders: Sequence[Iterable[Op]], packed: bool = True) -> dict[Op, int]:
    """Returns the tick of each op if the ops of each stage run in this order, as early as possible.

    Raises ScheduleError for orders that deadlock.
    """
    queues = [deque(order) for order in orders]
    n_virtual = 1 + max((op.virtual for queue in queues for op in queue), default=-1)
    ticks: dict[Op, int] = {}
    tick = 0
    while any(queues):
        n_assigned = len(ticks)
        for queue in queues:
            # An op takes a slot after that of the op before it, so that a tick never runs B, then
            # F.
            slot = -1
            while queue and KINDS.index(queue[0].kind) > slot and (packed or slot < 0):
                if not _is_ready(queue[0], tick, ticks, n_virtual):
                    break
                slot = KINDS.index(queue[0].kind)
                ticks[queue.popleft()] = tick
        if len(ticks) == n_assigned:
            blocked = [(stage, queue[0]) for stage, queue in enumerate(queues) if queue]
            ops = ", ".join(f"stage {stage} at {op}" for stage, op in blocked)
            raise ScheduleError(
                f"deadlock at tick {tick}: every stage waits for another: {ops}", blocked[0][1]
            )
        tick += 1
    return ticks


def _is_ready(op: Op, tick: int, ticks: Mapping[Op, int], n_virtual: int) -> bool:
    return all(
        needed in ticks and ticks[needed] + gap <= tick for needed, gap in needs(op, n_virtual)
    )
