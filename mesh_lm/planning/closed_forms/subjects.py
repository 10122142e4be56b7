"""The decoder, the strategy and the batch of a closed form: the sizes that communication depends
on.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal

from mesh_lm.planning.closed_forms.terms import Per
from mesh_lm.schedules.schedule import make_schedule
from mesh_lm.schedules.table import compile_table

CONTEXT = {"context_gather", "ulysses", "ring", "usp"}
TENSOR = {"megatron", "megatron_sp", "megatron_2d"}
REPLICATED = {"ddp", "zero1", "zero2", "distributed", "zero3", "by_node", "diloco"}
EXPERTS = {"experts_gather", "experts_padded"}
PARTS = REPLICATED | EXPERTS | {"fsdp", "hsdp"} | TENSOR | CONTEXT
"""The presets that have forms, alone and in products."""


class NoFormError(ValueError):
    """A model, rules or a schedule without a closed form. The message says what has none."""


@dataclasses.dataclass(frozen=True)
class Experts:
    """The experts of each layer, in the place of its MLP."""

    number: int
    active: int
    d_ff: int
    factor: float
    """Rows received over those that balanced routing sends; 0: over all."""


@dataclasses.dataclass(frozen=True)
class Decoder:
    """The sizes of a decoder on which its communication depends."""

    layers: int
    d_model: int
    d_ff: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    """Vocabulary size, padding included."""
    seq: int
    learned_positions: bool
    biases: bool
    norm_vectors: int
    """Vectors in one norm: 2 (scale and bias) or 1."""
    gated: bool
    """SwiGLU: two matrices into the MLP."""
    tied: bool
    remat: str
    """none, save_names (offload counts as that), save_attention or full."""
    loss_chunk: int
    recomputed: int | None = None
    """The number of layers with this remat; the others have the next lighter one: save_names, or
    none instead of save_names. None: all."""
    kept: int = 0
    """The number of layers that keep the matrices they gather until their backward passes."""
    experts: Experts | None = None
    unrolled: bool = False
    """Whether each layer is compiled by itself, and not in a loop."""
    windows: tuple[int | None, ...] = (None,)
    """The widths of attention's windows in tokens, of one period of layers; None: all tokens."""

    @classmethod
    def of(cls, model: Any) -> Decoder:
        """Returns the sizes of a `mesh_lm.model.DecoderConfig`."""
        has_norm_biases = model.norm == "layernorm" and model.biases
        return cls(
            layers=model.n_layers,
            d_model=model.d_model,
            d_ff=model.d_mlp,
            heads=model.n_heads,
            kv_heads=model.kv_heads,
            head_dim=model.d_head,
            vocab=model.padded_vocab,
            seq=model.seq_len,
            learned_positions=model.positions == "learned",
            biases=model.biases,
            norm_vectors=2 if has_norm_biases else 1,
            gated=model.activation == "swiglu",
            tied=model.tied,
            remat="save_names" if model.remat == "offload" else model.remat,
            loss_chunk=model.loss_chunk,
            recomputed=model.remat_layers,
            kept=model.kept_layers,
            experts=_experts(model),
            unrolled=model.unroll,
            windows=model.windows(),
        )

    @property
    def recompute_per(self) -> Per:
        """What the repetitions of remat=full and of save_attention are counted by."""
        return "backward" if self.recomputed is None else "recompute"

    @property
    def again_per(self) -> Per:
        """What the repetitions that every remat but none has are counted by."""
        others_have_none = self.remat == "save_names" and self.recomputed is not None
        return "recompute" if others_have_none else "backward"

    @property
    def matrices(self) -> int:
        """Parameters of one layer's matrices: q, k, v, out, up (and gate), down; with experts, the
        router in the place of the MLP.
        """
        attention = self.d_model * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        if self.experts:
            return attention + self.router
        return attention + self.d_model * self.d_ff * (3 if self.gated else 2)

    @property
    def router(self) -> int:
        """Parameters of one layer's router, which is used in fp32."""
        return self.d_model * self.experts.number if self.experts else 0

    @property
    def expert_matrices(self) -> int:
        """Parameters of all experts of one layer."""
        if not self.experts:
            return 0
        of_one = self.d_model * self.experts.d_ff * (3 if self.gated else 2)
        return self.experts.number * of_one

    @property
    def whole_vectors(self) -> int:
        """Per layer, elements of replicated vectors as wide as the residual stream: two norms, the
        biases of out and down.
        """
        return self.d_model * (2 * self.norm_vectors + 2 * self.biases)

    @property
    def head_biases(self) -> int:
        """Per layer, elements of the biases of q, k and v."""
        return self.biases * self.head_dim * (self.heads + 2 * self.kv_heads)

    @property
    def cut_vectors(self) -> int:
        """Per layer, elements of the biases of q, k, v and up (and gate), which are sharded over
        tensor like their matrices.
        """
        return self.head_biases + self.biases * self.d_ff * (2 if self.gated else 1)


def _experts(model: Any) -> Experts | None:
    """Returns the experts of a `DecoderConfig`; None if its layers have none."""
    if model.block != "moe":
        return None
    experts = model.experts
    return Experts(experts.number, experts.active, model.d_expert, experts.factor)


@dataclasses.dataclass(frozen=True)
class Strategy:
    """A preset, or a product of presets, on a mesh."""

    preset: str
    data: int = 1
    fsdp: int = 1
    tensor: int = 1
    zero_by: Literal["embed", "layers"] = "embed"
    """The logical axis along which ZeRO shards moments (and gradients) over data."""
    pipeline: int = 1
    virtual: int = 1
    """Virtual stages on each stage, interleaved if more than 1."""
    stash: Literal["input", "residuals"] = "input"
    """What a stage saves of a microbatch: its input, from which the backward slot recomputes the
    layers, or the layers' residuals."""
    reduction: Literal["auto", "float32", "bfloat16", "int8"] = "auto"
    """The type in which gradients of matrices are summed (`Rules.reduction`)."""
    sequence: int = 1
    """Shards of each sequence (context parallelism)."""
    ulysses: int = 1
    """The inner axis of preset usp."""
    tensor_y: int = 1
    """The second axis of preset megatron_2d."""
    schedule: str = "1f1b"
    """The schedule of the stages: 1f1b, gpipe or classic_1f1b."""
    layer_counts: tuple[int, ...] = ()
    """The layers of each virtual stage in model order, where they differ; empty: they do not."""
    node: int = 1
    """The axis of preset by_node: replicas inside of a node."""
    expert: int = 1
    """The axis of the experts."""
    island: int = 1
    """The axis of preset diloco, over which only the outer step sends."""
    owner: bool = False
    """Whether gradients and moments are divided by layers (`sharding_rules.owner`)."""

    def __post_init__(self) -> None:
        unknown = self.parts - PARTS
        if unknown:
            raise NoFormError(f"no closed form for preset {' or '.join(sorted(unknown))}")
        used = self._used_axes()
        unused = [axis for axis in used if not used[axis] and self.ways(axis) > 1]
        if unused:
            axes = " or ".join(unused)
            raise NoFormError(
                f"{self.preset} shards nothing over {axes}, which has several devices"
            )
        if self.distributed and self.zero:
            raise NoFormError(f"{self.preset} shards the moments twice over data")
        if self.zero_by == "layers" and (self.reduction in ("bfloat16", "int8") or self.node > 1):
            raise NoFormError(
                f"no closed form for reduction {self.reduction} by layers, whose vectors are "
                "sharded as matrices are"
            )
        if self.owner:
            self._require_plain_owners()
        if self.gathered and (self.reduction == "int8" or self.node > 1):
            raise NoFormError(
                "no closed form for zero3 with sums in int8 or by node, in each microbatch"
            )

    def _require_plain_owners(self) -> None:
        """Raises NoFormError for owners of layers beside what they have no form with."""
        others = self.parts - {"zero1", "zero2", "megatron"}
        if others or self.staged or self.data == 1:
            raise NoFormError(
                f"no closed form for owner beside {self.preset} with mesh.data={self.data} in "
                f"{self.pipeline} stages"
            )
        if self.reduction not in ("auto", "float32"):
            raise NoFormError(f"no closed form for owner with reduction {self.reduction}")

    @property
    def owners(self) -> int:
        """The devices among which layers are divided."""
        return self.data * self.tensor if self.owner else 1

    def _used_axes(self) -> dict[str, bool]:
        """Returns mesh axis -> whether the preset shards anything over it."""
        return {
            "data": bool(self.parts - {"fsdp"}),
            "sequence": bool(self.parts & CONTEXT),
            "ulysses": "usp" in self.parts,
            "tensor_y": self.square,
            "fsdp": bool(self.parts & {"fsdp", "hsdp"}),
            "tensor": self.is_tensor,
            "node": "by_node" in self.parts,
            "island": "diloco" in self.parts,
            "expert": bool(self.parts & EXPERTS),
        }

    def ways(self, axis: str) -> int:
        """Returns the devices along a mesh axis."""
        return getattr(self, axis)

    def used(self, axes: tuple[str, ...]) -> tuple[str, ...]:
        """Returns those of the axes that have more than one device."""
        return tuple(axis for axis in axes if self.ways(axis) > 1)

    @property
    def parts(self) -> set[str]:
        """The presets of which this is a product."""
        return set(self.preset.split("+"))

    @property
    def token_shards(self) -> int:
        """The shards of a sequence."""
        return self.sequence * self.ulysses

    @property
    def replicas(self) -> int:
        """The shards of a flat vector, without stages."""
        return self.data * self.token_shards * self.node * self.expert

    @property
    def exchange(self) -> str:
        """How tokens reach the devices of their experts: gather or padded."""
        return "gather" if "experts_gather" in self.parts else "padded"

    @property
    def sums_in_steps(self) -> bool:
        """Whether matrices' gradients are summed in int8 or in two levels."""
        return self.reduction == "int8" or self.node > 1

    @property
    def is_tensor(self) -> bool:
        """Whether matrices are sharded over tensor as the layers use them."""
        return bool(self.parts & TENSOR)

    @property
    def square(self) -> bool:
        """Whether tensor parallelism has two dimensions."""
        return "megatron_2d" in self.parts

    @property
    def matrix_shards(self) -> int:
        """The shards of a matrix, or of a table, as it is used."""
        return self.tensor * self.tensor_y

    @property
    def sp(self) -> bool:
        """Whether the residual stream is sharded over tensor (Megatron's sequence parallelism)."""
        return "megatron_sp" in self.parts

    @property
    def distributed(self) -> bool:
        """Whether the moments and the fp32 weights of matrices are flat vectors that are sharded
        over the replicas.
        """
        return bool(self.parts & {"distributed", "zero3"})

    @property
    def gathered(self) -> bool:
        """Whether each layer gathers its own matrices from those vectors, and sums their gradients
        in each microbatch. A stage does both once a step.
        """
        return "zero3" in self.parts and not self.staged

    @property
    def staged(self) -> bool:
        """Whether the layers are divided into pipeline stages."""
        return self.pipeline > 1

    @property
    def again(self) -> bool:
        """Whether a backward slot recomputes the forward pass."""
        return self.staged and self.stash == "input"

    @property
    def zero(self) -> int:
        """The ZeRO stage over data: 1 shards the moments, 2 the gradients too, as owners do."""
        if "zero2" in self.parts or self.owner:
            return 2
        return int("zero1" in self.parts)

    def ticks(self, microbatches: int) -> tuple[int, int]:
        """Returns the ticks with a forward slot, from the first to the last of any stage, and those
        with a backward slot.

        By 1F1B that is one for each chunk of each microbatch, and one for each further stage. A
        stage that recomputes has no forward slot for the last chunk of the model. Without stages,
        microbatches.
        """
        if self.staged and self.schedule != "1f1b":
            return self._counted_ticks(microbatches)
        slots = microbatches * self.virtual + self.pipeline - 1
        return slots - self.again, slots

    def _counted_ticks(self, microbatches: int) -> tuple[int, int]:
        """Returns the same, counted in the table of the schedule."""
        ticks = {"F": 0, "B": 0}
        for slots, loop in self._loops(microbatches):
            for slot in slots:
                ticks[slot] += loop.stop - loop.start
        return ticks["F"], ticks["B"]

    def forward_hops(self, microbatches: int) -> int:
        """Returns the ticks in which a stage sends its output to the next one.

        That is every tick with a forward slot, but the last one of GPipe if it is in a loop of its
        own: what it sends is not read, and XLA removes it.
        """
        forward, _ = self.ticks(microbatches)
        if self.staged and self.schedule != "1f1b":
            for slots, loop in self._loops(microbatches):
                forward -= slots == "FB" and loop.stop - loop.start == 1
        return forward

    def _loops(self, microbatches: int) -> list[tuple[str, slice]]:
        schedule = make_schedule(self.schedule, self.pipeline, microbatches, self.virtual)
        return compile_table(schedule, drop_last_forward=self.again).loops()


@dataclasses.dataclass(frozen=True)
class Step:
    """A decoder under a strategy, with its batch."""

    model: Decoder
    strategy: Strategy
    sequences: int
    """Of one microbatch on one batch shard."""
    microbatches: int

    def __post_init__(self) -> None:
        n_chunks = self.strategy.pipeline * self.strategy.virtual
        if self.model.experts:
            self._require_plain_experts()
        if not self.strategy.layer_counts and self.model.layers % n_chunks:
            raise NoFormError(
                f"no closed form for {self.model.layers} layers on {self.strategy.pipeline} x "
                f"{self.strategy.virtual} virtual stages: they differ"
            )

    def _require_plain_experts(self) -> None:
        """Raises NoFormError for experts beside what they have no form with."""
        strategy = self.strategy
        with_form = EXPERTS | {"ddp", "distributed", "zero3"}
        others = strategy.parts - with_form
        if others or strategy.staged or strategy.reduction in ("bfloat16", "int8"):
            raise NoFormError(
                f"no closed form for experts under {strategy.preset} in {strategy.pipeline} stages "
                f"with reduction {strategy.reduction}"
            )
        if self.model.biases:
            raise NoFormError("no closed form for experts with biases")

    @property
    def sums_last_norm_at_once(self) -> bool:
        """Whether one all-reduce sums the gradient of the last norm over fsdp and the replicas.

        XLA makes one of two that follow each other. Between them there is a loop over layers, over
        ticks or over microbatches, or under megatron_2d a gather, for all other gradients; and
        without fsdp they remain two.
        """
        strategy = self.strategy
        is_simple = not strategy.staged and not strategy.square
        return strategy.fsdp > 1 and self.microbatches == 1 and is_simple

    @property
    def stage_layers(self) -> int:
        """The rows of stacked weights of a stage: the most layers of any stage."""
        counts = self.strategy.layer_counts
        stages = self.strategy.pipeline
        if counts:
            return max(sum(counts[stage::stages]) for stage in range(stages))
        return self.model.layers // stages

    @property
    def owned_rows(self) -> int:
        """The rows of stacked gradients and moments, with those that pad the last owners."""
        owners = self.strategy.owners
        return math.ceil(self.stage_layers / owners) * owners

    @property
    def chunk_layers(self) -> int:
        """The rows that a pass through a virtual stage reads: the most layers of any of them."""
        counts = self.strategy.layer_counts
        return max(counts) if counts else self.stage_layers // self.strategy.virtual

    @property
    def local_seq(self) -> float:
        """The tokens of a sequence on one device."""
        return self.model.seq / self.strategy.token_shards

    @property
    def tokens(self) -> float:
        """The tokens of a microbatch on one device."""
        return self.sequences * self.local_seq

    @property
    def loss_chunks(self) -> int:
        """The chunks of the loss in one microbatch."""
        tokens = self.sequences * self.model.seq
        return math.ceil(tokens / (self.model.loss_chunk * self.strategy.token_shards))
