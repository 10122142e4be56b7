"""Shared by the attention tests: random inputs, values with gradients, and tolerances."""

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import describe_attention
from pallas_kernels.attention import xla


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).standard_normal(shape, np.float32)


def assert_close(ours, ref, tolerance: float) -> None:
    """Asserts max |ours - ref| <= tolerance * max |ref|, and -inf in the same places."""
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(ref), strict=True):
        a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
        assert (np.isfinite(a) == np.isfinite(b)).all() and not np.isnan(a).any()
        a, b = (np.where(np.isfinite(x), x, 0) for x in (a, b))
        assert np.abs(a - b).max() <= tolerance * max(np.abs(b).max(), 1e-3)


def values_and_grads(attention, weights, arrays):
    """(out, lse) and the gradients of a loss that depends on both."""
    w_out, w_lse = weights

    def loss(*arrays):
        out, lse = attention(*arrays)
        return (out * w_out).sum() + jnp.where(lse == -jnp.inf, 0, jnp.sin(lse) * w_lse).sum(), (
            out,
            lse,
        )

    (_, values), grads = jax.value_and_grad(loss, tuple(range(len(arrays))), has_aux=True)(*arrays)
    return values, grads


def chunked(
    q, k, v, sinks=None, segment_ids=None, kv_segment_ids=None, q_offset=0, chunk=512, **features
):
    problem = describe_attention(
        q,
        k,
        v,
        sinks=sinks,
        segment_ids=segment_ids,
        kv_segment_ids=kv_segment_ids,
        q_offset=q_offset,
        return_lse=True,
        **features,
    )
    kv_segment_ids = segment_ids if kv_segment_ids is None else kv_segment_ids
    arrays = {
        "sinks": sinks,
        "segment_ids": segment_ids,
        "kv_segment_ids": kv_segment_ids,
        "q_offset": q_offset,
    }
    return xla.attend(q, k, v, problem, **arrays, q_chunk=chunk, kv_chunk=chunk)
