"""The sizes of a model and of a GPU, as far as a step's cost on paper depends on them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, NamedTuple


@dataclasses.dataclass(frozen=True)
class ModelSizes:
    """A decoder with one kind of layer, and its batch."""

    layers: int
    d_model: int
    d_ff: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    """Rows of the embedding table, padded."""
    seq_len: int
    global_batch: int
    loss_chunk: int
    is_gated: bool
    """Whether the MLP has a gate, and so three matrices, not two."""
    is_tied: bool
    has_biases: bool
    has_positions: bool
    """Whether a table of positions is learned."""
    reduction: str = "auto"
    """The type in which gradients are summed (`Rules.reduction`)."""
    hosted_moments: float = 0.0
    """Bytes of moments for each parameter that the hosts keep (optimizer.offload)."""
    is_master_hosted: bool = False
    """Whether the hosts keep the fp32 weights of rules with flat vectors."""

    @classmethod
    def of(cls, config: Any) -> ModelSizes | None:
        """Returns the sizes of a run (a `TrainConfig`); None for one without formulas."""
        model = config.model
        if why_no_formulas(config):
            return None
        return cls(
            layers=model.n_layers,
            d_model=model.d_model,
            d_ff=model.d_mlp,
            heads=model.n_heads,
            kv_heads=model.kv_heads,
            head_dim=model.d_head,
            vocab=model.padded_vocab,
            seq_len=model.seq_len,
            global_batch=config.train.global_batch,
            loss_chunk=model.loss_chunk,
            is_gated=model.activation == "swiglu",
            is_tied=model.tied,
            has_biases=model.biases,
            has_positions=model.positions == "learned",
            reduction=config.rules.reduction,
            hosted_moments=4.0 * len({"mu", "nu"} & set(config.optimizer.offload)),
            is_master_hosted="master" in config.optimizer.offload,
        )

    @property
    def attention_matrices(self) -> int:
        """Elements of a layer's matrices of attention."""
        return self.d_model * self.head_dim * (2 * self.heads + 2 * self.kv_heads)

    @property
    def mlp_matrices(self) -> int:
        """Elements of a layer's matrices of the MLP."""
        return self.d_model * self.d_ff * (3 if self.is_gated else 2)

    @property
    def matrices(self) -> int:
        """Elements of a layer's matrices."""
        return self.attention_matrices + self.mlp_matrices

    @property
    def tables(self) -> int:
        """Elements of the embedding and the head."""
        return (1 if self.is_tied else 2) * self.vocab * self.d_model

    @property
    def positions(self) -> int:
        """Elements of the table of positions."""
        return self.seq_len * self.d_model if self.has_positions else 0

    @property
    def vectors(self) -> int:
        """Elements of a layer's norms and of its biases of width d_model."""
        return self.d_model * (6 if self.has_biases else 2)


def why_no_formulas(config: Any) -> str:
    """Returns why there are no formulas for a run (a `TrainConfig`); empty if there are."""
    model = config.model
    if not hasattr(model, "segment_configs"):
        return "its model is of a class of its own"
    if model.segments or model.block != "dense":
        return "its layers are not all dense and alike (model.segments, model.block)"
    if model.dtype != "bfloat16":
        return f"model.dtype={model.dtype}"
    if any(model.windows()):
        return "model.window limits its attention"
    for axis, size in config.mesh.sizes().items():
        if size not in (1, -1) and axis not in AXES:
            return f"mesh.{axis}={size}"
    return ""


AXES = ("pipeline", "data", "fsdp", "tensor")
"""The mesh axes of the formulas."""


class MeasuredLink(NamedTuple):
    """A kind of collective over one kind of link, as a profile has measured it."""

    bandwidth: float
    """Bytes/s of one GPU's port."""
    latency: float
    """The latency, over the assumed one of the same group."""
    most: float = math.inf
    """Bytes/s of the other link that the collective takes, if that may be slower."""


@dataclasses.dataclass(frozen=True)
class Hardware:
    """A GPU and its links, each rate being what is reached, not the data sheet's peak. Bytes, FLOP
    and seconds.
    """

    matmul: float
    """FLOP/s of a large matmul."""
    attention: float
    attention_backward: float
    memory_bandwidth: float
    memory: float
    """Bytes that a program may take, the margin deducted."""
    nvlink: float
    network: float
    node: int
    """GPUs of a node."""
    pcie: float = math.inf
    """Of copies between a GPU and its host's memory, in one direction."""
    kernel: float = 1.5e-6
    """Seconds of the shortest kernel."""
    start: float = 8e-6
    """Seconds of the start of a collective."""
    start_between_nodes: float = 7e-6
    """Seconds that the start of a collective between nodes adds."""
    nvlink_step: float = 1.5e-6
    """Seconds of one step of a collective inside a node."""
    network_step: float = 6e-6
    """Seconds of one step of a collective between nodes."""
    measured: Mapping[tuple[str, str], MeasuredLink] = dataclasses.field(default_factory=dict)
    """By kind of collective and link (NVLink, network). It takes the place of the links' rates, and
    scales the latencies."""
