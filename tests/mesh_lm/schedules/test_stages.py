"""The division of layers among stages: the place of each layer, and that the division is
optimal."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh_lm.errors import ConfigError
from mesh_lm.schedules.segments import Segment, Stack
from mesh_lm.schedules.stages import StackLayout, StackLayouts, divide, flops


@st.composite
def layouts(draw: st.DrawFn) -> StackLayout:
    stages, chunks = draw(st.integers(1, 5)), draw(st.integers(1, 4))
    counts = st.lists(st.integers(0, 4), min_size=stages * chunks, max_size=stages * chunks)
    return StackLayout(stages, tuple(draw(counts.filter(any))))


@st.composite
def pipelines(draw: st.DrawFn, kinds: int = 3, most: int = 6) -> tuple[Stack, int, int]:
    """(stack of up to `segments` segments, stages, chunks), with at least one period for each of at
    most `most` virtual stages."""
    one = st.tuples(st.integers(1, 5), st.integers(1, 3), st.integers(1, 5))
    drawn = draw(st.lists(one, min_size=1, max_size=kinds))
    segments = [
        Segment(name, n * period, period, cost=cost)
        for name, (n, period, cost) in zip("abc", drawn, strict=False)
    ]
    stack = Stack(tuple(segments), embed=draw(st.integers(0, 9)), head=draw(st.integers(0, 9)))
    virtual = draw(st.integers(1, min(most, len(periods(stack)))))
    stages = draw(
        st.sampled_from([stages for stages in range(1, virtual + 1) if virtual % stages == 0])
    )
    return stack, stages, virtual // stages


def periods(stack: Stack) -> list[Segment]:
    """The segment of each period of the stack."""
    return [
        segment for segment in stack.segments for _ in range(segment.n_layers // segment.period)
    ]


def every_division(stack: Stack, virtual: int) -> list[list[int]]:
    """All divisions of the layers that give each virtual stage at least one period, and complete
    periods only."""
    *ends, n_layers = itertools.accumulate(period.period for period in periods(stack))
    cuts = itertools.combinations(ends, virtual - 1)
    return [[end - begin for begin, end in itertools.pairwise((0, *cut, n_layers))] for cut in cuts]


def held(layout: StackLayouts) -> list[int]:
    """The layers of each virtual stage, over all segments."""
    return [sum(each) for each in zip(*(one.layer_counts for one in layout.values()), strict=True)]


def loads(layers: Sequence[int], stack: Stack) -> list[float]:
    """The cost of each virtual stage, summed layer by layer."""
    costs = iter([segment.cost for segment in stack.segments for _ in range(segment.n_layers)])
    found = [sum(itertools.islice(costs, count)) for count in layers]
    found[0] += stack.embed
    found[-1] += stack.head
    return found


def by_stage(of_virtual: Sequence[float], stages: int) -> list[float]:
    return [sum(of_virtual[stage::stages]) for stage in range(stages)]


@given(layouts())
def test_a_pass_reads_the_layers_of_its_chunk_in_order(layout: StackLayout) -> None:
    P, counts = layout.stages, layout.layer_counts
    rows = layout.layer_of_row().reshape(P, layout.rows_per_stage).tolist()
    for s, count in enumerate(counts):
        at, first = (s % P, s // P), sum(counts[:s])
        start, skip = int(layout.chunk_start_rows()[at]), int(layout.chunk_skipped_rows()[at])
        assert (layout.chunk_first_layers()[at], layout.chunk_layers()[at]) == (first, count)
        assert (
            0 <= start <= layout.rows_per_stage - layout.rows_per_pass
            and 0 <= skip <= layout.rows_per_pass - count
        )
        read = rows[s % P][start : start + layout.rows_per_pass]
        assert read[skip : skip + count] == list(range(first, first + count))
    assert layout.has_padding == any(count < layout.rows_per_pass for count in counts)


@given(layouts())
def test_rows_are_packed_by_stage(layout: StackLayout) -> None:
    P, V, counts = layout.stages, layout.chunks, layout.layer_counts
    number = iter(range(sum(counts)))
    of_virtual = [[next(number) for _ in range(count)] for count in counts]
    held = [list(itertools.chain(*of_virtual[p::P])) for p in range(P)]
    height = max(map(len, held))
    wanted = list(itertools.chain(*(layers + [-1] * (height - len(layers)) for layers in held)))
    assert layout.layer_of_row().tolist() == wanted and (
        layout.padded_rows,
        layout.rows_per_stage,
    ) == (len(wanted), height)
    assert layout.layer_of_row()[layout.row_of_layer()].tolist() == list(range(layout.n_layers))
    assert layout.is_contiguous == (wanted == list(range(layout.n_layers)))
    assert layout.wasted_bytes(8) == 8 * wanted.count(-1)
    assert layout.rows_per_stage <= V * layout.rows_per_pass


@given(pipelines(), st.data())
def test_layers_as_given_are_cut_by_segment_in_model_order(
    pipeline: tuple[Stack, int, int], data: st.DataObject
) -> None:
    stack, stages, chunks = pipeline
    layers = data.draw(st.sampled_from(every_division(stack, stages * chunks)))
    layout = divide(stack, stages, chunks, layers=layers)
    names = [segment.name for segment in stack.segments for _ in range(segment.n_layers)]
    spans = list(itertools.pairwise(itertools.accumulate(layers, initial=0)))
    assert layout == {
        name: StackLayout(stages, tuple(names[a:b].count(name) for a, b in spans))
        for name in stack.names
    }
    assert list(layout) == list(stack.names) and held(layout) == layers
    assert flops(layout, stack).tolist() == by_stage(loads(layers, stack), stages)


def busiest_stage(layers: Sequence[int], stack: Stack, stages: int) -> tuple[float, float]:
    """(cost of the busiest stage, cost of the busiest virtual stage)."""
    each = loads(layers, stack)
    return max(by_stage(each, stages)), max(each)


def busiest_virtual_stage(layers: Sequence[int], stack: Stack) -> tuple[float, float]:
    """(cost of the busiest virtual stage, sum of the squared costs)."""
    each = loads(layers, stack)
    return max(each), sum(load**2 for load in each)


@given(pipelines(most=9))
def test_balanced_is_the_best_of_all_divisions(pipeline: tuple[Stack, int, int]) -> None:
    stack, stages, chunks = pipeline
    found, every = (
        divide(stack, stages, chunks, balance="flops"),
        every_division(stack, stages * chunks),
    )
    assert held(found) in every
    if len({(segment.period, segment.cost) for segment in stack.segments}) == 1:
        assert busiest_stage(held(found), stack, stages) == min(
            busiest_stage(layers, stack, stages) for layers in every
        )
    else:
        assert busiest_virtual_stage(held(found), stack) == min(
            busiest_virtual_stage(layers, stack) for layers in every
        )


@given(
    st.integers(2, 16),
    st.integers(1, 4),
    st.integers(1, 6),
    st.integers(0, 9),
    st.integers(0, 9),
    st.integers(1, 4),
)
def test_balanced_is_never_worse_than_equal(
    stages: int, chunks: int, each: int, embed: int, head: int, cost: int
) -> None:
    stack = Stack((Segment("blocks", each * stages * chunks, cost=cost),), embed, head)
    equal, found = divide(stack, stages, chunks), divide(stack, stages, chunks, balance="flops")
    assert set(held(equal)) == {each}
    assert busiest_stage(held(found), stack, stages) <= busiest_stage(held(equal), stack, stages)
    assert divide(Stack(stack.segments), stages, chunks, balance="flops") == equal


@given(pipelines())
def test_equal_stages_may_hold_several_segments(pipeline: tuple[Stack, int, int]) -> None:
    stack, stages, chunks = pipeline
    virtual = stages * chunks
    equal = [stack.n_layers // virtual] * virtual
    if equal in every_division(stack, virtual):
        assert divide(stack, stages, chunks) == divide(stack, stages, chunks, layers=equal)
    else:
        with pytest.raises(
            ConfigError,
            match=(
                rf"^model.n_layers={stack.n_layers} does not divide into the {virtual} virtual "
                r"stages"
            ),
        ):
            divide(stack, stages, chunks)


def test_a_head_of_two_thirds_of_a_layer_takes_one_from_its_stage() -> None:
    """Llama 3 405B, 126 layers on 16 stages: the last and the first have one layer fewer; the first
    has the most microbatches in flight."""
    found = divide(Stack((Segment("blocks", 126, cost=3.19),), head=2.1), 16, balance="flops")
    assert (
        found == {"blocks": StackLayout(16, (7, *(8,) * 14, 7))}
        and found["blocks"].wasted_bytes(1) == 2
    )


def test_dense_layers_of_a_third_of_the_cost_share_a_stage() -> None:
    """3 dense and 58 expert layers, as in DeepSeek-V3, on 8 stages of 2 chunks. Every stage has
    rows for 3 dense layers, not for 6."""
    stack = Stack((Segment("dense", 3, cost=1), Segment("moe", 58, cost=3)), head=2)
    found = divide(stack, 8, 2, balance="flops")
    assert found["dense"] == StackLayout(8, (3, *(0,) * 15)) and found["moe"].rows_per_pass == 4
    assert (
        found["dense"].rows_per_stage,
        found["moe"].rows_per_stage,
        found["moe"].padded_rows,
    ) == (3, 8, 64)


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
