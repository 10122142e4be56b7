"""Reports as files: written by the ending of their name, and read again."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from sharding_rules.lab.fixes import Fix
from sharding_rules.lab.lint import Finding
from sharding_rules.lab.page import page
from sharding_rules.lab.report import LabError, Report
from sharding_rules.lab.trace import chrome_trace

TRACE = ".trace.json"
ENDINGS = (
    f".html (a page), {TRACE} (the predicted timeline, for ui.perfetto.dev) or .json (the report, "
    "for machines)"
)


def load(file: str) -> Report:
    """Returns the report of a file that `--plan=FILE.json` or `report --out=FILE.json` wrote.

    Raises LabError if the file cannot be read, or holds no report.
    """
    try:
        data = json.loads(Path(file).expanduser().read_text(encoding="utf-8"))
        return Report.from_json(json.dumps(data.get("report", data)))
    except OSError as error:
        raise LabError(f"cannot read {file}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise LabError(
            f"{file} holds no report; one is written by --plan=FILE.json, or by report "
            "--out=FILE.json"
        ) from error


def content(
    file: str,
    report: Report,
    findings: Sequence[Finding] = (),
    fixes: Sequence[Fix] = (),
    facts: Sequence[tuple[str, str]] = (),
) -> str:
    """Returns the text for a file of this name: a page, a trace, or else the report as JSON.

    findings, fixes and facts are for a page only, see `page`.
    """
    if file.endswith(".html"):
        return page(report, findings, fixes, facts)
    if file.endswith(TRACE):
        return chrome_trace(report)
    return json.dumps({"report": json.loads(report.to_json())})


def require_writable(file: str) -> None:
    """Raises LabError if `write` could not write the file.

    Called before anything is compiled for it. Makes the folder, but leaves no file.
    """
    path = Path(file).expanduser()
    existed = path.exists()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab"):
            pass
        if not existed:
            path.unlink()
    except OSError as error:
        raise LabError(f"cannot write {file}: {error.strerror}") from error


def write(file: str, text: str) -> None:
    """Writes a file, and makes its folder. Raises LabError where it cannot."""
    path = Path(file).expanduser()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise LabError(f"cannot write {file}: {error.strerror}") from error
