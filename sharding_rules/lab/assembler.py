"""Compiling without assembling: a report is of XLA's program, and machine code that nothing will
run only takes time.
"""

from __future__ import annotations

import importlib.util
import os
import shlex
from pathlib import Path
from typing import Any

import jax

_SCRIPT = """#!/bin/sh
[ "$1" = --version ] && exec {tool} --version
while [ $# -gt 1 ]; do
    [ "$1" = -o ] && echo none > "$2"
    shift
done
"""
"""In place of a tool: XLA asks for its version, and then for a file that it keeps and does not
read."""


def unassembled(device: Any, folder: str) -> dict[str, str]:
    """The compiler option by which XLA finds, in the folder, pip's CUDA with scripts in place of
    its assembler and linker.

    device: a `jax.Device`, here or not. folder: a path where nothing is yet, kept until the
    compilation is done; raises FileExistsError where it has been used. What is compiled so is the
    same program, and cannot run. Nothing ({}) for a device that is here, whose code will run; where
    JAX has a GPU, on which XLA then tries kernels for the absent one; and where pip installed no
    CUDA: XLA then looks for one itself.
    """
    if device.client.local_device_count() or gpu_in_use() or not (toolkit := _toolkit()):
        return {}
    here = Path(folder)
    (here / "bin").mkdir(parents=True)
    (here / "nvvm").symlink_to(toolkit / "nvvm")
    for name in ("ptxas", "nvlink"):
        script = here / "bin" / name
        script.write_bytes(
            os.fsencode(_SCRIPT.format(tool=shlex.quote(str(toolkit / "bin" / name))))
        )
        script.chmod(0o755)
    return {"xla_gpu_cuda_data_dir": folder}


def gpu_in_use() -> bool:
    """Whether JAX has one, asked as its own compiler asks
    (jax._src.compiler._get_cross_compile_backend).
    """
    try:
        return bool(jax.devices("cuda"))
    except Exception:  # AssertionError among them, where CUDA is the only platform allowed
        return False


def _toolkit() -> Path | None:
    spec = importlib.util.find_spec("nvidia")
    places = spec.submodule_search_locations if spec else None
    tools = (
        ptxas.parents[1]
        for place in places or ()
        for ptxas in sorted(Path(place).glob("*/bin/ptxas"))
    )
    return next((tool for tool in tools if (tool / "nvvm").is_dir()), None)
