"""Rules bound to a mesh: the object through which a model controls sharding. It is passed as an
argument; there is no global state.
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

from sharding_rules.rules import Exchange, Kind, Rules, ShardingRuleError, axes_of

_NOUN: dict[Kind, str] = {
    "params": "weight",
    "gathered": "weight",
    "gradients": "gradient",
    "optimizer": "moment",
    "activations": "activation",
}


@dataclasses.dataclass(frozen=True, eq=False)
class Shard:
    """`shard(x, "batch", "seq", "embed")` constrains an activation. Other methods constrain weights
    and run code on local shards.

    It works in a jitted function and inside a `shard_map` that is manual over some mesh axes, such
    as the microbatch engine's: axes that are manual where a method is called are left out, because
    arrays there are local along them.
    """

    rules: Rules
    mesh: Mesh
    scope: str = ""
    """The part of the model whose scoped rows apply; "": none."""

    def within(self, scope: str) -> Shard:
        """The same for a part of the model: a logical axis "mlp" is looked up as "moe/mlp", then as
        "mlp", in every column.

        Scopes are not nested: `within` replaces the current one. Raises ShardingRuleError for a
        name with a slash.
        """
        if "/" in scope:
            raise ShardingRuleError(
                f"Shard.within({scope!r}): a scope is one name, without a slash"
            )
        return dataclasses.replace(self, scope=scope)

    def __call__(self, x: jax.Array, *axes: str | None) -> jax.Array:
        """x, an activation, constrained to its rules. Raises ShardingRuleError as `Rules.spec`
        does.
        """
        return self.constrain(x, "activations", axes)

    def weight(self, w: jax.Array, *axes: str | None) -> jax.Array:
        """A weight as a layer uses it, gathered over the axes of the batch. Cast it first, so that
        fewer bytes are gathered.
        """
        return self.constrain(w, "gathered", axes)

    def operand(
        self, x: jax.Array, leading: Sequence[str | None], axes: Sequence[str | None]
    ) -> jax.Array:
        """x as it is multiplied with a weight: dimensions `leading` by the rules of activations,
        those that it shares with the weight, `axes`, as the weight is used.
        """
        spec = PartitionSpec(*self.spec("activations", leading), *self.spec("gathered", axes))
        return lax.with_sharding_constraint(
            x, spec if _manual() else NamedSharding(self.mesh, spec)
        )

    def regathers(self, axes: Sequence[str | None]) -> bool:
        """Whether a mesh axis shards activations along one dimension of a weight, and the weight
        along another, as in megatron_2d: then `operand` gathers what is multiplied with it, once.
        axes: those of the weight.
        """
        used = [set(axes_of(entry)) for entry in self.spec("gathered", axes)]
        dims = [
            (axis, mine)
            for axis, mine in zip(self._scoped(axes), used, strict=True)
            if axis and self.rules.row("activations", axis)
        ]
        return any((set(self.axes_for(axis)) - mine) & set().union(*used) for axis, mine in dims)

    def einsum(
        self, equation: str, x: jax.Array, w: jax.Array, axes: Sequence[str | None]
    ) -> jax.Array:
        """The einsum of an activation and a stored weight, which is cast to the type of x and
        gathered first.

        The weight's gradient is summed over devices in the type that `rules.reduction` chooses.
        Without jax.checkpoint, the gathered weight is saved for the backward. axes: those of the
        weight. Each letter of the equation, as in "bsd,df->bsf", must be in two of its terms.
        """
        einsum, weight = self.einsum_of(w, x.dtype, axes)
        return einsum(equation, x, weight)

    def einsum_of(
        self, w: jax.Array, dtype: Any, axes: Sequence[str | None]
    ) -> tuple[Callable[..., jax.Array], jax.Array]:
        """(f, weight): `f(equation, x, weight)` is `einsum` for an x of this dtype, without a stack
        frame between caller and matmul.
        """
        if self.rules.reduction == "float32" and self._gradient_is_summed(axes):
            return partial(self._einsum_summed_in_fp32, axes), w
        return jnp.einsum, self.weight(w.astype(dtype), *axes)

    def constrain(self, x: jax.Array, kind: Kind, axes: Sequence[str | None]) -> jax.Array:
        """x constrained to its spec as this kind of tensor.

        Raises ShardingRuleError as `Rules.spec` does, and for a size that does not divide, where
        XLA would drop the sharding.
        """
        spec, axes = self.spec(kind, axes), self._scoped(axes)
        if len(axes) != x.ndim:
            raise ShardingRuleError(
                f"{_NOUN[kind]}{tuple(axes)}: {len(axes)} logical axes for {x.ndim} dimensions "
                f"{x.shape}"
            )
        for dim, (logical, entry) in enumerate(zip(axes, spec, strict=True)):
            if x.shape[dim] % (n := self.n_shards(axes_of(entry))):
                where = f"dimension {dim} ({logical!r}, size {x.shape[dim]})"
                raise ShardingRuleError(
                    f"{_NOUN[kind]}{tuple(axes)}: {where} does not divide over {entry!r} ({n} ways)"
                )
        # In a manual region the constraint must use the mesh of the region, as a bare spec does.
        return lax.with_sharding_constraint(
            x, spec if _manual() else NamedSharding(self.mesh, spec)
        )

    def sharding(
        self,
        kind: Kind,
        axes: Sequence[str | None],
        shape: Sequence[int] = (),
        name: str = "tensor",
    ) -> NamedSharding:
        """The sharding of a global array of this kind, for use outside of manual regions."""
        return self.rules.sharding(kind, self._scoped(axes), self.mesh, shape, name)

    def spec(self, kind: Kind, axes: Sequence[str | None]) -> PartitionSpec:
        """The spec by the rules, without axes that are manual where this is called, and without
        axes of size 1.
        """
        return self.restrict(
            self.rules.spec(kind, self._scoped(axes), mesh=self.mesh, name=_NOUN[kind]),
            self._auto(),
        )

    def restrict(self, spec: PartitionSpec, keep: frozenset[str]) -> PartitionSpec:
        """`spec` with only the mesh axes in `keep`, and without axes of size 1."""
        kept = (
            tuple(a for a in axes_of(entry) if a in keep and self.mesh.shape[a] > 1)
            for entry in spec
        )
        return PartitionSpec(*(axes[0] if len(axes) == 1 else axes or None for axes in kept))

    # Code that runs on local shards: kernels, and explicit collectives.

    def shard_map(self, f: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
        """A function that runs `f` on each device's shards, manual over all mesh axes. Specs as
        from `Shard.spec`.

        XLA silently gathers the operands of a kernel that is called under plain jit; called through
        this method, it gets local shards.
        """
        outside = {"mesh": self.mesh} if not _manual() else {}
        return jax.shard_map(
            f,
            in_specs=in_specs,
            out_specs=out_specs,
            axis_names=set(self._auto()),
            check_vma=False,
            **outside,
        )

    def table(self, *axes: str | None) -> TableSharding:
        """The sharding of a lookup table [rows, width], with its collectives for code inside
        `shard_map`. Call this outside of it.

        Raises ShardingRuleError for rules that those collectives cannot implement.
        """
        spec, used = self.spec("params", axes), self.spec("gathered", axes)
        axes = self._scoped(axes)
        gather_axes = []
        for logical, have, want in zip(axes, map(axes_of, spec), map(axes_of, used), strict=True):
            if have[: len(want)] != want:
                raise ShardingRuleError(
                    f"rules.gathered[{logical!r}]={want or None} must be the leading part of "
                    f"rules.params[{logical!r}]={have or None}"
                )
            gather_axes.append(have[len(want) :])
        if used[-1]:
            fix = f"shard rules.params[{axes[-1]!r}] over axes of the batch, or not at all"
            raise ShardingRuleError(
                f"rules.gathered[{axes[-1]!r}]={used[-1]!r}: a table is used with complete rows; "
                f"{fix}"
            )
        batch = self.axes_for("batch")
        if clash := [a for a in axes_of(used[0]) if a in batch]:
            fix = f"a table is gathered over the axes of the batch; leave {clash[0]!r} out"
            raise ShardingRuleError(
                f"rules.gathered[{axes[0]!r}]={used[0]!r} has {clash[0]!r}, which shards the "
                f"batch: {fix}"
            )
        return TableSharding(spec, used, tuple(gather_axes), batch)

    def axes_for(self, logical: str) -> tuple[str, ...]:
        """The mesh axes that shard a logical axis of the activations here, over which code inside
        `shard_map` must reduce or gather.
        """
        return axes_of(self.spec("activations", (logical,))[0])

    def exchanges(self) -> list[tuple[str, Exchange]]:
        """(mesh axis, exchange) of each axis that shards the sequence on this mesh, outermost
        first: see `Rules.context`.

        Raises ShardingRuleError for an axis without an exchange.
        """
        axes = [
            axis for axis in axes_of(self.rules.activations.get("seq")) if self.mesh.shape[axis] > 1
        ]
        if unknown := [axis for axis in axes if axis not in self.rules.context]:
            fix = f"set rules.context[{unknown[0]!r}] to gather, ulysses or ring"
            raise ShardingRuleError(
                f"rules.activations['seq'] is sharded over {unknown[0]!r}, and attention needs all "
                f"keys; {fix}"
            )
        return [(axis, self.rules.context[axis]) for axis in axes]

    def n_shards(self, axes: Sequence[str]) -> int:
        """The number of shards that mesh axes make: the product of their sizes."""
        return math.prod(self.mesh.shape[a] for a in axes)

    def _einsum_summed_in_fp32(
        self, axes: Sequence[str | None], equation: str, x: jax.Array, w: jax.Array
    ) -> jax.Array:
        of_x, of_w, of_y = equation.replace("->", ",").split(",")

        def forward(x: jax.Array, w: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
            used = self.weight(w.astype(x.dtype), *axes)
            return jnp.einsum(equation, x, used), (x, used)

        def backward(
            residuals: tuple[jax.Array, jax.Array], dy: jax.Array
        ) -> tuple[jax.Array, jax.Array]:
            x, used = residuals
            dx = jnp.einsum(f"{of_y},{of_w}->{of_x}", dy, used)
            # XLA:CPU cannot multiply bf16 into fp32 if an operand has three dimensions; with fp32
            # operands the product is the same.
            on_cpu = self.mesh.devices.flat[0].platform == "cpu"
            x, dy = (a.astype(jnp.float32) if on_cpu else a for a in (x, dy))
            # XLA sums over devices in the type of the matmul's result.
            dw = jnp.einsum(f"{of_x},{of_y}->{of_w}", x, dy, preferred_element_type=jnp.float32)
            return dx, self.constrain(dw, "params", axes).astype(w.dtype)

        f = jax.custom_vjp(lambda x, w: forward(x, w)[0])
        f.defvjp(forward, backward)
        return f(x, w)

    def _gradient_is_summed(self, axes: Sequence[str | None]) -> bool:
        """Whether XLA sums the weight's gradient over devices: an axis that XLA handles shards the
        tokens, but not the gathered weight.
        """
        rows = [
            row
            for row in ("batch", "seq_resid")
            if self.rules.row("activations", f"{self.scope}/{row}")
        ]
        tokens = {axis for row in rows for axis in self.axes_for(row)}
        return not tokens <= {
            axis for entry in self.spec("gathered", axes) for axis in axes_of(entry)
        }

    def _scoped(self, axes: Sequence[str | None]) -> tuple[str | None, ...]:
        return tuple(
            f"{self.scope}/{axis}" if axis and self.scope and "/" not in axis else axis
            for axis in axes
        )

    def _auto(self) -> frozenset[str]:
        return frozenset(self.mesh.axis_names) - _manual()


@dataclasses.dataclass(frozen=True)
class TableSharding:
    """How a lookup table is sharded and gathered, with FSDP as explicit collectives for code inside
    `Shard.shard_map`.
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
        """A device's shard of the stored table -> its shard of the gathered table."""
        for dim, names in enumerate(self.gather_axes):
            w = lax.all_gather(w, names, axis=dim, tiled=True) if names else w
        return w

    def reduce_scatter(self, dw: jax.Array) -> jax.Array:
        """The gradient of the gathered table for this device's tokens -> its shard of the stored
        table's gradient for the whole batch.

        Along an axis that does not shard the batch, devices have the same gradient already: it is
        sliced, not summed.
        """
        for dim, names in enumerate(self.gather_axes):
            for summed, run in itertools.groupby(names, lambda axis: axis in self.batch_axes):
                over = tuple(run)
                if summed:
                    dw = lax.psum_scatter(dw, over, scatter_dimension=dim, tiled=True)
                else:
                    dw = local_block(dw, over, dim)
        rest = tuple(
            a for a in self.batch_axes if not any(a in names for names in self.gather_axes)
        )
        return lax.psum(dw, rest) if rest else dw


def local_block(x: jax.Array, axes: tuple[str, ...], dim: int) -> jax.Array:
    """Inside `Shard.shard_map`: this device's slice along one dimension of x, which is replicated
    along `axes`.
    """
    size = x.shape[dim] // lax.axis_size(axes)
    return lax.dynamic_slice_in_dim(x, lax.axis_index(axes) * size, size, axis=dim)


def _manual() -> frozenset[str]:
    """The mesh axes that are manual where the caller is being traced."""
    return frozenset(jax.sharding.get_abstract_mesh().manual_axes)
