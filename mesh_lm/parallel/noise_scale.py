"""The gradient noise scale (McCandlish et al., arXiv 1812.06162): the batch, in sequences, above
which more sequences hardly improve a step's gradient.

B_simple = tr(S) / |G|^2, where G is the gradient of the true loss, and S the covariance of the
gradient of one sequence. Both follow from the norms of gradients of two batches (appendix A.1): of
the global batch, which a step has anyway, and of the part of one replica, before gradients are
summed over replicas. So a program without replicas that sum their gradients lacks one of them.
"""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp

from mesh_lm.model import Sums
from mesh_lm.parallel.layout import ModelLayout, Params
from sharding_rules import ISLAND, Rules, axes_of

REPLICA_SQUARE = "replica_square"
"""The scalar among a step's sums: the squared norms of all replicas' gradients, each the replica's
part of the sum that is the gradient of the global batch."""
TRACE = "noise_trace"
"""The metric that estimates tr(S), without bias."""
SIGNAL = "noise_signal"
"""The metric that estimates |G|^2, without bias; it may be negative."""


def replica_axes(rules: Rules) -> frozenset[str]:
    """Returns the mesh axes over which the engine sums gradients of different sequences."""
    return rules.manual_axes() & frozenset(axes_of(rules.activations["batch"])) - {ISLAND}


def n_replicas(layout: ModelLayout) -> int:
    """Returns the number of replicas, of an island if there are islands."""
    size = 1
    for axis in replica_axes(layout.shard.rules):
        size *= layout.shard.mesh.shape.get(axis, 1)
    return size


def with_replica_square(sums: Sums, grads: Params) -> Sums:
    """Returns this device's sums with the squared norm of its gradients, which are not summed over
    replicas yet. It is summed over replicas with the other scalars: the metric's only collective,
    but for axes such as tensor, over which XLA adds up the squares of a sharded gradient.
    """
    # Not a dot product, whose flat vectors XLA would gather along axes such as tensor.
    squares = [jnp.sum(jnp.square(grad)) for grad in grads.values()]
    return {**sums, REPLICA_SQUARE: jnp.sum(jnp.stack(squares))}


def estimates(
    replica_square: jax.Array, grad_norm: jax.Array, n_sequences: int, replicas: int
) -> Mapping[str, jax.Array]:
    """Returns the metrics TRACE and SIGNAL of one step.

    Args:
      replica_square: as in a step's sums, over all replicas.
      grad_norm: of the global batch.
      n_sequences: of the global batch; each of the replicas has the same number, and its sequences
        are expected to have as many labels as those of the others.
      replicas: at least 2.
    """
    large = grad_norm**2
    # A replica's own gradient is `replicas` times its part of the sum; the mean of their squares.
    small = replicas * replica_square
    trace = (small - large) * n_sequences / (replicas - 1)
    signal = (replicas * large - small) / (replicas - 1)
    return {TRACE: trace, SIGNAL: signal}
