"""Trust before use: a kernel of ours runs in a process of its own, with a time limit, before a
program uses it on a GPU for the first time.

`verdict.py` has the decision, `store.py` the verdicts on disk, `trial.py` the process that is
started, `self_test.py` what runs in it.
"""

from pallas_kernels.trust.store import Store, gpu_here
from pallas_kernels.trust.trial import Trial
from pallas_kernels.trust.verdict import (
    VARIABLE,
    Kind,
    Verdict,
    assess,
    policy,
    settle,
    trusted,
    worst,
)

__all__ = [
    "VARIABLE",
    "Kind",
    "Store",
    "Trial",
    "Verdict",
    "assess",
    "gpu_here",
    "policy",
    "settle",
    "trusted",
    "worst",
]
