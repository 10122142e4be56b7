"""What each segment of a model costs: sums that miss nothing, of reports made by hand and of one compiled program with three segments."""

from __future__ import annotations

import dataclasses
from collections import Counter

import lab_report
import pytest
from rich.console import Console

from mesh_lm.config import DataConfig, LaunchConfig, TrainConfig, TrainLoop
from mesh_lm.model import DecoderConfig, SegmentConfig
from mesh_lm.planning.program import compile_config
from sharding_rules import MeshConfig, preset
from sharding_rules.lab.page import page
from sharding_rules.lab.report import Argument, Location, Report, Timeline
from sharding_rules.lab.segments import REST, by_segment, segment_of, segment_of_argument, segment_table
from sharding_rules.lab.text import LINES, screen

COMPILE_BUDGET = 1
SEGMENTS = {"first": 1, "middle": 94, "last": 1}
PARTS = {"first/layers/mlp": 1000.0, "middle/layers/attention": 40_000.0, "last/layers": 500.0, "first+middle": 7.0, "loss": 300.0, "": 2.0}


def report(segments: dict[str, int] = SEGMENTS) -> Report:
    """Each collective of the layers once in each segment; those of the sum of gradients merged from two."""
    made = lab_report.report()
    sent = []
    for one in made.collectives:
        inside = one.where.part.startswith("layers")
        for name in SEGMENTS if inside else [""]:
            where = dataclasses.replace(one.where, part=f"{name}/{one.where.part}" if inside else "first+middle/layers")
            sent.append(dataclasses.replace(one, where=where, loops=(4, SEGMENTS.get(name, 1))))
    names = [f"state['params']['{name}.mlp.up.weight']" for name in SEGMENTS] + ["state['params']['embedding']"]
    arguments = tuple(Argument(name, "params", (8, 8), "f32", 100 + i, ()) for i, name in enumerate(names))
    line = Timeline(50_000.0, sum(PARTS.values()), 0.0, 8191.0, (), parts=PARTS)
    return dataclasses.replace(made, collectives=tuple(sent), arguments=arguments, timeline=line, segments=segments)


def assert_sums(made: Report) -> None:
    costs, line = by_segment(made), made.timeline
    assert [cost.name for cost in costs] == [*made.segments, REST]
    assert line
    assert sum(cost.compute for cost in costs) == pytest.approx(line.compute)
    assert sum(cost.exposed for cost in costs) == pytest.approx(line.exposed)
    assert sum(cost.time for cost in costs) == pytest.approx(line.step)
    for axes in {one.axes for one in made.collectives}:
        assert sum(cost.wire.get(axes, 0) for cost in costs) == pytest.approx(made.wire_bytes(axes))
    assert sum(cost.params for cost in costs) == sum(a.bytes for a in made.arguments if a.kind == "params")


def test_the_rows_sum_to_the_step() -> None:
    made = report()
    first, middle, _, rest = by_segment(made)
    line = made.timeline
    assert line
    assert_sums(dataclasses.replace(made, timeline=dataclasses.replace(line, step=line.compute + line.exposed)))
    assert (first.compute, middle.compute, rest.compute) == (1000, 40_000, 309)
    assert middle.wire[("tensor",)] == pytest.approx(94 * first.wire[("tensor",)]) and ("data",) not in first.wire
    assert [cost.params for cost in by_segment(made)] == [100, 101, 102, 103]


def test_a_place_is_in_the_outermost_segment() -> None:
    made = dataclasses.replace(report(), segments={"first": 1, "mlp": 1})
    assert segment_of(made, Location("first/layers/mlp")) == "first"
    assert segment_of(made, Location("mlp/layers/attention+mlp")) == "mlp"
    assert segment_of(made, Location("first+mlp/layers")) == segment_of(made, Location()) == ""
    flat = Argument("state.params['first/tensor']", "params", (8,), "f32", 32, ())
    assert segment_of_argument(made, flat) == "first"


def test_without_a_timeline_there_are_bytes() -> None:
    made = dataclasses.replace(report(), timeline=None)
    assert not any(cost.compute for cost in by_segment(made)) and all(cost.wire for cost in by_segment(made))
    assert segment_table(made)[1][2:5] == ("", "", "")


@pytest.mark.parametrize("width", [80, 110])
def test_the_screen_and_the_page_show_segments_only_where_there_are_several(width: int) -> None:
    console = Console(width=width)
    for made, shown in ((report(), True), (report({"blocks": 96}), False), (report({}), False)):
        with console.capture() as captured:
            console.print(screen(made))
        text = captured.get()
        assert len(text.splitlines()) <= LINES
        assert ("\nsegment " in text) == ("By segment" in page(made)) == shown
    with console.capture() as captured:
        console.print(screen(report(dict.fromkeys("abcdefgh", 6))))
    assert "\n4 more" in captured.get() and "\nrest " in captured.get()


def test_a_report_with_segments_survives_json() -> None:
    made = report()
    assert Report.from_json(made.to_json()) == made


SEQ, D, MICROBATCHES = 64, 32, 2
ALL_REDUCE = SEQ * D * 2
"""Bytes that a device sends for an all-reduce of a sequence's residual stream in bf16 over two devices, a ring: 2 (2 - 1) / 2 of them."""


@pytest.mark.deviceless
@pytest.mark.slow
def test_a_segment_sends_what_its_own_rules_ask_for(reports: str) -> None:
    """Tensor parallelism has four all-reduces for each layer and microbatch; with a replicated MLP there are two, with heads, too, none."""
    segments = SegmentConfig("first", 1), SegmentConfig("middle", 2), SegmentConfig("last", 1)
    whole = {"first/mlp": None, "last/mlp": None, "last/heads": None, "last/kv_heads": None}
    config = TrainConfig(
        model=DecoderConfig(
            n_layers=4, segments=segments, d_model=D, n_heads=4, seq_len=SEQ, vocab_size=256, attention="xla", loss_chunk=SEQ
        ),
        output="runs/segments",
        mesh=MeshConfig(data=2, tensor=2),
        rules=preset("megatron").replace("ends whole", params=whole, activations=whole),
        train=TrainLoop(global_batch=2 * MICROBATCHES, microbatches=MICROBATCHES, steps=20),
        data=DataConfig(tokenizer_vocab=200),
        launch=LaunchConfig(compile_cache=reports),
    )
    made = compile_config(config, "h100", 4)
    assert_sums(made)
    first, middle, last, rest = by_segment(made)
    sent = Counter({cost.name: cost.wire.get(("tensor",), 0) for cost in (first, middle, last)})
    assert sent == {name: n * MICROBATCHES * ALL_REDUCE for name, n in (("first", 2), ("middle", 2 * 4), ("last", 0))}
    matrices, vectors = {"attention": 4 * D * D, "mlp": 8 * D * D}, 3 * D + D + D + 4 * D
    replicated = 4 * (sum(matrices.values()) + 4 * D + vectors)
    assert last.params == replicated, "fp32"
    assert first.params == replicated - 4 * (matrices["attention"] + 3 * D) // 2
    assert middle.params == 2 * (first.params - 4 * (matrices["mlp"] + 4 * D) // 2)
    assert rest.params > 0 and set(rest.wire) >= {("data",), ("tensor",)}
    assert all(cost.compute > 0 for cost in (first, middle, last, rest))
