"""The parts of gpu_suite.py about attention alone. Each yields tables as soon as they are
measured."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from gpu_lab import Lab, Table, compiler_there
from record import Row

WORKER, TORCH = "attention_worker.py", "torch_peers.py"
OURS = "mosaic"
SHAPE = ("mask", "head_dim", "seq", "batch", "heads", "kv_heads")
"""The columns that identify a shape."""
TORCH_PEERS = {"causal": ("torch flash", "torch cudnn"), "full": ("torch flash", "torch cudnn"), "window": ("torch varlen", "torch flex"),
               "packed": ("torch varlen", "torch flex")}  # fmt: skip
ALIKE = 3e-3
"""Largest relative difference of our norms of out and gradients from cuDNN's on the same data, for
shapes too large for a reference."""
GOALS = (
    ("causal", 128, "fwd", 645.0, 1.03), ("full", 128, "fwd", 695.0, 1.03),
    ("causal", 128, "bwd", 545.0, 1.05),
    ("full", 128, "bwd", 545.0, 1.05), ("causal", 64, "fwd", 510.0, 0.0),
    ("full", 64, "fwd", 510.0, 0.0),
)  # fmt: skip
"""The goals of our kernel on an H100 at 16,384 tokens, random data: mask, head dim, direction,
TFLOP/s, and the least ratio to cuDNN."""
PACKED = 0.95
"""The goal for packed documents: the share of the rate of one causal document."""


ROOF = (
    "A bf16 matmul of random data in JAX, back to back for 4 s: the ceiling that shares below are "
    "of."
)


def torch_there() -> bool:
    return "TORCH_PYTHON" in os.environ or importlib.util.find_spec("torch") is not None


def headline(lab: Lab) -> Iterator[Table]:
    """Head dim 128, 16,384 tokens, heads x head dim = 2,048, batch 2; ours and cuDNN in turns. bwd:
    the backward alone, 2.5 times the FLOPs. spread: (slowest - fastest) / median of five samples.
    norms: equal data gives equal ones."""
    names = [OURS, "xla" if lab.dry_run else "cudnn"]
    options: Row = {
        "size": 128 if lab.dry_run else 8192,
        "shapes": HEADLINE if not lab.dry_run else TINY_SHAPES[:1],
        "names": names,
    }
    rows = lab.run("headline", worker=WORKER, **options, dry_run=lab.dry_run)
    roof = [row for row in rows if "matmul" in row]
    lab.found["roof"] = roof[0]["tflops"] if roof else None
    yield "Matmul roof", roof, ROOF
    lab.found["headline"] = _attention(rows)
    if not lab.found["headline"]:
        lab.problems.append("no figure of the headline")
    yield "Headline", lab.found["headline"], note_of(headline)
    yield "Headline, compared", compared(lab, lab.found["headline"]), COMPARED


def changed(lab: Lab) -> Iterator[Table]:
    """Attention whose tiles changed since it was last timed, or that never was: head dim 64 and
    2,048 tokens, 32,768 tokens in all. Ours and cuDNN in turns. bwd: the backward alone, 2.5 times
    the FLOPs. spread: (slowest - fastest) / median of five samples."""
    title = "Attention that changed"
    names = [OURS, "xla" if lab.dry_run else "cudnn"]
    selected = CHANGED if not lab.dry_run else TINY_SHAPES[:1]
    earlier = [
        row
        for row in (
            lab.known(title, shape | {"peer": name}) for shape in selected for name in names
        )
        if row is not None
    ]
    missing = [
        shape
        for shape in selected
        if sum(shape.items() <= row.items() for row in earlier) < len(names)
    ]
    rows = list(earlier)
    if missing:
        options: Row = {
            "size": 128 if lab.dry_run else 8192,
            "shapes": missing,
            "names": names,
            "dry_run": lab.dry_run,
        }

        def tell(rows: list[Row]) -> None:
            lab.progress(title, earlier + _attention(rows), note_of(changed))

        headline = lab.run("headline", worker=WORKER, tell=tell, **options)
        roof = [row for row in headline if "matmul" in row]
        lab.found["roof"] = roof[0]["tflops"] if roof else None
        yield "Matmul roof", roof, ROOF
        rows += _attention(headline)
    yield title, rows, note_of(changed)
    yield f"{title}, compared", compared(lab, rows), COMPARED
    lab.problems += unlike(rows)


def _attention(rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if "matmul" not in row]


def peers(lab: Lab) -> Iterator[Table]:
    """32,768 tokens in all, heads x head dim = 2,048. window: 1,024. packed: causal documents of
    4,096 tokens on average. mgpu: jax's example, fp16. Backward alone. unserved: a peer's error
    message."""
    options: Row = (
        {"headline": HEADLINE, "shapes": SHAPES}
        if not lab.dry_run
        else {"headline": TINY_SHAPES[:1], "shapes": TINY_SHAPES[1:]}
    )
    plan = lab.run("plan", worker=WORKER, platform="cpu", **options, dry_run=lab.dry_run)
    ours = [row["shape"] | {"peer": peer} for row in plan for peer in row["peers"]]
    theirs = (
        [variant for row in plan for variant in torch_variants(row, lab.dry_run)]
        if torch_there()
        else []
    )
    if not theirs:
        lab.left_out.append("torch is not installed")
    limits: dict[str, Any] = {"patience": 120, "needed": False, "dry_run": lab.dry_run}
    with ThreadPoolExecutor(2) as pool:
        title = "Attention, PyTorch"
        torch = pool.submit(
            lab.spread,
            "attention",
            theirs,
            worker=TORCH,
            lanes=1,
            title=title,
            note=note_of(peers),
            **limits,
        )
        rows = lab.spread(
            "speed",
            ours,
            worker=WORKER,
            lanes=lanes(lab),
            title="Attention, JAX",
            note=note_of(peers),
            **limits,
        )
        torch_rows = torch.result()
    yield "Attention, JAX", rows, note_of(peers)
    yield "Attention, PyTorch", torch_rows, note_of(peers)
    both = [*lab.found.get("headline", ()), *rows, *torch_rows]
    yield "Attention, compared", compared(lab, both), COMPARED
    lab.problems += unlike(both)
    yield (
        "Goals",
        goals(both),
        "In TFLOP/s, of ours on an H100; vs_cudnn: ours / cuDNN, least_vs_cudnn: the goal.",
    )


def correct(lab: Lab) -> Iterator[Table]:
    """Compares our attention with the formula in fp32 on random data: rel_x is |x - reference| /
    |reference| of result and gradients. cudnn: the largest ratio of our error to cuDNN's on the
    same data, which must not exceed 1.1. The error is the larger of those with and without
    deterministic=True. reruns_differ: the number of results that differ in any bit in three more
    runs with deterministic=True."""
    names = (
        CASES_TINY if lab.dry_run else lab.run("cases", worker=WORKER, platform="cpu")[0]["names"]
    )
    options: dict[str, Any] = {
        "patience": 120,
        "dry_run": lab.dry_run,
        "reruns": 1 if lab.dry_run else 3,
    }
    table = {"title": "Correctness", "note": note_of(correct)}
    rows = lab.spread(
        "correct",
        [{"case": name} for name in names],
        worker=WORKER,
        lanes=lanes(lab),
        **table,
        **options,
    )
    yield table["title"], rows, table["note"]


def deviceless(lab: Lab) -> Iterator[Table]:
    """Forward and backward of an attention block with our kernel, compiled and serialised by a
    process that sees no GPU, then loaded and run by one that does. rel_difference: to the same
    program compiled there, whose matmul algorithms differ."""
    target = "h200" if "H200" in lab.device["device_kind"] else "h100"
    path, made = str(lab.directory / "program"), []
    options: Row = {"worker": WORKER, "path": path, "tiny": lab.dry_run}
    if lab.dry_run and not compiler_there():
        lab.left_out.append("XLA's compiler for CUDA is not installed")
    else:
        made = lab.run("deviceless", platform="cpu", hidden=True, target=target, **options)
        yield "Compiled without a GPU", made, note_of(deviceless)
    if lab.dry_run:
        made = lab.run("deviceless", target="cpu", **options)
    if made:
        rows = lab.run("load", **options)
        yield (
            "Loaded and run",
            rows,
            "The program above." if not lab.dry_run else "One compiled for a CPU: a rehearsal.",
        )


def lanes(lab: Lab) -> int:
    """Returns the number of processes that compile in parallel: half of the cores."""
    return 1 if lab.dry_run else max(2, min(8, (os.cpu_count() or 2) // 2))


def torch_variants(row: Row, dry_run: bool) -> list[Row]:
    names = TORCH_PEERS[row["shape"]["mask"]]
    # the others need a GPU
    names = [name for name in names if name == "torch flash"] if dry_run else names
    if row["shape"]["head_dim"] > 256:
        return []
    columns = {"flops": row["flops"], "window": row["window"], "lengths": row["lengths"]}
    return [row["shape"] | {"peer": name} | columns for name in names]


def note_of(part: Any) -> str:
    return " ".join((part.__doc__ or "").split())


COMPARED = "TFLOP/s. ratio: ours to the best peer. roof: ours, as a share of the matmul's."


def compared(lab: Lab, rows: Sequence[Row]) -> list[Row]:
    """Returns a row for each shape and direction: TFLOP/s of each implementation, ratio to the best
    peer, share of the roof."""
    shapes: dict[tuple[Any, ...], dict[str, Row]] = {}
    for row in rows:
        if not {"error", "unserved"} & row.keys():
            shapes.setdefault(tuple(row[name] for name in SHAPE), {})[row["peer"]] = row
    order = list(
        dict.fromkeys(
            peer for row_by_peer in shapes.values() for peer in row_by_peer if peer != OURS
        )
    )
    table = []
    for shape, row_by_peer in shapes.items():
        for way in ("fwd", "bwd"):
            rates = {peer: row.get(f"{way}_tflops") for peer, row in row_by_peer.items()}
            ours, other_rates = (
                rates.pop(OURS, None),
                {peer: rate for peer, rate in rates.items() if rate},
            )
            best = max(other_rates, key=lambda peer: other_rates[peer]) if other_rates else None
            quotients = {
                "best_peer": best,
                "ratio": ours / other_rates[best] if ours and best else None,
                "roof": ours / lab.found["roof"] if ours and lab.found.get("roof") else None,
            }
            columns = {peer: other_rates.get(peer) for peer in order}
            table.append(
                {
                    **dict(zip(SHAPE, shape, strict=True)),
                    "way": way,
                    "ours": ours,
                    **columns,
                    **quotients,
                }
            )
    return table


def unlike(rows: Sequence[Row]) -> list[str]:
    """Returns a line for each norm in which our kernel differs from cuDNN (or xla) on the same
    data."""
    rows_by_shape: dict[tuple[Any, ...], dict[str, Row]] = {}
    for row in rows:
        if row["peer"] in (OURS, "cudnn", "xla") and "fwd_ms" in row:
            rows_by_shape.setdefault(tuple(row[name] for name in SHAPE), {})[row["peer"]] = row
    wrong = []
    for shape, pair in rows_by_shape.items():
        ours, other = pair.get(OURS), pair.get("cudnn", pair.get("xla"))
        if not ours or not other:
            continue
        for name in (name for name in ours if name.endswith("_norm")):
            if not abs(ours[name] / other[name] - 1) <= ALIKE:
                wrong.append(
                    f"{' '.join(map(str, shape))}: {name} is {ours[name]:.6g}, of {other['peer']} "
                    f"{other[name]:.6g}"
                )
    return wrong


def goals(rows: Sequence[Row]) -> list[Row]:
    """Returns a row for each goal, with the measured rate. met: None if it was not measured."""
    at: dict[tuple[str, int, str], Row] = {}
    for row in rows:
        if row["seq"] == 16_384 and row["heads"] == row["kv_heads"]:
            at[row["mask"], row["head_dim"], row["peer"]] = row
    table = []
    for mask, dim, way, least, ratio in GOALS:
        ours, cudnn = (
            at.get((mask, dim, peer), {}).get(f"{way}_tflops") for peer in (OURS, "cudnn")
        )
        met = ours >= max(least, ratio * (cudnn or 0.0)) if ours and (cudnn or not ratio) else None
        versus = ours / cudnn if ours and cudnn else None
        columns = {"goal": f"{mask} {way} d{dim}", "least": least, "ours": ours, "cudnn": cudnn}
        table.append(columns | {"vs_cudnn": versus, "least_vs_cudnn": ratio or None, "met": met})
    for way in ("fwd", "bwd"):
        packed, causal = (
            at.get((mask, 128, OURS), {}).get(f"{way}_tflops") for mask in ("packed", "causal")
        )
        least = PACKED * causal if causal else None
        table.append(
            {
                "goal": f"packed {way} d128",
                "least": least,
                "ours": packed,
                "met": packed >= least if packed and least else None,
            }
        )
    return table


def shape(
    mask: str, head_dim: int, seq: int, *, tokens: int = 32_768, width: int = 2048, group: int = 1
) -> Row:
    """Returns a shape to time. mask: causal, full, window or packed; tokens: in all; width: heads x
    head dim; group: heads per kv head."""
    heads = width // head_dim
    return {
        "mask": mask,
        "head_dim": head_dim,
        "seq": seq,
        "batch": tokens // seq,
        "heads": heads,
        "kv_heads": heads // group,
    }


HEADLINE = [shape("causal", 128, 16_384), shape("full", 128, 16_384)]
SHAPES = [
    shape("packed", 128, 16_384), shape("window", 128, 16_384),
    shape("causal", 128, 16_384, group=8),
    shape("causal", 128, 4096), shape("causal", 64, 16_384), shape("causal", 256, 16_384),
    shape("causal", 128, 1024),
    shape("full", 64, 16_384), shape("full", 256, 16_384), shape("full", 128, 4096),
    shape("causal", 128, 32_768),
    shape("causal", 64, 4096), shape("causal", 256, 4096), shape("causal", 128, 8192),
    shape("causal", 128, 2048),
    shape("causal", 64, 1024), shape("causal", 256, 1024), shape("full", 128, 1024),
    shape("packed", 128, 4096),
    shape("full", 128, 32_768), shape("full", 128, 8192), shape("full", 64, 4096),
    shape("full", 256, 4096),
    shape("causal", 64, 32_768), shape("causal", 256, 32_768), shape("full", 128, 2048),
]  # fmt: skip
"""The most important first."""
CHANGED = [
    shape("causal", 64, 2048), shape("causal", 128, 2048), shape("full", 64, 2048),
    shape("causal", 64, 16_384), shape("full", 64, 16_384),
    shape("causal", 64, 1024), shape("full", 128, 2048),
]  # fmt: skip
TINY_SHAPES = [
    shape(mask, 64, 128, tokens=128, width=128, group=group)
    for mask, group in (("causal", 1), ("packed", 2))
]
CASES_TINY = ("head dim 64",)
"""The cases of attention_cases.py in a dry run."""
