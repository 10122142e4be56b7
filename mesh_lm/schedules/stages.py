"""The division of a model's layers among pipeline stages, and the rows of a stacked array that hold
them.

P stages of V chunks are P * V virtual stages, through which every token goes in order: virtual
stage s is chunk s // P of stage s % P. A virtual stage is a contiguous run of the model's layers:
of each segment it holds a contiguous run, perhaps empty, in the segments' order.

In memory, an array that stacks one weight of all layers of a segment has P * rows_per_stage rows,
so that sharding its first dimension over P stages gives each stage its own layers. A stage has as
many rows as the stage with the most layers of the segment; its chunks follow each other, and the
remaining rows are padding at the end. A pass through a virtual stage reads `rows_per_pass` rows
from its start row on. The first of them, the skipped rows, belong to the previous chunk, and those
after its own layers belong to the next one or are padding.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Literal

import numpy as np

from mesh_lm.errors import ConfigError
from mesh_lm.schedules.segments import Segment, Stack


@dataclasses.dataclass(frozen=True)
class StackLayout:
    """The layers of one segment on the stages; `divide` makes it."""

    stages: int
    """P, the size of the mesh axis pipeline."""
    layer_counts: tuple[int, ...]
    """Layers of the segment on each of the P * V virtual stages, in model order."""

    @property
    def chunks(self) -> int:
        """V, the virtual stages on one stage."""
        return len(self.layer_counts) // self.stages

    @property
    def n_layers(self) -> int:
        """Layers of the segment on all virtual stages."""
        return sum(self.layer_counts)

    @property
    def rows_per_pass(self) -> int:
        """Rows that a pass through one virtual stage reads: the most layers of the segment on any
        of them.
        """
        return max(self.layer_counts)

    @property
    def rows_per_stage(self) -> int:
        """Rows of one stage: the most layers of the segment on any stage."""
        return int(self.chunk_layers().sum(1).max())

    @property
    def padded_rows(self) -> int:
        """Rows of a stacked array in memory, including padding."""
        return self.stages * self.rows_per_stage

    @property
    def has_padding(self) -> bool:
        """Whether some pass reads a row that is not one of its own layers."""
        return min(self.layer_counts) < self.rows_per_pass

    @property
    def is_contiguous(self) -> bool:
        """Whether the rows in memory are the layers in model order, without padding."""
        return np.array_equal(self.layer_of_row(), np.arange(self.n_layers))

    def chunk_layers(self) -> np.ndarray:
        """The number of layers of each chunk of each stage, int32 [P, V]."""
        return self._by_stage(self.layer_counts)

    def chunk_first_layers(self) -> np.ndarray:
        """The number of each chunk's first layer in the segment, int32 [P, V]."""
        return self._by_stage(np.cumsum((0, *self.layer_counts[:-1])))

    def chunk_start_rows(self) -> np.ndarray:
        """The first row of its stage that a pass through each chunk reads, int32 [P, V]."""
        return np.minimum(self._row_offsets(), self.rows_per_stage - self.rows_per_pass).astype(
            np.int32
        )

    def chunk_skipped_rows(self) -> np.ndarray:
        """The number of leading rows of a pass that belong to the previous chunk, int32 [P, V]."""
        return (self._row_offsets() - self.chunk_start_rows()).astype(np.int32)

    def layer_of_row(self) -> np.ndarray:
        """The layer of the segment in each row in memory, int32 [padded_rows]; -1: padding."""
        layers, offset, first = (
            np.full((self.stages, self.rows_per_stage), -1, np.int32),
            self._row_offsets(),
            self.chunk_first_layers(),
        )
        for (stage, chunk), count in np.ndenumerate(self.chunk_layers()):
            begin, layer = offset[stage, chunk], first[stage, chunk]
            layers[stage, begin : begin + count] = range(layer, layer + count)
        return layers.ravel()

    def row_of_layer(self) -> np.ndarray:
        """The row in memory of each layer, int32 [n_layers]."""
        layers = self.layer_of_row()
        rows = np.flatnonzero(layers >= 0).astype(np.int32)
        return rows[np.argsort(layers[rows])]

    def wasted_bytes(self, bytes_per_layer: float) -> float:
        """Bytes of padding, over all stages."""
        return (self.padded_rows - self.n_layers) * bytes_per_layer

    def _row_offsets(self) -> np.ndarray:
        return np.cumsum(self.chunk_layers(), 1) - self.chunk_layers()

    def _by_stage(self, of_virtual: Sequence[int] | np.ndarray) -> np.ndarray:
        return np.asarray(of_virtual, np.int32).reshape(self.chunks, self.stages).T


StackLayouts = dict[str, StackLayout]
"""By the name of the segment, in model order."""


def flops(layouts: StackLayouts, stack: Stack) -> np.ndarray:
    """The cost of each stage for one token, float64 [P]. The embedding is on the first virtual
    stage, the head on the last.
    """
    each = [layouts[segment.name].chunk_layers() * segment.cost for segment in stack.segments]
    stages, chunks = each[0].shape
    return np.sum(each, 0).sum(1) + _ends(stack, stages * chunks).reshape(chunks, stages).sum(0)


def divide(
    stack: Stack,
    stages: int,
    chunks: int = 1,
    *,
    layers: Sequence[int] = (),
    balance: Literal["equal", "flops"] = "equal",
) -> StackLayouts:
    """The division of a stack among the stages: every virtual stage gets at least one layer, and
    complete periods of each segment.

    Args:
      stack: a stack without `Stack.problems`. layers: the number of layers of each virtual stage,
      in model order, over all segments; empty: by `balance`. balance: equal: the same number
      everywhere. flops: as even as complete periods allow, by the costs of the stack. If all
      periods cost
        the same, it minimises the cost of the busiest stage, then that of the busiest virtual
        stage. Otherwise it minimises the cost of the busiest virtual stage, then the sum of the
        squared costs of the virtual stages.

    Raises ConfigError, with sizes that would work, if the layers do not divide among the stages.
    """
    virtual, n_layers = stages * chunks, stack.n_layers
    what = f"the {virtual} virtual stages of mesh.pipeline={stages} x pipeline.chunks={chunks}"
    if layers:
        return _as_given(tuple(layers), stack, stages, virtual, what)
    periods = [
        (segment.period, segment.period * segment.cost)
        for segment in stack.segments
        for _ in range(0, segment.n_layers, segment.period)
    ]
    if len(periods) < virtual:
        size = f"model.n_layers={n_layers}" + f" ({len(periods)} complete periods)" * (
            len(periods) < n_layers
        )
        raise ConfigError(
            f"{size} is too few for {what}: each needs at least 1; lower mesh.pipeline or "
            "pipeline.chunks"
        )
    if balance == "flops":
        costs, ends = [cost for _, cost in periods], _ends(stack, virtual)
        held = (
            _greedy(len(periods), costs[0], ends, stages)
            if len(set(periods)) == 1
            else _partition(costs, ends)
        )
        each = iter(periods)
        return _stack_layouts(
            [sum(length for length, _ in itertools.islice(each, count)) for count in held],
            stack,
            stages,
        )
    equal = _stack_layouts([n_layers // virtual] * virtual, stack, stages)
    if n_layers % virtual or _divided_period(equal, stack):
        raise ConfigError(_unequal(stack, virtual, what, _divided_period(equal, stack)))
    return equal


def _unequal(stack: Stack, virtual: int, what: str, divided: Segment | None) -> str:
    """An error: why stages cannot be equal, and what would be possible."""
    n_layers, unit = stack.n_layers, virtual * stack.segments[0].period
    periods = (
        f" in complete periods of segment {divided.name!r} ({divided.period} layers)"
        if divided and n_layers % virtual == 0
        else ""
    )
    would = (
        f"model.n_layers={n_layers // unit * unit} or {(n_layers // unit + 1) * unit} would, or "
        if len(stack.segments) == 1
        else ""
    )
    return (
        f"model.n_layers={n_layers} does not divide into {what}{periods}; {would}set "
        "pipeline.balance=flops or pipeline.layers"
    )


def _as_given(
    layers: tuple[int, ...], stack: Stack, stages: int, virtual: int, what: str
) -> StackLayouts:
    wrong = []
    if len(layers) != virtual:
        wrong.append(f"has {len(layers)} entries; it needs one for each of {what}, in model order")
    if sum(layers) != stack.n_layers:
        wrong.append(f"sums to {sum(layers)}, not to model.n_layers={stack.n_layers}")
    if min(layers) < 1:
        wrong.append("leaves a virtual stage without layers; each needs at least 1")
    layout = {} if wrong else _stack_layouts(layers, stack, stages)
    if layout and (divided := _divided_period(layout, stack)):
        wrong.append(
            f"divides a period of segment {divided.name!r}; each entry must hold a multiple of "
            f"{divided.period} of its layers"
        )
    if wrong:
        raise ConfigError(f"pipeline.layers={','.join(map(str, layers))} {'; it '.join(wrong)}")
    return layout


def _divided_period(layouts: StackLayouts, stack: Stack) -> Segment | None:
    """The first segment with a period that is divided between virtual stages."""
    return next(
        (
            s
            for s in stack.segments
            if any(count % s.period for count in layouts[s.name].layer_counts)
        ),
        None,
    )


def _stack_layouts(layers: Sequence[int], stack: Stack, stages: int) -> StackLayouts:
    """The layers of each virtual stage, given as counts over all segments, as layers of each
    segment.
    """
    bounds, layouts = list(itertools.accumulate(layers, initial=0)), {}
    for segment in stack.segments:
        first = stack.start(segment.name)
        layers_here = (
            min(end, first + segment.n_layers) - max(begin, first)
            for begin, end in itertools.pairwise(bounds)
        )
        layouts[segment.name] = StackLayout(stages, tuple(max(0, count) for count in layers_here))
    return layouts


def _ends(stack: Stack, virtual: int) -> np.ndarray:
    """The cost of each virtual stage besides its layers."""
    extra = np.zeros(virtual)
    extra[0] += stack.embed
    extra[-1] += stack.head
    return extra


def _partition(costs: Sequence[float], ends: np.ndarray) -> list[int]:
    """The number of units on each virtual stage, at least one: exact dynamic programming over
    (virtual stages x units).

    It runs twice: to minimise the cost of the busiest virtual stage, then to minimise the sum of
    squares among those divisions.
    """
    total = np.concatenate([[0.0], np.cumsum(costs)])
    n, virtual = len(costs), len(ends)
    # [end, begin]; inf: no unit
    load = np.where(np.tri(n + 1, k=-1, dtype=bool), total[:, None] - total[None, :], np.inf)

    def best(of_stage: np.ndarray, join: np.ufunc) -> list[np.ndarray]:
        """For each number of virtual stages, the least cost of the first units, [n + 1]."""
        least = [np.where(np.arange(n + 1) == 0, 0.0, np.inf)]
        for each in of_stage:
            least.append(join(least[-1][None, :], each).min(1))
        return least

    loads = load[None] + ends[:, None, None]
    most = best(loads, np.maximum)[-1][n]
    allowed = np.where(loads <= most * (1 + 1e-12), loads**2, np.inf)
    prefix, counts, end = best(allowed, np.add), [], n
    for stage in reversed(range(virtual)):
        begin = int(np.argmin(prefix[stage] + allowed[stage, end]))
        counts.append(end - begin)
        end = begin
    return counts[::-1]


def _greedy(n: int, cost: float, ends: np.ndarray, stages: int) -> list[int]:
    """The number of units on each virtual stage, for n units of equal cost. Minimises the cost of
    the busiest stage, over all its chunks.

    That cost limits the number of units of each stage; within this limit, the virtual stages are
    balanced.
    """
    chunks = len(ends) // stages
    of_stage = ends.reshape(chunks, stages).sum(0)
    most = (of_stage + cost * _fill(n, of_stage, cost, chunks, np.full(stages, n))).max()
    room = (of_stage[:, None] + cost * np.arange(n + 1) <= most).sum(1) - 1
    return _fill(n, ends, cost, 1, room).tolist()


def _fill(n: int, extra: np.ndarray, layer: float, least: int, room: np.ndarray) -> np.ndarray:
    """Assigns n units one by one, each to the virtual stage whose cost is then least and whose
    stage, i % len(room), has room.

    Greedy is exact: the allowed counts are a matroid, whose greedy basis has the least maximum.
    Ties go to the last one, because late stages hold fewer microbatches at once.
    """
    count, stage = np.full(len(extra), least), np.arange(len(extra)) % len(room)
    for _ in range(n - count.sum()):
        free = np.bincount(stage, count, len(room))[stage] < room[stage]
        best = min(
            np.flatnonzero(free), key=lambda i: (extra[i] + layer * (count[i] + 1), count[i], -i)
        )
        count[best] += 1
    return count
