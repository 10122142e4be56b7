"""What a run holds, declared once: from `parts` follow where it lives, how it begins, and what is saved, planned and shown of it."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec

from mesh_lm.optim import ArraySpec, Optimizer
from mesh_lm.parallel.layout import MISFIT, ModelLayout, Params
from mesh_lm.state import loss_statistics
from sharding_rules import ShardingRuleError
from sharding_rules.rules import Kind

State = dict[str, Any]
"""{"step", "skipped": int32 scalars, "recent": float32 [2, 3] (`mesh_lm.state.loss_statistics`)}, and each of `parts`, a dict by
parameter name."""

MASTER = "master"
"""The part with the flat vectors of the fp32 weights."""
COUNTERS = ("step", "skipped", "recent")
"""The entries of a state that are no part: small, and the same on every device."""


@dataclasses.dataclass(frozen=True)
class StatePart:
    """One entry of a state: arrays by the names of parameters, or of flat vectors."""

    kind: Kind
    """The column of the rules that places what is not flat."""
    leaves: dict[str, ArraySpec]
    shardings: dict[str, jax.NamedSharding]

    @property
    def nbytes(self) -> int:
        """On one device."""
        local = (math.prod(self.shardings[n].shard_shape(leaf.shape)) * leaf.dtype.itemsize for n, leaf in self.leaves.items())
        return sum(local)


def parts(layout: ModelLayout, optimizer: Optimizer) -> dict[str, StatePart]:
    """Every entry of a run's state but the counters.

    params: what the layers use. master: the fp32 flat vectors of those that `ModelLayout.flat` says, which `params` then follow from.
    buffers: what has no gradient. Then the optimizer's slots.
    """
    flat, leaves, buffers = layout.flat, layout.leaves, layout.buffers
    used = {name: leaf.like(flat.compute_dtypes.get(name, leaf.dtype)) for name, leaf in leaves.items() if name not in buffers}
    found: dict[str, tuple[Kind, dict[str, ArraySpec]]] = {"params": ("params", used)}
    if flat.vectors:
        found[MASTER] = "optimizer", flat.leaves
    if buffers:
        found["buffers"] = "params", {name: leaf for name, leaf in leaves.items() if name in buffers}
    for slot, each in optimizer.slots(masters(layout)).items():
        found[slot] = "optimizer", each
    out, problems = {}, {}
    for part, (kind, each) in found.items():
        where = {}
        for name, leaf in each.items():
            try:
                where[name] = _where(layout, kind, name, leaf)
            except ShardingRuleError as error:
                problems[str(error)] = None
        out[part] = StatePart(kind, each, where)
    if problems:
        raise ShardingRuleError("\n  - ".join([MISFIT, *problems]))
    return out


def _where(layout: ModelLayout, kind: Kind, name: str, leaf: ArraySpec) -> jax.NamedSharding:
    return layout.flat.shardings[name] if leaf.form == "flat" else layout.shard.sharding(kind, leaf.axes, leaf.shape, name)


def masters(layout: ModelLayout) -> dict[str, ArraySpec]:
    """What the optimizer updates: flat vectors, and the parameters that are not flat; all float32."""
    rest = {name: leaf for name, leaf in layout.leaves.items() if name not in layout.flat.names | layout.buffers}
    return {**layout.flat.leaves, **rest}


def weights_of(state: State) -> Params:
    """What a model is bound with: parameters as the layers use them, and buffers."""
    return {**state["params"], **state.get("buffers", {})}


def state_shardings(layout: ModelLayout, optimizer: Optimizer) -> State:
    """Where each leaf of the state lives."""
    everywhere = jax.NamedSharding(layout.shard.mesh, PartitionSpec())
    return {**dict.fromkeys(COUNTERS, everywhere), **{name: part.shardings for name, part in parts(layout, optimizer).items()}}


def abstract_state(layout: ModelLayout, optimizer: Optimizer) -> State:
    """Shapes, dtypes and shardings of the state; no memory is touched."""
    everywhere = jax.NamedSharding(layout.shard.mesh, PartitionSpec())
    state: State = {name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=everywhere) for name, x in counters().items()}
    for name, part in parts(layout, optimizer).items():
        state[name] = {n: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=part.shardings[n]) for n, leaf in part.leaves.items()}
    return state


def initial_statistics() -> np.ndarray:
    """The state's "recent" before any step, and that of a checkpoint without one (format 1): float32 zeros [2, 3]."""
    return loss_statistics.initial()


def counters() -> State:
    """Those of a state at step 0, on the host."""
    return {"step": np.int32(0), "skipped": np.int32(0), "recent": initial_statistics()}
