"""From an instruction of the compiled program back to the model: named scopes, phase of the
training step, source line.

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

from sharding_rules.lab.hlo import CALLS, Instruction, Module
from sharding_rules.lab.report import Location, Phase
from sharding_rules.lab.vocabulary import NEUTRAL, Vocabulary

COLLECTIVES = (
    "all-gather", "all-reduce", "reduce-scatter", "all-to-all", "ragged-all-to-all",
    "collective-permute", "collective-broadcast",
)  # fmt: skip
_PHASES: tuple[Phase, ...] = ("", "forward", "recompute", "backward", "optimizer")
"""In the order of a step."""
_NOT_SCOPES = re.compile(
    r"shard_map|while|body|cond|scan|closed_call|core_call|named_call|eval_jaxpr|checkpoint|remat2?|rematted_computation|pjit|xla_call"
    r"|custom_(vjp|jvp)_call\w*|custom_lin|pallas_call|branch_\d+_fun|run_state|.*(->|,).*"
)
_KERNEL = "mpmd_map"
"""The primitive of a Pallas kernel for Mosaic GPU, as jax 0.10 to 0.12 have it."""
_WRAPPED = re.compile(r"^([\w.\-]+)\((.*)\)$")
_MOVES = {
    "get-tuple-element", "tuple", "bitcast", "copy", "copy-start", "copy-done", "concatenate",
    "async-start", "async-update",
    "async-done",
}  # fmt: skip
_MOVES |= {kind + end for kind in COLLECTIVES for end in ("", "-start", "-done")}
INSTALLED = ("/site-packages/", "/dist-packages/")
_HELPERS = ("sharding_rules/shard.py:",)
_OWN_ROOT = "sharding_rules/"
_FAR = 400
"""Instructions to look at for a place before giving up."""


class Provenance:
    """Provenance of a module's instructions: `places.of(instruction)`."""

    def __init__(self, module: Module, vocabulary: Vocabulary = NEUTRAL) -> None:
        self.module, self.vocabulary = module, vocabulary
        self._known: dict[str, Location] = {}
        self._read: dict[str, Location | None] = {}

    def of(self, instruction: Instruction) -> Location:
        """Part, phase and source line; empty fields where nothing says them."""
        name = instruction.name
        if name not in self._known:
            self._known[name] = self._place(instruction)
        return self._known[name]

    def _place(self, one: Instruction) -> Location:
        own = self._own(one)
        if own and own.phase and own.part:
            return own
        if (own is None or (not own.part and one.opcode in _MOVES)) and (near := self._near(one)):
            own = (
                dataclasses.replace(own, part=near.part, phase=own.phase or near.phase)
                if own
                else near
            )
        own = own or Location(source=self._source(one))
        return (
            own if own.phase else dataclasses.replace(own, phase=self._phase_by_position(one, own))
        )

    def _own(self, one: Instruction) -> Location | None:
        """Returns the location that the instruction's own op_name gives; None if there is no path
        in it.
        """
        if one.name not in self._read:
            path = one.op_name
            if one.opcode == "parameter" or "/" not in path:
                self._read[one.name] = None
            else:
                locations = [read(each, self.vocabulary) for each in alternatives(path)]
                self._read[one.name] = dataclasses.replace(
                    merged(locations), source=self._source(one)
                )
        return self._read[one.name]

    def _source(self, one: Instruction) -> str:
        """The innermost frame outside installed packages and outside the helpers of Shard, from the
        root of its source folder on.
        """
        frames = [
            frame
            for frame in self.module.stack(one)
            if not any(folder in frame for folder in INSTALLED)
        ]
        frame = next(
            (frame for frame in frames if not any(helper in frame for helper in _HELPERS)),
            frames[0] if frames else "",
        )
        begin = max(frame.rfind("/" + root) for root in (_OWN_ROOT, *self.vocabulary.source_roots))
        return frame[begin + 1 :] if begin >= 0 else "/".join(frame.split("/")[-2:])

    # What XLA made itself: the place of what it works on, of what works on its result, of the loop
    # it is in.

    def _near(self, one: Instruction) -> Location | None:
        for step in (self._upstream, self._downstream):
            if found := self._search(one, step):
                return _heaviest(found)
        caller = self.module.callers.get(self.module.home[one.name])
        while caller is not None:
            if (own := self._own(caller)) and own.part:
                return own
            caller = self.module.callers.get(self.module.home[caller.name])
        return None

    def _search(
        self, start: Instruction, step: Callable[[Instruction], Iterator[str]]
    ) -> list[tuple[int, Location]]:
        """The nearest places on each way from `start`, with the bytes of the arrays there."""
        result: list[tuple[int, Location]] = []
        seen, todo = {start.name}, [start]
        while todo and len(seen) < _FAR:
            following: list[Instruction] = []
            for name in (name for one in todo for name in step(one)):
                one = self.module.by_name.get(name)
                if one is None or name in seen:
                    continue
                seen.add(name)
                own = self._own(one)
                if own and (own.part or (own.phase and one.opcode not in _MOVES)):
                    result.append((one.bytes, own))
                else:
                    following.append(one)
            todo = following
        return result

    def _upstream(self, one: Instruction) -> Iterator[str]:
        """Names of what an instruction's value is made from: through fusions, and from one trip of
        a loop into the trip before.
        """
        if one.opcode == "get-tuple-element":
            match = re.search(r"index=(\d+)", one.text)
            yield from self._element(
                self.module.by_name.get(one.operands[0]), int(match[1]) if match else 0
            )
        elif one.opcode == "parameter":
            caller = self.module.callers.get(self.module.home[one.name])
            if (
                caller is not None
                and caller.opcode not in ("while", "conditional")
                and one.arguments.strip().isdigit()
            ):
                yield from caller.operands[int(one.arguments) : int(one.arguments) + 1]
        elif one.opcode in CALLS and (inside := self._roots(one.called)):
            yield from inside
        else:
            yield from one.operands

    def _element(self, whole: Instruction | None, index: int) -> Iterator[str]:
        """Yields the names of the instructions that an element of a tuple comes from."""
        if whole is None:
            return
        if whole.opcode == "tuple":
            yield from whole.operands[index : index + 1]
        elif whole.opcode in ("while", "fusion", "call"):
            for root in self._roots((whole.body,) if whole.body else whole.called):
                inside = self.module.by_name[root]
                yield from self._element(inside, index) if inside.opcode == "tuple" else (root,)
        elif (
            whole.opcode == "parameter"
            and (caller := self.module.callers.get(self.module.home[whole.name]))
            and caller.opcode == "while"
        ):
            yield from self._element(self.module.by_name.get(caller.operands[0]), index)
        else:
            yield whole.name

    def _downstream(self, one: Instruction) -> Iterator[str]:
        yield from self._users[one.name]

    def _roots(self, computations: Iterable[str]) -> list[str]:
        return [
            lines[-1].name for name in computations if (lines := self.module.computations.get(name))
        ]

    # Code outside of what is differentiated: before it, or after it.

    def _phase_by_position(self, one: Instruction, own: Location) -> Phase:
        """Returns the phase of an instruction outside the differentiated code.

        An instruction that depends on a backward pass belongs to the optimizer. In the same loop as
        that pass, where gradients are summed, it belongs to the backward pass.
        """
        if self.vocabulary.optimizer_part in re.split(r"[/+]", own.part):
            return "optimizer"
        home, looped = self.module.home[one.name], False
        if (slot := self._slot(home)) and (around := self._own(slot)):
            return around.phase
        while (
            caller := self.module.callers.get(home)
        ) is not None and home not in self._differentiated:
            one, home = caller, self.module.home[caller.name]
        if home not in self._differentiated:
            return ""
        outer: str | None = home
        while outer and (caller := self.module.callers.get(outer)):
            looped |= caller.opcode == "while"
            outer = self.module.home[caller.name]
        if one.name in self._after[home]:
            return "backward" if looped else "optimizer"
        return "forward" if own.part else ""

    def _slot(self, computation: str | None) -> Instruction | None:
        """The pipeline's slot that a computation is in."""
        while computation and (caller := self.module.callers.get(computation)):
            if caller.opcode == "conditional" and any(
                scope in caller.op_name for scope in self.vocabulary.slots
            ):
                return caller
            computation = self.module.home[caller.name]
        return None

    @cached_property
    def _differentiated(self) -> set[str]:
        """Computations that run any of a backward pass, themselves or in what they call."""
        result: set[str] = set()
        for name, lines in self.module.computations.items():
            if any(
                (own := self._own(one)) and own.phase in ("backward", "recompute") for one in lines
            ):
                while name and name not in result:
                    result.add(name)
                    caller = self.module.callers.get(name)
                    name = self.module.home[caller.name] if caller else ""
        return result

    @cached_property
    def _after(self) -> dict[str, set[str]]:
        """By computation: instructions that need a result of the backward pass."""
        after: dict[str, set[str]] = {}
        for name in self._differentiated:
            result = after[name] = set()
            for one in self.module.computations[name]:
                own = self._own(one)
                begins = (
                    own.phase in ("backward", "recompute")
                    if own and own.phase
                    else bool(self._inside(one) & self._differentiated)
                )
                if begins or any(operand in result for operand in one.operands):
                    result.add(one.name)
        return after

    @staticmethod
    def _inside(one: Instruction) -> set[str]:
        return {*one.called, *one.branches, one.body, one.condition}

    # The graph.

    @cached_property
    def _users(self) -> dict[str, list[str]]:
        users: dict[str, list[str]] = defaultdict(list)
        for lines in self.module.computations.values():
            for one in lines:
                for operand in one.operands:
                    users[operand].append(one.name)
        return users


def read(path: str, vocabulary: Vocabulary = NEUTRAL) -> Location:
    """A path of scopes as part, phase and op:
    `jit(f)/transpose(jvp(layers))/while/body/mlp/dot_general` is the backward of layers/mlp.

    The forward computation in a pipeline's backward slot repeats that of the forward slot, so that
    its phase is recompute, except for the loss, which is computed only there.
    """
    *scopes, op = _split(path, "/")
    if op == _KERNEL:
        scopes, op = scopes[:-1], "/".join(scopes[-1:])  # a kernel's name comes before it
    slot = next((scope for scope in scopes if scope in vocabulary.slots), "")
    parts: list[str] = []
    phase: Phase = ""
    for scope in scopes:
        transforms, inner = _unwrap(scope)
        if "transpose" in transforms and phase != "recompute":
            phase = "backward"
        elif "jvp" in transforms and not phase:
            phase = "forward"
        if scope == "rematted_computation":
            phase = "recompute"
        known = [
            part
            for part in inner
            if part not in vocabulary.slots and not _NOT_SCOPES.fullmatch(part)
        ]
        # around a conditional, and again in its branch
        parts += known if known != parts[-1:] else []
    forward = bool(slot) and slot == vocabulary.forward_slot
    if forward or (slot and parts and phase in ("", "forward")):
        phase = "forward" if forward or set(vocabulary.loss_parts) & set(parts) else "recompute"
    elif slot and not phase:
        phase = "backward"
    if not phase and vocabulary.optimizer_part in parts:
        phase = "optimizer"
    return Location("/".join(parts), phase, "", op)


def alternatives(path: str) -> list[str]:
    """The paths of a combined instruction: `a/(b:c/d)` is `a/b` and `a/c/d`."""
    match = re.search(r"(?:^|/)(\()", path)
    if match is None:
        return [path]
    opening = match.start(1)
    closing = next(
        (
            at
            for at in range(opening, len(path))
            if path[opening : at + 1].count("(") == path[opening : at + 1].count(")")
        ),
        len(path),
    )
    choices = _split(path[opening + 1 : closing], ":")
    return [
        each
        for choice in choices
        for each in alternatives(path[:opening] + choice + path[closing + 1 :])
    ]


def merged(places: list[Location]) -> Location:
    """One for several: the scopes that they share and where they part, `layers/attention+mlp`; the
    latest phase; source of the first.
    """
    parts = [place.part.split("/") for place in places if place.part]
    shared: list[str] = []
    for level in zip(*parts, strict=False):
        if len(set(level)) > 1:
            break
        shared.append(level[0])
    ends = {
        end
        for part in parts
        for end in "".join(part[len(shared) : len(shared) + 1]).split("+")
        if end
    }
    part = "/".join([*shared, *(["+".join(sorted(ends))] if ends else [])])
    phase = _PHASES[max(_PHASES.index(place.phase) for place in places)]
    return Location(part, phase, places[0].source, places[0].op)


def _heaviest(found: list[tuple[int, Location]]) -> Location:
    """One place for several: those of few bytes (scalars that are reduced along) left out, and the
    phase of most bytes.
    """
    found = sorted(found, key=lambda each: -each[0])
    places = [where for size, where in found if size * 64 >= found[0][0]]
    bytes_of: dict[Phase, int] = {}
    for size, where in found:
        bytes_of[where.phase] = bytes_of.get(where.phase, 0) + size
    return dataclasses.replace(
        merged(places), phase=max(bytes_of, key=lambda phase: bytes_of[phase])
    )


def _unwrap(scope: str) -> tuple[set[str], list[str]]:
    """Transformations around a scope, and the scope; a jitted function's name is no scope."""
    transforms: set[str] = set()
    while match := _WRAPPED.match(scope):
        if match[1] in ("jit", "pjit"):
            return transforms, []
        transforms.add(match[1])
        scope = match[2]
    return transforms, [part for part in _split(scope, "/") if part]


def _split(text: str, at: str) -> list[str]:
    """Splits the text at each separator that is outside of brackets."""
    pieces, depth = [""], 0
    for letter in text:
        depth += (letter == "(") - (letter == ")")
        if letter == at and depth <= 0:
            pieces.append("")
        else:
            pieces[-1] += letter
    return pieces
