"""A sharding strategy is a table: logical axis -> mesh axes, with one column per kind of tensor."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

from jax.sharding import Mesh, NamedSharding, PartitionSpec

Kind = Literal["params", "gathered", "gradients", "optimizer", "activations"]
MeshAxes = str | tuple[str, ...] | None
Column = Mapping[str, MeshAxes]


class ShardingRuleError(ValueError):
    """A rule that names no logical axis, no mesh axis, or cannot shard the tensor at hand. The text says which, and what would work."""


@dataclasses.dataclass(frozen=True)
class Rules:
    """Mesh axes for every logical axis. Nothing is implied: a logical axis without a row is an error.

    An experiment is a changed row: `rules.replace(params={"mlp": None})`.
    """

    name: str
    """Shown in logs and stored with checkpoints."""
    params: Column
    """The master weights, as they are stored."""
    activations: Column
    """What flows through the model. Its row "batch" says which mesh axes the batch is cut over."""
    gathered: Column | None = None
    """A weight at the moment a layer uses it. None: as `params`, less the axes that cut the batch (they are gathered, which is FSDP)."""
    gradients: Column | None = None
    """Gradients when they reach the optimizer. None: as `params`."""
    optimizer: Column | None = None
    """Adam's moments. None: as `params`."""

    def __post_init__(self) -> None:
        if "batch" not in self.activations:
            raise ShardingRuleError("rules.activations needs a row 'batch': the mesh axes that cut the batch, or None")

    def column(self, kind: Kind) -> Column:
        """The rows for one kind of tensor, with the defaults of the optional columns filled in."""
        if (column := getattr(self, kind)) is not None:
            return column
        if kind == "gathered":
            batch = axes_of(self.activations["batch"])
            return {name: tuple(a for a in axes_of(entry) if a not in batch) or None for name, entry in self.params.items()}
        return self.params

    def replace(self, name: str | None = None, **columns: Column) -> Rules:
        """A copy with some rows changed or added: `rules.replace(params={"mlp": None}, activations={"mlp": None})`."""
        if unknown := set(columns) - set(get_args(Kind)):
            raise ShardingRuleError(
                f"rules have no column {' or '.join(map(repr, sorted(unknown)))}; columns are {', '.join(get_args(Kind))}"
            )
        changed = {kind: {**self.column(kind), **rows} for kind, rows in columns.items()}  # pyright: ignore[reportArgumentType]
        return dataclasses.replace(self, name=name or f"{self.name} (changed)", **changed)

    def spec(
        self, kind: Kind, axes: Sequence[str | None], shape: Sequence[int] = (), mesh: Mesh | None = None, name: str = "tensor"
    ) -> PartitionSpec:
        """The PartitionSpec of a tensor whose dimensions are named `axes` (None: never sharded).

        Raises ShardingRuleError for an unknown logical axis, one mesh axis on two dimensions, a mesh axis that `mesh` does not have,
        and, where `shape` is given, a size that does not divide.
        """
        column = self.column(kind)
        owner: dict[str, str] = {}
        entries: list[MeshAxes] = []
        if shape and len(shape) != len(axes):
            raise ShardingRuleError(f"{name}{tuple(axes)}: {len(axes)} logical axes for {len(shape)} dimensions {tuple(shape)}")
        for dim, logical in enumerate(axes):
            if logical is None:
                entries.append(None)
                continue
            if logical not in column:
                raise ShardingRuleError(f"{name}{tuple(axes)}: no {kind} rule for logical axis {logical!r}{did_you_mean(logical, column)}")
            ways = 1
            for axis in axes_of(column[logical]):
                if axis in owner:
                    raise ShardingRuleError(
                        f"{name}{tuple(axes)}: mesh axis {axis!r} shards both {owner[axis]!r} and {logical!r}; "
                        f"set one of them to None in rules.{kind}"
                    )
                owner[axis] = logical
                if mesh is not None and axis not in mesh.shape:
                    raise ShardingRuleError(f"rules.{kind}[{logical!r}]: mesh axis {axis!r} is not in mesh {dict(mesh.shape)}")
                ways *= mesh.shape[axis] if mesh is not None else 1
            if shape and shape[dim] % ways:
                raise ShardingRuleError(
                    f"{name}: dimension {dim} ({logical!r}, size {shape[dim]}) does not divide over {column[logical]!r} ({ways} ways)"
                )
            entries.append(column[logical])
        return PartitionSpec(*entries)

    def sharding(
        self, kind: Kind, axes: Sequence[str | None], mesh: Mesh, shape: Sequence[int] = (), name: str = "tensor"
    ) -> NamedSharding:
        return NamedSharding(mesh, self.spec(kind, axes, shape, mesh, name))

    def mesh_axes(self) -> set[str]:
        """Every mesh axis that some rule uses."""
        columns = (getattr(self, kind) or {} for kind in get_args(Kind))
        return {axis for column in columns for entry in column.values() for axis in axes_of(entry)}

    def as_dict(self) -> dict[str, Any]:
        """Plain and JSON-ready."""
        plain = {kind: getattr(self, kind) for kind in get_args(Kind)}
        return {"name": self.name} | {
            kind: None if column is None else {row: list(axes_of(entry)) for row, entry in column.items()} for kind, column in plain.items()
        }

    def __hash__(self) -> int:
        return hash(repr(self.as_dict()))


def axes_of(entry: MeshAxes) -> tuple[str, ...]:
    """The mesh axes of one table entry, as a tuple."""
    return (entry,) if isinstance(entry, str) else entry or ()


def did_you_mean(word: str, known: Sequence[str] | Column) -> str:
    near = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f"; did you mean {near[0]!r}?" if near else f"; known: {', '.join(sorted(known))}"
