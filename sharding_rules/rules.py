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
TokenExchange = Literal["gather", "padded", "ragged"]

FLAT = "flat"
"""The row of flat vectors: see `Rules.params` and `Rules.optimizer`."""

TABLES = "tables"
"""The scope of parameters outside of the layers, such as the embedding and the output head.

The row "tables/embed" is the logical axis embed in them.
"""

_UNSCOPED = {
    "batch": "the whole model has one batch",
    "layers": "all segments are divided into the same stages",
}


class ShardingRuleError(ValueError):
    """Raised for a rule with an unknown axis, or that cannot shard a tensor.

    The message says what would work.
    """


@dataclasses.dataclass(frozen=True)
class Rules:
    """The mesh axes that shard every logical axis, for each kind of tensor.

    A column maps a logical axis, such as "mlp", to the mesh axis that shards it, to several mesh
    axes, outermost first, or to None: replicated. There are no defaults: a logical axis without a
    row is an error. An experiment changes a row: `rules.replace(params={"mlp": None})`.
    """

    name: str
    """A name for logs and checkpoints."""

    params: Column
    """Weights as stored between steps.

    The row "flat", if there is one, has the mesh axes over which each layer gathers its matrices
    from the optimizer's flat vectors.
    """

    activations: Column
    """Activations. The row "batch" has the mesh axes that shard the batch."""

    gathered: Column | None = None
    """Weights while a layer uses them.

    None: as `params`, without the axes of the batch, over which they are gathered (FSDP). Experts
    are not gathered over axes with an exchange.
    """

    gradients: Column | None = None
    """Gradients as the optimizer receives them. None: as `params`."""

    optimizer: Column | None = None
    """Optimizer state, such as Adam's moments. None: as `params`.

    The row "flat", if there is one, has the mesh axes that shard flat vectors of many weights; no
    dimension needs to divide by them.
    """

    axes: Mapping[str, AxisType] = dataclasses.field(default_factory=dict)
    """Additional mesh axes that these rules use; `MeshConfig.extra` has their sizes.

    auto: XLA shards along the axis and inserts the collectives, as along fsdp and tensor.
    manual: the axis shards the batch or the sequence only. Weights are replicated along it, and
    gradients are summed over it once a step, as along data.
    """

    context: Mapping[str, Exchange] = dataclasses.field(default_factory=dict)
    """Context parallelism: how attention sees all keys, for each mesh axis that shards "seq".

    gather: every device gathers the keys and values of all tokens.
    ulysses: an all-to-all gives each device all tokens of a part of the heads
    (DeepSpeed-Ulysses, arXiv 2309.14509).
    ring: keys and values travel from device to device, beside the attention to those that arrived
    earlier (arXiv 2310.01889).

    One axis may have gather or ring, and further axes inside of it ulysses (USP, arXiv 2405.07719).
    """

    exchange: Mapping[str, TokenExchange] = dataclasses.field(default_factory=dict)
    """Expert parallelism: how tokens reach the devices that hold their experts, for each mesh axis
    that shards "experts".

    gather: every device gathers the tokens of all, and the results are reduce-scattered. No routing
    can overflow it.
    padded: an all-to-all sends each token once to each device that holds an expert of it, in a
    buffer of fixed size (`experts.factor`). What does not fit follows in further rounds.
    ragged: an all-to-all sends each token once to each device that holds an expert of it, and
    nothing else. It receives into a buffer for the worst routing, as large as that of gather. For
    GPUs only.

    Neighbouring axes with the same exchange are one exchange over both. Different ones compose,
    outermost first: padded across nodes and gather inside them sends a token to a node once.
    """

    reduction: Reduction = "auto"
    """The type in which gradients of matrices are summed over devices.

    Gradients of vectors are always summed in float32.

    auto: float32 along the axes that a step is manual over (data), where gradients are summed once
    a step; along the axes that XLA handles (fsdp), where every microbatch sums, the type of the
    matmul.
    float32: along all axes, at twice the bytes of bfloat16.
    bfloat16: along all axes, at half the bytes of float32.
    int8: along the axes that a step is manual over, in blocks with a scale each and with error
    feedback, at a quarter of the bytes of float32; along other axes as auto.
    """

    node_axis: str = ""
    """The mesh axis along which replicas are in one node. Empty: one sum over all replicas.

    Gradients of matrices are reduce-scattered along it, summed across nodes, and gathered along it,
    so that each device sends only its own part of them across nodes.
    """

    def __post_init__(self) -> None:
        # Copies, so that an experiment that changes a row in place changes no other rules.
        for field in dataclasses.fields(self):
            table = getattr(self, field.name)
            if isinstance(table, dict):
                object.__setattr__(self, field.name, dict(table))

        if "batch" not in self.activations:
            raise ShardingRuleError(
                "rules.activations needs a row 'batch': the mesh axes that shard the batch, or None"
            )
        for axis, axis_type in self.axes.items():
            if axis in AXES:
                raise ShardingRuleError(
                    f"rules.axes[{axis!r}]: every mesh has an axis of that name; choose another"
                )
            if axis_type not in get_args(AxisType):
                raise ShardingRuleError(
                    f"rules.axes[{axis!r}]={axis_type!r}: a mesh axis is one of the types "
                    f"{', '.join(get_args(AxisType))}"
                )
        for axis, exchange in self.context.items():
            if exchange not in get_args(Exchange):
                hint = did_you_mean(str(exchange), get_args(Exchange))
                raise ShardingRuleError(
                    f"rules.context[{axis!r}]={exchange!r}: attention has no such exchange{hint}"
                )
        for axis, exchange in self.exchange.items():
            if exchange not in get_args(TokenExchange):
                hint = did_you_mean(str(exchange), get_args(TokenExchange))
                raise ShardingRuleError(
                    f"rules.exchange[{axis!r}]={exchange!r}: experts have no such exchange{hint}"
                )
        if self.reduction not in get_args(Reduction):
            hint = did_you_mean(str(self.reduction), get_args(Reduction))
            raise ShardingRuleError(
                f"rules.reduction={self.reduction!r}: gradients cannot be summed in this type{hint}"
            )
        self._require_summed_node_axis()
        for kind in get_args(Kind):
            for row, entry in (getattr(self, kind) or {}).items():
                if not _is_entry(entry):
                    raise ShardingRuleError(
                        f"rules.{kind}[{row!r}]={entry!r}: expected a mesh axis, a tuple of them, "
                        "or None"
                    )
        for row in self._rows():
            _require_valid_row(row)

    def _require_summed_node_axis(self) -> None:
        summed_axes = self.manual_axes() - {ISLAND, "pipeline"}
        if self.node_axis and self.node_axis not in summed_axes:
            axis_names = ", ".join(axis for axis in self.order() if axis in summed_axes)
            raise ShardingRuleError(
                f"rules.node_axis={self.node_axis!r}: gradients are not summed along it once a "
                f"step; known: {axis_names}"
            )

    def column(self, kind: Kind) -> Column:
        """Returns the rows for one kind of tensor, with a default for an optional column."""
        column = getattr(self, kind)
        if column is not None:
            return column
        if kind != "gathered":
            return self.params
        batch = axes_of(self.activations["batch"])
        gathered: dict[str, MeshAxes] = {}
        for row, entry in self.params.items():
            # Experts stay where they are: their tokens are exchanged.
            exchanged = self.exchange if row.rpartition("/")[2] == "experts" else ()
            axes = [axis for axis in axes_of(entry) if axis not in batch or axis in exchanged]
            gathered[row] = tuple(axes) or None
        return gathered

    def own_rows(self, kind: Kind) -> Column:
        """Returns the rows that an explicit column starts from: those of `column`.

        Gradients that default to the rows of parameters have no row "flat", because flat vectors
        belong to the optimizer.
        """
        column = self.column(kind)
        if kind != "gradients" or self.gradients is not None:
            return column
        return {row: entry for row, entry in column.items() if row.rpartition("/")[2] != FLAT}

    def row(self, kind: Kind, logical: str) -> str | None:
        """Returns the row of a column that applies to a logical axis; None if there is none.

        A scoped axis without a row of its own has the row of its name without the scope.
        """
        return row_of(self.column(kind), logical)

    def scopes(self) -> set[str]:
        """Returns the scopes of all rows."""
        return {row.partition("/")[0] for row in self._rows() if "/" in row}

    def manual_axes(self) -> frozenset[str]:
        """Returns the mesh axes that a training step is manual over.

        The step itself sums gradients over them, once. XLA handles all other axes.
        """
        return MANUAL | {axis for axis, axis_type in self.axes.items() if axis_type == "manual"}

    def order(self) -> tuple[str, ...]:
        """Returns every mesh axis that these rules may use, outermost first."""
        return (*AXES, *self.axes)

    def replace(
        self,
        name: str | None = None,
        *,
        axes: Mapping[str, AxisType] | None = None,
        context: Mapping[str, Exchange] | None = None,
        exchange: Mapping[str, TokenExchange] | None = None,
        reduction: Reduction | None = None,
        node_axis: str | None = None,
        **columns: Column,
    ) -> Rules:
        """Returns a copy with some rows changed or added.

        To replicate the MLP over all devices:
        `rules.replace(params={"mlp": None}, activations={"mlp": None})`.

        Args:
          name: the name of the copy; None: the old name, with "(changed)" behind it.
          axes: mesh axes to declare, beside those that are.
          context: exchanges of attention to change or add.
          exchange: exchanges of experts to change or add.
          reduction: None: unchanged.
          node_axis: None: unchanged.
          columns: rows to change or add, by the kind of tensor.

        Raises ShardingRuleError for an unknown column, and for rules that are not valid.
        """
        if not (name is None or isinstance(name, str)):
            raise ShardingRuleError(
                f"replace({name!r}) names no column; write replace(params={name!r}, "
                f"activations={name!r})"
            )
        unknown = sorted(set(columns) - set(get_args(Kind)))
        if unknown:
            near = difflib.get_close_matches(unknown[0], get_args(Kind), n=1)
            if near and len(unknown) == 1:
                hint = f"; did you mean {near[0]!r}?"
            else:
                hint = f"; columns are {', '.join(get_args(Kind))}"
            raise ShardingRuleError(
                f"the rules have no column {' or '.join(map(repr, unknown))}{hint}"
            )
        changes: dict[str, Any] = {
            kind: {**self.own_rows(kind), **rows}  # pyright: ignore[reportArgumentType]
            for kind, rows in columns.items()
        }
        changes["axes"] = {**self.axes, **(axes or {})}
        changes["context"] = {**self.context, **(context or {})}
        changes["exchange"] = {**self.exchange, **(exchange or {})}
        changes["reduction"] = reduction or self.reduction
        changes["node_axis"] = self.node_axis if node_axis is None else node_axis
        return dataclasses.replace(self, name=name or f"{self.name} (changed)", **changes)

    def spec(
        self,
        kind: Kind,
        axes: Sequence[str | None],
        shape: Sequence[int] = (),
        mesh: Mesh | None = None,
        name: str = "tensor",
    ) -> PartitionSpec:
        """Returns the PartitionSpec of a tensor whose dimensions are named `axes`.

        Args:
          kind: the column to look in.
          axes: a logical axis for each dimension; None: the dimension is never sharded. Scoped
            axes without a row of their own have that of the plain axis.
          shape: if given, each size must divide by the shards of its dimension.
          mesh: if given, it must have all mesh axes.
          name: the tensor's name in messages.

        Raises ShardingRuleError for an unknown logical axis, a mesh axis on two dimensions, a mesh
        axis that `mesh` does not have, and a size that does not divide.
        """
        column = self.column(kind)
        if shape and len(shape) != len(axes):
            raise ShardingRuleError(
                f"{name}{tuple(axes)}: {len(axes)} logical axes for {len(shape)} dimensions "
                f"{tuple(shape)}; give one axis, or None, for each"
            )
        row_by_axis: dict[str, str] = {}
        entries: list[MeshAxes] = []
        for dim, logical in enumerate(axes):
            if logical is None:
                entries.append(None)
                continue
            row = row_of(column, logical)
            if row is None:
                raise ShardingRuleError(
                    f"{name}{tuple(axes)}: no {kind} rule for the logical axis {logical!r}"
                    f"{did_you_mean(logical, column)}"
                )
            n_shards = 1
            for axis in axes_of(column[row]):
                if axis in row_by_axis:
                    raise ShardingRuleError(
                        f"{name}{tuple(axes)}: mesh axis {axis!r} shards both "
                        f"{row_by_axis[axis]!r} and {row!r}; set one of them to None in "
                        f"rules.{kind}"
                    )
                row_by_axis[axis] = row
                if mesh is None:
                    continue
                if axis not in mesh.shape:
                    raise ShardingRuleError(
                        f"rules.{kind}[{row!r}]: mesh axis {axis!r} is not an axis of the mesh "
                        f"{dict(mesh.shape)}"
                    )
                n_shards *= mesh.shape[axis]
            if shape and shape[dim] % n_shards:
                raise ShardingRuleError(
                    f"{name}: dimension {dim} ({logical!r}, size {shape[dim]}) "
                    f"does not divide evenly over {column[row]!r} ({n_shards} ways)"
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
        """Returns `spec` as a NamedSharding. Raises ShardingRuleError as `spec` does."""
        return NamedSharding(mesh, self.spec(kind, axes, shape, mesh, name))

    def mesh_axes(self) -> set[str]:
        """Returns all mesh axes that some row uses."""
        used_axes: set[str] = set()
        for kind in get_args(Kind):
            for entry in (getattr(self, kind) or {}).values():
                used_axes.update(axes_of(entry))
        return used_axes

    def as_dict(self) -> dict[str, Any]:
        """Returns the rules as plain data for JSON, without fields that have their defaults."""
        plain: dict[str, Any] = {"name": self.name}
        for kind in get_args(Kind):
            column = getattr(self, kind)
            if column is None:
                plain[kind] = None
            else:
                plain[kind] = {row: list(axes_of(entry)) for row, entry in column.items()}
        if self.axes:
            plain["axes"] = dict(self.axes)
        if self.context:
            plain["context"] = dict(self.context)
        if self.exchange:
            plain["exchange"] = dict(self.exchange)
        if self.reduction != "auto":
            plain["reduction"] = self.reduction
        if self.node_axis:
            plain["node_axis"] = self.node_axis
        return plain

    def _rows(self) -> list[str]:
        """Returns the rows of all explicit columns, without duplicates, in their order."""
        columns = [getattr(self, kind) or {} for kind in get_args(Kind)]
        return list(dict.fromkeys(row for column in columns for row in column))

    def __hash__(self) -> int:
        return hash(repr(self.as_dict()))


def axes_of(entry: MeshAxes) -> tuple[str, ...]:
    """Returns the mesh axes of a table entry as a tuple."""
    return (entry,) if isinstance(entry, str) else entry or ()


def row_of(column: Column, logical: str) -> str | None:
    """Returns the row for a logical axis, "moe/mlp" before "mlp"; None if there is none."""
    plain = logical.rpartition("/")[2]
    for row in (logical, plain):
        if row in column:
            return row
    return None


def unknown_scopes(rules: Rules, model_scopes: Collection[str]) -> list[str]:
    """Returns a sentence for each scope of the rules that the model does not have.

    The rows of such a scope would have no effect. model_scopes: the scopes of the model.
    """
    sentences = []
    for scope in sorted(rules.scopes() - set(model_scopes)):
        rows = sorted(row for row in rules._rows() if row.startswith(f"{scope}/"))
        near = difflib.get_close_matches(scope, model_scopes, n=1)
        if near:
            hint = f"did you mean {near[0]!r}?"
        else:
            hint = f"the model has {', '.join(map(repr, sorted(model_scopes))) or 'none'}"
        sentences.append(
            f"rules have the scope {scope!r} ({', '.join(rows)}), which the model does not "
            f"have; {hint}"
        )
    return sentences


def did_you_mean(word: str, known_words: Sequence[str] | Column) -> str:
    """Returns the end of a message about an unknown name: the nearest known one, or all of them."""
    # In a scoped word, the name or the scope may be misspelt.
    for spelling in (word.rpartition("/")[2], word):
        near = difflib.get_close_matches(spelling, list(known_words), n=1, cutoff=0.6)
        if near:
            return f"; did you mean {near[0]!r}?"
    return f"; known: {', '.join(sorted(known_words))}"


def _is_entry(entry: object) -> bool:
    if isinstance(entry, tuple):
        return all(isinstance(axis, str) for axis in entry)
    return entry is None or isinstance(entry, str)


def _require_valid_row(row: str) -> None:
    scope, slash, name = row.rpartition("/")
    if slash and (not (scope and name) or "/" in scope):
        raise ShardingRuleError(
            f"rules have a row {row!r}: a row is a logical axis or scope/axis, as in 'moe/mlp'"
        )
    if scope and name in _UNSCOPED:
        raise ShardingRuleError(
            f"rules have a row {row!r}: {_UNSCOPED[name]}; leave the scope out of this row"
        )
