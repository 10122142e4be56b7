"""A handmade report of a model like gpt_175b, for tests of the renderers of reports."""

from __future__ import annotations

from typing import Any

from mesh_lm.planning.vocabulary import VOCABULARY
from sharding_rules.lab.report import (
    Argument,
    Buffer,
    Collective,
    Location,
    Memory,
    Report,
    Span,
    Timeline,
)

GIB, MIB = 2**30, 2**20
LAYERS, MICROBATCHES = 96, 4


def collective(
    kind: str, axes: tuple[str, ...], shape: str, payload: int, part: str, phase: Any, **other: Any
) -> Collective:
    """Over 8 devices of one node, beside matmuls, once a layer, a ms each, with 250 µs in a step
    exposed, unless `other` says so."""
    group = {"tensor": 8, "fsdp": 16, "data": 8}[axes[0]] if axes else 1
    ways = {"all-reduce": 2.0, "collective-permute": group / (group - 1)}.get(kind, 1.0)
    values = {
        "name": f"{kind}.7", "kind": kind, "axes": axes, "group": group,
        "nodes": 1 if axes == ("tensor",) else group,
        "shapes": (shape,), "dtype": shape.split("[")[0], "payload": payload,
        "wire": ways * payload * (group - 1) / group,
        "loops": (MICROBATCHES, LAYERS), "conditional": False,
        "where": Location(part, phase, "mesh_lm/model/layers.py:107", "dot_general"),
        "asynchronous": True, "flops_hidden_behind": 10**12,
        "duration": 1000.0, "exposed": 250.0,
    }  # fmt: skip
    return Collective(**{**values, **other})


def report(**changes: Any) -> Report:
    """1,024 H100s, data 8 x fsdp 16 x tensor 8."""
    found = []
    for part, weight in (("attention", 108), ("mlp", 144)):
        for phase in ("forward", "recompute", "backward"):
            found.append(
                collective(
                    "all-gather",
                    ("tensor",),
                    "bf16[2,2048,12288]",
                    96 * MIB,
                    f"layers/{part}",
                    phase,
                )
            )
            found.append(
                collective(
                    "all-gather",
                    ("fsdp",),
                    f"bf16[12288,{weight * 16}]",
                    weight * MIB // 2,
                    f"layers/{part}",
                    phase,
                )
            )
            if phase != "recompute":
                found.append(
                    collective(
                        "reduce-scatter",
                        ("tensor",),
                        "bf16[2,2048,12288]",
                        96 * MIB,
                        f"layers/{part}",
                        phase,
                        flops_hidden_behind=0,
                    )
                )
        found.append(
            collective(
                "reduce-scatter",
                ("fsdp",),
                f"bf16[12288,{weight * 16}]",
                weight * MIB // 2,
                f"layers/{part}",
                "backward",
            )
        )
    found.append(
        collective(
            "all-reduce",
            ("data",),
            "f32[96,12288,576]",
            5 * GIB,
            "optimizer",
            "optimizer",
            loops=(),
        )
    )
    found.append(
        collective("all-reduce", ("data",), "f32[]", 4, "optimizer", "optimizer", loops=())
    )
    found.append(
        collective(
            "all-gather",
            ("tensor",),
            "f32[2,2048,50304]",
            393 * MIB,
            "loss",
            "forward",
            loops=(MICROBATCHES,),
        )
    )
    buffers = [
        Buffer(
            "state['params']['blocks.mlp.up.weight']",
            "params",
            "f32[96,768,6144]",
            int(1.69 * GIB),
            Location(),
            ("fsdp", "tensor"),
        ),
        Buffer(
            "state['mu']['blocks.mlp.up.weight']",
            "moments",
            "f32[96,768,6144]",
            int(1.69 * GIB),
            Location(),
            ("fsdp", "tensor"),
        ),
        Buffer(
            "state['nu']['blocks.mlp.up.weight']",
            "moments",
            "f32[96,768,6144]",
            int(1.69 * GIB),
            Location(),
            ("fsdp", "tensor"),
        ),
        Buffer(
            "fusion.1",
            "activations",
            "bf16[96,2,256,12288]",
            int(1.125 * GIB),
            Location("layers", "forward", "mesh_lm/model/decoder.py:88"),
        ),
        Buffer(
            "fusion.2",
            "weights in use",
            "bf16[12288,6144]",
            144 * MIB,
            Location("layers/mlp", "recompute", "mesh_lm/model/layers.py:107"),
        ),
        Buffer(
            "fusion.3",
            "weights in use",
            "bf16[12288,6144]",
            144 * MIB,
            Location("layers/mlp", "recompute", "mesh_lm/model/layers.py:107"),
        ),
        Buffer(
            "fusion.4",
            "logits",
            "f32[2,2048,6288]",
            98 * MIB,
            Location("loss", "forward", "mesh_lm/model/loss.py:31"),
        ),
        Buffer(
            "fusion.5",
            "gradients",
            "f32[96,768,6144]",
            int(1.69 * GIB),
            Location("layers/mlp", "backward"),
        ),
        Buffer("", "fragmentation", "", 37 * MIB, Location()),
    ]
    arguments = tuple(
        Argument(b.name, b.kind, (96, 12288, 49152), "f32", b.bytes, b.axes)
        for b in buffers
        if b.axes is not None
    )
    values: dict[str, Any] = {
        "name": "gpt_175b", "target": "h100", "hbm": 84_978_434_048,
        "mesh": {"data": 8, "fsdp": 16, "tensor": 8},
        "axis_nodes": {"data": 8, "fsdp": 16, "tensor": 1}, "collectives": tuple(found),
        "memory": Memory(6 * GIB, 0, 4 * GIB, sum(b.bytes for b in buffers), tuple(buffers)),
        "arguments": arguments,
        "flops": {"forward": 85_000 * 10**9, "recompute": 80_000 * 10**9, "backward": 170_000 * 10**9},
        "kernels": (), "warnings": (), "timeline": timeline(), "sustained": sustained(), "instructions": 9_876,
        "text_bytes": 2_345_678, "compile_seconds": 14.7,
        "versions": {"jax": "0.10.2", "jaxlib": "0.10.2"}, "options": {}, "vocabulary": VOCABULARY,
        "model_flops": 250e12,
        "peak_flops": 989.4e12,
    }  # fmt: skip
    return Report(**{**values, **changes})


def sustained() -> Timeline:
    """Half as slow again, waiting for all-gathers inside a node."""
    line = timeline()
    return Timeline(1.5 * line.step, line.compute, 0, 0, (), waits={"all-gather.7": line.step / 2})


def timeline() -> Timeline:
    """A layer forward and one backward, each part of which waits a quarter of its time for a
    gather; once in a step the optimizer."""
    spans, now = [], 0.0
    layer = (MICROBATCHES, LAYERS)
    work = [("embed", "forward", (MICROBATCHES,), 300.0)]
    work += [
        (f"layers/{part}", "forward", layer, us)
        for part, us in (("attention", 1500.0), ("mlp", 2400.0))
    ]
    work += [
        ("loss", "forward", (MICROBATCHES,), 900.0),
        ("loss", "backward", (MICROBATCHES,), 1800.0),
    ]
    work += [
        (f"layers/{part}", "recompute", layer, us)
        for part, us in (("attention", 1500.0), ("mlp", 2400.0))
    ]
    work += [
        (f"layers/{part}", "backward", layer, us)
        for part, us in (("mlp", 4800.0), ("attention", 3000.0))
    ]
    work += [("optimizer", "optimizer", (), 9000.0)]
    for i, (part, phase, loops, us) in enumerate(work):
        where = Location(part, phase)  # pyright: ignore[reportArgumentType]
        first = 0
        if "layers" in part:
            spans.append(
                Span(f"all-gather-start.{i}", "network", "all-gather", now, us / 4, loops, where)
            )
            first = 1
        for quarter in range(first, 4):
            kind = "elementwise" if quarter == 3 or part == "optimizer" else "matmul"
            spans.append(
                Span(
                    f"fusion.{i}{quarter}",
                    "compute",
                    kind,
                    now + quarter * us / 4,
                    us / 4,
                    loops,
                    where,
                )
            )
        now += us
    layers = 15_600.0 * LAYERS * MICROBATCHES
    step = layers + 3_000.0 * MICROBATCHES + 9_000.0
    return Timeline(step, step - layers / 4, layers / 4, layers / 4, tuple(spans))
