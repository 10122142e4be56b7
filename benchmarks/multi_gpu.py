"""Every strategy on the 2, 4 or 8 GPUs of one machine: does it equal one GPU, how fast is it, and
what do the links carry?

Parts: bandwidth of collectives; initial bits, loss and gradients of every strategy in fp32,
compared with one GPU's; step time, MFU and memory of a model sized for the machine; losses in bf16;
settings on and off. Each runs in processes of its own, so a strategy that crashes or hangs loses
only its own results, which are written after each part. Needs jax, flax, optax, orbax-checkpoint
and numpy. `--cpu --quick` is a dry run.
"""

from __future__ import annotations

import dataclasses
import itertools
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from gpu_lab import TINY, Lab, Part, Table, measure, probed
from record import Row, options
from strategies import COUNTS, ONE, SETTINGS, Strategy, strategies

SMALL = {"vocab_size": 1000, "seq_len": 128, "n_layers": 8, "d_model": 256, "loss_chunk": 192}
HEADS = {
    "n_heads": 16,
    "n_kv_heads": 8,
    "biases": False,
    "tied": False,
    "positions": "rotary",
    "norm": "rmsnorm",
    "activation": "swiglu",
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {**HEADS, "z_loss": 1e-3, "sinks": True, "remat": "full"},
    "gpt": {"n_heads": 8, "dropout": 0.1},
}
"""The models that are compared; together they cover everything that a strategy could get wrong."""
BATCH = 16
"""Sequences in the global batch that is compared."""

SIZED: tuple[tuple[float, int, dict[str, Any]], ...] = (
    (
        60,
        4,
        {"seq_len": 2048, "n_layers": 24, "d_model": 2048, "n_heads": 16, "remat": "save_names"},
    ),
    (
        30,
        8,
        {"seq_len": 1024, "n_layers": 24, "d_model": 1024, "n_heads": 16, "remat": "save_names"},
    ),
    (0, 4, {"seq_len": 1024, "n_layers": 24, "d_model": 512, "n_heads": 8, "remat": "save_names"}),
)
"""(GiB that a GPU must have, sequences on each, model): 1.3 B, 350 M and 100 M parameters, which
fit one GPU with AdamW."""

SIZES = [1 << n for n in range(10, 31, 2)]
PAIRS = 64 << 20
"""Bytes sent in a collective, and between a pair of devices."""
KEPT = ("tokens_per_s", "mfu", "weak_scaling", "peak_gib", "high_water_gib")
"""Columns of the speed table that the summary repeats."""
UNSHOWN = ("program_gib", "temp_gib", "began", "ended")
"""Columns of a timed row that no table shows."""


@dataclasses.dataclass
class Suite:
    """The parts for this machine. Each yields tables as soon as they are measured."""

    devices: int
    quick: bool
    cpu: bool
    memory_gib: float
    """Results of one device."""
    status: dict[str, Row] = dataclasses.field(default_factory=dict)
    """Results of each strategy, by name, for the summary."""
    patience: float = 400.0
    """Seconds for one strategy to compile and run, after which it counts as hung."""

    def bandwidth(self, lab: Lab) -> Iterator[Table]:
        """fp32 zeros, in device memory. bus: bytes / time x NCCL's factor for what a link must
        carry; all groups run concurrently."""
        n, kinds = (
            self.devices,
            ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "ppermute"),
        )
        groups = {"all": [list(range(n))]} | (
            {"neighbours": [[i, i + 1] for i in range(0, n, 2)]} if n > 2 else {}
        )
        sizes = SIZES[:6:2] if self.cpu or self.quick else SIZES
        variants = [
            {"collective": kind, "group": name, "bytes": size, "devices": rows}
            for name, rows in groups.items() for kind in kinds for size in sizes
        ]  # fmt: skip
        rows = self.each(lab, "bandwidth", variants, most=5 if self.cpu else 200)
        yield (
            "Bandwidth",
            rows,
            f"{_said(self.bandwidth)} Nominal: NVLink's data sheet, one direction.",
        )
        best = [
            max(group_rows, key=lambda row: row["bus_gb_per_s"])
            for group_rows in _grouped(rows, "group", "collective")
        ]
        yield "Best bus bandwidth", best, "Of all sizes."

    def pairs(self, lab: Lab) -> Iterator[Table]:
        """Two devices, each sending to the other, so that a slow link, or a card in the wrong slot,
        shows as one row."""
        size = SIZES[3] if self.cpu or self.quick else PAIRS
        pairs = list(itertools.combinations(range(self.devices), 2))[: 3 if self.quick else None]
        variants = [
            {"collective": "ppermute", "group": f"{a} and {b}", "bytes": size, "devices": [[a, b]]}
            for a, b in pairs
        ]
        yield "Pairs", self.each(lab, "bandwidth", variants, most=20), _said(self.pairs)

    def equality(self, lab: Lab) -> Iterator[Table]:
        """fp32, one global batch in one step. init_differ: leaves of the initial weights that
        differ in any bit; rel: the largest differences of sums, and of gradients by leaf, from one
        device's."""
        rows: list[Row] = []
        for model, fields in list(MODELS.items())[: 1 if self.quick else None]:
            exact = fields | {"dtype": "float32", "attention": "xla"}
            options = {
                **self.compared(lab.directory, exact),
                "path": str(lab.directory / f"{model}.npz"),
            }
            if not any(
                "error" not in row
                for row in self.each(lab, "reference", [ONE.variant(1, model=model)], **options)
            ):
                continue
            chosen = [s for s in self.strategies if model == "llama" or s.main]
            new_rows = self.each(
                lab,
                "equality",
                [s.variant(microbatches(s), model=model) for s in chosen],
                **options,
            )
            self.keep(chosen, new_rows, "fp32")
            rows += new_rows
            yield "Equal to one device, fp32", rows, _said(self.equality)

    def training(self, lab: Lab) -> Iterator[Table]:
        """bf16, attention=auto, the first steps. rel: the largest difference of a loss from one
        device's."""
        options = {
            **self.compared(lab.directory, MODELS["llama"]),
            "steps": 5 if self.quick else 20,
        }
        alone = self.each(lab, "training", [ONE.variant(1)], wanted=[], **options)
        if not alone or "losses" not in alone[0]:
            return
        new_rows = self.each(
            lab,
            "training",
            [s.variant(microbatches(s)) for s in self.strategies],
            wanted=alone[0]["losses"],
            **options,
        )
        self.keep(self.strategies, new_rows, "bf16")
        rows = [
            {key: value for key, value in row.items() if key != "losses"}
            for row in alone + new_rows
        ]
        yield "Losses in bf16", rows, _said(self.training)
        runs = {_name(row): row["losses"] for row in alone + new_rows if "losses" in row}
        yield (
            "Losses by step",
            [
                {"step": i + 1, **{name: run[i] for name, run in runs.items()}}
                for i in range(options["steps"])
            ],
            "",
        )

    def speed(self, lab: Lab) -> Iterator[Table]:
        """As many sequences per device as a single device has. mfu: of the dense bf16 peak; peak:
        XLA's plan, as train.py --plan prints it; high water: measured on the device; weak_scaling:
        tokens per second, over n times one device's."""
        rows: list[Row] = []
        alone = 0.0
        for strategy in [ONE, *(s for s in self.strategies if s.main)]:
            n = self.devices if strategy.mesh else 1
            options = {**self.sized(lab.directory, n), "steps": 3 if self.quick else 20}
            new_rows = self.each(
                lab, "speed", [strategy.variant(timed_microbatches(strategy))], **options
            )
            for row in new_rows:
                rate = row.get("tokens_per_s", 0.0) / n
                alone = alone if strategy.mesh else rate
                scaling = {"weak_scaling": rate / alone} if rate and alone else {}
                rows.append({key: row[key] for key in row if key not in UNSHOWN} | scaling)
            if strategy.mesh:
                self.keep([strategy], rows[len(rows) - len(new_rows) :], "speed")
        yield (
            "Speed",
            rows,
            f"{_said(self.speed)} Model: {self.sized(lab.directory, 1)['changes']['model']}.",
        )

    def settings(self, lab: Lab) -> Iterator[Table]:
        """Settings of the model on and off, one after the other; flags are train.py's. ratio: of
        tokens per second to the first row's."""
        options = {**self.sized(lab.directory, self.devices), "steps": 3 if self.quick else 20}
        layers = options["changes"]["model"]["n_layers"]
        rows: list[Row] = []
        for rules, axis, choices in SETTINGS[:1] if self.quick else SETTINGS:
            fields = [
                {name: layers if value == -1 else value for name, value in choice.items()}
                for choice in choices
            ]
            titles = [
                " ".join(f"{name}={value}" for name, value in each.items()) for each in fields
            ]
            strategy = Strategy(rules, {axis: self.devices})
            variants = [
                strategy.variant(1, each, setting=title)
                for each, title in zip(fields, titles, strict=True)
            ]
            new_rows = [
                row for variant in variants for row in self.each(lab, "speed", [variant], **options)
            ]
            rate = new_rows[0].get("tokens_per_s") if new_rows else None
            for row in new_rows:
                ratio = (
                    {"ratio": row["tokens_per_s"] / rate} if rate and "tokens_per_s" in row else {}
                )
                rows.append({key: row[key] for key in row if key not in UNSHOWN} | ratio)
        yield "Settings", rows, f"{_said(self.settings)} Model: {options['changes']['model']}."

    def summary(self, lab: Lab) -> Iterator[Table]:
        """A summary of every strategy. ok: within the tolerance of one device; empty: not run."""
        rows = []
        for strategy in self.strategies:
            status = self.status.get(_name(strategy.columns), {})
            rows.append(
                strategy.columns
                | {column: status.get(column) for column in ("fp32", "bf16", "speed", *KEPT)}
            )
        yield "Summary", rows, _said(self.summary)

    @property
    def strategies(self) -> list[Strategy]:
        return [s for s in strategies(self.devices) if s.quick or not self.quick]

    def compared(self, directory: Path, fields: dict[str, Any]) -> dict[str, Any]:
        """Returns the run in which strategies are compared, with these fields of the model."""
        model = {**SMALL, **({**TINY, "n_layers": 8} if self.cpu else {}), **fields}
        changes = {
            "model": model,
            "train": {"global_batch": BATCH, "steps": 1000},
            "optimizer": {"warmup_steps": 2, "learning_rate": 1e-3},
        }
        return {"directory": str(directory), "changes": changes}

    def sized(self, directory: Path, n: int) -> dict[str, Any]:
        """Returns the run that is timed on n devices, as large as one device can hold."""
        each, model = next(
            (count, model) for gib, count, model in SIZED if self.cpu or self.memory_gib >= gib
        )
        model = {**TINY, "n_layers": 8, "n_heads": 8} if self.cpu else model
        train, rate = (
            {"global_batch": each * n, "steps": 1000},
            {"warmup_steps": 5, "learning_rate": 3e-4},
        )
        return {
            "directory": str(directory),
            "changes": {"model": model, "train": train, "optimizer": rate},
        }

    def each(
        self, lab: Lab, task: str, variants: list[dict[str, Any]], **options: Any
    ) -> list[Row]:
        """Returns a row for each variant. Those to which train.py gives other XLA flags run in
        processes of their own."""
        groups = itertools.groupby(variants, lambda variant: variant.get("flags"))
        return [
            row
            for _, group in groups
            for row in lab.each(task, list(group), patience=self.patience, **options)
        ]

    def keep(self, chosen: list[Strategy], rows: list[Row], check: str) -> None:
        for strategy, row in zip(chosen, rows, strict=False):
            status = self.status.setdefault(_name(strategy.columns), {})
            status[check] = "FAILED" if "error" in row or status.get(check) == "FAILED" else "ok"
            status |= {key: row[key] for key in KEPT if key in row}


def microbatches(strategy: Strategy) -> int:
    """Returns the fewest microbatches that fill the pipeline; 2 without one, so that gradients are
    accumulated."""
    return max(4, strategy.stages) if strategy.stages > 1 else 2


def timed_microbatches(strategy: Strategy) -> int:
    """Returns microbatches of one sequence per device in a pipeline, whose bubble is then less than
    a quarter of the time; else 1."""
    return 4 * strategy.stages if strategy.stages > 1 else 1


def _grouped(rows: list[Row], *columns: str) -> list[list[Row]]:
    """Returns the rows without error, by their values in these columns."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        if "error" not in row:
            groups.setdefault(tuple(row[column] for column in columns), []).append(row)
    return list(groups.values())


def _said(part: Callable[[Lab], Iterator[Table]]) -> str:
    return " ".join((part.__doc__ or "").split())


def _name(row: Row) -> str:
    return " ".join(filter(None, (row["rules"], row["mesh"], row["pipeline"])))


def main() -> int:
    parser = options(__doc__ or "", quick_help="fewer strategies, sizes and steps")
    parser.add_argument(
        "--devices",
        type=int,
        choices=COUNTS,
        help="how many (default: as many as there are; 8 with --cpu)",
    )
    parser.add_argument(
        "--cpu", action="store_true", help="on CPU devices, with tiny models: a rehearsal"
    )
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="multi-gpu-") as directory:
        start_time = time.monotonic()
        lab = Lab(
            Path(directory), arguments.cpu, "multi_gpu_worker.py", arguments.devices or max(COUNTS)
        )
        if isinstance(device := probed(lab, "--cpu --quick"), int):
            return device
        lab.devices = arguments.devices or max(
            (n for n in COUNTS if n <= device["devices"]), default=0
        )
        if not 0 < lab.devices <= device["devices"]:
            print(
                f"{device['devices']} GPU here: nothing measured; "
                f"{arguments.devices or min(COUNTS)} are needed"
            )
            return 1
        suite = Suite(lab.devices, arguments.quick, arguments.cpu, device["memory_limit_gib"])
        return measure(
            f"multi_gpu{'-quick' * arguments.quick}",
            parts(suite),
            lab,
            device,
            arguments.output,
            start_time,
        )


def parts(suite: Suite) -> list[Part]:
    """The most important first, in case the machine is lost. The times are limits."""
    return [
        Part(suite.bandwidth, 900), Part(suite.pairs, 300), Part(suite.equality, 3600),
        Part(suite.speed, 2400), Part(suite.training, 2400),
        Part(suite.settings, 1200), Part(suite.summary, 1),
    ]  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
