"""What other trainers call the fields of a config, and the options of `mesh-lm prepare` and
`mesh-lm launch`.

The same tables serve the suggestions on the command line and the tour from Megatron-LM
(docs/tours/from_megatron.md). A suggestion never changes what was asked for: where a value means
something else here, the answer has the formula, with the numbers of the run.
"""

from __future__ import annotations

from mesh_lm.commands import formulas
from mesh_lm.commands.deepspeed_names import DEEPSPEED
from mesh_lm.commands.meanings import Context, Meaning, explained, option, same, similar
from mesh_lm.commands.megatron_names import MEGATRON, MOE, TOKENIZER
from mesh_lm.commands.torch_names import DDP, FSDP

_EPOCHS = explained(
    "`train.steps`: epochs x sequences of the training text / `train.global_batch`; "
    "`data.max_epochs` is only a limit"
)
_SHOWS = explained("`mesh-lm plan` shows memory, communication and time without starting the run")
OTHERS: dict[str, Meaning] = {
    "max_lr": same("optimizer.learning_rate"),
    "wd": same("optimizer.weight_decay"),
    "warmup": same("optimizer.warmup_steps"),
    "warmup_iters": same("optimizer.warmup_steps"),
    "num_warmup_steps": same("optimizer.warmup_steps"),
    "grad_clip": same("optimizer.clip_norm"),
    "max_grad_norm": same("optimizer.clip_norm"),
    "lr_scheduler": similar("optimizer.schedule"),
    "batch_size": similar("train.global_batch"),
    "batch": similar("train.global_batch"),
    "grad_accum": same("train.microbatches"),
    "max_steps": same("train.steps"),
    "num_steps": same("train.steps"),
    "train_steps": same("train.steps"),
    "max_iters": same("train.steps"),
    "iterations": same("train.steps"),
    "n_layer": same("model.n_layers"),
    "n_head": same("model.n_heads"),
    "num_heads": same("model.n_heads"),
    "num_key_value_heads": same("model.n_kv_heads"),
    "n_embd": same("model.d_model"),
    "intermediate_size": same("model.d_ff"),
    "block_size": same("model.seq_len"),
    "context_length": same("model.seq_len"),
    "max_seq_len": same("model.seq_len"),
    "sequence_length": same("model.seq_len"),
    "precision": similar("model.dtype"),
    "recompute": similar("model.remat"),
    "activation_checkpointing": similar("model.remat"),
    "tie_embeddings": similar("model.tied"),
    "dataset": similar("data.path"),
    "pp": same("mesh.pipeline"),
    "pipeline_parallel": same("mesh.pipeline"),
    "dp": similar("mesh.data"),
    "data_parallel": similar("mesh.data"),
    "out_dir": same("output"),
    "output_dir": same("output"),
    "save_dir": same("output"),
    "save_every": same("checkpoint.every"),
    "finetune_from": same("init_from"),
    "project": same("wandb"),
    "cpus": same("launch.cpu_devices"),
    "random_seed": same("seed"),
    "microbatch": formulas.MICROBATCHES,
    "microbatch_size": formulas.MICROBATCHES,
    "per_device_train_batch_size": formulas.MICROBATCHES,
    "warmup_ratio": formulas.WARMUP_FRACTION,
    "epochs": _EPOCHS,
    "num_epochs": _EPOCHS,
    "num_train_epochs": _EPOCHS,
    "tp": MEGATRON["tensor-model-parallel-size"],
    "tensor_parallel": MEGATRON["tensor-model-parallel-size"],
    "cp": MEGATRON["context-parallel-size"],
    "context_parallel": MEGATRON["context-parallel-size"],
    "ep": MEGATRON["expert-model-parallel-size"],
    "expert_parallel": MEGATRON["expert-model-parallel-size"],
    "num_local_experts": same("model.experts.number"),
    "n_routed_experts": same("model.experts.number"),
    "num_experts_per_tok": same("model.experts.active"),
    "moe_intermediate_size": same("model.experts.d_ff"),
    "routed_scaling_factor": same("model.experts.scale"),
    "router_aux_loss_coef": similar("model.experts.balance_loss"),
    "dry_run": _SHOWS,
    "dryrun": _SHOWS,
}
"""A name of another trainer than Megatron-LM, with underscores -> its meaning."""

PREPROCESS: dict[str, Meaning] = {
    "output-prefix": option("output", ", without the `_text_document` that Megatron appends"),
    "json-keys": formulas.TEXT_FIELD,
    "append-eod": explained(
        "no option: the end-of-document token is always appended; leave it out"
    ),
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
}
"""An option of Megatron-LM's preprocess_data.py that `mesh-lm prepare` lacks -> its meaning."""

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
    "max-restarts": Meaning(
        "`--restarts`, which counts those in a row without a new checkpoint",
        "restarts",
        exact=False,
    ),
    "log-dir": explained("no option: the run's own log is in the output directory; leave it out"),
}
"""An option of torchrun that `mesh-lm launch` lacks -> its meaning."""

_MEANINGS = {
    **{name: meaning for name, meaning in (DDP | FSDP).items() if name.islower() and "_" in name},
    # A single word, such as pipeline, may be a section of a config here.
    **{name: meaning for name, meaning in DEEPSPEED.items() if "_" in name or "." in name},
    **OTHERS,
    **{name.replace("-", "_"): meaning for name, meaning in MEGATRON.items()},
}

LIST_OPTIONS = frozenset(
    f"--{name}"
    for name, meaning in _MEANINGS.items()
    if meaning.field in ("data.blend", "data.valid_blend")
)
"""Options of other trainers that take all words after them."""


def look_up(name: str) -> Meaning | None:
    """Returns what a name of another trainer stands for; None if no trainer is known to use it.

    It may have underscores or hyphens, be in any case, and be inside of sections, as
    zero_optimization.stage.
    """
    name = name.lower().replace("-", "_")
    leaf = name.rpartition(".")[2]
    if name not in _MEANINGS and leaf not in _MEANINGS and leaf.startswith("moe_"):
        return MOE
    return _MEANINGS.get(name) or _MEANINGS.get(leaf)


def field_and_value(name: str, text: str, context: Context) -> tuple[str, str]:
    """Returns the field that a name of another trainer stands for, and its value.

    Raises ValueError if the command line does not determine them.
    """
    meaning = look_up(name)
    if meaning is None or not meaning.field or not meaning.exact:
        raise ValueError(name)
    if meaning.convert:
        text = meaning.convert(text, context)
    return meaning.field, text


RULES = {
    "dp": "ddp",
    "data": "ddp",
    "fsdp2": "fsdp",
    "hybrid": "hsdp",
    "full_shard": "fsdp",
    "hybrid_shard": "hsdp",
    "no_shard": "ddp",
    "shard_grad_op": "zero2",
    "horovod": "ddp",
    "zero": "zero1",
    "tp": "megatron",
    "tensor": "megatron",
    "tensor_parallel": "megatron",
    "sp": "megatron_sp",
    "tp+sp": "megatron_sp",
    "tp_sp": "megatron_sp",
    "tp_2d": "megatron_2d",
    "2d": "megatron_2d",
}
"""A name of rules -> the preset that does the same."""
