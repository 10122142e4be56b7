"""The choice among the implementations of a kernel, the same for all kernels of this package.

Imports no kernel.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping

from pallas_kernels.trust.kind import Verdict


class Unsupported(ValueError):
    """Raised if the named implementation cannot serve a call; the message says why."""


@dataclasses.dataclass(frozen=True)
class Choice:
    """The implementation for a problem."""

    name: str
    rejected: Mapping[str, str]
    """The reasons against other implementations, by name."""


def trusted_choice(
    choice: Choice, verdict: Callable[[], Verdict], without: Callable[[str], Choice]
) -> Choice:
    """Returns `choice`, unless it is `mosaic` and has not passed its self-test.

    Args:
      verdict: judges the kernel, which may run the self-test (`pallas_kernels.trust`); called for
        `mosaic` only.
      without: a function from the reason against `mosaic` to the choice without it.
    """
    if choice.name != "mosaic":
        return choice
    judgement = verdict()
    if judgement.passed:
        return choice
    return without(judgement.reason)


def serving(
    function: str,
    implementation: str | None,
    implementations: Collection[str],
    *,
    choose: Callable[[], Choice],
    reason: Callable[[str], str | None],
) -> str:
    """Returns the name of the implementation that serves a call of `function`.

    Args:
      implementation: the one that the call names; None: that of `choose()` serves it.
      implementations: the names of all implementations.
      reason: a function from a name to why it cannot serve the call; None: it can.

    Raises:
      ValueError: the name is unknown.
      Unsupported: the named implementation cannot serve the call.
    """
    if implementation is None:
        return choose().name
    if implementation not in implementations:
        raise ValueError(
            f"{function}: implementation must be one of {', '.join(implementations)} or None, got "
            f"{implementation!r}"
        )
    unsupported = reason(implementation)
    if unsupported:
        raise Unsupported(
            f"{function}: implementation={implementation!r} cannot serve this call: {unsupported}"
        )
    return implementation
