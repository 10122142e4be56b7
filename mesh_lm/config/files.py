"""Reads a config file: Python with a function get_config() -> TrainConfig, or the config.json of a
run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import re
import traceback
from collections.abc import Iterator
from pathlib import Path

from mesh_lm.config import resolved
from mesh_lm.config.layout import with_layout
from mesh_lm.config.run import TrainConfig
from mesh_lm.errors import ConfigError, did_you_mean, hub_hint
from mesh_lm.user_code import PACKAGE, executed, found, in_directories

DEFAULT = "configs/gpt_tiny.py"
_FOREIGN_SUFFIXES = {".yaml", ".yml", ".toml"}
"""Suffixes of the configs of other trainers."""
_NAME = re.compile(r"\w+")
"""The name of a config, as opposed to a path."""


def load(file: str) -> TrainConfig:
    """Returns the config that get_config() of a Python file makes, or that the config.json in the
    output of a run describes.

    file: a path, or the name of a config that comes with mesh_lm, such as gpt_tiny. A relative path
    is looked for in the working directory, beside the package mesh_lm, and inside it, where an
    installed package has its configs.

    Raises ConfigError for a file that is missing, cannot run, or has no get_config() that returns a
    TrainConfig; and for a saved layout (`mesh="plan.json"`) that is not of this config.
    """
    config, layout = load_apart(file)
    return with_layout(config, layout) if layout else config


def load_apart(file: str) -> tuple[TrainConfig, str]:
    """Returns the config of a file, and the file of a saved layout that it names, which is not a
    part of the config yet; empty if it names none. Raises as `load`.
    """
    _require_config(file)
    path = _find(file)
    if path.suffix == ".json":
        return resolved.read(path, file), ""
    with _user_code(file, path):
        module = executed(path)
    if not hasattr(module, "get_config"):
        raise ConfigError(f"{file}: no function get_config() -> TrainConfig")
    with _user_code(file, path):
        config = module.get_config()
    if not isinstance(config, TrainConfig):
        raise ConfigError(
            f"{file}: get_config() returned a value of type {type(config).__name__}; "
            "expected TrainConfig"
        )
    if not isinstance(config.mesh, str):
        return config, ""
    layout = Path(config.mesh).expanduser()
    beside = path.parent / layout
    found_layout = beside if beside.is_file() and not layout.is_file() else layout
    return dataclasses.replace(config, mesh=type(config).mesh), str(found_layout)


def _require_config(file: str) -> None:
    """Raises ConfigError for a file that cannot be a config, with what to do instead: for YAML, a
    model directory, and a name on the Hugging Face Hub.
    """
    path = Path(file).expanduser()
    if path.suffix in (".py", ".json") or _NAME.fullmatch(file):
        return
    name = path.name
    if path.is_dir():
        raise ConfigError(
            f"--config={file}: a directory; a run's config is {file}/config.json, and a Hugging "
            f"Face model becomes a run by mesh-lm import {file} --output=runs/{name}"
        )
    if not path.exists() and path.suffix not in _FOREIGN_SUFFIXES:
        hint = hub_hint(file)
        if hint:
            raise ConfigError(
                f"--config={file}: no such file{hint}, "
                f"then import it: mesh-lm import {file} --output=runs/{name}"
            )
    raise ConfigError(
        f"--config={file}: a config is a .py file with get_config(), or the config.json of a run; "
        "`mesh-lm configs` lists some to copy"
    )


def shipped() -> dict[str, Path]:
    """Returns the configs that come with mesh_lm, by name, in alphabetical order."""
    return {path.stem: path for path in sorted((PACKAGE / "configs").glob("[!_]*.py"))}


def is_config(word: str) -> bool:
    """Returns whether a word of a command line names a config: a Python file, a config.json, or one
    that comes with mesh_lm.
    """
    return word.endswith((".py", ".json")) or bool(_NAME.fullmatch(word) and word in shipped())


def _find(file: str) -> Path:
    """Returns the absolute path of a config, from its path or its name."""
    if not _NAME.fullmatch(file):
        return found(file, f"--config={file}")
    for candidate in (Path(file), Path("configs", f"{file}.py")):
        path = in_directories(candidate)
        if path:
            return path
    names = list(shipped())
    hint = did_you_mean(difflib.get_close_matches(file, names, n=1, cutoff=0.6))
    if not hint:
        hint = f"; give the path of a .py file, or one of {', '.join(names)}"
    raise ConfigError(f"--config={file}: there is no such config{hint}")


@contextlib.contextmanager
def _user_code(file: str, path: Path) -> Iterator[None]:
    """Turns any exception into a ConfigError at the last line of the user's own file, which may be
    far above the one that raised.
    """
    try:
        yield
    except Exception as error:
        lines = [
            frame.lineno
            for frame in traceback.extract_tb(error.__traceback__)
            if frame.filename == str(path)
        ]
        if isinstance(error, SyntaxError) and error.filename == str(path):
            lines.append(error.lineno)
        location = f"{file}:{lines[-1]}" if lines else file
        raise ConfigError(f"{location}: {type(error).__name__}: {error}") from error
