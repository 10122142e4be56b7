"""Looks at the checkpoints of a run from outside: no mesh, no GPU and none of the model's code is
needed.

mesh-lm checkpoint ls runs/gpt_tiny what is there, by descriptions alone; reads no arrays mesh-lm
checkpoint verify runs/gpt_tiny reads every array, and compares digests with the saved ones mesh-lm
checkpoint diff runs/a runs/b how config, parameters and arrays of two checkpoints differ

A path is a run's output, its `checkpoints`, or one step there. Status: 0 everything is intact, or
the arrays are the same bits; 1 a checkpoint is damaged (for ls: its description is), or arrays
differ; 2 the command cannot be carried out.
"""

from __future__ import annotations

import dataclasses
import difflib
import sys
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from mesh_lm.commands.options import command
from mesh_lm.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    from mesh_lm.checkpoint.listing import CheckpointEntry

_DAMAGED = _DIFFERENT = 1
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
    name, rest = (argv[0], argv[1:]) if argv else ("", [])
    if name in ("-h", "--help"):
        print(__doc__)
        raise SystemExit(0)
    if name not in COMMANDS:
        near = did_you_mean(difflib.get_close_matches(name, COMMANDS, n=1))
        raise ConfigError(
            f"{prog} needs one of {', '.join(COMMANDS)}, not {name or 'nothing'}{near}"
        )
    cls = COMMANDS[name]
    return command(cls, rest, cls.__doc__ or "", f"{prog} {name}")


def main(argv: Sequence[str]) -> int:
    """The status of a command, as the module's docstring has it. Users' mistakes and damage are a
    message, no exception.
    """
    try:
        return run(parse(argv))
    except ConfigError as error:
        return _refused(error, _CANNOT)


def run(options: Ls | Verify | Diff) -> int:
    """As `main`, for arguments that were read."""
    import jax  # here, so that --help needs no JAX

    from mesh_lm.checkpoint.reader import DamagedCheckpoint

    jax.config.update("jax_platforms", "cpu")  # beside a run, its GPUs are not ours to take
    try:
        return {Ls: _ls, Verify: _verify, Diff: _diff}[type(options)](options)
    except DamagedCheckpoint as damage:
        return _refused(damage, _DAMAGED)
    except ConfigError as error:
        return _refused(error, _CANNOT)


def _refused(error: Exception, status: int) -> int:
    print(f"error: {error}", file=sys.stderr)
    return status


def _ls(options: Ls) -> int:
    from mesh_lm.checkpoint import listing as inspected

    rows = [("step", "written", "size", "format", "state", "samples", "")]
    entries = inspected.at(options.path)
    resumed = next((entry for entry in reversed(entries) if entry.complete), None)
    for entry in entries:
        written = time.strftime("%Y-%m-%d %H:%M", time.localtime(entry.written))
        what = f"{entry.what}{'; a run tries it first' if entry is resumed else ''}"
        rows.append(
            (entry.path.name, written, inspected.size(entry.nbytes), *entry.described, what)
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print(
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        )
    print("from descriptions alone; `verify` reads the arrays")
    return _DAMAGED if any(entry.is_damaged for entry in entries) else 0


def _verify(options: Verify) -> int:
    from mesh_lm.checkpoint import listing as inspected

    found = [_verified(entry) for entry in inspected.chosen(options.path, options.step)]
    return _DAMAGED if False in found else 0


def _verified(entry: CheckpointEntry) -> bool:
    from mesh_lm.checkpoint.arrays import StoredArrays
    from mesh_lm.checkpoint.listing import size
    from mesh_lm.checkpoint.reader import DamagedCheckpoint

    began, count, total, reasons = time.monotonic(), 0, 0, []
    try:
        metadata = entry.descriptions()["metadata"]
        for nbytes, reason in StoredArrays(entry.path).verified(metadata):
            count, total = count + 1, total + nbytes
            reasons += [reason] if reason else []
    except DamagedCheckpoint as damage:
        reasons = damage.reasons
    if reasons:
        print("\n  - ".join([f"{entry.path.name}: damaged", *reasons]), flush=True)
        return False
    whole = "whole" if metadata.get("digests") else "no digests (format 1); its arrays can be read"
    seconds = time.monotonic() - began
    print(
        (
            f"{entry.path.name}: {whole}; {count} arrays, {size(total)}, state "
            f"{entry.described[1]}, {seconds:.1f} s"
        ),
        flush=True,
    )
    return True


def _diff(options: Diff) -> int:
    """Arrays whose digests agree are not read."""
    from mesh_lm.checkpoint import listing as inspected
    from mesh_lm.checkpoint.reader import differences

    one, other = inspected.newest(options.a), inspected.newest(options.b)
    before, after = one.descriptions(), other.descriptions()
    for title, changes in (
        ("config", differences(before["metadata"]["config"], after["metadata"]["config"])),
        ("data", differences(before["data"], after["data"])),
    ):
        for line in changes:
            print(f"{title}  {line}")
    count = 0
    for line in _differing(one, other, before["metadata"], after["metadata"]):
        print(line, flush=True)
        count += 1
    if count:
        print(f"{count} arrays differ" if count > 1 else "1 array differs")
    else:
        print(
            "all arrays have the same bits"
            + (f": state {one.described[1]}" if before["metadata"].get("digests") else "")
        )
    return _DIFFERENT if count else 0


def _differing(
    one: CheckpointEntry, other: CheckpointEntry, before: dict[str, Any], after: dict[str, Any]
) -> Iterator[str]:
    """A line for each array that is not the same in both."""
    from mesh_lm.checkpoint.arrays import StoredArrays
    from mesh_lm.checkpoint.reader import parts_of

    ours, theirs = before.get("digests", {}), after.get("digests", {})
    if ours and ours == theirs and parts_of(before) == parts_of(after):
        return
    a, b = StoredArrays(one.path), StoredArrays(other.path)
    for name in dict.fromkeys([*a, *b]):
        if name not in a or name not in b:
            yield f"{name}  only in {(a if name in a else b).path}"
        elif name not in ours or ours[name] != theirs.get(name):
            x, y = a[name], b[name]
            if x.described != y.described:
                yield f"{name}  {x.described} -> {y.described}"
            elif (found := x.distance(y))[0]:
                yield f"{name}  max |a - b| {found[1]:.3g}, {found[0]} of {x.size} elements"
