"""A compiled program's schedule replayed against estimates: how long a step might take, and what of
its network time it waits for.

A second opinion, not a measurement: nothing runs. Against an analytic model calibrated on published
H100 runs, replays of this kind were within 3 % on two of five layouts and 20-35 % off on the
others: compare layouts with it, and believe no single number. Left out are copies to and from the
host, kernels that run side by side, stragglers, congestion, and the tuning of matmuls, which needs
a GPU.

Where `estimates` ask for it, XLA writes its own estimates into the program. What they and
collectives cost is in `prices`.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any

from sharding_rules.lab.hlo import Instruction, Module
from sharding_rules.lab.ledger import started
from sharding_rules.lab.prices import FREE, Prices, collective_us
from sharding_rules.lab.provenance import Provenance
from sharding_rules.lab.report import Collective, Span, Timeline
from sharding_rules.lab.targets import Target

SPANS = 600
"""The most spans of a timeline, so that a report stays small."""
_LIMIT = "xla_gpu_experimental_parallel_collective_overlap_limit"


def estimates(target: Target | None) -> dict[str, Any]:
    """Compiler options that make XLA write its estimates into the program, and change nothing else
    in it.

    None before Hopper: XLA has no table of matmuls for sm_80 and fails (`NOT_FOUND: Cannot find
    key`). Bytes and FLOPs must do there.
    """
    return (
        {"xla_gpu_collect_cost_model_stats": True} if target and target.capability >= (9, 0) else {}
    )


def in_parallel(options: Mapping[str, Any]) -> bool:
    """Whether XLA may run two collectives at once, by these compiler options, or else by the
    variable XLA_FLAGS.
    """
    said = re.findall(rf"--{_LIMIT}=(\d+)", os.environ.get("XLA_FLAGS", ""))
    return int(options.get(_LIMIT, said[-1] if said else 1)) >= 2


def replay(
    module: Module,
    provenance: Provenance,
    sent: Iterable[Collective],
    target: Target,
    *,
    parallel: bool = False,
) -> Timeline:
    """The program's timeline on `target`: one compute stream, one of collectives, in the order they
    are started, and one of permutes.

    sent: the program's collectives, as `ledger.collectives` finds them. parallel: those within a
    node have a stream of their own, beside that of those between nodes. That is optimistic: on a
    GPU both take SMs, and a ring between nodes uses NVLink inside of them.

    Compute continues after a collective's start, and waits at its done; without start and done it
    blocks. Loops run their known trips (the spans show one, and time as if it were the only one),
    conditionals their dearest branch. Where slots say which stages run a conditional in which trip,
    each trip is that of its slowest stage: a ring of sends and receives lets no stage run ahead.
    The most frequent is shown.
    """
    run = _Run(
        _Program(module, provenance, target, {one.name: one for one in sent}, parallel), spans=[]
    )
    run.computation(module.entry, ())
    run.wait(max(run.free.values(), default=0.0))
    return Timeline(
        run.clock,
        run.compute,
        run.network,
        run.exposed,
        _at_most(run.spans or [], SPANS),
        dict(run.waits),
        dict(run.parts),
    )


def priced(sent: Sequence[Collective], line: Timeline, target: Target) -> tuple[Collective, ...]:
    """The collectives with their predicted durations, and with what compute waits for each: those
    of one name share it by their runs.
    """
    runs = Counter[str]()
    for one in sent:
        runs[one.name] += one.times
    return tuple(
        dataclasses.replace(
            one,
            duration=collective_us(one, target),
            exposed=line.waits.get(one.name, 0.0) * one.times / max(1, runs[one.name]),
        )
        for one in sent
    )


@dataclasses.dataclass(frozen=True)
class _Program(Prices):
    """Microseconds of single instructions, and of whole computations."""

    collectives: dict[str, Collective]
    """By name."""
    parallel: bool = False
    """Collectives within a node and collectives between nodes run at the same time."""
    _alone: dict[tuple[str, frozenset[str]], _Run] = dataclasses.field(default_factory=dict)

    def sent(self, one: Instruction) -> list[Collective]:
        """The collectives that an instruction starts: several where XLA has grouped them."""
        if own := self.collectives.get(one.name):
            return [own]
        return [
            self.collectives[inside.name]
            for inside in started(self.module, one)
            if inside.name in self.collectives
        ]

    def stream(self, one: Collective) -> str:
        """The stream that carries a collective. XLA keeps sends from device to device apart from
        the others.
        """
        if one.kind == "collective-permute":
            return "permutes"
        return "within a node" if self.parallel and one.nodes == 1 else "collectives"

    def sends(self, computation: str) -> bool:
        """Whether there is a collective in it."""
        return any(self.sent(one) for one in self.module.computations.get(computation, ()))

    def alone(self, computation: str, taken: frozenset[str] = frozenset()) -> _Run:
        """A computation from an idle start. taken: conditionals with a slot that run."""
        if (computation, taken) not in self._alone:
            self._alone[computation, taken] = run = _Run(self, taken=taken)
            run.computation(computation, ())
            run.wait(max(run.free.values(), default=0.0))
        return self._alone[computation, taken]

    def once(self, conditional: Instruction) -> bool:
        """Whether a conditional with a slot is in no loop, because XLA has removed the one of its
        tick, and runs on a stage.
        """
        window, slot = self.module.windows.get(conditional.name), self.module.slot(conditional)
        return bool(
            window and window.alone and slot and any(map(slot.runs, range(len(slot.stages))))
        )

    def trips(self, loop: Instruction) -> Counter[frozenset[str]]:
        """How many trips of a loop are alike: by the conditionals with a slot that run on the
        slowest stage of each.
        """
        slots = dict(self.module.slots_in(loop.body))
        count = loop.trips or 1
        if not slots:
            return Counter({frozenset(): count})
        result = Counter[frozenset[str]]()
        for trip in range(count):
            taken = [
                frozenset(
                    name
                    for name, slot in slots.items()
                    if slot.stages[stage][trip : trip + 1] == "1"
                )
                for stage in range(self.module.n_stages)
            ]
            result[
                max(dict.fromkeys(taken), key=lambda each: self.alone(loop.body, each).clock)
            ] += 1
        return result


@dataclasses.dataclass
class _Run:
    """The two streams while a computation runs. Microseconds."""

    prices: _Program
    spans: list[Span] | None = None
    """None: not recorded."""
    clock: float = 0.0
    """Time that the compute stream has reached."""
    free: dict[str, float] = dataclasses.field(default_factory=dict)
    """When each stream of the network is."""
    skipped: float = 0.0
    """Time of later trips, which the spans leave out."""
    compute: float = 0.0
    network: float = 0.0
    exposed: float = 0.0
    waits: dict[str, float] = dataclasses.field(default_factory=dict)
    """`exposed` by the collective that the network is busy with."""
    parts: dict[str, float] = dataclasses.field(default_factory=dict)
    """`compute` by the part of the model."""
    flying: list[tuple[float, float, str]] = dataclasses.field(default_factory=list)
    """Begin, end and name of what was sent and may not have arrived."""
    ends: dict[str, float] = dataclasses.field(default_factory=dict)
    """When a collective that was started will be done."""
    taken: frozenset[str] = frozenset()
    """Conditionals with a slot that run in this trip."""
    often: Mapping[str, int] = dataclasses.field(default_factory=dict)
    """How many trips run each conditional with a slot."""

    def computation(self, name: str, loops: tuple[int, ...]) -> None:
        for one in self.prices.module.computations[name]:
            if one.opcode == "while":
                self._loop(one, loops)
            elif one.opcode == "conditional" and one.branches:
                self._conditional(one, loops)
            elif one.opcode == "call":
                for called in one.called:
                    self.computation(called, loops)
            else:
                self._instruction(one, name, loops)

    def _conditional(self, one: Instruction, loops: tuple[int, ...]) -> None:
        module = self.prices.module
        if module.slot(one) is None:
            self.computation(
                max(one.branches, key=lambda branch: self.prices.alone(branch, self.taken).clock),
                loops,
            )
        elif one.name in self.taken or self.prices.once(one):
            self.computation(
                module.dearest(one), (*loops[:-1], self.often.get(one.name, 1)) if loops else ()
            )
        else:
            for idle in [branch for branch in one.branches if branch != module.dearest(one)][:1]:
                self.computation(idle, loops)

    def _loop(self, one: Instruction, loops: tuple[int, ...]) -> None:
        trips = self.prices.trips(one)
        shown = max(trips, key=lambda taken: trips[taken])
        outer = self.taken, self.often
        self.taken, self.often = (
            shown,
            {name: sum(n for taken, n in trips.items() if name in taken) for name in shown},
        )
        later = [(one.body, taken, n) for taken, n in (trips - Counter([shown])).items()]
        # else it is a comparison, which takes no time worth a kernel
        if self.prices.sends(one.condition):
            self.computation(one.condition, (*loops, trips.total() + 1))
            later.append((one.condition, frozenset(), trips.total()))
        self.computation(one.body, (*loops, trips.total()))
        self.taken, self.often = outer
        for computation, taken, n in later:
            again = self.prices.alone(computation, taken)
            for total in ("clock", "skipped", "compute", "network", "exposed"):
                more = again.clock if total == "skipped" else getattr(again, total)
                setattr(self, total, getattr(self, total) + n * more)
            for own, more in ((self.waits, again.waits), (self.parts, again.parts)):
                for name, us in more.items():
                    own[name] = own.get(name, 0.0) + n * us

    def _instruction(self, one: Instruction, computation: str, loops: tuple[int, ...]) -> None:
        if one.opcode == "async-update":
            self.ends[one.name] = self.ends.get(one.operands[0], self.clock)
        elif one.opcode.endswith("-done"):
            self.wait(self.ends.get(one.operands[0], self.clock))
        elif sent := self.prices.sent(one):
            self.ends[one.name] = max(self._send(each, loops) for each in sent)
            if not sent[0].asynchronous:
                self.wait(self.ends[one.name])
        elif one.opcode not in FREE:
            where = self.prices.provenance.of(self.prices.custom(one) or one)
            kind, us = self.prices.kernel(one, where.phase)
            self._record(Span(one.name, "compute", kind, self.clock, us, loops, where))
            self.clock += us
            self.compute += us
            self.parts[where.part] = self.parts.get(where.part, 0.0) + us

    def _send(self, one: Collective, loops: tuple[int, ...]) -> float:
        us, stream = collective_us(one, self.prices.target), self.prices.stream(one)
        begin = max(self.clock, self.free.get(stream, 0.0))
        self._record(Span(one.name, "network", one.kind, begin, us, loops, one.where))
        self.network += us
        self.free[stream] = begin + us
        self.flying.append((begin, begin + us, one.name))
        return begin + us

    def wait(self, until: float) -> None:
        """Compute is idle until then: for what the network is busy with, the one that ends first
        where several of its streams are.
        """
        if until <= self.clock:
            return
        self.exposed += until - self.clock
        for begin, end, name in sorted(self.flying, key=lambda each: each[1]):
            if (us := min(end, until) - max(begin, self.clock)) > 0:
                self.waits[name] = self.waits.get(name, 0.0) + us
                self.clock = min(end, until)
        self.clock = until
        self.flying = [each for each in self.flying if each[1] > until]

    def _record(self, span: Span) -> None:
        if self.spans is not None:
            self.spans.append(dataclasses.replace(span, start=span.start - self.skipped))


def _at_most(spans: list[Span], limit: int) -> tuple[Span, ...]:
    """Short compute spans in a row in one place become one, ever longer ones until few enough are
    left; the longest stay in any case.
    """
    end = max((span.start + span.duration for span in spans), default=0.0)
    longest = end / 2**12
    while len(spans) > limit and longest < end:
        spans, longest = _merged(spans, longest), 2 * longest
    kept = sorted(spans, key=lambda span: -span.duration)[:limit]
    return tuple(sorted(kept, key=lambda span: span.start))


def _merged(spans: list[Span], longest: float) -> list[Span]:
    network = [span for span in spans if span.stream == "network"]
    compute = [span for span in spans if span.stream == "compute"]
    merged = []
    for (*_, short), row in groupby(
        compute,
        lambda span: (span.where.part, span.where.phase, span.loops, span.duration <= longest),
    ):
        same = list(row)
        for group in _unbroken(same) if short else [[span] for span in same]:
            chief = max(group, key=lambda span: span.duration)
            end = group[-1].start + group[-1].duration
            merged.append(
                dataclasses.replace(chief, start=group[0].start, duration=end - group[0].start)
            )
    return network + merged


def _unbroken(spans: list[Span]) -> list[list[Span]]:
    """Split where compute waited."""
    groups: list[list[Span]] = []
    for span in spans:
        if groups and span.start - (groups[-1][-1].start + groups[-1][-1].duration) < 0.01:
            groups[-1].append(span)
        else:
            groups.append([span])
    return groups
