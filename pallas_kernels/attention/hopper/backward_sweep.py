"""Shared parts of the backward kernels.

For raw dot products s = q k^T, with dp = dout v^T and delta = rowsum(dout * out),

    p  = exp(scale * s - lse)
    ds = p * (dp - delta)
    dq = ds k,  dk = ds^T q,  dv = p^T dout

where dq and dk are scaled at the end (FlashAttention-2, arXiv 2307.08691, section 3.1.2).
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
_MAX_REGISTERS = 192
"""Registers of a thread, of 240, that sums and operands may take."""


def ring_sizes(
    stages: int, n_resident: int, n_long_lived: int, n_short_lived: int
) -> tuple[int, int]:
    """The slots of two rings of operands: at most `stages` each, and both 2 before one has 3.

    The first ring's operands are read until the end of a step. The other ring may get one slot
    only, whose copy is then not hidden.

    Args:
      n_resident: 16-bit numbers that stay in shared memory beside the rings.
      n_long_lived, n_short_lived: 16-bit numbers of a slot of the first ring and of the other.
    """
    n_numbers = (SHARED_MEMORY - _IDS) // 2 - n_resident
    for long_lived in range(stages, 0, -1):
        short_lived = min(stages, (n_numbers - long_lived * n_long_lived) // n_short_lived)
        if short_lived >= 2 or long_lived <= 2:
            return long_lived, max(1, short_lived)
    raise AssertionError("stages is at least 1")


def registers_are_short(sum_columns: int, block: int, n_operands: int) -> bool:
    """Whether registers are too few for products to overlap.

    A thread holds `sum_columns` columns of sums, s and dp, and 16-bit operands.
    """
    return sum_columns // 2 + block + n_operands * block // 4 > _MAX_REGISTERS


class Ring:
    """A ring of slots in shared memory, which the loading warpgroup fills and the others read.

    The barrier `ready` of a slot completes when its copies have arrived, and `free` when every
    computing warpgroup has given the slot back.
    """

    def __init__(self, ready: Any, free: Any, size: int) -> None:
        self.ready = ready
        self.free = free
        self.size = size

    def slot(self, turn: Any) -> Any:
        """The index of the slot of a turn."""
        return lax.rem(turn, jnp.int32(self.size))

    def take(self, turn: Any) -> Any:
        """The slot of a turn, after it is filled."""
        slot = self.slot(turn)
        plgpu.barrier_wait(self.ready.at[slot])
        # with one slot, its address is the same in every step
        return slot if self.size > 1 else opaque(slot)

    def give(self, turn: Any) -> None:
        """Marks the slot of a turn as free."""
        plgpu.barrier_arrive(self.free.at[self.slot(turn)])

    def fill(self, turn: Any, *copies: tuple[Any, Callable[[Any], Any]]) -> None:
        """Starts copies into a slot, once it is free.

        copies: pairs of a source and of a function from the slot to its target.
        """
        slot = self.slot(turn)
        pl.when(turn >= self.size)(lambda: plgpu.barrier_wait(self.free.at[slot]))
        for source, target in copies:
            plgpu.copy_gmem_to_smem(source, target(slot), self.ready.at[slot])


def probabilities(
    spec: Spec, s: Array, lse: Array, axis: int, mask: Array | None
) -> tuple[Array, Array]:
    """(p, p times the slope of the soft cap), from raw dot products.

    lse: to the base 2, along `axis` of the tile.
    """
    if spec.softcap is not None:
        s = jnp.tanh(s * spec.capped)
    if mask is not None:
        s = jnp.where(mask, masked_logit(spec), s)
    p = jnp.exp2(s * spec.to_log2 - spread(lse, (s.shape[0], s.shape[1]), axis))
    return p, p if spec.softcap is None else p * (1 - s * s)


def masked_logit(spec: Spec) -> float:
    """The (capped) dot product of a query and a key that it does not see.

    With a soft cap its square, in the cap's slope, must be finite, so that p = 0 times the slope is
    0.
    """
    return -jnp.inf if spec.softcap is None else -1e18
