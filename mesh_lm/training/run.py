"""The result of `mesh_lm.train`, which callbacks get as well: the progress of a run, and its
measurements.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

import jax

from mesh_lm.config import TrainConfig
from mesh_lm.distributed.stop import status_of
from mesh_lm.errors import ConfigError, did_you_mean
from mesh_lm.report import rows
from mesh_lm.state import State

if TYPE_CHECKING:
    from mesh_lm.optim import Optimizer
    from mesh_lm.parallel.layout import ModelLayout


@dataclasses.dataclass(eq=False)
class Run:
    """One run, while it trains and afterwards."""

    config: TrainConfig
    """The config as it was run: checked, with its mesh resolved."""
    layout: ModelLayout
    """Shapes and shardings of the model on the mesh."""
    optimizer: Optimizer
    step: int
    """Optimizer steps done, those before a restart included."""
    state: State
    """Parameters, optimizer slots and counters after that step; see `mesh_lm.state`. While the run
    trains it is donated to the next step: copy what you want to keep. After a run with pipeline
    stages that wrote a sample it is empty; `mesh_lm.load` reads the checkpoint."""
    preempted: bool = False
    """Whether SIGTERM or Ctrl-C ended the run, which then saved; the same call continues it."""
    interrupted: bool = False
    """Whether that was Ctrl-C."""
    stopping: bool = False
    """Whether `stop` was called."""

    @property
    def output(self) -> Path:
        """The directory of the run's checkpoints, metrics, plots and samples."""
        return Path(self.config.output).expanduser()

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """The rows of <output>/metrics.jsonl, such as {"step": 10, "loss": 3.2, ...}: those of
        training and those of evaluation.
        """
        return rows.read(self.output / rows.METRICS)[0]

    @property
    def losses(self) -> list[float]:
        """The training losses on record, in nats per token: one every train.log_every steps, the
        first and the last.
        """
        return [row["loss"] for row in self.metrics if "loss" in row]

    @property
    def unfinished(self) -> bool:
        """Whether there are steps left."""
        return self.step < self.config.train.steps and not (self.preempted or self.stopping)

    @property
    def status(self) -> Literal[0, 99, 130]:
        """The exit status of a command that made this run."""
        return status_of(interrupted=self.interrupted) if self.preempted else 0

    def stop(self) -> None:
        """For callbacks, on all processes: ends the run after this step as if it were the last,
        with a checkpoint and an evaluation.
        """
        self.stopping = True


class Callback(Protocol):
    """The methods of a callback, all optional. They are called on every process of the run.

    If one of them raises, the run saves a checkpoint, and ends with that exception.
    """

    def on_start(self, run: Run, /) -> None:
        """Called before the first step of this process."""
        ...

    def on_step(self, run: Run, metrics: Mapping[str, jax.Array], /) -> None:
        """Called after a step was dispatched; float(metrics["loss"]) waits for the step, and then
        makes the devices wait for the host.
        """
        ...

    def on_evaluation(self, run: Run, metrics: Mapping[str, float], /) -> None:
        """Called after an evaluation: {"heldout_loss": nats per token, "heldout_bpb": bits per
        byte, if the bytes are known}.
        """
        ...

    def on_end(self, run: Run, /) -> None:
        """Called after the last evaluation, unless the run was interrupted."""
        ...


def require_callbacks(callbacks: Any) -> None:
    """Raises ConfigError for what is no list, and for a method that begins with on_ and is none of
    `Callback`.
    """
    hooks = [name for name in vars(Callback) if name.startswith("on_")]
    if not isinstance(callbacks, Iterable):
        raise ConfigError(f"callbacks={callbacks!r}: expected a list of them")
    for callback in callbacks:
        for name in dir(callback):
            if not name.startswith("on_") or name in hooks:
                continue
            suggestion = did_you_mean(difflib.get_close_matches(name, hooks, n=1))
            if not suggestion:
                suggestion = f"; the methods are {', '.join(hooks)}"
            raise ConfigError(
                f"{type(callback).__name__}.{name}: no such method of a callback{suggestion}"
            )
