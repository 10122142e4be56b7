"""Lists, reads and writes tensors in .safetensors files.

The only file that imports `safetensors` (format: https://huggingface.co/docs/safetensors), lazily.
"""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np

from mesh_lm import strict_json
from mesh_lm.errors import ConfigError

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
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
                found = file.get_slice(self.name)[part]
        except Exception as error:  # safetensors raises its own class, or OSError
            raise ConfigError(
                f"{self.file}: {self.name} cannot be read: {error}; fetch the file again"
            ) from error
        if bad := found.size - int(np.isfinite(found).sum()):
            raise ConfigError(
                f"{self.file}: {self.name} has {bad:,} numbers that are not finite (NaN or Inf); "
                "fetch it again"
            )
        return found


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
        stop = min(start + n_rows, a.shape[0])
        rows = (slice(start, stop),) + (slice(None),) * (len(a.shape) - 1)
        parts = [tensor.read(rows) for tensor in (a, b)]
        if a.dtype != b.dtype:
            parts = [part.astype(np.float32) for part in parts]
        if parts[0].tobytes() != parts[1].tobytes():
            return False
    return True


def scan(directory: Path) -> tuple[dict[str, StoredTensor], list[str]]:
    """Returns the tensors of a directory and problems with the files. Reads only headers.

    As in transformers, model.safetensors precedes an index, and all tensors of the files that an
    index names are those of the model.
    """
    index = directory / INDEX
    single = directory / SINGLE
    files = [single] if single.is_file() else sorted(directory.glob("*.safetensors"))
    if single.is_file() or not index.exists():
        if len(files) != 1:
            have = ", ".join(f.name for f in files[:4]) if files else "none"
            problem = (
                f"expected one .safetensors file, or several and {INDEX}; there "
                f"{'are' if len(files) > 1 else 'is'} {have}"
            )
            return {}, [
                problem
                + (
                    "; pytorch_model.bin is not read"
                    if (directory / "pytorch_model.bin").exists()
                    else ""
                )
            ]
        headers, problem = _header(files[0])
        return {
            name: StoredTensor(files[0], name, *header) for name, header in headers.items()
        }, problem
    try:
        names: dict[str, str] = strict_json.read(index)["weight_map"]
        if outside := sorted(
            {name for name in names.values() if Path(name).name != name or not Path(name).suffix}
        ):
            return {}, [f"{INDEX} names {outside[0]}, which is not a file of this directory"]
        files = [directory / name for name in dict.fromkeys(names.values())]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return {}, [f"{INDEX} is not an index of tensors: {type(error).__name__}: {error}"]
    by_file = {file: _header(file) for file in files}
    problems = [problem for _, broken in by_file.values() for problem in broken]
    tensors = {}
    for name, file in names.items():
        headers, broken = by_file[directory / file]
        if not broken and name not in headers:
            problems.append(f"{file}: {name} is missing, but {INDEX} lists it")
        tensors[name] = StoredTensor(directory / file, name, *headers.get(name, (None, None)))
    for file, (headers, _) in by_file.items():
        tensors |= {
            name: StoredTensor(file, name, *header)
            for name, header in headers.items()
            if name not in names
        }
    return tensors, problems


def write(path: Path, tensors: dict[str, np.ndarray]) -> None:
    """One file, readable by whom the user's umask lets. transformers refuses a file that does not
    call its format pt.
    """
    from safetensors.numpy import save_file

    path.touch()
    mode = path.stat().st_mode
    save_file(tensors, path, metadata={"format": "pt"})
    path.chmod(mode)  # safetensors makes it private to the user


def _open(file: Path) -> Any:
    from safetensors import safe_open

    return safe_open(file, framework="numpy")


def _header(file: Path) -> tuple[dict[str, tuple[tuple[int, ...], str]], list[str]]:
    """Returns shapes and types by name, and problems with the file."""
    try:
        with _open(file) as opened:
            slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118
            return {
                name: (tuple(each.get_shape()), each.get_dtype()) for name, each in slices.items()
            }, []
    except FileNotFoundError:
        return {}, [f"{file.name} is missing"]
    except Exception as error:  # safetensors raises its own class, or OSError
        return {}, [f"{file.name} is truncated or damaged: {error}"]
