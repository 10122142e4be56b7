"""What the directory of a run's checkpoints holds, from names and descriptions alone."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
from functools import cached_property
from pathlib import Path
from typing import Any

from mesh_lm.checkpoint.reader import DamagedCheckpoint, descriptions
from mesh_lm.errors import ConfigError
from mesh_lm.huggingface import is_huggingface
from mesh_lm.state.digest import combined

_NAME = re.compile(r"(\d+)(\.\w.*)?")
_ASIDE = {
    "damaged": "put aside: could not be verified",
    "passed": "put aside: the run went back behind it",
    "removed": "being removed",
    "orbax": "not complete: a save in flight, or what is left of one",
}


@dataclasses.dataclass(frozen=True)
class CheckpointEntry:
    """One directory among the checkpoints: a step, complete or not, or one that was put aside."""

    path: Path

    @property
    def step(self) -> int:
        return int(self.path.name.partition(".")[0])

    @property
    def kind(self) -> str:
        """Empty for a step of a run, else "damaged", "passed", "removed" or "orbax"."""
        return re.split(r"\W", self.path.name.partition(".")[2])[0]

    def descriptions(self) -> dict[str, Any]:
        """{"data": ..., "metadata": ...}, as `SavedCheckpoint` has them. Raises DamagedCheckpoint."""
        return descriptions(self.path)

    @cached_property
    def _said(self) -> dict[str, Any] | DamagedCheckpoint:
        try:
            return self.descriptions()
        except DamagedCheckpoint as damage:
            return damage

    @property
    def complete(self) -> bool:
        """Whether a run would try to continue from it."""
        return not self.kind and not isinstance(self._said, DamagedCheckpoint)

    @property
    def what(self) -> str:
        if self.kind:
            return _ASIDE.get(self.kind, "of a name that no run gives")
        return f"damaged: {self._said.reasons[0]}" if isinstance(self._said, DamagedCheckpoint) else "complete"

    @property
    def described(self) -> tuple[str, str, str]:
        """Format, digest of the state and of the samples; "-" for what it does not say."""
        if isinstance(self._said, DamagedCheckpoint):
            return "-", "-", "-"
        data, metadata = self._said["data"], self._said["metadata"]
        digests = metadata.get("digests")
        return str(metadata["format"]), combined(digests) if digests else "-", str(data.get("samples", "-"))

    @property
    def written(self) -> float:
        """Seconds since 1970 at which its description was written, or else the directory; 0: a run has just removed it."""
        for path in (self.path / "metadata" / "metadata", self.path):
            with contextlib.suppress(FileNotFoundError):
                return path.stat().st_mtime
        return 0.0

    @property
    def nbytes(self) -> int:
        """Of all its files; of a save in flight, or of a step that is being removed, those that were met."""
        total = 0
        for directory, _, files in os.walk(self.path):
            for file in files:
                with contextlib.suppress(FileNotFoundError):
                    total += os.stat(os.path.join(directory, file)).st_size
        return total


def at(path: Path | str) -> list[CheckpointEntry]:
    """What a run's output, its `checkpoints`, or one step holds, oldest first. Raises ConfigError where that is nothing."""
    path = Path(path).expanduser().absolute()
    if not path.is_dir():
        raise ConfigError(f"{path}: no such directory")
    directory = path / "checkpoints" if (path / "checkpoints").is_dir() else path
    if _NAME.fullmatch(directory.name) and (directory.parent.name == "checkpoints" or (directory / "metadata").is_dir()):
        return [CheckpointEntry(directory)]
    if directory.name != "checkpoints":
        if is_huggingface(path):
            raise ConfigError(f"{path} is a Hugging Face model, not a run: there is no digest of its weights")
        raise ConfigError(f"{path} holds no checkpoints; name a run's output, its `checkpoints`, or one step there")
    found = [CheckpointEntry(child) for child in directory.iterdir() if child.is_dir() and _NAME.fullmatch(child.name)]
    if not found:
        raise ConfigError(f"no checkpoint in {directory}")
    return sorted(found, key=lambda entry: (entry.step, entry.path.name))


def chosen(path: Path | str, name: str) -> list[CheckpointEntry]:
    """The steps of a run, or the one directory that `path` or `name` names, put aside or not. Raises ConfigError where there is none."""
    entries = at(path)
    if name:
        if not (named := [entry for entry in entries if entry.path.name == name]):
            raise ConfigError(f"--step={name} is not there; there are {', '.join(entry.path.name for entry in entries)}")
        return named
    steps = entries if len(entries) == 1 and entries[0].path == Path(path).expanduser().absolute() else [e for e in entries if not e.kind]
    if not steps:
        raise ConfigError(f"no complete checkpoint among {', '.join(entry.path.name for entry in entries)}; name one of them")
    return steps


def newest(path: Path | str) -> CheckpointEntry:
    """The newest step of a run, or the one directory that `path` names. Raises ConfigError where there is none."""
    return chosen(path, "")[-1]


def size(nbytes: int) -> str:
    """In decimal units: 403 MB."""
    power = min(max(0, len(str(nbytes)) - 1) // 3, 4)
    return f"{nbytes / 1000**power:.4g} {('B', 'kB', 'MB', 'GB', 'TB')[power]}"
