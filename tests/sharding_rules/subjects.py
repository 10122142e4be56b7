"""The decoder and the strategy of a closed form (`closed_forms.py`): the sizes that communication
depends on."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

CONTEXT = {"context_gather", "ulysses", "ring", "usp"}
PARTS = {
    "ddp",
    "zero1",
    "zero2",
    "distributed",
    "zero3",
    "fsdp",
    "hsdp",
    "megatron",
    "megatron_sp",
    "megatron_2d",
} | CONTEXT


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
    """none, save_names (offload counts as that) or full."""
    loss_chunk: int
    recomputed: int | None = None
    """The number of layers with this remat, full; the others have save_names. None: all."""
    kept: int = 0
    """The number of layers that keep the matrices they gather until their backward passes."""

    @classmethod
    def of(cls, model: Any) -> Decoder:
        """The sizes of a `mesh_lm.model.DecoderConfig`."""
        return cls(
            layers=model.n_layers, d_model=model.d_model, d_ff=model.d_mlp, heads=model.n_heads,
            kv_heads=model.kv_heads,
            head_dim=model.d_head, vocab=model.padded_vocab, seq=model.seq_len,
            learned_positions=model.positions == "learned",
            biases=model.biases,
            norm_vectors=2 if model.norm == "layernorm" and model.biases else 1,
            gated=model.activation == "swiglu", tied=model.tied,
            remat="save_names" if model.remat == "offload" else model.remat,
            loss_chunk=model.loss_chunk, recomputed=model.remat_layers, kept=model.kept_layers,
        )  # fmt: skip

    def __post_init__(self) -> None:
        if self.recomputed is not None and self.remat != "full":
            raise ValueError(
                f"no closed form for layers of which {self.recomputed} have remat={self.remat}"
            )

    @property
    def matrices(self) -> int:
        """Parameters of one layer's matrices: q, k, v, out, up (and gate), down."""
        return self.d_model * self.head_dim * (
            2 * self.heads + 2 * self.kv_heads
        ) + self.d_model * self.d_ff * (3 if self.gated else 2)

    @property
    def whole_vectors(self) -> int:
        """Per layer, elements of replicated vectors as wide as the residual stream: two norms, the
        biases of out and down."""
        return self.d_model * (2 * self.norm_vectors + 2 * self.biases)

    @property
    def cut_vectors(self) -> int:
        """Per layer, elements of the biases of q, k, v and up (and gate), which are sharded over
        tensor like their matrices."""
        return self.biases * (
            self.head_dim * (self.heads + 2 * self.kv_heads) + self.d_ff * (2 if self.gated else 1)
        )


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
    """Virtual stages on each stage, by 1F1B (interleaved if more than 1)."""
    stash: Literal["input", "residuals"] = "input"
    """What a stage saves of a microbatch: its input, from which the backward slot recomputes the
    layers, or the layers' residuals."""
    reduction: Literal["auto", "float32", "bfloat16"] = "auto"
    """The type in which gradients of matrices are summed (`Rules.reduction`)."""
    sequence: int = 1
    """Shards of each sequence (context parallelism)."""
    ulysses: int = 1
    """The inner axis of preset usp."""
    tensor_y: int = 1
    """The second axis of preset megatron_2d."""

    def __post_init__(self) -> None:
        if unknown := self.parts - PARTS:
            raise ValueError(f"no closed form for preset {' or '.join(sorted(unknown))}")
        if (self.sequence * self.ulysses > 1) and (self.zero or self.pipeline > 1):
            raise ValueError(
                f"no closed form for shards of sequences with {self.preset} in {self.pipeline} "
                "stages"
            )
        cut = {
            "data": bool(self.parts - {"fsdp"}),
            "sequence": bool(self.parts & CONTEXT),
            "ulysses": "usp" in self.parts,
            "tensor_y": self.square,
        }
        cut |= {"fsdp": bool(self.parts & {"fsdp", "hsdp"}), "tensor": self.is_tensor}
        if unused := [axis for axis, used in cut.items() if not used and getattr(self, axis) > 1]:
            raise ValueError(f"{self.preset} cuts nothing over {' or '.join(unused)}")
        if self.distributed and self.zero:
            raise ValueError(f"{self.preset} cuts the moments twice over data")
        if self.reduction == "bfloat16" and self.zero_by == "layers":
            raise ValueError(
                "no closed form for reduction bfloat16 by layers, whose vectors are cut as "
                "matrices are"
            )

    @property
    def parts(self) -> set[str]:
        return set(self.preset.split("+"))

    @property
    def replicas(self) -> int:
        """The shards of a flat vector, without stages."""
        return self.data * self.sequence * self.ulysses

    @property
    def is_tensor(self) -> bool:
        return bool(self.parts & {"megatron", "megatron_sp", "megatron_2d"})

    @property
    def square(self) -> bool:
        """Two-dimensional tensor parallelism."""
        return "megatron_2d" in self.parts

    @property
    def matrix_shards(self) -> int:
        """The shards of a matrix, or of a table, as it is used."""
        return self.tensor * self.tensor_y

    @property
    def sp(self) -> bool:
        """Megatron's sequence parallelism."""
        return "megatron_sp" in self.parts

    @property
    def distributed(self) -> bool:
        """Whether the moments and the fp32 weights of matrices are flat vectors that are sharded
        over the replicas."""
        return bool(self.parts & {"distributed", "zero3"})

    @property
    def gathered(self) -> bool:
        """Whether each layer gathers its own matrices from those vectors, and sums their
        gradients."""
        return "zero3" in self.parts

    @property
    def again(self) -> bool:
        """Whether a backward slot recomputes the forward pass."""
        return self.pipeline > 1 and self.stash == "input"

    def ticks(self, microbatches: int) -> tuple[int, int]:
        """Ticks of 1F1B with a forward slot, from the first to the last of any stage, and with a
        backward slot.

        That is one for each chunk of each microbatch, and one for each further stage. A stage that
        recomputes has no forward slot for the last chunk of the model. Without stages,
        microbatches.
        """
        slots = microbatches * self.virtual + self.pipeline - 1
        return slots - self.again, slots

    @property
    def zero(self) -> int:
        """The ZeRO stage over data: 1 shards the moments, 2 the gradients too."""
        return 2 if "zero2" in self.parts else 1 if "zero1" in self.parts else 0
