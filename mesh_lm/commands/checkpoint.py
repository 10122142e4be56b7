"""Looks at the checkpoints of a run from outside: no mesh, no GPU and none of the model's code is needed.

python -m mesh_lm.checkpoint ls runs/gpt_tiny              what is there; reads descriptions, no arrays
python -m mesh_lm.checkpoint verify runs/gpt_tiny          reads every array, and compares digests with the saved ones
python -m mesh_lm.checkpoint diff runs/a runs/b            how config, parameters and arrays of two checkpoints differ

A path is a run's output, its `checkpoints`, or one step there. Status: 0 all is whole, or the arrays are the same bits; 1 a checkpoint is
damaged, or arrays differ; 2 the command cannot be carried out.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from typing import Any, NoReturn

import jax

from mesh_lm.checkpoint import listing as inspected
from mesh_lm.checkpoint.arrays import StoredArrays
from mesh_lm.checkpoint.listing import CheckpointEntry
from mesh_lm.checkpoint.reader import DamagedCheckpoint, differences, parts_of
from mesh_lm.errors import ConfigError

_DAMAGED = _DIFFERENT = 1
_CANNOT = 2


def main(argv: list[str]) -> int:
    """The status of a command, as the module's docstring has it. Users' mistakes and damage are a message, no exception."""
    try:
        options = _parser().parse_args(argv)
        jax.config.update("jax_platforms", "cpu")  # beside a run, its GPUs are not ours to take
        return options.command(options)
    except DamagedCheckpoint as damage:
        print(f"error: {damage}", file=sys.stderr)
        return _DAMAGED
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return _CANNOT


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; see {self.prog} --help")


def _parser() -> argparse.ArgumentParser:
    plain = {"formatter_class": argparse.RawDescriptionHelpFormatter, "allow_abbrev": False}
    parser = _Parser(prog="python -m mesh_lm.checkpoint", description=__doc__, **plain)
    commands = parser.add_subparsers(required=True, metavar="ls | verify | diff")
    for name, command, paths in (("ls", _ls, ("path",)), ("verify", _verify, ("path",)), ("diff", _diff, ("a", "b"))):
        sub = commands.add_parser(name, description=command.__doc__, **plain)
        for path in paths:
            sub.add_argument(path, help="a run's output (to diff: its newest step), its `checkpoints`, or one step there")
        sub.set_defaults(command=command)
    commands.choices["verify"].add_argument("--step", default="", help="only this one, as in 500 or 500.damaged")
    return parser


def _ls(options: argparse.Namespace) -> int:
    """Lists what is there, oldest first. Only descriptions are read: that a checkpoint is whole, `verify` says."""
    rows = [("step", "written", "size", "format", "state", "samples", "")]
    entries = inspected.at(options.path)
    resumed = next((entry for entry in reversed(entries) if entry.complete), None)
    for entry in entries:
        written = time.strftime("%Y-%m-%d %H:%M", time.localtime(entry.written))
        what = f"{entry.what}{'; a run continues from it' if entry is resumed else ''}"
        rows.append((entry.path.name, written, inspected.size(entry.nbytes), *entry.described, what))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    print("from descriptions alone; `verify` reads the arrays")
    return 0


def _verify(options: argparse.Namespace) -> int:
    """Reads every array of every checkpoint, or of one, a part at a time, and compares its digest with the saved one.

    A checkpoint that was put aside is verified where it is named. Status: 0 all are whole, 1 one is damaged, 2 there is none.
    """
    found = [_verified(entry) for entry in inspected.chosen(options.path, options.step)]
    return _DAMAGED if False in found else 0


def _verified(entry: CheckpointEntry) -> bool:
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
    print(f"{entry.path.name}: {whole}; {count} arrays, {inspected.size(total)}, state {entry.described[1]}, {seconds:.1f} s", flush=True)
    return True


def _diff(options: argparse.Namespace) -> int:
    """How two checkpoints differ: config, place in the data, arrays. Status: 0 all arrays have the same bits, 1 they differ.

    Config and place in the data are told, and do not count. Arrays whose digests agree are not read.
    """
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
        print(f"{count} arrays differ")
    else:
        print("all arrays have the same bits" + (f": state {one.described[1]}" if before["metadata"].get("digests") else ""))
    return _DIFFERENT if count else 0


def _differing(one: CheckpointEntry, other: CheckpointEntry, before: dict[str, Any], after: dict[str, Any]) -> Iterator[str]:
    """A line for each array that is not the same in both."""
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
