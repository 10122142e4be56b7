"""The backward pass on Hopper, in kernels that recompute the probabilities from the log-sum-exp
(Dao, arXiv 2307.08691, algorithm 2).

`backward_fused.py` does it in five matmuls, and adds to dq in no fixed order. Two others take
seven: one owns queries and visits keys, the other owns keys and visits queries. So each sum has one
owner and a fixed order, needs no atomics, and is bitwise reproducible: they serve
`deterministic=True`. Sizes as in `spec.py`.
"""

from __future__ import annotations

from collections.abc import Callable

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


def backward(
    spec: Spec,
    tiles: tuple[FusedTiles | None, Tiles, Tiles],
    q: Array,
    k: Array,
    v: Array,
    dout: Array,
    lse_BNS: Array,
    delta_BNS: Array,
    sides: Sides,
) -> tuple[Array, Array, Array]:
    """Gradients of q [B, S, N, H], k [B, T, K, H], v [B, T, K, V], of the same shapes, padded to
    complete tiles of all kernels.

    Their dtypes are the same, or fp32 if they are not rounded.

    tiles: of the fused kernel, of dq, of dkv. dout: [B, S, N, V]. lse_BNS: fp32, to the base e;
    +inf in rows that are padding or see no key. delta_BNS: fp32, rowsum(dout * out) minus the
    gradient of the log-sum-exp. sides: a function of the tiles of a kernel and of whether their
    rows are keys; its other inputs, as in `forward`.
    """
    # To the base 2 once, instead of in every step.
    arrays = (q, k, v, dout, lse_BNS * LOG2E, delta_BNS)
    (H, V), (fused, of_dq, of_dkv) = (k.shape[3], v.shape[3]), tiles
    if fused is not None and not spec.deterministic:
        fused = fused.fitting(spec)
        gradients = backward_fused(spec, fused, *arrays, sides(fused, True))
        left: tuple[Part, ...] = () if sums_fit(H, V) else ("dv",)
    else:
        gradients = {"dq": dq(spec, of_dq, *arrays, sides(of_dq, False))}
        left = parts(H, V)
    for part in left:
        gradients |= dkv(spec, of_dkv, *arrays, sides(of_dkv, True), part)
    return gradients["dq"], gradients["dk"], gradients["dv"]


def parts(H: int, V: int) -> tuple[Part, ...]:
    """The kernels of dk and dv: one for both sums if they fit a thread's registers, otherwise one
    for each.
    """
    return ("both",) if H + V <= _COLUMNS else ("dk", "dv")
