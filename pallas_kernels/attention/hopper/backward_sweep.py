"""Shared parts of the backward kernels.

With dp = dout v^T and delta = rowsum(dout * out), for raw dot products s = q k^T,

ds = p * (dp - delta), dq = ds k, dk = ds^T q, dv = p^T dout, where p = exp(scale * s - lse), and dq
and dk are scaled at the end.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.attention.hopper.spec import SHARED_MEMORY, Spec, opaque, spread

_IDS = 2048
"""Bytes for segment ids; SHARED_MEMORY leaves room for other vectors. Reserved without segments,
too, for the same number of slots."""


def slots(stages: int, kept: int, held: int, other: int) -> tuple[int, int]:
    """The slots of two rings, of `held` and `other` 16-bit numbers each, besides `kept` ones: at
    most `stages`, both 2 before one has 3.

    `held`: read until the end of a step. The other ring may get one slot only, whose copy is then
    not hidden.
    """
    for n in range(stages, 0, -1):
        rest = min(stages, ((SHARED_MEMORY - _IDS) // 2 - kept - n * held) // other)
        if rest >= 2 or n <= 2:
            return n, max(1, rest)
    raise AssertionError("stages is at least 1")


def tight(sums: int, block: int, operands: int) -> bool:
    """Whether registers are too few for products to overlap: they hold `sums` columns, s and dp,
    and 16-bit operands.
    """
    return sums // 2 + block + operands * block // 4 > 192


class Ring:
    """A ring of slots in shared memory: `take` waits until a slot is filled, `give` lets the
    producer overwrite it.
    """

    def __init__(self, here: Any, free: Any, size: int) -> None:
        self.here, self.free, self.size = here, free, size

    def slot(self, turn: Any) -> Any:
        """The index of the slot of a turn."""
        return lax.rem(turn, jnp.int32(self.size))

    def take(self, turn: Any) -> Any:
        """The slot of a turn, after it is filled."""
        slot = self.slot(turn)
        plgpu.barrier_wait(self.here.at[slot])
        # with one slot, its address is the same in every step
        return slot if self.size > 1 else opaque(slot)

    def give(self, turn: Any) -> None:
        """Marks the slot of a turn as free."""
        plgpu.barrier_arrive(self.free.at[self.slot(turn)])

    def fill(self, turn: Any, *copies: tuple[Any, Callable[[Any], Any]]) -> None:
        """Producer: copies each source to its target, a function of the slot, once the slot is
        free.
        """
        slot = self.slot(turn)
        pl.when(turn >= self.size)(lambda: plgpu.barrier_wait(self.free.at[slot]))
        for source, target in copies:
            plgpu.copy_gmem_to_smem(source, target(slot), self.here.at[slot])


def weights(spec: Spec, s: Array, lse: Array, axis: int, mask: Array | None) -> tuple[Array, Array]:
    """(p, p times the slope of the soft cap), from raw dot products. lse: to the base 2, along
    `axis` of the tile.
    """
    if spec.softcap is not None:
        s = jnp.tanh(s * spec.capped)
    if mask is not None:
        # With a soft cap, its square must be finite, so that p = 0 times the slope is 0.
        s = jnp.where(mask, -jnp.inf if spec.softcap is None else -1e18, s)
    p = jnp.exp2(s * spec.to_log2 - spread(lse, (s.shape[0], s.shape[1]), axis))
    return p, p if spec.softcap is None else p * (1 - s * s)
