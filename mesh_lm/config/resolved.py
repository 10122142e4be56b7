"""The config of a run as a file: `config.json` in its output, which `--config` reads again.

Each section and each list has the names of its fields, as in Python. `model` also has the module of
its class, which is imported to read the file, as a config file in Python would import it.
"""

from __future__ import annotations

import dataclasses
import json
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from mesh_lm import strict_json
from mesh_lm.config.moved import migrated
from mesh_lm.config.run import ModelConfig, TrainConfig, as_dict
from mesh_lm.errors import ConfigError
from mesh_lm.optim.contract import Rule
from mesh_lm.user_code import imported
from sharding_rules import Rules
from sharding_rules.rules import Kind

_SIMPLE: dict[Any, tuple[type, ...]] = {
    int: (int,),
    float: (int, float),
    str: (str,),
    bool: (bool,),
    None: (types.NoneType,),
}


def to_json(config: TrainConfig) -> str:
    """Returns the contents of the file."""
    plain = as_dict(config)
    cls = type(config.model)
    plain["model"] = {"class": cls.__qualname__, "module": cls.__module__} | {
        name: value for name, value in plain["model"].items() if name != "class"
    }
    return json.dumps(plain, indent=1) + "\n"


def read(path: Path, shown: str) -> TrainConfig:
    """Returns the config that `to_json` wrote; fields that the file lacks have their defaults.

    shown: how the user names the file, for errors.

    Raises ConfigError if it is no such file, if a field is unknown or of another type, or
    if the class of its model cannot be imported.
    """
    try:
        plain = strict_json.read(path)
        described = plain.pop("model", None)
        if plain.get("class") != TrainConfig.__name__ or not isinstance(described, dict):
            raise ValueError("expected a config.json from the output of a run")
        name = described.get("class")
        module = described.pop("module", None)
        if not isinstance(name, str) or not isinstance(module, str):
            raise ValueError("its model has no class and module")
        cls = getattr(imported(module, f"--config={shown}: the module of its model"), name, None)
        if not isinstance(cls, type) or not issubclass(cls, ModelConfig):
            raise ValueError(
                f"its model is a {name}, which {module} does not have; name the config file that "
                "creates it instead"
            )
        model = _section(cls, described, "model.")
        return _section(TrainConfig, migrated(plain) | {"model": model}, "")
    except OSError as error:
        raise ConfigError(f"--config={shown}: the file cannot be read: {error.strerror}") from error
    except ConfigError:
        raise
    except (ValueError, TypeError, LookupError) as error:  # also what a __post_init__ raises
        raise ConfigError(f"--config={shown}: {error}") from error


def rules_from(plain: Mapping[str, Any]) -> Rules:
    """Returns the rules of which `Rules.as_dict` made this."""
    columns: dict[str, Any] = {}
    for kind in get_args(Kind):
        column = plain[kind]
        if column:
            column = {row: tuple(axes) or None for row, axes in column.items()}
        columns[kind] = column
    optional = ("axes", "context", "exchange", "reduction", "node_axis")
    settings: dict[str, Any] = {name: plain[name] for name in optional if name in plain}
    return Rules(plain["name"], **columns, **settings)


def _section(cls: type, plain: Mapping[str, Any], prefix: str) -> Any:
    """Returns the dataclass of a section. Raises ValueError for the first field that is unknown or
    of another type.
    """
    if not isinstance(plain, Mapping):
        raise ValueError(f"{prefix.removesuffix('.')}: expected an object with its fields")
    name = plain.get("class")
    if name != cls.__qualname__:
        raise ValueError(
            f"{prefix.removesuffix('.')} is a {name}, not a {cls.__qualname__}; "
            "set it in the Python config again"
        )
    fields = {field.name for field in dataclasses.fields(cls) if field.init}
    hints = get_type_hints(cls)
    unknown = plain.keys() - fields - {"class"}
    if unknown:
        raise ValueError(f"{prefix}{min(unknown)}: this version has no such field; remove it")
    values = {
        field: _value(hints[field], plain[field], f"{prefix}{field}")
        for field in plain
        if field != "class"
    }
    return cls(**values)


def rule_from(plain: Any, path: str) -> Rule:
    """Returns the update rule of which `as_dict` made this.

    Raises ValueError if that is not possible, and ConfigError if its module cannot be imported.
    """
    if not isinstance(plain, Mapping) or not {"class", "module"} <= plain.keys():
        raise ValueError(f"{path}: expected an object with the class and module of an update rule")
    cls = getattr(imported(str(plain["module"]), path), str(plain["class"]), None)
    if not isinstance(cls, type):
        raise ValueError(f"{path}: there is no update rule {plain['class']} in {plain['module']}")
    if not dataclasses.is_dataclass(cls):
        return cls()
    fields = {name: value for name, value in plain.items() if name != "module"}
    return _section(cls, fields, f"{path}.")


def _value(hint: Any, plain: Any, path: str) -> Any:
    """Returns a value as the type that its field has. Raises ValueError if it is of another."""
    if isinstance(plain, ModelConfig):  # which was read before
        return plain
    if hint is Rules:
        try:
            return rules_from(plain)
        except (LookupError, AttributeError, TypeError):
            raise ValueError(
                f"{path}: expected a name, and a column each for {', '.join(get_args(Kind))}"
            ) from None
    if hint is Rule:
        return rule_from(plain, path)
    if dataclasses.is_dataclass(hint):
        return _section(hint, plain, f"{path}.")  # pyright: ignore[reportArgumentType]
    kind = get_origin(hint)
    arguments = get_args(hint)
    if kind in (Union, types.UnionType):
        for alternative in arguments:
            try:
                return _value(alternative, plain, path)
            except ValueError:
                continue
    elif kind is Literal:
        if plain in arguments:
            return plain
    elif kind is tuple and isinstance(plain, list):
        return tuple(_value(arguments[0], x, f"{path}[{i}]") for i, x in enumerate(plain))
    elif hint is types.NoneType or hint in _SIMPLE:
        if type(plain) in _SIMPLE.get(hint, (types.NoneType,)):
            return plain
    elif kind is not tuple:
        return plain
    type_name = getattr(hint, "__name__", hint) if kind is None else hint
    raise ValueError(f"{path}={plain!r}: expected a value of type {type_name}")
