"""A description of this process: config, code, versions and devices, which must agree on all
processes of a run. They compare it at the rendezvous (`mesh_lm.network.rendezvous`).
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import sys
import sysconfig
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax

from mesh_lm.distributed import gpu
from mesh_lm.network.rendezvous import Description

_ROOT = Path(__file__).parents[2]
_CODE = ("mesh_lm", "sharding_rules", "pallas_kernels", "train.py")
_VARIABLES = ("XLA_FLAGS", "JAX_ENABLE_X64", "JAX_DEFAULT_MATMUL_PRECISION", "JAX_NUM_CPU_DEVICES")
_COMPILERS = ("jax-cuda13-pjrt", "jax-cuda12-pjrt")
"""The packages that have XLA's compiler for GPUs; that for CPUs is in jaxlib."""
_DIGEST = 12
"""Characters of a file's digest."""


def describe(
    config: Mapping[str, Any], command: Mapping[str, Any] = MappingProxyType({})
) -> Description:
    """Returns the config, digests of the code (imported user code included), versions, variables
    that change the compiled program, and whether this process will use NVIDIA GPUs: JAX would wait
    minutes for the devices of one that has lost them.
    """
    versions = {
        "python": platform.python_version(),
        "jax": jax.__version__,
        "jaxlib": version("jaxlib"),
    }
    has_gpus = bool(gpu.visible(os.environ))
    if has_gpus:
        versions |= _compiler_versions()
    return {
        "config": dict(config),
        "command": dict(command),
        "code": _project_code() | _user_code(),
        "versions": versions,
        "environment": {name: os.environ.get(name, "") for name in _VARIABLES},
        "devices": "NVIDIA GPUs" if has_gpus else "no NVIDIA GPU",
    }


def _compiler_versions() -> dict[str, str]:
    """Returns the installed packages of XLA's compiler for GPUs and their versions."""
    versions = {}
    for name in _COMPILERS:
        with contextlib.suppress(PackageNotFoundError):
            versions[name] = version(name)
    return versions


def _project_code() -> dict[str, str]:
    """Returns file -> digest for all files of this project, imported or not."""
    digests = {}
    for name in _CODE:
        path = _ROOT / name
        files = sorted(path.rglob("*.py")) if path.is_dir() else [path]
        for file in files:
            if file.exists():
                digests[str(file.relative_to(_ROOT))] = _digest(file)
    return digests


def _user_code() -> dict[str, str]:
    """Returns module -> digest for the imported files that belong neither to Python nor to an
    installed package, such as a config file.

    This project's are left out, because a process may have imported more of them than others.
    """
    excluded = [(_ROOT / name).resolve() for name in _CODE]
    for name in ("stdlib", "platstdlib"):
        excluded.append(Path(sysconfig.get_path(name)).resolve())
    digests = {}
    for name, module in list(sys.modules.items()):
        file = Path(getattr(module, "__file__", None) or "/")
        if file.suffix != ".py" or not file.is_file():
            continue
        if {"site-packages", "dist-packages"} & {*file.parts}:
            continue
        if not any(file.resolve().is_relative_to(path) for path in excluded):
            digests[Path(name).name] = _digest(file)
    return digests


def _digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()[:_DIGEST]
