"""The update with parts of the state in the hosts' memory (optimizer.offload): a layer at a time,
so that the devices hold one layer of these parts. Rules whose updates need much memory besides the
state take the same way (`Optimizer.updates_by_layer`).

The stacks of the layers are the carry of a loop, which XLA updates in place: it copies one row to
the device, updates it and copies it back. Other forms of the loop were compiled for an H100 and
declined. As the loop's inputs and outputs (xs, ys) the host's stacks exist twice, as do those of a
loop that fetches a row ahead; unrolled, or with all layers at once, most of a stack is on the
device.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from mesh_lm.config import DilocoConfig
from mesh_lm.errors import ConfigError
from mesh_lm.optim import ArraySpec, Optimizer, Params
from mesh_lm.optim.contract import ArraySpecs, Slots
from mesh_lm.optim.rules import rule_name
from mesh_lm.parallel.feedback import feedback_of
from mesh_lm.parallel.flat import FlatLayout, serialized_on_cpu
from mesh_lm.parallel.layout import ModelLayout, segment_of
from mesh_lm.state import MASTER, StatePart, masters, parts
from sharding_rules import axes_of

_SLICE_BYTES = 2**26
"""Bytes, on a device, of the slices in which a table outside of the layers is updated."""


class Updated(NamedTuple):
    """What an update returns."""

    weights: Params
    """Float32: flat vectors, and parameters that are not flat, sharded like the slots."""
    slots: Slots
    computed: Params
    """The params that are computed from flat vectors."""


class _Scalars(NamedTuple):
    """What all layers' updates have in common."""

    grad_norm: jax.Array
    step: jax.Array
    n_updates: jax.Array
    accepted: jax.Array
    """False: the step changes nothing."""


def packs_rows(layout: ModelLayout) -> bool:
    """Returns whether the update makes vectors of the gradients' matrices, a row at a time. The
    gradients are then those of matrices, not of flat vectors.

    With one replica there is nothing to reduce-scatter, and vectors of all gradients would be a
    second copy of them.
    """
    vectors = layout.flat.vectors
    is_alone = all(vector.replicas == 1 and not vector.gathered_by_layer for vector in vectors)
    return bool(vectors) and is_alone and not feedback_of(layout)


def gradient_layout(layout: ModelLayout, optimizer: Optimizer) -> FlatLayout:
    """Returns the vectors that the gradients are of (`region_with_feedback`)."""
    if optimizer.updates_by_layer and packs_rows(layout):
        return FlatLayout()
    return layout.flat


def update(
    layout: ModelLayout,
    optimizer: Optimizer,
    grads: Params,
    weights: Params,
    slots: Slots,
    params: Params,
    *,
    grad_norm: jax.Array,
    step: jax.Array,
    n_updates: jax.Array,
    accepted: jax.Array,
) -> Updated:
    """Returns the weights and slots after a step, as `Optimizer.update` makes them, and the params
    of flat vectors.

    grads: of the weights, or of matrices in place of flat vectors (`packs_rows`). weights: float32,
    sharded like the slots. params: what the layers use, whose memory the new ones take. Parts in
    optimizer.offload are in the hosts' memory, before and after.
    """
    scalars = _Scalars(grad_norm, step, n_updates, accepted)
    run = _Update(layout, optimizer)
    computed = {name: params[name] for name in layout.flat.compute_dtypes if name in params}
    return run(grads, weights, slots, computed, scalars)


class _Group(NamedTuple):
    """Arrays that are updated in one loop."""

    weights: tuple[str, ...]
    """Names of the weights: those of a segment's layers, or one outside of them."""
    is_stacked: bool


class _Update:
    """The update of all weights: one loop after another, a loop for each group.

    An elementwise rule works on local shards, in a region that is manual over the whole mesh.
    Other rules see complete matrices of one layer. Only what shards the layers is manual then, so
    that each device goes through the layers that it has.
    """

    def __init__(self, layout: ModelLayout, optimizer: Optimizer) -> None:
        self._layout = layout
        self._optimizer = optimizer
        self._flat = layout.flat
        self._vectors = {vector.name: vector for vector in layout.flat.vectors}
        self._leaves = masters(layout)
        # An island updates its own arrays, which have no dimension of islands.
        on_one_island = dataclasses.replace(optimizer, diloco=DilocoConfig())
        self._parts = parts(layout, on_one_island)
        self._packs_rows = packs_rows(layout)
        self._is_elementwise = optimizer.config.rule.elementwise
        offloaded = frozenset(optimizer.config.offload)
        self._hosted_slots = offloaded - {MASTER}
        self._hosted_weights = frozenset(self._vectors) if MASTER in offloaded else frozenset()
        self._require_rows()

    def _require_rows(self) -> None:
        """Raises ConfigError for a slot without a row for each layer, or each row of a table that
        is updated in slices.
        """
        rule = rule_name(self._optimizer.config.rule)
        for slot, part in self._parts.items():
            if part.kind != "optimizer" or slot == MASTER:
                continue
            for name, leaf in part.leaves.items():
                weight = self._leaves[name]
                is_whole = not (weight.stacked or self._is_elementwise)
                if is_whole or leaf.shape[:1] == weight.shape[:1]:
                    continue
                raise ConfigError(
                    f"optimizer.rule={rule}: its slot {slot!r} has the shape {leaf.shape} for "
                    f"{name}, whose shape is {weight.shape}; an update by layers (of a rule with "
                    "by_layer, or with optimizer.offload) goes through rows, so both need the same "
                    "number of them"
                )

    def __call__(
        self,
        grads: Params,
        weights: Params,
        slots: Slots,
        computed: Params,
        scalars: _Scalars,
    ) -> Updated:
        axes = self._manual_axes()
        if self._is_elementwise or not axes:
            return self._in_region(axes, grads, weights, slots, computed, scalars)

        # Only layers have owners. The rule sees complete tables, which XLA shards, outside of the
        # region: a device's part of one has other means and other blocks. There are no vectors.
        layers = [name for name, leaf in self._leaves.items() if leaf.stacked]
        tables = [name for name, leaf in self._leaves.items() if not leaf.stacked]
        of_layers = self._in_region(
            axes,
            _only(layers, grads),
            _only(layers, weights),
            _slots_of(layers, slots),
            {},
            scalars,
        )
        of_tables = self._run(
            _only(tables, grads), _only(tables, weights), _slots_of(tables, slots), {}, scalars
        )
        new_slots = {slot: of_layers.slots[slot] | of_tables.slots[slot] for slot in slots}
        return Updated(of_layers.weights | of_tables.weights, new_slots, {})

    def _in_region(
        self,
        axes: frozenset[str],
        grads: Params,
        weights: Params,
        slots: Slots,
        computed: Params,
        scalars: _Scalars,
    ) -> Updated:
        """Returns `_run`, in a region that is manual over these axes."""
        if not axes:
            return self._run(grads, weights, slots, computed, scalars)
        weight_specs = _only(weights, self._weight_specs(axes))
        slot_specs = {
            slot: {name: self._spec(self._parts[slot], name, axes) for name in arrays}
            for slot, arrays in slots.items()
        }
        restrict = self._layout.shard.restrict
        computed_specs = {name: restrict(self._flat.specs[name], axes) for name in computed}
        # Outside of segments a vector has the name of its matrix.
        are_matrices = self._flat.names if self._packs_rows else frozenset()
        grad_specs = {
            name: computed_specs[name] if name in are_matrices else weight_specs[name]
            for name in grads
        }
        scalar_specs = jax.tree.map(lambda _: PartitionSpec(), scalars)
        out_specs: Any = (weight_specs, slot_specs, computed_specs)
        # Inside of an island's region the mesh is in the context, and is not passed again.
        mesh = {} if _axes_of_region() else {"mesh": self._layout.shard.mesh}
        run = jax.shard_map(
            self._run,
            in_specs=(grad_specs, weight_specs, slot_specs, computed_specs, scalar_specs),
            out_specs=Updated(*out_specs),
            axis_names=axes,
            check_vma=False,
            **mesh,
        )
        return run(grads, weights, slots, computed, scalars)

    # Which axes are manual, and how arrays are sharded over them.

    def _manual_axes(self) -> frozenset[str]:
        mesh = self._layout.shard.mesh
        if self._is_elementwise:
            return frozenset(mesh.axis_names) - _axes_of_region()
        axes: set[str] = set()
        for part in self._parts.values():
            for name, leaf in part.leaves.items():
                if leaf.stacked and part.kind == "optimizer":
                    axes.update(axes_of(part.shardings[name].spec[0]))
        return frozenset(axis for axis in axes if mesh.shape[axis] > 1)

    def _weight_specs(self, axes: frozenset[str]) -> dict[str, PartitionSpec]:
        shard = self._layout.shard
        specs = {}
        for name, leaf in self._leaves.items():
            if name in self._vectors:
                spec = self._vectors[name].spec
            else:
                spec = shard.sharding("optimizer", leaf.axes, leaf.shape, name).spec
            specs[name] = shard.restrict(spec, axes)
        return specs

    def _spec(self, part: StatePart, name: str, axes: frozenset[str]) -> PartitionSpec:
        return self._layout.shard.restrict(part.shardings[name].spec, axes)

    # On one device.

    def _run(
        self,
        grads: Params,
        weights: Params,
        slots: Slots,
        computed: Params,
        scalars: _Scalars,
    ) -> Updated:
        weights = dict(weights)
        slots = {slot: dict(arrays) for slot, arrays in slots.items()}
        gathered: Params = {}
        for group in self._groups(weights):
            state = Updated(
                {name: weights[name] for name in group.weights},
                {
                    slot: {name: arrays[name] for name in group.weights if name in arrays}
                    for slot, arrays in slots.items()
                },
                {name: computed[name] for name in self._matrices(group) if name in computed},
            )
            new = self._update_group(group, grads, state, scalars, gathered)
            weights |= new.weights
            for slot, arrays in new.slots.items():
                slots[slot] |= arrays
            gathered |= new.computed
        return Updated(weights, slots, gathered)

    def _groups(self, weights: Container[str]) -> Iterator[_Group]:
        """Yields those of the layers' weights, segment by segment, and each other weight alone."""
        by_segment: dict[tuple[str, int], list[str]] = {}
        for name, leaf in self._leaves.items():
            if name not in weights:
                continue
            if leaf.stacked:
                by_segment.setdefault((segment_of(name), leaf.shape[0]), []).append(name)
            else:
                yield _Group((name,), is_stacked=False)
        for names in by_segment.values():
            yield _Group(tuple(names), is_stacked=True)

    def _matrices(self, group: _Group) -> list[str]:
        """Returns the names of the matrices in the group's vectors."""
        vectors = [self._vectors[name] for name in group.weights if name in self._vectors]
        return [matrix.name for vector in vectors for matrix in vector.matrices]

    def _update_group(
        self,
        group: _Group,
        grads: Params,
        state: Updated,
        scalars: _Scalars,
        gathered: Params,
    ) -> Updated:
        """Returns the group's arrays after the step. gathered: params whose all-gathers come before
        these.
        """
        names = [*group.weights, *self._matrices(group)]
        group_grads = {name: grads[name] for name in names if name in grads}
        if group.is_stacked:
            return self._update_layers(group, group_grads, state, scalars, gathered)

        # A vector of one matrix is packed and gathered at once, but updated in slices, and so is
        # a table.
        (name,) = group.weights
        group_grads = self._packed(group, group_grads)
        copies = {}
        if name in self._vectors and not self._vectors[name].gathered_by_layer:
            # In the type of the layers, so that no fp32 vector is on the device.
            copies[name] = jnp.zeros(state.weights[name].shape, self._vectors[name].dtype)
        new = self._update_slices(group, group_grads, state._replace(computed=copies), scalars)
        return new._replace(computed=self._gathered(new.computed, gathered))

    def _update_layers(
        self, group: _Group, grads: Params, state: Updated, scalars: _Scalars, gathered: Params
    ) -> Updated:
        """Returns the arrays of a segment's layers after the step."""
        leaves = {name: _one_layer(self._leaves[name]) for name in group.weights}

        def turn(carry: Updated, row: jax.Array) -> tuple[Updated, None]:
            old = self._fetched(carry, lambda x: lax.dynamic_slice_in_dim(x, row, 1))
            row_grads = {name: lax.dynamic_slice_in_dim(g, row, 1) for name, g in grads.items()}
            new = self._updated(self._packed(group, row_grads), old, scalars, leaves)
            matrices = {name: x[0] for name, x in new.weights.items() if name in self._vectors}
            computed = self._gathered(matrices, gathered)
            new = new._replace(computed={name: x[None] for name, x in computed.items()})
            return self._stored(carry, new, row), None

        n_rows = state.weights[group.weights[0]].shape[0]
        return lax.scan(turn, state, jnp.arange(n_rows))[0]

    def _update_slices(
        self, group: _Group, grads: Params, state: Updated, scalars: _Scalars
    ) -> Updated:
        """Returns one weight and its slots after the step; the rows of a table slice by slice, if
        the rule is elementwise.
        """
        (name,) = group.weights
        weight = state.weights[name]
        size = _slice_size(weight) if self._is_elementwise else 0
        leaves = {name: self._leaves[name]}

        def updated(old: Updated, grads: Params) -> Updated:
            new = self._updated(grads, old, scalars, leaves)
            return new._replace(
                computed={
                    name: new.weights[name].astype(x.dtype) for name, x in old.computed.items()
                }
            )

        if not size:
            new = updated(self._fetched(state, lambda x: x), grads)
            return self._stored(state, new, None)

        def turn(carry: Updated, number: jax.Array) -> tuple[Updated, None]:
            first = number * size

            def rows(x: jax.Array) -> jax.Array:
                return lax.dynamic_slice_in_dim(x, first, size)

            new = updated(self._fetched(carry, rows), {name: rows(g) for name, g in grads.items()})
            return self._stored(carry, new, first), None

        return lax.scan(turn, state, jnp.arange(weight.shape[0] // size))[0]

    def _updated(
        self, grads: Params, old: Updated, scalars: _Scalars, leaves: ArraySpecs
    ) -> Updated:
        """Returns new weights and slots, or the old ones of a step that is not accepted."""
        weights, slots = self._optimizer.update(
            grads,
            scalars.grad_norm,
            old.slots,
            old.weights,
            scalars.step,
            scalars.n_updates,
            leaves=leaves,
        )
        select = partial(jnp.where, scalars.accepted)
        return Updated(
            jax.tree.map(select, weights, old.weights), jax.tree.map(select, slots, old.slots), {}
        )

    def _fetched(self, state: Updated, rows: Callable[[jax.Array], jax.Array]) -> Updated:
        """Returns rows of the arrays on the device."""

        def fetched(x: jax.Array, hosted: bool) -> jax.Array:
            x = rows(x)
            return jax.device_put(x, jax.memory.Space.Device) if hosted else x

        return self._map(fetched, state)

    def _stored(self, state: Updated, new: Updated, first: jax.Array | None) -> Updated:
        """Returns the arrays with new rows from `first` on; None: all rows are new."""

        def stored(x: jax.Array, hosted: bool, rows: jax.Array) -> jax.Array:
            if hosted:
                rows = jax.device_put(rows, jax.memory.Space.Host)
            return rows if first is None else lax.dynamic_update_slice_in_dim(x, rows, first, 0)

        return self._map(stored, state, new)

    def _map(self, f: Callable[..., jax.Array], state: Updated, *others: Updated) -> Updated:
        """Returns f(array, whether it is on the host, the same of others) for all arrays."""
        weights = {
            name: f(x, name in self._hosted_weights, *(other.weights[name] for other in others))
            for name, x in state.weights.items()
        }
        slots = {
            slot: {
                name: f(
                    x, slot in self._hosted_slots, *(other.slots[slot][name] for other in others)
                )
                for name, x in arrays.items()
            }
            for slot, arrays in state.slots.items()
        }
        computed = {
            name: f(x, False, *(other.computed[name] for other in others))
            for name, x in state.computed.items()
        }
        return Updated(weights, slots, computed)

    def _packed(self, group: _Group, grads: Params) -> Params:
        """Returns the gradients of the group's weights, with vectors in place of matrices."""
        packed = {}
        for name in group.weights:
            if name not in self._vectors or not self._packs_rows:
                packed[name] = grads[name]
                continue
            vector = self._vectors[name]
            matrices = {matrix.name: grads[matrix.name] for matrix in vector.matrices}
            if group.is_stacked:
                matrices = {matrix: x[0] for matrix, x in matrices.items()}
            row = vector.pack(matrices)
            packed[name] = row[None] if group.is_stacked else row
        return packed

    def _gathered(self, shards: Params, earlier: Params) -> Params:
        """Returns the params of one row of vectors. earlier: those whose all-gathers come before
        these.
        """
        gathered: Params = {}
        for name, shard in shards.items():
            vector = self._vectors[name]
            if vector.gathered_by_layer:
                continue
            shard = serialized_on_cpu(shard, (earlier, gathered), vector.mesh)
            gathered |= vector.all_gather_row(shard)
        return gathered


def _axes_of_region() -> frozenset[str]:
    """Returns the axes of the region that this code is traced in: that of islands, or none."""
    return frozenset(jax.sharding.get_abstract_mesh().manual_axes)


def _only(names: Iterable[str], arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Returns those of the arrays that have these names."""
    return {name: arrays[name] for name in names if name in arrays}


def _slots_of(names: Iterable[str], slots: Slots) -> Slots:
    return {slot: _only(names, arrays) for slot, arrays in slots.items()}


def _one_layer(leaf: ArraySpec) -> ArraySpec:
    return dataclasses.replace(leaf, shape=(1, *leaf.shape[1:]))


def _slice_size(x: jax.Array) -> int:
    """Returns how many rows of an array are updated at once: the most that divide it and have at
    most _SLICE_BYTES. 0: all of them.
    """
    if x.nbytes <= _SLICE_BYTES:
        return 0
    n_rows = x.shape[0]
    most = max(1, _SLICE_BYTES * n_rows // x.nbytes)
    size = max(size for size in _divisors(n_rows) if size <= most)
    # A number of rows without a suitable divisor would make a loop of tiny turns.
    return size if 4 * size >= most else 0


def _divisors(n: int) -> Iterator[int]:
    for small in range(1, math.isqrt(n) + 1):
        if n % small == 0:
            yield small
            yield n // small
