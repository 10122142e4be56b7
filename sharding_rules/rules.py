"""A sharding strategy is a table: logical axis -> mesh axes, with one column per kind of tensor.

A row may be scoped: "moe/mlp" is the axis mlp in the part of the model that is called moe, and
"mlp" is that axis in all other parts. `Shard.within` makes the scoped names. There is one level of
scopes.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal, get_args

from jax.sharding import Mesh, NamedSharding, PartitionSpec

from sharding_rules.mesh import AXES, ISLAND, MANUAL

Kind = Literal["params", "gathered", "gradients", "optimizer", "activations"]
MeshAxes = str | tuple[str, ...] | None
Column = Mapping[str, MeshAxes]
AxisType = Literal["auto", "manual"]
Reduction = Literal["auto", "float32", "bfloat16", "int8"]
Exchange = Literal["gather", "ulysses", "ring"]

FLAT = "flat"
"""The row of flat vectors: see `Rules.params` and `Rules.optimizer`."""
TABLES = "tables"
"""The scope of parameters outside of the layers, such as the embedding and the output head: the row
"tables/embed" is that axis in them."""
_UNSCOPED = {
    "batch": "the whole model has one batch",
    "layers": "all segments are divided into the same stages",
}


class ShardingRuleError(ValueError):
    """Raised for a rule with an unknown logical or mesh axis, or that cannot shard a tensor. The
    message says what would work.
    """


@dataclasses.dataclass(frozen=True)
class Rules:
    """The mesh axes of every logical axis. There are no defaults: a logical axis without a row is
    an error.

    An experiment changes a row: `rules.replace(params={"mlp": None})`.
    """

    name: str
    """A name for logs and checkpoints."""
    params: Column
    """Weights as stored between steps.

    The row "flat", if there is one, has the mesh axes over which each layer gathers its matrices
    from the optimizer's flat vectors.
    """
    activations: Column
    """Activations. The row "batch" has the mesh axes that the batch is sharded over."""
    gathered: Column | None = None
    """Weights while a layer uses them. None: as `params`, without the axes of the batch, over which
    they are gathered (FSDP)."""
    gradients: Column | None = None
    """Gradients as the optimizer receives them. None: as `params`."""
    optimizer: Column | None = None
    """Optimizer state, such as Adam's moments. None: as `params`.

    The row "flat", if there is one, has the mesh axes that shard flat vectors of many weights; no
    dimension needs to divide by them.
    """
    axes: Mapping[str, AxisType] = dataclasses.field(default_factory=dict)
    """Additional mesh axes that these rules use; `MeshConfig.extra` has their sizes.

    auto: XLA shards along the axis and inserts the collectives, as along fsdp and tensor. manual:
    the axis shards the batch or the sequence only, weights are replicated along it, and gradients
    are summed over it once a step, as along data.
    """
    context: Mapping[str, Exchange] = dataclasses.field(default_factory=dict)
    """How attention sees all keys, for each mesh axis that shards the sequence (the row "seq" of
    activations): context parallelism.

    gather: every device gathers the keys and values of all tokens. ulysses: an all-to-all gives
    each device all tokens of a part of the heads (DeepSpeed-Ulysses, arXiv 2309.14509). ring: keys
    and values travel from device to device, beside the attention of those that came before (arXiv
    2310.01889). One axis may have gather or ring, and further axes inside of it ulysses (USP, arXiv
    2405.07719).
    """
    reduction: Reduction = "auto"
    """The type in which gradients of matrices are summed over devices. Those of vectors are always
    summed in float32.

    auto: float32 along the axes that a step is manual over (data), where gradients are summed once
    a step; the type of the matmul along those that XLA handles (fsdp), where every microbatch sums.
    float32: along all axes, twice the bytes. bfloat16: along all, half of them. int8: along the
    axes that a step is manual over, in blocks with a scale each and with error feedback, a quarter
    of the bytes; along others as auto.
    """
    node_axis: str = ""
    """The mesh axis along which replicas are in one node: gradients of matrices are
    reduce-scattered along it, summed across nodes, and gathered along it, so that each device sends
    its own part of them across nodes alone. Empty: one sum over all replicas.
    """

    def __post_init__(self) -> None:
        # Tables of its own, so that an experiment that changes a row in place changes no other
        # rules.
        for field in dataclasses.fields(self):
            table = getattr(self, field.name)
            if isinstance(table, dict):
                object.__setattr__(self, field.name, dict(table))
        if "batch" not in self.activations:
            raise ShardingRuleError(
                "rules.activations needs a row 'batch': the mesh axes that shard the batch, or None"
            )
        for axis, kind in self.axes.items():
            if axis in AXES:
                raise ShardingRuleError(
                    f"rules.axes[{axis!r}]: every mesh has an axis of that name; choose another"
                )
            if kind not in get_args(AxisType):
                raise ShardingRuleError(
                    f"rules.axes[{axis!r}]={kind!r}: a mesh axis is one of "
                    f"{', '.join(get_args(AxisType))}"
                )
        for axis, exchange in self.context.items():
            if exchange not in get_args(Exchange):
                known = did_you_mean(str(exchange), get_args(Exchange))
                raise ShardingRuleError(
                    f"rules.context[{axis!r}]={exchange!r}: attention has no such exchange{known}"
                )
        if self.reduction not in get_args(Reduction):
            known = did_you_mean(str(self.reduction), get_args(Reduction))
            raise ShardingRuleError(
                f"rules.reduction={self.reduction!r}: gradients cannot be summed in this "
                f"type{known}"
            )
        if self.node_axis and self.node_axis not in self.manual_axes() - {ISLAND, "pipeline"}:
            along = ", ".join(
                axis for axis in self.order() if axis in self.manual_axes() - {ISLAND, "pipeline"}
            )
            raise ShardingRuleError(
                f"rules.node_axis={self.node_axis!r}: gradients are not summed along it once a "
                f"step; known: {along}"
            )
        for kind in get_args(Kind):
            for row, entry in (getattr(self, kind) or {}).items():
                if not (
                    entry is None
                    or isinstance(entry, str)
                    or (isinstance(entry, tuple) and all(isinstance(a, str) for a in entry))
                ):
                    raise ShardingRuleError(
                        f"rules.{kind}[{row!r}]={entry!r}: expected a mesh axis, a tuple of them, "
                        "or None"
                    )
        for row in self._rows():
            scope, _, name = row.rpartition("/")
            if "/" in scope or (not (scope and name) and "/" in row):
                raise ShardingRuleError(
                    f"rules have a row {row!r}: a row is a logical axis or scope/axis, as in "
                    "'moe/mlp'"
                )
            if scope and name in _UNSCOPED:
                raise ShardingRuleError(
                    f"rules have a row {row!r}: {_UNSCOPED[name]}; leave the scope out"
                )

    def column(self, kind: Kind) -> Column:
        """The rows for one kind of tensor, with the defaults of the optional columns filled in."""
        if (column := getattr(self, kind)) is not None:
            return column
        if kind == "gathered":
            batch = axes_of(self.activations["batch"])
            return {
                name: tuple(a for a in axes_of(entry) if a not in batch) or None
                for name, entry in self.params.items()
            }
        return self.params

    def own_rows(self, kind: Kind) -> Column:
        """The rows from which a column of its own is made where the rules leave it out: as
        `column`, but gradients have no flat vectors, whose row is the optimizer's.
        """
        column = self.column(kind)
        if kind != "gradients" or self.gradients is not None:
            return column
        return {row: entry for row, entry in column.items() if row.rpartition("/")[2] != FLAT}

    def row(self, kind: Kind, logical: str) -> str | None:
        """The row of a column for a logical axis: its own, or that of its name without the scope.
        None: there is neither.
        """
        return row_of(self.column(kind), logical)

    def scopes(self) -> set[str]:
        """The scopes of all rows."""
        return {scope for scope, slash, _ in (row.partition("/") for row in self._rows()) if slash}

    def manual_axes(self) -> frozenset[str]:
        """The mesh axes that a training step is manual over: it sums gradients over them once
        itself. XLA handles all others.
        """
        return MANUAL | {axis for axis, kind in self.axes.items() if kind == "manual"}

    def order(self) -> tuple[str, ...]:
        """Every mesh axis that these rules may use, outermost first."""
        return (*AXES, *self.axes)

    def replace(
        self,
        name: str | None = None,
        *,
        axes: Mapping[str, AxisType] | None = None,
        context: Mapping[str, Exchange] | None = None,
        reduction: Reduction | None = None,
        node_axis: str | None = None,
        **columns: Column,
    ) -> Rules:
        """A copy with some rows changed or added: `rules.replace(params={"mlp": None},
        activations={"mlp": None})`.

        axes: additional mesh axes to declare. context: changed or added, too. reduction, node_axis:
        None: unchanged.
        """
        if not (name is None or isinstance(name, str)):
            raise ShardingRuleError(
                f"replace({name!r}) names no column; write replace(params={name!r}, "
                f"activations={name!r})"
            )
        if unknown := sorted(set(columns) - set(get_args(Kind))):
            near = difflib.get_close_matches(unknown[0], get_args(Kind), n=1)
            hint = (
                f"; did you mean {near[0]!r}?"
                if near and len(unknown) == 1
                else f"; columns are {', '.join(get_args(Kind))}"
            )
            raise ShardingRuleError(f"rules have no column {' or '.join(map(repr, unknown))}{hint}")
        changed = {kind: {**self.own_rows(kind), **rows} for kind, rows in columns.items()}  # pyright: ignore[reportArgumentType]
        changed |= {
            "axes": {**self.axes, **(axes or {})},
            "context": {**self.context, **(context or {})},
        }
        changed |= {
            "reduction": reduction or self.reduction,
            "node_axis": self.node_axis if node_axis is None else node_axis,
        }
        return dataclasses.replace(self, name=name or f"{self.name} (changed)", **changed)

    def spec(
        self,
        kind: Kind,
        axes: Sequence[str | None],
        shape: Sequence[int] = (),
        mesh: Mesh | None = None,
        name: str = "tensor",
    ) -> PartitionSpec:
        """The PartitionSpec of a tensor whose dimensions are named `axes` (None: never sharded).
        Scoped names fall back to plain ones.

        Raises ShardingRuleError for an unknown logical axis, a mesh axis on two dimensions, a mesh
        axis that `mesh` does not have, and, if `shape` is given, a size that does not divide.
        """
        column = self.column(kind)
        owner: dict[str, str] = {}
        entries: list[MeshAxes] = []
        if shape and len(shape) != len(axes):
            raise ShardingRuleError(
                f"{name}{tuple(axes)}: {len(axes)} logical axes for {len(shape)} dimensions "
                f"{tuple(shape)}"
            )
        for dim, logical in enumerate(axes):
            if logical is None:
                entries.append(None)
                continue
            row = row_of(column, logical)
            if row is None:
                raise ShardingRuleError(
                    f"{name}{tuple(axes)}: no {kind} rule for logical axis "
                    f"{logical!r}{did_you_mean(logical, column)}"
                )
            n_shards = 1
            for axis in axes_of(column[row]):
                if axis in owner:
                    raise ShardingRuleError(
                        f"{name}{tuple(axes)}: mesh axis {axis!r} shards both {owner[axis]!r} and "
                        f"{row!r}; set one of them to None in rules.{kind}"
                    )
                owner[axis] = row
                if mesh is not None and axis not in mesh.shape:
                    raise ShardingRuleError(
                        f"rules.{kind}[{row!r}]: mesh axis {axis!r} is not in mesh "
                        f"{dict(mesh.shape)}"
                    )
                n_shards *= mesh.shape[axis] if mesh is not None else 1
            if shape and shape[dim] % n_shards:
                raise ShardingRuleError(
                    f"{name}: dimension {dim} ({logical!r}, size {shape[dim]}) does not divide "
                    f"over {column[row]!r} ({n_shards} ways)"
                )
            entries.append(column[row])
        return PartitionSpec(*entries)

    def sharding(
        self,
        kind: Kind,
        axes: Sequence[str | None],
        mesh: Mesh,
        shape: Sequence[int] = (),
        name: str = "tensor",
    ) -> NamedSharding:
        """`spec` as a NamedSharding. Raises as it does."""
        return NamedSharding(mesh, self.spec(kind, axes, shape, mesh, name))

    def mesh_axes(self) -> set[str]:
        """All mesh axes that some row uses."""
        columns = (getattr(self, kind) or {} for kind in get_args(Kind))
        return {axis for column in columns for entry in column.values() for axis in axes_of(entry)}

    def as_dict(self) -> dict[str, Any]:
        """The rules as plain data for JSON."""
        plain = {kind: getattr(self, kind) for kind in get_args(Kind)}
        return {
            "name": self.name,
            **{
                k: None
                if column is None
                else {row: list(axes_of(entry)) for row, entry in column.items()}
                for k, column in plain.items()
            },
            **({"axes": dict(self.axes)} if self.axes else {}),
            **({"context": dict(self.context)} if self.context else {}),
            **({"reduction": self.reduction} if self.reduction != "auto" else {}),
            **({"node_axis": self.node_axis} if self.node_axis else {}),
        }

    def _rows(self) -> list[str]:
        """The rows of all columns that are given, each once, in their order there."""
        return list(
            dict.fromkeys(row for kind in get_args(Kind) for row in getattr(self, kind) or ())
        )

    def __hash__(self) -> int:
        return hash(repr(self.as_dict()))


def axes_of(entry: MeshAxes) -> tuple[str, ...]:
    """The mesh axes of a table entry as a tuple."""
    return (entry,) if isinstance(entry, str) else entry or ()


def row_of(column: Column, logical: str) -> str | None:
    """The row of a column for a logical axis, "moe/mlp" before "mlp"; None if there is none."""
    plain = logical.rpartition("/")[2]
    return logical if logical in column else plain if plain in column else None


def unknown_scopes(rules: Rules, known: Collection[str]) -> list[str]:
    """A sentence for each scope of the rules that the model does not have, so that its rows would
    have no effect.
    """
    has = f"the model has {', '.join(map(repr, sorted(known))) or 'none'}"
    unknown = sorted(rules.scopes() - set(known))
    rows = {
        scope: sorted(row for row in rules._rows() if row.startswith(f"{scope}/"))
        for scope in unknown
    }
    return [
        (
            f"rules have the scope {scope!r} ({', '.join(rows[scope])}), which the model does not "
            "have; "
        )
        + (
            f"did you mean {near[0]!r}?"
            if (near := difflib.get_close_matches(scope, known, n=1))
            else has
        )
        for scope in unknown
    ]


def did_you_mean(word: str, known: Sequence[str] | Column) -> str:
    """The end of an error message: the known name nearest to an unknown one, or all known names."""
    # in a scoped word, the name or the scope may be wrong
    tries = dict.fromkeys((word.rpartition("/")[2], word))
    near = next(
        filter(
            None, (difflib.get_close_matches(each, list(known), n=1, cutoff=0.6) for each in tries)
        ),
        [],
    )
    return f"; did you mean {near[0]!r}?" if near else f"; known: {', '.join(sorted(known))}"
