"""`mesh-lm plan bytes FILE`: what one step sends, by the closed forms. Nothing is compiled."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from mesh_lm.commands import command_line
from mesh_lm.commands.options import HELP, print_help
from mesh_lm.config import TrainConfig
from mesh_lm.errors import ConfigError
from mesh_lm.planning.closed_forms.subjects import NoFormError
from mesh_lm.planning.closed_forms.terms import Term, by_axes, total
from sharding_rules.lab import LabError
from sharding_rules.lab.saved import write
from sharding_rules.lab.summary import Unit, size

COMMAND = "bytes"
"""The word after `mesh-lm plan` that chooses this."""
_DESCRIPTION = (
    "What one step sends on each device, on paper: every collective with its payload, the times "
    "it runs and its bytes, and the totals by mesh axis. Nothing is compiled. FILE and its options "
    "are those of `mesh-lm train --help`."
)


@dataclasses.dataclass(frozen=True)
class Bytes:
    """The options of `mesh-lm plan bytes`."""

    devices: int = 0
    """Number of GPUs; 0: the size of the mesh; if an axis is -1, the fewest complete nodes that
    hold it."""
    output: str = ""
    """Write every collective and the totals to this .json; empty: a table on the screen."""

    def __post_init__(self) -> None:
        if self.devices < 0:
            raise ConfigError(f"--devices={self.devices}: a step is made by at least 1 device")
        if self.output and Path(self.output).suffix != ".json":
            raise ConfigError(f"--output={self.output}: the bytes are a file that ends in .json")


def parse(argv: Sequence[str], prog: str) -> tuple[Bytes, TrainConfig]:
    """Returns the options and the run on the command line of `mesh-lm plan bytes`.

    --output names the file of the bytes; the run's own directory is --config.output. Raises
    ConfigError.
    """
    if HELP & {f"--{word.lstrip('-')}" for word in argv}:
        print_help(Bytes, _DESCRIPTION, prog)
    config, values = command_line.parse_with(Bytes, argv, prog=prog)
    return Bytes(**values), config


def show(options: Bytes, config: TrainConfig) -> int:
    """Prints the bytes of a step, or writes them to a file, and returns 0.

    Raises ConfigError for a config that cannot run on these devices, or has no closed form.
    """
    # Imported here, so that a mistake in the arguments is answered first.
    from mesh_lm.planning.closed_forms.config import expected_of, expected_outer_of
    from mesh_lm.planning.program import devices_for
    from mesh_lm.training.check import check

    n_devices = devices_for(config, options.devices)
    config = check(config, n_devices)
    name = Path(config.output).name
    try:
        terms = expected_of(config)
        outer_terms = expected_outer_of(config)
    except NoFormError as error:
        raise ConfigError(f"{name}: {error}; `mesh-lm plan` compiles the step instead") from error
    if options.output:
        _write(options.output, name, n_devices, terms, outer_terms)
    else:
        _print(name, n_devices, terms)
    if outer_terms and not options.output:
        outer_bytes = size(total(outer_terms))
        n_steps = config.diloco.outer_steps
        print(f"\nthe outer step, every {n_steps} steps, sends {outer_bytes} over island")
    return 0


class Row(NamedTuple):
    """The terms of one array that are alike but for the pass of the model that runs them."""

    axes: tuple[str, ...]
    part: str
    kind: str
    dtype: str
    size: str
    payload: float
    times: int
    wire_bytes: float


def rows(terms: Iterable[Term]) -> list[Row]:
    """Returns the rows of the table: those over the axes that carry most first, and among them the
    largest first.
    """
    alike: dict[tuple[Any, ...], list[Term]] = {}
    for term in terms:
        key = (term.axes, term.part, term.kind, term.dtype, term.size, term.payload)
        alike.setdefault(key, []).append(term)
    all_rows = []
    for group in alike.values():
        first = group[0]
        row = Row(
            axes=first.axes,
            part=first.part,
            kind=first.kind,
            dtype=first.dtype,
            size=first.size,
            payload=first.payload,
            times=sum(term.times for term in group),
            wire_bytes=total(group),
        )
        all_rows.append(row)
    bytes_by_axes = by_axes(terms)
    return sorted(all_rows, key=lambda row: (-bytes_by_axes[row.axes], row.axes, -row.wire_bytes))


def _print(name: str, n_devices: int, terms: Sequence[Term]) -> None:
    """Prints the collectives, and the totals by axes."""
    console = Console()
    heading = f"{name} on {n_devices:,} devices: what each sends in one step, on paper"
    console.print(heading, highlight=False, soft_wrap=True)
    if not terms:
        console.print("nothing: no axis of the mesh has a second device", highlight=False)
        return
    console.print()
    console.print(_collectives(terms))
    console.print()
    console.print(_totals(terms))


def _collectives(terms: Sequence[Term]) -> Table:
    table_rows = rows(terms)
    unit = Unit.of(max(row.wire_bytes for row in table_rows))
    table = _table(
        "over", "collective", "of", "type", right=("payload", "times", f"{unit.name} sent")
    )
    previous: tuple[str, ...] = ()
    for row in table_rows:
        table.add_row(
            " x ".join(row.axes) if row.axes != previous else "",
            f"{row.kind} {row.size}",
            row.part,
            row.dtype,
            size(row.payload),
            f"{row.times:,}",
            unit(row.wire_bytes),
        )
        previous = row.axes
    return table


def _totals(terms: Sequence[Term]) -> Table:
    """Returns the totals by axes, beside the least that the strategy could send."""
    bytes_by_axes = by_axes(terms)
    least_by_axes = by_axes(terms, "least_wire_bytes")
    unit = Unit.of(sum(bytes_by_axes.values()))
    table = _table("over", right=(f"{unit.name} sent", "least"))
    for axes in sorted(bytes_by_axes, key=lambda axes: -bytes_by_axes[axes]):
        table.add_row(" x ".join(axes), unit(bytes_by_axes[axes]), unit(least_by_axes[axes]))
    all_bytes = unit(total(terms))
    table.add_row("all", all_bytes, unit(total(terms, field="least_wire_bytes")), style="bold")
    return table


def _table(*left: str, right: Sequence[str]) -> Table:
    """Returns an empty table: columns of words, then columns of numbers."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for header in left:
        table.add_column(header, no_wrap=True)
    for header in right:
        table.add_column(header, no_wrap=True, justify="right")
    return table


def _write(
    file: str, name: str, n_devices: int, terms: Sequence[Term], outer_terms: Sequence[Term]
) -> None:
    """Writes every collective with its reason, and the totals of a step by axes."""
    content = {
        "name": name,
        "devices": n_devices,
        "collectives": [_as_dict(term) for term in terms],
        "outer_step": [_as_dict(term) for term in outer_terms],
        "wire_bytes": {"+".join(axes): sent for axes, sent in by_axes(terms).items()},
        "least_wire_bytes": {
            "+".join(axes): sent for axes, sent in by_axes(terms, "least_wire_bytes").items()
        },
    }
    try:
        write(file, json.dumps(content, indent=1))
    except LabError as error:
        raise ConfigError(str(error)) from error
    print(f"wrote {file}")


def _as_dict(term: Term) -> dict[str, Any]:
    sent = {"wire_bytes": term.wire_bytes, "least_wire_bytes": term.least_wire_bytes}
    return dataclasses.asdict(term) | sent
