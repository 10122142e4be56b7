"""The search for a faster layout of a run for which there are no formulas: a hill climb, every step
of which is compiled.

It starts at the config as it is, compiles what differs from it in one decision, and continues
with the fastest. Each kind of decision that made the step no shorter is left out from then on.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from mesh_lm.config import TrainConfig
from mesh_lm.config.layout import LAYOUT_OF_MODEL, Fields, with_fields
from mesh_lm.errors import ConfigError
from mesh_lm.planning.best import (
    COMPILES,
    Found,
    Trial,
    changes_of,
    kept_fields,
    options,
    value_of,
)
from mesh_lm.planning.changes import POLICIES, with_reduction
from mesh_lm.planning.paper.layouts import MOST_UNROLLED
from mesh_lm.training.check import check
from sharding_rules import ShardingRuleError, preset
from sharding_rules.lab import LabError, Report
from sharding_rules.lab.machine import Machine, machine_of
from sharding_rules.lab.side_by_side import compiled_side_by_side, parallel
from sharding_rules.mesh import AXES

_ROOMY = 0.75
"""Share of the memory below which decisions that need more memory are tried first."""
_REPLICA_RULES = ("zero1", "zero2", "distributed", "zero3")


class Lever(NamedTuple):
    """A decision about a layout."""

    kind: str
    fields: Fields
    needs_memory: bool = False
    """Whether it makes a step shorter by more memory."""


def climb(
    config: TrainConfig,
    n_devices: int,
    target: str | Machine,
    compiled: Callable[[TrainConfig], Report],
    *,
    compiles: int = COMPILES,
    kept: Mapping[str, float] | None = None,
    most_tensor: int = 0,
    reason: str = "",
    say: Callable[[str], None] = lambda text: None,
) -> Found:
    """Returns the layouts that were compiled, the fastest first. Arguments are those of
    `best.search`; reason: why there are no formulas.

    Raises ConfigError if the config as it is cannot run on these devices, with what is kept, or has
    more tensor parallelism than `most_tensor`, and LabError if it does not compile.
    """
    search = _Climb(config, n_devices, target, compiled, kept or {}, most_tensor, say)
    search.compile_start()
    try:
        search.run(compiles)
    except KeyboardInterrupt:
        say("interrupted: the layouts compiled so far are compared")
        return search.result(reason, interrupted=True)
    return search.result(reason)


class _Climb:
    def __init__(
        self,
        config: TrainConfig,
        n_devices: int,
        target: str | Machine,
        compiled: Callable[[TrainConfig], Report],
        kept: Mapping[str, float],
        most_tensor: int,
        say: Callable[[str], None],
    ) -> None:
        self.n_devices = n_devices
        self.limit = most_tensor
        """The most tensor parallelism that the user wants; 0: any."""
        self.most_tensor = most_tensor or machine_of(target).target.node
        self.compiled = compiled
        self.say = say
        self.kept = kept_fields(kept)
        self.config = check(config, n_devices)
        self.trials: list[Trial] = []
        self.tried: set[str] = set()
        """The words of layouts that were compiled, or cannot be."""
        self.useless: set[str] = set()
        """Kinds of decisions that did not help."""

    def compile_start(self) -> None:
        """Compiles the config with what is kept."""
        start = changes_of(self.kept, self.config)
        started = check(with_fields(self.config, start), self.n_devices)
        if self.limit and started.mesh.tensor > self.limit:
            raise ConfigError(
                f"--max-tensor={self.limit}: without formulas the search starts at the config as "
                f"it is, which has mesh.tensor={started.mesh.tensor}: give it a mesh with less"
            )
        name = self.name(start)
        programs = {name: functools.partial(self.compiled, with_fields(self.config, start))}
        for _, result in compiled_side_by_side(programs, 1, self.say):
            if isinstance(result, LabError):
                raise result
            self.trials.append(self.trial(start, result))
        self.tried.add(name)

    def run(self, compiles: int) -> None:
        """Climbs until no decision is left that may help, or this many programs were compiled."""
        n_left = compiles
        while n_left:
            chosen = self.promising(min(parallel(), n_left))
            if not chosen:
                self.say("no other layout was found that may be faster")
                return
            best = self.fastest()
            programs = {
                name: functools.partial(self.compiled, with_fields(self.config, changes))
                for name, (_, changes) in chosen.items()
            }
            n_left -= len(programs)
            self.tried |= programs.keys()
            for name, result in compiled_side_by_side(programs, parallel(), self.say):
                lever, changes = chosen[name]
                if isinstance(result, LabError):
                    self.say(f"{name} does not compile: {result}")
                    self.useless.add(lever.kind)
                    continue
                trial = self.trial(changes, result)
                self.trials.append(trial)
                if _order(trial) >= _order(best):
                    self.useless.add(lever.kind)

    def promising(self, most: int) -> dict[str, tuple[Lever, Fields]]:
        """Returns decisions that were not tried yet, from the best layout, by the words of what
        results; one of each kind.
        """
        best = self.fastest()
        base = with_fields(self.config, best.changes)
        is_roomy = best.report.peak_bytes < _ROOMY * best.report.limit
        ordered = sorted(
            _levers(base, self.most_tensor), key=lambda lever: lever.needs_memory != is_roomy
        )
        chosen: dict[str, tuple[Lever, Fields]] = {}
        kinds: set[str] = set()
        for lever in ordered:
            if len(chosen) == most:
                break
            if lever.kind in self.useless | kinds or lever.fields.keys() & self.kept.keys():
                continue
            changes = changes_of({**best.changes, **lever.fields}, self.config)
            name = self.name(changes)
            if name in self.tried or not self.can_run(name, changes):
                continue
            chosen[name] = (lever, changes)
            kinds.add(lever.kind)
        return chosen

    def can_run(self, name: str, changes: Fields) -> bool:
        try:
            check(with_fields(self.config, changes), self.n_devices)
        except (ConfigError, ShardingRuleError):
            self.tried.add(name)
            return False
        return True

    def trial(self, changes: Fields, report: Report) -> Trial:
        return Trial({**self.own_fields(), **changes}, changes, report)

    def own_fields(self) -> Fields:
        """Returns the fields of the layout as the config has them: a saved layout has them all, so
        that it stays the same if the config's own layout changes.
        """
        config = self.config
        model_fields = [name for name in LAYOUT_OF_MODEL if hasattr(config.model, name)]
        pipeline_fields = [field.name for field in dataclasses.fields(config.pipeline)]
        names = [f"mesh.{axis}" for axis in AXES]
        names += [f"model.{name}" for name in model_fields]
        names += [f"pipeline.{name}" for name in pipeline_fields]
        names += ["train.microbatches", "launch.xla_flags"]
        with contextlib.suppress(ShardingRuleError):
            # Changed presets have no name by which a file could have them.
            if preset(config.rules.name) == config.rules:
                names.append("rules")
        return {name: value_of(config, name) for name in names}

    def fastest(self) -> Trial:
        return min(self.trials, key=_order)

    def name(self, changes: Fields) -> str:
        return " ".join(options(changes)) or "the config as it is"

    def result(self, reason: str, *, interrupted: bool = False) -> Found:
        is_own = not self.trials[0].changes
        committed = self.trials[0] if is_own else None
        trials = sorted(self.trials[1:] if is_own else self.trials, key=_order)
        return Found(tuple(trials), committed, 0, reason, interrupted)


def _order(trial: Trial) -> tuple[bool, float, int]:
    """Returns a key: what fits first, by its step; of what does not the smallest first."""
    if trial.report.fits:
        return False, trial.seconds, 0
    return True, 0.0, trial.report.peak_bytes


def _levers(config: TrainConfig, most_tensor: int) -> Iterator[Lever]:
    """Yields changes of one decision; not all of them can run."""
    yield from _of_model(config)
    yield from _of_batch(config)
    yield from _of_mesh(config, most_tensor)
    yield from _of_flags(config)
    yield from _of_rules(config)


def _of_model(config: TrainConfig) -> Iterator[Lever]:
    model: Any = config.model
    policy = getattr(model, "remat", None)
    if policy in POLICIES:
        i = POLICIES.index(policy)
        for other, needs_memory in ((i - 1, True), (i + 1, False)):
            if 0 <= other < len(POLICIES):
                fields = {"model.remat": POLICIES[other], "model.remat_layers": None}
                yield Lever(f"remat {'less' if needs_memory else 'more'}", fields, needs_memory)
    if getattr(model, "batch_halves", None) is False:
        yield Lever("halves", {"model.batch_halves": True})
    n_layers = getattr(model, "n_layers", MOST_UNROLLED + 1)
    if getattr(model, "unroll", None) is False and n_layers <= MOST_UNROLLED:
        yield Lever("unroll", {"model.unroll": True}, needs_memory=True)


def _of_batch(config: TrainConfig) -> Iterator[Lever]:
    n = config.train.microbatches
    if n % 2 == 0:
        yield Lever("larger microbatches", {"train.microbatches": n // 2}, needs_memory=True)
    yield Lever("smaller microbatches", {"train.microbatches": 2 * n})
    if config.mesh.sizes()["pipeline"] > 1 and not config.pipeline.pair_layers:
        fields = {"pipeline.pair_layers": True, "pipeline.stash": "residuals"}
        yield Lever("pairs", fields, needs_memory=True)


def _of_rules(config: TrainConfig) -> Iterator[Lever]:
    words = config.rules.name.split("+")
    swaps = {"megatron": "megatron_sp", "megatron_sp": "megatron"}
    for i, word in enumerate(words):
        kind, others = "tensor", [swaps[word]] if word in swaps else []
        if word in _REPLICA_RULES:
            kind = "replicas"
            others = [other for other in reversed(_REPLICA_RULES) if other != word]
        for other in others:
            name = with_reduction(config, "+".join([*words[:i], other, *words[i + 1 :]]))
            yield Lever(f"rules of {kind}", {"rules": name})


def _of_mesh(config: TrainConfig, most_tensor: int) -> Iterator[Lever]:
    """Half of one axis, twice another one: less tensor parallelism first."""
    sizes = config.mesh.sizes()
    used = [axis for axis in AXES if sizes[axis] > 1 or axis in ("data", "fsdp")]
    for axis, other in itertools.permutations(sorted(used, key=_spread), 2):
        if sizes[axis] % 2 or (other == "tensor" and 2 * sizes[other] > most_tensor):
            continue
        fields = {f"mesh.{axis}": sizes[axis] // 2, f"mesh.{other}": 2 * sizes[other]}
        needs_memory = _spread(axis) < _spread(other)
        yield Lever(f"mesh {axis} to {other}", fields, needs_memory)


def _spread(axis: str) -> int:
    """Returns a number that is smaller for axes that divide more of a step's memory."""
    order = ("tensor", "sequence", "pipeline", "expert", "fsdp")
    return order.index(axis) if axis in order else len(order)


def _of_flags(config: TrainConfig) -> Iterator[Lever]:
    for name in ("pipeline", "layers"):
        if config.launch.xla_flags != name:
            yield Lever(f"flags {name}", {"launch.xla_flags": name})
