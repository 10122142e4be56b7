"""Stores of some rows of a tile from registers to global memory.

TMA stores all rows of a tile, and rows of another group must stay as they are.
"""

from __future__ import annotations

from typing import Any

from jax.experimental.pallas import mosaic_gpu as plgpu

_THREADS = 128
"""Threads of a warpgroup."""


def store_rows(ref: Any, x: Any, row: Any, begin: Any, end: Any, column: Any) -> None:
    """ref[row + begin : row + end, column :] = x[begin:end], as far as ref has columns.

    begin and end may lie outside of x, which then limits the rows.

    ref: [rows, width] in global memory, with a width that is a multiple of 8.
    x: [64, columns] of 16 bits, the result of a wgmma.
    """
    scalar = plgpu.Layout.WG_SPLAT(())
    arg_types = (plgpu.RefType(), plgpu.Layout.WGMMA, *[scalar] * 4)
    plgpu.inline_mgpu(arg_types=arg_types)(_store)(ref, x, row, begin, end, column)


def _store(ctx: Any, ref: Any, x: Any, row: Any, begin: Any, end: Any, column: Any) -> None:
    """Emits the code of one warpgroup.

    A register is two columns; after the pair of a row comes that of the row 8 below, then the next
    8 columns.
    """
    from jax.experimental.mosaic.gpu import utils
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import arith, llvm

    i32 = ir.IntegerType.get_signless(32)
    i64 = ir.IntegerType.get_signless(64)
    greater_equal = arith.CmpIPredicate.sge
    less = arith.CmpIPredicate.slt
    row, begin, end, column = (scalar.registers.item() for scalar in (row, begin, end, column))
    width = ir.MemRefType(ref.type).shape[1]

    def c(n: int) -> Any:
        return utils.c(n, i32)

    thread = arith.remui(utils.thread_idx(), c(_THREADS))
    warp = arith.divui(thread, c(32))
    lane = arith.remui(thread, c(32))
    # A warp has 16 rows, and four neighbouring threads share a row and the row 8 below.
    first_row = arith.addi(arith.muli(warp, c(16)), arith.divui(lane, c(4)))
    n_columns = arith.subi(c(width), column)
    ref_row = arith.extui(i64, arith.addi(row, first_row))
    offset = arith.addi(arith.muli(ref_row, utils.c(width, i64)), arith.extui(i64, column))
    first_column = arith.muli(arith.remui(lane, c(4)), c(2))
    offset = arith.addi(offset, arith.extui(i64, first_column))
    base = utils.getelementptr(utils.memref_ptr(ref), [offset], x.mlir_dtype)

    for i, pair in enumerate(x.registers.flat):
        rows_below = 8 * (i % 2)
        columns_right = 8 * (i // 2)
        x_row = arith.addi(first_row, c(rows_below))
        in_rows = arith.andi(arith.cmpi(greater_equal, x_row, begin), arith.cmpi(less, x_row, end))
        stored = arith.andi(in_rows, arith.cmpi(less, c(columns_right), n_columns))
        target = utils.getelementptr(base, [rows_below * width + columns_right], x.mlir_dtype)
        llvm.inline_asm(
            ir.Type.parse("!llvm.void"),
            [target, utils.bitcast(pair, i32), arith.extui(i32, stored)],
            "{ .reg .pred p; setp.ne.s32 p, $2, 0; @p st.global.b32 [$0], $1; }",
            "l,r,r",
            has_side_effects=True,
        )


def _store_in_numpy(ref: Any, x: Any, row: Any, begin: Any, end: Any, column: Any) -> None:
    """`_store` in NumPy, for the interpreter."""
    first = max(0, int(begin))
    stop = min(len(x), int(end))
    target = ref[int(row) + first : int(row) + stop, int(column) : int(column) + x.shape[1]]
    target[...] = x[first:stop, : target.shape[1]]


_store.in_numpy = _store_in_numpy  # pyright: ignore[reportFunctionMemberAccess]
