"""Reads a config file: Python with a function get_config() -> TrainConfig."""

from __future__ import annotations

import contextlib
import difflib
import importlib.util
import re
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path

from mesh_lm.config.run import TrainConfig
from mesh_lm.errors import ConfigError, did_you_mean

DEFAULT = "configs/gpt_tiny.py"
_PACKAGE = Path(__file__).resolve().parents[1]
_NAME = re.compile(r"\w+")
"""A config that is named, not one that is a path."""


def load(file: str) -> TrainConfig:
    """What get_config() of a Python file returns.

    file: a path, or the name of a config that comes with mesh_lm, such as gpt_tiny. A relative path is looked for in the working
    directory, beside the package mesh_lm, and inside it, where an installed package has its configs.

    Raises ConfigError for a file that is missing, cannot run, or has no get_config() that returns a TrainConfig.
    """
    path = _find(file)
    spec = importlib.util.spec_from_file_location(str(path), path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"--config={file}: expected a .py file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # get_type_hints and the help's docstrings find a class's file by its module's name
    with _user_code(file, path):
        spec.loader.exec_module(module)
    if not hasattr(module, "get_config"):
        raise ConfigError(f"{file}: no function get_config() -> TrainConfig")
    with _user_code(file, path):
        config = module.get_config()
    if not isinstance(config, TrainConfig):
        raise ConfigError(f"{file}: get_config() returned {type(config).__name__}; expected TrainConfig")
    return config


def _find(file: str) -> Path:
    path, bases = Path(file).expanduser(), [Path.cwd(), _PACKAGE.parent, _PACKAGE]
    for each in (path, Path("configs", f"{file}.py")) if _NAME.fullmatch(file) else (path,):
        for base in dict.fromkeys(bases):
            if (base / each).is_file():
                return (base / each).resolve()
    if _NAME.fullmatch(file):
        shipped = sorted(other.stem for other in (_PACKAGE / "configs").glob("[!_]*.py"))
        near = did_you_mean(difflib.get_close_matches(file, shipped, n=1, cutoff=0.6))
        raise ConfigError(f"--config={file}: no such file{near or '; give the path of a .py file, or one of ' + ', '.join(shipped)}")
    beside = [str(Path(file).with_name(other.name)) for base in bases for other in (base / path).parent.glob("[!_]*.py")]
    where = "" if path.is_absolute() else f" in {' or '.join(map(str, dict.fromkeys(bases[:2])))}"
    raise ConfigError(f"--config={file}: no such file{where}{did_you_mean(difflib.get_close_matches(file, beside, n=1, cutoff=0.8))}")


@contextlib.contextmanager
def _user_code(file: str, path: Path) -> Iterator[None]:
    """Turns any exception into a ConfigError at the last line of the user's own file, which may be far above the one that raised."""
    try:
        yield
    except Exception as error:
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
        if isinstance(error, SyntaxError) and error.filename == str(path):
            lines.append(error.lineno)
        where = f"{file}:{lines[-1]}" if lines else file
        raise ConfigError(f"{where}: {type(error).__name__}: {error}") from error
