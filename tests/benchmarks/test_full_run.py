"""The full run: its parts leave out only what needs a GPU, and it records the result of each."""

import itertools
import json
import sys
from pathlib import Path

import pytest
from processes import ROOT

MARKS = ("slow", "exhaustive", "deviceless", "fault")


@pytest.fixture
def full_run(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import full_run

    yield full_run
    sys.modules.pop("full_run")


def test_every_test_is_in_one_part(full_run) -> None:
    """Every test is in a part, whatever its marks; exhaustive tests are slow, and faults are in a folder of their own."""
    chosen = [command[command.index("-m", 3) + 1] for command in full_run.PARTS.values() if command[:3] == full_run.PYTEST[:3]]
    assert len(chosen) == 4
    for values in itertools.product((False, True), repeat=len(MARKS)):
        marks = dict(zip(MARKS, values, strict=True), gpu=False)
        if marks["slow"] >= marks["exhaustive"]:
            assert sum(eval(each, {}, marks) for each in chosen) == 1, marks
        assert not any(eval(each, {}, marks | {"gpu": True, "fault": False}) for each in chosen)
    marked = [path for path in (ROOT / "tests").rglob("*.py") if "pytest.mark.fault" in path.read_text() and path != Path(__file__)]
    assert {path.parent.name for path in marked} == {"fault"}


def test_outcomes_are_counted(full_run, tmp_path: Path) -> None:
    (tmp_path / "report.xml").write_text(
        "<testsuites><testsuite><testcase/><testcase><failure/></testcase><testcase><error/></testcase>"
        "<testcase><skipped/></testcase><testcase><properties/></testcase></testsuite></testsuites>"
    )
    assert full_run.counted(tmp_path / "report.xml") == {"passed": 2, "failed": 2, "skipped": 1}


def test_seconds_are_remembered_by_file_and_part(full_run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files that no longer exist are dropped; the other known seconds are kept."""
    here, other = "tests/test_house.py", "tests/test_readme.py"
    monkeypatch.setattr(full_run, "SECONDS", tmp_path / "seconds.json")
    full_run.SECONDS.write_text(
        json.dumps({here: {"fast": 1, "slow": 9}, other: {"slow": 5, "fast": 2}, "tests/test_gone.py": {"fast": 3}})
    )
    cases = (f'<testcase file="{file}" time="{time}"/>' for file, time in ((here, 2.25), (here, 0.5), ("tests/test_new.py", 1)))
    (tmp_path / "report.xml").write_text(f"<testsuites><testsuite>{''.join(cases)}</testsuite></testsuites>")
    full_run.remember("slow", tmp_path / "report.xml")
    assert json.loads(full_run.SECONDS.read_text()) == {here: {"fast": 1, "slow": 2.8}, other: {"fast": 2}}


def test_what_failed_and_what_was_not_run_is_told(full_run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = "import sys; sys.exit({})".format
    parts = {"good": [sys.executable, "-c", python(0)], "bad": [sys.executable, "-c", python(3)], "other": []}
    monkeypatch.setattr(full_run, "PARTS", parts)
    monkeypatch.setattr(sys, "argv", ["benchmarks/full_run.py", "--only=bad,good", f"--output={tmp_path}"])
    assert full_run.main() == 1
    (results,) = tmp_path.glob("full_run_*.json")
    record = json.loads(results.read_text())
    assert [(row["part"], row["status"]) for row in record["tables"]["Parts"]["rows"]] == [("good", 0), ("bad", 3), ("other", "not run")]
    assert record["versions"]["jax"] and record["machine"]["cores"] and record["date"] and "commit" in record
    monkeypatch.setattr(sys, "argv", ["benchmarks/full_run.py", "--only=none"])
    with pytest.raises(SystemExit):
        full_run.main()
