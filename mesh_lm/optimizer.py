"""AdamW with clipping and a schedule: optax does the arithmetic, the state is plain dicts."""

from __future__ import annotations

import dataclasses
from collections.abc import Container, Mapping, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import optax

from mesh_lm.blueprint import Params
from mesh_lm.config import OptimizerConfig

Moments = dict[str, Params]
"""{"mu": first moments, "nu": second moments}, each keyed and shaped like the parameters, fp32."""

UNDECAYED = ("bias", "scale", "sinks")
"""Last parts of the names of parameters that are not decayed, whatever their shape."""


@dataclasses.dataclass(frozen=True)
class AdamW:
    """theta <- theta - lr (m_hat / (sqrt(v_hat) + eps) + weight_decay theta), after the gradients are clipped to a global norm."""

    config: OptimizerConfig
    steps: int
    """Length of the schedule."""

    def init(self, params: Params) -> Moments:
        state = cast(optax.ScaleByAdamState, self._adam().init(params))
        return {"mu": cast(Params, state.mu), "nu": cast(Params, state.nu)}

    def update(
        self, grads: Params, norm: jax.Array, moments: Moments, params: Params, step: jax.Array, count: jax.Array, *,
        decayed: Container[str],
    ) -> tuple[Params, Moments]:  # fmt: skip
        """New parameters and moments.

        norm: global L2 norm of grads; step: int32, for the schedule; count: updates made so far; decayed: names, see `decayed`.
        """
        c = self.config
        if c.clip_norm:
            scale = jnp.minimum(1.0, c.clip_norm / jnp.maximum(norm, 1e-30))
            grads = jax.tree.map(lambda g: g * scale, grads)
        adam = optax.ScaleByAdamState(count, cast(Any, moments["mu"]), cast(Any, moments["nu"]))
        direction, after = cast(tuple[Params, optax.ScaleByAdamState], self._adam().update(cast(Any, grads), adam))
        rate = self.learning_rate(step)
        new = {name: p - rate * (direction[name] + (c.weight_decay * p if name in decayed else 0)) for name, p in params.items()}
        return new, {"mu": cast(Params, after.mu), "nu": cast(Params, after.nu)}

    def learning_rate(self, step: jax.Array | int) -> jax.Array:
        """At the update made by step number `step` (0, 1, ...): linear from 0 over the warm-up, then the schedule."""
        c, warm = self.config, self.config.warmup_steps
        rest, end = max(1, self.steps - warm), self.config.final_fraction
        decay = min(rest, max(1, int(c.decay_fraction * self.steps)))
        shapes = {
            "cosine": optax.cosine_decay_schedule(1.0, rest, alpha=end),
            "linear": optax.linear_schedule(1.0, end, rest),
            "wsd": optax.linear_schedule(1.0, end, decay, rest - decay),
            "constant": optax.constant_schedule(1.0),
        }
        schedule = optax.join_schedules([optax.linear_schedule(0.0, 1.0, max(1, warm)), shapes[c.schedule]], [warm])
        return jnp.asarray(c.learning_rate * schedule(jnp.asarray(step) + 1), jnp.float32)

    def _adam(self) -> optax.GradientTransformation:
        return optax.scale_by_adam(self.config.beta1, self.config.beta2, self.config.eps)


def decayed(axes: Mapping[str, Sequence[str | None]]) -> frozenset[str]:
    """The parameters, of all with their logical axes, that weight decay applies to: matrices only. A stack of vectors is none."""
    return frozenset(
        name for name, each in axes.items() if len(each) - ("layers" in each) > 1 and name.rsplit(".", 1)[-1] not in UNDECAYED
    )  # fmt: skip
