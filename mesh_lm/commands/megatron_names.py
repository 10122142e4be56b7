"""Megatron-LM's arguments, and what they are here."""

from __future__ import annotations

from mesh_lm.commands import formulas
from mesh_lm.commands.meanings import (
    SCHEDULED_BY_XLA,
    Meaning,
    NotBuiltError,
    Parts,
    chosen,
    constant,
    explained,
    flag,
    one_of,
    same,
    with_parts,
)

MOE = explained("not built; `docs/experts.md` has what a mixture of experts can do")
"""The answer to an argument of Megatron-LM's experts that is not in the table."""
TOKENIZER = (
    "a tokenizer.json, as save_pretrained of transformers writes from vocab.json and merges.txt"
)
_FUSION = explained("no option: XLA decides what is fused; leave it out")
_ONE_DECAY = explained("not built: `optimizer.weight_decay` is the same at every step")
_SCALER = explained("no option: bfloat16 and float32 need no loss scaling; leave it out")
_SELECTIVE = explained(
    "`model.remat`: full for full; for selective save_names, which is not the same: it recomputes "
    "all but matmul and attention outputs",
    # The switch --recompute-activations has no value, and means selective.
    chosen("model.remat", {"": "save_names", "selective": "save_names", "full": "full"}),
)


def _nothing_for(*values: str) -> Parts:
    """Returns parts that set nothing for these values, because other arguments do, and that refuse
    others.
    """

    def parts(text: str) -> dict[str, str]:
        if text not in values:
            raise NotBuiltError(text)
        return {}

    return parts


_FUSIONS = (
    "no-masked-softmax-fusion",
    "no-bias-gelu-fusion",
    "no-bias-swiglu-fusion",
    "no-bias-dropout-fusion",
    "no-rope-fusion",
    "no-gradient-accumulation-fusion",
    "no-persist-layer-norm",
    "cross-entropy-loss-fusion",
    "cross-entropy-fusion-impl",
)
_FP8 = explained("not built: fp8")
_LOGS = explained(
    "no option: metrics.jsonl and TensorBoard files have all metrics, and `mesh-lm plan` the "
    "memory; leave it out"
)
_HOST = explained("no option: the loader and the host's memory need no setting; leave it out")
_STAGE_LAYERS = explained("`pipeline.layers`, the number of layers of each virtual stage")
_SCHEDULER = explained(
    "no option: the schedule is always the config's, and a checkpoint has none; leave it out"
)
_ALL_TOKENS = explained("no option: no token is dropped; leave it out")
_ONE_IMPLEMENTATION = explained("no option: there is one implementation; leave it out")

MEGATRON: dict[str, Meaning] = {
    "num-layers": same("model.n_layers"),
    "hidden-size": same("model.d_model"),
    "ffn-hidden-size": same("model.d_ff"),
    "num-attention-heads": same("model.n_heads"),
    "group-query-attention": explained(
        "`model.n_kv_heads`, smaller than `model.n_heads`", constant()
    ),
    "num-query-groups": same("model.n_kv_heads"),
    "kv-channels": same("model.head_dim"),
    "seq-length": same("model.seq_len"),
    "vocab-size": same("model.vocab_size"),
    "max-position-embeddings": explained(
        "no option: a table of learned positions has `model.seq_len` rows"
    ),
    "position-embedding-type": one_of(
        "model.positions", {"rope": "rotary", "learned_absolute": "learned"}
    ),
    "use-rotary-position-embeddings": flag("model.positions", "rotary"),
    "no-position-embedding": explained(
        "no option: with `model.positions=rotary` there is no table; leave it out"
    ),
    "rotary-base": same("model.rope_theta"),
    "rotary-percent": explained(
        "not built: `model.positions=rotary` rotates the complete head; 1.0 needs no option",
        _nothing_for("1.0", "1"),
    ),
    "normalization": one_of("model.norm", {"RMSNorm": "rmsnorm", "LayerNorm": "layernorm"}),
    "norm-epsilon": same("model.norm_eps"),
    "apply-layernorm-1p": explained("not built: scales start at 1, and are stored as they are"),
    "swiglu": flag("model.activation", "swiglu"),
    "squared-relu": explained("not built: `model.activation` is gelu or swiglu"),
    "disable-bias-linear": flag("model.biases", "false", ", which removes those of LayerNorm, too"),
    "add-qkv-bias": explained("not built: `model.biases` is for all linear layers"),
    "untie-embeddings-and-output-weights": flag("model.tied", "false"),
    "qk-layernorm": flag("model.qk_norm", "true"),
    "window-size": formulas.WINDOW,
    "window-attn-skip-freq": explained(
        "`model.window`, a width for each layer in turn, as in 129,129,129,0; 0: full attention"
    ),
    "hidden-dropout": same("model.dropout"),
    "attention-dropout": explained(
        "no dropout inside of attention; `model.dropout` is that of its output and the MLP's"
    ),
    "init-method-std": same("model.init_std"),
    "make-vocab-size-divisible-by": formulas.VOCAB_MULTIPLE,
    "bf16": flag("model.dtype", "bfloat16"),
    "fp16": explained("not built: `model.dtype` is bfloat16 or float32"),
    "fp8-format": _FP8,
    "fp8-amax-history-len": _FP8,
    "fp8-amax-compute-algo": _FP8,
    "fp8-param-gather": _FP8,
    "loss-scale": _SCALER,
    "initial-loss-scale": _SCALER,
    "transformer-impl": _ONE_IMPLEMENTATION,
    "use-mcore-models": _ONE_IMPLEMENTATION,
    **dict.fromkeys(_FUSIONS, _FUSION),
    "attention-backend": explained(
        "`model.attention`: auto, mosaic, cudnn or xla",
        chosen(
            "model.attention",
            {"auto": "auto", "flash": "auto", "fused": "cudnn", "unfused": "xla", "local": "xla"},
        ),
    ),
    "use-flash-attn": explained(
        "no option: `model.attention=auto` is flash attention wherever there is a kernel"
    ),
    "recompute-granularity": _SELECTIVE,
    "recompute-activations": _SELECTIVE,
    "recompute-method": explained(
        "uniform: `model.remat=full`, which is for every layer; block: `model.remat_layers`, not "
        "with stages",
        constant(),
    ),
    "recompute-num-layers": formulas.REMAT_LAYERS,
    "tensor-model-parallel-size": with_parts(
        same("mesh.tensor", ", with `rules` such as `megatron`"),
        constant(rules__tensor="megatron"),
    ),
    "sequence-parallel": explained(
        "`rules`: megatron_sp instead of megatron", constant(rules__tensor="megatron_sp")
    ),
    "context-parallel-size": with_parts(
        same("mesh.sequence", ", with `rules` such as `ring` or `ulysses`"),
        constant(rules__sequence="ring"),
    ),
    "cp-comm-type": explained(
        "`rules`: `ring` for p2p, `context_gather` for all_gather, `ulysses` for a2a, `usp` for "
        "a2a+p2p",
        chosen("rules.sequence", {"p2p": "ring", "all_gather": "context_gather", "a2a": "ulysses"}),
    ),
    "pipeline-model-parallel-size": same("mesh.pipeline"),
    "num-layers-per-virtual-pipeline-stage": formulas.CHUNKS,
    "num-virtual-stages-per-pipeline-rank": same("pipeline.chunks"),
    "pipeline-model-parallel-layout": _STAGE_LAYERS,
    "decoder-first-pipeline-num-layers": _STAGE_LAYERS,
    "decoder-last-pipeline-num-layers": _STAGE_LAYERS,
    "use-distributed-optimizer": explained(
        "`rules`: distributed, as in distributed+megatron_sp", constant(rules__data="distributed")
    ),
    "use-megatron-fsdp": explained("`mesh.fsdp`, with `rules` fsdp or hsdp", constant()),
    "data-parallel-sharding-strategy": explained(
        "`rules`: zero1, zero2, zero3, fsdp or hsdp",
        chosen(
            "rules.data",
            {
                "no_shard": "ddp",
                "optim": "zero1",
                "optim_grads": "zero2",
                "optim_grads_params": "zero3",
            },
        ),
    ),
    # All sums but those along fsdp are in float32 anyway, and a conversion makes no fsdp axis.
    "accumulate-allreduce-grads-in-fp32": explained("`rules`: +reduce_float32", constant()),
    "grad-reduce-in-bf16": explained(
        "`rules`: +reduce_bfloat16, as in distributed+reduce_bfloat16",
        constant(rules__reduction="reduce_bfloat16"),
    ),
    "overlap-grad-reduce": SCHEDULED_BY_XLA,
    "overlap-param-gather": SCHEDULED_BY_XLA,
    "tp-comm-overlap": SCHEDULED_BY_XLA,
    "num-experts": with_parts(
        same("model.experts.number", ", with `model.block=moe`"), constant(model__block="moe")
    ),
    "expert-model-parallel-size": with_parts(
        same(
            "mesh.expert",
            ", with `rules` such as `experts_gather`; `mesh.data` is then the other replicas",
        ),
        constant(rules__expert="experts_gather"),
    ),
    "expert-tensor-parallel-size": explained(
        "`rules`: experts are sharded over `mesh.tensor` as the MLP is; for 1, over "
        "`('expert', 'tensor')`, as docs/experts.md shows"
    ),
    "moe-layer-freq": explained(
        "`model.segments`: for each run of layers of one kind NAME:LAYERS:KIND, where KIND is moe "
        "or dense"
    ),
    "moe-ffn-hidden-size": same("model.experts.d_ff"),
    "moe-shared-expert-intermediate-size": same("model.experts.shared"),
    "moe-router-topk": same("model.experts.active"),
    "moe-router-score-function": same("model.experts.score"),
    "moe-router-pre-softmax": flag("model.experts.normalised", "false"),
    "moe-router-topk-scaling-factor": same("model.experts.scale"),
    "moe-router-num-groups": same("model.experts.groups"),
    "moe-router-group-topk": same("model.experts.active_groups"),
    "moe-router-load-balancing-type": explained(
        "`model.experts.balance_loss` for seq_aux_loss, `model.experts.bias` for none; "
        "aux_loss, global_aux_loss and sinkhorn are not built",
        _nothing_for("seq_aux_loss", "none"),
    ),
    "moe-aux-loss-coeff": same(
        "model.experts.balance_loss", ", the loss of each sequence, as seq_aux_loss"
    ),
    "moe-z-loss-coeff": same("model.experts.z_loss"),
    "moe-router-enable-expert-bias": flag("model.experts.bias", "true"),
    "moe-router-bias-update-rate": same("model.experts.bias_rate"),
    "moe-token-dispatcher-type": explained(
        "`rules`: `experts_gather` for allgather, `experts_padded` for alltoall, in a product with "
        "the others; flex is not built",
        chosen("rules.expert", {"allgather": "experts_gather", "alltoall": "experts_padded"}),
    ),
    "moe-grouped-gemm": explained(
        "no option: the experts of a device are one grouped matmul; leave it out"
    ),
    "moe-expert-capacity-factor": explained(
        "no option: no token is dropped; `model.experts.factor` is the size of a buffer, and what "
        "does not fit follows in further rounds"
    ),
    "moe-pad-expert-input-to-capacity": _ALL_TOKENS,
    "moe-token-drop-policy": _ALL_TOKENS,
    "moe-router-dtype": explained("no option: routers are computed in float32; leave it out"),
    "moe-permute-fusion": _FUSION,
    "moe-router-fusion": _FUSION,
    "moe-shared-expert-overlap": SCHEDULED_BY_XLA,
    "moe-per-layer-logging": explained(
        "no option: `expert_load` and `expert_idle` are means over the layers"
    ),
    "moe-input-jitter-eps": explained("not built: noise at the input of a router"),
    "micro-batch-size": formulas.MICROBATCHES,
    "global-batch-size": same("train.global_batch"),
    "rampup-batch-size": explained("not built: every step has `train.global_batch` sequences"),
    "train-iters": same("train.steps"),
    "train-samples": formulas.TRAIN_SAMPLES,
    "exit-interval": explained(
        "not built: a run ends at `train.steps`, with the end of its schedule, or on SIGTERM"
    ),
    "skip-train": explained("no option: `mesh-lm evaluate` evaluates a checkpoint"),
    "exit-duration-in-mins": explained(
        "no option: on SIGTERM the run saves and exits with status 99, as before a Slurm time limit"
    ),
    "exit-signal-handler": explained(
        "no option: on SIGTERM the run saves and exits with status 99"
    ),
    "optimizer": formulas.OPTIMIZER,
    "lr": same("optimizer.learning_rate"),
    "min-lr": formulas.FINAL_FRACTION,
    "decoupled-lr": explained("not built: all weights have `optimizer.learning_rate`"),
    "decoupled-min-lr": explained("not built: all weights have `optimizer.learning_rate`"),
    "lr-decay-style": formulas.SCHEDULE,
    "lr-wsd-decay-style": explained(
        "no option: `optimizer.schedule=wsd` decays linearly; exponential, cosine, minus_sqrt are "
        "not built",
        _nothing_for("linear"),
    ),
    "lr-wsd-decay-iters": formulas.DECAY_FRACTION,
    "lr-decay-iters": explained("no option: the schedule ends at `train.steps`"),
    "lr-decay-samples": explained("no option: the schedule ends at `train.steps`"),
    "lr-warmup-init": explained("not built: the warm-up starts at 0"),
    "override-opt_param-scheduler": _SCHEDULER,
    "use-checkpoint-opt_param-scheduler": _SCHEDULER,
    "lr-warmup-iters": same("optimizer.warmup_steps"),
    "lr-warmup-fraction": formulas.WARMUP_FRACTION,
    "lr-warmup-samples": formulas.WARMUP_SAMPLES,
    "weight-decay": same("optimizer.weight_decay"),
    "start-weight-decay": _ONE_DECAY,
    "end-weight-decay": _ONE_DECAY,
    "weight-decay-incr-style": _ONE_DECAY,
    "clip-grad": same("optimizer.clip_norm"),
    "adam-beta1": same("optimizer.rule.beta1"),
    "adam-beta2": same("optimizer.rule.beta2"),
    "adam-eps": same("optimizer.rule.eps"),
    "data-path": formulas.BLEND,
    "train-data-path": formulas.BLEND,
    "valid-data-path": formulas.VALID_BLEND,
    "test-data-path": explained(
        "no option: a run reads no test data; `mesh-lm evaluate` reads them afterwards"
    ),
    "split": same("data.split"),
    "data-cache-path": same("data.cache"),
    "dataloader-type": explained(
        "no option: samples are read in the order of Megatron's single; cyclic and external are "
        "not built",
        _nothing_for("single"),
    ),
    "mock-data": explained(
        "no random data; `data.path=stdlib` is real text that every machine has"
    ),
    "tokenizer-type": explained("no option: the file that `data.tokenizer` names says what it is"),
    "tokenizer-model": same("data.tokenizer"),
    "vocab-file": explained(f"`data.tokenizer`: {TOKENIZER}"),
    "merge-file": explained(f"`data.tokenizer`: {TOKENIZER}"),
    "reset-position-ids": flag("data.documents", "megatron"),
    "reset-attention-mask": flag("data.documents", "megatron"),
    "eod-mask-loss": flag("data.megatron", "mask_document_start"),
    "fim-rate": same("data.fim_rate"),
    "fim-spm-rate": same("data.fim_spm_rate"),
    "num-workers": same("data.threads"),
    "no-create-attention-mask-in-dataloader": _HOST,
    "no-mmap-bin-files": _HOST,
    "manual-gc": _HOST,
    "manual-gc-interval": _HOST,
    "empty-unused-memory-level": _HOST,
    "tiktoken-pattern": explained(
        "no option: the file that `data.tokenizer` names has its pattern; leave it out"
    ),
    "seed": same("seed"),
    "save": same("output"),
    "load": explained(
        "`output`, from which a run resumes by itself; `init_from` for weights alone"
    ),
    "finetune": explained("`init_from`: weights alone, at step 0"),
    "no-load-optim": explained("`init_from`: weights alone, at step 0"),
    "no-load-rng": explained("`init_from`: weights alone, at step 0"),
    "pretrained-checkpoint": same("init_from"),
    "save-interval": same(
        "checkpoint.every", " (only the newest stay: `checkpoint.keep=2` by default)"
    ),
    "use-dist-ckpt": explained("no option: checkpoints are Orbax's, independent of mesh and rules"),
    "auto-detect-ckpt-format": explained(
        "no option: checkpoints are Orbax's, independent of mesh and rules"
    ),
    "no-save-optim": explained("not built: a checkpoint has the complete state"),
    "no-save-rng": explained("not built: a checkpoint has the complete state"),
    "exit-on-missing-checkpoint": flag("checkpoint.resume", "required"),
    "ckpt-format": explained("no option: checkpoints are Orbax's, independent of mesh and rules"),
    "async-save": explained("no option: checkpoints are always written in the background"),
    "non-persistent-save-interval": same("checkpoint.local_every"),
    "non-persistent-local-ckpt-dir": same("checkpoint.local"),
    "replication-factor": formulas.LOCAL_COPIES,
    "eval-interval": same("train.eval_every"),
    "eval-iters": formulas.EVAL_SEQUENCES,
    "log-interval": same("train.log_every"),
    "calculate-per-token-loss": explained(
        "no option: the loss is always the mean over all labels of the batch; leave it out"
    ),
    "log-params-norm": explained("not built: `grad_norm` is logged, the norm of the weights not"),
    "log-num-zeros-in-grad": explained("not built: `grad_norm` is logged, the number of zeros not"),
    "log-timers-to-tensorboard": _LOGS,
    "log-memory-to-tensorboard": _LOGS,
    "log-validation-ppl-to-tensorboard": _LOGS,
    "tensorboard-queue-size": _LOGS,
    "tensorboard-log-interval": _LOGS,
    "timing-log-level": explained("`profile.steps`: a trace of that many steps"),
    "log-throughput": explained(
        "no option: tokens per second are always logged, and MFU where it is known"
    ),
    "check-for-nan-in-loss-and-grad": explained(
        "no option: a step with a non-finite loss or gradient is always skipped, and "
        "`health.skip_limit` of them in a row end the run"
    ),
    "tensorboard-dir": explained("`output`: TensorBoard files are always written there"),
    "wandb-project": same("wandb"),
    "wandb-exp-name": explained("no option: a run of W&B has the name of `output`; leave it out"),
    "wandb-save-dir": explained("no option: W&B writes into `output`; leave it out"),
    "profile": explained("`profile.steps`, a number of steps; 0: no trace"),
    "profile-step-start": same("profile.start_step"),
    "profile-step-end": explained("`profile.steps`: end - start"),
    "distributed-backend": explained("no option: NCCL on GPUs; leave it out"),
    "distributed-timeout-minutes": explained("`health.stall` and `health.patience`, in seconds"),
}
"""An argument of Megatron-LM, without the dashes -> its meaning. The tour shows all of them."""


MEGATRON_DEFAULTS: dict[str, str] = {
    "hidden-dropout": "0.1",
    "attention-dropout": "0.1",
    "adam-beta1": "0.9",
    "adam-beta2": "0.999",
    "adam-eps": "1e-8",
    "clip-grad": "1.0",
    "weight-decay": "0.01",
    "lr-decay-style": "linear",
    "lr-warmup-iters": "0",
    "min-lr": "0.0",
    "seed": "1234",
    "norm-epsilon": "1e-5",
    "init-method-std": "0.02",
    "rotary-base": "10000",
    "make-vocab-size-divisible-by": "128",
    "eval-interval": "1000",
    "eval-iters": "100",
    "log-interval": "100",
}
"""An argument that a command line may leave out -> the value that Megatron-LM then takes. A
converted config has those that differ from the defaults here."""


MEGATRON_LOST: dict[str, str] = {
    "lr-decay-iters": "not built: the schedule ends at train.steps",
    "lr-decay-samples": "not built: the schedule ends at train.steps",
    "moe-expert-capacity-factor": "not built: experts have no capacity, and no token is dropped",
    "exit-duration-in-mins": (
        "not built: a run ends at train.steps, or on SIGTERM, on which it saves and exits with "
        "status 99"
    ),
}
"""An argument for which there is nothing to write here, although it changes Megatron-LM's run ->
the reason that a converted config prints."""
