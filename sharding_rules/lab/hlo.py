"""The text of a compiled program (HLO after optimisation and scheduling) as data. Knows nothing of
meshes or models.

Format: openxla.org/xla/operation_semantics and the printer's own output, as jax 0.10.2, 0.11.2 and
0.12.0.1 write it.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator
from functools import cached_property

from sharding_rules.lab.report import Slot
from sharding_rules.lab.ticks import Window, windows

_BITS = {
    "pred": 8, "token": 0, "s2": 2, "u2": 2, "s4": 4, "u4": 4, "f4e2m1fn": 4, "s8": 8, "u8": 8,
    "s16": 16, "u16": 16, "bf16": 16, "f16": 16,
    "s32": 32, "u32": 32, "f32": 32, "s64": 64, "u64": 64, "f64": 64, "c64": 64, "c128": 128,
}  # fmt: skip
_COMMENT = re.compile(r"/\*.*?\*/")
_HEAD = re.compile(r"^(ENTRY )?%?([\w.\-]+) (?:\(.*\) -> .*)?\{\s*$")
_LINE = re.compile(r"^\s+(?:ROOT )?%([\w.\-]+) = (.*)$")
_ARRAY = re.compile(r"\b([a-z]+\d*[a-z0-9]*)\[([\d,]*)\]")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_SCOPE = re.compile(r"[\w.\-]+(?=\)*(?:/|$))")
_INSIDE = re.compile(r"body|branch_\d+_fun")
_ATTRIBUTE = re.compile(r'(\w+)="([^"]*)"')
# with jax 0.12 some kernels start in one instruction, and end in a `fusion-done`
FUSIONS = ("fusion", "fusion-start")
CALLS = (*FUSIONS, "call", "async-start")  # what runs the computations that it calls, once each
_CALLED = re.compile(r"(?:calls|to_apply|called_computations)=\{?%([\w.\-]+)")


@dataclasses.dataclass(frozen=True)
class Array:
    """One array of a shape, which may be a tuple of them."""

    dtype: str
    dims: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """f8 types of any name have 8 bits."""
        return math.ceil(math.prod(self.dims) * _BITS.get(self.dtype, 8) / 8)

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.dims))}]"


def arrays(shape: str) -> tuple[Array, ...]:
    """Every array in the text of a shape, in order, nested tuples flattened."""
    return tuple(
        Array(dtype, tuple(int(d) for d in dims.split(",") if d))
        for dtype, dims in _ARRAY.findall(shape)
    )


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One instruction of the compiled program's text."""

    name: str
    shape: str
    opcode: str
    operands: tuple[str, ...]
    text: str
    """What follows the operands: attributes, metadata, backend_config."""
    index: int
    """Its place in the schedule of its computation."""
    arguments: str = ""
    """The text between the brackets, for parameters and constants."""

    @property
    def arrays(self) -> tuple[Array, ...]:
        """The result's arrays; a tuple's elements in order."""
        return arrays(self.shape)

    @property
    def bytes(self) -> int:
        """Bytes of the result on one device."""
        return sum(array.bytes for array in self.arrays)

    @property
    def op_name(self) -> str:
        """The path of scopes that JAX traced it in; empty where XLA made the instruction itself."""
        match = re.search(r'op_name="((?:[^"\\]|\\.)*)"', self.text)
        return match[1].replace("\\'", "'") if match else ""

    @property
    def frame(self) -> int:
        """Number of its stack frame in the module's table; 0 where there is none."""
        match = re.search(r"stack_frame_id=(\d+)", self.text)
        return int(match[1]) if match else 0

    @property
    def target(self) -> str:
        """The name of the function that a custom call calls; empty for other instructions."""
        match = re.search(r'custom_call_target="([^"]*)"', self.text)
        return match[1] if match else ""

    @property
    def attributes(self) -> dict[str, str]:
        """Attributes that the author of the program attached to it
        (`jax.experimental.xla_metadata.set_xla_metadata`).
        """
        match = re.search(r"frontend_attributes=\{(.*?)\}", self.text)
        return dict(_ATTRIBUTE.findall(match[1])) if match else {}

    @property
    def called(self) -> tuple[str, ...]:
        """Computations that run once each time this runs: of fusions, calls and asynchronous
        wrappers.
        """
        return tuple(_CALLED.findall(self.text))

    @property
    def branches(self) -> tuple[str, ...]:
        """The computations of a conditional, one of which runs; empty for other instructions."""
        if match := re.search(r"branch_computations=\{(.*?)\}", self.text):
            return tuple(re.findall(r"%([\w.\-]+)", match[1]))
        return tuple(re.findall(r"(?:true|false)_computation=%([\w.\-]+)", self.text))

    @property
    def body(self) -> str:
        """The computation that a while loop repeats. Empty for other instructions."""
        match = re.search(r"body=%([\w.\-]+)", self.text)
        return match[1] if match else ""

    @property
    def condition(self) -> str:
        """The computation that decides whether a while loop continues; it runs once more than the
        body. Empty for other instructions.
        """
        match = re.search(r"condition=%([\w.\-]+)", self.text)
        return match[1] if match else ""

    @property
    def trips(self) -> int | None:
        """How often a while loop runs; None where XLA does not know."""
        match = _TRIPS.search(self.text)
        return int(match[1]) if match else None


@dataclasses.dataclass(frozen=True)
class Visit:
    """A computation as the entry reaches it."""

    computation: str
    stages: tuple[tuple[int, ...], ...]
    """By stage, the trip counts of the loops around it, outermost first. An unknown count is 1; in
    a branch with a slot, its runs."""
    conditional: bool = False
    """Inside a branch that may not be taken."""
    fused: bool = False
    """Inside a fusion: its instructions have no place in the schedule of their own."""
    bounded: bool = False
    """Inside a branch of which nothing is known: it runs at most as often as the loops say."""
    dearest: bool = True
    """Not inside a branch that another one exceeds in FLOPs, for conditionals without a slot."""

    @property
    def loops(self) -> tuple[int, ...]:
        """On the stage that runs it most."""
        return max(self.stages, key=math.prod)


@dataclasses.dataclass(frozen=True)
class Module:
    """A parsed program."""

    computations: dict[str, tuple[Instruction, ...]]
    entry: str
    _files: dict[int, str]
    _locations: dict[int, tuple[int, int]]
    _frames: dict[int, tuple[int, int]]
    slots: tuple[Slot, ...] = ()

    @property
    def n_stages(self) -> int:
        """How many kinds of devices there are, by the branches that they take."""
        return max((len(slot.stages) for slot in self.slots), default=1)

    def visits(self) -> Iterator[Visit]:
        """Every computation in the order in which the entry runs them, once for each place that it
        is called from.
        """
        yield from self._visit(Visit(self.entry, ((),) * self.n_stages))

    def _visit(self, visit: Visit) -> Iterator[Visit]:
        yield visit
        for one in self.computations.get(visit.computation, ()):
            if one.opcode == "while":
                if one.condition in self.computations:
                    tests = tuple(
                        (*loops, one.trips + 1 if one.trips is not None else 1)
                        for loops in visit.stages
                    )
                    yield from self._visit(
                        dataclasses.replace(visit, computation=one.condition, stages=tests)
                    )
                stages = tuple((*loops, one.trips or 1) for loops in visit.stages)
                yield from self._visit(
                    dataclasses.replace(visit, computation=one.body, stages=stages)
                )
            elif one.opcode == "conditional":
                for branch in one.branches:
                    yield from self._visit(self._branch(visit, one, branch))
            elif one.opcode in (*CALLS, "custom-call"):
                for called in one.called:
                    yield from self._visit(
                        dataclasses.replace(
                            visit, computation=called, fused=visit.fused or one.opcode in FUSIONS
                        )
                    )

    def _branch(self, visit: Visit, one: Instruction, branch: str) -> Visit:
        inside = dataclasses.replace(visit, computation=branch, conditional=True)
        runs = branch == self.dearest(one)
        if (slot := self.slot(one)) is None:
            return dataclasses.replace(inside, bounded=True, dearest=visit.dearest and runs)
        stages = []
        for stage, loops in enumerate(visit.stages):
            *outer, trips = loops or (1,)
            times = min(trips, slot.runs(stage))
            stages.append((*outer, times if runs else trips - times))
        return dataclasses.replace(inside, stages=tuple(stages))

    def slot(self, conditional: Instruction) -> Slot | None:
        """Returns the slot of a conditional, for the trips of the loop that it is in; None if there
        is none.
        """
        slot, window = self.named_slot(conditional), self.windows.get(conditional.name)
        return slot.within(window.begin, window.end) if slot and window else slot

    @cached_property
    def windows(self) -> dict[str, Window]:
        """The ticks that the loop around each conditional with a slot runs, by the conditional's
        name.
        """
        return windows(self)

    def named_slot(self, conditional: Instruction) -> Slot | None:
        """Returns the slot, of all ticks, whose scope a conditional was traced in directly, not
        within another branch or loop.
        """
        path = _SCOPE.findall(conditional.op_name)[:-1]
        begin = max((at + 1 for at, word in enumerate(path) if _INSIDE.fullmatch(word)), default=0)
        result = [
            (at, len(slot.scope), slot)
            for slot in self.slots
            if (at := _innermost(slot.scope.split("/"), path)) >= begin
        ]
        return max(result, key=lambda each: each[:2])[2] if result else None

    def slots_in(self, computation: str) -> Iterator[tuple[str, Slot]]:
        """Conditionals with a slot in a computation and its branches, those in loops of their own
        left out.
        """
        for name, _ in self.named_slots_in(computation):
            if slot := self.slot(self.by_name[name]):
                yield name, slot

    def named_slots_in(self, computation: str) -> Iterator[tuple[str, Slot]]:
        """The same with the slots of all ticks."""
        for one in self.computations.get(computation, ()):
            if one.opcode == "conditional" and (slot := self.named_slot(one)):
                yield one.name, slot
            for inside in (*one.branches, *(one.called if one.opcode == "call" else ())):
                yield from self.named_slots_in(inside)

    def dearest(self, conditional: Instruction) -> str:
        """The branch with the most FLOPs, then with the most instructions; of a slot the one that
        runs.
        """
        return max(
            conditional.branches,
            key=lambda branch: (self.total_flops(branch), self._lines(branch)),
            default="",
        )

    def _lines(self, computation: str) -> int:
        """Returns how many instructions a computation has, with those of what it calls."""
        if computation not in self._sizes:
            lines = self.computations.get(computation, ())
            inside = sum(
                self._lines(name)
                for one in lines
                for name in (*one.called, *one.branches, one.body)
                if name
            )
            self._sizes[computation] = len(lines) + inside
        return self._sizes[computation]

    @cached_property
    def _sizes(self) -> dict[str, int]:
        return {}

    @cached_property
    def by_name(self) -> dict[str, Instruction]:
        """Names are unique in a module, parameters of computations included."""
        return {one.name: one for computation in self.computations.values() for one in computation}

    def stack(self, instruction: Instruction) -> Iterator[str]:
        """file:line of each stack frame, innermost first; none where XLA made the instruction
        itself.
        """
        frame = instruction.frame
        for _ in range(len(self._frames) + 1):
            if frame not in self._frames:
                return
            location, frame = self._frames[frame]
            file, line = self._locations.get(location, (0, 0))
            if file in self._files:
                yield f"{self._files[file]}:{line}"

    @cached_property
    def home(self) -> dict[str, str]:
        """The computation of each instruction, by names."""
        return {one.name: name for name, lines in self.computations.items() for one in lines}

    @cached_property
    def callers(self) -> dict[str, Instruction]:
        """The instruction that runs each computation; the last one where there are several."""
        everything = (one for lines in self.computations.values() for one in lines)
        return {
            name: one
            for one in everything
            for name in {*one.called, *one.branches, one.body, one.condition}
            if name
        }

    def flops(self, instruction: Instruction) -> int:
        """Returns the FLOPs of the matmuls in one instruction and in what it calls, run once. Loops
        inside count with their trips, and of branches the one with the most.

        XLA cannot look into a kernel. Any kernel can say its FLOPs in the attribute `kernel_flops`
        of its call (before jax 0.12, Pallas's `cost_estimate` is dropped on Mosaic GPU). Fused
        attention that says nothing, such as cuDNN's, is known by its operands.
        """
        if instruction.opcode == "dot":
            return (
                2
                * math.prod(instruction.arrays[0].dims)
                * self._contracted(instruction, r"lhs_contracting_dims=\{([\d,]*)\}")
            )
        if instruction.opcode == "custom-call" and instruction.target.startswith("__cublas$"):
            return (
                2
                * math.prod(instruction.arrays[0].dims)
                * self._contracted(instruction, r'"lhs_contracting_dimensions":\[([^\]]*)\]')
            )
        if instruction.opcode == "custom-call":
            said = instruction.attributes.get("kernel_flops", "")
            return int(said) if said.isdecimal() else self._attention(instruction)
        if instruction.opcode == "while":
            return (instruction.trips or 1) * self.total_flops(instruction.body)
        if instruction.opcode == "conditional":
            return max(map(self.total_flops, instruction.branches), default=0)
        if instruction.opcode in CALLS:
            return sum(map(self.total_flops, instruction.called))
        return 0

    def total_flops(self, computation: str) -> int:
        """Returns the FLOPs of the matmuls of one run of a computation."""
        if computation not in self._flops:
            self._flops[computation] = sum(
                self.flops(one) for one in self.computations.get(computation, ())
            )
        return self._flops[computation]

    @cached_property
    def _flops(self) -> dict[str, int]:
        return {}

    def _attention(self, call: Instruction) -> int:
        """FLOPs of fused attention: the first operands are queries, keys and values of four axes,
        the last one the head's width.
        """
        known = self.by_name
        operands = [
            known[name].arrays[0].dims
            for name in call.operands
            if name in known and known[name].arrays
        ]
        if (
            len(operands) < 3
            or any(len(dims) != 4 for dims in operands[:3])
            or operands[0][-1] != operands[1][-1]
        ):
            return 0
        # Forward: scores and output. Backward, which gets the output's gradient: scores, theirs,
        # and one for each gradient that it returns.
        backward = operands[0] in operands[3:]
        matmuls = 2 + sum(len(array.dims) == 4 for array in call.arrays) if backward else 2
        keys = max(operands[1][1:3])  # Longer than there are heads, whichever comes first.
        causal = call.target.startswith("__cudnn") and "causal" in call.text.lower()
        return 2 * matmuls * math.prod(operands[0]) * keys // (2 if causal else 1)

    def _contracted(self, dot: Instruction, pattern: str) -> int:
        found, left = re.search(pattern, dot.text), self.by_name.get(dot.operands[0])
        dims = [int(d) for d in re.findall(r"\d+", found[1])] if found else []
        return math.prod(left.arrays[0].dims[d] for d in dims) if left else 1


def _innermost(scopes: list[str], path: list[str]) -> int:
    """Returns the position in a path of the last of these scopes, if the path has them in this
    order; else -1.
    """
    result = []
    for scope in reversed(scopes):
        before = path[: result[-1]] if result else path
        if scope not in before:
            return -1
        result.append(len(before) - 1 - before[::-1].index(scope))
    return result[0]


def parse(text: str, slots: tuple[Slot, ...] = ()) -> Module:
    """`compiled.as_text()` as a Module. Raises ValueError where there is no entry computation.

    slots: what is known of its conditionals.
    """
    computations: dict[str, list[Instruction]] = {}
    entry, current = "", None
    for line in text.splitlines():
        if line.startswith((" ", "\t")):
            if current is not None and (match := _LINE.match(line)):
                current.append(_instruction(match[1], _COMMENT.sub("", match[2]), len(current)))
        elif line.startswith("}"):
            current = None
        elif not line.startswith("HloModule") and (head := _HEAD.match(_COMMENT.sub("", line))):
            current = computations.setdefault(head[2], [])
            entry = head[2] if head[1] else entry
    if not entry:
        raise ValueError("no ENTRY computation in this text: it is not an HLO module")
    return Module(
        {name: tuple(lines) for name, lines in computations.items()}, entry, *_tables(text), slots
    )


def _instruction(name: str, text: str, index: int) -> Instruction:
    end = _closing(text, 0) + 1 if text.startswith("(") else text.index(" ")
    shape, rest = text[:end], text[end:].lstrip()
    opening = rest.find("(")
    closing = _closing(rest, opening)
    inside = rest[opening + 1 : closing]
    operands = tuple(re.findall(r"%([\w.\-]+)", inside))
    return Instruction(
        name,
        shape,
        rest[:opening],
        operands,
        rest[closing + 1 :],
        index,
        "" if operands else inside,
    )


def _closing(text: str, opening: int) -> int:
    """Index of the bracket that closes the one at `opening`."""
    depth = 0
    for at in range(opening, len(text)):
        depth += (text[at] == "(") - (text[at] == ")")
        if depth == 0:
            return at
    return len(text) - 1


def _tables(
    text: str,
) -> tuple[dict[int, str], dict[int, tuple[int, int]], dict[int, tuple[int, int]]]:
    """Files, locations (file, line) and frames (location, parent) of the stack traces, by number.

    XLA writes a parent one too high: 1 is none.
    """
    head = text[: text.find("\n}")]
    files = {
        int(n): path
        for n, path in re.findall(
            r'^(\d+) "([^"]*/[^"]*|[^"]*\.py)"$', _section(head, "FileNames"), re.M
        )
    }
    lines = re.findall(
        r"^(\d+) \{file_name_id=(\d+).*?line=(\d+)", _section(head, "FileLocations"), re.M
    )
    frames = re.findall(
        r"^(\d+) \{file_location_id=(\d+)(?: parent_frame_id=(\d+))?",
        _section(head, "StackFrames"),
        re.M,
    )
    return (
        files,
        {int(n): (int(file), int(line)) for n, file, line in lines},
        {int(n): (int(location), int(parent or 1) - 1) for n, location, parent in frames},
    )


def _section(head: str, title: str) -> str:
    match = re.search(rf"^{title}\n(.*?)(?:\n\n|\Z)", head, re.M | re.S)
    return match[1] if match else ""
