"""Compiles the shipped configs for absent H100s, and compares their predicted steps with this
project's bars, and with the base.

The base is benchmarks/results/bars_base_*.json: the same figures of an earlier state of this
repository, written by --freeze. Nothing runs on a GPU. Rows that are not asked for are kept from
the newest results, with their dates. Needs the compiler: pip install -e '.[aot]'.
"""

from __future__ import annotations

import dataclasses
import datetime
import importlib.metadata
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from plan_page import TFLOPS
from plan_table import PUBLISHED as DEVICES
from plan_table import TARGET, megatron_flops, model_seconds
from record import ROOT, Record, Row
from record import options as arguments

PIPELINED, PLAIN, EXPOSED = 1.6, 1.35, 0.15
"""The most of step / (the model's matmuls and attention), with and without stages, and of the
exposed share (of Megatron's nine)."""
ALL_ON = ("step_s", "sustained_step_s", "exposed_share", "peak_gib")
"""Figures that are kept of a config with all its settings for overlap on."""
WAITS = 5
"""How many collectives are listed of a config that waits longer than that."""


@dataclasses.dataclass(frozen=True)
class Bar:
    """What a config must reach on a number of devices. 0: no such limit."""

    config: str
    devices: int = 0
    """0: the number that the config is published for."""
    step_s: float = 0.0
    """At most."""
    step_all_on_s: float = 0.0
    """The same where all of the config's settings for overlap are on (--on)."""
    peak_gib: float = 0.0
    """At most."""
    mfu: float = 0.0
    """At least."""
    published_share: float = 0.0
    """Share of the published TFLOP/s, at least."""
    ratio: float = 0.0
    """Step / (the model's matmuls and attention), at most; 0: that of dense models."""
    exposed: float = 0.0
    """Exposed share, at most; 0: that of Megatron's nine for those, no limit for others."""
    changes: str = ""
    """Options of train.py that the config names for this number of devices."""

    @property
    def name(self) -> str:
        return f"{self.config}, {self.devices} devices" if self.devices else self.config

    @property
    def n(self) -> int:
        return self.devices or DEVICES[self.config]


BARS = (
    Bar("gpt2_124m", mfu=0.32), Bar("gpt_1_3b", mfu=0.57),
    Bar("gpt_175b", step_s=6.7, step_all_on_s=6.2, peak_gib=50.0),
    Bar("llama3_8b", mfu=0.60), Bar("llama3_8b_128k"),
    Bar("llama3_70b", 512, mfu=0.57, changes="--train.microbatches=4"),
    Bar("llama3_70b", mfu=0.57), Bar("llama3_405b", mfu=0.30),
    Bar("megatron_1_7b", published_share=1.0), Bar("megatron_7_1b", published_share=1.0),
    Bar("megatron_16b", published_share=1.0),
    Bar("megatron_32b", published_share=0.9), Bar("megatron_70b", published_share=0.9),
    Bar("megatron_119b", published_share=0.9),
    Bar("megatron_177b", step_s=5.2, step_all_on_s=4.9, published_share=1.0),
    Bar("megatron_314b", published_share=0.9),
    Bar("megatron_462b", published_share=1.0),
    # Moving the rows of narrow experts takes as long as multiplying them.
    Bar("mixtral_8x7b", ratio=1.5), Bar("qwen3_30b_a3b", ratio=2.8, exposed=0.3),
)  # fmt: skip


def main() -> None:
    parser = arguments(__doc__ or "", quick_help="only gpt2_124m")
    parser.add_argument(
        "--only",
        default="",
        help="rows whose name contains one of these words, with commas between; the rest is kept",
    )
    parser.add_argument(
        "--on",
        default="",
        help="options of train.py that turn all settings on, for a second figure: '--a.b=c --d.e=f'",
    )
    parser.add_argument(
        "--freeze",
        action="store_true",
        help="write the rows into the base; those that are not asked for stay",
    )
    parser.add_argument("--row", default="", help="compile this one and print it (internal)")
    args = parser.parse_args()
    if args.row:
        (bar,) = (bar for bar in BARS if bar.name == args.row)
        print(json.dumps(compiled(bar, args.on.split())))
        return
    only = "gpt2_124m" if args.quick else args.only
    bars = [bar for bar in BARS if any(word in bar.name for word in only.split(","))]
    kind = f"{TARGET} jax {importlib.metadata.version('jax')}"
    record = Record("bars", args.output, kind=kind)
    if args.freeze:
        record.stem = record.stem.replace(record.data["date"], "base")
    done = kept(record)
    base = (
        {}
        if args.freeze
        else rows_of(record.directory / f"{record.stem.replace(record.data['date'], 'base')}.json")
    )
    for bar in bars:
        figures = in_a_process(bar, "")
        if args.on:
            all_on = in_a_process(bar, args.on)
            figures |= {f"all_on_{key}": all_on[key] for key in ALL_ON} | {"all_on": args.on}
        done[bar.name] = figures
        rows = [done[each.name] for each in BARS if each.name in done]
        note = (
            "Times are predicted, never measured, at the optimistic rates; sustained_step_s at the "
            "sustained ones. all_on: with these options besides."
        )
        record.table("Compiled", rows, note, show=False)
        record.table(
            "Bars",
            [
                compared(each, done[each.name], base.get(each.name))
                for each in BARS
                if each.name in done
            ],
            note,
            show=False,
        )
        record.write()
    table = record.data["tables"]["Bars"]
    record.table("Bars", table["rows"], table["note"])
    print(f"\nwrote {record.write()}")


def kept(record: Record) -> dict[str, Row]:
    """Returns the rows of the file that is about to be written, else those of the newest results of
    these versions."""
    own_file = record.directory / f"{record.stem}.json"
    if own_file.is_file() or "base" in record.stem:
        return rows_of(own_file)
    dated = sorted(
        record.directory.glob(record.stem.replace(record.data["date"], "????-??-??") + ".json")
    )
    return rows_of(dated[-1]) if dated else {}


def rows_of(path: Path) -> dict[str, Row]:
    return (
        {
            row["config"]: row
            for row in json.loads(path.read_text(encoding="utf-8"))["tables"]["Compiled"]["rows"]
        }
        if path.is_file()
        else {}
    )


def in_a_process(bar: Bar, on: str) -> Row:
    """Compiles a row in a process of its own. Raises RuntimeError with the process's last output if
    it fails."""
    return output_of(
        [__file__, f"--row={bar.name}", f"--on={on}"], f"{bar.name}{' with all on' * bool(on)}"
    )


def output_of(command: Sequence[str], name: str) -> Row:
    """Runs a script of this directory that prints a row, in a process of its own. Raises
    RuntimeError with its last output if it fails."""
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path[1:]]),
    }
    done = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, env=environment, cwd=ROOT
    )
    if done.returncode:
        raise RuntimeError(f"{name}: {done.stderr[-2000:]}")
    row: Row = json.loads(done.stdout.splitlines()[-1])
    print(f"{name}: {row['step_s']:.3f} s, {row['compile_s']:.0f} s to compile", flush=True)
    return row


def compiled(bar: Bar, changes: Sequence[str]) -> Row:
    """Returns the figures of a config as it is shipped, or with changes, under the XLA flags of a
    run. The lab keeps its reports."""
    from mesh_lm.commands import command_line
    from mesh_lm.planning.program import compile_config, flags_of
    from sharding_rules.lab.flags import options

    config = command_line.parse(
        [f"--config=configs/{bar.config}.py", *bar.changes.split(), *changes]
    )
    report = compile_config(config, TARGET, bar.n, options(flags_of(config, TARGET)))
    return {
        "config": bar.name,
        "date": datetime.date.today().isoformat(),
        **figures(config, report),
    }


def figures(config: Any, report: Any) -> Row:
    """Returns what the bars are about, and what a step waits for."""
    from sharding_rules.lab.report import location_text
    from sharding_rules.lab.summary import over, ratios

    line = report.timeline
    step_ratios = ratios(report)
    exposed = step_ratios.pop("exposed_us")
    # The limits of the bars are about the definition of main 3f09f97.
    step_ratios["model_ratio"] = line.step / 1e6 / model_seconds(config, report.n_devices)
    waits = sorted(report.collectives, key=lambda one: -one.exposed)[:WAITS]
    return {
        "GPUs": report.n_devices, "pipelined": config.mesh.pipeline != 1, "step_s": line.step / 1e6,
        "sustained_step_s": report.step_band.slow / 1e6,
        "peak_gib": report.peak_bytes / 2**30,
        "tflops": megatron_flops(config) / report.n_devices / line.step / 1e6, **step_ratios,
        "waits_for": ", ".join(f"{axes} {us / line.step:.1%}" for axes, us in exposed["axes"].items()),
        "waits_in": ", ".join(f"{phase} {us / line.step:.1%}" for phase, us in exposed["phase"].items()),
        "longest": "; ".join(
            (f"{one.exposed / line.step:.1%} {one.kind} {over(one.axes)} in "
            f"{location_text(one.where)}") for one in waits if one.exposed
        ),
        "compile_s": report.compile_seconds,
    }  # fmt: skip


def compared(bar: Bar, row: Row, base: Row | None) -> Row:
    """Returns a line of the table: each figure, that of the base, and the bars that are not met."""
    base_row = base or {}
    unmet_bars = unmet(bar, row)
    return {
        "config": bar.name, "GPUs": row["GPUs"],
        "step, s": row["step_s"], "base step": base_row.get("step_s"),
        "all on": row.get("all_on_step_s"),
        "peak, GiB": row["peak_gib"], "base peak": base_row.get("peak_gib"),
        "TFLOP/s": row["tflops"], "base TFLOP/s": base_row.get("tflops"),
        "published": TFLOPS.get(bar.config),
        "MFU, %": _percent(row["mfu"]), "base MFU": _percent(base_row.get("mfu")),
        "exposed, %": _percent(row["exposed_share"]),
        "base exposed": _percent(base_row.get("exposed_share")),
        "ratio": row["model_ratio"], "base ratio": base_row.get("model_ratio"),
        "waits for": row["longest"] if row["exposed_share"] > EXPOSED else row["waits_for"],
        "bars": "; ".join(f"{name} {limit:g}" for name, _, limit, _ in limits(bar, row)),
        "met": not unmet_bars, "missed": "; ".join(unmet_bars),
    }  # fmt: skip


def limits(bar: Bar, row: Row) -> list[tuple[str, float | None, float, bool]]:
    """Returns the bars of a config: name, figure (None: not compiled), limit, and whether the
    figure is as it must be."""
    published = TFLOPS.get(bar.config, 0.0)
    ratio = bar.ratio or (PIPELINED if row["pipelined"] else PLAIN)
    most = [
        ("step <=", row["step_s"], bar.step_s),
        ("all on <=", row.get("all_on_step_s"), bar.step_all_on_s),
        ("GiB <=", row["peak_gib"], bar.peak_gib),
        ("ratio <=", row["model_ratio"], ratio),
        ("exposed <=", row["exposed_share"], bar.exposed or (EXPOSED if published else 0.0)),
    ]
    least = [
        ("TFLOP/s >=", row["tflops"], bar.published_share * published),
        ("MFU >=", row["mfu"], bar.mfu),
    ]
    checks = [(name, value, limit, value is None or value <= limit) for name, value, limit in most]
    checks += [(name, value, limit, value >= limit) for name, value, limit in least]
    return [each for each in checks if each[2]]


def unmet(bar: Bar, row: Row) -> list[str]:
    """Returns the bars that a config does not meet, with its figure: "step <= 6.7: 9.309"."""
    return [
        f"{name} {limit:g}: {value:.4g}" for name, value, limit, met in limits(bar, row) if not met
    ]


def _percent(share: float | None) -> float | None:
    return None if share is None else 100 * share


if __name__ == "__main__":
    main()
