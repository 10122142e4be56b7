"""A compiled program's schedule replayed against estimates: how long a step might take, and what of its network time it waits for.

A second opinion, not a measurement: nothing runs. Against an analytic model calibrated on published H100 runs, replays of this kind
were within 3 % on two of five layouts and 20-35 % off on the others: compare layouts with it, and believe no single number. Left out are
copies to and from the host, kernels that run side by side, stragglers, congestion, and the tuning of matmuls, which needs a GPU.

Location `estimates` ask for it, XLA writes an estimate called `sol` (speed of light) into the program. For kernels
bound by memory it is bytes / peak bandwidth. For matmuls it is a measured table where operands and result are bf16 (750 TFLOP/s for
large ones on an H100) and nonsense elsewhere: a bf16 matmul with an f32 result comes out 60 times too slow. So a matmul that XLA calls more
than twice as slow as its roofline gets the roofline. Collectives are priced here, because XLA assumes another network and stops at 5 ms.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from sharding_rules.lab.hlo import Instruction, Module
from sharding_rules.lab.ledger import started
from sharding_rules.lab.provenance import Provenance
from sharding_rules.lab.report import Collective, Span, Timeline
from sharding_rules.lab.targets import Target

MATMUL, MEMORY, NVLINK, NETWORK = 0.77, 0.9, 0.78, 0.84
"""Share of a data sheet's peak that large matmuls (cuBLAS), copies, and collectives (NCCL's bus bandwidth) are taken to reach. Assumed."""
ATTENTION, ATTENTION_BACKWARD = 0.62, 0.52
"""The same of fused attention kernels: a little under FlashAttention-3's published 640 and 540 TFLOP/s on an H100. Assumed of ours too.

Our kernel has never been measured. It is assumed to reach these shares of the FLOPs that it reports, the recomputed ones of its backward
included, times the share of the SMs that, by its own estimate, its grid keeps busy. The published figures are of grids that fill them.
"""
KERNEL = 1.5
"""Microseconds that the shortest kernel takes."""
SPANS = 600
"""The most spans of a timeline, so that a report stays small."""

_FREE = {
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id", "replica-id", "opt-barrier",
    "add-dependency", "domain", "iota", "copy-start", "send", "recv", "infeed", "outfeed",
}  # fmt: skip
_SOL = re.compile(r'"exec_time_us":"?([\d.eE+\-]+)"?[^}]*?"name":"sol"')


def estimates(target: Target | None) -> dict[str, Any]:
    """Compiler options that make XLA write its estimates into the program, and change nothing else in it.

    None before Hopper: XLA has no table of matmuls for sm_80 and fails (`NOT_FOUND: Cannot find key`). Bytes and FLOPs must do there.
    """
    return {"xla_gpu_collect_cost_model_stats": True} if target and target.capability >= (9, 0) else {}


def replay(module: Module, provenance: Provenance, sent: Iterable[Collective], target: Target) -> Timeline:
    """The program's timeline on `target`: one compute stream, one of collectives, in the order they are started, and one of permutes.

    sent: the program's collectives, as `ledger.collectives` finds them.

    Compute continues after a collective's start, and waits at its done; without start and done it blocks. Loops run their known trips
    (the spans show one, and time as if it were the only one), conditionals their dearest branch. Where slots say which stages run a
    conditional in which trip, each trip is that of its slowest stage: a ring of sends and receives lets no stage run ahead. The most
    frequent is shown.
    """
    run = _Run(_Prices(module, provenance, target, {one.name: one for one in sent}), spans=[])
    run.computation(module.entry, ())
    run.wait(max(run.network_free.values()))
    return Timeline(run.clock, run.compute, run.network, run.exposed, _at_most(run.spans or [], SPANS), dict(run.waits))


def priced(sent: Sequence[Collective], line: Timeline, target: Target) -> tuple[Collective, ...]:
    """The collectives with their predicted durations, and with what compute waits for each: those of one name share it by their runs."""
    runs = Counter[str]()
    for one in sent:
        runs[one.name] += one.times
    return tuple(
        dataclasses.replace(
            one, duration=collective_us(one, target), exposed=line.waits.get(one.name, 0.0) * one.times / max(1, runs[one.name])
        )
        for one in sent
    )


def collective_us(one: Collective, target: Target) -> float:
    """Microseconds of one collective alone: bytes / bandwidth of its slowest link, plus latency.

    A ring through nodes with k members in each has k network ports between two nodes; pairs of devices (all-to-all, permute) have one each.
    Latency of a ring is linear in the nodes, an all-reduce's that of NCCL's double tree; its microseconds are assumed.
    """
    pairwise = one.kind in ("all-to-all", "ragged-all-to-all", "collective-permute")
    ports = 1 if pairwise else max(1, one.group // one.nodes)
    bandwidth = NVLINK * target.nvlink
    if one.nodes > 1:
        bandwidth = min(bandwidth, ports * NETWORK * target.network)
    inside = max(1, one.group // one.nodes) - 1
    across = 2 * math.ceil(math.log2(one.nodes)) if one.kind == "all-reduce" else min(one.nodes - 1, 1) if pairwise else one.nodes - 1
    latency = 8 + 1.5 * (1 if pairwise else inside) + (7 if one.nodes > 1 else 0) + 6 * across
    return 1e6 * one.wire / bandwidth + latency


@dataclasses.dataclass(frozen=True)
class _Prices:
    """Microseconds of single instructions."""

    module: Module
    provenance: Provenance
    target: Target
    collectives: dict[str, Collective]
    """By name."""
    _alone: dict[tuple[str, frozenset[str]], _Run] = dataclasses.field(default_factory=dict)

    def sent(self, one: Instruction) -> list[Collective]:
        """The collectives that an instruction starts: several where XLA has grouped them."""
        if own := self.collectives.get(one.name):
            return [own]
        return [self.collectives[inside.name] for inside in started(self.module, one) if inside.name in self.collectives]

    def sends(self, computation: str) -> bool:
        """Whether there is a collective in it."""
        return any(self.sent(one) for one in self.module.computations.get(computation, ()))

    def alone(self, computation: str, taken: frozenset[str] = frozenset()) -> _Run:
        """A computation from an idle start. taken: conditionals with a slot that run."""
        if (computation, taken) not in self._alone:
            self._alone[computation, taken] = run = _Run(self, taken=taken)
            run.computation(computation, ())
            run.wait(max(run.network_free.values()))
        return self._alone[computation, taken]

    def trips(self, loop: Instruction) -> Counter[frozenset[str]]:
        """How many trips of a loop are alike: by the conditionals with a slot that run on the slowest stage of each."""
        slots = dict(self.module.slots_in(loop.body))
        count = loop.trips or 1
        if not slots:
            return Counter({frozenset(): count})
        result = Counter[frozenset[str]]()
        for trip in range(count):
            taken = [
                frozenset(name for name, slot in slots.items() if slot.stages[stage][trip : trip + 1] == "1")
                for stage in range(self.module.n_stages)
            ]
            result[max(dict.fromkeys(taken), key=lambda each: self.alone(loop.body, each).clock)] += 1
        return result

    def kernel(self, instruction: Instruction, phase: str) -> tuple[str, float]:
        """Kind and microseconds of what runs on the device's own cores."""
        flops = self.module.flops(instruction)
        if instruction.opcode == "custom-call" and not instruction.target.startswith("__cublas$") and flops:
            return self._custom(instruction, flops, phase)
        if flops:
            return "matmul", max(KERNEL, self._matmul(instruction, flops))
        kind = "copy" if instruction.opcode.startswith("copy") or "transpose" in instruction.name else "elementwise"
        return kind, max(KERNEL, self._sol(instruction) / MEMORY or self._memory(instruction))

    def _custom(self, call: Instruction, flops: int, phase: str) -> tuple[str, float]:
        """A kernel that says its FLOPs and, perhaps, bytes and name, or fused attention, known by its operands."""
        said = call.attributes
        kind = "attention" if "kernel_flops" not in said or "attention" in said.get("kernel", "") else "matmul"
        share = MATMUL if kind == "matmul" else ATTENTION_BACKWARD if phase == "backward" else ATTENTION
        share *= float(said.get("kernel_occupancy", 1))
        moved = said.get("kernel_bytes", "")
        memory = self._moving(int(moved)) if moved.isdecimal() else self._memory(call)
        return kind, max(KERNEL, memory, 1e6 * flops / (share * self._peak(call)))

    def _matmul(self, instruction: Instruction, flops: int) -> float:
        roofline = max(1e6 * flops / (MATMUL * self._peak(instruction)), self._memory(instruction))
        sol = self._sol(instruction)
        return sol if 0 < sol <= 2 * roofline else roofline

    def _peak(self, instruction: Instruction) -> float:
        """FLOP/s of the tensor cores for the operands' type."""
        inside = (one for name in instruction.called for one in self.module.computations.get(name, ()) if one.opcode == "dot")
        left = self.module.by_name.get(next(inside, instruction).operands[0])
        dtype = left.arrays[0].dtype if left and left.arrays else "bf16"
        return self.target.flops.get("f8" if dtype.startswith("f8") else dtype, self.target.flops["bf16"])

    def _memory(self, instruction: Instruction) -> float:
        """Returns the microseconds of reading the operands and writing the result once. For an array that a fusion only slices or
        updates in place, only the slice counts.
        """
        inside = [one for name in instruction.called for one in self.module.computations.get(name, ())]
        if not inside:
            return self._moving(instruction.bytes + sum(self._operand_bytes(instruction)))
        moved = sum(self._operand_bytes(one)[1] for one in inside if one.opcode == "dynamic-update-slice") or inside[-1].bytes
        for parameter in (one for one in inside if one.opcode == "parameter"):
            moved += min(parameter.bytes, sum(self._read(parameter, user) for user in _users(inside, parameter.name)))
        return self._moving(moved)

    def _read(self, parameter: Instruction, user: Instruction) -> int:
        if user.opcode in ("dynamic-slice", "slice", "gather"):
            return user.bytes
        in_place = user.opcode == "dynamic-update-slice" and parameter.bytes > self._operand_bytes(user)[1]
        return 0 if in_place else parameter.bytes

    def _moving(self, size: int) -> float:
        return 1e6 * size / (MEMORY * self.target.hbm_bandwidth)

    def _operand_bytes(self, instruction: Instruction) -> list[int]:
        known = self.module.by_name
        return [known[name].bytes if name in known else 0 for name in instruction.operands]

    @staticmethod
    def _sol(instruction: Instruction) -> float:
        match = _SOL.search(instruction.text)
        return float(match[1]) if match else 0.0


@dataclasses.dataclass
class _Run:
    """The two streams while a computation runs. Microseconds."""

    prices: _Prices
    spans: list[Span] | None = None
    """None: not recorded."""
    clock: float = 0.0
    """Time that the compute stream has reached."""
    network_free: dict[bool, float] = dataclasses.field(default_factory=lambda: {False: 0.0, True: 0.0})
    """When the stream of collectives is, and that of sends from device to device (collective-permute), which XLA keeps apart."""
    skipped: float = 0.0
    """Time of later trips, which the spans leave out."""
    compute: float = 0.0
    network: float = 0.0
    exposed: float = 0.0
    waits: dict[str, float] = dataclasses.field(default_factory=dict)
    """`exposed` by the collective that the network is busy with."""
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
            self.computation(max(one.branches, key=lambda branch: self.prices.alone(branch, self.taken).clock), loops)
        elif one.name in self.taken:
            self.computation(module.dearest(one), (*loops[:-1], self.often.get(one.name, 1)))
        else:
            for idle in [branch for branch in one.branches if branch != module.dearest(one)][:1]:
                self.computation(idle, loops)

    def _loop(self, one: Instruction, loops: tuple[int, ...]) -> None:
        trips = self.prices.trips(one)
        shown = max(trips, key=lambda taken: trips[taken])
        outer = self.taken, self.often
        self.taken, self.often = shown, {name: sum(n for taken, n in trips.items() if name in taken) for name in shown}
        later = [(one.body, taken, n) for taken, n in (trips - Counter([shown])).items()]
        if self.prices.sends(one.condition):  # else it is a comparison, which takes no time worth a kernel
            self.computation(one.condition, (*loops, trips.total() + 1))
            later.append((one.condition, frozenset(), trips.total()))
        self.computation(one.body, (*loops, trips.total()))
        self.taken, self.often = outer
        for computation, taken, n in later:
            again = self.prices.alone(computation, taken)
            for total in ("clock", "skipped", "compute", "network", "exposed"):
                more = again.clock if total == "skipped" else getattr(again, total)
                setattr(self, total, getattr(self, total) + n * more)
            for name, us in again.waits.items():
                self.waits[name] = self.waits.get(name, 0.0) + n * us

    def _instruction(self, one: Instruction, computation: str, loops: tuple[int, ...]) -> None:
        if one.opcode == "async-update":
            self.ends[one.name] = self.ends.get(one.operands[0], self.clock)
        elif one.opcode.endswith("-done"):
            self.wait(self.ends.get(one.operands[0], self.clock))
        elif sent := self.prices.sent(one):
            self.ends[one.name] = max(self._send(each, loops) for each in sent)
            if not sent[0].asynchronous:
                self.wait(self.ends[one.name])
        elif one.opcode not in _FREE:
            where = self.prices.provenance.of(one)
            kind, us = self.prices.kernel(one, where.phase)
            self._record(Span(one.name, "compute", kind, self.clock, us, loops, where))
            self.clock += us
            self.compute += us

    def _send(self, one: Collective, loops: tuple[int, ...]) -> float:
        us, alone = collective_us(one, self.prices.target), one.kind == "collective-permute"
        begin = max(self.clock, self.network_free[alone])
        self._record(Span(one.name, "network", one.kind, begin, us, loops, one.where))
        self.network += us
        self.network_free[alone] = begin + us
        self.flying.append((begin, begin + us, one.name))
        return begin + us

    def wait(self, until: float) -> None:
        """Compute is idle until then: for what the network is busy with, the one that ends first where both of its streams are."""
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


def _users(computation: Iterable[Instruction], name: str) -> Iterator[Instruction]:
    """Yields the instructions that read a value, directly or reshaped."""
    for one in computation:
        if name in one.operands and one.opcode in ("bitcast", "reshape"):
            yield from _users(computation, one.name)
        elif name in one.operands:
            yield one


def _at_most(spans: list[Span], limit: int) -> tuple[Span, ...]:
    """Short compute spans in a row in one place become one, ever longer ones until few enough are left; the longest stay in any case."""
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
    for (*_, short), row in groupby(compute, lambda span: (span.where.part, span.where.phase, span.loops, span.duration <= longest)):
        same = list(row)
        for group in _unbroken(same) if short else [[span] for span in same]:
            chief = max(group, key=lambda span: span.duration)
            end = group[-1].start + group[-1].duration
            merged.append(dataclasses.replace(chief, start=group[0].start, duration=end - group[0].start))
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
