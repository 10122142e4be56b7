"""A compiled program's schedule replayed with estimates: how long a step might take.

It also has the part of the network time for which the step waits.

A second opinion, not a measurement: nothing runs. Against an analytic model calibrated on published
H100 runs, replays of this kind were within 3 % on two of five layouts and 20-35 % off on the
others: compare layouts with it, and believe no single number. Left out are kernels that run side
by side, stragglers, congestion, and the tuning of matmuls, which needs a GPU.

Where `estimates` ask for it, XLA writes its own estimates into the program. What they and
collectives cost is in `prices`.
"""

from __future__ import annotations

import dataclasses
import math
import os
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple

from sharding_rules.lab import host
from sharding_rules.lab.hlo import Instruction, Module
from sharding_rules.lab.ledger import started
from sharding_rules.lab.prices import FREE, Prices, collective_us, host_copy_us
from sharding_rules.lab.provenance import Provenance
from sharding_rules.lab.rates import OPTIMISTIC, Rates
from sharding_rules.lab.report import Collective, Span, Timeline
from sharding_rules.lab.targets import Target

SPANS = 600
"""The most spans of a timeline, so that a report stays small."""

_LIMIT = "xla_gpu_experimental_parallel_collective_overlap_limit"
_SHORTEST_GAP = 0.01
"""Microseconds between two spans from which compute has waited; less is rounding."""


def estimates(target: Target | None) -> dict[str, Any]:
    """Returns compiler options that make XLA write its estimates into the program.

    They change nothing else in it. Empty before Hopper: XLA has no table of matmuls for sm_80 and
    fails (`NOT_FOUND: Cannot find key`). Bytes and FLOPs must do there.
    """
    if target and target.capability >= (9, 0):
        return {"xla_gpu_collect_cost_model_stats": True}
    return {}


def in_parallel(options: Mapping[str, Any]) -> bool:
    """Whether XLA may run two collectives at once.

    The compiler options say so, or else the variable XLA_FLAGS.
    """
    flags = re.findall(rf"--{_LIMIT}=(\d+)", os.environ.get("XLA_FLAGS", ""))
    limit = flags[-1] if flags else 1
    return int(options.get(_LIMIT, limit)) >= 2


def replay(
    module: Module,
    provenance: Provenance,
    sent: Iterable[Collective],
    target: Target,
    *,
    parallel: bool = False,
    rates: Rates = OPTIMISTIC,
    n_spans: int = SPANS,
) -> Timeline:
    """Returns the program's timeline on `target`.

    There is one stream for compute, one for collectives, in the order they are started, one for
    permutes, and one for copies to and from the host: XLA gives both directions the same queue.
    Compute continues after a collective's start, and waits at its done; without start and
    done it blocks. Loops run their known trips (the spans show one, and time as if it were the only
    one), conditionals their slowest branch, or each branch as often as its probability says. Where
    slots say which stages run a conditional in which
    trip, each trip is that of its slowest stage: a ring of sends and receives lets no stage run
    ahead. The most frequent is shown.

    Args:
      sent: the program's collectives, as `ledger.collectives` returns them.
      rates: the speeds of its kernels and links.
      n_spans: the most spans that the timeline keeps.
      parallel: collectives within a node have a stream of their own, beside that of collectives
        between nodes. That is optimistic: on a GPU both take SMs, and a ring between nodes uses
        NVLink inside of them.
    """
    collectives = {one.name: one for one in sent}
    program = _Program(module, provenance, target, rates, collectives, parallel)
    run = _Run(program, spans=[])
    run.computation(module.entry, ())
    run.wait(max(run.free.values(), default=0.0))
    return Timeline(
        step=run.clock,
        compute=run.compute,
        network=run.network,
        exposed=run.exposed,
        spans=_at_most(run.spans or [], n_spans) if n_spans else (),
        waits=dict(run.waits),
        parts=dict(run.parts),
        kinds=dict(run.kinds),
        flops=dict(run.flops),
        host=run.host,
        host_exposed=run.host_exposed,
    )


def priced(
    sent: Sequence[Collective], line: Timeline, target: Target, rates: Rates = OPTIMISTIC
) -> tuple[Collective, ...]:
    """Returns the collectives with their predicted durations and exposed times.

    rates: those of the timeline.

    Collectives of one name share what compute waits for it, in proportion to their runs.
    """
    runs: dict[str, float] = defaultdict(float)
    for collective in sent:
        runs[collective.name] += collective.times
    priced = []
    for collective in sent:
        waits = line.waits.get(collective.name, 0.0)
        exposed = waits * collective.times / (runs[collective.name] or 1)
        duration = collective_us(collective, target, rates)
        priced.append(dataclasses.replace(collective, duration=duration, exposed=exposed))
    return tuple(priced)


@dataclasses.dataclass(frozen=True)
class _Program(Prices):
    """Microseconds of single instructions, and of whole computations."""

    collectives: dict[str, Collective]
    """By name."""
    parallel: bool = False
    """Collectives within a node and collectives between nodes run at the same time."""
    _runs: dict[tuple[str, frozenset[str]], _Run] = dataclasses.field(default_factory=dict)

    def starts(self, instruction: Instruction) -> list[Collective]:
        """Returns the collectives that an instruction starts: several if XLA has grouped them."""
        if instruction.name in self.collectives:
            return [self.collectives[instruction.name]]
        names = [line.name for line in started(self.module, instruction)]
        return [self.collectives[name] for name in names if name in self.collectives]

    def host_copy(self, instruction: Instruction) -> host.Transfer | None:
        """Returns what an instruction copies to or from the host, or starts to copy."""
        return host.transfer(self.module, instruction) if self.module.uses_host else None

    def stream(self, collective: Collective) -> str:
        """Returns the stream that carries a collective.

        XLA keeps sends from device to device apart from the others.
        """
        if collective.kind == "collective-permute":
            return "permutes"
        return "within a node" if self.parallel and collective.nodes == 1 else "collectives"

    def has_collectives(self, computation: str) -> bool:
        return any(self.starts(line) for line in self.module.computations.get(computation, ()))

    def run_alone(self, computation: str, active: frozenset[str] = frozenset()) -> _Run:
        """Returns the run of a computation from an idle start.

        active: the conditionals with a slot that run.
        """
        key = (computation, active)
        if key not in self._runs:
            run = _Run(self, active=active)
            self._runs[key] = run
            run.computation(computation, ())
            run.wait(max(run.free.values(), default=0.0))
        return self._runs[key]

    def runs_outside_loops(self, conditional: Instruction) -> bool:
        """Whether a conditional with a slot is in no loop, and runs on a stage.

        XLA has then removed the loop of its only tick.
        """
        window = self.module.windows.get(conditional.name)
        slot = self.module.slot(conditional)
        if not window or not window.alone or not slot:
            return False
        return any(slot.runs(stage) for stage in range(len(slot.stages)))

    def trips(self, loop: Instruction) -> Counter[frozenset[str]]:
        """Returns how many trips of a loop are equal.

        Trips are equal if the same conditionals with a slot run on the slowest stage of each: these
        are the keys.
        """
        slots = dict(self.module.slots_in(loop.body))
        n_trips = loop.trips or 1
        if not slots:
            return Counter({frozenset(): n_trips})
        trips = Counter[frozenset[str]]()
        for trip in range(n_trips):
            active_by_stage = []
            for stage in range(self.module.n_stages):
                active = []
                for name, slot in slots.items():
                    if slot.stages[stage][trip : trip + 1] == "1":
                        active.append(name)
                active_by_stage.append(frozenset(active))
            slowest = max(
                active_by_stage, key=lambda active: self.run_alone(loop.body, active).clock
            )
            trips[slowest] += 1
        return trips


_HOST = "host"


class _Transfer(NamedTuple):
    """A collective on the network, or a copy to or from the host: when it begins and ends."""

    begin: float
    end: float
    name: str
    is_host_copy: bool = False


@dataclasses.dataclass
class _Run:
    """Compute and network while a computation runs. All times are microseconds."""

    program: _Program
    spans: list[Span] | None = None
    """None: not recorded."""
    clock: float = 0.0
    """Time that the compute stream has reached."""
    free: dict[str, float] = dataclasses.field(default_factory=dict)
    """Time from which each stream of the network is free."""
    skipped: float = 0.0
    """Time of later trips, which the spans leave out."""
    compute: float = 0.0
    network: float = 0.0
    exposed: float = 0.0
    host: float = 0.0
    host_exposed: float = 0.0
    waits: dict[str, float] = dataclasses.field(default_factory=dict)
    """`exposed` by the collective that the network is busy with."""
    parts: dict[str, float] = dataclasses.field(default_factory=dict)
    """`compute` by the part of the model."""
    kinds: dict[str, float] = dataclasses.field(default_factory=dict)
    """`compute` by the kind of kernel."""
    flops: dict[str, float] = dataclasses.field(default_factory=dict)
    """FLOPs by the kind of kernel."""
    transfers: list[_Transfer] = dataclasses.field(default_factory=list)
    """Those that may not have ended yet."""
    ends: dict[str, float] = dataclasses.field(default_factory=dict)
    """The end of each collective that was started, by the name of the start."""
    active: frozenset[str] = frozenset()
    """Conditionals with a slot that run in this trip."""
    active_trips: Mapping[str, int] = dataclasses.field(default_factory=dict)
    """How many trips run each conditional with a slot."""

    def computation(self, name: str, loops: tuple[float, ...]) -> None:
        """Runs a computation. loops: the trip counts around it, outermost first."""
        for line in self.program.module.computations[name]:
            if line.opcode == "while":
                self._loop(line, loops)
            elif line.opcode == "conditional" and line.branches:
                self._conditional(line, loops)
            elif line.opcode == "call":
                for called in line.called:
                    self.computation(called, loops)
            else:
                self._instruction(line, loops)

    def wait(self, until: float) -> None:
        """Lets compute wait.

        The wait belongs to what the streams are busy with: where several are, to the collective or
        copy that ends first.
        """
        if until <= self.clock:
            return
        exposed = until - self.clock
        for transfer in sorted(self.transfers, key=lambda transfer: transfer.end):
            us = min(transfer.end, until) - max(transfer.begin, self.clock)
            if us <= 0:
                continue
            if transfer.is_host_copy:
                self.host_exposed += us
                exposed -= us
            else:
                _add(self.waits, transfer.name, us)
            self.clock = min(transfer.end, until)
        self.exposed += exposed
        self.clock = until
        self.transfers = [transfer for transfer in self.transfers if transfer.end > until]

    def _conditional(self, conditional: Instruction, loops: tuple[float, ...]) -> None:
        module = self.program.module
        if module.slot(conditional) is None:
            probabilities = module.branch_probabilities(conditional)
            if probabilities:
                self._expected(probabilities, loops)
                return
            branch = max(
                conditional.branches,
                key=lambda branch: self.program.run_alone(branch, self.active).clock,
            )
            self.computation(branch, loops)
            return
        dearest = module.dearest(conditional)
        if conditional.name in self.active or self.program.runs_outside_loops(conditional):
            # The step waits for this number of trips of the loop around it.
            if loops:
                loops = (*loops[:-1], self.active_trips.get(conditional.name, 1))
            self.computation(dearest, loops)
            return
        idle = next((branch for branch in conditional.branches if branch != dearest), None)
        if idle is not None:
            self.computation(idle, loops)

    def _expected(self, probabilities: dict[str, float], loops: tuple[float, ...]) -> None:
        """Runs each branch as often as it is likely. The spans show a branch that is certain."""
        for branch, probability in probabilities.items():
            if probability == 1:
                self.computation(branch, loops)
            elif probability > 0:
                self._repeat(self.program.run_alone(branch, self.active), probability)

    def _loop(self, loop: Instruction, loops: tuple[float, ...]) -> None:
        trips = self.program.trips(loop)
        n_trips = trips.total()
        shown = max(trips, key=lambda active: trips[active])
        hidden = [(loop.body, active, n) for active, n in (trips - Counter([shown])).items()]
        outer_active = self.active
        outer_active_trips = self.active_trips
        self.active = shown
        self.active_trips = {
            name: sum(n for active, n in trips.items() if name in active) for name in shown
        }
        # A condition without collectives is a comparison, which takes no time worth a kernel.
        if self.program.has_collectives(loop.condition):
            self.computation(loop.condition, (*loops, n_trips + 1))
            hidden.append((loop.condition, frozenset(), n_trips))
        self.computation(loop.body, (*loops, n_trips))
        self.active = outer_active
        self.active_trips = outer_active_trips
        for computation, active, n in hidden:
            self._repeat(self.program.run_alone(computation, active), n)

    def _repeat(self, run: _Run, n: float) -> None:
        """Adds n runs of a computation that the spans do not show, or the expectation of n."""
        self.clock += n * run.clock
        self.skipped += n * run.clock
        self.compute += n * run.compute
        self.network += n * run.network
        self.exposed += n * run.exposed
        self.host += n * run.host
        self.host_exposed += n * run.host_exposed
        for name, us in run.waits.items():
            _add(self.waits, name, n * us)
        for part, us in run.parts.items():
            _add(self.parts, part, n * us)
        for kind, us in run.kinds.items():
            _add(self.kinds, kind, n * us)
        for kind, flops in run.flops.items():
            _add(self.flops, kind, n * flops)

    def _instruction(self, one: Instruction, loops: tuple[float, ...]) -> None:
        if one.opcode == "async-update":
            self.ends[one.name] = self.ends.get(one.operands[0], self.clock)
            return
        if one.opcode.endswith("-done"):
            self.wait(self.ends.get(one.operands[0], self.clock))
            return
        collectives = self.program.starts(one)
        if collectives:
            self.ends[one.name] = max(self._send(collective, loops) for collective in collectives)
            if not collectives[0].asynchronous:
                self.wait(self.ends[one.name])
            return
        copy = self.program.host_copy(one)
        if copy:
            self.ends[one.name] = self._copy(one, copy, loops)
            if not one.opcode.endswith("-start"):
                self.wait(self.ends[one.name])
            return
        if one.opcode in FREE:
            return
        location = self.program.provenance.of(self.program.custom(one) or one)
        kind, us, flops = self.program.kernel(one, location.phase)
        self._record(Span(one.name, "compute", kind, self.clock, us, loops, location))
        self.clock += us
        self.compute += us
        _add(self.parts, location.part, us)
        _add(self.kinds, kind, us)
        if flops:
            _add(self.flops, kind, flops)

    def _send(self, one: Collective, loops: tuple[float, ...]) -> float:
        """Queues a collective on its stream, and returns when it ends."""
        us = collective_us(one, self.program.target, self.program.rates)
        stream = self.program.stream(one)
        begin = max(self.clock, self.free.get(stream, 0.0))
        end = begin + us
        self._record(Span(one.name, "network", one.kind, begin, us, loops, one.where))
        self.network += us
        self.free[stream] = end
        self.transfers.append(_Transfer(begin, end, one.name))
        return end

    def _copy(self, one: Instruction, copy: host.Transfer, loops: tuple[float, ...]) -> float:
        """Queues a copy to or from the host, and returns when it ends."""
        us = host_copy_us(copy.array.bytes, self.program.target, self.program.rates)
        begin = max(self.clock, self.free.get(_HOST, 0.0))
        end = begin + us
        location = self.program.provenance.of(one)
        self._record(Span(one.name, "host", copy.direction, begin, us, loops, location))
        self.host += us
        self.free[_HOST] = end
        self.transfers.append(_Transfer(begin, end, one.name, is_host_copy=True))
        return end

    def _record(self, span: Span) -> None:
        if self.spans is not None:
            self.spans.append(dataclasses.replace(span, start=span.start - self.skipped))


def _add(times: dict[str, float], name: str, us: float) -> None:
    times[name] = times.get(name, 0.0) + us


def _at_most(spans: list[Span], limit: int) -> tuple[Span, ...]:
    """Returns at most `limit` spans, in the order of their starts.

    Short compute spans in a row in one place become one, ever longer ones until few enough are
    left. The longest stay in any case.
    """
    end = max((span.start + span.duration for span in spans), default=0.0)
    longest = end / 2**12
    while len(spans) > limit and longest < end:
        spans = _merged(spans, longest)
        longest *= 2
    largest = sorted(spans, key=lambda span: -span.duration)[:limit]
    return tuple(sorted(largest, key=lambda span: span.start))


def _merged(spans: list[Span], longest: float) -> list[Span]:
    """Returns the spans, with neighbours of at most `longest` microseconds in one place merged."""
    merged = [span for span in spans if span.stream != "compute"]
    compute = [span for span in spans if span.stream == "compute"]
    for key, neighbours in groupby(
        compute,
        lambda span: (span.where.part, span.where.phase, span.loops, span.duration <= longest),
    ):
        is_short = key[-1]
        for group in _unbroken(neighbours) if is_short else [[span] for span in neighbours]:
            longest_span = max(group, key=lambda span: span.duration)
            start = group[0].start
            duration = group[-1].start + group[-1].duration - start
            merged.append(dataclasses.replace(longest_span, start=start, duration=duration))
    return merged


def _unbroken(spans: Iterable[Span]) -> list[list[Span]]:
    """Returns the spans in groups, divided where compute waited."""
    groups: list[list[Span]] = []
    end = -math.inf
    for span in spans:
        if span.start - end < _SHORTEST_GAP:
            groups[-1].append(span)
        else:
            groups.append([span])
        end = span.start + span.duration
    return groups
