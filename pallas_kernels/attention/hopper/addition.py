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
    OPTIONAL_INPUTS,
    THREAD,
    WARPGROUP,
    Refs,
    in_sections,
    present,
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
    """Returns the outputs of a kernel that also adds to fp32 arrays, and those sums.

    The sums are passed in the buffers of the outputs. Pallas's public functions can do that only
    with mutable references, and the call would then have a side effect.

    Args:
      sums: by name, an array, or a shape if the sum starts at zero.
      body, inputs, out, scratch, ...: as for `spec.launch`.
    """
    absent = dict.fromkeys((*OPTIONAL_INPUTS, *scratch))
    inputs = present(inputs)
    scratch = present(scratch)
    initial = {key: x for key, x in sums.items() if not isinstance(x, tuple)}
    shapes = {key: x if isinstance(x, tuple) else x.shape for key, x in sums.items()}
    results = {key: jax.ShapeDtypeStruct(shape, jnp.float32) for key, shape in shapes.items()}
    results |= out
    aliases = {len(inputs) + i: i for i in range(len(sums))}
    if moved is None:
        # A sum is read and written.
        arrays = (*inputs.values(), *results.values(), *(results[key] for key in sums))
        moved = sum(x.size * x.dtype.itemsize for x in arrays)

    def entry(*refs: Any) -> None:
        # The refs of the sums come twice, as inputs and as outputs; they are the same memory.
        input_refs = zip(inputs, refs[: len(inputs)], strict=True)
        result_refs = zip(results, refs[len(inputs) + len(sums) :], strict=True)
        operands = absent | dict(input_refs) | dict(result_refs)

        def run(**scratch_refs: Any) -> None:
            body(Refs(operands | scratch_refs))

        pl.run_scoped(run, collective_axes=THREAD, **scratch)

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
        [(mesh, entry)],
        list(results.values()),
        input_output_aliases=aliases,
        compiler_params=params,
        name=name,
        # the public function reads it, too
        interpret=config.pallas_tpu_interpret_mode_context_manager.value,
    )

    @jax.custom_batching.sequential_vmap  # jax has no rule for a kernel whose operands are outputs
    def call(*arrays: Array) -> list[Array]:
        passed = dict(zip(initial, arrays[len(inputs) :], strict=True))
        initial_sums = [
            passed[key] if key in passed else jnp.zeros(shape, jnp.float32)
            for key, shape in shapes.items()
        ]
        return kernel(*arrays[: len(inputs)], *initial_sums)

    with (
        config._check_vma(False),
        cost_metadata(name, flops=flops, bytes_accessed=moved, occupancy=occupancy),
    ):
        return Refs(zip(results, call(*inputs.values(), *initial.values()), strict=True))


def launch_unrounded(
    body: Callable[[Refs], None],
    inputs: Mapping[str, Array | None],
    out: Mapping[str, jax.ShapeDtypeStruct],
    scratch: Mapping[str, Any],
    **options: Any,
) -> Refs:
    """Returns the outputs [B, length, heads, columns] in fp32; otherwise as `spec.launch`.

    The kernel adds each tile of 64 rows of them to zeros, by `add_from_registers`. A tile with one
    owner has a fixed order all the same.
    """
    sums = {}
    for name, x in out.items():
        B, length, heads, columns = x.shape
        sums[name] = register_order(B, heads, length, columns, columns)
    results = launch_adding(body, inputs, sums, {}, scratch, **options)
    return Refs({name: from_register_order(x) for name, x in results.items()})


def add_from_registers(ref: Any, x: Array) -> None:
    """ref += x, atomically.

    It takes no shared memory, no fence and no barrier. `plgpu.atomic_add` emits an instruction for
    each number.

    ref: fp32 [64 * columns] in global memory, in register order.
    x: fp32 [64, columns], the result of a wgmma.
    """
    plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.Layout.WGMMA))(_add)(ref, x)


def _add(ctx: Any, ref: Any, x: Any) -> None:
    """Emits the code of one warpgroup.

    Register 4 i + j of a thread belongs to number (128 i + thread) * 4 + j of ref.
    """
    from jax.experimental.mosaic.gpu import utils
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import arith, llvm

    i32 = ir.IntegerType.get_signless(32)
    f32 = ir.F32Type.get()
    thread = arith.remui(utils.thread_idx(), utils.c(_THREADS, i32))
    pointer = utils.memref_ptr(ref)
    base = utils.getelementptr(pointer, [arith.muli(thread, utils.c(_VECTOR, i32))], f32)
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
            ir.Type.parse("!llvm.void"),
            [target, *values[first : first + _VECTOR]],
            "red.relaxed.gpu.global.add.v4.f32 [$0], {$1, $2, $3, $4};",
            "l,f,f,f,f",
            has_side_effects=True,
        )


def _add_in_numpy(ref: Any, x: Any) -> None:
    """`_add` in NumPy, for the interpreter."""
    columns = x.shape[1]
    # Rows: warp, half, row. Columns: tile, pair, column.
    ref += x.reshape(4, 2, 8, columns // 8, 4, 2).transpose(3, 0, 2, 4, 1, 5).reshape(-1)


_add.in_numpy = _add_in_numpy  # pyright: ignore[reportFunctionMemberAccess]


def register_order(B: int, heads: int, length: int, columns: int, wide: int) -> tuple[int, ...]:
    """The shape of sums [B, length, heads, columns] in the order of registers.

    They are tiles of 64 rows and `wide` columns, each flat.
    """
    return B, heads, length // WARPGROUP, columns // wide, WARPGROUP * wide


def from_register_order(x: Array) -> Array:
    """Sums [B, length, heads, columns] from their `register_order`.

    It is a transpose, which XLA fuses with what follows.
    """
    B, heads, row_tiles, column_tiles, size = x.shape
    wide = size // WARPGROUP
    # batch 0, head 1, tile of rows 2, tile of columns 3, 8 columns 4, warp 5, row 6, pair of
    # columns 7, half 8, column 9
    split = x.reshape(B, heads, row_tiles, column_tiles, wide // 8, 4, 8, 4, 2, 2)
    rows_first = split.transpose(0, 2, 5, 8, 6, 1, 3, 4, 7, 9)
    return rows_first.reshape(B, row_tiles * WARPGROUP, heads, column_tiles * wide)
