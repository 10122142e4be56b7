"""The list of planted mistakes, as the .toml files have it."""

from __future__ import annotations

import dataclasses
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
KERNELS = "tests/pallas_kernels/test_kernel_mutations.py"
INTERPRETED = "test_a_fault_is_found_by_name"
COMPILED = "test_a_fault_that_only_hardware_has_is_found_in_what_is_compiled"


@dataclasses.dataclass(frozen=True)
class Mutation:
    """One planted mistake."""

    id: str
    file: str
    """Of the repository."""
    old: str
    """Is in the file exactly once."""
    new: str
    plants: str
    """The wrong behaviour, in one sentence."""
    tests: tuple[str, ...]
    """Ids of tests that must fail."""
    planted_by_test: bool = False
    """Whether the test plants it, and passes if it is found, as for kernels."""
    equivalent: str = ""
    """Why it is no mistake, for one that its test plants."""

    def place(self, root: Path) -> str:
        """Why it does not apply to the files below `root`, or nothing."""
        path = root / self.file
        times = path.read_text(encoding="utf-8").count(self.old) if path.is_file() else 0
        return (
            ""
            if times == 1
            else f"its old text is {times} times in {self.file}"
            if path.is_file()
            else f"there is no {self.file}"
        )


def load() -> list[Mutation]:
    """All, those in kernels last."""
    return [*load_texts(), *load_kernels()]


def load_texts() -> list[Mutation]:
    """Those whose text run.py replaces, in the order of the files and of the entries in them."""
    entries = [
        entry
        for path in sorted(Path(__file__).parent.glob("*.toml"))
        for entry in tomllib.loads(path.read_text(encoding="utf-8"))["mutation"]
    ]
    return [Mutation(**entry | {"tests": tuple(entry["tests"])}) for entry in entries]


def load_kernels() -> list[Mutation]:
    """Those that the tests in KERNELS plant."""
    path = (ROOT / KERNELS).with_name("kernel_mutations.toml")
    found = []
    for entry in (
        tomllib.loads(path.read_text(encoding="utf-8"))["mutation"] if path.exists() else []
    ):
        file = f"pallas_kernels/{entry.get('folder', 'attention/hopper')}/{entry['file']}"
        function = COMPILED if entry["runs"] == "compiled" else INTERPRETED
        test = f"{KERNELS}::{function}[{entry['id']}]"
        found.append(
            Mutation(
                f"kernels/{entry['id']}",
                file,
                "",
                "",
                entry["plants"],
                (test,),
                True,
                entry.get("equivalent", ""),
            )
        )
    return found
