"""What other trainers call the fields of a config, and the options of `mesh-lm prepare` and `mesh-lm launch`.

The same tables serve the suggestions on the command line and the tour from Megatron-LM (docs/tours/from_megatron.md). A
suggestion never changes what was asked for: where a value means something else here, the answer has the formula, with
the numbers of the run.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from mesh_lm.errors import did_you_mean

if TYPE_CHECKING:
    from mesh_lm.config import TrainConfig


@dataclasses.dataclass(frozen=True)
class Asked:
    """What the rest of a command line asks for, for the values that depend on it."""

    run: TrainConfig | None = None
    """The config with the other options; None: the command has no config."""
    typed: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Every option with a value as it was typed: its name without dashes in front, with underscores -> the value."""

    @property
    def config(self) -> TrainConfig:
        """The config. Raises ValueError where there is none."""
        if self.run is None:
            raise ValueError("no config")
        return self.run


class NotBuiltError(ValueError):
    """A value that has no counterpart here. Its text is the value."""


@dataclasses.dataclass(frozen=True)
class Meaning:
    """How something is written here that another trainer has a name for."""

    ours: str
    """What decides it here, in Markdown, as a cell of the tour's table."""
    field: str = ""
    """The field, or the command's option, that takes the value; empty: there is none."""
    convert: Callable[[str, Asked], str] | None = None
    """Their value -> the value of `field`. Raises ValueError where the command does not determine it. None: the same value."""
    numbers: Callable[[str, Asked], str] | None = None
    """Their value -> the formula of `ours` with its numbers. Raises ValueError where it is no such value."""
    note: str = ""
    """What a suggestion of `field` must add, in Markdown."""
    exact: bool = True
    """Whether the same value means the same. False: users mean different things by this name, and only the field is suggested."""


def _same(field: str, note: str = "") -> Meaning:
    return Meaning(f"`{field}`{note}", field, note=note)


def _near(field: str) -> Meaning:
    return Meaning(f"`{field}`", field, exact=False)


def _option(name: str, note: str = "") -> Meaning:
    """An option of a command that is no config."""
    return Meaning(f"`--{name}`{note}", name, note=note)


def _one_of(field: str, values: Mapping[str, str], ours: str = "") -> Meaning:
    """A choice whose values have other names here."""
    known = {theirs.lower(): value for theirs, value in values.items()}

    def convert(text: str, _: Asked) -> str:
        if text and text.lower() not in known:
            raise NotBuiltError(text)
        return known[_given(text).lower()]

    return Meaning(ours or ", ".join(f"`{field}={value}`" for value in dict.fromkeys(values.values())), field, convert)


def _flag(field: str, value: str, note: str = "") -> Meaning:
    """A switch that sets a field to one value."""

    def convert(text: str, _: Asked) -> str:
        if text.lower() in ("false", "0", "no"):
            raise ValueError(text)
        return value

    return Meaning(f"`{field}={value}`{note}", field, convert, note=note)


def _text(ours: str) -> Meaning:
    return Meaning(ours)


def _given(text: str) -> str:
    """Raises ValueError for an option without a value."""
    if not text:
        raise ValueError("no value")
    return text


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


def _microbatches(text: str, asked: Asked) -> str:
    return _quotient(asked.config.train.global_batch, int(text) * _data_parallel_size(asked.config))


def _axis(asked: Asked, axis: str) -> str:
    """Returns the size of a mesh axis; its name where it is what remains of the devices."""
    size = getattr(asked.config.mesh, axis)
    return axis if size == -1 else str(size)


def _n_layers(asked: Asked) -> int:
    """Raises ValueError for a model whose sizes are impossible."""
    if problems := asked.config.model.problems():
        raise ValueError(problems[0])
    return sum(segment.n_layers for segment in asked.config.model.stack().segments)


def _chunks(text: str, asked: Asked) -> str:
    return _quotient(_n_layers(asked), int(text) * asked.config.mesh.pipeline)


def _final_fraction(text: str, asked: Asked) -> str:
    return f"{float(text) / asked.config.optimizer.learning_rate:.6g}"


def _decay_steps(asked: Asked) -> float:
    """Returns the steps that Megatron-LM's fraction of warm-up is of: the schedule's own, else all."""
    if steps := asked.typed.get("lr_decay_iters"):
        return int(steps)
    if samples := asked.typed.get("lr_decay_samples"):
        return int(samples) / asked.config.train.global_batch
    return asked.config.train.steps


def _warmup_steps(text: str, asked: Asked) -> str:
    """Raises ValueError where the fraction is not one of whole steps."""
    steps = float(text) * _decay_steps(asked)
    if abs(steps - round(steps)) > 1e-6 * max(1.0, steps):
        raise ValueError(text)
    return str(round(steps))


def _steps_of_samples(text: str, asked: Asked) -> str:
    """Megatron-LM rounds down; too few samples for one step have no answer."""
    if not (steps := int(text) // asked.config.train.global_batch):
        raise ValueError(text)
    return str(steps)


def _warmup_of_samples(text: str, asked: Asked) -> str:
    return _quotient(int(text), asked.config.train.global_batch)


def _eval_sequences(text: str, asked: Asked) -> str:
    if int(text) < 1:
        raise ValueError("0 means all sequences here")
    return str(int(text) * asked.config.train.global_batch)


def _with_commas(text: str, _: Asked) -> str:
    """As it is: the words after an option of several values are joined by commas before."""
    return _given(text)


def _of_samples(text: str, asked: Asked) -> str:
    return f"{text} / {asked.config.train.global_batch}"


def _left(text: str) -> int:
    """Returns the left width of Megatron-LM's (left, right). Raises ValueError where it is not one causal window."""
    found = re.fullmatch(r"[(\[]?\s*(\d+)[,\s]+(\d+)\s*[)\]]?", text)
    if found is None or int(found[2]):
        raise ValueError(text)
    return int(found[1])


def _window(text: str, asked: Asked) -> str:
    if "window_attn_skip_freq" in asked.typed:
        raise ValueError("a window for some layers")
    return str(_left(text) + 1)


def _remat_layers(text: str, asked: Asked) -> str:
    if asked.typed.get("recompute_method") != "block" or asked.config.mesh.pipeline != 1:
        raise ValueError("all layers, or those of each stage")
    return str(int(text))


def _vocab_multiple(text: str, asked: Asked) -> str:
    if asked.config.mesh.tensor < 1:
        raise ValueError("an axis of size -1")
    return str(int(text) * asked.config.mesh.tensor)


def _decay_fraction(text: str, asked: Asked) -> str:
    """Returns a fraction of the run that is exactly this number of steps."""
    n, steps = int(text), asked.config.train.steps
    for exact in (n, n + 0.5):
        fraction = f"{exact / steps:.6g}"
        if 1 <= n <= steps and int(float(fraction) * steps) == n and float(fraction) <= 1:
            return fraction
    raise ValueError(text)


def _schedule(text: str, asked: Asked) -> str:
    schedules = {"cosine": "cosine", "linear": "linear", "constant": "constant", "wsd": "wsd"}
    if text and text.lower() not in schedules:
        raise NotBuiltError(text)
    if text.lower() == "wsd" and asked.typed.get("lr_wsd_decay_style") != "linear":
        raise ValueError("another decay")
    return schedules[_given(text).lower()]


def _optimizer(text: str, _: Asked) -> str:
    known = {"adam": "adamw", **{name: name for name in ("adamw", "muon", "lion", "adafactor")}}
    if text not in known and ":" not in text:
        raise NotBuiltError(_given(text))
    return known.get(text, text)


def _processes(text: str, _: Asked) -> str:
    return str(int(text))


def _rendezvous(text: str, asked: Asked) -> str:
    """29500 is torchrun's port."""
    return f"{_given(asked.typed.get('master_addr', ''))}:{asked.typed.get('master_port', '29500')}"


def _one_key(text: str, _: Asked) -> str:
    if len(_given(text).split()) > 1:
        raise ValueError("several keys")
    return text


_MICROBATCHES = Meaning(
    "`train.microbatches`, a count, not a size: global batch / (micro-batch size x data x fsdp)",
    "train.microbatches",
    _microbatches,
    lambda text, asked: f"{asked.config.train.global_batch} / ({text} x {_axis(asked, 'data')} x {_axis(asked, 'fsdp')})",
)
_BLEND = Meaning("`data.blend`: prefixes, or weight,prefix,weight,prefix", "data.blend", _with_commas)
_FINAL_FRACTION = Meaning(
    "`optimizer.final_fraction`: minimum / `optimizer.learning_rate`",
    "optimizer.final_fraction",
    _final_fraction,
    lambda text, asked: f"{text} / {asked.config.optimizer.learning_rate:g}",
)
_EVAL_SEQUENCES = Meaning(
    "`train.eval_sequences`, sequences instead of batches: iterations x `train.global_batch`",
    "train.eval_sequences",
    _eval_sequences,
    lambda text, asked: f"{text} x {asked.config.train.global_batch}",
)
_WARMUP_FRACTION = Meaning(
    "`optimizer.warmup_steps`: fraction x `train.steps` (x `--lr-decay-iters` if that is given)",
    "optimizer.warmup_steps",
    _warmup_steps,
    lambda text, asked: f"{text} x {_decay_steps(asked):g}",
)
_CHUNKS = Meaning(
    "`pipeline.chunks`, a number of virtual stages: layers / (stages x layers of a virtual stage)",
    "pipeline.chunks",
    _chunks,
    lambda text, asked: f"{_n_layers(asked)} / ({asked.config.mesh.pipeline} x {text})",
)
_XLA = _text("no option: XLA schedules communication, by the flag sets of `launch.xla_flags`")
_MOE = _text("not built: mixture of experts")
_FUSION = _text("no option: XLA decides what is fused; leave it out")
_ONE_DECAY = _text("not built: `optimizer.weight_decay` is the same at every step")
_SCALER = _text("no option: bfloat16 and float32 need no loss scaling; leave it out")
_SELECTIVE = _text(
    "`model.remat`: full for full; for selective save_names, which is not the same: it recomputes all but matmul and attention outputs"
)
_FUSIONS = (
    "no-masked-softmax-fusion", "no-bias-gelu-fusion", "no-bias-swiglu-fusion", "no-bias-dropout-fusion", "no-rope-fusion",
    "no-gradient-accumulation-fusion", "no-persist-layer-norm",
)  # fmt: skip
_TOKENIZER = "a tokenizer.json, as save_pretrained of transformers writes from vocab.json and merges.txt"
_STAGE_LAYERS = _text("`pipeline.layers`, the number of layers of each virtual stage")
_SCHEDULER = _text("no option: the schedule is always the config's, and a checkpoint has none; leave it out")
_ONE_IMPLEMENTATION = _text("no option: there is one implementation; leave it out")

MEGATRON: dict[str, Meaning] = {
    "num-layers": _same("model.n_layers"),
    "hidden-size": _same("model.d_model"),
    "ffn-hidden-size": _same("model.d_ff"),
    "num-attention-heads": _same("model.n_heads"),
    "group-query-attention": _text("`model.n_kv_heads`, smaller than `model.n_heads`"),
    "num-query-groups": _same("model.n_kv_heads"),
    "kv-channels": _same("model.head_dim"),
    "seq-length": _same("model.seq_len"),
    "max-position-embeddings": _text("no option: a table of learned positions has `model.seq_len` rows"),
    "position-embedding-type": _one_of("model.positions", {"rope": "rotary", "learned_absolute": "learned"}),
    "use-rotary-position-embeddings": _flag("model.positions", "rotary"),
    "rotary-base": _same("model.rope_theta"),
    "rotary-percent": _text("not built: `model.positions=rotary` rotates the complete head; 1.0 needs no option"),
    "normalization": _one_of("model.norm", {"RMSNorm": "rmsnorm", "LayerNorm": "layernorm"}),
    "norm-epsilon": _same("model.norm_eps"),
    "swiglu": _flag("model.activation", "swiglu"),
    "squared-relu": _text("not built: `model.activation` is gelu or swiglu"),
    "disable-bias-linear": _flag("model.biases", "false", ", which removes those of LayerNorm, too"),
    "add-qkv-bias": _text("not built: `model.biases` is for all linear layers"),
    "untie-embeddings-and-output-weights": _flag("model.tied", "false"),
    "qk-layernorm": _flag("model.qk_norm", "true"),
    "window-size": Meaning(
        "`model.window`, one width for every layer: left + 1, as it counts the token itself (Megatron's pair is left, right)",
        "model.window",
        _window,
        lambda text, _: f"{_left(text)} + 1",
    ),
    "window-attn-skip-freq": _text("`model.window`, a width for each layer in turn, as in 129,129,129,0; 0: full attention"),
    "hidden-dropout": _same("model.dropout"),
    "attention-dropout": _text("no dropout inside of attention; `model.dropout` is that of its output and the MLP's"),
    "init-method-std": _same("model.init_std"),
    "make-vocab-size-divisible-by": Meaning(
        "`model.vocab_multiple`: multiple x `mesh.tensor`",
        "model.vocab_multiple",
        _vocab_multiple,
        lambda text, asked: f"{text} x {_axis(asked, 'tensor')}",
    ),
    "bf16": _flag("model.dtype", "bfloat16"),
    "fp16": _text("not built: `model.dtype` is bfloat16 or float32"),
    "fp8-format": _text("not built: fp8"),
    "loss-scale": _SCALER,
    "initial-loss-scale": _SCALER,
    "transformer-impl": _ONE_IMPLEMENTATION,
    "use-mcore-models": _ONE_IMPLEMENTATION,
    **dict.fromkeys(_FUSIONS, _FUSION),
    "attention-backend": _text("`model.attention`: auto, mosaic, cudnn or xla"),
    "use-flash-attn": _text("no option: `model.attention=auto` is flash attention wherever there is a kernel"),
    "recompute-granularity": _SELECTIVE,
    "recompute-activations": _SELECTIVE,
    "recompute-method": _text("uniform: `model.remat=full`, which is for every layer; block: `model.remat_layers`, not with stages"),
    "recompute-num-layers": Meaning(
        "`model.remat_layers` for `--recompute-method=block`, not with stages; uniform recomputes every layer: `model.remat=full`",
        "model.remat_layers",
        _remat_layers,
        note=", with `model.remat=full`; the other layers recompute as save_names does",
    ),
    "tensor-model-parallel-size": _same("mesh.tensor", ", with `rules` such as `megatron`"),
    "sequence-parallel": _text("`rules`: megatron_sp instead of megatron"),
    "context-parallel-size": _same("mesh.sequence", ", with `rules` such as `ring` or `ulysses`"),
    "cp-comm-type": _text("`rules`: `ring` for p2p, `context_gather` for all_gather, `ulysses` for a2a, `usp` for a2a+p2p"),
    "pipeline-model-parallel-size": _same("mesh.pipeline"),
    "num-layers-per-virtual-pipeline-stage": _CHUNKS,
    "num-virtual-stages-per-pipeline-rank": _same("pipeline.chunks"),
    "pipeline-model-parallel-layout": _STAGE_LAYERS,
    "decoder-first-pipeline-num-layers": _STAGE_LAYERS,
    "decoder-last-pipeline-num-layers": _STAGE_LAYERS,
    "use-distributed-optimizer": _text("`rules`: distributed, as in distributed+megatron_sp"),
    "use-megatron-fsdp": _text("`mesh.fsdp`, with `rules` fsdp or hsdp"),
    "data-parallel-sharding-strategy": _text("`rules`: zero1, zero2, zero3, fsdp or hsdp"),
    "accumulate-allreduce-grads-in-fp32": _text("`rules`: +reduce_float32"),
    "grad-reduce-in-bf16": _text("`rules`: +reduce_bfloat16, as in distributed+reduce_bfloat16"),
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
    "train-samples": Meaning(
        "`train.steps`: samples / `train.global_batch`, rounded down", "train.steps", _steps_of_samples, _of_samples
    ),
    "exit-interval": _text("not built: a run ends at `train.steps`, with the end of its schedule, or on SIGTERM"),
    "skip-train": _text("no option: `mesh-lm evaluate` evaluates a checkpoint"),
    "exit-duration-in-mins": _text("no option: on SIGTERM the run saves and exits with status 99, as before a Slurm time limit"),
    "exit-signal-handler": _text("no option: on SIGTERM the run saves and exits with status 99"),
    "optimizer": Meaning(
        "`optimizer.name`: adamw for adam, which is AdamW there; the others are muon, lion and adafactor", "optimizer.name", _optimizer
    ),
    "lr": _same("optimizer.learning_rate"),
    "min-lr": _FINAL_FRACTION,
    "lr-decay-style": Meaning(
        "`optimizer.schedule=cosine`, `optimizer.schedule=linear`, `optimizer.schedule=constant`, or `optimizer.schedule=wsd`, "
        "which decays linearly",
        "optimizer.schedule",
        _schedule,
    ),
    "lr-wsd-decay-style": _text("no option: `optimizer.schedule=wsd` decays linearly; exponential, cosine and minus_sqrt are not built"),
    "lr-wsd-decay-iters": Meaning(
        "`optimizer.decay_fraction`: iterations / `train.steps`",
        "optimizer.decay_fraction",
        _decay_fraction,
        lambda text, asked: f"{text} / {asked.config.train.steps}",
    ),
    "lr-decay-iters": _text("no option: the schedule ends at `train.steps`"),
    "lr-decay-samples": _text("no option: the schedule ends at `train.steps`"),
    "lr-warmup-init": _text("not built: the warm-up starts at 0"),
    "override-opt_param-scheduler": _SCHEDULER,
    "use-checkpoint-opt_param-scheduler": _SCHEDULER,
    "lr-warmup-iters": _same("optimizer.warmup_steps"),
    "lr-warmup-fraction": _WARMUP_FRACTION,
    "lr-warmup-samples": Meaning(
        "`optimizer.warmup_steps`: samples / `train.global_batch`", "optimizer.warmup_steps", _warmup_of_samples, _of_samples
    ),
    "weight-decay": _same("optimizer.weight_decay"),
    "start-weight-decay": _ONE_DECAY,
    "end-weight-decay": _ONE_DECAY,
    "weight-decay-incr-style": _ONE_DECAY,
    "clip-grad": _same("optimizer.clip_norm"),
    "adam-beta1": _same("optimizer.beta1"),
    "adam-beta2": _same("optimizer.beta2"),
    "adam-eps": _same("optimizer.eps"),
    "data-path": _BLEND,
    "train-data-path": _BLEND,
    "valid-data-path": Meaning("`data.valid_blend`, as `data.blend`", "data.valid_blend", _with_commas),
    "test-data-path": _text("no option: a run reads no test data; `mesh-lm evaluate` reads them afterwards"),
    "split": _same("data.split"),
    "data-cache-path": _same("data.cache"),
    "dataloader-type": _text("no option: samples are read in the order of Megatron's single; cyclic and external are not built"),
    "mock-data": _text("no random data; `data.path=stdlib` is real text that every machine has"),
    "tokenizer-type": _text("no option: the file that `data.tokenizer` names says what it is"),
    "tokenizer-model": _same("data.tokenizer"),
    "vocab-file": _text(f"`data.tokenizer`: {_TOKENIZER}"),
    "merge-file": _text(f"`data.tokenizer`: {_TOKENIZER}"),
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
    "no-load-optim": _text("`init_from`: weights alone, at step 0"),
    "no-load-rng": _text("`init_from`: weights alone, at step 0"),
    "pretrained-checkpoint": _same("init_from"),
    "save-interval": _same("checkpoint.every", " (only the newest stay: `checkpoint.keep=2` by default)"),
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
    "log-throughput": _text("no option: tokens per second are always logged, and MFU where it is known"),
    "check-for-nan-in-loss-and-grad": _text(
        "no option: a step with a non-finite loss or gradient is always skipped, and `health.skip_limit` of them in a row end the run"
    ),
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
_AMBIGUOUS = frozenset({
    "lr_scheduler", "batch_size", "batch", "precision", "recompute", "activation_checkpointing", "dataset", "dp", "data_parallel",
    "tie_embeddings",
})  # fmt: skip
"""Names whose values are spelled differently, or that mean different things to different trainers."""
OTHERS: dict[str, Meaning] = {
    **{name: _near(field) if name in _AMBIGUOUS else _same(field) for name, field in {
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
    "microbatch": _MICROBATCHES,
    "microbatch_size": _MICROBATCHES,
    "per_device_train_batch_size": _MICROBATCHES,
    "train_micro_batch_size_per_gpu": _MICROBATCHES,
    "warmup_ratio": _WARMUP_FRACTION,
    "epochs": _EPOCHS,
    "num_epochs": _EPOCHS,
    "num_train_epochs": _EPOCHS,
    "tp": MEGATRON["tensor-model-parallel-size"],
    "tensor_parallel": MEGATRON["tensor-model-parallel-size"],
    "cp": MEGATRON["context-parallel-size"],
    "context_parallel": MEGATRON["context-parallel-size"],
    "ep": _MOE,
    "expert_parallel": _MOE,
    "dry_run": _SHOWS,
    "dryrun": _SHOWS,
}  # fmt: skip
"""A name of another trainer than Megatron-LM, with underscores -> the same."""

PREPROCESS: dict[str, Meaning] = {
    "output-prefix": _option("output", ", without the `_text_document` that Megatron appends"),
    "json-keys": Meaning("`--text-field`, a single one", "text-field", _one_key),
    "append-eod": _text("no option: the end-of-document token is always appended; leave it out"),
    "tokenizer-model": _option("tokenizer"),
    "tokenizer-type": _text("no option: the file that `--tokenizer` names says what it is"),
    "vocab-file": _text(f"`--tokenizer`: {_TOKENIZER}"),
    "merge-file": _text(f"`--tokenizer`: {_TOKENIZER}"),
    "vocab-size": _text("no option: the vocabulary is that of `--tokenizer`"),
    "partitions": _text("no option: `--workers` processes share the files; leave it out"),
    "keep-sequential-samples": _text("no option: documents keep their order; leave it out"),
    "split-sentences": _text("not built: a document is one sequence"),
    "keep-newlines": _text("no option: newlines are always kept; leave it out"),
    "lang": _text("no option: it is for splitting sentences; leave it out"),
    "log-interval": _text("no option: progress is always printed; leave it out"),
}  # fmt: skip
"""An option of Megatron-LM's preprocess_data.py that `mesh-lm prepare` lacks -> what it is there."""

_ENDPOINT = Meaning("`--rendezvous=ADDRESS:PORT` of node 0, for several nodes", "rendezvous", _rendezvous)
_ONE_RENDEZVOUS = _text("no option: `--rendezvous` alone says where the nodes meet; leave it out")
TORCHRUN: dict[str, Meaning] = {
    "nproc-per-node": Meaning("`--per-node`; without it one process drives all GPUs of its node", "per-node", _processes),
    "nnodes": Meaning("`--nodes`, and `--min-nodes` for the smaller number of MIN:MAX", "nodes", _processes),
    "node-rank": _option("node"),
    "master-addr": _ENDPOINT,
    "master-port": _ENDPOINT,
    "rdzv-endpoint": _option("rendezvous"),
    "rdzv-backend": _ONE_RENDEZVOUS,
    "rdzv-id": _ONE_RENDEZVOUS,
    "standalone": _text("no option: one node needs no rendezvous; leave it out"),
    "max-restarts": Meaning("`--restarts`, which counts those in a row without a new checkpoint", "restarts", exact=False),
    "log-dir": _text("no option: the run's own log is in the output directory; leave it out"),
}  # fmt: skip
"""An option of torchrun that `mesh-lm launch` lacks -> what it is there."""

_MEANINGS = OTHERS | {name.replace("-", "_"): meaning for name, meaning in MEGATRON.items()}

SEVERAL = frozenset(f"--{name}" for name, meaning in _MEANINGS.items() if meaning.convert is _with_commas)
"""Options of theirs that take all words after them."""


def meaning_of(name: str) -> Meaning | None:
    """Returns what a name stands for, with underscores or hyphens and in any case; None where nobody is known to use it."""
    name = name.lower().replace("-", "_")
    if name not in _MEANINGS and name.startswith("moe_"):
        return _MOE
    return _MEANINGS.get(name)


def in_run(name: str, text: str, asked: Asked) -> tuple[str, str]:
    """Returns the field that a name stands for and its value. Raises ValueError where they are not determined."""
    meaning = meaning_of(name)
    if meaning is None or not meaning.field or not meaning.exact:
        raise ValueError(name)
    return meaning.field, meaning.convert(text, asked) if meaning.convert else text


def answer(meaning: Meaning, text: str | None, asked: Asked, prefix: str = "--") -> str:
    """Returns the end of an error: what to write instead of an option that has this meaning.

    text: its value; None where it has none. asked: the other options, which a formula needs. prefix: that of the suggested option, "--"
    or "--config.".
    """
    ours, note = meaning.ours.replace("`", "").removeprefix("no option: "), meaning.note.replace("`", "")
    if not meaning.field:
        return f"; {ours}"
    if not meaning.convert:
        one = text and meaning.exact and " " not in text
        return did_you_mean([f"{prefix}{meaning.field}{f'={text}' if one else ''}{note}"])
    here = f"; here it is {ours}"
    formula = _formula(meaning, text, asked)
    try:
        value = meaning.convert(text or "", asked)
    except NotBuiltError as error:
        return f"; {error} is not built{here}"
    except (ValueError, ZeroDivisionError):
        return here + formula
    # A formula is what decides; a switch or a choice is only written otherwise.
    return (here + formula if meaning.numbers else "") + did_you_mean([f"{prefix}{meaning.field}={value}{note}"])


def _formula(meaning: Meaning, text: str | None, asked: Asked) -> str:
    try:
        return f" = {meaning.numbers(text, asked)}" if text and meaning.numbers else ""
    except ValueError:
        return ""


def of_command(names: Mapping[str, Meaning]) -> Callable[[str, str | None, Mapping[str, str]], tuple[str, str] | None]:
    """Returns what `options.command` asks for an option that it does not know: the field that is meant, or "", and the end of the error."""
    known = {name.replace("-", "_"): meaning for name, meaning in names.items()}

    def look_up(name: str, text: str | None, typed: Mapping[str, str]) -> tuple[str, str] | None:
        meaning = known.get(name.lower())
        return meaning and (meaning.field.replace("-", "_"), answer(meaning, text, Asked(typed=typed)))

    return look_up


def table(names: Mapping[str, Meaning] = MEGATRON, heads: tuple[str, str] = ("Megatron-LM", "mesh_lm")) -> str:
    """Returns a table of the tour in Markdown: the arguments of others, those with the same meaning in one row."""
    rows: dict[str, list[str]] = {}
    for name, meaning in names.items():
        rows.setdefault(meaning.ours, []).append(f"`--{name}`")
    lines = [f"| {', '.join(theirs)} | {ours} |" for ours, theirs in rows.items()]
    return "\n".join([f"| {heads[0]} | {heads[1]} |", "|---|---|", *lines])


RULES = {
    "dp": "ddp", "data": "ddp", "fsdp2": "fsdp", "hybrid": "hsdp", "hybrid_shard": "hsdp", "zero": "zero1",
    "tp": "megatron", "tensor": "megatron", "tensor_parallel": "megatron",
    "sp": "megatron_sp", "tp+sp": "megatron_sp", "tp_sp": "megatron_sp", "tp_2d": "megatron_2d", "2d": "megatron_2d",
}  # fmt: skip
"""A name of rules -> the preset that does the same."""
