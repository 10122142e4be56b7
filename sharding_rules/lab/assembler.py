"""Compiles without assembling: machine code that nothing will run only takes time.

A report is of XLA's program, which is the same with or without machine code.
"""

from __future__ import annotations

import importlib.util
import os
import shlex
from pathlib import Path
from typing import Any

import jax

# In place of a tool: XLA asks for its version, and then for a file that it keeps and does not read.
_SCRIPT = """#!/bin/sh
[ "$1" = --version ] && exec {tool} --version
while [ $# -gt 1 ]; do
    [ "$1" = -o ] && echo none > "$2"
    shift
done
"""


def unassembled(device: Any, folder: str) -> dict[str, str]:
    """Returns the compiler option by which XLA uses scripts for its assembler and linker.

    XLA finds them in the folder, with the rest of pip's CUDA. What is compiled so is the same
    program, and cannot run.

    Returns nothing ({}) for a device that is here, whose code will run; where JAX has a GPU, on
    which XLA then tries kernels for the absent one; and where pip installed no CUDA: XLA then looks
    for one itself.

    Args:
      device: a `jax.Device`, here or not.
      folder: a path that does not exist yet, kept until the compilation is done. Raises
        FileExistsError where it has been used.
    """
    if device.client.local_device_count() or gpu_in_use():
        return {}
    toolkit = _toolkit()
    if toolkit is None:
        return {}
    root = Path(folder)
    (root / "bin").mkdir(parents=True)
    (root / "nvvm").symlink_to(toolkit / "nvvm")
    for name in ("ptxas", "nvlink"):
        tool = shlex.quote(str(toolkit / "bin" / name))
        script = root / "bin" / name
        script.write_bytes(os.fsencode(_SCRIPT.format(tool=tool)))
        script.chmod(0o755)
    return {"xla_gpu_cuda_data_dir": folder}


def gpu_in_use() -> bool:
    """Whether JAX has a GPU.

    It is asked as its own compiler asks (jax._src.compiler._get_cross_compile_backend).
    """
    try:
        return bool(jax.devices("cuda"))
    except Exception:  # AssertionError among them, where CUDA is the only platform allowed
        return False


def _toolkit() -> Path | None:
    """Returns the folder of pip's CUDA that has an assembler; None if there is none."""
    spec = importlib.util.find_spec("nvidia")
    folders = spec.submodule_search_locations if spec else None
    for folder in folders or ():
        for ptxas in sorted(Path(folder).glob("*/bin/ptxas")):
            toolkit = ptxas.parents[1]
            if (toolkit / "nvvm").is_dir():
                return toolkit
    return None
