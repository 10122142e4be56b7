"""What a predicted step means for a whole run: tokens per second, days, cost and energy, each from
the fast to the slow end of the prediction.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from mesh_lm.config import TrainConfig
from sharding_rules.lab import Report
from sharding_rules.lab.report import Band
from sharding_rules.lab.summary import amount, changes_words
from sharding_rules.lab.targets import TARGETS

Fact = tuple[str, str]
"""A line of the report: its label and its text."""


def hardware_facts(report: Report) -> Iterator[Fact]:
    """Yields the constants of the hardware that are not the usual ones."""
    if report.changes:
        yield "hardware", changes_words(report)


class RunSize(NamedTuple):
    """What the duration of a run depends on, beside the step."""

    tokens_per_step: int
    steps: int

    @staticmethod
    def of(config: TrainConfig) -> RunSize:
        """Returns the size of a config's run."""
        return RunSize(config.tokens_per_step, config.train.steps)


_DAY = 24
"""Hours of a day."""


def report_facts(
    config: TrainConfig, report: Report, tokens: float = 0, gpu_hour: float = 0
) -> Iterator[Fact]:
    """Yields what `facts_of` does, for the run of a config."""
    return facts_of(RunSize.of(config), report, tokens, gpu_hour)


def facts_of(
    run: RunSize, report: Report, tokens: float = 0, gpu_hour: float = 0
) -> Iterator[Fact]:
    """Yields the speed of a run, and the duration, cost and energy of its tokens.

    tokens: of the whole run; 0: those of the config's steps, if the price is given. gpu_hour: the
    price of one GPU for an hour, in any currency; 0: not known. Nothing without predicted times.
    """
    step = report.step_band
    if step is None:
        return
    n_devices = report.n_devices
    speed = Band(*(1e6 * run.tokens_per_step / us for us in step))
    each = Band(*(rate / n_devices for rate in speed))
    yield "speed", f"{_slow_to_fast(speed)} tokens/s, {_slow_to_fast(each)} on each GPU"

    if not tokens and not gpu_hour:
        return
    tokens = tokens or run.steps * run.tokens_per_step
    hours = Band(*(tokens / rate / 3600 for rate in speed))
    gpu_hours = Band(*(n_devices * each_hours for each_hours in hours))
    words = [_duration(hours), f"{_fast_to_slow(gpu_hours)} GPU hours"]
    if gpu_hour:
        price = Band(*(gpu_hour * n for n in gpu_hours))
        words.append(f"{_fast_to_slow(price)} at {gpu_hour:g} each")
    target = TARGETS.get(report.target)
    watts = report.watts or (target.watts if target else 0)
    if watts:
        energy = Band(*(n * watts / 1e6 for n in gpu_hours))
        words.append(f"{_fast_to_slow(energy)} MWh at {watts:g} W each")
    yield f"{amount(tokens)} tokens", ", ".join(words)


def _duration(hours: Band) -> str:
    if hours.slow < _DAY:
        return f"{_fast_to_slow(hours)} hours"
    return f"{_fast_to_slow(Band(*(n / _DAY for n in hours)))} days"


def _fast_to_slow(band: Band) -> str:
    fast = _number(band.fast)
    slow = _number(band.slow)
    return fast if fast == slow else f"{fast} to {slow}"


def _slow_to_fast(band: Band) -> str:
    return _fast_to_slow(Band(band.slow, band.fast))


def _number(n: float) -> str:
    """Returns a number with three digits: 12.3, 9,450, 1.21 M."""
    n = float(f"{n:.3g}")
    for unit, scale in (("T", 1e12), ("B", 1e9), ("M", 1e6)):
        if n >= scale:
            return f"{n / scale:.3g} {unit}"
    return f"{n:,.0f}" if n >= 1000 else f"{n:.3g}"
