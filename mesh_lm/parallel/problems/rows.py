"""Mesh axes that rules and mesh do not agree on, and rows that shard a dimension which must not be
sharded that way.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import get_args

from mesh_lm.config import TrainConfig
from sharding_rules import ISLAND, PRESETS, Rules, axes_of, did_you_mean, setting
from sharding_rules.rules import FLAT, Kind


def name_of(row: str) -> str:
    """Returns the name of a row without its scope."""
    return row.rpartition("/")[2]


def axis_problems(config: TrainConfig) -> Iterator[str]:
    """Yields mesh axes that only one of mesh and rules has."""
    rules = config.rules
    sizes = config.mesh.sizes()
    for axis, size in sizes.items():
        if axis not in rules.order():
            yield (
                f"{setting(axis, size)}: rules {rules.name!r} declare no mesh axis {axis!r}; "
                f"declare it, as in rules.replace(axes={{{axis!r}: 'auto'}})"
            )
    for axis in rules.axes:
        if axis not in sizes:
            yield (
                f"rules {rules.name!r} declare the mesh axis {axis!r}, which this mesh lacks; give "
                f"it a size: mesh.extra={axis}=2"
            )
    for axis in sorted(rules.mesh_axes() - set(rules.order())):
        kind, row = _first_row_with(rules, axis)
        yield (
            f"rules.{kind}[{row!r}]: mesh axis {axis!r} is neither a standard mesh axis nor "
            f"declared in rules.axes{did_you_mean(axis, rules.order())}"
        )


def _first_row_with(rules: Rules, axis: str) -> tuple[Kind, str]:
    for kind in get_args(Kind):
        for row, entry in rules.column(kind).items():
            if axis in axes_of(entry):
                return kind, row
    raise KeyError(axis)


def unused_axis_problems(config: TrainConfig) -> Iterator[str]:
    """Yields mesh axes that shard no activation: their devices would repeat the same work, and XLA
    would permute arrays along them.
    """
    rules = config.rules
    used_axes = _activation_axes(rules)
    for axis, size in config.mesh.sizes().items():
        # pipeline shards the layers, not an activation.
        if size <= 1 or axis == "pipeline" or axis not in rules.order():
            continue
        if axis == "expert" and not getattr(config.model, "has_experts", False):
            continue  # see `expert_problems`
        if axis not in used_axes:
            yield (
                f"{setting(axis, size)}, but rules {rules.name!r} shard no activation over {axis}; "
                f"set {setting(axis, 1)} or {_rules_with(rules, axis)}"
            )


def _rules_with(rules: Rules, axis: str) -> str:
    """Returns a suggestion of rules that shard an activation over a mesh axis."""
    fitting = [name for name, preset in PRESETS.items() if axis in _activation_axes(preset)]
    if not fitting:
        return f"a row of rules.activations to {axis!r}"
    base = rules.name.removesuffix(" (changed)")
    return f"rules such as {' or '.join(f'{base}+{name}' for name in fitting[:2])}"


def _activation_axes(rules: Rules) -> set[str]:
    return {axis for entry in rules.activations.values() for axis in axes_of(entry)}


def row_problems(config: TrainConfig) -> Iterator[str]:
    """Yields rows that shard a dimension which must not be sharded that way: training would be
    wrong, not only slow.
    """
    yield from _weight_row_problems(config.rules, "params")
    yield from _weight_row_problems(config.rules, "gathered")
    entry = config.rules.activations.get("batch")
    if "pipeline" in axes_of(entry):
        yield (
            f"rules.activations['batch']={entry!r}: every stage needs the full batch; remove "
            "'pipeline'"
        )
    for row in config.rules.activations:
        yield from _activation_row_problems(config.rules, row)


def _weight_row_problems(rules: Rules, kind: Kind) -> Iterator[str]:
    for row, entry in (getattr(rules, kind) or {}).items():
        for axis in axes_of(entry):
            is_stage = (row, axis) == ("layers", "pipeline")
            if axis not in rules.manual_axes() or is_stage:
                continue
            if name_of(row) in (FLAT, "experts"):  # see `flat_problems` and `expert_problems`
                continue
            yield (
                f"rules.{kind}[{row!r}]={entry!r}: weights are replicated over {axis}; "
                "to shard them over replicas use the mesh axis 'fsdp'"
            )


def _activation_row_problems(rules: Rules, row: str) -> Iterator[str]:
    entry = rules.activations[row]
    name = name_of(row)
    manual_axes = rules.manual_axes()
    if name == "head_dim" and entry:
        yield f"rules.activations[{row!r}]={entry!r}: attention needs full heads; set it to None"
        return
    if name == "seq":
        for axis in axes_of(entry):
            if axis in rules.context:
                continue
            fix = "shard it over 'sequence'"
            if axis in manual_axes - {ISLAND, "pipeline", "data"}:
                fix = f"set rules.context[{axis!r}] to gather, ulysses or ring"
            yield (
                f"rules.activations[{row!r}]={entry!r}: attention needs all keys, and no rule says "
                f"how over {axis}; {fix}, or leave {axis!r} out"
            )
        return
    if name in ("batch", "experts"):  # see `expert_problems`
        return
    allowed = rules.context if name == "seq_resid" else ()  # see `context_problems`
    refused = [axis for axis in axes_of(entry) if axis in manual_axes and axis not in allowed]
    if refused:
        axis = refused[0]
        sharded = "no activation" if axis == "pipeline" else "only the batch"
        yield (
            f"rules.activations[{row!r}]={entry!r}: "
            f"{sharded} is sharded over the axis {axis}; remove {axis!r}"
        )
