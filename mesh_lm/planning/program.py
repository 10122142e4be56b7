"""A config's training step, as `train.py` runs it, compiled for GPUs that you do not have."""

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
from sharding_rules.lab.machine import Machine, machine_of
from sharding_rules.lab.replayed import compiled_on
from sharding_rules.lab.report import CompilerMissing, Slot
from sharding_rules.lab.targets import NODE, TARGETS, require_whole_nodes


def devices_for(config: TrainConfig, devices: int | None, node: int = NODE) -> int:
    """Returns the number of devices to plan for: `devices`, else the size of the mesh.

    If an axis of the mesh is -1, that is the fewest full nodes that hold the other axes.

    node: GPUs of a node.
    """
    if devices:
        return devices
    sizes = config.mesh.sizes().values()
    n_fixed = math.prod(size for size in sizes if size != -1)
    return math.lcm(n_fixed, node) if -1 in sizes else n_fixed


def mesh_for(hardware: str | Machine, n_devices: int, **axes: Any) -> Mesh:
    """Returns a mesh of absent GPUs.

    Raises LabError as `lower_for`, with what to install where the compiler is missing.
    """
    try:
        return lower_for(machine_of(hardware).target, n_devices, **axes)
    except CompilerMissing as error:
        raise LabError(f"{error.subject}; {INSTALL}") from error


@dataclasses.dataclass(frozen=True)
class Program:
    """A training step, before it is compiled."""

    config: TrainConfig
    """The checked config, with an attention that can be compiled here."""
    mesh: Mesh
    layout: ModelLayout
    machine: Machine
    """The hardware at whose speeds the report's times are predicted."""

    @classmethod
    def of(cls, config: TrainConfig, hardware: str | Machine, n_devices: int) -> Program:
        """Returns the program of a config.

        hardware: a target's name, or a machine whose changed constants XLA reads where it can.

        Raises ConfigError if the config cannot run on n_devices, and LabError if the compiler for
        the target is missing.
        """
        # First, because a config that fits a part of a node is no help.
        machine = machine_of(hardware)
        require_whole_nodes(machine.target, n_devices)
        config = check(config, n_devices)
        mesh = mesh_for(machine, n_devices, **dataclasses.asdict(config.mesh))
        config = with_compilable_attention(config, machine.target.name)
        layout = ModelLayout.of(config.model, Shard(config.rules, mesh), config.pipeline)
        return cls(config, mesh, layout, machine)

    @property
    def optimizer(self) -> Optimizer:
        """The run's optimizer."""
        return Optimizer(self.config.optimizer, self.config.train.steps, self.config.diloco)

    @cached_property
    def declared(self) -> dict[str, StatePart]:
        """The parts of the training state. Raises as `mesh_lm.state.parts`."""
        return parts(self.layout, self.optimizer)

    @property
    def model_flops(self) -> float:
        """FLOPs of the model on one device in a step, 0 if they are unknown.

        They are those of forward and backward of its tokens, nothing computed twice.
        """
        return self.config.model.flops_per_token() * self._tokens

    @property
    def attention_flops(self) -> float:
        """The part of `model_flops` that is attention's."""
        return self.config.model.attention_flops_per_token() * self._tokens

    @property
    def _tokens(self) -> float:
        """Tokens of a step, per device."""
        return self.config.train.global_batch * self.config.model.seq_len / self.mesh.size

    def compile(self, options: Mapping[str, Any] | None = None) -> Report:
        """Compiles the step with these XLA options, and returns the lab's report.

        Raises LabError if the compiler fails.
        """
        step, arguments = self._step()
        return self._report(
            step,
            arguments,
            options,
            slots=self._slots,
            model_flops=self.model_flops,
            attention_flops=self.attention_flops,
            segments={segment.name: segment.n_layers for segment in self.layout.segments},
        )

    def compile_outer(self, options: Mapping[str, Any] | None = None) -> Report | None:
        """Compiles the outer step, which a run makes every diloco.outer_steps steps.

        Returns None if the run has none. Raises LabError if the compiler fails.
        """
        if not self.config.diloco.outer_steps:
            return None
        step = outer_step(self.layout, self.optimizer)
        return self._report(step, (abstract_state(self.layout, self.optimizer),), options)

    def _report(
        self,
        program: Callable[..., Any],
        arguments: tuple[Any, ...],
        options: Mapping[str, Any] | None,
        **facts: Any,
    ) -> Report:
        cache = None
        if self.config.launch.compile_cache:
            cache = os.path.join(os.path.expanduser(self.config.launch.compile_cache), "reports")
        report = compile_report(
            program,
            *arguments,
            mesh=self.mesh,
            name=Path(self.config.output).name,
            options=options,
            kind_of=state_bytes.kind_of(self.declared),
            vocabulary=VOCABULARY,
            cache=cache,
            **facts,
        )
        return compiled_on(report, self.machine)

    def module(self, options: Mapping[str, Any] | None = None) -> Module:
        """Compiles the step, and returns the program for queries (`sharding_rules.lab.structure`).

        Raises LabError if the compiler fails.
        """
        step, arguments = self._step()
        return compile_module(step, *arguments, mesh=self.mesh, options=options, slots=self._slots)

    @property
    def _slots(self) -> tuple[Slot, ...]:
        return stages.pipeline_slots(self.layout, self.config.train.microbatches)

    def _step(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """Returns the training step, and the shapes of its arguments."""
        config = self.config
        optimizer = self.optimizer
        step = train_step(
            self.layout,
            optimizer,
            config.seed,
            config.health.outlier,
            has_noise_scale=config.train.noise_scale,
        )
        state = abstract_state(self.layout, optimizer)
        return step, (state, abstract_batch(config, batch_sharding(self.layout)))


def compile_config(
    config: TrainConfig,
    hardware: str | Machine,
    n_devices: int,
    options: Mapping[str, Any] | None = None,
) -> Report:
    """Compiles one training step of this config, and returns the lab's report.

    Raises as `Program.of` and `Program.compile`.
    """
    return Program.of(config, hardware, n_devices).compile(options)


def flags_of(config: TrainConfig, target: str) -> str:
    """Returns the name of the set of XLA flags that a run of this config uses on such a GPU."""
    if config.launch.xla_flags == "none":
        return "default"
    if config.launch.xla_flags != "auto":
        return config.launch.xla_flags
    if target not in TARGETS:
        raise LabError(f"the target {target!r} is unknown; expected one of {', '.join(TARGETS)}")
    has_pipeline = config.mesh.pipeline != 1
    return auto(TARGETS[target].capability, has_pipeline, config.pipeline.pair_layers)
