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

MASTER = "master"
"""The part of the state that holds the fp32 weights of rules with flat vectors."""


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
    yield from _offload_problems(optimizer, rules)
    if rule.elementwise:
        return
    for row in _flat_rows(rules)[:1]:
        entry = rules.column("optimizer")[row]
        yield (
            f"optimizer.rule={rule_name(rule)} needs full matrices, but rules {rules.name!r} store "
            f"its state as flat vectors (rules.optimizer[{row!r}]={entry!r}); use "
            "the rule adamw or lion, or rules without that row, such as zero2"
        )


def _offload_problems(optimizer: OptimizerConfig, rules: Rules) -> Iterator[str]:
    """Yields parts in optimizer.offload that the run does not have, or cannot offload."""
    if not optimizer.offload:
        return
    words = ",".join(optimizer.offload)
    name = rule_name(optimizer.rule)
    slots = list(optimizer.rule.slots({}))
    flat_rows = _flat_rows(rules)
    known = [*slots, *([MASTER] if flat_rows else [])]
    for part in dict.fromkeys(optimizer.offload):
        if part in known:
            continue
        if part == MASTER:
            yield (
                f"optimizer.offload={words}: rules {rules.name!r} keep no master; only rules that "
                "store the optimizer's state as flat vectors have one, such as distributed"
            )
            continue
        if part == "params":
            yield (
                f"optimizer.offload={words}: params, what the layers use, stay on the devices; "
                "under rules zero3 layers gather their weights from the master, and with it in "
                f"optimizer.offload they stream them from the host; use {','.join(known)}"
            )
            continue
        yield (
            f"optimizer.offload={words}: {part!r} is not a part of the state of the rule {name}, "
            f"which has {', '.join(known)}"
        )
    if len(set(optimizer.offload)) < len(optimizer.offload):
        yield f"optimizer.offload={words} names a part more than once; leave out the others"


def _flat_rows(rules: Rules) -> list[str]:
    """Returns the rows of the optimizer's column that shard flat vectors over a mesh axis."""
    return [
        row
        for row, entry in rules.column("optimizer").items()
        if row.rpartition("/")[2] == FLAT and entry is not None
    ]
