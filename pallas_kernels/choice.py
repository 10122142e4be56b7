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
    """The implementation for a problem, with the reasons why others cannot serve it."""

    name: str
    rejected: Mapping[str, str]


def trusted_choice(
    choice: Choice, verdict: Callable[[], Verdict], without: Callable[[str], Choice]
) -> Choice:
    """`choice`, unless it is `mosaic` and has not passed its self-test: then `without(the reason)`.

    verdict: judges the kernel, which may run the self-test (`pallas_kernels.trust`); called for
    `mosaic` only.
    """
    if choice.name != "mosaic" or (judged := verdict()).passed:
        return choice
    return without(judged.reason)


def serving(
    function: str,
    implementation: str | None,
    known: Collection[str],
    *,
    choose: Callable[[], Choice],
    reason: Callable[[str], str | None],
) -> str:
    """The name of the implementation that serves a call: the one that it names, else that of
    `choose()`.

    reason: why an implementation cannot serve the call; None: it can.

    Raises ValueError for an unknown name, `Unsupported` for an implementation that cannot serve the
    call; both name the function.
    """
    if implementation is None:
        return choose().name
    if implementation not in known:
        raise ValueError(
            f"{function}: implementation must be one of {', '.join(known)} or None, got "
            f"{implementation!r}"
        )
    if why := reason(implementation):
        raise Unsupported(
            f"{function}: implementation={implementation!r} cannot serve this call: {why}"
        )
    return implementation
