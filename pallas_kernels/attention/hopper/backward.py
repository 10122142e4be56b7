"""The backward pass on Hopper, in kernels that recompute the probabilities from the log-sum-exp (Dao, arXiv 2307.08691, algorithm 2).

One kernel owns queries and visits keys, the other owns keys and visits queries. So each sum has one owner and a fixed order, needs no
atomics, and is bitwise reproducible. Sizes as in `spec.py`.
"""

from __future__ import annotations

from jax import Array

from pallas_kernels.attention.hopper.backward_keys import Part, dkv
from pallas_kernels.attention.hopper.backward_queries import dq
from pallas_kernels.attention.hopper.spec import LOG2E, Refs, Spec, Tiles

_COLUMNS = 256
"""The most columns of a kernel's fp32 sums together: 128 registers of a thread, which leaves enough for everything else."""


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
    """Gradients of q [B, S, N, H], k [B, T, K, H], v [B, T, K, V], of the same dtypes and shapes, padded to complete tiles of both kernels.

    dout: [B, S, N, V]. lse_BNS: fp32, to the base e; +inf in rows that are padding or see no key. delta_BNS: fp32, rowsum(dout * out) minus
    the gradient of the log-sum-exp. sides: as in `forward`; the walks of tiles of keys are in `{name}_kv`.
    """
    # To the base 2 once, instead of in every step.
    arrays = (q, k, v, dout, lse_BNS * LOG2E, delta_BNS)
    of_keys = {name.removesuffix("_kv"): x for name, x in sides.items() if name.endswith("_kv")}
    of_queries = {name: x for name, x in sides.items() if not name.endswith("_kv") and name != "sinks"}
    gradients = Refs()
    for part in parts(k.shape[3], v.shape[3]):
        gradients |= dkv(spec, dkv_tiles, *arrays, of_queries | of_keys, part)
    return dq(spec, dq_tiles, *arrays, of_queries), gradients["dk"], gradients["dv"]


def parts(H: int, V: int) -> tuple[Part, ...]:
    """The kernels to run: one for both sums if they fit a thread's registers, otherwise one for each."""
    return ("both",) if H + V <= _COLUMNS else ("dk", "dv")
