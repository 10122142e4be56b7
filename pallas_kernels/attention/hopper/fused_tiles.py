"""The tiles of the fused backward pass, and the shared memory and barriers that they take.

Sizes as in `spec.py`.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
from jax import Array
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.attention.hopper.backward_sweep import ring_sizes
from pallas_kernels.attention.hopper.spec import COMPUTING, WARPGROUP, Spec, swizzled

Addition = Literal["red", "tma"]
ADDITIONS: tuple[Addition, ...] = ("red", "tma")
ROWS = WARPGROUP * COMPUTING
"""Keys of a block of threads."""


@dataclasses.dataclass(frozen=True)
class FusedTiles:
    """Tile sizes of the fused kernel: 128 keys stay in place while blocks of queries pass."""

    block: int
    """Queries of a block."""
    stages: int
    """The most blocks that are in shared memory together."""
    add: Addition = "red"
    """The way of dQ to global memory: "red", atomic additions from registers, or "tma", a reducing
    copy from shared memory, which takes a buffer there. On an H200, "tma" had 0.95 to 0.99 of the
    rate of "red" (benchmarks/results/gpu_suite_2026-11-26_h200-jax-0.11.2.md)."""

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
        """These tiles, or smaller ones with a soft cap.

        Its slope needs registers for each query of a block.
        """
        return self if spec.softcap is None else dataclasses.replace(self, block=WARPGROUP)


class FusedShape(NamedTuple):
    """The sizes of a call that its tiles imply."""

    block: int
    part: int
    """Columns of dQ that a warpgroup makes of 64 queries: half of them, or all of those of its own
    64 of 128 queries."""
    tile_columns: int
    """Columns of a swizzled tile of K, Q and dS^T in shared memory. They divide a part, because a
    warpgroup multiplies by its part of K alone."""
    q_stages: int
    dout_stages: int
    computes_dv: bool
    """The kernel computes dV, too."""
    single_head: bool
    """A block of threads visits the queries of one head, instead of all heads of a group."""


def shape_of(tiles: FusedTiles, q: Array, k: Array, v: Array, single_head: bool) -> FusedShape:
    """The sizes for operands as of `backward_fused`."""
    _, S, N, H = q.shape
    K, V = v.shape[2:]
    C = tiles.block
    part = H // COMPUTING if C == WARPGROUP else H
    n_turns = S // C * (1 if single_head else N // K)
    # K and V, two slots of dS^T, and dQ in fp32 if it is staged.
    n_resident = ROWS * (H + V) + 2 * ROWS * C
    if tiles.add == "tma":
        n_resident += 2 * ROWS * part
    q_stages, dout_stages = ring_sizes(min(tiles.stages, n_turns), n_resident, C * H, C * V)
    return FusedShape(
        block=C,
        part=part,
        tile_columns=math.gcd(part, 64),
        q_stages=q_stages,
        dout_stages=dout_stages,
        computes_dv=sums_fit(H, V),
        single_head=single_head,
    )


def sums_fit(H: int, V: int) -> bool:
    """Whether a thread's registers hold the sums of dK and dV of 64 keys.

    They are beside S^T and dP^T of 64 queries.
    """
    return H + V <= 256


def scratch_of(
    spec: Spec, tiles: FusedTiles, shape: FusedShape, q: Array, k: Array, v: Array
) -> dict[str, Any]:
    """Shared memory and barriers."""
    H = q.shape[3]
    V = v.shape[3]
    C = shape.block
    W = COMPUTING
    columns = shape.tile_columns
    v_columns = math.gcd(V, 64)
    dq_s = None
    if tiles.add == "tma":
        dq_s = swizzled(WARPGROUP, shape.part, jnp.float32, math.gcd(shape.part, 32), (W,))
    # delta arrives with dO, or at a barrier of its own (see `_Kernel.step`).
    delta_ready = None
    if not shape.computes_dv:
        delta_ready = plgpu.Barrier(num_barriers=shape.dout_stages)
    return {
        "k_s": swizzled(WARPGROUP, H, k.dtype, columns, (W,)),
        "v_s": swizzled(WARPGROUP, V, v.dtype, v_columns, (W,)),
        "q_s": swizzled(C, H, q.dtype, columns, (shape.q_stages,)),
        "dout_s": swizzled(C, V, q.dtype, v_columns, (shape.dout_stages,)),
        # dS^T of each warpgroup. With two slots, one meeting a step says both that the other's is
        # there and that it has read mine.
        "ds_s": swizzled(WARPGROUP, C, q.dtype, columns, (2, W)),
        "dq_s": dq_s,
        # lse and delta share one array, and so do numbers and ids, because each array takes at
        # least a kilobyte.
        "vectors_s": plgpu.SMEM((shape.q_stages + shape.dout_stages, C), jnp.float32),
        "ints_s": plgpu.SMEM((C + (ROWS + shape.q_stages * C) * spec.segments,), jnp.int32),
        # K and V of each warpgroup, all ids, and the loading warpgroup, which stores numbers.
        "kv_ready": plgpu.Barrier(num_arrivals=2 * W + spec.segments + 1, num_barriers=1),
        # Q, lse, and ids
        "q_ready": plgpu.Barrier(num_arrivals=2 + spec.segments, num_barriers=shape.q_stages),
        "dout_ready": plgpu.Barrier(
            num_arrivals=1 + shape.computes_dv, num_barriers=shape.dout_stages
        ),
        "delta_ready": delta_ready,
        "q_free": plgpu.Barrier(num_arrivals=W, num_barriers=shape.q_stages),
        "dout_free": plgpu.Barrier(num_arrivals=W, num_barriers=shape.dout_stages),
        # where the computing warpgroups meet
        "both": plgpu.Barrier(num_arrivals=W, num_barriers=1),
    }
