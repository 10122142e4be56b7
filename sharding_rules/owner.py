"""The word `owner` of a product: gradients and optimizer state are divided by layers, so that a
device has complete matrices of its own layers. An optimizer that works on complete matrices (Muon)
then sends nothing.
"""

from __future__ import annotations

from sharding_rules.rules import FLAT, TABLES, Column, Kind, Rules, ShardingRuleError, axes_of

OWNER = "owner"
_STAY = ("layers", "experts", "vocab", "position")
"""Rows that stay as they are: experts are a batch of matrices, and no layer has the last two."""


def owner_axes(rules: Rules, kind: Kind = "optimizer") -> tuple[str, ...]:
    """Returns the mesh axes that divide the layers of a pipeline stage among their owners, in the
    order of the row; empty: none do.
    """
    first, *others = axes_of(rules.column(kind).get("layers")) or ("pipeline",)
    return tuple(others) if first == "pipeline" else ()


def with_owners(rules: Rules, name: str) -> Rules:
    """Returns rules of this name, with `layers` over every mesh axis that shards the optimizer
    state of the layers' matrices, and the matrices themselves complete.

    Parameters outside of the layers keep their rows. Raises ShardingRuleError for flat vectors, and
    for rules that shard no matrix.
    """
    state = rules.column("optimizer")
    if any(row.rpartition("/")[2] == FLAT and entry for row, entry in state.items()):
        raise ShardingRuleError(
            f"rules {name!r}: {OWNER} gives each device complete matrices, and these rules keep "
            "the optimizer state in flat vectors, of which a device has parts of several matrices; "
            "use zero2, fsdp or hsdp instead"
        )
    divided: Column = {
        row: entry
        for row, entry in state.items()
        if row not in _STAY and "/" not in row and axes_of(entry)
    }
    used_axes = {axis for entry in divided.values() for axis in axes_of(entry)}
    owner_axes = [axis for axis in rules.order() if axis in used_axes]
    if not owner_axes:
        raise ShardingRuleError(
            f"rules {name!r}: {OWNER} divides the optimizer state by layers over the axes that "
            "shard its matrices, and these rules shard none; multiply with zero2, fsdp or hsdp"
        )
    layers = tuple(dict.fromkeys((*axes_of(state.get("layers")), *owner_axes)))
    rows: Column = {"layers": layers, **dict.fromkeys(divided)}
    # Parameters outside of the layers are in the scope of tables.
    for row, entry in divided.items():
        rows[f"{TABLES}/{row}"] = state.get(f"{TABLES}/{row}", entry)
    # Gradients come to the owner, of the tables as of all other parameters.
    return rules.replace(name, gradients={**state, **rows}, optimizer=rows)
