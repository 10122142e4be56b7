"""What `mesh_lm.train` returns, and what the user's own callbacks are given: where a run is, and what it has measured."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

import jax

from mesh_lm.config import TrainConfig
from mesh_lm.launch import EXIT_PREEMPTED
from mesh_lm.state import State

if TYPE_CHECKING:
    from mesh_lm.optim import Optimizer
    from mesh_lm.parallel.layout import ModelLayout


@dataclasses.dataclass(eq=False)
class Run:
    """One run, while it trains and afterwards."""

    config: TrainConfig
    """As it was run: checked, with its mesh resolved."""
    layout: ModelLayout
    """How the model lies on the mesh."""
    optimizer: Optimizer
    step: int
    """Optimizer steps done, those before a restart included."""
    state: State
    """Parameters, optimizer slots and counters after that step; see `mesh_lm.state`. While the run trains the next step takes its memory
    over: copy what is to be kept. After a run in pipeline stages that wrote a sample it is empty; `mesh_lm.load` reads the checkpoint."""
    preempted: bool = False
    """Whether SIGTERM ended the run, which then saved; the same call continues it."""
    stopping: bool = False
    """Whether `stop` was called."""

    @property
    def output(self) -> Path:
        """The directory of the run's checkpoints, metrics, plots and samples."""
        return Path(self.config.output).expanduser()

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """The rows of <output>/metrics.jsonl, such as {"step": 10, "loss": 3.2, ...}: those of training and those of evaluation."""
        lines = (self.output / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines if line.endswith("}")]  # a full disk may have cut the last one short

    @property
    def losses(self) -> list[float]:
        """The training losses on record, in nats per token: one every train.log_every steps, the first and the last."""
        return [row["loss"] for row in self.metrics if "loss" in row]

    @property
    def unfinished(self) -> bool:
        """Whether there are steps to make."""
        return self.step < self.config.train.steps and not (self.preempted or self.stopping)

    @property
    def status(self) -> Literal[0, 99]:
        """The exit status of a command that made this run."""
        return EXIT_PREEMPTED if self.preempted else 0

    def stop(self) -> None:
        """For callbacks, on all processes alike: ends the run after this step as after its last, with a checkpoint and an evaluation."""
        self.stopping = True


class Callback(Protocol):
    """What a callback may have, all of it optional. It is called on every process of the run.

    An exception in one ends the run as `Run.stop` would save it, and is raised again.
    """

    def on_start(self, run: Run, /) -> None:
        """Before the first step of this process."""
        ...

    def on_step(self, run: Run, metrics: Mapping[str, jax.Array], /) -> None:
        """After a step was dispatched; float(metrics["loss"]) waits for it, and lets the devices wait for the host."""
        ...

    def on_evaluation(self, run: Run, metrics: Mapping[str, float], /) -> None:
        """After an evaluation: {"heldout_loss": nats per token, "heldout_bpb": bits per byte, where the bytes are known}."""
        ...

    def on_end(self, run: Run, /) -> None:
        """After the last evaluation; not where the run was interrupted."""
        ...
