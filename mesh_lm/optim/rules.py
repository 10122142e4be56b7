"""The update rules by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from mesh_lm.errors import ConfigError
from mesh_lm.optim.contract import Rule
from mesh_lm.user_code import imported
from sharding_rules import did_you_mean

RULES = {
    "adamw": "mesh_lm.optim.adamw:AdamW",
    "adamw8": "mesh_lm.optim.adamw8:AdamW8",
    "muon": "mesh_lm.optim.muon:Muon",
    "lion": "mesh_lm.optim.lion:Lion",
    "adafactor": "mesh_lm.optim.adafactor:Adafactor",
}
"""optimizer.rule on the command line -> module:class."""


def rule_class(name: str) -> type:
    """Returns the class of an update rule: one of RULES, module:class, or FILE.py:class.

    Raises ConfigError for an unknown name, and for a module that cannot be imported or lacks the
    class.
    """
    path, colon, class_name = RULES.get(name, name).rpartition(":")
    if not colon:
        hint = did_you_mean(class_name, list(RULES))
        if not hint.endswith("?"):
            hint += ", or module:class for a custom one"
        raise ConfigError(f"there is no such optimizer{hint}")
    module = imported(path)
    if hasattr(module, class_name):
        return getattr(module, class_name)
    rules = [
        candidate
        for candidate, value in vars(module).items()
        if getattr(value, "__module__", "") == path and hasattr(value, "direction")
    ]
    hint = did_you_mean(class_name, rules) if rules else ""
    raise ConfigError(f"{path!r} has no optimizer of the name {class_name!r}{hint}")


def make_rule(name: str) -> Rule:
    """Returns the rule of a name, see `rule_class`, with its default hyperparameters.

    Raises ConfigError as `rule_class` does, and for a class that does not implement `Rule`.
    """
    try:
        rule = rule_class(name)()
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(
            f"cannot be constructed without arguments ({type(error).__name__}: {error}); give its "
            "fields defaults"
        ) from error
    require_rule(rule)
    return rule


def require_rule(rule: Any) -> None:
    """Raises ConfigError if an object does not implement `Rule`."""
    if isinstance(rule, str | type):
        raise ConfigError("is a name or a class; give a rule, such as Muon() of mesh_lm.optim")
    types = {"elementwise": bool, "slots": Callable, "direction": Callable}
    missing = [
        name for name, kind in types.items() if not isinstance(getattr(rule, name, None), kind)
    ]
    if missing:
        raise ConfigError(f"lacks {', '.join(missing)}; implement mesh_lm.optim.Rule")


def rule_name(rule: Any) -> str:
    """Returns the name by which the command line chooses the class of a rule."""
    return _short_name(f"{type(rule).__module__}:{type(rule).__qualname__}")


def described_name(description: Mapping[str, Any] | None) -> str:
    """Returns the `rule_name` of a rule in the description of a config (`as_dict`); None: of a
    checkpoint from before there were several.
    """
    if description is None:
        return "adamw"
    return _short_name(f"{description['module']}:{description['class']}")


def _short_name(path: str) -> str:
    for name, known_path in RULES.items():
        if path == known_path:
            return name
    return path
