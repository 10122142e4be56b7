"""Changes of a config that may make it fit.

They follow from the config's fields; none is written for a particular model.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, get_args

from mesh_lm.config import TrainConfig
from mesh_lm.config.layout import with_fields
from mesh_lm.errors import ConfigError
from mesh_lm.optim.problems import MASTER, optimizer_problems
from mesh_lm.training.check import check
from sharding_rules import PRESETS, REDUCTIONS, ShardingRuleError, axes_of, preset
from sharding_rules.lab import Report
from sharding_rules.lab.fixes import Candidate
from sharding_rules.lab.targets import NODE
from sharding_rules.rules import Kind

POLICIES = ("none", "save_names", "save_attention", "full")
"""Rematerialisation, from the one that recomputes the least."""
_REPLICA_RULES = ("zero1", "zero2", "distributed", "hsdp", "fsdp")
_TENSOR_RULES = ("megatron", "megatron_sp", "megatron_2d")
_LEAST_LOSS_CHUNK = 128


class Change(NamedTuple):
    """A change of a config."""

    kind: str
    fields: dict[str, Any]
    """section.field -> its new value; of `rules` the name."""


def candidates(
    config: TrainConfig, n_devices: int, compiled: Callable[[TrainConfig], Report]
) -> Iterator[Candidate]:
    """Yields every change that passes `check`, and every pair of changes of different kinds.

    A candidate has the options to type, and how to compile it, by `compiled`.
    """
    search = _Search(check(config, n_devices), n_devices, compiled)
    config = search.config
    changes = []
    for change in itertools.chain(
        _remat(config),
        _microbatches(config),
        _rules(config),
        _meshes(config),
        _loss(config),
        _optimizer_offload(config),
    ):
        candidate = search.candidate(change)
        if candidate is not None:
            changes.append(change)
            yield candidate
    for first, second in itertools.combinations(changes, 2):
        kinds = {first.kind, second.kind}
        if len(kinds) == 1 or kinds == {"remat", "offload"}:
            continue
        candidate = search.candidate(first, second)
        if candidate is not None:
            yield candidate


class _Search:
    """The candidates for one config, without those that are the same program."""

    def __init__(
        self, config: TrainConfig, n_devices: int, compiled: Callable[[TrainConfig], Report]
    ) -> None:
        self.config = config
        self._n_devices = n_devices
        self._compiled = compiled
        self._effects = [_effect(config)]

    def candidate(self, *changes: Change) -> Candidate | None:
        """Returns the config with these changes; None if it cannot run, or is not new."""
        fields: dict[str, Any] = {}
        for change in changes:
            if fields.keys() & change.fields.keys():
                return None
            fields |= change.fields
        try:
            changed = check(with_fields(self.config, fields), self._n_devices)
        except (ConfigError, ShardingRuleError):
            return None
        effect = _effect(changed)
        if effect in self._effects:
            return None
        self._effects.append(effect)
        kinds = [change.kind for change in changes]
        return Candidate(
            "+".join(kinds),
            command_words(fields),
            functools.partial(self._compiled, changed),
            scale=_sequences_per_device(changed) / _sequences_per_device(self.config),
            parts=(
                tuple(command_words(change.fields) for change in changes)
                if len(changes) > 1
                else ()
            ),
            first=set(kinds) <= {"remat", "microbatch"},
        )


def _sequences_per_device(config: TrainConfig) -> float:
    """Returns the number of sequences that a device has at once."""
    sizes = config.mesh.sizes()
    n_shards = math.prod(sizes[axis] for axis in axes_of(config.rules.activations["batch"]))
    return config.train.global_batch / config.train.microbatches / n_shards


def command_words(fields: Mapping[str, Any]) -> str:
    """Returns the words of a command line that set these fields."""
    words = []
    for name, value in fields.items():
        text = ",".join(value) if isinstance(value, tuple) else value
        words.append(f"--config.{name}={text}")
    return " ".join(words)


def _effect(config: TrainConfig) -> tuple[TrainConfig, Any]:
    """Returns a key that differs for different programs.

    Rules count only as far as they shard over axes that this mesh has.
    """
    sizes = config.mesh.sizes()
    sharded = {}
    for kind in get_args(Kind):
        for row, entry in config.rules.column(kind).items():
            axes = [axis for axis in axes_of(entry) if sizes.get(axis, 1) > 1]
            sharded[kind, row] = axes
    return dataclasses.replace(config, rules=PRESETS["ddp"]), (sharded, config.rules.reduction)


def _remat(config: TrainConfig) -> Iterator[Change]:
    """Rematerialise more, beginning with the cheapest; or offload to the host."""
    policy = getattr(config.model, "remat", None)
    if any(segment.remat != policy for segment in config.model.stack().segments):
        return  # model.remat does not apply to a segment with its own policy
    if policy not in POLICIES:
        return
    for stronger in POLICIES[POLICIES.index(policy) + 1 :]:
        yield Change("remat", {"model.remat": stronger})
    if policy != "full":
        yield Change("offload", {"model.remat": "offload"})


def _microbatches(config: TrainConfig) -> Iterator[Change]:
    """Fewer sequences at once: each divisor of their number, down to one on each device."""
    n_sequences = int(_sequences_per_device(config))
    for n in range(n_sequences - 1, 0, -1):
        if n_sequences % n == 0:
            microbatches = config.train.microbatches * n_sequences // n
            yield Change("microbatch", {"train.microbatches": microbatches})


def _rules(config: TrainConfig) -> Iterator[Change]:
    """Other presets that use each axis of the same mesh."""
    mesh_axes = {axis for axis, size in config.mesh.sizes().items() if size > 1}
    names = list(PRESETS)
    names += [f"{a}+{b}" for a, b in itertools.product(_REPLICA_RULES, _TENSOR_RULES)]
    for name in names:
        if name != config.rules.name and mesh_axes <= preset(name).mesh_axes():
            yield Change("rule", {"rules": with_reduction(config, name)})


def with_reduction(config: TrainConfig, name: str) -> str:
    """Returns the name of rules with the config's own `reduction`, for the command line."""
    reductions = [
        word for word, reduction in REDUCTIONS.items() if reduction == config.rules.reduction
    ]
    return "+".join(dict.fromkeys([*name.split("+"), *reductions]))


def _meshes(config: TrainConfig) -> Iterator[Change]:
    """Weights sharded over part of the replicas (HSDP); more tensor parallelism inside a node."""
    sizes = config.mesh.sizes()
    tensor_y = sizes.get("tensor_y", 1)
    rules = "hsdp"
    if tensor_y > 1:
        rules = "hsdp+megatron_2d"
    elif sizes["tensor"] > 1:
        rules = "hsdp+megatron_sp"
    for factor in (2, 8):
        if sizes["data"] % factor == 0:
            fields = {
                "rules": with_reduction(config, rules),
                "mesh.data": sizes["data"] // factor,
                "mesh.fsdp": sizes["fsdp"] * factor,
            }
            yield Change("mesh", fields)

    if sizes["tensor"] * tensor_y * 2 > NODE:
        return
    for axis in ("data", "fsdp"):
        if sizes[axis] % 2 == 0:
            fields = {}
            if "megatron" not in config.rules.name:
                fields["rules"] = with_reduction(config, f"{config.rules.name}+megatron_sp")
            fields[f"mesh.{axis}"] = sizes[axis] // 2
            fields["mesh.tensor"] = sizes["tensor"] * 2
            yield Change("mesh", fields)


def _loss(config: TrainConfig) -> Iterator[Change]:
    """Smaller chunks of logits in the loss."""
    chunk = getattr(config.model, "loss_chunk", 0)
    if chunk:
        yield Change("loss", {"model.loss_chunk": max(_LEAST_LOSS_CHUNK, chunk // 4)})


def _optimizer_offload(config: TrainConfig) -> Iterator[Change]:
    """The optimizer's slots in the hosts' memory, and the master, where the rules have one."""
    slots = tuple(config.optimizer.rule.slots({}))
    for offloaded in ((*slots, MASTER), slots):
        if set(config.optimizer.offload) >= set(offloaded):
            return
        changed = with_fields(config, {"optimizer.offload": offloaded})
        if not list(optimizer_problems(changed.optimizer, changed.rules)):
            yield Change("host", {"optimizer.offload": offloaded})
            return
