"""Verdicts on disk: one file each, by kind, GPU, driver, versions and the source of the kernels;
and a lock for the processes of a host.
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
    """(name of the first GPU, version of the driver) without using the GPU; ("", "") if neither the
    driver nor nvidia-smi says so.
    """
    with contextlib.suppress(OSError):
        models = [
            re.search(r"^Model:\s*(.+?)\s*$", file.read_text(encoding="utf-8"), re.MULTILINE)
            for file in sorted(driver.glob("gpus/*/information"))
        ]
        version = re.search(
            r"\b(\d+\.\d+(?:\.\d+)?)\b", (driver / "version").read_text(encoding="utf-8")
        )
        if models and models[0] and version:
            return models[0][1], version[1]
    if tool := shutil.which("nvidia-smi"):
        command = [tool, "--query-gpu=name,driver_version", "--format=csv,noheader"]
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            line = subprocess.run(
                command,
                capture_output=True,
                encoding="utf-8",
                errors="replace",
                timeout=30,
                check=True,
            ).stdout.partition("\n")[0]
            name, _, version = line.partition(",")
            return name.strip(), version.strip()
    return "", ""


@functools.cache
def source_hash(package: Path = PACKAGE) -> str:
    """A hash of the package's source and data, without developers' tools: any of it may change what
    a kernel computes.
    """
    digest = hashlib.sha256()
    for path in sorted(
        path
        for path in package.rglob("*")
        if path.suffix in (".py", ".json") and "dev" not in path.parts
    ):
        digest.update(str(path.relative_to(package)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


@functools.cache
def versions() -> tuple[str, ...]:
    """Names and versions of the installed packages that compile a kernel."""
    found = []
    for name in _VERSIONS:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found.append(f"{name} {importlib.metadata.version(name)}")
    return tuple(found)


def cache_directory() -> Path:
    """Where verdicts are kept: $XDG_CACHE_HOME/mesh_lm/kernels, or ~/.cache/mesh_lm/kernels."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "mesh_lm" / "kernels"


@dataclasses.dataclass(frozen=True)
class Store:
    """The verdicts in `directory` for one GPU and driver. Where it cannot be written, verdicts are
    forgotten, and nothing is raised.
    """

    directory: Path = dataclasses.field(default_factory=cache_directory)
    gpu: tuple[str, str] = dataclasses.field(default_factory=gpu_here)
    source: str = dataclasses.field(default_factory=source_hash)

    def path(self, kind: Kind) -> Path:
        """The file of a kind."""
        about = json.dumps([kind.family, kind.facts, *self.gpu, *versions(), self.source])
        return (
            self.directory / f"{kind.family}-{hashlib.sha256(about.encode()).hexdigest()[:20]}.json"
        )

    def get(self, kind: Kind) -> Verdict | None:
        """The verdict on a kind; None if there is none, or its file is damaged."""
        path = self.path(kind)
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            row = json.loads(path.read_text(encoding="utf-8"))
            if row["status"] in ("passed", "failed"):
                return Verdict(row["status"], str(row["reason"]), str(path))
        return None

    def put(self, kind: Kind, verdict: Verdict, output: str) -> Verdict:
        """Keeps a verdict, with the end of the test's output, and returns it with the path of its
        file; unchanged if that fails.

        A test that could not be run leaves no file, so that the next program tries again.
        """
        if verdict.status == "untested":
            return verdict
        path, row = (
            self.path(kind),
            dataclasses.asdict(verdict) | {"family": kind.family, "kind": kind.values},
        )
        row |= {"gpu": self.gpu, "versions": versions(), "source": self.source, "output": output}
        part = path.with_suffix(f".{os.getpid()}")
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            part.write_text(json.dumps(row, indent=1) + "\n", encoding="utf-8")
            part.replace(path)
        except OSError:
            return verdict
        return dataclasses.replace(verdict, report=str(path))

    @contextlib.contextmanager
    def alone(self, patience: float) -> Iterator[None]:
        """Runs the block while no other process tests a kernel, if the directory allows locks;
        after `patience` seconds in any case.
        """
        with contextlib.ExitStack() as stack:
            with contextlib.suppress(OSError, ImportError):
                import fcntl  # which Windows does not have

                self.directory.mkdir(parents=True, exist_ok=True)
                file = stack.enter_context((self.directory / "lock").open("a", encoding="utf-8"))
                until = time.monotonic() + patience
                while time.monotonic() < until:
                    try:
                        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                        break
                    except BlockingIOError:
                        time.sleep(0.1)
            yield
