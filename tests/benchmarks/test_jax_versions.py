"""benchmarks/jax_versions.py: figures of several versions side by side, and which earlier results
are kept."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

ROOT = Path(__file__).parents[2]
OLD = {
    "config": "gpt_1_3b",
    "jax": "0.9.3",
    "step_s": 2.0,
    "peak_gib": 20.0,
    "sent over fsdp, GiB": 8.0,
    "compile_s": 4.0,
}
NEW = OLD | {"jax": "0.10.2", "step_s": 1.0, "sent over data, GiB": 1.0}
ELSEWHERE = OLD | {"config": "gpt_175b", "jax": "0.10.2"}


@pytest.fixture(scope="module")
def jax_versions() -> Iterator[ModuleType]:
    """The command, whose file imports its neighbours as a script does."""
    with pytest.MonkeyPatch.context() as patched:
        patched.syspath_prepend(str(ROOT / "benchmarks"))
        yield importlib.import_module("jax_versions")


def test_versions_are_side_by_side_in_their_order(jax_versions: ModuleType) -> None:
    lines = jax_versions.beside([NEW, OLD, ELSEWHERE])
    assert [*lines[0]] == ["config", "figure", "jax 0.9.3", "jax 0.10.2", "change, %"]
    rows = {(line["config"], line["figure"]): [*line.values()][2:] for line in lines}
    assert rows["gpt_1_3b", "step_s"] == [2.0, 1.0, -50.0]
    assert rows["gpt_1_3b", "peak_gib"] == [20.0, 20.0, 0.0]
    assert rows["gpt_1_3b", "sent over data, GiB"] == [0.0, 1.0, None], (
        "no change in per cent of nothing"
    )
    assert rows["gpt_175b", "step_s"] == [None, 2.0, None], (
        "this version has not been compiled with"
    )
    assert not any(name == "compile_s" for _, name in rows), (
        "the machine's time is no figure of the program"
    )


def test_rows_of_other_versions_are_kept(jax_versions: ModuleType, tmp_path: Path) -> None:
    record = SimpleNamespace(
        directory=tmp_path, stem="jax_versions_2026-11-24_h100", data={"date": "2026-11-24"}
    )
    assert jax_versions.kept(record) == {}
    (tmp_path / "jax_versions_2026-11-20_h100.json").write_text(
        json.dumps({"tables": {"Compiled": {"rows": [OLD, NEW]}}}), encoding="utf-8"
    )
    assert [*jax_versions.kept(record)] == [("gpt_1_3b", "0.9.3"), ("gpt_1_3b", "0.10.2")]


def test_every_config_has_a_number_of_devices(jax_versions: ModuleType) -> None:
    assert len({*jax_versions.CONFIGS}) == 5 and {*jax_versions.CONFIGS} <= {*jax_versions.DEVICES}
