"""The error that a user's mistake raises. In a module of its own, so that worker processes can raise it without importing JAX."""

from __future__ import annotations

from collections.abc import Sequence

_SHOWN = 8


class ConfigError(ValueError):
    """A mistake in what the user asked for. Its text is the whole message; the program prints it and exits with status 1."""


def listed(head: str, lines: Sequence[str]) -> str:
    """Returns `head`, the first few of `lines` as a list, and how many more there are."""
    more = [f"and {len(lines) - _SHOWN} more"] if len(lines) > _SHOWN else []
    return "\n  - ".join([head, *lines[:_SHOWN], *more])


def did_you_mean(near: list[str]) -> str:
    """Returns the end of a message that suggests names; empty without any."""
    return f"; did you mean {' or '.join(near)}?" if near else ""
