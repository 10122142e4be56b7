"""Sums in global memory to which several blocks of threads add, in fp32 and in no fixed order.

A tile of fp32 sums that wgmma leaves in registers is added by `red.global.add.v4.f32`, 16 bytes a
thread. The sums are stored in the order of the registers, so that a warp's addresses are
consecutive; `from_register_order` restores rows and columns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax._src import config
from jax._src.pallas import mpmd
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.attention.cost import cost_metadata
from pallas_kernels.attention.hopper.spec import (
    COMPUTING,
    GRID,
    SIDES,
    THREAD,
    WARPGROUP,
    Refs,
    in_sections,
)

_VECTOR = 4
"""Numbers that one instruction of a thread adds."""
_THREADS = 128
"""Threads of a warpgroup."""


def launch_adding(
    body: Callable[[Refs], None],
    inputs: Mapping[str, Array | None],
    sums: Mapping[str, tuple[int, ...] | Array],
    out: Mapping[str, jax.ShapeDtypeStruct],
    scratch: Mapping[str, Any],
    *,
    name: str,
    flops: int,
    grid: tuple[int, int, int],
    section: int,
    occupancy: float | None = None,
    moved: int | None = None,
) -> Refs:
    """As `spec.launch`, for a kernel that also adds to fp32 arrays: `sums`, by name, a shape if it
    starts at zero. They are returned, too.

    The sums are passed in the buffers of the outputs. Pallas's public functions can do that only
    with mutable references, and the call would then have a side effect.
    """
    absent = dict.fromkeys((*SIDES, *scratch))
    inputs, scratch = (
        {key: x for key, x in some.items() if x is not None} for some in (inputs, scratch)
    )
    given = {key: x for key, x in sums.items() if not isinstance(x, tuple)}
    shapes = {key: x if isinstance(x, tuple) else x.shape for key, x in sums.items()}
    results = {
        key: jax.ShapeDtypeStruct(shape, jnp.float32) for key, shape in shapes.items()
    } | dict(out)
    aliases = {len(inputs) + i: i for i in range(len(sums))}
    each_once = sum(
        x.size * x.dtype.itemsize
        for x in (*inputs.values(), *results.values(), *(results[key] for key in sums))
    )

    def entry(*refs: Any) -> None:
        read, written = refs[: len(inputs)], refs[len(inputs) + len(sums) :]
        operands = (
            absent | dict(zip(inputs, read, strict=True)) | dict(zip(results, written, strict=True))
        )
        pl.run_scoped(lambda **own: body(Refs(operands | own)), collective_axes=THREAD, **scratch)

    mesh = plgpu.Mesh(
        grid=in_sections(grid, section),
        grid_names=GRID,
        num_threads=COMPUTING + 1,
        thread_name=THREAD,
        kernel_name=name,
    )
    params = plgpu.CompilerParams(
        approx_math=True, reduction_scratch_bytes=0, lowering_semantics=plgpu.LoweringSemantics.Lane
    )
    kernel = mpmd._mpmd_map(
        [(mesh, entry)], list(results.values()), input_output_aliases=aliases,
        compiler_params=params, name=name,
        # the public function reads it, too
        interpret=config.pallas_tpu_interpret_mode_context_manager.value,
    )  # fmt: skip

    @jax.custom_batching.sequential_vmap  # jax has no rule for a kernel whose operands are outputs
    def call(*arrays: Array) -> list[Array]:
        own = dict(zip(given, arrays[len(inputs) :], strict=True))
        starts = [
            own[key] if key in own else jnp.zeros(shape, jnp.float32)
            for key, shape in shapes.items()
        ]
        return kernel(*arrays[: len(inputs)], *starts)

    with (
        config._check_vma(False),
        cost_metadata(name, flops=flops, bytes_accessed=moved or each_once, occupancy=occupancy),
    ):
        return Refs(zip(results, call(*inputs.values(), *given.values()), strict=True))


def launch_unrounded(
    body: Callable[[Refs], None],
    inputs: Mapping[str, Array | None],
    out: Mapping[str, jax.ShapeDtypeStruct],
    scratch: Mapping[str, Any],
    **how: Any,
) -> Refs:
    """As `spec.launch`, but the outputs [B, length, heads, columns] are fp32.

    The kernel adds each tile of 64 rows of them to zeros, by `add_from_registers`. A tile with one
    owner has a fixed order all the same.
    """
    sums = {}
    for name, x in out.items():
        B, length, heads, columns = x.shape
        sums[name] = register_order(B, heads, length, columns, columns)
    found = launch_adding(body, inputs, sums, {}, scratch, **how)
    return Refs({name: from_register_order(x) for name, x in found.items()})


def add_from_registers(ref: Any, x: Array) -> None:
    """ref += x, atomically. x: fp32 [64, columns], the result of a wgmma. ref: fp32 [64 * columns]
    in global memory, in register order.

    It takes no shared memory, no fence and no barrier. `plgpu.atomic_add` emits an instruction for
    each number.
    """
    plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.Layout.WGMMA))(_add)(ref, x)


def _add(ctx: Any, ref: Any, x: Any) -> None:
    """Code of one warpgroup: register 4 i + j of a thread belongs to number (128 i + thread) * 4 +
    j of ref.
    """
    from jax.experimental.mosaic.gpu import utils
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import arith, llvm

    i32, f32 = ir.IntegerType.get_signless(32), ir.F32Type.get()
    thread = arith.remui(utils.thread_idx(), utils.c(_THREADS, i32))
    base = utils.getelementptr(
        utils.memref_ptr(ref), [arith.muli(thread, utils.c(_VECTOR, i32))], f32
    )
    # A register of the layout is a pair of columns; after the row's pair comes that of the row 8
    # below.
    values = [
        llvm.extractelement(pair, utils.c(i, i32))
        for pair in x.registers.flat
        for i in range(pair.type.shape[0])
    ]
    for i, first in enumerate(range(0, len(values), _VECTOR)):
        target = utils.getelementptr(base, [_THREADS * _VECTOR * i], f32)
        llvm.inline_asm(
            ir.Type.parse("!llvm.void"), [target, *values[first : first + _VECTOR]],
            "red.relaxed.gpu.global.add.v4.f32 [$0], {$1, $2, $3, $4};", "l,f,f,f,f",
            has_side_effects=True,
        )  # fmt: skip


def _add_in_numpy(ref: Any, x: Any) -> None:
    """What `_add` does, for the interpreter."""
    columns = x.shape[1]
    # Rows: warp, half, row. Columns: tile, pair, column.
    ref += x.reshape(4, 2, 8, columns // 8, 4, 2).transpose(3, 0, 2, 4, 1, 5).reshape(-1)


_add.in_numpy = _add_in_numpy  # pyright: ignore[reportFunctionMemberAccess]


def register_order(B: int, heads: int, length: int, columns: int, wide: int) -> tuple[int, ...]:
    """The shape of sums [B, length, heads, columns] in the order of registers: tiles of 64 rows and
    `wide` columns, each of them flat.
    """
    return B, heads, length // WARPGROUP, columns // wide, WARPGROUP * wide


def from_register_order(x: Array) -> Array:
    """Sums [B, length, heads, columns] from their `register_order`: a transpose, which XLA fuses
    with what follows.
    """
    B, heads, tall, parts, size = x.shape
    wide = size // WARPGROUP
    # batch 0, head 1, tile of rows 2, tile of columns 3, 8 columns 4, warp 5, row 6, pair of
    # columns 7, half 8, column 9
    split = x.reshape(B, heads, tall, parts, wide // 8, 4, 8, 4, 2, 2)
    return split.transpose(0, 2, 5, 8, 6, 1, 3, 4, 7, 9).reshape(
        B, tall * WARPGROUP, heads, parts * wide
    )
