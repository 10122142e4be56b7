"""What all optimizers share: clipping, the learning-rate schedule, and decoupled weight decay."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from mesh_lm.errors import ConfigError
from mesh_lm.optim.config import DilocoConfig, OptimizerConfig
from mesh_lm.optim.contract import ArraySpec, ArraySpecs, Params, Slots, decayed
from mesh_lm.optim.rules import rule_name

_SMALLEST_NORM = 1e-30


@dataclasses.dataclass(frozen=True)
class Optimizer:
    """theta <- theta - rate (direction + weight_decay theta), after the gradients are clipped to a
    global norm.
    """

    config: OptimizerConfig
    steps: int
    """Length of the learning-rate schedule."""
    diloco: DilocoConfig = DilocoConfig()
    """The outer step of islands; without them nothing."""

    @property
    def updates_by_layer(self) -> bool:
        """Whether layers are updated one after another, so that what an update needs besides the
        state is that of one layer.
        """
        return bool(self.config.offload) or getattr(self.config.rule, "by_layer", False)

    def slots(self, leaves: ArraySpecs) -> dict[str, dict[str, ArraySpec]]:
        """Returns the optimizer state of parameters, see `Rule.slots`.

        Raises ConfigError for flat vectors if the rule is not elementwise.
        """
        flat = [name for name, leaf in leaves.items() if leaf.form == "flat"]
        rule = self.config.rule
        if flat and not rule.elementwise:
            raise ConfigError(
                f"optimizer.rule={rule_name(rule)} works on whole matrices, and {flat[0]} is kept "
                "as flat vectors"
            )
        return rule.slots(leaves)

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
        directions, new_slots = config.rule.direction(
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
        import optax  # here, so that configs load without it

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
