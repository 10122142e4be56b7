"""Dense attention by its formula, the reference of the tests.

Shape suffixes: B batch, S query sequence, T key sequence, N heads, K kv heads, H head dim.
"""

import math

import jax.numpy as jnp
from jax import Array

from pallas_kernels.attention.block_mask import BlockMask


def reference_attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    causal: bool = True,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    segment_ids: Array | None = None,
    kv_segment_ids: Array | None = None,
    q_offset: int | Array = 0,
    sinks: Array | None = None,
    block_mask: BlockMask | None = None,
) -> tuple[Array, Array]:
    """Attention in fp32 (fp64 for fp64 inputs), with memory O(S T). Arguments as in
    `flash_attention`, but unchecked.

    Returns out [B, S, N, Hv] and the log-sum-exp [B, S, N], both in that precision.
    """
    dtype = jnp.promote_types(q.dtype, jnp.float32)
    (_, S, N, H), (_, T, K, _) = q.shape, k.shape
    q_BSNH, k_BTNH, v_BTNH = (
        q.astype(dtype),
        *(jnp.repeat(x.astype(dtype), N // K, axis=2) for x in (k, v)),
    )
    s_BNST = jnp.einsum("bsnh,btnh->bnst", q_BSNH, k_BTNH, precision="highest") * (
        1 / math.sqrt(H) if scale is None else scale
    )
    if softcap is not None:
        s_BNST = softcap * jnp.tanh(s_BNST / softcap)

    row, key = q_offset + jnp.arange(S)[:, None], jnp.arange(T)
    mask = jnp.ones((1, 1, S, T), bool)
    if causal:
        mask &= row >= key
    if window is not None:
        mask &= row - key < window
    if segment_ids is not None:
        kv_segment_ids = segment_ids if kv_segment_ids is None else kv_segment_ids
        mask &= (segment_ids[:, :, None] == kv_segment_ids[:, None, :])[:, None]
    if block_mask is not None:
        mask &= block_mask.dense(S, T)

    sink_N = jnp.full((N,), -jnp.inf, dtype) if sinks is None else sinks.astype(dtype)
    top = jnp.maximum(jnp.where(mask, s_BNST, -jnp.inf).max(-1), sink_N[:, None])
    top = jnp.where(top == -jnp.inf, 0, top)
    # The inner `where` keeps exp finite in masked places: 0 * inf in the gradient would be nan.
    p = jnp.where(mask, jnp.exp(jnp.where(mask, s_BNST - top[..., None], 0)), 0)
    total = p.sum(-1) + jnp.exp(sink_N[:, None] - top)
    safe = jnp.where(total == 0, 1, total)
    out = jnp.einsum("bnst,btnh->bsnh", p / safe[..., None], v_BTNH, precision="highest")
    lse = jnp.where(total == 0, -jnp.inf, top + jnp.log(safe))
    return out, lse.swapaxes(1, 2)
