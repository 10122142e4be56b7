"""Declares the training state once: placement, initialization, checkpoints, plans and reports all
follow from `parts`.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec

from mesh_lm.optim import ArraySpec, Optimizer
from mesh_lm.parallel.feedback import feedback_of
from mesh_lm.parallel.layout import MISFIT, ModelLayout, Params
from mesh_lm.state import diloco as islands
from mesh_lm.state import loss_statistics
from sharding_rules import ShardingRuleError
from sharding_rules.rules import Kind

State = dict[str, Any]
"""{"step", "skipped": int32 scalars, "recent": float32 [2, 3] (`mesh_lm.state.loss_statistics`)},
and each of `parts`, a dict by parameter name."""

MASTER = "master"
"""The part that holds flat vectors of fp32 weights."""
FEEDBACK = "feedback"
"""The part that holds what sums of gradients in int8 have left out
(`mesh_lm.parallel.feedback`)."""
COUNTERS = ("step", "skipped", "recent")
"""The other entries of a state, which are small and replicated."""


@dataclasses.dataclass(frozen=True)
class StatePart:
    """One entry of a state: arrays by the names of parameters or flat vectors."""

    kind: Kind
    """The column of the rules that shards arrays that are not flat."""
    leaves: dict[str, ArraySpec]
    shardings: dict[str, jax.NamedSharding]

    @property
    def nbytes(self) -> int:
        """Bytes on one device."""
        local = (
            math.prod(self.shardings[n].shard_shape(leaf.shape)) * leaf.dtype.itemsize
            for n, leaf in self.leaves.items()
        )
        return sum(local)


def parts(layout: ModelLayout, optimizer: Optimizer) -> dict[str, StatePart]:
    """Returns every entry of a run's state but the counters.

    params: what the layers use, but for the matrices that each layer gathers. master: fp32 flat
    vectors of the parameters in `ModelLayout.flat`, from which `params` are computed. buffers:
    parameters without gradients. Then the optimizer's slots, and the error feedback of sums in
    int8. With an outer step each island has its own weights and slots (`mesh_lm.state.diloco`).
    """
    flat, leaves, buffers, n = (
        layout.flat,
        layout.leaves,
        layout.buffers,
        islands.n_islands(layout, optimizer),
    )
    kept = {
        name: leaf for name, leaf in leaves.items() if name not in buffers | flat.gathered_names
    }
    used = {
        name: leaf.like(flat.compute_dtypes.get(name, leaf.dtype)) for name, leaf in kept.items()
    }
    declared: dict[str, tuple[Kind, dict[str, ArraySpec]]] = {"params": ("params", used)}
    if flat.vectors:
        declared[MASTER] = "optimizer", flat.leaves
    if buffers:
        declared["buffers"] = (
            "params",
            {name: leaf for name, leaf in leaves.items() if name in buffers},
        )
    for slot, each in optimizer.slots(masters(layout)).items():
        declared[slot] = "optimizer", each
    if n:
        stack = functools.partial(islands.stacked, n=n)
        declared = {
            part: (kind, {name: stack(leaf) for name, leaf in each.items()})
            for part, (kind, each) in declared.items()
        }
        declared = {
            "params": ("params", used),
            islands.WEIGHTS: declared.pop("params"),
            **declared,
            islands.MOMENTUM: ("optimizer", used),
        }
    out, problems = {}, {}
    for part, (kind, each) in declared.items():
        where = {}
        for name, leaf in each.items():
            try:
                where[name] = _where(layout, kind, name, leaf)
            except ShardingRuleError as error:
                problems[str(error)] = None
        out[part] = StatePart(kind, each, where)
    if kept := feedback_of(layout):
        out[FEEDBACK] = StatePart(
            "gradients",
            {n: r.array for n, r in kept.items()},
            {n: r.sharding for n, r in kept.items()},
        )
    if problems:
        raise ShardingRuleError("\n  - ".join([MISFIT, *problems]))
    return out


def _where(layout: ModelLayout, kind: Kind, name: str, leaf: ArraySpec) -> jax.NamedSharding:
    if leaf.axes[:1] == (islands.WEIGHTS,):
        return islands.sharding(_where(layout, kind, name, leaf.without(0)))
    return (
        layout.flat.shardings[name]
        if leaf.form == "flat"
        else layout.shard.sharding(kind, leaf.axes, leaf.shape, name)
    )


def masters(layout: ModelLayout) -> dict[str, ArraySpec]:
    """Returns what the optimizer updates: flat vectors, and parameters that are not flat; all
    float32.
    """
    rest = {
        name: leaf
        for name, leaf in layout.leaves.items()
        if name not in layout.flat.names | layout.buffers
    }
    return {**layout.flat.leaves, **rest}


def weights_of(layout: ModelLayout, state: State) -> Params:
    """Returns what the engine reads: parameters as the layers use them, buffers, and the vectors
    that layers gather their matrices from.
    """
    gathered = {v.name: state[MASTER][v.name] for v in layout.flat.vectors if v.gathered_by_layer}
    return {**state["params"], **state.get("buffers", {}), **gathered}


def state_shardings(layout: ModelLayout, optimizer: Optimizer) -> State:
    """Returns the sharding of each leaf of the state."""
    return jax.tree.map(lambda leaf: leaf.sharding, abstract_state(layout, optimizer))


def abstract_state(layout: ModelLayout, optimizer: Optimizer) -> State:
    """Returns shapes, dtypes and shardings of the state without allocating memory."""
    replicated, n = (
        jax.NamedSharding(layout.shard.mesh, PartitionSpec()),
        islands.n_islands(layout, optimizer),
    )
    where = {"recent": islands.sharding(replicated)} if n else {}
    state: State = {
        name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where.get(name, replicated))
        for name, x in counters(n).items()
    }
    for name, part in parts(layout, optimizer).items():
        state[name] = {
            n: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=part.shardings[n])
            for n, leaf in part.leaves.items()
        }
    return state


def initial_statistics() -> np.ndarray:
    """Returns "recent" at step 0, also for checkpoints without it (format 1): float32 zeros [2,
    3].
    """
    return loss_statistics.initial()


def counters(n_islands: int = 0) -> State:
    """Returns the counters at step 0, on the host."""
    recent = initial_statistics()
    return {
        "step": np.int32(0),
        "skipped": np.int32(0),
        "recent": islands.statistics(recent, n_islands) if n_islands else recent,
    }
