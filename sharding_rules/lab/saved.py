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
    """A report from a file that `--plan=FILE.json` or `report --out=FILE.json` wrote. Raises
    LabError where there is none in it.
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
    """What a file of this name holds: a page or a trace by its ending, else the report as JSON."""
    if file.endswith(".html"):
        return page(report, findings, fixes, facts)
    return (
        chrome_trace(report)
        if file.endswith(TRACE)
        else json.dumps({"report": json.loads(report.to_json())})
    )


def require_writable(file: str) -> None:
    """Raises LabError where `write` could not write, before anything is compiled for it."""
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
    """Makes the folder, too. Raises LabError where it cannot."""
    path = Path(file).expanduser()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise LabError(f"cannot write {file}: {error.strerror}") from error
