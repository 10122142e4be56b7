"""Compiles one model's training step for absent H100s with each way to save memory, one after
another: recomputation, ZeRO, 8-bit moments, offload, and parallelism.

llama3_8b on 8 GPUs, with 128 sequences of 8,192 tokens in a step. Nothing runs: times are predicted. Rows that today's results have already are not compiled again.
Needs the compiler for CUDA: pip install -e '.[aot]'.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Mapping
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
from offload import ALL, GIB, memory_and_step
from record import Record, Row, options

TARGET = "h100"
CONFIG = "llama3_8b"
GPUS = 8
SEQUENCES = 128
TITLE = "One model with each way to save memory"
NOTE = (
    "peak: of one GPU, in GiB, and below it the classes at that moment. Times are predicted, never "
    "measured; slow: at the sustained rates."
)


@dataclasses.dataclass(frozen=True)
class Subject:
    """A row. Those of a group change one thing after another."""

    group: str
    name: str
    fields: Mapping[str, Any]
    mesh: Mapping[str, int] = dataclasses.field(default_factory=lambda: {"data": GPUS})


SUBJECTS = (
    Subject("recomputation", "nothing recomputed", {"rules": "ddp"}),
    Subject("recomputation", "save_names", {"rules": "ddp", "model.remat": "save_names"}),
    Subject("recomputation", "save_attention", {"rules": "ddp", "model.remat": "save_attention"}),
    Subject("recomputation", "full", {"rules": "ddp", "model.remat": "full"}),
    Subject("ZeRO", "zero1", {"rules": "zero1", "model.remat": "full"}),
    Subject("ZeRO", "zero2", {"rules": "zero2", "model.remat": "full"}),
    Subject("ZeRO", "distributed", {"rules": "distributed", "model.remat": "full"}),
    Subject("ZeRO", "zero3", {"rules": "zero3", "model.remat": "full"}),
    Subject("ZeRO", "zero3, save_names", {"rules": "zero3", "model.remat": "save_names"}),
    Subject("8-bit AdamW", "ddp", {"rules": "ddp", "model.remat": "full", "8-bit": True}),
    Subject("8-bit AdamW", "zero2", {"rules": "zero2", "model.remat": "full", "8-bit": True}),
    Subject("offload", "ddp, mu and nu",
            {"rules": "ddp", "model.remat": "full", "optimizer.offload": ("mu", "nu")}),
    Subject("offload", "distributed, all",
            {"rules": "distributed", "model.remat": "full", "optimizer.offload": ALL}),
    Subject("offload", "zero3, all",
            {"rules": "zero3", "model.remat": "full", "optimizer.offload": ALL}),
    Subject("parallelism", "tensor 8", {"rules": "megatron_sp", "model.remat": "full"},
            {"tensor": GPUS}),
    Subject("parallelism", "pipeline 8", {"rules": "ddp", "model.remat": "full"},
            {"pipeline": GPUS}),
    Subject("parallelism", "sequence 8, zero3", {"rules": "zero3+ulysses", "model.remat": "full"},
            {"sequence": GPUS}),
)  # fmt: skip


def prepared(subject: Subject, quick: bool) -> Any:
    """Returns the config of a row: scanned layers, one sequence on a GPU in each microbatch."""
    from mesh_lm.config import load
    from mesh_lm.config.layout import with_fields
    from mesh_lm.optim import AdamW8
    from sharding_rules import MeshConfig

    config = load(CONFIG)
    model: dict[str, Any] = {
        "remat": "none",
        "remat_layers": None,
        "unroll": False,
    }
    if quick:
        model |= {"d_model": 512, "n_heads": 8, "n_kv_heads": 8, "d_ff": 1024, "n_layers": 8}
    mesh: dict[str, Any] = {"data": 1, "fsdp": 1, **subject.mesh}
    # A microbatch has one sequence for each of the replicas.
    microbatches = SEQUENCES // mesh["data"]
    config = dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, **model),
        mesh=MeshConfig(**mesh),
        train=dataclasses.replace(config.train, global_batch=SEQUENCES, microbatches=microbatches),
        launch=dataclasses.replace(config.launch, compile_cache="", xla_flags="auto"),
    )
    fields = dict(subject.fields)
    if fields.pop("8-bit", False):
        fields["optimizer.rule"] = AdamW8()
    return with_fields(config, fields)


def compiled(subject: Subject, quick: bool) -> Row:
    """Compiles it."""
    from mesh_lm.planning.program import compile_config, flags_of
    from sharding_rules.lab.flags import options as flags

    config = prepared(subject, quick)
    report = compile_config(config, TARGET, GPUS, flags(flags_of(config, TARGET)))
    return {
        "group": subject.group,
        "name": subject.name,
        **memory_and_step(report),
        **{f"{kind}_gib": n / GIB for kind, n in report.memory.by_kind.items()},
        "seconds": report.compile_seconds,
    }


def main() -> int:
    parser = options(__doc__ or "", quick_help="the first row and the last of offload, small")
    parser.add_argument("--again", action="store_true", help="also compile rows that are there")
    args = parser.parse_args()
    record = Record(
        f"memory_choices{'-quick' * args.quick}", args.output, kind=f"h100 jax {jax.__version__}"
    )
    subjects = [SUBJECTS[0], SUBJECTS[13]] if args.quick else SUBJECTS
    keys = [f"{one.group}: {one.name}" for one in subjects]
    tables = {} if args.again else record.earlier()
    done = {row["subject"]: row for row in tables.get(TITLE, [])}
    for key, subject in zip(keys, subjects, strict=True):
        if key in done:
            continue
        done[key] = {"subject": key, **compiled(subject, args.quick)}
        record.table(TITLE, [done[one] for one in keys if one in done], NOTE, show=False)
        record.write()
        print(done[key], flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
