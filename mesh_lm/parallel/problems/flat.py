"""Rows of flat vectors (`mesh_lm.parallel.flat`): they belong in the optimizer's column, and in
that of params if layers gather them, over axes of replicas.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import get_args

from mesh_lm.config import TrainConfig
from mesh_lm.parallel.problems.rows import name_of
from sharding_rules import ISLAND, Rules, axes_of, did_you_mean, row_of
from sharding_rules.rules import FLAT, Kind


def flat_problems(config: TrainConfig) -> Iterator[str]:
    """Yields rows of flat vectors that stand in a wrong column, or name wrong axes."""
    rules = config.rules
    for kind in get_args(Kind):
        for row, entry in (getattr(rules, kind) or {}).items():
            setting = f"rules.{kind}[{row!r}]={entry!r}"
            if kind == "optimizer" and name_of(row) != FLAT and row not in rules.params:
                suggestion = did_you_mean(name_of(row), [FLAT])
                if suggestion.endswith("?"):
                    yield f"{setting}: no parameter has such an axis{suggestion}"
            if name_of(row) != FLAT or not axes_of(entry):
                continue
            if kind == "params":
                yield from _gathering_problems(config, row)
                # The optimizer's row must name the same axes, and is checked itself.
                if rules.optimizer is None:
                    yield from _axis_problems(rules, setting, axes_of(entry))
            elif kind == "optimizer":
                yield from _axis_problems(rules, setting, axes_of(entry))
            else:
                yield f"{setting}: flat vectors are the optimizer's; set rules.optimizer[{row!r}]"


def _axis_problems(rules: Rules, setting: str, axes: tuple[str, ...]) -> Iterator[str]:
    """Yields why a flat vector cannot be sharded over these axes."""
    replica_axes = rules.manual_axes() - {ISLAND}
    repeated = [axis for axis in axes if axes.count(axis) > 1]
    auto_axes = [axis for axis in axes if axis in rules.order() and axis not in replica_axes]
    layers = rules.params.get("layers")
    if repeated:
        yield f"{setting}: has {repeated[0]!r} twice; name each mesh axis once"
    elif auto_axes:
        axis_names = ", ".join(axis for axis in rules.order() if axis in replica_axes)
        yield (
            f"{setting}: flat vectors are sharded over replicas, whose axes are {axis_names}; "
            f"remove {auto_axes[0]!r}"
        )
    elif layers and axes_of(layers) != ("pipeline",):
        yield (
            f"{setting}: each flat vector holds one layer, but rules.params['layers']={layers!r}; "
            "set that to 'pipeline'"
        )


def _gathering_problems(config: TrainConfig, row: str) -> Iterator[str]:
    """Yields settings with which layers cannot gather their own matrices from flat vectors
    (`mesh_lm.parallel.zero3`).
    """
    column = config.rules.column("optimizer")
    entry = config.rules.params[row]
    setting = f"rules.params[{row!r}]={entry!r}"
    axes = axes_of(entry)
    optimizer_row = row_of(column, row)
    optimizer_axes = axes_of(column[optimizer_row]) if optimizer_row else ()
    if axes != tuple(axis for axis in optimizer_axes if axis != "pipeline"):
        yield (
            f"{setting}: layers gather what the optimizer keeps, and "
            f"rules.optimizer[{row!r}]={optimizer_axes or None!r}; set rules.optimizer[{row!r}] to "
            f"{('pipeline', *axes)!r}"
        )
    if config.model.problems():
        return
    scope = row.rpartition("/")[0]
    for segment in config.model.stack().segments:
        if segment.remat == "offload" and scope in ("", segment.name):
            yield (
                f"{setting}: layers that gather their matrices cannot offload; set model.remat (of "
                f"{segment.name!r}) to save_names or full"
            )
