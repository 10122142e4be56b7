"""Experts that cannot be sharded as the rules say (expert parallelism), and exchanges of tokens
that no row asks for.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import get_args

from mesh_lm.config import TrainConfig
from mesh_lm.parallel.problems.rows import name_of
from sharding_rules import ISLAND, Rules, axes_of, row_of
from sharding_rules.rules import Kind


def expert_problems(config: TrainConfig) -> Iterator[str]:
    """Yields contradictions between the rows of experts, their exchanges, the mesh and the
    model.
    """
    rules = config.rules
    yield from _column_problems(rules)
    for row in rules.params:
        if name_of(row) == "experts":
            yield from _axis_problems(config, row)
        elif name_of(row) == "router":
            yield from _router_problems(rules, row)
    for axis, exchange in rules.exchange.items():
        rows = [row for row in rules.params if name_of(row) == "experts"]
        if not any(axis in axes_of(rules.params[row]) for row in rows):
            yield (
                f"rules.exchange[{axis!r}]={exchange!r}, but rules.params['experts'] is not "
                f"sharded over {axis!r}; add it there, and in rules.activations['experts']"
            )
        elif exchange == "ragged" and config.launch.cpu_devices:
            yield (
                f"rules.exchange[{axis!r}]='ragged': XLA has no ragged all-to-all for CPUs; set "
                "it to padded or gather"
            )
    if config.model.problems():
        return
    segments = _expert_segments(config)
    if not segments and config.mesh.expert > 1:
        yield (
            f"mesh.expert={config.mesh.expert}: this model has no experts; set mesh.expert=1, or "
            "model.block=moe"
        )
    for name in segments:
        yield from _residual_problems(rules, name)
        yield from _shared_expert_problems(config, name)


def _expert_segments(config: TrainConfig) -> list[str]:
    """Returns the names of the segments whose layers have experts."""
    segments = getattr(config.model, "expert_segments", tuple)()
    return [segment.name for segment in segments]


def _column_problems(rules: Rules) -> Iterator[str]:
    """Yields columns in which experts are sharded otherwise than as stored."""
    for row, entry in rules.params.items():
        if name_of(row) != "experts":
            continue
        for kind in get_args(Kind):
            column = getattr(rules, kind) or {}  # a default follows from the rows checked below
            other_row = row_of(column, row)
            if other_row is None or axes_of(column[other_row]) == axes_of(entry):
                continue
            yield (
                f"rules.{kind}[{other_row!r}]={column[other_row]!r}: experts stay on their "
                f"devices, and rules.params[{row!r}]={entry!r}; set both to the same mesh axes"
            )


def _axis_problems(config: TrainConfig, row: str) -> Iterator[str]:
    """Yields mesh axes that cannot hold experts, or over which no rule sends tokens."""
    rules = config.rules
    entry = rules.params[row]
    setting = f"rules.params[{row!r}]={entry!r}"
    scope = row.rpartition("/")[0]
    token_axes = set(axes_of(rules.activations["batch"]))
    residual_row = rules.row("activations", f"{scope}/seq_resid")
    if residual_row:
        token_axes |= set(axes_of(rules.activations[residual_row]))
    width_row = row_of(rules.params, f"{scope}/expert_mlp")
    width_axes = axes_of(rules.params[width_row]) if width_row else ()
    embed_row = row_of(rules.params, f"{scope}/embed")
    embed_axes = axes_of(rules.params[embed_row]) if embed_row else ()
    sizes = config.mesh.sizes()
    manual_axes = rules.manual_axes()
    ordered = sorted(axes_of(entry), key=lambda axis: axis not in manual_axes)
    if tuple(ordered) != axes_of(entry):
        # A step divides experts over its manual axes first, and XLA what is left.
        yield (
            f"{setting}: the mesh axes over which a step divides arrays itself come first; set it "
            f"to {tuple(ordered)!r}"
        )
    for axis in axes_of(entry):
        if axis in (ISLAND, "pipeline"):
            yield f"{setting}: experts of one layer are in one stage; remove {axis!r}"
        elif axis not in token_axes and sizes.get(axis, 1) > 1:
            fix = f"add {axis!r} to rules.activations['batch']"
            if axis == "tensor":
                fix = "add megatron_sp, which shards the sequence over it"
            yield (
                f"{setting}: {axis!r} shards no tokens, so its devices would compute the same "
                f"experts; {fix}, or leave {axis!r} out"
            )
        elif axis not in rules.exchange:
            yield (
                f"{setting}: no rule says how tokens reach experts over {axis!r}; set "
                f"rules.exchange[{axis!r}] to gather or padded"
            )
        elif axis in width_axes:
            yield (
                f"{setting}: {axis!r} shards the width of an expert, too; set "
                f"rules.params[{width_row!r}] to None"
            )
        elif axis in embed_axes:
            yield (
                f"{setting}: {axis!r} shards {embed_row!r}, too, and a matrix is divided over a "
                f"mesh axis once; set rules.params['{scope or 'blocks'}/embed'] to None"
            )


def _router_problems(rules: Rules, row: str) -> Iterator[str]:
    entry = rules.params[row]
    if axes_of(entry):
        yield (
            f"rules.params[{row!r}]={entry!r}: each token needs the scores of all experts; set it "
            "to None"
        )


def _residual_problems(rules: Rules, segment: str) -> Iterator[str]:
    """Yields a residual stream, or matrices in use, that are sharded along embed, which a router
    and the experts cannot read.
    """
    for kind in ("activations", "gathered"):
        column = rules.column(kind)
        row = row_of(column, f"{segment}/embed")
        if row is not None and axes_of(column[row]):
            yield (
                f"rules.{kind}[{row!r}]={column[row]!r}: the router of {segment!r} reads complete "
                "tokens; use megatron_sp in place of megatron_2d, or set it to None"
            )
            return


def _shared_expert_problems(config: TrainConfig, segment: str) -> Iterator[str]:
    """Yields a width of the shared expert that does not divide over the mesh axes of its MLP."""
    experts = getattr(config.model, "experts", None)
    column = config.rules.column("params")
    row = row_of(column, f"{segment}/mlp")
    sizes = config.mesh.sizes()
    if experts is None or row is None:
        return
    n_shards = math.prod(sizes.get(axis, 1) for axis in axes_of(column[row]))
    if experts.shared % n_shards:
        yield (
            f"model.experts.shared={experts.shared}: the width of the shared expert does not "
            f"divide into {n_shards} shards (rules.params: {row} -> "
            f"{'+'.join(axes_of(column[row]))})"
        )
