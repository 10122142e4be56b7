"""The tiles of the fused backward pass, and the shared memory and barriers that they take. Sizes as
in `spec.py`.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
from jax import Array
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.attention.hopper.backward_sweep import slots
from pallas_kernels.attention.hopper.spec import COMPUTING, WARPGROUP, Spec

Addition = Literal["red", "tma"]
ADDITIONS: tuple[Addition, ...] = ("red", "tma")
ROWS = WARPGROUP * COMPUTING
"""Keys of a block of threads."""


@dataclasses.dataclass(frozen=True)
class FusedTiles:
    """Tile sizes of the fused kernel: `block` queries at a time, at most `stages` of them in shared
    memory.

    add: how dQ gets to global memory: "red", atomic additions from registers, or "tma", a reducing
    copy from shared memory.
    """

    block: int
    stages: int
    add: Addition = "red"

    def __post_init__(self) -> None:
        if self.block not in (64, 128) or self.stages < 1 or self.add not in ADDITIONS:
            raise ValueError(
                "a block has 64 or 128 queries, at least 1 stage, and adds by red or tma, not "
                f"{self}"
            )

    @property
    def rows(self) -> int:
        """Keys of a tile."""
        return ROWS

    def fitting(self, spec: Spec) -> FusedTiles:
        """These tiles, or smaller ones if a call has too few registers: the slope of a soft cap
        needs some for each query of a block.
        """
        return self if spec.softcap is None else dataclasses.replace(self, block=WARPGROUP)


class FusedShape(NamedTuple):
    """The sizes of a call that its tiles imply."""

    block: int
    part: int
    """Columns of dQ that a warpgroup makes of 64 queries: half of them, or all of those of its own
    64 of 128 queries."""
    swizzled: int
    """Columns of a tile of K, Q and dS^T in shared memory, which divide a part."""
    q_stages: int
    dout_stages: int
    with_dv: bool
    by_head: bool


def shape_of(tiles: FusedTiles, q: Array, k: Array, v: Array, by_head: bool) -> FusedShape:
    """The sizes for operands as of `backward_fused`."""
    (_, S, N, H), (K, V), C = q.shape, v.shape[2:], tiles.block
    part = H // COMPUTING if C == WARPGROUP else H
    turns = S // C * (1 if by_head else N // K)
    kept = ROWS * (H + V) + 2 * ROWS * C + (2 * ROWS * part if tiles.add == "tma" else 0)
    q_stages, dout_stages = slots(min(tiles.stages, turns), kept, C * H, C * V)
    return FusedShape(C, part, math.gcd(part, 64), q_stages, dout_stages, sums_fit(H, V), by_head)


def sums_fit(H: int, V: int) -> bool:
    """Whether a thread's registers hold the sums of dK and dV of 64 keys, beside S^T and dP^T of 64
    queries.
    """
    return H + V <= 256


def scratch_of(
    spec: Spec, tiles: FusedTiles, shape: FusedShape, q: Array, k: Array, v: Array
) -> dict[str, Any]:
    """Shared memory and barriers."""
    H, V, C, W = q.shape[3], v.shape[3], shape.block, COMPUTING
    staged = math.gcd(shape.part, 32)
    return {
        "k_s": _matrix(WARPGROUP, H, k.dtype, shape.swizzled, (W,)),
        "v_s": _matrix(WARPGROUP, V, v.dtype, math.gcd(V, 64), (W,)),
        "q_s": _matrix(C, H, q.dtype, shape.swizzled, (shape.q_stages,)),
        "dout_s": _matrix(C, V, q.dtype, math.gcd(V, 64), (shape.dout_stages,)),
        # dS^T of each warpgroup. With two slots, one meeting a step says both that the other's is
        # there and that it has read mine.
        "ds_s": _matrix(WARPGROUP, C, q.dtype, shape.swizzled, (2, W)),
        "dq_s": _matrix(WARPGROUP, shape.part, jnp.float32, staged, (W,))
        if tiles.add == "tma"
        else None,
        # lse and delta share one array, and so do numbers and ids, because each array takes at
        # least a kilobyte.
        "vectors_s": plgpu.SMEM((shape.q_stages + shape.dout_stages, C), jnp.float32),
        "ints_s": plgpu.SMEM((C + (ROWS + shape.q_stages * C) * spec.segments,), jnp.int32),
        "here": plgpu.Barrier(num_arrivals=2 * W + spec.segments + 1, num_barriers=1),
        "q_here": plgpu.Barrier(num_arrivals=2 + spec.segments, num_barriers=shape.q_stages),
        "dout_here": plgpu.Barrier(num_arrivals=1 + shape.with_dv, num_barriers=shape.dout_stages),
        "delta_here": None if shape.with_dv else plgpu.Barrier(num_barriers=shape.dout_stages),
        "q_free": plgpu.Barrier(num_arrivals=W, num_barriers=shape.q_stages),
        "dout_free": plgpu.Barrier(num_arrivals=W, num_barriers=shape.dout_stages),
        "both": plgpu.Barrier(num_arrivals=W, num_barriers=1),
    }


def _matrix(rows: int, columns: int, dtype: Any, wide: int, copies: tuple[int, ...]) -> Any:
    """As `spec.matrix`, with tiles of `wide` columns."""
    transforms = (
        plgpu.TilingTransform((8, wide)),
        plgpu.SwizzleTransform(jnp.dtype(dtype).itemsize * wide),
    )
    return plgpu.SMEM((*copies, rows, columns), dtype, transforms=transforms)
