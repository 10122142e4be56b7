"""docs/closed_forms.md: its tables are the closed forms."""

import dataclasses
import itertools
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from mesh_lm.config import load
from mesh_lm.training.check import check
from tests.sharding_rules.closed_forms import A2A, AG, AR, CP, RS, SYMBOLS, Decoder, Strategy, Term, by_axes, expected, expected_of, total

PAGE = (Path(__file__).parents[2] / "docs" / "closed_forms.md").read_text(encoding="utf-8")
SHORT = {AG: "AG", RS: "RS", AR: "AR", CP: "CP", A2A: "A2A"}
AXES = (("data",), ("fsdp",), ("fsdp", "tensor"), ("tensor",))
STAGED_AXES = (("data",), ("pipeline", "data"), ("pipeline",), *AXES[1:], ("data", "sequence"), ("sequence",))
CONTEXTS = ("context_gather", "ulysses", "ring", "usp")
REMATS = ("none", "save_names", "full")
PRESETS = (
    "ddp", "zero1", "zero2", "distributed", "zero3", "fsdp", "hsdp", "megatron", "megatron_sp", "zero1+megatron", "zero1+megatron_sp",
    "zero2+megatron_sp", "distributed+megatron_sp", "hsdp+megatron", "hsdp+megatron_sp", "zero1+hsdp+megatron_sp",
)  # fmt: skip
CONFIGS = {
    "gpt2_124m": 8, "gpt_1_3b": 8, "gpt_175b": 1024, "llama3_8b": 64, "llama3_8b_128k": 64, "llama3_70b": 1024, "llama3_405b": 16_384,
    "megatron_1_7b": 48, "megatron_7_1b": 96, "megatron_16b": 192, "megatron_32b": 384, "megatron_70b": 768, "megatron_119b": 1536,
    "megatron_177b": 2304, "megatron_314b": 3072, "megatron_462b": 6144,
}  # fmt: skip


def gpt(remat: str = "full") -> Decoder:
    return Decoder(
        layers=2, d_model=64, d_ff=256, heads=16, kv_heads=16, head_dim=4, vocab=128, seq=64, learned_positions=True, biases=True,
        norm_vectors=2, gated=False, tied=False, remat=remat, loss_chunk=32,
    )  # fmt: skip


def terms(preset: str, remat: str = "full") -> list[Term]:
    """Of an untied GPT with two rows, on a mesh that uses every axis that the preset cuts."""
    axes = [axis for axis in ("data", "fsdp", "tensor", "tensor_y") if _cuts(preset, axis)]
    return expected(gpt(remat), dataclasses.replace(Strategy(preset), **dict.fromkeys(axes, 4)), 2, 4)


def staged(preset: str, remat: str = "full", **how: Any) -> list[Term]:
    """The same on 2 stages besides."""
    axes = [axis for axis in ("data", "fsdp", "tensor") if _cuts(preset, axis)]
    return expected(gpt(remat), dataclasses.replace(Strategy(preset), **dict.fromkeys(axes, 4), pipeline=2, **how), 2, 4)


def _cuts(preset: str, axis: str) -> bool:
    try:
        return bool(dataclasses.replace(Strategy(preset), **{axis: 4}))
    except ValueError:
        return False


def table(head: list[str], rows: Iterable[list[str]]) -> str:
    return "\n".join("| " + " | ".join(row) + " |" for row in [head, ["---"] * len(head), *rows])


def symbol_table() -> str:
    return table(["symbol", "bytes", "type", "what"], ([f"`{name}`", *texts] for name, texts in SYMBOLS.items()))


def run_counts(group: Iterable[Term]) -> str:
    """As 2 AG X + RS X; over data, what a step runs for each layer with L before it, and for each microbatch with M."""
    often = {"row": "L ", "forward": "L M ", "backward": "L M ", "microbatch": "M "}
    counts: dict[str, int] = {}
    for t in group:
        name = f"{often.get(t.per, '') if 'data' in t.axes else ''}{SHORT[t.kind]} {t.size}"
        counts[name] = counts.get(name, 0) + t.count
    return " + ".join(f"{n if n > 1 else ''} {name}".strip() for name, n in counts.items())


def layer_table() -> str:
    """What a layer of a microbatch sends, then what the step sends once; presets and remats that agree in one line."""
    alike: dict[tuple[str, ...], dict[str, list[str]]] = {}
    for preset, remat in itertools.product(PRESETS, REMATS):
        found = terms(preset, remat)
        cells = tuple(
            run_counts(t for t in found if t.axes == axes and (t.per in ("forward", "backward") or axes == ("data",))) for axes in AXES
        )
        alike.setdefault(cells, {}).setdefault(preset, []).append(remat)
    rows = []
    for cells, presets in alike.items():
        remats = {tuple(r) for r in presets.values()}
        (remat,) = remats  # presets that agree, agree for the same remats
        rows.append([", ".join(f"`{p}`" for p in presets), "any" if remat == REMATS else ", ".join(remat), *cells])
    return table(["preset", "remat", "`data`, a step", "`fsdp`", "`fsdp` x `tensor`", "`tensor`"], rows)


def stage_table() -> str:
    """What a layer of a microbatch sends on a stage that keeps inputs, and on one that keeps residuals."""
    rows = []
    for preset, remat in itertools.product(("megatron", "megatron_sp", "hsdp"), REMATS):
        cells = [
            run_counts(t for t in staged(preset, remat, stash=stash) if t.part == "layer" and t.size in "XW" and t.kind != CP)
            for stash in ("input", "residuals")
        ]
        rows.append([f"`{preset}`", remat, *cells])
    return table(["preset", "remat", "stash=input", "stash=residuals"], rows)


def context_table() -> str:
    """What attention exchanges in a layer of a microbatch, over 4 shards of the sequence (usp: 2 x 2)."""
    rows = []
    for preset, remat in itertools.product(CONTEXTS, REMATS):
        shards = {"sequence": 2, "ulysses": 2} if preset == "usp" else {"sequence": 4}
        found = expected(gpt(remat), dataclasses.replace(Strategy(preset), **shards), 2, 4)
        of_layer = [t for t in found if t.part == "layer" and set(t.axes) & shards.keys()]
        rows.append([f"`{preset}`", remat, *(run_counts(t for t in of_layer if t.axes == (axis,)) for axis in ("sequence", "ulysses"))])
    return table(["preset", "remat", "`sequence`, of 4 (2)", "`ulysses`, of 2"], rows)


def term_table(preset: str, axis: str) -> str:
    """Each collective along an axis, with its reason."""
    times = {"forward": "L M", "backward": "L M", "microbatch": "M", "chunk": "M x chunks", "row": "L", "step": "1"}
    times |= {"forward tick": "F ticks", "backward tick": "B ticks"}
    rows = []
    for t in staged(preset) if axis == "pipeline" else terms(preset):
        if axis in t.axes:
            runs = f"{t.count} {times[t.per]}" if t.count > 1 else times[t.per]
            share = f"M V / {times[t.per]}" if t.part == "hop" else f"{t.needed:.3g}"
            least = "" if t.needed == 1 else f"; least: {share} of it ({t.excess})"
            rows.append([t.part, f"{SHORT[t.kind]} {t.dtype}", " x ".join(t.axes), t.size, runs, t.why + least])
    return table(["part", "kind", "over", "payload", "runs", "why"], rows)


def config_table() -> str:
    """GiB on the wire per device and step, and what of it the strategy could do without."""
    rows = []
    for name, devices in CONFIGS.items():
        config = check(load(f"configs/{name}.py"), devices)
        if config.pipeline.balance != "equal":
            continue  # stages of unequal layers have no closed form
        found, mesh = expected_of(config), config.mesh
        sent = {axes: f"{bytes / 2**30:.3f}" for axes, bytes in by_axes(found).items()}
        ratio = f"{total(found) / total(found, field='least_wire_bytes'):.3f}"
        chunks = f"V={config.pipeline.chunks}, {config.pipeline.stash}, " if mesh.pipeline > 1 else ""
        where = f"{mesh}, M={config.train.microbatches}, {chunks}{getattr(config.model, 'remat', '')}"
        rows.append([f"`{name}`", str(devices), where, *(sent.get(axes, "") for axes in STAGED_AXES), f"{total(found) / 2**30:.2f}", ratio])
    return table(["config", "devices", "mesh", *(" x ".join(axes) for axes in STAGED_AXES), "all", "all / least"], rows)


def reduction_table() -> str:
    """As `layer_table`, of one layer and the step, by the type in which gradients of matrices are summed."""
    rows = []
    for preset, reduction in itertools.product(("ddp", "zero2", "distributed", "zero3", "hsdp"), ("auto", "float32", "bfloat16")):
        axes = [axis for axis in ("data", "fsdp") if _cuts(preset, axis)]
        found = expected(gpt(), dataclasses.replace(Strategy(preset, reduction=reduction), **dict.fromkeys(axes, 4)), 2, 4)
        of_layer = ("forward", "backward")
        cells = (run_counts(t for t in found if t.axes == (axis,) and (axis == "data" or t.per in of_layer)) for axis in ("data", "fsdp"))
        rows.append([f"`{preset}`", reduction, *cells])
    return table(["preset", "reduction", "`data`, a step", "`fsdp`, a layer"], rows)


def reduced_config_table() -> str:
    """GiB on the wire per device and step over data and over fsdp, by the same."""
    rows = []
    for name in ("gpt_1_3b", "llama3_8b", "llama3_70b"):
        config = check(load(f"configs/{name}.py"), CONFIGS[name])
        asked = [dataclasses.replace(config, rules=config.rules.replace(config.rules.name, reduction=r)) for r in ("float32", "bfloat16")]
        sent = [by_axes(expected_of(each)) for each in (config, *asked)]
        cells = [[f"{bytes[axis,] / 2**30:.3f}" if (axis,) in bytes else "" for bytes in sent] for axis in ("data", "fsdp")]
        rows.append([f"`{name}`", *itertools.chain(*cells)])
    return table(["config", *(f"{axis}, {r}" for axis in ("data", "fsdp") for r in ("auto", "float32", "bfloat16"))], rows)


@pytest.mark.parametrize(
    "render", [symbol_table, layer_table, stage_table, context_table, config_table, reduction_table, reduced_config_table]
)
def test_tables_are_the_forms(render) -> None:
    assert render() in PAGE, f"docs/closed_forms.md must have this table:\n{render()}"


@pytest.mark.parametrize(
    ("preset", "axis"),
    [
        ("hsdp", "fsdp"),
        ("megatron_sp", "tensor"),
        ("megatron", "tensor"),
        ("megatron_2d", "tensor"),
        ("megatron_2d", "tensor_y"),
        ("ddp", "data"),
        ("zero1", "data"),
        ("zero2", "data"),
        ("distributed", "data"),
        ("zero3", "data"),
        ("ddp", "pipeline"),
        ("zero2+megatron_sp", "pipeline"),
        ("distributed+megatron_sp", "pipeline"),
    ],
)
def test_each_collective_is_on_the_page(preset: str, axis: str) -> None:
    assert term_table(preset, axis) in PAGE, f"docs/closed_forms.md must have this table:\n{term_table(preset, axis)}"
