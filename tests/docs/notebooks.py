"""Runs the notebooks of docs/notebooks: python -m tests.docs.notebooks writes their outputs into
them.

tests/docs/test_notebook.py compares. It takes three minutes, and needs pip install -e
'.[aot,notebook]'.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))
_EXECUTE = """
import sys, nbformat, nbclient
book = nbformat.read(sys.argv[1], as_version=4)
nbclient.NotebookClient(book, timeout=1800, kernel_name="python3").execute()
nbformat.write(book, sys.argv[2])
"""
_WRITTEN_BY_THE_MODEL = re.compile(
    r"(?<=/sample\.txt\n).*?(?=^wall time)|\A.*?(?=^\{'nats_per_token')", re.M | re.S
)
_VARIES = re.compile(
    (
        r"[0-9a-f]{16}|wall time.*|(first step|eta) \S+( s)?|[\d.,]+ (tok/s|ms/step|GiB "
        r"process)|grad "
        r"[\d.]+|'perplexity': [\d.]+"
    ),
    re.M,
)
"""Times, memory, the name of a state, and numbers that a small difference of the arithmetic changes
much."""
_NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?(?:e[-+]\d+)?")


def read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


def code_cells(book: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [cell for cell in book["cells"] if cell["cell_type"] == "code"]


def code_hash(book: Mapping[str, Any]) -> str:
    """A hash of the code, which is kept with the outputs: another one means that they are older
    than the code."""
    return hashlib.sha256(
        json.dumps(["".join(cell["source"]) for cell in code_cells(book)]).encode()
    ).hexdigest()[:16]


def execute(
    path: Path, directory: Path, python: str, environment: Mapping[str, str]
) -> dict[str, Any]:
    """The notebook with the outputs of a run in `directory`, without times of its cells. Raises
    AssertionError where a cell fails."""
    target = directory / "executed.ipynb"
    environment = {**environment, "PATH": f"{Path(python).parent}:{environment['PATH']}"}
    words = [python, "-c", _EXECUTE, str(path), str(target)]
    done = subprocess.run(words, cwd=directory, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-6000:]
    return with_outputs(read(path), read(target))


def with_outputs(book: dict[str, Any], executed: Mapping[str, Any]) -> dict[str, Any]:
    """The notebook with what its cells plotted and printed to stdout in another copy of it.
    Warnings of libraries go to stderr."""
    for cell, done in zip(code_cells(book), code_cells(executed), strict=True):
        cell["execution_count"] = done["execution_count"]
        printed = "".join(
            "".join(output["text"]) for output in done["outputs"] if output.get("name") == "stdout"
        )
        cell["outputs"] = (
            [{"name": "stdout", "output_type": "stream", "text": printed.splitlines(keepends=True)}]
            if printed
            else []
        )
        cell["outputs"] += [
            output
            for output in done["outputs"]
            if output["output_type"] in ("display_data", "execute_result")
        ]
    book["metadata"]["outputs_of_code"] = code_hash(book)
    return book


def printed(cell: Mapping[str, Any]) -> str:
    return "".join("".join(output.get("text", "")) for output in cell["outputs"])


def differences(stored: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """The lines of two runs that differ by more than times, what a model wrote, and a tenth of a
    number."""
    found = []
    for old, new in zip(code_cells(stored), code_cells(now), strict=True):
        old_lines, new_lines = _comparable(printed(old)), _comparable(printed(new))
        if len(old_lines) != len(new_lines):
            found.append(
                f"{len(old_lines)} lines were stored, and {len(new_lines)} are printed: {new_lines}"
            )
        found += [
            f"- {a}\n+ {b}"
            for a, b in zip(old_lines, new_lines, strict=False)
            if not _similar(a, b)
        ]
    return found


def _comparable(text: str) -> list[str]:
    return _VARIES.sub("~", _WRITTEN_BY_THE_MODEL.sub("", text)).splitlines()


def _similar(a: str, b: str) -> bool:
    numbers = [
        [float(number.replace(",", "")) for number in _NUMBER.findall(text)] for text in (a, b)
    ]
    return _NUMBER.sub("#", a) == _NUMBER.sub("#", b) and all(
        abs(x - y) <= 0.1 * max(abs(x), abs(y)) for x, y in zip(*numbers, strict=True)
    )


def main() -> None:
    for path in NOTEBOOKS:
        with tempfile.TemporaryDirectory() as directory:
            book = execute(
                path,
                Path(directory),
                sys.executable,
                os.environ | {"PYTHONPATH": str(ROOT), "HOME": directory},
            )
        path.write_text(json.dumps(book, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
