"""The grouped matmuls of a run with a mixture of experts, before JAX has found a device: what one
device multiplies, for the self-tests of kernels.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh

from mesh_lm.config import TrainConfig
from mesh_lm.model import DecoderConfig
from mesh_lm.model.exchange import Exchange, Hop
from pallas_kernels.grouped_matmul import GroupedMatmulProblem, describe_grouped_matmul
from sharding_rules import Shard, axes_of


class DeviceExperts(NamedTuple):
    """What one device multiplies in a layer of a segment."""

    rows: int
    """Rows of the buffer of tokens in each round of an exchange."""
    number: int
    width: int
    """Width of the hidden layer of an expert; on a tensor-parallel device, of its part."""


def grouped_problems(
    config: TrainConfig, platform: str, capability: tuple[int, int] | None
) -> list[GroupedMatmulProblem]:
    """Returns the grouped matmuls of one device; empty for a model without experts, and for a mesh
    with a size of -1, because the rows of a device are unknown then.

    Raises ValueError for rules that do not say how tokens reach their experts.
    """
    model = config.model
    if not isinstance(model, DecoderConfig) or -1 in config.mesh.sizes().values():
        return []
    problems = []
    for segment in model.expert_segments():
        device = device_experts(config, model, segment.name)
        problems += expert_problems(
            device,
            model.d_model,
            model.within(segment).dtype,
            platform,
            capability,
            is_gated=model.activation == "swiglu",
        )
    return list(dict.fromkeys(problems))


def expert_problems(
    device: DeviceExperts,
    d_model: int,
    dtype: str,
    platform: str,
    capability: tuple[int, int] | None,
    *,
    is_gated: bool,
) -> list[GroupedMatmulProblem]:
    """Returns the two grouped matmuls of the experts: into their hidden layers and out of them.

    is_gated: a gate is beside the hidden layer, in one matrix.
    """
    up_width = 2 * device.width if is_gated else device.width
    problems = []
    for d_in, d_out in ((d_model, up_width), (device.width, d_model)):
        problem = describe_grouped_matmul(
            jax.ShapeDtypeStruct((device.rows, d_in), jnp.dtype(dtype)),
            jax.ShapeDtypeStruct((device.number, d_in, d_out), jnp.dtype(dtype)),
            jax.ShapeDtypeStruct((device.number,), jnp.int32),
            platform=platform,
            capability=capability,
        )
        problems.append(problem)
    return problems


def device_experts(config: TrainConfig, model: DecoderConfig, segment: str) -> DeviceExperts:
    """Returns what a device multiplies in a segment. A config that does not divide is refused
    elsewhere.
    """
    exchange = exchange_of(config, model, segment)
    shard = _shard(config, segment)
    return DeviceExperts(
        exchange.buffer_rows(received_tokens(exchange)),
        exchange.local_experts,
        model.d_expert // shard.n_shards(_width_axes(shard)),
    )


def exchange_of(config: TrainConfig, model: DecoderConfig, segment: str) -> Exchange:
    """Returns the exchange of a layer of a segment with experts, of the tokens that a device
    computes at once: those of a microbatch, or of half of one.
    """
    shard = _shard(config, segment)
    token_axes = set(shard.sequence_axes()) | set(shard.axes_for("batch"))
    # Tensor-parallel devices with different tokens gather those of all.
    n_shards = shard.n_shards(sorted(token_axes - set(_width_axes(shard))))
    n_tokens = config.tokens_per_step // (config.train.microbatches * n_shards)
    if model.batch_halves:
        n_tokens //= 2
    hops = tuple(
        Hop(axes, exchange, shard.n_shards(axes)) for axes, exchange in shard.token_exchanges()
    )
    experts = model.experts
    return Exchange(hops, experts.number, experts.active, n_tokens, experts.factor)


def _shard(config: TrainConfig, segment: str) -> Shard:
    """Returns the rules of a segment without devices: sizes suffice for what is asked of it."""
    sizes = config.mesh.sizes()
    mesh: Any = AbstractMesh(tuple(sizes.values()), tuple(sizes))
    return Shard(config.rules, mesh, segment)


def _width_axes(shard: Shard) -> tuple[str, ...]:
    """Returns the mesh axes that shard the width of an expert in use."""
    return axes_of(shard.spec("gathered", ("expert_mlp",))[0])


def received_tokens(exchange: Exchange) -> int:
    """Returns the tokens that a device has after all hops of an exchange, in each round."""
    n_tokens = exchange.n_tokens
    for position, hop in enumerate(exchange.hops):
        if hop.exchange == "padded":
            n_tokens = exchange.sent_tokens(hop, exchange.hops[position + 1 :], n_tokens)
        n_tokens *= hop.n_devices
    return n_tokens
