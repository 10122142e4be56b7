"""How a run spent its wall time, over all its starts and restarts: <output>/goodput/ has one small
file for each.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import time
from pathlib import Path
from typing import Any

from mesh_lm import sealed_json
from mesh_lm.distributed.phases import Phases

_NAMES = {
    "step": "steps",
    "lost": "repeated steps",
    "down": "between restarts",
    "start": "start",
    "data": "preparing data",
    "restore": "restoring",
    "compile": "first steps (compiling)",
    "batch": "waiting for data",
    "save": "saving",
    "evaluate": "evaluating",
}
"""Phase -> its name in the log, in the order in which it shows them."""
_SHORT = 600.0
"""Seconds of a run for which its goodput says nothing: most of it is compiling."""
_INTERVAL = 2.0
"""Seconds between two writes."""
_LIST = "lives.txt"
"""Names of all records, so that one that is deleted is missed."""


class Goodput:
    """The record of one life of a run's process 0, rewritten every few seconds so that it survives
    a kill.

    A life ends with its process, or when the run rolls back to an earlier step. In both cases the
    next life repeats its last steps.
    """

    def __init__(self, output: Path, phases: Phases, first: int) -> None:
        """first: the step that this life continues from."""
        self._phases = phases
        self._first = first
        self._finished = False
        self._directory = output / "goodput"
        nothing = dict.fromkeys(phases.seconds(), 0.0)
        self._begin(time.time() - phases.age, nothing, went_back=False)

    def _begin(self, born: float, earlier_seconds: dict[str, float], *, went_back: bool) -> None:
        """Begins a life. earlier_seconds: spent by this process in earlier lives."""
        self._born = born
        self._earlier_seconds = earlier_seconds
        self._went_back = went_back
        self._written_at = -_INTERVAL
        self._is_listed = False
        self._path = self._directory / f"{born:.3f}-{os.getpid()}.json"

    def roll_back(self, step: int) -> None:
        """Starts another life of the same process, which continues from this step. Call it before
        the phases get the new step.
        """
        self.write(force=True)
        self._first = step
        seconds = self._phases.seconds()
        age = sum(seconds.values()) - sum(self._earlier_seconds.values())
        self._begin(self._born + age, seconds, went_back=True)

    def write(self, *, force: bool = False) -> None:
        """Writes the times so far, every few seconds unless `force`. Errors of the disk are
        ignored.
        """
        if not force and self._phases.age - self._written_at < _INTERVAL:
            return
        self._written_at = self._phases.age
        seconds = self._phases.seconds()
        life = {
            "born": self._born,
            "first": self._first,
            "step": max(self._phases.step, self._first),
            "seconds": {phase: s - self._earlier_seconds[phase] for phase, s in seconds.items()},
            "went_back": self._went_back,
            "finished": self._finished,
        }
        with contextlib.suppress(OSError):
            self._directory.mkdir(parents=True, exist_ok=True)
            part = self._path.with_suffix(".part")
            part.write_text(json.dumps(sealed_json.sealed(life)), encoding="utf-8")
            part.replace(self._path)
            if not self._is_listed:
                with (self._directory / _LIST).open("a", encoding="utf-8") as names:
                    names.write(f"{self._path.name}\n")
                self._is_listed = True

    def total(self, *, finished: bool = False) -> dict[str, Any]:
        """Returns {"seconds": {...}, "starts": int, "lost_steps": int, "goodput": 0 to 1} over all
        lives of the run so far.

        finished: the run has done all of its steps, so that the time until it is given more is not
        lost.
        """
        self._finished = finished
        self.write(force=True)
        return total(self._directory)


def total(directory: Path) -> dict[str, Any]:
    """Returns the totals over the lives in a run's `goodput` directory.

    damaged: records that are missing or not as they were written, and so left out. seconds: by
    phase, with "lost" (steps that a later life repeated) and "down" (no process ran, and the run
    was not finished). goodput: the share of steps that count.
    """
    names = {path.name for path in directory.glob("*.json")} | _listed_names(directory / _LIST)
    records = [_read(directory / name) for name in names]
    lives = sorted(filter(None, records), key=lambda life: life["born"])
    seconds = dict.fromkeys(_NAMES, 0.0)
    lost_steps = 0
    for life in lives:
        for phase, value in life["seconds"].items():
            seconds[phase] += value
    for life, next_life in itertools.pairwise(lives):
        n_steps = life["step"] - life["first"]
        n_lost = max(0, life["step"] - next_life["first"])
        lost_steps += n_lost
        if n_steps:
            lost_seconds = life["seconds"]["step"] * min(1.0, n_lost / n_steps)
            seconds["step"] -= lost_seconds
            seconds["lost"] += lost_seconds
        if not life.get("finished"):
            end = life["born"] + sum(life["seconds"].values())
            seconds["down"] += max(0.0, next_life["born"] - end)
    total_seconds = sum(seconds.values())
    return {
        "seconds": seconds,
        "starts": sum(not life.get("went_back") for life in lives),
        "lost_steps": lost_steps,
        "goodput": seconds["step"] / total_seconds if total_seconds else 0.0,
        "damaged": len(names) - len(lives),
    }


def describe(totals: dict[str, Any]) -> str:
    """Returns a line of text for what `total` returns."""
    seconds = totals["seconds"]
    total_seconds = sum(seconds.values())
    restarted = totals["starts"] > 1
    text = f"wall time {_clock(total_seconds)}"
    if total_seconds >= _SHORT or restarted:
        text = f"goodput {totals['goodput']:.1%} of {_clock(total_seconds)}"
    if restarted:
        text += f", {totals['starts']} starts"
    if restarted or totals["lost_steps"]:
        text += f", {totals['lost_steps']} steps repeated"
    damaged = totals.get("damaged", 0)
    if damaged:
        text += f", {damaged} damaged record{'s' * (damaged > 1)} left out"
    shown = [phase for phase in _NAMES if seconds[phase] >= 0.05]
    return f"{text}: {', '.join(f'{_NAMES[phase]} {_clock(seconds[phase])}' for phase in shown)}"


def _clock(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    whole_seconds = round(seconds)
    minutes = whole_seconds // 60
    if minutes < 60:
        return f"{minutes} min {whole_seconds % 60} s"
    return f"{minutes // 60} h {minutes % 60} min"


def _listed_names(path: Path) -> set[str]:
    try:
        lines = path.read_text(errors="replace", encoding="utf-8").split("\n")
    except OSError:
        return set()
    return {name for name in lines if name and "/" not in name and "\0" not in name}


def _read(path: Path) -> dict[str, Any] | None:
    """Returns a record; None if it is missing or damaged."""
    try:
        life = sealed_json.read(path)
        seconds = life["seconds"]
        numbers = [life["born"], life["first"], life["step"], *seconds.values()]
        phases_are_known = "step" in seconds and seconds.keys() <= _NAMES.keys()
    except (OSError, ValueError, AttributeError, KeyError):
        return None
    if phases_are_known and all(type(number) in (int, float) for number in numbers):
        return life
    return None
