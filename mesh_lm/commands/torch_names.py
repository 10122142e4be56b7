"""Names of PyTorch's DistributedDataParallel and FSDP, and of Horovod, and what they are here."""

from __future__ import annotations

from mesh_lm.commands.meanings import SCHEDULED_BY_XLA, Meaning, explained

_ACCUMULATION = explained("`train.microbatches`: gradients are summed over devices once per step")
_SAME_BITS = explained(
    "no option: every mesh has the same initial bits, from `seed`, and `health.replicas` compares "
    "replicas; leave it out"
)
_MESH = explained("`mesh.data`; -1: all devices that the other axes leave")
_LAUNCH = explained("`mesh-lm launch`, or Slurm: one process drives all GPUs of its node")
_UNUSED = explained(
    "no option: a parameter that the loss does not use has a zero gradient; leave it out"
)
_PER_LAYER = explained("no option: each layer is a unit, in every preset; leave it out")
_OFFLOAD = explained(
    "`optimizer.offload=mu,nu`: optimizer state in the host's memory (docs/memory.md); weights "
    "stay on the GPU"
)
_REDUCTION = explained(
    "`rules`: +reduce_float32, or +reduce_bfloat16, as in fsdp+reduce_float32 (docs/gradients.md)"
)
_TYPE = explained("`model.dtype`: the type of matmuls and activations; the masters are fp32")

DDP: dict[str, Meaning] = {
    "device_ids": explained("no option: a process uses all GPUs that it sees; leave it out"),
    "output_device": explained("no option: the loss is computed where its tokens are"),
    "process_group": _MESH,
    "broadcast_buffers": _SAME_BITS,
    "init_sync": _SAME_BITS,
    "bucket_cap_mb": SCHEDULED_BY_XLA,
    "gradient_as_bucket_view": SCHEDULED_BY_XLA,
    "static_graph": explained("no option: the step is compiled once; leave it out"),
    "find_unused_parameters": _UNUSED,
    "no_sync()": _ACCUMULATION,
    "bf16_compress_hook": explained("`rules`: +reduce_bfloat16, as in ddp+reduce_bfloat16"),
    "fp16_compress_hook": explained(
        "`rules`: +reduce_bfloat16, or +reduce_int8 with error feedback"
    ),
    "powerSGD_hook": explained("not built: `rules` +reduce_int8 sends fewer bytes, too"),
    "post_localSGD_hook": explained("`rules=diloco`, with `diloco.outer_steps`"),
    "ZeroRedundancyOptimizer": explained("`rules`: zero1 or distributed"),
    "Join": explained("no option: every batch is complete on every device; leave it out"),
    "DistributedSampler": explained(
        "no option: the order of samples depends on `seed` alone, and on no number of processes"
    ),
    "autocast": _TYPE,
    "GradScaler": explained("no option: bfloat16 and float32 need no loss scaling; leave it out"),
    "SyncBatchNorm": explained("no option: a decoder's norms need no sums over the batch"),
}
"""An argument of DistributedDataParallel, or a name used beside it -> its meaning."""

FSDP: dict[str, Meaning] = {
    "FULL_SHARD": explained("`rules=fsdp` over `mesh.fsdp`, or `rules=zero3` over `mesh.data`"),
    "SHARD_GRAD_OP": explained(
        "`rules=zero3` with `model.kept_layers` = `model.n_layers`: layers keep what they have "
        "gathered until their backward passes; or `rules=zero2`"
    ),
    "HYBRID_SHARD": explained("`rules=hsdp`: `mesh.fsdp` inside a node, `mesh.data` across nodes"),
    "NO_SHARD": explained("`rules=ddp`"),
    "reshard_after_forward": explained(
        "True: `rules=fsdp` or `rules=zero3`; False: `rules=zero3` with `model.kept_layers` = "
        "`model.n_layers`; a number is not built"
    ),
    "mesh": explained("`mesh.fsdp`, and for two dimensions `mesh.data` as well, with `rules=hsdp`"),
    "device_mesh": explained(
        "`mesh.fsdp`, and for two dimensions `mesh.data` as well, with `rules=hsdp`"
    ),
    "auto_wrap_policy": _PER_LAYER,
    "param_dtype": _TYPE,
    "reduce_dtype": _REDUCTION,
    "buffer_dtype": _TYPE,
    "output_dtype": explained("no option: the loss is fp32; leave it out"),
    "cast_forward_inputs": _TYPE,
    "cpu_offload": _OFFLOAD,
    "offload_policy": _OFFLOAD,
    "backward_prefetch": SCHEDULED_BY_XLA,
    "forward_prefetch": SCHEDULED_BY_XLA,
    "limit_all_gathers": SCHEDULED_BY_XLA,
    "set_modules_to_forward_prefetch": SCHEDULED_BY_XLA,
    "use_orig_params": explained("no option: parameters keep their names and shapes; leave it out"),
    "ignored_modules": explained(
        "`rules`: a row of its own with None, as in docs/sharding.md, replicates a parameter"
    ),
    "shard_placement_fn": explained("`rules`: a table names the dimension that is sharded"),
    "sync_module_states": _SAME_BITS,
    "param_init_fn": _SAME_BITS,
    "set_requires_gradient_sync": _ACCUMULATION,
    "state_dict_type": explained(
        "no option: checkpoints are independent of mesh and rules, and `mesh-lm export` writes "
        "the full weights"
    ),
    "apply_activation_checkpointing": explained(
        "`model.remat`: full, save_names, save_attention or offload"
    ),
    "parallelize_module": explained("`rules`: a product, as in fsdp+megatron_sp"),
}
"""An argument of FullyShardedDataParallel (FSDP 1) or fully_shard (FSDP 2), or a name used beside
it -> its meaning."""

HOROVOD: dict[str, Meaning] = {
    "hvd.init()": _LAUNCH,
    "horovodrun": _LAUNCH,
    "hvd.size()": _MESH,
    "DistributedOptimizer": explained("`rules=ddp`, the default"),
    "backward_passes_per_step": _ACCUMULATION,
    "Compression.fp16": explained("`rules`: +reduce_bfloat16, as in ddp+reduce_bfloat16"),
    "Adasum": explained("not built: gradients are averaged over all labels"),
    "broadcast_parameters": _SAME_BITS,
    "broadcast_optimizer_state": _SAME_BITS,
    "hvd.elastic": explained(
        "`mesh-lm launch --min-nodes=N`: a run continues on fewer nodes, with the same batch"
    ),
    "HOROVOD_HIERARCHICAL_ALLREDUCE": explained(
        "`rules=by_node`, with `mesh.extra=node=N` (docs/gradients.md)"
    ),
    "HOROVOD_FUSION_THRESHOLD": SCHEDULED_BY_XLA,
    "HOROVOD_CYCLE_TIME": SCHEDULED_BY_XLA,
    "HOROVOD_AUTOTUNE": explained("`mesh-lm plan FILE --best` searches without GPUs"),
    "HOROVOD_TIMELINE": explained(
        "`profile.steps`: a trace of that many steps; `mesh-lm plan FILE "
        "--output=FILE.trace.json` predicts one"
    ),
    "MetricAverageCallback": explained(
        "no option: metrics are means over all devices; leave it out"
    ),
}
"""A name of Horovod -> its meaning."""
