"""Compiles Llama 3 8B at 8k to 1M tokens on 64 absent H100s, by each form of context parallelism:
bytes, memory, predicted time.

Each step has 1,048,576 tokens, 16,384 on each GPU, so that only attention depends on the length.
Writes the figures of docs/context.md and their chart. The results also have the lengths at which
another form becomes the best one. Rows that today's results have already are not compiled again.
Needs the compiler for CUDA: pip install -e '.[aot]'.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import os
import sys
from collections.abc import Iterator, Sequence
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import context_chart
import context_page
import jax
from plan_table import model_seconds
from record import Record, Row, options

TARGET, DEVICES, NODE = "h100", 64, 8
TOKENS = 16_384
"""On each device, in a step."""
LENGTHS = tuple(1024 * 2**n for n in range(3, 11))
FEW, OF_A_NODE, ALL = "As few ways as hold it", "8 ways, in a node", "64 ways, over 8 nodes"
NOTES = {
    FEW: (
        "16,384 tokens of a sequence on each GPU; up to that length no sequence is sharded. Times "
        "are predicted, never measured, at the optimistic rates; sustained_step_s at the sustained "
        "ones."
    ),
    OF_A_NODE: "Batches of as many tokens: a GPU has parts of several short sequences.",
    ALL: "Ulysses is not possible: 64 ways do not divide 32 heads.",
}
"""Table -> what its rows share."""


@dataclasses.dataclass(frozen=True)
class Subject:
    """A row: a form at a length, over a number of ways."""

    table: str
    form: str
    """A preset; empty: no sequence is sharded."""
    length: int
    ways: int

    @property
    def inner(self) -> int:
        """The ways of Ulysses below the ring of usp: those of a node, or half of them where the
        ring would have one."""
        return min(NODE, self.ways // 2) if self.form == "usp" else 1

    @property
    def name(self) -> str:
        return f"{self.form or 'none'} {self.length} {self.ways}"


def subjects() -> Iterator[Subject]:
    tables = {
        FEW: lambda length: max(1, length // TOKENS),
        OF_A_NODE: lambda _: NODE,
        ALL: lambda _: DEVICES,
    }
    for table, ways_for_length in tables.items():
        for length in LENGTHS:
            ways = ways_for_length(length)
            if table == FEW or 1024 <= length // ways <= TOKENS:
                yield from (Subject(table, form, length, ways) for form in forms(ways))


def forms(ways: int) -> Sequence[str]:
    if ways == 1:
        return ("",)
    return (
        "context_gather",
        *(["ulysses"] if ways <= 32 else []),
        "ring",
        *(["usp"] if ways >= 4 else []),
    )


def prepared(subject: Subject, quick: bool) -> Any:
    """Returns the config of a row: that of 128k with other sequences and another mesh."""
    from mesh_lm.config import load
    from sharding_rules import MeshConfig, preset

    config, mine = load("llama3_8b_128k"), subject
    small = (
        {"d_model": 512, "n_heads": 32, "head_dim": 16, "d_ff": 1024, "n_layers": 2}
        if quick
        else {}
    )
    replicas = DEVICES // mine.ways
    mesh = MeshConfig(
        data=replicas,
        sequence=mine.ways // mine.inner,
        extra=(f"ulysses={mine.inner}",) if mine.form == "usp" else (),
    )
    return dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, seq_len=mine.length, **small),
        mesh=mesh,
        rules=preset("+".join(filter(None, ("zero3", mine.form)))),
        train=dataclasses.replace(config.train, global_batch=DEVICES * TOKENS // mine.length),
        launch=dataclasses.replace(config.launch, compile_cache=""),
    )


def measured(subject: Subject, quick: bool) -> Row:
    """Compiles it. `sent_gib`: by a device in attention, in a step. `waits_s`: for that.
    `sustained_step_s`: at the sustained rates, all other times at the optimistic ones. `ratio`: the
    step over the model's own time."""
    from mesh_lm.planning.program import compile_config, flags_of
    from sharding_rules.lab.flags import options as flags

    config = prepared(subject, quick)
    report = compile_config(config, TARGET, DEVICES, flags(flags_of(config, TARGET)))
    exchange = [one for one in report.collectives if "attention" in one.where.part]
    assert report.timeline is not None and report.step_band is not None
    return {
        "name": subject.name, "form": subject.form or "none", "tokens": subject.length,
        "ways": subject.ways,
        "mesh": " x ".join(f"{axis} {n}" for axis, n in config.mesh.sizes().items() if n > 1),
        "sent_gib": sum(one.times * one.wire for one in exchange) / 2**30,
        "waits_s": sum(one.exposed for one in exchange) / 1e6,
        "step_s": report.timeline.step / 1e6, "sustained_step_s": report.step_band.slow / 1e6,
        "ratio": report.timeline.step / 1e6 / model_seconds(config, DEVICES), "mfu": report.mfu,
        "peak_gib": report.peak_bytes / 2**30,
        "usable_gib": report.hbm / 2**30, "fits": report.fits, "seconds": report.compile_seconds,
    }  # fmt: skip


def crossovers(rows: Sequence[Row], key: str) -> list[Row]:
    """Returns the lengths at which the smallest of `key` changes from one form to another, between
    two lengths of the rows.

    Values are joined by straight lines over the logarithm of the length. Forms count where both
    lengths have them.
    """
    rows_found: list[Row] = []
    values_by_length: dict[int, dict[str, float]] = {}
    for row in rows:
        values_by_length.setdefault(row["tokens"], {})[row["form"]] = row[key]
    for (short, short_values), (long, long_values) in itertools.pairwise(
        sorted(values_by_length.items())
    ):
        both = sorted(short_values.keys() & long_values.keys())
        if not both:
            continue
        first, last = (min(both, key=values.__getitem__) for values in (short_values, long_values))
        gap, then = short_values[last] - short_values[first], long_values[first] - long_values[last]
        if first != last and gap + then > 0:
            at = math.log2(short) + gap / (gap + then) * math.log2(long / short)
            rows_found.append({"of": key, "from": first, "to": last, "tokens": round(2**at)})
    return rows_found


def main() -> int:
    parser = options(__doc__ or "", quick_help="two small models")
    parser.add_argument(
        "--again", action="store_true", help="also compile rows that today's results already have"
    )
    parser.add_argument(
        "--page",
        action="store_true",
        help="only rewrite the page's figures and the chart, from the newest results",
    )
    args = parser.parse_args()
    if not args.page:
        collect(args)
    if not args.quick:
        source = context_page.newest()
        data = json.loads(source.read_text(encoding="utf-8"))
        context_page.write(data, source.name)
        context_chart.draw(data, context_page.CHART)
    return 0


def collect(args: Any) -> None:
    """Compiles the rows that have no results yet; results are written after each row."""
    record = Record(
        f"context_lengths{'-quick' * args.quick}", args.output, kind=f"h100 jax {jax.__version__}"
    )
    tables = {} if args.again else record.earlier()
    done = {row["name"]: row for rows in tables.values() for row in rows if "name" in row}
    selected = list(subjects())
    if args.quick:
        selected = [
            one
            for one in selected
            if one.table == OF_A_NODE
            and one.length in LENGTHS[:2]
            and one.form in ("ring", "ulysses")
        ]
    for subject in selected:
        if subject.name not in done:
            done[subject.name] = measured(subject, args.quick)
            print(
                {
                    key: done[subject.name][key]
                    for key in ("name", "sent_gib", "step_s", "ratio", "peak_gib", "seconds")
                },
                flush=True,
            )
        for title in dict.fromkeys(one.table for one in selected):
            rows = [done[one.name] for one in selected if one.table == title and one.name in done]
            record.table(title, rows, NOTES[title], show=False)
        record.write()
    changes = [
        {"ways": title, **one}
        for title in record.data["tables"]
        for key in ("sent_gib", "step_s")
        for one in crossovers(record.data["tables"][title]["rows"], key)
    ]
    record.table(
        "Crossovers",
        changes,
        "Where the form that sends least, and the one predicted to be fastest, changes.",
    )
    record.write()


if __name__ == "__main__":
    sys.exit(main())
