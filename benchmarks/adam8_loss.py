"""AdamW with 8-bit moments beside AdamW: gpt_tiny on the CPU, with equal seeds, text and
learning rate.

The text and its order depend on the seed alone, so that each row with 8-bit moments is compared
with AdamW's of its seed. A run that has ended in --runs is not repeated.
"""

from __future__ import annotations

import sys

from trained_runs import compare_rules

RULES = {"adamw": "adamw", "adamw8": "adamw8"}
"""What the table shows -> optimizer.rule."""


def main() -> int:
    return compare_rules(__doc__ or "", "adam8_loss", "8-bit moments beside AdamW", "rule", RULES)


if __name__ == "__main__":
    sys.exit(main())
