"""The progress and the speed of a run: a live bar on a terminal, plain lines in a log file."""

from __future__ import annotations

import contextlib
import datetime
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import TracebackType
from typing import Any, NamedTuple, Protocol, Self, TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, TextColumn
from rich.progress import Progress as Bar
from rich.text import Text

from mesh_lm.report.flops import mfu
from mesh_lm.report.memory import Memory, device_memory_gib


class Progress:
    """Times the steps of a run and shows them. `step` returns a row of metrics when one is due, for
    `Writer.write`.

    ```
    with Progress(total_steps, start_step, tokens_per_step=...) as progress:
        for step in range(start_step + 1, total_steps + 1):
            ...
            row = progress.step(step, metrics)
            if row:
                writer.write(step, row)
    ```
    A row is due every `log_every` steps (0: never) and at the first and the last step. The first
    step compiles, so rates leave it out.
    """

    def __init__(
        self,
        total_steps: int,
        start_step: int = 0,
        *,
        log_every: int = 10,
        tokens_per_step: int = 0,
        flops_per_token: float = 0.0,
        n_devices: int = 1,
        device_kind: str = "",
        bits_per_byte: Callable[[float], float] | None = None,
        enabled: bool = True,
        file: TextIO | None = None,
        log: Log | None = None,
        clock: Callable[[], float] = time.perf_counter,
        memory: Callable[[], Memory] = device_memory_gib,
    ) -> None:
        """Starts the clock.

        Args:
          flops_per_token, n_devices, device_kind: for `mfu`.
          bits_per_byte: converts a loss in nats per token.
          enabled: False for all processes but the first: rows are returned, but nothing is shown.
          log: a file that gets a line for each row and each note, also if the terminal shows a bar.
        """
        self._total_steps = total_steps
        self._log_every = log_every
        self._tokens_per_step = tokens_per_step
        self._mfu = partial(
            mfu, flops_per_token=flops_per_token, n_devices=n_devices, device_kind=device_kind
        )
        self._bits_per_byte = bits_per_byte
        self._clock = clock
        self._memory = memory
        self._views: list[_View] = []
        if enabled:
            self._views.append(_view_for(file or sys.stdout, total_steps, start_step))
            if log:
                self._views.append(_Lines(log, total_steps))
        self._restart(start_step)

    def step(self, step: int, metrics: Mapping[str, Any]) -> dict[str, float]:
        """Records that `step` is done.

        `metrics` may be arrays still being computed: they are waited for only when a row is due.

        Returns:
          Empty when no row is due, else `metrics` as floats with, over the steps since the last
          row, mean_loss, step_ms, tokens_per_s, mfu (0 to 1, if known; no rates at the first step),
          the peak memory_gib, the tokens so far, and train_bpb and mean_train_bpb if the
          constructor was given `bits_per_byte`.
        """
        self._losses.append(metrics["loss"])
        is_regular = self._log_every and step % self._log_every == 0
        if not (is_regular or self._first is None or step == self._total_steps):
            for view in self._views:
                view.advance(step)
            return {}
        # waits for the device, so it comes before the clock is read
        row = {name: float(value) for name, value in metrics.items()}
        done_at = self._clock()
        memory = self._memory()

        row["mean_loss"] = self._mean_loss()
        if self._bits_per_byte:
            row["train_bpb"] = self._bits_per_byte(row["loss"])
            row["mean_train_bpb"] = self._bits_per_byte(row["mean_loss"])
        if self._first is None:
            self._first = _Mark(step, done_at)
            tail = f"first step {done_at - self._started_at:.1f} s"
        else:
            row |= self._rates((done_at - self._last.time) / (step - self._last.step))
            # From all steps so far, evaluations and saves included, because the remaining steps
            # will have them, too.
            n_remaining = self._total_steps - step
            seconds = n_remaining * (done_at - self._first.time) / (step - self._first.step)
            tail = f"eta {datetime.timedelta(seconds=math.ceil(seconds))}"
        self._last = _Mark(step, done_at)
        row["memory_gib"] = memory.gib
        if self._tokens_per_step:
            row["tokens"] = float(step * self._tokens_per_step)
        for view in self._views:
            view.show(step, _describe(row, memory.of), tail)
        return row

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """A context whose time is not counted as training: `with progress.paused(): evaluate()`."""
        started_at = self._clock()
        try:
            yield
        finally:
            paused = self._clock() - started_at
            self._last = _Mark(self._last.step, self._last.time + paused)

    def roll_back(self, step: int) -> None:
        """Continues from this step; later ones are no longer counted."""
        self._restart(step)

    def note(self, text: str) -> None:
        """Prints a line above the bar."""
        for view in self._views:
            view.note(text)

    def __enter__(self) -> Self:
        self._restart(self._last.step)  # the time since the constructor does not count
        for view in self._views:
            view.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for view in self._views:
            view.stop()

    def _restart(self, step: int) -> None:
        """Times from now on, after `step`."""
        self._started_at = self._clock()
        self._last = _Mark(step, self._started_at)  # the last row
        self._first: _Mark | None = None  # the first step, which compiles, when it was done
        self._losses: list[Any] = []  # of the steps since the last row

    def _mean_loss(self) -> float:
        """Returns the mean loss of the steps since the last row, without skipped steps, whose
        losses are not finite.
        """
        losses = [float(loss) for loss in self._losses]
        self._losses = []
        finite = [loss for loss in losses if math.isfinite(loss)]
        if not finite:
            return losses[-1]
        return sum(finite) / len(finite)

    def _rates(self, step_seconds: float) -> dict[str, float]:
        rates = {"step_ms": 1e3 * step_seconds}
        if self._tokens_per_step:
            rates["tokens_per_s"] = self._tokens_per_step / step_seconds
            utilisation = self._mfu(rates["tokens_per_s"])
            if utilisation is not None:
                rates["mfu"] = utilisation
        return rates


class _Mark(NamedTuple):
    step: int
    time: float
    """When it was done, by the clock; moved by the pauses since."""


def _describe(row: Mapping[str, float], memory_kind: str) -> str:
    """Returns the metrics of a row as text, the most important first."""
    formats: dict[str, Callable[[float], str]] = {
        "mean_loss": lambda v: f"loss {v:.4f}",
        "mean_train_bpb": lambda v: f"bpb {v:.4f}",
        "heldout_loss": lambda v: f"held-out loss {v:.4f}",
        "heldout_bpb": lambda v: f"held-out bpb {v:.4f}",
        "grad_norm": lambda v: f"grad {v:.2f}",
        "learning_rate": lambda v: f"lr {v:.2e}",
        "tokens_per_s": lambda v: f"{v:,.0f} tok/s",
        "step_ms": lambda v: f"{v:,.0f} ms/step" if v >= 100 else f"{v:.1f} ms/step",
        "mfu": lambda v: f"mfu {v:.1%}",
        "memory_gib": lambda v: f"{v:.1f} GiB {memory_kind}",
        "expert_load": lambda v: f"expert load {v:.2f}",
        "expert_idle": lambda v: f"idle experts {v:.1%}" if v else "",
        "noise_scale": lambda v: f"noise scale {v:,.0f} sequences",
        "skipped": lambda v: f"skipped {v:.0f}" if v else "",
    }
    texts = [format_value(row[name]) for name, format_value in formats.items() if name in row]
    return "  ".join(text for text in texts if text)


class Log(Protocol):
    """A file to which `print(..., file=log)` writes."""

    def write(self, text: str, /) -> object:
        """Takes text."""
        ...

    def flush(self) -> None:
        """Called after each line."""
        ...


class _View(Protocol):
    """Shows the progress."""

    def start(self) -> None: ...
    def stop(self) -> None: ...
    def advance(self, step: int) -> None: ...
    def show(self, step: int, text: str, tail: str) -> None: ...
    def note(self, text: str) -> None: ...


def _view_for(file: TextIO, total_steps: int, start_step: int) -> _View:
    # The file is asked, not rich, which takes FORCE_COLOR for a terminal and would draw a bar into
    # a log.
    console = Console(file=file)
    if file.isatty() and not console.is_dumb_terminal:
        return _Screen(console, total_steps, start_step)
    return _Lines(file, total_steps)


class _Lines:
    """Shows one line per row, without control characters, in a file or pipe."""

    def __init__(self, file: Log, total_steps: int) -> None:
        self._file = file
        self._total_steps = total_steps

    def start(self) -> None: ...
    def stop(self) -> None: ...
    def advance(self, step: int) -> None: ...

    def show(self, step: int, text: str, tail: str) -> None:
        width = len(str(self._total_steps))
        self.note(f"step {step:>{width}}/{self._total_steps}  {text}  {tail}")

    def note(self, text: str) -> None:
        with contextlib.suppress(OSError):  # a log that cannot be written must not end the run
            print(text, file=self._file, flush=True)


class _Screen:
    """Shows a bar and the newest row on a terminal, redrawn in place."""

    def __init__(self, console: Console, total_steps: int, start_step: int) -> None:
        self._bar = Bar(
            TextColumn("step {task.completed:.0f}/{task.total:.0f}"),
            BarColumn(bar_width=None),
            TextColumn("{task.percentage:.0f}%"),
            TextColumn("{task.fields[tail]}"),
            console=console,
            expand=True,
        )
        self._task = self._bar.add_task(
            "", total=total_steps, completed=start_step, tail="first step: compiling"
        )
        self._text = Text()
        self._live = Live(Group(self._bar, self._text), console=console, refresh_per_second=4)

    def start(self) -> None:
        self._live.start(refresh=True)

    def stop(self) -> None:
        self._live.stop()

    def advance(self, step: int) -> None:
        self._bar.update(self._task, completed=step)

    def show(self, step: int, text: str, tail: str) -> None:
        self._bar.update(self._task, completed=step, tail=tail)
        self._text.plain = text

    def note(self, text: str) -> None:
        self._live.console.print(text, markup=False, highlight=False, soft_wrap=True)
