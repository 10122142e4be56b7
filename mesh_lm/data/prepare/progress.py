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
    """Displays `Totals`, starting from `start`, relative to `size`, the bytes on disk of all
    inputs.
    """

    def __init__(
        self, file: TextIO, size: int, start: Totals, clock: Callable[[], float] = time.monotonic
    ) -> None:
        # The file is checked, not rich, which takes FORCE_COLOR for a terminal and would draw a bar
        # into a log.
        console = Console(file=file)
        self._file, self._size, self._start, self._clock = file, max(1, size), start, clock
        self._started = self._last_line = clock()
        self._bar = None
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
        elif self._clock() - self._last_line >= _LINE_SECONDS:
            self._last_line = self._clock()
            self.note(f"{100 * totals.size / self._size:3.0f}%  {self._describe(totals)}")

    def note(self, text: str) -> None:
        """Prints a line above the bar."""
        if self._bar:
            self._bar.console.print(text, markup=False, highlight=False, soft_wrap=True)
        else:
            print(text, file=self._file, flush=True)

    def _describe(self, totals: Totals) -> str:
        seconds = max(self._clock() - self._started, 1e-9)
        rate = (totals.bytes - self._start.bytes) / 1e6 / seconds
        left = (self._size - totals.size) * seconds / max(1, totals.size - self._start.size)
        return (
            f"{rate:.1f} MB/s  {totals.tokens:,} tokens  eta "
            f"{datetime.timedelta(seconds=math.ceil(left))}"
        )

    def __enter__(self) -> Self:
        if self._bar:
            self._bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._bar:
            self._bar.stop()
