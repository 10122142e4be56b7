"""docs/notebooks: every cell runs, in order, in a process of its own, in an empty directory, and
prints what is kept in the file."""

import copy
import re
import sys
from pathlib import Path

import pytest
import runnable
from processes import bare

from tests.docs import notebooks


@pytest.mark.parametrize("path", notebooks.NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_kept_with_its_outputs(path: Path) -> None:
    """Those of a run of this code, without errors and without paths of the machine that ran it."""
    book = notebooks.read(path)
    cells = notebooks.code_cells(book)
    again = "python -m tests.docs.notebooks writes them"
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1)), (
        f"outputs are missing; {again}"
    )
    assert book["metadata"]["outputs_of_code"] == notebooks.code_hash(book), (
        f"outputs are older than the code; {again}"
    )
    _check(book)
    assert not re.search(r"/(root|home|tmp|work|usr)/", path.read_text(encoding="utf-8"))


def _check(book: dict) -> None:
    cells = notebooks.code_cells(book)
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert any("image/png" in output.get("data", {}) for output in outputs), "nothing was plotted"
    printed = "".join(map(notebooks.printed, cells))
    assert (
        "step 60/60" in printed
        and "fits: True" in printed
        and "ERROR" not in printed
        and "Traceback" not in printed
    )
    assert all(
        cell["outputs"]
        for cell in cells
        if re.search(r"\bprint\(|\.train\(|plt\.", "".join(cell["source"]))
    )


def test_outputs_that_are_old_are_found() -> None:
    """Other times, other texts of a model and slightly other losses are the same outputs; another
    number or line is not."""
    book = notebooks.read(notebooks.NOTEBOOKS[0])
    old = (
        "step 60/60  loss 5.7355  bpb 3.0244  grad 0.38  2,719 tok/s  753 ms/step  1.1 GiB process "
        " eta 0:00:00\n"
    )
    new = (
        "step 60/60  loss 5.7361  bpb 3.0251  grad 0.41  19 tok/s  4,000 ms/step  0.9 GiB process  "
        "eta 0:01:07\n"
    )
    same = {
        old: new,
        "a/sample.txt\nself\n\nwall time 2 min: steps 1 s\n": "a/sample.txt\nif\nwall time 9 s\n",
        "x\n{'nats_per_token': 6.97, 'perplexity': 1071.4}\n": "def 7\ny\n{'nats_per_token': 6.9, 'perplexity': 992.3}\n",
        "saving step 60 (state ef77046bffd8583a)\n": "saving step 60 (state 0c59f6d7d2537a50)\n",
    }
    others = {
        old: old.replace("5.7355", "4.7"),
        "a\n": "a\nb\n",
        "fits: True": "fits: False",
        "all-gathers: 39": "all-gathers: 52",
    }
    for pairs, equal in ((same, True), (others, False)):
        for before, after in pairs.items():
            stored, now = copy.deepcopy(book), copy.deepcopy(book)
            notebooks.code_cells(stored)[0]["outputs"] = [{"text": before}]
            notebooks.code_cells(now)[0]["outputs"] = [{"text": after}]
            assert (not notebooks.differences(stored, now)) == equal, (before, after)
    notebooks.code_cells(book)[0]["source"] += ["# changed"]
    assert book["metadata"]["outputs_of_code"] != notebooks.code_hash(book)


@pytest.mark.exhaustive
@pytest.mark.deviceless
@pytest.mark.parametrize("path", notebooks.NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path: Path, tmp_path: Path) -> None:
    environment = bare(HOME=str(tmp_path), PYTHONPATH="" if runnable.READER else str(runnable.ROOT))
    now = notebooks.execute(path, tmp_path, runnable.READER or sys.executable, environment)
    _check(now)
    assert not notebooks.differences(notebooks.read(path), now)
