"""A report at other speeds: its compiled program is kept, and its times are predicted again."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from sharding_rules.lab import hlo
from sharding_rules.lab.machine import Constant, Machine, Range, moved_rates, rate_value
from sharding_rules.lab.provenance import Provenance
from sharding_rules.lab.rates import OPTIMISTIC, Rates
from sharding_rules.lab.report import LabError, Report, Timeline, unpacked
from sharding_rules.lab.targets import TARGETS, Target
from sharding_rules.lab.timeline import SPANS, in_parallel, priced, replay


class Replay:
    """A report's program, parsed once and replayed at several speeds."""

    def __init__(self, report: Report) -> None:
        """Raises LabError if the report has no program, or is for no target."""
        if not report.program or report.target not in TARGETS:
            raise LabError(
                f"the report of {report.name} holds no program to replay: it is of an older "
                "version, or was not compiled for a target; plan the config again"
            )
        self.report = report
        probabilities = {one.scope: one.probability for one in report.conditionals}
        self._module = hlo.parse(unpacked(report.program), report.slots, probabilities)
        self._provenance = Provenance(self._module, report.vocabulary)
        self._parallel = in_parallel(report.options)

    def timeline(self, target: Target, rates: Rates = OPTIMISTIC, n_spans: int = 0) -> Timeline:
        """Returns the program's timeline on such a target at these rates."""
        return replay(
            *(self._module, self._provenance, self.report.collectives, target),
            parallel=self._parallel,
            rates=rates,
            n_spans=n_spans,
        )

    def on(self, machine: Machine) -> Report:
        """Returns the report with the times, memory limit and power of another machine.

        The program, its bytes and its schedule stay. Raises LabError for another device, and for
        nodes of another size than it was compiled for.
        """
        report = self.report
        if machine.target.name != report.target:
            raise LabError(
                f"{report.name} was compiled for {report.target}, not for {machine.target.name}: "
                "plan its config with --hw, which compiles it"
            )
        _require_same_program(report, machine)
        timeline = self.timeline(machine.target, machine.fast, SPANS)
        return dataclasses.replace(
            report,
            hbm=machine.target.usable,
            collectives=priced(report.collectives, timeline, machine.target, machine.fast),
            timeline=timeline,
            sustained=self.timeline(machine.target, machine.slow),
            model_us=timeline.model_us(report.model_flops, report.attention_flops),
            peak_flops=machine.target.flops["bf16"],
            changes=machine.changes,
            watts=machine.target.watts,
            node=machine.target.node,
        )


def _require_same_program(report: Report, machine: Machine) -> None:
    """Raises LabError if a constant that XLA reads is another than that of the compiled program."""
    compiled = {change.name: change for change in report.changes}
    wanted = {change.name: change for change in machine.changes}
    for name in machine.recompiled:
        # A constant that the report does not name had the target's own value.
        value = compiled[name].value if name in compiled else wanted[name].usual
        if wanted[name].value != value:
            raise LabError(
                f"--hw={name}: XLA reads it, and {report.name} was compiled for another value: "
                "plan its config with --hw, which compiles it"
            )
    for name in compiled.keys() & {"node", "memory", "bandwidth"}:
        change = compiled[name]
        if name not in wanted and change.value != change.usual:
            raise LabError(
                f"{report.name} was compiled with {name} {change.value}: give the same to --hw"
            )


def compiled_on(report: Report, machine: Machine) -> Report:
    """Returns the report of a program that was compiled for this machine, at its speeds."""
    if not machine.changes:
        return report
    return Replay(dataclasses.replace(report, changes=machine.changes)).on(machine)


class Effect(NamedTuple):
    """What one constant alone does to the predicted step."""

    constant: Constant
    usual_text: str
    """The value of the unchanged step."""
    low_text: str
    high_text: str
    source: str
    low_us: float
    """Predicted microseconds of the step at the range's low end."""
    high_us: float

    def us(self, base_us: float) -> float:
        """Returns the width of the step's range, the unchanged step included."""
        ends = (self.low_us, self.high_us, base_us)
        return max(ends) - min(ends)


class WhatIf(NamedTuple):
    """The predicted step, and what each constant does to it."""

    base_us: float
    effects: tuple[Effect, ...]
    """The largest first."""


def what_if(report: Report, machine: Machine) -> WhatIf:
    """Returns the effect of each constant, moved alone through its stated range.

    Args:
      report: of a program that was compiled for this machine.
      machine: its fast rates are those of the unchanged step.

    Raises LabError as `Replay`.
    """
    program = Replay(report)
    base_us = program.timeline(machine.target, machine.fast).step
    effects = [_effect(program, machine, one) for one in machine.ranges()]
    effects.sort(key=lambda effect: -effect.us(base_us))
    return WhatIf(base_us, tuple(effects))


def _effect(program: Replay, machine: Machine, one: Range) -> Effect:
    low = program.timeline(machine.target, one.low).step
    high = program.timeline(machine.target, one.high).step
    usual = one.constant.text(rate_value(one.constant, machine.fast))
    return Effect(one.constant, usual, one.low_text, one.high_text, one.source, low, high)


class Suspect(NamedTuple):
    """A constant that alone may explain measured steps."""

    constant: Constant
    usual: float
    """The value at the fast end."""
    value: float
    """With which the predictions are nearest to the measurements."""
    error: float
    """Mean of |predicted / measured - 1| that is left."""
    change: float
    """|log(value / usual)|."""


def suspects(
    measured_us: Mapping[str, float], programs: Mapping[str, Replay], machine: Machine
) -> list[Suspect]:
    """Returns which constants, changed alone, explain measured steps: the best first.

    Of equally good ones that which changes least is first. Constants without an effect are left
    out.

    Args:
      measured_us: microseconds of a step, by the name of its program.
      programs: by the same names. One program alone is explained by many constants; several that
        use the constants differently tell them apart.
      machine: whose fast rates the other constants keep.
    """
    fits = [_Fit(one.constant, measured_us, programs, machine) for one in machine.ranges()]
    found = [fit.best() for fit in fits if fit.has_effect()]
    return sorted(found, key=lambda suspect: (round(suspect.error, 3), suspect.change))


_FACTORS = (1 / 8, 1 / 4, 1 / 2, 1.0, 2.0, 4.0, 8.0)
"""By which a constant is tried smaller and larger, a share up to 1. Between two of them a step is
linear in the time that the constant stands for, but for what compute hides."""
_GRID = 2000
"""Values between the smallest and the largest of which the best is taken."""


class _Fit:
    """The value of one constant with which predictions are nearest to measurements."""

    def __init__(
        self,
        constant: Constant,
        measured_us: Mapping[str, float],
        programs: Mapping[str, Replay],
        machine: Machine,
    ) -> None:
        self._constant = constant
        self._measured_us = measured_us
        self._programs = programs
        self._machine = machine
        self._usual = rate_value(constant, machine.fast) or 1.0
        self._factors = _FACTORS
        if not constant.unit:
            most = 1 / self._usual  # a share of 1
            self._factors = (*(factor for factor in _FACTORS if factor < most), most)
        self._at_smallest = self._steps(self._factors[0])
        self._at_largest = self._steps(self._factors[-1])

    def has_effect(self) -> bool:
        """Whether a program's step depends on the constant."""
        return self._at_smallest != self._at_largest

    def best(self) -> Suspect:
        """Returns the best value, from steps that are interpolated, and its error from a replay."""
        steps = {self._factors[0]: self._at_smallest, self._factors[-1]: self._at_largest}
        for factor in self._factors[1:-1]:
            steps[factor] = self._steps(factor)
        factors = np.geomspace(self._factors[0], self._factors[-1], _GRID)
        times = self._times(factors)
        order = np.argsort(times)
        errors = np.zeros(_GRID)
        tried = sorted(self._factors, key=lambda factor: float(self._times(np.array(factor))))
        for name, us in self._measured_us.items():
            at = np.array([self._times(np.array(factor)) for factor in tried])
            known = np.array([steps[factor][name] for factor in tried])
            interpolated = np.empty(_GRID)
            interpolated[order] = np.interp(times[order], at, known)
            errors += np.abs(interpolated / us - 1)
        factor = float(factors[errors.argmin()])
        return Suspect(
            constant=self._constant,
            usual=self._usual,
            value=self._usual * factor,
            error=self._error(factor),
            change=abs(math.log(factor)),
        )

    def _times(self, factors: np.ndarray) -> np.ndarray:
        """Returns what the time is proportional to: microseconds themselves, or 1 / share."""
        return factors if self._constant.unit else 1 / factors

    def _error(self, factor: float) -> float:
        steps = self._steps(factor)
        errors = [abs(steps[name] / us - 1) for name, us in self._measured_us.items()]
        return sum(errors) / len(errors)

    def _steps(self, factor: float) -> dict[str, float]:
        rates = moved_rates(self._machine.fast, self._constant, factor * self._usual)
        target = self._machine.target
        return {
            name: self._programs[name].timeline(target, rates).step for name in self._measured_us
        }
