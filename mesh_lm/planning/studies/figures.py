"""Studies from their rows: the sentences, tables and pictures of each."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from mesh_lm.planning.studies import charts
from mesh_lm.planning.studies.output import Picture, Study
from mesh_lm.planning.studies.replica_bytes import BytesRow


def of_replica_bytes(rows: Sequence[BytesRow], config: str, command: str) -> Study:
    """Returns the study of the rows of `replica_bytes`."""
    sentences = (
        "What one GPU sends in a step, by the closed forms to which compiled programs are held. "
        "Nothing was compiled, and nothing was measured.",
        "A ring of n sends (n - 1) / n of what it gathers or scatters, and twice that for an "
        "all-reduce. A group that spans several nodes counts as between nodes.",
    )
    picture = Picture(
        "bytes",
        f"Bytes that each GPU sends in a step of {config}, by strategy and number of GPUs",
        functools.partial(charts.draw_replica_bytes, rows, config),
    )
    return Study(
        "bytes",
        f"{config}: what data parallelism sends",
        sentences,
        command,
        {"bytes": rows},
        (picture,),
    )
