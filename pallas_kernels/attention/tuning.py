"""Which tiles a Hopper kernel takes: a table, `tuning.json`, made by `autotune.py`.

Each row says what it is for (device, head_dims, dtype, causal, from a length on; null: any) and gives the tiles of the three kernels.
The first row that fits serves, so that what was measured on a device stands above what merely compiles well.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

import jax

from pallas_kernels.attention.hopper.differentiable import Tiling
from pallas_kernels.attention.hopper.spec import Tiles
from pallas_kernels.attention.problem import AttentionProblem

PATH = Path(__file__).with_name("tuning.json")


@dataclasses.dataclass(frozen=True)
class TuningEntry:
    """One line of the table."""

    head_dims: tuple[int, int]
    """Widths of a query's and of a value's head."""
    tiling: Tiling
    device: str | None = None
    """Part of the device's name as JAX has it, such as H200."""
    dtype: str | None = None
    causal: bool | None = None
    length: int = 0
    """Serves from this many keys on."""

    def serves(self, problem: AttentionProblem, device: str) -> bool:
        return (
            self.head_dims == (problem.q_shape[3], problem.v_shape[3])
            and (self.device is None or self.device in device)
            and self.dtype in (None, problem.dtype)
            and self.causal in (None, problem.causal)
            and problem.k_shape[1] >= self.length
        )

    @classmethod
    def of(cls, row: dict[str, Any]) -> TuningEntry:
        """From a row of the file."""
        tiling = Tiling(**{name: Tiles(**row[name]) for name in ("forward", "dq", "dkv")})
        about = {name: row[name] for name in ("device", "dtype", "causal", "length") if name in row}
        return cls(head_dims=tuple(row["head_dims"]), tiling=tiling, **about)


@functools.cache
def entries() -> tuple[TuningEntry, ...]:
    """The table, in its order."""
    return tuple(TuningEntry.of(row) for row in json.loads(PATH.read_text())["rows"])


def tiling(problem: AttentionProblem, device: str | None = None) -> Tiling:
    """The tiles for `problem`. device: its name; None: the first GPU of this process, or none in particular.

    Raises LookupError where no row serves; `mosaic.unsupported_reason` has said so before.
    """
    if device is None:
        device = jax.local_devices()[0].device_kind if jax.default_backend() == "gpu" else ""
    found = next((row for row in entries() if row.serves(problem, device)), None)
    if found is None:
        raise LookupError(f"{PATH.name} has no tiles for head dims {problem.q_shape[3]} and {problem.v_shape[3]}")
    return found.tiling
