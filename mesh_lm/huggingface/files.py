"""Lists, reads and writes tensors in .safetensors files.

The only file that imports `safetensors` (format: https://huggingface.co/docs/safetensors), lazily.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np

from mesh_lm import strict_json

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """The location of a tensor; `shape` is None if its file cannot be read."""

    file: Path
    name: str
    shape: tuple[int, ...] | None

    def read(self, part: tuple[slice, ...]) -> np.ndarray:
        """Returns slices of each dimension in the dtype of the file, which is closed again so that no page stays mapped."""
        with _open(self.file) as file:
            return file.get_slice(self.name)[part]


def scan(directory: Path) -> tuple[dict[str, StoredTensor], list[str]]:
    """Returns the tensors of a directory (one file, or several with an index) and problems with the files. Reads only headers."""
    index = directory / INDEX
    files = sorted(directory.glob("*.safetensors"))
    if not index.exists():
        if len(files) != 1:
            have = ", ".join(f.name for f in files[:4]) if files else "none"
            problem = f"expected one .safetensors file, or several and {INDEX}; there {'are' if len(files) > 1 else 'is'} {have}"
            return {}, [problem + ("; pytorch_model.bin is not read" if (directory / "pytorch_model.bin").exists() else "")]
        shapes, problem = _header(files[0])
        return {name: StoredTensor(files[0], name, shape) for name, shape in shapes.items()}, problem
    try:
        names: dict[str, str] = strict_json.read(index)["weight_map"]
        if outside := sorted({name for name in names.values() if Path(name).name != name or not Path(name).suffix}):
            return {}, [f"{INDEX} names {outside[0]}, which is not a file of this directory"]
        files = [directory / name for name in dict.fromkeys(names.values())]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return {}, [f"{INDEX} is not an index of tensors: {type(error).__name__}: {error}"]
    headers = {file: _header(file) for file in files}
    problems = [problem for _, broken in headers.values() for problem in broken]
    tensors = {}
    for name, file in names.items():
        shapes, broken = headers[directory / file]
        if not broken and name not in shapes:
            problems.append(f"{file}: {name} is missing, but {INDEX} lists it")
        tensors[name] = StoredTensor(directory / file, name, shapes.get(name))
    return tensors, problems


def write(path: Path, tensors: dict[str, np.ndarray]) -> None:
    """One file, readable by whom the user's umask lets. transformers refuses a file that does not call its format pt."""
    from safetensors.numpy import save_file

    path.touch()
    mode = path.stat().st_mode
    save_file(tensors, path, metadata={"format": "pt"})
    path.chmod(mode)  # safetensors makes it private to the user


def _open(file: Path) -> Any:
    from safetensors import safe_open

    return safe_open(file, framework="numpy")


def _header(file: Path) -> tuple[dict[str, tuple[int, ...]], list[str]]:
    """Returns shapes by name, and problems with the file."""
    try:
        with _open(file) as opened:
            return {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}, []  # noqa: SIM118
    except FileNotFoundError:
        return {}, [f"{file.name} is missing"]
    except Exception as error:  # safetensors raises its own class, or OSError
        return {}, [f"{file.name} is truncated or damaged: {error}"]
