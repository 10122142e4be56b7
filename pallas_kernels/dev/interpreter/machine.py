"""Runs the traced program of a Mosaic GPU kernel on NumPy arrays.

There is a generator for each warpgroup, and a scheduler instead of OS threads.
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
from pallas_kernels.dev.interpreter.threads import (
    Block,
    KernelError,
    Steps,
    Thread,
    Wait,
    source_line,
)


def run_kernel(
    name: str,
    jaxpr: Any,
    mesh: Any,
    arrays: Sequence[np.ndarray],
    out_types: Sequence[Any],
    aliases: Mapping[int, int],
    seed: int | None,
) -> tuple[np.ndarray, ...]:
    """Returns the outputs of a kernel, after its blocks ran one after another. Raises KernelError.

    Args:
      jaxpr: the kernel's program; its arguments are references to the operands, then to the
        outputs.
      mesh: the kernel's plgpu.Mesh.
      aliases: operand -> the output that is initialised with it.
      seed: None: a thread runs until it must wait; a number: threads alternate at random.
    """
    if any(size > 1 for size in mesh.cluster):
        raise KernelError(f"{name}: the interpreter has no clusters, got {tuple(mesh.cluster)}")
    operands, outputs = _global_memory(name, jaxpr, arrays, out_types, aliases)
    axes = (*mesh.grid_names, *mesh.cluster_names)
    n_threads = mesh.num_threads or 1
    rng = random.Random(seed) if seed is not None else None
    for point in itertools.product(*map(range, (*mesh.grid, *mesh.cluster))):
        position = dict(zip(axes, point, strict=True))
        coordinates = [f"{axis}={i}" for axis, i in position.items() if isinstance(axis, str)]
        block = Block(f"{name}, block {', '.join(coordinates) or point}")
        running = []
        for i, clock in enumerate(np.eye(n_threads, dtype=np.int32)):
            thread = Thread(i, clock, position | {mesh.thread_name: i}, block)
            running.append((thread, evaluate(thread, jaxpr, (), [*operands, *outputs])))
        # NaN and infinities are results here, as on the GPU.
        with np.errstate(all="ignore"):
            _run_block(block, running, rng)
    return tuple(output.data for output in outputs)


def _global_memory(
    name: str,
    jaxpr: Any,
    arrays: Sequence[np.ndarray],
    out_types: Sequence[Any],
    aliases: Mapping[int, int],
) -> tuple[list[Any], list[MemoryRef]]:
    """(operands, outputs), the arguments of a kernel's program."""
    arg_names = getattr(jaxpr.debug_info, "arg_names", None) or ()
    names = [str(v) for v in arg_names] or [f"operand {i}" for i in range(len(arrays))]
    outputs = [MemoryRef(f"output {i}", blank(t.shape, t.dtype)) for i, t in enumerate(out_types)]
    for operand, output in aliases.items():
        outputs[output].data[...] = arrays[operand]

    operands: list[Any] = []
    for i, (array, v) in enumerate(zip(arrays, jaxpr.invars, strict=False)):
        if i in aliases and _is_reference(v):
            # one memory: a kernel may write through either reference
            operands.append(outputs[aliases[i]])
        elif _is_reference(v):
            operands.append(MemoryRef(f"{names[i] if i < len(names) else i} (GMEM)", array))
        else:
            operands.append(array)
    if len(operands) + len(outputs) != len(jaxpr.invars):
        raise KernelError(
            f"{name}: {len(jaxpr.invars)} references for {len(operands)} operands and "
            f"{len(outputs)} outputs"
        )
    return operands, outputs


def _run_block(
    block: Block, running: list[tuple[Thread, Steps]], rng: random.Random | None
) -> None:
    """Runs the threads of a block to their ends, always one that is ready."""
    waits: dict[int, Wait | None] = {thread.index: None for thread, _ in running}
    while running:
        if rng:
            rng.shuffle(running)
        next_thread = _first_ready(block, running, waits)
        if next_thread is None:
            blocked = [
                f"thread {i} waits for {wait.description()}" for i, wait in waits.items() if wait
            ]
            raise KernelError(f"{block.location}: deadlock: {'; '.join(blocked)}")
        thread, steps = next_thread
        try:
            waits[thread.index] = next(steps)
        except StopIteration:
            running.remove((thread, steps))
            waits[thread.index] = None
            _located(block.location, thread.check_done)
    _located(block.location, block.check_done)


def _first_ready(
    block: Block, running: list[tuple[Thread, Steps]], waits: Mapping[int, Wait | None]
) -> tuple[Thread, Steps] | None:
    for thread, steps in running:
        wait = waits[thread.index]
        location = f"{block.location}, thread {thread.index}"
        if wait is None or _located(location, wait.ready):
            return thread, steps
    return None


def _located(location: str, check: Callable[[], Any]) -> Any:
    """The result of `check()`. Raises its Fault as a KernelError with the location."""
    try:
        return check()
    except Fault as fault:
        raise KernelError(f"{location}: {fault}") from None


def evaluate(thread: Thread, jaxpr: Any, consts: Sequence[Any], args: Sequence[Any]) -> Steps:
    """The outputs of a program in one thread.

    References are MemoryRefs or arrays of Barriers, values NumPy arrays.
    """
    values = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True))

    def read(v: Any) -> Any:
        return _literal(v) if isinstance(v, core.Literal) else values[v]

    for eqn in jaxpr.eqns:
        try:
            results = yield from _step(thread, eqn, [read(v) for v in eqn.invars])
        except KernelError:
            raise
        except Exception as error:
            message = str(error) if isinstance(error, Fault) else repr(error)
            raise KernelError(
                f"{thread.block.location}, thread {thread.index}, {eqn.primitive} at "
                f"{source_line(eqn)}: {message}"
            ) from error
        values.update(zip(eqn.outvars, results, strict=True))
    return [read(v) for v in jaxpr.outvars]


def _literal(v: Any) -> np.ndarray:
    return np.asarray(v.val, v.aval.dtype)


def _step(thread: Thread, eqn: Any, values: list[Any]) -> Steps:
    name = compat.primitive_name(eqn)
    rule = OPERATIONS.get(name)
    if rule:
        [out] = eqn.outvars
        result = np.asarray(rule(eqn.params, *values)).astype(out.aval.dtype, copy=False)
        if result.shape != out.aval.shape:
            raise AssertionError(f"{name} gave {result.shape}, not {out.aval.shape}")
        return [result]
    steps = CONTROL.get(name) or PRIMITIVES.get(name)
    if steps:
        return (yield from steps(thread, eqn, values))
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
    index = min(max(int(values[0]), 0), len(branches) - 1)
    return (yield from _closed(thread, branches[index], values[1:]))


def _while(thread: Thread, eqn: Any, values: list[Any]) -> Steps:
    n_cond = eqn.params["cond_nconsts"]
    n_consts = n_cond + eqn.params["body_nconsts"]
    cond_consts = values[:n_cond]
    body_consts = values[n_cond:n_consts]
    carry = values[n_consts:]
    while bool((yield from _closed(thread, eqn.params["cond_jaxpr"], [*cond_consts, *carry]))[0]):
        carry = yield from _closed(thread, eqn.params["body_jaxpr"], [*body_consts, *carry])
    return carry


def _scan(thread: Thread, eqn: Any, values: list[Any]) -> Steps:
    params = eqn.params
    length = params["length"]
    n_consts, n_carry = compat.scan_sizes(params)
    consts = values[:n_consts]
    carry = values[n_consts : n_consts + n_carry]
    xs = values[n_consts + n_carry :]
    steps: Sequence[int] = range(length)
    if params["reverse"]:
        steps = steps[::-1]
    ys: list[Any] = [None] * length
    for i in steps:
        arguments = [*consts, *carry, *(x[i] for x in xs)]
        results = yield from _closed(thread, params["jaxpr"], arguments)
        carry = results[:n_carry]
        ys[i] = results[n_carry:]
    return [*carry, *(np.stack(y) for y in zip(*ys, strict=True))]


def _is_reference(v: Any) -> bool:
    return hasattr(v.aval, "inner_aval")


def _allocate(thread: Thread, v: Any, transforms: Sequence[Any], name: str) -> Any:
    """New memory for a reference of a run_scoped, or an array of barriers."""
    aval = v.aval
    shape = aval.inner_aval.shape
    dtype = aval.inner_aval.dtype
    if hasattr(dtype, "num_arrivals"):
        return _allocate_barriers(thread, shape, dtype, name)
    for transform in transforms:
        shape = transform.transform_type(aval.inner_aval.update(shape=shape)).shape
    if type(aval).__name__ == "WGMMAAbstractAccumulatorRef":
        return MemoryRef(name, np.zeros(shape, dtype))
    space = str(aval.memory_space).lower()
    if "smem" in space:
        ref = MemoryRef.shared(name, shape, dtype, len(thread.clock))
        thread.block.shared.append(ref)
        return ref
    if "regs" in space or "gmem" in space or aval.memory_space is None:
        return MemoryRef(name, blank(shape, dtype))
    raise NotImplementedError(f"an allocation in {space}")


def _allocate_barriers(thread: Thread, shape: Any, dtype: Any, name: str) -> np.ndarray:
    if hasattr(dtype, "collective_axes"):
        raise NotImplementedError("cluster barriers")
    barriers = np.empty(shape, object)
    for point in np.ndindex(*shape):
        index = str(list(point)) if point else ""
        barrier = Barrier(name + index, dtype.num_arrivals, len(thread.clock))
        thread.block.barriers.append(barrier)
        barriers[point] = barrier
    return barriers


def _run_scoped(thread: Thread, eqn: Any, values: list[Any]) -> Steps:
    jaxpr = eqn.params["jaxpr"]
    collective = bool(eqn.params["collective_axes"])
    block = thread.block
    visit = thread.visits.get(id(eqn), 0)
    thread.visits[id(eqn)] = visit + 1
    key = (id(eqn), visit)
    if collective:
        # All threads meet before memory of an earlier scope is allocated again.
        arrivals = block.arrivals.setdefault(key, [])
        arrivals.append(thread.release())
        yield Wait(
            lambda: len(arrivals) == len(thread.clock), lambda: "the other threads at a run_scoped"
        )
        thread.acquire(np.max(arrivals, axis=0))
    if collective and key in block.scopes:
        refs = block.scopes[key]
    else:
        refs = _allocate_scope(thread, eqn)
    if collective:
        block.scopes[key] = refs
    return (yield from evaluate(thread, jaxpr, values, refs))


def _allocate_scope(thread: Thread, eqn: Any) -> list[Any]:
    jaxpr = eqn.params["jaxpr"]
    n_refs = len(jaxpr.invars)
    names = list(getattr(jaxpr.debug_info, "arg_names", None) or ())[-n_refs:]
    names += [f"scratch {i}" for i in range(len(names), n_refs)]
    transforms = eqn.params.get("ref_transforms") or ((),) * n_refs
    return [
        _allocate(thread, v, t, str(name))
        for v, t, name in zip(jaxpr.invars, transforms, names, strict=True)
    ]


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
    "jit": _call,
    "closed_call": _call,
    "custom_jvp_call": _call,
    "custom_vjp_call": _call,
    "remat2": _call,
    "eval_jaxpr": _call,
    "cond": _cond,
    "while": _while,
    "scan": _scan,
    "run_scoped": _run_scoped,
    "run_state": _run_state,
}
"""Rules of the primitives that run nested programs, by name."""
