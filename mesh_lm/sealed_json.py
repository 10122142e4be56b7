"""JSON files that hold a SHA-256 of their own content, by which a change is noticed.

A disk that flips a digit leaves valid JSON. Files of older versions have no digest and are read as
they are.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from mesh_lm import strict_json

_SEAL = "sha256"


def sealed(content: dict[str, Any]) -> dict[str, Any]:
    """Returns the content with its digest, to be written as JSON."""
    return content | {_SEAL: _digest(content)}


def read(path: Path) -> dict[str, Any]:
    """Returns the content without its digest.

    Raises OSError, and ValueError if it is not JSON, or not as it was written.
    """
    content = strict_json.read(path)
    digest = content.pop(_SEAL, None)
    if digest is not None and digest != _digest(content):
        raise ValueError("it is not as it was written (SHA-256)")
    return content


def _digest(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
