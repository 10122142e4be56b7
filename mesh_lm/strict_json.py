"""Reads JSON that this process did not write, and raises ValueError for whatever is wrong with it.

A thousand brackets are a RecursionError in `json.loads`, a long file is a MemoryError, and `[]`
where an object was expected is an AttributeError a few lines later. Files come from disks that fail
and from other people, and messages from whoever can connect.
"""

from __future__ import annotations

import json
import re
from itertools import accumulate
from pathlib import Path
from typing import Any, TypeVar

_Kind = TypeVar("_Kind", dict[str, Any], list[Any])
MESSAGE = 2**20
"""Size in bytes of a message."""
FILE = 2**26
"""Size in bytes of a file that describes something."""
LARGE_FILE = 2**29
"""Size in bytes of a file with a vocabulary (the largest known has 35 MB)."""
_DEPTH = 64
# It always matches from a quote, also where a string does not end, so that the search takes linear
# time.
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\\?\Z)', re.DOTALL)
_LEVELS = {ord("["): 1, ord("{"): 1, ord("]"): -1, ord("}"): -1}
"""Levels that a bracket opens."""
_OTHER_BYTES = bytes(byte for byte in range(256) if byte not in _LEVELS)


def loads(
    text: bytes | str, kind: type[_Kind] = dict, *, size: int = MESSAGE, depth: int = _DEPTH
) -> _Kind:
    """Returns the object (kind: dict) or the list (kind: list) that `text` spells.

    Raises ValueError if it is longer than `size` bytes, has more than `depth` levels (0: than
    Python can follow), does not fit into memory, or is not such JSON (json.JSONDecodeError where it
    is not JSON at all). The message has no part of the text.
    """
    if len(text) > size:
        raise ValueError(f"longer than {size} bytes")
    try:
        if depth and _depth(text) > depth:
            raise ValueError(f"nested deeper than {depth} levels")
        value = json.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    except MemoryError:
        raise ValueError("too large for this machine's memory") from None
    if not isinstance(value, kind):
        expected = "an object" if kind is dict else "a list"
        raise ValueError(f"expected {expected}, got {type(value).__name__}")
    return value


def read(path: Path, kind: type[_Kind] = dict, *, size: int = FILE, depth: int = _DEPTH) -> _Kind:
    """Returns the content of a file, as `loads` does. It stops reading after `size` bytes.

    Raises OSError, and ValueError as `loads`.
    """
    with open(path, "rb") as file:
        content = file.read(size + 1)
    if len(content) > size:
        raise ValueError(f"longer than {size} bytes")
    return loads(content.decode("utf-8-sig"), kind, size=size, depth=depth)


def _depth(text: bytes | str) -> int:
    """Returns the levels of brackets outside of strings. It takes about as long as parsing."""
    data = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
    brackets = _STRING.sub(b"", data).translate(None, _OTHER_BYTES)
    return max(accumulate(map(_LEVELS.__getitem__, brackets)), default=0)
