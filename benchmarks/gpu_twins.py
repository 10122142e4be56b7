"""Train steps of ours and of torch.compile in turns, and one traced step: parts of
gpu_minutes.py."""

from __future__ import annotations

import random
import statistics
import subprocess
import time
from collections.abc import Iterator, Mapping
from typing import Any

import gpu_trace
from gpu_attention import TORCH, note_of, torch_there
from gpu_lab import TINY, Lab, Table
from gpu_predictions import predicted, programs, twin
from gpu_training import TIMED, TINY_TIMED, batch_of
from record import Row

OURS, THEIRS = "mesh_lm", "torch.compile"
TOGETHER = {"gpt2_124m": 40, "gpt_1_3b": 90}
"""Config -> GiB that JAX may take on a GPU on which both processes fit beside each other."""
SECONDS, ROUNDS = 2.0, 6
"""Seconds of a turn, and the turns of each process."""
BLOCKS = {"gpt2_124m": "steps_124m", "gpt_1_3b": "steps_1_3b"}
"""Config -> the block that times it."""
TURN_COLUMNS = (
    "steps",
    "step_ms",
    "slowest_ms",
    "loss_last",
    "watts",
    "sm_mhz",
    "celsius",
    "host_load",
)
STARTS = 2
"""Starts of each process where both do not fit beside each other."""


class Lost(Exception):
    """A process that ended, hangs or reported an error. The message says which."""


class Entrant:
    """A process that makes steps when it is its turn."""

    def __init__(self, lab: Lab, name: str, task: str, **arguments: Any) -> None:
        self.lab, self.name = lab, name
        self.process, self.out, self.err = lab.start(task, stdin=subprocess.PIPE, **arguments)
        self.n_rows = 0

    def row(self) -> Row:
        """Returns its next row. Raises Lost."""
        while len(rows := self.lab.rows(self.out)) <= self.n_rows:
            ended = self.process.poll() is not None
            if ended and len(self.lab.rows(self.out)) <= self.n_rows:
                self.lab.note(f"{self.name}: exit status {self.process.returncode}", self.err)
                raise Lost
            if self.lab.left() < 0:
                self.lab.note(f"{self.name}: stopped at the time limit", self.err)
                raise Lost
            time.sleep(0.02)
        self.n_rows += 1
        row = rows[self.n_rows - 1]
        if "error" in row:
            self.lab.problems.append(f"{self.name}: {row['error']}")
            raise Lost
        return row

    def turn(self) -> Row:
        """Lets it make a turn of steps, and returns its row. Raises Lost."""
        self._tell("turn")
        return self.row()

    def close(self) -> None:
        """Ends the process."""
        self._tell("next")
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.lab.rows(self.out)  # which notes the modules that it has imported

    def _tell(self, line: str) -> None:
        assert self.process.stdin
        try:
            self.process.stdin.write(f"{line}\n".encode())
            self.process.stdin.flush()
        except OSError:  # it has ended, which its next row will say
            return


def steps_124m(lab: Lab) -> Iterator[Table]:
    """Train steps of gpt2_124m, 32 sequences of 1,024, beside torch.compile with FlashAttention:
    see `twins`."""
    yield from twins(lab, "gpt2_124m")


def steps_1_3b(lab: Lab) -> Iterator[Table]:
    """Train steps of gpt_1_3b, 8 sequences of 2,048, beside torch.compile with FlashAttention: see
    `twins`."""
    yield from twins(lab, "gpt_1_3b")


def twins(lab: Lab, name: str) -> Iterator[Table]:
    """Train steps beside torch.compile with FlashAttention (scaled_dot_product_attention), in turns
    of 2 s in random order; the first step of a turn is not timed. Both: bf16 with fp32 weights and
    moments, clipping, (fused) AdamW, no rematerialisation, the same tokens in a step. step_ms: the
    median of the turns; spread: (slowest - fastest turn) / median. ratio: our tokens per second
    over theirs, the median of the rounds, with the lowest and the highest. predicted_ms:
    gpu_predictions.py's, for one such GPU. joules: of the GPU alone."""
    fields = {**TINY, **TINY_TIMED} if lab.dry_run else TIMED[name][1]
    batch = 2 if lab.dry_run else batch_of(lab, name)
    ours = twin(lab, name)
    shape = lab.run(
        "shapes", platform="cpu", models={name: fields}, device_kind=lab.device["device_kind"]
    )[0]
    starts: dict[str, Any] = {
        OURS: lambda: Entrant(lab, OURS, "turns", variants=[ours], **_ours(lab))
    }
    if torch_there():
        their = shape | {"batch": batch}
        starts[THEIRS] = lambda: Entrant(
            lab,
            THEIRS,
            "turns",
            worker=TORCH,
            variants=[their],
            seconds=_seconds(lab),
            dry_run=lab.dry_run,
        )
    else:
        lab.left_out.append("torch is not installed: ours alone")
    together = lab.dry_run or lab.device.get("memory_limit_gib", 0) >= TOGETHER[name]
    plan = predicted(lab, BLOCKS[name])
    rows_by_entrant: dict[str, list[Row]] = {entrant: [] for entrant in starts}
    for entrant, row in _rows(lab, starts, together):
        rows_by_entrant[entrant].append(row)
        turns = [row for rows in rows_by_entrant.values() for row in rows if "step_ms" in row]
        yield f"{name}, turns", turns, note_of(twins)
        yield (
            f"{name} beside torch.compile",
            compared(name, shape, batch, rows_by_entrant, plan),
            note_of(twins),
        )


def _ours(lab: Lab) -> Row:
    return {
        "directory": str(lab.directory),
        "seconds": _seconds(lab),
        "interpret": lab.dry_run,
        "cache": "tuned",
    }


def _seconds(lab: Lab) -> float:
    return 0.0 if lab.dry_run else SECONDS


def _rows(lab: Lab, starts: Mapping[str, Any], together: bool) -> Iterator[tuple[str, Row]]:
    """Yields (entrant, row) of each start and each turn."""
    order = random.Random(0)
    rounds = 2 if lab.dry_run else ROUNDS
    n_starts = 1 if together else STARTS
    for start in range(n_starts):
        groups = (
            [[*starts]]
            if together
            else [[entrant] for entrant in order.sample([*starts], len(starts))]
        )
        for group in groups:
            entrants = {entrant: starts[entrant]() for entrant in group}
            yield from _group(lab, entrants, order, start, rounds // n_starts)


def _group(
    lab: Lab, entrants: dict[str, Entrant], order: random.Random, start: int, rounds: int
) -> Iterator[tuple[str, Row]]:
    """Yields (entrant, row) of processes that are there at the same time."""
    running = dict(entrants)

    def asked(entrant: str, row: Any) -> Iterator[tuple[str, Row]]:
        try:
            yield entrant, row()
        except Lost:
            del running[entrant]

    try:
        for entrant in entrants:
            yield from asked(entrant, running[entrant].row)
        for number in range(rounds):
            for entrant in order.sample([*running], len(running)):
                for _, row in asked(entrant, running[entrant].turn):
                    columns = {
                        column: value for column, value in row.items() if column in TURN_COLUMNS
                    }
                    yield (
                        entrant,
                        {"entrant": entrant, "start": start, "round": start * rounds + number}
                        | columns,
                    )
    finally:
        for entrant in entrants.values():
            entrant.close()


def compared(
    name: str, shape: Row, batch: int, rows_by_entrant: dict[str, list[Row]], plan: Row
) -> list[Row]:
    """Returns a row for each framework: medians and spreads of its turns, and the ratio of the
    two."""
    tokens = batch * shape["fields"]["seq_len"]
    turns = {
        entrant: [row for row in rows if "step_ms" in row]
        for entrant, rows in rows_by_entrant.items()
    }
    rows: list[Row] = []
    for entrant, each in turns.items():
        if not each:
            continue
        times = [row["step_ms"] for row in each]
        ms = statistics.median(times)
        rate = 1e3 * tokens / ms
        row: Row = {
            "model": name,
            "entrant": entrant,
            "sequences": batch,
            "tokens": tokens,
            "turns": len(each),
            "step_ms": ms,
        }
        row |= {"spread": (max(times) - min(times)) / ms, "tokens_per_s": rate}
        row["mfu"] = (
            rate * shape["flops_per_token"] / shape["peak_flops"] if shape["peak_flops"] else None
        )
        for column in ("watts", "sm_mhz", "celsius", "host_load"):
            values = [turn[column] for turn in each if column in turn]
            row |= {column: statistics.fmean(values)} if values else {}
        row |= {"joules_per_token": row["watts"] / rate} if "watts" in row else {}
        row |= {
            column: rows_by_entrant[entrant][0].get(column)
            for column in ("compile_s", "loss_first")
        }
        if entrant == OURS and plan:
            predicted = 1e3 * plan["predicted_step_s"]
            row |= {"predicted_ms": predicted, "measured_by_predicted": ms / predicted}
        rows.append(row)
    ratios = sorted(ratios_of(turns.get(OURS, []), turns.get(THEIRS, [])))
    if ratios:
        rows[0] |= {
            "ratio": statistics.median(ratios),
            "lowest_ratio": ratios[0],
            "highest_ratio": ratios[-1],
        }
    return rows


def ratios_of(ours: list[Row], theirs: list[Row]) -> list[float]:
    """Returns their time over ours for each round that both have."""
    ours_by_round = {row["round"]: row["step_ms"] for row in theirs}
    return [
        ours_by_round[row["round"]] / row["step_ms"]
        for row in ours
        if row["round"] in ours_by_round
    ]


def trace(lab: Lab) -> Iterator[Table]:
    """One train step of gpt_1_3b (64 sequences, 8 microbatches, as gpu_truth.py's `steps`) under
    jax.profiler: its kernels, summed by the kinds of the lab's timeline, beside the prediction for
    one GPU of this kind. step_ms: the median of five steps without the profiler; share: of that. no
    kernel: what is left of it."""
    yield from _traced_step(lab, "trace", note_of(trace))


def trace_124m(lab: Lab) -> Iterator[Table]:
    """The same for the step of `steps_124m`, which took 1.05 times torch.compile's time on
    2026-11-28."""
    yield from _traced_step(lab, "steps_124m", note_of(trace_124m), " of gpt2_124m")


def _traced_step(lab: Lab, program: str, note: str, model: str = "") -> Iterator[Table]:
    """Yields the tables of one traced step. program: which of `gpu_predictions.programs`."""
    directory = lab.directory / "trace"
    plan = predicted(lab, program)
    options: Row = {"directory": str(lab.directory), "cache": "tuned", **programs(lab)[program]}
    ran = lab.run("traced", **options, steps=0 if lab.dry_run else 5, trace=str(directory))
    row = {name: value for part in ran for name, value in part.items()}
    predictions = {
        name: plan.get(name) for name in ("target", "predicted_step_s", "predicted_peak_gib")
    }
    yield f"Traced step{model}", [row | predictions], note
    if "step_ms" not in row:
        return
    kernels = gpu_trace.kernels(directory)
    if not kernels:
        lab.problems.append("the trace has no kernels: may this user profile the GPU?")
        return
    kind_rows = gpu_trace.by_kind(kernels, plan.get("kinds", {}), row["step_ms"])
    yield f"One step{model} by kind", [*kind_rows], note
    yield (
        f"Longest kernels of a step{model}",
        gpu_trace.longest(kernels),
        "In all calls of one step.",
    )
