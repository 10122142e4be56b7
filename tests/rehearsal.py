"""Rehearses a GPU suite on the CPU, in a separate process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from processes import PATIENCE, ROOT, environment


def suite(
    name: str, *arguments: str, patience: float = PATIENCE, **more: str
) -> subprocess.CompletedProcess[str]:
    """`python benchmarks/<name>.py`, with these arguments and more environment."""
    command = [sys.executable, f"benchmarks/{name}.py", *arguments]
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, env=environment(**more), timeout=patience
    )


def rehearsed(
    name: str, tmp_path: Path, parts: list[str], *arguments: str
) -> tuple[dict[str, list[dict]], dict]:
    """Tables by title, and the whole record, of a dry run without a fault."""
    done = suite(name, "--dry-run", f"--output={tmp_path}", *arguments, patience=4 * PATIENCE)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]
    assert "imported though a GPU machine may lack it: nothing" in done.stdout
    (results,) = tmp_path.glob(f"{name}-dry-run_*.json")
    record = json.loads(results.read_text(encoding="utf-8"))
    assert [(row["part"], row["status"]) for row in record["tables"]["Parts"]["rows"]] == [
        (part, "ok") for part in parts
    ]
    text = results.with_suffix(".md").read_text(encoding="utf-8")
    assert all(f"## {title}" in text for title in record["tables"])
    for private in (str(ROOT), str(tmp_path), os.uname().nodename):
        assert private not in text and private not in results.read_text(encoding="utf-8")
    return {title: table["rows"] for title, table in record["tables"].items()}, record
