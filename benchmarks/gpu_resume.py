"""What an earlier run of a GPU suite measured in the same directory, so that a later run need not
measure it again.

Complete parts are taken over with their tables, incomplete parts with their rows that have no
error. Both require that the device, the versions and the kernels' source are the same.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from record import ROOT, Row

NOT_IN_ROWS = ("n_params", "flops_per_token", "peak_flops", "flops", "window")
"""Values of a variant that its row need not repeat."""


class Earlier:
    """The parts and rows of earlier runs, in a file that is written after each row."""

    def __init__(self, path: Path, kind: str, use: bool) -> None:
        """kind: what measured, such as device and versions. use: whether to take over what the file
        has; else it is replaced."""
        self.path, identity = path, {"kind": kind, "kernels": kernels_digest()}
        self.data: dict[str, Any] = {"identity": identity, "parts": {}, "rows": {}}
        if use and path.exists():
            saved = json.loads(path.read_text(encoding="utf-8"))
            if saved["identity"] == identity:
                self.data = saved
            else:
                print(
                    f"{path.name} is of another device, of other versions or of other kernels: "
                    "everything is measured again"
                )

    @property
    def parts(self) -> dict[str, Any]:
        """Name of a complete part -> its summary, tables, and values for later parts."""
        return self.data["parts"]

    def complete(
        self, name: str, summary: Row, tables: Mapping[str, Any], found: Mapping[str, Any]
    ) -> None:
        """Keeps a part that had no problem."""
        self.data["parts"][name] = {
            "summary": summary,
            "tables": dict(tables),
            "found": dict(found),
        }
        self.write()

    def progress(self, title: str, rows: list[Row]) -> None:
        """Keeps the rows of a table that is not complete yet."""
        self.data["rows"][title] = rows
        self.write()

    def row(self, title: str, variant: Row) -> Row | None:
        """Returns the row of a variant in a table; None if there is none without an error."""
        columns = {
            name: x
            for name, x in variant.items()
            if name not in NOT_IN_ROWS and not isinstance(x, dict | list)
        }
        for row in self.data["rows"].get(title, ()):
            if columns.items() <= row.items() and "error" not in row:
                return row
        return None

    def write(self) -> None:
        """Writes the file. A crash leaves the old one or the new one."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        part = self.path.with_suffix(".part")
        part.write_text(json.dumps(self.data, indent=1), encoding="utf-8")
        part.replace(self.path)


def kernels_digest() -> str:
    """Returns a digest of the source of `pallas_kernels`."""
    digest = hashlib.sha256()
    for path in sorted((ROOT / "pallas_kernels").rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]
