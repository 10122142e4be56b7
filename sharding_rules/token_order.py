"""The order of a causal sequence's tokens in memory, where a mesh axis shards the sequence."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from sharding_rules.rules import Rules, axes_of


def token_order(rules: Rules, mesh: Mapping[str, int], n_tokens: int) -> np.ndarray | None:
    """Returns the index of each token in its sequence, int32 [n_tokens], in the order in memory.

    None: tokens are in memory as they are in the sequence.

    With a causal mask the last tokens have the most keys. So of 2 n chunks, the shard i of n along
    the axes that exchange by gather or ring has the chunks i and 2 n - 1 - i, which are as much
    work together as those of any other shard (zig-zag; Brandon et al., arXiv 2311.09431, have
    stripes instead). Ulysses divides heads, and needs no such order.

    Args:
      rules: their rows and exchanges say how the sequence is sharded.
      mesh: the size of each mesh axis.
      n_tokens: a multiple of 2 n.
    """
    axes = [
        axis
        for axis in axes_of(rules.activations.get("seq"))
        if rules.context.get(axis) in ("gather", "ring")
    ]
    n_shards = math.prod(mesh[axis] for axis in axes)
    if n_shards == 1:
        return None

    # The second half backwards: [n, 2, n_tokens / 2 n] pairs chunk i with chunk 2 n - 1 - i.
    chunks = np.arange(n_tokens, dtype=np.int32).reshape(2, n_shards, -1)
    return np.stack([chunks[0], chunks[1, ::-1]], axis=1).reshape(-1)
