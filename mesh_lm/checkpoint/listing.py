"""Lists the checkpoints of a run from directory names and descriptions, without reading arrays."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
from functools import cached_property
from pathlib import Path
from typing import Any

from mesh_lm.checkpoint.reader import DamagedCheckpoint, descriptions, names_a_step
from mesh_lm.errors import ConfigError
from mesh_lm.huggingface import is_huggingface
from mesh_lm.state.digest import combined

_NAME = re.compile(r"(\d+)(\.\w.*)?")
_RENAMED = {
    "damaged": "set aside: could not be verified",
    "passed": "set aside: the run rolled back to an earlier step",
    "removed": "being removed",
    "saving": "incomplete: a save in progress, or the remains of one",
    "orbax": "incomplete: the remains of a save of an earlier version",
    "misnamed": "not the name of a step: a run leaves it alone",
}


@dataclasses.dataclass(frozen=True)
class CheckpointEntry:
    """One directory of a checkpoint: a step, complete or not, or one that was renamed."""

    path: Path

    @property
    def step(self) -> int:
        """The step in the name."""
        return int(self.path.name.partition(".")[0])

    @property
    def kind(self) -> str:
        """Empty for a step, else the reason it is not one: "damaged", "passed", "removed",
        "saving", "orbax", "misnamed".
        """
        number, _, suffix = self.path.name.partition(".")
        if not names_a_step(number):
            return "misnamed"
        return re.split(r"\W", suffix)[0]

    def descriptions(self) -> dict[str, Any]:
        """Returns {"data": ..., "metadata": ...}, as in `SavedCheckpoint`.

        Raises DamagedCheckpoint.
        """
        return descriptions(self.path)

    @cached_property
    def _described(self) -> dict[str, Any] | DamagedCheckpoint:
        try:
            return self.descriptions()
        except DamagedCheckpoint as damage:
            return damage

    @property
    def complete(self) -> bool:
        """Whether a run would try to resume from it."""
        return not self.kind and not isinstance(self._described, DamagedCheckpoint)

    @property
    def is_damaged(self) -> bool:
        """Whether it has the name of a step, and a description that is damaged or missing."""
        return not self.kind and isinstance(self._described, DamagedCheckpoint)

    @property
    def what(self) -> str:
        """The condition of the checkpoint, for a listing."""
        if self.kind:
            return _RENAMED.get(self.kind, "not named by a run")
        if isinstance(self._described, DamagedCheckpoint):
            return f"damaged: {self._described.reasons[0]}"
        return "complete by its description"

    @property
    def described(self) -> tuple[str, str, str]:
        """Format, digest of the state, digest of the samples; "-" if unknown."""
        if isinstance(self._described, DamagedCheckpoint):
            return "-", "-", "-"
        metadata = self._described["metadata"]
        digests = metadata.get("digests")
        state = combined(digests) if digests else "-"
        samples = str(self._described["data"].get("samples", "-"))
        return str(metadata["format"]), state, samples

    @property
    def written(self) -> float:
        """Unix time at which its description, or else the directory, was written.

        0 if a run has just removed it.
        """
        for path in (self.path / "metadata" / "metadata", self.path):
            with contextlib.suppress(FileNotFoundError):
                return path.stat().st_mtime
        return 0.0

    @property
    def nbytes(self) -> int:
        """Bytes in all its files; approximate while it is being written or removed."""
        nbytes = 0
        for directory, _, files in os.walk(self.path):
            for file in files:
                with contextlib.suppress(FileNotFoundError):
                    nbytes += os.stat(os.path.join(directory, file)).st_size
        return nbytes


def at(path: Path | str) -> list[CheckpointEntry]:
    """Returns the checkpoints in a run's output or `checkpoints`, or one step, oldest first.

    Raises ConfigError if there are none.
    """
    path = Path(path).expanduser().absolute()
    if not path.is_dir():
        raise ConfigError(f"{path}: no such directory; give the output of a run")
    directory = path / "checkpoints" if (path / "checkpoints").is_dir() else path
    if _NAME.fullmatch(directory.name) and (
        directory.parent.name == "checkpoints" or (directory / "metadata").is_dir()
    ):
        return [CheckpointEntry(directory)]
    if directory.name != "checkpoints":
        if is_huggingface(path):
            raise ConfigError(
                f"{path} is a Hugging Face model, not a run: there is no digest of its weights"
            )
        raise ConfigError(
            f"{path} holds no checkpoints; name a run's output, its `checkpoints`, or one step "
            "there"
        )
    entries = [
        CheckpointEntry(child)
        for child in directory.iterdir()
        if child.is_dir() and _NAME.fullmatch(child.name)
    ]
    if not entries:
        raise ConfigError(f"no checkpoint in {directory}; give the output of a run that has one")
    return sorted(entries, key=lambda entry: (entry.step, entry.path.name))


def chosen(path: Path | str, name: str) -> list[CheckpointEntry]:
    """Returns the steps of a run, or the directory that `path` or `name` names, renamed or not.

    Raises ConfigError if there is none.
    """
    entries = at(path)
    names = ", ".join(entry.path.name for entry in entries)
    if name:
        matches = [entry for entry in entries if entry.path.name == name]
        if not matches:
            raise ConfigError(f"--step={name}: there is no such checkpoint; there are {names}")
        return matches
    if [entry.path for entry in entries] == [Path(path).expanduser().absolute()]:
        return entries
    steps = [entry for entry in entries if not entry.kind]
    if not steps:
        raise ConfigError(f"no complete checkpoint among {names}; name one of them")
    return steps


def newest(path: Path | str) -> CheckpointEntry:
    """Returns the newest step of a run, or the directory that `path` names.

    Raises ConfigError if there is none.
    """
    return chosen(path, "")[-1]


def size(nbytes: int) -> str:
    """Returns a size in decimal units, such as 403 MB."""
    units = ("B", "kB", "MB", "GB", "TB")
    power = min(max(0, len(str(nbytes)) - 1) // 3, len(units) - 1)
    return f"{nbytes / 1000**power:.4g} {units[power]}"
