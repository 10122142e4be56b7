"""Writes docs/configs.md from the results of plan_table.py, so that no figure is written by
hand."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from sharding_rules.lab.targets import TARGETS

ROOT = Path(__file__).resolve().parents[1]
PAGE, CHART = ROOT / "docs" / "configs.md", ROOT / "docs" / "images" / "configs.png"
CONFIGS, FSDP, DEVICES, DEPTH = "Configs", "FSDP", "Devices", "Depth"
NOTES = {
    CONFIGS: (
        "Each config at its published number of H100s. step_s, exposed_s: predicted, never "
        "measured, at the optimistic rates; sustained_step_s at the sustained ones. own_ratio: "
        "step_s over the time of the model's FLOPs at the speeds of the program's own kernels; "
        "model_ratio: by the definition of main 3f09f97."
    ),
    FSDP: (
        "The configs with stages, with FSDP instead, on the same number of H100s: no stages, few "
        "microbatches, and remat=full."
    ),
    DEVICES: (
        "gpt_175b with the same work per device; at 64 there are no replicas, so nothing is "
        "sharded over them."
    ),
    DEPTH: "gpt_175b on 1,024 H100s with more layers: 2, 3 and 4 in each of its 48 chunks.",
}
"""Table -> the description of its rows."""
TFLOPS = {
    "megatron_1_7b": 408.8, "megatron_7_1b": 465.9, "megatron_16b": 489.1, "megatron_32b": 459.6,
    "megatron_70b": 419.7,
    "megatron_119b": 420.5, "megatron_177b": 432.8, "megatron_314b": 474.4, "megatron_462b": 459.9,
}  # fmt: skip
"""Measured TFLOP/s per H100 by NVIDIA/Megatron-LM, images/model_table.png at commit d98e8a64dd.
Ours are predictions: no race is won."""
AXES = (
    "data",
    "data+sequence",
    "data+expert",
    "pipeline+data",
    "pipeline",
    "fsdp",
    "fsdp+tensor",
    "expert",
    "sequence",
    "tensor",
)

_PAGE = """\
# Every config, as XLA compiles it

This page lists what one training step of each file in `configs/` needs on H100s, at the number of devices for which the
model is published: Megatron-LM's nine models, Llama 3's, GPT-3 and GPT-2. Two [mixtures of experts](experts.md) are on
as many as we chose. Each is on the mesh that is predicted to be the fastest of those tried, at the optimistic rates.
The step of `train.py` was compiled without GPUs, as `mesh-lm plan` does; nothing was measured on one. `gpt_tiny` and
`gpt_tiny_moe` are for CPUs, and are left out.

`python benchmarks/plan_table.py` compiles them all and writes this page: on {date} with jax {jax}, from [these raw
results](../benchmarks/results/{source}).

![Memory at the peak by class, and bytes sent by mesh axis, of every config](images/configs.png)

With pipeline stages, *other* is mostly the residuals of microbatches that wait for their backward passes.

## The runs

{runs}

- *remat* applies to the number of layers in the column *of*; the other layers use the lighter policy.
- *kept* is the number of layers that keep the weights that they have gathered until their backward passes
  ([`zero3`](sharding.md#layers-that-gather-their-own-weights)).
- Pipelines run interleaved 1F1B with *chunks* chunks of layers on each stage, and keep what *stash* says
  ([pipelines](pipeline.md)). The *bubble* is a stage's idle time divided by its work.

## What a step needs of each GPU

- *peak* is the memory that a GPU needs; its share is that of the {usable:.1f} GiB that a run may take of an H100. The
  rest is for CUDA and NCCL. A config fits if 1.05 times its peak does.
- A column for each mesh axis has the GiB that a GPU sends along it in a step. `expert`, `sequence` and `tensor` are
  NVLink; two axes, as in `pipeline+data`, are groups over both. *x the least* is the sum divided by the minimum that
  the strategy must send ([closed forms](closed_forms.md)). With stages, each collective counts on the stage that runs
  it most.
- *FLOPs x the model's* are those of the program's matmuls. `remat=full` repeats each layer's forward pass except for
  its last matmul, and the attention kernel's backward pass makes five matmuls where the formula counts four.

{needs}

{verdict}

## How long a step takes

- The time of a step is predicted, never measured: use it to compare configs. *step* is a band, from the optimistic
  rates to the sustained ones ([rates and bands](lab.md#rates-and-bands)). *MFU* is the model's own FLOPs over what the
  tensor cores could do in that time by the data sheet (989.4 TFLOP/s in bf16), from the slow end of the step to the
  fast one.
- *exposed* is the share of the step during which compute waits for the network, at the optimistic rates.
- *ratio* is the fast end of the step over the time that the model's own FLOPs would take at the speeds of this
  program's matmuls and attention: what is above 1 is recomputation, bubbles, memory traffic and waiting.
- To compare with predictions of main 3f09f97 and before: they were made at the optimistic rates, as the fast ends of
  *step* and *MFU* and *exposed* are here. Their ratio had another definition, the step over the time of the model's
  FLOPs at the rates of large matmuls and long attention: that is *ratio, 3f09f97*.
- *TFLOP/s* is the rate of a GPU by Megatron-LM's formula, at the fast end, and *published* the rate that NVIDIA
  measured for that model and number of GPUs. Do not compare the two: a prediction leaves out much of what a cluster
  does.
- *flags* is the set of XLA flags of the config's runs.

{times}

## Stages or FSDP

This table compares the configs with stages to the same model with FSDP instead (no stages, few microbatches,
`remat=full`) on the same number of H100s: FSDP -> stages. The *step* is a band, as above.

{fsdp}

{fsdp_said}

## How long a plan takes

{costs_said}
"""


def newest() -> Path:
    """Returns the latest day's results. Raises FileNotFoundError if there are none, ValueError if
    two machines have some of that day."""
    dated: dict[str, list[Path]] = {}
    for path in sorted((ROOT / "benchmarks" / "results").glob("plan_table_*.json")):
        if match := re.match(r"plan_table_(\d{4}-\d\d-\d\d)_", path.name):
            dated.setdefault(match[1], []).append(path)
    if not dated:
        raise FileNotFoundError(
            "no benchmarks/results/plan_table_*.json; run: python benchmarks/plan_table.py"
        )
    paths = dated[max(dated)]
    if len(paths) > 1:  # a checkout has no modification times that would show the newer one
        raise ValueError(
            f"results of one day: {', '.join(path.name for path in paths)}; keep only those for "
            "the page"
        )
    return paths[0]


def page(data: dict[str, Any], source: str) -> str:
    """Returns the page. source: the results' file name."""
    rows = {title: table["rows"] for title, table in data["tables"].items()}
    configs = rows[CONFIGS]
    return _PAGE.format(
        source=source, date=data["date"], jax=data["versions"]["jax"],
        usable=configs[0]["usable_gib"], runs=_runs(configs),
        needs=_needs(configs), times=_times(configs), verdict=_verdict(configs), fsdp=_fsdp(configs, rows[FSDP]),
        fsdp_said=_fsdp_said(configs, rows[FSDP]),
        costs_said=_costs_said(configs, rows[DEVICES], rows[DEPTH], data["machine"]),
    )  # fmt: skip


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Returns a Markdown table; a column whose head starts with > is aligned to the right."""
    rule = ["---:" if name.startswith(">") else "---" for name in head]
    return "\n".join(
        "| " + " | ".join(row) + " |" for row in [[name.lstrip(">") for name in head], rule, *rows]
    )


def billions(n: int) -> str:
    """Returns the number in billions, as in 174.59 B; below one in millions."""
    return f"{n / 1e9:.2f} B" if n >= 1e9 else f"{n / 1e6:.1f} M"


def seconds(n: float) -> str:
    return f"{n:.0f}" if n >= 99.5 else f"{n:.1f}" if n >= 9.95 else f"{n:.2f}"


def step_words(row: dict[str, Any]) -> str:
    """Returns the seconds of a predicted step from the fast to the slow end, as in 6.24 to 7.02;
    the fast end alone of a row that was compiled before there were bands."""
    fast = seconds(row["step_s"])
    slow = seconds(slow_step(row))
    return fast if fast == slow else f"{fast} to {slow}"


def slow_step(row: dict[str, Any]) -> float:
    """Returns the seconds of a step at the sustained rates, or else at the optimistic ones."""
    return row.get("sustained_step_s", row["step_s"])


def _gib(n: float | None) -> str:
    return "" if n is None else f"{n:.1f}" if n >= 9.95 else f"{n:.2f}"


def _runs(rows: Sequence[dict[str, Any]]) -> str:
    head = [
        "config",
        ">parameters",
        ">GPUs",
        "mesh",
        "rules",
        ">batch",
        ">tokens",
        ">microbatches",
        "remat",
        ">of",
        ">kept",
        ">chunks",
        "stash",
        ">bubble",
    ]
    return table(head, ([
        f"`{r['name']}`", billions(r["parameters"]), f"{r['devices']:,}", r["mesh"], r["rules"],
        f"{r['global_batch']:,}",
        f"{r['seq_len']:,}", str(r["microbatches"]), r["remat"],
        f"{r['remat_layers'] or r['layers']} of {r['layers']}",
        str(r["kept_layers"] or ""),
        *([str(r["chunks"]), r["stash"], f"{100 * r['bubble']:.1f} %"] if "bubble" in r else [""] * 3),
    ] for r in rows))  # fmt: skip


def _needs(rows: Sequence[dict[str, Any]]) -> str:
    sent_over = [
        axes for axes in AXES if any(r.get(f"sent over {axes}, GiB") is not None for r in rows)
    ]
    head = [
        "config",
        ">peak, GiB",
        ">of usable",
        *(f">{axes}" for axes in sent_over),
        ">sent, GiB",
        ">x the least",
        ">FLOPs x the model's",
    ]
    return table(head, ([
        f"`{r['name']}`", _gib(r["peak_gib"]), f"{100 * r['peak_gib'] / r['usable_gib']:.0f} %",
        *(_gib(r.get(f"sent over {axes}, GiB")) for axes in sent_over), _gib(r["sent_gib"]),
        f"{r['sent_over_least']:.3f}" if r["sent_over_least"] else "no form",
        f"{r['flops_over_model']:.2f}",
    ] for r in rows))  # fmt: skip


def _times(rows: Sequence[dict[str, Any]]) -> str:
    head = [
        "config",
        ">step, s",
        ">MFU",
        ">exposed",
        ">ratio",
        ">ratio, 3f09f97",
        ">TFLOP/s",
        ">published",
        "flags",
    ]
    return table(head, ([
        f"`{r['name']}`", step_words(r), _mfu_words(r), f"{100 * r['exposed_s'] / r['step_s']:.0f} %",
        _ratio(r.get("own_ratio")), _ratio(r.get("model_ratio")),
        f"{r['megatron_tflops']:.0f}", f"{TFLOPS[r['name']]:.0f}" if r["name"] in TFLOPS else "",
        f"`{r['flags']}`",
    ] for r in rows))  # fmt: skip


def utilisation(row: dict[str, Any], step_s: float) -> float:
    """Predicted MFU, 0 to 1: the model's own FLOPs over what an H100's tensor cores could do in
    step_s seconds, by its data sheet."""
    return row["tflop"] / row["flops_over_model"] / step_s / (TARGETS["h100"].flops["bf16"] / 1e12)


def _mfu_words(row: dict[str, Any]) -> str:
    """Returns the MFU from the slow to the fast end of the step, as in 47 to 53 %."""
    slow = f"{100 * utilisation(row, slow_step(row)):.0f}"
    fast = f"{100 * utilisation(row, row['step_s']):.0f}"
    return f"{fast} %" if slow == fast else f"{slow} to {fast} %"


def _ratio(n: float | None) -> str:
    return "" if n is None else f"{n:.2f}"


def _verdict(rows: Sequence[dict[str, Any]]) -> str:
    """Returns a sentence: do all configs fit, and which send more than 5 % above the minimum?"""
    large = [f"`{r['name']}` needs {r['peak_gib']:.1f} GiB" for r in rows if not r["fits"]]
    over = [
        f"`{r['name']}` ({r['sent_over_least']:.2f})"
        for r in rows
        if (r["sent_over_least"] or 0) > 1.05
    ]
    fit = f"Not all fit: {', '.join(large)}." if large else f"All {len(rows)} fit."
    least = (
        f"More than 1.05 of the least, by design: {', '.join(over)}."
        if over
        else "None sends more than 1.05 of the least."
    )
    return textwrap.fill(
        f"{fit} Each that has a closed form sends what it says, within 1 %. {least}", 118
    )


_COMPARED = (
    ("peak_gib", _gib),
    ("sent_gib", _gib),
    ("flops_over_model", "{:.2f}".format),
)
_COMPARED_HEAD = [">peak, GiB", ">sent, GiB", ">FLOPs x the model's", ">step, s"]


def _compared(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    cells = [f"{say(old[key])} -> {say(new[key])}" for key, say in _COMPARED]
    return [*cells, f"{step_words(old)} -> {step_words(new)}"]


def _fsdp(rows: Sequence[dict[str, Any]], without: Sequence[dict[str, Any]]) -> str:
    """Returns a row for each config with stages: FSDP -> stages."""
    head = ["config", "by FSDP", "with stages", *_COMPARED_HEAD]
    return table(
        head,
        (
            [f"`{r['name']}`", other["mesh"], r["mesh"], *_compared(other, r)]
            for r, other in _pairs(rows, without)
        ),
    )


def _fsdp_said(rows: Sequence[dict[str, Any]], without: Sequence[dict[str, Any]]) -> str:
    """Returns a sentence: which steps are faster with stages at both ends of the band?"""
    slower = []
    for row, other in _pairs(rows, without):
        if row["step_s"] >= other["step_s"] or slow_step(row) >= slow_step(other):
            slower.append(f"`{row['name']}`")
    exceptions = f", except {', '.join(slower)}" if slower else ""
    return (
        f"A step is predicted to be faster with stages in each of them{exceptions}, at both ends "
        "of the band."
    )


def _pairs(
    rows: Sequence[dict[str, Any]], without: Sequence[dict[str, Any]]
) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    row_by_name = {r["name"].removesuffix(" by FSDP"): r for r in without}
    return [(r, row_by_name[r["name"]]) for r in rows if r["name"] in row_by_name]


def _costs_said(
    rows: Sequence[dict[str, Any]],
    devices: Sequence[dict[str, Any]],
    depth: Sequence[dict[str, Any]],
    machine: dict[str, Any],
) -> str:
    """Returns what a plan costs, and that neither devices nor layers make it much dearer."""
    cpu, memory = [r["cpu_s"] for r in rows], max(rows, key=lambda r: r["rss_gib"])
    kinds = " or ".join(sorted({row.get("cpu", machine["cpu"]) for row in rows}))
    few, many = devices[0], devices[-1]
    sizes = [r["text_bytes"] for r in depth]
    return textwrap.fill(
        f"On {machine['cores']} cores ({kinds}) a plan takes {seconds(min(cpu))} to "
        f"{seconds(max(cpu))} s of CPU time, over all threads, and at most {memory['rss_gib']:.2f} "
        f"GiB of memory (`{memory['name']}`). `{many['name'].split(',')[0]}` on "
        f"{many['devices']:,} devices takes {many['cpu_s'] / few['cpu_s']:.2f} times the CPU time "
        f"of {few['devices']} devices with the same work on each. From {depth[0]['layers']} to "
        f"{depth[-1]['layers']} layers its program grows by "
        f"{100 * (max(sizes) / min(sizes) - 1):.1f} %.",
        118,
    )
