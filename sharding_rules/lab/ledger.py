"""What the compiled program sends and multiplies, by place in the model: collectives, FLOPs,
kernels.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator, Sequence

from jax.sharding import Mesh

from sharding_rules.lab import groups
from sharding_rules.lab.hlo import Array, Instruction, Module, Visit
from sharding_rules.lab.provenance import COLLECTIVES, Provenance
from sharding_rules.lab.report import Collective, Copy, Location

_KINDS = {kind + end: kind for kind in COLLECTIVES for end in ("", "-start")}
_LARGE = 2**20
"""Bytes: arrays below it are copied for nothing worth a line."""
_TRIVIA = re.compile(
    r"Sharding|SPMD\w*|AllocateBuffer|CreateBuffer|Pin|Unpin|annotate_device_placement|MoveTo\w+|PinTo\w+|LayoutConstraint|xla\.sdy.*"
    r"|.*[Tt]op_?[Kk].*|PadToStatic|SliceToDynamic|AssumeGatherIndicesInBound|.*callback.*|__cublas.*|__cub\$.*|__onednn.*"
)


def collectives(module: Module, provenance: Provenance, mesh: Mesh) -> tuple[Collective, ...]:
    """Every collective, once for each place that its computation is run from: the entry's first,
    then those of each loop in it.

    Wire bytes are those of ring algorithms (NCCL's documentation, "Performance reported by NCCL
    tests").
    """
    found, wrapped = [], set()
    for visit in module.visits():
        lines = module.computations.get(visit.computation, ())
        for one in lines if visit.computation not in wrapped else ():
            if one.opcode == "async-start":
                wrapped.update(one.called)
            if 0 not in visit.loops:
                found += [
                    _collective(module, provenance, mesh, visit, one, inside)
                    for inside in started(module, one)
                ]
    return tuple(found)


def flops_by_phase(module: Module, provenance: Provenance) -> dict[str, int]:
    """Returns the FLOPs of matmuls on the mean device, by phase, times the trips of the loops
    around them. For a conditional without a slot, the branch with the most counts.

    Without a known phase: "".
    """
    totals: dict[str, int] = {}
    for dot, visit in _dots(module):
        phase = provenance.of(dot).phase
        totals[phase] = totals.get(phase, 0) + sum(map(math.prod, visit.stages)) * module.flops(dot)
    return {phase: n // module.n_stages for phase, n in totals.items()}


def flops_by_stage(module: Module) -> tuple[int, ...]:
    """The same, all phases, on a device of each stage."""
    totals = [0] * module.n_stages
    for dot, visit in _dots(module):
        for stage, loops in enumerate(visit.stages):
            totals[stage] += math.prod(loops) * module.flops(dot)
    return tuple(totals)


def copies(module: Module, provenance: Provenance) -> tuple[Copy, ...]:
    """Whole arrays that a loop of conditionals changes and that are copied in it, those of less
    than _LARGE bytes left out.
    """
    bodies = [
        module.computations[one.body] for one in module.by_name.values() if one.opcode == "while"
    ]
    ticks = [body for body in bodies if any(one.opcode == "conditional" for one in body)]
    carried = {str(array) for body in ticks for array in _changed(module, body)}
    result = []
    for visit in module.visits():
        for one in (
            module.computations.get(visit.computation, ())
            if visit.loops and not visit.fused
            else ()
        ):
            if (
                one.opcode in ("copy", "copy-start")
                and (array := one.arrays[0]).bytes >= _LARGE
                and str(array) in carried
            ):
                result.append(
                    Copy(one.name, str(array), array.bytes, visit.loops, provenance.of(one))
                )
    return tuple(result)


def _changed(module: Module, body: Sequence[Instruction]) -> Iterator[Array]:
    """Yields the arrays that a loop carries and changes."""
    for at, name in enumerate(body[-1].operands):
        one = module.by_name[name]
        if (
            one.opcode != "get-tuple-element"
            or one.operands[0] != body[0].name
            or f"index={at}" not in one.text
        ):
            yield from one.arrays


def kernels(
    module: Module, provenance: Provenance
) -> tuple[tuple[str, tuple[str, ...], Location], ...]:
    """Target, operand shapes and place of the custom calls that compute: attention, cuDNN, Pallas;
    matmuls (cuBLAS) left out.

    A call with the attribute `kernel` has it after its target: "mosaic_gpu_v2: attention forward".
    """
    result = []
    for visit in module.visits():
        for one in module.computations.get(visit.computation, ()):
            if one.opcode == "custom-call" and one.target and not _TRIVIA.fullmatch(one.target):
                shapes = tuple(str(array) for array in _operands(module, one))
                name = one.attributes.get("kernel", "")
                result.append(
                    (f"{one.target}: {name}" if name else one.target, shapes, provenance.of(one))
                )
    return tuple(result)


def _collective(
    module: Module,
    provenance: Provenance,
    mesh: Mesh,
    visit: Visit,
    start: Instruction,
    inside: Instruction,
) -> Collective:
    """`inside` is the collective, `start` what stands in the schedule for it; the same unless it is
    wrapped.
    """
    kind = _KINDS[inside.opcode]
    along = groups.parse(inside.text, mesh.devices.size)
    whole = _whole(kind, inside, _operands(module, inside), along.size)
    payload = sum(array.bytes for array in whole)
    asynchronous = start.opcode.endswith("-start") and '"is_sync":true' not in start.text
    where = provenance.of(start)
    alone = len(started(module, start)) == 1
    if not alone:
        where = dataclasses.replace(
            where, **{k: v for k, v in dataclasses.asdict(provenance.of(inside)).items() if v}
        )
    return Collective(
        name=start.name if alone else inside.name,
        kind=kind,
        axes=along.axes(mesh),
        group=along.size,
        nodes=along.nodes(mesh),
        shapes=tuple(map(str, whole)),
        dtype=whole[0].dtype if whole else "",
        payload=payload,
        wire=_wire(kind, payload, along.size) if along.members.size else 0.0,
        loops=visit.loops,
        conditional=visit.conditional,
        where=where if where.part or inside is start else provenance.of(inside),
        asynchronous=asynchronous,
        flops_hidden_behind=sum(map(module.flops, _between(module, visit.computation, start)))
        if asynchronous
        else 0,
        partial=along.partial(mesh),
        bounded=visit.bounded,
    )


def started(module: Module, one: Instruction) -> tuple[Instruction, ...]:
    """The collectives that an instruction of a schedule starts: itself, or those in the computation
    that it wraps, which may be several.
    """
    if one.opcode in _KINDS:
        return (one,)
    if one.opcode == "async-start":
        return tuple(
            line
            for name in one.called
            for line in module.computations.get(name, ())
            if line.opcode in _KINDS
        )
    return ()


def _operands(module: Module, one: Instruction) -> list[Array]:
    return [
        array
        for name in one.operands
        if name in module.by_name
        for array in module.by_name[name].arrays
    ]


def _whole(kind: str, one: Instruction, operands: list[Array], group: int) -> list[Array]:
    """The arrays of all members together. Read from the operands, because the shapes of
    asynchronous results vary with XLA's version.
    """
    if kind == "ragged-all-to-all":
        return operands[:1]
    if kind != "all-gather":
        return operands
    match = re.search(r"dimensions=\{(\d+)\}", one.text)
    dim = int(match[1]) if match else 0
    return [
        Array(a.dtype, (*a.dims[:dim], a.dims[dim] * group, *a.dims[dim + 1 :])) for a in operands
    ]


def _wire(kind: str, payload: int, group: int) -> float:
    if kind in ("collective-permute", "collective-broadcast"):
        return float(payload)
    return payload * (group - 1) / group * (2 if kind == "all-reduce" else 1)


def _between(module: Module, computation: str, start: Instruction) -> Iterator[Instruction]:
    """Yields the instructions scheduled between an asynchronous start and its done, or up to the
    end if the done is in the next trip.
    """
    waiting = {start.name}
    for one in module.computations[computation][start.index + 1 :]:
        if waiting.intersection(one.operands):
            if one.opcode.endswith("-done"):
                return
            if one.opcode.endswith("-update"):
                waiting.add(one.name)
        yield one


def _dots(module: Module) -> Iterator[tuple[Instruction, Visit]]:
    for visit in module.visits():
        for one in module.computations.get(visit.computation, ()) if visit.dearest else ():
            if one.opcode in ("dot", "custom-call") and module.flops(one):
                yield one, visit
