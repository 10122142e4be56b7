"""What launchers and workers say to each other, checked field by field: no value of another type
gets past here.

A message that is not understood comes from another version of mesh_lm. Errors name the field, never
its value.
"""

from __future__ import annotations

import math
import re
import signal
from collections.abc import Callable, Mapping
from typing import Any

Check = Callable[[Any], bool]
_LARGEST = 2**53
_LONGEST_PROBLEM = 2**19
"""Characters of the outcome of a rendezvous; a message has at most 2^20 bytes."""


def whole(low: int = -_LARGEST, high: int = _LARGEST) -> Check:
    """Accepts integers from low to high. True and 1.0 are none."""
    return lambda value: type(value) is int and low <= value <= high


def number(value: Any) -> bool:
    """Accepts finite numbers."""
    return type(value) in (int, float) and -_LARGEST <= value <= _LARGEST and math.isfinite(value)


def boolean(value: Any) -> bool:
    """Accepts true and false."""
    return type(value) is bool


def text(longest: int, pattern: str = "") -> Check:
    """Accepts printable texts, so that no log shows anything but one line of them."""
    return lambda value: (
        isinstance(value, str)
        and len(value) <= longest
        and value.isprintable()
        and bool(re.fullmatch(pattern or ".*", value))
    )


def items(check: Check, *, size: int = -1) -> Check:
    """Accepts lists whose items `check` accepts. size: their length; -1: any."""
    return lambda value: (
        isinstance(value, list) and size in (-1, len(value)) and all(map(check, value))
    )


def mapping(key_check: Check, value_check: Check) -> Check:
    """Accepts objects whose keys and values the two accept."""
    return lambda value: (
        isinstance(value, dict)
        and all(map(key_check, value))
        and all(map(value_check, value.values()))
    )


def fields(checks: Mapping[str, Check], *required: str) -> Check:
    """Accepts objects with the required fields, whose values `checks` accept.

    Fields without a check are ignored.
    """
    return lambda value: isinstance(value, dict) and not _invalid_fields(value, checks, required)


def require(message: Mapping[str, Any], checks: Mapping[str, Check], *required: str) -> None:
    """Raises ValueError, which names the fields, if `fields` does not accept the message."""
    invalid = _invalid_fields(message, checks, required)
    if invalid:
        raise ValueError(f"fields that are missing or not as expected: {', '.join(invalid)}")


def _invalid_fields(
    message: Mapping[str, Any], checks: Mapping[str, Check], required: tuple[str, ...]
) -> list[str]:
    invalid = [name for name in required if name not in message]
    for name, check in checks.items():
        if name in message and not check(message[name]):
            invalid.append(name)
    return invalid


def _signal_at(value: Any) -> bool:
    """Accepts [seconds, number of a signal]."""
    return items(number, size=2)(value) and _SIGNAL(value[1])


_COUNT = whole(0, 2**31)
_INDEX = whole(0, 2**20)
_SIGNAL = whole(0, 64)
_SIGNAL_NAMES = "|".join(member.name for member in signal.Signals)
_SECONDS = mapping(text(32), number)
PREPARING = ("start", "data", "restore", "compile")
"""Phases before the first new step is done (`mesh_lm.distributed.phases`)."""
BEAT: Mapping[str, Check] = {
    "pid": _COUNT,
    "step": whole(),
    "phase": text(32),
    "since": number,
    "saved": whole(),
    "seconds": _SECONDS,
    "nodes": _COUNT,
}
"""A worker's heartbeat."""
_REPORTED = fields(BEAT | {"age": number}, "step", "phase", "since", "saved", "seconds", "age")
HELLO: Mapping[str, Check] = {
    "hello": text(16, "mesh_lm"),
    "node": whole(),
    "life": text(64),
    "host": text(255),
    "job": mapping(text(32), text(64)),
}
"""An agent's first message."""
_FINDING = fields(
    {"check": text(32), "outcome": text(7, "ok|failed|unknown"), "text": text(300)},
    "check",
    "outcome",
    "text",
)
REPORT: Mapping[str, Check] = {
    "generation": _COUNT,
    "beats": mapping(text(8, "[0-9]+"), _REPORTED),
    "died": items(items(whole(-255, 2**20), size=3)),
    "fewer": _INDEX,
    "ended": boolean,
    "silent": _INDEX,
    "seconds": number,
    "stop": text(16, _SIGNAL_NAMES),
    "at_once": boolean,
    "checked": _COUNT,
    "port": whole(1, 2**16 - 1),
    "gpus": whole(0, 2**12),
    "findings": items(_FINDING),
}
"""An agent's other messages."""
ORDER: Mapping[str, Check] = {
    "start": _COUNT,
    "coordinator": text(300, r".+:\d{1,5}"),
    "count": _INDEX,
    "first": _INDEX,
    "nodes": _INDEX,
    "begun": _COUNT,
    "end": _COUNT,
    "schedule": items(_signal_at),
    "check": _COUNT,
    "exit": whole(0, 255),
    "refused": text(32),
    "fields": items(text(32)),
    "host": text(255),
}
"""The controller's messages to an agent."""
START = ("start", "coordinator", "count", "first", "nodes", "begun")
"""The fields of an order to start."""
PRESENTED: Mapping[str, Check] = {
    "magic": text(16, "mesh_lm"),
    "count": whole(),
    "index": whole(),
    "host": text(255),
    "description": lambda value: isinstance(value, dict),
}
"""The message of a process at the rendezvous."""
OUTCOME: Mapping[str, Check] = {
    "problem": lambda value: isinstance(value, str) and len(value) < _LONGEST_PROBLEM,
    "absent": boolean,
}
"""The answer of process 0."""
