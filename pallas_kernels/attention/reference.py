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
    """Attention in fp32 (fp64 for fp64 inputs), with memory O(S T).

    Arguments are as in `flash_attention`, but not checked.

    Returns out [B, S, N, Hv] and the log-sum-exp [B, S, N], both in that precision.
    """
    dtype = jnp.promote_types(q.dtype, jnp.float32)
    _, S, N, H = q.shape
    _, T, K, _ = k.shape
    if scale is None:
        scale = 1 / math.sqrt(H)
    q_BSNH = q.astype(dtype)
    k_BTNH = jnp.repeat(k.astype(dtype), N // K, axis=2)
    v_BTNH = jnp.repeat(v.astype(dtype), N // K, axis=2)
    s_BNST = jnp.einsum("bsnh,btnh->bnst", q_BSNH, k_BTNH, precision="highest") * scale
    if softcap is not None:
        s_BNST = softcap * jnp.tanh(s_BNST / softcap)

    row = q_offset + jnp.arange(S)[:, None]
    key = jnp.arange(T)
    mask = jnp.ones((1, 1, S, T), bool)
    if causal:
        mask &= row >= key
    if window is not None:
        mask &= row - key < window
    if segment_ids is not None:
        if kv_segment_ids is None:
            kv_segment_ids = segment_ids
        mask &= (segment_ids[:, :, None] == kv_segment_ids[:, None, :])[:, None]
    if block_mask is not None:
        mask &= block_mask.dense(S, T)

    if sinks is None:
        sink_N = jnp.full((N,), -jnp.inf, dtype)
    else:
        sink_N = sinks.astype(dtype)
    max_BNS = jnp.maximum(jnp.where(mask, s_BNST, -jnp.inf).max(-1), sink_N[:, None])
    max_BNS = jnp.where(max_BNS == -jnp.inf, 0, max_BNS)
    # The inner `where` keeps exp finite in masked places: 0 * inf in the gradient would be nan.
    p_BNST = jnp.where(mask, jnp.exp(jnp.where(mask, s_BNST - max_BNS[..., None], 0)), 0)
    sum_BNS = p_BNST.sum(-1) + jnp.exp(sink_N[:, None] - max_BNS)
    divisor = jnp.where(sum_BNS == 0, 1, sum_BNS)
    out = jnp.einsum("bnst,btnh->bsnh", p_BNST / divisor[..., None], v_BTNH, precision="highest")
    lse = jnp.where(sum_BNS == 0, -jnp.inf, max_BNS + jnp.log(divisor))
    return out, lse.swapaxes(1, 2)
