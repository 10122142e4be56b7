"""The communication between islands: measured in a compiled outer step, and by formula."""

from __future__ import annotations

from mesh_lm.config import TrainConfig
from sharding_rules import ISLAND
from sharding_rules.lab import Report
from sharding_rules.lab.summary import size


def report_facts(
    config: TrainConfig, step: Report, outer: Report | None
) -> tuple[tuple[str, str], ...]:
    """Returns a line for the report of a step: the bytes that the step and the outer step send.

    Those of the outer step are also given as an average over its steps.
    """
    if outer is None:
        return ()
    outer_steps = config.diloco.outer_steps
    outer_bytes = outer.wire_bytes(ISLAND)
    text = (
        f"{config.mesh.island}; a step sends {size(step.wire_bytes(ISLAND))} over island, the "
        f"outer step every {outer_steps} steps {size(outer_bytes)}: "
        f"{size(outer_bytes / outer_steps)} a step"
    )
    return (("islands", text),)


def wire_bytes(weight_bytes: float, islands: int, outer_steps: int) -> float:
    """Returns the bytes that a device sends over `island` in a step, on average.

    weight_bytes: fp32 bytes of the weights that the device holds, which a ring sums once every
    `outer_steps` steps. It is exposed, too: the outer step has no computation beside it. Data
    parallelism sends the same in every step (`outer_steps` = 1).
    """
    return 2 * (islands - 1) / islands * weight_bytes / outer_steps
