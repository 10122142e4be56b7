"""Trust before use: a kernel of ours is tested before a program first uses it on a GPU.

The test runs in a process of its own, with a time limit. `verdict.py` has the decision, `store.py`
the verdicts on disk, `trial.py` starts the process, and `self_test.py` is its program.
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
