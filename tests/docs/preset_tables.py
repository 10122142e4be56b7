"""The tables of presets in docs/sharding.md: tests/docs/made.py writes them into the page."""

from __future__ import annotations

from typing import Any

from mesh_lm.parallel.flat import FLAT
from sharding_rules import PRESETS, Rules, axes_of
from sharding_rules.rules import Column, Kind
from tests.docs.markdown import table

ALSO = {
    "distributed": "Megatron-LM's distributed optimizer",
    "fsdp": "ZeRO-3; XLA gathers each layer's weights",
    "zero3": "ZeRO-3; gathers the next layer's weights",
    "hsdp": "FSDP, replicated over `data`",
    "megatron": "heads, mlp and vocab over `tensor`",
    "megatron_sp": "also the residual stream's sequence over `tensor`",
    "megatron_2d": "heads and mlp over `tensor`, `embed` over `tensor_y`",
    "context_gather": "attention gathers all keys over `sequence`",
    "ulysses": "attention exchanges sequences for heads",
    "ring": "keys travel around the devices",
    "usp": "a ring over `sequence`, Ulysses over `ulysses`",
    "experts_gather": "experts over `expert`, which gathers their tokens",
    "experts_padded": "experts over `expert`, which exchanges their tokens",
    "by_node": "gradients are summed inside nodes first",
    "diloco": "islands average their weights every H steps",
}
"""Preset -> what the axes of its columns do not say."""


def summary() -> str:
    """The mesh axes over which each preset shards what; gradients like the optimizer state where
    that is flat."""
    rows = []
    for name, rules in PRESETS.items():
        flat = rules.column("optimizer").get(FLAT) is not None
        kinds: tuple[Kind, ...] = ("params", "optimizer" if flat else "gradients", "optimizer")
        batch = " x ".join(f"`{axis}`" for axis in axes_of(rules.activations["batch"]))
        rows.append(
            [f"`{name}`", *(_used(rules, kind) for kind in kinds), batch, ALSO.get(name, "")]
        )
    return table(["preset", "weights", "gradients", "optimizer state", "batch", "notes"], rows)


def _used(rules: Rules, kind: Kind) -> str:
    axes = {axis for entry in rules.column(kind).values() for axis in axes_of(entry)} - {"pipeline"}
    return " x ".join(f"`{axis}`" for axis in sorted(axes)) or "replicated"


def rows() -> str:
    """The rows that are not None, of the columns that differ from `params`; without `layers`, which
    is the same in all presets.

    Presets with the same rows, which differ in how attention exchanges keys, are in one line.
    """
    lines: dict[tuple[str, ...], list[str]] = {}
    for name, rules in PRESETS.items():
        params = rules.column("params")
        others: tuple[Kind, ...] = ("gradients", "optimizer")
        cells = [
            "" if (column := rules.column(kind)) == params else _cell(column) for kind in others
        ]
        lines.setdefault((_cell(params), *cells, _cell(rules.column("activations"))), []).append(
            f"`{name}`"
        )
    named = ([", ".join(names), *cells] for cells, names in lines.items())
    return table(["preset", "`params`", "`gradients`", "`optimizer`", "`activations`"], named)


def _cell(column: Column) -> str:
    """As `mlp`, `heads` -> `tensor`: the rows of one entry together."""
    named: dict[Any, list[str]] = {}
    for logical, entry in column.items():
        if axes_of(entry) and logical != "layers":
            named.setdefault(axes_of(entry), []).append(f"`{logical}`")
    return (
        "; ".join(
            f"{', '.join(those)} -> {', '.join(f'`{axis}`' for axis in axes)}"
            for axes, those in named.items()
        )
        or "none"
    )


TABLES = {"presets": summary, "rows of the presets": rows}
