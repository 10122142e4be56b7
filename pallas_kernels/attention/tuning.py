"""The tiles of the Hopper kernels, from the table `tuning.json`.

`pallas_kernels/dev/autotune.py` makes the table. Each entry has its conditions (device, head_dims,
dtype, causal, minimum length; null: any) and the tiles of the kernels: the forward pass, the fused
backward pass, and the two kernels of the deterministic one. The first entry that matches is used,
so entries measured on a device come before entries that were only compiled.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

import jax

from pallas_kernels.attention.hopper.differentiable import Tiling
from pallas_kernels.attention.hopper.fused_tiles import FusedTiles
from pallas_kernels.attention.hopper.spec import ForwardTiles, Tiles
from pallas_kernels.attention.problem import AttentionProblem

PATH = Path(__file__).with_name("tuning.json")


@dataclasses.dataclass(frozen=True)
class TuningEntry:
    """An entry of the table."""

    head_dims: tuple[int, int]
    """Widths of the heads of queries and of values."""
    tiling: Tiling
    device: str | None = None
    """A part of jax's device_kind, such as H200."""
    dtype: str | None = None
    causal: bool | None = None
    length: int = 0
    """The minimum number of keys."""
    plain: bool = False
    """It serves only calls without window, soft cap, segments, sinks, block mask and traced
    offset."""

    def serves(self, problem: AttentionProblem, device: str) -> bool:
        """Whether the entry's conditions hold for a problem on a device."""
        if self.head_dims != (problem.q_shape[3], problem.v_shape[3]):
            return False
        if self.device is not None and self.device not in device:
            return False
        if self.dtype not in (None, problem.dtype) or self.causal not in (None, problem.causal):
            return False
        if problem.k_shape[1] < self.length:
            return False
        if self.plain and has_features(problem):
            return False
        if problem.block_mask is None:
            return True
        # The kernels skip complete tiles, so that a mask's blocks must consist of such.
        forward = self.tiling.forward
        size = problem.block_mask.size
        return size % forward.rows == 0 and size % forward.block == 0

    @classmethod
    def of(cls, row: dict[str, Any]) -> TuningEntry:
        """An entry from the file's JSON."""
        tiling = Tiling(
            forward=ForwardTiles(**row["forward"]),
            dq=Tiles(**row["dq"]),
            dkv=Tiles(**row["dkv"]),
            fused=FusedTiles(**row["fused"]) if row.get("fused") else None,
        )
        optional = ("device", "dtype", "causal", "length", "plain")
        conditions = {name: row[name] for name in optional if name in row}
        return cls(head_dims=tuple(row["head_dims"]), tiling=tiling, **conditions)


def has_features(problem: AttentionProblem) -> bool:
    """Whether a problem has more than a causal mask."""
    return (
        problem.window is not None
        or problem.block_mask is not None
        or problem.q_offset is None
        or problem.softcap is not None
        or problem.segments
        or problem.sinks
    )


@functools.cache
def entries() -> tuple[TuningEntry, ...]:
    """All entries, in the order of the table."""
    rows = json.loads(PATH.read_text(encoding="utf-8"))["rows"]
    return tuple(TuningEntry.of(row) for row in rows)


def tiling(problem: AttentionProblem, device: str | None = None) -> Tiling:
    """The tiles for `problem`.

    device: its device_kind; None: that of the first GPU of this process, if there is one.

    Raises LookupError if no entry matches; `mosaic.unsupported_reason` excludes such problems.
    """
    if device is None:
        device = jax.local_devices()[0].device_kind if jax.default_backend() == "gpu" else ""
    for entry in entries():
        if entry.serves(problem, device):
            return entry.tiling
    raise LookupError(
        f"{PATH.name} has no tiles for head dims {problem.q_shape[3]} and {problem.v_shape[3]}"
    )
