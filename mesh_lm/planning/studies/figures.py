"""Studies from their rows: the sentences, tables and pictures of each."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from mesh_lm.errors import ConfigError
from mesh_lm.planning.paper.constants import HELD_OUT
from mesh_lm.planning.studies import charts
from mesh_lm.planning.studies.charts import PREDICTED
from mesh_lm.planning.studies.output import Picture, Study
from mesh_lm.planning.studies.published import TARGET, WEAK
from mesh_lm.planning.studies.replica_bytes import BytesRow
from mesh_lm.planning.studies.scaling import ScalingRow, ShareRow, beside_published
from mesh_lm.planning.studies.strategies import (
    HEADROOM,
    TIE,
    StrategyRow,
    fitting_bytes,
    points_of,
    telling_point,
    winner,
)
from sharding_rules.lab.rates import OPTIMISTIC, SUSTAINED


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


GIB = 2**30
ERROR_WORDS = (
    "The formulas were off compiled programs that they had not seen by "
    f"{HELD_OUT.step_mean:.0%} of the step in the mean and {HELD_OUT.step_max:.0%} at most, and "
    f"by {HELD_OUT.peak_mean:.0%} of the peak in the mean and {HELD_OUT.peak_max:.0%} at most: "
    "compile a layout before you use it."
)
"""The error of what is on paper, as every page of it says."""


def of_strategies(
    rows: Sequence[StrategyRow],
    detail: Sequence[StrategyRow],
    target: str,
    seq_len: int,
    batch: int,
    command: str,
) -> Study:
    """Returns the study of the rows of `side_by_side`.

    detail: the rows of the point whose strategies are drawn side by side. Others: those of
    `side_by_side`.
    """
    about = f"{target.upper()}s, {batch:,} sequences of {seq_len:,} tokens a step"
    limit = fitting_bytes(target) / GIB
    of_points = points_of(rows)
    n_unserved = sum(winner(of_point) is None for of_point in of_points.values())
    sentences = [
        f"Models of GPT's shape on {about}. Times are on paper, predicted, never measured; bytes "
        "are those of the closed forms.",
        f"{ERROR_WORDS} A layout counts as fitting if its peak leaves {HEADROOM:.0%} of it free "
        "besides the margin of a plan.",
        f"The map names the strategy with the fewest decisions among those within {TIE:.0%} of the "
        "fastest. The speed of links is assumed, not measured.",
    ]
    if n_unserved:
        sentences.append(f"No layout fits at {n_unserved} of {len(of_points)} points.")
    n_compiled = sum(row.compiled_fits is not None for row in rows)
    if n_compiled:
        sentences.append(
            f"{n_compiled} programs were compiled (* in the map), where pure data parallelism and "
            "hybrids are nearest to each other on paper."
        )
    first = detail[0]
    point = f"{first.size.upper()} parameters on {first.gpus:,} GPUs"
    pictures = (
        Picture(
            "winners",
            "Which strategy to use, by size of model and number of GPUs",
            functools.partial(charts.draw_winners, rows, about, batch),
        ),
        Picture(
            "pure_and_hybrid",
            "Efficiency of pure data parallelism and of hybrids over numbers of GPUs",
            functools.partial(charts.draw_pure_and_hybrid, rows, about),
        ),
        Picture(
            "side_by_side",
            f"Memory, bytes by network and efficiency of every strategy: {point}",
            functools.partial(charts.draw_side_by_side, detail, limit, about),
        ),
    )
    return Study(
        "strategies", "Strategies side by side", sentences, command, {"strategies": rows}, pictures
    )


def point_of(rows: Sequence[StrategyRow], text: str) -> Sequence[StrategyRow]:
    """Returns the rows of a point, as 10b@64; of the most telling one if the text is empty.

    Raises ConfigError if the study has no such point.
    """
    if not text:
        return telling_point(rows)
    size, _, gpus = text.lower().partition("@")
    points = points_of(rows)
    if not gpus.isdecimal() or (size, int(gpus)) not in points:
        example_size, example_gpus = next(iter(points))
        raise ConfigError(
            f"--detail={text}: the study has no such point; write one as "
            f"{example_size}@{example_gpus}"
        )
    return points[size, int(gpus)]


def of_scaling(
    rows: Sequence[ScalingRow],
    shares: Sequence[ShareRow],
    title: str,
    target: str,
    command: str,
    *,
    grows: bool,
    n_points: int,
) -> Study:
    """Returns the study of the rows of `scaled`.

    title: what is scaled. grows: whether the models or the batch grow with the GPUs. n_points: the
    points that the study has when it is finished.
    """
    about = f"{target.upper()}s; at each point the fastest of the layouts that were compiled"
    rates = {"fast": OPTIMISTIC.matmul.value, "slow": SUSTAINED.matmul.value}
    sentences = [
        f"{title}. Every point is compiled with the layout that the planner found; times are "
        "predicted, never measured, from the fast to the slow end.",
        *beside_published(rows, rates),
    ]
    if target != TARGET and any(row.config in WEAK for row in rows):
        sentences.append(
            "What Megatron-LM has published of these models is of H100s, and is not compared with "
            f"{target.upper()}s."
        )
    if len(rows) < n_points:
        sentences.append(
            f"The study was interrupted: {n_points - len(rows)} of {n_points} points are missing. "
            "The same command continues."
        )
    unserved = [row for row in rows if row.status]
    for row in unserved:
        sentences.append(f"{row.config} on {row.gpus:,}: {row.status}.")
    n_models = len({row.config for row in rows})
    pictures = [
        Picture(
            "efficiency",
            f"{title}: TFLOP/s of each GPU",
            functools.partial(
                *(charts.draw_efficiency, rows, _efficiency_title(rows, title), about),
                named=n_models > 1,
            ),
        )
    ]
    if n_models == 1:
        throughput = functools.partial(
            charts.draw_throughput, rows, _throughput_title(rows, title), f"{about}, {PREDICTED}"
        )
        picture = Picture("throughput", f"{title}: tokens per second", throughput)
        pictures.insert(0, picture)
    if shares:
        communication = functools.partial(charts.draw_communication, shares, about)
        picture = Picture(
            "communication", f"{title}: communication by kind and axis", communication
        )
        pictures.append(picture)
    kind = "weak" if grows else "strong"
    tables = {f"{kind}_scaling": rows, f"{kind}_communication": shares}
    return Study(f"{kind}_scaling", title, sentences, command, tables, pictures)


def _efficiency_title(rows: Sequence[ScalingRow], title: str) -> str:
    """Returns the title of a picture: what is left of the first point's TFLOP/s at the last."""
    served = [row for row in rows if row.tflops_fast]
    if len(served) < 2:
        return title
    kept = (served[-1].tflops_fast or 0) / (served[0].tflops_fast or 1)
    text = f"{title}: {served[-1].gpus:,} GPUs keep {kept:.0%} of the rate on {served[0].gpus:,}"
    published = [row.published_tflops for row in served if row.published_tflops]
    if len(published) > 1:
        text += f" (published: {published[-1] / published[0]:.0%})"
    return text


def _throughput_title(rows: Sequence[ScalingRow], title: str) -> str:
    served = [row for row in rows if row.tokens_fast]
    if len(served) < 2:
        return title
    first = served[0]
    last = served[-1]
    faster = (last.tokens_fast or 0) / (first.tokens_fast or 1)
    return f"{title}: {last.gpus / first.gpus:.3g} times the GPUs, {faster:.3g} times the tokens"
