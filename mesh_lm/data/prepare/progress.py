"""Progress of a preparation: a bar on a terminal, else a line every ten seconds."""

from __future__ import annotations

import datetime
import math
import time
from collections.abc import Callable
from typing import Self, TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from mesh_lm.data.prepare.unfinished import Totals

_LINE_SECONDS = 10.0


class Display:
    """Displays `Totals`, from those at the start to all bytes on disk of the inputs."""

    def __init__(
        self, file: TextIO, size: int, start: Totals, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """size: bytes on disk of all inputs."""
        self._file = file
        self._size = max(1, size)
        self._start = start
        self._clock = clock
        self._started_at = clock()
        self._last_line_at = self._started_at

        self._bar = None
        console = Console(file=file)
        # The file is checked, not rich, which takes FORCE_COLOR for a terminal and would draw a bar
        # into a log.
        if file.isatty() and not console.is_dumb_terminal:
            columns = (
                TextColumn("{task.percentage:.0f}%"),
                BarColumn(bar_width=None),
                TextColumn("{task.fields[text]}"),
            )
            self._bar = Progress(*columns, console=console, expand=True, refresh_per_second=4)
            self._task = self._bar.add_task(
                "", total=self._size, completed=start.size, text="starting the workers"
            )

    def show(self, totals: Totals) -> None:
        """Updates the bar, or prints a line if the last one is ten seconds old."""
        if self._bar:
            self._bar.update(self._task, completed=totals.size, text=self._describe(totals))
        elif self._clock() - self._last_line_at >= _LINE_SECONDS:
            self._last_line_at = self._clock()
            self.note(f"{100 * totals.size / self._size:3.0f}%  {self._describe(totals)}")

    def note(self, text: str) -> None:
        """Prints a line above the bar."""
        if self._bar:
            self._bar.console.print(text, markup=False, highlight=False, soft_wrap=True)
        else:
            print(text, file=self._file, flush=True)

    def _describe(self, totals: Totals) -> str:
        seconds = max(self._clock() - self._started_at, 1e-9)
        rate = (totals.bytes - self._start.bytes) / 1e6 / seconds
        n_read = max(1, totals.size - self._start.size)
        remaining = datetime.timedelta(
            seconds=math.ceil((self._size - totals.size) * seconds / n_read)
        )
        return f"{rate:.1f} MB/s  {totals.tokens:,} tokens  eta {remaining}"

    def __enter__(self) -> Self:
        if self._bar:
            self._bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._bar:
            self._bar.stop()
