"""The implementations of attention in JAX that the GPU suite times, as functions of the same
arrays."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

import jax
from attention_variants import VARIANTS, variant_attention
from record import Row

from pallas_kernels import flash_attention

OURS = "mosaic"
HOPPER: Row = {"platform": "gpu", "capability": (9, 0)}
"""The device that an interpreted call on a CPU assumes."""
DTYPES = {"mgpu": "float16"}
"""Types for peers that do not support bfloat16."""


def available(mask: str, head_dim: int, group: int) -> list[str]:
    """Returns the peers that support such a shape, ours first; tokamax only if it is installed."""
    simple = mask in ("causal", "full")
    names = [OURS] + (["cudnn"] if mask != "packed" else [])
    names += ["xla"] if mask == "packed" else []
    names += ["tokamax"] if simple and importlib.util.find_spec("tokamax") else []
    return names + (["mgpu"] if simple and group == 1 and head_dim % 64 == 0 else [])


def forward_only(peer: str, mask: str) -> bool:
    return peer == "mgpu" and mask == "causal"


def attention(peer: str, static: Row, dry_run: bool = False) -> Callable[..., jax.Array]:
    """Returns f(q, k, v, **arrays) of a peer: mosaic, cudnn and xla by our own API, mgpu (jax's
    example, without softmax scale), tokamax.

    Also one of our kernels' variants, by its name in attention_variants.py. static: keywords of
    `flash_attention` that are not arrays.
    """
    if peer in VARIANTS:
        return variant_attention(peer, static)
    if peer == "mgpu":
        return _mgpu(static["causal"])
    if peer == "tokamax":
        return _tokamax(static["causal"])
    hopper_options = HOPPER if dry_run and peer == OURS else {}

    def ours(q: jax.Array, k: jax.Array, v: jax.Array, **arrays: jax.Array) -> jax.Array:
        features: Row = {**static, **arrays, **hopper_options, "implementation": peer}
        return flash_attention(q, k, v, **features)

    return ours


def _mgpu(causal: bool) -> Callable[..., jax.Array]:
    from jax.experimental.pallas.ops.gpu import attention_mgpu  # Mosaic needs a GPU's packages

    def mgpu(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        # By head dim, the largest blocks of its own benchmark that fit into shared memory (228 KiB)
        # with two pipeline steps.
        blocks = {64: 256, 128: 128}.get(q.shape[-1], 64)
        backward: Row = (
            {} if causal else {f"block_{x}": 64 for x in ("q_dkv", "kv_dkv", "q_dq", "kv_dq")}
        )
        config = attention_mgpu.TuningConfig(
            block_q=64, block_kv=blocks, max_concurrent_steps=2, causal=causal, **backward
        )
        return attention_mgpu.attention(q, k, v, config)

    return mgpu


def _tokamax(causal: bool) -> Callable[..., jax.Array]:
    import tokamax  # pyright: ignore[reportMissingImports]

    return lambda q, k, v: tokamax.dot_product_attention(
        q, k, v, is_causal=causal, implementation="mosaic"
    )
