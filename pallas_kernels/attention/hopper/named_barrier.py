"""Named barriers of a block (PTX: bar.sync, bar.arrive): one warpgroup waits for another.

They take one instruction and no shared memory; an mbarrier takes an arrival of every thread and a
loop that tests it. Pallas has none, so these are primitives, which the interpreter knows too. They
order instructions, not memory: data that another warpgroup wrote needs another barrier.
"""

from __future__ import annotations

from typing import Any

from jax._src.pallas.mosaic_gpu import core, lowering
from jax.experimental.mosaic import gpu as mosaic
from jax.extend.core import Primitive

_THREADS = 256
"""Threads of two warpgroups: the one that waits and the one that arrives."""


def wait(number: Any) -> None:
    """Waits until another warpgroup arrives at a barrier.

    number: int32, 8 to 15; the others belong to Pallas and to CUDA.
    """
    _wait.bind(number)


def arrive(number: Any) -> None:
    """Releases the warpgroup that waits, or will wait, at a barrier."""
    _arrive.bind(number)


def _primitive(name: str, instruction: str) -> Primitive:
    primitive = Primitive(name)
    primitive.multiple_results = True

    @primitive.def_effectful_abstract_eval
    def _(number: Any) -> tuple[tuple, set]:
        # An effect, so that the primitive is neither removed nor reordered.
        return (), {core._memory_effect}

    @lowering.register_lowering_rule(primitive, mosaic.LoweringSemantics.Lane)
    def _(ctx: Any, number: Any) -> tuple:
        from jax._src.lib.mlir import ir  # pyright: ignore[reportPrivateImportUsage]
        from jax._src.lib.mlir.dialects import llvm

        number = lowering._ensure_ir_value(number, ctx.avals_in[0].dtype)
        llvm.inline_asm(
            ir.Type.parse("!llvm.void"),
            [number],
            f"{instruction} $0, {_THREADS};",
            "r",
            has_side_effects=True,
        )
        return ()

    return primitive


_wait = _primitive("named_barrier_wait", "bar.sync")
_arrive = _primitive("named_barrier_arrive", "bar.arrive")
