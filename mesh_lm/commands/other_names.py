"""What other trainers call the fields of a config, and the options of `mesh-lm prepare` and
`mesh-lm launch`.

The same tables serve the suggestions on the command line and the tour from Megatron-LM
(docs/tours/from_megatron.md). A suggestion never changes what was asked for: where a value means
something else here, the answer has the formula, with the numbers of the run.
"""

from __future__ import annotations

from mesh_lm.commands import formulas
from mesh_lm.commands.meanings import Asked, Meaning, explained, near_to, option, same
from mesh_lm.commands.megatron_names import MEGATRON, MOE, TOKENIZER

_EPOCHS = explained(
    "`train.steps`: epochs x sequences of the training text / `train.global_batch`; "
    "`data.max_epochs` is only a limit"
)
_SHOWS = explained("`mesh-lm plan` shows memory, communication and time without starting the run")
_AMBIGUOUS = frozenset({
    "lr_scheduler", "batch_size", "batch", "precision", "recompute", "activation_checkpointing",
    "dataset", "dp", "data_parallel",
    "tie_embeddings",
})  # fmt: skip
"""Names whose values are spelled differently, or that mean different things to different
trainers."""
OTHERS: dict[str, Meaning] = {
    **{name: near_to(field) if name in _AMBIGUOUS else same(field) for name, field in {
        "max_lr": "optimizer.learning_rate",
        "wd": "optimizer.weight_decay",
        "warmup": "optimizer.warmup_steps",
        "warmup_iters": "optimizer.warmup_steps",
        "num_warmup_steps": "optimizer.warmup_steps",
        "grad_clip": "optimizer.clip_norm",
        "max_grad_norm": "optimizer.clip_norm",
        "lr_scheduler": "optimizer.schedule",
        "batch_size": "train.global_batch",
        "batch": "train.global_batch",
        "grad_accum": "train.microbatches",
        "gradient_accumulation_steps": "train.microbatches",
        "max_steps": "train.steps",
        "num_steps": "train.steps",
        "train_steps": "train.steps",
        "max_iters": "train.steps",
        "iterations": "train.steps",
        "n_layer": "model.n_layers",
        "n_head": "model.n_heads",
        "num_heads": "model.n_heads",
        "num_key_value_heads": "model.n_kv_heads",
        "n_embd": "model.d_model",
        "intermediate_size": "model.d_ff",
        "block_size": "model.seq_len",
        "context_length": "model.seq_len",
        "max_seq_len": "model.seq_len",
        "sequence_length": "model.seq_len",
        "precision": "model.dtype",
        "recompute": "model.remat",
        "activation_checkpointing": "model.remat",
        "tie_embeddings": "model.tied",
        "dataset": "data.path",
        "pp": "mesh.pipeline",
        "pipeline_parallel": "mesh.pipeline",
        "dp": "mesh.data",
        "data_parallel": "mesh.data",
        "out_dir": "output",
        "output_dir": "output",
        "save_dir": "output",
        "save_every": "checkpoint.every",
        "finetune_from": "init_from",
        "project": "wandb",
        "cpus": "launch.cpu_devices",
        "random_seed": "seed",
    }.items()},
    "microbatch": formulas.MICROBATCHES,
    "microbatch_size": formulas.MICROBATCHES,
    "per_device_train_batch_size": formulas.MICROBATCHES,
    "train_micro_batch_size_per_gpu": formulas.MICROBATCHES,
    "warmup_ratio": formulas.WARMUP_FRACTION,
    "epochs": _EPOCHS,
    "num_epochs": _EPOCHS,
    "num_train_epochs": _EPOCHS,
    "tp": MEGATRON["tensor-model-parallel-size"],
    "tensor_parallel": MEGATRON["tensor-model-parallel-size"],
    "cp": MEGATRON["context-parallel-size"],
    "context_parallel": MEGATRON["context-parallel-size"],
    "ep": MOE,
    "expert_parallel": MOE,
    "dry_run": _SHOWS,
    "dryrun": _SHOWS,
}  # fmt: skip
"""A name of another trainer than Megatron-LM, with underscores -> the same."""

PREPROCESS: dict[str, Meaning] = {
    "output-prefix": option("output", ", without the `_text_document` that Megatron appends"),
    "json-keys": formulas.TEXT_FIELD,
    "append-eod": explained("no option: the end-of-document token is always appended; leave it out"),
    "tokenizer-model": option("tokenizer"),
    "tokenizer-type": explained("no option: the file that `--tokenizer` names says what it is"),
    "vocab-file": explained(f"`--tokenizer`: {TOKENIZER}"),
    "merge-file": explained(f"`--tokenizer`: {TOKENIZER}"),
    "vocab-size": explained("no option: the vocabulary is that of `--tokenizer`"),
    "partitions": explained("no option: `--workers` processes share the files; leave it out"),
    "keep-sequential-samples": explained("no option: documents keep their order; leave it out"),
    "split-sentences": explained("not built: a document is one sequence"),
    "keep-newlines": explained("no option: newlines are always kept; leave it out"),
    "lang": explained("no option: it is for splitting sentences; leave it out"),
    "log-interval": explained("no option: progress is always printed; leave it out"),
}  # fmt: skip
"""An option of Megatron-LM's preprocess_data.py that `mesh-lm prepare` lacks -> what it is
there."""

_ONE_RENDEZVOUS = explained(
    "no option: `--rendezvous` alone says where the nodes meet; leave it out"
)
TORCHRUN: dict[str, Meaning] = {
    "nproc-per-node": formulas.PER_NODE,
    "nnodes": formulas.NODES,
    "node-rank": option("node"),
    "master-addr": formulas.ENDPOINT,
    "master-port": formulas.ENDPOINT,
    "rdzv-endpoint": option("rendezvous"),
    "rdzv-backend": _ONE_RENDEZVOUS,
    "rdzv-id": _ONE_RENDEZVOUS,
    "standalone": explained("no option: one node needs no rendezvous; leave it out"),
    "max-restarts": Meaning("`--restarts`, which counts those in a row without a new checkpoint", "restarts", exact=False),
    "log-dir": explained("no option: the run's own log is in the output directory; leave it out"),
}  # fmt: skip
"""An option of torchrun that `mesh-lm launch` lacks -> what it is there."""

_MEANINGS = OTHERS | {name.replace("-", "_"): meaning for name, meaning in MEGATRON.items()}

SEVERAL = frozenset(
    f"--{name}"
    for name, meaning in _MEANINGS.items()
    if meaning.field in ("data.blend", "data.valid_blend")
)
"""Options of theirs that take all words after them."""


def meaning_of(name: str) -> Meaning | None:
    """Returns what a name stands for, with underscores or hyphens and in any case; None where
    nobody is known to use it.
    """
    name = name.lower().replace("-", "_")
    if name not in _MEANINGS and name.startswith("moe_"):
        return MOE
    return _MEANINGS.get(name)


def in_run(name: str, text: str, asked: Asked) -> tuple[str, str]:
    """Returns the field that a name stands for and its value. Raises ValueError where they are not
    determined.
    """
    meaning = meaning_of(name)
    if meaning is None or not meaning.field or not meaning.exact:
        raise ValueError(name)
    return meaning.field, meaning.convert(text, asked) if meaning.convert else text


RULES = {
    "dp": "ddp", "data": "ddp", "fsdp2": "fsdp", "hybrid": "hsdp", "hybrid_shard": "hsdp",
    "zero": "zero1",
    "tp": "megatron", "tensor": "megatron", "tensor_parallel": "megatron",
    "sp": "megatron_sp", "tp+sp": "megatron_sp", "tp_sp": "megatron_sp", "tp_2d": "megatron_2d",
    "2d": "megatron_2d",
}  # fmt: skip
"""A name of rules -> the preset that does the same."""
