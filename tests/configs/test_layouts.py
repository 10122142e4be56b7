"""configs/layouts: what the planner found to be faster than the layouts of the shipped configs."""

from __future__ import annotations

import json
from importlib.metadata import version
from pathlib import Path

import pytest

from mesh_lm.commands.command_line import parse
from mesh_lm.config import load
from mesh_lm.config.layout import with_layout
from mesh_lm.planning.best import TIE
from mesh_lm.training.check import check
from tests.docs.planner_tables import tables_of

LAYOUTS = Path(__file__).resolve().parents[2] / "configs" / "layouts"
FILES = sorted(LAYOUTS.glob("*.json"))
SEARCHES = tables_of("best_layouts")["The best layout found, and the config's own"]


def test_each_layout_that_is_faster_has_a_file() -> None:
    faster = {f"{row['config']}_{row['devices']}" for row in SEARCHES if row["ratio"] <= 1 - TIE}
    assert {file.stem for file in FILES} == faster


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_run_can_start_with_it(file: Path) -> None:
    """The file is of this config as it is today, runs on its number of devices, and is the layout
    that the search found."""
    if json.loads(file.read_text(encoding="utf-8"))["jax"] != version("jax"):
        pytest.skip("the layouts were found with another version of jax")
    name, _, devices = file.stem.rpartition("_")
    n_devices = int(devices)
    read = check(with_layout(load(name), str(file)), n_devices)
    (search,) = (row for row in SEARCHES if row["config"] == name)
    found = check(parse([name, *search["best"].split()]), n_devices)
    assert read == found
