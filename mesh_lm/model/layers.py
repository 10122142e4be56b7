"""The parts of a decoder block. Sizes: B batch, S sequence, D embed, N heads, K kv heads, H head dim, F mlp."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from mesh_lm.errors import ConfigError
from mesh_lm.model.cache import Past
from mesh_lm.model.config import DecoderConfig
from pallas_kernels import Unsupported, capability_of, flash_attention
from sharding_rules import Shard, ShardingRuleError


class Weights:
    """Makes a module's parameters: names the dimensions and, inside a stack of layers, puts the stack's dimension in front."""

    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs, layers: int = 0) -> None:
        self.config, self.rngs, self.layers = config, rngs, layers

    def __call__(
        self, shape: Sequence[int], axes: Sequence[str], std: float | None = None, fill: float | None = None, *, cast: bool = False
    ) -> nnx.Param:
        """Normal with standard deviation `std` (default: the config's), cut at three of them, or constant `fill`.

        cast: it is cast to the config's compute type before it is used.
        """
        if self.layers:
            shape, axes = (self.layers, *shape), ("layers", *axes)
        if fill is not None:
            value = jnp.full(shape, fill, jnp.float32)
        else:
            value = (self.config.init_std if std is None else std) * jax.random.truncated_normal(self.rngs.params(), -3, 3, tuple(shape))
        metadata: dict[str, Any] = {"compute_dtype": self.config.dtype} if cast else {}
        return nnx.Param(value, out_sharding=tuple(axes), **metadata)

    @property
    def residual_std(self) -> float:
        """For matrices that write into the residual stream, so that its variance does not grow with depth (GPT-2)."""
        return self.config.init_std / math.sqrt(2 * self.config.n_layers)


class Norm(nnx.Module):
    """LayerNorm or RMSNorm over the last dimension, computed in fp32, returned in the compute type."""

    def __init__(self, config: DecoderConfig, weights: Weights, width: int = 0) -> None:
        """width: of the last dimension; 0: D, the residual stream's."""
        self.config, self.residual = config, not width
        self.scale = weights((width or config.d_model,), ("norm",), fill=1.0)
        if config.norm == "layernorm" and config.biases:
            self.bias = weights((width or config.d_model,), ("norm",), fill=0.0)

    def __call__(self, x: jax.Array) -> jax.Array:
        bias = self.bias[...] if self.config.norm == "layernorm" and self.config.biases else None
        x = _normalise(x, self.scale[...], bias, self.config)
        # Without the barrier XLA moves the cast behind the all-gather that follows, which then carries fp32.
        return lax.optimization_barrier(x) if self.residual and self.config.dtype != "float32" else x


# Elementwise chains keep their input for the backward and nothing in between: left alone, GELU keeps five arrays of its input's size.
recomputed = partial(jax.checkpoint, prevent_cse=False)


@partial(recomputed, static_argnums=3)
def _normalise(x_BSD: jax.Array, scale_D: jax.Array, bias_D: jax.Array | None, config: DecoderConfig) -> jax.Array:
    x = x_BSD.astype(jnp.float32)
    x = x - x.mean(-1, keepdims=True) if config.norm == "layernorm" else x
    x = x * lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + config.norm_eps) * scale_D
    return (x if bias_D is None else x + bias_D).astype(config.dtype)


@recomputed
def _swiglu(up_BSGF: jax.Array) -> jax.Array:
    return jax.nn.silu(up_BSGF[:, :, 0]) * up_BSGF[:, :, 1]


_gelu = recomputed(jax.nn.gelu)


def add_bias(x: jax.Array, bias: jax.Array) -> jax.Array:
    """x + bias in fp32, for its gradient: the sum over all tokens. In bf16 that sum was 18 % off at 16,384 tokens (measured)."""
    return (x.astype(jnp.float32) + bias).astype(x.dtype)


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def _gathered_once(y_BSD: jax.Array, shard: Shard) -> jax.Array:
    """y. Its gradient, cut along the sequence, is gathered here: XLA would gather it for each of the two matmuls that take it."""
    return y_BSD


def _forward(y_BSD: jax.Array, shard: Shard) -> tuple[jax.Array, None]:
    return y_BSD, None


def _backward(shard: Shard, _: None, dy_BSD: jax.Array) -> tuple[jax.Array]:
    return (shard(dy_BSD, "batch", "seq", "embed"),)


_gathered_once.defvjp(_forward, _backward)


class Linear(nnx.Module):
    """An einsum with a weight that is cast, then gathered, then used, and an optional bias of its output's dimensions."""

    def __init__(
        self, equation: str, weights: Weights, shape: Sequence[int], axes: Sequence[str], shard: Shard, *, std: float | None = None,
        bias_axes: Sequence[str] | None = None,
    ) -> None:  # fmt: skip
        """The embedding is the weight's first dimension on either side of the model's width, because it is what FSDP cuts.

        XLA gathers along the major dimension only: it would keep a transposed copy of the whole stack of a weight that is cut along the
        last one (gpt_175b on 1,024 devices: 2.3 GB). With `bias_axes` it is the output, into the residual stream; else it is contracted.
        """
        self.equation, self.shard, self.axes = equation, shard, tuple(axes)
        self.dtype, self.remat = weights.config.dtype, weights.config.remat
        self.weight = weights(shape, axes, std, cast=True)
        self.into_residual = bias_axes is not None
        self.has_bias = weights.config.biases
        if self.has_bias:
            self.bias = weights(shape[:1] if bias_axes else shape[1:], bias_axes or axes[1:], fill=0.0)

    def __call__(self, x_BS: jax.Array) -> jax.Array:
        # Without remat the backward casts the weights again, and gathers FSDP's; kept, each device would have them all by the end of the
        # forward.
        y_BS = (recomputed(self._matmul) if self.remat == "none" else self._matmul)(x_BS, self.weight[...])
        return add_bias(y_BS, self.bias[...]) if self.has_bias else y_BS

    def _matmul(self, x_BS: jax.Array, weight: jax.Array) -> jax.Array:
        einsum, weight = self.shard.einsum_of(weight, self.dtype, self.axes)
        if self.shard.axes_for("seq_resid"):
            y = einsum(self.equation, x_BS, weight)
            return _gathered_once(y, self.shard) if self.into_residual else y
        # Tokens as one dimension: XLA:CPU transposes whole activations for a gradient that contracts two.
        # Not where the sequence is about to be cut: that cut would no longer be a dimension's.
        y = einsum(self.equation.replace("bs", "t"), x_BS.reshape(-1, *x_BS.shape[2:]), weight)
        return y.reshape(*x_BS.shape[:2], *y.shape[1:])


class Attention(nnx.Module):
    """Causal self-attention with grouped queries. q, k and v come from one matmul where they have as many heads."""

    def __init__(self, config: DecoderConfig, weights: Weights, shard: Shard) -> None:
        self.config, self.shard = config, shard
        d, n, k, h = config.d_model, config.n_heads, config.kv_heads, config.d_head
        # [D, 3, N, H], not [D, 3N, H]: cutting the joint dimension would make XLA gather it before every split.
        if n == k:
            self.qkv = Linear("bsd,dfnh->bsfnh", weights, (d, 3, n, h), ("embed", "fused", "heads", "head_dim"), shard)
        else:
            self.q = Linear("bsd,dnh->bsnh", weights, (d, n, h), ("embed", "heads", "head_dim"), shard)
            self.kv = Linear("bsd,dfkh->bsfkh", weights, (d, 2, k, h), ("embed", "fused", "kv_heads", "head_dim"), shard)
        out_axes = ("embed", "heads", "head_dim")
        self.out = Linear("bsnh,dnh->bsd", weights, (d, n, h), out_axes, shard, std=weights.residual_std, bias_axes=("norm",))
        if config.qk_norm:
            self.q_norm, self.k_norm = Norm(config, weights, h), Norm(config, weights, h)
        if config.sinks:
            self.sinks = weights((n,), ("heads",), fill=0.0)

    def __call__(
        self, x_BSD: jax.Array, rope: jax.Array | None, segment_ids: jax.Array | None, window: int | None, past: Past | None = None
    ) -> tuple[jax.Array, Past | None]:
        """Of tokens that see each other and, where there is a `past`, what it holds; returned with these tokens in it."""
        shard = self.shard
        if self.config.n_heads == self.config.kv_heads:
            fused = shard(self.qkv(x_BSD), "batch", "seq", "fused", "heads", "head_dim")
            q, k, v = fused[:, :, 0], fused[:, :, 1], fused[:, :, 2]
        else:
            q = shard(self.q(x_BSD), "batch", "seq", "heads", "head_dim")
            kv = shard(self.kv(x_BSD), "batch", "seq", "fused", "kv_heads", "head_dim")
            k, v = kv[:, :, 0], kv[:, :, 1]
        if self.config.qk_norm:
            # A norm's backward needs its input: that is what save_names keeps of q and k, not what becomes of them.
            q, k = self.q_norm(checkpoint_name(q, "q")), self.k_norm(checkpoint_name(k, "k"))
        if rope is not None:
            q, k = rotate(q, rope), rotate(k, rope)
        if not self.config.qk_norm:
            q, k = checkpoint_name(q, "q"), checkpoint_name(k, "k")
        v = checkpoint_name(v, "v")
        kv_segment_ids = start = None
        if past is not None:
            past = past.put(k, v, shard)
            if not (isinstance(past.start, int) and past.start == 0):  # else these tokens are all there is
                (k, v), kv_segment_ids, start = past.keys_and_values(), past.cache["segment_ids"], jnp.asarray(past.start)
                k, v = k.astype(q.dtype), v.astype(q.dtype)
        # What was chosen for training need not serve a text that is written on.
        chosen = None if self.config.attention == "auto" or past is not None else self.config.attention
        y = self._attend(q, k, v, segment_ids, window, kv_segment_ids, start, chosen)
        return self.out(shard(y, "batch", "seq", "heads", "head_dim")), past

    def _attend(
        self, q: jax.Array, k: jax.Array, v: jax.Array, segment_ids: jax.Array | None, window: int | None,
        kv_segment_ids: jax.Array | None, start: jax.Array | None, implementation: Literal["mosaic", "cudnn", "xla"] | None,
    ) -> jax.Array:  # fmt: skip
        """The kernel, on each device's own sequences and heads. start: the key that query 0 is, where it is not key 0.

        Raises ConfigError where the implementation cannot serve.
        """
        config, shard = self.config, self.shard
        heads_by, kv_by = (shard.axes_for(name) for name in ("heads", "kv_heads"))
        group = config.n_heads // config.kv_heads

        device = shard.mesh.devices.flat[0]  # perhaps none of this process: --plan compiles for GPUs that are not there
        local = config.n_heads // shard.n_shards(heads_by)
        if (kv_by and kv_by != heads_by) or (not kv_by and local % group and group % local):
            raise ShardingRuleError(
                f"rules.activations: {local} query heads on each device do not share whole kv heads ({group} query heads to each); "
                "cut kv_heads as heads, or set heads and kv_heads to None"
            )

        def kernel(q, k, v, segment_ids, kv_segment_ids, sinks, start):
            if heads_by and not kv_by and config.kv_heads > 1:
                # More devices than kv heads: they are replicated, and each device takes those its query heads belong to.
                first, count = lax.axis_index(heads_by) * q.shape[2] // group, max(1, q.shape[2] // group)
                k, v = (lax.dynamic_slice_in_dim(x, first, count, axis=2) for x in (k, v))
            try:
                return flash_attention(
                    q, k, v, window=window, softcap=config.softcap or None, segment_ids=segment_ids, kv_segment_ids=kv_segment_ids,
                    sinks=sinks, q_offset=0 if start is None else start, implementation=implementation,
                    platform=device.platform, capability=capability_of(device),
                )  # fmt: skip
            except Unsupported as error:
                raise ConfigError(f"model.attention={config.attention}: {error}") from error

        q_spec = shard.spec("activations", ("batch", "seq", "heads", "head_dim"))
        kv_spec = shard.spec("activations", ("batch", "seq", "kv_heads", "head_dim"))
        row_spec, sink_spec = shard.spec("activations", ("batch", "seq")), shard.spec("activations", ("heads",))
        sinks = self.sinks[...] if config.sinks else None
        in_specs = (q_spec, kv_spec, kv_spec, row_spec, row_spec, sink_spec, jax.P())
        return shard.shard_map(kernel, in_specs, q_spec)(q, k, v, segment_ids, kv_segment_ids, sinks, start)


class Mlp(nnx.Module):
    """GELU or SwiGLU between two matmuls; gate and up come from one."""

    def __init__(self, config: DecoderConfig, weights: Weights, shard: Shard) -> None:
        self.config, self.shard = config, shard
        d, f = config.d_model, config.d_mlp
        if config.activation == "swiglu":
            self.up = Linear("bsd,dgf->bsgf", weights, (d, 2, f), ("embed", "fused", "mlp"), shard)
        else:
            self.up = Linear("bsd,df->bsf", weights, (d, f), ("embed", "mlp"), shard)
        self.down = Linear("bsf,df->bsd", weights, (d, f), ("embed", "mlp"), shard, std=weights.residual_std, bias_axes=("norm",))

    def __call__(self, x_BSD: jax.Array) -> jax.Array:
        up = checkpoint_name(self.up(x_BSD), "mlp_up")
        h = _swiglu(up) if self.config.activation == "swiglu" else _gelu(up)
        return self.down(self.shard(h, "batch", "seq", "mlp"))


def rope_table(config: DecoderConfig, positions: jax.Array) -> jax.Array:
    """Angles float32 [..., H/2] of positions int32 [...], with Llama-3's stretching of long wavelengths where configured."""
    frequency = config.rope_theta ** (-jnp.arange(0, config.d_head, 2, dtype=jnp.float32) / config.d_head)
    if config.rope_scaling != 1:
        # Llama 3 (arXiv 2407.21783; constants as released): wavelengths over a quarter of the original context are stretched whole.
        low, high = 1.0, 4.0
        turns = config.rope_original_seq_len * frequency / (2 * math.pi)
        keep = jnp.clip((turns - low) / (high - low), 0, 1)
        frequency = frequency * (keep + (1 - keep) / config.rope_scaling)
    return positions[..., None].astype(jnp.float32) * frequency


def rotate(x_BSNH: jax.Array, angles: jax.Array) -> jax.Array:
    """RoPE on the two halves of H, as Llama stores them. angles: [S, H/2] or [B, S, H/2]."""
    sin, cos = jnp.sin(angles)[..., None, :], jnp.cos(angles)[..., None, :]
    a, b = jnp.split(x_BSNH.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x_BSNH.dtype)
