"""The backward pass on Hopper, in kernels that recompute the probabilities from the log-sum-exp (Dao, arXiv 2307.08691, algorithm 2).

One kernel owns queries and walks keys, the other owns keys and walks queries: so each sum has one owner and a fixed order, without
atomics, and comes out with the same bits every time. Sizes as in `spec.py`.
"""

from __future__ import annotations

from jax import Array

from pallas_kernels.attention.hopper.backward_keys import Part, dkv
from pallas_kernels.attention.hopper.backward_queries import dq
from pallas_kernels.attention.hopper.spec import LOG2E, Refs, Spec, Tiles

_COLUMNS = 256
"""The most that a kernel's fp32 sums may have together: 128 of a thread's registers, which leaves enough for all else."""


def backward(
    spec: Spec,
    dq_tiles: Tiles,
    dkv_tiles: Tiles,
    q: Array,
    k: Array,
    v: Array,
    dout: Array,
    lse_BNS: Array,
    delta_BNS: Array,
    sides: dict[str, Array | None],
) -> tuple[Array, Array, Array]:
    """Gradients of q [B, S, N, H], k [B, T, K, H], v [B, T, K, V], in their dtypes and shapes, all padded to whole tiles of both kernels.

    dout: [B, S, N, V]. lse_BNS: fp32, natural; +inf in rows that are padding or saw nothing. delta_BNS: fp32, rowsum(dout * out) less the
    gradient of the log-sum-exp. sides: as of `forward`; what says where to walk is there twice, for tiles of keys as `{name}_kv`.
    """
    # To the base 2, once here instead of in every step.
    arrays = (q, k, v, dout, lse_BNS * LOG2E, delta_BNS)
    of_keys = {name.removesuffix("_kv"): x for name, x in sides.items() if name.endswith("_kv")}
    of_queries = {name: x for name, x in sides.items() if not name.endswith("_kv") and name != "sinks"}
    found = Refs()
    for part in parts(k.shape[3], v.shape[3]):
        found |= dkv(spec, dkv_tiles, *arrays, of_queries | of_keys, part)
    return dq(spec, dq_tiles, *arrays, of_queries), found["dk"], found["dv"]


def parts(H: int, V: int) -> tuple[Part, ...]:
    """Both sums in one kernel where a thread's registers hold them, else each in its own."""
    return ("both",) if H + V <= _COLUMNS else ("dk", "dv")
