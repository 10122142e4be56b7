"""The division of layers: the permutation it means, and that it is the best there is."""

from __future__ import annotations

import itertools
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh_lm.errors import ConfigError
from mesh_lm.pipeline.stages import Costs, Stages, divide

COSTS = st.builds(Costs, st.integers(0, 9), st.integers(1, 4), st.integers(0, 9))


@st.composite
def divisions(draw: st.DrawFn) -> Stages:
    stages, chunks = draw(st.integers(1, 5)), draw(st.integers(1, 4))
    return Stages(stages, tuple(draw(st.lists(st.integers(1, 4), min_size=stages * chunks, max_size=stages * chunks))))


@given(divisions())
def test_rows_are_the_layers_in_order_stage_chunk_slot(division: Stages) -> None:
    P, V, counts = division.stages, division.chunks, division.counts
    starts = [sum(counts[:s]) for s in range(P * V)]
    wanted = [
        starts[v * P + p] + slot if slot < counts[v * P + p] else -1 for p in range(P) for v in range(V) for slot in range(max(counts))
    ]
    assert division.layer_of_row().tolist() == wanted and division.rows == len(wanted)
    assert division.layer_of_row()[division.row_of_layer()].tolist() == list(range(division.n_layers))
    assert division.identity == (wanted == list(range(division.n_layers)))
    assert all(division.first()[s % P, s // P] == starts[s] and division.count()[s % P, s // P] == counts[s] for s in range(P * V))
    assert division.wasted_bytes(8) == 8 * wanted.count(-1)


@given(divisions(), COSTS)
def test_flops_of_a_stage_are_its_layers_and_what_lies_at_the_ends(division: Stages, costs: Costs) -> None:
    wanted = division.count().sum(1) * costs.layer
    wanted[0] += costs.embed
    wanted[-1] += costs.head
    assert division.flops(costs).tolist() == wanted.tolist()


def busiest(division: Stages, costs: Costs) -> tuple[float, float]:
    """What the busiest stage does, and the busiest virtual stage."""
    return division.flops(costs).max(), Stages(len(division.counts), division.counts).flops(costs).max()


@given(st.integers(1, 3), st.integers(1, 3), st.integers(0, 5), st.integers(1, 2), COSTS)
def test_balanced_is_the_best_of_all_divisions(stages: int, chunks: int, more: int, period: int, costs: Costs) -> None:
    virtual = stages * chunks
    n_layers = period * (virtual + more)
    found = divide(n_layers, stages, chunks, balance="flops", period=period, costs=costs)
    cuts = itertools.combinations(range(period, n_layers, period), virtual - 1)
    every = (Stages(stages, tuple(np.diff((0, *cut, n_layers)).tolist())) for cut in cuts)
    assert busiest(found, costs) == min(busiest(division, costs) for division in every)
    assert found.n_layers == n_layers and len(found.counts) == virtual and not any(count % period for count in found.counts)


@given(st.integers(1, 16), st.integers(1, 4), st.integers(1, 6), COSTS)
def test_balanced_is_never_worse_than_equal(stages: int, chunks: int, each: int, costs: Costs) -> None:
    equal = divide(each * stages * chunks, stages, chunks)
    assert set(equal.counts) == {each}
    assert busiest(divide(equal.n_layers, stages, chunks, balance="flops", costs=costs), costs) <= busiest(equal, costs)
    assert divide(equal.n_layers, stages, chunks, balance="flops") == equal


def test_a_head_of_two_thirds_of_a_layer_takes_one_from_its_stage() -> None:
    """Llama 3 405B, 126 layers over 16 stages; the first stage, which embeds for nothing but holds most in flight, gives the other."""
    found = divide(126, 16, balance="flops", costs=Costs(layer=3.19, head=2.1))
    assert found == Stages(16, (7, *(8,) * 14, 7)) and found.wasted_bytes(1) == 2
    assert divide(8, 2, 2, layers=(3, 2, 2, 1)) == Stages(2, (3, 2, 2, 1))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"n_layers": 30, "stages": 4, "chunks": 2},
            "model.n_layers=30 does not divide into the 8 virtual stages of mesh.pipeline=4 x pipeline.chunks=2; "
            "model.n_layers=24 or 32 would, or set pipeline.balance=flops or pipeline.layers",
        ),
        (
            {"n_layers": 12, "stages": 4, "period": 2},
            "model.n_layers=12 does not divide into the 4 virtual stages of mesh.pipeline=4 x pipeline.chunks=1 in whole periods of the "
            "2 entries of model.window; model.n_layers=8 or 16 would, or set pipeline.balance=flops or pipeline.layers",
        ),
        ({"n_layers": 9, "stages": 2, "period": 2}, "model.n_layers=9 is not a multiple of the 2 entries of model.window"),
        (
            {"n_layers": 6, "stages": 4, "chunks": 1, "period": 2, "balance": "flops"},
            "model.n_layers=6 is too few for the 4 virtual stages of mesh.pipeline=4 x pipeline.chunks=1: each needs at least 2 "
            "(the entries of model.window); lower mesh.pipeline or pipeline.chunks",
        ),
        (
            {"n_layers": 8, "stages": 2, "chunks": 2, "layers": (3, 0, 4)},
            "pipeline.layers=3,0,4 has 3 entries; it needs one for each of the 4 virtual stages of mesh.pipeline=2 x pipeline.chunks=2, "
            "in model order; it sums to 7, not to model.n_layers=8; it leaves a virtual stage without layers; each needs at least 1",
        ),
        (
            {"n_layers": 8, "stages": 2, "layers": (3, 5), "period": 2},
            "pipeline.layers=3,5 cuts the pattern of model.window in two; every entry must be a multiple of 2",
        ),
    ],
)  # fmt: skip
def test_what_does_not_divide_says_what_would(arguments: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}$"):
        divide(**arguments)
