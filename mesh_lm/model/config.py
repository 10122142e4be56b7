"""The decoder's shape: its fields make it GPT-2, GPT-3, Llama or Qwen."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Literal, cast, get_args

from mesh_lm.config import ModelConfig, expert, option
from mesh_lm.errors import ConfigError
from mesh_lm.fields import bound_problems
from mesh_lm.model.experts_config import ExpertsConfig
from mesh_lm.model.kinds import attention_flops_per_token, base, kind
from mesh_lm.schedules.segments import Remat, Segment, Stack

if TYPE_CHECKING:
    import jax
    from flax import nnx

    from sharding_rules import Shard


Dtype = Literal["float32", "bfloat16"]


@dataclasses.dataclass(frozen=True)
class SegmentConfig:
    """Consecutive layers of one kind. The name is the scope of their parameters and sharding rules,
    as in "late/mlp".
    """

    name: str
    n_layers: int
    kind: str = "dense"
    """The kind of layer: a name in mesh_lm.model.kinds, or module:class or FILE.py:class for one of
    your own."""
    remat: Remat | None = None
    """None: the model's."""
    dtype: Dtype | None = None
    """Type of this segment's matmuls; the residual stream keeps the model's type. None: the
    model's."""

    @classmethod
    def parse(cls, word: str) -> SegmentConfig:
        """Parses name:layers[:kind[:remat[:dtype]]], the form on the command line. Raises
        ValueError for any other form.
        """
        name, layers, *options = word.split(":")
        remats = ("", *get_args(Remat))
        if len(options) > 1 and options[1] not in remats:
            options[:2] = [":".join(options[:2])]  # a kind of the user's own: module:class
        defaults = ["dense", "", ""]
        kind, remat, dtype = options + defaults[len(options) :]
        if remat not in remats or dtype not in ("", *get_args(Dtype)):
            raise ValueError(word)
        return cls(name, int(layers), kind, cast(Remat, remat) or None, cast(Dtype, dtype) or None)

    def __str__(self) -> str:
        words = [self.name, str(self.n_layers), self.kind, self.remat or "", self.dtype or ""]
        return ":".join(words).rstrip(":")


@dataclasses.dataclass(frozen=True)
class DecoderConfig(ModelConfig):
    """A decoder-only transformer. The defaults are those of GPT-2."""

    n_layers: int = option(4, least=1)
    """Number of transformer layers, over all segments."""
    segments: tuple[SegmentConfig, ...] = ()
    """Different kinds of layers, first to last, as name:layers[:kind[:remat[:dtype]]]; empty:
    layers of one kind, in a segment "blocks"."""
    block: str = "dense"
    """The kind of layer where `segments` is empty: dense, moe (experts), or module:class or
    FILE.py:class for one of your own (docs/own_block.py)."""
    d_model: int = option(128, least=1)
    """Width of the residual stream."""
    n_heads: int = option(4, least=1)
    """Number of query heads."""
    n_kv_heads: int = option(0, least=0)
    """Number of key and value heads (grouped-query attention, arXiv 2305.13245); 0: n_heads."""
    head_dim: int = option(0, least=0)
    """Width of each head; 0: d_model / n_heads."""
    d_ff: int = option(0, least=0)
    """Width of the MLP; 0: 4 d_model."""
    experts: ExpertsConfig = ExpertsConfig()
    """The experts of layers of kind moe."""
    positions: Literal["learned", "rotary"] = "learned"
    """learned: a table of seq_len position embeddings; rotary: RoPE (arXiv 2104.09864)."""
    rope_theta: float = 10_000.0
    """Base of the RoPE wavelengths."""
    rope_scaling: float = expert(1.0)
    """Factor by which Llama 3's context extension stretches long RoPE wavelengths; 1: off."""
    rope_original_seq_len: int = expert(8192)
    """Context length before that extension, in tokens."""
    norm: Literal["layernorm", "rmsnorm"] = "layernorm"
    """Normalisation before attention, before the MLP and before the head."""
    norm_eps: float = expert(1e-5)
    """Added to the variance in norms."""
    activation: Literal["gelu", "swiglu"] = "gelu"
    """Activation of the MLP: the tanh GELU of GPT-2, or SwiGLU (arXiv 2002.05202)."""
    biases: bool = True
    """Whether linear layers and LayerNorm have biases."""
    tied: bool = True
    """Whether the head shares the embedding table."""
    window: tuple[int, ...] = ()
    """Sliding-window widths in tokens, one per layer and repeated over the layers, as in 1024,0 (0:
    full attention); empty: none."""
    softcap: float = expert(0.0, least=0)
    """Soft cap c of the attention logits, c tanh(s / c) (Gemma 2, arXiv 2408.00118); 0: off."""
    head_softcap: float = expert(0.0, least=0)
    """Soft cap of the vocabulary logits; 0: off."""
    qk_norm: bool = False
    """Whether each head's query and key are normalised before RoPE (Qwen3, arXiv 2505.09388)."""
    sinks: bool = expert(False)
    """Attention sinks: a learned logit per head in the softmax, without a value (gpt-oss)."""
    dropout: float = 0.0
    """Dropout rate of the embedding and of the outputs of attention and MLP."""
    z_loss: float = expert(0.0, least=0)
    """Weight of the z-loss, log(Z)^2, which keeps the vocabulary logits near 0 (PaLM, arXiv
    2204.02311)."""
    init_std: float = expert(0.02, least=0)
    """Standard deviation of initial weights. Projections into the residual stream are scaled by 1 /
    sqrt(2 n_layers) (GPT-2)."""
    dtype: Dtype = "bfloat16"
    """Type of matmuls and activations. Master weights, norms, softmax and the loss are fp32."""
    remat: Remat = "none"
    """What the backward pass recomputes. full: each block; save_names: all but matmul and attention
    outputs; save_attention: those of the MLP, too; offload: the outputs that save_names saves move
    to the host."""
    remat_layers: int | None = expert(None)
    """Number of layers, from the first on, to which `remat` applies. The others recompute less,
    where memory has room for what they save: save_names instead of full or save_attention, none
    instead of save_names. None: all. Not for pipelines."""
    kept_layers: int = expert(0)
    """Number of layers, up to the last, that keep the weights they have gathered until their
    backward passes, which then gather nothing: for rules by which layers gather their own weights
    (zero3), without pipeline stages."""
    unroll: bool = expert(False)
    """Whether XLA compiles each layer by itself, instead of one body of a loop over the layers of a
    segment. Without a loop nothing is stacked for the backward pass, which makes small models
    faster; compilation takes as many times longer as there are layers."""
    batch_halves: bool = expert(False)
    """Whether a layer computes the two halves of a microbatch's sequences independently, so that
    tensor-parallel collectives of one half run beside the matmuls of the other. A device must have
    an even number of sequences in a microbatch."""
    attention: Literal["auto", "mosaic", "cudnn", "xla"] = "auto"
    """Attention implementation; auto: the fastest that supports this model and GPU (see
    pallas_kernels)."""
    loss_chunk: int = expert(1024, least=1)
    """Tokens per chunk of the loss: a device holds the vocabulary logits of this many tokens at a
    time."""
    vocab_multiple: int = expert(128, least=1)
    """The vocabulary is padded to a multiple of this, so that it can be sharded over `tensor`;
    padding ids have probability 0."""

    @property
    def kv_heads(self) -> int:
        """Key and value heads."""
        return self.n_kv_heads or self.n_heads

    @property
    def d_head(self) -> int:
        """Width of a head."""
        return self.head_dim or self.d_model // max(1, self.n_heads)

    @property
    def d_mlp(self) -> int:
        """Width of the MLP."""
        return self.d_ff or 4 * self.d_model

    @property
    def d_expert(self) -> int:
        """Width of an expert."""
        return self.experts.d_ff or self.d_mlp

    @property
    def has_experts(self) -> bool:
        """Whether a segment's layers have experts."""
        return bool(self.expert_segments())

    @property
    def _head_weights(self) -> int:
        return self.vocab_size * self.d_model

    @property
    def padded_vocab(self) -> int:
        """Rows of the embedding table and of the head."""
        return -(-self.vocab_size // max(1, self.vocab_multiple)) * self.vocab_multiple

    def windows(self) -> tuple[int | None, ...]:
        """Returns one period of the per-layer window pattern (None: full attention). Segments
        consist of complete periods.
        """
        return tuple(w or None for w in self.window) or (None,)

    def segment_configs(self) -> tuple[SegmentConfig, ...]:
        """Returns the segments, with the default of one segment called blocks filled in."""
        return self.segments or (SegmentConfig("blocks", self.n_layers, self.block),)

    def expert_segments(self) -> list[SegmentConfig]:
        """Returns the segments whose layers have experts: of kind moe, or of a class derived from
        it.
        """
        return [segment for segment in self.segment_configs() if base(segment.kind) == "moe"]

    def within(self, segment: SegmentConfig) -> DecoderConfig:
        """Returns the config of a segment's layers. Its n_layers is still that of the whole
        model.
        """
        remat = segment.remat or self.remat
        return dataclasses.replace(self, remat=remat, dtype=segment.dtype or self.dtype)

    def sizes(self) -> dict[str, tuple[str, int]]:
        """Returns (config field, size) of the logical axes that rules may shard."""
        sizes = {
            "seq": ("seq_len", self.seq_len),
            "seq_resid": ("seq_len", self.seq_len),
            "embed": ("d_model", self.d_model),
            "heads": ("n_heads", self.n_heads),
        }
        if self.n_kv_heads:
            sizes["kv_heads"] = ("n_kv_heads", self.n_kv_heads)
        sizes["mlp"] = ("d_ff", self.d_mlp)
        sizes["vocab"] = ("vocab_size", self.padded_vocab)
        if self.has_experts:
            sizes["experts"] = ("experts.number", self.experts.number)
            sizes["expert_mlp"] = ("experts.d_ff", self.d_expert)
        return sizes

    def problems(self) -> list[str]:
        """Returns a sentence for each field with a wrong value and for each contradiction between
        fields.
        """
        problems = list(bound_problems("model", self))
        if any(width < 0 for width in self.window):
            problems.append(
                f"model.window={self.window} must be widths of at least 1, or 0 for all earlier "
                "tokens"
            )
        if problems:
            return problems
        if not self.head_dim and self.d_model % self.n_heads:
            problems.append(
                f"model.d_model={self.d_model} is not divisible by model.n_heads={self.n_heads}; "
                "set model.head_dim, or change one"
            )
        if self.n_heads % self.kv_heads:
            problems.append(
                f"model.n_heads={self.n_heads} is not divisible by model.n_kv_heads={self.kv_heads}"
            )
        problems += self._segment_problems()
        if self.has_experts:
            problems += self.experts.problems()
        elif self.experts != ExpertsConfig():
            problems.append(
                "model.experts is set, but no layer has experts; set model.block=moe, or give a "
                "segment the kind moe"
            )
        if self.positions == "rotary" and self.d_head % 2:
            problems.append(f"rotary positions need an even head width, not {self.d_head}")
        if not 0 <= self.dropout < 1:
            problems.append(f"model.dropout={self.dropout} must be in [0, 1)")
        return problems

    def _segment_problems(self) -> list[str]:
        from mesh_lm.model.decoder import Decoder  # here, so that configs load without Flax

        problems = []
        period = len(self.windows())
        n_layers = sum(segment.n_layers for segment in self.segments)
        if not self.segments and self.n_layers % period:
            problems.append(
                f"model.n_layers={self.n_layers} is not a multiple of the {period} entries of "
                "model.window"
            )
        if self.segments and n_layers != self.n_layers:
            problems.append(
                f"model.segments have {n_layers} layers, not model.n_layers={self.n_layers}"
            )
        for segment in self.segments:
            if segment.n_layers % period:
                problems.append(
                    f"model.segments: {segment.name!r} has {segment.n_layers} layers, not a "
                    f"multiple of the {period} of model.window"
                )
            if segment.name in _RESERVED or hasattr(Decoder, segment.name):
                problems.append(
                    f"model.segments: {segment.name!r} is the name of another part of the decoder; "
                    "choose another"
                )
        field = "model.segments" if self.segments else "model.block"
        for segment in self.segment_configs():
            try:
                kind(segment.kind, field)
            except ConfigError as error:
                problems.append(str(error))
        return problems

    def n_params(self) -> int:
        """Returns the number of parameters, without the padding of the vocabulary."""
        in_layers = sum(
            segment.n_layers * kind(segment.kind).n_params(self.within(segment))
            for segment in self.segment_configs()
        )
        # Vectors of width D: of the last norm, of the tables.
        vectors = 2 if self.norm == "layernorm" and self.biases else 1
        vectors += self.vocab_size if self.tied else 2 * self.vocab_size
        if self.positions == "learned":
            vectors += self.seq_len
        return in_layers + vectors * self.d_model

    def n_idle_params(self) -> int:
        """Returns the number of parameters that a token does not use: those of all experts that it
        has not chosen.
        """
        matrices = 3 if self.activation == "swiglu" else 2
        n_experts = self.experts.number - self.experts.active
        in_layer = n_experts * matrices * self.d_model * self.d_expert
        return sum(segment.n_layers for segment in self.expert_segments()) * in_layer

    def stack(self) -> Stack:
        """Returns the segments with their costs in FLOPs per token and layer."""
        segments = []
        first_layer = 0
        first_kept = self.n_layers - self.kept_layers
        for part in self.segment_configs():
            config = self.within(part)
            n_layers = part.n_layers
            end = first_layer + n_layers
            remat_layers = None
            if self.remat_layers is not None:
                remat_layers = min(max(self.remat_layers - first_layer, 0), n_layers)
            segments.append(
                Segment(
                    part.name,
                    n_layers,
                    period=len(self.windows()),
                    remat=config.remat,
                    cost=kind(part.kind).flops_per_token(config),
                    unroll=self.unroll,
                    remat_layers=remat_layers,
                    kept_layers=min(max(end - first_kept, 0), n_layers),
                    batch_halves=self.batch_halves,
                )
            )
            first_layer = end
        return Stack(tuple(segments), head=6.0 * self._head_weights)

    def updated(
        self, buffers: dict[str, jax.Array], sums: dict[str, jax.Array]
    ) -> dict[str, jax.Array]:
        """Returns the routers' biases after a step, [L, E] of each segment: up by
        `experts.bias_rate` for an expert with fewer tokens of the global batch than the mean, and
        down for one with more (arXiv 2408.15664). A layer of your own with other buffers needs a
        config that updates them, too.
        """
        from jax import numpy as jnp  # here, so that configs load without JAX

        updated = {}
        for name, bias_LE in buffers.items():
            segment, _, buffer = name.partition(".")
            if buffer != "experts.bias":
                continue
            load_LE = sums[f"{segment}/load"]
            missing_LE = load_LE.mean(-1, keepdims=True) - load_LE
            updated[name] = bias_LE + self.experts.bias_rate * jnp.sign(missing_LE)
        return updated

    def metrics(self, sums: dict[str, jax.Array]) -> dict[str, jax.Array]:
        """Returns, of a model with experts: expert_load, the load of a layer's busiest expert over
        the mean, averaged over layers; expert_idle, the share of experts that no token chose;
        expert_loads [L, E], the load of each expert over the mean of its layer.
        """
        from jax import numpy as jnp  # here, so that configs load without JAX

        loads = [
            sums[f"{segment.name}/load"]
            for segment in self.expert_segments()
            if f"{segment.name}/load" in sums
        ]
        if not loads:
            return {}
        load_LE = jnp.concatenate(loads)
        relative_LE = load_LE / jnp.maximum(load_LE.mean(-1, keepdims=True), 1)
        return {
            "expert_load": relative_LE.max(-1).mean(),
            "expert_idle": (load_LE == 0).mean(),
            "expert_loads": relative_LE,
        }

    def flops_per_token(self) -> float:
        """Returns the FLOPs of one token, forward and backward: 6 per matmul weight (including the
        head, excluding the lookup), and 12 n_heads d_head T_seen per layer for attention, where
        T_seen is the number of tokens that a query sees on average (PaLM, arXiv 2204.02311,
        appendix B, which does not subtract the causal half).
        """
        stack = self.stack()
        return sum(segment.n_layers * segment.cost for segment in stack.segments) + stack.head

    def attention_flops_per_token(self) -> float:
        """Returns attention's share of `flops_per_token`."""
        return sum(
            run.n_layers * attention_flops_per_token(run.kind, self.within(run))
            for run in self.segment_configs()
        )

    def make(self, shard: Shard, rngs: nnx.Rngs) -> nnx.Module:
        """Returns the module, with initial weights."""
        from mesh_lm.model.decoder import Decoder  # here, so that configs load without Flax

        return Decoder(self, shard, rngs)


_RESERVED = ("config", "shard", "embedding", "positions", "norm", "head")
"""Attributes of the decoder that a segment cannot be named after."""
