"""The state of islands (DiLoCo): what each island has of its own, with the islands as leading
dimension, and what they share.

All share "params", the anchor, from which they started and which is evaluated, saved and exported
as the weights, and "outer_momentum". Each has its own weights in "islands", the slots of its
optimizer, and "recent", the statistics of its losses.
"""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
from jax.sharding import PartitionSpec

from mesh_lm.optim import ArraySpec, Optimizer
from mesh_lm.parallel.layout import ModelLayout
from sharding_rules import ISLAND

WEIGHTS = "islands"
"""The part with the weights of each island."""
MOMENTUM = "outer_momentum"
"""The part with the momentum of the outer step."""
SHARED = ("params", MOMENTUM)
"""The parts that all islands share."""


def n_islands(layout: ModelLayout, optimizer: Optimizer) -> int:
    """Returns the number of islands; 0: the optimizer has no outer step, so that there are none."""
    return layout.shard.mesh.shape[ISLAND] if optimizer.diloco.outer_steps else 0


def stacked(leaf: ArraySpec, n: int) -> ArraySpec:
    """Returns the array of n islands that has one like `leaf` for each of them."""
    return dataclasses.replace(leaf, shape=(n, *leaf.shape), axes=(WEIGHTS, *leaf.axes))


def sharding(leaf_sharding: jax.NamedSharding) -> jax.NamedSharding:
    """Returns the sharding of a stacked array: each island has its own, sharded over the island's
    devices like `leaf_sharding`.
    """
    return jax.NamedSharding(leaf_sharding.mesh, PartitionSpec(ISLAND, *leaf_sharding.spec))


def statistics(recent: np.ndarray, n: int) -> np.ndarray:
    """Returns "recent" of n islands from that of one."""
    return np.repeat(recent[None], n, axis=0)
