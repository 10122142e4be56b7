"""The parts of layers: parameters with named dimensions, norms, and linear layers.

Sizes: B batch, S sequence, D embed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from mesh_lm.model.config import DecoderConfig
from sharding_rules import Shard


class Weights:
    """Makes a module's parameters with named dimensions. In a segment, each has the segment's
    layers as its leading dimension.
    """

    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs, layers: int = 0) -> None:
        self.config = config
        self.rngs = rngs
        self.layers = layers

    def __call__(
        self,
        shape: Sequence[int],
        axes: Sequence[str],
        std: float | None = None,
        fill: float | None = None,
        *,
        cast: bool = False,
    ) -> nnx.Param:
        """Returns a parameter: normal with standard deviation `std` (default: the config's),
        truncated at three of them, or constant `fill`.

        cast: whether it is cast to the config's compute type before it is used.
        """
        if self.layers:
            shape = (self.layers, *shape)
            axes = ("layers", *axes)
        if fill is not None:
            value = jnp.full(shape, fill, jnp.float32)
        else:
            std = self.config.init_std if std is None else std
            key = self.rngs.params()
            value = std * jax.random.truncated_normal(key, -3, 3, tuple(shape))
        metadata: dict[str, Any] = {"compute_dtype": self.config.dtype} if cast else {}
        return nnx.Param(value, out_sharding=tuple(axes), **metadata)

    @property
    def residual_std(self) -> float:
        """The std of matrices that write into the residual stream, so that its variance does not
        grow with depth (GPT-2).
        """
        return self.config.init_std / math.sqrt(2 * self.config.n_layers)


class Norm(nnx.Module):
    """LayerNorm or RMSNorm over the last dimension, computed in fp32, returned in the compute
    type.
    """

    def __init__(self, config: DecoderConfig, weights: Weights, width: int = 0) -> None:
        """width: size of the last dimension; 0: D, the width of the residual stream."""
        self.config = config
        self.normalises_residual = not width
        self.has_bias = config.norm == "layernorm" and config.biases
        shape = (width or config.d_model,)
        self.scale = weights(shape, ("norm",), fill=1.0)
        if self.has_bias:
            self.bias = weights(shape, ("norm",), fill=0.0)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Normalises the last dimension of x; the statistics are computed in float32."""
        bias = self.bias[...] if self.has_bias else None
        x = _normalise(x, self.scale[...], bias, self.config)
        if not self.normalises_residual or self.config.dtype == "float32":
            return x
        # Without the barrier XLA moves the cast after the following all-gather, which then moves
        # fp32.
        return lax.optimization_barrier(x)


# Elementwise chains save their input only for the backward. Without this, GELU saves five arrays of
# the size of its input.
recomputed = partial(jax.checkpoint, prevent_cse=False)


@partial(recomputed, static_argnums=3)
def _normalise(
    x_BSD: jax.Array, scale_D: jax.Array, bias_D: jax.Array | None, config: DecoderConfig
) -> jax.Array:
    x = x_BSD.astype(jnp.float32)
    if config.norm == "layernorm":
        x = x - x.mean(-1, keepdims=True)
    x = x * lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + config.norm_eps) * scale_D
    if bias_D is not None:
        x = x + bias_D
    return x.astype(config.dtype)


# A custom VJP, for the type and the kernel of the bias's gradient.
@jax.custom_vjp
def add_bias(x: jax.Array, bias: jax.Array) -> jax.Array:
    """Returns x + bias. The bias's gradient, a sum over all tokens, is fp32: in bf16 it was 18 %
    off at 16,384 tokens (measured).
    """
    return (x.astype(jnp.float32) + bias).astype(x.dtype)


def _add_bias_forward(x: jax.Array, bias: jax.Array) -> tuple[jax.Array, jax.Array]:
    return add_bias(x, bias), bias


def _add_bias_backward(bias: jax.Array, dy: jax.Array) -> tuple[jax.Array, jax.Array]:
    # Without the barrier XLA sums in the kernel that computes dy, which takes twice as long as both
    # kernels apart (predicted for H100).
    token_dims = tuple(range(dy.ndim - bias.ndim))
    dbias = lax.optimization_barrier(dy).astype(jnp.float32).sum(token_dims)
    return dy, dbias.astype(bias.dtype)


add_bias.defvjp(_add_bias_forward, _add_bias_backward)


# A custom VJP, to constrain the gradient's sharding alone.
@partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _gathered_once(y: jax.Array, shard: Shard, tokens: tuple[str, str]) -> jax.Array:
    """Returns y. Its gradient, sharded along the sequence, is gathered here once; XLA would gather
    it for each of the two matmuls that read it.
    """
    return y


def _forward(y: jax.Array, shard: Shard, tokens: tuple[str, str]) -> tuple[jax.Array, None]:
    return y, None


def _backward(shard: Shard, tokens: tuple[str, str], _: None, dy: jax.Array) -> tuple[jax.Array]:
    return (shard(dy, *tokens, "embed"),)


_gathered_once.defvjp(_forward, _backward)


# A custom VJP, to constrain the gradient's sharding alone.
@partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def _gradient_as_operand(
    y: jax.Array, shard: Shard, tokens: tuple[str, str], axes: tuple[str, ...]
) -> jax.Array:
    """Returns y. Its gradient is gathered here once where the weight is sharded over fewer mesh
    axes; XLA may gather it for each of two matmuls.
    """
    return y


def _as_operand_forward(
    y: jax.Array, shard: Shard, tokens: tuple[str, str], axes: tuple[str, ...]
) -> tuple[jax.Array, None]:
    return y, None


def _as_operand_backward(
    shard: Shard, tokens: tuple[str, str], axes: tuple[str, ...], _: None, dy: jax.Array
) -> tuple[jax.Array]:
    return (shard.operand(dy, tokens, axes),)


_gradient_as_operand.defvjp(_as_operand_forward, _as_operand_backward)


class Linear(nnx.Module):
    """An einsum with a weight that is cast, then gathered, and an optional bias with the dimensions
    of the output.
    """

    def __init__(
        self,
        equation: str,
        weights: Weights,
        shape: Sequence[int],
        axes: Sequence[str],
        shard: Shard,
        *,
        std: float | None = None,
        bias_axes: Sequence[str] | None = None,
    ) -> None:
        """The embedding is always the weight's first dimension, because FSDP shards it.

        XLA gathers along the major dimension only: for weights that are sharded along the last one
        it would keep a transposed copy of the whole stack (gpt_175b on 1,024 devices: 2.3 GB). With
        `bias_axes` the embedding is the output, into the residual stream; otherwise it is
        contracted.
        """
        self.equation = equation
        self.shard = shard
        self.axes = tuple(axes)
        self.dtype = weights.config.dtype
        self.remat = weights.config.remat
        self.weight = weights(shape, axes, std, cast=True)
        self.into_residual = bias_axes is not None
        self.has_bias = weights.config.biases
        if self.has_bias:
            bias_shape = shape[:1] if bias_axes else shape[1:]
            self.bias = weights(bias_shape, bias_axes or axes[1:], fill=0.0)

    def __call__(self, x_BS: jax.Array, tokens: tuple[str, str] = ("batch", "seq")) -> jax.Array:
        """Returns the product of x and the weight, as the einsum formula says, plus the bias if
        there is one. tokens: as in `Context`.
        """
        matmul = partial(self._matmul, tokens=tokens)
        if self.remat == "none":
            # The backward casts (and under FSDP gathers) the weights again. If they were saved,
            # each device would have the gathered weights of all layers at the end of the forward.
            matmul = recomputed(matmul)
        y_BS = matmul(x_BS, self.weight[...])
        return add_bias(y_BS, self.bias[...]) if self.has_bias else y_BS

    def _matmul(self, x_BS: jax.Array, weight: jax.Array, tokens: tuple[str, str]) -> jax.Array:
        einsum, weight = self.shard.einsum_of(weight, self.dtype, self.axes)
        regathers = self.shard.regathers(self.axes)
        if regathers and self.into_residual:
            x_BS = self.shard.operand(x_BS, tokens, self.axes[1:])
        if self.shard.axes_for("seq_resid"):
            y = einsum(self.equation, x_BS, weight)
            return _gathered_once(y, self.shard, tokens) if self.into_residual else y
        # Tokens as one dimension: XLA:CPU transposes whole activations for a gradient that
        # contracts two. Not if the sequence is about to be sharded: the sharding would no longer be
        # that of a dimension.
        y = einsum(self.equation.replace("bs", "t"), x_BS.reshape(-1, *x_BS.shape[2:]), weight)
        y = y.reshape(*x_BS.shape[:2], *y.shape[1:])
        if regathers and not self.into_residual:
            return _gradient_as_operand(y, self.shard, tokens, self.axes[1:])
        return y
