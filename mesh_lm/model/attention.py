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
        self.config = config
        self.shard = shard
        d = config.d_model
        n = config.n_heads
        k = config.kv_heads
        h = config.d_head
        # [D, 3, N, H], not [D, 3N, H]: if the joint dimension were sharded, XLA would gather it
        # before every split.
        if n == k:
            fused_axes = ("embed", "fused", "heads", "head_dim")
            self.qkv = Linear("bsd,dfnh->bsfnh", weights, (d, 3, n, h), fused_axes, shard)
        else:
            q_axes = ("embed", "heads", "head_dim")
            kv_axes = ("embed", "fused", "kv_heads", "head_dim")
            self.q = Linear("bsd,dnh->bsnh", weights, (d, n, h), q_axes, shard)
            self.kv = Linear("bsd,dfkh->bsfkh", weights, (d, 2, k, h), kv_axes, shard)
        self.out = Linear(
            "bsnh,dnh->bsd",
            weights,
            (d, n, h),
            ("embed", "heads", "head_dim"),
            shard,
            std=weights.residual_std,
            bias_axes=("norm",),
        )
        if config.qk_norm:
            self.q_norm = Norm(config, weights, h)
            self.k_norm = Norm(config, weights, h)
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
        """Returns (output [T, D], `past` with the keys and values of these tokens). Tokens see each
        other and the tokens in `past`.

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
            q = self.q_norm(checkpoint_name(q, "q"))
            k = self.k_norm(checkpoint_name(k, "k"))
        if rope is not None:
            angles = rope if tokens[0] == "batch" else rope.swapaxes(0, 1)
            q = rotate(q, angles)
            k = rotate(k, angles)
        # remat=save_names and save_attention save q, k and v.
        if not self.config.qk_norm:
            q = checkpoint_name(q, "q")
            k = checkpoint_name(k, "k")
        v = checkpoint_name(v, "v")
        kv_segment_ids = start = None
        if past is not None:
            past = past.put(k, v, shard)
            cache_was_empty = isinstance(past.start, int) and past.start == 0
            if not cache_was_empty:
                k, v = past.keys_and_values()
                kv_segment_ids = past.cache["segment_ids"]
                start = jnp.asarray(past.start)
                k = k.astype(q.dtype)
                v = v.astype(q.dtype)
        implementation = None
        if self.config.attention != "auto" and past is None:
            # In generation the implementation that was named for training may not serve.
            implementation = self.config.attention
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
        """Runs the kernel on each device's own sequences and heads.

        start: the position of query 0 among the keys, if it is not 0. Raises ConfigError if the
        implementation cannot serve the call.
        """
        config = self.config
        shard = self.shard
        group = config.n_heads // config.kv_heads
        q_head_axes = shard.axes_for("heads")
        kv_head_axes = shard.axes_for("kv_heads")
        # Axes that shard query heads alone: along them, devices share kv heads.
        sharing_axes = q_head_axes[len(kv_head_axes) :]
        n_sharing = shard.n_shards(sharing_axes)
        local_heads = config.n_heads // shard.n_shards(q_head_axes)
        splits_groups = n_sharing > 1 and local_heads % group and group % local_heads
        if q_head_axes[: len(kv_head_axes)] != kv_head_axes or splits_groups:
            raise ShardingRuleError(
                f"rules.activations: {local_heads} query heads on each device do not share "
                f"complete kv heads ({group} query heads each); shard kv_heads like heads, or over "
                "the first mesh axes of heads, or set heads and kv_heads to None"
            )
        features = self._features(window, implementation)
        sequence_first = tokens[0] == "seq"

        def kernel(q, k, v, segment_ids, kv_segment_ids, sinks, start):
            if n_sharing > 1 and k.shape[2] > 1:
                # There are more devices than kv heads: these are replicated, and each device takes
                # those of its query heads.
                first = lax.axis_index(sharing_axes) * q.shape[2] // group
                n_kv_heads = max(1, q.shape[2] // group)
                k = lax.dynamic_slice_in_dim(k, first, n_kv_heads, axis=2)
                v = lax.dynamic_slice_in_dim(v, first, n_kv_heads, axis=2)
            shape = q.shape
            # Of [S, B, N, H] the kernel sees one sequence with B N heads, which is the same memory,
            # unless documents are separate: these differ from sequence to sequence, and the arrays
            # are transposed.
            as_one_sequence = sequence_first and segment_ids is None
            if as_one_sequence:
                sinks = None if sinks is None else jnp.tile(sinks, shape[1])
                q, k, v = (x.reshape(1, x.shape[0], -1, x.shape[3]) for x in (q, k, v))
            elif sequence_first:
                q, k, v = (x.swapaxes(0, 1) for x in (q, k, v))
            offsets: dict[str, Any] = {}
            if start is not None:
                offsets = {"kv_segment_ids": kv_segment_ids, "q_offset": start}
            try:
                y = attend(shard.exchanges(), q, k, v, segment_ids, sinks, {**features, **offsets})
            except Unsupported as error:
                raise ConfigError(f"model.attention={config.attention}: {error}") from error
            if sequence_first and not as_one_sequence:
                return y.swapaxes(0, 1)
            return y.reshape(shape)

        q_spec = shard.spec("activations", (*tokens, "heads", "head_dim"))
        kv_spec = shard.spec("activations", (*tokens, "kv_heads", "head_dim"))
        row_spec = shard.spec("activations", ("batch", "seq"))
        sink_spec = shard.spec("activations", ("heads",))
        sinks = self.sinks[...] if config.sinks else None
        in_specs = (q_spec, kv_spec, kv_spec, row_spec, row_spec, sink_spec, jax.P())
        run = shard.shard_map(kernel, in_specs, q_spec)
        return run(q, k, v, segment_ids, kv_segment_ids, sinks, start)

    def _features(self, window: int | None, implementation: str | None) -> dict[str, Any]:
        """Returns the keywords of `flash_attention` that all calls of a layer share."""
        features: dict[str, Any] = {
            "window": window,
            "softcap": self.config.softcap or None,
            "implementation": implementation,
        }
        device = self.shard.mesh.devices.flat[0]
        if device not in jax.devices():
            # --plan compiles for absent GPUs. On those of this process our kernels are tested
            # before their first use.
            features["platform"] = device.platform
            features["capability"] = capability_of(device)
        return features


def rope_table(config: DecoderConfig, positions: jax.Array) -> jax.Array:
    """Returns angles, float32 [..., H/2], of positions int32 [...], with Llama-3's scaling of long
    wavelengths if configured.
    """
    exponents = -jnp.arange(0, config.d_head, 2, dtype=jnp.float32) / config.d_head
    frequency = config.rope_theta**exponents
    if config.rope_scaling != 1:
        # Llama 3 (arXiv 2407.21783; constants as released): wavelengths longer than the original
        # context are stretched fully, those up to a quarter of it are kept.
        turns = config.rope_original_seq_len * frequency / (2 * math.pi)
        low_turns = 1.0
        high_turns = 4.0
        unscaled = jnp.clip((turns - low_turns) / (high_turns - low_turns), 0, 1)
        frequency = frequency * (unscaled + (1 - unscaled) / config.rope_scaling)
    return positions[..., None].astype(jnp.float32) * frequency


def rotate(x_TNH: jax.Array, angles: jax.Array) -> jax.Array:
    """Returns x rotated by RoPE, on the two halves of H, as Llama stores them. angles: as x,
    without N; a dimension may be 1.
    """
    sin = jnp.sin(angles)[..., None, :]
    cos = jnp.cos(angles)[..., None, :]
    a, b = jnp.split(x_TNH.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x_TNH.dtype)
