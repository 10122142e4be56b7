"""The largest microbatch that fits, found by compiling."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

from mesh_lm.config import TrainConfig
from mesh_lm.errors import ConfigError
from mesh_lm.training.check import check
from sharding_rules import axes_of
from sharding_rules.lab import Report


def largest_microbatch(
    config: TrainConfig,
    n_devices: int,
    compiled: Callable[[TrainConfig], Report],
    *,
    say: Callable[[str], None],
    most: int = 4096,
) -> tuple[tuple[str, str], ...]:
    """Returns how many sequences a microbatch can have on each device, as facts for the report: b
    fits, and b + 1 does not.

    Each attempt is compiled, with the config's number of microbatches; without a pipeline with at
    most two, because more need no further memory except for their tokens.
    """
    config = check(config, n_devices)
    mesh = config.mesh.sizes()
    ways = math.prod(mesh[a] for a in axes_of(config.rules.activations["batch"]))
    count = config.train.microbatches if mesh["pipeline"] > 1 else min(2, config.train.microbatches)
    peaks: dict[int, int] = {}
    hbm = 0

    def fits(b: int) -> bool:
        nonlocal hbm
        train = dataclasses.replace(config.train, global_batch=b * ways * count, microbatches=count)
        report = compiled(dataclasses.replace(config, train=train))
        peaks[b], hbm = report.peak_bytes, report.hbm
        say(
            f"{b} sequences in a microbatch: {report.peak_bytes / 2**30:.2f} GiB of "
            f"{report.hbm / 2**30:.2f}"
        )
        return report.fits

    def gib(b: int) -> str:
        return f"{peaks[b] / 2**30:.2f} of {hbm / 2**30:.2f} GiB"

    if not fits(1):
        return (("largest microbatch", f"none: one sequence on each device needs {gib(1)}"),)
    low, high = 1, most + 1
    while high - low > 1:
        b = _guess(peaks, hbm, low, high)
        low, high = (b, high) if fits(b) else (low, b)
    if high > most:
        return (("largest microbatch", f"at least {low} sequences on each device ({gib(low)})"),)
    result = f"{low} sequences on each device ({gib(low)}); {high} do not fit ({gib(high)})"
    each = config.train.global_batch // ways
    best = next(
        (b for b in range(low, 0, -1) if each % b == 0 and _can_run(config, each // b, n_devices)),
        None,
    )
    if best is None:
        return (("largest microbatch", result),)
    advice = f"--config.train.microbatches={each // best}: {best} sequences at once"
    return (("largest microbatch", result), ("for this batch", advice))


def _can_run(config: TrainConfig, microbatches: int, n_devices: int) -> bool:
    try:
        check(
            dataclasses.replace(
                config, train=dataclasses.replace(config.train, microbatches=microbatches)
            ),
            n_devices,
        )
    except ConfigError:
        return False
    return True


def _guess(peaks: dict[int, int], hbm: int, low: int, high: int) -> int:
    """Returns where a line through two measured peaks reaches the memory's size, inside (low,
    high). The two are low and high, or the largest two that fit if high has not been measured.
    """
    if len(peaks) == 1:
        return low + 1
    a, b = (low, high) if high in peaks else sorted(peaks)[-2:]
    slope = (peaks[b] - peaks[a]) / (b - a)
    guess = low + int((hbm - peaks[low]) / slope) if slope > 0 else high
    if len(peaks) > 8:  # far from straight
        guess = (low + high) // 2
    return min(max(low + 1, guess), high - 1)
