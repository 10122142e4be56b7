"""Scaling, compiled: one model on many numbers of GPUs (strong), or models or batches that grow
with the GPUs (weak). At each point the planner searches for the layout.

A finished point is kept, so that an interrupted study continues; the reports of an unfinished one
are in the cache of compiled reports.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import mesh_lm
from mesh_lm.config import TrainConfig, load
from mesh_lm.config.layout import with_fields
from mesh_lm.errors import ConfigError
from mesh_lm.planning import best
from mesh_lm.planning.best_table import layout_words
from mesh_lm.planning.climb import climb
from mesh_lm.planning.studies.published import STRONG, TARGET, WEAK
from sharding_rules import ShardingRuleError
from sharding_rules.lab import LabError, Report
from sharding_rules.lab.summary import over, wire_by_axes
from sharding_rules.lab.targets import TARGETS, require_whole_nodes

GIB = 2**30
_FORMAT = 1
"""The format of a kept point; points of another format are made again."""
Compile = Callable[[TrainConfig, int], Report]
"""Compiles a config for a number of GPUs."""


class ScalingRow(NamedTuple):
    """One point, from the fast to the slow end of the prediction; None without a prediction."""

    config: str
    parameters: int
    gpus: int
    batch: int
    """Sequences of a step."""
    status: str
    """Empty, or why no layout serves the point."""
    step_fast_s: float | None = None
    step_slow_s: float | None = None
    tokens_fast: float | None = None
    """Tokens per second of all GPUs."""
    tokens_slow: float | None = None
    tflops_fast: float | None = None
    """TFLOP/s of each GPU, by Megatron-LM's formula."""
    tflops_slow: float | None = None
    mfu_fast: float | None = None
    mfu_slow: float | None = None
    published_tflops: float | None = None
    waits_fast_s: float | None = None
    """Seconds of the step during which compute waits for the network, at the fast end."""
    matmul_fast_s: float | None = None
    """Seconds of the step in matmuls, at the fast end."""
    matmul_slow_s: float | None = None
    sent_gib: float | None = None
    """Sent by a GPU in a step."""
    peak_gib: float | None = None
    layout: str = ""
    """What the search has changed of the config."""
    options: str = ""
    """The words of a command line that do so."""
    programs: int = 0
    """Programs that were compiled."""
    seconds: float = 0.0
    """How long the search took here."""


class ShareRow(NamedTuple):
    """The communication of one point, by kind of collective and mesh axes."""

    config: str
    gpus: int
    kind: str
    axes: str
    link: str
    """NVLink, or network if a group spans several nodes."""
    sent_gib: float
    """By a GPU in a step."""
    network_s: float
    """Predicted seconds of the collectives in a step if nothing else ran, at the fast end."""
    waits_s: float
    """Predicted seconds during which compute waits for them."""
    waits_share: float
    """The same over the step."""


class Point(NamedTuple):
    """A config on a number of GPUs."""

    name: str
    config: TrainConfig
    gpus: int
    published_tflops: float | None = None
    """What Megatron-LM has measured there, TFLOP/s of each GPU."""
    status: str = ""
    """Why there is no such point: the batch does not divide."""


class Result(NamedTuple):
    """What a point came out at."""

    row: ScalingRow
    shares: list[ShareRow]


def strong_points(
    name: str, config: TrainConfig, counts: Sequence[int], target: str = TARGET
) -> list[Point]:
    """Returns the points of one model, with one batch, on numbers of GPUs.

    Args:
      name: of a config that comes with mesh_lm, for which there may be published points; that of a
        file has none.
      target: the GPU. What is published is of H100s, and beside no other.
    """
    published = dict(STRONG.get(name, {}))
    if name in WEAK and not published:
        published = {WEAK[name].gpus: WEAK[name].tflops}
    if target != TARGET:
        published = {}
    return [Point(name, config, gpus, published.get(gpus)) for gpus in counts]


def weak_points(
    name: str, config: TrainConfig, own_gpus: int, counts: Sequence[int], target: str = TARGET
) -> list[Point]:
    """Returns the points of one model whose batch grows with the GPUs.

    own_gpus: the number of GPUs for which the config's batch is. Others: those of `strong_points`.
    """
    points = []
    for gpus in counts:
        batch = config.train.global_batch * gpus
        if batch % own_gpus:
            status = (
                f"{config.train.global_batch} sequences on {own_gpus:,} GPUs are no whole number "
                f"on {gpus:,}"
            )
            points.append(Point(name, config, gpus, status=status))
            continue
        train = dataclasses.replace(config.train, global_batch=batch // own_gpus)
        is_published = name in WEAK and WEAK[name].gpus == gpus == own_gpus
        tflops = WEAK[name].tflops if is_published and target == TARGET else None
        points.append(Point(name, dataclasses.replace(config, train=train), gpus, tflops))
    return points


def published_points(target: str = TARGET) -> list[Point]:
    """Returns the points of Megatron-LM's table: models that grow with the GPUs. On other GPUs than
    H100s they have nothing published.
    """
    return [
        Point(name, load(name), row.gpus, row.tflops if target == TARGET else None)
        for name, row in WEAK.items()
    ]


@dataclasses.dataclass(frozen=True)
class Search:
    """How the layout of each point is searched for."""

    target: str
    compiles: int
    """Programs at most, besides the config as it is."""
    keep: str
    """What stays, as --keep of `mesh-lm plan` has it."""
    compile_one: Compile


class Kept:
    """The finished points of a study, in a file; in memory without one."""

    def __init__(self, file: str = "") -> None:
        self._file = Path(file).expanduser() if file else None
        self._results: dict[str, Any] = {}
        if self._file and self._file.is_file():
            try:
                self._results = json.loads(self._file.read_text(encoding="utf-8"))
            except (OSError, ValueError):
                # A torn file is made again, from the cached reports.
                self._results = {}

    def find(self, key: str) -> Result | None:
        """Returns a finished point; None if it is not there."""
        data = self._results.get(key)
        if data is None:
            return None
        try:
            return Result(ScalingRow(**data["row"]), [ShareRow(**one) for one in data["shares"]])
        except (TypeError, KeyError):
            return None

    def add(self, key: str, result: Result) -> None:
        """Keeps a point. Raises ConfigError if the file cannot be written."""
        shares = [share._asdict() for share in result.shares]
        self._results[key] = {"row": result.row._asdict(), "shares": shares}
        if not self._file:
            return
        new = self._file.with_suffix(".new")
        try:
            new.write_text(json.dumps(self._results, indent=1), encoding="utf-8")
            os.replace(new, self._file)
        except OSError as error:
            raise ConfigError(
                f"cannot write the points of the study to {self._file}: {error.strerror}"
            ) from error


def key_of(point: Point, search: Search) -> str:
    """Returns the key under which a point is kept: it changes with all that the result depends
    on.
    """
    config = point.config
    identity = [
        _FORMAT, mesh_lm.__version__, version("jax"), point.name, point.gpus, search.target,
        search.compiles, search.keep, repr(config.model), repr(config.train), repr(config.mesh),
        repr(config.pipeline), repr(config.optimizer), repr(config.rules), repr(config.diloco),
        config.launch.xla_flags, config.data.documents, config.health.outlier, config.seed,
    ]  # fmt: skip
    return hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:16]


def scaled(
    points: Sequence[Point],
    search: Search,
    kept: Kept,
    say: Callable[[str], None] = lambda text: None,
) -> Iterator[Result]:
    """Yields the result of each point, in order. An interruption (control-C) ends it; the points
    that are finished by then are in `kept`. A point that failed, such as for a compiler that lacked
    memory, is yielded with the error as its status and not kept: the same command tries it again.

    say: receives the progress.

    Raises ConfigError for a wrong --keep.
    """
    best.parse_kept(search.keep)
    n_new = sum(kept.find(key_of(point, search)) is None and not point.status for point in points)
    if n_new:
        say(
            f"{len(points)} points, {n_new} of them new, with at most {search.compiles + 1} "
            "programs each; a program takes 10 to 60 s on two cores, more if layers are unrolled"
        )
    durations: list[float] = []
    for number, point in enumerate(points, start=1):
        where = f"[{number}/{len(points)}] {point.name} on {point.gpus:,} GPUs"
        key = key_of(point, search)
        result = kept.find(key)
        if result is not None:
            say(f"{where}: kept from before")
            yield result
            continue
        if point.status:
            yield Result(_row(point, point.status), [])
            continue
        say(where)
        began = time.monotonic()
        try:
            result = _searched(point, search, say)
        except (KeyboardInterrupt, best.Interrupted):
            result = None
        except (ConfigError, LabError, ShardingRuleError) as error:
            status = str(error).partition("\n")[0]
            say(f"{where}: {status}")
            yield Result(_row(point, status), [])
            continue
        if result is None:
            say(f"interrupted at {where}: the same command continues")
            return
        durations.append(time.monotonic() - began)
        result = result._replace(row=result.row._replace(seconds=round(durations[-1], 1)))
        kept.add(key, result)
        n_left = sum(
            kept.find(key_of(other, search)) is None and not other.status
            for other in points[number:]
        )
        say(f"{where}: {words(result.row)}; {_remaining(durations, n_left)}")
        yield result


def _remaining(durations: Sequence[float], n_left: int) -> str:
    if not n_left:
        return "no point is left"
    minutes = n_left * sum(durations) / len(durations) / 60
    return f"{n_left} left, about {minutes:.0f} minutes"


def words(row: ScalingRow) -> str:
    """Returns a point in words: its step and its TFLOP/s, or its status."""
    if row.status or row.step_fast_s is None:
        return row.status or "no prediction"
    text = (
        f"{row.step_fast_s:.3g} to {row.step_slow_s:.3g} s, {row.tflops_slow:.0f} to "
        f"{row.tflops_fast:.0f} TFLOP/s on each GPU"
    )
    if row.published_tflops:
        text += f" (published {row.published_tflops:.0f})"
    return text


def _searched(point: Point, search: Search, say: Callable[[str], None]) -> Result | None:
    """Returns the result of a search; None if it was interrupted.

    Raises ConfigError, LabError and ShardingRuleError if no layout compiles.
    """
    config = point.config
    require_whole_nodes(TARGETS[search.target], point.gpus)
    reason = best.why_only_compiled(config)
    arguments = (
        config,
        point.gpus,
        search.target,
        lambda changed: search.compile_one(changed, point.gpus),
    )
    kept = best.parse_kept(search.keep)
    if reason:
        found = climb(*arguments, compiles=search.compiles, kept=kept, reason=reason, say=say)
    else:
        found = best.search(*arguments, compiles=search.compiles, kept=kept, say=say)
    if found.interrupted:
        return None
    n_programs = len(found.trials) + (found.committed is not None)
    if found.best is None:
        smallest = min(trial.report.peak_bytes for trial in found.candidates) / GIB
        status = f"does not fit: {smallest:,.1f} GiB of the smallest of {n_programs} programs"
        return Result(_row(point, status)._replace(programs=n_programs), [])
    trial = found.best
    final = with_fields(config, trial.fields)
    row = _predicted(point, final, trial.report)._replace(
        layout=layout_words(trial.changes),
        options=" ".join(best.options(trial.changes)),
        programs=n_programs,
    )
    return Result(row, shares_of(point.name, trial.report))


def _row(point: Point, status: str) -> ScalingRow:
    model: Any = point.config.model
    n_params = model.n_params() if hasattr(model, "n_params") else 0
    batch = point.config.train.global_batch
    return ScalingRow(
        *(point.name, n_params, point.gpus, batch, status),
        published_tflops=point.published_tflops,
    )


def _predicted(point: Point, config: TrainConfig, report: Report) -> ScalingRow:
    """Returns the row of a compiled layout."""
    row = _row(point, "")._replace(peak_gib=report.peak_bytes / GIB)
    band = report.step_band
    if band is None or report.timeline is None:
        return row
    fast = band.fast / 1e6
    slow = band.slow / 1e6
    flops = megatron_flops(config) / point.gpus
    model_flops = config.model.flops_per_token() * config.tokens_per_step / point.gpus
    peak = TARGETS[report.target].flops["bf16"] if report.target in TARGETS else 0.0
    slow_timeline = report.sustained or report.timeline
    return row._replace(
        step_fast_s=fast,
        step_slow_s=slow,
        tokens_fast=config.tokens_per_step / fast,
        tokens_slow=config.tokens_per_step / slow,
        tflops_fast=flops / fast / 1e12,
        tflops_slow=flops / slow / 1e12,
        mfu_fast=model_flops / fast / peak if peak else None,
        mfu_slow=model_flops / slow / peak if peak else None,
        waits_fast_s=report.timeline.exposed / 1e6,
        matmul_fast_s=report.timeline.kinds.get("matmul", 0.0) / 1e6,
        matmul_slow_s=slow_timeline.kinds.get("matmul", 0.0) / 1e6,
        sent_gib=sum(wire_by_axes(report).values()) / GIB,
    )


def megatron_flops(config: TrainConfig) -> float:
    """Returns the FLOPs of a step as Megatron-LM counts them: each query with all keys, causal or
    not, and nothing twice.

    72 B s l h^2 (1 + s / 6 h + V / 12 l h) for GPT (Narayanan et al., arXiv 2104.04473, equation 3,
    without its recomputation).
    """
    model: Any = config.model
    in_weights = model.flops_per_token() - model.attention_flops_per_token()
    in_attention = 12 * model.n_layers * model.n_heads * model.d_head * model.seq_len
    return config.tokens_per_step * (in_weights + in_attention)


# Figure 8: communication by kind and axes.


def shares_of(name: str, report: Report) -> list[ShareRow]:
    """Returns the communication of a compiled step by kind and axes, those for which compute waits
    longest first.
    """
    step = report.timeline.step if report.timeline else 0.0
    sums: dict[tuple[str, str, str], list[float]] = {}
    for collective in report.collectives:
        link = "network" if collective.nodes > 1 else "NVLink"
        key = (collective.kind, over(collective.axes), link)
        total = sums.setdefault(key, [0.0, 0.0, 0.0])
        total[0] += collective.times * collective.wire / GIB
        total[1] += collective.times * collective.duration / 1e6
        total[2] += collective.exposed / 1e6
    rows = []
    for (kind, axes, link), (sent, network, waits) in sums.items():
        share = 1e6 * waits / step if step else 0.0
        rows.append(ShareRow(name, report.n_devices, kind, axes, link, sent, network, waits, share))
    return sorted(rows, key=lambda row: (-row.waits_s, -row.sent_gib))


# Beside what is published.


def beside_published(rows: Sequence[ScalingRow], rates: Mapping[str, float]) -> Iterator[str]:
    """Yields a sentence: how many published points are inside the band; and one for each that is
    not, with an assumption and the value that would be needed of it.

    rates: the share of the tensor cores' peak that large matmuls reach, at the "fast" and the
    "slow" end.
    """
    beside = [row for row in rows if row.published_tflops and row.tflops_fast]
    if not beside:
        return
    outside = [row for row in beside if not _is_inside(row)]
    yield (
        f"{len(beside) - len(outside)} of {len(beside)} published points are inside the band. "
        "Megatron-LM measured its own program; these are predictions of this one."
    )
    for row in outside:
        yield _explanation(row, rates)


def _is_inside(row: ScalingRow) -> bool:
    published = row.published_tflops or 0.0
    return (row.tflops_slow or 0.0) <= published <= (row.tflops_fast or 0.0)


def _explanation(row: ScalingRow, rates: Mapping[str, float]) -> str:
    """Returns the assumption that would have to differ for a published point, and by how much."""
    where = f"{row.config} on {row.gpus:,}: published {row.published_tflops:.0f} TFLOP/s"
    assert row.published_tflops and row.tflops_fast and row.step_fast_s and row.step_slow_s
    published_s = row.step_fast_s * row.tflops_fast / row.published_tflops
    if published_s > row.step_slow_s:
        extra = published_s - row.step_slow_s
        matmul = row.matmul_slow_s or 0.0
        needed = rates["slow"] * matmul / (matmul + extra) if matmul else 0.0
        return (
            f"{where} is {published_s / row.step_slow_s - 1:.0%} slower than the slow end; large "
            f"matmuls at {needed:.2f} of the peak, in place of {rates['slow']:.2f}, would explain "
            "it"
        )
    missing = row.step_fast_s - published_s
    waits = row.waits_fast_s or 0.0
    beyond = f"{where} is {1 - published_s / row.step_fast_s:.0%} faster than the fast end"
    if missing <= waits:
        return (
            f"{beyond}; waits for the network of {(waits - missing) / published_s:.0%} of the "
            f"step, in place of {waits / row.step_fast_s:.0%}, would explain it: more overlap than "
            "XLA's schedule has, or faster links"
        )
    matmul = row.matmul_fast_s or 0.0
    needed = rates["fast"] * matmul / (matmul - missing) if matmul > missing else math.inf
    if needed > 1:
        return f"{beyond}; no single assumption explains it: not even matmuls at the peak"
    return (
        f"{beyond}; large matmuls at {needed:.2f} of the peak, in place of {rates['fast']:.2f}, "
        "would explain it"
    )
