"""mesh-lm pipeline --stages=8 --microbatches=64 --chunks=4: the timeline, cost and memory of a
pipeline schedule.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table as Rows
from rich.text import Text

from mesh_lm.commands.options import command
from mesh_lm.errors import ConfigError
from mesh_lm.schedules import custom, gantt, trace
from mesh_lm.schedules.cost import (
    CLOCKS,
    Clock,
    Durations,
    Timeline,
    in_flight,
    stash_bytes,
    timeline,
)
from mesh_lm.schedules.schedule import NAMES, Schedule, make_schedule
from mesh_lm.schedules.table import compile_table

DESCRIPTION = (
    "Draws a pipeline schedule, reports its bubble and its activation memory, and compares it with "
    "other schedules."
)
_COMPARED = ("1f1b", "gpipe", "classic_1f1b", "zb_h1")


@dataclasses.dataclass(frozen=True)
class Arguments:
    """The schedule, how long its parts take, and the files to write."""

    stages: int = 0
    """Number of pipeline stages; 0: 4, or those of the file."""
    microbatches: int = 0
    """Microbatches per step; 0: 4 per stage, or those of the file."""
    chunks: int = 0
    """Chunks of layers (virtual stages) per stage; 0: 1, or those of the file."""
    schedule: str = "1f1b"
    """1f1b, gpipe, classic_1f1b, zb_h1, forward, or a .csv or .json file (see docs/pipeline.md)."""
    forward: float = Durations.forward
    """Time of the forward pass of one microbatch through one stage, in any unit."""
    backward: float = Durations.backward
    """Time of the backward pass, including the forward pass it recomputes: 3 if inputs are stashed
    or layers use remat."""
    weight_share: float = Durations.weight_share
    """Fraction of the backward pass that computes weight gradients, which zb_h1 postpones."""
    embed: float = Durations.embed
    """Time of the forward pass of the embedding, and of layers before those that stages share."""
    head: float = Durations.head
    """Time of the forward pass of the head and the loss."""
    clock: Clock = "lockstep"
    """What a stage waits for. async: its inputs; neighbour: the adjacent stages, at each tick;
    lockstep: all stages, at each tick."""
    drop_last_forward: bool = False
    """Omit the forward pass of the last virtual stage if inputs are stashed: its backward pass
    recomputes it anyway."""
    input_mib: float = 0.0
    """Size of a stage's input on one device in MiB (microbatch x seq_len x d_model x 2 bytes in
    bf16), to report the stash in MiB."""
    compare: bool = False
    """Draw the other schedules too."""
    png: str = ""
    """Write a picture to this file."""
    trace: str = ""
    """Write a trace to this file, for ui.perfetto.dev; one unit of time is 1 ms."""
    csv: str = ""
    """Write the schedule to this file, which you can edit and pass as --schedule."""

    def found(self) -> Schedule:
        """The schedule asked for. Raises ConfigError."""
        if Path(self.schedule).suffix in custom.SUFFIXES:
            return custom.find_schedule(self.schedule, self.stages, self.microbatches, self.chunks)
        stages = self.stages or 4
        return make_schedule(
            self.schedule, stages, self.microbatches or 4 * stages, self.chunks or 1
        )

    def timed(self, one: Schedule, clock: Clock | None = None) -> Timeline:
        """The schedule's timeline with the durations of these options."""
        durations = Durations(self.forward, self.backward, self.weight_share, self.embed, self.head)
        return timeline(
            one, durations, clock or self.clock, drop_last_forward=self.drop_last_forward
        )


def parse(argv: Sequence[str], prog: str = "") -> Arguments:
    """The options of `mesh-lm pipeline`. Raises ConfigError."""
    return command(Arguments, argv, DESCRIPTION, prog)


def main(argv: Sequence[str], console: Console | None = None) -> int:
    """Runs `mesh-lm pipeline` with these arguments. Returns the exit status; raises ConfigError."""
    return run(parse(argv), console)


def run(options: Arguments, console: Console | None = None) -> int:
    """Draws, writes the files asked for and returns 0. Raises ConfigError."""
    console = console or Console()
    chosen = options.found()
    others = [chosen, *(other for other in _comparable(chosen) if other != chosen)]
    drawn = [options.timed(one) for one in (others if options.compare else [chosen])]
    for one in drawn:
        _show(console, one, options)
    if len(others) > 1:
        console.print(_comparison(others, options))
    if options.png:
        gantt.draw(drawn, options.png)
    if options.trace:
        trace.write(drawn, options.trace, seconds=1e-3)
    if options.csv:
        custom.write_csv(chosen, options.csv)
    for file in filter(None, (options.png, options.trace, options.csv)):
        console.print(f"wrote {file}", style="dim", markup=False, highlight=False)
    return 0


def _comparable(chosen: Schedule) -> list[Schedule]:
    """All named schedules of the same sizes, with one chunk and with as many as `chosen` has; none
    for evaluation.
    """
    if "B" not in chosen.kinds:
        return []
    able = [
        (name, chunks)
        for name in _COMPARED
        for chunks in dict.fromkeys((1, chosen.chunks))
        if chunks == 1 or NAMES[name].chunked
    ]
    found = []
    for name, chunks in able:
        # a custom schedule may have sizes that a named one cannot have
        with contextlib.suppress(ConfigError):
            found.append(make_schedule(name, chosen.stages, chosen.microbatches, chunks))
    return found


def _show(console: Console, one: Timeline, options: Arguments) -> None:
    made = one.schedule
    about = NAMES[made.name].about if made.name in NAMES else options.schedule
    console.print(
        Text(gantt.title(made), style="bold").append(
            f": {made.stages} stages, {made.microbatches} microbatches; {about}", "not bold"
        )
    )
    console.print()
    for line in gantt.lines(one, console.width, colour=console.color_system is not None):
        console.print(line, no_wrap=True, crop=True)
    console.print()
    busy = one.busy
    work = (
        f"{max(busy):.4g} on the busiest stage, {min(busy):.4g} on the idlest"
        if max(busy) - min(busy) > 1e-9
        else f"{max(busy):.4g}"
    )
    bubbles = "   ".join(f"{clock} {options.timed(made, clock).bubble:.2%}" for clock in CLOCKS)
    facts = {
        "bubble": (
            f"{bubbles}   ((P-1)/(V M) = {(made.stages - 1) / made.chunks / made.microbatches:.2%})"
        )
    }
    facts["time"] = f"{one.span:.4g} ({one.clock}), of which work {work}; {made.n_ticks} ticks"
    if "B" in made.kinds:
        facts["in flight"] = (
            f"{' '.join(map(str, in_flight(made)))}   (at most, on each stage; in inputs of a "
            "virtual stage)"
        )
    facts["slots"] = _slots(made, options)
    for name, fact in facts.items():
        console.print(f"{name.ljust(10)} {fact}", highlight=False, markup=False)
    console.print()


def _slots(made: Schedule, options: Arguments) -> str:
    if "W" in made.kinds:
        return "for study: the engine runs no schedule that splits the backward pass"
    slots = compile_table(made, drop_last_forward=options.drop_last_forward)
    size = (
        f": {stash_bytes(slots, round(options.input_mib * 2**20)) / 2**20:,.0f} MiB"
        if options.input_mib
        else ""
    )
    residuals = (
        f"; {slots.n_residuals} for residuals, where they are stashed"
        if slots.n_residuals and not options.drop_last_forward
        else ""
    )
    return (
        f"{slots.n_inputs} for inputs, {slots.n_grads} for gradients on each stage{size}{residuals}"
    )


def _comparison(others: list[Schedule], options: Arguments) -> Rows:
    rows = Rows(box=box.SIMPLE_HEAD, pad_edge=False, title_justify="left", header_style="bold")
    rows.add_column("schedule")
    for name in (
        "chunks",
        "ticks",
        "bubble:\nasync",
        "\nneighbour",
        "\nlockstep",
        f"time,\n{options.clock}",
        "in flight",
        "slots",
    ):
        rows.add_column(name, justify="right", no_wrap=True)
    lines = [{clock: options.timed(other, clock) for clock in CLOCKS} for other in others]
    best = min(line[options.clock].span for line in lines)
    for other, line in zip(others, lines, strict=True):
        time = line[options.clock].span
        slots = (
            compile_table(other, drop_last_forward=options.drop_last_forward)
            if "W" not in other.kinds
            else None
        )
        rows.add_row(
            other.name, str(other.chunks), str(other.n_ticks),
            *(f"{line[clock].bubble:.2%}" for clock in CLOCKS),
            f"{time:.4g} {time / best - 1:+.1%}", str(max(in_flight(other))),
            f"{slots.n_inputs} + {slots.n_grads}" if slots else "-",
            style="bold" if other is others[0] else "",
        )  # fmt: skip
    return rows
