"""Parses the text of a compiled program (HLO after optimisation and scheduling).

Knows nothing of meshes or models. The format is that of openxla.org/xla/operation_semantics and of
the printer's own output, as jax 0.10.2, 0.11.2 and 0.12.0.1 write it.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

from sharding_rules.lab.report import Slot
from sharding_rules.lab.ticks import Window, windows

_BITS = {
    "pred": 8, "token": 0, "s2": 2, "u2": 2, "s4": 4, "u4": 4, "f4e2m1fn": 4, "s8": 8, "u8": 8,
    "s16": 16, "u16": 16, "bf16": 16, "f16": 16,
    "s32": 32, "u32": 32, "f32": 32, "s64": 64, "u64": 64, "f64": 64, "c64": 64, "c128": 128,
}  # fmt: skip

# With jax 0.12 some kernels start in one instruction, and end in a `fusion-done`.
FUSIONS = ("fusion", "fusion-start")
# Instructions that run the computations that they call, once each.
CALLS = (*FUSIONS, "call", "async-start")

# The forms of lines that are read. Comments may stand anywhere in them.

# (s32[], f32[8], /*index=2*/f32[8])
_COMMENT = re.compile(r"/\*.*?\*/")
# ENTRY %main.42 (Arg_0.1: f32[8,4]) -> f32[8] {
# %fused_computation {
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) (?:\(.*\) -> .*)?\{\s*$")
#   ROOT %add.3 = f32[8,4]{1,0} add(%p.1, %p.2), metadata={...}
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%([\w.\-]+) = (.*)$")
# bf16[4,512,8192]
# f32[8,2048,1024]{2,1,0:S(5)}
_ARRAY = re.compile(r"\b([a-z]+\d*[a-z0-9]*)\[([\d,]*)\](\{[^}]*\})?")
_HOST_SPACE = "S(5)"
# %add.3
_NAME = re.compile(r"%([\w.\-]+)")

# The forms of attributes, which follow the operands.

# metadata={op_name="jit(step)/layers/dot_general" stack_frame_id=7}
_OP_NAME = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')
_STACK_FRAME = re.compile(r"stack_frame_id=(\d+)")
# custom_call_target="__cublas$gemm"
_TARGET = re.compile(r'custom_call_target="([^"]*)"')
# frontend_attributes={kernel="attention forward",kernel_flops="4096"}
_FRONTEND_ATTRIBUTES = re.compile(r"frontend_attributes=\{(.*?)\}")
_ATTRIBUTE = re.compile(r'(\w+)="([^"]*)"')
# calls=%fused_computation
# to_apply=%add
# called_computations={%async_wrapped}
_CALLED = re.compile(r"(?:calls|to_apply|called_computations)=\{?%([\w.\-]+)")
# branch_computations={%branch_0, %branch_1}
# true_computation=%then, false_computation=%else
_BRANCHES = re.compile(r"branch_computations=\{(.*?)\}")
_TRUE_AND_FALSE = re.compile(r"(?:true|false)_computation=%([\w.\-]+)")
# condition=%cond.1, body=%body.1, backend_config={"known_trip_count":{"n":"96"}}
_CONDITION = re.compile(r"condition=%([\w.\-]+)")
_BODY = re.compile(r"body=%([\w.\-]+)")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
# lhs_contracting_dims={1}, of a dot
_DOT_CONTRACTED = re.compile(r"lhs_contracting_dims=\{([\d,]*)\}")
# "lhs_contracting_dimensions":["1"], in the backend_config of a call of cuBLAS
_CUBLAS_CONTRACTED = re.compile(r'"lhs_contracting_dimensions":\[([^\]]*)\]')

# The scopes of an op_name: jit(step)/transpose(jvp(forward_slot))/cond/branch_1_fun/dot_general
_SCOPE = re.compile(r"[\w.\-]+(?=\)*(?:/|$))")
_LOOP_OR_BRANCH_SCOPE = re.compile(r"body|branch_\d+_fun")

# The tables of stack traces at the head of a module, each a title and its lines:
# 1 "/home/me/train.py"
_FILE = re.compile(r'^(\d+) "([^"]*/[^"]*|[^"]*\.py)"$', re.MULTILINE)
# 3 {file_name_id=1 function_name_id=2 line=107 end_line=107 column=4 end_column=9}
_FILE_LOCATION = re.compile(r"^(\d+) \{file_name_id=(\d+).*?line=(\d+)", re.MULTILINE)
# 7 {file_location_id=3 parent_frame_id=5}
_FRAME = re.compile(r"^(\d+) \{file_location_id=(\d+)(?: parent_frame_id=(\d+))?", re.MULTILINE)


@dataclasses.dataclass(frozen=True)
class Array:
    """One array of a shape, which may be a tuple of them."""

    dtype: str
    dims: tuple[int, ...]
    on_host: bool = dataclasses.field(default=False, compare=False)
    """In the host's pinned memory, not the device's."""

    @property
    def bytes(self) -> int:
        """Bytes of the array; f8 types of any name have 8 bits."""
        return math.ceil(math.prod(self.dims) * _BITS.get(self.dtype, 8) / 8)

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.dims))}]"


def arrays(shape: str) -> tuple[Array, ...]:
    """Returns every array in the text of a shape, in order, nested tuples flattened."""
    return tuple(
        Array(dtype, _dims(dims), _HOST_SPACE in layout)
        for dtype, dims, layout in _ARRAY.findall(shape)
    )


def _dims(text: str) -> tuple[int, ...]:
    """Returns (4, 512) for 4,512."""
    return tuple(int(size) for size in text.split(",") if size)


def _group(pattern: re.Pattern[str], text: str) -> str:
    """Returns the first group of the first match; empty without a match."""
    match = pattern.search(text)
    return match[1] if match else ""


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
    """Its position in the schedule of its computation."""
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
        return _group(_OP_NAME, self.text).replace("\\'", "'")

    @property
    def frame(self) -> int:
        """Number of its stack frame in the module's table; 0 where there is none."""
        return int(_group(_STACK_FRAME, self.text) or 0)

    @property
    def target(self) -> str:
        """The name of the function that a custom call calls; empty for other instructions."""
        return _group(_TARGET, self.text)

    @property
    def attributes(self) -> dict[str, str]:
        """Attributes that the author of the program attached to it.

        `jax.experimental.xla_metadata.set_xla_metadata` attaches them.
        """
        return dict(_ATTRIBUTE.findall(_group(_FRONTEND_ATTRIBUTES, self.text)))

    @property
    def called(self) -> tuple[str, ...]:
        """Computations that fusions, calls and asynchronous wrappers run once each time."""
        return tuple(_CALLED.findall(self.text))

    @property
    def branches(self) -> tuple[str, ...]:
        """The computations of a conditional, one of which runs; empty for other instructions."""
        match = _BRANCHES.search(self.text)
        if match:
            return tuple(_NAME.findall(match[1]))
        return tuple(_TRUE_AND_FALSE.findall(self.text))

    @property
    def body(self) -> str:
        """The computation that a while loop repeats; empty for other instructions."""
        return _group(_BODY, self.text)

    @property
    def condition(self) -> str:
        """The computation that decides whether a while loop continues.

        It runs once more than the body. Empty for other instructions.
        """
        return _group(_CONDITION, self.text)

    @property
    def trips(self) -> int | None:
        """How often a while loop runs; None where XLA does not know."""
        match = _TRIPS.search(self.text)
        return int(match[1]) if match else None


@dataclasses.dataclass(frozen=True)
class Visit:
    """A computation as the entry reaches it."""

    computation: str
    stages: tuple[tuple[float, ...], ...]
    """By stage, the trip counts of the loops around it, outermost first. An unknown count is 1; in
    a branch with a slot, its runs, and in one with a probability, its expected runs."""
    conditional: bool = False
    """Inside a branch that may not be taken."""
    fused: bool = False
    """Inside a fusion: its instructions have no place in the schedule of their own."""
    bounded: bool = False
    """Inside a branch of which nothing is known: it runs at most as often as the loops say."""
    dearest: bool = True
    """Not inside a branch that another one exceeds in FLOPs, for conditionals of which nothing is
    known."""

    @property
    def loops(self) -> tuple[float, ...]:
        """The trip counts on the stage that runs it most."""
        return max(self.stages, key=math.prod)


@dataclasses.dataclass(frozen=True)
class Module:
    """A parsed program."""

    computations: dict[str, tuple[Instruction, ...]]
    entry: str
    _stack_traces: _StackTraces
    slots: tuple[Slot, ...] = ()
    probabilities: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """By the named scope around a conditional, how likely its dearest branch runs."""

    # Instructions and their computations.

    @cached_property
    def by_name(self) -> dict[str, Instruction]:
        """Instructions by name. Names are unique, parameters of computations included."""
        return {instruction.name: instruction for instruction in self._instructions()}

    @cached_property
    def uses_host(self) -> bool:
        """Whether any array of the program is in the host's memory."""
        return any(_HOST_SPACE in instruction.shape for instruction in self._instructions())

    @cached_property
    def home(self) -> dict[str, str]:
        """The computation of each instruction, by names."""
        return {
            instruction.name: computation
            for computation, instructions in self.computations.items()
            for instruction in instructions
        }

    @cached_property
    def callers(self) -> dict[str, Instruction]:
        """The instruction that runs each computation; the last one where there are several."""
        callers = {}
        for instruction in self._instructions():
            for computation in (
                *instruction.called,
                *instruction.branches,
                instruction.body,
                instruction.condition,
            ):
                if computation:
                    callers[computation] = instruction
        return callers

    def _instructions(self) -> Iterator[Instruction]:
        for instructions in self.computations.values():
            yield from instructions

    def stack(self, instruction: Instruction) -> Iterator[str]:
        """Yields file:line of each stack frame, innermost first.

        Yields nothing where XLA made the instruction itself.
        """
        traces = self._stack_traces
        number = instruction.frame
        # A frame cannot have more ancestors than there are frames: a cycle ends here.
        for _ in range(len(traces.frames) + 1):
            if number not in traces.frames:
                return
            location, number = traces.frames[number]
            file, line = traces.locations.get(location, (0, 0))
            if file in traces.files:
                yield f"{traces.files[file]}:{line}"

    # The order in which computations run.

    @property
    def n_stages(self) -> int:
        """Kinds of devices by the branches that they take."""
        return max((len(slot.stages) for slot in self.slots), default=1)

    def visits(self) -> Iterator[Visit]:
        """Yields every computation in the order in which the entry runs them.

        A computation comes once for each instruction that calls it.
        """
        yield from self._visit(Visit(self.entry, ((),) * self.n_stages))

    def _visit(self, visit: Visit) -> Iterator[Visit]:
        yield visit
        for instruction in self.computations.get(visit.computation, ()):
            for callee in self._callees(visit, instruction):
                yield from self._visit(callee)

    def _callees(self, visit: Visit, instruction: Instruction) -> Iterator[Visit]:
        """Yields the computations that an instruction runs."""
        if instruction.opcode == "while":
            trips = instruction.trips
            if instruction.condition in self.computations:
                n_tests = trips + 1 if trips is not None else 1
                yield _in_loop(visit, instruction.condition, n_tests)
            yield _in_loop(visit, instruction.body, trips or 1)
        elif instruction.opcode == "conditional":
            for branch in instruction.branches:
                yield self._in_branch(visit, instruction, branch)
        elif instruction.opcode in (*CALLS, "custom-call"):
            fused = visit.fused or instruction.opcode in FUSIONS
            for computation in instruction.called:
                yield dataclasses.replace(visit, computation=computation, fused=fused)

    def _in_branch(self, visit: Visit, conditional: Instruction, branch: str) -> Visit:
        """Returns the visit of a branch; with a slot, the one with most FLOPs runs in the slot."""
        inside = dataclasses.replace(visit, computation=branch, conditional=True)
        is_dearest = branch == self.dearest(conditional)
        slot = self.slot(conditional)
        probabilities = self.branch_probabilities(conditional)
        if slot is None and not probabilities:
            return dataclasses.replace(inside, bounded=True, dearest=visit.dearest and is_dearest)
        stages = []
        for stage, loops in enumerate(visit.stages):
            *outer, trips = loops or (1,)
            if slot is None:
                runs = _expected(trips, probabilities[branch])
            elif is_dearest:
                runs = min(trips, slot.runs(stage))
            else:
                runs = trips - min(trips, slot.runs(stage))
            stages.append((*outer, runs))
        return dataclasses.replace(inside, stages=tuple(stages))

    def dearest(self, conditional: Instruction) -> str:
        """Returns the branch with the most FLOPs, then with the most instructions.

        With a slot or a probability, it is the branch that runs in the slot, or with this
        probability.
        """
        return max(
            conditional.branches,
            key=lambda branch: (self.total_flops(branch), self._n_instructions(branch)),
            default="",
        )

    def _n_instructions(self, computation: str) -> int:
        """Returns the instructions of a computation, with those of what it calls."""
        if computation not in self._sizes:
            instructions = self.computations.get(computation, ())
            size = len(instructions)
            for instruction in instructions:
                for callee in (*instruction.called, *instruction.branches, instruction.body):
                    if callee:
                        size += self._n_instructions(callee)
            self._sizes[computation] = size
        return self._sizes[computation]

    @cached_property
    def _sizes(self) -> dict[str, int]:
        """The cache of `_n_instructions`."""
        return {}

    # Probabilities of conditionals.

    def branch_probabilities(self, conditional: Instruction) -> dict[str, float]:
        """Returns the probability of each branch of a conditional; empty if none is known."""
        scope = self.probable_scope(conditional)
        if scope is None:
            return {}
        probability = self.probabilities[scope]
        dearest = self.dearest(conditional)
        others = [branch for branch in conditional.branches if branch != dearest]
        return {dearest: probability} | {
            branch: (1 - probability) / len(others) for branch in others
        }

    def probable_scope(self, conditional: Instruction) -> str | None:
        """Returns the scope in `probabilities` that a conditional was traced in directly.

        None if there is none. A scope outside of another branch or loop around the conditional
        does not count.
        """
        return _scope_around(conditional, self.probabilities)

    # Slots of conditionals.

    def slot(self, conditional: Instruction) -> Slot | None:
        """Returns the slot of a conditional, for the trips of its loop; None if there is none."""
        slot = self.named_slot(conditional)
        window = self.windows.get(conditional.name)
        if slot is None or window is None:
            return slot
        return slot.within(window.begin, window.end)

    @cached_property
    def windows(self) -> dict[str, Window]:
        """By conditional with a slot, the ticks that the loop around it runs."""
        return windows(self)

    def named_slot(self, conditional: Instruction) -> Slot | None:
        """Returns the slot, of all ticks, whose scope a conditional was traced in directly.

        A scope outside of another branch or loop around the conditional does not count. The
        innermost scope decides between several slots.
        """
        scope = _scope_around(conditional, [slot.scope for slot in self.slots])
        return next((slot for slot in self.slots if slot.scope == scope), None)

    def slots_in(self, computation: str) -> Iterator[tuple[str, Slot]]:
        """Yields the conditionals with a slot in a computation and its branches.

        Those in loops of their own are left out. The slots are for the trips of the loop.
        """
        for name, _ in self.named_slots_in(computation):
            slot = self.slot(self.by_name[name])
            if slot:
                yield name, slot

    def named_slots_in(self, computation: str) -> Iterator[tuple[str, Slot]]:
        """Yields what `slots_in` does, with the slots of all ticks."""
        for instruction in self.computations.get(computation, ()):
            if instruction.opcode == "conditional":
                slot = self.named_slot(instruction)
                if slot:
                    yield instruction.name, slot
            called = instruction.called if instruction.opcode == "call" else ()
            for callee in (*instruction.branches, *called):
                yield from self.named_slots_in(callee)

    # Matmuls.

    def total_flops(self, computation: str) -> int:
        """Returns the FLOPs of the matmuls of one run of a computation."""
        if computation not in self._flops:
            instructions = self.computations.get(computation, ())
            self._flops[computation] = sum(map(self.flops, instructions))
        return self._flops[computation]

    @cached_property
    def _flops(self) -> dict[str, int]:
        """The cache of `total_flops`."""
        return {}

    def flops(self, instruction: Instruction) -> int:
        """Returns the FLOPs of the matmuls in one instruction and in what it calls, run once.

        Loops inside count with their trips. Branches count with their probabilities; where these
        are not known, only the branch with the most counts.

        XLA cannot look into a kernel. Any kernel can say its FLOPs in the attribute `kernel_flops`
        of its call (before jax 0.12, Pallas's `cost_estimate` is dropped on Mosaic GPU). Fused
        attention that says nothing, such as cuDNN's, is known by its operands.
        """
        if instruction.opcode == "dot":
            return self._dot_flops(instruction, _DOT_CONTRACTED)
        if instruction.opcode == "custom-call":
            if instruction.target.startswith("__cublas$"):
                return self._dot_flops(instruction, _CUBLAS_CONTRACTED)
            kernel_flops = instruction.attributes.get("kernel_flops", "")
            if kernel_flops.isdecimal():
                return int(kernel_flops)
            return self._attention_flops(instruction)
        if instruction.opcode == "while":
            return (instruction.trips or 1) * self.total_flops(instruction.body)
        if instruction.opcode == "conditional":
            probabilities = self.branch_probabilities(instruction)
            if not probabilities:
                return max(map(self.total_flops, instruction.branches), default=0)
            return round(sum(p * self.total_flops(branch) for branch, p in probabilities.items()))
        if instruction.opcode in CALLS:
            return sum(map(self.total_flops, instruction.called))
        return 0

    def _dot_flops(self, dot: Instruction, contracted: re.Pattern[str]) -> int:
        """Returns 2 M N K."""
        result = dot.arrays[0]
        lhs = self.by_name.get(dot.operands[0])
        n_contracted = 1
        if lhs:
            dims = lhs.arrays[0].dims
            contracted_dims = re.findall(r"\d+", _group(contracted, dot.text))
            n_contracted = math.prod(dims[int(d)] for d in contracted_dims)
        return 2 * math.prod(result.dims) * n_contracted

    def _attention_flops(self, call: Instruction) -> int:
        """Returns the FLOPs of fused attention; 0 for any other kernel.

        The first operands of attention are queries, keys and values of four dimensions, the last
        one the head's width.
        """
        operands = []
        for name in call.operands:
            operand = self.by_name.get(name)
            if operand and operand.arrays:
                operands.append(operand.arrays[0].dims)
        if len(operands) < 3 or any(len(dims) != 4 for dims in operands[:3]):
            return 0
        queries, keys = operands[:2]
        if queries[-1] != keys[-1]:
            return 0
        # Forward: scores and output. Backward, which gets the output's gradient: scores, theirs,
        # and one for each gradient that it returns.
        n_matmuls = 2
        is_backward = queries in operands[3:]
        if is_backward:
            n_matmuls += sum(len(array.dims) == 4 for array in call.arrays)
        # Keys are [B, S, N, H] or [B, N, S, H]; sequences are longer than there are heads.
        n_keys = max(keys[1:3])
        flops = 2 * n_matmuls * math.prod(queries) * n_keys
        is_causal = call.target.startswith("__cudnn") and "causal" in call.text.lower()
        return flops // 2 if is_causal else flops


def _in_loop(visit: Visit, computation: str, trips: int) -> Visit:
    stages = tuple((*loops, trips) for loops in visit.stages)
    return dataclasses.replace(visit, computation=computation, stages=stages)


def _expected(trips: float, probability: float) -> float:
    """Returns the expected number of runs in these trips, an int where it is integral."""
    runs = trips * probability
    return int(runs) if runs == int(runs) else runs


def _scope_around(conditional: Instruction, scopes: Iterable[str]) -> str | None:
    """Returns the innermost of these scopes that a conditional was traced in directly.

    Directly means that there is no other branch or loop between the two.
    """
    path = _SCOPE.findall(conditional.op_name)[:-1]
    begin = 0
    for position, word in enumerate(path):
        if _LOOP_OR_BRANCH_SCOPE.fullmatch(word):
            begin = position + 1
    innermost = None
    best = (begin, -1)
    for scope in scopes:
        rank = (_last_position(scope.split("/"), path), len(scope))
        if rank > best:
            best = rank
            innermost = scope
    return innermost


def _last_position(scopes: Sequence[str], path: Sequence[str]) -> int:
    """Returns the last position in a path of the last of these scopes.

    -1 if the path does not have all scopes in this order.
    """
    positions: list[int] = []
    end = len(path)
    for scope in reversed(scopes):
        candidates = [i for i in range(end) if path[i] == scope]
        if not candidates:
            return -1
        end = candidates[-1]
        positions.append(end)
    return positions[0]


# Parsing.


def parse(
    text: str, slots: tuple[Slot, ...] = (), probabilities: Mapping[str, float] | None = None
) -> Module:
    """Returns `compiled.as_text()` as a Module.

    slots, probabilities: what is known of its conditionals, as `compile_report` takes it. Raises
    ValueError where there is no entry computation.
    """
    computations: dict[str, list[Instruction]] = {}
    entry = ""
    instructions = None  # of the computation that the line is in
    for line in text.splitlines():
        if line.startswith((" ", "\t")):
            match = _INSTRUCTION.match(line)
            if instructions is not None and match:
                name, definition = match.groups()
                definition = _COMMENT.sub("", definition)
                instructions.append(_instruction(name, definition, len(instructions)))
        elif line.startswith("}"):
            instructions = None
        elif not line.startswith("HloModule"):
            match = _COMPUTATION.match(_COMMENT.sub("", line))
            if match:
                is_entry, name = match.groups()
                instructions = computations.setdefault(name, [])
                if is_entry:
                    entry = name
    if not entry:
        raise ValueError("no ENTRY computation in this text: it is not an HLO module")
    return Module(
        {name: tuple(lines) for name, lines in computations.items()},
        entry,
        _stack_traces(text),
        slots,
        dict(probabilities or {}),
    )


def _instruction(name: str, text: str, index: int) -> Instruction:
    """Parses what follows "%name = ".

    (f32[8], s32[]) fusion(%p.1, %p.2), kind=kLoop, calls=%fused, metadata={...}
    """
    shape_end = _closing_bracket(text, 0) + 1 if text.startswith("(") else text.index(" ")
    call = text[shape_end:].lstrip()
    opening = call.find("(")
    closing = _closing_bracket(call, opening)
    inside = call[opening + 1 : closing]
    operands = tuple(_NAME.findall(inside))
    return Instruction(
        name=name,
        shape=text[:shape_end],
        opcode=call[:opening],
        operands=operands,
        text=call[closing + 1 :],
        index=index,
        arguments="" if operands else inside,
    )


def _closing_bracket(text: str, opening: int) -> int:
    """Returns the index of the bracket that closes the one at `opening`."""
    depth = 0
    for i in range(opening, len(text)):
        if text[i] == "(":
            depth += 1
        elif text[i] == ")":
            depth -= 1
        if depth == 0:
            return i
    return len(text) - 1


class _StackTraces(NamedTuple):
    """The stack frames of the program's lines, by number."""

    files: dict[int, str]
    locations: dict[int, tuple[int, int]]
    """File and line."""
    frames: dict[int, tuple[int, int]]
    """Location, and the frame that called this one."""


def _stack_traces(text: str) -> _StackTraces:
    head = text[: text.find("\n}")]
    files = {int(number): path for number, path in _FILE.findall(_table(head, "FileNames"))}
    locations = {}
    for number, file, line in _FILE_LOCATION.findall(_table(head, "FileLocations")):
        locations[int(number)] = (int(file), int(line))
    frames = {}
    for number, location, parent in _FRAME.findall(_table(head, "StackFrames")):
        # XLA writes a parent one too high: 1 is none.
        frames[int(number)] = (int(location), int(parent or 1) - 1)
    return _StackTraces(files, locations, frames)


def _table(head: str, title: str) -> str:
    match = re.search(rf"^{title}\n(.*?)(?:\n\n|\Z)", head, re.MULTILINE | re.DOTALL)
    return match[1] if match else ""
