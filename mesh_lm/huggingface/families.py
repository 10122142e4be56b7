"""The supported model families: how fields of config.json and tensors correspond to ours.

Sources: the config.json and .safetensors that transformers writes for these classes
(https://huggingface.co/docs/transformers).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from mesh_lm.huggingface.tensor_mapping import TensorMapping
from mesh_lm.model import DecoderConfig

HEAD = "lm_head.weight"
"""The name of the head in all families."""
REQUIRED = object()
"""Marks a field without a default."""
_BLOCKS = "blocks."
"""The prefix of the parameters of layers, in a model with one segment."""


@dataclasses.dataclass(frozen=True)
class Family:
    """A class of transformers and the subset of DecoderConfig that it can express."""

    architecture: str
    """The name in `architectures` of config.json."""
    model_type: str
    base: str
    """The prefix of all tensor names but the head's; files of the model without its head lack
    it."""
    fields: Mapping[str, tuple[str, Any]]
    """Their fields, with (our field, default of transformers). A field of the experts is named
    "experts.number"."""
    fixed: Mapping[str, Any]
    """Our fields that are fixed in this family."""
    only: Mapping[str, tuple[Any, ...]]
    """Their fields of which only these values are supported; the first is the default of
    transformers."""
    mappings: tuple[TensorMapping, ...]
    """In the order in which tensors are exported, for a model with one segment. A model may lack
    some of the parameters."""
    kinds: tuple[str, ...] = ("dense",)
    """The kinds of layers that a model can have."""
    rope_theta: float = 10_000.0
    """The default of transformers for the base of rotary wavelengths."""
    aliases: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Their fields, with another name under which transformers also writes them."""
    unpublished: tuple[TensorMapping, ...] = ()
    """Tensors that files can have in place of those of `mappings`, and that are never written:
    transformers 5 keeps all experts of a layer in one, and saves them so on request."""
    ignored: tuple[str, ...] = ()
    """Name suffixes of obsolete tensors in old files."""

    def full_name(self, tensor: str) -> str:
        """Returns a tensor's name in the model with its head."""
        return tensor if tensor.startswith((self.base, "lm_head.")) else self.base + tensor

    def mappings_of(
        self, config: DecoderConfig, mappings: tuple[TensorMapping, ...] | None = None
    ) -> list[TensorMapping]:
        """Returns mappings (None: those that are exported) for the parameters of a model: those of
        layers once for each of its segments.
        """
        expanded = []
        for mapping in self.mappings if mappings is None else mappings:
            if "L" not in mapping.dims:
                expanded.append(mapping)
                continue
            first_layer = 0
            for segment in config.segment_configs():
                param = f"{segment.name}.{mapping.param.removeprefix(_BLOCKS)}"
                expanded.append(dataclasses.replace(mapping, param=param, first_layer=first_layer))
                first_layer += segment.n_layers
        return expanded

    @property
    def embedding(self) -> str:
        """The name of the token table, which a tied head shares."""
        (name,) = (m.hf_names[0] for m in self.mappings if m.param == "embedding")
        return name


def _map(param: str, dims: str, hf_name: str, hf_dims: str) -> TensorMapping:
    """Maps a parameter of the model to a tensor."""
    return TensorMapping(param, dims.replace(" ", ""), (hf_name,), hf_dims)


def _map_layers(
    prefix: str, *rows: tuple[str, str, str | tuple[str, ...], str]
) -> tuple[TensorMapping, ...]:
    """Maps parameters of the blocks, of which each layer has one tensor or several.

    Args:
      prefix: of the tensors, with {} for the layer. A tensor of one expert has another {}.
      rows: (parameter, its dimensions, tensors, dimensions of each tensor).
    """
    mappings = []
    for param, dims, hf_names, hf_dims in rows:
        names = (hf_names,) if isinstance(hf_names, str) else hf_names
        full_names = tuple(prefix + name for name in names)
        mappings.append(TensorMapping(_BLOCKS + param, dims.replace(" ", ""), full_names, hf_dims))
    return tuple(mappings)


_COMMON = {
    "softcap": 0.0,
    "head_softcap": 0.0,
    "sinks": False,
}
"""Our fields that are fixed in all families."""
_EXPERTS = {
    "experts.score": "softmax",
    "experts.scale": 1.0,
    "experts.groups": 1,
    "experts.shared": 0,
    "experts.bias": False,
}
"""Our fields that are fixed in all families with experts."""

# Tables of the blocks: our parameter and its dimensions, their tensors and the dimensions of each.
# `tensor_mapping` explains the letters.
_GPT2_BLOCKS = _map_layers(
    "transformer.h.{}.",
    ("attention_norm.scale", "L D",       "ln_1.weight",        "D"),
    ("attention_norm.bias",  "L D",       "ln_1.bias",          "D"),
    ("attention.qkv.weight", "L D f N H", "attn.c_attn.weight", "D fNH"),
    ("attention.qkv.bias",   "L f N H",   "attn.c_attn.bias",   "fNH"),
    ("attention.out.weight", "L D N H",   "attn.c_proj.weight", "NH D"),
    ("attention.out.bias",   "L D",       "attn.c_proj.bias",   "D"),
    ("mlp_norm.scale",       "L D",       "ln_2.weight",        "D"),
    ("mlp_norm.bias",        "L D",       "ln_2.bias",          "D"),
    ("mlp.up.weight",        "L D F",     "mlp.c_fc.weight",    "D F"),
    ("mlp.up.bias",          "L F",       "mlp.c_fc.bias",      "F"),
    ("mlp.down.weight",      "L D F",     "mlp.c_proj.weight",  "F D"),
    ("mlp.down.bias",        "L D",       "mlp.c_proj.bias",    "D"),
)  # fmt: skip

_Q = "self_attn.q_proj.weight"
_K = "self_attn.k_proj.weight"
_V = "self_attn.v_proj.weight"
_GATE = "mlp.gate_proj.weight"
_UP = "mlp.up_proj.weight"
_LLAMA_ATTENTION = _map_layers(
    "model.layers.{}.",
    ("attention_norm.scale", "L D",       "input_layernorm.weight",          "D"),
    # A model has qkv if n_kv_heads = n_heads, else q and kv.
    ("attention.qkv.weight", "L D f N H", (_Q, _K, _V),                      "NH D"),
    ("attention.q.weight",   "L D N H",   _Q,                                "NH D"),
    ("attention.kv.weight",  "L D f K H", (_K, _V),                          "KH D"),
    ("attention.out.weight", "L D N H",   "self_attn.o_proj.weight",         "D NH"),
    ("mlp_norm.scale",       "L D",       "post_attention_layernorm.weight", "D"),
)  # fmt: skip
_LLAMA_MLP = _map_layers(
    "model.layers.{}.",
    ("mlp.up.weight",        "L D f F",   (_GATE, _UP),                      "F D"),
    ("mlp.down.weight",      "L D F",     "mlp.down_proj.weight",            "D F"),
)  # fmt: skip

_W1 = "block_sparse_moe.experts.{}.w1.weight"
_W3 = "block_sparse_moe.experts.{}.w3.weight"
_W2 = "block_sparse_moe.experts.{}.w2.weight"
_MIXTRAL_EXPERTS = _map_layers(
    "model.layers.{}.",
    ("experts.router", "L D E",     "block_sparse_moe.gate.weight", "E D"),
    ("experts.up",     "L E D f F", (_W1, _W3),                     "F D"),
    ("experts.down",   "L E F D",   _W2,                            "D F"),
)  # fmt: skip

_EXPERT_GATE = "mlp.experts.{}.gate_proj.weight"
_EXPERT_UP = "mlp.experts.{}.up_proj.weight"
_EXPERT_DOWN = "mlp.experts.{}.down_proj.weight"
_QWEN3_EXPERTS = _map_layers(
    "model.layers.{}.",
    ("experts.router", "L D E",     "mlp.gate.weight",          "E D"),
    ("experts.up",     "L E D f F", (_EXPERT_GATE, _EXPERT_UP), "F D"),
    ("experts.down",   "L E F D",   _EXPERT_DOWN,               "D F"),
)  # fmt: skip

_FUSED_EXPERTS = _map_layers(
    "model.layers.{}.",
    ("experts.router", "L D E",     "mlp.gate.weight",          "E D"),
    ("experts.up",     "L E D f F", "mlp.experts.gate_up_proj", "E fF D"),
    ("experts.down",   "L E F D",   "mlp.experts.down_proj",    "E D F"),
)  # fmt: skip

_QWEN3_NORMS = _map_layers(
    "model.layers.{}.",
    ("attention.q_norm.scale", "L H", "self_attn.q_norm.weight", "H"),
    ("attention.k_norm.scale", "L H", "self_attn.k_norm.weight", "H"),
)

GPT2 = Family(
    architecture="GPT2LMHeadModel",
    model_type="gpt2",
    base="transformer.",
    fields={
        "vocab_size": ("vocab_size", REQUIRED),
        "n_positions": ("seq_len", REQUIRED),
        "n_layer": ("n_layers", REQUIRED),
        "n_embd": ("d_model", REQUIRED),
        "n_head": ("n_heads", REQUIRED),
        "n_inner": ("d_ff", None),
        "layer_norm_epsilon": ("norm_eps", 1e-5),
        "tie_word_embeddings": ("tied", True),
    },
    fixed={
        **_COMMON,
        "window": (),
        "positions": "learned",
        "norm": "layernorm",
        "activation": "gelu",
        "biases": True,
        "qk_norm": False,
    },
    only={
        "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
        "add_cross_attention": (False,),
        "quantization_config": (None,),
    },
    mappings=(
        _map("embedding", "V D", "transformer.wte.weight", "V D"),
        _map("positions", "S D", "transformer.wpe.weight", "S D"),
        *_GPT2_BLOCKS,
        _map("norm.scale", "D", "transformer.ln_f.weight", "D"),
        _map("norm.bias", "D", "transformer.ln_f.bias", "D"),
        _map("head", "V D", HEAD, "V D"),
    ),
    ignored=(".attn.bias", ".attn.masked_bias"),  # the causal mask
)

LLAMA = Family(
    architecture="LlamaForCausalLM",
    model_type="llama",
    base="model.",
    fields={
        "vocab_size": ("vocab_size", REQUIRED),
        "max_position_embeddings": ("seq_len", REQUIRED),
        "num_hidden_layers": ("n_layers", REQUIRED),
        "hidden_size": ("d_model", REQUIRED),
        "num_attention_heads": ("n_heads", REQUIRED),
        "num_key_value_heads": ("n_kv_heads", None),
        "head_dim": ("head_dim", None),
        "intermediate_size": ("d_ff", REQUIRED),
        "rms_norm_eps": ("norm_eps", 1e-6),
        "tie_word_embeddings": ("tied", False),
    },
    fixed={
        **_COMMON,
        "window": (),
        "positions": "rotary",
        "norm": "rmsnorm",
        "activation": "swiglu",
        "biases": False,
        "qk_norm": False,
    },
    only={
        "hidden_act": ("silu", "swish"),
        "attention_bias": (False,),
        "mlp_bias": (False,),
        "partial_rotary_factor": (1.0, None),
        "quantization_config": (None,),
    },
    mappings=(
        _map("embedding", "V D", "model.embed_tokens.weight", "V D"),
        *_LLAMA_ATTENTION,
        *_LLAMA_MLP,
        _map("norm.scale", "D", "model.norm.weight", "D"),
        _map("head", "V D", HEAD, "V D"),
    ),
    ignored=(".rotary_emb.inv_freq",),
)

QWEN3 = dataclasses.replace(
    LLAMA,
    architecture="Qwen3ForCausalLM",
    model_type="qwen3",
    fields={
        **LLAMA.fields,
        "num_key_value_heads": ("n_kv_heads", REQUIRED),
        "head_dim": ("head_dim", 128),
    },
    fixed={**LLAMA.fixed, "qk_norm": True},
    only={
        "hidden_act": ("silu", "swish"),
        "attention_bias": (False,),
        "use_sliding_window": (False,),
        "layer_types": (None, "full_attention"),
        "partial_rotary_factor": (1.0, None),
        "quantization_config": (None,),
    },
    mappings=(*LLAMA.mappings, *_QWEN3_NORMS),
)

MIXTRAL = dataclasses.replace(
    LLAMA,
    architecture="MixtralForCausalLM",
    model_type="mixtral",
    fields={
        "vocab_size": ("vocab_size", REQUIRED),
        "max_position_embeddings": ("seq_len", REQUIRED),
        "num_hidden_layers": ("n_layers", REQUIRED),
        "hidden_size": ("d_model", REQUIRED),
        "num_attention_heads": ("n_heads", REQUIRED),
        "num_key_value_heads": ("n_kv_heads", REQUIRED),
        "head_dim": ("head_dim", None),
        "intermediate_size": ("experts.d_ff", REQUIRED),
        "num_local_experts": ("experts.number", REQUIRED),
        "num_experts_per_tok": ("experts.active", 2),
        "sliding_window": ("window", None),
        "rms_norm_eps": ("norm_eps", 1e-5),
        "tie_word_embeddings": ("tied", False),
    },
    fixed={
        **_COMMON,
        **_EXPERTS,
        "experts.normalised": True,
        "positions": "rotary",
        "norm": "rmsnorm",
        "activation": "swiglu",
        "biases": False,
        "qk_norm": False,
    },
    only={
        "hidden_act": ("silu", "swish"),
        "partial_rotary_factor": (1.0, None),
        "quantization_config": (None,),
    },
    mappings=(
        _map("embedding", "V D", "model.embed_tokens.weight", "V D"),
        *_LLAMA_ATTENTION,
        *_MIXTRAL_EXPERTS,
        _map("norm.scale", "D", "model.norm.weight", "D"),
        _map("head", "V D", HEAD, "V D"),
    ),
    kinds=("moe",),
    rope_theta=1e6,
    unpublished=_FUSED_EXPERTS,
)

QWEN3_MOE = dataclasses.replace(
    QWEN3,
    architecture="Qwen3MoeForCausalLM",
    model_type="qwen3_moe",
    fields={
        **QWEN3.fields,
        "head_dim": ("head_dim", None),
        "num_experts": ("experts.number", REQUIRED),
        "num_experts_per_tok": ("experts.active", 8),
        "moe_intermediate_size": ("experts.d_ff", REQUIRED),
        "norm_topk_prob": ("experts.normalised", False),
    },
    fixed={**QWEN3.fixed, **_EXPERTS},
    mappings=(*QWEN3.mappings, *_QWEN3_EXPERTS),
    kinds=("dense", "moe"),
    aliases={"num_experts": "num_local_experts"},
    unpublished=_FUSED_EXPERTS,
)

FAMILIES = (GPT2, LLAMA, MIXTRAL, QWEN3, QWEN3_MOE)
