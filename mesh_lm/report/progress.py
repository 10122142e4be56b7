"""The progress and the speed of a run: a live bar on a terminal, plain lines in a log file."""

from __future__ import annotations

import contextlib
import datetime
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Protocol, Self, TextIO

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
            if row := progress.step(step, metrics):
                writer.write(step, row)
    ```
    A row is due every `log_every` steps (0: never) and at the first and the last step. The first step compiles, so rates leave it out.
    If `enabled` is false, as on every process but the first, rows are returned, but nothing is shown. log: a file that gets a line for
    each row and each note, also if the terminal shows a bar.
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
        self._total, self._start, self._log_every = total_steps, start_step, log_every
        self._tokens_per_step = tokens_per_step
        self._utilisation = lambda rate: mfu(rate, flops_per_token, n_devices, device_kind)
        self._bits_per_byte, self._clock, self._memory = bits_per_byte, clock, memory
        views = [
            _view(file or sys.stdout, total_steps, start_step),
            *([_Lines(log, total_steps)] if log else []),
        ]
        self._view = _Both(views) if enabled else _Silent()
        self._losses: list[Any] = []  # of the steps since the last row
        self._began = self._last = clock()
        self._last_step = start_step
        # when the first step was done, and which it was
        self._warm: tuple[float, int] | None = None

    def step(self, step: int, metrics: Mapping[str, Any]) -> dict[str, float]:
        """Notes that `step` is done. Empty when no row is due, else `metrics` as floats with, over
        the steps since the last row, mean_loss, step_ms, tokens_per_s, mfu (0 to 1, where known; no
        rates at the first step), the peak memory_gib, the tokens so far, and train_bpb and
        mean_train_bpb if the constructor was given `bits_per_byte`, which computes it from a loss
        (nats per token).

        `metrics` may be arrays still being computed: they are waited for only when a row is due.
        """
        self._losses.append(metrics["loss"])
        every = self._log_every and step % self._log_every == 0
        if not (every or self._warm is None or step == self._total):
            self._view.advance(step)
            return {}
        # waits for the device, so it comes before the clock is read
        row = {name: float(value) for name, value in metrics.items()}
        now, memory = self._clock(), self._memory()
        row["mean_loss"] = self._mean_loss()
        if self._bits_per_byte:
            row["train_bpb"], row["mean_train_bpb"] = (
                self._bits_per_byte(row["loss"]),
                self._bits_per_byte(row["mean_loss"]),
            )
        if self._warm is None:
            self._warm = now, step
            tail = f"first step {now - self._began:.1f} s"
        else:
            row |= self._rates((now - self._last) / (step - self._last_step))
            # From all steps so far, evaluations and saves included, because the remaining steps
            # will have them, too.
            left = (self._total - step) * (now - self._warm[0]) / (step - self._warm[1])
            tail = f"eta {datetime.timedelta(seconds=math.ceil(left))}"
        self._last, self._last_step = now, step
        row["memory_gib"] = memory.gib
        if self._tokens_per_step:
            row["tokens"] = float(step * self._tokens_per_step)
        self._view.show(step, _describe(row, memory.of), tail)
        return row

    def _mean_loss(self) -> float:
        """Returns the mean loss of the steps since the last row, without skipped steps, whose
        losses are not finite.
        """
        losses, self._losses = [float(loss) for loss in self._losses], []
        finite = [loss for loss in losses if math.isfinite(loss)]
        return sum(finite) / len(finite) if finite else losses[-1]

    def _rates(self, seconds: float) -> dict[str, float]:
        rates = {"step_ms": 1e3 * seconds}
        if self._tokens_per_step:
            rates["tokens_per_s"] = self._tokens_per_step / seconds
            if (utilisation := self._utilisation(rates["tokens_per_s"])) is not None:
                rates["mfu"] = utilisation
        return rates

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """A context whose time is not counted as training: `with progress.paused(): evaluate()`."""
        before = self._clock()
        try:
            yield
        finally:
            self._last += self._clock() - before

    def roll_back(self, step: int) -> None:
        """The run continues from this step; later ones are no longer counted."""
        self._began = self._last = self._clock()
        self._last_step, self._warm, self._losses = step, None, []

    def note(self, text: str) -> None:
        """Prints a line above the bar."""
        self._view.note(text)

    def __enter__(self) -> Self:
        self._began = self._last = self._clock()
        self._view.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        self._view.stop()


def _describe(row: Mapping[str, float], memory_of: str) -> str:
    """Returns the metrics of a row as text, the most important first."""
    shown: dict[str, Callable[[float], str]] = {
        "mean_loss": lambda v: f"loss {v:.4f}",
        "mean_train_bpb": lambda v: f"bpb {v:.4f}",
        "heldout_loss": lambda v: f"held-out loss {v:.4f}",
        "heldout_bpb": lambda v: f"held-out bpb {v:.4f}",
        "grad_norm": lambda v: f"grad {v:.2f}",
        "learning_rate": lambda v: f"lr {v:.2e}",
        "tokens_per_s": lambda v: f"{v:,.0f} tok/s",
        "step_ms": lambda v: f"{v:,.0f} ms/step" if v >= 100 else f"{v:.1f} ms/step",
        "mfu": lambda v: f"mfu {v:.1%}",
        "memory_gib": lambda v: f"{v:.1f} GiB {memory_of}",
        "skipped": lambda v: f"skipped {v:.0f}" if v else "",
    }
    return "  ".join(
        text for name, show in shown.items() if name in row and (text := show(row[name]))
    )


class _Silent:
    """The interface of a view, and the view of a process that shows nothing."""

    def start(self) -> None: ...
    def stop(self) -> None: ...
    def advance(self, step: int) -> None: ...
    def show(self, step: int, text: str, tail: str) -> None: ...
    def note(self, text: str) -> None: ...


class _Both(_Silent):
    """What a person sees, and the log file."""

    def __init__(self, views: Sequence[_Silent]) -> None:
        self._views = views

    def start(self) -> None:
        for view in self._views:
            view.start()

    def stop(self) -> None:
        for view in self._views:
            view.stop()

    def advance(self, step: int) -> None:
        for view in self._views:
            view.advance(step)

    def show(self, step: int, text: str, tail: str) -> None:
        for view in self._views:
            view.show(step, text, tail)

    def note(self, text: str) -> None:
        for view in self._views:
            view.note(text)


class Log(Protocol):
    """What `print(..., file=log)` needs."""

    def write(self, text: str, /) -> object:
        """Takes text."""
        ...

    def flush(self) -> None:
        """Called after each line."""
        ...


class _Lines(_Silent):
    """For files and pipes: one line per row, no control characters."""

    def __init__(self, file: Log, total: int) -> None:
        self._file, self._total = file, total

    def show(self, step: int, text: str, tail: str) -> None:
        self.note(f"step {step:>{len(str(self._total))}}/{self._total}  {text}  {tail}")

    def note(self, text: str) -> None:
        with contextlib.suppress(OSError):  # a log that cannot be written must not end the run
            print(text, file=self._file, flush=True)


class _Screen(_Silent):
    """For terminals: a bar and the newest row, redrawn in place."""

    def __init__(self, console: Console, total: int, start: int) -> None:
        self._bar = Bar(
            TextColumn("step {task.completed:.0f}/{task.total:.0f}"),
            BarColumn(bar_width=None),
            TextColumn("{task.percentage:.0f}%"),
            TextColumn("{task.fields[tail]}"),
            console=console,
            expand=True,
        )
        self._task = self._bar.add_task(
            "", total=total, completed=start, tail="first step: compiling"
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


def _view(file: TextIO, total: int, start: int) -> _Silent:
    # Ask the file, not rich, which treats FORCE_COLOR as a terminal and would draw a bar into a
    # log.
    console = Console(file=file)
    return (
        _Screen(console, total, start)
        if file.isatty() and not console.is_dumb_terminal
        else _Lines(file, total)
    )
