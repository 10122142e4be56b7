"""DeepSpeed's keys (ds_config.json), and what they are here."""

from __future__ import annotations

from collections.abc import Mapping

from mesh_lm.commands import formulas
from mesh_lm.commands.meanings import (
    SCHEDULED_BY_XLA,
    Context,
    Meaning,
    NotBuiltError,
    chosen,
    constant,
    explained,
    flag,
    require_value,
    same,
    with_parts,
)

_BUFFERS = explained("no option: XLA plans the buffers; `mesh-lm plan` shows them; leave it out")
_OFFLOAD = explained(
    "`optimizer.offload=mu,nu`, and `master` too under `distributed`: parts of the optimizer state "
    "in the host's memory (docs/memory.md)"
)
_NO_OFFLOAD = explained("not built: weights stay on the GPU, sharded by `rules`; no NVMe")
_SCALER = explained("no option: bfloat16 and float32 need no loss scaling; leave it out")
_PLAN = explained("no option: `mesh-lm plan` shows FLOPs, memory and each collective of a step")
_TRACE = explained("`profile.steps`: a trace of that many steps")
_NOT_TRAINING = explained("not built: compression and inference kernels")
_ONE_ADAM = explained("no option: there is one implementation of AdamW; leave it out")


def _betas(text: str) -> Mapping[str, str]:
    beta1, _, beta2 = text.partition(",")
    return {"optimizer.rule.beta1": beta1, "optimizer.rule.beta2": beta2}


def _rule(text: str, _: Context) -> str:
    rule = {"adam": "adamw", "adamw": "adamw", "lion": "lion", "muon": "muon"}
    if require_value(text).lower() not in rule:
        raise NotBuiltError(text)
    return rule[text.lower()]


def _schedule(text: str, _: Context) -> str:
    schedule = {
        "warmuplr": "constant",
        "warmupdecaylr": "linear",
        "warmupcosinelr": "cosine",
    }
    if require_value(text).lower() not in schedule:
        raise NotBuiltError(text)
    return schedule[text.lower()]


def _last_fraction(text: str) -> Mapping[str, str]:
    """WarmupDecayLR ends at 0."""
    return {"optimizer.final_fraction": "0"} if text.lower() == "warmupdecaylr" else {}


def _axis_size(text: str, _: Context) -> str:
    """Raises ValueError for 0, by which the axis is off."""
    if text == "0":
        raise ValueError(text)
    return require_value(text)


def _zero_stage(text: str) -> Mapping[str, str]:
    rules = {"0": "ddp", "1": "zero1", "2": "zero2", "3": "zero3"}
    if text not in rules:
        raise NotBuiltError(text)
    return {"rules.data": rules[text]}


def _only(*values: str) -> dict[str, str]:
    """Returns the values of a choice that need no field."""
    return dict.fromkeys(values, "")


def _warmup_type(text: str) -> Mapping[str, str]:
    if text.lower() not in _only("linear"):
        raise NotBuiltError(text)
    return {}


def _adam_w_mode(text: str) -> Mapping[str, str]:
    if text.lower() == "false":
        raise NotBuiltError("L2 regularisation in the gradient")
    return {}


DEEPSPEED: dict[str, Meaning] = {
    "train_batch_size": same("train.global_batch"),
    "train_micro_batch_size_per_gpu": formulas.MICROBATCHES,
    "gradient_accumulation_steps": same("train.microbatches"),
    "managed_gradient_accumulation": explained(
        "no option: a step always has `train.microbatches`; leave it out"
    ),
    "gradient_clipping": same("optimizer.clip_norm"),
    "optimizer.type": Meaning(
        "`optimizer.rule`: adamw for Adam and AdamW, lion and muon for their like; adafactor is "
        "one more",
        "optimizer.rule",
        _rule,
    ),
    "optimizer.params.lr": same("optimizer.learning_rate"),
    "optimizer.params.betas": explained(
        "`optimizer.rule.beta1` and `optimizer.rule.beta2`", _betas
    ),
    "optimizer.params.eps": same("optimizer.rule.eps"),
    "optimizer.params.weight_decay": same("optimizer.weight_decay"),
    "optimizer.params.momentum": same("optimizer.rule.momentum", ", with `optimizer.rule=muon`"),
    "optimizer.params.adam_w_mode": explained(
        "no option: weight decay is decoupled, as in AdamW", _adam_w_mode
    ),
    "optimizer.params.torch_adam": _ONE_ADAM,
    "optimizer.params.fused": _ONE_ADAM,
    "optimizer.params.bias_correction": explained(
        "no option: the moments of AdamW are always corrected; leave it out", constant()
    ),
    "optimizer.params.amsgrad": explained("not built: AMSGrad"),
    "optimizer.params": explained(
        "no field of `optimizer.rule`; a rule of your own has its own (docs/optimizers.md)"
    ),
    "scheduler.type": Meaning(
        "`optimizer.schedule`: constant for WarmupLR, linear for WarmupDecayLR, cosine for "
        "WarmupCosineLR; OneCycle and LRRangeTest are not built",
        "optimizer.schedule",
        _schedule,
        parts=_last_fraction,
    ),
    "scheduler.params.warmup_num_steps": same("optimizer.warmup_steps"),
    "scheduler.params.warmup_max_lr": same("optimizer.learning_rate"),
    "scheduler.params.total_num_steps": same("train.steps"),
    "scheduler.params.cos_min_ratio": same("optimizer.final_fraction"),
    "scheduler.params.warmup_type": explained("no option: always linear", _warmup_type),
    "scheduler.params.warmup_min_lr": explained("not built: the warm-up starts at 0"),
    "scheduler.params.warmup_min_ratio": explained("not built: the warm-up starts at 0"),
    "scheduler.params": explained("not built: a parameter of another schedule"),
    "bf16.enabled": flag("model.dtype", "bfloat16"),
    "bf16.immediate_grad_update": _BUFFERS,
    "bf16": explained("no option: fp32 masters, moments and sums of gradients are the only ones"),
    "fp16.enabled": explained("not built: `model.dtype` is bfloat16 or float32"),
    "fp16": _SCALER,
    "amp": explained("not built: `model.dtype` is bfloat16 or float32, for the whole model"),
    "torch_autocast": explained(
        "`model.dtype`: the type of matmuls and activations; norms, softmax and the loss are fp32"
    ),
    "data_types.grad_accum_dtype": explained(
        "no option: gradients are accumulated in fp32",
        chosen("", {"fp32": "", "float32": "", "torch.float32": ""}),
    ),
    "communication_data_type": explained(
        "`rules`: +reduce_bfloat16 for bfp16, as in zero3+reduce_bfloat16; fp32 is the default",
        chosen(
            "rules.reduction",
            {"bfp16": "reduce_bfloat16", "bf16": "reduce_bfloat16", "fp32": ""},
        ),
    ),
    "prescale_gradients": explained("no option: gradients are summed in fp32; leave it out"),
    "gradient_predivide_factor": explained("no option: gradients are summed in fp32; leave it out"),
    "gradient_allreduce_op": explained("no option: the loss is the mean over all labels"),
    "sparse_gradients": explained("not built: the gradient of the embedding is dense"),
    "zero_optimization.stage": explained(
        "`rules`: ddp, zero1, zero2 or zero3 for 0 to 3; distributed is zero2 with bf16 weights",
        _zero_stage,
    ),
    "zero_optimization.offload_optimizer": _OFFLOAD,
    "zero_optimization.offload_param": _NO_OFFLOAD,
    "zero_optimization.cpu_offload": _OFFLOAD,
    "zero_optimization.overlap_comm": SCHEDULED_BY_XLA,
    "zero_optimization.reduce_scatter": SCHEDULED_BY_XLA,
    "zero_optimization.allgather_partitions": SCHEDULED_BY_XLA,
    "zero_optimization.reduce_bucket_size": SCHEDULED_BY_XLA,
    "zero_optimization.allgather_bucket_size": SCHEDULED_BY_XLA,
    "zero_optimization.use_multi_rank_bucket_allreduce": SCHEDULED_BY_XLA,
    "zero_optimization.stage3_prefetch_bucket_size": explained(
        "no option: zero3 gathers the weights of one layer ahead, by `launch.xla_flags=layers`"
    ),
    "zero_optimization.stage3_max_live_parameters": explained(
        "`model.kept_layers`, the number of layers that keep what they have gathered"
    ),
    "zero_optimization.stage3_max_reuse_distance": explained(
        "`model.kept_layers`, the number of layers that keep what they have gathered"
    ),
    "zero_optimization.stage3_param_persistence_threshold": explained(
        "no option: norms and biases are never sharded by zero3; leave it out"
    ),
    "zero_optimization.stage3_module_granularity_threshold": _BUFFERS,
    "zero_optimization.stage3_gather_16bit_weights_on_model_save": explained(
        "`mesh-lm export`, which writes bf16 weights from any checkpoint"
    ),
    "zero_optimization.stage3_gather_fp16_weights_on_model_save": explained(
        "`mesh-lm export`, which writes bf16 weights from any checkpoint"
    ),
    "zero_optimization.sub_group_size": _BUFFERS,
    "zero_optimization.contiguous_gradients": _BUFFERS,
    "zero_optimization.round_robin_gradients": _BUFFERS,
    "zero_optimization.parameter_alignment": _BUFFERS,
    "zero_optimization.compute_grad_norm": explained("no option: it is always computed and logged"),
    "zero_optimization.ignore_unused_parameters": explained(
        "no option: a parameter that the loss does not use has a zero gradient; leave it out"
    ),
    "zero_optimization.load_from_fp32_weights": explained(
        "no option: a checkpoint has the fp32 masters; leave it out"
    ),
    "zero_optimization.elastic_checkpoint": explained(
        "no option: checkpoints are independent of mesh and rules; leave it out"
    ),
    "zero_optimization.legacy_stage1": SCHEDULED_BY_XLA,
    "zero_optimization.memory_efficient_linear": _BUFFERS,
    "zero_optimization.log_trace_cache_warnings": _BUFFERS,
    "zero_optimization.zero_hpz_partition_size": explained(
        "`rules=hsdp`: `mesh.fsdp` inside a node, `mesh.data` across nodes; there the moments are "
        "sharded inside a node only, too"
    ),
    "zero_optimization.mics_shard_size": explained(
        "`rules=hsdp`: `mesh.fsdp` is the size of the group, `mesh.data` the rest"
    ),
    "zero_optimization.mics_hierarchical_params_gather": SCHEDULED_BY_XLA,
    "zero_optimization.zero_quantized_weights": explained("not built: weights travel in bf16"),
    "zero_optimization.zero_quantized_nontrainable_weights": explained(
        "not built: weights travel in bf16"
    ),
    "zero_optimization.zero_quantized_gradients": explained(
        "`rules`: +reduce_int8, as in distributed+reduce_int8: int8 with error feedback"
    ),
    "zero_allow_untested_optimizer": explained("no option: any rule is sharded; leave it out"),
    "zero_force_ds_cpu_optimizer": explained("no option: the update runs on the GPU"),
    "aio": _NO_OFFLOAD,
    "tensor_parallel.autotp_size": Meaning(
        "`mesh.tensor`, with `rules` such as `megatron`",
        "mesh.tensor",
        _axis_size,
        note=", with `rules` such as `megatron`",
        parts=constant(rules__tensor="megatron"),
    ),
    "tensor_parallel": explained("`rules`: a table of your own (docs/sharding.md) says the rest"),
    "sequence_parallel_size": with_parts(
        same("mesh.sequence", ", with `rules` such as `ulysses`"),
        constant(rules__sequence="ulysses"),
    ),
    "pipeline": explained(
        "`mesh.pipeline` is the number of stages, and `pipeline.layers` their layers"
    ),
    "activation_checkpointing.cpu_checkpointing": flag("model.remat", "offload"),
    "activation_checkpointing.partition_activations": explained(
        "`rules`: megatron_sp, which shards the residual stream over `mesh.tensor`"
    ),
    "activation_checkpointing.number_checkpoints": explained(
        "`model.remat_layers`, the number of layers that are recomputed"
    ),
    "activation_checkpointing": _BUFFERS,
    "steps_per_print": same("train.log_every"),
    "wall_clock_breakdown": _TRACE,
    "memory_breakdown": _PLAN,
    "dump_state": explained("no option: the complete config is in the run's config.json"),
    "flops_profiler": _PLAN,
    "comms_logger": _PLAN,
    "tensorboard": explained("`output`: TensorBoard files are always written there"),
    "csv_monitor": explained("`output`: metrics.jsonl is always written there"),
    "wandb.project": same("wandb"),
    "wandb": explained("`wandb`, a project; empty: none", constant()),
    "comet": explained("not built: `wandb`, TensorBoard files and metrics.jsonl are there"),
    "checkpoint": explained(
        "no option: checkpoints are independent of mesh and rules, and their bits are verified"
    ),
    "nebula": explained("no option: checkpoints are always written in the background"),
    "elasticity": explained(
        "`mesh-lm launch --min-nodes=N`: a run continues on fewer nodes, with the same batch"
    ),
    "autotuning": explained("`mesh-lm plan FILE --best` searches without GPUs"),
    "data_efficiency": explained("not built: curricula and token dropping"),
    "curriculum_learning": explained("not built: every step has sequences of `model.seq_len`"),
    "progressive_layer_drop": explained("not built: all layers run in every step"),
    "eigenvalue": explained("not built: it serves quantization"),
    "sparse_attention": explained("`model.window`: sliding windows; other patterns are not built"),
    "compression_training": _NOT_TRAINING,
    "quantize_training": _NOT_TRAINING,
    "hybrid_engine": _NOT_TRAINING,
    "compile": explained("no option: XLA compiles the complete step; leave it out"),
    "disable_allgather": SCHEDULED_BY_XLA,
    "dataloader_drop_last": explained("no option: every batch is complete; leave it out"),
    "seed": same("seed"),
}
"""A key of DeepSpeed's JSON, with the sections that it is in -> its meaning. A section stands for
all of its keys that have no entry."""

DEEPSPEED_DEFAULTS: dict[str, str] = {"gradient_clipping": "0"}
"""A key that every file may leave out -> the value that DeepSpeed then takes."""

ADAM_DEFAULTS: dict[str, str] = {
    "optimizer.params.lr": "0.001",
    "optimizer.params.betas": "0.9,0.999",
    "optimizer.params.weight_decay": "0",
}
"""A key that a file with Adam may leave out -> the value that DeepSpeed's Adam takes."""

_WARMUP_DEFAULTS = {
    "scheduler.params.warmup_num_steps": "1000",
    "scheduler.params.warmup_type": "log",
}
SCHEDULER_DEFAULTS: dict[str, dict[str, str]] = {
    # Its warmup_max_lr is the optimizer's lr by default.
    "warmuplr": _WARMUP_DEFAULTS,
    "warmupdecaylr": {**_WARMUP_DEFAULTS, "scheduler.params.warmup_max_lr": "0.001"},
    "warmupcosinelr": {**_WARMUP_DEFAULTS, "scheduler.params.cos_min_ratio": "0.0001"},
}
"""The type of a scheduler in lower case -> a key that a file may leave out -> the value that the
scheduler takes."""
