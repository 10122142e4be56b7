"""All output of a run. It gets metrics one step late, so that the host never makes the devices
wait.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import jax
import numpy as np

from mesh_lm.checkpoint.reader import steps_in
from mesh_lm.config import ProfileConfig, TrainConfig, as_dict
from mesh_lm.config.resolved import to_json
from mesh_lm.data.atomic import atomic_write
from mesh_lm.data.dataset import Dataset
from mesh_lm.distributed.phases import Phases
from mesh_lm.errors import ConfigError
from mesh_lm.inference.perplexity import bits_per_byte
from mesh_lm.parallel.layout import ModelLayout
from mesh_lm.parallel.noise_scale import SIGNAL, TRACE
from mesh_lm.report import rows
from mesh_lm.report.plot import loss_curve
from mesh_lm.report.progress import Progress
from mesh_lm.report.run_log import RunLog
from mesh_lm.report.weights_and_biases import WeightsAndBiases
from mesh_lm.report.writer import Writer
from mesh_lm.training.goodput import Goodput, describe
from mesh_lm.training.noise_scale import RunningNoiseScale
from mesh_lm.training.opening import opening

StepMetrics = tuple[int, dict[str, jax.Array]]
"""(a step's number, its metrics)."""


class Monitor:
    """Progress on the terminal, metrics in `<output>`, traces on request. Prints on process 0 only.
    A context manager.
    """

    def __init__(
        self,
        config: TrainConfig,
        layout: ModelLayout,
        corpus: Dataset,
        phases: Phases,
        first_step: int,
        log: RunLog | None = None,
    ) -> None:
        self.config = config
        self.corpus = corpus
        self.output = Path(config.output).expanduser()
        self.speaks = jax.process_index() == 0
        if self.speaks:
            self._keep_config()
        self._progress = Progress(
            config.train.steps,
            first_step,
            log_every=config.train.log_every,
            tokens_per_step=config.tokens_per_step,
            flops_per_token=config.model.flops_per_token(),
            n_devices=jax.device_count(),
            device_kind=jax.devices()[0].device_kind,
            enabled=self.speaks,
            log=log,
            bits_per_byte=_train_bits_per_byte(corpus),
        )
        wandb = None
        if config.wandb and self.speaks:
            wandb = WeightsAndBiases(config.wandb, self.output, as_dict(config))
        try:
            self._writer = Writer(self.output if self.speaks else None, first_step, also=wandb)
        except OSError as error:
            raise _unwritable(self.output, error) from error
        self._profile = Profile(config.profile, self.output / "profile", first_step)
        self._newest: StepMetrics | None = None
        """The metrics of the newest step."""
        self._unread: StepMetrics | None = None
        """The same, until they are read."""
        self._write_problem = ""
        """The reason why rows cannot be written; empty if they can."""
        self._phases = phases
        self._goodput: Goodput | None = None
        if self.speaks and first_step < config.train.steps:
            # A start that finds a finished run spends no time on it.
            self._goodput = Goodput(self.output, phases, first_step)
        self._noise_scale = RunningNoiseScale()
        self._opening = opening(config, layout, corpus)
        self._waited_until_row = 0.0
        """Seconds that steps have waited for data until the last row."""
        self._row_step = first_step

    def _keep_config(self) -> None:
        """Writes down the config as it is run, for `--config`."""
        try:
            self.output.mkdir(parents=True, exist_ok=True)
            with atomic_write(self.output / "config.json") as (file,):
                file.write(to_json(self.config).encode())
        except OSError as error:
            raise _unwritable(self.output, error) from error

    def step(self, step: int, metrics: dict[str, jax.Array]) -> StepMetrics | None:
        """Takes the metrics of a step just dispatched, and returns those of the step before, which
        is done; None at the first step.
        """
        previous = self._newest
        self._newest = (step, metrics)
        self._phases.step = step
        if self._goodput:
            self._goodput.write()
        self._profile.step(step, metrics, self._phases)
        self.flush()
        self._unread = self._newest
        return previous

    def roll_back(self, step: int) -> None:
        """Drops what came after this step, from which the run continues."""
        if self._goodput:
            self._goodput.roll_back(step)
        self._newest = None
        self._unread = None
        self._noise_scale = RunningNoiseScale()
        self._phases.step = step
        self._row_step = step
        self._progress.roll_back(step)
        try:
            self._writer.roll_back(step)
        except OSError as error:
            self.note(
                f"warning: the metrics after step {step} are still in {self.output}: "
                f"{error.strerror}"
            )

    def heldout(self, step: int, loss: float) -> dict[str, float]:
        """Records a held-out loss in nats per token, and returns the recorded row.

        If all of the held-out text was read, the log also has the bits per byte of compressors on
        the same text.
        """
        row = {"heldout_loss": loss}
        text = f"{loss:.3f} nats per token"
        n_bytes = self.corpus.heldout_bytes
        if n_bytes:
            row["heldout_bpb"] = bits_per_byte(loss, self.corpus.heldout_tokens, n_bytes)
            text = f"{row['heldout_bpb']:.3f} bits per byte"
        self._write(step, row)
        compressors = ", ".join(f"{name} {x:.3f}" for name, x in self._compressors().items())
        part = f"{self.config.train.eval_sequences or 'all'} sequences"
        self.note(f"step {step}: held-out {text} ({compressors or part})")
        return row

    def has_heldout(self, step: int) -> bool:
        """Returns whether a held-out loss after this step is on record, as in a finished run that
        is restarted. False off process 0.
        """
        if not self.speaks:
            return False
        try:
            metrics, _ = rows.read(self.output / rows.METRICS)
        except OSError:
            return False
        return any(row["step"] == step and "heldout_loss" in row for row in metrics)

    def _compressors(self) -> dict[str, float]:
        """Returns the bits per byte of general compressors on the held-out text; empty if only a
        part of it is evaluated.
        """
        if self.config.train.eval_sequences:
            return {}
        compressor_scores = {
            "gzip -9": self.corpus.gzip_bits_per_byte,
            "xz -9": self.corpus.xz_bits_per_byte,
        }
        return {name: value for name, value in compressor_scores.items() if value is not None}

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """A context whose time is not counted as training: `with monitor.paused(): evaluate()`."""
        self.flush()
        phase = self._phases.phase
        self._phases.at("evaluate")
        with self._progress.paused():
            yield
        self._phases.at(phase)

    def note(self, text: str) -> None:
        """Prints a line between those of the steps."""
        self._progress.note(text)

    def finish(self, sample: str | None) -> None:
        """Draws the loss curve and writes the generated text. A full disk does not make a finished
        run fail.
        """
        if not self.speaks:
            return
        try:
            loss_curve(self.output / rows.METRICS, self.output / "loss.png", self._compressors())
            self.note(f"loss curve: {self.output / 'loss.png'}")
            if sample is not None:
                (self.output / "sample.txt").write_text(sample, encoding="utf-8")
        except OSError as error:
            self.note(
                f"warning: {error.filename or self.output} cannot be written: {error.strerror}"
            )
        if sample is not None:
            self.note(f"sample: {self.output / 'sample.txt'}\n{sample}")

    def has_finished(self, *, has_sample: bool) -> bool:
        """Returns whether an earlier process has written what `finish` writes, after the newest
        checkpoint. False off process 0.

        Files that are older than it are of a shorter run, which was then trained on, and died
        between its last save and `finish`.
        """
        if not self.speaks:
            return False
        names = ["loss.png", "sample.txt"] if has_sample else ["loss.png"]
        checkpoints = self.output / "checkpoints"
        newest = checkpoints / str(max(steps_in(checkpoints), default=0))
        try:
            saved_at = (newest / "metadata" / "metadata").stat().st_mtime_ns
            return all((self.output / name).stat().st_mtime_ns >= saved_at for name in names)
        except OSError:
            return False

    def flush(self) -> None:
        """Waits for the newest step, and writes its metrics."""
        if self._unread is None:
            return
        step, metrics = self._unread
        self._unread = None
        jax.block_until_ready(metrics)  # so that the host is never more than one step ahead
        scalars: dict[str, Any] = {name: x for name, x in metrics.items() if x.ndim == 0}
        if TRACE in scalars:
            self._noise_scale.add(float(scalars[TRACE]), float(scalars[SIGNAL]))
            if self._noise_scale.value is not None:
                scalars["noise_scale"] = np.float32(self._noise_scale.value)
        row = self._progress.step(step, scalars)
        if row:
            arrays = {name: x for name, x in metrics.items() if x.ndim}
            self._write(step, row | self._data_row(step), arrays)

    def _data_row(self, step: int) -> dict[str, float]:
        """Returns the epochs of the data so far, and how long a step waits for it: the mean over
        the steps since the last row.
        """
        waited = self._phases.seconds()["batch"]
        n_steps = max(1, step - self._row_step)
        wait_ms = 1e3 * (waited - self._waited_until_row) / n_steps
        self._waited_until_row = waited
        self._row_step = step
        epoch = step * self.config.tokens_per_step / self.corpus.train_tokens
        return {"epoch": epoch, "wait_ms": wait_ms}

    def _write(
        self, step: int, row: dict[str, float], arrays: Mapping[str, jax.Array] = {}
    ) -> None:
        """Writes a row. A full disk does not stop the run; the rows are written when there is space
        again.
        """
        problem = ""
        try:
            self._writer.write(step, row, arrays)
        except OSError as error:
            problem = error.strerror or str(error)
        if problem == self._write_problem:
            return
        self._write_problem = problem
        if problem:
            self.note(
                f"warning: the metrics in {self.output} cannot be written: {problem}; training "
                "continues"
            )
        else:
            self.note(f"warning: the metrics in {self.output} are written again")

    def __enter__(self) -> Monitor:
        self._progress.__enter__()
        for line in self._opening:
            self.note(line)
        n_damaged = self._writer.damaged
        if n_damaged:
            self.note(
                f"warning: {n_damaged} earlier rows of {self.output / rows.METRICS} are damaged or "
                "missing, and left out"
            )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            self.flush()
        self._profile.stop()
        if kind is None and self._profile.missed:
            self.note(
                f"no trace was made: this process ended before step {self._profile.missed} "
                "(profile.start_step)"
            )
        if self._goodput:
            finished = self._phases.step >= self.config.train.steps
            self.note(describe(self._goodput.total(finished=finished)))
        self._progress.__exit__(kind, value, trace)
        with contextlib.suppress(OSError):  # was reported when it happened
            self._writer.close()


def _train_bits_per_byte(corpus: Dataset) -> Callable[[float], float] | None:
    """Returns a function from nats per token of the training text to bits per byte; None where the
    bytes of the text are not known.
    """
    n_bytes = corpus.train_bytes
    if not n_bytes:
        return None
    return lambda nats: bits_per_byte(nats, corpus.train_tokens, n_bytes)


def _unwritable(output: Path, error: OSError) -> ConfigError:
    return ConfigError(
        f"cannot write metrics to {error.filename or output}: {error.strerror}; set another output"
    )


class Profile:
    """A jax.profiler trace of some steps, with the model's named scopes."""

    def __init__(self, config: ProfileConfig, directory: Path, first_step: int) -> None:
        self.directory = directory
        self._is_tracing = False
        self._has_traced = False
        self._start = first_step + max(2, config.start_step) if config.steps else None
        self._stop = (self._start or 0) + config.steps

    def step(self, step: int, metrics: dict[str, jax.Array], phases: Phases) -> None:
        """Call it after step `step` was dispatched, with the metrics that it will return."""
        if self._is_tracing and step + 1 >= self._stop:
            phases.at("save")  # a trace of a large model takes minutes to write
            jax.block_until_ready(metrics)
            self.stop()
        elif step + 1 == self._start:
            jax.profiler.start_trace(str(self.directory))
            self._is_tracing = True
            self._has_traced = True

    @property
    def missed(self) -> int | None:
        """The first step to trace, if the run ended before it; else None."""
        return None if self._has_traced else self._start

    def stop(self) -> None:
        """Ends the trace if one is being recorded."""
        if self._is_tracing:
            jax.profiler.stop_trace()
            self._is_tracing = False
