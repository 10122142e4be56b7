"""The layer with a mixture of experts in place of the MLP: Mixtral, Qwen3-MoE, and DeepSeek-V3's
router and shared expert. No token is dropped.

Sizes: B batch, S sequence, D embed, E experts, F width of an expert, k active experts of a token, R
rows of tokens sorted by expert. T stands for both dimensions of tokens, as in
`mesh_lm.model.dense`; where a device's tokens are one dimension, it is theirs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from mesh_lm.model import dense
from mesh_lm.model.buffer import Buffer
from mesh_lm.model.config import DecoderConfig
from mesh_lm.model.contract import Context, Sums
from mesh_lm.model.dense import DenseLayer
from mesh_lm.model.exchange import Exchange, Hop, Tokens, exchanged, require_platform
from mesh_lm.model.exchange import Mlp as ExpertMlp
from mesh_lm.model.layers import Weights, recomputed
from mesh_lm.model.mlp import Mlp, gelu
from mesh_lm.model.permutation import count
from mesh_lm.model.router import Routing, balance_loss, route
from pallas_kernels import capability_of, grouped_matmul
from sharding_rules import EXPERTS, Shard, axes_of

_ROUTER = ("embed", "router")
_DOWN = ("experts", "expert_mlp", "embed")


class MoeLayer(DenseLayer):
    """Attention and experts, each after a norm and added to the residual stream; implements
    `mesh_lm.model.Layer`.
    """

    sequence_first = True

    def make_mlp(self, config: DecoderConfig, weights: Weights, shard: Shard) -> None:
        """Makes the experts, and the shared expert if there is one."""
        self.experts = Experts(config, weights, shard)
        self.has_shared_expert = config.experts.shared > 0
        if self.has_shared_expert:
            shared_config = dataclasses.replace(config, d_ff=config.experts.shared)
            self.shared_expert = Mlp(shared_config, weights, shard)

    def apply_mlp(self, x_TD: jax.Array, ctx: Context) -> tuple[jax.Array, Sums]:
        """Returns the sum of the experts' outputs, sharded like the residual stream, and the
        router's sums.
        """
        # Not gathered along the sequence: a router reads one token at a time.
        x_TD = self.shard(x_TD, *ctx.residual)
        with jax.named_scope(EXPERTS):
            y_TD, sums = self.experts(x_TD, ctx)
        if self.has_shared_expert:
            with jax.named_scope("shared_expert"):
                shared_TD = self.shared_expert(self._enter(x_TD, ctx), ctx.tokens)
                y_TD = y_TD + self.shard(shared_TD, *ctx.residual)
        return y_TD, sums


Layer = MoeLayer
"""The name that `mesh_lm.model.kinds.Kind` asks of this module."""


@dataclasses.dataclass(frozen=True)
class _Placement:
    """How the rules shard a layer's tokens and experts, for code on the shards of one device, where
    all mesh axes are manual.
    """

    dims: tuple[str, str]
    """The logical axes of the first two dimensions of activations."""
    tokens: jax.P
    """The spec of activations."""
    matrices: tuple[jax.P, jax.P, jax.P]
    """The specs of the router, the up and the down matrices as they are stored."""
    gather_axes: tuple[tuple[tuple[str, ...], ...], ...]
    """The mesh axes over which each dimension of these is gathered before its use (FSDP)."""
    width_axes: tuple[str, ...]
    """The mesh axes that shard the width of an expert."""
    sequence_axes: tuple[str, ...]
    """The mesh axes that shard a sequence, also those that the caller's region is manual over."""
    hops: tuple[Hop, ...]

    @property
    def token_axes(self) -> tuple[str, ...]:
        """The mesh axes that shard tokens; the caller's region sums over its own."""
        return tuple(axis for entry in self.tokens[:2] for axis in axes_of(entry))


class Experts(nnx.Module):
    """A router, and the matrices of the experts, with gate and up in one."""

    def __init__(self, config: DecoderConfig, weights: Weights, shard: Shard) -> None:
        self.config = config
        self.shard = shard
        d = config.d_model
        n = config.experts.number
        f = config.d_expert
        self.is_gated = config.activation == "swiglu"
        self.router = weights((d, n), _ROUTER)
        if self.is_gated:
            self.up_axes = ("experts", "embed", "fused", "expert_mlp")
            self.up = weights((n, d, 2, f), self.up_axes, cast=True)
        else:
            self.up_axes = ("experts", "embed", "expert_mlp")
            self.up = weights((n, d, f), self.up_axes, cast=True)
        self.down = weights((n, f, d), _DOWN, weights.residual_std, cast=True)
        if config.experts.bias:
            bias = jnp.zeros((weights.layers, n))
            self.bias = Buffer(bias, out_sharding=("layers", "router"))

    def __call__(self, x_TD: jax.Array, ctx: Context) -> tuple[jax.Array, Sums]:
        """Returns the weighted sum of each token's experts, like x, and the sums: "load", float32
        [E], the number of tokens that chose each expert; "router_z" and "balance", the auxiliary
        losses, which are in "objective", too.
        """
        placement = self._placement(ctx)
        label_weights = ctx.batch["weights"]
        if ctx.tokens[0] != "batch":
            label_weights = label_weights.T
        bias = self.bias[...] if self.config.experts.bias else None
        run = self.shard.shard_map(
            partial(self._on_device, placement),
            (placement.tokens, jax.P(*placement.tokens[:2]), *placement.matrices, jax.P()),
            (placement.tokens, jax.P()),
        )
        return run(x_TD, label_weights, self.router[...], self.up[...], self.down[...], bias)

    def _placement(self, ctx: Context) -> _Placement:
        shard = self.shard
        matrix_axes = (_ROUTER, self.up_axes, _DOWN)
        hops = tuple(
            Hop(axes, exchange, shard.n_shards(axes)) for axes, exchange in shard.token_exchanges()
        )
        require_platform(hops, shard.mesh.devices.flat[0].platform)
        router, up, down = (shard.spec("params", axes) for axes in matrix_axes)
        return _Placement(
            dims=ctx.tokens,
            tokens=shard.spec("activations", ctx.residual),
            matrices=(router, up, down),
            gather_axes=tuple(shard.gather_axes(*axes) for axes in matrix_axes),
            width_axes=axes_of(shard.spec("gathered", ("expert_mlp",))[0]),
            sequence_axes=shard.sequence_axes(),
            hops=hops,
        )

    def _on_device(
        self,
        placement: _Placement,
        x_TD: jax.Array,
        label_weights: jax.Array,
        router: jax.Array,
        up: jax.Array,
        down: jax.Array,
        bias_E: jax.Array | None,
    ) -> tuple[jax.Array, Sums]:
        """Computes the experts of one device's tokens, and its part of the sums.

        label_weights: float32, as the first dimensions of x. router, up, down: as they are stored
        on the device.
        """
        config = self.config.experts
        sum_dtype = "float32" if self.shard.rules.reduction == "float32" else x_TD.dtype
        router_axes, up_axes, down_axes = placement.gather_axes
        router = _matrix_in_use(router, router_axes, "float32", "float32")
        up = _matrix_in_use(up, up_axes, x_TD.dtype, sum_dtype)
        down = _matrix_in_use(down, down_axes, x_TD.dtype, sum_dtype)

        x = x_TD.reshape(-1, x_TD.shape[-1])
        # In float32, also on GPUs, whose default for float32 is TF32.
        logits_TE = jnp.dot(x.astype(jnp.float32), router, precision=lax.Precision.HIGHEST)
        routing = route(logits_TE, bias_E, config)
        y = self._computed(placement, Tokens(x, routing.experts, routing.weights), up, down)

        # Integers up to 2^24 are exact in float32, so that the loads are the same on every mesh.
        load_E = count(routing.experts.reshape(-1), config.number).astype(jnp.float32)
        losses: Sums = {}
        if config.z_loss:
            squares_T = jnp.square(jax.nn.logsumexp(logits_TE, -1))
            losses["router_z"] = config.z_loss * (label_weights.reshape(-1) * squares_T).sum()
        if config.balance_loss:
            losses["balance"] = config.balance_loss * self._balance(
                placement, routing, label_weights
            )
        if losses:
            losses["objective"] = sum(losses.values(), jnp.float32(0))
        sums: Sums = {"load": load_E, **losses}
        return y.reshape(x_TD.shape), lax.psum(sums, placement.token_axes)

    def _computed(
        self, placement: _Placement, tokens: Tokens, up: jax.Array, down: jax.Array
    ) -> jax.Array:
        """Returns the weighted sums of the tokens' experts, [T, D], over all devices that have
        parts of them.
        """
        config = self.config.experts
        # Tensor-parallel devices with different tokens (sequence parallelism) need those of all,
        # and each gets back the sums of its own; those with the same tokens add up their parts.
        joined_axes = tuple(a for a in placement.width_axes if a in placement.token_axes)
        summed_axes = tuple(a for a in placement.width_axes if a not in placement.token_axes)
        if joined_axes:
            tokens = Tokens(*(lax.all_gather(array, joined_axes, tiled=True) for array in tokens))
        exchange = Exchange(
            placement.hops, config.number, config.active, len(tokens.x), config.factor
        )
        expected_rows = config.active * len(tokens.x)
        y = exchanged(exchange, exchange.hops, tokens, self._mlp(up, down, expected_rows))
        if summed_axes:
            y = lax.psum(y, summed_axes)
        if joined_axes:
            y = lax.psum_scatter(y, joined_axes, tiled=True)
        return y

    def _mlp(self, up: jax.Array, down: jax.Array, expected_rows: int) -> ExpertMlp:
        """Returns the experts of this device.

        expected_rows: of balanced routing, by which plans count the FLOPs of the first round.
        """
        up_EDF = up.reshape(*up.shape[:2], -1)
        activation = _weighted_swiglu if self.is_gated else _weighted_gelu
        options: dict[str, Any] = {"expected_rows": expected_rows}
        device = self.shard.mesh.devices.flat[0]
        if device not in jax.devices():
            # `plan` compiles for absent GPUs. On those of this process our kernels are tested
            # before their first use.
            options |= {"platform": device.platform, "capability": capability_of(device)}

        def mlp(
            x_RD: jax.Array, weights_R: jax.Array, sizes_E: jax.Array, *, first: bool
        ) -> jax.Array:
            up_RF = grouped_matmul(x_RD, up_EDF, sizes_E, **options)
            if first:
                # remat=save_names saves it; the nonlinearity is recomputed.
                up_RF = checkpoint_name(up_RF, "expert_up")
            return grouped_matmul(activation(up_RF, weights_R), down, sizes_E, **options)

        return mlp

    def _balance(
        self, placement: _Placement, routing: Routing, label_weights: jax.Array
    ) -> jax.Array:
        """Returns the sum over this device's labels of their sequences' balance losses."""
        experts = routing.experts.reshape(*label_weights.shape, -1)
        scores = routing.scores.reshape(*label_weights.shape, -1)
        if placement.dims[0] != "batch":
            experts = experts.swapaxes(0, 1)
            scores = scores.swapaxes(0, 1)
            label_weights = label_weights.T
        n_sequences, n_tokens = label_weights.shape
        choices_BE = jax.vmap(partial(count, n=scores.shape[-1]))(experts.reshape(n_sequences, -1))
        shares_BE = choices_BE.astype(jnp.float32) / n_tokens
        scores_BE = (scores / (scores.sum(-1, keepdims=True) + 1e-20)).mean(1)
        if placement.sequence_axes:
            # Parts of one sequence are on several devices.
            shares_BE = lax.pmean(shares_BE, placement.sequence_axes)
            scores_BE = lax.pmean(scores_BE, placement.sequence_axes)
        loss_B = balance_loss(shares_BE, scores_BE, self.config.experts.active)
        return (loss_B * label_weights.sum(1)).sum()


# A custom VJP, for the type in which gradients are summed over devices.
@partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def _matrix_in_use(
    w: jax.Array, gather_axes: tuple[tuple[str, ...], ...], dtype: Any, sum_dtype: Any
) -> jax.Array:
    """Returns a stored matrix as a device uses it: cast to `dtype`, then gathered along each
    dimension over its mesh axes (FSDP). Its gradient is reduce-scattered in `sum_dtype`.
    """
    w = w.astype(dtype)
    for dim, axes in enumerate(gather_axes):
        if axes:
            w = lax.all_gather(w, axes, axis=dim, tiled=True)
    return w


def _matrix_forward(
    w: jax.Array, gather_axes: tuple[tuple[str, ...], ...], dtype: Any, sum_dtype: Any
) -> tuple[jax.Array, jax.Array]:
    # An empty array says what the type of the gradient is.
    return _matrix_in_use(w, gather_axes, dtype, sum_dtype), jnp.empty(0, w.dtype)


def _matrix_backward(
    gather_axes: tuple[tuple[str, ...], ...],
    dtype: Any,
    sum_dtype: Any,
    stored: jax.Array,
    dw: jax.Array,
) -> tuple[jax.Array]:
    dw = dw.astype(sum_dtype)
    for dim, axes in enumerate(gather_axes):
        if axes:
            dw = lax.psum_scatter(dw, axes, scatter_dimension=dim, tiled=True)
    return (dw.astype(stored.dtype),)


_matrix_in_use.defvjp(_matrix_forward, _matrix_backward)


@recomputed
def _weighted_swiglu(up_RF: jax.Array, weights_R: jax.Array) -> jax.Array:
    """Returns silu(gate) * up, each row times its weight, [R, F]. Weighted here, not at the output,
    so that the exchange that returns results is linear, and its backward pass needs none of them.
    """
    gate, up = jnp.split(up_RF, 2, axis=-1)
    return (jax.nn.silu(gate) * up * weights_R[:, None]).astype(up_RF.dtype)


@recomputed
def _weighted_gelu(up_RF: jax.Array, weights_R: jax.Array) -> jax.Array:
    return (gelu(up_RF) * weights_R[:, None]).astype(up_RF.dtype)


def n_params(config: DecoderConfig) -> int:
    """Returns the number of parameters of one layer, with those of all experts."""
    return _without_mlp(config, dense.n_params) + _expert_weights(config, config.experts.number)


def flops_per_token(config: DecoderConfig) -> float:
    """Returns the FLOPs of one token in one layer: those of its active experts."""
    weights = _expert_weights(config, config.experts.active)
    return _without_mlp(config, dense.flops_per_token) + 6 * weights


attention_flops_per_token = dense.attention_flops_per_token


def _without_mlp(config: DecoderConfig, dense_count: Callable[[DecoderConfig], Any]) -> Any:
    """Returns a count of a dense layer with the shared expert, or nothing, in place of its MLP."""
    shared = config.experts.shared
    if shared:
        return dense_count(dataclasses.replace(config, d_ff=shared))
    # The count is linear in the width, and 0 stands for the default width.
    one = dense_count(dataclasses.replace(config, d_ff=1))
    two = dense_count(dataclasses.replace(config, d_ff=2))
    bias = config.d_model if config.biases and dense_count is dense.n_params else 0
    return 2 * one - two - bias


def _expert_weights(config: DecoderConfig, n_experts: int) -> int:
    """Returns the weights of the router and of `n_experts` experts."""
    matrices = 3 if config.activation == "swiglu" else 2
    return config.d_model * (config.experts.number + n_experts * matrices * config.d_expert)
