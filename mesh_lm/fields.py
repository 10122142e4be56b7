"""The bounds of a config's fields, which stand with the field as metadata, and the mark of fields
that few runs change.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any, TypeVar

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Bounds:
    """The numbers that a field may have. None: no bound. NaN is outside of all bounds."""

    least: float | None = None
    """The smallest value."""
    most: float | None = None
    """The largest value."""
    above: float | None = None
    """The value must be greater."""
    below: float | None = None
    """The value must be smaller; infinity: the value must be finite."""

    def contain(self, value: float) -> bool:
        """Returns whether a value is within the bounds."""
        return (
            (self.least is None or value >= self.least)
            and (self.most is None or value <= self.most)
            and (self.above is None or value > self.above)
            and (self.below is None or value < self.below)
            and not math.isnan(value)
        )

    def __str__(self) -> str:
        words: list[str] = []
        if self.least is not None:
            words.append(f"at least {self.least}")
        if self.above is not None:
            words.append(f"above {self.above}")
        if self.most is not None:
            words.append(f"at most {self.most}")
        if self.below is not None:
            words.append("finite" if self.below == math.inf else f"below {self.below}")
        return " and ".join(words)


def option(
    default: T,
    *,
    least: float | None = None,
    most: float | None = None,
    above: float | None = None,
    below: float | None = None,
    expert: bool = False,
) -> T:
    """Returns a dataclass field with bounds, see `Bounds`.

    expert: few runs change it. --help leaves it out, --help-all shows it, and it is set like any
    other.
    """
    bounds = Bounds(least, most, above, below)
    metadata = {"bounds": None if bounds == Bounds() else bounds, "expert": expert}
    return dataclasses.field(default=default, metadata=metadata)


def expert(default: T, *, least: float | None = None) -> T:
    """Returns a field that few runs change, see `option`."""
    return option(default, least=least, expert=True)


def bound_problems(section: str, values: Any) -> Iterator[str]:
    """Yields a sentence for each field of a dataclass that is outside of its bounds.

    section: the path of the dataclass in the config, such as "optimizer.rule".
    """
    for field in dataclasses.fields(values):
        bounds = field.metadata.get("bounds")
        value = getattr(values, field.name)
        if bounds is not None and not bounds.contain(value):
            yield f"{section}.{field.name}={value} must be {bounds}"
