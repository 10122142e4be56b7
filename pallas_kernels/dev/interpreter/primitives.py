"""The primitives of Mosaic GPU and of JAX's references that access memory or wait. Rules take
(thread, equation, values).
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
    tiling_of,
)
from pallas_kernels.dev.interpreter.threads import Steps, Thread, Wait, place_of


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
    return (
        tree.unflatten([next(leaves) for _ in range(tree.num_leaves)]) if tree is not None else ()
    )


def _get(thread: Thread, eqn: Any, ref: MemoryRef, *leaves: Any) -> Any:
    return [np.array(ref.read(_transforms(eqn.params["tree"], iter(leaves)), thread, "a load"))]


def _swap(thread: Thread, eqn: Any, ref: MemoryRef, value: Any, *leaves: Any) -> Any:
    transforms = _transforms(eqn.params["tree"], iter(leaves))
    old = np.array(ref.view(transforms))
    ref.write(transforms, value, thread, "a store")
    return [old]


def _addupdate(thread: Thread, eqn: Any, ref: MemoryRef, value: Any, *leaves: Any) -> Any:
    transforms = _transforms(eqn.params["tree"], iter(leaves))
    ref.write(
        transforms, ref.read(transforms, thread, "an addition") + value, thread, "an addition"
    )
    return []


def _barrier(barriers: np.ndarray, transforms: Sequence[Any]) -> Barrier:
    selected = barriers
    for transform in transforms:
        indices = (
            (i.start, i.size) if type(i).__name__ == "Slice" else (i, 1) for i in transform.indices
        )
        selected = selected[
            (*(slice(int(start), int(start) + int(size)) for start, size in indices), ...)
        ]
    if selected.size != 1:
        raise Fault(f"{selected.size} barriers are selected instead of one")
    return selected.item()


def _barrier_wait(thread: Thread, eqn: Any, values: list[Any]) -> Steps:
    barrier = _barrier(values[0], _transforms(eqn.params["transforms_treedef"], iter(values[1:])))
    yield Wait(
        lambda: barrier.passes(thread.index),
        lambda: f"{barrier.state(thread.index)} at {place_of(eqn)}",
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
    # It orders instructions: what the other warpgroup wrote is not acquired.
    barrier = thread.block.meet(int(values[0]), thread)
    # its own arrival may have been the second
    phase = barrier.completed - (not barrier.arrived_threads)
    yield Wait(
        lambda: barrier.completed > phase,
        lambda: f"named barrier {int(values[0])} at {place_of(eqn)}",
    )
    return []


def _copy_in(thread: Thread, eqn: Any, values: list[Any]) -> Steps:
    p = eqn.params
    if not p.get("has_barrier", True) or p["collective_axes"]:
        raise NotImplementedError(
            "copy_gmem_to_smem without a barrier, or to several blocks of a cluster"
        )
    leaves = iter(values[3:])
    source, target = (
        _transforms(p[tree], leaves)
        for tree in ("src_transforms_treedef", "dst_transforms_treedef")
    )
    barrier = _barrier(values[2], _transforms(p["barrier_transforms_treedef"], leaves))
    if not p.get("has_user_predicate") or bool(next(leaves)):
        where = box(values[0], source, tiling_of(target))
        value = np.where(
            where >= 0, values[0].data.reshape(-1)[where], np.zeros((), values[0].data.dtype)
        )
        what = f"the copy of {values[0].name} issued at {place_of(eqn)}"
        values[1].begin_write(target, thread, what, IN_FLIGHT)
        barrier.copies.append(Copy(values[1], target, value, thread.release(), what))
    yield None
    return []


def _copy_out(thread: Thread, eqn: Any, values: list[Any]) -> Steps:
    p, leaves = eqn.params, iter(values[2:])
    source, target = (
        _transforms(p[tree], leaves)
        for tree in ("src_transforms_treedef", "dst_transforms_treedef")
    )
    if not p["has_user_predicate"] or bool(next(leaves)):
        what = f"the copy to {values[1].name} issued at {place_of(eqn)}"
        value, where = (
            values[0].read(source, thread, what, fenced=True),
            box(values[1], target, tiling_of(source)),
        )
        flat = values[1].data.reshape(-1)
        if p["reduction_op"] not in (None, "add"):
            raise NotImplementedError(f"copy_smem_to_gmem with reduction_op={p['reduction_op']!r}")
        flat[where[where >= 0]] = value[where >= 0] + (
            flat[where[where >= 0]] if p["reduction_op"] else 0
        )
        thread.uncommitted.append(values[0].begin_read(source, what))
    if p["commit_group"]:
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
    for buffer in thread.block.shared:
        assert buffer.shadow
        buffer.shadow.unfenced[buffer.shadow.unfenced == thread.index + 1] = 0
    return []


def _wgmma(thread: Thread, eqn: Any, values: list[Any]) -> Steps:
    acc, leaves, reads = values[0], iter(values[3:]), []
    trees = [_transforms(eqn.params[f"{x}_transforms_tree"], leaves) for x in ("acc", "a", "b")]
    what = f"the wgmma issued at {place_of(eqn)}"
    operands = []
    for value, transforms in zip(values[1:3], trees[1:], strict=True):
        if isinstance(value, MemoryRef):
            operands.append(value.read(transforms, thread, what, fenced=True))
            if value.shadow:
                reads.append(value.begin_read(transforms, what))
        else:
            operands.append(value)
    a, b = operands
    if a.dtype != b.dtype:
        raise Fault(f"operands of different types, {a.dtype} and {b.dtype}")
    target = acc.view(trees[0])
    target[...] = target + (a.astype(np.float32) @ b.astype(np.float32)).astype(target.dtype)
    thread.wgmmas.append((acc, reads))
    yield None
    return []


def _wgmma_wait(thread: Thread, eqn: Any, *n: Any) -> Any:
    thread.await_wgmmas(int(n[0] if n else eqn.params["n"]))
    return []


def _settled(thread: Thread, acc: MemoryRef, what: str) -> None:
    if any(acc is pending for pending, _ in thread.wgmmas):
        raise Fault(f"{what} an accumulator while its wgmma is in flight: wgmma_wait is missing")


def _acc_load(thread: Thread, eqn: Any, acc: MemoryRef) -> Any:
    thread.await_wgmmas(eqn.params.get("wait_n") or 0)
    _settled(thread, acc, "reads")
    return [np.array(acc.data)]


def _acc_store(thread: Thread, eqn: Any, acc: MemoryRef, value: Any) -> Any:
    _settled(thread, acc, "writes")
    acc.data[...] = value
    return [None] * len(eqn.outvars)  # of a reference's own store, the value is never used


def _inline(thread: Thread, eqn: Any, *values: Any) -> Any:
    """inline_mgpu of a function whose attribute `in_numpy` does the same with arrays; references
    become views to read and write.
    """
    p = eqn.params
    if (in_numpy := getattr(p["mgpu_fn"], "in_numpy", None)) is None:
        raise NotImplementedError(
            f"inline_mgpu of {p['mgpu_fn'].__name__}, which has no attribute in_numpy: what it "
            "does with arrays"
        )
    arguments, leaves = values[: len(p["flat_arg_types"])], iter(values[len(p["flat_arg_types"]) :])
    given = []
    for value, transforms in zip(
        arguments, _transforms(p["pytree_ref_transforms"], leaves), strict=True
    ):
        if isinstance(value, MemoryRef):
            if value.shadow:
                raise NotImplementedError(
                    "inline_mgpu on shared memory, whose order with other accesses is unknown"
                )
            value = value.view(transforms)
        given.append(value)
    results = in_numpy(*given)
    return [] if results is None else list(results)


PRIMITIVES: dict[str, Callable[..., Steps]] = {
    "axis_index": _pure(_axis_index), "get": _pure(_get), "load": _pure(_get), "swap": _pure(_swap),
    "addupdate": _pure(_addupdate),
    "barrier_wait": _barrier_wait, "barrier_arrive": _barrier_arrive,
    "named_barrier_wait": _named_barrier_wait, "named_barrier_arrive": _named_barrier_arrive,
    "copy_gmem_to_smem": _copy_in, "copy_smem_to_gmem": _copy_out,
    "commit_group": _pure(_commit_group), "wait_smem_to_gmem": _pure(_wait_out),
    "commit_smem": _pure(_commit_smem),
    "wgmma_ref": _wgmma, "wgmma_wait": _pure(_wgmma_wait),
    "wgmma_accumulator_deref": _pure(_acc_load), "wgmma_accumulator_store": _pure(_acc_store),
    "inline_mgpu": _pure(_inline),
    "optimization_barrier": _pure(lambda thread, eqn, *values: list(values)),
    **dict.fromkeys(("set_max_registers", "debug_print", "print_layout", "delay", "async_prefetch"), _pure(lambda *_: [])),
}  # fmt: skip
"""Rules by the name of the primitive, as `compat.primitive_name` has it."""
