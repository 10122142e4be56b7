"""Data-parallel traffic of pipeline stages whose rules keep the layers' matrices as flat vectors
over the replicas (`zero3` in a pipeline).

A stage gathers each of its layers once a step and keeps it, and sums the gradient of each layer
once: the traffic of the distributed optimizer. But all except the first chunk is gathered while the
pipeline fills, and all except the gradients of the first chunk are summed while it drains
(`mesh_lm.schedules.transfers`).
"""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jax import lax

from mesh_lm.parallel.layer_collectives import LayerCollectives, row_of, with_row
from mesh_lm.parallel.layout import ModelLayout, Params
from mesh_lm.schedules.table import Table
from mesh_lm.schedules.transfers import Transfers, plan_transfers


def plan(layout: ModelLayout, table: Table) -> dict[str, Transfers]:
    """The transfers of each segment whose layers' matrices a stage gathers, by the segment's
    name.
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
        self.layout, self.vectors, self.stage = layout, vectors, stage
        self.plans = plan(layout, table) if vectors else {}
        self.collectives = {segment: LayerCollectives(layout, segment) for segment in self.plans}

    def finished(self, x: jax.Array) -> jax.Array:
        """`LayerCollectives.finished` of an activation [B, S, D]."""
        each = next(iter(self.collectives.values()))
        return each.finished(
            x, self.layout.shard.spec("activations", ("batch", "seq_resid", "embed"))
        )

    # Weights.

    def first_weights(self) -> Params:
        """This stage's matrices [rows, ...], as the layers use them: those rows that are gathered
        before the first tick, else zeros.
        """
        return self._gathered({segment: plan.before for segment, plan in self.plans.items()})

    def all_weights(self) -> Params:
        """This stage's matrices, all gathered."""
        return self._gathered(
            {segment: plan.gathers.shape[1] for segment, plan in self.plans.items()}
        )

    def _gathered(self, rows: Mapping[str, int]) -> Params:
        out: Params = {}
        for segment, each in self.collectives.items():
            stacked = {
                name: jnp.zeros((self.plans[segment].gathers.shape[1], *like.shape), like.dtype)
                for name, like in each.abstract.items()
            }

            def gather(
                weights: Params, row: jax.Array, each: LayerCollectives = each
            ) -> tuple[Params, None]:
                return each.of_stacked(
                    with_row(weights, row, each.gather(self.vectors, row, jnp.float32(0))[0])
                ), None

            out |= lax.scan(
                gather, each.of_stacked(stacked), self._order(segment, "gathers")[: rows[segment]]
            )[0]
        return out

    def gather(self, tick: jax.Array, after: jax.Array) -> dict[str, Params]:
        """A row of each segment's matrices, which layers may use from the next tick on
        (`with_gathered`). after: see LayerCollectives.
        """
        out = {}
        for segment, each in self.collectives.items():
            out[segment], after = each.gather(self.vectors, self._gather_row(segment, tick), after)
        return out

    def with_gathered(
        self, weights: Params, tick: jax.Array, gathered: Mapping[str, Params]
    ) -> Params:
        """The stage's matrices with the rows that `gather` returned in this tick."""
        for segment, each in self.collectives.items():
            own = {name: weights[name] for name in gathered[segment]}
            weights = weights | each.of_stacked(
                with_row(own, self._gather_row(segment, tick), gathered[segment])
            )
        return weights

    # Gradients.

    def zeros(self) -> Params:
        """The sums of the gradients, like the vectors, at zero."""
        return jax.tree.map(jnp.zeros_like, self.vectors)

    def gradients(self, tick: jax.Array, of_layers: Params) -> dict[str, Params]:
        """The gradients of those layers, one of each segment, that `sum` moves in this tick."""
        return {
            segment: row_of({n: of_layers[n] for n in each.specs}, self._sum_row(segment, tick))
            for segment, each in self.collectives.items()
        }

    def sum(self, grads: Mapping[str, Params], after: jax.Array) -> Params:
        """A row of each vector: this replica's shards of the gradients, summed over the
        replicas.
        """
        out: Params = {}
        for segment, each in self.collectives.items():
            shards, after = each.reduce(grads[segment], after)
            out |= shards
        return out

    def with_sums(self, totals: Params, tick: jax.Array, summed: Params) -> Params:
        """The vectors' gradients with the rows that `sum` returned in this tick."""
        for segment, each in self.collectives.items():
            names = [vector.name for vector in each.vectors]
            totals = totals | with_row(
                {n: totals[n] for n in names},
                self._sum_row(segment, tick),
                {n: summed[n] for n in names},
            )
        return totals

    def last_sums(self, totals: Params, of_layers: Params) -> Params:
        """The gradients of the vectors, with the rows that are summed after the last tick."""
        for segment, each in self.collectives.items():
            names, own = (
                [vector.name for vector in each.vectors],
                {n: of_layers[n] for n in each.specs},
            )

            def add(
                totals: Params, row: jax.Array, each: LayerCollectives = each, own: Params = own
            ) -> tuple[Params, None]:
                return with_row(totals, row, each.reduce(row_of(own, row), jnp.float32(0))[0]), None

            last = self._order(segment, "sums")[self.plans[segment].sum_ticks :]
            totals = totals | lax.scan(add, {n: totals[n] for n in names}, last)[0]
        return totals

    # The rows of a tick. Where one segment needs fewer ticks than another, it moves a row again.

    def _order(self, segment: str, what: str) -> jax.Array:
        return self.stage[f"{segment}/{what}"]

    def _gather_row(self, segment: str, tick: jax.Array) -> jax.Array:
        order, plan = self._order(segment, "gathers"), self.plans[segment]
        return order[jnp.minimum(plan.before + tick, len(order) - 1)]

    def _sum_row(self, segment: str, tick: jax.Array) -> jax.Array:
        plan = self.plans[segment]
        return self._order(segment, "sums")[jnp.maximum(tick - (plan.ticks - plan.sum_ticks), 0)]
