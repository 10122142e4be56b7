"""Causal self-attention of a decoder, and rotary positions. Sizes: B batch, S sequence, D embed, N
heads, K kv heads, H head dim.

Activations are [B, S, ...], or [S, B, ...] where the context says so; T stands for both dimensions.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from mesh_lm.errors import ConfigError
from mesh_lm.model.cache import Past
from mesh_lm.model.config import DecoderConfig
from mesh_lm.model.context import attend
from mesh_lm.model.layers import Linear, Norm, Weights
from pallas_kernels import Unsupported, capability_of
from sharding_rules import Shard, ShardingRuleError


class Attention(nnx.Module):
    """Causal self-attention with grouped queries. One matmul makes q, k and v if they have the same
    number of heads.
    """

    def __init__(self, config: DecoderConfig, weights: Weights, shard: Shard) -> None:
        self.config, self.shard = config, shard
        d, n, k, h = config.d_model, config.n_heads, config.kv_heads, config.d_head
        # [D, 3, N, H], not [D, 3N, H]: if the joint dimension were sharded, XLA would gather it
        # before every split.
        if n == k:
            self.qkv = Linear(
                "bsd,dfnh->bsfnh",
                weights,
                (d, 3, n, h),
                ("embed", "fused", "heads", "head_dim"),
                shard,
            )
        else:
            self.q = Linear(
                "bsd,dnh->bsnh", weights, (d, n, h), ("embed", "heads", "head_dim"), shard
            )
            self.kv = Linear(
                "bsd,dfkh->bsfkh",
                weights,
                (d, 2, k, h),
                ("embed", "fused", "kv_heads", "head_dim"),
                shard,
            )
        out_axes = ("embed", "heads", "head_dim")
        self.out = Linear(
            "bsnh,dnh->bsd",
            weights,
            (d, n, h),
            out_axes,
            shard,
            std=weights.residual_std,
            bias_axes=("norm",),
        )
        if config.qk_norm:
            self.q_norm, self.k_norm = Norm(config, weights, h), Norm(config, weights, h)
        if config.sinks:
            self.sinks = weights((n,), ("heads",), fill=0.0)

    def __call__(
        self,
        x_TD: jax.Array,
        rope: jax.Array | None,
        segment_ids: jax.Array | None,
        window: int | None,
        past: Past | None = None,
        tokens: tuple[str, str] = ("batch", "seq"),
    ) -> tuple[jax.Array, Past | None]:
        """(output [T, D], `past` with the keys and values of these tokens). Tokens see each other
        and what `past` holds.

        rope: angles [B or 1, S, H/2]. segment_ids: [B, S]. tokens: as in `Context`; with a `past`,
        the batch comes first.
        """
        shard = self.shard
        if self.config.n_heads == self.config.kv_heads:
            fused = shard(self.qkv(x_TD, tokens), *tokens, "fused", "heads", "head_dim")
            q, k, v = fused[:, :, 0], fused[:, :, 1], fused[:, :, 2]
        else:
            q = shard(self.q(x_TD, tokens), *tokens, "heads", "head_dim")
            kv = shard(self.kv(x_TD, tokens), *tokens, "fused", "kv_heads", "head_dim")
            k, v = kv[:, :, 0], kv[:, :, 1]
        if self.config.qk_norm:
            # The backward of a norm needs its input, so save_names saves q and k before the norm.
            q, k = self.q_norm(checkpoint_name(q, "q")), self.k_norm(checkpoint_name(k, "k"))
        if rope is not None:
            angles = rope if tokens[0] == "batch" else rope.swapaxes(0, 1)
            q, k = rotate(q, angles), rotate(k, angles)
        if not self.config.qk_norm:
            q, k = checkpoint_name(q, "q"), checkpoint_name(k, "k")
        v = checkpoint_name(v, "v")
        kv_segment_ids = start = None
        if past is not None:
            past = past.put(k, v, shard)
            # otherwise the cache is empty
            if not (isinstance(past.start, int) and past.start == 0):
                (k, v), kv_segment_ids, start = (
                    past.keys_and_values(),
                    past.cache["segment_ids"],
                    jnp.asarray(past.start),
                )
                k, v = k.astype(q.dtype), v.astype(q.dtype)
        # The implementation that was named for training may not support decoding.
        implementation = (
            None if self.config.attention == "auto" or past is not None else self.config.attention
        )
        y = self._attend(
            q, k, v, segment_ids, window, kv_segment_ids, start, implementation, tokens
        )
        return self.out(shard(y, *tokens, "heads", "head_dim"), tokens), past

    def _attend(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        segment_ids: jax.Array | None,
        window: int | None,
        kv_segment_ids: jax.Array | None,
        start: jax.Array | None,
        implementation: Literal["mosaic", "cudnn", "xla"] | None,
        tokens: tuple[str, str],
    ) -> jax.Array:
        """Runs the kernel on each device's own sequences and heads. start: the position of query 0
        among the keys, if it is not 0.

        Of [S, B, N, H] the kernel sees one sequence with B N heads, which is the same memory,
        unless documents are separate: these differ from sequence to sequence, and the arrays are
        transposed.

        Raises ConfigError if the implementation cannot serve the call.
        """
        config, shard = self.config, self.shard
        heads_by, kv_by = (shard.axes_for(name) for name in ("heads", "kv_heads"))
        group = config.n_heads // config.kv_heads

        device = shard.mesh.devices.flat[0]
        # --plan compiles for absent GPUs. On those of this process our kernels are tested before
        # their first use.
        target: Any = (
            {}
            if device in jax.devices()
            else {"platform": device.platform, "capability": capability_of(device)}
        )
        local = config.n_heads // shard.n_shards(heads_by)
        more = shard.n_shards(heads_by[len(kv_by) :])
        if heads_by[: len(kv_by)] != kv_by or (more > 1 and local % group and group % local):
            raise ShardingRuleError(
                f"rules.activations: {local} query heads on each device do not share complete kv "
                f"heads ({group} query heads each); shard kv_heads like heads, or over the first "
                "mesh axes of heads, or set heads and kv_heads to None"
            )

        def kernel(q, k, v, segment_ids, kv_segment_ids, sinks, start):
            if more > 1 and k.shape[2] > 1:
                # There are more devices than kv heads: these are replicated, and each device takes
                # those of its query heads.
                first, count = (
                    lax.axis_index(heads_by[len(kv_by) :]) * q.shape[2] // group,
                    max(1, q.shape[2] // group),
                )
                k, v = (lax.dynamic_slice_in_dim(x, first, count, axis=2) for x in (k, v))
            shape = q.shape
            if tokens[0] == "seq" and segment_ids is None:
                sinks = None if sinks is None else jnp.tile(sinks, shape[1])
                q, k, v = (x.reshape(1, x.shape[0], -1, x.shape[3]) for x in (q, k, v))
            elif tokens[0] == "seq":
                q, k, v = (x.swapaxes(0, 1) for x in (q, k, v))
            features: dict[str, Any] = {
                "window": window,
                "softcap": config.softcap or None,
                "implementation": implementation,
                **target,
            }
            if start is not None:
                features |= {"kv_segment_ids": kv_segment_ids, "q_offset": start}
            try:
                y = attend(shard.exchanges(), q, k, v, segment_ids, sinks, features)
            except Unsupported as error:
                raise ConfigError(f"model.attention={config.attention}: {error}") from error
            return (
                y.swapaxes(0, 1)
                if tokens[0] == "seq" and segment_ids is not None
                else y.reshape(shape)
            )

        q_spec = shard.spec("activations", (*tokens, "heads", "head_dim"))
        kv_spec = shard.spec("activations", (*tokens, "kv_heads", "head_dim"))
        row_spec, sink_spec = (
            shard.spec("activations", ("batch", "seq")),
            shard.spec("activations", ("heads",)),
        )
        sinks = self.sinks[...] if config.sinks else None
        in_specs = (q_spec, kv_spec, kv_spec, row_spec, row_spec, sink_spec, jax.P())
        return shard.shard_map(kernel, in_specs, q_spec)(
            q, k, v, segment_ids, kv_segment_ids, sinks, start
        )


def rope_table(config: DecoderConfig, positions: jax.Array) -> jax.Array:
    """Angles, float32 [..., H/2], of positions int32 [...], with Llama-3's scaling of long
    wavelengths if configured.
    """
    frequency = config.rope_theta ** (
        -jnp.arange(0, config.d_head, 2, dtype=jnp.float32) / config.d_head
    )
    if config.rope_scaling != 1:
        # Llama 3 (arXiv 2407.21783; constants as released): wavelengths over a quarter of the
        # original context are stretched fully.
        low, high = 1.0, 4.0
        turns = config.rope_original_seq_len * frequency / (2 * math.pi)
        keep = jnp.clip((turns - low) / (high - low), 0, 1)
        frequency = frequency * (keep + (1 - keep) / config.rope_scaling)
    return positions[..., None].astype(jnp.float32) * frequency


def rotate(x_TNH: jax.Array, angles: jax.Array) -> jax.Array:
    """x rotated by RoPE, on the two halves of H, as Llama stores them. angles: as x, without N; a
    dimension may be 1.
    """
    sin, cos = jnp.sin(angles)[..., None, :], jnp.cos(angles)[..., None, :]
    a, b = jnp.split(x_TNH.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x_TNH.dtype)
