"""Reads a config file: Python with a function get_config() -> TrainConfig, or the config.json of a
run.
"""

from __future__ import annotations

import contextlib
import difflib
import importlib
import importlib.util
import re
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

from mesh_lm.config import resolved
from mesh_lm.config.run import TrainConfig
from mesh_lm.errors import ConfigError, did_you_mean, hub_hint

DEFAULT = "configs/gpt_tiny.py"
_PACKAGE = Path(__file__).resolve().parents[1]
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
    TrainConfig.
    """
    _require_config(file)
    path = _find(file)
    if path.suffix == ".json":
        return resolved.read(path, file, imported)
    with _user_code(file, path):
        module = _executed(path)
    if not hasattr(module, "get_config"):
        raise ConfigError(f"{file}: no function get_config() -> TrainConfig")
    with _user_code(file, path):
        config = module.get_config()
    if not isinstance(config, TrainConfig):
        raise ConfigError(
            f"{file}: get_config() returned a value of type {type(config).__name__}; "
            "expected TrainConfig"
        )
    return config


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
    return {path.stem: path for path in sorted((_PACKAGE / "configs").glob("[!_]*.py"))}


def is_config(word: str) -> bool:
    """Returns whether a word of a command line names a config: a Python file, a config.json, or one
    that comes with mesh_lm.
    """
    return word.endswith((".py", ".json")) or bool(_NAME.fullmatch(word) and word in shipped())


def imported(name: str, where: str) -> ModuleType:
    """Returns the module of this name; for a path that ends in .py, the module of that file, which
    is searched for as `load` searches for a config.

    where: the field that names it, for errors. Raises ConfigError if it cannot be imported.
    """
    try:
        if not name.endswith(".py"):
            return importlib.import_module(name)
        path = _find(name, where)
        return sys.modules.get(str(path)) or _executed(path)
    except ConfigError:
        raise
    except Exception as error:
        file = f"{name.replace('.', '/')}.py"
        hint = ""
        if isinstance(error, ModuleNotFoundError) and Path(file).is_file():
            hint = f"; a file is named by its path: {file}"
        raise ConfigError(
            f"{where}: cannot import the module {name!r} ({type(error).__name__}: {error}){hint}"
        ) from error


def _executed(path: Path) -> ModuleType:
    """Executes a file and returns its module, which is registered under the name of its path, where
    get_type_hints and the docstrings of the help find it.

    As in a script, it can import the files beside it; modules that are installed come first.
    """
    if not path.is_relative_to(_PACKAGE) and str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    spec = importlib.util.spec_from_file_location(str(path), path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{path}: expected a file that ends in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def _find(file: str, where: str = "") -> Path:
    """Returns the absolute path of a file. where: the beginning of the error; empty: that of a
    config's.
    """
    path = Path(file).expanduser()
    is_name = bool(_NAME.fullmatch(file))
    directories = list(dict.fromkeys([Path.cwd(), _PACKAGE.parent, _PACKAGE]))
    candidates = [path, Path("configs", f"{file}.py")] if is_name else [path]
    for candidate in candidates:
        for directory in directories:
            if (directory / candidate).is_file():
                return (directory / candidate).resolve()
    if is_name:
        names = list(shipped())
        hint = did_you_mean(difflib.get_close_matches(file, names, n=1, cutoff=0.6))
        if not hint:
            hint = f"; give the path of a .py file, or one of {', '.join(names)}"
        raise ConfigError(f"--config={file}: there is no such config{hint}")

    neighbours = [
        str(Path(file).with_name(neighbour.name))
        for directory in directories
        for neighbour in (directory / path).parent.glob("[!_]*.py")
    ]
    searched = ""
    if not path.is_absolute():
        checkout = dict.fromkeys([Path.cwd(), _PACKAGE.parent])
        searched = f" in {' or '.join(map(str, checkout))}"
    hint = did_you_mean(difflib.get_close_matches(file, neighbours, n=1, cutoff=0.8))
    option = where or f"--config={file}"
    raise ConfigError(f"{option}: cannot find a file of this name{searched}{hint}")


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
        where = f"{file}:{lines[-1]}" if lines else file
        raise ConfigError(f"{where}: {type(error).__name__}: {error}") from error
