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
from typing import Literal, NamedTuple

import numpy as np

from mesh_lm.errors import ConfigError
from mesh_lm.schedules.segments import Segment, Stack


@dataclasses.dataclass(frozen=True)
class StackLayout:
    """The layers of one segment on the stages; `divide` makes it."""

    stages: int
    """P, the size of the mesh axis pipeline; of `divided_among` owners, times their number."""
    layer_counts: tuple[int, ...]
    """Layers of the segment on each of the P * V virtual stages, in model order."""

    @property
    def chunks(self) -> int:
        """V, the virtual stages on one stage."""
        return len(self.layer_counts) // self.stages

    @property
    def n_layers(self) -> int:
        """The number of layers of the segment."""
        return sum(self.layer_counts)

    @property
    def rows_per_pass(self) -> int:
        """Rows that a pass through one virtual stage reads: its most layers on any of them."""
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
        last_start = self.rows_per_stage - self.rows_per_pass
        return np.minimum(self._row_offsets(), last_start).astype(np.int32)

    def chunk_skipped_rows(self) -> np.ndarray:
        """The number of leading rows of a pass that belong to the previous chunk, int32 [P, V]."""
        return (self._row_offsets() - self.chunk_start_rows()).astype(np.int32)

    def layer_of_row(self) -> np.ndarray:
        """The layer of the segment in each row in memory, int32 [padded_rows]; -1: padding."""
        layers = np.full((self.stages, self.rows_per_stage), -1, np.int32)
        row_offsets = self._row_offsets()
        first_layers = self.chunk_first_layers()
        for (stage, chunk), n_layers in np.ndenumerate(self.chunk_layers()):
            row = row_offsets[stage, chunk]
            layer = first_layers[stage, chunk]
            layers[stage, row : row + n_layers] = range(layer, layer + n_layers)
        return layers.ravel()

    def row_of_layer(self) -> np.ndarray:
        """The row in memory of each layer, int32 [n_layers]."""
        layers = self.layer_of_row()
        rows = np.flatnonzero(layers >= 0).astype(np.int32)
        return rows[np.argsort(layers[rows])]

    def divided_among(self, owners: int) -> StackLayout:
        """Returns the layout of arrays that divide the rows of each stage among this many owners.

        Owner j of stage i is stage i * owners + j of the result. All owners have as many rows; the
        last rows of a stage are padding where they do not divide. Raises ConfigError for stages
        with chunks, whose rows are not a contiguous run of layers.
        """
        if owners == 1:
            return self
        if self.chunks > 1:
            raise ConfigError(
                f"pipeline.chunks={self.chunks}: the rows of a stage are not in the order of the "
                "model, so that owners of layers cannot divide them; set pipeline.chunks=1"
            )
        rows_per_owner = -(-self.rows_per_stage // owners)
        layer_counts = []
        for n_layers in self.layer_counts:
            for owner in range(owners):
                n_left = n_layers - owner * rows_per_owner
                layer_counts.append(min(max(n_left, 0), rows_per_owner))
        return StackLayout(self.stages * owners, tuple(layer_counts))

    def wasted_bytes(self, bytes_per_layer: float) -> float:
        """Bytes of padding, over all stages."""
        return (self.padded_rows - self.n_layers) * bytes_per_layer

    def _row_offsets(self) -> np.ndarray:
        """The first row of each chunk in its stage, [P, V]."""
        return np.cumsum(self.chunk_layers(), 1) - self.chunk_layers()

    def _by_stage(self, values: Sequence[int] | np.ndarray) -> np.ndarray:
        """One value of each virtual stage, in model order, as int32 [P, V]."""
        return np.asarray(values, np.int32).reshape(self.chunks, self.stages).T


StackLayouts = dict[str, StackLayout]
"""By the name of the segment, in model order."""


def flops(layouts: StackLayouts, stack: Stack) -> np.ndarray:
    """Returns the cost of each stage for one token, float64 [P].

    The embedding is on the first virtual stage, the head on the last.
    """
    segment_costs = [
        layouts[segment.name].chunk_layers() * segment.cost for segment in stack.segments
    ]
    stages, chunks = segment_costs[0].shape
    end_costs = _end_costs(stack, stages * chunks).reshape(chunks, stages)
    return np.sum(segment_costs, 0).sum(1) + end_costs.sum(0)


def divide(
    stack: Stack,
    stages: int,
    chunks: int = 1,
    *,
    layers: Sequence[int] = (),
    balance: Literal["equal", "flops"] = "equal",
) -> StackLayouts:
    """Returns the division of a stack among the stages.

    Every virtual stage gets at least one layer, and complete periods of each segment.

    Args:
      stack: a stack without `Stack.problems`.
      layers: the number of layers of each virtual stage, in model order, over all segments; empty:
        by `balance`.
      balance: "equal": the same number everywhere. "flops": as even as complete periods allow, by
        the costs of the stack. If all periods cost the same, it minimises the cost of the busiest
        stage, then that of the busiest virtual stage. Otherwise it minimises the cost of the
        busiest virtual stage, then the sum of the squared costs of the virtual stages.

    Raises ConfigError, with sizes that would work, if the layers do not divide among the stages.
    """
    virtual = stages * chunks
    virtual_stages = (
        f"the {virtual} virtual stages of mesh.pipeline={stages} x pipeline.chunks={chunks}"
    )
    if layers:
        return _chosen_layouts(tuple(layers), stack, stages, virtual, virtual_stages)

    periods = []
    for segment in stack.segments:
        period = _Period(segment.period, segment.period * segment.cost)
        periods += [period] * (segment.n_layers // segment.period)
    n_layers = stack.n_layers
    if len(periods) < virtual:
        in_periods = f" ({len(periods)} complete periods)" if len(periods) < n_layers else ""
        raise ConfigError(
            f"model.n_layers={n_layers}{in_periods} is too few for {virtual_stages}: each needs at "
            "least 1; lower mesh.pipeline or pipeline.chunks"
        )
    if balance == "flops":
        return _stack_layouts(_balanced_layers(periods, stack, stages, virtual), stack, stages)
    layouts = _stack_layouts([n_layers // virtual] * virtual, stack, stages)
    if n_layers % virtual or _divided_period(layouts, stack):
        raise ConfigError(_unequal(stack, virtual, virtual_stages, _divided_period(layouts, stack)))
    return layouts


class _Period(NamedTuple):
    """Layers that stay together."""

    n_layers: int
    cost: float


def _unequal(stack: Stack, virtual: int, virtual_stages: str, divided: Segment | None) -> str:
    """An error: why stages cannot be equal, and which sizes would be possible."""
    n_layers = stack.n_layers
    periods = ""
    if divided and n_layers % virtual == 0:
        periods = f" in complete periods of segment {divided.name!r} ({divided.period} layers)"
    sizes = ""
    if len(stack.segments) == 1:
        unit = virtual * stack.segments[0].period
        below = n_layers // unit * unit
        sizes = f"model.n_layers={below} or {below + unit} would, or "
    return (
        f"model.n_layers={n_layers} does not divide into {virtual_stages}{periods}; {sizes}set "
        "pipeline.balance=flops or pipeline.layers"
    )


def _chosen_layouts(
    layers: tuple[int, ...], stack: Stack, stages: int, virtual: int, virtual_stages: str
) -> StackLayouts:
    """The layouts of pipeline.layers."""
    problems = []
    if len(layers) != virtual:
        problems.append(
            f"has {len(layers)} entries; it needs one for each of {virtual_stages}, in model order"
        )
    if sum(layers) != stack.n_layers:
        problems.append(f"sums to {sum(layers)}, not to model.n_layers={stack.n_layers}")
    if min(layers) < 1:
        problems.append("leaves a virtual stage without layers; each needs at least 1")
    layouts: StackLayouts = {}
    if not problems:
        layouts = _stack_layouts(layers, stack, stages)
        divided = _divided_period(layouts, stack)
        if divided:
            problems.append(
                f"divides a period of segment {divided.name!r}; each entry must hold a multiple of "
                f"{divided.period} of its layers"
            )
    if problems:
        raise ConfigError(f"pipeline.layers={','.join(map(str, layers))} {'; it '.join(problems)}")
    return layouts


def _divided_period(layouts: StackLayouts, stack: Stack) -> Segment | None:
    """The first segment with a period that is divided between virtual stages."""
    for segment in stack.segments:
        if any(n % segment.period for n in layouts[segment.name].layer_counts):
            return segment
    return None


def _stack_layouts(layers: Sequence[int], stack: Stack, stages: int) -> StackLayouts:
    """The layout of each segment. layers: of each virtual stage, over all segments."""
    bounds = list(itertools.accumulate(layers, initial=0))
    layouts = {}
    for segment in stack.segments:
        first = stack.start(segment.name)
        end = first + segment.n_layers
        layouts[segment.name] = StackLayout(
            stages,
            tuple(
                max(0, min(stage_end, end) - max(stage_begin, first))
                for stage_begin, stage_end in itertools.pairwise(bounds)
            ),
        )
    return layouts


def _end_costs(stack: Stack, virtual: int) -> np.ndarray:
    """The cost of each virtual stage besides its layers."""
    costs = np.zeros(virtual)
    costs[0] += stack.embed
    costs[-1] += stack.head
    return costs


def _balanced_layers(
    periods: Sequence[_Period], stack: Stack, stages: int, virtual: int
) -> list[int]:
    """The number of layers on each virtual stage for pipeline.balance=flops."""
    end_costs = _end_costs(stack, virtual)
    if len(set(periods)) == 1:
        period_counts = _greedy(len(periods), periods[0].cost, end_costs, stages)
    else:
        period_counts = _partition([period.cost for period in periods], end_costs)
    lengths = iter([period.n_layers for period in periods])
    return [sum(itertools.islice(lengths, n)) for n in period_counts]


def _partition(costs: Sequence[float], end_costs: np.ndarray) -> list[int]:
    """The number of units on each virtual stage, at least one.

    Exact dynamic programming over (virtual stages x units). It runs twice: to minimise the cost of
    the busiest virtual stage, then to minimise the sum of squares among those divisions.
    """
    n = len(costs)
    virtual = len(end_costs)
    # The cost of the units from begin to end, [end, begin]; inf where there are none.
    prefix_sums = np.concatenate([[0.0], np.cumsum(costs)])
    has_units = np.tri(n + 1, k=-1, dtype=bool)
    unit_costs = np.where(has_units, prefix_sums[:, None] - prefix_sums[None, :], np.inf)
    loads = unit_costs[None] + end_costs[:, None, None]  # [virtual stage, end, begin]

    busiest = _least_costs(loads, np.maximum)[-1][n]
    allowed = np.where(loads <= busiest * (1 + 1e-12), loads**2, np.inf)
    least = _least_costs(allowed, np.add)

    # Walk back from the last virtual stage along the choices that gave the least sum.
    counts = []
    end = n
    for stage in reversed(range(virtual)):
        begin = int(np.argmin(least[stage] + allowed[stage, end]))
        counts.append(end - begin)
        end = begin
    return counts[::-1]


def _least_costs(costs: np.ndarray, join: np.ufunc) -> list[np.ndarray]:
    """For each number of virtual stages, the least cost of the first units, [n + 1].

    costs: of each virtual stage, [stage, end, begin]. join: np.add for a sum of costs, np.maximum
    for the greatest.
    """
    n_ends = costs.shape[1]
    least = [np.where(np.arange(n_ends) == 0, 0.0, np.inf)]
    for stage_costs in costs:
        least.append(join(least[-1][None, :], stage_costs).min(1))
    return least


def _greedy(n: int, unit_cost: float, end_costs: np.ndarray, stages: int) -> list[int]:
    """The number of units on each virtual stage, for n units of equal cost.

    Minimises the cost of the busiest stage, over all its chunks. That cost limits the number of
    units of each stage; within this limit, the virtual stages are balanced.
    """
    chunks = len(end_costs) // stages
    stage_costs = end_costs.reshape(chunks, stages).sum(0)
    unlimited = np.full(stages, n)
    counts = _fill(n, stage_costs, unit_cost, minimum=chunks, capacity=unlimited)
    busiest = (stage_costs + unit_cost * counts).max()
    fits = stage_costs[:, None] + unit_cost * np.arange(n + 1) <= busiest
    capacity = fits.sum(1) - 1
    return _fill(n, end_costs, unit_cost, minimum=1, capacity=capacity).tolist()


def _fill(
    n: int, base_costs: np.ndarray, unit_cost: float, *, minimum: int, capacity: np.ndarray
) -> np.ndarray:
    """Assigns n units one by one, each where the cost is then least and the stage has room.

    `base_costs` are those of the virtual stages without units, `minimum` is the number of units
    that each has at first. Virtual stage i is on stage i % len(capacity).

    Greedy is exact: the allowed counts are a matroid, whose greedy basis has the least maximum.
    Ties go to the last one, because late stages hold fewer microbatches at once.
    """
    counts = np.full(len(base_costs), minimum)
    stage = np.arange(len(counts)) % len(capacity)
    for _ in range(n - counts.sum()):
        has_room = np.bincount(stage, counts, len(capacity))[stage] < capacity[stage]
        best = min(
            np.flatnonzero(has_room),
            key=lambda i: (base_costs[i] + unit_cost * (counts[i] + 1), counts[i], -i),
        )
        counts[best] += 1
    return counts
