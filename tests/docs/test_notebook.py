"""docs/notebooks: every cell runs, in order, in a process of its own, in an empty directory, and leaves no error behind."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import runnable
from processes import PATIENCE, bare

NOTEBOOKS = sorted((runnable.ROOT / "docs" / "notebooks").glob("*.ipynb"))
EXECUTE = """
import sys, nbformat, nbclient
book = nbformat.read(sys.argv[1], as_version=4)
nbclient.NotebookClient(book, timeout=600, kernel_name="python3").execute()
nbformat.write(book, sys.argv[2])
"""


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_kept_without_results(path: Path) -> None:
    book = json.loads(path.read_text(encoding="utf-8"))
    code = [cell for cell in book["cells"] if cell["cell_type"] == "code"]
    assert len(code) > 3 and not any(cell["outputs"] or cell["execution_count"] for cell in code)


@pytest.mark.exhaustive
@pytest.mark.deviceless
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path: Path, tmp_path: Path) -> None:
    python = runnable.READER or sys.executable
    environment = bare(HOME=str(tmp_path), PYTHONPATH="" if runnable.READER else str(runnable.ROOT))
    environment["PATH"] = f"{Path(python).parent}:{os.environ['PATH']}"
    words = [python, "-c", EXECUTE, str(path), str(tmp_path / "executed.ipynb")]
    done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr[-6000:]
    cells = [cell for cell in json.loads((tmp_path / "executed.ipynb").read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == "code"]
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert any("image/png" in output.get("data", {}) for output in outputs), "nothing was plotted"
    printed = "".join("".join(output.get("text", "")) for output in outputs)
    assert "step 60/60" in printed and "fits: True" in printed and "ERROR" not in printed and "Traceback" not in printed
