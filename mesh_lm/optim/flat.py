"""The distributed optimizer's layout: matrices as padded vectors, cut over the replicas, whatever their dimensions.

The layers use `params`, each matrix whole on every replica, in the type that layers cast it to. The fp32 master and an optimizer's slots
are flat: of each layer, the matrices of its segment that are cut alike lie one after another in one vector, padded to a multiple of the
replicas, and every replica has a part of it. So any number of replicas divides it. Gradients come unreduced, and one reduce-scatter adds
them up; one all-gather makes `params` of the new master (as Megatron-LM's distributed optimizer and ZeRO-1 do, arXiv 1910.02054).

On disk nothing is flat: there a matrix is one array (`mesh_lm.state.disk_form`).
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from mesh_lm.optim.contract import FLAT, ArraySpec, Params, is_matrix
from sharding_rules import Rules, axes_of

_F32 = jnp.dtype("float32")
_ALIGNED = 128
"""A replica's part of a vector is a multiple of so many elements, so that each begins where copies and collectives are fast."""


@dataclasses.dataclass(frozen=True)
class Matrix:
    """One parameter of a vector."""

    name: str
    local: tuple[int, ...]
    """What one device has of it, or of one of its layers."""
    offset: int
    """Where it begins in the vector."""

    @property
    def size(self) -> int:
        return math.prod(self.local)


@dataclasses.dataclass(frozen=True)
class FlatVector:
    """The matrices of a segment that are cut alike, layer by layer: in memory [rows, n]. Or one that is no segment's, [n]."""

    name: str
    mesh: Any
    matrices: tuple[Matrix, ...]
    rows: int
    """Of the stacked parameters in memory, over all stages; 0: the parameter is not stacked."""
    dtype: Any
    """Of the matrices in use."""
    replica_axes: tuple[str, ...]
    """The mesh axes that cut the vector, along which the matrices are whole: the replicas."""
    shard_axes: tuple[str, ...]
    """The mesh axes that cut the matrices themselves, those that the engine is manual over first."""

    @property
    def replicas(self) -> int:
        return math.prod(self.mesh.shape[axis] for axis in self.replica_axes)

    @property
    def shard_size(self) -> int:
        """Elements of a row on one device."""
        last = self.matrices[-1]
        unit = self.replicas * _ALIGNED
        return -(-(last.offset + last.size) // unit) * _ALIGNED

    @property
    def array_spec(self) -> ArraySpec:
        n = self.shard_size * self.replicas * math.prod(self.mesh.shape[axis] for axis in self.shard_axes)
        return ArraySpec((self.rows, n), _F32, ("layers", FLAT), "flat") if self.rows else ArraySpec((n,), _F32, (FLAT,), "flat")

    @property
    def spec(self) -> PartitionSpec:
        flat = (*self.replica_axes, *self.shard_axes) or None
        return PartitionSpec("pipeline", flat) if self.rows else PartitionSpec(flat)

    @property
    def sharding(self) -> NamedSharding:
        return NamedSharding(self.mesh, self.spec)

    # On one device, inside a region that is manual over every mesh axis.

    def pack(self, row: Mapping[str, jax.Array]) -> jax.Array:
        """A device's part of the matrices of one layer -> [piece * replicas], zeros at the end."""
        parts = [row[matrix.name].reshape(-1) for matrix in self.matrices]
        whole = jnp.concatenate(parts)
        return jnp.pad(whole, (0, self.shard_size * self.replicas - whole.size))

    def unpack(self, row: jax.Array) -> Params:
        """The inverse."""
        return {m.name: row[m.offset : m.offset + m.size].reshape(m.local) for m in self.matrices}

    def map_rows(self, one: Callable[[Any], Any], held: Any) -> Any:
        """one(row) of all rows of what a device holds, one after another, so that no more than a row is there twice."""
        return lax.scan(lambda _, row: (None, one(row)), None, held)[1] if self.rows else one(held)

    def reduce_scatter(self, grads: Mapping[str, jax.Array], dtype: Any) -> jax.Array:
        """This replica's gradients of the matrices -> its piece of the sum over the replicas, float32, added up in `dtype`."""

        def one(row: Params) -> jax.Array:
            vector = self.pack(row).astype(dtype)
            return (lax.psum_scatter(vector, self.replica_axes, tiled=True) if self.replicas > 1 else vector).astype(jnp.float32)

        return self.map_rows(one, {matrix.name: grads[matrix.name] for matrix in self.matrices})

    def all_gather(self, piece: jax.Array) -> Params:
        """A piece of the master -> the matrices as the layers use them."""

        def one(row: jax.Array) -> Params:
            # Cast first, and held there: XLA would gather fp32 and cast what it has gathered.
            row = lax.optimization_barrier(row.astype(self.dtype))
            return self.unpack(lax.all_gather(row, self.replica_axes, tiled=True) if self.replicas > 1 else row)

        return self.map_rows(one, piece)


@dataclasses.dataclass(frozen=True)
class FlatLayout:
    """What of a model's parameters is flat, and where."""

    vectors: tuple[FlatVector, ...] = ()
    specs: Mapping[str, PartitionSpec] = dataclasses.field(default_factory=dict)
    """Of the matrices in memory."""

    @classmethod
    def of(
        cls, rules: Rules, leaves: Mapping[str, ArraySpec], where: Mapping[str, NamedSharding], compute: Mapping[str, Any],
        segment_of: Callable[[str], str],
    ) -> FlatLayout:  # fmt: skip
        """Of parameters in memory, by their names: leaves, shardings, and the types that layers cast them to."""
        groups: dict[tuple[Any, ...], list[str]] = {}
        for name, leaf in leaves.items():
            over = replica_axes_of(rules, segment_of(name))
            if not over or not is_matrix(name, leaf.axes):
                continue
            own = {a for entry in where[name].spec for a in axes_of(entry)}
            sizes = where[name].mesh.shape
            over = tuple(a for a in over if sizes[a] > 1 and a not in own)
            manual = rules.manual_axes()
            cut = sorted(
                (a for a in sizes if a in own and sizes[a] > 1 and not (leaf.stacked and a == "pipeline")), key=lambda a: a not in manual
            )
            part = segment_of(name) if leaf.stacked else name
            groups.setdefault((part, tuple(cut), over, str(compute[name])), []).append(name)
        parts = [key[0] for key in groups]
        vectors = []
        for (part, cut, over, dtype), names in groups.items():
            leaf, sharding = leaves[names[0]], where[names[0]]
            locals_ = [where[n].shard_shape(leaves[n].shape)[int(leaf.stacked) :] for n in names]
            offsets = itertools.accumulate((math.prod(local) for local in locals_), initial=0)
            matrices = tuple(Matrix(*each) for each in zip(names, locals_, offsets, strict=False))
            called = part if not leaf.stacked else f"{part}/{'+'.join(cut) or 'whole'}" + (f"/{dtype}" if parts.count(part) > 1 else "")
            vectors.append(FlatVector(called, sharding.mesh, matrices, leaf.shape[0] if leaf.stacked else 0, jnp.dtype(dtype), over, cut))
        specs = {m.name: where[m.name].spec for v in vectors for m in v.matrices}
        return cls(tuple(vectors), specs)

    @cached_property
    def names(self) -> frozenset[str]:
        """The parameters that are flat."""
        return frozenset(self.specs)

    @cached_property
    def leaves(self) -> dict[str, ArraySpec]:
        """The vectors, by their names."""
        return {vector.name: vector.array_spec for vector in self.vectors}

    @cached_property
    def shardings(self) -> dict[str, NamedSharding]:
        return {vector.name: vector.sharding for vector in self.vectors}

    @cached_property
    def compute_dtypes(self) -> dict[str, Any]:
        """Of the flat parameters in use."""
        return {matrix.name: vector.dtype for vector in self.vectors for matrix in vector.matrices}

    def compute_params(self, masters: Params) -> Params:
        """The flat parameters as the layers use them, of the vectors of the master; one all-gather a layer."""

        def gathered(pieces: Params) -> Params:
            out: Params = {}
            for vector in self.vectors:
                out |= vector.all_gather(serialized_on_cpu(pieces[vector.name], out, vector.mesh))
            return out

        if not self.vectors:
            return {}
        pieces = {vector.name: vector.spec for vector in self.vectors}
        mesh, specs = self.vectors[0].mesh, dict(self.specs)
        return jax.shard_map(gathered, mesh=mesh, in_specs=(pieces,), out_specs=specs, check_vma=False)(
            {name: masters[name] for name in pieces}
        )

    def reduce_scatter(self, grads: Mapping[str, jax.Array], before: Any, dtype: Any) -> Params:
        """On one device: this replica's gradients of the matrices -> `FlatVector.reduce_scatter` of each vector.

        grads: others among them are summed already, as `before` is.
        """
        out: Params = {}
        before = before, {name: g for name, g in grads.items() if name not in self.names}
        for vector in self.vectors:
            own = {m.name: serialized_on_cpu(grads[m.name], (before, out), vector.mesh) for m in vector.matrices}
            out[vector.name] = vector.reduce_scatter(own, dtype)
        return out


def serialized_on_cpu(x: jax.Array, before: Any, mesh: Any) -> jax.Array:
    """x, which on CPUs is made of all arrays in `before`, so that collectives that take it come after those that make them.

    XLA:CPU starts a collective inside of a loop and one outside in any order where neither needs the other, and two processes may then take
    one for the other. Multiplied by 1 + 0 y, x keeps its bits where y is finite; where it is not, the step is skipped anyway.
    """
    if mesh.devices.flat[0].platform != "cpu":
        return x
    first = [y.ravel()[0].astype(jnp.float32) for y in jax.tree.leaves(before)]
    return x * (1 + 0 * jnp.stack(first).sum()).astype(x.dtype) if first else x


def replica_axes_of(rules: Rules, segment: str) -> tuple[str, ...]:
    """The mesh axes that cut the flat vectors of a segment, or of a parameter outside of segments; empty: its matrices are not flat."""
    row = rules.row("optimizer", f"{segment}/{FLAT}")
    return axes_of(rules.column("optimizer")[row]) if row else ()
