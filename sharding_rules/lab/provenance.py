"""From an instruction of the compiled program back to the model.

A Location has the named scopes, the phase of the training step, and the source line.

JAX writes the path of scopes and transformations into op_name:
`jit(step)/transpose(jvp(layers))/while/body/checkpoint/mlp/dot_general`. XLA keeps it for most
instructions, joins it for combined ones, `.../(attention/add:mlp/add)`, and loses it for those that
it makes itself; their place follows from what they work on.
"""

from __future__ import annotations

import dataclasses
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from typing import NamedTuple

from sharding_rules.lab.hlo import CALLS, Instruction, Module
from sharding_rules.lab.report import Location, Phase
from sharding_rules.lab.vocabulary import NEUTRAL, Vocabulary

COLLECTIVES = (
    "all-gather", "all-reduce", "reduce-scatter", "all-to-all", "ragged-all-to-all",
    "collective-permute", "collective-broadcast",
)  # fmt: skip

INSTALLED = ("/site-packages/", "/dist-packages/")
"""Folders of installed packages in the path of a stack frame."""

_PHASES: tuple[Phase, ...] = ("", "forward", "recompute", "backward", "optimizer")
"""In the order of a step."""
_BACKWARD = ("backward", "recompute")
"""The phases of a backward pass."""
_NOT_SCOPES = re.compile(
    r"shard_map|while|body|cond|scan|closed_call|core_call|named_call|eval_jaxpr|checkpoint|remat2?"
    r"|rematted_computation|pjit|xla_call|custom_(vjp|jvp)_call\w*|custom_lin|pallas_call"
    r"|branch_\d+_fun|run_state|.*(->|,).*"
)
"""Words of a path that JAX writes itself."""
_KERNEL = "mpmd_map"
"""The primitive of a Pallas kernel for Mosaic GPU, as jax 0.10 to 0.12 have it."""
_TRANSFORMED = re.compile(r"^([\w.\-]+)\((.*)\)$")
_MOVES = {
    "get-tuple-element", "tuple", "bitcast", "copy", "copy-start", "copy-done", "concatenate",
    "async-start", "async-update", "async-done",
    *(kind + end for kind in COLLECTIVES for end in ("", "-start", "-done")),
}  # fmt: skip
"""Opcodes that move values, and compute none."""
_HELPERS = ("sharding_rules/shard.py:",)
_OWN_ROOT = "sharding_rules/"
_MOST_INSTRUCTIONS = 400
"""Instructions to look at for a place before giving up."""
_SCALAR_RATIO = 64
"""Arrays with at least 64 times fewer bytes than the largest are scalars that are reduced with
it."""


class Provenance:
    """Provenance of a module's instructions: `places.of(instruction)`."""

    def __init__(self, module: Module, vocabulary: Vocabulary = NEUTRAL) -> None:
        self.module = module
        self.vocabulary = vocabulary
        self._locations: dict[str, Location] = {}
        self._named_locations: dict[str, Location | None] = {}

    def of(self, instruction: Instruction) -> Location:
        """Returns part, phase and source line; fields are empty where nothing says them."""
        name = instruction.name
        if name not in self._locations:
            self._locations[name] = self._locate(instruction)
        return self._locations[name]

    def _locate(self, one: Instruction) -> Location:
        location = self._named(one)
        if location is None:
            location = self._nearby(one) or Location(source=self._source(one))
        elif not location.part and one.opcode in _MOVES:
            nearby = self._nearby(one)
            if nearby:
                phase = location.phase or nearby.phase
                location = dataclasses.replace(location, part=nearby.part, phase=phase)
        if location.phase:
            return location
        return dataclasses.replace(location, phase=self._phase_by_position(one, location.part))

    def _named(self, one: Instruction) -> Location | None:
        """Returns the location that the instruction's own op_name gives; None if it has no path."""
        if one.name not in self._named_locations:
            location = None
            if one.opcode != "parameter" and "/" in one.op_name:
                paths = alternatives(one.op_name)
                location = merged([read(path, self.vocabulary) for path in paths])
                location = dataclasses.replace(location, source=self._source(one))
            self._named_locations[one.name] = location
        return self._named_locations[one.name]

    def _source(self, one: Instruction) -> str:
        """Returns the innermost frame outside installed packages, from its source folder on.

        Helpers of Shard are left out, unless there is no other frame.
        """
        frames = []
        for frame in self.module.stack(one):
            if not any(folder in frame for folder in INSTALLED):
                frames.append(frame)
        callers = (frame for frame in frames if not any(helper in frame for helper in _HELPERS))
        frame = next(callers, frames[0] if frames else "")
        roots = (_OWN_ROOT, *self.vocabulary.source_roots)
        begin = max(frame.rfind(f"/{root}") for root in roots)
        return frame[begin + 1 :] if begin >= 0 else "/".join(frame.split("/")[-2:])

    # 1. The place of what XLA made itself. It is that of what it works on, of what works on its
    #    result, or of the loop that it is in.

    def _nearby(self, one: Instruction) -> Location | None:
        for step in (self._upstream, self._downstream):
            neighbours = self._search(one, step)
            if neighbours:
                return _heaviest(neighbours)
        caller = self._caller(one)
        while caller is not None:
            location = self._named(caller)
            if location and location.part:
                return location
            caller = self._caller(caller)
        return None

    def _search(
        self, start: Instruction, step: Callable[[Instruction], Iterable[str]]
    ) -> list[_Neighbour]:
        """Returns the nearest values with a location on each way from `start`."""
        neighbours: list[_Neighbour] = []
        visited = {start.name}
        frontier = [start]
        while frontier and len(visited) < _MOST_INSTRUCTIONS:
            names = [name for one in frontier for name in step(one)]
            frontier = []
            for name in names:
                one = self.module.by_name.get(name)
                if one is None or name in visited:
                    continue
                visited.add(name)
                location = self._named(one)
                if location and (location.part or (location.phase and one.opcode not in _MOVES)):
                    neighbours.append(_Neighbour(one.bytes, location))
                else:
                    frontier.append(one)
        return neighbours

    def _upstream(self, one: Instruction) -> Iterable[str]:
        """Returns the names of what an instruction's value is made from.

        The way leads through fusions, and from one trip of a loop into the trip before.
        """
        if one.opcode == "get-tuple-element":
            match = re.search(r"index=(\d+)", one.text)
            index = int(match[1]) if match else 0
            return self._element(self.module.by_name.get(one.operands[0]), index)
        if one.opcode == "parameter":
            caller = self._caller(one)
            if caller is None or caller.opcode in ("while", "conditional"):
                return ()
            number = one.arguments.strip()
            return caller.operands[int(number) : int(number) + 1] if number.isdigit() else ()
        roots = self._roots(one.called) if one.opcode in CALLS else []
        return roots or one.operands

    def _element(self, value: Instruction | None, index: int) -> Iterator[str]:
        """Yields the names of the instructions that an element of a tuple comes from."""
        if value is None:
            return
        if value.opcode == "tuple":
            yield from value.operands[index : index + 1]
        elif value.opcode in ("while", "fusion", "call"):
            for name in self._roots((value.body,) if value.body else value.called):
                root = self.module.by_name[name]
                if root.opcode == "tuple":
                    yield from self._element(root, index)
                else:
                    yield name
        else:
            caller = self._caller(value) if value.opcode == "parameter" else None
            if caller and caller.opcode == "while":
                yield from self._element(self.module.by_name.get(caller.operands[0]), index)
            else:
                yield value.name

    def _downstream(self, one: Instruction) -> Iterable[str]:
        return self._users[one.name]

    def _roots(self, computations: Iterable[str]) -> list[str]:
        lines = [self.module.computations.get(name) for name in computations]
        return [computation[-1].name for computation in lines if computation]

    # 2. The phase of what is outside of the code that is differentiated: before it, or after it.

    def _phase_by_position(self, one: Instruction, part: str) -> Phase:
        """Returns the phase of an instruction outside the differentiated code.

        An instruction that depends on a backward pass belongs to the optimizer. In the same loop as
        that pass, where gradients are summed, it belongs to the backward pass.
        """
        if self.vocabulary.optimizer_part in re.split(r"[/+]", part):
            return "optimizer"
        slot = self._slot(one)
        slot_location = self._named(slot) if slot else None
        if slot_location:
            return slot_location.phase

        # The instruction, or what calls it, in the innermost computation that has a backward pass.
        while self.module.home[one.name] not in self._differentiated:
            caller = self._caller(one)
            if caller is None:
                return ""
            one = caller
        if one.name not in self._after_backward[self.module.home[one.name]]:
            return "forward" if part else ""
        caller = self._caller(one)
        while caller is not None:
            if caller.opcode == "while":
                return "backward"
            caller = self._caller(caller)
        return "optimizer"

    def _slot(self, one: Instruction) -> Instruction | None:
        """Returns the conditional of the pipeline's slot that an instruction is in."""
        caller = self._caller(one)
        while caller is not None:
            scopes = self.vocabulary.slots
            if caller.opcode == "conditional" and any(s in caller.op_name for s in scopes):
                return caller
            caller = self._caller(caller)
        return None

    @cached_property
    def _differentiated(self) -> set[str]:
        """Computations that run a part of a backward pass, themselves or in what they call."""
        result: set[str] = set()
        for name, lines in self.module.computations.items():
            locations = (self._named(line) for line in lines)
            if not any(location and location.phase in _BACKWARD for location in locations):
                continue
            while name and name not in result:
                result.add(name)
                caller = self.module.callers.get(name)
                name = self.module.home[caller.name] if caller else ""
        return result

    @cached_property
    def _after_backward(self) -> dict[str, set[str]]:
        """By computation: instructions that need a result of the backward pass, or are of it."""
        result: dict[str, set[str]] = {}
        for name in self._differentiated:
            dependents: set[str] = set()
            for one in self.module.computations[name]:
                location = self._named(one)
                if location and location.phase:
                    is_backward = location.phase in _BACKWARD
                else:
                    called = {*one.called, *one.branches, one.body, one.condition}
                    is_backward = bool(called & self._differentiated)
                if is_backward or any(operand in dependents for operand in one.operands):
                    dependents.add(one.name)
            result[name] = dependents
        return result

    # 3. The graph.

    def _caller(self, one: Instruction) -> Instruction | None:
        """Returns the instruction that calls the computation of this one; None in the entry."""
        return self.module.callers.get(self.module.home[one.name])

    @cached_property
    def _users(self) -> dict[str, list[str]]:
        users: dict[str, list[str]] = defaultdict(list)
        for lines in self.module.computations.values():
            for one in lines:
                for operand in one.operands:
                    users[operand].append(one.name)
        return users


def read(path: str, vocabulary: Vocabulary = NEUTRAL) -> Location:
    """Returns a path of scopes as part, phase and op.

    `jit(f)/transpose(jvp(layers))/while/body/mlp/dot_general` is the backward of layers/mlp. The
    forward computation in a pipeline's backward slot repeats that of the forward slot, so that its
    phase is recompute, except for the loss, which is computed only there.
    """
    *scopes, op = _split(path, "/")
    if op == _KERNEL:
        op = scopes.pop() if scopes else ""  # a kernel's name comes before it
    parts: list[str] = []
    phase: Phase = ""
    for scope in scopes:
        transforms, words = _untransformed(scope)
        if scope == "rematted_computation":
            phase = "recompute"
        elif "transpose" in transforms and phase != "recompute":
            phase = "backward"
        elif "jvp" in transforms and not phase:
            phase = "forward"
        names = [
            word
            for word in words
            if word not in vocabulary.slots and not _NOT_SCOPES.fullmatch(word)
        ]
        # A scope around a conditional is repeated in its branch.
        if names != parts[-1:]:
            parts += names

    slot = next((scope for scope in scopes if scope in vocabulary.slots), "")
    is_loss = bool(set(vocabulary.loss_parts) & set(parts))
    if slot and slot == vocabulary.forward_slot:
        phase = "forward"
    elif slot and parts and phase in ("", "forward"):
        phase = "forward" if is_loss else "recompute"
    elif slot and not phase:
        phase = "backward"
    if not phase and vocabulary.optimizer_part in parts:
        phase = "optimizer"
    return Location("/".join(parts), phase, "", op)


def alternatives(path: str) -> list[str]:
    """Returns the paths of a combined instruction: `a/(b:c/d)` is `a/b` and `a/c/d`."""
    match = re.search(r"(?:^|/)(\()", path)
    if match is None:
        return [path]
    opening = match.start(1)
    closing = _closing(path, opening)
    paths: list[str] = []
    for choice in _split(path[opening + 1 : closing], ":"):
        paths += alternatives(path[:opening] + choice + path[closing + 1 :])
    return paths


def merged(locations: list[Location]) -> Location:
    """Returns one location for several.

    It has the scopes that they share and the words in which they differ, `layers/attention+mlp`,
    the latest phase, and the source of the first.
    """
    parts = [location.part.split("/") for location in locations if location.part]
    shared: list[str] = []
    for level in zip(*parts, strict=False):
        if len(set(level)) > 1:
            break
        shared.append(level[0])
    words: set[str] = set()
    for part in parts:
        for joined in part[len(shared) : len(shared) + 1]:
            words.update(filter(None, joined.split("+")))
    if words:
        shared.append("+".join(sorted(words)))
    latest = max(_PHASES.index(location.phase) for location in locations)
    return Location("/".join(shared), _PHASES[latest], locations[0].source, locations[0].op)


class _Neighbour(NamedTuple):
    """A value with a location near to one without, and its size."""

    bytes: int
    location: Location


def _heaviest(neighbours: list[_Neighbour]) -> Location:
    """Returns one location for several neighbours.

    Those of few bytes (scalars that are reduced along) are left out, and the phase is that of most
    bytes.
    """
    neighbours = sorted(neighbours, key=lambda neighbour: -neighbour.bytes)
    largest = neighbours[0].bytes
    large = [n.location for n in neighbours if n.bytes * _SCALAR_RATIO >= largest]
    phase_bytes: dict[Phase, int] = {}
    for neighbour in neighbours:
        phase = neighbour.location.phase
        phase_bytes[phase] = phase_bytes.get(phase, 0) + neighbour.bytes
    heaviest_phase = max(phase_bytes, key=lambda phase: phase_bytes[phase])
    return dataclasses.replace(merged(large), phase=heaviest_phase)


def _untransformed(scope: str) -> tuple[set[str], list[str]]:
    """Returns the transformations around a scope, and the words inside of them.

    A jitted function's name is no scope.
    """
    transforms: set[str] = set()
    match = _TRANSFORMED.match(scope)
    while match:
        if match[1] in ("jit", "pjit"):
            return transforms, []
        transforms.add(match[1])
        scope = match[2]
        match = _TRANSFORMED.match(scope)
    return transforms, [word for word in _split(scope, "/") if word]


def _split(text: str, separator: str) -> list[str]:
    """Splits the text at each separator that is outside of brackets."""
    pieces = [""]
    depth = 0
    for letter in text:
        depth += (letter == "(") - (letter == ")")
        if letter == separator and depth <= 0:
            pieces.append("")
        else:
            pieces[-1] += letter
    return pieces


def _closing(text: str, opening: int) -> int:
    """Returns the position of the bracket that closes another; the end of the text without one."""
    depth = 0
    for position in range(opening, len(text)):
        depth += (text[position] == "(") - (text[position] == ")")
        if depth == 0:
            return position
    return len(text)
