"""A config's training step, the same that `train.py` runs, as a program for GPUs that this machine
does not have.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from jax.sharding import Mesh

from mesh_lm.config import TrainConfig
from mesh_lm.data.abstract import abstract_batch
from mesh_lm.optim import Optimizer
from mesh_lm.parallel.engine import batch_sharding
from mesh_lm.parallel.layout import ModelLayout
from mesh_lm.planning import stages, state_bytes
from mesh_lm.planning.attention import with_compilable_attention
from mesh_lm.planning.vocabulary import INSTALL, VOCABULARY
from mesh_lm.state import StatePart, abstract_state, parts
from mesh_lm.training.check import check
from mesh_lm.training.diloco import outer_step
from mesh_lm.training.step import train_step
from sharding_rules import Shard
from sharding_rules.lab import LabError, Report, compile_module, compile_report, lower_for
from sharding_rules.lab.flags import auto
from sharding_rules.lab.hlo import Module
from sharding_rules.lab.report import CompilerMissing, Slot
from sharding_rules.lab.targets import NODE, TARGETS, require_whole_nodes


def devices_for(config: TrainConfig, devices: int | None) -> int:
    """Returns the number of devices to plan for: `devices`, else the mesh's size; if one of its
    axes is -1, the fewest full nodes.
    """
    sizes = config.mesh.sizes().values()
    fixed = math.prod(size for size in sizes if size != -1)
    return devices or (math.lcm(fixed, NODE) if -1 in sizes else fixed)


@dataclasses.dataclass(frozen=True)
class Program:
    """A training step, before it is compiled."""

    config: TrainConfig
    """The checked config, with an attention that can be compiled here."""
    mesh: Mesh
    layout: ModelLayout

    @classmethod
    def of(cls, config: TrainConfig, target: str, n_devices: int) -> Program:
        """Raises ConfigError if the config cannot run on n_devices, and LabError if the compiler
        for the target is missing.
        """
        if target in TARGETS:
            # first: what fits a part of a node is no help
            require_whole_nodes(TARGETS[target], n_devices)
        config = check(config, n_devices)
        try:
            mesh = lower_for(target, n_devices, **dataclasses.asdict(config.mesh))
        except CompilerMissing as error:
            raise LabError(f"{error.what}; {INSTALL}") from error
        config = with_compilable_attention(config, target)
        return cls(
            config, mesh, ModelLayout.of(config.model, Shard(config.rules, mesh), config.pipeline)
        )

    @property
    def optimizer(self) -> Optimizer:
        """The run's optimizer."""
        return Optimizer(self.config.optimizer, self.config.train.steps)

    @cached_property
    def declared(self) -> dict[str, StatePart]:
        """The parts of the training state. Raises ShardingRuleError and ConfigError as
        `mesh_lm.state.parts` does.
        """
        return parts(self.layout, self.optimizer)

    @property
    def model_flops(self) -> float:
        """FLOPs of the model on one device in a step: forward and backward of its tokens, nothing
        computed twice; 0 where unknown.
        """
        return self.config.model.flops_per_token() * self._tokens

    @property
    def attention_flops(self) -> float:
        """Those of them that are attention's."""
        return self.config.model.attention_flops_per_token() * self._tokens

    @property
    def _tokens(self) -> float:
        """Tokens of a step, per device."""
        return self.config.train.global_batch * self.config.model.seq_len / self.mesh.size

    def compile(self, options: Mapping[str, Any] | None = None) -> Report:
        """Compiles the step with these XLA options, and returns the lab's report. Raises LabError
        if the compiler fails.
        """
        step, arguments = self._step()
        return self._report(
            step, arguments, options, slots=self._slots, model_flops=self.model_flops,
            attention_flops=self.attention_flops,
            segments={segment.name: segment.n_layers for segment in self.layout.segments},
        )  # fmt: skip

    def compile_outer(self, options: Mapping[str, Any] | None = None) -> Report | None:
        """The same of the outer step, which a run makes every optimizer.outer_steps steps; None
        without one.
        """
        if not self.config.optimizer.outer_steps:
            return None
        layout, optimizer = self.layout, self.optimizer
        return self._report(
            outer_step(layout, optimizer), (abstract_state(layout, optimizer),), options
        )

    def _report(
        self,
        program: Callable[..., Any],
        arguments: tuple[Any, ...],
        options: Mapping[str, Any] | None,
        **more: Any,
    ) -> Report:
        config = self.config
        return compile_report(
            program, *arguments, mesh=self.mesh, name=Path(config.output).name, options=options,
            kind_of=state_bytes.kind_of(self.declared), vocabulary=VOCABULARY,
            cache=os.path.join(os.path.expanduser(config.launch.compile_cache), "reports") if config.launch.compile_cache else None, **more,
        )  # fmt: skip

    def module(self, options: Mapping[str, Any] | None = None) -> Module:
        """Compiles the step, and returns the program itself, for the queries of
        `sharding_rules.lab.structure`. Raises as `compile`.
        """
        step, arguments = self._step()
        return compile_module(step, *arguments, mesh=self.mesh, options=options, slots=self._slots)

    @property
    def _slots(self) -> tuple[Slot, ...]:
        return stages.pipeline_slots(self.layout, self.config.train.microbatches)

    def _step(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """The training step, and the shapes of its arguments."""
        config, layout, optimizer = self.config, self.layout, self.optimizer
        step = train_step(layout, optimizer, config.seed, config.health.outlier)
        return step, (
            abstract_state(layout, optimizer),
            abstract_batch(config, batch_sharding(layout)),
        )


def compile_config(
    config: TrainConfig, target: str, n_devices: int, options: Mapping[str, Any] | None = None
) -> Report:
    """Compiles one training step of this config, and returns the lab's report. Raises as Program
    does.
    """
    return Program.of(config, target, n_devices).compile(options)


def flags_of(config: TrainConfig, target: str) -> str:
    """Returns the name of the set of XLA flags that a run of this config uses on such a GPU."""
    match config.launch.xla_flags:
        case "auto" if target not in TARGETS:
            raise LabError(f"no target {target!r}; expected one of {', '.join(TARGETS)}")
        case "auto":
            return auto(
                TARGETS[target].capability, config.mesh.pipeline != 1, config.pipeline.pair_layers
            )
        case "none":
            return "default"
        case name:
            return name
