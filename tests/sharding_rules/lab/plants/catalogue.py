"""Every planted bug. Those of the trainer come first; the eleven of the review that asked for this
are the first eleven of them."""

from __future__ import annotations

from tests.sharding_rules.lab.plants import plain, trainer
from tests.sharding_rules.lab.plants.program import Plant

PLANTS = (
    Plant(
        "logits gathered",
        "The loss pins its logits to a row without 'vocab'.",
        trainer.HSDP,
        trainer.logits_gathered,
        {"wire": 1.3},
        "reshard",
        ("activation", "gathered over tensor", "vocab"),
    ),
    Plant(
        "weights gathered in f32",
        "A weight is gathered and then cast.",
        trainer.HSDP,
        trainer.weights_gathered_in_f32,
        {"wire": 1.02},
        "f32-collective",
        ("blocks.", "over fsdp", "cast"),
    ),
    Plant(
        "embed and mlp swapped",
        "The MLP names the dimensions of its weights in the wrong order.",
        trainer.HSDP,
        trainer.embed_and_mlp_swapped,
        {"wire": 1.1},
        "swapped-names",
        ("blocks.mlp.up.weight", "'embed'", "'mlp'", "swapped"),
    ),
    Plant(
        "stack gathered before the scan",
        "All layers' weights are gathered at once, outside of the loop over layers.",
        trainer.HSDP,
        trainer.stack_gathered_before_the_scan,
        {"peak": 1.1},
        "gathered-early",
        ("blocks.", "fsdp", "in the loop"),
    ),
    Plant(
        "head in a transposed layout",
        (
            "The head is stored [D, V], its dimensions are still named (vocab, embed), and it is "
            "used transposed."
        ),
        trainer.GROUPED,
        trainer.head_in_a_transposed_layout,
        {"wire": 1.05},
        "reshard|swapped-names",
        ("head",),
    ),
    Plant(
        "embedding gradient all-reduced",
        "The gradient of a table is summed whole, and each device keeps its part.",
        trainer.HSDP,
        trainer.embedding_gradient_all_reduced,
        {"wire": 1.05},
        "all-reduce-of-shards",
        ("embedding", "reduce-scatter", "fsdp"),
    ),
    Plant(
        "activations['mlp'] forgotten",
        "rules.params shards 'mlp' over tensor and rules.activations does not.",
        trainer.HSDP,
        trainer.mlp_activations_forgotten,
        {"wire": 1.2},
        "reshard",
        ("rules.activations['mlp']", "tensor"),
    ),
    Plant(
        "batch gathered over fsdp",
        "A block pins its input to a row without 'batch'.",
        trainer.HSDP,
        trainer.batch_gathered_over_fsdp,
        {"wire": 1.25},
        "reshard",
        ("activation", "fsdp", "batch"),
    ),
    Plant(
        "moments replicated",
        "The optimizer's state is replicated on every device.",
        trainer.HSDP,
        trainer.moments_replicated,
        {"peak": 1.5},
        "replicated",
        ("moments", "fsdp", "tensor"),
    ),
    Plant(
        "hop of whole sequences",
        "A pipeline's stages send each other activations that tensor does not shard.",
        trainer.STAGED,
        trainer.hop_of_whole_sequences,
        {"wire": 1.05},
        "reshard",
        ("pipeline", "tensor", "collective-permute"),
    ),
    Plant(
        "hop in f32",
        "A pipeline's stages send each other activations in float32.",
        trainer.STAGED,
        trainer.hop_in_f32,
        {"wire": 1.02},
        "f32-collective",
        ("pipeline", "cast"),
    ),
    Plant(
        "master gathered in f32",
        (
            "The distributed optimizer gathers the new weights in float32 and casts them where "
            "they are used."
        ),
        trainer.DISTRIBUTED,
        trainer.master_gathered_in_f32,
        {"wire": 1.04},
        "f32-collective",
        ("over data", "cast"),
    ),
    Plant(
        "kv heads gathered",
        "rules.params shards 'kv_heads' over tensor and rules.activations does not.",
        trainer.GROUPED,
        trainer.kv_heads_gathered,
        {"wire": 1.1},
        "reshard",
        ("kv_heads", "tensor"),
    ),
    Plant(
        "gradients all-reduced for ZeRO-2",
        "Gradients are not pinned to rules.gradients after the last microbatch.",
        trainer.ZERO2,
        trainer.gradients_all_reduced_for_zero2,
        {"wire": 1.05},
        "all-reduce-of-shards",
        ("gradients", "reduce-scatter", "data"),
    ),
    Plant(
        "update of whole weights",
        "The optimizer works on weights gathered in float32.",
        trainer.HSDP,
        trainer.update_of_whole_weights,
        {"wire": 1.1},
        "reshard",
        ("optimizer", "blocks.", "fsdp"),
    ),
    Plant(
        "residual stream not sharded",
        (
            "Blocks add to a residual stream that the rules of sequence parallelism would shard "
            "along the sequence."
        ),
        trainer.HSDP,
        trainer.residual_stream_not_sharded,
        {"peak": 1.05},
        "residual-not-sharded",
        ("seq_resid", "tensor"),
    ),
    Plant(
        "scale of the gathered weight",
        (
            "A weight is scaled by its largest element, which every device looks for in the whole "
            "weight, in float32."
        ),
        trainer.HSDP,
        trainer.scale_of_the_gathered_weight,
        {"wire": 1.05},
        "gathered-twice|f32-collective",
        ("blocks.", "fsdp"),
    ),
    Plant(
        "tensor axis outermost",
        "Neighbours along the tensor axis are in different nodes.",
        plain.TENSOR_PARALLEL,
        plain.tensor_axis_outermost,
        {"step": 1.15},
        "device-order|leaves-nvlink",
        ("tp", "2 nodes"),
    ),
    Plant(
        "batch not sharded",
        "The batch is given whole to every data-parallel replica.",
        plain.TENSOR_PARALLEL,
        plain.batch_not_sharded,
        {"flops": 1.9},
        "idle-axis",
        ("dp", "compute the same"),
    ),
    Plant(
        "down sharded as up",
        (
            "The second matrix of an MLP is sharded along its output, not along what the first one "
            "shards."
        ),
        plain.TENSOR_PARALLEL,
        plain.down_sharded_as_up,
        {"wire": 1.1},
        "reshard",
        ("activation", "gathered over tp"),
    ),
    Plant(
        "layers disagree",
        "Two operations of a layer shard their activations along different dimensions.",
        plain.TENSOR_PARALLEL,
        plain.layers_disagree,
        {"wire": 1.5},
        "reshard",
        ("all-to-all", "tp"),
    ),
    Plant(
        "bias table replicated",
        "Every device holds the attention bias of all heads, and uses only that of its own heads.",
        plain.BIASED,
        plain.bias_table_replicated,
        {"peak": 1.2},
        "replicated",
        ("bias", "tp"),
    ),
    Plant(
        "hidden activations not sharded",
        "An FSDP program pins its hidden activations to no axis: every device has the whole batch.",
        plain.FULLY_SHARDED,
        plain.hidden_not_sharded,
        {"wire": 1.4, "flops": 3, "peak": 1.5},
        "reshard",
        ("activation", "shard", "batch"),
    ),
    Plant(
        "moments replicated, plain JAX",
        "Parameters are sharded, and the moments beside them are not.",
        plain.FULLY_SHARDED,
        plain.plain_moments_replicated,
        {"peak": 1.3},
        "replicated",
        ("mu", "shard"),
    ),
    Plant(
        "gradients averaged in each microbatch",
        "Data parallelism by hand averages gradients in every microbatch.",
        plain.DATA_PARALLEL,
        plain.gradients_averaged_in_each_microbatch,
        {"wire": 3},
        "microbatch-reduction",
        ("workers", "4 microbatches"),
    ),
)

ABORTING = (
    Plant(
        "lookup by indexing",
        "The embedding is looked up by indexing its sharded table.",
        trainer.HSDP,
        trainer.lookup_by_indexing,
        {},
        "",
        ("embed", "lookup"),
    ),
    Plant(
        "cross-entropy without a constraint",
        "The loss picks each label's score out of logits that nothing pins.",
        trainer.HSDP,
        trainer.cross_entropy_without_a_constraint,
        {},
        "",
        ("cross entropy", "mesh_lm.model.loss.cross_entropy("),
    ),
)
"""Those at which XLA ends the process: there is no program to look at, and the error must name the
mistake."""
