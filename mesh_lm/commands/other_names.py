"""What other trainers call the fields of a config.

One table serves the suggestions on the command line and the tour from Megatron-LM
(docs/tours/from_megatron.md). A suggestion never changes what was asked for: where a value means
something else here, the answer has the formula, with the numbers of the run.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping

from mesh_lm.config import TrainConfig
from mesh_lm.errors import did_you_mean


@dataclasses.dataclass(frozen=True)
class Meaning:
    """How something is written here that another trainer has a name for."""

    ours: str
    """What decides it here, in Markdown, as a cell of the tour's table."""
    field: str = ""
    """The field that takes the value; empty: there is none."""
    convert: Callable[[str, TrainConfig], str] | None = None
    """Their value and the run -> the value of `field`. Raises ValueError where the run does not determine it. None: the same value."""
    numbers: Callable[[str, TrainConfig], str] | None = None
    """Their value and the run -> the formula of `ours` with its numbers."""


def _same(field: str, note: str = "") -> Meaning:
    return Meaning(f"`{field}`{note}", field)


def _one_of(field: str, values: Mapping[str, str]) -> Meaning:
    """A choice whose values have other names here."""

    def convert(text: str, _: TrainConfig) -> str:
        if text not in values:
            raise ValueError(text)
        return values[text]

    return Meaning(", ".join(f"`{field}={value}`" for value in dict.fromkeys(values.values())), field, convert)


def _flag(field: str, value: str) -> Meaning:
    """A switch that sets a field to one value."""
    return Meaning(f"`{field}={value}`", field, lambda text, _: value)


def _text(ours: str) -> Meaning:
    return Meaning(ours)


def _quotient(dividend: float, divisor: float) -> str:
    """Raises ValueError where the quotient is not a positive whole number."""
    quotient = dividend / divisor if divisor else 0
    if quotient < 1 or quotient != int(quotient):
        raise ValueError(f"{dividend} / {divisor}")
    return str(int(quotient))


def _data_parallel_size(run: TrainConfig) -> int:
    """Returns data x fsdp. Raises ValueError where one of them is what remains of the devices."""
    sizes = run.mesh.data, run.mesh.fsdp
    if -1 in sizes:
        raise ValueError("an axis of size -1")
    return math.prod(sizes)


def _microbatches(text: str, run: TrainConfig) -> str:
    return _quotient(run.train.global_batch, int(text) * _data_parallel_size(run))


def _axis(run: TrainConfig, axis: str) -> str:
    """Returns the size of a mesh axis; its name where it is what remains of the devices."""
    size = getattr(run.mesh, axis)
    return axis if size == -1 else str(size)


def _n_layers(run: TrainConfig) -> int:
    return sum(segment.n_layers for segment in run.model.stack().segments)


def _chunks(text: str, run: TrainConfig) -> str:
    return _quotient(_n_layers(run), int(text) * run.mesh.pipeline)


def _final_fraction(text: str, run: TrainConfig) -> str:
    return f"{float(text) / run.optimizer.learning_rate:.6g}"


def _warmup_steps(text: str, run: TrainConfig) -> str:
    return str(round(float(text) * run.train.steps))


def _steps_of_samples(text: str, run: TrainConfig) -> str:
    return str(math.ceil(int(text) / run.train.global_batch))


def _eval_sequences(text: str, run: TrainConfig) -> str:
    return str(int(text) * run.train.global_batch)


def _with_commas(text: str, _: TrainConfig) -> str:
    """As it is: the words after an option of several values are joined by commas before."""
    if not text:
        raise ValueError("no prefix")
    return text


def _of_samples(text: str, run: TrainConfig) -> str:
    return f"{text} / {run.train.global_batch}"


_MICROBATCHES = Meaning(
    "`train.microbatches`, a number, not a size: global batch / (micro-batch size x data x fsdp)",
    "train.microbatches",
    _microbatches,
    lambda text, run: f"{run.train.global_batch} / ({text} x {_axis(run, 'data')} x {_axis(run, 'fsdp')})",
)
_BLEND = Meaning("`data.blend`: prefixes, or weight,prefix,weight,prefix", "data.blend", _with_commas)
_FINAL_FRACTION = Meaning(
    "`optimizer.final_fraction`: minimum / `optimizer.learning_rate`",
    "optimizer.final_fraction",
    _final_fraction,
    lambda text, run: f"{text} / {run.optimizer.learning_rate:g}",
)
_EVAL_SEQUENCES = Meaning(
    "`train.eval_sequences`, sequences instead of batches: iterations x `train.global_batch`",
    "train.eval_sequences",
    _eval_sequences,
    lambda text, run: f"{text} x {run.train.global_batch}",
)
_WARMUP_FRACTION = Meaning(
    "`optimizer.warmup_steps`: fraction x `train.steps`",
    "optimizer.warmup_steps",
    _warmup_steps,
    lambda text, run: f"{text} x {run.train.steps}",
)
_CHUNKS = Meaning(
    "`pipeline.chunks`, a number of virtual stages: layers / (stages x layers of a virtual stage)",
    "pipeline.chunks",
    _chunks,
    lambda text, run: f"{_n_layers(run)} / ({run.mesh.pipeline} x {text})",
)
_XLA = _text("no option: XLA schedules communication, by the flag sets of `launch.xla_flags`")
_MOE = _text("not built: mixture of experts")

MEGATRON: dict[str, Meaning] = {
    "num-layers": _same("model.n_layers"),
    "hidden-size": _same("model.d_model"),
    "ffn-hidden-size": _same("model.d_ff"),
    "num-attention-heads": _same("model.n_heads"),
    "group-query-attention": _text("`model.n_kv_heads` below `model.n_heads`"),
    "num-query-groups": _same("model.n_kv_heads"),
    "kv-channels": _same("model.head_dim"),
    "seq-length": _same("model.seq_len"),
    "max-position-embeddings": _same("model.seq_len"),
    "position-embedding-type": _one_of("model.positions", {"rope": "rotary", "learned_absolute": "learned"}),
    "rotary-base": _same("model.rope_theta"),
    "normalization": _one_of("model.norm", {"RMSNorm": "rmsnorm", "LayerNorm": "layernorm"}),
    "norm-epsilon": _same("model.norm_eps"),
    "swiglu": _flag("model.activation", "swiglu"),
    "disable-bias-linear": _flag("model.biases", "false"),
    "untie-embeddings-and-output-weights": _flag("model.tied", "false"),
    "qk-layernorm": _flag("model.qk_norm", "true"),
    "window-size": _text("`model.window`, a width in tokens, or one for each layer in turn"),
    "hidden-dropout": _same("model.dropout"),
    "attention-dropout": _text("no dropout inside of attention; `model.dropout` is that of its output and the MLP's"),
    "init-method-std": _same("model.init_std"),
    "make-vocab-size-divisible-by": _same("model.vocab_multiple"),
    "bf16": _flag("model.dtype", "bfloat16"),
    "fp16": _text("not built: `model.dtype` is bfloat16 or float32"),
    "fp8-format": _text("not built: fp8"),
    "attention-backend": _text("`model.attention`: auto, mosaic, cudnn or xla"),
    "use-flash-attn": _text("no option: `model.attention=auto` is flash attention wherever there is a kernel"),
    "recompute-granularity": _one_of("model.remat", {"full": "full", "selective": "save_names"}),
    "recompute-activations": _flag("model.remat", "save_names"),
    "recompute-num-layers": _same("model.remat_layers"),
    "tensor-model-parallel-size": _same("mesh.tensor", ", with `rules` such as `megatron`"),
    "sequence-parallel": _text("`rules`: megatron_sp instead of megatron"),
    "context-parallel-size": _same("mesh.sequence", ", with `rules` such as `ring` or `ulysses`"),
    "cp-comm-type": _text("`rules`: `ring` for p2p, `context_gather` for all_gather, `ulysses` for a2a, `usp` for a2a+p2p"),
    "pipeline-model-parallel-size": _same("mesh.pipeline"),
    "num-layers-per-virtual-pipeline-stage": _CHUNKS,
    "num-virtual-stages-per-pipeline-rank": _same("pipeline.chunks"),
    "pipeline-model-parallel-layout": _text("`pipeline.layers`, the number of layers of each virtual stage"),
    "use-distributed-optimizer": _text("`rules`: distributed, as in distributed+megatron_sp"),
    "use-megatron-fsdp": _text("`mesh.fsdp`, with `rules` fsdp or hsdp"),
    "data-parallel-sharding-strategy": _text("`rules`: zero1, zero2, zero3, fsdp or hsdp"),
    "accumulate-allreduce-grads-in-fp32": _text("`rules`: +reduce_float32"),
    "overlap-grad-reduce": _XLA,
    "overlap-param-gather": _XLA,
    "tp-comm-overlap": _XLA,
    "num-experts": _MOE,
    "expert-model-parallel-size": _MOE,
    "expert-tensor-parallel-size": _MOE,
    "moe-router-topk": _MOE,
    "moe-grouped-gemm": _MOE,
    "micro-batch-size": _MICROBATCHES,
    "global-batch-size": _same("train.global_batch"),
    "rampup-batch-size": _text("not built: every step has `train.global_batch` sequences"),
    "train-iters": _same("train.steps"),
    "train-samples": Meaning("`train.steps`: samples / `train.global_batch`", "train.steps", _steps_of_samples, _of_samples),
    "exit-duration-in-mins": _text("no option: on SIGTERM the run saves and exits with status 99, as before a Slurm time limit"),
    "exit-signal-handler": _text("no option: on SIGTERM the run saves and exits with status 99"),
    "lr": _same("optimizer.learning_rate"),
    "min-lr": _FINAL_FRACTION,
    "lr-decay-style": _one_of(
        "optimizer.schedule", {"cosine": "cosine", "linear": "linear", "constant": "constant", "WSD": "wsd"}
    ),
    "lr-decay-iters": _text("no option: the schedule ends at `train.steps`"),
    "lr-warmup-iters": _same("optimizer.warmup_steps"),
    "lr-warmup-fraction": _WARMUP_FRACTION,
    "lr-warmup-samples": Meaning(
        "`optimizer.warmup_steps`: samples / `train.global_batch`", "optimizer.warmup_steps", _steps_of_samples, _of_samples
    ),
    "weight-decay": _same("optimizer.weight_decay"),
    "clip-grad": _same("optimizer.clip_norm"),
    "adam-beta1": _same("optimizer.beta1"),
    "adam-beta2": _same("optimizer.beta2"),
    "adam-eps": _same("optimizer.eps"),
    "data-path": _BLEND,
    "train-data-path": _BLEND,
    "valid-data-path": Meaning("`data.valid_blend`, as `data.blend`", "data.valid_blend", _with_commas),
    "split": _same("data.split"),
    "mock-data": _text("no random data; `data.path=stdlib` is real text that every machine has"),
    "tokenizer-type": _text("no option: the file that `data.tokenizer` names says what it is"),
    "tokenizer-model": _same("data.tokenizer"),
    "vocab-file": _text("`data.tokenizer`: a tokenizer.json, as save_pretrained of transformers writes from vocab.json and merges.txt"),
    "merge-file": _text("`data.tokenizer`: a tokenizer.json, as save_pretrained of transformers writes from vocab.json and merges.txt"),
    "reset-position-ids": _flag("data.documents", "megatron"),
    "reset-attention-mask": _flag("data.documents", "megatron"),
    "eod-mask-loss": _flag("data.mask_document_start", "true"),
    "fim-rate": _same("data.fim_rate"),
    "fim-spm-rate": _same("data.fim_spm_rate"),
    "num-workers": _same("data.threads"),
    "seed": _same("seed"),
    "save": _same("output"),
    "load": _text("`output`, from which a run resumes by itself; `init_from` for weights alone"),
    "finetune": _text("`init_from`: weights alone, at step 0"),
    "pretrained-checkpoint": _same("init_from"),
    "save-interval": _same("checkpoint.every"),
    "ckpt-format": _text("no option: checkpoints are Orbax's, independent of mesh and rules"),
    "async-save": _text("no option: checkpoints are always written in the background"),
    "non-persistent-save-interval": _same("checkpoint.local_every"),
    "non-persistent-local-ckpt-dir": _same("checkpoint.local"),
    "replication-factor": Meaning(
        "`checkpoint.local_copies`: factor - 1", "checkpoint.local_copies", lambda text, _: str(int(text) - 1)
    ),
    "eval-interval": _same("train.eval_every"),
    "eval-iters": _EVAL_SEQUENCES,
    "log-interval": _same("train.log_every"),
    "tensorboard-dir": _text("`output`: TensorBoard files are always written there"),
    "wandb-project": _same("wandb"),
    "profile": _text("`profile.steps`, a number of steps; 0: no trace"),
    "profile-step-start": _same("profile.start_step"),
    "profile-step-end": _text("`profile.steps`: end - start"),
    "distributed-timeout-minutes": _text("`health.stall` and `health.patience`, in seconds"),
}  # fmt: skip
"""An argument of Megatron-LM, without dashes at its front -> what it is here. The tour shows all of them."""

_EPOCHS = _text("`train.steps`: epochs x sequences of the training text / `train.global_batch`; `data.max_epochs` is only a limit")
_SHOWS = _text("`mesh-lm plan` shows memory, communication and time without starting the run")
OTHERS: dict[str, Meaning] = {
    **{name: _same(field) for name, field in {
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
        "tp": "mesh.tensor",
        "tensor_parallel": "mesh.tensor",
        "pp": "mesh.pipeline",
        "pipeline_parallel": "mesh.pipeline",
        "dp": "mesh.data",
        "data_parallel": "mesh.data",
        "cp": "mesh.sequence",
        "context_parallel": "mesh.sequence",
        "out_dir": "output",
        "output_dir": "output",
        "save_dir": "output",
        "save_every": "checkpoint.every",
        "finetune_from": "init_from",
        "project": "wandb",
        "cpus": "launch.cpu_devices",
        "random_seed": "seed",
    }.items()},
    "microbatch": _MICROBATCHES,
    "microbatch_size": _MICROBATCHES,
    "per_device_train_batch_size": _MICROBATCHES,
    "train_micro_batch_size_per_gpu": _MICROBATCHES,
    "warmup_ratio": _WARMUP_FRACTION,
    "epochs": _EPOCHS,
    "num_epochs": _EPOCHS,
    "num_train_epochs": _EPOCHS,
    "ep": _MOE,
    "expert_parallel": _MOE,
    "dry_run": _SHOWS,
    "dryrun": _SHOWS,
}  # fmt: skip
"""A name of another trainer than Megatron-LM, with underscores -> the same."""

_MEANINGS = OTHERS | {name.replace("-", "_"): meaning for name, meaning in MEGATRON.items()}

SEVERAL = frozenset(f"--{name}" for name, meaning in _MEANINGS.items() if meaning.convert is _with_commas)
"""Options of theirs that take all words after them."""


def meaning_of(name: str) -> Meaning | None:
    """Returns what a name stands for, with underscores or hyphens and in any case; None where nobody is known to use it."""
    name = name.lower().replace("-", "_")
    if name not in _MEANINGS and name.startswith("moe_"):
        return _MOE
    return _MEANINGS.get(name)


def same_field(name: str) -> str:
    """Returns the field that takes the same values under this name; empty where there is none."""
    meaning = meaning_of(name)
    return meaning.field if meaning and meaning.convert is None else ""


def answer(meaning: Meaning, text: str | None, run: TrainConfig, prefix: str = "--") -> str:
    """Returns the end of an error: what to write instead of an option that has this meaning.

    text: its value; None where it has none. run: the config with the other options of the command line, which a formula needs.
    prefix: that of the suggested option, "--" or "--config.".
    """
    if meaning.field and meaning.convert is None:
        return did_you_mean([prefix + meaning.field])
    said = f"; here it is {meaning.ours.replace('`', '')}" if meaning.field else f"; {meaning.ours.replace('`', '')}"
    if not meaning.convert:
        return said
    if text and meaning.numbers:
        said += f" = {meaning.numbers(text, run)}"
    try:
        value = meaning.convert(text or "", run)
    except ValueError:
        return said
    # A formula is what decides; a switch or a choice is only written otherwise.
    return (said if meaning.numbers else "") + did_you_mean([f"{prefix}{meaning.field}={value}"])


def table() -> str:
    """Returns the tour's table in Markdown: Megatron-LM's arguments, those with the same meaning in one row."""
    rows: dict[str, list[str]] = {}
    for name, meaning in MEGATRON.items():
        rows.setdefault(meaning.ours, []).append(f"`--{name}`")
    lines = [f"| {', '.join(theirs)} | {ours} |" for ours, theirs in rows.items()]
    return "\n".join(["| Megatron-LM | mesh_lm |", "|---|---|", *lines])


RULES = {
    "dp": "ddp", "data": "ddp", "fsdp2": "fsdp", "hybrid": "hsdp", "hybrid_shard": "hsdp", "zero": "zero1",
    "tp": "megatron", "tensor": "megatron", "tensor_parallel": "megatron",
    "sp": "megatron_sp", "tp+sp": "megatron_sp", "tp_sp": "megatron_sp", "tp_2d": "megatron_2d", "2d": "megatron_2d",
}  # fmt: skip
"""A name of rules -> the preset that does the same."""
