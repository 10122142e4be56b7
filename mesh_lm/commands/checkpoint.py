"""Looks at the checkpoints of a run from outside: no mesh, no GPU and none of the model's code is
needed.

mesh-lm checkpoint ls runs/gpt_tiny      lists them by their descriptions; reads no arrays
mesh-lm checkpoint verify runs/gpt_tiny  reads every array, and compares digests with the saved ones
mesh-lm checkpoint diff runs/a runs/b    shows how config, parameters and arrays of two differ

A path is a run's output, its `checkpoints`, or one step there. Status: 0 everything is intact, or
the arrays are the same bits; 1 a checkpoint is damaged (for ls: its description is), or arrays
differ; 2 the command cannot be carried out.
"""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from mesh_lm.commands.options import command, subcommand
from mesh_lm.errors import ConfigError

if TYPE_CHECKING:
    from mesh_lm.checkpoint.listing import CheckpointEntry

_DAMAGED = 1
_DIFFERENT = 1
_CANNOT = 2


@dataclasses.dataclass(frozen=True)
class Ls:
    """Lists what is there, oldest first. Only descriptions are read; `verify` reads the arrays.

    The status is 1 if the description of a step is damaged or missing, and 2 if there is no
    checkpoint.
    """

    POSITIONAL: ClassVar[tuple[str, ...]] = ("path",)

    path: str
    """A run's output, its `checkpoints`, or one step there."""


@dataclasses.dataclass(frozen=True)
class Verify:
    """Reads every array of every checkpoint, a part at a time, and compares its digest with the
    saved one.

    A checkpoint that was put aside is verified where it is named.
    The status is 0 if all are intact, 1 if one is damaged, and 2 if there is none.
    """

    POSITIONAL: ClassVar[tuple[str, ...]] = ("path",)

    path: str
    """A run's output, its `checkpoints`, or one step there."""
    step: str = ""
    """Only this one, as in 500 or 500.damaged; empty: all."""


@dataclasses.dataclass(frozen=True)
class Diff:
    """How two checkpoints differ: config, position in the data, arrays. Status: 0 all arrays have
    the same bits, 1 they differ.

    Differences in the config and in the position in the data are printed, and do not change the
    status.
    """

    POSITIONAL: ClassVar[tuple[str, ...]] = ("a", "b")

    a: str
    """A run's output (its newest step), its `checkpoints`, or one step there."""
    b: str
    """The same, of the other."""


COMMANDS: dict[str, type[Ls] | type[Verify] | type[Diff]] = {
    "ls": Ls,
    "verify": Verify,
    "diff": Diff,
}


def parse(argv: Sequence[str], prog: str = "mesh-lm checkpoint") -> Ls | Verify | Diff:
    """Raises ConfigError, and SystemExit after printing the help."""
    name = subcommand(argv, prog, COMMANDS, __doc__ or "")
    cls = COMMANDS[name]
    return command(cls, argv[1:], cls.__doc__ or "", f"{prog} {name}")


def main(argv: Sequence[str]) -> int:
    """Returns the status of a command. Users' mistakes and damage are a message, no exception."""
    try:
        return run(parse(argv))
    except ConfigError as error:
        return _refuse(error, _CANNOT)


def run(options: Ls | Verify | Diff) -> int:
    """Returns the status of a command. Mistakes and damage are a message, no exception."""
    import jax  # here, so that --help needs no JAX

    from mesh_lm.checkpoint.reader import DamagedCheckpoint

    jax.config.update("jax_platforms", "cpu")  # a GPU may belong to a run
    try:
        if isinstance(options, Ls):
            return _ls(options)
        if isinstance(options, Verify):
            return _verify(options)
        return _diff(options)
    except DamagedCheckpoint as damage:
        return _refuse(damage, _DAMAGED)
    except ConfigError as error:
        return _refuse(error, _CANNOT)


def _refuse(error: Exception, status: int) -> int:
    print(f"error: {error}", file=sys.stderr)
    return status


def _ls(options: Ls) -> int:
    from mesh_lm.checkpoint import listing

    entries = listing.at(options.path)
    # A run resumes from the newest one that is complete.
    newest = next((entry for entry in reversed(entries) if entry.complete), None)
    rows = [("step", "written", "size", "format", "state", "samples", "")]
    for entry in entries:
        written = time.strftime("%Y-%m-%d %H:%M", time.localtime(entry.written))
        remark = f"{entry.what}; a run tries it first" if entry is newest else entry.what
        nbytes = listing.size(entry.nbytes)
        rows.append((entry.path.name, written, nbytes, *entry.described, remark))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        print("  ".join(cells).rstrip())
    print("from descriptions alone; `verify` reads the arrays")
    return _DAMAGED if any(entry.is_damaged for entry in entries) else 0


def _verify(options: Verify) -> int:
    from mesh_lm.checkpoint import listing

    # A list, so that all are verified.
    intact = [_is_intact(entry) for entry in listing.chosen(options.path, options.step)]
    return 0 if all(intact) else _DAMAGED


def _is_intact(entry: CheckpointEntry) -> bool:
    """Reads every array of a checkpoint, and prints the result."""
    from mesh_lm.checkpoint.arrays import StoredArrays
    from mesh_lm.checkpoint.listing import size
    from mesh_lm.checkpoint.reader import DamagedCheckpoint

    started_at = time.monotonic()
    n_arrays = 0
    total_bytes = 0
    reasons: list[str] = []
    try:
        metadata = entry.descriptions()["metadata"]
        for nbytes, reason in StoredArrays(entry.path).verified(metadata):
            n_arrays += 1
            total_bytes += nbytes
            if reason:
                reasons.append(reason)
    except DamagedCheckpoint as damage:
        reasons = damage.reasons
    if reasons:
        print("\n  - ".join([f"{entry.path.name}: damaged", *reasons]), flush=True)
        return False
    result = "whole" if metadata.get("digests") else "no digests (format 1); its arrays can be read"
    seconds = time.monotonic() - started_at
    print(
        f"{entry.path.name}: {result}; {n_arrays} arrays, {size(total_bytes)}, state "
        f"{entry.described[1]}, {seconds:.1f} s",
        flush=True,
    )
    return True


def _diff(options: Diff) -> int:
    from mesh_lm.checkpoint import listing
    from mesh_lm.checkpoint.reader import differences
    from mesh_lm.config.moved import migrated

    a = listing.newest(options.a)
    b = listing.newest(options.b)
    a_descriptions = a.descriptions()
    b_descriptions = b.descriptions()
    a_metadata = a_descriptions["metadata"]
    b_metadata = b_descriptions["metadata"]
    for line in differences(migrated(a_metadata["config"]), migrated(b_metadata["config"])):
        print(f"config  {line}")
    for line in differences(a_descriptions["data"], b_descriptions["data"]):
        print(f"data  {line}")
    n_different = 0
    for line in _different_arrays(a, b, a_metadata, b_metadata):
        print(line, flush=True)
        n_different += 1
    if n_different:
        print(f"{n_different} arrays differ" if n_different > 1 else "1 array differs")
        return _DIFFERENT
    state = f": state {a.described[1]}" if a_metadata.get("digests") else ""
    print(f"all arrays have the same bits{state}")
    return 0


def _different_arrays(
    a: CheckpointEntry, b: CheckpointEntry, a_metadata: dict[str, Any], b_metadata: dict[str, Any]
) -> Iterator[str]:
    """Yields a line for each array that is not the same in both."""
    from mesh_lm.checkpoint.arrays import StoredArrays
    from mesh_lm.checkpoint.reader import parts_of

    # Arrays whose digests agree are not read.
    a_digests = a_metadata.get("digests", {})
    b_digests = b_metadata.get("digests", {})
    if a_digests and a_digests == b_digests and parts_of(a_metadata) == parts_of(b_metadata):
        return
    a_arrays = StoredArrays(a.path)
    b_arrays = StoredArrays(b.path)
    for name in dict.fromkeys([*a_arrays, *b_arrays]):
        if name not in a_arrays or name not in b_arrays:
            owner = a_arrays if name in a_arrays else b_arrays
            yield f"{name}  only in {owner.path}"
            continue
        if name in a_digests and a_digests[name] == b_digests.get(name):
            continue
        x = a_arrays[name]
        y = b_arrays[name]
        if x.described != y.described:
            yield f"{name}  {x.described} -> {y.described}"
            continue
        n_elements, distance = x.distance(y)
        if n_elements:
            yield f"{name}  max |a - b| {distance:.3g}, {n_elements} of {x.size} elements"
