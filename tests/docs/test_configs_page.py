"""docs/configs.md and its chart: made from the newest results, which are those of the configs as they are."""

import json
from pathlib import Path

import pytest
from PIL import Image

from benchmarks import plan_page
from benchmarks.plan_chart import digest
from mesh_lm.check import check
from mesh_lm.cli import load
from mesh_lm.model import DecoderConfig
from tests.sharding_rules.closed_forms import expected_of, total

ROOT = Path(__file__).parents[2]
SOURCE = plan_page.newest()
DATA = json.loads(SOURCE.read_text())
ROWS = {row["name"]: row for row in DATA["tables"][plan_page.CONFIGS]["rows"]}
ANEW = "run: python benchmarks/plan_table.py"


def test_the_page_is_that_of_the_newest_results() -> None:
    assert plan_page.PAGE.read_text() == plan_page.page(DATA, SOURCE.name), f"{ANEW} --page"


def test_the_chart_is_that_of_the_newest_results() -> None:
    with Image.open(plan_page.CHART) as image:
        assert image.info["Source"] == digest(DATA), f"{ANEW} --page"


def test_every_config_has_a_row() -> None:
    files = {path.stem for path in (ROOT / "configs").glob("*.py")} - {"__init__", "gpt_tiny"}
    assert ROWS.keys() == files, ANEW


@pytest.mark.parametrize("name", ROWS)
def test_a_row_is_its_config(name: str) -> None:
    row = ROWS[name]
    config = check(load(f"configs/{name}.py"), row["devices"])
    assert isinstance(config.model, DecoderConfig)
    sizes = {axis: n for axis, n in config.mesh.sizes().items() if n > 1}
    again = f"{name} has changed since; {ANEW} --again --only={name}"
    assert row["parameters"] == config.model.n_params(), again
    assert row["mesh"] == " x ".join(f"{axis} {n}" for axis, n in sizes.items()), again
    loop = config.train
    assert (row["global_batch"], row["microbatches"], row["rules"]) == (loop.global_batch, loop.microbatches, config.rules.name), again
    assert row["remat"] == config.model.remat and row["layers"] == config.model.n_layers, again
    staged = (config.mesh.pipeline, config.pipeline.chunks, config.pipeline.stash) if config.mesh.pipeline > 1 else (None,) * 3
    assert (row.get("stages"), row.get("chunks"), row.get("stash")) == staged, again


@pytest.mark.parametrize("name", ROWS)
def test_a_row_adds_up(name: str) -> None:
    """The classes of memory to its peak, the axes to what is sent; and it fits."""
    row = ROWS[name]
    sent = sum(n for key, n in row.items() if key.startswith("sent over "))
    classes = sum(n for key, n in row.items() if key.endswith(", GiB") and not key.startswith("sent over "))
    assert sent == pytest.approx(row["sent_gib"]) and classes == pytest.approx(row["peak_gib"])
    assert row["fits"] and row["peak_gib"] <= row["usable_gib"] and not row["warnings"]


@pytest.mark.parametrize("name", ROWS)
def test_a_row_sends_what_the_closed_form_says(name: str) -> None:
    row = ROWS[name]
    terms, gib = expected_of(check(load(f"configs/{name}.py"), row["devices"])), 2**30
    assert row["sent_gib"] == pytest.approx(total(terms) / gib, rel=0.01)
    assert row["least_gib"] == pytest.approx(total(terms, field="least_wire_bytes") / gib)
    assert row["sent_over_least"] == pytest.approx(row["sent_gib"] / row["least_gib"])


def test_the_program_does_not_grow() -> None:
    """With the layers by at most 2 % of its text; nor what it takes to compile with the devices, above 1.5 times and 2 GB."""
    sizes = [row["text_bytes"] for row in DATA["tables"][plan_page.DEPTH]["rows"]]
    assert len(sizes) == 3 and max(sizes) <= 1.02 * min(sizes)
    few, *_, many = DATA["tables"][plan_page.DEVICES]["rows"]
    assert (few["devices"], many["devices"]) == (64, 6144) and many["cpu_s"] <= 1.5 * few["cpu_s"]
    assert all(row["rss_gib"] * 2**30 <= 2e9 for table in DATA["tables"].values() for row in table["rows"])


def test_every_config_with_stages_is_compared_to_fsdp() -> None:
    """The same model on as many GPUs with as large a batch."""
    staged = {name: row for name, row in ROWS.items() if "stages" in row}
    without = {row["name"].removesuffix(" by FSDP"): row for row in DATA["tables"][plan_page.FSDP]["rows"]}
    assert staged.keys() == without.keys() and len(staged) == 6
    for name, row in without.items():
        assert all(row[key] == staged[name][key] for key in ("parameters", "devices", "global_batch", "layers"))
        assert "pipeline" not in row["mesh"] and row["fits"]
