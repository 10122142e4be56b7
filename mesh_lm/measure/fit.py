"""Latency and bandwidth from the times of messages of several sizes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from sharding_rules.lab.profile import Fit


def fitted(wire: Sequence[float], us: Sequence[float]) -> Fit:
    """Returns latency and bandwidth of time = latency + bytes / bandwidth.

    The sum of the squares of (fitted / measured - 1) is the least, so that short messages count as
    much as long ones. A latency below zero becomes zero.

    Args:
      wire: bytes that a device sends, of at least two different messages.
      us: microseconds of each.

    Raises ValueError for fewer than two sizes, or times that are not positive.
    """
    sizes = np.asarray(wire, float)
    times = np.asarray(us, float)
    if len(set(wire)) < 2 or (times <= 0).any():
        raise ValueError("a fit needs positive times of at least two sizes")
    rows = np.stack([1 / times, sizes / times], axis=1)
    latency, us_per_byte = np.linalg.lstsq(rows, np.ones(len(times)), rcond=None)[0]
    if latency < 0:
        latency = 0.0
        us_per_byte = _slope(sizes / times)
    if us_per_byte <= 0:
        # Time does not grow with the size: the longest message says the least that there is.
        us_per_byte = times[sizes.argmax()] / sizes.max()
        latency = max(0.0, float((times - us_per_byte * sizes).min()))
    error = np.abs((latency + us_per_byte * sizes) / times - 1).mean()
    return Fit(float(latency), float(1e6 / us_per_byte), float(error))


def _slope(bytes_per_us: np.ndarray) -> float:
    """Returns the microseconds per byte that fit best without a latency."""
    return float(bytes_per_us.sum() / (bytes_per_us**2).sum())
