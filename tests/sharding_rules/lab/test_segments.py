"""What each segment of a model costs: sums that miss nothing, of reports made by hand and of the
recipes in docs/sharding.md."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import lab_report
import pytest
from lab_report import GIB
from rich.console import Console

from mesh_lm.config import TrainConfig
from mesh_lm.model import DecoderConfig
from mesh_lm.planning.program import Program, flags_of
from sharding_rules.lab.flags import options
from sharding_rules.lab.lint import lint
from sharding_rules.lab.page import page
from sharding_rules.lab.report import Argument, Location, Report, Timeline
from sharding_rules.lab.segments import (
    REST,
    by_segment,
    segment_of,
    segment_of_argument,
    segment_table,
)
from sharding_rules.lab.text import LINES, screen

COMPILE_BUDGET = 1
SEGMENTS = {"first": 1, "middle": 94, "last": 1}
PARTS = {
    "first/layers/mlp": 1000.0,
    "middle/layers/attention": 40_000.0,
    "last/layers": 500.0,
    "first+middle": 7.0,
    "loss": 300.0,
    "": 2.0,
}


def report(segments: dict[str, int] = SEGMENTS) -> Report:
    """Each collective of the layers once in each segment; those of the sum of gradients merged from
    two."""
    made = lab_report.report()
    sent = []
    for one in made.collectives:
        inside = one.where.part.startswith("layers")
        for name in SEGMENTS if inside else [""]:
            where = dataclasses.replace(
                one.where, part=f"{name}/{one.where.part}" if inside else "first+middle/layers"
            )
            sent.append(dataclasses.replace(one, where=where, loops=(4, SEGMENTS.get(name, 1))))
    names = [f"state['params']['{name}.mlp.up.weight']" for name in SEGMENTS] + [
        "state['params']['embedding']"
    ]
    arguments = tuple(
        Argument(name, "params", (8, 8), "f32", 100 + i, ()) for i, name in enumerate(names)
    )
    line = Timeline(50_000.0, sum(PARTS.values()), 0.0, 8191.0, (), parts=PARTS)
    return dataclasses.replace(
        made, collectives=tuple(sent), arguments=arguments, timeline=line, segments=segments
    )


def assert_sums(made: Report) -> None:
    costs, line = by_segment(made), made.timeline
    assert [cost.name for cost in costs] == [*made.segments, REST]
    assert line
    assert sum(cost.compute for cost in costs) == pytest.approx(line.compute)
    assert sum(cost.exposed for cost in costs) == pytest.approx(line.exposed)
    assert sum(cost.time for cost in costs) == pytest.approx(line.step)
    for axes in {one.axes for one in made.collectives}:
        assert sum(cost.wire.get(axes, 0) for cost in costs) == pytest.approx(made.wire_bytes(axes))
    assert sum(cost.state for cost in costs) == sum(
        a.bytes for a in made.arguments if a.kind in ("params", "moments")
    )
    assert sum(cost.params for cost in costs) == sum(
        a.bytes for a in made.arguments if a.kind == "params"
    )


def test_the_rows_sum_to_the_step() -> None:
    made = report()
    first, middle, _, rest = by_segment(made)
    line = made.timeline
    assert line
    assert_sums(
        dataclasses.replace(
            made, timeline=dataclasses.replace(line, step=line.compute + line.exposed)
        )
    )
    assert (first.compute, middle.compute, rest.compute) == (1000, 40_000, 309)
    assert (
        middle.wire[("tensor",)] == pytest.approx(94 * first.wire[("tensor",)])
        and ("data",) not in first.wire
    )
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
    assert not any(cost.compute for cost in by_segment(made)) and all(
        cost.wire for cost in by_segment(made)
    )
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


PAGE = (Path(__file__).parents[3] / "docs" / "sharding.md").read_text(encoding="utf-8")


@pytest.mark.deviceless
@pytest.mark.slow
def test_a_segment_sends_what_its_own_rules_ask_for(reports: str) -> None:
    """The recipes of docs/sharding.md, compiled: in each layer and microbatch four all-reduces over
    tensor, or two, or those of the gradients of replicated queries, keys and values. The page's
    table has these numbers.
    """
    namespace: dict[str, Any] = {}
    exec(
        next(
            text
            for text in re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
            if "segments" in text
        ),
        namespace,
    )
    config: TrainConfig = namespace["get_config"]()
    config = dataclasses.replace(
        config, launch=dataclasses.replace(config.launch, compile_cache=str(Path(reports).parent))
    )
    made = Program.of(config, "h100", 8)
    report = made.compile(options(flags_of(config, "h100")))
    assert_sums(report)
    first, middle, last, rest = by_segment(report)
    slow = by_segment(dataclasses.replace(report, timeline=report.sustained))

    model, tensor, replicas, microbatches = made.config.model, 4, 2, config.train.microbatches
    assert isinstance(model, DecoderConfig)
    width, residual = (
        model.d_model,
        config.train.global_batch // replicas // microbatches * model.seq_len * model.d_model * 2,
    )
    ring = 2 * (tensor - 1) / tensor * residual
    for cost, sums in ((first, 2), (middle, 4), (last, 3)):
        assert cost.wire[("tensor",)] == cost.n_layers * microbatches * sums * ring, cost.name
    attention, mlp, vectors = 4 * width**2 + 3 * width, 8 * width**2 + 4 * width, 6 * width
    assert last.params == 4 * (attention + mlp + vectors)
    assert first.params == 4 * (attention // tensor + mlp + vectors)
    assert middle.params == 4 * 22 * ((attention + mlp) // tensor + vectors)
    assert all(cost.state == 3 * cost.params for cost in (first, middle, last)), (
        "fp32, and two moments"
    )
    assert rest.params > 0 and all(cost.compute > 0 for cost in (first, middle, last, rest))

    listed = re.findall(
        r"^\| `(\w+)` \| (\d+) \| ([\d.]+) GiB \| ([\d.]+) GiB \| ([\d.]+) to ([\d.]+) ms \|$",
        PAGE,
        re.MULTILINE,
    )
    shown = [
        (
            cost.name,
            str(cost.n_layers),
            f"{cost.wire['tensor',] / GIB:.2f}",
            f"{cost.state / GIB:.2f}",
        )
        for cost in (first, middle, last)
    ]
    assert [tuple(row[:4]) for row in listed] == shown
    for cost, slow_cost, row in zip((first, middle, last), slow[:3], listed, strict=True):
        # of jax 0.10.2
        found = [one.compute / one.n_layers / 1000 for one in (cost, slow_cost)]
        assert found == pytest.approx([float(row[4]), float(row[5])], rel=0.25), cost.name
    assert lint(report, config.rules, made.layout.axes) == ()
