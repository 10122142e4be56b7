"""Lists, reads and writes tensors in .safetensors files.

The only file that imports `safetensors` (format: https://huggingface.co/docs/safetensors), lazily.
"""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mesh_lm import strict_json
from mesh_lm.errors import ConfigError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_COMPARED_BYTES = 2**26
"""Bytes of a tensor that are compared at a time, at most."""
FLOATS = ("F64", "F32", "F16", "BF16")
"""Types of weights that can be imported. Integers and float8 are quantized weights, which mean
nothing without their scales."""


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """The location of a tensor; `shape` and `dtype` (the format's name, such as BF16) are None if
    its file cannot be read.
    """

    file: Path
    name: str
    shape: tuple[int, ...] | None
    dtype: str | None

    def read(self, part: tuple[slice, ...]) -> np.ndarray:
        """Returns slices of each dimension in the dtype of the file, which is closed again so that
        no page stays mapped.

        Raises ConfigError if a number is not finite, or the file can no longer be read.
        """
        try:
            with _open(self.file) as file:
                array = file.get_slice(self.name)[part]
        except Exception as error:  # safetensors raises its own class, or OSError
            raise ConfigError(
                f"{self.file}: cannot read the tensor {self.name}: {error}; fetch the file again"
            ) from error
        n_bad = array.size - int(np.isfinite(array).sum())
        if n_bad:
            raise ConfigError(
                f"{self.file}: {self.name} has {n_bad:,} numbers that are not finite (NaN or Inf); "
                "fetch it again"
            )
        return array


class _Header(NamedTuple):
    """Shape and type of a tensor in the header of its file; None if that cannot be read."""

    shape: tuple[int, ...] | None
    dtype: str | None


_UNREAD = _Header(None, None)


def equal(a: StoredTensor, b: StoredTensor) -> bool:
    """Returns whether two tensors of one shape have the same bits: as they are stored, or if their
    types differ, as float32.

    Reads a few rows of both at a time, up to the first difference. Raises ConfigError as
    `StoredTensor.read`.
    """
    if not a.shape or a.shape != b.shape:
        return False
    row_bytes = 8 * math.prod(a.shape[1:])
    n_rows = max(1, _COMPARED_BYTES // max(1, row_bytes))
    for start in range(0, a.shape[0], n_rows):
        rows = slice(start, min(start + n_rows, a.shape[0]))
        part = (rows,) + (slice(None),) * (len(a.shape) - 1)
        rows_a = a.read(part)
        rows_b = b.read(part)
        if a.dtype != b.dtype:
            rows_a = rows_a.astype(np.float32)
            rows_b = rows_b.astype(np.float32)
        if rows_a.tobytes() != rows_b.tobytes():
            return False
    return True


def scan(directory: Path) -> tuple[dict[str, StoredTensor], list[str]]:
    """Returns the tensors of a directory and problems with the files. Reads only headers.

    As in transformers, model.safetensors precedes an index, and all tensors of the files that an
    index names are those of the model.
    """
    single = directory / SINGLE
    if single.is_file():
        return _scan_file(single)
    if (directory / INDEX).exists():
        return _scan_indexed(directory)
    paths = sorted(directory.glob("*.safetensors"))
    if len(paths) == 1:
        return _scan_file(paths[0])
    names = ", ".join(path.name for path in paths[:4]) or "none"
    problem = (
        f"expected one .safetensors file, or several and {INDEX}; there "
        f"{'are' if len(paths) > 1 else 'is'} {names}"
    )
    if (directory / "pytorch_model.bin").exists():
        problem += "; pytorch_model.bin is not read"
    return {}, [problem]


def write(path: Path, tensors: dict[str, np.ndarray]) -> None:
    """Writes one file, readable by whom the user's umask lets. transformers refuses a file that
    does not call its format pt.
    """
    from safetensors.numpy import save_file

    path.touch()
    mode = path.stat().st_mode
    save_file(tensors, path, metadata={"format": "pt"})
    path.chmod(mode)  # safetensors makes it private to the user


def _scan_file(path: Path) -> tuple[dict[str, StoredTensor], list[str]]:
    headers, problems = _headers(path)
    tensors = {name: StoredTensor(path, name, *header) for name, header in headers.items()}
    return tensors, problems


def _scan_indexed(directory: Path) -> tuple[dict[str, StoredTensor], list[str]]:
    try:
        file_names: dict[str, str] = strict_json.read(directory / INDEX)["weight_map"]
        unsafe = {name for name in file_names.values() if not _is_plain_file_name(name)}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return {}, [f"{INDEX} is not an index of tensors: {type(error).__name__}: {error}"]
    if unsafe:
        return {}, [f"{INDEX} names {min(unsafe)}, which is not a file of this directory"]

    headers: dict[Path, dict[str, _Header]] = {}
    damaged: set[Path] = set()
    problems: list[str] = []
    for path in dict.fromkeys(directory / name for name in file_names.values()):
        headers[path], file_problems = _headers(path)
        if file_problems:
            damaged.add(path)
            problems += file_problems

    tensors = {}
    for name, file_name in file_names.items():
        path = directory / file_name
        if path not in damaged and name not in headers[path]:
            problems.append(f"{file_name}: {name} is missing, but {INDEX} lists it")
        tensors[name] = StoredTensor(path, name, *headers[path].get(name, _UNREAD))
    for path, file_headers in headers.items():
        for name, header in file_headers.items():
            if name not in file_names:
                tensors[name] = StoredTensor(path, name, *header)
    return tensors, problems


def _is_plain_file_name(name: str) -> bool:
    """Whether a name has no folders, and a suffix."""
    return Path(name).name == name and bool(Path(name).suffix)


def _headers(path: Path) -> tuple[dict[str, _Header], list[str]]:
    """Returns the headers of a file's tensors by name, and problems with the file."""
    try:
        with _open(path) as file:
            headers = {}
            for name in file.keys():  # noqa: SIM118
                tensor = file.get_slice(name)
                headers[name] = _Header(tuple(tensor.get_shape()), tensor.get_dtype())
            return headers, []
    except FileNotFoundError:
        return {}, [f"{path.name} is missing"]
    except Exception as error:  # safetensors raises its own class, or OSError
        return {}, [f"{path.name} is truncated or damaged: {error}"]


def _open(path: Path) -> Any:
    from safetensors import safe_open

    return safe_open(path, framework="numpy")
