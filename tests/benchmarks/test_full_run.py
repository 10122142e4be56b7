"""The full run: its parts leave out only what needs a GPU, and it records the result of each."""

import itertools
import json
import sys
from pathlib import Path

import pytest
import tiers
from processes import ROOT

MARKS = ("slow", "exhaustive", "deviceless", "fault")


@pytest.fixture
def full_run(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import full_run

    yield full_run
    sys.modules.pop("full_run")


def test_every_test_is_in_one_part(full_run) -> None:
    """Every test is in a part, whatever its marks; exhaustive tests are slow, and faults are in a
    folder of their own.

    A deviceless test that is not slow is in two: CI's slow part accepts no skipped one.
    """
    chosen = [
        command[command.index("-m", 3) + 1]
        for command in full_run.PARTS.values()
        if command[:3] == full_run.PYTEST[:3]
    ]
    assert [*dict.fromkeys(chosen)] == [
        tiers.FAST,
        tiers.CI,
        tiers.FULL,
    ] and "faults" in full_run.PARTS
    rest = full_run.PARTS["full, the rest"]
    assert {word.removeprefix("--ignore=") for word in rest if "--ignore=" in word} == {
        *full_run.FOLDERS
    }
    assert all(
        (ROOT / folder).is_dir() and full_run.PARTS[f"full {folder}"][-1] == folder
        for folder in full_run.FOLDERS
    )
    for values in itertools.product((False, True), repeat=len(MARKS)):
        marks = {name for name, value in zip(MARKS, values, strict=True) if value}
        parts = sum(tiers.selects(expression, marks) for expression in {*chosen, tiers.FAULTS})
        assert parts == (2 if marks == {"deviceless"} else 1), marks
        assert not any(
            tiers.selects(expression, (marks | {"gpu"}) - {"fault"}) for expression in chosen
        )
    marked = [
        path
        for path in (ROOT / "tests").rglob("*.py")
        if "pytest.mark.fault" in path.read_text(encoding="utf-8") and path != Path(__file__)
    ]
    assert {path.parent.name for path in marked} == {"fault"}


def test_outcomes_are_counted(full_run, tmp_path: Path) -> None:
    (tmp_path / "report.xml").write_text(
        "<testsuites><testsuite><testcase/><testcase><failure/></testcase><testcase><error/></testcase><testcase><skipped/></testcase><testcase><properties/></testcase></testsuite></testsuites>",
        encoding="utf-8",
    )
    assert full_run.counted(tmp_path / "report.xml") == {"passed": 2, "failed": 2, "skipped": 1}


def test_a_resumed_run_keeps_what_passed(
    full_run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = "import sys; sys.exit({})".format
    parts = {"good": [sys.executable, "-c", python(0)], "bad": [sys.executable, "-c", python(3)]}
    monkeypatch.setattr(full_run, "PARTS", parts)
    monkeypatch.setattr(sys, "argv", ["benchmarks/full_run.py", f"--output={tmp_path}"])
    assert full_run.main() == 1
    parts["good"] = parts["bad"]
    parts["bad"] = [sys.executable, "-c", python(0)]
    monkeypatch.setattr(sys, "argv", ["benchmarks/full_run.py", "--resume", f"--output={tmp_path}"])
    assert full_run.main() == 0
    (results,) = tmp_path.glob("full_run_*.json")
    assert [
        row["status"]
        for row in json.loads(results.read_text(encoding="utf-8"))["tables"]["Parts"]["rows"]
    ] == [0, 0]


def test_a_python_that_is_not_here(full_run, capsys: pytest.CaptureFixture[str]) -> None:
    assert full_run.fast_tests_of("3.99", []) == 2
    assert "no Python 3.99 on this machine" in capsys.readouterr().err
    assert full_run.find_python(f"{sys.version_info.major}.{sys.version_info.minor}")


def test_every_python_has_an_environment(full_run) -> None:
    """Each Python that is promised is in one with the newest jax, and the constraints that an
    environment names exist."""
    assert "3.11" in full_run.PYTHONS and {*full_run.PYTHONS} == {
        version for version, _ in full_run.ENVIRONMENTS.values()
    }
    assert {*full_run.ENVIRONMENTS} <= {*full_run.PARTS}
    files = [
        packages[1] for _, packages in full_run.ENVIRONMENTS.values() if packages[:1] == ["-c"]
    ]
    assert files and all((ROOT / file).exists() for file in files)


def test_what_failed_and_what_was_not_run_is_told(
    full_run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = "import sys; sys.exit({})".format
    parts = {
        "good": [sys.executable, "-c", python(0)],
        "bad": [sys.executable, "-c", python(3)],
        "other": [],
    }
    monkeypatch.setattr(full_run, "PARTS", parts)
    monkeypatch.setattr(
        sys, "argv", ["benchmarks/full_run.py", "--only=bad,good", f"--output={tmp_path}"]
    )
    assert full_run.main() == 1
    (results,) = tmp_path.glob("full_run_*.json")
    record = json.loads(results.read_text(encoding="utf-8"))
    assert [(row["part"], row["status"]) for row in record["tables"]["Parts"]["rows"]] == [
        ("good", 0),
        ("bad", 3),
        ("other", "not run"),
    ]
    assert (
        record["versions"]["jax"]
        and record["machine"]["cores"]
        and record["date"]
        and "commit" in record
    )
    monkeypatch.setattr(sys, "argv", ["benchmarks/full_run.py", "--only=none"])
    with pytest.raises(SystemExit):
        full_run.main()
