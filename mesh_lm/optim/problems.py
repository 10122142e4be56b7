"""Wrong values of the section `optimizer`, and rules that its update rule cannot work with."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from mesh_lm.errors import ConfigError
from mesh_lm.fields import bound_problems
from mesh_lm.optim.config import OptimizerConfig
from mesh_lm.optim.rules import require_rule, rule_name
from sharding_rules import Rules
from sharding_rules.rules import FLAT


def optimizer_problems(optimizer: OptimizerConfig, rules: Rules) -> Iterator[str]:
    """Yields the problems. rules: the sharding rules of the run."""
    yield from bound_problems("optimizer", optimizer)
    rule = optimizer.rule
    try:
        require_rule(rule)
    except ConfigError as error:
        shown = repr(rule) if isinstance(rule, str | type) else rule_name(rule)
        yield f"optimizer.rule={shown} is not an update rule: it {error}"
        return
    if dataclasses.is_dataclass(rule):
        yield from bound_problems("optimizer.rule", rule)
    if rule.elementwise:
        return
    for row, entry in rules.column("optimizer").items():
        if row.rpartition("/")[2] == FLAT and entry is not None:
            yield (
                f"optimizer.rule={rule_name(rule)} needs full matrices, but rules "
                f"{rules.name!r} store its state as flat vectors "
                f"(rules.optimizer[{row!r}]={entry!r}); use the rule adamw or lion, or rules "
                "without that row, such as zero2"
            )
            return
