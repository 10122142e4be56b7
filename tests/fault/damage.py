"""Random damage to files, and what became of it: refused, recovered, without effect, or one of the
two that must never happen."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import random
import shutil
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from mesh_lm.errors import ConfigError

MUST_NOT = ("silent", "traceback")
OUTCOMES = ("refused", "recovered", "no effect", *MUST_NOT)
HOW = (
    "flip",
    "flips",
    "digit",
    "zeros",
    "garbage",
    "truncate",
    "delete",
    "empty",
    "swap",
    "insert",
    "append",
)


def damage(files: Sequence[Path], chance: random.Random) -> str:
    """Damages one of these files in one of eleven ways, until it has changed. Returns what was
    done, for a message."""
    while True:
        path, how = chance.choice(files), chance.choice(HOW)
        before = path.read_bytes()
        if _damaged(path, how, before, files, chance) and not (
            path.exists() and path.read_bytes() == before
        ):
            return f"{how} of {path.name}"


def _damaged(
    path: Path, how: str, before: bytes, files: Sequence[Path], chance: random.Random
) -> bool:
    content, start = bytearray(before), chance.randrange(len(before) + 1)
    length = min(len(before) - start, chance.choice((1, 16, 512)))
    match how:
        case "flip" | "flips":
            for _ in range((1 if how == "flip" else chance.randrange(2, 64)) if before else 0):
                content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
        case "digit":  # which leaves JSON, and Python, that mean something else
            if not (places := [i for i, byte in enumerate(content) if 48 <= byte <= 57]):
                return False
            place = chance.choice(places)
            content[place] = 48 + (content[place] - 48 + chance.randrange(1, 10)) % 10
        case "zeros":
            content[start : start + length] = bytes(length)
        case "garbage":
            content[start : start + length] = chance.randbytes(length)
        case "truncate":
            del content[start:]
        case "delete":
            path.unlink()
            return True
        case "empty":
            content.clear()
        case "swap":
            other = chance.choice(files)
            path.write_bytes(other.read_bytes())
            other.write_bytes(before)
            return other != path
        case "insert":
            content[start:start] = chance.randbytes(chance.choice((1, 16, 512)))
        case _:
            content += chance.randbytes(chance.choice((1, 16, 512)))
    path.write_bytes(content)
    return True


@dataclasses.dataclass
class Target:
    """Files of one kind, and a reader of them."""

    root: Path
    """The directory in which the reader expects all that it needs."""
    files: Callable[[], Sequence[Path]]
    """Returns those to damage."""
    read: Callable[[], Any]
    """Returns what the reader makes of them."""
    right: Callable[[Any, str], bool]
    """Whether that is what was written or, if what was printed (the second argument) says so, what
    an earlier or a new writer made."""
    says: str
    """Words that are printed where something was damaged."""

    def attacked(self, n: int, seed: str) -> tuple[Counter[str], list[str]]:
        """Damages a fresh copy n times. Returns how often each outcome came, and descriptions of
        those that must never come."""
        good, count, bad = self.root.with_name(f"{self.root.name}-good"), Counter(), []
        shutil.copytree(self.root, good)
        assert self._outcome() == ("no effect", ""), (
            "the reader finds something wrong with files that are right"
        )
        for number in range(n):
            shutil.rmtree(self.root)
            shutil.copytree(good, self.root)
            what = damage(self.files(), random.Random(f"{seed} {number}"))
            outcome, why = self._outcome()
            count[outcome] += 1
            if outcome in MUST_NOT:
                bad.append(f"{seed} {number}, {what}: {outcome}: {why}")
        return count, bad

    def _outcome(self) -> tuple[str, str]:
        printed = io.StringIO()
        try:
            with contextlib.redirect_stdout(printed):
                found = self.read()
        except ConfigError as error:
            return (
                ("refused", "")
                if str(error).strip()
                else ("traceback", "an error without a message")
            )
        except Exception as error:
            return "traceback", "".join(traceback.format_exception(error))[-1500:]
        said = self.says in printed.getvalue() if self.says else False
        if not self.right(found, printed.getvalue() if said else ""):
            return "silent", f"{str(found)[:300]} {printed.getvalue()[:300]}"
        return "recovered" if said else "no effect", ""
