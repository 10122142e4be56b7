"""The parts of gpu_suite.py about our own kernels alone. Each yields tables as soon as they are
measured."""

from __future__ import annotations

import csv
import io
import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from typing import Any

from attention_variants import names_for
from gpu_attention import ALIKE, HEADLINE, TINY_SHAPES, lanes, note_of, shape
from gpu_lab import Lab, Table
from record import Row

KERNELS = "kernel_worker.py"
ATTENTION = "attention_worker.py"
PATIENCE = 60
"""Seconds in which a kernel of the smoke part must compile and run. One that takes longer hangs."""
AB_SHAPES = [*HEADLINE, shape("causal", 64, 16_384), shape("full", 64, 16_384)]
DRY_VARIANTS = ("bwd tma", "fwd 128 rows, named barriers alone")
TUNED_SHAPES = [*HEADLINE, *AB_SHAPES[2:], shape("causal", 128, 4096), shape("full", 128, 4096)]
EXPERTS: tuple[Row, ...] = (
    {"tokens": 8192, "groups": 64, "d_in": 2048, "d_out": 1408, "spread": 1.5},
    {"tokens": 32_768, "groups": 8, "d_in": 4096, "d_out": 14_336, "spread": 1.25},
    {"tokens": 8192, "groups": 64, "d_in": 2048, "d_out": 1408, "spread": 1.0},
)
"""Fine-grained experts; those of Mixtral 8x7B; even groups."""
TINY_EXPERTS: Row = {"tokens": 256, "groups": 4, "d_in": 64, "d_out": 64, "spread": 1.5}
MATRICES = {
    "qkv": (12_288, 4608),
    "out": (1536, 12_288),
    "up": (12_288, 6144),
    "down": (6144, 12_288),
}
"""Those of gpt_175b on one of 8 devices of tensor parallelism, K and N."""
PLANNED = "as planned"
CALLS: tuple[Row, ...] = tuple(
    {"form": form, "tile": tile}
    for tile in (PLANNED, "128 x 256", "256 x 192")
    for form in ("add", "product", "transposed")
)
STACKS: tuple[Row, ...] = tuple(
    {"matrix": name, "tokens": 8192, "K": K, "N": N, "rows": 4} | call
    for call in CALLS
    for name, (K, N) in MATRICES.items()
)
"""A microbatch of gpt_175b has 8,192 tokens. Four of its twelve rows: more do not change what a
matmul moves."""
TINY_STACKS: tuple[Row, ...] = tuple(
    {"matrix": "tiny", "tokens": 72, "K": 64, "N": 128, "rows": 2} | call for call in CALLS[:4]
)
CUBLAS = 0.95
"""The bar of the stacked matmul: the share of cuBLAS's rate from which on it may serve calls by
default."""
DENSE = 0.85
"""The goal of the grouped matmul: the share of the dense matmul's rate at the same FLOPs."""


def smoke(lab: Lab) -> Iterator[Table]:
    """Each kernel for the first time, at a small shape, in a process of its own with 60 s: a
    kernel that hangs costs itself alone, and is named. rel: the largest |x - formula| /
    |formula|, in fp32; rerun: the largest difference of a rerun (the fused backward's sums have
    no fixed order)."""
    variants = [
        {"kernel": name}
        for name in lab.run("kernels", worker=KERNELS, platform="cpu", dry_run=lab.dry_run)[0][
            "names"
        ]
    ]
    options: dict[str, Any] = {
        "patience": 4 * PATIENCE if lab.dry_run else PATIENCE,
        "reruns": 1 if lab.dry_run else 20,
    }
    options["alone"] = not lab.dry_run
    table = {"title": "Smoke", "note": note_of(smoke)}
    rows = lab.spread(
        "smoke",
        variants,
        worker=KERNELS,
        lanes=min(4, lanes(lab)),
        dry_run=lab.dry_run,
        **table,
        **options,
    )
    yield table["title"], rows, table["note"]


def autotune(lab: Lab) -> Iterator[Table]:
    """Times candidates for the table of tiles at the headline's shapes. The parts after this one
    use the table, tuning.json, which is next to these results."""
    path = lab.output / "tuning.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    shapes = [{name: row[name] for name in ("head_dim", "mask", "seq")} for row in TUNED_SHAPES]
    options: Row = {
        "seconds": max(1.0, lab.left() - 15),
        "table": str(path),
        "shapes": shapes,
        "dry_run": lab.dry_run,
    }
    rows = lab.run("autotune", worker=KERNELS, **options)
    if lab.dry_run:
        path.unlink(missing_ok=True)
    yield "Autotuning", rows, note_of(autotune)


def variants(lab: Lab) -> Iterator[Table]:
    """Variants of our kernels beside each other. red and tma: how the fused backward adds dQ, by
    atomic additions from registers or by a reducing copy; pair: the deterministic backward, seven
    matmuls. The forward's variants are schedules and tiles that compile without spills. norms:
    equal data gives equal ones."""
    shapes = TINY_SHAPES[:1] if lab.dry_run else AB_SHAPES
    selected = [
        row | {"peer": name, "way": name[:3]}
        for row in shapes
        for name in names_for(row["head_dim"], row["mask"])
    ]
    selected = [row for row in selected if row["peer"] in DRY_VARIANTS] if lab.dry_run else selected
    options: dict[str, Any] = {"patience": 120, "needed": False, "dry_run": lab.dry_run}
    table = {"title": "Variants", "note": note_of(variants)}
    rows = lab.spread("speed", selected, worker=ATTENTION, lanes=lanes(lab), **table, **options)
    yield table["title"], rows, table["note"]
    lab.problems += odd_norms(rows)
    yield (
        "Variants, ranked",
        ranked(rows),
        "vs_first: its rate over that of the first variant of the same direction and shape.",
    )


def odd_norms(rows: Sequence[Row]) -> list[str]:
    """Returns a line for each norm in which a variant differs from the first that ran of the same
    direction and shape."""
    first: dict[tuple[Any, ...], Row] = {}
    wrong = []
    for row in rows:
        norms = {name: x for name, x in row.items() if name.endswith("_norm")}
        other = (
            first.setdefault(tuple(row[name] for name in ("mask", "head_dim", "seq", "way")), row)
            if norms
            else row
        )
        for name, x in norms.items():
            if not abs(x / other[name] - 1) <= ALIKE:
                label = f"{row['peer']}, {row['mask']} {row['head_dim']} {row['seq']}"
                wrong.append(f"{label}: {name} is {x:.6g}, of {other['peer']} {other[name]:.6g}")
    return wrong


def ranked(rows: Sequence[Row]) -> list[Row]:
    """Returns a row for each variant that ran: the fastest first, for each shape and direction."""
    rows_by_shape: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        if rate := row.get(f"{row['way']}_tflops"):
            columns = {name: row[name] for name in ("mask", "head_dim", "seq", "way")}
            rows_by_shape.setdefault(tuple(columns.values()), []).append(
                {**columns, "variant": row["peer"], "tflops": rate}
            )
    for group in rows_by_shape.values():
        first = group[0]["tflops"]
        group[:] = sorted(
            ({**row, "vs_first": row["tflops"] / first} for row in group),
            key=lambda row: -row["tflops"],
        )
    return [row for group in rows_by_shape.values() for row in group]


def grouped_repaired(lab: Lab) -> Iterator[Table]:
    """The grouped matmul, which was wrong when it first ran on a GPU: compared with a loop at a
    small shape, and timed if it is right."""
    options: dict[str, Any] = {
        "patience": PATIENCE,
        "reruns": 1,
        "title": "Smoke",
        "note": note_of(smoke),
    }
    rows = lab.spread(
        "smoke", [{"kernel": GROUPED}], worker=KERNELS, lanes=1, dry_run=lab.dry_run, **options
    )
    yield "Smoke", rows, note_of(smoke)
    if not lab.problems:
        yield from grouped(lab)


GROUPED = "grouped matmul"
"""As kernel_worker.py names it."""


def grouped(lab: Lab) -> Iterator[Table]:
    """The grouped matmul of a mixture of experts, bf16, beside a dense matmul of as many tokens and
    the same FLOPs, in turns. spread: the largest group over the mean. ratio: the dense matmul's
    time over this one's. chosen: what a model takes. bwd: both gradients."""
    names = ("mosaic", "xla")
    shapes = [TINY_EXPERTS] if lab.dry_run else EXPERTS
    selected = [row | {"peer": name} for row in shapes for name in names]
    options: dict[str, Any] = {"patience": 120, "dry_run": lab.dry_run}
    table = {"title": "Grouped matmul", "note": note_of(grouped)}
    rows = lab.spread("groups", selected, worker=KERNELS, lanes=lanes(lab), **table, **options)
    yield table["title"], rows, table["note"]
    goals = [
        {"goal": (f"grouped {way}, {row['tokens']} tokens, {row['groups']} groups, spread "
            f"{row['spread']:g}"), "peer": row["peer"],
         "least": DENSE, "ours": row[f"{way}_ratio"], "met": row[f"{way}_ratio"] >= DENSE}
        for row in rows if row.get("chosen") for way in ("fwd", "bwd")
    ]  # fmt: skip
    yield (
        "Goals of the grouped matmul",
        goals,
        "Shares of the dense matmul's rate, for the implementation that a model takes.",
    )


def stacked(lab: Lab) -> Iterator[Table]:
    """A matmul with one matrix of a stack, bf16, at the shapes of gpt_175b, beside cuBLAS's with
    that matrix alone and XLA's form, in turns. form: add, x^T dy added to fp32 sums in place, XLA
    adding a result in bf16; product and transposed, x @ w and x @ w^T, XLA with a copy of the
    matrix. tile: that of our result, by our plan or as stated. ratio and xla_ratio: their time over
    ours. rel: the difference of ours from XLA's form."""
    options: dict[str, Any] = {"patience": 120, "dry_run": lab.dry_run}
    table = {"title": "Stacked matmul", "note": note_of(stacked)}
    rows = lab.spread(
        "stacks",
        list(TINY_STACKS if lab.dry_run else STACKS),
        worker=KERNELS,
        lanes=lanes(lab),
        **table,
        **options,
    )
    yield table["title"], rows, table["note"]
    goals = [
        {"goal": f"stacked {row['form']}, {row['matrix']}", "least": CUBLAS, "ours": row["ratio"], "met": row["ratio"] >= CUBLAS}
        for row in rows if "ratio" in row and row["tile"] == PLANNED
    ]  # fmt: skip
    note = (
        "Shares of cuBLAS's rate. If all are met, EXPERIMENTAL in pallas_kernels/stacked_matmul.py "
        "may become empty."
    )
    yield "Goals of the stacked matmul", goals, note


# Under NVIDIA's tools.

SANITIZED = ("memcheck", "synccheck", "racecheck")
"""Tools of compute-sanitizer, the most important first. It knows little of TMA's asynchronous
copies: racecheck may raise false alarms."""


def sanitizer(lab: Lab) -> Iterator[Table]:
    """The smoke part's kernels under NVIDIA's compute-sanitizer, which looks for accesses out of
    bounds, misused barriers, and races in shared memory. errors: as it counts them; those of
    racecheck are not counted as problems, because it does not follow TMA's copies."""
    if not (tool := found_tool("compute-sanitizer")):
        lab.left_out.append("compute-sanitizer is not installed")
        return
    names = lab.run("kernels", worker=KERNELS, platform="cpu", dry_run=lab.dry_run)[0]["names"]
    rows: list[Row] = []
    for check in SANITIZED:
        for name in names:
            variant = {"tool": check, "kernel": name}
            if earlier_row := lab.known("Sanitizer", variant):
                rows.append(earlier_row)
                continue
            if lab.left() < 10:
                lab.left_out.append(f"{check} of {name}: no time left")
                continue
            rows.append(variant | sanitized(lab, [tool, "--tool", check], name))
            lab.progress("Sanitizer", rows, note_of(sanitizer))
    yield "Sanitizer", rows, note_of(sanitizer)


def sanitized(lab: Lab, command: list[str], kernel: str) -> Row:
    """Returns the columns of one kernel under one tool."""
    log = lab.directory / f"sanitizer-{next(lab.n)}.log"
    under = [*command, "--target-processes", "all", "--print-limit", "3", "--log-file", str(log)]
    options: Row = {"variants": [{"kernel": kernel}], "dry_run": lab.dry_run, "reruns": 0}
    ran = lab.run("smoke", worker=KERNELS, under=under, **options)
    text = log.read_text(encoding="utf-8") if log.exists() else ""
    total = re.search(r"(?:ERROR|RACECHECK) SUMMARY: (\d+)", text)
    if not ran or not total:
        return {"error": f"no result: {' '.join(text.split())[-200:] or 'no message'}"}
    errors = int(total[1])
    row: Row = {"errors": errors, "rel": ran[0].get("rel")}
    if errors:
        row["first"] = next(
            (
                line.strip("= ")
                for line in text.splitlines()
                if "Invalid" in line or "error" in line.lower()
            ),
            "",
        )[:200]
        if command[-1] != "racecheck":
            lab.problems.append(f"{command[-1]} of {kernel}: {errors} errors, first {row['first']}")
    return row


METRICS = {
    "ms": "gpu__time_duration.sum",
    "tensor_active": "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed",
    "tensor_issued": "sm__inst_executed_pipe_tensor.avg.pct_of_peak_sustained_elapsed",
    "issue_active": "sm__inst_issued.avg.pct_of_peak_sustained_elapsed",
    "shared_memory": "l1tex__data_pipe_lsu_wavefronts_mem_shared.avg.pct_of_peak_sustained_elapsed",
    "l2": "lts__t_sectors.avg.pct_of_peak_sustained_elapsed",
    "dram": "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "registers": "launch__registers_per_thread",
    "local_bytes": "smsp__inst_executed_op_local.sum",
}
"""Column -> metric of Nsight Compute; percents of the peak, except ms and registers. Those that an
installation lacks are left out."""
STALLS = re.compile(r"smsp__average_warps_issue_stalled_(\w+)_per_issue_active")
PROFILED = {
    "fwd": ("mosaic", "flash_attention_forward"),
    "bwd": ("mosaic", "flash_attention_bwd"),
}
"""Direction -> (peer, the beginning of the names of its kernels)."""


def ncu(lab: Lab) -> Iterator[Table]:
    """Counters of our kernels at the headline's shapes by NVIDIA's Nsight Compute, one kernel
    launch each, at the clocks of the moment. Percents of the peak; registers: of a thread at
    launch; stalls: the three most frequent reasons why a warp waits, in warps."""
    if not (tool := found_tool("ncu")):
        lab.left_out.append("ncu is not installed")
        return
    metrics = known_metrics(tool)
    if not metrics:
        lab.left_out.append("ncu knows none of the metrics, or may not read them")
        return
    rows: list[Row] = []
    for row in TINY_SHAPES[:1] if lab.dry_run else AB_SHAPES:
        for way, (peer, kernel) in PROFILED.items():
            variant = row | {"way": way}
            if earlier_row := lab.known("Counters", variant):
                rows.append(earlier_row)
                continue
            if lab.left() < 10:
                lab.left_out.append(
                    f"counters of {row['mask']} {row['head_dim']} {way}: no time left"
                )
                continue
            rows.append(variant | counted(lab, [tool], metrics, variant, peer, kernel))
            lab.progress("Counters", rows, note_of(ncu))
    yield "Counters", rows, note_of(ncu)


def counted(
    lab: Lab, command: list[str], metrics: Sequence[str], variant: Row, peer: str, kernel: str
) -> Row:
    """Returns the columns of one direction at one shape."""
    log = lab.directory / f"ncu-{next(lab.n)}.csv"
    under = [
        *command,
        "--clock-control",
        "none",
        "--kernel-name",
        f"regex:{kernel}",
        "--launch-skip",
        "1",
        "--launch-count",
        "1",
    ]
    under += [
        "--csv",
        "--page",
        "raw",
        "--print-units",
        "base",
        "--log-file",
        str(log),
        "--metrics",
        ",".join(metrics),
    ]
    shape = {name: x for name, x in variant.items() if name != "way"}
    lab.run(
        "profile",
        worker=KERNELS,
        under=under,
        shape=shape,
        peer=peer,
        way=variant["way"],
        dry_run=lab.dry_run,
    )
    row = counters(log.read_text(encoding="utf-8") if log.exists() else "")
    if "error" in row:
        lab.problems.append(
            f"ncu, {variant['mask']} {variant['head_dim']} {variant['way']}: {row['error']}"
        )
    return row


def counters(text: str) -> Row:
    """Returns the columns of what ncu wrote: messages, then CSV with a line of names, a line of
    units, and a line for each launch."""
    lines = [line for line in text.splitlines() if line.startswith('"')]
    table = list(csv.DictReader(io.StringIO("\n".join(lines))))
    if len(table) < 2:
        return {"error": " ".join(text.split())[-200:] or "no counters"}
    values = {
        name: float(x.replace(",", ""))
        for name, x in table[1].items()
        if re.fullmatch(r"[\d.,]+(e[+-]?\d+)?", x or "")
    }
    row: Row = {"kernel": table[1].get("Kernel Name", "")[:60]}
    row |= {column: values[metric] for column, metric in METRICS.items() if metric in values}
    if "ms" in row:
        row["ms"] /= 1e6  # the base unit is ns
    stalls = {match[1]: x for name, x in values.items() if (match := STALLS.match(name))}
    most = sorted(stalls, key=lambda name: -stalls[name])[:3]
    return row | {"stalls": ", ".join(f"{name} {stalls[name]:.2f}" for name in most)}


def known_metrics(tool: str) -> list[str]:
    """Returns the metrics that this ncu knows of those that we want: METRICS, and all reasons of
    stalls."""
    try:
        done = subprocess.run(
            [tool, "--query-metrics", "--chips", "gh100"],
            capture_output=True,
            text=True,
            timeout=60,
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    bases = {line.split()[0] for line in done.stdout.splitlines() if "__" in line}
    selected = [
        name
        for name in METRICS.values()
        if name.partition(".")[0] in bases or name.startswith("launch__")
    ]
    return (
        [*selected, *sorted(f"{name}.ratio" for name in bases if STALLS.match(name))]
        if bases
        else []
    )


def found_tool(name: str) -> str | None:
    """Returns the path of one of CUDA's tools."""
    return shutil.which(name) or shutil.which(
        name, path="/usr/local/cuda/bin:/opt/nvidia/nsight-compute"
    )
