"""Makes the tables of tiles: which tiles compile well, found without a GPU, and which of those are fastest, found with one.

    python -m pallas_kernels.dev.autotune             # compiles every candidate for a GPU that is not here: candidates.json
    python -m pallas_kernels.dev.autotune --measure   # on a Hopper GPU: times those that passed, puts the best into tuning.json

The first needs the extra `aot`. A candidate passes when it fits shared memory, spills no register, and keeps its wgmmas asynchronous,
with no feature and with all of them.
Without measurements tuning.json has the first candidate that passes: they come in the order in which larger blocks and deeper
pipelines should win.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import math
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp

from pallas_kernels.attention import tuning
from pallas_kernels.attention.hopper.backward import dkv, dq, parts
from pallas_kernels.attention.hopper.forward import forward
from pallas_kernels.attention.hopper.spec import Spec, Tiles
from pallas_kernels.attention.mosaic import HEAD_DIMS

Kernel = Literal["forward", "dq", "dkv"]
KERNELS: tuple[Kernel, ...] = ("forward", "dq", "dkv")
CANDIDATES = Path(__file__).with_name("candidates.json")
LENGTHS = (2048, 16384)
"""Sequence lengths that are timed, of 32,768 tokens and heads of 2,048 in all."""


@dataclasses.dataclass(frozen=True)
class Candidate:
    """Tiles of one kernel for one pair of head dims."""

    kernel: Kernel
    head_dims: tuple[int, int]
    tiles: Tiles

    def __str__(self) -> str:
        H, V = self.head_dims
        return f"{self.kernel} {H}x{V} block {self.tiles.block} stages {self.tiles.stages}"


def candidates() -> Iterator[Candidate]:
    """All that is worth compiling, the more promising first."""
    for head_dims in HEAD_DIMS:
        for kernel in KERNELS:
            for block in (128, 64):  # which divide every block mask's blocks
                for stages in (4, 3, 2):
                    yield Candidate(kernel, head_dims, Tiles(block, stages))


def run(spec: Spec, candidate: Candidate, sides: dict[str, Any], q: Any, k: Any, v: Any, dout: Any, lse: Any, delta: Any) -> Any:
    """The kernel alone, on arrays of whole tiles; lse to the base 2."""
    if candidate.kernel == "forward":
        return forward(spec, candidate.tiles, q, k, v, sides)
    arrays = (q, k, v, dout, lse, delta, {name: x for name, x in sides.items() if name != "sinks"})
    if candidate.kernel == "dq":
        return dq(spec, candidate.tiles, *arrays)
    return [list(dkv(spec, candidate.tiles, *arrays, part).values()) for part in parts(*candidate.head_dims)]


def shapes(candidate: Candidate, S: int, B: int, N: int, K: int, dtype: str) -> list[jax.ShapeDtypeStruct]:
    """The matrices and vectors of `run`: q, k, v, dout, lse, delta."""
    H, V = candidate.head_dims
    matrices = [jax.ShapeDtypeStruct((B, S, heads, width), jnp.dtype(dtype)) for heads, width in ((N, H), (K, H), (K, V), (N, V))]
    return [*matrices, *[jax.ShapeDtypeStruct((B, N, S), jnp.float32)] * 2]


def compiles_well(candidate: Candidate, dtype: str = "bfloat16", cache: str | None = None, **features: Any) -> tuple[bool, dict[str, Any]]:
    """Whether a candidate passes, causal with grouped heads unless `features` of Spec say otherwise, and what was found.

    cache: a directory that keeps what compiling found.

    Raises ValueError where the compiler is not installed, and what compiling raises unless it is that shared memory does not suffice.
    """
    from pallas_kernels.dev.resources import resources

    B, S, N, K = 2, 1024, 4, 2
    spec = Spec(S, S, 1 / math.sqrt(candidate.head_dims[0]), **features)
    sides = {}
    if spec.segments:
        ids = jax.ShapeDtypeStruct((B, S), jnp.int32)
        sides = {"table": jax.ShapeDtypeStruct((B, S // candidate.tiles.rows, 4), jnp.int32), "q_ids": ids, "k_ids": ids}
    if spec.sinks:
        sides["sinks"] = jax.ShapeDtypeStruct((N,), jnp.float32)
    try:
        found = resources(lambda *x: run(spec, candidate, *x), sides, *shapes(candidate, S, B, N, K, dtype), cache=cache)
    except ValueError as error:
        if "shared memory" not in str(error):
            raise
        return False, {"error": str(error)}
    spills = sum(kernel.spill_stores + kernel.spill_loads for kernel in found)
    serialised = sum("serialized" in warning for kernel in found for warning in kernel.warnings)
    about = {
        "registers": max(kernel.registers for kernel in found),
        "spills": spills,
        "shared_memory": max(kernel.dynamic_shared for kernel in found),
        "wgmma": sum(kernel.wgmma for kernel in found),
        "tma": sum(kernel.tma_loads + kernel.tma_stores for kernel in found),
        "serialised": serialised,
    }
    return spills == 0 and not serialised, about


EVERYTHING = {"window": 300, "softcap": 30.0, "segments": True, "sinks": True}
"""The features that take registers and shared memory, together."""


def compile_all(cache: str | None) -> None:
    """Writes candidates.json, and the rows of tuning.json that rest on no measurement."""
    lines = []
    for candidate in candidates():
        passes, about = compiles_well(candidate, cache=cache)
        if passes:
            passes, full = compiles_well(candidate, cache=cache, **EVERYTHING)
            about = {"plain": about, "everything": full}
        lines.append({"kernel": candidate.kernel, "head_dims": candidate.head_dims, "passes": passes, **as_data(candidate.tiles), **about})
        print(f"{candidate}: {'passes' if passes else 'fails'} {about}", flush=True)
    write(CANDIDATES, {"jax": jax.__version__, "candidates": lines})
    rows = [
        {"head_dims": head_dims, **{kernel: as_data(first) for kernel in KERNELS for first in [passing(kernel, head_dims)[0].tiles]}}
        for head_dims in HEAD_DIMS
    ]
    measured = [row for row in json.loads(tuning.PATH.read_text())["rows"] if "measured" in row] if tuning.PATH.exists() else []
    write(tuning.PATH, {"rows": [*measured, *rows]})


def passing(kernel: Kernel, head_dims: tuple[int, int]) -> list[Candidate]:
    """The candidates that passed, from candidates.json."""
    lines = json.loads(CANDIDATES.read_text())["candidates"]
    return [
        Candidate(kernel, head_dims, Tiles(line["block"], line["stages"]))
        for line in lines
        if line["passes"] and line["kernel"] == kernel and tuple(line["head_dims"]) == head_dims
    ]


def as_data(tiles: Tiles) -> dict[str, int]:
    return dataclasses.asdict(tiles)


def write(path: Path, content: dict[str, Any]) -> None:
    """One line for each entry of a list, so that a change shows as the lines that changed."""
    lists = ",\n".join(
        f' "{name}": [\n' + ",\n".join(f"  {json.dumps(line)}" for line in value) + "\n ]"
        if isinstance(value, list)
        else f' "{name}": {json.dumps(value)}'
        for name, value in content.items()
    )
    path.write_text("{\n" + lists + "\n}\n")


def milliseconds(call: Callable[..., Any], *arrays: Any, repeats: int = 5, calls: int = 10) -> float:
    """Median time of one call among `repeats` rounds of `calls` each; compiled and warmed up before."""
    jax.block_until_ready(call(*arrays))
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        results = [call(*arrays) for _ in range(calls)]
        jax.block_until_ready(results)
        times.append((time.perf_counter() - start) / calls)
    return 1e3 * statistics.median(times)


def measure(seconds: float, lengths: tuple[int, ...] = LENGTHS) -> list[dict[str, Any]]:
    """Times every candidate that passed on this process's GPU, for `seconds` at most; rows for tuning.json, written as they are found.

    A row takes the place of an older one of the same device and shape; all others stay.
    """
    device, started = jax.local_devices()[0].device_kind, time.monotonic()
    found: list[dict[str, Any]] = []
    before = json.loads(tuning.PATH.read_text())["rows"]
    for head_dims, causal, length in order(lengths):
        best: dict[str, Any] = {}
        for kernel in KERNELS:
            timed = []
            for candidate in passing(kernel, head_dims):
                if time.monotonic() - started > seconds:
                    return found
                timed.append((time_of(candidate, length, causal), candidate))
                print(f"{candidate} causal={causal} length {length}: {timed[-1][0]:.3f} ms", flush=True)
            best[kernel] = min(timed, key=lambda pair: pair[0])
        row = {
            "device": device,
            "head_dims": head_dims,
            "causal": causal,
            "length": 0 if length == min(lengths) else length,
            **{kernel: as_data(candidate.tiles) for kernel, (_, candidate) in best.items()},
            "measured": {
                "date": datetime.date.today().isoformat(),
                "jax": jax.__version__,
                "ms": {kernel: round(ms, 4) for kernel, (ms, _) in best.items()},
            },
        }
        found.append(row)
        write(tuning.PATH, {"rows": merged(found, before)})
    return found


def merged(found: list[dict[str, Any]], before: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows of tuning.json: those found on one device, and those from before that none of them replaces."""

    def subject(row: dict[str, Any]) -> tuple[Any, ...]:
        return row.get("device"), tuple(row["head_dims"]), row.get("causal"), row.get("length", 0)

    replaced, devices = {subject(row) for row in found}, {row["device"] for row in found}
    kept = [row for row in before if subject(row) not in replaced]
    same = [row for row in kept if row.get("device") in devices]
    # The first row that fits serves: of one device longer lengths come first.
    return [*sorted([*found, *same], key=lambda row: -row.get("length", 0)), *(row for row in kept if row not in same)]


def order(lengths: tuple[int, ...]) -> Iterator[tuple[tuple[int, int], bool, int]]:
    """What to time, the most used first."""
    for head_dims in sorted(HEAD_DIMS, key=lambda dims: (dims != (128, 128), dims != (64, 64), dims)):
        for length in sorted(lengths, reverse=True):
            for causal in (True, False):
                yield head_dims, causal, length


def time_of(candidate: Candidate, length: int, causal: bool) -> float:
    """Milliseconds on random data."""
    H, V = candidate.head_dims
    N, B = max(1, 2048 // V), max(1, 32768 // length)
    spec = Spec(length, length, 1 / math.sqrt(H), causal=causal)
    wanted = shapes(candidate, length, B, N, N, "bfloat16")
    keys = jax.random.split(jax.random.key(0), len(wanted))
    arrays = [jax.random.normal(key, x.shape, x.dtype) for key, x in zip(keys, wanted, strict=True)]
    return milliseconds(jax.jit(lambda *x: run(spec, candidate, {}, *x)), *arrays)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measure", action="store_true", help="time on this machine's GPU what candidates.json lets pass")
    parser.add_argument("--seconds", type=float, default=300, help="with --measure: stop after this long (default 300)")
    parser.add_argument("--cache", help="directory that keeps what compiling found")
    args = parser.parse_args()
    if not args.measure:
        compile_all(args.cache)
        return
    device = jax.local_devices()[0]
    if getattr(device, "compute_capability", None) != "9.0":
        parser.exit(1, f"error: --measure needs a Hopper GPU (compute capability 9.0), and this is {device.device_kind}\n")
    measure(args.seconds)


if __name__ == "__main__":
    main()
