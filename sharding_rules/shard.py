"""Rules bound to a mesh: the object through which a model controls sharding.

It is passed as an argument; there is no global state.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from sharding_rules.rules import (
    Exchange,
    Kind,
    Rules,
    ShardingRuleError,
    TokenExchange,
    axes_of,
)

_NOUN: dict[Kind, str] = {
    "params": "weight",
    "gathered": "weight",
    "gradients": "gradient",
    "optimizer": "moment",
    "activations": "activation",
}


@dataclasses.dataclass(frozen=True, eq=False)
class Shard:
    """Rules bound to a mesh: `shard(x, "batch", "seq", "embed")` constrains an activation.

    Other methods constrain weights and run code on local shards. A dimension's name is a logical
    axis of the rules; None: the dimension is not sharded.

    It works in a jitted function and inside a `shard_map` that is manual over some mesh axes, such
    as the microbatch engine's: axes that are manual where a method is called are left out, because
    arrays there are local along them.
    """

    rules: Rules
    mesh: Mesh
    scope: str = ""
    """The part of the model whose scoped rows apply; "": none."""

    def within(self, scope: str) -> Shard:
        """Returns the same rules and mesh for a part of the model.

        In every column, a logical axis "mlp" is looked up as "moe/mlp", then as "mlp". Scopes are
        not nested: `within` replaces the current one. Raises ShardingRuleError for a name with a
        slash.
        """
        if "/" in scope:
            raise ShardingRuleError(
                f"Shard.within({scope!r}): a scope is one name, without a slash"
            )
        return dataclasses.replace(self, scope=scope)

    def __call__(self, x: jax.Array, *axes: str | None) -> jax.Array:
        """Returns an activation, constrained to its rules. Raises as `constrain` does."""
        return self.constrain(x, "activations", axes)

    def weight(self, w: jax.Array, *axes: str | None) -> jax.Array:
        """Returns a weight as a layer uses it, gathered over the axes of the batch.

        Cast it first, so that fewer bytes are gathered.
        """
        return self.constrain(w, "gathered", axes)

    def operand(
        self, x: jax.Array, leading: Sequence[str | None], axes: Sequence[str | None]
    ) -> jax.Array:
        """Returns x as it is multiplied with a weight.

        The dimensions `leading` are sharded by the rules of activations. The last ones, `axes`,
        which x shares with the weight, are sharded as the weight is used.
        """
        spec = PartitionSpec(*self.spec("activations", leading), *self.spec("gathered", axes))
        return lax.with_sharding_constraint(x, self._constraint(spec))

    def regathers(self, axes: Sequence[str | None]) -> bool:
        """Whether `operand` gathers what is multiplied with a weight of these logical axes.

        It does, once, if a mesh axis shards activations along one dimension of the weight, and the
        weight along another, as in megatron_2d.
        """
        axes_by_dim = [set(axes_of(entry)) for entry in self.spec("gathered", axes)]
        weight_axes = set().union(*axes_by_dim)
        for logical, dim_axes in zip(self._scoped(axes), axes_by_dim, strict=True):
            if not logical or not self.rules.row("activations", logical):
                continue
            if (set(self.axes_for(logical)) - dim_axes) & weight_axes:
                return True
        return False

    def einsum(
        self, equation: str, x: jax.Array, w: jax.Array, axes: Sequence[str | None]
    ) -> jax.Array:
        """Returns the einsum of an activation and a stored weight.

        The weight is cast to the type of x and gathered first. Its gradient is summed over devices
        in the type that `rules.reduction` chooses. Without jax.checkpoint, the gathered weight is
        saved for the backward.

        Args:
          equation: as in "bsd,df->bsf". Each letter must be in two of its terms.
          x: the activation, the first operand.
          w: the weight, the second operand, as it is stored.
          axes: the logical axes of the weight.
        """
        einsum, weight = self.einsum_of(w, x.dtype, axes)
        return einsum(equation, x, weight)

    def einsum_of(
        self, w: jax.Array, dtype: Any, axes: Sequence[str | None]
    ) -> tuple[Callable[..., jax.Array], jax.Array]:
        """Returns (f, weight), so that `f(equation, x, weight)` is `einsum` for an x of this dtype.

        There is no stack frame between the caller of f and the matmul.
        """
        if self.rules.reduction == "float32" and self._gradient_is_summed(axes):
            return partial(self._einsum_summed_in_fp32, axes), w
        return jnp.einsum, self.weight(w.astype(dtype), *axes)

    def constrain(self, x: jax.Array, kind: Kind, axes: Sequence[str | None]) -> jax.Array:
        """Returns x, constrained to its spec as this kind of tensor.

        Raises ShardingRuleError as `Rules.spec` does, and for a size that does not divide, where
        XLA would drop the sharding.
        """
        spec = self.spec(kind, axes)
        axes = self._scoped(axes)
        if len(axes) != x.ndim:
            raise ShardingRuleError(
                f"{_NOUN[kind]}{tuple(axes)}: {len(axes)} logical axes for {x.ndim} dimensions "
                f"{x.shape}; name an axis, or None, for each"
            )
        for dim, (logical, entry) in enumerate(zip(axes, spec, strict=True)):
            n_shards = self.n_shards(axes_of(entry))
            if x.shape[dim] % n_shards:
                raise ShardingRuleError(
                    f"{_NOUN[kind]}{tuple(axes)}: dimension {dim} ({logical!r}, size "
                    f"{x.shape[dim]}) cannot be divided evenly over {entry!r} ({n_shards} ways)"
                )
        return lax.with_sharding_constraint(x, self._constraint(spec))

    def reshard(
        self, x: jax.Array, source: Kind, target: Kind, axes: Sequence[str | None]
    ) -> jax.Array:
        """Returns x, sharded as `source`, constrained to its spec as `target`.

        Mesh axes that shard another dimension than before are exchanged one after the other, by an
        all-to-all each.
        """
        for spec in self._steps(source, target, axes)[:-1]:
            x = lax.with_sharding_constraint(x, self._constraint(spec))
        return self.constrain(x, target, axes)

    def return_path(
        self, x: jax.Array, source: Kind, target: Kind, axes: Sequence[str | None]
    ) -> jax.Array:
        """Returns x, which is sharded as `target`, one step before `source`: what `reshard` does,
        in the other direction. Without mesh axes that shard another dimension it returns x.
        """
        steps = self._steps(source, target, axes)
        if not steps:
            return x
        # Without this constraint XLA computes the last sum of an update where its result is used,
        # and exchanges both of its operands.
        x = self.constrain(x, target, axes)
        for spec in reversed(steps[:-1]):
            x = lax.with_sharding_constraint(x, self._constraint(spec))
        return x

    def _steps(self, source: Kind, target: Kind, axes: Sequence[str | None]) -> list[PartitionSpec]:
        """Returns the specs on the way from one kind to another, the last one included; none if no
        mesh axis shards another dimension than before.

        XLA gathers an array completely if two mesh axes change at once and one of them moves to
        another dimension ("Involuntary full rematerialization").
        """
        start = [axes_of(entry) for entry in self.spec(source, axes)]
        end = [axes_of(entry) for entry in self.spec(target, axes)]
        start_dims = {axis: dim for dim, entry in enumerate(start) for axis in entry}
        end_dims = {axis: dim for dim, entry in enumerate(end) for axis in entry}
        waiting = [axis for axis, dim in end_dims.items() if start_dims.get(axis, dim) != dim]
        if not waiting:
            return []

        steps = []
        # Axes that shard only one of both come first: a sum that is pending over them is scattered.
        if start_dims.keys() != end_dims.keys():
            steps.append(_partly_moved(start, end, waiting))
        while waiting:
            waiting = waiting[1:]
            steps.append(_partly_moved(start, end, waiting))
        return steps

    def sharding(
        self,
        kind: Kind,
        axes: Sequence[str | None],
        shape: Sequence[int] = (),
        name: str = "tensor",
    ) -> NamedSharding:
        """Returns the sharding of a global array of this kind, for use outside of manual regions.

        shape, name and errors are as in `Rules.spec`.
        """
        return self.rules.sharding(kind, self._scoped(axes), self.mesh, shape, name)

    def spec(self, kind: Kind, axes: Sequence[str | None]) -> PartitionSpec:
        """Returns the spec by the rules, without axes of size 1.

        Axes that are manual where this is called are left out, too.
        """
        spec = self.rules.spec(kind, self._scoped(axes), mesh=self.mesh, name=_NOUN[kind])
        return self.restrict(spec, self._auto())

    def restrict(self, spec: PartitionSpec, keep: frozenset[str]) -> PartitionSpec:
        """Returns `spec` with only the mesh axes in `keep`, and without axes of size 1."""
        entries = []
        for entry in spec:
            axes = tuple(a for a in axes_of(entry) if a in keep and self.mesh.shape[a] > 1)
            entries.append(axes[0] if len(axes) == 1 else axes or None)
        return PartitionSpec(*entries)

    # Code that runs on local shards: kernels, and explicit collectives.

    def shard_map(self, f: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
        """Returns a function that runs `f` on each device's shards, manual over all mesh axes.

        Specs are as from `Shard.spec`. XLA silently gathers the operands of a kernel that is called
        under plain jit; called through this method, it gets local shards.
        """
        # Inside a manual region the mesh is that of the region.
        mesh = {} if _manual() else {"mesh": self.mesh}
        return jax.shard_map(
            f,
            in_specs=in_specs,
            out_specs=out_specs,
            axis_names=set(self._auto()),
            check_vma=False,
            **mesh,
        )

    def table(self, *axes: str | None) -> TableSharding:
        """Returns the sharding of a lookup table [rows, width], with its collectives.

        The collectives are for code inside `shard_map`; call this outside of it. Raises
        ShardingRuleError for rules that those collectives cannot implement.
        """
        stored = self.spec("params", axes)
        gathered = self.spec("gathered", axes)
        gather_axes = self.gather_axes(*axes)
        axes = self._scoped(axes)
        if gathered[-1]:
            raise ShardingRuleError(
                f"rules.gathered[{axes[-1]!r}]={gathered[-1]!r}: a table is used with complete "
                f"rows; shard rules.params[{axes[-1]!r}] over axes of the batch, or not at all"
            )
        batch = self.axes_for("batch")
        for axis in axes_of(gathered[0]):
            if axis in batch:
                raise ShardingRuleError(
                    f"rules.gathered[{axes[0]!r}]={gathered[0]!r} has {axis!r}, which shards the "
                    f"batch: a table is gathered over the axes of the batch; leave {axis!r} out"
                )
        return TableSharding(stored, gathered, gather_axes, batch)

    def gather_axes(self, *axes: str | None) -> tuple[tuple[str, ...], ...]:
        """Returns the mesh axes over which each dimension of a stored weight is gathered before its
        use.

        For explicit gathers inside `shard_map`; call this outside of it. Raises ShardingRuleError
        where the gathered weight is not sharded over the first axes of the stored one.
        """
        stored = self.spec("params", axes)
        gathered = self.spec("gathered", axes)
        gather_axes = []
        for logical, stored_entry, gathered_entry in zip(
            self._scoped(axes), stored, gathered, strict=True
        ):
            stored_axes = axes_of(stored_entry)
            gathered_axes = axes_of(gathered_entry)
            if stored_axes[: len(gathered_axes)] != gathered_axes:
                raise ShardingRuleError(
                    f"rules.gathered[{logical!r}]={gathered_axes or None} must be the leading part "
                    f"of rules.params[{logical!r}]={stored_axes or None}"
                )
            gather_axes.append(stored_axes[len(gathered_axes) :])
        return tuple(gather_axes)

    def axes_for(self, logical: str) -> tuple[str, ...]:
        """Returns the mesh axes that shard a logical axis of the activations here.

        Code inside `shard_map` must reduce or gather over them. In a region that is manual over an
        axis, such as the engine's over data, that axis is not among them.
        """
        return axes_of(self.spec("activations", (logical,))[0])

    def exchanges(self) -> list[tuple[str, Exchange]]:
        """Returns (mesh axis, exchange) of each axis that shards the sequence, outermost first.

        Axes of size 1 are left out; `Rules.context` describes the exchanges. Raises
        ShardingRuleError for an axis without one.
        """
        exchanges: list[tuple[str, Exchange]] = []
        for axis in axes_of(self.rules.activations.get("seq")):
            if self.mesh.shape[axis] == 1:
                continue
            if axis not in self.rules.context:
                raise ShardingRuleError(
                    f"rules.activations['seq'] is sharded over {axis!r}, and attention needs all "
                    f"keys; set rules.context[{axis!r}] to gather, ulysses or ring"
                )
            exchanges.append((axis, self.rules.context[axis]))
        return exchanges

    def sequence_axes(self) -> tuple[str, ...]:
        """Returns the mesh axes that shard the sequence of the residual stream, without axes of
        size 1, also those that are manual where this is called.
        """
        row = self.rules.row("activations", f"{self.scope}/seq_resid")
        entry = self.rules.activations[row] if row else None
        return tuple(axis for axis in axes_of(entry) if self.mesh.shape[axis] > 1)

    def token_exchanges(self) -> list[tuple[tuple[str, ...], TokenExchange]]:
        """Returns (mesh axes, exchange) of each exchange of tokens with experts, outermost first.

        Neighbouring axes with the same exchange are one group; axes of size 1 are left out.
        `Rules.exchange` describes the exchanges. Raises ShardingRuleError for an axis without one.
        """
        row = self.rules.row("params", f"{self.scope}/experts")
        groups: list[tuple[tuple[str, ...], TokenExchange]] = []
        for axis in axes_of(self.rules.params[row] if row else None):
            if self.mesh.shape[axis] == 1:
                continue
            if axis not in self.rules.exchange:
                raise ShardingRuleError(
                    f"rules.params['experts'] is sharded over {axis!r}, and no rule says how "
                    f"tokens reach their experts; set rules.exchange[{axis!r}] to gather or padded"
                )
            exchange = self.rules.exchange[axis]
            if groups and groups[-1][1] == exchange:
                groups[-1] = ((*groups[-1][0], axis), exchange)
            else:
                groups.append(((axis,), exchange))
        return groups

    def n_shards(self, axes: Sequence[str]) -> int:
        """Returns the number of shards that mesh axes make: the product of their sizes."""
        return math.prod(self.mesh.shape[axis] for axis in axes)

    def _einsum_summed_in_fp32(
        self, axes: Sequence[str | None], equation: str, x: jax.Array, w: jax.Array
    ) -> jax.Array:
        x_dims, w_dims, y_dims = equation.replace("->", ",").split(",")
        dx_equation = f"{y_dims},{w_dims}->{x_dims}"
        dw_equation = f"{x_dims},{y_dims}->{w_dims}"

        def forward(x: jax.Array, w: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
            gathered = self.weight(w.astype(x.dtype), *axes)
            return jnp.einsum(equation, x, gathered), (x, gathered)

        def backward(
            residuals: tuple[jax.Array, jax.Array], dy: jax.Array
        ) -> tuple[jax.Array, jax.Array]:
            x, gathered = residuals
            dx = jnp.einsum(dx_equation, dy, gathered)
            # XLA:CPU cannot multiply bf16 into fp32 if an operand has three dimensions; with fp32
            # operands the product is the same.
            if self.mesh.devices.flat[0].platform == "cpu":
                x = x.astype(jnp.float32)
                dy = dy.astype(jnp.float32)
            # XLA sums over devices in the type of the matmul's result.
            dw = jnp.einsum(dw_equation, x, dy, preferred_element_type=jnp.float32)
            return dx, self.constrain(dw, "params", axes).astype(w.dtype)

        f = jax.custom_vjp(lambda x, w: forward(x, w)[0])
        f.defvjp(forward, backward)
        return f(x, w)

    def _gradient_is_summed(self, axes: Sequence[str | None]) -> bool:
        """Whether XLA sums a weight's gradient over devices.

        It does if an axis that XLA handles shards the tokens, but not the gathered weight.
        """
        token_axes: set[str] = set()
        for row in ("batch", "seq_resid"):
            if self.rules.row("activations", f"{self.scope}/{row}"):
                token_axes.update(self.axes_for(row))
        weight_axes = itertools.chain.from_iterable(map(axes_of, self.spec("gathered", axes)))
        return not token_axes <= set(weight_axes)

    def _scoped(self, axes: Sequence[str | None]) -> tuple[str | None, ...]:
        if not self.scope:
            return tuple(axes)
        return tuple(f"{self.scope}/{axis}" if axis and "/" not in axis else axis for axis in axes)

    def _auto(self) -> frozenset[str]:
        return frozenset(self.mesh.axis_names) - _manual()

    def _constraint(self, spec: PartitionSpec) -> NamedSharding | PartitionSpec:
        # In a manual region the constraint must use the mesh of the region, as a bare spec does.
        return spec if _manual() else NamedSharding(self.mesh, spec)


def _partly_moved(
    start: Sequence[tuple[str, ...]], end: Sequence[tuple[str, ...]], waiting: Sequence[str]
) -> PartitionSpec:
    """Returns the spec `end`, but with the axes `waiting` where they are in `start`."""
    entries = []
    for old_axes, new_axes in zip(start, end, strict=True):
        moved = [axis for axis in new_axes if axis not in waiting]
        unmoved = [axis for axis in old_axes if axis in waiting]
        entries.append((*moved, *unmoved) or None)
    return PartitionSpec(*entries)


@dataclasses.dataclass(frozen=True)
class TableSharding:
    """How a lookup table is sharded and gathered.

    This is FSDP as explicit collectives, for code inside `Shard.shard_map`.
    """

    spec: PartitionSpec
    """The spec of the stored table, and of its gradient."""
    gathered_spec: PartitionSpec
    """The spec of the table after `gather`."""
    gather_axes: tuple[tuple[str, ...], ...]
    """The mesh axes that each dimension is gathered over."""
    batch_axes: tuple[str, ...]
    """The mesh axes that shard the batch."""

    def gather(self, w: jax.Array) -> jax.Array:
        """Returns a device's shard of the gathered table, from its shard of the stored one."""
        for dim, axes in enumerate(self.gather_axes):
            if axes:
                w = lax.all_gather(w, axes, axis=dim, tiled=True)
        return w

    def reduce_scatter(self, dw: jax.Array) -> jax.Array:
        """Returns a device's shard of the stored table's gradient for the whole batch.

        dw: the gradient of the gathered table for this device's tokens. Along an axis that does not
        shard the batch, devices have the same gradient already: it is sliced, not summed.
        """
        for dim, axes in enumerate(self.gather_axes):
            for is_summed, group in itertools.groupby(axes, lambda axis: axis in self.batch_axes):
                if is_summed:
                    dw = lax.psum_scatter(dw, tuple(group), scatter_dimension=dim, tiled=True)
                else:
                    dw = local_block(dw, tuple(group), dim)
        gathered_axes = set(itertools.chain.from_iterable(self.gather_axes))
        ungathered_axes = tuple(axis for axis in self.batch_axes if axis not in gathered_axes)
        return lax.psum(dw, ungathered_axes) if ungathered_axes else dw


def local_block(x: jax.Array, axes: tuple[str, ...], dim: int) -> jax.Array:
    """Returns this device's slice of x, which is replicated along mesh axes, in one dimension.

    For code inside `Shard.shard_map`.
    """
    size = x.shape[dim] // lax.axis_size(axes)
    return lax.dynamic_slice_in_dim(x, lax.axis_index(axes) * size, size, axis=dim)


def _manual() -> frozenset[str]:
    """Returns the mesh axes that are manual where the caller is being traced."""
    return frozenset(jax.sharding.get_abstract_mesh().manual_axes)
