"""The cost of a kernel as metadata in XLA's compiled program, because XLA cannot analyse a kernel.

Before jax 0.12, Pallas's own `cost_estimate` does not reach the program on Mosaic GPU, but
attributes of the call always do: the custom call has `kernel` (a name), `kernel_flops`,
`kernel_bytes` and, where it is known, `kernel_occupancy`.
"""

import contextlib
from collections.abc import Iterator

import numpy as np
from jax.experimental.xla_metadata import set_xla_metadata

from pallas_kernels.attention.block_mask import BlockMask


@contextlib.contextmanager
def cost_metadata(
    kernel: str, *, flops: int, bytes_accessed: int, occupancy: float | None = None
) -> Iterator[None]:
    """Inside, calls of kernels get these costs.

    flops: of matmuls; bytes_accessed: of device memory, each operand and result once; occupancy:
    the share of the SMs' time in which the grid gives them work (`occupancy.Occupancy.efficiency`).
    """
    known = {} if occupancy is None else {"kernel_occupancy": f"{occupancy:.3f}"}
    with set_xla_metadata(
        kernel=kernel, kernel_flops=int(flops), kernel_bytes=int(bytes_accessed), **known
    ):
        yield


def visible_pairs(
    S: int,
    T: int,
    *,
    causal: bool = True,
    window: int | None = None,
    q_offset: int | None = 0,
    block_mask: BlockMask | None = None,
) -> float:
    """The number of pairs of query and key that see each other in one head (the mean over heads, if
    a pattern differs by head).

    Documents are ignored, because they are data. A traced offset (None) counts as the mean of those
    at which queries and keys begin together and end together: a shard of a sequence has queries
    from all of it.
    """
    if q_offset is None:
        masks = {"causal": causal, "window": window, "block_mask": block_mask}
        return (visible_pairs(S, T, **masks) + visible_pairs(S, T, q_offset=T - S, **masks)) / 2
    first = q_offset + np.arange(S)
    stop = np.clip(first + 1, 0, T) if causal else np.full(S, T)
    start = np.zeros(S, int) if window is None else np.clip(first - window + 1, 0, T)
    if block_mask is None:
        return float(np.maximum(stop - start, 0).sum())
    size, (heads, rows, blocks) = block_mask.size, block_mask.visible.shape
    total = 0
    for i in range(rows):
        span = slice(i * size, (i + 1) * size)
        edges = np.arange(blocks + 1) * size
        # Keys that each query of the block sees in each block of keys.
        seen = np.clip(
            np.minimum(stop[span, None], edges[1:]) - np.maximum(start[span, None], edges[:-1]),
            0,
            None,
        )
        total += float(seen.sum(0) @ block_mask.visible[:, i].sum(0))
    return total / heads
