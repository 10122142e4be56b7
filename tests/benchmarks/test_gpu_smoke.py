"""The GPU suite rehearsed on the CPU: an hour on a GPU is too rare to lose to a typo."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from processes import PATIENCE

ROOT = Path(__file__).parents[2]
PARTS = ["speed", "losses", "resume", "kernels", "rerun", "layouts"]


def smoke(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"} | {"JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "benchmarks/gpu_smoke.py", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment, timeout=PATIENCE)


@pytest.mark.slow
def test_dry_run(tmp_path: Path) -> None:
    done = smoke("--dry-run", f"--output={tmp_path}")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "imported though a GPU machine may lack it: nothing" in done.stdout
    (results,) = tmp_path.glob("gpu_smoke-dry-run_*.json")
    record = json.loads(results.read_text())
    assert [(row["part"], row["status"]) for row in record["tables"]["Parts"]["rows"]] == [(name, "ok") for name in PARTS]
    assert all(table["rows"] for table in record["tables"].values())
    assert record["not_needed_but_imported"] == []
    (reruns,) = {(row["differ_same_program"], row["differ_new_process"]) for row in record["tables"]["Bitwise reruns"]["rows"]}
    assert reruns == (0, 0)
    text = results.with_suffix(".md").read_text()
    assert all(f"## {title}" in text for title in record["tables"])
    for private in (str(ROOT), str(tmp_path), os.uname().nodename):
        assert private not in text and private not in results.read_text()


def test_without_a_gpu_it_says_so(tmp_path: Path) -> None:
    done = smoke(f"--output={tmp_path}")
    assert done.returncode == 0 and "no GPU that JAX can use" in done.stdout, done.stdout + done.stderr
    assert not list(tmp_path.iterdir())
