"""Stores of some rows of a tile from registers to global memory. TMA stores all rows of a tile, and
those of another group must stay.
"""

from __future__ import annotations

from typing import Any

from jax.experimental.pallas import mosaic_gpu as plgpu

_THREADS = 128
"""Threads of a warpgroup."""


def store_rows(ref: Any, x: Any, row: Any, begin: Any, end: Any, column: Any) -> None:
    """ref[row + begin : row + end, column :] = x[begin:end], as far as x has rows and ref has
    columns.

    x: [64, columns] of 16 bits, the result of a wgmma; ref: [rows, width] in global memory, with a
    width that is a multiple of 8.
    """
    scalar = plgpu.Layout.WG_SPLAT(())
    plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.Layout.WGMMA, *[scalar] * 4))(_store)(
        ref, x, row, begin, end, column
    )


def _store(ctx: Any, ref: Any, x: Any, row: Any, begin: Any, end: Any, column: Any) -> None:
    """Code of one warpgroup. A register is two columns; after the pair of a row comes that of the
    row 8 below, then the next 8 columns.
    """
    from jax.experimental.mosaic.gpu import utils
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import arith, llvm

    i32, i64 = ir.IntegerType.get_signless(32), ir.IntegerType.get_signless(64)
    row, begin, end, column = (scalar.registers.item() for scalar in (row, begin, end, column))
    width = ir.MemRefType(ref.type).shape[1]

    def c(n: int) -> Any:
        return utils.c(n, i32)

    thread = arith.remui(utils.thread_idx(), c(_THREADS))
    warp, lane = arith.divui(thread, c(32)), arith.remui(thread, c(32))
    # of the 64 rows, the first of this thread
    own = arith.addi(arith.muli(warp, c(16)), arith.divui(lane, c(4)))
    left = arith.subi(c(width), column)
    at = arith.addi(
        arith.muli(arith.extui(i64, arith.addi(row, own)), utils.c(width, i64)),
        arith.extui(i64, column),
    )
    at = arith.addi(at, arith.extui(i64, arith.muli(arith.remui(lane, c(4)), c(2))))
    base = utils.getelementptr(utils.memref_ptr(ref), [at], x.mlir_dtype)
    for i, pair in enumerate(x.registers.flat):
        below, columns = 8 * (i % 2), 8 * (i // 2)
        line, less = arith.addi(own, c(below)), arith.CmpIPredicate.slt
        wanted = arith.andi(
            arith.cmpi(arith.CmpIPredicate.sge, line, begin), arith.cmpi(less, line, end)
        )
        wanted = arith.andi(wanted, arith.cmpi(less, c(columns), left))
        llvm.inline_asm(
            ir.Type.parse("!llvm.void"),
            [utils.getelementptr(base, [below * width + columns], x.mlir_dtype), utils.bitcast(pair, i32), arith.extui(i32, wanted)],
            "{ .reg .pred p; setp.ne.s32 p, $2, 0; @p st.global.b32 [$0], $1; }", "l,r,r",
            has_side_effects=True,
        )  # fmt: skip


def _store_in_numpy(ref: Any, x: Any, row: Any, begin: Any, end: Any, column: Any) -> None:
    """What `_store` does, for the interpreter."""
    first, last = max(0, int(begin)), min(len(x), int(end))
    target = ref[int(row) + first : int(row) + last, int(column) : int(column) + x.shape[1]]
    target[...] = x[first:last, : target.shape[1]]


_store.in_numpy = _store_in_numpy  # pyright: ignore[reportFunctionMemberAccess]
