"""Compares what versions of jax make of five shipped configs: bytes sent over each mesh axis, peak
memory and the predicted step.

Each run compiles under the jax of its own environment, for absent H100s, and adds its rows to those
of the newest results, which may be of other versions. So run it once in each environment. Nothing
runs on a GPU. Needs the compiler: pip install -e '.[aot]'.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import json
from collections.abc import Sequence
from typing import Any

import bars
from plan_table import PUBLISHED as DEVICES
from plan_table import TARGET
from record import Record, Row, options, versions

CONFIGS = ("gpt_1_3b", "llama3_8b", "llama3_8b_128k", "megatron_7_1b", "gpt_175b")
"""By FSDP, by FSDP with replicas, with sharded sequences, by ZeRO-3, and with a pipeline and tensor
parallelism."""
COMPILED, BESIDE = "Compiled", "Side by side"
NOTE = "Times are predicted, never measured."


def main() -> None:
    parser = options(__doc__ or "", quick_help="only gpt_1_3b")
    parser.add_argument(
        "--only",
        default="",
        help="configs whose name contains one of these words, with commas between; the rest is kept",
    )
    parser.add_argument("--row", default="", help="compile this one and print it (internal)")
    arguments = parser.parse_args()
    if arguments.row:
        print(json.dumps(compiled(arguments.row)))
        return
    only = CONFIGS[0] if arguments.quick else arguments.only
    record = Record(f"jax_versions{'-quick' * arguments.quick}", arguments.output, kind=TARGET)
    rows = kept(record)
    for config in CONFIGS:
        if not any(word in config for word in only.split(",")):
            continue
        row = bars.output_of([__file__, f"--row={config}"], config)
        rows[config, row["jax"]] = row
        ordered = [
            rows[key]
            for key in sorted(rows, key=lambda key: (CONFIGS.index(key[0]), version_of(key[1])))
        ]
        record.table(COMPILED, ordered, NOTE, show=False)
        record.table(BESIDE, beside(ordered), NOTE, show=False)
        record.write()
    table = record.data["tables"][BESIDE]
    record.table(BESIDE, table["rows"], table["note"])
    print(f"\nwrote {record.write()}")


def kept(record: Record) -> dict[tuple[str, str], Row]:
    """Returns the rows of the newest results, by config and version of jax."""
    dated = sorted(
        record.directory.glob(record.stem.replace(record.data["date"], "????-??-??") + ".json")
    )
    if not dated:
        return {}
    rows = json.loads(dated[-1].read_text(encoding="utf-8"))["tables"][COMPILED]["rows"]
    return {(row["config"], row["jax"]): row for row in rows}


def compiled(name: str) -> Row:
    """Returns the figures of a config as it is shipped, under the XLA flags of a run."""
    from mesh_lm.commands import command_line
    from mesh_lm.planning.program import compile_config, flags_of
    from sharding_rules.lab import flags

    config = command_line.parse([f"--config=configs/{name}.py"])
    report = compile_config(config, TARGET, DEVICES[name], flags.options(flags_of(config, TARGET)))
    row: Row = {
        "config": name,
        "jax": importlib.metadata.version("jax"),
        "python": versions()["python"],
        "date": datetime.date.today().isoformat(),
        "GPUs": report.n_devices,
    }
    return (
        row
        | figures(report)
        | {"instructions": report.instructions, "compile_s": report.compile_seconds}
    )


def figures(report: Any) -> Row:
    """Returns what is compared: the predicted step in seconds, the peak in GiB, and the GiB that a
    device sends over each set of axes."""
    from sharding_rules.lab.summary import over, wire_by_axes

    row: Row = {"step_s": report.timeline.step / 1e6, "peak_gib": report.peak_bytes / 2**30}
    return row | {
        f"sent over {over(axes)}, GiB": n / 2**30 for axes, n in wire_by_axes(report).items() if n
    }


def beside(rows: Sequence[Row]) -> list[Row]:
    """Returns a line for each figure of each config: its value under each version, and the change
    from the oldest to the newest in %."""
    jax_versions = sorted({row["jax"] for row in rows}, key=version_of)
    lines: list[Row] = []
    for config in dict.fromkeys(row["config"] for row in rows):
        row_by_version = {row["jax"]: row for row in rows if row["config"] == config}
        names = dict.fromkeys(
            name for row in row_by_version.values() for name in row if is_figure(name)
        )
        for name in names:
            values = {version: row.get(name, 0.0) for version, row in row_by_version.items()}
            line: Row = {"config": config, "figure": name} | {
                f"jax {version}": values.get(version) for version in jax_versions
            }
            old, new = values.get(jax_versions[0]), values.get(jax_versions[-1])
            line["change, %"] = (
                100 * (new / old - 1) if old and new is not None and len(jax_versions) > 1 else None
            )
            lines.append(line)
    return lines


def is_figure(name: str) -> bool:
    """Whether a column of a row is compared."""
    return name in ("step_s", "peak_gib") or name.startswith("sent over ")


def version_of(text: str) -> tuple[int, ...]:
    """Returns a version in the form in which versions are ordered."""
    return tuple(int(part) for part in text.split(".") if part.isdigit())


if __name__ == "__main__":
    main()
