"""Makes the tables of tile sizes: candidates that compile well, and the fastest of them.

    python -m pallas_kernels.dev.autotune            # without a GPU: candidates.json
    python -m pallas_kernels.dev.autotune --measure  # on a Hopper GPU: tuning.json

The first compiles every candidate, and needs the extra `aot`. A candidate passes if it has none of
the faults of `limits.py`, such as spilled registers or serialised wgmmas, both without features and
with all of them. The second times those that pass, and writes the fastest. Without measurements,
tuning.json has the first candidate that passes: larger blocks and deeper pipelines come first.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import math
import os
import re
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp

from pallas_kernels.attention import tuning
from pallas_kernels.attention.hopper.backward import dkv, dq, parts
from pallas_kernels.attention.hopper.backward_fused import backward_fused
from pallas_kernels.attention.hopper.forward import forward
from pallas_kernels.attention.hopper.fused_tiles import ADDITIONS, FusedTiles
from pallas_kernels.attention.hopper.spec import ForwardTiles, Spec, Tiles
from pallas_kernels.attention.mosaic import HEAD_DIMS

Kernel = Literal["forward", "dq", "dkv", "fused"]
Case = tuple[tuple[int, int], bool, int]
"""Head dims, whether causal, length."""
KERNELS: tuple[Kernel, ...] = ("forward", "dq", "dkv", "fused")
CANDIDATES = Path(__file__).with_name("candidates.json")
LENGTHS = (2048, 16384)
"""Sequence lengths to time, with 32,768 tokens and a total head width of 2,048."""


@dataclasses.dataclass(frozen=True)
class Candidate:
    """Tile sizes of one kernel for one pair of head dims."""

    kernel: Kernel
    head_dims: tuple[int, int]
    tiles: Tiles | FusedTiles

    def __str__(self) -> str:
        H, V = self.head_dims
        fields = " ".join(f"{name} {value}" for name, value in as_data(self.tiles).items())
        return f"{self.kernel} {H}x{V} {fields}"


def candidates(kernels: Sequence[Kernel] = KERNELS) -> Iterator[Candidate]:
    """Yields all candidates, the more promising ones first, each kernel once.

    More slots than memory has room for make no other kernel.
    """
    for head_dims in HEAD_DIMS:
        for kernel in kernels:
            yielded = set()
            for tiles in tiles_to_try(kernel, head_dims):
                candidate = Candidate(kernel, head_dims, tiles)
                programs = (program(candidate), program(candidate, **EVERYTHING))
                if programs not in yielded:
                    yielded.add(programs)
                    yield candidate


def tiles_to_try(kernel: Kernel, head_dims: tuple[int, int]) -> list[Tiles | FusedTiles]:
    """The tiles of a kernel for these head dims, the more promising ones first."""
    blocks = (128, 64)  # which divide every block mask's blocks
    tiles: list[Tiles | FusedTiles] = []
    if kernel == "fused":
        if head_dims != (64, 64):
            # of wider heads, S^T and dP^T of 128 queries need more registers than there are
            blocks = (64,)
        for block in blocks:
            for add in ADDITIONS:
                tiles += [FusedTiles(block, stages, add) for stages in (3, 2, 1)]
        return tiles
    for block in blocks:
        tiles += [tiles_of(kernel, block=block, stages=stages) for stages in (4, 3, 2)]
    if kernel == "forward":
        tiles += forward_variants(head_dims)
    return tiles


def forward_variants(head_dims: tuple[int, int]) -> Iterator[ForwardTiles]:
    """The forward's other schedules, with blocks that fit shared memory.

    For narrow heads, there are other sizes, too.
    """
    block = 128 if sum(head_dims) <= 256 else 64
    for is_named, automatic in ((True, True), (False, False), (True, False)):
        yield ForwardTiles(block, 4, named_barriers=is_named, automatic_barriers=automatic)
    yield ForwardTiles(block, 4, overlapped=False)
    if head_dims == (64, 64):
        for options in ({}, {"named_barriers": True, "automatic_barriers": False}):
            yield ForwardTiles(128, 4, warpgroups=3, **options)
            yield ForwardTiles(64, 4, height=128, **options)
            yield ForwardTiles(192, 3, **options)
        yield ForwardTiles(256, 2, overlapped=False)


def run(
    spec: Spec,
    candidate: Candidate,
    sides: dict[str, Any],
    q: Any,
    k: Any,
    v: Any,
    dout: Any,
    lse: Any,
    delta: Any,
) -> Any:
    """The outputs of the kernel alone, on arrays of complete tiles; lse to the base 2."""
    if isinstance(candidate.tiles, ForwardTiles):
        return forward(spec, candidate.tiles, q, k, v, sides)
    backward_sides = {name: x for name, x in sides.items() if name != "sinks"}
    arrays = (q, k, v, dout, lse, delta, backward_sides)
    if isinstance(candidate.tiles, FusedTiles):
        return list(backward_fused(spec, candidate.tiles.fitting(spec), *arrays).values())
    if candidate.kernel == "dq":
        return dq(spec, candidate.tiles, *arrays)
    all_parts = parts(*candidate.head_dims)
    return [list(dkv(spec, candidate.tiles, *arrays, part).values()) for part in all_parts]


def shapes(
    candidate: Candidate, S: int, B: int, N: int, K: int, dtype: str
) -> list[jax.ShapeDtypeStruct]:
    """The shapes of q, k, v, dout, lse and delta for `run`."""
    H, V = candidate.head_dims
    q = jax.ShapeDtypeStruct((B, S, N, H), jnp.dtype(dtype))
    k = jax.ShapeDtypeStruct((B, S, K, H), jnp.dtype(dtype))
    v = jax.ShapeDtypeStruct((B, S, K, V), jnp.dtype(dtype))
    dout = jax.ShapeDtypeStruct((B, S, N, V), jnp.dtype(dtype))
    vector = jax.ShapeDtypeStruct((B, N, S), jnp.float32)
    return [q, k, v, dout, vector, vector]


def call(
    candidate: Candidate, dtype: str = "bfloat16", **features: Any
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """(a candidate's kernel as a function, the shapes of its arguments).

    The call is causal with grouped heads, unless `features` of Spec differ.
    """
    B = 2
    S = 1536  # complete tiles of every size
    N = 4
    K = 2
    spec = Spec(S, S, 1 / math.sqrt(candidate.head_dims[0]), **features)
    sides = {}
    if spec.segments:
        ids = jax.ShapeDtypeStruct((B, S), jnp.int32)
        sides = {
            "table": jax.ShapeDtypeStruct((B, S // candidate.tiles.rows, 4), jnp.int32),
            "q_ids": ids,
            "k_ids": ids,
        }
    if spec.sinks:
        sides["sinks"] = jax.ShapeDtypeStruct((N,), jnp.float32)
    return lambda *x: run(spec, candidate, *x), (sides, *shapes(candidate, S, B, N, K, dtype))


def program(candidate: Candidate, **features: Any) -> str:
    """The traced program of a candidate; equal programs are the same kernel."""
    fn, arguments = call(candidate, **features)
    return re.sub("0x[0-9a-f]+", "", str(jax.make_jaxpr(fn)(*arguments)))


def compiles_well(
    candidate: Candidate, dtype: str = "bfloat16", cache: str | None = None, **features: Any
) -> tuple[bool, dict[str, Any]]:
    """(whether a candidate passes, its resources), for a call as of `call`.

    One fault is accepted: with segments, ptxas drains the wgmmas of the dk and dv kernel once in
    each block, between s and dp.

    cache: a directory that stores the results of compilations.

    Raises ValueError if the compiler is not installed, and errors of the compilation other than
    insufficient shared memory.
    """
    from pallas_kernels.dev.limits import faults
    from pallas_kernels.dev.resources import resources

    fn, arguments = call(candidate, dtype, **features)
    try:
        kernels = resources(fn, *arguments, cache=cache)
    except ValueError as error:
        if "shared memory" not in str(error):
            raise
        return False, {"error": str(error)}
    kernel_faults: set[str] = set()
    for kernel in kernels:
        kernel_faults.update(faults(kernel))
    summary = {
        "registers": max(kernel.registers for kernel in kernels),
        "spills": sum(kernel.spill_stores + kernel.spill_loads for kernel in kernels),
        "shared_memory": max(kernel.dynamic_shared for kernel in kernels),
        "wgmma": sum(kernel.wgmma for kernel in kernels),
        "tma": sum(kernel.tma_loads + kernel.tma_stores for kernel in kernels),
        "faults": sorted(kernel_faults),
    }
    if candidate.kernel == "dkv" and features.get("segments"):
        kernel_faults = {fault for fault in kernel_faults if not fault.startswith("drained")}
    return not kernel_faults, summary


EVERYTHING = {"window": 300, "softcap": 30.0, "segments": True, "sinks": True}
"""All features that need registers and shared memory."""


def compile_all(cache: str | None, kernels: Sequence[Kernel] = KERNELS) -> None:
    """Writes candidates.json, and the entries of tuning.json without a measurement.

    kernels: those to compile; other lines stay.
    """
    lines = []
    if set(kernels) != set(KERNELS):
        other_candidates = set(candidates([kernel for kernel in KERNELS if kernel not in kernels]))
        old_lines = json.loads(CANDIDATES.read_text(encoding="utf-8"))["candidates"]
        lines = [line for line in old_lines if of_line(line) in other_candidates]
    for candidate in candidates(kernels):
        line = judged(candidate, cache)
        lines.append(line)
        print(f"{candidate}: {line}", flush=True)
    lines.sort(
        key=lambda line: (HEAD_DIMS.index(tuple(line["head_dims"])), KERNELS.index(line["kernel"]))
    )
    write(CANDIDATES, {"jax": jax.__version__, "candidates": lines})

    rows = []
    for head_dims in HEAD_DIMS:
        best = {kernel: as_data(passing(kernel, head_dims)[0].tiles) for kernel in KERNELS}
        rows.append({"head_dims": head_dims, **best})
    measured = []
    if tuning.PATH.exists():
        old_rows = json.loads(tuning.PATH.read_text(encoding="utf-8"))["rows"]
        measured = [row for row in old_rows if "measured" in row]
    write(tuning.PATH, {"rows": [*measured, *rows]})


def judged(candidate: Candidate, cache: str | None) -> dict[str, Any]:
    """The line of a candidate in candidates.json.

    passes: with and without features. Candidates of the forward that do not may pass without any:
    `only` then has "causal", "full" or both.
    """
    line: dict[str, Any] = {"kernel": candidate.kernel, "head_dims": candidate.head_dims}
    passes_causal, causal = compiles_well(candidate, cache=cache)
    if not passes_causal:
        passes = False
        results = causal
    else:
        passes, everything = compiles_well(candidate, cache=cache, **EVERYTHING)
        results = {"plain": causal, "everything": everything}

    line["passes"] = passes
    if candidate.kernel == "forward" and not passes and "error" not in causal:
        only = ["causal"] if passes_causal else []
        passes_full, _ = compiles_well(candidate, cache=cache, causal=False)
        if passes_full:
            only.append("full")
        if only:
            line["only"] = only
    return {**line, **as_data(candidate.tiles), **results}


def passing(
    kernel: Kernel, head_dims: tuple[int, int], plain: str | None = None
) -> list[Candidate]:
    """The candidates that passed, from candidates.json.

    plain: "causal" or "full" adds those that pass only with that mask and without features.
    """
    lines = json.loads(CANDIDATES.read_text(encoding="utf-8"))["candidates"]
    passed = []
    for line in lines:
        if line["kernel"] != kernel or tuple(line["head_dims"]) != tuple(head_dims):
            continue
        if line["passes"] or plain in line.get("only", ()):
            passed.append(of_line(line))
    return passed


def of_line(line: dict[str, Any]) -> Candidate:
    """The candidate of a line of candidates.json."""
    tiles = tiles_of(line["kernel"], **{name: line[name] for name in FIELDS if name in line})
    return Candidate(line["kernel"], tuple(line["head_dims"]), tiles)


FIELDS = tuple(
    dict.fromkeys(
        field.name for field in (*dataclasses.fields(ForwardTiles), *dataclasses.fields(FusedTiles))
    )
)
"""The fields of a kernel's tiles that the table and the candidates may have."""


def tiles_of(kernel: Kernel, **fields: Any) -> Tiles | FusedTiles:
    """The tiles of a kernel from JSON data."""
    if kernel == "forward":
        return ForwardTiles(**fields)
    if kernel == "fused":
        return FusedTiles(**fields)
    return Tiles(**fields)


def as_data(tiles: Tiles | FusedTiles) -> dict[str, Any]:
    """Tiles as JSON data, without the fields that have their default."""
    defaults = {field.name: field.default for field in dataclasses.fields(tiles)}
    return {name: x for name, x in dataclasses.asdict(tiles).items() if x != defaults[name]}


def write(path: Path, content: dict[str, Any]) -> None:
    """Writes JSON with a line for each entry of a list, for readable diffs."""
    entries = []
    for name, value in content.items():
        text = json.dumps(value)
        if isinstance(value, list):
            text = "[\n" + ",\n".join(f"  {json.dumps(line)}" for line in value) + "\n ]"
        entries.append(f' "{name}": {text}')
    path.write_text("{\n" + ",\n".join(entries) + "\n}\n", encoding="utf-8")


def milliseconds(
    call: Callable[..., Any], *arrays: Any, repeats: int = 5, calls: int = 10
) -> float:
    """The median time of a call over `repeats` rounds of `calls`.

    A first call, which compiles and warms up, is not timed.
    """
    jax.block_until_ready(call(*arrays))
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        results = [call(*arrays) for _ in range(calls)]
        jax.block_until_ready(results)
        times.append((time.perf_counter() - start) / calls)
    return 1e3 * statistics.median(times)


def measure(
    seconds: float, lengths: tuple[int, ...] = LENGTHS, cases: Sequence[Case] | None = None
) -> list[dict[str, Any]]:
    """Times every candidate that passed on this process's GPU, for at most `seconds`.

    The candidates of a case compile in parallel, and are timed when all have. One that does not
    compile or run here is left out, with a line about it. An entry replaces an older one of the
    same device and shape; all others stay.

    cases: the cases to time; None: all head dims and both masks, at these lengths.

    Returns entries for tuning.json, after it wrote them.
    """
    device = jax.local_devices()[0].device_kind
    deadline = time.monotonic() + seconds
    new_rows: list[dict[str, Any]] = []
    old_rows = json.loads(tuning.PATH.read_text(encoding="utf-8"))["rows"]
    cases = list(order(lengths)) if cases is None else cases
    shortest = min(length for _, _, length in cases)
    for head_dims, causal, length in cases:
        timed: dict[str, list[tuple[float, Candidate]]] = {kernel: [] for kernel in KERNELS}
        plain = "causal" if causal else "full"
        case_candidates: list[Candidate] = []
        for kernel in KERNELS:
            case_candidates += passing(kernel, head_dims, plain)
        for candidate, program in compiled(case_candidates, length, causal).items():
            if time.monotonic() > deadline:
                return new_rows
            subject = f"{candidate} causal={causal} length {length}"
            try:
                ms = time_of(candidate, length, causal, program)
            except Exception as error:
                print(f"{subject}: {type(error).__name__}: {error}"[:300], flush=True)
                continue
            timed[candidate.kernel].append((ms, candidate))
            print(f"{subject}: {ms:.3f} ms", flush=True)

        # Calls with features need candidates that pass with all of them.
        general = {}
        for kernel in KERNELS:
            allowed = passing(kernel, head_dims)
            general[kernel] = [pair for pair in timed[kernel] if pair[1] in allowed]
        if not all(general.values()):
            return new_rows
        conditions = {
            "device": device,
            "head_dims": head_dims,
            "causal": causal,
            "length": 0 if length == shortest else length,
        }
        plain_row = {**conditions, **fastest(timed)}
        general_row = {**conditions, **fastest(general)}
        if plain_row != general_row:
            new_rows.append({"plain": True, **plain_row})
        new_rows.append(general_row)
        write(tuning.PATH, {"rows": merged(new_rows, old_rows)})
    return new_rows


def fastest(timed: dict[str, list[tuple[float, Candidate]]]) -> dict[str, Any]:
    """The measured part of an entry of tuning.json. timed: milliseconds of each kernel's tiles."""
    best = {kernel: min(pairs, key=lambda pair: pair[0]) for kernel, pairs in timed.items()}
    tiles = {kernel: as_data(candidate.tiles) for kernel, (_, candidate) in best.items()}
    measured = {
        "date": datetime.date.today().isoformat(),
        "jax": jax.__version__,
        "ms": {kernel: round(ms, 4) for kernel, (ms, _) in best.items()},
    }
    return {**tiles, "measured": measured}


def merged(new: list[dict[str, Any]], old: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The entries of tuning.json: new ones, and older ones that they do not replace.

    New entries are of one device.
    """

    def conditions(row: dict[str, Any]) -> tuple[Any, ...]:
        return (
            row.get("device"),
            tuple(row["head_dims"]),
            row.get("causal"),
            row.get("length", 0),
            row.get("plain", False),
        )

    replaced = {conditions(row) for row in new}
    devices = {row["device"] for row in new}
    remaining = [row for row in old if conditions(row) not in replaced]
    same_device = [row for row in remaining if row.get("device") in devices]
    other_rows = [row for row in remaining if row not in same_device]
    # The first entry that matches is used, so longer lengths of a device come first, and entries
    # that serve fewer calls.
    measured = [*new, *same_device]
    measured.sort(key=lambda row: (-row.get("length", 0), not row.get("plain", False)))
    return [*measured, *other_rows]


def order(lengths: tuple[int, ...]) -> Iterator[tuple[tuple[int, int], bool, int]]:
    """(head dims, causal, length) of each case to time, the most common first."""
    common_first = sorted(HEAD_DIMS, key=lambda dims: (dims != (128, 128), dims != (64, 64), dims))
    for head_dims in common_first:
        for length in sorted(lengths, reverse=True):
            for causal in (True, False):
                yield head_dims, causal, length


def arguments(candidate: Candidate, length: int) -> list[jax.ShapeDtypeStruct]:
    """The shapes of a candidate's arguments when it is timed, as of `shapes`."""
    N = max(1, 2048 // candidate.head_dims[1])
    B = max(1, 32768 // length)
    return shapes(candidate, length, B, N, N, "bfloat16")


def compiled(
    candidates: Sequence[Candidate], length: int, causal: bool
) -> dict[Candidate, Future[Any]]:
    """The kernels at a length, compiled in parallel for this process's GPU. All are done."""

    def program(candidate: Candidate) -> Any:
        spec = Spec(length, length, 1 / math.sqrt(candidate.head_dims[0]), causal=causal)
        kernel = jax.jit(lambda *x: run(spec, candidate, {}, *x))
        return kernel.lower(*arguments(candidate, length)).compile()

    with ThreadPoolExecutor(max(1, (os.cpu_count() or 2) // 2)) as pool:
        return {candidate: pool.submit(program, candidate) for candidate in candidates}


def time_of(candidate: Candidate, length: int, causal: bool, program: Future[Any]) -> float:
    """The milliseconds of a kernel on random data.

    program: of `compiled`. Raises the errors of its compilation.
    """
    shapes = arguments(candidate, length)
    keys = jax.random.split(jax.random.key(0), len(shapes))
    arrays = [jax.random.normal(key, x.shape, x.dtype) for key, x in zip(keys, shapes, strict=True)]
    return milliseconds(program.result(), *arrays)


def main() -> None:
    """Searches the tiles, prints a line for each candidate, and writes the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--measure", action="store_true", help="time the candidates that pass on this machine's GPU"
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=300,
        help="with --measure: stop after this long (default 300)",
    )
    parser.add_argument("--cache", help="directory that keeps the results of compilations")
    parser.add_argument(
        "--kernels",
        nargs="+",
        choices=KERNELS,
        default=KERNELS,
        help="without --measure: those to compile (default all)",
    )
    args = parser.parse_args()
    if not args.measure:
        compile_all(args.cache, args.kernels)
        return
    device = jax.local_devices()[0]
    if getattr(device, "compute_capability", None) != "9.0":
        parser.exit(
            1,
            "error: --measure needs a Hopper GPU (compute capability 9.0), and this is "
            f"{device.device_kind}\n",
        )
    measure(args.seconds)


if __name__ == "__main__":
    main()
