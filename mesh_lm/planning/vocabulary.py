"""The vocabulary of mesh_lm for the lab: its named scopes, folders, hand-sharded mesh axes, and
fixes in its own words.
"""

from __future__ import annotations

from sharding_rules.lab.vocabulary import Vocabulary

INSTALL = "run: pip install -e '.[aot]'"
_LOOKUP = (
    "look a sharded table up with mesh_lm.model.embedding.lookup(table, ids, shard, axes, dtype), "
    "and take the loss with mesh_lm.model.loss.cross_entropy(x, head, labels, weights, shard, "
    "vocab_size=...)"
)
VOCABULARY = Vocabulary(
    forward_slot="forward_slot",  # the scopes of a pipeline's tick in mesh_lm/parallel/tick.py
    backward_slot="backward_slot",
    source_roots=("mesh_lm/", "pallas_kernels/"),
    manual_axes=("pipeline", "expert", "sequence"),
    page_option="--plan=report.html",
    fixes={
        "abort-lookup": _LOOKUP,
        "abort-manual": (
            "pin the operands of the operation to rows of rules.activations: shard(x, 'batch', ...)"
        ),
        "branch-collective": (
            "run both branches and select the result, or move it out of the conditional"
        ),
        "divided-matrices": (
            "give each device complete matrices of its own layers: --rules={rules}+owner, in a "
            "pipeline with --pipeline.chunks=1 (docs/optimizers.md, Muon by owner)"
        ),
        "exchange-repeated": (
            "give what the exchange returns a name, checkpoint_name(x, NAME), and add the name to "
            "SAVED_NAMES (mesh_lm/parallel/remat.py)"
        ),
        "exposed-hop": (
            "XLA's flags of the set pipeline (launch.xla_flags=auto takes it for a pipeline; "
            "--plan --flags=pipeline); where the peak is above XLA's limit, 76 % of the memory, it "
            "saves memory instead: raise xla_gpu_memory_limit_slop_factor"
        ),
        "exposed-communication": (
            "a larger train.global_batch, for which as much is sent, or a smaller mesh axis "
            "between nodes"
        ),
        "exposed-in-loops": (
            "fewer train.microbatches, each of which sends it again, or a smaller mesh axis "
            "between nodes"
        ),
        "idle-axis": (
            "set mesh.{axis}=1, or name it in rules {rules!r}: in activations['batch'], or in rows "
            "of params and activations"
        ),
        "leaves-nvlink": "mesh.tensor={node} at most; give the rest to mesh.fsdp",
        "rematerialization": f"pin that array (shard(x, ...)); {_LOOKUP}",
    },
)
