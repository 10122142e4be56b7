"""What all optimizers share: clipping, the learning-rate schedule, and decoupled weight decay."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import optax

from mesh_lm.config import OptimizerConfig, files
from mesh_lm.errors import ConfigError
from mesh_lm.optim.contract import ArraySpec, ArraySpecs, Params, Rule, Slots, decayed
from sharding_rules import did_you_mean

RULES = {
    "adamw": "mesh_lm.optim.adamw:AdamW",
    "muon": "mesh_lm.optim.muon:Muon",
    "lion": "mesh_lm.optim.lion:Lion",
    "adafactor": "mesh_lm.optim.adafactor:Adafactor",
}
"""optimizer.name -> module:class. A rule is constructed from the config's section `optimizer`."""


@dataclasses.dataclass(frozen=True)
class Optimizer:
    """theta <- theta - rate (direction + weight_decay theta), after the gradients are clipped to a
    global norm.
    """

    config: OptimizerConfig
    steps: int
    """Length of the learning-rate schedule."""
    own: Rule | None = None
    """A rule object that was passed in; None: the rule that optimizer.name names."""

    @cached_property
    def rule(self) -> Rule:
        """The update rule. Raises ConfigError as `make_rule` does."""
        return self.own or make_rule(self.config)

    def slots(self, leaves: ArraySpecs) -> dict[str, dict[str, ArraySpec]]:
        """The optimizer state of parameters, see `Rule.slots`. Raises ConfigError for flat vectors
        if the rule is not elementwise.
        """
        flat = [name for name, leaf in leaves.items() if leaf.form == "flat"]
        if flat and not self.rule.elementwise:
            raise ConfigError(
                f"optimizer.name={self.config.name} works on whole matrices, and {flat[0]} is kept "
                "as flat vectors"
            )
        return self.rule.slots(leaves)

    def update(
        self,
        grads: Params,
        norm: jax.Array,
        slots: Slots,
        params: Params,
        step: jax.Array,
        count: jax.Array,
        *,
        leaves: ArraySpecs,
    ) -> tuple[Params, Slots]:
        """(updated parameters, updated slots).

        norm: global L2 norm of grads; step: int32, for the schedule; count: number of earlier
        updates; leaves: of the parameters.
        """
        c = self.config
        if c.clip_norm:
            scale = jnp.minimum(1.0, c.clip_norm / jnp.maximum(norm, 1e-30))
            grads = jax.tree.map(lambda g: g * scale, grads)
        direction, after = self.rule.direction(grads, slots, params, count=count, leaves=leaves)
        rate, matrices = self.learning_rate(step), decayed(leaves)
        new = {
            name: p - rate * (direction[name] + (c.weight_decay * p if name in matrices else 0))
            for name, p in params.items()
        }
        return new, after

    def learning_rate(self, step: jax.Array | int) -> jax.Array:
        """The learning rate of step `step` (0, 1, ...): linear from 0 during the warm-up, then by
        the schedule.
        """
        c, warm = self.config, self.config.warmup_steps
        rest, end = max(1, self.steps - warm), self.config.final_fraction
        decay = min(rest, max(1, int(c.decay_fraction * self.steps)))
        shapes = {
            "cosine": optax.cosine_decay_schedule(1.0, rest, alpha=end),
            "linear": optax.linear_schedule(1.0, end, rest),
            "wsd": optax.linear_schedule(1.0, end, decay, rest - decay),
            "constant": optax.constant_schedule(1.0),
        }
        schedule = optax.join_schedules(
            [optax.linear_schedule(0.0, 1.0, max(1, warm)), shapes[c.schedule]], [warm]
        )
        return jnp.asarray(c.learning_rate * schedule(jnp.asarray(step) + 1), jnp.float32)


def make_rule(config: OptimizerConfig) -> Rule:
    """The rule that optimizer.name names: one of RULES, module:class, or FILE.py:class.

    Raises ConfigError for an unknown name, a module that cannot be imported, and a class that does
    not implement `Rule`.
    """
    what, where = f"optimizer.name={config.name}", RULES.get(config.name, config.name)
    path, colon, name = where.rpartition(":")
    if not colon:
        hint = did_you_mean(name, list(RULES))
        raise ConfigError(
            f"{what}: no such optimizer{hint}"
            + ("" if hint.endswith("?") else ", or module:class for a custom one")
        )
    module = files.imported(path, what)
    if not hasattr(module, name):
        rules = [
            each
            for each, value in vars(module).items()
            if getattr(value, "__module__", "") == path and hasattr(value, "direction")
        ]
        raise ConfigError(
            f"{what}: {path!r} has no {name!r}{did_you_mean(name, rules) if rules else ''}"
        )
    return _checked_rule(getattr(module, name), config, what)


def own_rule(config: OptimizerConfig, given: Rule | type) -> tuple[OptimizerConfig, Rule]:
    """(the config with the name of a custom rule, the rule). given: the rule or its class. Raises
    ConfigError as `make_rule` does.
    """
    rule_class = given if isinstance(given, type) else type(given)
    name = f"{rule_class.__module__}:{rule_class.__qualname__}"
    rule = _checked_rule(
        given if isinstance(given, type) else lambda config: given, config, f"optimizer={name}"
    )
    return dataclasses.replace(config, name=name), rule


def _checked_rule(
    make: Callable[[OptimizerConfig], Any], config: OptimizerConfig, what: str
) -> Rule:
    try:
        instance = make(config)
    except Exception as error:
        raise ConfigError(
            f"{what}: cannot be made from the section optimizer ({type(error).__name__}: {error})"
        ) from error
    fits = {"elementwise": bool, "slots": Callable, "direction": Callable}
    if lacks := [
        each for each, kind in fits.items() if not isinstance(getattr(instance, each, None), kind)
    ]:
        raise ConfigError(f"{what}: lacks {', '.join(lacks)}; implement mesh_lm.optim.Rule")
    return instance
