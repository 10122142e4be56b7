"""Searches for the fastest layout of the shipped configs, as `mesh-lm plan --best` does, and
compares it with the layout that each config has.

The search is from scratch: it does not know the config's own layout, which is compiled afterwards.
Step times are the lab's, at its optimistic rates. Rows that the newest results have already are
kept, so that an interrupted run can be continued. What is faster by more than a tie is written to
configs/layouts, where --mesh reads it. Needs the compiler for CUDA: pip install -e '.[aot]'.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from layout_pools import PROGRAMS, PROGRAMS_NOTE, newest, program_row
from plan_table import PUBLISHED, TARGET
from record import ROOT, Record, Row, options

TITLE = "The best layout found, and the config's own"
NOTE = (
    "Steps are predicted, never measured. compiles: programs of the search, which does not know the "
    "config's own layout. ratio: the best step found over that of the config's own layout."
)

LAYOUTS = ROOT / "configs" / "layouts"


def main() -> int:
    parser = options(__doc__ or "")
    parser.add_argument("--only", default="", help="configs, with commas between")
    parser.add_argument("--compiles", type=int, default=8)
    args = parser.parse_args()
    names = args.only.split(",") if args.only else list(PUBLISHED)
    if args.quick:
        names = ["gpt2_124m"]
    record = Record(f"best_layouts{'-quick' * args.quick}", args.output)
    tables = {} if args.quick else newest("best_layouts")
    rows = {row["config"]: row for row in tables.get(TITLE, [])}
    programs = tables.get(PROGRAMS, [])
    for name in names:
        if name in rows:
            continue
        found = searched(name, 1 if args.quick else args.compiles)
        if found:
            rows[name], compiled = found
            programs = [row for row in programs if row["config"] != name] + compiled
            ordered = [rows[one] for one in PUBLISHED if one in rows]
            record.table(TITLE, ordered, NOTE, show=False)
            record.table(PROGRAMS, programs, PROGRAMS_NOTE, show=False)
            record.write()
    if not args.quick:
        save_layouts(rows.values(), LAYOUTS)
    return 0


def save_layouts(rows: Iterable[Row], directory: Path) -> None:
    """Writes a file for each layout that is faster than its config's own by more than a tie, and
    removes all others.
    """
    from mesh_lm.commands.command_line import parse
    from mesh_lm.config import load
    from mesh_lm.config.layout import saved_layout
    from mesh_lm.planning.best import TIE, fields_as_they_are
    from mesh_lm.training.check import check

    directory.mkdir(exist_ok=True)
    for old in directory.glob("*.json"):
        old.unlink()
    for row in rows:
        if row["ratio"] is None or row["ratio"] > 1 - TIE:
            continue
        found = check(parse([row["config"], *row["best"].split()]), row["devices"])
        fields = fields_as_they_are(found)
        facts = {
            "target": TARGET,
            "step_s": [round(row["best_step_s"], 4), round(row["best_slow_s"], 4)],
            "peak_gib": round(row["best_peak_gib"], 2),
        }
        file = directory / f"{row['config']}_{row['devices']}.json"
        text = saved_layout(load(row["config"]), fields, row["devices"], facts)
        file.write_text(text, encoding="utf-8")


def searched(name: str, compiles: int) -> tuple[Row, list[Row]] | None:
    """Returns the result of a search, and its programs; None for a model without formulas."""
    from mesh_lm.config import load
    from mesh_lm.planning.best import options as words
    from mesh_lm.planning.best import search
    from mesh_lm.planning.paper.layouts import layout_of
    from mesh_lm.planning.paper.sizes import ModelSizes
    from mesh_lm.planning.program import compile_config, flags_of
    from mesh_lm.training.check import check
    from sharding_rules.lab.flags import options as flags

    config = load(name)
    n_devices = PUBLISHED[name]
    sizes = ModelSizes.of(config)
    if sizes is None:
        return None

    def compiled(changed: Any) -> Any:
        return compile_config(changed, TARGET, n_devices, flags(flags_of(changed, TARGET)))

    began = time.perf_counter()
    found = search(
        config, n_devices, TARGET, compiled, compiles=compiles, from_scratch=True, say=print
    )
    seconds = time.perf_counter() - began
    best = found.best
    own = compiled(check(config, n_devices))
    own_seconds = own.timeline.step / 1e6 if own.timeline else None
    row: Row = {
        "config": name, "devices": n_devices, "considered": found.considered,
        "compiles": len(found.trials), "search_s": seconds,
        "own_step_s": own_seconds, "best_step_s": best.seconds if best else None,
        "own_slow_s": slow_end(own), "best_slow_s": slow_end(best.report) if best else None,
        "ratio": best.seconds / own_seconds if best and own_seconds else None,
        "best_peak_gib": best.report.peak_bytes / 2**30 if best else None,
        "best": " ".join(words(best.changes)) if best else "",
    }  # fmt: skip
    print(row, flush=True)
    programs = [
        program_row(name, n_devices, sizes, trial.row, trial.report)
        for trial in found.trials
        if trial.row
    ]
    own_layout = layout_of(config, n_devices)
    if own_layout:
        programs.append(program_row(name, n_devices, sizes, own_layout, own))
    return row, programs


def slow_end(report: Any) -> float | None:
    """Returns the slow end of a predicted step, in seconds."""
    band = report.step_band
    return band.slow / 1e6 if band else None


if __name__ == "__main__":
    sys.exit(main())
