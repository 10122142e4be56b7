"""Strategies side by side, on paper: memory, bytes by network, and efficiency of each, for models
of many sizes on many numbers of GPUs.

A strategy is a set of layouts; the fastest of them that fits stands for it. Times and peaks are
those of the formulas (`mesh_lm.planning.paper`), bytes those of the closed forms. ZeRO-2 and
context parallelism have bytes and a state, and no formula for a time.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from mesh_lm.config import TrainConfig
from mesh_lm.config.layout import Fields, with_fields
from mesh_lm.planning.best import (
    changes_of,
    fields_as_they_are,
    fields_of,
    hardware_of,
    options,
)
from mesh_lm.planning.best_table import layout_words
from mesh_lm.planning.closed_forms.config import expected_of
from mesh_lm.planning.closed_forms.subjects import NoFormError
from mesh_lm.planning.closed_forms.terms import Term
from mesh_lm.planning.paper.constants import HELD_OUT
from mesh_lm.planning.paper.layouts import (
    DDP,
    DISTRIBUTED,
    ZERO1,
    ZERO3,
    Layouts,
    enumerated,
)
from mesh_lm.planning.paper.price import Price, price
from mesh_lm.planning.paper.sizes import Hardware, ModelSizes
from mesh_lm.planning.studies.models import decoder
from mesh_lm.planning.studies.ranges import model_sizes, size_word
from sharding_rules import MeshConfig
from sharding_rules.lab import LabError, Report
from sharding_rules.lab.rates import SUSTAINED
from sharding_rules.lab.side_by_side import compiled_side_by_side, parallel
from sharding_rules.lab.targets import TARGETS
from sharding_rules.mesh import AXES

GIB = 2**30
TIE = HELD_OUT.step_mean
"""Share of the step within which the formulas tell no two strategies apart."""
HEADROOM = HELD_OUT.peak_mean
"""Share of the peak on paper that must be free as well: programs whose peak on paper barely fits do
not fit when they are compiled, or are slow because XLA saves memory."""
_NO_TIME = "no formula for its time: compile it"
_RING = 8
"""GPUs over which context parallelism shards a sequence here: those of a node."""


class StrategyRow(NamedTuple):
    """One strategy, for a model on a number of GPUs. What is not known is None."""

    size: str
    """The size of the model, as 30b."""
    parameters: int
    gpus: int
    strategy: str
    status: str
    """Empty; or why the strategy does not serve this point, or what is not known of it."""
    fits: bool
    """Whether the peak on paper leaves HEADROOM free, besides the margin of a plan."""
    state_gib: float | None = None
    """Weights, gradients and Adam's moments of a GPU, by arithmetic."""
    peak_gib: float | None = None
    inside_gib: float | None = None
    """Sent by a GPU in a step, in groups of one node."""
    between_gib: float | None = None
    """The same in groups that span several nodes."""
    step_fast_s: float | None = None
    step_slow_s: float | None = None
    mfu_fast: float | None = None
    """Model FLOPs over the tensor cores' peak, at the fast end of the step."""
    mfu_slow: float | None = None
    waits: float | None = None
    """Share of the step during which compute waits for the network, at the fast end."""
    layout: str = ""
    options: str = ""
    """The words of a command line that set the batch and all fields of the layout, whatever a
    config has."""
    compiled_fast_s: float | None = None
    compiled_slow_s: float | None = None
    compiled_peak_gib: float | None = None
    compiled_fits: bool | None = None

    @property
    def seconds(self) -> float:
        """The fast end of the step: compiled if it was, else on paper; infinite if there is none,
        or the program does not fit.
        """
        if self.compiled_fits is not None:
            return (self.compiled_fast_s or math.inf) if self.compiled_fits else math.inf
        if not self.fits or self.step_fast_s is None:
            return math.inf
        return self.step_fast_s

    @property
    def mfu(self) -> tuple[float, float] | None:
        """The slow and the fast end of the MFU: compiled if it was, else on paper."""
        if not (self.mfu_fast and self.mfu_slow and self.step_fast_s and self.step_slow_s):
            return None
        if not (self.compiled_fast_s and self.compiled_slow_s):
            return self.mfu_slow, self.mfu_fast
        slow = self.mfu_slow * self.step_slow_s / self.compiled_slow_s
        return slow, self.mfu_fast * self.step_fast_s / self.compiled_fast_s


@dataclasses.dataclass(frozen=True)
class Strategy:
    """A set of layouts."""

    name: str
    is_pure: bool
    """Whether it is data parallelism alone."""
    chosen: Callable[[Layouts], np.ndarray]
    """Layouts -> which of them are of this strategy."""


def _is_alone(layouts: Layouts) -> np.ndarray:
    """Returns which layouts have neither stages nor tensor parallelism."""
    return (layouts.pipeline == 1) & (layouts.tensor == 1)


def _replicas(kind: int) -> Callable[[Layouts], np.ndarray]:
    return lambda layouts: _is_alone(layouts) & (layouts.fsdp == 1) & (layouts.replicas == kind)


def _is_fsdp(layouts: Layouts) -> np.ndarray:
    return _is_alone(layouts) & (layouts.fsdp > 1) & (layouts.data == 1)


def _is_hsdp(layouts: Layouts) -> np.ndarray:
    return _is_alone(layouts) & (layouts.fsdp > 1) & (layouts.data > 1)


def _tensor(sequence_parallel: int) -> Callable[[Layouts], np.ndarray]:
    return lambda layouts: (
        (layouts.pipeline == 1)
        & (layouts.tensor > 1)
        & (layouts.fsdp == 1)
        & (layouts.replicas == DDP)
        & (layouts.sequence_parallel == sequence_parallel)
    )


def _is_tensor_and_sharded(layouts: Layouts) -> np.ndarray:
    has_shards = (layouts.fsdp > 1) | (layouts.replicas != DDP)
    return (layouts.pipeline == 1) & (layouts.tensor > 1) & has_shards


def _is_pipeline(layouts: Layouts) -> np.ndarray:
    return (layouts.pipeline > 1) & (layouts.tensor == 1)


def _is_three_dimensional(layouts: Layouts) -> np.ndarray:
    return (layouts.pipeline > 1) & (layouts.tensor > 1)


ZERO_2 = "ZeRO-2"
CONTEXT = "CP + ZeRO-3"
STRATEGIES = (
    Strategy("DDP", True, _replicas(DDP)),
    Strategy("ZeRO-1", True, _replicas(ZERO1)),
    Strategy("distributed", True, _replicas(DISTRIBUTED)),
    Strategy("ZeRO-3", True, _replicas(ZERO3)),
    Strategy("FSDP", True, _is_fsdp),
    Strategy("HSDP", True, _is_hsdp),
    Strategy("TP", False, _tensor(0)),
    Strategy("TP + SP", False, _tensor(1)),
    Strategy("TP + ZeRO", False, _is_tensor_and_sharded),
    Strategy("PP", False, _is_pipeline),
    Strategy("3D", False, _is_three_dimensional),
)
"""From the one with the fewest decisions to the one with most."""
NAMES = ("DDP", "ZeRO-1", ZERO_2, *(one.name for one in STRATEGIES[2:]), CONTEXT)
"""All of them in the order of the tables."""
PURE = {ZERO_2, *(one.name for one in STRATEGIES if one.is_pure)}


@dataclasses.dataclass(frozen=True)
class _Point:
    """A model on a number of GPUs."""

    config: TrainConfig
    size: str
    gpus: int
    target: str
    sizes: ModelSizes

    @property
    def n_params(self) -> int:
        """Parameters of the model."""
        model: Any = self.config.model
        return model.n_params()

    @property
    def model_flops(self) -> float:
        """FLOPs of the model on one GPU in a step."""
        return self.config.model.flops_per_token() * self.config.tokens_per_step / self.gpus

    def mfu(self, seconds: float) -> float:
        return self.model_flops / seconds / TARGETS[self.target].flops["bf16"]


def side_by_side(
    n_params: Sequence[float],
    counts: Sequence[int],
    target: str,
    *,
    seq_len: int,
    batch: int,
    say: Callable[[str], None] = lambda text: None,
) -> list[StrategyRow]:
    """Returns a row for each size, number of GPUs and strategy; points that no layout serves have a
    status.

    Args:
      n_params: sizes of models; `models.decoder` makes them.
      counts: numbers of GPUs.
      target: the GPU, as in `mesh-lm plan`.
      seq_len: tokens of a sequence.
      batch: sequences of a step, which are the same on all numbers of GPUs.
      say: receives a line for each size.
    """
    rows = []
    for n in n_params:
        say(f"{size_word(n)}: strategies on {counts[0]:,} to {counts[-1]:,} GPUs, on paper")
        config = decoder(n, seq_len, batch)
        sizes = ModelSizes.of(config)
        assert sizes is not None  # the family is dense
        for gpus in counts:
            rows += _rows(_Point(config, size_word(n), gpus, target, sizes))
    return rows


def _rows(point: _Point) -> list[StrategyRow]:
    """Returns the rows of a point, in the order of NAMES."""
    fast_hardware = hardware_of(point.target)
    slow_hardware = hardware_of(point.target, SUSTAINED)
    layouts = enumerated(point.sizes, point.gpus, fast_hardware.node)
    by_name: dict[str, StrategyRow] = {}
    chosen: dict[str, Mapping[str, float]] = {}
    prices = price(point.sizes, layouts, fast_hardware) if len(layouts) else None
    for strategy in STRATEGIES:
        at = np.flatnonzero(strategy.chosen(layouts)) if prices else np.zeros(0, int)
        if not prices or not len(at):
            by_name[strategy.name] = _unserved(point, strategy.name, _why_none(point, strategy))
            continue
        i = _representative(prices, at, fitting_bytes(point.target))
        layout = layouts.row(i)
        chosen[strategy.name] = layout
        by_name[strategy.name] = _priced(point, strategy.name, layout, prices, i, slow_hardware)
    by_name[ZERO_2] = _zero2(point, chosen.get("ZeRO-1"), by_name["ZeRO-1"])
    by_name[CONTEXT] = _context(point, chosen.get("ZeRO-3"))
    return [by_name[name] for name in NAMES]


def fitting_bytes(target: str) -> float:
    """Returns the highest peak on paper that counts as fitting."""
    return hardware_of(target).memory / (1 + HEADROOM)


def _representative(prices: Price, at: np.ndarray, limit: float) -> int:
    """Returns the fastest layout that fits among these; if none fits, the one that needs least.

    limit: the highest peak that fits.
    """
    fits = prices.peak[at] <= limit
    if fits.any():
        return int(at[np.argmin(np.where(fits, prices.seconds[at], np.inf))])
    return int(at[np.argmin(prices.peak[at])])


def _priced(
    point: _Point,
    strategy: str,
    layout: Mapping[str, float],
    prices: Price,
    i: int,
    slow_hardware: Hardware,
) -> StrategyRow:
    fields = fields_of(layout, point.config)
    fast = float(prices.seconds[i])
    peak = float(prices.peak[i])
    slow = float(price(point.sizes, Layouts.of([dict(layout)]), slow_hardware).seconds[0])
    fits = peak <= fitting_bytes(point.target)
    inside, between = _bytes_by_network(with_fields(point.config, fields), slow_hardware.node)
    status = "" if fits else f"does not fit: {peak / GIB:,.0f} GiB on paper"
    changes = changes_of(fields, point.config)
    return StrategyRow(
        size=point.size,
        parameters=point.n_params,
        gpus=point.gpus,
        strategy=strategy,
        status=status,
        fits=fits,
        state_gib=state_bytes(point.sizes, layout) / GIB,
        peak_gib=peak / GIB,
        inside_gib=inside,
        between_gib=between,
        step_fast_s=fast,
        step_slow_s=max(fast, slow),
        mfu_fast=point.mfu(fast),
        mfu_slow=point.mfu(max(fast, slow)),
        waits=float(prices.exposed[i]) / fast,
        layout=layout_words(changes),
        options=_words(point, fields),
    )


def _words(point: _Point, fields: Fields) -> str:
    """Returns the words that make a config of the user's own run in this layout.

    fields: some of the layout's; the others are those of the point's config.
    """
    whole: Fields = {"train.global_batch": point.sizes.global_batch}
    whole |= {f"mesh.{axis}": 1 for axis in AXES}
    whole["mesh.extra"] = ()
    whole |= fields_as_they_are(point.config)
    return " ".join(options(whole | fields))


def _unserved(point: _Point, strategy: str, status: str) -> StrategyRow:
    """Returns the row of a strategy that has no layout here."""
    return StrategyRow(
        size=point.size,
        parameters=point.n_params,
        gpus=point.gpus,
        strategy=strategy,
        status=status,
        fits=False,
    )


def _why_none(point: _Point, strategy: Strategy) -> str:
    """Returns why a strategy has no layout on a number of GPUs."""
    batch = point.sizes.global_batch
    if strategy.is_pure and point.gpus > batch:
        return f"more GPUs than the {batch:,} sequences of a step"
    if strategy.is_pure and batch % point.gpus:
        return f"a step's {batch:,} sequences do not divide by {point.gpus:,}"
    return "no layout divides the model and the batch"


def _bytes_by_network(config: TrainConfig, node: int) -> tuple[float | None, float | None]:
    """Returns the GiB that a GPU sends in a step: in groups of one node, and in groups that span
    several; None where there is no closed form.
    """
    try:
        terms = expected_of(config)
    except NoFormError:
        return None, None
    crosses = _axes_between_nodes(config.mesh, node)
    between = sum(term.wire_bytes for term in terms if _spans(term, crosses))
    everything = sum(term.wire_bytes for term in terms)
    return (everything - between) / GIB, between / GIB


def _axes_between_nodes(mesh: MeshConfig, node: int) -> set[str]:
    """Returns the axes whose groups span several nodes; along the last axis GPUs are nearest."""
    crosses = set()
    sizes = mesh.sizes()
    span = 1
    for axis in reversed(AXES):
        span *= sizes[axis]
        if sizes[axis] > 1 and span > node:
            crosses.add(axis)
    return crosses


def _spans(term: Term, crosses: set[str]) -> bool:
    return bool(crosses & set(term.axes))


def state_bytes(sizes: ModelSizes, layout: Mapping[str, float], *, zero2: bool = False) -> float:
    """Returns the bytes of the training state on one GPU of the stage that has most: fp32 weights,
    their bf16 copy if they are gathered once a step, fp32 gradients, and Adam's two moments.

    layout: a row of `Layouts`. zero2: gradients are sharded as the moments are.
    """
    elements = device_elements(sizes, layout)
    kind = layout["replicas"]
    has_stages = layout["pipeline"] > 1
    shards = layout["data"]
    weight_ways = shards if kind in (DISTRIBUTED, ZERO3) else 1
    moment_ways = shards if kind != DDP else 1
    gradient_ways = shards if zero2 or (kind == ZERO3 and not has_stages) else 1
    # Layers that gather their own weights (zero3) hold no copy of all of them.
    has_copy = kind == DISTRIBUTED or (kind == ZERO3 and has_stages)
    weights = 4 * elements / weight_ways + (2 * elements if has_copy else 0)
    return weights + 8 * elements / moment_ways + 4 * elements / gradient_ways


def device_elements(sizes: ModelSizes, layout: Mapping[str, float]) -> float:
    """Returns the parameters of one GPU, replicas aside: the layers of its stage, and the tables,
    which every stage has.
    """
    layers = math.ceil(sizes.layers / layout["pipeline"])
    in_layers = layers * (sizes.matrices / layout["tensor"] + sizes.vectors)
    at_the_ends = sizes.tables / layout["tensor"] + sizes.positions
    return (in_layers + at_the_ends) / layout["fsdp"]


def _zero2(point: _Point, layout: Mapping[str, float] | None, zero1: StrategyRow) -> StrategyRow:
    """Returns the row of ZeRO-2: the layout of ZeRO-1, with gradients sharded as well."""
    if layout is None:
        return zero1._replace(strategy=ZERO_2)
    fields = fields_of(layout, point.config) | {"rules": "zero2"}
    return _without_time(point, ZERO_2, fields, state_bytes(point.sizes, layout, zero2=True))


def _context(point: _Point, layout: Mapping[str, float] | None) -> StrategyRow:
    """Returns the row of context parallelism: a ring over the GPUs of a node, zero3 over all.

    layout: that of ZeRO-3, whose microbatches have as many tokens on a GPU; None if it has none.
    """
    batch = point.sizes.global_batch
    n_rings = point.gpus // _RING
    if point.gpus % _RING or batch % n_rings:
        status = f"a step's {batch:,} sequences do not divide by {point.gpus:,} / {_RING}"
        return _unserved(point, CONTEXT, status)
    fields: Fields = {"train.microbatches": batch // n_rings}
    if layout:
        fields = fields_of(layout, point.config)
    fields |= {
        "rules": "zero3+ring",
        "mesh.data": n_rings,
        "mesh.sequence": _RING,
        "launch.xla_flags": "layers",
    }
    elements = device_elements(point.sizes, dict.fromkeys(AXES, 1.0))
    return _without_time(point, CONTEXT, fields, 16 * elements / point.gpus)


def _without_time(point: _Point, strategy: str, fields: Fields, n_bytes: float) -> StrategyRow:
    """Returns the row of a strategy whose time has no formula."""
    inside, between = _bytes_by_network(
        with_fields(point.config, fields), TARGETS[point.target].node
    )
    changes = changes_of(fields, point.config)
    return _unserved(point, strategy, _NO_TIME)._replace(
        state_gib=n_bytes / GIB,
        inside_gib=inside,
        between_gib=between,
        layout=layout_words(changes),
        options=_words(point, fields),
    )


# Which strategy wins.


def points_of(rows: Iterable[StrategyRow]) -> dict[tuple[str, int], list[StrategyRow]]:
    """Returns the rows by (size, GPUs), in the order of the rows."""
    by_point: dict[tuple[str, int], list[StrategyRow]] = {}
    for row in rows:
        by_point.setdefault((row.size, row.gpus), []).append(row)
    return by_point


def winner(rows: Sequence[StrategyRow]) -> StrategyRow | None:
    """Returns the strategy to use at one point: of those whose step is within the formulas' mean
    error of the fastest, the one with the fewest decisions; None if nothing fits.
    """
    fastest = min((row.seconds for row in rows), default=math.inf)
    if fastest == math.inf:
        return None
    return next(row for row in rows if row.seconds <= (1 + TIE) * fastest)


def best_of(rows: Sequence[StrategyRow], *, pure: bool) -> StrategyRow | None:
    """Returns the fastest row of pure data parallelism, or of the other strategies; None if none
    fits.
    """
    chosen = [row for row in rows if (row.strategy in PURE) == pure and row.seconds < math.inf]
    return min(chosen, key=lambda row: row.seconds, default=None)


# Compiled points.


def compiled(
    rows: Sequence[StrategyRow],
    n_programs: int,
    target: str,
    compile_one: Callable[[TrainConfig, int], Report],
    *,
    seq_len: int,
    batch: int,
    say: Callable[[str], None] = lambda text: None,
) -> list[StrategyRow]:
    """Returns the rows with what those that matter most came out at when compiled.

    Those are the best of pure data parallelism and the best hybrid of a point, where they are
    nearest to each other on paper. An interruption leaves the rows that have been compiled.

    Args:
      n_programs: programs to compile at most.
      compile_one: compiles a config for a number of GPUs.
      seq_len, batch: those of `side_by_side`.
      say: receives a line for each program.

    Raises LabError if no program compiles.
    """
    chosen = points_that_matter(rows)[:n_programs]
    programs: dict[str, Callable[[], Report]] = {}
    by_name: dict[str, StrategyRow] = {}
    for row in chosen:
        config = with_options(decoder(_parameters(row), seq_len, batch), row.options)
        name = f"{row.size} on {row.gpus:,} by {row.strategy}"
        by_name[name] = row
        programs[name] = functools.partial(compile_one, config, row.gpus)
    outcomes: dict[StrategyRow, StrategyRow] = {}
    errors: list[LabError] = []
    try:
        for name, result in compiled_side_by_side(programs, parallel(), say):
            row = by_name[name]
            if isinstance(result, LabError):
                say(f"{name} does not compile: {result}")
                errors.append(result)
                continue
            outcomes[row] = _with_report(row, result)
            say(f"{name}: {len(outcomes)} of {len(programs)} compiled")
    except KeyboardInterrupt:
        say("interrupted: the same command continues, as reports are cached")
    if errors and not outcomes:
        raise errors[0]
    return [outcomes.get(row, row) for row in rows]


def points_that_matter(rows: Iterable[StrategyRow]) -> list[StrategyRow]:
    """Returns pairs of rows, pure data parallelism and hybrid, of the points where these are
    nearest to each other first.
    """
    pairs = []
    for of_point in points_of(rows).values():
        pure = best_of(of_point, pure=True)
        hybrid = best_of(of_point, pure=False)
        if pure and hybrid:
            pairs.append((abs(math.log(pure.seconds / hybrid.seconds)), pure, hybrid))
    pairs.sort(key=lambda pair: pair[0])
    return [row for _, pure, hybrid in pairs for row in (pure, hybrid)]


def _parameters(row: StrategyRow) -> float:
    """Returns the number of parameters that a row's size stands for."""
    return model_sizes(row.size, "size")[0]


def with_options(config: TrainConfig, words: str) -> TrainConfig:
    """Returns a config with the fields that the words of a row's `options` set."""
    fields: Fields = {}
    for word in words.split():
        name, _, text = word.removeprefix("--").partition("=")
        fields[name] = _value(text)
    return with_fields(config, fields)


def _value(text: str) -> Any:
    if text in ("true", "false"):
        return text == "true"
    if text == "None":
        return None
    if not text:
        return ()
    return int(text) if text.isdecimal() else text


def _with_report(row: StrategyRow, report: Report) -> StrategyRow:
    band = report.step_band
    return row._replace(
        compiled_fast_s=band.fast / 1e6 if band else None,
        compiled_slow_s=band.slow / 1e6 if band else None,
        compiled_peak_gib=report.peak_bytes / GIB,
        compiled_fits=report.fits,
    )


def telling_point(rows: Iterable[StrategyRow]) -> list[StrategyRow]:
    """Returns the rows of the point where most strategies fit, of those where most do not."""

    def key(of_point: Sequence[StrategyRow]) -> tuple[int, int]:
        n_fitting = sum(row.fits for row in of_point)
        n_too_large = sum(row.peak_gib is not None and not row.fits for row in of_point)
        return min(n_fitting, n_too_large), n_fitting

    return max(points_of(rows).values(), key=key)
