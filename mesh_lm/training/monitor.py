"""All output of a run. It gets metrics one step late, so that the host never makes the devices
wait.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

import jax

from mesh_lm.checkpoint.reader import steps_in
from mesh_lm.config import ProfileConfig, TrainConfig, as_dict
from mesh_lm.config.resolved import to_json
from mesh_lm.data.atomic import atomic_write
from mesh_lm.data.dataset import Dataset
from mesh_lm.distributed.phases import Phases
from mesh_lm.errors import ConfigError
from mesh_lm.inference.perplexity import bits_per_byte
from mesh_lm.parallel.layout import ModelLayout
from mesh_lm.report import rows
from mesh_lm.report.plot import loss_curve
from mesh_lm.report.progress import Progress
from mesh_lm.report.run_log import RunLog
from mesh_lm.report.weights_and_biases import WeightsAndBiases
from mesh_lm.report.writer import Writer
from mesh_lm.training.goodput import Goodput, describe
from mesh_lm.training.opening import opening


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
        self.config, self.corpus, self.output = config, corpus, Path(config.output).expanduser()
        self.speaks = jax.process_index() == 0
        device = jax.devices()[0]
        if self.speaks:
            self._keep_config()
        self._progress = Progress(
            config.train.steps,
            first_step,
            log_every=config.train.log_every,
            tokens_per_step=config.tokens_per_step,
            flops_per_token=config.model.flops_per_token(),
            n_devices=jax.device_count(),
            device_kind=device.device_kind,
            enabled=self.speaks,
            log=log,
            bits_per_byte=(lambda nats: bits_per_byte(nats, corpus.train_tokens, n_bytes))
            if (n_bytes := corpus.train_bytes)
            else None,
        )
        wandb = (
            WeightsAndBiases(config.wandb, self.output, as_dict(config))
            if config.wandb and self.speaks
            else None
        )
        try:
            self._writer = Writer(self.output if self.speaks else None, first_step, also=wandb)
        except OSError as error:
            raise _unwritable(self.output, error) from error
        self._profile = Profile(config.profile, self.output / "profile", first_step)
        self._newest: tuple[int, dict[str, jax.Array]] | None = None  # of the newest step
        self._late = self._newest  # the same, until it is read
        self._unwritten = ""
        # a start that finds a finished run spends no time on it
        counts = self.speaks and first_step < config.train.steps
        self._phases, self._goodput = (
            phases,
            Goodput(self.output, phases, first_step) if counts else None,
        )
        self._opening = opening(config, layout, corpus)
        self._waited, self._row_step = 0.0, first_step

    def _keep_config(self) -> None:
        """Writes down the config as it is run, for `--config`."""
        try:
            self.output.mkdir(parents=True, exist_ok=True)
            with atomic_write(self.output / "config.json") as (file,):
                file.write(to_json(self.config).encode())
        except OSError as error:
            raise _unwritable(self.output, error) from error

    def step(
        self, step: int, metrics: dict[str, jax.Array]
    ) -> tuple[int, dict[str, jax.Array]] | None:
        """Takes the metrics of a step just dispatched, and returns those of the step before, which
        is done; None at the first step.
        """
        before, self._newest = self._newest, (step, metrics)
        self._phases.step = step
        if self._goodput:
            self._goodput.write()
        self._profile.step(step, metrics, self._phases)
        self.flush()
        self._late = self._newest
        return before

    def roll_back(self, step: int) -> None:
        """Drops what came after this step, from which the run continues."""
        if self._goodput:
            self._goodput.roll_back(step)
        self._newest = self._late = None
        self._phases.step = self._row_step = step
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
        beside = ", ".join(f"{name} {value:.3f}" for name, value in self._yardsticks().items())
        row, shown = {"heldout_loss": loss}, f"{loss:.3f} nats per token"
        if self.corpus.heldout_bytes:
            row["heldout_bpb"] = bits_per_byte(
                loss, self.corpus.heldout_tokens, self.corpus.heldout_bytes
            )
            shown = f"{row['heldout_bpb']:.3f} bits per byte"
        self._write(step, row)
        part = f"{self.config.train.eval_sequences or 'all'} sequences"
        self.note(f"step {step}: held-out {shown} ({beside or part})")
        return row

    def has_heldout(self, step: int) -> bool:
        """Returns whether a held-out loss after this step is on record, as in a finished run that
        is restarted. False off process 0.
        """
        try:
            found = rows.read(self.output / rows.METRICS)[0] if self.speaks else []
        except OSError:
            return False
        return any(row["step"] == step and "heldout_loss" in row for row in found)

    def _yardsticks(self) -> dict[str, float]:
        """Returns the bits per byte of general compressors on the held-out text; empty if only a
        part of it is evaluated.
        """
        known = {"gzip -9": self.corpus.gzip_bits_per_byte, "xz -9": self.corpus.xz_bits_per_byte}
        return (
            {}
            if self.config.train.eval_sequences
            else {name: value for name, value in known.items() if value is not None}
        )

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """A context whose time is not counted as training: `with monitor.paused(): evaluate()`."""
        self.flush()
        before = self._phases.phase
        self._phases.at("evaluate")
        with self._progress.paused():
            yield
        self._phases.at(before)

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
            loss_curve(self.output / rows.METRICS, self.output / "loss.png", self._yardsticks())
            self.note(f"loss curve: {self.output / 'loss.png'}")
            if sample is not None:
                (self.output / "sample.txt").write_text(sample, encoding="utf-8")
        except OSError as error:
            self.note(
                f"warning: {error.filename or self.output} cannot be written: {error.strerror}"
            )
        if sample is not None:
            self.note(f"sample: {self.output / 'sample.txt'}\n{sample}")

    def has_finished(self, *, with_sample: bool) -> bool:
        """Returns whether an earlier process has written what `finish` writes, after the newest
        checkpoint. False off process 0.

        Files that are older than it are of a shorter run, which was then trained on, and died
        between its last save and `finish`.
        """
        names = ["loss.png", *(["sample.txt"] if with_sample else [])]
        if not self.speaks:
            return False
        checkpoints = self.output / "checkpoints"
        try:
            saved = (
                (checkpoints / str(max(steps_in(checkpoints), default=0)) / "metadata" / "metadata")
                .stat()
                .st_mtime_ns
            )
            return all((self.output / name).stat().st_mtime_ns >= saved for name in names)
        except OSError:
            return False

    def flush(self) -> None:
        """Waits for the newest step, and writes its metrics."""
        late, self._late = self._late, None
        self._read(late)

    def _read(self, late: tuple[int, dict[str, jax.Array]] | None) -> None:
        if late is None:
            return
        jax.block_until_ready(late[1])  # so that the host is never more than one step ahead
        if row := self._progress.step(*late):
            self._write(late[0], row | self._about_data(late[0]))

    def _about_data(self, step: int) -> dict[str, float]:
        """Epochs of the data so far, and how long a step waits for it: the mean over the steps
        since the last row.
        """
        waited, self._waited = self._waited, self._phases.seconds()["batch"]
        steps, self._row_step = step - self._row_step, step
        epoch = step * self.config.tokens_per_step / self.corpus.train_tokens
        return {"epoch": epoch, "wait_ms": 1e3 * (self._waited - waited) / max(1, steps)}

    def _write(self, step: int, row: dict[str, float]) -> None:
        """Writes a row. A full disk does not stop the run; the rows are written when there is space
        again.
        """
        try:
            self._writer.write(step, row)
            problem = ""
        except OSError as error:
            problem = error.strerror or str(error)
        if problem != self._unwritten:
            state = (
                f"cannot be written: {problem}; training continues"
                if problem
                else "are written again"
            )
            self.note(f"warning: the metrics in {self.output} {state}")
        self._unwritten = problem

    def __enter__(self) -> Monitor:
        self._progress.__enter__()
        for line in self._opening:
            self.note(line)
        if n := self._writer.damaged:
            self.note(
                f"warning: {n} earlier rows of {self.output / rows.METRICS} are damaged or "
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
            self.note(
                describe(self._goodput.total(finished=self._phases.step >= self.config.train.steps))
            )
        self._progress.__exit__(kind, value, trace)
        with contextlib.suppress(OSError):  # was reported when it happened
            self._writer.close()


def _unwritable(output: Path, error: OSError) -> ConfigError:
    return ConfigError(
        f"cannot write metrics to {error.filename or output}: {error.strerror}; set another output"
    )


class Profile:
    """A jax.profiler trace of some steps, with the model's named scopes."""

    def __init__(self, config: ProfileConfig, directory: Path, first_step: int) -> None:
        self.directory, self._tracing, self._began = directory, False, False
        self._start = first_step + max(2, config.start_step) if config.steps else None
        self._stop = (self._start or 0) + config.steps

    def step(self, step: int, metrics: dict[str, jax.Array], phases: Phases) -> None:
        """Call it after step `step` was dispatched, with the metrics that it will return."""
        if self._tracing and step + 1 >= self._stop:
            phases.at("save")  # a trace of a large model takes minutes to write
            jax.block_until_ready(metrics)
            self.stop()
        elif step + 1 == self._start:
            jax.profiler.start_trace(str(self.directory))
            self._tracing = self._began = True

    @property
    def missed(self) -> int | None:
        """The first step to trace, if the run ended before it; else None."""
        return None if self._began else self._start

    def stop(self) -> None:
        """Ends the trace if one is being recorded."""
        if self._tracing:
            jax.profiler.stop_trace()
            self._tracing = False
