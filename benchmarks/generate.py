"""Tokens per second that gpt_tiny generates: with its cache, streamed, and without a cache, reading
the full text again for every token.

fp32, random weights, greedy, no stop: every text has all its tokens. The first call of each
compiles and is not counted.
"""

from __future__ import annotations

import dataclasses
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
import tiny
from record import Record, Row, milliseconds, options

from mesh_lm.inference import Engine, Sampling
from mesh_lm.inference.engine import NoCacheModel
from mesh_lm.model import DecoderConfig
from mesh_lm.parallel.layout import Params

PROMPT = 16
REPEATS = {"cache": 5, "cache, streamed": 5, "no cache": 2}


class WithoutCache(Engine):
    def _model(self, params: Params) -> NoCacheModel:
        return NoCacheModel(self.layout.bind(params).logits)


def whole(engine: Engine, prompts: list[list[int]], new: int) -> Callable[[], list]:
    return lambda: engine.start(prompts, new).advance()


def streamed(engine: Engine, prompts: list[list[int]], new: int) -> Callable[[], list]:
    def run() -> list:
        session, made = engine.start(prompts, new), [[] for _ in prompts]
        while not session.done:
            made = [
                row + new_tokens for row, new_tokens in zip(made, session.advance(1), strict=True)
            ]
        return made

    return run


def main() -> int:
    arguments = options(__doc__ or "").parse_args()
    record = Record(
        f"generate{'-quick' * arguments.quick}",
        arguments.output,
        device=jax.devices()[0].device_kind,
    )
    with tempfile.TemporaryDirectory(prefix="generate-") as directory:
        config = tiny.config(Path(directory), arguments.quick, steps=1)
    rows: list[Row] = []
    assert isinstance(config.model, DecoderConfig)
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, dtype="float32"))
    layout, new = tiny.layout(config), config.model.seq_len - PROMPT
    params = jax.jit(layout.init)(jax.random.key(0))
    engines = {
        kind: kind(layout, params, Sampling(temperature=0)) for kind in (Engine, WithoutCache)
    }
    for batch in (1, 2) if arguments.quick else (1, 8):
        prompts = (
            np.random.default_rng(0).integers(0, config.model.vocab_size, (batch, PROMPT)).tolist()
        )
        runs = {
            "cache": whole(engines[Engine], prompts, new),
            "cache, streamed": streamed(engines[Engine], prompts, new),
            "no cache": whole(engines[WithoutCache], prompts, new),
        }
        # compiles, too
        texts = {way: [[token for token, _ in row] for row in run()] for way, run in runs.items()}
        rates = {
            way: 1e3 * batch * new / milliseconds(run, REPEATS[way], warm_up=0)
            for way, run in runs.items()
        }
        for way, rate in rates.items():
            agreement = np.mean(
                [
                    a == b
                    for x, y in zip(texts[way], texts["cache"], strict=True)
                    for a, b in zip(x, y, strict=True)
                ]
            )
            rows.append({"batch": batch, "way": way, "tokens_per_s": rate, "ratio": rate / rates["no cache"],
                         "tokens_as_with_cache": float(agreement)})  # fmt: skip
    note = (
        f"Prompts of {PROMPT} tokens, {config.model.seq_len - PROMPT} new ones in each text; the "
        "prompts are read within the time."
    )
    record.table("Tokens a second", rows, note)
    record.write()
    return 0


if __name__ == "__main__":
    sys.exit(main())
