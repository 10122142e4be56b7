"""Predicts the steps that gpu_minutes.py measures, where there is no GPU: python
benchmarks/gpu_predictions.py --target=h200

A prediction compiles the whole step for the absent GPU, minutes on a small CPU. Made in advance it
costs none of a session's time on a GPU, and cannot know what the session will measure.
gpu_minutes.py takes the newest file for its kind of GPU, and leaves the columns empty if there is
none, or if the step has changed since. `--dry-run` predicts one tiny step.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from gpu_lab import TINY, Lab, compiler_there
from gpu_training import TIMED, TINY_TIMED, variant
from gpu_truth import CONFIG, RULES, SHARE, target_of
from record import RESULTS, Record, Row, options

NAME = "gpu_predictions"
TARGETS = ("h100", "h200")
LIMIT = 1800.0
"""Seconds in which a step must compile."""


def twin(lab: Lab, name: str) -> Row:
    """Returns the worker's arguments for our side of the twins: no rematerialisation, one
    microbatch."""
    fields = {**TINY, **TINY_TIMED} if lab.dry_run else TIMED[name][1]
    ours = variant(lab, {"model": fields}, name, "mosaic" if lab.dry_run else "auto")
    if lab.dry_run:
        ours["changes"]["train"]["global_batch"] = 2
    return ours


def traced(lab: Lab) -> Row:
    """Returns the worker's arguments for the traced step of gpt_1_3b: 64 sequences in 8
    microbatches, as shipped."""
    model = {**TINY, **TINY_TIMED, "remat": "save_names"} if lab.dry_run else {"attention": "auto"}
    train = {"global_batch": 8, "microbatches": 2} if lab.dry_run else SHARE
    changes = {
        "model": model,
        "train": train,
        "optimizer": {"warmup_steps": 2},
        "launch": {"compile_cache": ""},
    }
    return {"changes": changes, "name": CONFIG, "rules": RULES}


def programs(lab: Lab) -> dict[str, Row]:
    """Returns the programs that are measured and predicted: block -> the config's name, its changed
    fields, and the rules."""
    specifications = {"trace": traced(lab)}
    for block, name in (("steps_124m", "gpt2_124m"), ("steps_1_3b", "gpt_1_3b")):
        changes = twin(lab, name)["changes"] | {"launch": {"compile_cache": ""}}
        specifications[block] = {"changes": changes, "name": name, "rules": "ddp"}
    return specifications


def predicted(lab: Lab, block: str) -> Row:
    """Returns the prediction for a block on the lab's kind of GPU; empty, with the reason in
    `left_out`, if none was made."""
    target = target_of(lab)
    command = f"python benchmarks/{NAME}.py --target={target}"
    if lab.dry_run:
        return {}
    files = sorted(RESULTS.glob(f"{NAME}_*_{target}.json"))
    if not files:
        lab.left_out.append(f"no prediction for {target}: {command}")
        return {}
    made = json.loads(files[-1].read_text(encoding="utf-8"))["predictions"].get(block)
    if made is None:
        lab.left_out.append(f"{block} is not predicted for {target}: {command}")
        return {}
    if made["program"] != json.loads(json.dumps(programs(lab)[block])):
        lab.left_out.append(
            f"the step of {block} has changed since it was predicted for {target}: {command}"
        )
        return {}
    return made["prediction"]


def main() -> int:
    """Runs the command line. Returns the exit status: 1 if a step could not be predicted."""
    parser = options(__doc__ or "", quick="--dry-run", quick_help="one tiny step")
    parser.add_argument(
        "--target", choices=TARGETS, default="h100", help="the kind of GPU (default: %(default)s)"
    )
    parser.add_argument("--blocks", default="", help="which, with commas (default: all)")
    arguments = parser.parse_args()
    if not compiler_there():
        print("XLA's compiler for CUDA is not installed: pip install '.[aot]'")
        return 1
    record = Record(NAME, arguments.output, kind=arguments.target)
    predictions: dict[str, Any] = {}
    record.data["predictions"] = predictions
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix=f"{NAME}-") as directory:
        lab = Lab(Path(directory), arguments.dry_run)
        lab.device = {"device_kind": arguments.target.upper()}
        chosen = programs(lab)
        if arguments.blocks:
            chosen = {block: chosen[block] for block in arguments.blocks.split(",")}
        elif arguments.dry_run:
            chosen = {"trace": chosen["trace"]}
        for block, program in chosen.items():
            lab.deadline = time.monotonic() + LIMIT
            made = lab.run(
                "predicted",
                platform="cpu",
                hidden=True,
                directory=directory,
                target=arguments.target,
                **program,
            )
            if not made or "error" in made[0]:
                continue
            prediction = made[0]
            predictions[block] = {"program": program, "prediction": prediction}
            shown = {column: value for column, value in prediction.items() if column != "kinds"}
            rows.append(
                {"block": block, "config": program["name"], "rules": program["rules"]} | shown
            )
            record.table(
                "Predicted steps",
                rows,
                "Times are predicted, never measured. lab_s: seconds that the prediction took.",
            )
            record.write()
    for problem in lab.problems:
        print(problem)
    return int(len(predictions) < len(chosen))


if __name__ == "__main__":
    sys.exit(main())
