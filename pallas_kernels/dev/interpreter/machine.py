"""Runs the traced program of a Mosaic GPU kernel on NumPy arrays, with a generator per warpgroup
and a scheduler instead of OS threads.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from jax.extend import core

from pallas_kernels import compat
from pallas_kernels.dev.interpreter.memory import Barrier, Fault, MemoryRef, blank
from pallas_kernels.dev.interpreter.operations import OPERATIONS
from pallas_kernels.dev.interpreter.primitives import PRIMITIVES
from pallas_kernels.dev.interpreter.threads import Block, KernelError, Steps, Thread, Wait, place_of


def run_kernel(
    name: str,
    jaxpr: Any,
    mesh: Any,
    arrays: Sequence[np.ndarray],
    out_types: Sequence[Any],
    aliases: Mapping[int, int],
    seed: int | None,
) -> tuple[np.ndarray, ...]:
    """The outputs of a kernel. Runs its blocks one after another. Raises KernelError.

    Args:
      jaxpr: the kernel's program; its arguments are references to the operands, then to the
      outputs. mesh: the kernel's plgpu.Mesh. aliases: operand -> the output that is initialised
      with it. seed: None: a thread runs until it must wait; a number: threads alternate at random.
    """
    names = [str(v) for v in getattr(jaxpr.debug_info, "arg_names", None) or ()] or [
        f"operand {i}" for i in range(len(arrays))
    ]
    outputs = [MemoryRef(f"output {i}", blank(t.shape, t.dtype)) for i, t in enumerate(out_types)]
    for operand, output in aliases.items():
        outputs[output].data[...] = arrays[operand]
    operands: list[Any] = [
        MemoryRef(f"{names[i] if i < len(names) else i} (GMEM)", array)
        if _is_reference(v)
        else array
        for i, (array, v) in enumerate(zip(arrays, jaxpr.invars, strict=False))
    ]
    for operand, output in aliases.items():
        if _is_reference(jaxpr.invars[operand]):
            # one memory: a kernel may write through either reference
            operands[operand] = outputs[output]
    if len(operands) + len(outputs) != len(jaxpr.invars):
        raise KernelError(
            f"{name}: {len(jaxpr.invars)} references for {len(operands)} operands and "
            f"{len(outputs)} outputs"
        )
    if any(size > 1 for size in mesh.cluster):
        raise KernelError(f"{name}: the interpreter has no clusters, got {tuple(mesh.cluster)}")
    axes = (*mesh.grid_names, *mesh.cluster_names)
    order = random.Random(seed) if seed is not None else None
    for point in itertools.product(*map(range, (*mesh.grid, *mesh.cluster))):
        position = dict(zip(axes, point, strict=True))
        where = f"{name}, block {', '.join(f'{k}={v}' for k, v in position.items() if isinstance(k, str)) or point}"
        block, count = Block(where), mesh.num_threads or 1
        threads = [
            Thread(i, np.eye(count, dtype=np.int32)[i], position | {mesh.thread_name: i}, block)
            for i in range(count)
        ]
        with np.errstate(all="ignore"):
            _run_block(
                block, [(t, evaluate(t, jaxpr, (), [*operands, *outputs])) for t in threads], order
            )
    return tuple(output.data for output in outputs)


def _run_block(
    block: Block, running: list[tuple[Thread, Steps]], order: random.Random | None
) -> None:
    waits: dict[int, Wait | None] = {thread.index: None for thread, _ in running}
    while running:
        if order:
            order.shuffle(running)
        thread, steps = next(
            ((t, s) for t, s in running if _ready(block, t, waits[t.index])), (None, None)
        )
        if thread is None or steps is None:
            blocked = [f"thread {i} waits for {wait.what()}" for i, wait in waits.items() if wait]
            raise KernelError(f"{block.where}: deadlock: {'; '.join(blocked)}")
        try:
            waits[thread.index] = next(steps)
        except StopIteration:
            running.remove((thread, steps))
            waits[thread.index] = None
            _located(block.where, thread.check_done)
    _located(block.where, block.check_done)


def _ready(block: Block, thread: Thread, wait: Wait | None) -> bool:
    return wait is None or _located(f"{block.where}, thread {thread.index}", wait.ready)


def _located(where: str, check: Callable[[], Any]) -> Any:
    try:
        return check()
    except Fault as fault:
        raise KernelError(f"{where}: {fault}") from None


def evaluate(thread: Thread, jaxpr: Any, consts: Sequence[Any], args: Sequence[Any]) -> Steps:
    """The outputs of a program in one thread. References are MemoryRefs or arrays of Barriers,
    values NumPy arrays.
    """
    known = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True))
    for eqn in jaxpr.eqns:
        values = [_literal(v) if isinstance(v, core.Literal) else known[v] for v in eqn.invars]
        try:
            results = yield from _step(thread, eqn, values)
        except KernelError:
            raise
        except Exception as fault:
            where = (
                f"{thread.block.where}, thread {thread.index}, {eqn.primitive} at {place_of(eqn)}"
            )
            raise KernelError(
                f"{where}: {fault if isinstance(fault, Fault) else repr(fault)}"
            ) from fault
        known.update(zip(eqn.outvars, results, strict=True))
    return [_literal(v) if isinstance(v, core.Literal) else known[v] for v in jaxpr.outvars]


def _literal(v: Any) -> np.ndarray:
    return np.asarray(v.val, v.aval.dtype)


def _step(thread: Thread, eqn: Any, values: list[Any]) -> Steps:
    name = compat.primitive_name(eqn)
    if rule := OPERATIONS.get(name):
        [out] = eqn.outvars
        result = np.asarray(rule(eqn.params, *values)).astype(out.aval.dtype, copy=False)
        if result.shape != out.aval.shape:
            raise AssertionError(f"{name} gave {result.shape}, not {out.aval.shape}")
        return [result]
    if control := CONTROL.get(name) or PRIMITIVES.get(name):
        return (yield from control(thread, eqn, values))
    raise NotImplementedError(f"the interpreter does not know the primitive {name}")


def _call(thread: Thread, eqn: Any, values: list[Any]) -> Steps:
    program = eqn.params.get("jaxpr") or eqn.params.get("call_jaxpr")
    return (yield from _closed(thread, program, values))


def _closed(thread: Thread, program: Any, values: Sequence[Any]) -> Steps:
    if hasattr(program, "consts"):
        return (yield from evaluate(thread, program.jaxpr, program.consts, values))
    return (yield from evaluate(thread, program, (), values))


def _cond(thread: Thread, eqn: Any, values: list[Any]) -> Steps:
    branches = eqn.params["branches"]
    return (
        yield from _closed(
            thread, branches[min(max(int(values[0]), 0), len(branches) - 1)], values[1:]
        )
    )


def _while(thread: Thread, eqn: Any, values: list[Any]) -> Steps:
    of_cond, of_body = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    cond_consts, body_consts, carry = (
        values[:of_cond],
        values[of_cond : of_cond + of_body],
        values[of_cond + of_body :],
    )
    while bool((yield from _closed(thread, eqn.params["cond_jaxpr"], [*cond_consts, *carry]))[0]):
        carry = yield from _closed(thread, eqn.params["body_jaxpr"], [*body_consts, *carry])
    return carry


def _scan(thread: Thread, eqn: Any, values: list[Any]) -> Steps:
    p = eqn.params
    of_consts, of_carry = compat.scan_sizes(p)
    consts, carry, xs = (
        values[:of_consts],
        values[of_consts : of_consts + of_carry],
        values[of_consts + of_carry :],
    )
    steps: Sequence[int] = range(p["length"])
    ys: list[Any] = [None] * p["length"]
    for i in reversed(steps) if p["reverse"] else steps:
        results = yield from _closed(thread, p["jaxpr"], [*consts, *carry, *(x[i] for x in xs)])
        carry, ys[i] = results[:of_carry], results[of_carry:]
    return [*carry, *(np.stack(y) for y in zip(*ys, strict=True))]


def _is_reference(v: Any) -> bool:
    return hasattr(v.aval, "inner_aval")


def _allocate(thread: Thread, v: Any, transforms: Sequence[Any], name: str) -> Any:
    aval, kind = v.aval, type(v.aval).__name__
    shape, dtype = aval.inner_aval.shape, aval.inner_aval.dtype
    if hasattr(dtype, "num_arrivals"):
        if hasattr(dtype, "collective_axes"):
            raise NotImplementedError("cluster barriers")
        barriers = np.empty(shape, object)
        for point in np.ndindex(*shape):
            barrier = Barrier(
                name + (str(list(point)) if point else ""), dtype.num_arrivals, len(thread.clock)
            )
            thread.block.barriers.append(barrier)
            barriers[point] = barrier
        return barriers
    for transform in transforms:
        shape = transform.transform_type(aval.inner_aval.update(shape=shape)).shape
    if kind == "WGMMAAbstractAccumulatorRef":
        return MemoryRef(name, np.zeros(shape, dtype))
    space = str(aval.memory_space).lower()
    if "smem" in space:
        thread.block.shared.append(ref := MemoryRef.shared(name, shape, dtype, len(thread.clock)))
        return ref
    if "regs" in space or "gmem" in space or aval.memory_space is None:
        return MemoryRef(name, blank(shape, dtype))
    raise NotImplementedError(f"an allocation in {space}")


def _run_scoped(thread: Thread, eqn: Any, values: list[Any]) -> Steps:
    jaxpr, collective = eqn.params["jaxpr"], bool(eqn.params["collective_axes"])
    key = (id(eqn), thread.visits.get(id(eqn), 0))
    thread.visits[id(eqn)] = key[1] + 1
    block = thread.block
    if collective:  # all threads meet before memory of an earlier scope is allocated again
        arrivals = block.arrivals.setdefault(key, [])
        arrivals.append(thread.release())
        yield Wait(
            lambda: len(arrivals) == len(thread.clock), lambda: "the other threads at a run_scoped"
        )
        thread.acquire(np.max(arrivals, axis=0))
    if not collective or key not in block.scopes:
        names = list(getattr(jaxpr.debug_info, "arg_names", None) or ())[-len(jaxpr.invars) :]
        names += [f"scratch {i}" for i in range(len(names), len(jaxpr.invars))]
        transforms = eqn.params.get("ref_transforms") or ((),) * len(jaxpr.invars)
        allocated = [
            _allocate(thread, v, t, str(n))
            for v, t, n in zip(jaxpr.invars, transforms, names, strict=True)
        ]
        if collective:
            block.scopes[key] = allocated
    else:
        allocated = block.scopes[key]
    return (yield from evaluate(thread, jaxpr, values, allocated))


def _run_state(thread: Thread, eqn: Any, values: list[Any]) -> Steps:
    jaxpr = eqn.params["jaxpr"]
    refs = [
        x if _is_reference(outer) else MemoryRef("a state", np.array(x))
        for x, outer in zip(values, eqn.invars, strict=True)
    ]
    yield from _closed(thread, jaxpr, refs)
    if any(type(v.aval).__name__ == "WGMMAAbstractAccumulatorRef" for v in jaxpr.invars):
        thread.await_wgmmas(0)
    return [
        x if _is_reference(outer) else ref.data
        for ref, x, outer in zip(refs, values, eqn.invars, strict=True)
    ]


CONTROL: dict[str, Callable[..., Steps]] = {
    **dict.fromkeys(("jit", "closed_call", "custom_jvp_call", "custom_vjp_call", "remat2", "eval_jaxpr"), _call),
    "cond": _cond, "while": _while, "scan": _scan, "run_scoped": _run_scoped,
    "run_state": _run_state,
}  # fmt: skip
"""Rules by the name of the primitive, for those that run nested programs."""
