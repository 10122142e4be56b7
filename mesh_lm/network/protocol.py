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
    """Accepts lists of what `check` accepts. size: their length; -1: any."""
    return lambda value: (
        isinstance(value, list) and size in (-1, len(value)) and all(map(check, value))
    )


def mapping(key: Check, check: Check) -> Check:
    """Accepts objects whose keys and values the two accept."""
    return lambda value: (
        isinstance(value, dict) and all(key(name) and check(each) for name, each in value.items())
    )


def fields(known: Mapping[str, Check], *required: str) -> Check:
    """Accepts objects with the required fields, whose known fields are accepted. Unknown fields are
    ignored.
    """
    return lambda value: isinstance(value, dict) and not _wrong(value, known, required)


def require(message: Mapping[str, Any], known: Mapping[str, Check], *required: str) -> None:
    """Raises ValueError, which names the fields, if `fields` does not accept the message."""
    if wrong := _wrong(message, known, required):
        raise ValueError(f"fields that are missing or not as expected: {', '.join(wrong)}")


def _wrong(
    message: Mapping[str, Any], known: Mapping[str, Check], required: tuple[str, ...]
) -> list[str]:
    missing = [name for name in required if name not in message]
    return missing + [
        name for name, check in known.items() if name in message and not check(message[name])
    ]


_COUNT = whole(0, 2**31)
_INDEX = whole(0, 2**20)
_SIGNAL = whole(0, 64)
_SECONDS = mapping(text(32), number)
BEAT: Mapping[str, Check] = {
    "pid": _COUNT, "step": whole(), "phase": text(32), "since": number, "saved": whole(),
    "seconds": _SECONDS, "nodes": _COUNT,
}  # fmt: skip
"""A worker's heartbeat."""
_REPORTED = fields(BEAT | {"age": number}, "step", "phase", "since", "saved", "seconds", "age")
HELLO: Mapping[str, Check] = {
    "hello": text(16, "mesh_lm"), "node": whole(), "life": text(64), "host": text(255),
    "job": mapping(text(32), text(64)),
}  # fmt: skip
"""An agent's first message."""
_FINDING = fields(
    {"check": text(32), "outcome": text(7, "ok|failed|unknown"), "text": text(300)},
    "check",
    "outcome",
    "text",
)
REPORT: Mapping[str, Check] = {
    "generation": _COUNT, "beats": mapping(text(8, "[0-9]+"), _REPORTED),
    "died": items(items(whole(-255, 2**20), size=3)),
    "fewer": _INDEX, "ended": boolean, "silent": _INDEX, "seconds": number,
    "stop": text(16, "|".join(each.name for each in signal.Signals)), "at_once": boolean,
    "checked": _COUNT, "port": whole(1, 2**16 - 1), "gpus": whole(0, 2**12),
    "findings": items(_FINDING),
}  # fmt: skip
"""What else an agent says."""
ORDER: Mapping[str, Check] = {
    "start": _COUNT, "coordinator": text(300, r".+:\d{1,5}"), "count": _INDEX, "first": _INDEX,
    "nodes": _INDEX, "begun": _COUNT,
    "end": _COUNT, "schedule": items(lambda each: items(number, size=2)(each) and _SIGNAL(each[1])),
    "check": _COUNT, "exit": whole(0, 255), "refused": text(32), "fields": items(text(32)),
    "host": text(255),
}  # fmt: skip
"""What the controller says to an agent."""
START = ("start", "coordinator", "count", "first", "nodes", "begun")
"""The fields of an order to start."""
PRESENTED: Mapping[str, Check] = {
    "magic": text(16, "mesh_lm"), "count": whole(), "index": whole(), "host": text(255),
    "description": lambda value: isinstance(value, dict),
}  # fmt: skip
"""What a process says at the rendezvous."""
OUTCOME: Mapping[str, Check] = {
    "problem": lambda value: isinstance(value, str) and len(value) < 2**19,
    "absent": boolean,
}
"""What process 0 answers there."""
