"""mesh-lm pipeline --stages=8 --microbatches=64 --chunks=4: draws a pipeline schedule, and shows
its cost and memory.
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
from mesh_lm.schedules import cost, custom, gantt, trace
from mesh_lm.schedules.cost import CLOCKS, Clock, Durations, Timeline, in_flight, stash_bytes
from mesh_lm.schedules.schedule import NAMES, Schedule, make_schedule
from mesh_lm.schedules.table import Table, compile_table

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

    def make_schedule(self) -> Schedule:
        """Returns the schedule that these options describe. Raises ConfigError."""
        if Path(self.schedule).suffix in custom.SUFFIXES:
            return custom.find_schedule(self.schedule, self.stages, self.microbatches, self.chunks)
        stages = self.stages or 4
        microbatches = self.microbatches or 4 * stages
        return make_schedule(self.schedule, stages, microbatches, self.chunks or 1)

    def timeline(self, schedule: Schedule, clock: Clock | None = None) -> Timeline:
        """Returns a schedule's timeline with the durations of these options."""
        durations = Durations(self.forward, self.backward, self.weight_share, self.embed, self.head)
        return cost.timeline(
            schedule, durations, clock or self.clock, drop_last_forward=self.drop_last_forward
        )

    def table(self, schedule: Schedule) -> Table | None:
        """Returns a schedule's table; None if its backward pass is split: the engine has no W."""
        if "W" in schedule.kinds:
            return None
        return compile_table(schedule, drop_last_forward=self.drop_last_forward)


def parse(argv: Sequence[str], prog: str = "") -> Arguments:
    """Returns the options of `mesh-lm pipeline`. Raises ConfigError."""
    return command(Arguments, argv, DESCRIPTION, prog)


def main(argv: Sequence[str], console: Console | None = None) -> int:
    """Runs `mesh-lm pipeline` with these arguments. Returns the exit status; raises ConfigError."""
    return run(parse(argv), console)


def run(options: Arguments, console: Console | None = None) -> int:
    """Draws the schedule, writes its files and returns 0. Raises ConfigError."""
    console = console or Console()
    schedule = options.make_schedule()
    schedules = [schedule]
    schedules += [other for other in _comparable(schedule) if other != schedule]
    timelines = [options.timeline(s) for s in (schedules if options.compare else schedules[:1])]
    for timeline in timelines:
        _show(console, timeline, options)
    if len(schedules) > 1:
        console.print(_comparison(schedules, options))
    if options.png:
        gantt.draw(timelines, options.png)
    if options.trace:
        trace.write(timelines, options.trace, seconds=1e-3)
    if options.csv:
        custom.write_csv(schedule, options.csv)
    for file in filter(None, (options.png, options.trace, options.csv)):
        console.print(f"wrote {file}", style="dim", markup=False, highlight=False)
    return 0


def _comparable(schedule: Schedule) -> list[Schedule]:
    """Returns all named schedules of the same sizes; none for evaluation.

    They have one chunk, and as many as `schedule` has.
    """
    if "B" not in schedule.kinds:
        return []
    alternatives = []
    for name in _COMPARED:
        for chunks in dict.fromkeys((1, schedule.chunks)):
            if chunks > 1 and not NAMES[name].chunked:
                continue
            # A custom schedule may have sizes that a named one cannot have.
            with contextlib.suppress(ConfigError):
                alternatives.append(
                    make_schedule(name, schedule.stages, schedule.microbatches, chunks)
                )
    return alternatives


def _show(console: Console, timeline: Timeline, options: Arguments) -> None:
    """Prints a schedule's chart, and the facts about it."""
    schedule = timeline.schedule
    summary = NAMES[schedule.name].summary if schedule.name in NAMES else options.schedule
    sizes = f"{schedule.stages} stages, {schedule.microbatches} microbatches"
    title = Text(gantt.title(schedule), style="bold")
    console.print(title.append(f": {sizes}; {summary}", "not bold"))
    console.print()
    for line in gantt.lines(timeline, console.width, colour=console.color_system is not None):
        console.print(line, no_wrap=True, crop=True)
    console.print()
    for name, fact in _facts(timeline, options).items():
        console.print(f"{name.ljust(10)} {fact}", highlight=False, markup=False)
    console.print()


def _facts(timeline: Timeline, options: Arguments) -> dict[str, str]:
    schedule = timeline.schedule
    bubbles = [f"{clock} {options.timeline(schedule, clock).bubble:.2%}" for clock in CLOCKS]
    # The bubble of 1F1B (arXiv 2104.04473).
    ideal = (schedule.stages - 1) / schedule.chunks / schedule.microbatches
    most = max(timeline.busy)
    least = min(timeline.busy)
    work = f"{most:.4g}"
    if most - least > 1e-9:
        work = f"{most:.4g} on the busiest stage, {least:.4g} on the idlest"
    facts = {
        "bubble": f"{'   '.join(bubbles)}   ((P-1)/(V M) = {ideal:.2%})",
        "time": (
            f"{timeline.span:.4g} ({timeline.clock}), of which work {work}; {schedule.n_ticks} "
            "ticks"
        ),
    }
    if "B" in schedule.kinds:
        passes = " ".join(map(str, in_flight(schedule)))
        facts["in flight"] = f"{passes}   (at most, on each stage; in inputs of a virtual stage)"
    facts["slots"] = _slots(schedule, options)
    return facts


def _slots(schedule: Schedule, options: Arguments) -> str:
    table = options.table(schedule)
    if table is None:
        return "for study: the engine runs no schedule that splits the backward pass"
    text = f"{table.n_inputs} for inputs, {table.n_grads} for gradients on each stage"
    if options.input_mib:
        mib = stash_bytes(table, round(options.input_mib * 2**20)) / 2**20
        text += f": {mib:,.0f} MiB"
    if table.n_residuals and not options.drop_last_forward:
        text += f"; {table.n_residuals} for residuals, where they are stashed"
    return text


def _comparison(schedules: Sequence[Schedule], options: Arguments) -> Rows:
    """Returns a table of the costs of schedules; the first one is bold."""
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
    timelines = [{clock: options.timeline(s, clock) for clock in CLOCKS} for s in schedules]
    shortest = min(timeline_by_clock[options.clock].span for timeline_by_clock in timelines)
    for schedule, timeline_by_clock in zip(schedules, timelines, strict=True):
        span = timeline_by_clock[options.clock].span
        table = options.table(schedule)
        rows.add_row(
            schedule.name,
            str(schedule.chunks),
            str(schedule.n_ticks),
            *(f"{timeline_by_clock[clock].bubble:.2%}" for clock in CLOCKS),
            f"{span:.4g} {span / shortest - 1:+.1%}",
            str(max(in_flight(schedule))),
            f"{table.n_inputs} + {table.n_grads}" if table else "-",
            style="bold" if schedule is schedules[0] else "",
        )
    return rows
