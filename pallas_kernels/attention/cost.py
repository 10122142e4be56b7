"""What a kernel costs, written where XLA's compiled program keeps it: XLA cannot look into a kernel.

Pallas's own `cost_estimate` does not get there on Mosaic GPU (jax 0.10.2 and 0.11.2 drop it); attributes of the call do. Any reader of
the program finds `kernel` (a name), `kernel_flops` and `kernel_bytes` on the custom call.
"""

import contextlib
from collections.abc import Iterator

import numpy as np
from jax.experimental.xla_metadata import set_xla_metadata

from pallas_kernels.attention.block_mask import BlockMask


@contextlib.contextmanager
def cost_metadata(kernel: str, *, flops: int, bytes_accessed: int) -> Iterator[None]:
    """Around the call of a kernel. flops: of its matmuls; bytes_accessed: of device memory, each operand and result once."""
    with set_xla_metadata(kernel=kernel, kernel_flops=int(flops), kernel_bytes=int(bytes_accessed)):
        yield


def visible_pairs(
    S: int, T: int, *, causal: bool = True, window: int | None = None, q_offset: int | None = 0, block_mask: BlockMask | None = None
) -> float:
    """Pairs of query and key that see each other, of one head (of the mean head, where a pattern differs by head).

    Without documents, which are data. An offset that is traced (None) counts as if queries and keys ended together.
    """
    first = (T - S if q_offset is None else q_offset) + np.arange(S)
    stop = np.clip(first + 1, 0, T) if causal else np.full(S, T)
    start = np.zeros(S, int) if window is None else np.clip(first - window + 1, 0, T)
    if block_mask is None:
        return float(np.maximum(stop - start, 0).sum())
    size, (heads, rows, blocks) = block_mask.size, block_mask.visible.shape
    total = 0
    for i in range(rows):
        span = slice(i * size, (i + 1) * size)
        edges = np.arange(blocks + 1) * size
        # Keys that each query of the block has in each block of keys.
        seen = np.clip(np.minimum(stop[span, None], edges[1:]) - np.maximum(start[span, None], edges[:-1]), 0, None)
        total += float(seen.sum(0) @ block_mask.visible[:, i].sum(0))
    return total / heads
