"""The backward pass on Hopper: the choice of its kernels.

They recompute the probabilities from the log-sum-exp (Dao, arXiv 2307.08691, algorithm 2).

`backward_fused.py` does it in five matmuls, and adds to dq in no fixed order. Two others take
seven: one owns queries and visits keys, the other owns keys and visits queries. So each sum has one
owner and a fixed order, needs no atomics, and is bitwise reproducible: they serve
`deterministic=True`. On an H200 they had 0.77 to 0.85 of the fused kernel's rate
(benchmarks/results/gpu_suite_2026-11-26_h200-jax-0.11.2.md). Sizes as in `spec.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from jax import Array

from pallas_kernels.attention.hopper.backward_fused import backward_fused
from pallas_kernels.attention.hopper.backward_keys import Part, dkv
from pallas_kernels.attention.hopper.backward_queries import dq
from pallas_kernels.attention.hopper.fused_tiles import FusedTiles, sums_fit
from pallas_kernels.attention.hopper.spec import LOG2E, Spec, Tiles

_COLUMNS = 256
"""The most columns of a kernel's fp32 sums together: 128 registers of a thread, which leaves enough
for everything else."""
Sides = Callable[[Tiles | FusedTiles, bool], dict[str, Array | None]]
"""A function of the tiles of a kernel and of whether their rows are keys: its other inputs, as in
`forward`."""


class BackwardTiles(NamedTuple):
    """The tiles of each kernel."""

    fused: FusedTiles | None
    """None: the two other kernels serve all calls."""
    dq: Tiles
    dkv: Tiles


def backward(
    spec: Spec,
    tiles: BackwardTiles,
    q: Array,
    k: Array,
    v: Array,
    dout: Array,
    lse_BNS: Array,
    delta_BNS: Array,
    sides: Sides,
) -> tuple[Array, Array, Array]:
    """Returns the gradients of q, k and v, of their shapes.

    Their dtypes are the same, or fp32 if they are not rounded.

    Args:
      q, k, v, dout: [B, S, N, H], [B, T, K, H], [B, T, K, V], [B, S, N, V], padded to complete
        tiles of all kernels.
      lse_BNS: fp32, to the base e; +inf in rows that are padding or see no key.
      delta_BNS: fp32, rowsum(dout * out) minus the gradient of the log-sum-exp.
    """
    # To the base 2 once, instead of in every step.
    arrays = (q, k, v, dout, lse_BNS * LOG2E, delta_BNS)
    H = k.shape[3]
    V = v.shape[3]
    missing: tuple[Part, ...]
    if tiles.fused is not None and not spec.deterministic:
        fused_tiles = tiles.fused.fitting(spec)
        gradients = backward_fused(spec, fused_tiles, *arrays, sides(fused_tiles, True))
        missing = () if sums_fit(H, V) else ("dv",)
    else:
        gradients = {"dq": dq(spec, tiles.dq, *arrays, sides(tiles.dq, False))}
        missing = parts(H, V)
    for part in missing:
        gradients |= dkv(spec, tiles.dkv, *arrays, sides(tiles.dkv, True), part)
    return gradients["dq"], gradients["dk"], gradients["dv"]


def parts(H: int, V: int) -> tuple[Part, ...]:
    """The calls of `dkv`: one for both sums if a thread's registers hold them, otherwise two."""
    return ("both",) if H + V <= _COLUMNS else ("dk", "dv")
