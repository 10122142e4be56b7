"""What each constant of the hardware does to a predicted step: a table, and a tornado chart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from mesh_lm.errors import ConfigError
from sharding_rules.lab import LabError, Report
from sharding_rules.lab.machine import Machine
from sharding_rules.lab.replayed import Effect, Replay, WhatIf, suspects, what_if
from sharding_rules.lab.saved import require_writable
from sharding_rules.lab.summary import changes_words

PREDICTED = "predicted, never measured"
_SMALL = 0.0005
"""Share of the step below which an effect has no row."""


def show_what_if(report: Report, machine: Machine, picture: str = "") -> int:
    """Prints the effect of each constant, the largest first, and draws them. Returns the status 0.

    picture: the .png; empty: none. Raises ConfigError if the report cannot be replayed, or the
    picture cannot be written.
    """
    try:
        if picture:
            require_writable(picture)
        result = what_if(report, machine)
    except LabError as error:
        raise ConfigError(str(error)) from error
    title = f"{report.name} on {report.n_devices:,} x {machine.name}"
    console = Console()
    console.print(effects_table(result, title))
    changed = changes_words(report)
    if changed:
        console.print(f"changed: {changed}", highlight=False)
    if picture:
        write_tornado(result, title, picture)
        print(f"wrote {picture}")
    return 0


def show_suspects(
    measured_us: Mapping[str, float], programs: Mapping[str, Replay], machine: Machine
) -> int:
    """Prints which constant, changed alone, would explain the measured steps. Returns the status
    0.
    """
    title = f"What would explain the measured steps, of {machine.name}, if it alone changed"
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("constant")
    for name in ("assumed", "needed", "error left"):
        table.add_column(name, justify="right")
    for suspect in suspects(measured_us, programs, machine):
        constant = suspect.constant
        table.add_row(
            Text(constant.name),
            Text(constant.text(suspect.usual)),
            Text(constant.text(suspect.value)),
            Text(f"{suspect.error:.1%}"),
        )
    Console().print(Group(Text(title), table))
    return 0


def effects_table(result: WhatIf, title: str) -> RenderableType:
    """Returns the table: each constant, its range, and the step at both ends of it."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    for name in ("constant", "from", "to"):
        table.add_column(name)
    for name in ("step", "step", "effect"):
        table.add_column(name, justify="right")
    table.add_column("range is")
    shown = large_effects(result)
    for effect in shown:
        cells = (
            effect.constant.name,
            effect.low_text,
            effect.high_text,
            _seconds(effect.low_us),
            _seconds(effect.high_us),
            f"{effect.us(result.base_us) / result.base_us:.1%}",
            effect.source,
        )
        table.add_row(*map(Text, cells))
    names = [effect.constant.name for effect in result.effects if effect not in shown]
    foot = (
        "Each constant moves alone, and the others stay at their fast ends. The program stays as "
        "it was compiled."
    )
    if names:
        foot += f" Below {_SMALL:.2%}: {', '.join(names)}."
    head = f"{title}: step {_seconds(result.base_us)}, {PREDICTED}"
    return Group(Text(head), table, Text(foot))


def _seconds(us: float) -> str:
    """Returns a step with the digits in which small effects show: 1.009 s, 50.21 ms."""
    return f"{us / 1e6:.4g} s" if us >= 1e6 else f"{us / 1e3:.4g} ms"


def large_effects(result: WhatIf) -> list[Effect]:
    """Returns the effects that are worth a row, the largest first."""
    least = _SMALL * result.base_us
    return [effect for effect in result.effects if effect.us(result.base_us) >= least]


def write_tornado(result: WhatIf, title: str, file: str) -> None:
    """Draws the steps at both ends of each range as bars around the unchanged step."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    effects = large_effects(result)
    figure = Figure(layout="constrained", figsize=(8, 1.4 + 0.36 * max(1, len(effects))), dpi=150)
    FigureCanvasAgg(figure)
    axes: Any = figure.subplots()
    base = result.base_us / 1e6
    for row, effect in enumerate(reversed(effects)):
        _draw(axes, row, effect, base)
    axes.axvline(base, color="black", linewidth=0.8)
    names = [f"{effect.constant.name} ({effect.usual_text})" for effect in reversed(effects)]
    axes.set_yticks(range(len(effects)), names)
    axes.set_xlabel(f"seconds of a step ({PREDICTED})")
    axes.set_title(title, fontsize=10, loc="left")
    axes.margins(x=0.22)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.savefig(Path(file).expanduser())


_COLOURS = ("tab:blue", "tab:orange")
"""Colours of the ends at which a step is shorter, and longer, than the unchanged one."""


def _draw(axes: Any, row: int, effect: Effect, base: float) -> None:
    ends: Sequence[tuple[float, str]] = (
        (effect.low_us / 1e6, effect.low_text),
        (effect.high_us / 1e6, effect.high_text),
    )
    for seconds, text in ends:
        if abs(seconds - base) < 1e-4 * base:
            continue
        is_longer = seconds > base
        axes.barh(row, seconds - base, left=base, color=_COLOURS[is_longer])
        axes.annotate(
            text,
            (seconds, row),
            (3 if is_longer else -3, 0),
            textcoords="offset points",
            ha="left" if is_longer else "right",
            va="center",
            fontsize=8,
        )
