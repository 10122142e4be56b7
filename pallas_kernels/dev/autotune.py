"""Makes the tables of tile sizes: those that compile well, which needs no GPU, and the fastest of
them, which needs one.

    python -m pallas_kernels.dev.autotune # compiles every candidate without a GPU: candidates.json
    python -m pallas_kernels.dev.autotune --measure # on a Hopper GPU: times those that pass, writes
    the best to tuning.json

The first needs the extra `aot`. A candidate passes if it has none of the faults of `limits.py`,
such as spilled registers or serialised wgmmas, both without features and with all of them. Without
measurements, tuning.json has the first candidate that passes: larger blocks and deeper pipelines
come first.
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
        return f"{self.kernel} {H}x{V} " + " ".join(
            f"{name} {value}" for name, value in as_data(self.tiles).items()
        )


def candidates(kernels: Sequence[Kernel] = KERNELS) -> Iterator[Candidate]:
    """All candidates, the more promising ones first, each kernel once: slots that memory has no
    room for make no other kernel.
    """
    for head_dims in HEAD_DIMS:
        for kernel in kernels:
            known = set()
            for tiles in tiles_to_try(kernel, head_dims):
                candidate = Candidate(kernel, head_dims, tiles)
                if (
                    programs := (program(candidate), program(candidate, **EVERYTHING))
                ) not in known:
                    known.add(programs)
                    yield candidate


def tiles_to_try(kernel: Kernel, head_dims: tuple[int, int]) -> list[Tiles | FusedTiles]:
    """The tiles of a kernel for these head dims, the more promising ones first."""
    blocks = 128, 64  # which divide every block mask's blocks
    if kernel != "fused":
        usual = [
            tiles_of(kernel, block=block, stages=stages) for block in blocks for stages in (4, 3, 2)
        ]
        return [*usual, *forward_variants(head_dims)] if kernel == "forward" else usual
    if head_dims != (64, 64):
        # of wider heads, S^T and dP^T of 128 queries need more registers than there are
        blocks = (64,)
    return [
        FusedTiles(block, stages, add)
        for block in blocks
        for add in ADDITIONS
        for stages in (3, 2, 1)
    ]


def forward_variants(head_dims: tuple[int, int]) -> Iterator[ForwardTiles]:
    """The forward's other schedules, with blocks that fit shared memory, and for narrow heads other
    sizes.
    """
    block = 128 if sum(head_dims) <= 256 else 64
    for named, automatic in ((True, True), (False, False), (True, False)):
        yield ForwardTiles(block, 4, named_barriers=named, automatic_barriers=automatic)
    yield ForwardTiles(block, 4, overlapped=False)
    if head_dims == (64, 64):
        for way in ({}, {"named_barriers": True, "automatic_barriers": False}):
            yield ForwardTiles(128, 4, warpgroups=3, **way)
            yield ForwardTiles(64, 4, height=128, **way)
            yield ForwardTiles(192, 3, **way)
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
    arrays = (q, k, v, dout, lse, delta, {name: x for name, x in sides.items() if name != "sinks"})
    if isinstance(candidate.tiles, FusedTiles):
        return list(backward_fused(spec, candidate.tiles.fitting(spec), *arrays).values())
    if candidate.kernel == "dq":
        return dq(spec, candidate.tiles, *arrays)
    return [
        list(dkv(spec, candidate.tiles, *arrays, part).values())
        for part in parts(*candidate.head_dims)
    ]


def shapes(
    candidate: Candidate, S: int, B: int, N: int, K: int, dtype: str
) -> list[jax.ShapeDtypeStruct]:
    """The shapes of q, k, v, dout, lse and delta for `run`."""
    H, V = candidate.head_dims
    matrices = [
        jax.ShapeDtypeStruct((B, S, heads, width), jnp.dtype(dtype))
        for heads, width in ((N, H), (K, H), (K, V), (N, V))
    ]
    return [*matrices, *[jax.ShapeDtypeStruct((B, N, S), jnp.float32)] * 2]


def call(
    candidate: Candidate, dtype: str = "bfloat16", **features: Any
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """(a candidate's kernel as a function, the shapes of its arguments): causal with grouped heads,
    unless `features` of Spec differ.
    """
    B, S, N, K = 2, 1536, 4, 2  # complete tiles of every size
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
    """The traced program of a candidate, which is the same for candidates whose kernels are the
    same.
    """
    fn, arguments = call(candidate, **features)
    return re.sub("0x[0-9a-f]+", "", str(jax.make_jaxpr(fn)(*arguments)))


def compiles_well(
    candidate: Candidate, dtype: str = "bfloat16", cache: str | None = None, **features: Any
) -> tuple[bool, dict[str, Any]]:
    """(whether a candidate passes, its resources). Causal with grouped heads unless `features` of
    Spec say otherwise.

    One fault is accepted: with segments, ptxas drains the wgmmas of the dk and dv kernel once in
    each block, between s and dp.

    cache: a directory that keeps the results of compilations.

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
    found = sorted({fault for kernel in kernels for fault in faults(kernel)})
    summary = {
        "registers": max(kernel.registers for kernel in kernels),
        "spills": sum(kernel.spill_stores + kernel.spill_loads for kernel in kernels),
        "shared_memory": max(kernel.dynamic_shared for kernel in kernels),
        "wgmma": sum(kernel.wgmma for kernel in kernels),
        "tma": sum(kernel.tma_loads + kernel.tma_stores for kernel in kernels),
        "faults": found,
    }
    accepted = candidate.kernel == "dkv" and features.get("segments")
    return all(accepted and fault.startswith("drained") for fault in found), summary


EVERYTHING = {"window": 300, "softcap": 30.0, "segments": True, "sinks": True}
"""All features that need registers and shared memory."""


def compile_all(cache: str | None, kernels: Sequence[Kernel] = KERNELS) -> None:
    """Writes candidates.json, and the entries of tuning.json without a measurement. kernels: those
    to compile; other lines stay.
    """
    lines = []
    if set(kernels) != set(KERNELS):
        others = set(candidates([kernel for kernel in KERNELS if kernel not in kernels]))
        lines = [
            line
            for line in json.loads(CANDIDATES.read_text(encoding="utf-8"))["candidates"]
            if of_line(line) in others
        ]
    for candidate in candidates(kernels):
        line = judged(candidate, cache)
        lines.append(line)
        print(f"{candidate}: {line}", flush=True)
    lines.sort(
        key=lambda line: (HEAD_DIMS.index(tuple(line["head_dims"])), KERNELS.index(line["kernel"]))
    )
    write(CANDIDATES, {"jax": jax.__version__, "candidates": lines})
    rows = [
        {
            "head_dims": head_dims,
            **{
                kernel: as_data(first)
                for kernel in KERNELS
                for first in [passing(kernel, head_dims)[0].tiles]
            },
        }
        for head_dims in HEAD_DIMS
    ]
    measured = (
        [
            row
            for row in json.loads(tuning.PATH.read_text(encoding="utf-8"))["rows"]
            if "measured" in row
        ]
        if tuning.PATH.exists()
        else []
    )
    write(tuning.PATH, {"rows": [*measured, *rows]})


def judged(candidate: Candidate, cache: str | None) -> dict[str, Any]:
    """The line of a candidate in candidates.json.

    passes: whether it does with and without features. Those of the forward that do not may pass
    without any: `only` then says whether causal or full.
    """
    passes, about = compiles_well(candidate, cache=cache)
    found: dict[str, Any] = about
    plain = ["causal"] if passes else []
    if passes:
        passes, full = compiles_well(candidate, cache=cache, **EVERYTHING)
        found = {"plain": about, "everything": full}
    only = {}
    if candidate.kernel == "forward" and not passes and "error" not in about:
        plain += ["full"] if compiles_well(candidate, cache=cache, causal=False)[0] else []
        only = {"only": plain} if plain else {}
    return {
        "kernel": candidate.kernel,
        "head_dims": candidate.head_dims,
        "passes": passes,
        **only,
        **as_data(candidate.tiles),
        **found,
    }


def passing(
    kernel: Kernel, head_dims: tuple[int, int], plain: str | None = None
) -> list[Candidate]:
    """The candidates that passed, from candidates.json. plain: "causal" or "full" adds those that
    pass only so, and without features.
    """
    lines = json.loads(CANDIDATES.read_text(encoding="utf-8"))["candidates"]
    found = [of_line(line) for line in lines if line["passes"] or plain in line.get("only", ())]
    return [
        candidate
        for candidate in found
        if (candidate.kernel, candidate.head_dims) == (kernel, tuple(head_dims))
    ]


def of_line(line: dict[str, Any]) -> Candidate:
    """The candidate of a line of candidates.json."""
    tiles = tiles_of(line["kernel"], **{name: line[name] for name in FIELDS if name in line})
    return Candidate(line["kernel"], tuple(line["head_dims"]), tiles)


FIELDS = tuple(
    {field.name: 0 for kind in (ForwardTiles, FusedTiles) for field in dataclasses.fields(kind)}
)
"""What the table and the candidates may state of a kernel's tiles."""


def tiles_of(kernel: Kernel, **fields: Any) -> Tiles | FusedTiles:
    """The tiles of a kernel from JSON data."""
    return {"forward": ForwardTiles, "fused": FusedTiles}.get(kernel, Tiles)(**fields)


def as_data(tiles: Tiles | FusedTiles) -> dict[str, Any]:
    """Tiles as JSON data, without what is as usual."""
    usual = {field.name: field.default for field in dataclasses.fields(tiles)}
    return {name: x for name, x in dataclasses.asdict(tiles).items() if x != usual[name]}


def write(path: Path, content: dict[str, Any]) -> None:
    """Writes JSON with a line for each entry of a list, for readable diffs."""
    lists = ",\n".join(
        f' "{name}": [\n' + ",\n".join(f"  {json.dumps(line)}" for line in value) + "\n ]"
        if isinstance(value, list)
        else f' "{name}": {json.dumps(value)}'
        for name, value in content.items()
    )
    path.write_text("{\n" + lists + "\n}\n", encoding="utf-8")


def milliseconds(
    call: Callable[..., Any], *arrays: Any, repeats: int = 5, calls: int = 10
) -> float:
    """The median time of a call over `repeats` rounds of `calls`, after a first call that compiles
    and warms up.
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
    """Times every candidate that passed on this process's GPU, for at most `seconds`. Returns
    entries for tuning.json, and writes them.

    cases: what to time; None: all head dims and both masks, at these lengths. The candidates of a
    case compile in parallel, and are timed when all have. One that does not compile or run here is
    left out, with a line that says so. An entry replaces an older one of the same device and shape;
    all others stay.
    """
    device, started = jax.local_devices()[0].device_kind, time.monotonic()
    new: list[dict[str, Any]] = []
    before = json.loads(tuning.PATH.read_text(encoding="utf-8"))["rows"]
    cases = list(order(lengths)) if cases is None else cases
    shortest = min(length for _, _, length in cases)
    for head_dims, causal, length in cases:
        timed: dict[str, list[tuple[float, Candidate]]] = {kernel: [] for kernel in KERNELS}
        plain = "causal" if causal else "full"
        programs = compiled(
            [one for kernel in KERNELS for one in passing(kernel, head_dims, plain)], length, causal
        )
        for candidate, program in programs.items():
            if time.monotonic() - started > seconds:
                return new
            about = f"{candidate} causal={causal} length {length}"
            try:
                timed[candidate.kernel].append(
                    (time_of(candidate, length, causal, program), candidate)
                )
                print(f"{about}: {timed[candidate.kernel][-1][0]:.3f} ms", flush=True)
            except Exception as error:
                print(f"{about}: {type(error).__name__}: {error}"[:300], flush=True)
        general = {
            kernel: [pair for pair in timed[kernel] if pair[1] in passing(kernel, head_dims)]
            for kernel in KERNELS
        }
        if not all(general.values()):
            return new
        conditions = {
            "device": device,
            "head_dims": head_dims,
            "causal": causal,
            "length": 0 if length == shortest else length,
        }
        rows = [{**conditions, **fastest(pairs)} for pairs in (timed, general)]
        new += rows[1:] if rows[0] == rows[1] else [{"plain": True, **rows[0]}, rows[1]]
        write(tuning.PATH, {"rows": merged(new, before)})
    return new


def fastest(timed: dict[str, list[tuple[float, Candidate]]]) -> dict[str, Any]:
    """The part of an entry of tuning.json that is measured, from the milliseconds of each kernel's
    candidates.
    """
    best = {kernel: min(pairs, key=lambda pair: pair[0]) for kernel, pairs in timed.items()}
    about = {
        "date": datetime.date.today().isoformat(),
        "jax": jax.__version__,
        "ms": {kernel: round(ms, 4) for kernel, (ms, _) in best.items()},
    }
    return {
        **{kernel: as_data(candidate.tiles) for kernel, (_, candidate) in best.items()},
        "measured": about,
    }


def merged(new: list[dict[str, Any]], before: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The entries of tuning.json: new ones, measured on one device, and older ones that they do not
    replace.
    """

    def conditions(row: dict[str, Any]) -> tuple[Any, ...]:
        return (
            row.get("device"),
            tuple(row["head_dims"]),
            row.get("causal"),
            row.get("length", 0),
            row.get("plain", False),
        )

    replaced, devices = {conditions(row) for row in new}, {row["device"] for row in new}
    kept = [row for row in before if conditions(row) not in replaced]
    same = [row for row in kept if row.get("device") in devices]
    # The first entry that matches is used, so longer lengths of a device come first, and what
    # serves fewer calls.
    return [
        *sorted(
            [*new, *same], key=lambda row: (-row.get("length", 0), not row.get("plain", False))
        ),
        *(row for row in kept if row not in same),
    ]


def order(lengths: tuple[int, ...]) -> Iterator[tuple[tuple[int, int], bool, int]]:
    """(head dims, causal, length) of each case to time, the most common first."""
    for head_dims in sorted(
        HEAD_DIMS, key=lambda dims: (dims != (128, 128), dims != (64, 64), dims)
    ):
        for length in sorted(lengths, reverse=True):
            for causal in (True, False):
                yield head_dims, causal, length


def arguments(candidate: Candidate, length: int) -> list[jax.ShapeDtypeStruct]:
    """The shapes that a candidate is timed at, as of `shapes`."""
    N, B = max(1, 2048 // candidate.head_dims[1]), max(1, 32768 // length)
    return shapes(candidate, length, B, N, N, "bfloat16")


def compiled(
    candidates: Sequence[Candidate], length: int, causal: bool
) -> dict[Candidate, Future[Any]]:
    """The kernels at a length, compiled for this process's GPU in parallel. All are done, or
    failed.
    """

    def program(candidate: Candidate) -> Any:
        spec = Spec(length, length, 1 / math.sqrt(candidate.head_dims[0]), causal=causal)
        return (
            jax.jit(lambda *x: run(spec, candidate, {}, *x))
            .lower(*arguments(candidate, length))
            .compile()
        )

    with ThreadPoolExecutor(max(1, (os.cpu_count() or 2) // 2)) as pool:
        return {candidate: pool.submit(program, candidate) for candidate in candidates}


def time_of(candidate: Candidate, length: int, causal: bool, program: Future[Any]) -> float:
    """The milliseconds of a kernel on random data. program: of `compiled`, whose errors it
    raises.
    """
    wanted = arguments(candidate, length)
    keys = jax.random.split(jax.random.key(0), len(wanted))
    return milliseconds(
        program.result(),
        *(jax.random.normal(key, x.shape, x.dtype) for key, x in zip(keys, wanted, strict=True)),
    )


def main() -> None:
    """Searches the tilings, prints a table and writes those that won."""
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
            (
                "error: --measure needs a Hopper GPU (compute capability 9.0), and this is "
                f"{device.device_kind}\n"
            ),
        )
    measure(args.seconds)


if __name__ == "__main__":
    main()
