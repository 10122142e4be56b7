"""Variants of our attention kernels that only a GPU can rank, as functions of the same arrays.

A variant changes the tiles that the table names for a shape. Its name begins with the direction that it changes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
from record import Row

from pallas_kernels import describe_attention

BOTH = (64, 128)
VARIANTS: dict[str, tuple[str, Row, tuple[int, ...]]] = {
    "bwd red": ("fused", {"add": "red"}, BOTH),
    "bwd tma": ("fused", {"add": "tma"}, BOTH),
    "bwd pair": ("", {}, BOTH),
    "fwd as tuned": ("forward", {}, BOTH),
    "fwd alternating": ("forward", {"overlapped": False}, BOTH),
    "fwd named barriers": ("forward", {"named_barriers": True}, BOTH),
    "fwd no automatic barriers": ("forward", {"automatic_barriers": False}, BOTH),
    "fwd neither": ("forward", {"named_barriers": True, "automatic_barriers": False}, BOTH),
    "fwd 3 warpgroups": ("forward", {"warpgroups": 3, "stages": 2}, (64,)),
    "fwd 128 rows": ("forward", {"height": 128, "block": 64, "stages": 2}, (64,)),
    "fwd blocks of 192": ("forward", {"block": 192, "stages": 2}, (64,)),
    "fwd blocks of 256, alternating": ("forward", {"block": 256, "stages": 2, "overlapped": False}, (64,)),
}
"""Name -> (the kernel whose tiles it changes, the changes, the head dims that it is for). The pair has a fixed order of sums."""


def variant_attention(name: str, static: Row) -> Callable[..., jax.Array]:
    """Returns f(q, k, v, **arrays) of a variant, for a Hopper GPU or the interpreter. static: as in `attention_peers.attention`."""
    kernel, changes, _ = VARIANTS[name]

    def attend(q: jax.Array, k: jax.Array, v: jax.Array, **arrays: jax.Array) -> jax.Array:
        from pallas_kernels.attention.hopper import attention  # Mosaic needs a GPU's packages
        from pallas_kernels.attention.tuning import tiling

        features: Row = {**static, **arrays, "platform": "gpu", "capability": (9, 0), "deterministic": name == "bwd pair"}
        problem = describe_attention(q, k, v, **features)
        tiles: Any = tiling(problem)
        if kernel:
            tiles = dataclasses.replace(tiles, **{kernel: dataclasses.replace(getattr(tiles, kernel), **changes)})
        sides: Row = {side: x for side, x in arrays.items() if side in ("q_offset", "sinks")}
        if (ids := arrays.get("segment_ids")) is not None:
            sides |= {"segment_ids": ids, "kv_segment_ids": arrays.get("kv_segment_ids", ids)}
        return attention(q, k, v, problem, tiles, **sides)[0]

    return attend
