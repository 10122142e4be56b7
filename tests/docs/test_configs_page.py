"""docs/configs.md and its chart: made from the newest results, whose rows add up and send what the
closed forms say.

Whether the configs have changed since is no test's business: `python benchmarks/plan_table.py
--check` tells it.
"""

import importlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from PIL import Image

from benchmarks import plan_page
from benchmarks.plan_chart import digest
from mesh_lm.config import load
from mesh_lm.planning.closed_forms.config import expected_of
from mesh_lm.planning.closed_forms.subjects import NoFormError
from mesh_lm.planning.closed_forms.terms import by_axes, total
from mesh_lm.training.check import check

ROOT = Path(__file__).parents[2]
SOURCE = plan_page.newest()
DATA = json.loads(SOURCE.read_text(encoding="utf-8"))
ROWS = {row["name"]: row for row in DATA["tables"][plan_page.CONFIGS]["rows"]}
TABLE = ROOT / "benchmarks" / "plan_table.py"
ANEW = "run: python benchmarks/plan_table.py"


def test_the_page_is_that_of_the_newest_results() -> None:
    assert plan_page.PAGE.read_text(encoding="utf-8") == plan_page.page(DATA, SOURCE.name), (
        f"{ANEW} --page"
    )


@pytest.mark.parametrize("name", ROWS)
def test_a_step_is_a_band(name: str) -> None:
    """From the optimistic to the sustained rates, and the MFU the other way around."""
    row = ROWS[name]
    fast, slow = row["step_s"], row["sustained_step_s"]
    assert row["exposed_s"] < fast < slow < 1.5 * fast
    assert row["own_ratio"] > 1 and row["model_ratio"] > 1
    text = plan_page.PAGE.read_text(encoding="utf-8")
    section = text[text.index("## How long a step takes") : text.index("## Stages or FSDP")]
    rounded = [plan_page.seconds(end) for end in (fast, slow)]
    step = " to ".join(dict.fromkeys(rounded))
    (line,) = [line for line in section.splitlines() if line.startswith(f"| `{name}` |")]
    _, *cells = line.split(" | ")
    mfus = [f"{100 * plan_page.utilisation(row, end):.0f}" for end in (slow, fast)]
    assert cells[:2] == [step, f"{' to '.join(dict.fromkeys(mfus))} %"]
    assert cells[2] == f"{100 * row['exposed_s'] / fast:.0f} %"
    assert cells[3:5] == [f"{row['own_ratio']:.2f}", f"{row['model_ratio']:.2f}"]


def test_an_older_row_has_the_fast_end_alone() -> None:
    row = {"step_s": 6.24, "tflop": 3428.0, "flops_over_model": 1.05}
    assert plan_page.step_words(row) == "6.24"
    assert plan_page.step_words(row | {"sustained_step_s": 6.2401}) == "6.24"
    assert plan_page.step_words(row | {"sustained_step_s": 7.02}) == "6.24 to 7.02"


def test_the_chart_is_that_of_the_newest_results() -> None:
    with Image.open(plan_page.CHART) as image:
        assert image.info["Source"] == digest(DATA), f"{ANEW} --page"


@pytest.fixture(scope="module")
def plan_table() -> Iterator[ModuleType]:
    """The command, whose file imports its neighbours as a script does."""
    with pytest.MonkeyPatch.context() as patched:
        patched.syspath_prepend(str(TABLE.parent))
        yield importlib.import_module("plan_table")


@pytest.mark.parametrize("name", ROWS)
def test_a_row_adds_up(name: str) -> None:
    """The classes of memory to its peak, the axes to what is sent; and it fits."""
    row = ROWS[name]
    sent = sum(n for key, n in row.items() if key.startswith("sent over "))
    classes = sum(
        n for key, n in row.items() if key.endswith(", GiB") and not key.startswith("sent over ")
    )
    assert sent == pytest.approx(row["sent_gib"]) and classes == pytest.approx(row["peak_gib"])
    assert row["fits"] and row["peak_gib"] <= row["usable_gib"] and not row["warnings"]


@pytest.mark.parametrize("name", ROWS)
def test_a_row_sends_what_the_closed_form_says(plan_table: ModuleType, name: str) -> None:
    row = ROWS[name]
    (subject,) = [one for one in plan_table.SUBJECTS if one.name == name]
    if not (ROOT / "configs" / f"{name}.py").exists() or plan_table.changed(subject, row):
        pytest.skip(
            f"{name} is no longer what was compiled: python benchmarks/plan_table.py --check"
        )
    config, gib = check(load(f"configs/{name}.py"), row["devices"]), 2**30
    try:
        terms = expected_of(config)
    except NoFormError:
        assert row["least_gib"] is None
        return
    assert row["sent_gib"] == pytest.approx(total(terms) / gib, rel=0.01)
    if row["least_gib"] is not None:  # else its form is newer than the results
        assert row["sent_over_least"] == pytest.approx(row["sent_gib"] / row["least_gib"])
        least = total(terms, field="least_wire_bytes") / gib
        assert row["least_gib"] == pytest.approx(least, rel=0.01)
    for axes, sent in by_axes(terms).items():
        over = "+".join(axes)
        assert row.get(f"sent over {over}, GiB", 0) == pytest.approx(
            sent / gib, rel=0.01, abs=0.001
        ), over


def test_the_program_does_not_grow() -> None:
    """With the layers by at most 2 % of its text; nor what it takes to compile with the devices,
    above 1.5 times and 2.75 GB in loops."""
    sizes = [row["text_bytes"] for row in DATA["tables"][plan_page.DEPTH]["rows"]]
    assert len(sizes) == 3 and max(sizes) <= 1.02 * min(sizes)
    few, *_, many = DATA["tables"][plan_page.DEVICES]["rows"]
    assert (few["devices"], many["devices"]) == (64, 6144) and many["cpu_s"] <= 1.5 * few["cpu_s"]
    looped = [
        row for table in DATA["tables"].values() for row in table["rows"] if not row["unroll"]
    ]
    assert looped and all(row["rss_gib"] * 2**30 <= 2.75e9 for row in looped)


def test_every_row_with_stages_is_compared_to_fsdp() -> None:
    """The same model on as many GPUs with as large a batch."""
    staged = {name: row for name, row in ROWS.items() if "stages" in row}
    without = {
        row["name"].removesuffix(" by FSDP"): row for row in DATA["tables"][plan_page.FSDP]["rows"]
    }
    assert staged.keys() == without.keys() and staged
    for name, row in without.items():
        assert all(
            row[key] == staged[name][key]
            for key in ("parameters", "devices", "global_batch", "layers")
        )
        assert "pipeline" not in row["mesh"] and row["fits"]


def test_what_has_changed_since_is_told(
    plan_table: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new config, a changed one and one that is gone, each in a line; nothing of the others."""
    shutil.copytree(
        ROOT / "configs", tmp_path / "configs", ignore=shutil.ignore_patterns("__pycache__")
    )
    monkeypatch.setattr(plan_table, "ROOT", tmp_path)
    monkeypatch.chdir(tmp_path)
    before = plan_table.stale(DATA)
    source = tmp_path / "configs" / "llama3_8b.py"
    source.write_text(
        source.read_text(encoding="utf-8").replace("global_batch=512", "global_batch=1024"),
        encoding="utf-8",
    )
    shutil.copy(source, tmp_path / "configs" / "mine.py")
    (tmp_path / "configs" / "gpt2_124m.py").unlink()
    assert sorted(set(plan_table.stale(DATA)) - {*before}) == [
        "configs/mine.py has no row: add its devices to PUBLISHED",
        "gpt2_124m: there is no configs/gpt2_124m.py; remove it from PUBLISHED",
        (
            "llama3_8b: global_batch 1024, which was 512: python benchmarks/plan_table.py --again "
            "'--only=llama3_8b'"
        ),
    ]
