"""Searches for the fastest layout of the shipped configs from scratch, as `mesh-lm plan --best`
does, and compares it with the layout that each config has.

The config's own layout is compiled, too, as in every search. Step times are the
lab's, at its optimistic rates. Rows that the newest results have already are kept, so that an
interrupted run can be continued. Needs the compiler for CUDA: pip install -e '.[aot]'.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from plan_table import PUBLISHED, TARGET
from record import RESULTS, Record, Row, options

TITLE = "The best layout found, and the config's own"
NOTE = (
    "compiles: programs of the search, besides the config's own. ratio: the best step found over "
    "that of the config's own layout."
)


def main() -> int:
    parser = options(__doc__ or "")
    parser.add_argument("--only", default="", help="configs, with commas between")
    parser.add_argument("--compiles", type=int, default=6)
    args = parser.parse_args()
    names = args.only.split(",") if args.only else list(PUBLISHED)
    if args.quick:
        names = ["gpt2_124m"]
    record = Record(f"best_layouts{'-quick' * args.quick}", args.output)
    rows: dict[str, Row] = {} if args.quick else earlier()
    for name in names:
        if name in rows:
            continue
        found = searched(name, 1 if args.quick else args.compiles)
        if found:
            rows[name] = found
            ordered = [rows[one] for one in PUBLISHED if one in rows]
            record.data["tables"][TITLE] = {"note": NOTE, "rows": ordered}
            record.write()
    return 0


def earlier() -> dict[str, Row]:
    """Returns the rows of the newest results by config."""
    files = sorted(RESULTS.glob("best_layouts_2*.json"))
    if not files:
        return {}
    tables = json.loads(files[-1].read_text(encoding="utf-8"))["tables"]
    return {row["config"]: row for row in tables[TITLE]["rows"]}


def searched(name: str, compiles: int) -> Row | None:
    """Returns the result of a search; None for a model without formulas."""
    from mesh_lm.config import load
    from mesh_lm.planning.best import options as words
    from mesh_lm.planning.best import search
    from mesh_lm.planning.paper.sizes import ModelSizes
    from mesh_lm.planning.program import compile_config, flags_of
    from sharding_rules.lab.flags import options as flags

    config = load(name)
    n_devices = PUBLISHED[name]
    if ModelSizes.of(config) is None:
        return None

    def compiled(changed: Any) -> Any:
        return compile_config(changed, TARGET, n_devices, flags(flags_of(changed, TARGET)))

    found = search(config, n_devices, TARGET, compiled, compiles=compiles, say=print)
    best, own = found.best, found.committed
    row: Row = {
        "config": name, "devices": n_devices, "considered": found.considered,
        "compiles": len(found.trials),
        "own_step_s": own.seconds if own else None, "best_step_s": best.seconds if best else None,
        "ratio": best.seconds / own.seconds if best and own else None,
        "best_peak_gib": best.report.peak_bytes / 2**30 if best else None,
        "best": " ".join(words(best.changes)) if best else "",
    }  # fmt: skip
    print(row, flush=True)
    return row


if __name__ == "__main__":
    sys.exit(main())
