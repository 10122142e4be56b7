"""The strategies of multi_gpu.py, as data: every preset and product on every mesh of a number of
devices, and pipeline schedules."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator
from typing import Any

from sharding_rules import AXES

COUNTS = (2, 4, 8)
"""Numbers of devices over which the models here can be sharded."""

RULES: tuple[tuple[str, str, str], ...] = (
    ("ddp", "data", ""),
    ("zero1", "data", ""),
    ("zero2", "data", ""),
    ("distributed", "data", ""),
    ("zero3", "data", ""),
    ("fsdp", "fsdp", ""),
    ("hsdp", "data fsdp", ""),
    ("megatron", "tensor", "data"),
    ("megatron_sp", "tensor", "data"),
    ("megatron_2d", "tensor tensor_y", "data"),
    ("zero1+fsdp+megatron_2d", "fsdp tensor tensor_y", ""),
    ("zero1+fsdp", "data fsdp", ""),
    ("zero1+megatron", "data tensor", ""),
    ("zero1+megatron_sp", "data tensor", ""),
    ("zero2+megatron", "data tensor", ""),
    ("zero2+megatron_sp", "data tensor", ""),
    ("distributed+megatron_sp", "data tensor", ""),
    ("fsdp+megatron", "fsdp tensor", ""),
    ("fsdp+megatron_sp", "fsdp tensor", ""),
    ("hsdp+megatron", "data fsdp tensor", ""),
    ("hsdp+megatron_sp", "data fsdp tensor", ""),
    ("zero1+fsdp+megatron_sp", "data fsdp tensor", ""),
    ("context_gather", "sequence", "data"),
    ("ulysses", "sequence", "data"),
    ("ring", "sequence", "data"),
    ("usp", "sequence ulysses", ""),
    ("zero3+ring", "data sequence", ""),
    ("by_node", "data node", ""),
    ("distributed+by_node", "data node", ""),
    ("ddp+reduce_int8", "data", ""),
    ("distributed+reduce_int8", "data", ""),
    ("diloco", "island", "data"),
    ("diloco+fsdp+megatron_sp", "island fsdp tensor", ""),
)
"""(rules, the axes that must be larger than 1 for them to deserve their name, an axis that may
be)."""

PIPELINES: tuple[tuple[str, int, dict[str, int], dict[str, Any]], ...] = (
    ("ddp", 2, {"data": -1}, {}),
    ("ddp", 2, {"data": -1}, {"chunks": 2}),
    ("ddp", 2, {"data": -1}, {"schedule": "gpipe"}),
    ("ddp", 2, {"data": -1}, {"balance": "flops"}),
    ("ddp", 2, {"data": -1}, {"stash": "residuals"}),
    ("ddp", 2, {"data": -1}, {"stash": "residuals", "pair_layers": True}),
    ("megatron_sp", 2, {"tensor": -1}, {"chunks": 2, "stash": "residuals"}),
    ("megatron_sp", 2, {"tensor": -1}, {"chunks": 2, "stash": "residuals", "pair_layers": True}),
    ("ddp", 4, {"data": -1}, {}),
    ("ddp", 4, {"data": -1}, {"chunks": 2}),
    ("ddp", 8, {"data": -1}, {}),
    ("zero1", 2, {"data": -1}, {"chunks": 2}),
    ("fsdp", 2, {"fsdp": -1}, {}),
    ("hsdp", 2, {"data": 2, "fsdp": -1}, {"chunks": 2}),
    ("megatron", 2, {"tensor": -1}, {"chunks": 2}),
    ("megatron_sp", 2, {"tensor": -1}, {}),
    ("megatron_sp", 4, {"tensor": -1}, {"schedule": "gpipe"}),
    ("zero1+megatron_sp", 2, {"data": 2, "tensor": -1}, {"chunks": 2}),
    ("distributed", 2, {"data": -1}, {"chunks": 2}),
    ("zero3", 2, {"data": -1}, {"chunks": 2}),
    ("fsdp+megatron_sp", 2, {"fsdp": 2, "tensor": -1}, {"chunks": 2}),
)
"""(rules, stages, the mesh within a stage (-1: the remaining devices), fields of
PipelineConfig)."""

MAIN = {
    "ddp",
    "zero1",
    "distributed",
    "fsdp",
    "hsdp",
    "megatron",
    "megatron_sp",
    "hsdp+megatron_sp",
}
MAIN_PIPELINES = (
    ("ddp", {}), ("ddp", {"chunks": 2}), ("ddp", {"schedule": "gpipe"}),
    ("fsdp+megatron_sp", {"chunks": 2}),
    ("megatron_sp", {"chunks": 2, "stash": "residuals"}),
    ("megatron_sp", {"chunks": 2, "stash": "residuals", "pair_layers": True}),
)  # fmt: skip
"""The strategies that are timed, each on the first mesh that fits. The last two tell whether
pipeline.pair_layers pays."""
LOOP = {"unroll": False, "kept_layers": 0}
"""Fields of the model with which XLA compiles one body of a loop over layers."""
SETTINGS: tuple[tuple[str, str, tuple[dict[str, Any], ...]], ...] = (
    (
        "zero3",
        "data",
        (
            LOOP,
            {"unroll": False, "kept_layers": -1},
            {"unroll": True},
            {"unroll": True, "kept_layers": -1},
        ),
    ),
    ("fsdp", "fsdp", (LOOP, {"unroll": True})),
    ("megatron_sp", "tensor", (LOOP, {"unroll": True}, {**LOOP, "batch_halves": True})),
    ("ddp", "data", (LOOP, {"unroll": True})),
)
"""(rules, their axis, fields of the model; -1: the number of layers). The first of each is what the
others are compared with."""
QUICK = {"ddp", "hsdp+megatron_sp"}
"""The strategies of a quick run, in addition to pipelines with non-default fields."""


@dataclasses.dataclass(frozen=True)
class Strategy:
    """One way to train on all devices."""

    rules: str
    mesh: dict[str, int]
    """The axes larger than 1."""
    pipeline: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Fields of PipelineConfig."""
    main: bool = False
    """Whether it is timed."""

    @property
    def stages(self) -> int:
        return self.mesh.get("pipeline", 1)

    @property
    def quick(self) -> bool:
        return self.main and (bool(self.pipeline) if self.stages > 1 else self.rules in QUICK)

    @property
    def flags(self) -> dict[str, bool]:
        """What train.py chooses XLA's flags by, as `gpu.set_flags` takes it."""
        return {"pipeline": self.stages > 1, "pairs": bool(self.pipeline.get("pair_layers"))}

    @property
    def columns(self) -> dict[str, str]:
        """Returns its name, in the columns of every table."""
        fields = [f"{name}={value}" for name, value in self.pipeline.items() if name != "schedule"]
        return {
            "rules": self.rules,
            "mesh": " x ".join(f"{axis}={size}" for axis, size in self.mesh.items()) or "1 device",
            "pipeline": " ".join([self.pipeline.get("schedule", "1f1b"), *fields])
            if self.stages > 1
            else "",
        }

    def variant(
        self, microbatches: int, fields: dict[str, Any] | None = None, **columns: Any
    ) -> dict[str, Any]:
        """Returns the variant for a task of multi_gpu_worker.py. fields: those of the model that
        are its own."""
        extra = tuple(f"{axis}={size}" for axis, size in self.mesh.items() if axis not in AXES)
        mesh = {
            "data": 1,
            **{axis: size for axis, size in self.mesh.items() if axis in AXES},
            **({"extra": extra} if extra else {}),
        }
        changes = {"mesh": mesh, "train": {"microbatches": microbatches}, "pipeline": self.pipeline}
        changes |= {"diloco": {"outer_steps": 1}} if "island" in mesh else {}
        changes |= {"model": fields} if fields else {}
        return {**self.columns, **columns, "flags": self.flags, "changes": changes}


ONE = Strategy("ddp", {})
"""Returns the reference: one device."""


def strategies(n: int) -> list[Strategy]:
    """Returns all strategies that fit n devices, each with a different name."""
    plain = [
        Strategy(rules, mesh)
        for rules, own_axes, free in RULES
        for mesh in _meshes(n, own_axes, free)
    ]
    staged = [
        Strategy(rules, mesh, fields)
        for rules, P, sizes, fields in PIPELINES
        if (mesh := _filled(n, P, sizes))
    ]
    first: dict[str, Strategy] = {}
    for s in plain + staged:
        if s.rules in MAIN if s.stages == 1 else (s.rules, s.pipeline) in MAIN_PIPELINES:
            first.setdefault(f"{s.rules} {s.columns['pipeline']}", s)
    return [dataclasses.replace(s, main=s in first.values()) for s in plain + staged]


def _meshes(n: int, own_axes: str, free: str) -> Iterator[dict[str, int]]:
    """Yields every division of n devices with more than one along each axis of `own_axes`, the
    largest first axis first."""
    axes = [*free.split(), *own_axes.split()]
    for sizes in itertools.product([d for d in range(n, 0, -1) if n % d == 0], repeat=len(axes)):
        mesh = dict(zip(axes, sizes, strict=True))
        if math.prod(sizes) == n and all(mesh[axis] > 1 for axis in own_axes.split()):
            yield {axis: size for axis, size in mesh.items() if size > 1}


def _filled(n: int, stages: int, sizes: dict[str, int]) -> dict[str, int] | None:
    """Returns the mesh; None if it does not fit, or an axis that the rules are named after would
    have size 1. A single pipeline may be one replica."""
    fixed = stages * math.prod(size for size in sizes.values() if size > 0)
    remaining_devices = n // fixed
    if n % fixed or (remaining_devices == 1 and sizes != {"data": -1}):
        return None
    return {"pipeline": stages} | {
        axis: size if size > 0 else remaining_devices
        for axis, size in sizes.items()
        if size > 0 or remaining_devices > 1
    }
