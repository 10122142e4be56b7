"""The quick form of the table of configs: rows of both kinds, and existing rows are not compiled
again."""

from pathlib import Path

import pytest

from tests.benchmarks.test_benchmarks import run

pytestmark = [pytest.mark.exhaustive, pytest.mark.deviceless]


def test_rows_and_resuming(tmp_path: Path) -> None:
    tables = run("plan_table", tmp_path)
    rows = [row for rows in tables.values() for row in rows]
    assert [row["name"] for row in rows] == ["gpt_175b", "gpt_175b, 96 layers"]
    for row in rows:
        assert (
            row["fits"]
            and row["sent_over_least"] >= 1
            and row["text_bytes"] > 1e5
            and 0.1 < row["rss_gib"] < 2
        )
        assert row["total_s"] == pytest.approx(row["lower_s"] + row["compile_s"] + row["read_s"])
        assert row["step_s"] < row["sustained_step_s"] and row["own_ratio"] > 1
        assert min(row["lower_s"], row["compile_s"], row["read_s"], row["cpu_s"]) > 0
    assert run("plan_table", tmp_path) == tables
