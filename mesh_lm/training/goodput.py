"""How a run spent its wall time, over all its starts and restarts: <output>/goodput/ has one small
file for each.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from pathlib import Path
from typing import Any

from mesh_lm import sealed_json
from mesh_lm.distributed.phases import Phases

_ORDER = {
    "step": "steps", "lost": "repeated steps", "down": "between restarts", "start": "start",
    "data": "preparing data",
    "restore": "restoring", "compile": "first steps (compiling)", "batch": "waiting for data",
    "save": "saving", "evaluate": "evaluating",
}  # fmt: skip

_SHORT = 600.0
"""Seconds of a run for which its goodput says nothing: most of it is compiling."""
_EVERY = 2.0
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
        self._phases, self._first, self._finished = phases, first, False
        self._directory = output / "goodput"
        self._begin(time.time() - phases.age, dict.fromkeys(phases.seconds(), 0.0), went_back=False)

    def _begin(self, born: float, before: dict[str, float], *, went_back: bool) -> None:
        """before: seconds that this process spent in earlier lives."""
        self._born, self._before, self._went_back = born, before, went_back
        self._written, self._listed = -_EVERY, False
        self._path = self._directory / f"{born:.3f}-{os.getpid()}.json"

    def roll_back(self, step: int) -> None:
        """Starts another life of the same process, which continues from this step. Call it before
        the phases get the new step.
        """
        self.write(now=True)
        self._first, spent = step, self._phases.seconds()
        self._begin(
            self._born + sum(spent.values()) - sum(self._before.values()), spent, went_back=True
        )

    def write(self, *, now: bool = False) -> None:
        """Writes the times so far, every few seconds unless `now`. Errors of the disk are
        ignored.
        """
        if not now and self._phases.age - self._written < _EVERY:
            return
        self._written, step = self._phases.age, max(self._phases.step, self._first)
        seconds = {
            phase: value - self._before[phase] for phase, value in self._phases.seconds().items()
        }
        life = {
            "born": self._born,
            "first": self._first,
            "step": step,
            "seconds": seconds,
            "went_back": self._went_back,
        }
        life["finished"] = self._finished
        with contextlib.suppress(OSError):
            self._directory.mkdir(parents=True, exist_ok=True)
            (part := self._path.with_suffix(".part")).write_text(
                json.dumps(sealed_json.sealed(life)), encoding="utf-8"
            )
            part.replace(self._path)
            if not self._listed:
                with (self._directory / _LIST).open("a", encoding="utf-8") as names:
                    names.write(f"{self._path.name}\n")
                self._listed = True

    def total(self, *, finished: bool = False) -> dict[str, Any]:
        """Returns {"seconds": {...}, "starts": int, "lost_steps": int, "goodput": 0 to 1} over all
        lives of the run so far.

        finished: the run has done all of its steps, so that the time until it is given more is not
        lost.
        """
        self._finished = finished
        self.write(now=True)
        return total(self._directory)


def total(directory: Path) -> dict[str, Any]:
    """Returns the totals over the lives in a run's `goodput` directory.

    damaged: records that are missing or not as they were written, and so left out. seconds: by
    phase, with "lost" (steps that a later life repeated) and "down" (no process ran, and the run
    was not finished). goodput: the share of steps that count.
    """
    paths = {path.name for path in directory.glob("*.json")} | _listed(directory / _LIST)
    lives = sorted(
        (life for name in paths if (life := _read(directory / name))), key=lambda life: life["born"]
    )
    seconds, lost_steps = dict.fromkeys(_ORDER, 0.0), 0
    for life, after in zip(lives, [*lives[1:], None], strict=True):
        for phase, value in life["seconds"].items():
            seconds[phase] += value
        if after:
            done, lost = life["step"] - life["first"], max(0, life["step"] - after["first"])
            lost_steps += lost
            share = life["seconds"]["step"] * min(1.0, lost / done) if done else 0.0
            seconds["step"] -= share
            seconds["lost"] += share
            seconds["down"] += (
                0.0
                if life.get("finished")
                else max(0.0, after["born"] - life["born"] - sum(life["seconds"].values()))
            )
    everything = sum(seconds.values())
    starts = sum(not life.get("went_back") for life in lives)
    return {
        "seconds": seconds, "starts": starts, "lost_steps": lost_steps,
        "goodput": seconds["step"] / everything if everything else 0.0,
        "damaged": len(paths) - len(lives),
    }  # fmt: skip


def describe(totals: dict[str, Any]) -> str:
    """Returns a line of text for what `total` returns."""
    seconds = totals["seconds"]
    parts = [
        f"{name} {_clock(seconds[phase])}"
        for phase, name in _ORDER.items()
        if seconds[phase] >= 0.05
    ]
    starts = f", {totals['starts']} starts" if totals["starts"] > 1 else ""
    starts += (
        f", {totals['lost_steps']} steps repeated"
        if totals["starts"] > 1 or totals["lost_steps"]
        else ""
    )
    damaged = totals.get("damaged", 0)
    starts += f", {damaged} damaged record{'s' * (damaged > 1)} left out" if damaged else ""
    whole = sum(seconds.values())
    share = (
        f"goodput {totals['goodput']:.1%} of {_clock(whole)}"
        if whole >= _SHORT or totals["starts"] > 1
        else f"wall time {_clock(whole)}"
    )
    return f"{share}{starts}: {', '.join(parts)}"


def _clock(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, hours = round(seconds) // 60, round(seconds) // 3600
    return (
        f"{minutes} min {round(seconds) % 60} s" if not hours else f"{hours} h {minutes % 60} min"
    )


def _listed(path: Path) -> set[str]:
    try:
        return {
            name
            for name in path.read_text(errors="replace", encoding="utf-8").split("\n")
            if name and "/" not in name and "\0" not in name
        }
    except OSError:
        return set()


def _read(path: Path) -> dict[str, Any] | None:
    try:
        life = sealed_json.read(path)
        numbers = [life["born"], life["first"], life["step"], *life["seconds"].values()]
        known = (
            all(type(number) in (int, float) for number in numbers)
            and life["seconds"].keys() <= _ORDER.keys()
        )
        return life if known and "step" in life["seconds"] else None
    except (OSError, ValueError, AttributeError, KeyError):
        return None
