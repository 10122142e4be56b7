"""Tokens per second that the loader delivers and that gpt_tiny's train step consumes on the same
machine. Target: twice as many.

Joined and separate documents, read in the caller's thread or by one or two of Grain's. A batch
counts when it is on the device.
"""

from __future__ import annotations

import contextlib
import dataclasses
import statistics
import sys
import tempfile
import time
from pathlib import Path

import jax
import tiny
from record import Record, Row, options

from mesh_lm.config import TrainConfig
from mesh_lm.data.batches import Batches
from mesh_lm.data.corpus import TextCorpus, prepare
from mesh_lm.optim import Optimizer
from mesh_lm.parallel.engine import batch_sharding
from mesh_lm.state.initial import init_state
from mesh_lm.training.step import train_step

TARGET = 2.0


def with_data(config: TrainConfig, **changes: object) -> TrainConfig:
    return dataclasses.replace(config, data=dataclasses.replace(config.data, **changes))


def loader_rate(config: TrainConfig, corpus: TextCorpus, seconds: float) -> float:
    """Returns tokens per second, without the first few batches."""
    batches = Batches(config, corpus, batch_sharding(tiny.layout(config))).train()
    with contextlib.closing(batches):
        for _ in range(config.data.prefetch + 2):
            jax.block_until_ready(next(batches))
        n, start_time = 0, time.perf_counter()
        while time.perf_counter() - start_time < seconds:
            jax.block_until_ready(next(batches)[1])
            n += 1
        return n * config.tokens_per_step / (time.perf_counter() - start_time)


def model_rate(config: TrainConfig, corpus: TextCorpus, steps: int) -> float:
    """Returns tokens per second of the real train step with its batch already on the device, from
    the median step."""
    layout, optimizer = (
        tiny.layout(config),
        Optimizer(config.optimizer, config.train.steps, config.diloco),
    )
    batches = Batches(config, corpus, batch_sharding(layout)).train()
    with contextlib.closing(batches):
        _, batch = next(batches)
    step, state, times = (
        train_step(layout, optimizer, config.seed),
        init_state(layout, optimizer, config.seed),
        [],
    )
    for _ in range(2 + steps):
        start_time = time.perf_counter()
        state, metrics = step(state, batch)
        jax.block_until_ready((state, metrics))
        times.append(time.perf_counter() - start_time)
    return config.tokens_per_step / statistics.median(times[2:])


def main() -> int:
    arguments = options(__doc__ or "").parse_args()
    record = Record(
        f"loader{'-quick' * arguments.quick}", arguments.output, device=jax.devices()[0].device_kind
    )
    steps, seconds = (2, 0.2) if arguments.quick else (20, 4.0)
    with tempfile.TemporaryDirectory(prefix="loader-") as directory:
        config = tiny.config(Path(directory), arguments.quick, steps=100)
        corpus = prepare(config.data, vocab=config.data.tokenizer_vocab)
        rows: list[Row] = []
        for documents in ("joined", "separate"):
            data_config = with_data(config, documents=documents)
            consumed = model_rate(data_config, corpus, steps)
            for threads in (0, 1, 2):
                rate = loader_rate(with_data(data_config, threads=threads), corpus, seconds)
                ratio = rate / consumed
                rows.append({"documents": documents, "threads": threads, "loader_tokens_per_s": rate, "model_tokens_per_s": consumed,
                             "ratio": ratio, "holds": ratio >= TARGET})  # fmt: skip
    note = (
        f"Batches of {config.train.global_batch} sequences of {config.model.seq_len} tokens; "
        f"target: a ratio of {TARGET:g}."
    )
    record.table(
        "Loader against model",
        rows,
        f"{note} Loader and model are measured one after the other, each with all cores.",
    )
    record.write()
    return 0


if __name__ == "__main__":
    sys.exit(main())
