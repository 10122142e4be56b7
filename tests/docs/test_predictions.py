"""Until several GPUs have confirmed one, every page that shows a predicted time says "predicted,
never measured" where it first does."""

import dataclasses
import html
import io
import re
from pathlib import Path

import pytest
from lab_report import report
from rich.console import Console

from sharding_rules.lab.diff import diff
from sharding_rules.lab.page import page
from sharding_rules.lab.summary import PREDICTED
from sharding_rules.lab.text import screen

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
MEASURED = sorted(RESULTS.glob("multi_gpu_*.json"))
pytestmark = pytest.mark.skipif(
    bool(MEASURED), reason=f"measured: {', '.join(path.name for path in MEASURED)}"
)

TIMES = re.compile(
    r"predicted (time|step)|\bm?s predicted|step time x|estimated_ms|\bstep_m?s\b|a step takes "
    r"[\d.]+ (to [\d.]+ )?m?s|time of (a step|the whole layer)"
)
"""How a page shows the time of a step that ran nowhere."""
NOT_PREDICTED = {
    "gpt_tiny",
    "multi_gpu",
    "gpu_suite",
    "gpu_truth",
    "gpu_minutes",
    "host_cost",
    "soak",
    "faults",
    "replay_cost",
}
"""Beginnings of the results whose times a clock took."""
PAGES = {
    "README.md", "docs/lab.md", "docs/configs.md", "docs/kernels.md", "docs/pipeline.md",
    "docs/context.md", "docs/sharding.md", "docs/hardware.md",
    "docs/what_has_run.md", "docs/images/plan_gpt_175b.svg",
    "benchmarks/results/plan_table", "benchmarks/results/hot_spots", "benchmarks/results/xla_flags",
    "benchmarks/results/bars",
    "benchmarks/results/context_lengths", "benchmarks/results/reductions",
    "benchmarks/results/jax_versions", "benchmarks/results/best_layouts",
    "benchmarks/results/random_layouts", "benchmarks/results/offload",
    "benchmarks/results/memory_choices",
    "benchmarks/results/bars_base_h100-jax-0.10.2.md",
}  # fmt: skip
"""Those that are known to; of results the beginnings of their names."""


def pages() -> dict[str, str]:
    """What is for people to read, with one space between words."""
    files = [
        ROOT / "README.md",
        *ROOT.glob("docs/*.md"),
        *ROOT.glob("docs/images/*.svg"),
        *RESULTS.glob("*.md"),
        *RESULTS.glob("*/*.md"),
    ]
    files = [path for path in files if path.name.partition("_20")[0] not in NOT_PREDICTED]
    return {
        str(path.relative_to(ROOT)).partition("_20")[0]: " ".join(
            html.unescape(path.read_text(encoding="utf-8")).split()
        )
        for path in files
    }


def test_every_page_that_shows_a_predicted_time_says_so_first() -> None:
    shown = {name: (text, found) for name, text in pages().items() if (found := TIMES.search(text))}
    assert shown.keys() == PAGES
    for name, (text, found) in shown.items():
        assert PREDICTED in text[: found.end() + 60], (
            f"{name}: {text[max(0, found.start() - 80) : found.end() + 80]}"
        )


def test_what_the_lab_prints_says_so() -> None:
    """The screen, the page and the comparison: once, before or beside the first time."""
    one = report()
    assert one.timeline is not None
    slower = dataclasses.replace(
        one, timeline=dataclasses.replace(one.timeline, step=2 * one.timeline.step)
    )
    console = Console(width=110, file=io.StringIO(), record=True)
    console.print(screen(one))
    assert re.search(rf"[\d.]+ to [\d.]+ m?s {PREDICTED}: compute", console.export_text())
    assert re.search(rf"A step takes [\d.]+ to [\d.]+ m?s \({PREDICTED}\)", page(one))
    assert re.search(rf"{PREDICTED}\n  step  [\d.]+ m?s -> ", str(diff(one, slower)))
