"""Text that a tokenizer does not encode: how much of it is tolerated, and the words that say so.

Bits per byte divide by bytes of text. A tokenizer without the whole alphabet drops characters, and
a model that never had to predict them must not be credited with them: only the bytes that tokens
spell are counted (`Tokenizer.lost_bytes` counts the others).
"""

from __future__ import annotations

import math

from mesh_lm.errors import ConfigError

TOLERATED = 0.01
"""Default of the settings `max_lost_bytes`. Up to one byte in a hundred, the bits per byte of two
models on the same file still differ by less than 1% for this reason; models are compared by
differences of some per cent."""


def described(lost: int, n_bytes: int) -> str:
    """Returns words for a log, such as "the tokenizer loses 3 of 400 bytes of text (0.75%)".

    They are "" if nothing is lost.
    """
    if not lost:
        return ""
    return f"the tokenizer loses {lost:,} of {n_bytes:,} bytes of text ({lost / n_bytes:.2%})"


def require_fraction(limit: float, setting: str) -> None:
    """Raises ConfigError for a limit that is no fraction, such as a percentage."""
    if not 0 <= limit <= 1:
        raise ConfigError(
            f"{setting}={limit:g} must be a fraction of the text's bytes, in [0, 1], such as "
            f"{TOLERATED}"
        )


def refuse(lost: int, n_bytes: int, limit: float, setting: str = "") -> None:
    """Raises ConfigError if more than the fraction `limit` of the text is lost.

    setting: the option that has the limit, if there is one.
    """
    if lost > limit * n_bytes:
        alternative = ""
        if setting:
            fraction = math.ceil(100 * lost / n_bytes) / 100
            alternative = f"; or accept the loss with {setting}={fraction:g}"
        raise ConfigError(
            f"{described(lost, n_bytes)}, and at most {100 * limit:.3g}% of them may be lost: it "
            "has no tokens for some characters, or rewrites them. Use a byte-level tokenizer with "
            f"the whole alphabet, or one with byte fallback, which lose nothing{alternative}"
        )
