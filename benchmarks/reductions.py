"""Compiles GPT-3 on 1,024 absent H100s, by each way to sum gradients: bytes on the wire, predicted
waits, memory.

With one replica in a node, and with two. Writes the figures of docs/gradients.md. Rows that today's
results have already are not compiled again. What has no compiled program here, an outer step every
H steps, has its formula. Needs the compiler for CUDA: pip install -e '.[aot]'.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Mapping
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import reductions_page
from record import Record, Row, options

from mesh_lm.planning.diloco import wire_bytes

TARGET, DEVICES = "h100", 1024
ONE, TWO, OUTER = "One replica in a node", "Two replicas in a node", "An outer step every H steps"
MESHES: dict[str, dict[str, Any]] = {
    ONE: {"pipeline": 8, "data": 16, "tensor": 8},
    TWO: {"pipeline": 8, "data": 16, "tensor": 4, "extra": ("node=2",)},
}
FORMS: dict[str, dict[str, str]] = {
    ONE: {
        "ring, fp32": "ddp",
        "ring, bf16": "ddp+reduce_bfloat16",
        "int8": "ddp+reduce_int8",
        "reduce-scatter, fp32": "distributed",
        "reduce-scatter, bf16": "distributed+reduce_bfloat16",
        "reduce-scatter, int8": "distributed+reduce_int8",
    },
    TWO: {
        "ring, fp32": "ddp",
        "by node, fp32": "ddp+by_node",
        "reduce-scatter, fp32": "distributed",
        "reduce-scatter by node, fp32": "distributed+by_node",
    },
}
"""Table -> form -> rules, each with megatron_sp."""
NOTES = {
    ONE: (
        "pipeline 8 x data 16 x tensor 8: replicas are in different nodes. Times are predicted, "
        "never measured, at the optimistic rates; sustained_waits_s at the sustained ones."
    ),
    TWO: "pipeline 8 x data 16 x node 2 x tensor 4: a node has both devices of a pair of replicas.",
    OUTER: (
        "A formula, 2 (n - 1) / n x weight bytes / H, on the mesh of the first table: fp32 weights "
        "of one device, n = 16 replicas."
    ),
}


@dataclasses.dataclass(frozen=True)
class Subject:
    """A row that is compiled."""

    table: str
    form: str

    @property
    def name(self) -> str:
        return f"{self.table}: {self.form}"

    @property
    def rules(self) -> str:
        return f"{FORMS[self.table][self.form]}+megatron_sp"


def subjects() -> list[Subject]:
    return [Subject(table, form) for table, forms in FORMS.items() for form in forms]


def prepared(subject: Subject, quick: bool) -> Any:
    """Returns the config of a row: that of GPT-3 with other rules and another mesh."""
    from mesh_lm.config import load
    from sharding_rules import MeshConfig, preset, product

    config = load("gpt_175b")
    small = {"d_model": 512, "n_heads": 16, "n_layers": 16} if quick else {}
    pipeline = dataclasses.replace(config.pipeline, chunks=1 if quick else config.pipeline.chunks)
    rules = preset(subject.rules)
    # the same mesh, with one sum over both axes of replicas
    if subject.table == TWO and not rules.node_axis:
        flat = {"optimizer": {"flat": ("pipeline", "data", "node")}} if rules.optimizer else {}
        rules = product(rules, preset("by_node").replace("replicas", node_axis="")).replace(
            subject.rules, **flat
        )
    return dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, **small),
        mesh=MeshConfig(**MESHES[subject.table]),
        rules=rules,
        pipeline=pipeline,
        launch=dataclasses.replace(config.launch, compile_cache=""),
    )


def measured(subject: Subject, quick: bool) -> Row:
    """Compiles it. Bytes are those that a device sends in a step for gradients and new weights,
    over the axes of the replicas. `sustained_waits_s`: at the sustained rates, all other times at
    the optimistic ones."""
    from mesh_lm.planning.program import compile_config, flags_of
    from sharding_rules.lab.flags import options as flags
    from sharding_rules.lab.lint_reductions import reduced

    config = prepared(subject, quick)
    report = compile_config(config, TARGET, DEVICES, flags(flags_of(config, TARGET)))
    sums = [one for one in report.collectives if {"data", "node"} & set(one.axes)]
    assert report.timeline is not None and report.sustained is not None
    slow_waits = report.sustained.waits

    def gib(predicate: Any) -> float:
        return sum(one.times * one.wire for one in sums if predicate(one)) / 2**30

    def exposed(one: Any) -> float:
        alone = one.times * one.duration
        return one.times * one.wire * (min(1.0, one.exposed / alone) if alone else 0.0)

    new = [
        one
        for one in sums
        if one.kind == "all-gather" and all(shape.startswith("bf16") for shape in one.shapes)
    ]
    return {
        "name": subject.name, "form": subject.form, "rules": subject.rules,
        "sent_gib": gib(lambda one: True),
        "across_nodes_gib": gib(lambda one: one.nodes > 1),
        "inside_nodes_gib": gib(lambda one: one.nodes == 1),
        "weights_gib": gib(lambda one: one in new), "exposed_gib": sum(map(exposed, sums)) / 2**30,
        "waits_s": sum(one.exposed for one in sums) / 1e6,
        "sustained_waits_s": sum(slow_waits.get(one.name, 0.0) for one in sums) / 1e6,
        "step_s": report.timeline.step / 1e6,
        "peak_gib": report.peak_bytes / 2**30, "usable_gib": report.hbm / 2**30,
        "fits": report.fits,
        "types": reduced(report, config.rules), "seconds": report.compile_seconds,
    }  # fmt: skip


def outer_steps() -> list[Row]:
    """Returns what an outer step sends on average over the inner ones: nothing but the change of
    the weights is summed."""
    n, parameters = MESHES[ONE]["data"], parameters_of_a_device()
    sent = {h: wire_bytes(4 * parameters, n, h) / 2**30 for h in (10, 100, 500)}
    return [
        {"form": f"DiLoCo, H = {h}", "h": h, "sent_gib": each, "parameters": parameters}
        for h, each in sent.items()
    ]


def parameters_of_a_device() -> int:
    """Returns the parameters of a device in the first table, which is that of a stage with a
    table."""
    from mesh_lm.config import load

    mesh, model = MESHES[ONE], load("gpt_175b").model
    matrices = 12 * model.d_model**2 * model.n_layers // (mesh["pipeline"] * mesh["tensor"])
    tables = (model.padded_vocab // mesh["tensor"] + model.seq_len) * model.d_model
    return matrices + tables


def main() -> int:
    parser = options(__doc__ or "", quick_help="two forms of a small model")
    parser.add_argument(
        "--page",
        action="store_true",
        help="only rewrite the page's figures, from the newest results",
    )
    args = parser.parse_args()
    if not args.page:
        collect(args)
    if not args.quick:
        reductions_page.write()
    return 0


def collect(args: Any) -> None:
    """Compiles the rows that have no results yet; results are written after each row."""
    record = Record(
        f"reductions{'-quick' * args.quick}", args.output, kind=f"h100 jax {jax.__version__}"
    )
    earlier_file = record.directory / f"{record.stem}.json"
    tables: Mapping[str, Any] = (
        json.loads(earlier_file.read_text(encoding="utf-8"))["tables"]
        if earlier_file.is_file()
        else {}
    )
    done = {row["name"]: row for table in tables.values() for row in table["rows"] if "name" in row}
    selected = [
        one for one in subjects() if not args.quick or (one.table == ONE and "int8" in one.form)
    ]
    for subject in selected:
        if subject.name not in done:
            done[subject.name] = measured(subject, args.quick)
            print(
                {key: value for key, value in done[subject.name].items() if key != "name"},
                flush=True,
            )
        for title in dict.fromkeys(one.table for one in selected):
            rows = [done[one.name] for one in selected if one.table == title and one.name in done]
            record.table(title, rows, NOTES[title], show=False)
        record.table(OUTER, outer_steps(), NOTES[OUTER], show=False)
        record.write()


if __name__ == "__main__":
    sys.exit(main())
