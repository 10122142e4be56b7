"""Ten random models on random numbers of GPUs: the layout that `mesh-lm plan --best` chooses, and
the best of 20 that were drawn uniformly.

The models come from seeds 3f09f97/0 to /9, and so do the drawn layouts: of those that `check`
accepts and that fit on paper. Everything is priced on paper before anything is compiled, so that
the results also say how good the formulas are for models to which they were not fitted. An
interrupted run continues with the same command: rows of the newest results are kept, and compiled
programs are cached. Needs the compiler for CUDA: pip install -e '.[aot]'.
"""

from __future__ import annotations

import dataclasses
import math
import random
import sys
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
from layout_pools import PROGRAMS, PROGRAMS_NOTE, newest, program_row
from plan_table import TARGET
from record import Record, Row, options

TITLE = "The layout chosen, and the best of those drawn"
NOTE = (
    "Steps are predicted, never measured. drawn: uniform draws that were compiled and fit. ratio: "
    "the step of the chosen layout over the fastest of them; from 1.03 up the choice was wrong."
)
N_MODELS = 10
N_DRAWN = 20
_MOST_DRAWS = 2000


@dataclasses.dataclass(frozen=True)
class Problem:
    """A model, its batch and a number of GPUs."""

    name: str
    n_devices: int
    model: dict[str, Any]
    """Fields of a DecoderConfig."""
    global_batch: int

    def config(self) -> Any:
        """Returns the run, with a layout that says nothing: replicas on all GPUs."""
        from mesh_lm.config import TrainConfig, TrainLoop
        from mesh_lm.model import DecoderConfig
        from sharding_rules import MeshConfig, preset

        return TrainConfig(
            output="runs/random",
            model=DecoderConfig(**self.model),
            mesh=MeshConfig(data=-1),
            rules=preset("ddp"),
            train=TrainLoop(global_batch=self.global_batch),
        )


def random_problem(number: int) -> Problem:
    """Returns the problem of seed 3f09f97/number: 0.2 to 40 billion parameters, 8 to 512 GPUs."""
    draw = random.Random(f"3f09f97/{number}")
    d_head = draw.choice([64, 128, 128])
    d_model = draw.choice([1024, 1536, 2048, 3072, 4096, 5120, 6144, 8192])
    n_heads = d_model // d_head
    n_kv_heads = draw.choice([n for n in (4, 8, n_heads) if n_heads % n == 0])
    is_gated = draw.random() < 0.6
    seq_len = draw.choice([1024, 2048, 4096, 8192])
    n_devices = draw.choice([8, 16, 32, 64, 96, 128, 256, 512])
    # 256 k to 4 M tokens a step, and at least one sequence on each pair of GPUs.
    sequences = 2 ** draw.randint(18, 22) // seq_len
    global_batch = max(1, round(sequences / n_devices)) * n_devices
    model = {
        "vocab_size": draw.choice([32_000, 50_257, 128_256]),
        "seq_len": seq_len,
        "n_layers": draw.choice([12, 16, 20, 24, 32, 40]),
        "d_model": d_model,
        "n_heads": n_heads,
        "n_kv_heads": n_kv_heads,
        "d_ff": round(d_model * (8 / 3 if is_gated else 4) / 256) * 256,
        "activation": "swiglu" if is_gated else "gelu",
        "biases": not is_gated,
        "tied": draw.random() < 0.5,
        "norm": "rmsnorm" if is_gated else "layernorm",
        "positions": "rotary" if is_gated else "learned",
        "dtype": "bfloat16",
        "vocab_multiple": 1024,
    }
    return Problem(f"3f09f97/{number}", n_devices, model, global_batch)


def main() -> int:
    parser = options(__doc__ or "")
    parser.add_argument("--only", default="", help="numbers of seeds, with commas between")
    parser.add_argument("--compiles", type=int, default=6)
    args = parser.parse_args()
    numbers = [int(word) for word in args.only.split(",")] if args.only else range(N_MODELS)
    if args.quick:
        numbers = [0]
    record = Record(f"random_layouts{'-quick' * args.quick}", args.output)
    tables = {} if args.quick else newest("random_layouts")
    rows = {row["config"]: row for row in tables.get(TITLE, [])}
    programs = tables.get(PROGRAMS, [])
    for number in numbers:
        problem = random_problem(number)
        if problem.name in rows:
            continue
        n_drawn, compiles = (1, 1) if args.quick else (N_DRAWN, args.compiles)
        rows[problem.name], compiled = compared(problem, n_drawn, compiles)
        programs = [row for row in programs if row["config"] != problem.name] + compiled
        record.table(TITLE, [rows[name] for name in sorted(rows)], NOTE, show=False)
        record.table(PROGRAMS, programs, PROGRAMS_NOTE, show=False)
        record.write()
    return 0


def compared(problem: Problem, n_drawn: int, compiles: int) -> tuple[Row, list[Row]]:
    """Returns the choice beside the best of the drawn layouts, and all programs."""
    from mesh_lm.planning.best import options as words
    from mesh_lm.planning.best import search
    from mesh_lm.planning.paper.sizes import ModelSizes
    from mesh_lm.planning.program import compile_config, flags_of
    from sharding_rules.lab import LabError
    from sharding_rules.lab.flags import options as flags
    from sharding_rules.lab.side_by_side import compiled_side_by_side, parallel

    config = problem.config()
    sizes = ModelSizes.of(config)
    assert sizes

    def compiled(changed: Any) -> Any:
        options_ = flags(flags_of(changed, TARGET))
        return compile_config(changed, TARGET, problem.n_devices, options_)

    print(problem, flush=True)
    began = time.perf_counter()
    found = search(
        config,
        problem.n_devices,
        TARGET,
        compiled,
        compiles=compiles,
        from_scratch=True,
        say=print,
    )
    seconds = time.perf_counter() - began
    best = found.best
    chosen = [trial.row for trial in found.trials]
    drawn = drawn_layouts(problem, config, sizes, n_drawn, chosen)
    programs = [
        program_row(problem.name, problem.n_devices, sizes, trial.row, trial.report)
        for trial in found.trials
        if trial.row
    ]
    # The closures bind each config now: the loop's variable changes.
    to_compile = {
        name: (lambda changed=changed: compiled(changed)) for name, (_, changed) in drawn.items()
    }
    steps = {}
    for name, report in compiled_side_by_side(to_compile, parallel(), print):
        if isinstance(report, LabError):
            print(f"{name} does not compile: {report}")
            continue
        row = drawn[name][0]
        programs.append(program_row(problem.name, problem.n_devices, sizes, row, report))
        if report.fits and report.timeline:
            steps[name] = report.timeline.step / 1e6
    best_drawn = min(steps, key=lambda name: steps[name], default="")
    row: Row = {
        "config": problem.name, "devices": problem.n_devices,
        "parameters": params_of(sizes), "global_batch": problem.global_batch,
        "considered": found.considered, "compiles": len(found.trials), "search_s": seconds,
        "chosen_step_s": best.seconds if best else None, "drawn": len(steps),
        "best_drawn_step_s": steps.get(best_drawn),
        "ratio": best.seconds / steps[best_drawn] if best and steps else None,
        "chosen": " ".join(words(best.changes)) if best else "", "best_drawn": best_drawn,
    }  # fmt: skip
    print(row, flush=True)
    return row, programs


def drawn_layouts(
    problem: Problem,
    config: Any,
    sizes: Any,
    n_drawn: int,
    chosen: list[Mapping[str, float] | None],
) -> dict[str, tuple[dict[str, float], Any]]:
    """Returns layouts that were drawn uniformly, by name: its row, and its config.

    They are of those that fit on paper, that `check` accepts and that the search did not compile.
    """
    from mesh_lm.config.layout import with_fields
    from mesh_lm.errors import ConfigError
    from mesh_lm.planning.best import changes_of, fields_of, hardware_of
    from mesh_lm.planning.best import options as words
    from mesh_lm.planning.paper.layouts import enumerated
    from mesh_lm.planning.paper.price import price
    from mesh_lm.training.check import check
    from sharding_rules import ShardingRuleError

    hardware = hardware_of(TARGET)
    layouts = enumerated(sizes, problem.n_devices, hardware.node)
    layouts = layouts.take(price(sizes, layouts, hardware).peak <= hardware.memory)
    seed = int.from_bytes(f"draws of {problem.name}".encode(), "big")
    order = np.random.default_rng(seed).permutation(len(layouts))
    drawn: dict[str, tuple[dict[str, float], Any]] = {}
    for i in order[:_MOST_DRAWS]:
        if len(drawn) == n_drawn:
            break
        row = layouts.row(int(i))
        if row in chosen:
            continue
        fields = fields_of(row, config)
        changed = with_fields(config, fields)
        try:
            check(changed, problem.n_devices)
        except (ConfigError, ShardingRuleError):
            continue
        drawn[" ".join(words(changes_of(fields, config)))] = (row, changed)
    return drawn


def params_of(sizes: Any) -> int:
    """Returns the parameters of a model."""
    in_layers = sizes.layers * (sizes.matrices + sizes.vectors)
    return math.floor(in_layers + sizes.tables + sizes.positions)


if __name__ == "__main__":
    sys.exit(main())
