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
_OTHERS = {".yaml", ".yml", ".toml"}
"""What the configs of other trainers end with."""
_NAME = re.compile(r"\w+")
"""A config that is named, not one that is a path."""


def load(file: str) -> TrainConfig:
    """What get_config() of a Python file returns, or what the config.json in the output of a run
    says.

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
            f"{file}: get_config() returned {type(config).__name__}; expected TrainConfig"
        )
    return config


def _require_config(file: str) -> None:
    """Raises ConfigError for what is no config of ours, with what to do: YAML, a model directory, a
    name on the Hugging Face Hub.
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
    if not path.exists() and path.suffix not in _OTHERS and (hint := hub_hint(file)):
        raise ConfigError(
            f"--config={file}: no such file{hint}, then mesh-lm import {file} --output=runs/{name}"
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
    """The module of this name; or, for a path that ends in .py, what that file makes, looked for as
    `load` looks for a config.

    where: the field that names it, for errors. Raises ConfigError where it cannot be imported.
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
        hint = (
            f"; a file is named by its path: {file}"
            if isinstance(error, ModuleNotFoundError) and Path(file).is_file()
            else ""
        )
        raise ConfigError(
            f"{where}: {name!r} cannot be imported ({type(error).__name__}: {error}){hint}"
        ) from error


def _executed(path: Path) -> ModuleType:
    """The module that a file makes, by the name of its path, under which get_type_hints and the
    help's docstrings find it.

    As in a script, it can import the files beside it; modules that are installed come first.
    """
    if not path.is_relative_to(_PACKAGE) and str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    spec = importlib.util.spec_from_file_location(str(path), path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{path}: expected a .py file")
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _find(file: str, where: str = "") -> Path:
    """where: what the error begins with; empty: that it is a config."""
    path, bases = Path(file).expanduser(), [Path.cwd(), _PACKAGE.parent, _PACKAGE]
    for each in (path, Path("configs", f"{file}.py")) if _NAME.fullmatch(file) else (path,):
        for base in dict.fromkeys(bases):
            if (base / each).is_file():
                return (base / each).resolve()
    if _NAME.fullmatch(file):
        known = [*shipped()]
        near = did_you_mean(difflib.get_close_matches(file, known, n=1, cutoff=0.6))
        raise ConfigError(
            f"--config={file}: no such "
            f"file{near or '; give the path of a .py file, or one of ' + ', '.join(known)}"
        )
    beside = [
        str(Path(file).with_name(other.name))
        for base in bases
        for other in (base / path).parent.glob("[!_]*.py")
    ]
    looked = "" if path.is_absolute() else f" in {' or '.join(map(str, dict.fromkeys(bases[:2])))}"
    near = did_you_mean(difflib.get_close_matches(file, beside, n=1, cutoff=0.8))
    raise ConfigError(f"{where or f'--config={file}'}: no such file{looked}{near}")


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
