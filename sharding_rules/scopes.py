"""Named scopes that a model and the lab share: `jax.named_scope(EXTRA_ROUND)`.

JAX writes them into the compiled program, in which the lab finds them again.
"""

from __future__ import annotations

EXPERTS = "experts"
"""Around a layer's mixture of experts: the router, the exchange of tokens, and the experts."""

EXTRA_ROUND = "extra_round"
"""Directly around the `lax.cond` of a further round of an exchange.

With balanced routing all tokens are exchanged in the first round, and no other round runs. The lab
counts such a conditional with a probability.
"""
