"""What islands send to one another: measured in a compiled outer step, and on paper."""

from __future__ import annotations

from mesh_lm.config import TrainConfig
from sharding_rules import ISLAND
from sharding_rules.lab import Report
from sharding_rules.lab.summary import size


def report_facts(
    config: TrainConfig, step: Report, outer: Report | None
) -> tuple[tuple[str, str], ...]:
    """Returns a line for the report of a step: what it sends over `island`, and what the outer step
    adds to each step on average.
    """
    if outer is None:
        return ()
    every, sent = config.optimizer.outer_steps, outer.wire_bytes(ISLAND)
    apart = f"a step sends {size(step.wire_bytes(ISLAND))} over island"
    return (
        (
            "islands",
            (
                f"{config.mesh.island}; {apart}, the outer step every {every} steps {size(sent)}: "
                f"{size(sent / every)} a step"
            ),
        ),
    )


def wire_bytes(weight_bytes: float, islands: int, outer_steps: int) -> float:
    """Returns the bytes that a device sends over `island` in a step, on average over the steps
    between two outer steps.

    weight_bytes: fp32 bytes of the weights that the device holds, which a ring sums once every
    `outer_steps` steps. It is exposed, too: the outer step has no computation beside it. Data
    parallelism sends the same in every step (`outer_steps` = 1).
    """
    return 2 * (islands - 1) / islands * weight_bytes / outer_steps
