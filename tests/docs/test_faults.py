"""docs/operations.md: the tables of the newest results, with every fault that the suite has."""

import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import faults

ROOT = Path(__file__).parents[2]


def test_the_tables_are_those_of_the_newest_results() -> None:
    page = faults.PAGE.read_text(encoding="utf-8")
    assert [page.count(mark) for mark in faults.MARKS] == [1, 1]
    assert faults.shown() == faults.section(faults.newest())


def test_every_fault_is_tested_and_told() -> None:
    tested = {
        f"F{n}"
        for path in (ROOT / "tests" / "fault").glob("test_*.py")
        for n in re.findall(r"def test_f(\d+)_", path.read_text(encoding="utf-8"))
    }
    assert tested == set(faults.FAULTS)


def test_all_held_three_times_in_a_row() -> None:
    held: set[str] = set()
    for _, data in faults.newest():
        rows = data["tables"]["Tests"]["rows"]
        # its seeds are fixed: a second run is the first
        repeats = {row["fault"] for row in rows} == {"F23"}
        assert {(row["run"], row["outcome"]) for row in rows} == {
            (n, "passed") for n in ((1,) if repeats else (1, 2, 3))
        }
        held |= {row["fault"] for row in rows}
    assert held == {*faults.FAULTS}


def test_at_least_two_thousand_files_were_damaged_and_none_in_silence() -> None:
    *kinds, everything = faults.corruptions(
        [row for _, data in faults.newest() for row in data["tables"]["Tests"]["rows"]]
    )
    assert len(kinds) >= 10 and int(everything["damaged"]) >= 2000
    assert (everything["silent"], everything["traceback"]) == ("0", "0")
