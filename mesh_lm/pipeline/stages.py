"""Which layers lie on which stage, and where a layer lies in a stacked leaf.

P stages of V chunks are P * V virtual stages, through which every token goes in order: virtual stage s is chunk s // P of stage s % P. In
memory a leaf that stacks one weight of all layers has P * V * width rows in order (stage, chunk, slot), so that cutting its first dimension
into P gives each stage its own; width is the most layers of any virtual stage, and the rows of the others that hold no layer are padding.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal

import numpy as np

from mesh_lm.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class Costs:
    """Matmul FLOPs of one token, or any other unit: only ratios matter. A prefix of unlike layers counts as embed, a suffix as head."""

    embed: float = 0.0
    layer: float = 1.0
    head: float = 0.0


@dataclasses.dataclass(frozen=True)
class Stack:
    """What of a model can be divided."""

    n_layers: int
    period: int = 1
    """Layers of one window pattern: a virtual stage has whole ones."""
    costs: Costs = Costs()

    def run(self, virtual: int, repeats: bool) -> Costs:
        """What so many virtual stages compute, not only what the model needs.

        repeats: a backward slot repeats the forward pass, a third of a layer's FLOPs. Then the last virtual stage has no forward slot of
        its own, and its head is free up to that.
        """
        if not repeats:
            return self.costs
        again = self.costs.layer / 3
        head = max(0.0, self.costs.head - self.n_layers / virtual * again)
        return Costs(self.costs.embed, self.costs.layer + again, head)


@dataclasses.dataclass(frozen=True)
class Stages:
    """A division of the layers; `divide` makes it."""

    stages: int
    """P, the size of the mesh axis pipeline."""
    counts: tuple[int, ...]
    """Layers of each of the P * V virtual stages, in model order."""

    @property
    def chunks(self) -> int:
        """V, the virtual stages on one stage."""
        return len(self.counts) // self.stages

    @property
    def n_layers(self) -> int:
        return sum(self.counts)

    @property
    def width(self) -> int:
        """Rows of one virtual stage."""
        return max(self.counts)

    @property
    def rows(self) -> int:
        """Rows of a stacked leaf in memory."""
        return len(self.counts) * self.width

    @property
    def identity(self) -> bool:
        """True where the rows in memory are the layers in model order, none padding."""
        return self.rows == self.n_layers and 1 in (self.stages, self.chunks)

    def count(self) -> np.ndarray:
        """int32 [P, V]: layers of each chunk of each stage."""
        return self._by_stage(self.counts)

    def first(self) -> np.ndarray:
        """int32 [P, V]: the number in the model of each chunk's first layer."""
        return self._by_stage(np.cumsum((0, *self.counts[:-1])))

    def layer_of_row(self) -> np.ndarray:
        """int32 [rows]: the layer that a row in memory holds; -1 where it is padding."""
        slot = np.arange(self.width, dtype=np.int32)
        return np.where(slot < self.count()[..., None], self.first()[..., None] + slot, -1).ravel()

    def row_of_layer(self) -> np.ndarray:
        """int32 [n_layers]: the row in memory that holds a layer."""
        layers = self.layer_of_row()
        rows = np.flatnonzero(layers >= 0).astype(np.int32)
        return rows[np.argsort(layers[rows])]

    def flops(self, costs: Costs) -> np.ndarray:
        """float64 [P]: what each stage does for one token. The embedding is on the first virtual stage, the head on the last."""
        return self.count().sum(1) * costs.layer + _ends(costs, len(self.counts)).reshape(self.chunks, self.stages).sum(0)

    def wasted_bytes(self, bytes_per_layer: float) -> float:
        """Bytes that the padding takes, over all stages."""
        return (self.rows - self.n_layers) * bytes_per_layer

    def _by_stage(self, of_virtual: Sequence[int] | np.ndarray) -> np.ndarray:
        return np.asarray(of_virtual, np.int32).reshape(self.chunks, self.stages).T


def divide(
    n_layers: int,
    stages: int,
    chunks: int = 1,
    *,
    layers: Sequence[int] = (),
    balance: Literal["equal", "flops"] = "equal",
    period: int = 1,
    costs: Costs = Costs(),
) -> Stages:
    """Gives every virtual stage at least one of the n_layers, in whole periods of the window pattern.

    Args:
      layers: how many each virtual stage gets, in model order; empty: by `balance`.
      balance: equal: the same everywhere. flops: so that the stage that does most for a token, with `costs`, does as little as can be;
        of all such divisions, one whose busiest virtual stage does least.
      period: layers of one window pattern.

    Raises ConfigError where the layers do not go into the stages, with what would.
    """
    virtual = stages * chunks
    what = f"the {virtual} virtual stages of mesh.pipeline={stages} x pipeline.chunks={chunks}"
    if n_layers % period:
        raise ConfigError(f"model.n_layers={n_layers} is not a multiple of the {period} entries of model.window")
    if layers:
        return Stages(stages, _checked(tuple(layers), n_layers, virtual, period, what))
    if n_layers < virtual * period:
        least = f"each needs at least {period}{' (the entries of model.window)' * (period > 1)}"
        raise ConfigError(f"model.n_layers={n_layers} is too few for {what}: {least}; lower mesh.pipeline or pipeline.chunks")
    if balance == "flops":
        block = dataclasses.replace(costs, layer=costs.layer * period)
        return Stages(stages, tuple(period * count for count in _balanced(n_layers // period, stages, chunks, block)))
    if n_layers % (unit := virtual * period):
        equal = f"does not divide into {what}" + f" in whole periods of the {period} entries of model.window" * (period > 1)
        near = f"model.n_layers={n_layers // unit * unit} or {(n_layers // unit + 1) * unit}"
        raise ConfigError(f"model.n_layers={n_layers} {equal}; {near} would, or set pipeline.balance=flops or pipeline.layers")
    return Stages(stages, (n_layers // virtual,) * virtual)


def _checked(layers: tuple[int, ...], n_layers: int, virtual: int, period: int, what: str) -> tuple[int, ...]:
    wrong = []
    if len(layers) != virtual:
        wrong.append(f"has {len(layers)} entries; it needs one for each of {what}, in model order")
    if sum(layers) != n_layers:
        wrong.append(f"sums to {sum(layers)}, not to model.n_layers={n_layers}")
    if min(layers) < 1:
        wrong.append("leaves a virtual stage without layers; each needs at least 1")
    elif any(count % period for count in layers):
        wrong.append(f"cuts the pattern of model.window in two; every entry must be a multiple of {period}")
    if wrong:
        raise ConfigError(f"pipeline.layers={','.join(map(str, layers))} {'; it '.join(wrong)}")
    return layers


def _ends(costs: Costs, virtual: int) -> np.ndarray:
    """What each virtual stage does besides its layers."""
    extra = np.zeros(virtual)
    extra[0] += costs.embed
    extra[-1] += costs.head
    return extra


def _balanced(n: int, stages: int, chunks: int, costs: Costs) -> list[int]:
    """The least that the busiest stage can do limits how many layers each may have; within that, the virtual stages are levelled."""
    extra = _ends(costs, stages * chunks)
    of_stage = extra.reshape(chunks, stages).sum(0)
    most = (of_stage + costs.layer * _fill(n, of_stage, costs.layer, chunks, np.full(stages, n))).max()
    room = (of_stage[:, None] + costs.layer * np.arange(n + 1) <= most).sum(1) - 1
    return _fill(n, extra, costs.layer, 1, room).tolist()


def _fill(n: int, extra: np.ndarray, layer: float, least: int, room: np.ndarray) -> np.ndarray:
    """Hands out n layers one by one, each to the place that then does least, where stage i % len(room) of place i has room.

    Greedy is exact: the counts allowed are a matroid, whose greedy basis has the least maximum. Of equals the last takes it, for
    late stages hold fewer microbatches at once.
    """
    count, stage = np.full(len(extra), least), np.arange(len(extra)) % len(room)
    for _ in range(n - count.sum()):
        free = np.bincount(stage, count, len(room))[stage] < room[stage]
        best = min(np.flatnonzero(free), key=lambda i: (extra[i] + layer * (count[i] + 1), count[i], -i))
        count[best] += 1
    return count
