"""Verdicts on disk, and a lock for the processes of a host.

There is one file for each kind, GPU, driver, versions and source of the kernels.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from pallas_kernels.trust.kind import Kind, Verdict

PACKAGE = Path(__file__).parents[1]
_DRIVER = Path("/proc/driver/nvidia")
_VERSIONS = (
    "jax",
    "jaxlib",
    "jax-cuda13-plugin",
    "jax-cuda12-plugin",
    "nvidia-cuda-nvcc",
    "nvidia-cuda-nvcc-cu12",
)
"""Packages that take part in the compilation of a kernel."""


@functools.cache
def gpu_here(driver: Path = _DRIVER) -> tuple[str, str]:
    """(name of the first GPU, version of the driver), without using the GPU.

    ("", "") if neither the driver nor nvidia-smi has them.
    """
    return _gpu_of_driver(driver) or _gpu_of_nvidia_smi() or ("", "")


def _gpu_of_driver(driver: Path) -> tuple[str, str] | None:
    with contextlib.suppress(OSError):
        version_text = (driver / "version").read_text(encoding="utf-8")
        version = re.search(r"\b(\d+\.\d+(?:\.\d+)?)\b", version_text)
        for file in sorted(driver.glob("gpus/*/information"))[:1]:
            information = file.read_text(encoding="utf-8")
            model = re.search(r"^Model:\s*(.+?)\s*$", information, re.MULTILINE)
            if model and version:
                return model[1], version[1]
    return None


def _gpu_of_nvidia_smi() -> tuple[str, str] | None:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    command = [tool, "--query-gpu=name,driver_version", "--format=csv,noheader"]
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        result = subprocess.run(
            command,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=30,
            check=True,
        )
        first_line = result.stdout.partition("\n")[0]
        name, _, version = first_line.partition(",")
        return name.strip(), version.strip()
    return None


@functools.cache
def source_hash(package: Path = PACKAGE) -> str:
    """A hash of the package's source and data, without developers' tools.

    Any of it may change the numbers that a kernel computes.
    """
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*")):
        if path.suffix not in (".py", ".json") or "dev" in path.parts:
            continue
        name = str(path.relative_to(package)).encode()
        digest.update(name + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


@functools.cache
def versions() -> tuple[str, ...]:
    """Names and versions of the installed packages that compile a kernel."""
    packages = []
    for name in _VERSIONS:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            packages.append(f"{name} {importlib.metadata.version(name)}")
    return tuple(packages)


def cache_directory() -> Path:
    """The verdicts' directory: $XDG_CACHE_HOME/mesh_lm/kernels, or ~/.cache/mesh_lm/kernels."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "mesh_lm" / "kernels"


@dataclasses.dataclass(frozen=True)
class Store:
    """The verdicts in `directory` for one GPU and driver.

    If the directory cannot be written, verdicts are not stored, and nothing is raised.
    """

    directory: Path = dataclasses.field(default_factory=cache_directory)
    gpu: tuple[str, str] = dataclasses.field(default_factory=gpu_here)
    source: str = dataclasses.field(default_factory=source_hash)

    def path(self, kind: Kind) -> Path:
        """The file of a kind."""
        key = json.dumps([kind.family, kind.facts, *self.gpu, *versions(), self.source])
        digest = hashlib.sha256(key.encode()).hexdigest()[:20]
        return self.directory / f"{kind.family}-{digest}.json"

    def get(self, kind: Kind) -> Verdict | None:
        """The verdict on a kind; None if there is none, or its file is damaged."""
        path = self.path(kind)
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            row = json.loads(path.read_text(encoding="utf-8"))
            if row["status"] in ("passed", "failed"):
                return Verdict(row["status"], str(row["reason"]), str(path))
        return None

    def put(self, kind: Kind, verdict: Verdict, output: str) -> Verdict:
        """Stores a verdict, with the end of the test's output.

        A test that could not be run leaves no file, so that the next program tries again.

        Returns the verdict with the path of its file, or unchanged if none was written.
        """
        if verdict.status == "untested":
            return verdict
        path = self.path(kind)
        row = {
            **dataclasses.asdict(verdict),
            "family": kind.family,
            "kind": kind.values,
            "gpu": self.gpu,
            "versions": versions(),
            "source": self.source,
            "output": output,
        }
        # Written under another name and renamed, so that other processes never read a part of it.
        unfinished = path.with_suffix(f".{os.getpid()}")
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            unfinished.write_text(json.dumps(row, indent=1) + "\n", encoding="utf-8")
            unfinished.replace(path)
        except OSError:
            return verdict
        return dataclasses.replace(verdict, report=str(path))

    @contextlib.contextmanager
    def alone(self, patience: float) -> Iterator[None]:
        """Runs the block while no other process of this host tests a kernel.

        It runs the block in any case after `patience` seconds, or if the directory has no locks.
        """
        with contextlib.ExitStack() as stack:
            with contextlib.suppress(OSError, ImportError):
                import fcntl  # which Windows does not have

                self.directory.mkdir(parents=True, exist_ok=True)
                file = stack.enter_context((self.directory / "lock").open("a", encoding="utf-8"))
                deadline = time.monotonic() + patience
                while time.monotonic() < deadline:
                    try:
                        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                        break
                    except BlockingIOError:
                        time.sleep(0.1)
            yield
