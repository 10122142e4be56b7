"""30 combinations of features (tests/form_rows.py): whether the compiled step sends exactly what
the closed forms say, in bytes by mesh axes, scalars aside.

Small decoders are compiled for H100s that are not there. `--resume` runs the rows that the newest
record lacks, and `--quick` runs one. Needs the compiler for CUDA: pip install -e '.[aot]'.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time

from record import RESULTS, ROOT, Record, Row, options

sys.path.insert(0, str(ROOT / "tests"))
os.environ["JAX_PLATFORMS"] = "cpu"

TITLE = "Bytes of the program and of the forms"
NOTE = "differs: mesh axes: bytes of the program, bytes of the forms; empty: none."


def main() -> int:
    import form_rows

    parser = options(__doc__ or "")
    parser.add_argument(
        "--resume", action="store_true", help="run only the rows that the newest record lacks"
    )
    arguments = parser.parse_args()
    rows = form_rows.rows()
    if arguments.quick:
        rows = rows[:1]
    record = Record(f"forms{'-quick' * arguments.quick}", arguments.output)
    earlier = recorded() if arguments.resume else {}
    outcomes: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="forms-") as cache:
        for row in rows:
            name = form_rows.name(row)
            outcome = earlier.get(name) or measured(row, cache)
            outcomes.append(outcome)
            print(
                f"{len(outcomes)}/{len(rows)} {name}: {outcome['differs'] or 'equal'}", flush=True
            )
            record.table(TITLE, outcomes, NOTE, show=False)
            record.write()
    return int(any(outcome["differs"] for outcome in outcomes))


def recorded() -> dict[str, Row]:
    """Returns the rows of the newest results that are equal, by name."""
    files = sorted(RESULTS.glob("forms_2*.json"))
    if not files:
        return {}
    table = json.loads(files[-1].read_text(encoding="utf-8"))["tables"][TITLE]
    return {row["combination"]: row for row in table["rows"] if not row["differs"]}


def measured(row: Row, cache: str) -> Row:
    """Returns the outcome of one row."""
    import form_rows

    config = form_rows.config_of(row)
    start_time = time.perf_counter()
    report = form_rows.compiled(config, cache)
    seconds = time.perf_counter() - start_time
    differs = [
        f"{axes}: {sent:.0f}, {on_paper:.0f}"
        for axes, (sent, on_paper) in form_rows.differences(config, report).items()
    ]
    return {
        "combination": form_rows.name(row),
        "devices": report.n_devices,
        "sent_bytes": round(report.wire_bytes()),
        "differs": "; ".join(differs),
        "compile_s": round(seconds, 1),
    }


if __name__ == "__main__":
    sys.exit(main())
