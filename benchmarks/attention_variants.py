"""Variants of our attention kernels that only a GPU can rank, as functions of the same arrays.
Importing this file does not import JAX.

A variant of the forward states its tiles, of those in candidates.json that compile without spills.
A variant of the backward changes the tiles that the table names for a shape.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from record import Row

if TYPE_CHECKING:
    import jax


class Variant(NamedTuple):
    """A variant of one kernel. The others have the tiles of the table."""

    kernel: str = ""
    """forward or fused; empty: none has other tiles."""
    tiles: Row = {}  # noqa: RUF012 - never changed
    """All tiles of the forward, or what differs from the table's tiles of the fused backward."""
    head_dims: tuple[int, ...] = (64, 128)
    masks: tuple[str, ...] = ("causal", "full")
    """The masks for which it compiles without spills."""


USUAL: Row = {"block": 128, "stages": 4}
TALL: Row = {"block": 64, "stages": 4, "height": 128}
WIDE: Row = {"block": 192, "stages": 3}
NAMED: Row = {"named_barriers": True, "automatic_barriers": False}
NARROW = (64,)

VARIANTS = {
    "bwd red": Variant("fused", {"add": "red"}),
    "bwd tma": Variant("fused", {"add": "tma"}),
    "bwd pair": Variant(),
    "fwd as tuned": Variant(),
    "fwd overlapped": Variant("forward", USUAL),
    "fwd alternating": Variant("forward", USUAL | {"overlapped": False}),
    "fwd named barriers": Variant("forward", USUAL | {"named_barriers": True}),
    "fwd no automatic barriers": Variant("forward", USUAL | {"automatic_barriers": False}),
    "fwd named barriers alone": Variant("forward", USUAL | NAMED),
    "fwd 3 warpgroups": Variant("forward", USUAL | {"warpgroups": 3}, NARROW, ("full",)),
    "fwd 3 warpgroups, named barriers alone": Variant(
        "forward", USUAL | {"warpgroups": 3} | NAMED, NARROW, ("full",)
    ),
    "fwd 128 rows": Variant("forward", TALL, NARROW),
    "fwd 128 rows, named barriers alone": Variant("forward", TALL | NAMED, NARROW),
    "fwd blocks of 192": Variant("forward", WIDE, NARROW),
    "fwd blocks of 192, named barriers alone": Variant("forward", WIDE | NAMED, NARROW),
    "fwd blocks of 256, alternating": Variant(
        "forward", {"block": 256, "stages": 2, "overlapped": False}, NARROW
    ),
}
"""Name, which begins with the direction -> variant. The pair of backward kernels has a fixed order
of sums."""


def names_for(head_dim: int, mask: str) -> list[str]:
    """Returns the variants for a head dim and a mask, in the order of the table."""
    return [
        name
        for name, variant in VARIANTS.items()
        if head_dim in variant.head_dims and mask in variant.masks
    ]


def variant_attention(name: str, static: Row) -> Callable[..., jax.Array]:
    """Returns f(q, k, v, **arrays) of a variant, for a Hopper GPU or the interpreter. static: as in
    `attention_peers.attention`."""
    kernel, changes, *_ = VARIANTS[name]

    def attend(q: jax.Array, k: jax.Array, v: jax.Array, **arrays: jax.Array) -> jax.Array:
        from pallas_kernels import describe_attention

        # Mosaic needs a GPU's packages
        from pallas_kernels.attention.hopper import ForwardTiles, attention
        from pallas_kernels.attention.tuning import tiling

        features: Row = {
            **static,
            **arrays,
            "platform": "gpu",
            "capability": (9, 0),
            "deterministic": name == "bwd pair",
        }
        problem = describe_attention(q, k, v, **features)
        tiles: Any = tiling(problem)
        if kernel == "forward":
            tiles = dataclasses.replace(tiles, forward=ForwardTiles(**changes))
        elif kernel == "fused":
            tiles = dataclasses.replace(tiles, fused=dataclasses.replace(tiles.fused, **changes))
        sides: Row = {side: x for side, x in arrays.items() if side in ("q_offset", "sinks")}
        if (ids := arrays.get("segment_ids")) is not None:
            sides |= {"segment_ids": ids, "kv_segment_ids": arrays.get("kv_segment_ids", ids)}
        return attention(q, k, v, problem, tiles, **sides)[0]

    return attend
