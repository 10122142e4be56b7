"""The grouped matmuls of a run with a mixture of experts, before its model exists: what one device
multiplies, for the self-tests of kernels.

The model is known by its names alone: `config.model.experts` has `number`, `active` and `d_ff`, and
its layers are the segments of kind "moe".
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from mesh_lm.config import TrainConfig
from pallas_kernels.grouped_matmul import GroupedMatmulProblem, describe_grouped_matmul
from sharding_rules import Rules, axes_of, row_of
from sharding_rules.rules import Column

KIND = "moe"
"""The kind of a segment whose layers have experts."""
FACTOR = 1.25
"""Rows of a round of an exchange, in units of those of balanced routing, where a config names
none."""


class DeviceExperts(NamedTuple):
    """The experts of one device, in one segment."""

    number: int
    width: int
    """Of each expert's hidden layer: of a tensor-parallel device, its share."""
    ways: int
    """Devices over which the experts are distributed."""
    tokens: int
    """Of a microbatch, those whose experts are on these devices."""


def grouped_problems(
    config: TrainConfig, platform: str, capability: tuple[int, int] | None
) -> list[GroupedMatmulProblem]:
    """Returns the grouped matmuls of one device; empty for a model without experts, and for a mesh
    with a size of -1, because the rows of a device are unknown then.
    """
    model: Any = config.model
    experts: Any = getattr(model, "experts", None)
    mesh = config.mesh.sizes()
    if not getattr(experts, "number", 0) or -1 in mesh.values():
        return []
    problems = []
    for segment in model.segment_configs():
        if segment.kind != KIND:
            continue
        device = device_experts(config, segment.name, mesh, config.rules)
        factor = getattr(experts, "factor", FACTOR)
        for rows in buffer_rows(device, experts.number, experts.active, factor):
            problems += expert_problems(
                rows,
                model.d_model,
                device.width,
                device.number,
                model.within(segment).dtype,
                platform,
                capability,
            )
    return list(dict.fromkeys(problems))


def expert_problems(
    rows: int,
    d_model: int,
    d_ff: int,
    n_experts: int,
    dtype: str,
    platform: str,
    capability: tuple[int, int] | None,
) -> list[GroupedMatmulProblem]:
    """Returns the two grouped matmuls of an expert MLP with a gate: into its hidden layer, gate and
    up beside each other, and out of it.

    rows: of the buffer. d_ff and n_experts: of one device.
    """
    problems = []
    for d_in, d_out in ((d_model, 2 * d_ff), (d_ff, d_model)):
        problem = describe_grouped_matmul(
            jax.ShapeDtypeStruct((rows, d_in), jnp.dtype(dtype)),
            jax.ShapeDtypeStruct((n_experts, d_in, d_out), jnp.dtype(dtype)),
            jax.ShapeDtypeStruct((n_experts,), jnp.int32),
            platform=platform,
            capability=capability,
        )
        problems.append(problem)
    return problems


def device_experts(
    config: TrainConfig, segment: str, mesh: dict[str, int], rules: Rules
) -> DeviceExperts:
    """Returns the experts that a device has in a segment. A config that does not divide is refused
    elsewhere.
    """
    model: Any = config.model
    expert_axes = _axes(rules.params, segment, "experts", mesh)
    width_axes = _axes(rules.params, segment, "expert_mlp", mesh)
    token_axes = _axes(rules.activations, segment, "batch", mesh)
    token_axes |= _axes(rules.activations, segment, "seq", mesh)
    token_axes |= _axes(rules.activations, segment, "seq_resid", mesh)
    # Devices with parts of the same experts gather their tokens first.
    replicas = _size(token_axes - expert_axes - width_axes, mesh)
    ways = _size(expert_axes, mesh)

    tokens = config.tokens_per_step // (max(1, config.train.microbatches) * replicas)
    if getattr(model, "batch_halves", False):
        tokens //= 2
    return DeviceExperts(
        number=max(1, model.experts.number // ways),
        width=max(1, model.experts.d_ff // _size(width_axes, mesh)),
        ways=ways,
        tokens=max(1, tokens),
    )


def buffer_rows(device: DeviceExperts, number: int, active: int, factor: float) -> list[int]:
    """Returns the rows that a device's buffer of tokens may have, by the exchange that fills it:
    for any routing, and in a round of gathered or of padded exchange.

    number, active: experts of a layer, and of a token. factor: rows of a round, in units of those
    of balanced routing; 0: there are no rounds.
    """
    worst = device.tokens * min(active, device.number)
    if device.ways == 1 or factor <= 0:
        return [worst]
    balanced = device.tokens * active * device.number / number
    gathered = min(worst, _multiple(factor * balanced, 128))
    # One device sends as many rows to each of the others.
    most_sent = device.tokens // device.ways * min(active, device.number)
    sent = min(most_sent, _multiple(factor * balanced / device.ways, 8))
    return list(dict.fromkeys([gathered, sent * device.ways, worst]))


def _axes(column: Column, segment: str, logical: str, mesh: dict[str, int]) -> set[str]:
    """Returns the mesh axes over which a segment's logical axis is sharded."""
    row = row_of(column, f"{segment}/{logical}")
    if row is None:
        return set()
    return {axis for axis in axes_of(column[row]) if mesh.get(axis, 1) > 1}


def _size(axes: set[str], mesh: dict[str, int]) -> int:
    return math.prod(mesh[axis] for axis in axes)


def _multiple(rows: float, of: int) -> int:
    """Returns the next multiple."""
    return -(-math.ceil(rows) // of) * of
