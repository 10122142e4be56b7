"""Declares the training state once: placement, initialization, checkpoints, plans and reports all
follow from `parts`.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import PartitionSpec

from mesh_lm.optim import ArraySpec, Optimizer
from mesh_lm.optim.quantization import SHORTEST_BLOCK
from mesh_lm.parallel.feedback import feedback_of
from mesh_lm.parallel.layout import MISFIT, ModelLayout, Params
from mesh_lm.state import diloco as islands
from mesh_lm.state import loss_statistics, placement
from sharding_rules import ShardingRuleError
from sharding_rules.rules import Kind, axes_of

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


class _Leaves(NamedTuple):
    """The arrays of one part, and the column of the rules that shards them."""

    kind: Kind
    leaves: dict[str, ArraySpec]


class _DividedBlocks(NamedTuple):
    """A parameter whose blocks the rules would divide."""

    block: int
    local_width: int
    """Elements of its last dimension on a device."""


@dataclasses.dataclass(frozen=True)
class StatePart:
    """One entry of a state: arrays by the names of parameters or flat vectors."""

    kind: Kind
    """The column of the rules that shards arrays that are not flat."""
    leaves: dict[str, ArraySpec]
    shardings: dict[str, jax.NamedSharding]
    """Those of the arrays on the devices, whose shards an array on the hosts has, too."""
    on_host: bool = False
    """Whether its arrays are in the hosts' pinned memory (optimizer.offload)."""

    def sharding(self, name: str) -> jax.NamedSharding:
        """Returns the sharding of an array of the state, with its kind of memory."""
        sharding = self.shardings[name]
        return placement.on_host(sharding) if self.on_host else sharding

    @property
    def nbytes(self) -> int:
        """Bytes on one device, or on the host for each device."""
        nbytes = 0
        for name, leaf in self.leaves.items():
            size = math.prod(self.shardings[name].shard_shape(leaf.shape))
            nbytes += size * leaf.dtype.itemsize
        return nbytes


def parts(layout: ModelLayout, optimizer: Optimizer) -> dict[str, StatePart]:
    """Returns every entry of a run's state but the counters.

    params: what the layers use, but for the matrices that each layer gathers. master: fp32 flat
    vectors of the parameters in `ModelLayout.flat`, from which `params` are computed. buffers:
    parameters without gradients. Then the optimizer's slots, and the error feedback of sums in
    int8. With an outer step each island has its own weights and slots (`mesh_lm.state.diloco`).
    """
    state_parts: dict[str, StatePart] = {}
    problems: list[str] = []
    divided: dict[str, _DividedBlocks] = {}
    for part, (kind, leaves) in _declared(layout, optimizer).items():
        shardings = {}
        for name, leaf in leaves.items():
            try:
                local_width = _local_width(layout, kind, name, leaf)
                if local_width % leaf.block:
                    divided[name] = _DividedBlocks(leaf.block, local_width)
                    continue
                shardings[name] = _sharding(layout, kind, name, leaf)
            except ShardingRuleError as error:
                problems.append(str(error))
        is_offloaded = part in optimizer.config.offload
        state_parts[part] = StatePart(kind, leaves, shardings, on_host=is_offloaded)
    feedback = feedback_of(layout)
    if feedback:
        state_parts[FEEDBACK] = StatePart(
            kind="gradients",
            leaves={name: leaf.array for name, leaf in feedback.items()},
            shardings={name: leaf.sharding for name, leaf in feedback.items()},
        )
    if divided:
        problems.append(_divided_problem(divided))
    if problems:
        raise ShardingRuleError("\n  - ".join([MISFIT, *dict.fromkeys(problems)]))
    return state_parts


def _local_width(layout: ModelLayout, kind: Kind, name: str, leaf: ArraySpec) -> int:
    """Returns how many elements of the parameter's last dimension, for blocks of which an array has
    an element, a device has. 0: the array has no blocks, or the parameter itself does not divide.
    """
    if leaf.block == 1:
        return 0
    if leaf.axes[:1] == (islands.WEIGHTS,):
        leaf = leaf.without(0)
    width = leaf.shape[-1] * leaf.block
    spec = layout.shard.sharding(kind, leaf.axes, name=name).spec
    n_shards = math.prod(layout.shard.mesh.shape[axis] for axis in axes_of(spec[-1]))
    return 0 if width % n_shards else width // n_shards


def _divided_problem(divided: dict[str, _DividedBlocks]) -> str:
    """Returns what is wrong with blocks that the rules would divide, and what works instead."""
    name, (block, local_width) = next(iter(divided.items()))
    # A block size is the greatest common divisor of the field and of a dimension. So this one suits
    # every parameter of the list, and those that the larger one suits.
    works = math.gcd(*(math.gcd(*sizes) for sizes in divided.values()))
    if works >= SHORTEST_BLOCK:
        remedy = (
            f"set optimizer.rule.block_size={works}, with which a run starts from scratch: its "
            "moments are not those of a checkpoint with other blocks"
        )
    else:
        remedy = "shard them over fewer devices, or use optimizer.rule=adamw"
    return (
        f"the rules would divide blocks of {block} elements that share a scale, in parameters such "
        f"as {name}, whose last dimension has {local_width} elements on a device; {remedy}"
    )


def _declared(layout: ModelLayout, optimizer: Optimizer) -> dict[str, _Leaves]:
    """Returns the arrays of every part but the error feedback."""
    flat = layout.flat
    absent = layout.buffers | flat.gathered_names
    compute_params = {
        name: leaf.like(flat.compute_dtypes.get(name, leaf.dtype))
        for name, leaf in layout.leaves.items()
        if name not in absent
    }
    declared = {"params": _Leaves("params", compute_params)}
    if flat.vectors:
        declared[MASTER] = _Leaves("optimizer", flat.leaves)
    if layout.buffers:
        buffers = {name: leaf for name, leaf in layout.leaves.items() if name in layout.buffers}
        declared["buffers"] = _Leaves("params", buffers)
    for slot, leaves in optimizer.slots(masters(layout)).items():
        declared[slot] = _Leaves("optimizer", leaves)

    n = islands.n_islands(layout, optimizer)
    if not n:
        return declared
    stacked = {
        part: _Leaves(kind, {name: islands.stacked(leaf, n) for name, leaf in leaves.items()})
        for part, (kind, leaves) in declared.items()
    }
    island_weights = stacked.pop("params")
    return {
        "params": declared["params"],
        islands.WEIGHTS: island_weights,
        **stacked,
        islands.MOMENTUM: _Leaves("optimizer", compute_params),
    }


def _sharding(layout: ModelLayout, kind: Kind, name: str, leaf: ArraySpec) -> jax.NamedSharding:
    if leaf.axes[:1] == (islands.WEIGHTS,):
        return islands.sharding(_sharding(layout, kind, name, leaf.without(0)))
    if leaf.form == "flat":
        return layout.flat.shardings[name]
    return layout.shard.sharding(kind, leaf.axes, leaf.shape, name)


def masters(layout: ModelLayout) -> dict[str, ArraySpec]:
    """Returns the arrays that the optimizer updates, all float32: flat vectors, and parameters that
    are not flat (`ModelLayout.optimizer_leaves`).
    """
    absent = layout.flat.names | layout.buffers
    leaves = layout.optimizer_leaves
    parameters = {name: leaf for name, leaf in leaves.items() if name not in absent}
    return {**layout.flat.leaves, **parameters}


def weights_of(layout: ModelLayout, state: State) -> Params:
    """Returns the arrays that the engine reads: parameters as the layers use them, buffers, and the
    vectors that layers gather their matrices from.
    """
    gathered = {
        vector.name: state[MASTER][vector.name]
        for vector in layout.flat.vectors
        if vector.gathered_by_layer
    }
    return {**state["params"], **state.get("buffers", {}), **gathered}


def state_shardings(layout: ModelLayout, optimizer: Optimizer) -> State:
    """Returns the sharding of each leaf of the state."""
    return jax.tree.map(lambda leaf: leaf.sharding, abstract_state(layout, optimizer))


def abstract_state(layout: ModelLayout, optimizer: Optimizer) -> State:
    """Returns shapes, dtypes and shardings of the state without allocating memory."""
    n = islands.n_islands(layout, optimizer)
    replicated = jax.NamedSharding(layout.shard.mesh, PartitionSpec())
    state: State = {}
    for name, x in counters(n).items():
        sharding = islands.sharding(replicated) if n and name == "recent" else replicated
        state[name] = jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
    for part, declared in parts(layout, optimizer).items():
        state[part] = {
            name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=declared.sharding(name))
            for name, leaf in declared.leaves.items()
        }
    return state


def counters(n_islands: int = 0) -> State:
    """Returns the counters at step 0, on the host."""
    recent = loss_statistics.initial_statistics()
    return {
        "step": np.int32(0),
        "skipped": np.int32(0),
        "recent": islands.statistics(recent, n_islands) if n_islands else recent,
    }
