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
_SMALLEST_NORM = 1e-30


@dataclasses.dataclass(frozen=True)
class Optimizer:
    """theta <- theta - rate (direction + weight_decay theta), after the gradients are clipped to a
    global norm.
    """

    config: OptimizerConfig
    steps: int
    """Length of the learning-rate schedule."""
    custom_rule: Rule | None = None
    """A rule object that was passed in; None: the rule that optimizer.name names."""

    @cached_property
    def rule(self) -> Rule:
        """The update rule. Raises ConfigError as `make_rule` does."""
        return self.custom_rule or make_rule(self.config)

    def slots(self, leaves: ArraySpecs) -> dict[str, dict[str, ArraySpec]]:
        """Returns the optimizer state of parameters, see `Rule.slots`.

        Raises ConfigError for flat vectors if the rule is not elementwise.
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
        """Returns (updated parameters, updated slots).

        norm: global L2 norm of grads. step: int32, for the schedule. count: the number of earlier
        updates. leaves: the specs of the parameters.
        """
        config = self.config
        if config.clip_norm:
            # The floor is for a norm of 0, where the gradients are 0, too.
            scale = jnp.minimum(1.0, config.clip_norm / jnp.maximum(norm, _SMALLEST_NORM))
            grads = jax.tree.map(lambda g: g * scale, grads)
        directions, new_slots = self.rule.direction(
            grads, slots, params, count=count, leaves=leaves
        )
        rate = self.learning_rate(step)
        decayed_names = decayed(leaves)
        new_params: Params = {}
        for name, param in params.items():
            decay = config.weight_decay * param if name in decayed_names else 0
            new_params[name] = param - rate * (directions[name] + decay)
        return new_params, new_slots

    def learning_rate(self, step: jax.Array | int) -> jax.Array:
        """Returns the learning rate of step `step` (0, 1, ...), float32.

        It rises linearly from 0 during the warm-up, and then follows the schedule.
        """
        config = self.config
        final = config.final_fraction
        n_after_warmup = max(1, self.steps - config.warmup_steps)
        n_decay = min(n_after_warmup, max(1, int(config.decay_fraction * self.steps)))
        schedules = {
            "cosine": optax.cosine_decay_schedule(1.0, n_after_warmup, alpha=final),
            "linear": optax.linear_schedule(1.0, final, n_after_warmup),
            # Warm-up, stable, decay: constant until the last n_decay steps.
            "wsd": optax.linear_schedule(1.0, final, n_decay, n_after_warmup - n_decay),
            "constant": optax.constant_schedule(1.0),
        }
        warmup = optax.linear_schedule(0.0, 1.0, max(1, config.warmup_steps))
        schedule = optax.join_schedules([warmup, schedules[config.schedule]], [config.warmup_steps])
        # Step 0 already moves: its rate is the first after 0.
        factor = schedule(jnp.asarray(step) + 1)
        return jnp.asarray(config.learning_rate * factor, jnp.float32)


def make_rule(config: OptimizerConfig) -> Rule:
    """Returns the rule that optimizer.name names: one of RULES, module:class, or FILE.py:class.

    Raises ConfigError for an unknown name, a module that cannot be imported, and a class that does
    not implement `Rule`.
    """
    setting = f"optimizer.name={config.name}"
    path, colon, name = RULES.get(config.name, config.name).rpartition(":")
    if not colon:
        hint = did_you_mean(name, list(RULES))
        if not hint.endswith("?"):
            hint += ", or module:class for a custom one"
        raise ConfigError(f"{setting}: there is no such optimizer{hint}")
    module = files.imported(path, setting)
    if not hasattr(module, name):
        rules = [
            candidate
            for candidate, value in vars(module).items()
            if getattr(value, "__module__", "") == path and hasattr(value, "direction")
        ]
        hint = did_you_mean(name, rules) if rules else ""
        raise ConfigError(f"{setting}: {path!r} has no optimizer of the name {name!r}{hint}")
    return _checked_rule(getattr(module, name), config, setting)


def own_rule(config: OptimizerConfig, rule: Rule | type) -> tuple[OptimizerConfig, Rule]:
    """Returns (the config with the name of a custom rule, the rule), from the rule or its class.

    Raises ConfigError as `make_rule` does.
    """
    rule_class = rule if isinstance(rule, type) else type(rule)
    make = rule if isinstance(rule, type) else lambda config: rule
    name = f"{rule_class.__module__}:{rule_class.__qualname__}"
    checked = _checked_rule(make, config, f"optimizer={name}")
    return dataclasses.replace(config, name=name), checked


def _checked_rule(
    make: Callable[[OptimizerConfig], Any], config: OptimizerConfig, setting: str
) -> Rule:
    try:
        rule = make(config)
    except Exception as error:
        raise ConfigError(
            f"{setting}: cannot be made from the section optimizer "
            f"({type(error).__name__}: {error})"
        ) from error
    types = {"elementwise": bool, "slots": Callable, "direction": Callable}
    missing = [
        name for name, kind in types.items() if not isinstance(getattr(rule, name, None), kind)
    ]
    if missing:
        raise ConfigError(f"{setting}: lacks {', '.join(missing)}; implement mesh_lm.optim.Rule")
    return rule
