"""Ranges on a command line: numbers of GPUs, as 8..16384, and sizes of models, as 1b..1t."""

from __future__ import annotations

import re
from collections.abc import Sequence

from mesh_lm.errors import ConfigError

_RANGE = ".."
_COUNT = re.compile(r"[1-9][\d_]*")
_SIZE = re.compile(r"(\d+(?:\.\d+)?)([mbt])", re.IGNORECASE)
_UNITS = {"m": 1e6, "b": 1e9, "t": 1e12}
_MANTISSAS = (1, 3)
"""The sizes of a range in each power of ten, besides its ends."""
_MOST_GPUS = 2**20
_SMALLEST = 3e8
_LARGEST = 1e13


def gpu_counts(text: str, option: str, known: Sequence[int] = ()) -> list[int]:
    """Returns numbers of GPUs, ascending.

    Args:
      text: "8..64": 8, 16, 32 and 64, doubled from the first, and the last in any case. "96,144":
        these.
      option: the name of the option, for errors.
      known: numbers of which a range takes those that it contains, in place of doubled ones; empty:
        none.

    Raises ConfigError for any other text.
    """
    first_word, dots, last_word = text.partition(_RANGE)
    if not dots:
        return sorted({_count(word, text, option) for word in text.split(",")})
    first = _count(first_word, text, option)
    last = _count(last_word, text, option)
    if first > last:
        raise ConfigError(f"{option}={text}: these numbers of GPUs fall; write {last}..{first}")
    inside = [n for n in known if first <= n <= last]
    if inside:
        return sorted(set(inside))
    counts = []
    n = first
    while n < last:
        counts.append(n)
        n *= 2
    return [*counts, last]


def _count(word: str, text: str, option: str) -> int:
    if not _COUNT.fullmatch(word):
        raise ConfigError(
            f"{option}={text}: expected a range of GPUs, as 8..64, or numbers, as 96,144,288"
        )
    n = int(word)
    if n > _MOST_GPUS:
        raise ConfigError(f"{option}={text}: the GPUs of a study are at most {_MOST_GPUS:,}")
    return n


def model_sizes(text: str, option: str) -> list[float]:
    """Returns numbers of parameters, ascending.

    text: "1b..1t": 1, 3, 10, 30 billion and so on, and both ends. "7b,70b": these. Units are m, b
    and t. option: the name of the option, for errors.

    Raises ConfigError for any other text, and for models below 0.3 or above 10,000 billion.
    """
    first_word, dots, last_word = text.partition(_RANGE)
    if not dots:
        return sorted({_size(word, text, option) for word in text.split(",")})
    first = _size(first_word, text, option)
    last = _size(last_word, text, option)
    if first > last:
        raise ConfigError(
            f"{option}={text}: these sizes of models fall; write {last_word}..{first_word}"
        )
    between = []
    for exponent in range(8, 14):
        for mantissa in _MANTISSAS:
            size = mantissa * 10.0**exponent
            if first < size < last:
                between.append(size)
    return sorted({first, *between, last})


def _size(word: str, text: str, option: str) -> float:
    match = _SIZE.fullmatch(word)
    if not match:
        raise ConfigError(
            f"{option}={text}: expected a range of sizes, as 1b..1t, or sizes, as 7b,70b"
        )
    size = float(match[1]) * _UNITS[match[2].lower()]
    if not _SMALLEST <= size <= _LARGEST:
        raise ConfigError(f"{option}={text}: expected models of 300m to 10t parameters")
    return size


def size_word(n_params: float) -> str:
    """Returns a number of parameters as it is typed: 1b, 1.75b, 1t."""
    for unit in ("t", "b"):
        if n_params >= _UNITS[unit]:
            return f"{n_params / _UNITS[unit]:.3g}{unit}"
    return f"{n_params / _UNITS['m']:.3g}m"
