"""Every row of the covering array of features (tests/feature_rows.py): whether a training step
equals one device, or is refused.

Each two values of two features are together in some row. It takes about an hour on two cores:
`--resume` runs the rows that the newest record lacks; `--quick` runs two rows.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from record import ROOT, Record, Row, options

sys.path.insert(0, str(ROOT / "tests"))
os.environ.setdefault(
    "XLA_FLAGS",
    (
        "--xla_backend_optimization_level=0 "
        "--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters"
    ),
)  # as tests/conftest.py does for a test run

import covering
import feature_rows
from example_runner import Runner

_ROWS = "Rows"
_SAID = 1500
"""Characters of a message that are recorded."""


def main() -> int:
    parser = options(__doc__ or "")
    parser.add_argument(
        "--resume", action="store_true", help="run only the rows that the newest record lacks"
    )
    arguments = parser.parse_args()
    fitting, refused = feature_rows.array()
    rows = [(row, ("same",)) for row in fitting] + [(row, ("refused", "same")) for row in refused]
    if arguments.quick:
        rows = [rows[0], rows[-1]]

    n_pairs = len({pair for row, _ in rows for pair in covering.pairs_of(row)})
    record = Record(
        f"features{'-quick' * arguments.quick}",
        arguments.output,
        factors=len(feature_rows.FACTORS),
        pairs=n_pairs,
    )
    recorded = _recorded(record) if arguments.resume else {}
    outcomes: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="features-") as directory:
        runner = Runner(ROOT / "tests" / "feature_rows.py", Path(directory), feature_rows.N_DEVICES)
        for number, (row, expected) in enumerate(rows):
            name = _name(row)
            outcomes.append(
                recorded.get(name)
                or {"date": record.data["date"], **_outcome(runner, row, expected)}
            )
            print(f"{number + 1}/{len(rows)} {outcomes[-1]['verdict']}: {name}", flush=True)
            record.table(
                _ROWS,
                outcomes,
                "A row has the first value of each feature that it does not name.",
                show=False,
            )
            record.write()
        runner.close()
    counts = Counter(outcome["verdict"] for outcome in outcomes)
    record.table(
        "Verdicts", [{"verdict": verdict, "rows": n} for verdict, n in sorted(counts.items())]
    )
    print(record.write())
    return 0 if all(outcome["as expected"] for outcome in outcomes) else 1


def _outcome(runner: Runner, row: covering.Row, expected: tuple[str, ...]) -> Row:
    """A line of the table: a row, its verdict, and what was said. expected: the verdicts that are
    right."""
    started_at = time.monotonic()
    verdict, text = runner.judged(row)
    return {
        "features": _name(row),
        "verdict": verdict,
        "as expected": verdict in expected,
        "seconds": round(time.monotonic() - started_at, 1),
        "said": text.removeprefix("this config cannot run")
        .replace(f"{ROOT}/", "")
        .strip()[-_SAID:],
    }


def _name(row: covering.Row) -> str:
    """The features of a row that are not the first value of theirs: "stages=2 segments=two"."""
    words = [
        f"{name}={value}" for name, value in row.items() if value != feature_rows.FACTORS[name][0]
    ]
    return " ".join(words) or "none"


def _recorded(record: Record) -> dict[str, Row]:
    """The lines of the newest record of this kind, by their features; those that failed are left
    out."""
    dated = sorted(
        record.directory.glob(record.stem.replace(record.data["date"], "????-??-??") + ".json")
    )
    if not dated:
        return {}
    newest = json.loads(dated[-1].read_text(encoding="utf-8"))
    outcomes = newest["tables"][_ROWS]["rows"]
    return {
        outcome["features"]: {"date": newest["date"], **outcome}
        for outcome in outcomes
        if outcome["as expected"]
    }


if __name__ == "__main__":
    sys.exit(main())
