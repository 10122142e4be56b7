"""The GPU that a process will use, and XLA's flags for it. XLA reads them when JAX first looks for
devices, so they are set before that.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
from collections.abc import Mapping, MutableMapping
from pathlib import Path

import jax

from mesh_lm.errors import ConfigError
from mesh_lm.network.process_slot import may_use_gpus, visible_gpus
from sharding_rules.lab import flags
from sharding_rules.lab.targets import MEMORY_FRACTION

_DRIVER = Path("/proc/driver/nvidia/gpus")
_ACCELERATORS = ("nvidia*", "dxg", "kfd", "accel*", "vfio")
"""Patterns of device files of accelerators that JAX can use."""
_CAPABILITIES = {
    r"\b(G?H100|G?H200|GH200|H800|H20)\b": (9, 0),
    r"\b(A100|A800)\b": (8, 0),
    r"\bG?B200\b": (10, 0),
}
"""Pattern of the driver's name for a GPU -> its compute capability."""
_DETERMINISTIC = "xla_gpu_deterministic_ops"
_NVIDIA_SMI_LIMIT = 30
"""Seconds that nvidia-smi may take."""


def set_flags(
    flag_set: str,
    environment: MutableMapping[str, str] = os.environ,
    driver: Path = _DRIVER,
    *,
    pipeline: bool = False,
    pairs: bool = False,
    deterministic: Path | None = None,
) -> str:
    """Adds a set of flags (launch.xla_flags) to XLA_FLAGS if JAX will use a GPU. Returns the lines
    to print; empty if nothing changed.

    A flag that XLA_FLAGS already has keeps its value. pipeline: the mesh has stages, so "auto"
    overlaps the transfers between them. pairs: they run layers of both passes side by side, so
    "auto" keeps the collectives of the two apart. deterministic: the directory of the run's
    autotuning results (made here), if its operations must be deterministic. Raises ConfigError for
    an unknown set, and if the run cannot be made deterministic.
    """
    names = ("auto", "none", *flags.FLAG_SETS)
    if flag_set not in names:
        raise ConfigError(
            f"launch.xla_flags={flag_set!r} must be one of the sets {', '.join(names)}"
        )
    gpu = visible(environment, driver)
    if not gpu:
        return ""
    lines = []
    version = capability(gpu)
    if flag_set != "none" and version is None:
        lines.append(f"XLA flags: none, because none are vetted for {gpu}")
    elif flag_set != "none" and version:
        vetted = flags.xla_flags(flag_set, version, pipeline, pairs)
        added = _add(vetted, environment)
        if added:
            lines.append(f"XLA flags for {gpu} (launch.xla_flags={flag_set}): {added}")
    if deterministic:
        added = _add(_deterministic_flags(deterministic, environment), environment)
        if added:
            lines.append(f"XLA flags for determinism (launch.deterministic): {added}")
    return "\n".join(lines)


def capability(name: str) -> tuple[int, int] | None:
    """Returns the compute capability of a GPU by the driver's name for it; None if the name is not
    known here.
    """
    for pattern, version in _CAPABILITIES.items():
        if re.search(pattern, name):
            return version
    return None


def _deterministic_flags(autotuning: Path, environment: Mapping[str, str]) -> str:
    """Returns flags with which XLA times no kernels but takes the first that compiles, or the run's
    own cached autotuning result.
    """
    if re.search(rf"--{_DETERMINISTIC}=(false|0)\b", environment.get("XLA_FLAGS", "")):
        raise ConfigError(
            f"launch.deterministic=True, but XLA_FLAGS has --{_DETERMINISTIC}=false; remove one of "
            "them"
        )
    if re.search(r"\s", str(autotuning)):
        raise ConfigError(
            f"launch.deterministic=True writes to {autotuning}, but XLA_FLAGS takes no spaces: set "
            "an output without spaces"
        )
    try:
        autotuning.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"launch.deterministic=True: cannot make {autotuning}: {error.strerror}"
        ) from error
    return flags.written(
        {_DETERMINISTIC: True, "xla_gpu_per_fusion_autotune_cache_dir": str(autotuning)}
    )


def _add(new_flags: str, environment: MutableMapping[str, str]) -> str:
    """Adds the flags that are not set yet to XLA_FLAGS, and returns them."""
    present = environment.get("XLA_FLAGS", "")
    added = missing(new_flags, present)
    if added:
        environment["XLA_FLAGS"] = f"{present} {added}".strip()
    return added


def missing(new_flags: str, present: str) -> str:
    """Returns the new flags that `present` does not set to any value.

    Both have the format of XLA_FLAGS.
    """
    present_names = {_flag_name(word) for word in present.split()}
    return " ".join(word for word in new_flags.split() if _flag_name(word) not in present_names)


def _flag_name(word: str) -> str:
    return word.lstrip("-").partition("=")[0]


def set_memory(environment: MutableMapping[str, str] = os.environ, driver: Path = _DRIVER) -> None:
    """Gives JAX the fraction of GPU memory that `--plan` assumes, unless the user has set one."""
    # JAX accepts only one of XLA_CLIENT_MEM_FRACTION and its old name.
    if "XLA_PYTHON_CLIENT_MEM_FRACTION" in environment or not visible(environment, driver):
        return
    environment.setdefault("XLA_CLIENT_MEM_FRACTION", str(MEMORY_FRACTION))


def choose_platform() -> None:
    """Makes JAX use the CPU if there is no accelerator, but the extra `aot` installed a plugin that
    would print errors about that.

    A choice by JAX_PLATFORMS or jax.config is kept. Call it before JAX first uses a device; later
    it has no effect.
    """
    if jax.config.values["jax_platforms"] is not None:
        return
    if absent() and importlib.util.find_spec("jax_cuda13_plugin"):
        jax.config.update("jax_platforms", "cpu")


def absent(
    environment: Mapping[str, str] = os.environ,
    devices: Path = Path("/dev"),
    driver: Path = _DRIVER,
) -> bool:
    """Returns whether there is no sign of an accelerator.

    JAX would then only warn about the CUDA plugin that the extra `aot` installs.
    """
    if any(any(devices.glob(pattern)) for pattern in _ACCELERATORS):
        return False
    return not visible(environment, driver)


def visible(environment: Mapping[str, str], driver: Path = _DRIVER) -> str:
    """Returns the name of the GPU that JAX will use; empty if it will find none, or use the CPU."""
    if not may_use_gpus(environment) or visible_gpus(environment) == []:
        return ""
    for file in sorted(driver.glob("*/information")):
        content = file.read_text(encoding="utf-8")
        model = re.search(r"^Model:\s*(.+?)\s*$", content, re.MULTILINE)
        if model:
            return model[1]
    tool = shutil.which("nvidia-smi", path=environment.get("PATH"))
    if not tool:
        return ""
    try:
        names = subprocess.run(
            [tool, "--query-gpu=name", "--format=csv,noheader"],
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=_NVIDIA_SMI_LIMIT,
            check=True,
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return ""
    return names.strip().partition("\n")[0]
