"""The decision whether a kernel of ours may be used in this process."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable
from typing import Literal, cast, get_args

import jax

from pallas_kernels.trust.kind import Kind, Verdict, worst
from pallas_kernels.trust.store import Store
from pallas_kernels.trust.trial import Trial

__all__ = ["VARIABLE", "Kind", "Verdict", "assess", "policy", "settle", "trusted", "worst"]

VARIABLE = "MESH_LM_TRUST_KERNELS"
Policy = Literal["test", "always", "never"]
_settled: dict[Kind, Verdict] = {}
"""What this process has decided. A kernel that was traced once must be chosen again when it is
traced for the second time."""


def policy() -> Policy:
    """The value of the environment variable: test each kind before its first use (the default),
    always trust ours, or never use them.

    Raises ValueError for any other value.
    """
    value = os.environ.get(VARIABLE) or "test"
    if value not in get_args(Policy):
        raise ValueError(f"{VARIABLE} must be one of {', '.join(get_args(Policy))}, got {value!r}")
    return cast(Policy, value)


def assess(kind: Kind, store: Store | None = None, trial: Trial | None = None) -> Verdict:
    """The verdict on a kind on this machine's GPU: by the policy, else the one on disk, else from a
    self-test, whose verdict is kept.
    """
    chosen, store, trial = policy(), store or Store(), trial or Trial()
    if chosen != "test":
        return Verdict("passed" if chosen == "always" else "untested", f"{VARIABLE}={chosen}")
    if known := store.get(kind):
        return known
    with store.alone(trial.longest):
        if known := store.get(kind):  # from the process that had the lock
            return known
        return store.put(kind, *trial(kind))


def settle(verdicts: Iterable[tuple[Kind, Verdict]]) -> None:
    """Makes `trusted` answer with these verdicts in this process."""
    _settled.update(verdicts)


def trusted(kind: Kind, store: Store | None = None, trial: Trial | None = None) -> Verdict:
    """The verdict on a kind, the same each time in this process. The first call may take minutes:
    it may run a self-test, and then warns of a failure.

    In a run of several processes, all must choose the same kernels, and none can ask the others
    while a program is traced. So only those verdicts count that were settled at the start.
    """
    if kind not in _settled:
        if policy() == "test" and jax.process_count() > 1:
            verdict = Verdict(
                "untested",
                (
                    "a run of several processes tests kernels at its start only, and did not "
                    "foresee this kind"
                ),
            )
        else:
            verdict = assess(kind, store, trial)
        _settled[kind] = verdict
        if text := warning(kind, verdict):
            warnings.warn(text, RuntimeWarning, stacklevel=2)
    return _settled[kind]


def warning(kind: Kind, verdict: Verdict) -> str:
    """The warning about a verdict, with how to report a failure; empty if the kernel may be used,
    or the user wants it that way.
    """
    if verdict.passed or verdict.reason.startswith(VARIABLE):
        return ""
    if verdict.status == "untested":
        return (
            f"our {kind.family} kernel is not used, because it has not passed its self-test on "
            f"this GPU: {verdict.reason}"
        )
    text = (
        f"our {kind.family} kernel failed its self-test on this GPU and is not used: "
        f"{verdict.reason}"
    )
    about = (
        f"the file {verdict.report}"
        if verdict.report
        else f"this line, the GPU and its driver, and kind {kind.facts}"
    )
    text += f". Please report it as an issue of mesh_lm, with {about}."
    return text + (" Delete the file to run the test again." if verdict.report else "")
