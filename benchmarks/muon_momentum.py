"""Muon with two forms of momentum, optax's and its author's: gpt_tiny on the CPU, with equal seeds,
text and learning rate.

They differ in the first some hundred steps only (jordan_muon.py). The text and its order depend on
the seed alone, so that each row of the author's form is compared with optax's of its seed. A run
that has ended in --runs is not repeated.
"""

from __future__ import annotations

import sys
from pathlib import Path

from trained_runs import compare_rules

RULES = {
    "optax": "muon",
    "jordan": f"{Path(__file__).with_name('jordan_muon.py')}:JordanMuon",
}
"""The form of the momentum -> optimizer.rule."""


def main() -> int:
    return compare_rules(
        __doc__ or "", "muon_momentum", "Two forms of momentum in Muon", "momentum", RULES
    )


if __name__ == "__main__":
    sys.exit(main())
