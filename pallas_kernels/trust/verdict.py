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
"""The decisions of this process. A kernel that was traced once must be chosen again when it is
traced for the second time."""


def policy() -> Policy:
    """The value of the environment variable `VARIABLE`. Raises ValueError for an unknown one.

    It means: test each kind before its first use (the default), always trust our kernels, or never
    use them.
    """
    value = os.environ.get(VARIABLE) or "test"
    if value not in get_args(Policy):
        raise ValueError(
            f"{VARIABLE} must be unset or one of {', '.join(get_args(Policy))}, got {value!r}"
        )
    return cast(Policy, value)


def assess(kind: Kind, store: Store | None = None, trial: Trial | None = None) -> Verdict:
    """The verdict on a kind on this machine's GPU.

    It is that of the policy, else the one on disk, else that of a self-test, which is then stored.
    """
    chosen = policy()
    store = store or Store()
    trial = trial or Trial()
    if chosen == "always":
        return Verdict("passed", f"{VARIABLE}={chosen}")
    if chosen == "never":
        return Verdict("untested", f"{VARIABLE}={chosen}")

    stored = store.get(kind)
    if stored:
        return stored
    with store.alone(trial.longest):
        # The process that had the lock may have stored one.
        stored = store.get(kind)
        if stored:
            return stored
        verdict, output = trial(kind)
        return store.put(kind, verdict, output)


def settle(verdicts: Iterable[tuple[Kind, Verdict]]) -> None:
    """Makes `trusted` answer with these verdicts in this process."""
    _settled.update(verdicts)


def trusted(kind: Kind, store: Store | None = None, trial: Trial | None = None) -> Verdict:
    """The verdict on a kind, the same each time in this process.

    The first call may take minutes: it may run a self-test, and then warns of a failure.

    In a run of several processes, all must choose the same kernels, and none can ask the others
    while a program is traced. So only those verdicts count that were settled at the start.
    """
    if kind in _settled:
        return _settled[kind]
    if policy() == "test" and jax.process_count() > 1:
        verdict = Verdict(
            "untested",
            "a run of several processes tests kernels at its start only, and did not foresee this "
            "kind",
        )
    else:
        verdict = assess(kind, store, trial)
    _settled[kind] = verdict
    text = warning(kind, verdict)
    if text:
        warnings.warn(text, RuntimeWarning, stacklevel=2)
    return verdict


def warning(kind: Kind, verdict: Verdict) -> str:
    """The warning about a verdict, with how to report a failure.

    It is empty if the kernel may be used, or if the policy excludes it.
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
        f"{verdict.reason}. Please report it as an issue of mesh_lm, with "
    )
    if verdict.report:
        return text + f"the file {verdict.report}. Delete the file to run the test again."
    return text + f"this line, the GPU and its driver, and kind {kind.facts}."
