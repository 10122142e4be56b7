"""Reads and writes custom schedules as files. Imports no jax.

CSV: a row is a stage, a cell is a tick. A cell is empty, or has at most one op of each kind. Lines
that start with # are comments:

    # 2 stages, 2 microbatches
    0F0, 0F1, 0B0, 0B1
       , 1F0;1B0, 1F1;1B1,

An op is its virtual stage, its kind and its microbatch, as in the tables of PyTorch
(torch.distributed.pipelining), which can be read unchanged: F forward, B backward; if the backward
pass is split, B or I for the gradient of the input and W for that of the weights.

JSON: {"ticks": rows of cells as above}, or {"order": each stage's ops in order}, which run as early
as their inputs allow; with "packed": false, one op a tick.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Sequence
from pathlib import Path

from mesh_lm import strict_json
from mesh_lm.errors import ConfigError
from mesh_lm.schedules.schedule import Op, Schedule, ScheduleError, assign_ticks, make_schedule

SUFFIXES = (".csv", ".json")
_OP = re.compile(r"(\d+)([FBW])(\d+)")
_SPLIT_INPUT = re.compile(r"(?<=\d)I(?=\d)")
_JSON = (
    '{"ticks": [["0F0", "0F1;0B0", ...], ...]} with a list for each stage, or "order" for ops '
    "without ticks"
)


def find_schedule(name: str, stages: int, microbatches: int, chunks: int = 1) -> Schedule:
    """The named schedule, or the one in a .csv or .json file, which must have these sizes; 0: any
    size.

    Raises ConfigError as `make_schedule` and `load` do, and for a file with other sizes.
    """
    if Path(name).suffix not in SUFFIXES:
        return make_schedule(name, stages, microbatches, chunks)
    schedule = load(name)
    sizes = {"stages": stages, "microbatches": microbatches, "chunks": chunks}
    if other := [
        field for field, size in sizes.items() if size not in (0, getattr(schedule, field))
    ]:
        has = " and ".join(f"{field}={getattr(schedule, field)}" for field in other)
        raise ConfigError(
            f"{name} is a schedule for {has}; here: "
            f"{' and '.join(f'{field}={sizes[field]}' for field in other)}"
        )
    return schedule


def load(file: str) -> Schedule:
    """The schedule in a .csv or .json file, checked, named after the file without directory and
    suffix.

    Raises ConfigError, which names file, line, tick and op, for a file that cannot be read and for
    a schedule that cannot run.
    """
    path = Path(file).expanduser()
    if path.suffix not in SUFFIXES:
        raise ConfigError(f"{file}: expected a file that ends in .csv or .json")
    try:
        with open(path, "rb") as opened:
            text = opened.read(strict_json.FILE).decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: {getattr(error, 'strerror', None) or 'not UTF-8'}") from error
    text = _SPLIT_INPUT.sub("B", text)
    try:
        return _read(path.stem, path.suffix, text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{file}:{error.lineno}: not JSON: {error.msg}") from error
    except ScheduleError as error:
        raise ConfigError(f"{file}{_line(text, error.word)}: {error}") from error


def write_csv(schedule: Schedule, file: str) -> None:
    """Writes a schedule as `load` reads it, with aligned columns. Raises ConfigError if the file
    cannot be written.
    """
    cells = [["" for _ in range(schedule.n_ticks)] for _ in range(schedule.stages)]
    for op, tick in schedule.in_order():
        stage = op.virtual % schedule.stages
        cells[stage][tick] = f"{cells[stage][tick]};{op}".lstrip(";")
    widths = [max(len(row[tick]) for row in cells) for tick in range(schedule.n_ticks)]
    sizes = f"{schedule.stages} stages, {schedule.microbatches} microbatches" + (
        f", {schedule.chunks} chunks" if schedule.chunks > 1 else ""
    )
    lines = [
        (
            f"# {schedule.name}: {sizes}. A row is a stage, a cell a tick; an op is its virtual "
            "stage, F, B or W, and its microbatch"
        )
    ]
    lines += [
        ", ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in cells
    ]
    try:
        Path(file).expanduser().write_text("\n".join(lines) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{file}: cannot write: {error.strerror}") from error


def _read(name: str, suffix: str, text: str) -> Schedule:
    if suffix == ".csv":
        lines = ["" if line.lstrip().startswith("#") else line for line in text.splitlines()]
        return _schedule_of(name, [row for row in csv.reader(lines) if row], "tick")
    try:
        data = strict_json.loads(text, size=strict_json.FILE)
    except json.JSONDecodeError:
        raise  # it has the line
    except ValueError as error:
        raise ScheduleError(f"expected {_JSON}") from error
    kinds = [kind for kind in ("ticks", "order") if kind in data]
    rows = data[kinds[0]] if len(kinds) == 1 else None
    if not isinstance(rows, list) or not all(
        isinstance(row, list) and all(isinstance(cell, str) for cell in row) for row in rows
    ):
        raise ScheduleError(f"expected {_JSON}")
    if strays := sorted(data.keys() - {*kinds, "packed"}):
        raise ScheduleError(f"unknown key {strays[0]!r}; expected {_JSON}", f'"{strays[0]}"')
    return _schedule_of(
        name,
        rows,
        "tick" if kinds == ["ticks"] else "position",
        packed=bool(data.get("packed", True)),
    )


def _schedule_of(
    name: str, rows: Sequence[Sequence[str]], unit: str, *, packed: bool = True
) -> Schedule:
    """The schedule of a row of cells for each stage. unit: what a cell's index in its row means, a
    `tick` or a `position` in the order.
    """
    ops = _ops(rows, unit)
    if not ops:
        raise ScheduleError(
            "the schedule has no ops; write a row for each stage, as in 0F0, 0F1;0B0, 0B1"
        )
    stages, n_virtual = len(rows), 1 + max(op.virtual for op in ops)
    if n_virtual % stages:
        near = (
            f"{n_virtual // stages * stages} or {-(-n_virtual // stages) * stages}"
            if n_virtual > stages
            else str(stages)
        )
        raise ScheduleError(
            f"{stages} rows are {stages} stages, which must have equally many virtual stages: "
            f"{near} in all, not {n_virtual}"
        )
    ticks = ops
    if unit == "position":
        ticks = assign_ticks(
            [[op for op in ops if op.virtual % stages == stage] for stage in range(stages)], packed
        )
    schedule = Schedule(
        name, stages, 1 + max(op.microbatch for op in ops), n_virtual // stages, ticks
    )
    schedule.check()
    return schedule


def _ops(rows: Sequence[Sequence[str]], unit: str) -> dict[Op, int]:
    """Each op of a table -> the index of its cell, row by row."""
    ops: dict[Op, int] = {}
    for stage, row in enumerate(rows):
        for index, word in (
            (index, word)
            for index, cell in enumerate(row)
            for word in re.split(r"[;\s]+", cell)
            if word
        ):
            where = f"{unit} {index}, stage {stage}"
            if not (match := _OP.fullmatch(word)):
                raise ScheduleError(
                    (
                        f"{where}: {word!r} is not an op; write virtual stage, F, B or W, and "
                        "microbatch, as in 2F3"
                    ),
                    word,
                )
            op = Op(match[2], int(match[3]), int(match[1]))
            if op.virtual % len(rows) != stage:
                owner = (
                    f"virtual stage {op.virtual} is on stage {op.virtual % len(rows)} of "
                    f"{len(rows)}"
                )
                raise ScheduleError(f"{where}: {op} is in the wrong row: {owner}", op)
            if op in ops:
                raise ScheduleError(f"{where}: {op} occurs twice, first at {unit} {ops[op]}", op)
            ops[op] = index
    return ops


def _line(text: str, word: str) -> str:
    """`:7` if the last occurrence of the word in a file's text is in line 7; empty if there is
    none.
    """
    places = list(re.finditer(rf"(?<!\w){re.escape(word)}(?!\w)", text)) if word else []
    return f":{text.count(chr(10), 0, places[-1].start()) + 1}" if places else ""
