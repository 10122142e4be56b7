"""Data-parallel traffic of pipeline stages whose rules keep the layers' matrices as flat vectors
over the replicas (`zero3` in a pipeline).

A stage gathers each of its layers once a step and keeps it, and sums the gradient of each layer
once: the traffic of the distributed optimizer. But all except the first chunk is gathered while the
pipeline fills, and all except the gradients of the first chunk are summed while it drains
(`mesh_lm.schedules.transfers`). With pipeline.chunks=1 a stage has only a first chunk: all of it is
gathered before the first tick and summed after the last, and nothing is hidden.
"""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jax import lax

from mesh_lm.parallel.layer_collectives import LayerCollectives, row_of, with_row, zeros_on_device
from mesh_lm.parallel.layout import ModelLayout, Params
from mesh_lm.schedules.table import Table
from mesh_lm.schedules.transfers import Transfers, plan_transfers


def plan(layout: ModelLayout, table: Table) -> dict[str, Transfers]:
    """Returns the transfers of each segment whose layers' matrices a stage gathers, by the
    segment's name.
    """
    return {
        name: plan_transfers(table, stack)
        for name, stack in layout.stacks.items()
        if layout.flat.gathered_by(name)
    }


class StageTransfers:
    """The transfers of one stage, in the engine's region. An object without vectors has nothing to
    move.
    """

    def __init__(
        self, layout: ModelLayout, vectors: Params, table: Table, stage: Mapping[str, jax.Array]
    ) -> None:
        """vectors: this device's shards [rows, n]. stage: its order of rows, "moe/gathers" and
        "moe/sums", int32 [rows] each.
        """
        self.layout = layout
        self.vectors = vectors
        self.stage = stage
        self.plans = plan(layout, table) if vectors else {}
        self.collectives = {segment: LayerCollectives(layout, segment) for segment in self.plans}

    def finished(self, x: jax.Array) -> jax.Array:
        """Returns `LayerCollectives.finished` of an activation [B, S, D]."""
        collectives = next(iter(self.collectives.values()))
        spec = self.layout.shard.spec("activations", ("batch", "seq_resid", "embed"))
        return collectives.finished(x, spec)

    # Weights.

    def first_weights(self) -> Params:
        """Returns this stage's matrices [rows, ...], as the layers use them: the rows that are
        gathered before the first tick, and zeros.
        """
        return self._gathered(
            {segment: plan.n_gathered_first for segment, plan in self.plans.items()}
        )

    def all_weights(self) -> Params:
        """Returns this stage's matrices, all gathered."""
        return self._gathered(
            {segment: plan.gather_order.shape[1] for segment, plan in self.plans.items()}
        )

    def _gathered(self, n_rows: Mapping[str, int]) -> Params:
        """Returns this stage's matrices, of which the first `n_rows` in the order of the gathers
        are gathered.
        """
        weights: Params = {}
        for segment, collectives in self.collectives.items():
            stack_height = self.plans[segment].gather_order.shape[1]
            zeros = {
                name: jnp.zeros((stack_height, *matrix.shape), matrix.dtype)
                for name, matrix in collectives.abstract.items()
            }

            def gather(
                weights: Params, row: jax.Array, collectives: LayerCollectives = collectives
            ) -> tuple[Params, None]:
                # No tick runs yet that could hide it, nor anything that it must wait for.
                matrices, _ = collectives.gather(self.vectors, row, jnp.float32(0))
                return collectives.constrain_stacked(with_row(weights, row, matrices)), None

            rows = self._order(segment, "gathers")[: n_rows[segment]]
            weights |= lax.scan(gather, collectives.constrain_stacked(zeros), rows)[0]
        return weights

    def gather(self, tick: jax.Array, predecessor: jax.Array) -> dict[str, Params]:
        """Returns a row of each segment's matrices, which layers may use from the next tick on
        (`with_gathered`). predecessor: see LayerCollectives.
        """
        gathered = {}
        for segment, collectives in self.collectives.items():
            row = self._gather_row(segment, tick)
            gathered[segment], predecessor = collectives.gather(self.vectors, row, predecessor)
        return gathered

    def with_gathered(
        self, weights: Params, tick: jax.Array, gathered: Mapping[str, Params]
    ) -> Params:
        """Returns the stage's matrices with the rows that `gather` returned in this tick."""
        for segment, collectives in self.collectives.items():
            segment_weights = {name: weights[name] for name in gathered[segment]}
            row = self._gather_row(segment, tick)
            segment_weights = with_row(segment_weights, row, gathered[segment])
            weights = weights | collectives.constrain_stacked(segment_weights)
        return weights

    # Gradients.

    def zeros(self) -> Params:
        """Returns the sums of the gradients, like the vectors, at zero."""
        return zeros_on_device(self.vectors)

    def gradients(self, tick: jax.Array, stacked_grads: Params) -> dict[str, Params]:
        """Returns the gradients of the layers, one of each segment, that `reduce` moves in this
        tick.
        """
        row_grads = {}
        for segment, collectives in self.collectives.items():
            segment_grads = {name: stacked_grads[name] for name in collectives.specs}
            row_grads[segment] = row_of(segment_grads, self._reduce_row(segment, tick))
        return row_grads

    def reduce(self, grads: Mapping[str, Params], predecessor: jax.Array) -> Params:
        """Returns a row of each vector: this replica's shards of the gradients, summed over the
        replicas.
        """
        shards: Params = {}
        for segment, collectives in self.collectives.items():
            segment_shards, predecessor = collectives.reduce(grads[segment], predecessor)
            shards |= segment_shards
        return shards

    def with_reduced(self, vector_grads: Params, tick: jax.Array, shards: Params) -> Params:
        """Returns the vectors' gradients with the rows that `reduce` returned in this tick."""
        for segment, collectives in self.collectives.items():
            names = [vector.name for vector in collectives.vectors]
            vector_grads = vector_grads | with_row(
                {name: vector_grads[name] for name in names},
                self._reduce_row(segment, tick),
                {name: shards[name] for name in names},
            )
        return vector_grads

    def reduce_last(self, vector_grads: Params, stacked_grads: Params) -> Params:
        """Returns the gradients of the vectors, with the rows that are summed after the last
        tick.
        """
        for segment, collectives in self.collectives.items():
            names = [vector.name for vector in collectives.vectors]
            segment_grads = {name: stacked_grads[name] for name in collectives.specs}

            def add(
                totals: Params,
                row: jax.Array,
                collectives: LayerCollectives = collectives,
                segment_grads: Params = segment_grads,
            ) -> tuple[Params, None]:
                shards, _ = collectives.reduce(row_of(segment_grads, row), jnp.float32(0))
                return with_row(totals, row, shards), None

            last_rows = self._order(segment, "sums")[self.plans[segment].reduce_ticks :]
            totals = {name: vector_grads[name] for name in names}
            vector_grads = vector_grads | lax.scan(add, totals, last_rows)[0]
        return vector_grads

    # The rows of a tick. Where one segment needs fewer ticks than another, it moves a row again.

    def _order(self, segment: str, direction: str) -> jax.Array:
        """Returns the rows in the order of their gathers or of the sums of their gradients."""
        return self.stage[f"{segment}/{direction}"]

    def _gather_row(self, segment: str, tick: jax.Array) -> jax.Array:
        order = self._order(segment, "gathers")
        return order[jnp.minimum(self.plans[segment].n_gathered_first + tick, len(order) - 1)]

    def _reduce_row(self, segment: str, tick: jax.Array) -> jax.Array:
        plan = self.plans[segment]
        first_tick = plan.ticks - plan.reduce_ticks
        return self._order(segment, "sums")[jnp.maximum(tick - first_tick, 0)]
