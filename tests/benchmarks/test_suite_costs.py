"""What the tests cost is counted for each test, and remembered by file and tier."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from processes import ROOT

CASES = """
import subprocess, sys
import jax
import jax.numpy as jnp

COMPILE_BUDGET = 9


def test_compiles():
    jax.block_until_ready(jax.jit(lambda x: jnp.sin(x) + 1)(jnp.ones(3)))


def test_starts_a_process():
    subprocess.run([sys.executable, "-c", "sum(range(10**7))"], check=True)
"""


@pytest.fixture
def suite_costs(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import suite_costs

    yield suite_costs
    sys.modules.pop("suite_costs")


def test_costs_are_counted_and_remembered(
    suite_costs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a real run. Files that no longer exist are dropped, and the costs of other tiers are
    kept."""
    test = tmp_path / "test_cases.py"
    test.write_text(CASES, encoding="utf-8")
    report = tmp_path / "report.xml"
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "no:cacheprovider",
        "-p",
        "conftest",
        "-c",
        str(ROOT / "pyproject.toml"),
    ]
    done = subprocess.run(
        [*command, f"--rootdir={tmp_path}", f"--junitxml={report}", str(test)],
        cwd=ROOT / "tests",
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    compiles, starts = suite_costs.costs(report, "fast")
    assert (
        compiles["traces"] >= 1
        and compiles["compiles"] >= 1
        and compiles["compile_s"] >= 0
        and not compiles["processes"]
    )
    assert starts["processes"] == 1 and starts["cpu_s"] > 0 and not starts["compiles"]

    here, other = "tests/test_house.py", "tests/test_readme.py"
    monkeypatch.setattr(suite_costs, "SECONDS", tmp_path / "seconds.json")
    known = {
        here: {"fast": {"seconds": 1}, "ci": {"seconds": 9}},
        other: {"ci": {"seconds": 5}},
        "tests/gone.py": {"ci": {"seconds": 3}},
    }
    suite_costs.SECONDS.write_text(json.dumps(known), encoding="utf-8")
    rows = [
        {"file": here, "seconds": seconds, **dict.fromkeys(suite_costs.COUNTS, 1)}
        for seconds in (2.25, 0.5)
    ]
    suite_costs.remember("ci", rows)
    found = json.loads(suite_costs.SECONDS.read_text(encoding="utf-8"))
    assert found == {
        here: {
            "fast": {"seconds": 1},
            "ci": {"seconds": 2.8, **dict.fromkeys(suite_costs.COUNTS, 2)},
        }
    }


def test_reports_are_named_by_tier(
    suite_costs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for words, said in (
        ("quick=x.xml", "no tier 'quick'; there are fast, ci, full, faults"),
        ("ci=absent.xml", "no file absent.xml"),
    ):
        monkeypatch.setattr(sys, "argv", ["benchmarks/suite_costs.py", "--junit", words])
        with pytest.raises(SystemExit):
            suite_costs.main()
        assert said in capsys.readouterr().err
