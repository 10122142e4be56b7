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
    """A context in which calls of kernels get this cost as metadata.

    Args:
      flops: of the matmuls.
      bytes_accessed: of device memory, each operand and result once.
      occupancy: the share of the SMs' time in which the grid gives them work
        (`occupancy.Occupancy.efficiency`); None if it is unknown.
    """
    metadata: dict[str, str | int] = {
        "kernel": kernel,
        "kernel_flops": int(flops),
        "kernel_bytes": int(bytes_accessed),
    }
    if occupancy is not None:
        metadata["kernel_occupancy"] = f"{occupancy:.3f}"
    with set_xla_metadata(**metadata):
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
    """The number of pairs of query and key that see each other in one head.

    If a pattern differs by head, it is the mean over heads. Documents are ignored, because they are
    data. A traced offset (None) counts as the mean of two offsets, at which queries and keys begin
    together and end together: a shard of a sequence has queries from all of it.
    """
    if q_offset is None:
        masks = {"causal": causal, "window": window, "block_mask": block_mask}
        aligned_starts = visible_pairs(S, T, **masks)
        aligned_ends = visible_pairs(S, T, q_offset=T - S, **masks)
        return (aligned_starts + aligned_ends) / 2

    # Each query sees the keys [start, stop).
    position = q_offset + np.arange(S)
    stop = np.clip(position + 1, 0, T) if causal else np.full(S, T)
    start = np.zeros(S, int) if window is None else np.clip(position - window + 1, 0, T)
    if block_mask is None:
        return float(np.maximum(stop - start, 0).sum())

    size = block_mask.size
    n_heads, n_query_blocks, n_key_blocks = block_mask.visible.shape
    edges = np.arange(n_key_blocks + 1) * size
    n_pairs = 0
    for i in range(n_query_blocks):
        queries = slice(i * size, (i + 1) * size)
        # Keys that each query of the block sees in each block of keys.
        block_stop = np.minimum(stop[queries, None], edges[1:])
        block_start = np.maximum(start[queries, None], edges[:-1])
        n_keys = np.clip(block_stop - block_start, 0, None)
        n_pairs += float(n_keys.sum(0) @ block_mask.visible[:, i].sum(0))
    return n_pairs / n_heads
