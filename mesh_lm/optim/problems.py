"""Wrong values of the section `optimizer`, and rules that its update rule cannot work with."""

from __future__ import annotations

import math
from collections.abc import Iterator

from mesh_lm.config import TrainConfig
from mesh_lm.errors import ConfigError
from mesh_lm.optim.contract import Rule
from mesh_lm.optim.optimizer import make_rule
from sharding_rules.rules import FLAT


def optimizer_problems(config: TrainConfig, rule: Rule | None) -> Iterator[str]:
    """Yields the problems. rule: the optimizer's if one was passed in; None: the rule that
    optimizer.name names.
    """
    optimizer = config.optimizer
    for name in ("beta1", "beta2", "momentum"):
        value = getattr(optimizer, name)
        if not 0 <= value < 1:
            yield f"optimizer.{name}={value} must be at least 0 and below 1"
    for name in ("final_fraction", "decay_fraction"):
        value = getattr(optimizer, name)
        if not 0 <= value <= 1:
            yield f"optimizer.{name}={value} must be a number in [0, 1]"
    for name in ("learning_rate", "weight_decay", "clip_norm"):
        value = getattr(optimizer, name)
        if not 0 <= value < math.inf:
            yield f"optimizer.{name}={value} must be a number of at least 0"
    # eps=0 gives 0 / 0 for zero gradients, such as those of padded rows.
    if not 0 < optimizer.eps < math.inf:
        yield f"optimizer.eps={optimizer.eps} must be above 0 and finite"
    try:
        is_elementwise = (rule or make_rule(optimizer)).elementwise
    except ConfigError as error:
        yield str(error)
        return
    if is_elementwise:
        return
    for row, entry in config.rules.column("optimizer").items():
        if row.rpartition("/")[2] == FLAT and entry is not None:
            yield (
                f"optimizer.name={optimizer.name} needs full matrices, but rules "
                f"{config.rules.name!r} store its state as flat vectors "
                f"(rules.optimizer[{row!r}]={entry!r}); use optimizer adamw or lion, or rules "
                "without that row, such as zero2"
            )
            return
