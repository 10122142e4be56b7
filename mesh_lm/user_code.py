"""Imports Python that users write: the files that a config names, and their classes."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from mesh_lm.errors import ConfigError, did_you_mean

PACKAGE = Path(__file__).resolve().parent


def imported(name: str, field: str = "") -> ModuleType:
    """Returns the module of this name; for a path that ends in .py, the module of that file, which
    is searched for as `found` does.

    field: the field that names it, with which an error begins. Raises ConfigError if it cannot be
    imported.
    """
    try:
        if not name.endswith(".py"):
            return importlib.import_module(name)
        path = found(name, field)
        return sys.modules.get(str(path)) or executed(path)
    except ConfigError:
        raise
    except Exception as error:
        file = f"{name.replace('.', '/')}.py"
        hint = ""
        if isinstance(error, ModuleNotFoundError) and Path(file).is_file():
            hint = f"; a file is named by its path: {file}"
        raise ConfigError(
            f"{_prefix(field)}cannot import the module {name!r} "
            f"({type(error).__name__}: {error}){hint}"
        ) from error


def executed(path: Path) -> ModuleType:
    """Executes a file and returns its module, which is registered under the name of its path, where
    get_type_hints and the docstrings of the help find it.

    As in a script, it can import the files beside it; modules that are installed come first.
    """
    if not path.is_relative_to(PACKAGE) and str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    spec = importlib.util.spec_from_file_location(str(path), path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{path}: expected a file that ends in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def found(file: str, field: str = "") -> Path:
    """Returns the absolute path of a file. A relative path is looked for in the working directory,
    beside the package mesh_lm, and inside it, where an installed package has its configs.

    field: the beginning of the error. Raises ConfigError if there is no such file.
    """
    path = Path(file).expanduser()
    existing_path = in_directories(path)
    if existing_path:
        return existing_path
    neighbours = [
        str(Path(file).with_name(neighbour.name))
        for directory in _directories()
        for neighbour in (directory / path).parent.glob("[!_]*.py")
    ]
    searched = ""
    if not path.is_absolute():
        checkout = dict.fromkeys([Path.cwd(), PACKAGE.parent])
        searched = f" in {' or '.join(map(str, checkout))}"
    hint = did_you_mean(difflib.get_close_matches(file, neighbours, n=1, cutoff=0.8))
    raise ConfigError(f"{_prefix(field)}cannot find a file of this name{searched}{hint}")


def in_directories(path: Path) -> Path | None:
    """Returns the absolute path of a file that one of the directories of `found` has; None: none
    has it.
    """
    for directory in _directories():
        if (directory / path).is_file():
            return (directory / path).resolve()
    return None


def _directories() -> list[Path]:
    return list(dict.fromkeys([Path.cwd(), PACKAGE.parent, PACKAGE]))


def _prefix(field: str) -> str:
    return f"{field}: " if field else ""
