"""What a compiled program sends and multiplies, by part of the model.

Collectives, FLOPs, kernels, and copies of what a loop carries.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence

from jax.sharding import Mesh

from sharding_rules.lab import groups
from sharding_rules.lab.hlo import Array, Instruction, Module, Visit
from sharding_rules.lab.provenance import COLLECTIVES, Provenance
from sharding_rules.lab.report import Collective, Conditional, Copy, Location

# The kind of a collective by its opcode, such as all-gather of all-gather-start.
_KINDS = {kind + suffix: kind for kind in COLLECTIVES for suffix in ("", "-start")}

# Bytes: copies of smaller arrays are not reported.
_LARGE = 2**20

# Targets of custom calls that do not compute, or that compute what is counted elsewhere (cuBLAS).
_TRIVIA = re.compile(
    r"Sharding|SPMD\w*|AllocateBuffer|CreateBuffer|Pin|Unpin|annotate_device_placement"
    r"|MoveTo\w+|PinTo\w+|LayoutConstraint|xla\.sdy.*|.*[Tt]op_?[Kk].*"
    r"|PadToStatic|SliceToDynamic|AssumeGatherIndicesInBound"
    r"|.*callback.*|__cublas.*|__cub\$.*|__onednn.*"
)


# Collectives.


def collectives(module: Module, provenance: Provenance, mesh: Mesh) -> tuple[Collective, ...]:
    """Returns every collective, once for each place that its computation is run from.

    The entry's are first, then those of each loop in it.

    Wire bytes are those of ring algorithms (NCCL's documentation, "Performance reported by NCCL
    tests").
    """
    collectives = []
    # Computations of an async-start, whose collectives are reported for the instruction itself.
    wrapped: set[str] = set()
    for visit in module.visits():
        if visit.computation in wrapped:
            continue
        for instruction in module.computations.get(visit.computation, ()):
            if instruction.opcode == "async-start":
                wrapped.update(instruction.called)
            if 0 in visit.loops:
                continue
            for inside in started(module, instruction):
                collectives.append(
                    _collective(module, provenance, mesh, visit, instruction, inside)
                )
    return tuple(collectives)


def started(module: Module, instruction: Instruction) -> tuple[Instruction, ...]:
    """Returns the collectives that an instruction of a schedule starts.

    They are the instruction itself, or those in the computation that it wraps, which may be
    several.
    """
    if instruction.opcode in _KINDS:
        return (instruction,)
    if instruction.opcode != "async-start":
        return ()
    wrapped = []
    for computation in instruction.called:
        for inside in module.computations.get(computation, ()):
            if inside.opcode in _KINDS:
                wrapped.append(inside)
    return tuple(wrapped)


def _collective(
    module: Module,
    provenance: Provenance,
    mesh: Mesh,
    visit: Visit,
    start: Instruction,
    inside: Instruction,
) -> Collective:
    """Returns the collective `inside`.

    `start` stands in the schedule for it; the two are the same unless the collective is wrapped.
    """
    kind = _KINDS[inside.opcode]
    group = groups.parse(inside.text, mesh.devices.size)
    whole_arrays = _whole_arrays(kind, inside, _operands(module, inside), group.size)
    payload = sum(array.bytes for array in whole_arrays)
    asynchronous = start.opcode.endswith("-start") and '"is_sync":true' not in start.text
    hidden_flops = 0
    if asynchronous:
        hidden_flops = sum(map(module.flops, _hiding(module, visit.computation, start)))
    is_alone = len(started(module, start)) == 1
    return Collective(
        name=start.name if is_alone else inside.name,
        kind=kind,
        axes=group.axes(mesh),
        group=group.size,
        nodes=group.nodes(mesh),
        shapes=tuple(map(str, whole_arrays)),
        dtype=whole_arrays[0].dtype if whole_arrays else "",
        payload=payload,
        wire=wire_bytes(kind, payload, group.size) if group.members.size else 0.0,
        loops=visit.loops,
        conditional=visit.conditional,
        where=_location(provenance, start, inside, is_alone),
        asynchronous=asynchronous,
        flops_hidden_behind=hidden_flops,
        partial=group.partial(mesh),
        bounded=visit.bounded,
    )


def _location(
    provenance: Provenance, start: Instruction, inside: Instruction, is_alone: bool
) -> Location:
    location = provenance.of(start)
    if not is_alone:
        # What is known of the collective itself goes before what is known of its wrapper.
        fields = dataclasses.asdict(provenance.of(inside))
        known_fields = {name: value for name, value in fields.items() if value}
        location = dataclasses.replace(location, **known_fields)
    if location.part or inside is start:
        return location
    return provenance.of(inside)


def _operands(module: Module, instruction: Instruction) -> list[Array]:
    arrays: list[Array] = []
    for name in instruction.operands:
        if name in module.by_name:
            arrays += module.by_name[name].arrays
    return arrays


def _whole_arrays(
    kind: str, instruction: Instruction, operands: list[Array], group_size: int
) -> list[Array]:
    """Returns the arrays of all members together.

    They are read from the operands, because the shapes of asynchronous results vary with XLA's
    version.
    """
    if kind == "ragged-all-to-all":
        return operands[:1]
    if kind != "all-gather":
        return operands
    match = re.search(r"dimensions=\{(\d+)\}", instruction.text)
    dim = int(match[1]) if match else 0
    whole_arrays = []
    for array in operands:
        dims = list(array.dims)
        dims[dim] *= group_size
        whole_arrays.append(Array(array.dtype, tuple(dims)))
    return whole_arrays


def wire_bytes(kind: str, payload: int, group_size: int) -> float:
    """Returns the bytes that a device sends in a ring; an all-reduce goes around it twice."""
    if kind in ("collective-permute", "collective-broadcast"):
        return float(payload)
    return payload * (group_size - 1) / group_size * (2 if kind == "all-reduce" else 1)


def _hiding(module: Module, computation: str, start: Instruction) -> Iterator[Instruction]:
    """Yields the instructions scheduled between an asynchronous start and its done.

    If the done is in the next trip, those up to the end.
    """
    waiting = {start.name}
    for instruction in module.computations[computation][start.index + 1 :]:
        if waiting.intersection(instruction.operands):
            if instruction.opcode.endswith("-done"):
                return
            if instruction.opcode.endswith("-update"):
                waiting.add(instruction.name)
        yield instruction


# Conditionals.


def conditionals(module: Module) -> tuple[Conditional, ...]:
    """Returns the conditionals that are counted with a probability, those of one scope together."""
    times: dict[str, float] = defaultdict(int)
    for visit in module.visits():
        for instruction in module.computations.get(visit.computation, ()):
            if instruction.opcode != "conditional" or module.slot(instruction):
                continue
            scope = module.probable_scope(instruction)
            if scope is not None:
                times[scope] += math.prod(visit.loops)
    return tuple(Conditional(scope, module.probabilities[scope], n) for scope, n in times.items())


# Matmuls and kernels.


def flops_by_phase(module: Module, provenance: Provenance) -> dict[str, int]:
    """Returns the FLOPs of matmuls on the mean device by phase; "" where it is not known.

    They are times the trips of the loops around them. Only the branch with the most counts, in a
    conditional of unknown probability.
    """
    flops: dict[str, float] = defaultdict(int)
    for dot, visit in _dots(module):
        n_runs = sum(map(math.prod, visit.stages))
        flops[provenance.of(dot).phase] += n_runs * module.flops(dot)
    return {phase: int(n // module.n_stages) for phase, n in flops.items()}


def flops_by_stage(module: Module) -> tuple[int, ...]:
    """Returns the FLOPs of matmuls, of all phases, on a device of each stage."""
    flops: list[float] = [0] * module.n_stages
    for dot, visit in _dots(module):
        for stage, loops in enumerate(visit.stages):
            flops[stage] += math.prod(loops) * module.flops(dot)
    return tuple(map(int, flops))


def _dots(module: Module) -> Iterator[tuple[Instruction, Visit]]:
    for visit in module.visits():
        if not visit.dearest:
            continue
        for instruction in module.computations.get(visit.computation, ()):
            if instruction.opcode in ("dot", "custom-call") and module.flops(instruction):
                yield instruction, visit


def kernels(
    module: Module, provenance: Provenance
) -> tuple[tuple[str, tuple[str, ...], Location], ...]:
    """Returns the target, operand shapes and place of each custom call that computes.

    These are attention, cuDNN and Pallas; matmuls (cuBLAS) are left out. A call with the attribute
    `kernel` has it after its target: "mosaic_gpu_v2: attention forward".
    """
    kernels = []
    for visit in module.visits():
        for call in module.computations.get(visit.computation, ()):
            if call.opcode != "custom-call" or not call.target or _TRIVIA.fullmatch(call.target):
                continue
            name = call.attributes.get("kernel", "")
            target = f"{call.target}: {name}" if name else call.target
            shapes = tuple(str(array) for array in _operands(module, call))
            kernels.append((target, shapes, provenance.of(call)))
    return tuple(kernels)


# Copies.


def copies(module: Module, provenance: Provenance) -> tuple[Copy, ...]:
    """Returns the copies of whole arrays that a loop of conditionals changes, in any loop.

    Arrays of less than _LARGE bytes are left out.
    """
    changed: set[str] = set()
    for instruction in module.by_name.values():
        if instruction.opcode == "while":
            body = module.computations[instruction.body]
            if any(inside.opcode == "conditional" for inside in body):
                changed.update(map(str, _changed_arrays(module, body)))

    copies = []
    for visit in module.visits():
        if not visit.loops or 0 in visit.loops or visit.fused:
            continue
        for copy in module.computations.get(visit.computation, ()):
            if copy.opcode not in ("copy", "copy-start"):
                continue
            array = copy.arrays[0]
            if array.bytes >= _LARGE and str(array) in changed:
                copies.append(
                    Copy(copy.name, str(array), array.bytes, visit.loops, provenance.of(copy))
                )
    return tuple(copies)


def _changed_arrays(module: Module, body: Sequence[Instruction]) -> Iterator[Array]:
    """Yields the arrays that a loop carries and changes: the others it returns as they came."""
    carry = body[0]
    result = body[-1]
    for i, name in enumerate(result.operands):
        element = module.by_name[name]
        is_unchanged = (
            element.opcode == "get-tuple-element"
            and element.operands[0] == carry.name
            and f"index={i}" in element.text
        )
        if not is_unchanged:
            yield from element.arrays
