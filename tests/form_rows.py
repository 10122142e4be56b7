"""Combinations of features of small decoders, whose compiled steps send exactly what the closed
forms say.

`FACTORS` are the features, and `rows` the first rows of a covering array of them: those in which
the most pairs of values of two features meet, among combinations that can run and have a form.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import covering
from covering import Constraint, Row

from mesh_lm.config import PipelineConfig, TrainConfig, TrainLoop
from mesh_lm.errors import ConfigError
from mesh_lm.model import DecoderConfig
from mesh_lm.planning.closed_forms.config import expected_of
from mesh_lm.planning.closed_forms.subjects import NoFormError
from mesh_lm.planning.closed_forms.terms import by_axes
from mesh_lm.planning.program import compile_config
from mesh_lm.training.check import check
from sharding_rules import MeshConfig, ShardingRuleError, preset
from sharding_rules.lab.flags import options
from sharding_rules.lab.report import SCALAR, Report

N_ROWS = 30
FACTORS: dict[str, tuple[Any, ...]] = {
    "replicas": ("ddp", "zero1", "zero2", "distributed", "zero3", "fsdp", "hsdp", "by_node"),
    "tensor": ("", "megatron", "megatron_sp", "megatron_2d"),
    "context": ("", "context_gather", "ulysses", "ring", "usp"),
    "schedule": ("", "1f1b", "gpipe"),
    "chunks": (1, 2),
    "stash": ("input", "residuals"),
    "model": ("gpt", "llama"),
    "remat": ("none", "save_names", "save_attention", "full"),
    "remat_layers": ("all", "half"),
    "reduction": ("auto", "float32", "bfloat16", "int8"),
    "sequences": (1, 2),
    "microbatches": (1, 4),
    "window": ((), (384, 0)),
}
_CONSTRAINTS: tuple[Constraint, ...] = (
    (("schedule", "chunks"), lambda schedule, chunks: schedule == "1f1b" or chunks == 1),
    (("schedule", "stash"), lambda schedule, stash: bool(schedule) or stash == "input"),
    (("schedule", "microbatches"), lambda schedule, n: not schedule or n == 4),
    (("schedule", "remat_layers"), lambda schedule, layers: not schedule or layers == "all"),
    (("remat", "remat_layers"), lambda remat, layers: remat != "none" or layers == "all"),
    (
        ("chunks", "window"),
        lambda chunks, window: chunks == 1 or not window,
    ),
)

GPT = DecoderConfig(
    vocab_size=8000,
    seq_len=1024,
    n_layers=4,
    d_model=1024,
    n_heads=16,
    vocab_multiple=1024,
    attention="xla",
)
"""Dimensions that XLA does not take for others, and that each mesh divides."""
LLAMA = dataclasses.replace(
    GPT,
    n_kv_heads=4,
    d_ff=3072,
    positions="rotary",
    norm="rmsnorm",
    activation="swiglu",
    biases=False,
    tied=False,
)


def rows() -> list[Row]:
    """Returns the rows, the same in every process."""
    fitting, _ = covering.array(FACTORS, _CONSTRAINTS)
    return [row for row in fitting if _has_form(row)][:N_ROWS]


def name(row: Row) -> str:
    """Returns the values that are not the first ones of their features."""
    values = [f"{key}={row[key]}" for key in FACTORS if row[key] != FACTORS[key][0]]
    return " ".join(values) or "ddp"


def config_of(row: Row) -> TrainConfig:
    """Returns the config of a row. Raises ShardingRuleError for presets that contradict."""
    # At least two passes through each loop over layers: XLA inlines a loop of one, and then finds
    # some of what is recomputed equal to what is there.
    n_layers = 8 if row["window"] or (row["schedule"] and row["chunks"] > 1) else 4
    model = dataclasses.replace(
        {"gpt": GPT, "llama": LLAMA}[row["model"]],
        n_layers=n_layers,
        remat=row["remat"],
        remat_layers=n_layers // 2 if row["remat_layers"] == "half" else None,
        window=row["window"],
    )
    words = [row["replicas"], row["tensor"], row["context"], f"reduce_{row['reduction']}"]
    rules = "+".join(word for word in words if word and word != "reduce_auto")
    mesh = _mesh(row)
    sizes = mesh.sizes()
    shards = math.prod(sizes.get(axis, 1) for axis in ("data", "fsdp", "node"))
    batch = row["sequences"] * row["microbatches"] * shards
    pipeline = PipelineConfig(
        schedule=row["schedule"] or "1f1b", chunks=row["chunks"], stash=row["stash"]
    )
    return TrainConfig(
        model=model,
        output=name(row),
        mesh=mesh,
        rules=preset(rules),
        train=TrainLoop(global_batch=batch, microbatches=row["microbatches"]),
        pipeline=pipeline,
    )


def _mesh(row: Row) -> MeshConfig:
    """Returns a mesh with two devices along each axis that the row uses, and with four along
    sequence where that is the only axis of the context, so that rings have several hops."""
    axes = {"data": 2}
    if row["replicas"] in ("fsdp", "hsdp"):
        axes["fsdp"] = 2
    if row["replicas"] == "fsdp":
        axes["data"] = 1
    if row["tensor"]:
        axes["tensor"] = 2
    if row["context"]:
        axes["sequence"] = 2 if row["context"] == "usp" else 4
    if row["schedule"]:
        axes["pipeline"] = 2
    extra = {"megatron_2d": "tensor_y=2", "usp": "ulysses=2", "by_node": "node=2"}
    words = tuple(extra[value] for value in row.values() if value in extra)
    return MeshConfig(**axes, extra=words)


def _has_form(row: Row) -> bool:
    try:
        config = config_of(row)
        n_devices = math.prod(config.mesh.sizes().values())
        expected_of(check(config, n_devices))
    except (ConfigError, ShardingRuleError, NoFormError):
        return False
    return True


def compiled(config: TrainConfig, cache: str) -> Report:
    """Returns the report of the step for as many H100s as the mesh has.

    cache: a directory for XLA's compilation cache.
    """
    launch = dataclasses.replace(config.launch, compile_cache=cache)
    flags = options("pipeline") if config.mesh.pipeline > 1 else None
    n_devices = math.prod(config.mesh.sizes().values())
    return compile_config(dataclasses.replace(config, launch=launch), "h100", n_devices, flags)


def differences(config: TrainConfig, report: Report) -> dict[str, tuple[float, float]]:
    """Returns mesh axes -> (bytes of the program, bytes of the forms), where they differ by more
    than scalars."""
    # The order of extra axes in a mesh is the user's.
    expected = {frozenset(axes): n for axes, n in by_axes(expected_of(config)).items()}
    found = {}
    groups = expected.keys() | {frozenset(one.axes) for one in report.collectives}
    for axes in sorted(groups, key=sorted):
        sent = report.wire_bytes(axes)
        on_paper = expected.get(axes, 0.0)
        if abs(sent - on_paper) > SCALAR:
            found["+".join(sorted(axes))] = (sent, on_paper)
    return found
