"""The primitives of Mosaic GPU and of JAX's references that access memory or wait.

Rules take (thread, equation, values).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from pallas_kernels.dev.interpreter.memory import (
    IN_FLIGHT,
    Barrier,
    Copy,
    Fault,
    MemoryRef,
    box,
    is_slice,
    shared_tiling,
)
from pallas_kernels.dev.interpreter.threads import Steps, Thread, Wait, source_line


def _pure(rule: Callable[..., Any]) -> Callable[..., Steps]:
    """A rule for a primitive that never waits."""

    def steps(thread: Thread, eqn: Any, values: list[Any]) -> Steps:
        return rule(thread, eqn, *values)
        yield  # makes this a generator

    return steps


def _axis_index(thread: Thread, eqn: Any) -> Any:
    names = eqn.params["axis_name"]
    if not isinstance(names, tuple):
        return [np.int32(thread.axes[names])]
    raise NotImplementedError(f"axis_index of several axes at once: {names}")


def _transforms(tree: Any, leaves: Iterator[Any]) -> Any:
    """The transforms of a reference, whose traced indices are the next of the leaves."""
    if tree is None:
        return ()
    return tree.unflatten([next(leaves) for _ in range(tree.num_leaves)])


def _get(thread: Thread, eqn: Any, ref: MemoryRef, *leaves: Any) -> Any:
    transforms = _transforms(eqn.params["tree"], iter(leaves))
    return [np.array(ref.read(transforms, thread, "a load"))]


def _swap(thread: Thread, eqn: Any, ref: MemoryRef, value: Any, *leaves: Any) -> Any:
    transforms = _transforms(eqn.params["tree"], iter(leaves))
    old = np.array(ref.view(transforms))
    ref.write(transforms, value, thread, "a store")
    return [old]


def _addupdate(thread: Thread, eqn: Any, ref: MemoryRef, value: Any, *leaves: Any) -> Any:
    transforms = _transforms(eqn.params["tree"], iter(leaves))
    old = ref.read(transforms, thread, "an addition")
    ref.write(transforms, old + value, thread, "an addition")
    return []


def _barrier(barriers: np.ndarray, transforms: Sequence[Any]) -> Barrier:
    """The barrier that transforms select from an array of them."""
    selected = barriers
    for transform in transforms:
        slices: list[Any] = []
        for index in transform.indices:
            start = int(index.start if is_slice(index) else index)
            size = int(index.size) if is_slice(index) else 1
            slices.append(slice(start, start + size))
        selected = selected[(*slices, ...)]
    if selected.size != 1:
        raise Fault(f"{selected.size} barriers are selected instead of one")
    return selected.item()


def _barrier_wait(thread: Thread, eqn: Any, values: list[Any]) -> Steps:
    barrier = _barrier(values[0], _transforms(eqn.params["transforms_treedef"], iter(values[1:])))
    yield Wait(
        lambda: barrier.passes(thread.index),
        lambda: f"{barrier.state(thread.index)} at {source_line(eqn)}",
    )
    barrier.waited[thread.index] += 1
    thread.acquire(barrier.clock)
    return []


def _barrier_arrive(thread: Thread, eqn: Any, values: list[Any]) -> Steps:
    leaves = iter(values[1:])
    barrier = _barrier(values[0], _transforms(eqn.params["transforms_treedef"], leaves))
    if not eqn.params.get("has_user_predicate") or bool(next(leaves)):
        barrier.arrive(thread.release())
    yield None
    return []


def _named_barrier_arrive(thread: Thread, eqn: Any, values: list[Any]) -> Steps:
    thread.block.meet(int(values[0]), thread)
    yield None
    return []


def _named_barrier_wait(thread: Thread, eqn: Any, values: list[Any]) -> Steps:
    # It orders instructions: the stores of the other warpgroup are not acquired.
    number = int(values[0])
    barrier = thread.block.meet(number, thread)
    # its own arrival may have been the second
    phase = barrier.completed - (not barrier.arrived_threads)
    yield Wait(
        lambda: barrier.completed > phase,
        lambda: f"named barrier {number} at {source_line(eqn)}",
    )
    return []


def _copy_in(thread: Thread, eqn: Any, values: list[Any]) -> Steps:
    params = eqn.params
    source, target, barriers, *transform_leaves = values
    if not params.get("has_barrier", True) or params["collective_axes"]:
        raise NotImplementedError(
            "copy_gmem_to_smem without a barrier, or to several blocks of a cluster"
        )
    leaves = iter(transform_leaves)
    source_transforms = _transforms(params["src_transforms_treedef"], leaves)
    target_transforms = _transforms(params["dst_transforms_treedef"], leaves)
    barrier = _barrier(barriers, _transforms(params["barrier_transforms_treedef"], leaves))
    if not params.get("has_user_predicate") or bool(next(leaves)):
        positions = box(source, source_transforms, shared_tiling(target_transforms))
        zero = np.zeros((), source.data.dtype)
        numbers = np.where(positions >= 0, source.data.reshape(-1)[positions], zero)
        operation = f"the copy of {source.name} issued at {source_line(eqn)}"
        target.begin_write(target_transforms, thread, operation, IN_FLIGHT)
        copy = Copy(target, target_transforms, numbers, thread.release(), operation)
        barrier.copies.append(copy)
    yield None
    return []


def _copy_out(thread: Thread, eqn: Any, values: list[Any]) -> Steps:
    params = eqn.params
    source, target, *transform_leaves = values
    reduction = params["reduction_op"]
    leaves = iter(transform_leaves)
    source_transforms = _transforms(params["src_transforms_treedef"], leaves)
    target_transforms = _transforms(params["dst_transforms_treedef"], leaves)
    if not params["has_user_predicate"] or bool(next(leaves)):
        operation = f"the copy to {target.name} issued at {source_line(eqn)}"
        numbers = source.read(source_transforms, thread, operation, fenced=True)
        positions = box(target, target_transforms, shared_tiling(source_transforms))
        if reduction not in (None, "add"):
            raise NotImplementedError(f"copy_smem_to_gmem with reduction_op={reduction!r}")
        inside = positions >= 0
        flat = target.data.reshape(-1)
        old = flat[positions[inside]] if reduction else 0
        flat[positions[inside]] = numbers[inside] + old
        thread.uncommitted.append(source.begin_read(source_transforms, operation))
    if params["commit_group"]:
        _commit_group(thread, eqn)
    yield None
    return []


def _commit_group(thread: Thread, eqn: Any) -> Any:
    thread.stores.append(thread.uncommitted)
    thread.uncommitted = []
    return []


def _wait_out(thread: Thread, eqn: Any, *n: Any) -> Any:
    thread.await_stores(int(n[0] if n else eqn.params["n"]))
    return []


def _commit_smem(thread: Thread, eqn: Any) -> Any:
    """Publishes this thread's stores to the asynchronous units."""
    for buffer in thread.block.shared:
        assert buffer.shadow
        unfenced = buffer.shadow.unfenced
        unfenced[unfenced == thread.index + 1] = 0
    return []


def _wgmma(thread: Thread, eqn: Any, values: list[Any]) -> Steps:
    acc, a, b, *transform_leaves = values
    leaves = iter(transform_leaves)
    acc_transforms, a_transforms, b_transforms = (
        _transforms(eqn.params[f"{name}_transforms_tree"], leaves) for name in ("acc", "a", "b")
    )
    operation = f"the wgmma issued at {source_line(eqn)}"
    operands = []
    reads = []
    for operand, transforms in ((a, a_transforms), (b, b_transforms)):
        if not isinstance(operand, MemoryRef):
            operands.append(operand)
            continue
        operands.append(operand.read(transforms, thread, operation, fenced=True))
        if operand.shadow:
            reads.append(operand.begin_read(transforms, operation))
    a, b = operands
    if a.dtype != b.dtype:
        raise Fault(f"operands of different types, {a.dtype} and {b.dtype}")
    target = acc.view(acc_transforms)
    target[...] = target + (a.astype(np.float32) @ b.astype(np.float32)).astype(target.dtype)
    thread.wgmmas.append((acc, reads))
    yield None
    return []


def _wgmma_wait(thread: Thread, eqn: Any, *n: Any) -> Any:
    thread.await_wgmmas(int(n[0] if n else eqn.params["n"]))
    return []


def _require_no_wgmma(thread: Thread, acc: MemoryRef, verb: str) -> None:
    if any(acc is pending for pending, _ in thread.wgmmas):
        raise Fault(f"{verb} an accumulator while its wgmma is in flight: wgmma_wait is missing")


def _acc_load(thread: Thread, eqn: Any, acc: MemoryRef) -> Any:
    thread.await_wgmmas(eqn.params.get("wait_n") or 0)
    _require_no_wgmma(thread, acc, "reads")
    return [np.array(acc.data)]


def _acc_store(thread: Thread, eqn: Any, acc: MemoryRef, value: Any) -> Any:
    _require_no_wgmma(thread, acc, "writes")
    acc.data[...] = value
    return [None] * len(eqn.outvars)  # a reference's store has a result, which is never used


def _inline(thread: Thread, eqn: Any, *values: Any) -> Any:
    """inline_mgpu of a function whose attribute `in_numpy` does the same with arrays.

    References become views to read and write.
    """
    params = eqn.params
    function = params["mgpu_fn"]
    in_numpy = getattr(function, "in_numpy", None)
    if in_numpy is None:
        raise NotImplementedError(
            f"inline_mgpu of {function.__name__}, which has no attribute in_numpy: what it does "
            "with arrays"
        )
    n_arguments = len(params["flat_arg_types"])
    transforms = _transforms(params["pytree_ref_transforms"], iter(values[n_arguments:]))
    arguments = []
    for value, value_transforms in zip(values[:n_arguments], transforms, strict=True):
        if not isinstance(value, MemoryRef):
            arguments.append(value)
            continue
        if value.shadow:
            raise NotImplementedError(
                "inline_mgpu on shared memory, whose order with other accesses is unknown"
            )
        arguments.append(value.view(value_transforms))
    results = in_numpy(*arguments)
    return [] if results is None else list(results)


def _no_effect(thread: Thread, eqn: Any, *_: Any) -> Any:
    return []


PRIMITIVES: dict[str, Callable[..., Steps]] = {
    "axis_index": _pure(_axis_index),
    "optimization_barrier": _pure(lambda thread, eqn, *values: list(values)),
    "get": _pure(_get),
    "load": _pure(_get),
    "swap": _pure(_swap),
    "addupdate": _pure(_addupdate),
    "barrier_wait": _barrier_wait,
    "barrier_arrive": _barrier_arrive,
    "named_barrier_wait": _named_barrier_wait,
    "named_barrier_arrive": _named_barrier_arrive,
    "copy_gmem_to_smem": _copy_in,
    "copy_smem_to_gmem": _copy_out,
    "commit_group": _pure(_commit_group),
    "wait_smem_to_gmem": _pure(_wait_out),
    "commit_smem": _pure(_commit_smem),
    "wgmma_ref": _wgmma,
    "wgmma_wait": _pure(_wgmma_wait),
    "wgmma_accumulator_deref": _pure(_acc_load),
    "wgmma_accumulator_store": _pure(_acc_store),
    "inline_mgpu": _pure(_inline),
    "set_max_registers": _pure(_no_effect),
    "debug_print": _pure(_no_effect),
    "print_layout": _pure(_no_effect),
    "delay": _pure(_no_effect),
    "async_prefetch": _pure(_no_effect),
}
"""Rules by the name of the primitive, as `compat.primitive_name` has it."""
