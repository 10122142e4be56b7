"""The fastest layout of a run on a number of GPUs: chosen on paper, decided by compiling.

Formulas (`paper`) price every layout that divides the model and the batch. The most promising ones
are compiled, several at once. What comes out corrects the formulas for layouts alike, and the next
ones are chosen by that, until no layout is expected to be faster. The best is the best of those
that were compiled, not the best there is.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from mesh_lm.config import TrainConfig
from mesh_lm.config.layout import Fields, with_fields
from mesh_lm.errors import ConfigError
from mesh_lm.planning.changes import command_words, with_reduction
from mesh_lm.planning.paper.layouts import (
    DDP,
    PRESETS,
    REMAT,
    REPLICAS,
    ZERO3,
    Layouts,
    enumerated,
    layout_of,
)
from mesh_lm.planning.paper.price import Price, price
from mesh_lm.planning.paper.sizes import (
    AXES,
    Hardware,
    MeasuredLink,
    ModelSizes,
    why_no_formulas,
)
from mesh_lm.training.check import check
from sharding_rules import REDUCTIONS, ShardingRuleError, did_you_mean, preset
from sharding_rules.lab import LabError, Report
from sharding_rules.lab.fixes import Candidate
from sharding_rules.lab.machine import Machine, machine_of
from sharding_rules.lab.prices import latency_us
from sharding_rules.lab.rates import Rates
from sharding_rules.lab.report import MARGIN
from sharding_rules.lab.side_by_side import compiled_side_by_side, parallel

TIE = 0.03
"""Share of the step within which two layouts are equally fast, for all that a prediction says."""
COMPILES = 6
"""Programs that a search compiles at most, besides the config as it is."""

_FIRST = 3
"""Layouts that are compiled before the formulas are corrected."""
_FULL = 0.97
"""Share of the memory from which on a program may be slow because XLA had to save memory: it then
schedules collectives where they hide less, and computes some results twice."""
_SMALLER = 0.95
"""Share of such a program's memory that others of its kind may need."""
_SLOW = 1.05
"""How much longer than on paper the step of such a program takes."""
_WORTH = 0.99
"""A layout must be expected to take less than this share of the best step to be compiled."""
_REFUSALS = 24
"""After this many layouts in a row that are refused, others with the same axes and rules are not
looked at: a setting of the run, such as train.noise_scale, does not work with them."""

KEPT = {
    "mesh.pipeline": "pipeline",
    "mesh.data": "data",
    "mesh.fsdp": "fsdp",
    "mesh.tensor": "tensor",
    "train.microbatches": "microbatches",
    "pipeline.chunks": "chunks",
    "model.remat": "remat",
    "model.unroll": "unroll",
}
"""The fields that a search can keep, and their columns."""


@dataclasses.dataclass(frozen=True)
class Trial:
    """A layout that was compiled."""

    fields: Fields
    """All fields of the layout."""
    changes: Fields
    """Those that the config has otherwise."""
    report: Report
    row: dict[str, float] | None = None
    """The layout on paper, if there are formulas for it."""

    @property
    def seconds(self) -> float:
        """The predicted step, at the optimistic rates."""
        return self.report.timeline.step / 1e6 if self.report.timeline else float("inf")


@dataclasses.dataclass(frozen=True)
class Found:
    """The result of a search."""

    trials: tuple[Trial, ...]
    """What was compiled and fits, the fastest first, and then what does not fit."""
    committed: Trial | None
    """The config as it is, where it can run on these devices."""
    considered: int
    """Layouts that were priced on paper."""
    no_formulas: str = ""
    """Why none was; empty if there are formulas."""
    interrupted: bool = False
    """Whether the user ended the search (control-C)."""
    committed_agrees: bool = True
    """Whether the config as it is has what is kept. Else it is shown, and cannot be the best."""

    @property
    def candidates(self) -> list[Trial]:
        """The layouts that have what is kept, the config as it is first."""
        if self.committed and self.committed_agrees:
            return [self.committed, *self.trials]
        return list(self.trials)

    @property
    def best(self) -> Trial | None:
        """The fastest candidate that fits; of equal ones the config as it is."""
        return _fastest(self.candidates)


class Interrupted(LabError):
    """The user ended a search before a layout was compiled."""


def _fastest(trials: Sequence[Trial]) -> Trial | None:
    fitting = [trial for trial in trials if trial.report.fits]
    return min(fitting, key=lambda trial: trial.seconds, default=None)


def fewest_devices(
    config: TrainConfig,
    n_devices: int,
    target: str | Machine,
    kept: Mapping[str, float] | None = None,
    most_tensor: int = 0,
) -> int | None:
    """Returns the fewest whole nodes, in devices and more than n_devices, on which a layout fits on
    paper; None if that is more than 64 times as many. Other arguments are those of `search`.
    """
    sizes = ModelSizes.of(config)
    if sizes is None:
        return None
    hardware = hardware_of(target)
    node = hardware.node
    for n in range((n_devices // node + 1) * node, 64 * n_devices + 1, node):
        layouts = _with_kept(enumerated(sizes, n, node, most_tensor), kept or {})
        if len(layouts) and price(sizes, layouts, hardware).peak.min() <= hardware.memory:
            return n
    return None


def peak_on_paper(config: TrainConfig, n_devices: int, target: str | Machine) -> float | None:
    """Returns the bytes that a run needs at its peak, on paper; None without formulas."""
    sizes = ModelSizes.of(config)
    row = layout_of(config, n_devices)
    if sizes is None or row is None:
        return None
    return float(price(sizes, Layouts.of([row]), hardware_of(target)).peak[0])


def fitting_candidate(
    config: TrainConfig,
    report: Report,
    compiled: Callable[[TrainConfig], Report],
    target: str | Machine = "",
) -> Candidate | None:
    """Returns the layout that is expected to be the fastest of those that fit, for a run that does
    not; None if there is none on paper, or there are no formulas.

    Args:
      report: of the run as it is, by which the formulas are corrected.
      compiled: compiles a config for the same devices.
      target: the hardware; empty: the report's target.
    """
    n_devices = report.n_devices
    found = _Search(config, n_devices, target or report.target, compiled, 1, lambda text: None)
    try:
        found.enumerate({}, 0)
    except ConfigError:
        return None
    fields = fields_as_they_are(found.config)
    found.committed = Trial(fields, {}, report, layout_of(found.config, n_devices))
    rows = found.promising(1)
    if not rows:
        return None
    changed = changes_of(fields_of(rows[0], found.config), found.config)
    return Candidate(
        "layout",
        command_words(changed),
        functools.partial(compiled, with_fields(found.config, changed)),
    )


def _agrees(trial: Trial, kept: Mapping[str, float], most_tensor: int) -> bool:
    """Whether a layout has what is kept, and no more tensor parallelism than this; 0: any."""
    if most_tensor and trial.fields["mesh.tensor"] > most_tensor:
        return False
    if trial.row is None:
        return all(trial.fields[name] == value for name, value in kept_fields(kept).items())
    return all(trial.row[column] == value for column, value in kept.items())


def _with_kept(layouts: Layouts, kept: Mapping[str, float]) -> Layouts:
    for column, value in kept.items():
        layouts = layouts.take(getattr(layouts, column) == value)
    return layouts


def hardware_of(target: str | Machine, rates: Rates | None = None) -> Hardware:
    """Returns what a GPU reaches at these rates; None: at the machine's fast ones."""
    machine = machine_of(target)
    gpu = machine.target
    rates = rates or machine.fast
    peak = gpu.flops["bf16"]
    attention, attention_backward = (
        peak * rates.attention_share(128, 0, backward=backward, deterministic=False)
        for backward in (False, True)
    )
    return Hardware(
        # The formulas take off what small matmuls lose.
        matmul=1.04 * rates.matmul.value * peak,
        attention=attention,
        attention_backward=attention_backward,
        memory_bandwidth=rates.memory["bf16"].value * gpu.hbm_bandwidth,
        memory=gpu.usable / (1 + MARGIN),
        nvlink=rates.nvlink.value * gpu.nvlink,
        network=rates.network.value * gpu.network,
        node=gpu.node,
        pcie=rates.pcie.value * gpu.pcie,
        kernel=rates.kernel_us.value / 1e6,
        start=rates.start_us.value / 1e6,
        start_between_nodes=rates.between_us.value / 1e6,
        nvlink_step=rates.nvlink_step_us.value / 1e6,
        network_step=rates.network_step_us.value / 1e6,
        measured=_measured_links(rates, rates.nvlink.value * gpu.nvlink),
    )


def _measured_links(rates: Rates, nvlink: float) -> dict[tuple[str, str], MeasuredLink]:
    """Returns what a profile has measured, by kind of collective and link.

    nvlink: bytes/s of NVLink without the profile.
    """
    measured: dict[tuple[str, str], MeasuredLink] = {}
    for (kind, link), rate in rates.links.items():
        scale = 1.0
        if rate.latency_us is not None:
            scale = rate.latency_us / latency_us(kind, rate.group, rate.nodes, rates)
        most = nvlink if rate.has_other_nvlink else math.inf
        measured[kind, link] = MeasuredLink(rate.bytes_per_s, scale, most)
    return measured


def parse_kept(text: str) -> dict[str, float]:
    """Returns the columns that are kept, and their values, from `mesh.tensor=8,model.remat=full`.

    Raises ConfigError for other fields.
    """
    kept = {}
    for word in filter(None, text.split(",")):
        field, _, value = word.partition("=")
        if field not in KEPT:
            raise ConfigError(
                f"--keep={word}: the fields that a search can keep are {', '.join(KEPT)}"
                f"{did_you_mean(field, KEPT)}"
            )
        if field == "model.remat" and value in REMAT:
            # In all layers: a share of them with another policy would not be kept.
            kept |= {KEPT[field]: float(REMAT.index(value)), "remat_share": 1.0}
        elif field == "model.unroll" and value in ("true", "false"):
            kept[KEPT[field]] = float(value == "true")
        elif value.isdecimal() and field not in ("model.remat", "model.unroll"):
            kept[KEPT[field]] = float(value)
        else:
            raise ConfigError(f"--keep={word}: {value!r} is not among the values of {field}")
    return kept


def kept_fields(kept: Mapping[str, float]) -> Fields:
    """Returns the fields of a config that `parse_kept` has read."""
    names = {column: name for name, column in KEPT.items()}
    fields: Fields = {}
    for column, value in kept.items():
        if column == "remat_share":
            fields["model.remat_layers"] = None
        elif column == "remat":
            fields[names[column]] = REMAT[int(value)]
        elif column == "unroll":
            fields[names[column]] = bool(value)
        else:
            fields[names[column]] = int(value)
    return fields


def search(
    config: TrainConfig,
    n_devices: int,
    target: str | Machine,
    compiled: Callable[[TrainConfig], Report],
    *,
    compiles: int = COMPILES,
    kept: Mapping[str, float] | None = None,
    most_tensor: int = 0,
    from_scratch: bool = False,
    say: Callable[[str], None] = lambda text: None,
) -> Found:
    """Returns the layouts that were compiled, the fastest first.

    Args:
      config: whose model, batch and rules' reductions stay.
      compiled: compiles a config for these devices.
      compiles: programs besides the config as it is.
      kept: columns of `Layouts` that stay, and their values.
      most_tensor: the most tensor parallelism; 0: a node's.
      from_scratch: the layout that the config has is not compiled, and corrects no formula. Else it
        is compiled even if it does not have what is kept.
      say: told what is compiled, and why the search ends.

    Raises ConfigError if no layout divides the model and the batch as `kept` demands, and LabError
    if no program compiles.
    """
    found = _Search(config, n_devices, target, compiled, compiles, say)
    found.enumerate(kept or {}, most_tensor)
    try:
        if not from_scratch:
            found.compile_committed()
        found.run()
    except KeyboardInterrupt:
        say("interrupted: the layouts compiled so far are compared")
        return found.result(interrupted=True)
    return found.result()


class _Ratios(NamedTuple):
    """What layouts compiled to, over their prices."""

    seconds: list[float]
    peak: list[float]

    def of_seconds(self, default: float) -> float:
        """Returns the median of the steps; `default` if there is none."""
        return statistics.median(self.seconds) if self.seconds else default


class _Search:
    def __init__(
        self,
        config: TrainConfig,
        n_devices: int,
        target: str | Machine,
        compiled: Callable[[TrainConfig], Report],
        compiles: int,
        say: Callable[[str], None],
    ) -> None:
        self.config = config
        with contextlib.suppress(ConfigError, ShardingRuleError):
            # With the sizes of its mesh, if it can run on these devices.
            self.config = check(config, n_devices)
        self.n_devices = n_devices
        self.compiled = compiled
        self.compiles = compiles
        self.say = say
        self.hardware = hardware_of(target)
        self.committed: Trial | None = None
        self.trials: list[Trial] = []
        self.refused: dict[str, str] = {}
        """Layouts that cannot run, or do not compile, by name, and why."""
        self.n_attempts = 0
        """Programs whose compilation was begun, besides the config as it is."""

    def enumerate(self, kept: Mapping[str, float], most_tensor: int) -> None:
        """Prices all layouts. Raises ConfigError if there are none."""
        sizes = ModelSizes.of(self.config)
        reason = why_only_compiled(self.config)
        if sizes is None or reason:
            raise ConfigError(f"there are no formulas for this run: {reason}")
        self.sizes = sizes
        self.kept = kept
        self.most_tensor = most_tensor
        layouts = enumerated(sizes, self.n_devices, self.hardware.node, most_tensor)
        if not len(layouts):
            raise ConfigError(_why_none(sizes, self.n_devices))
        layouts = _with_kept(layouts, kept)
        if not len(layouts):
            words = ", ".join(f"{column} {value:g}" for column, value in kept.items())
            raise ConfigError(
                f"none of the layouts on {self.n_devices} devices has what --keep asks: {words}"
            )
        self.layouts = layouts
        self.is_too_large = np.zeros(len(layouts), bool)
        """Layouts of the kind of a program that lacked memory, and hardly smaller."""
        self.price = price(self.sizes, layouts, self.hardware)

    def run(self) -> None:
        """Compiles the most promising layouts, until none is worth it."""
        self.compile(self.promising(min(_FIRST, self.compiles)))
        workers = parallel()
        # A program that does not compile counts, so that a compiler that is not there ends this.
        while self.n_attempts < self.compiles:
            most = min(workers, self.compiles - self.n_attempts)
            rows = self.promising(most)
            if rows:
                self.compile(rows)
                continue
            neighbours = self.neighbours(most)
            if not neighbours:
                self.say("no other layout is expected to be faster, and to fit")
                return
            self.compile_fields([(None, fields) for fields in neighbours])

    def compile_committed(self) -> None:
        try:
            config = check(self.config, self.n_devices)
        except (ConfigError, ShardingRuleError):
            return  # a config for another number of devices
        row = layout_of(config, self.n_devices)
        programs = {"the config as it is": functools.partial(self.compiled, config)}
        for name, result in compiled_side_by_side(programs, 1, self.say):
            if isinstance(result, LabError):
                self.refuse(name, result)
            else:
                self.committed = Trial(fields_as_they_are(config), {}, result, row)

    def refuse(self, name: str, error: Exception) -> None:
        self.refused[name] = str(error)
        self.say(f"{name} does not compile: {error}")

    def compile(self, rows: Sequence[dict[str, float]]) -> None:
        self.compile_fields([(row, fields_of(row, self.config)) for row in rows])

    def compile_fields(self, layouts: Sequence[tuple[dict[str, float] | None, Fields]]) -> None:
        """Compiles layouts: (row, fields), the row being None for one without formulas."""
        programs = {}
        by_name = {}
        for row, fields in layouts:
            name = self.name(fields)
            by_name[name] = (row, fields)
            programs[name] = functools.partial(self.compiled, with_fields(self.config, fields))
        self.n_attempts += len(programs)
        for name, result in compiled_side_by_side(programs, parallel(), self.say):
            row, fields = by_name[name]
            if isinstance(result, LabError):
                self.refuse(name, result)
            else:
                changes = changes_of(fields, self.config)
                self.trials.append(Trial(fields, changes, result, row))

    def result(self, *, interrupted: bool = False) -> Found:
        """Returns what was compiled. Raises LabError if none of it has what is kept."""
        agrees = self.committed_agrees()
        if not self.trials and not agrees:
            if interrupted or not self.refused:
                raise Interrupted("interrupted before a layout was compiled")
            raise LabError(next(iter(self.refused.values())))
        trials = sorted(self.trials, key=lambda trial: (not trial.report.fits, trial.seconds))
        return Found(
            tuple(trials),
            self.committed,
            len(self.layouts),
            interrupted=interrupted,
            committed_agrees=agrees,
        )

    def name(self, fields: Fields) -> str:
        """Returns the words that set these fields, where the config has others."""
        return " ".join(options(changes_of(fields, self.config)))

    # Choosing.

    def promising(self, most: int) -> list[dict[str, float]]:
        """Returns the rows that are expected to be fastest, of different kinds, and faster than the
        best that was compiled.
        """
        expected = self.corrected()
        fits = (expected.peak <= self.hardware.memory) & ~self.is_too_large
        seconds = np.where(fits, expected.seconds, np.inf)
        # The first round has no limit: the formulas may have all of them wrong.
        best = self.fastest() if self.trials else None
        limit = _WORTH * best.seconds if best else np.inf
        chosen: list[dict[str, float]] = []
        kinds: set[tuple[float, ...]] = set()
        tried = self.tried()
        refusals: collections.Counter[tuple[float, ...]] = collections.Counter()
        # One of each kind, which then corrects the prices of its kind for the next round.
        for i in np.argsort(seconds, kind="stable"):
            if len(chosen) == most or seconds[i] >= limit:
                break
            row = self.layouts.row(int(i))
            kind = _kind(row)
            if kind in kinds:
                continue
            # Where the formulas have all layouts with stages wrong, or all without, the last of the
            # first round is of the others.
            is_last = not self.trials and len(chosen) == most - 1 > 0
            families = {_has_stages(one) for one in (*chosen, row)}
            if is_last and len(families) == 1 and self.has_both_families(seconds):
                continue
            axes_and_rules = _axes_and_rules(row)
            if refusals[axes_and_rules] == _REFUSALS:
                continue
            fields = fields_of(row, self.config)
            if self.name(fields) in tried:
                continue
            if not self.can_run(fields):
                refusals[axes_and_rules] += 1
                continue
            refusals[axes_and_rules] = 0
            chosen.append(row)
            kinds.add(kind)
        if not self.trials and not np.isfinite(seconds).any():
            # Nothing fits: what needs least says by how much.
            smallest = self.layouts.row(int(np.argmin(expected.peak)))
            fields = fields_of(smallest, self.config)
            if self.name(fields) not in tried and self.can_run(fields):
                chosen.append(smallest)
        return chosen

    def has_both_families(self, seconds: np.ndarray) -> bool:
        """Returns whether layouts with stages and layouts without are expected to fit."""
        has_stages = self.layouts.pipeline > 1
        fits = np.isfinite(seconds)
        return bool((fits & has_stages).any() and (fits & ~has_stages).any())

    def fastest(self) -> Trial | None:
        """Returns the fastest that fits of those that were compiled and have what is kept."""
        trials = list(self.trials)
        if self.committed and self.committed_agrees():
            trials.append(self.committed)
        return _fastest(trials)

    def committed_agrees(self) -> bool:
        """Whether the config as it is was compiled, and has what is kept."""
        committed = self.committed
        return committed is not None and _agrees(committed, self.kept, self.most_tensor)

    def tried(self) -> set[str]:
        """Returns the names of layouts that were compiled, or cannot be."""
        names = {self.name(trial.fields) for trial in self.trials} | self.refused.keys()
        if self.committed:
            names.add("")  # a layout that changes nothing
        return names

    def neighbours(self, most: int) -> list[Fields]:
        """Returns layouts that differ from the best in one decision of which the formulas know
        nothing, and that were not compiled yet.
        """
        best = self.fastest()
        if best is None:
            return []
        tried = self.tried()
        changed = ({**best.fields, name: value} for name, value in _unpriced(best.fields))
        new = [f for f in changed if self.name(f) not in tried and self.can_run(f)]
        return new[:most]

    def can_run(self, fields: Fields) -> bool:
        try:
            check(with_fields(self.config, fields), self.n_devices)
        except (ConfigError, ShardingRuleError) as error:
            self.refused[self.name(fields)] = str(error)
            return False
        return True

    def corrected(self) -> Price:
        """Returns the prices, multiplied by what compiled layouts of the same kind came out at, in
        the median; those of other kinds by the mean of all with stages, or of all without, and of
        the paper itself.
        """
        trials = [*self.trials, *([self.committed] if self.committed else [])]
        compiled = [trial for trial in trials if trial.row and trial.report.timeline]
        if not compiled:
            return self.price
        rows = [trial.row for trial in compiled if trial.row]
        paper = price(self.sizes, Layouts.of(rows), self.hardware)
        by_kind: dict[tuple[float, ...], _Ratios] = {}
        # Paper is an observation, too, so that a kind is not given up for what one program of
        # another kind came out at.
        families = {has_stages: _Ratios([1.0], []) for has_stages in (False, True)}
        self.is_too_large[:] = False
        for trial, row, step, peak in zip(compiled, rows, paper.seconds, paper.peak, strict=True):
            of_kind = by_kind.setdefault(_kind(row), _Ratios([], []))
            of_family = families[_has_stages(row)]
            time_ratio = trial.seconds / step
            for ratios in (of_kind, of_family):
                ratios.peak.append(trial.report.peak_bytes / peak)
            if self.lacks_memory(trial, time_ratio):
                # The step says nothing about layouts that need less.
                self.is_too_large |= self.alike(row) & (self.price.peak > _SMALLER * peak)
                continue
            for ratios in (of_kind, of_family):
                ratios.seconds.append(time_ratio)

        has_stages = self.layouts.pipeline > 1
        means = [statistics.geometric_mean(families[one].seconds) for one in (False, True)]
        medians = [statistics.median(families[one].peak or [1.0]) for one in (False, True)]
        otherwise = np.where(has_stages, means[1], means[0])
        seconds = self.price.seconds * otherwise
        peak = self.price.peak * np.where(has_stages, medians[1], medians[0])
        for kind, ratios in by_kind.items():
            row: dict[str, float] = dict(zip(_KIND, kind, strict=True))
            alike = self.alike(row)
            ratio = ratios.of_seconds(means[_has_stages(row)])
            seconds = np.where(alike, self.price.seconds * ratio, seconds)
            peak = np.where(alike, self.price.peak * statistics.median(ratios.peak), peak)
        return Price(seconds, self.price.exposed, peak)

    def lacks_memory(self, trial: Trial, time_ratio: float) -> bool:
        """Whether a program does not fit, or probably is slow because it hardly does."""
        is_full = trial.report.peak_bytes > _FULL * self.hardware.memory
        return not trial.report.fits or (is_full and time_ratio > _SLOW)

    def alike(self, row: Mapping[str, float]) -> np.ndarray:
        """Returns which layouts are of the kind of this one."""
        alike = np.ones(len(self.layouts), bool)
        for column in _KIND:
            alike &= getattr(self.layouts, column) == row[column]
        return alike


_KIND = ("pipeline", "data", "fsdp", "tensor", "replicas", "sequence_parallel")
"""Columns in which layouts of one kind agree."""


def _kind(row: Mapping[str, float]) -> tuple[float, ...]:
    return tuple(row[column] for column in _KIND)


def _axes_and_rules(row: Mapping[str, float]) -> tuple[float, ...]:
    """Returns which axes a layout uses, whatever their sizes, and its rules."""
    uses = (row[axis] > 1 for axis in AXES)
    return (*uses, row["replicas"], row["sequence_parallel"])


def _has_stages(row: Mapping[str, float]) -> bool:
    return row["pipeline"] > 1


def fields_of(row: Mapping[str, float], config: TrainConfig) -> Fields:
    """Returns all fields of a config that are of its layout, as this layout has them."""
    n_layers = config.model.n_layers  # pyright: ignore[reportAttributeAccessIssue]
    has_stages = row["pipeline"] > 1
    is_zero3 = row["replicas"] == ZERO3
    fields: Fields = {"rules": with_reduction(config, _rules_of(row))}
    for axis in AXES:
        fields[f"mesh.{axis}"] = int(row[axis])
    fields["train.microbatches"] = int(row["microbatches"])
    fields["model.remat"] = REMAT[int(row["remat"])]
    n_policy = round(row["remat_share"] * n_layers)
    fields["model.remat_layers"] = None if n_policy == n_layers else n_policy
    fields["model.kept_layers"] = round(row["kept_share"] * n_layers)
    fields["model.unroll"] = bool(row["unroll"])
    fields["model.batch_halves"] = False
    fields["pipeline.chunks"] = int(row["chunks"])
    fields["pipeline.stash"] = "residuals" if has_stages and row["keeps_residuals"] else "input"
    fields["pipeline.pair_layers"] = False
    fields["pipeline.layers"] = ()
    n_chunks = int(row["pipeline"] * row["chunks"])
    fields["pipeline.balance"] = "flops" if n_layers % n_chunks else "equal"
    fields["pipeline.schedule"] = "1f1b"
    fields["launch.xla_flags"] = "layers" if is_zero3 and not has_stages else "auto"
    return fields


def fields_as_they_are(config: TrainConfig) -> Fields:
    """Returns the fields of a layout as a config has them, its mesh resolved."""
    row = dict.fromkeys(Layouts.names(), 1.0)
    return {name: value_of(config, name) for name in fields_of(row, config)}


def changes_of(fields: Fields, config: TrainConfig) -> Fields:
    """Returns those of the fields that the config has otherwise."""
    return {name: value for name, value in fields.items() if value != value_of(config, name)}


def _unpriced(fields: Fields) -> Iterator[tuple[str, Any]]:
    """Yields decisions that the formulas do not price, the most promising first."""
    if fields["mesh.pipeline"] > 1 and fields["pipeline.stash"] == "residuals":
        yield "pipeline.pair_layers", True
    if fields["launch.xla_flags"] == "layers":
        yield "launch.xla_flags", "pipeline"
    if fields["mesh.tensor"] > 1:
        yield "model.batch_halves", True
    if fields["mesh.fsdp"] > 1 and fields["mesh.tensor"] > 1:
        yield "launch.xla_flags", "overlap_two"


def _rules_of(row: Mapping[str, float]) -> str:
    words = []
    if row["fsdp"] > 1:
        words.append("hsdp" if row["data"] > 1 else "fsdp")
    elif row["replicas"] != DDP:
        words.append(REPLICAS[int(row["replicas"])])
    if row["tensor"] > 1:
        words.append("megatron_sp" if row["sequence_parallel"] else "megatron")
    return "+".join(words) or "ddp"


def why_only_compiled(config: TrainConfig) -> str:
    """Returns why layouts of a run cannot be priced on paper; empty if they can."""
    return why_no_formulas(config) or _why_no_rules(config)


def _why_no_rules(config: TrainConfig) -> str:
    """Returns why there are no formulas for these rules; empty if there are."""
    name = config.rules.name
    for word in name.split("+"):
        if word not in PRESETS | REDUCTIONS.keys() | {"zero2"}:
            return f"rules {name!r}"
    if preset(name) != config.rules:
        return "its rules are changed presets"
    return ""


def value_of(config: TrainConfig, name: str) -> Any:
    """Returns a field of a config by the name that it has in `Fields`."""
    if name == "rules":
        return config.rules.name
    section, _, field = name.partition(".")
    return getattr(getattr(config, section), field)


def options(fields: Mapping[str, Any]) -> Iterator[str]:
    """Yields the words of a command line that set these fields."""
    for name, value in fields.items():
        text = str(value)
        if isinstance(value, bool):
            text = text.lower()
        elif isinstance(value, tuple):
            text = ",".join(map(str, value))
        yield f"--{name}={text}"


def _why_none(sizes: ModelSizes, n_devices: int) -> str:
    """Returns why no layout divides the batch and the model, and a batch that would do."""
    batch = sizes.global_batch
    for distance in range(1, batch + 1):
        for other in (batch - distance, batch + distance):
            changed = dataclasses.replace(sizes, global_batch=other)
            if other > 0 and len(enumerated(changed, n_devices, n_devices)):
                return (
                    f"no layout divides train.global_batch={batch} over {n_devices} devices; "
                    f"nearest that one does: --train.global_batch={other}"
                )
    return f"no layout divides this model over {n_devices} devices"
