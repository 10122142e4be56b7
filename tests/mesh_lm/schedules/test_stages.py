"""The division of layers among stages: the row of each layer, and that the division is optimal."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh_lm.errors import ConfigError
from mesh_lm.schedules.segments import Segment, Stack
from mesh_lm.schedules.stages import StackLayout, StackLayouts, divide, flops


@st.composite
def layouts(draw: st.DrawFn) -> StackLayout:
    stages = draw(st.integers(1, 5))
    virtual = stages * draw(st.integers(1, 4))
    counts = st.lists(st.integers(0, 4), min_size=virtual, max_size=virtual)
    return StackLayout(stages, tuple(draw(counts.filter(any))))


class Pipeline(NamedTuple):
    """A stack, and stages for it."""

    stack: Stack
    stages: int
    chunks: int

    @property
    def virtual(self) -> int:
        return self.stages * self.chunks


@st.composite
def pipelines(draw: st.DrawFn, max_virtual: int = 6) -> Pipeline:
    """Up to three segments, with at least one period for each of at most `max_virtual` stages."""
    sizes = st.tuples(st.integers(1, 5), st.integers(1, 3), st.integers(1, 5))
    segments = []
    for name, (n, period, cost) in zip(
        "abc", draw(st.lists(sizes, min_size=1, max_size=3)), strict=False
    ):
        segments.append(Segment(name, n * period, period, cost=cost))
    stack = Stack(tuple(segments), embed=draw(st.integers(0, 9)), head=draw(st.integers(0, 9)))
    virtual = draw(st.integers(1, min(max_virtual, len(periods(stack)))))
    divisors = [n for n in range(1, virtual + 1) if virtual % n == 0]
    stages = draw(st.sampled_from(divisors))
    return Pipeline(stack, stages, virtual // stages)


def periods(stack: Stack) -> list[Segment]:
    """The segment of each period of the stack."""
    return [
        segment for segment in stack.segments for _ in range(segment.n_layers // segment.period)
    ]


def every_division(stack: Stack, virtual: int) -> list[list[int]]:
    """All divisions that give each virtual stage complete periods only, and at least one."""
    *ends, n_layers = itertools.accumulate(period.period for period in periods(stack))
    divisions = []
    for cut in itertools.combinations(ends, virtual - 1):
        bounds = itertools.pairwise((0, *cut, n_layers))
        divisions.append([end - begin for begin, end in bounds])
    return divisions


def layers_of_stages(layouts: StackLayouts) -> list[int]:
    """The number of layers on each virtual stage, over all segments."""
    counts = [layout.layer_counts for layout in layouts.values()]
    return [sum(stage_counts) for stage_counts in zip(*counts, strict=True)]


def loads(layers: Sequence[int], stack: Stack) -> list[float]:
    """The cost of each virtual stage, summed layer by layer."""
    costs = iter([segment.cost for segment in stack.segments for _ in range(segment.n_layers)])
    sums = [sum(itertools.islice(costs, n)) for n in layers]
    sums[0] += stack.embed
    sums[-1] += stack.head
    return sums


def by_stage(values: Sequence[float], stages: int) -> list[float]:
    """The sums over the chunks of each stage of values of virtual stages."""
    return [sum(values[stage::stages]) for stage in range(stages)]


@given(layouts())
def test_a_pass_reads_the_layers_of_its_chunk_in_order(layout: StackLayout) -> None:
    counts = layout.layer_counts
    rows = layout.layer_of_row().reshape(layout.stages, layout.rows_per_stage).tolist()
    for s, n_layers in enumerate(counts):
        stage = s % layout.stages
        chunk = s // layout.stages
        first = sum(counts[:s])
        start = int(layout.chunk_start_rows()[stage, chunk])
        skipped = int(layout.chunk_skipped_rows()[stage, chunk])
        assert layout.chunk_first_layers()[stage, chunk] == first
        assert layout.chunk_layers()[stage, chunk] == n_layers
        assert 0 <= start <= layout.rows_per_stage - layout.rows_per_pass
        assert 0 <= skipped <= layout.rows_per_pass - n_layers
        read = rows[stage][start : start + layout.rows_per_pass]
        assert read[skipped : skipped + n_layers] == list(range(first, first + n_layers))
    assert layout.has_padding == any(n < layout.rows_per_pass for n in counts)


@given(layouts())
def test_rows_are_packed_by_stage(layout: StackLayout) -> None:
    stages = layout.stages
    number = itertools.count()
    virtual_layers = [[next(number) for _ in range(n)] for n in layout.layer_counts]
    stage_layers = [list(itertools.chain(*virtual_layers[p::stages])) for p in range(stages)]
    height = max(map(len, stage_layers))
    expected = []
    for layers in stage_layers:
        expected += layers + [-1] * (height - len(layers))
    assert layout.layer_of_row().tolist() == expected
    assert layout.padded_rows == len(expected)
    assert layout.rows_per_stage == height
    all_layers = list(range(layout.n_layers))
    assert layout.layer_of_row()[layout.row_of_layer()].tolist() == all_layers
    assert layout.is_contiguous == (expected == all_layers)
    assert layout.wasted_bytes(8) == 8 * expected.count(-1)
    assert layout.rows_per_stage <= layout.chunks * layout.rows_per_pass


@given(pipelines(), st.data())
def test_layers_as_given_are_cut_by_segment_in_model_order(
    pipeline: Pipeline, data: st.DataObject
) -> None:
    stack, stages, chunks = pipeline
    layers = data.draw(st.sampled_from(every_division(stack, pipeline.virtual)))
    divided = divide(stack, stages, chunks, layers=layers)
    names = [segment.name for segment in stack.segments for _ in range(segment.n_layers)]
    spans = list(itertools.pairwise(itertools.accumulate(layers, initial=0)))
    assert list(divided) == list(stack.names)
    for name, layout in divided.items():
        assert layout == StackLayout(stages, tuple(names[a:b].count(name) for a, b in spans))
    assert layers_of_stages(divided) == layers
    assert flops(divided, stack).tolist() == by_stage(loads(layers, stack), stages)


def busiest_stage(layers: Sequence[int], stack: Stack, stages: int) -> tuple[float, float]:
    """(cost of the busiest stage, cost of the busiest virtual stage)."""
    costs = loads(layers, stack)
    return max(by_stage(costs, stages)), max(costs)


def busiest_virtual_stage(layers: Sequence[int], stack: Stack) -> tuple[float, float]:
    """(cost of the busiest virtual stage, sum of the squared costs)."""
    costs = loads(layers, stack)
    return max(costs), sum(cost**2 for cost in costs)


@given(pipelines(max_virtual=9))
def test_balanced_is_the_best_of_all_divisions(pipeline: Pipeline) -> None:
    stack, stages, chunks = pipeline
    layers = layers_of_stages(divide(stack, stages, chunks, balance="flops"))
    divisions = every_division(stack, pipeline.virtual)
    assert layers in divisions
    if len({(segment.period, segment.cost) for segment in stack.segments}) == 1:
        best = min(busiest_stage(division, stack, stages) for division in divisions)
        assert busiest_stage(layers, stack, stages) == best
    else:
        best = min(busiest_virtual_stage(division, stack) for division in divisions)
        assert busiest_virtual_stage(layers, stack) == best


@given(
    st.integers(2, 16),
    st.integers(1, 4),
    st.integers(1, 6),
    st.integers(0, 9),
    st.integers(0, 9),
    st.integers(1, 4),
)
def test_balanced_is_never_worse_than_equal(
    stages: int, chunks: int, n_layers: int, embed: int, head: int, cost: int
) -> None:
    segment = Segment("blocks", n_layers * stages * chunks, cost=cost)
    stack = Stack((segment,), embed, head)
    equal = divide(stack, stages, chunks)
    equal_layers = layers_of_stages(equal)
    layers = layers_of_stages(divide(stack, stages, chunks, balance="flops"))
    assert set(equal_layers) == {n_layers}
    assert busiest_stage(layers, stack, stages) <= busiest_stage(equal_layers, stack, stages)
    assert divide(Stack(stack.segments), stages, chunks, balance="flops") == equal


@given(pipelines())
def test_equal_stages_may_hold_several_segments(pipeline: Pipeline) -> None:
    stack, stages, chunks = pipeline
    virtual = pipeline.virtual
    equal = [stack.n_layers // virtual] * virtual
    if equal in every_division(stack, virtual):
        assert divide(stack, stages, chunks) == divide(stack, stages, chunks, layers=equal)
        return
    message = rf"^model.n_layers={stack.n_layers} does not divide into the {virtual} virtual stages"
    with pytest.raises(ConfigError, match=message):
        divide(stack, stages, chunks)


def test_a_head_of_two_thirds_of_a_layer_takes_one_from_its_stage() -> None:
    """Llama 3 405B, 126 layers on 16 stages: the last and the first have one layer fewer; the first
    has the most microbatches in flight."""
    stack = Stack((Segment("blocks", 126, cost=3.19),), head=2.1)
    layouts = divide(stack, 16, balance="flops")
    assert layouts == {"blocks": StackLayout(16, (7, *(8,) * 14, 7))}
    assert layouts["blocks"].wasted_bytes(1) == 2


def test_dense_layers_of_a_third_of_the_cost_share_a_stage() -> None:
    """3 dense and 58 expert layers, as in DeepSeek-V3, on 8 stages of 2 chunks. Every stage has
    rows for 3 dense layers, not for 6."""
    stack = Stack((Segment("dense", 3, cost=1), Segment("moe", 58, cost=3)), head=2)
    layouts = divide(stack, 8, 2, balance="flops")
    assert layouts["dense"] == StackLayout(8, (3, *(0,) * 15))
    assert layouts["dense"].rows_per_stage == 3
    assert layouts["moe"].rows_per_pass == 4
    assert layouts["moe"].rows_per_stage == 8
    assert layouts["moe"].padded_rows == 64


def blocks(n_layers: int, period: int = 1) -> Stack:
    return Stack((Segment("blocks", n_layers, period),))


EARLY_LATE = Stack((Segment("early", 3), Segment("late", 5, 5)))


@pytest.mark.parametrize(
    ("stack", "stages", "chunks", "chosen", "message"),
    [
        (
            blocks(30), 4, 2, {},
            "model.n_layers=30 does not divide into the 8 virtual stages of mesh.pipeline=4 x "
            "pipeline.chunks=2; model.n_layers=24 or 32 would, or set pipeline.balance=flops or "
            "pipeline.layers",
        ),
        (
            blocks(12, 2), 4, 1, {},
            "model.n_layers=12 does not divide into the 4 virtual stages of mesh.pipeline=4 x "
            "pipeline.chunks=1 in complete periods of segment 'blocks' (2 layers); "
            "model.n_layers=8 or 16 would, or set pipeline.balance=flops or pipeline.layers",
        ),
        (
            EARLY_LATE, 2, 1, {},
            "model.n_layers=8 does not divide into the 2 virtual stages of mesh.pipeline=2 x "
            "pipeline.chunks=1 in complete periods of segment 'late' (5 layers); set "
            "pipeline.balance=flops or pipeline.layers",
        ),
        (
            EARLY_LATE, 3, 1, {},
            "model.n_layers=8 does not divide into the 3 virtual stages of mesh.pipeline=3 x "
            "pipeline.chunks=1; set pipeline.balance=flops or pipeline.layers",
        ),
        (
            blocks(4), 8, 1, {},
            "model.n_layers=4 is too few for the 8 virtual stages of mesh.pipeline=8 x "
            "pipeline.chunks=1: each needs at least 1; lower mesh.pipeline or pipeline.chunks",
        ),
        (
            blocks(6, 2), 4, 1, {"balance": "flops"},
            "model.n_layers=6 (3 complete periods) is too few for the 4 virtual stages of "
            "mesh.pipeline=4 x pipeline.chunks=1: each needs at least 1; lower mesh.pipeline or "
            "pipeline.chunks",
        ),
        (
            blocks(8), 2, 2, {"layers": (3, 0, 4)},
            "pipeline.layers=3,0,4 has 3 entries; it needs one for each of the 4 virtual stages of "
            "mesh.pipeline=2 x pipeline.chunks=2, in model order; it sums to 7, not to "
            "model.n_layers=8; it leaves a virtual stage without layers; each needs at least 1",
        ),
        (
            EARLY_LATE, 2, 1, {"layers": (4, 4)},
            ("pipeline.layers=4,4 divides a period of segment 'late'; each entry must hold a "
            "multiple of 5 of its layers"),
        ),
    ],
)  # fmt: skip
def test_what_does_not_divide_says_what_would(
    stack: Stack, stages: int, chunks: int, chosen: dict, message: str
) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}$"):
        divide(stack, stages, chunks, **chosen)
