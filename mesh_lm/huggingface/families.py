"""The supported model families: how fields of config.json and tensors correspond to ours.

Sources: the config.json and .safetensors that transformers writes for these classes
(https://huggingface.co/docs/transformers).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from mesh_lm.huggingface.tensor_mapping import TensorMapping

HEAD = "lm_head.weight"
"""The name of the head in all families."""
REQUIRED = object()
"""Marks a field without a default."""


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
    """Their fields, with (our field, default of transformers)."""
    fixed: Mapping[str, Any]
    """Our fields that are fixed in this family."""
    only: Mapping[str, tuple[Any, ...]]
    """Their fields of which only these values are supported; the first is the default of
    transformers."""
    mappings: tuple[TensorMapping, ...]
    """In the order in which tensors are exported. A model may lack some of the parameters."""
    ignored: tuple[str, ...] = ()
    """Name suffixes of obsolete tensors in old files."""

    def full_name(self, tensor: str) -> str:
        """Returns a tensor's name in the model with its head."""
        return tensor if tensor.startswith((self.base, "lm_head.")) else self.base + tensor

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
      prefix: of the tensors, with {} for the layer.
      rows: (parameter, its dimensions, tensors, dimensions of each tensor).
    """
    mappings = []
    for param, dims, hf_names, hf_dims in rows:
        names = (hf_names,) if isinstance(hf_names, str) else hf_names
        full_names = tuple(prefix + name for name in names)
        mappings.append(
            TensorMapping(f"blocks.{param}", dims.replace(" ", ""), full_names, hf_dims)
        )
    return tuple(mappings)


_COMMON = {
    "softcap": 0.0,
    "head_softcap": 0.0,
    "sinks": False,
    "window": (),
    "segments": (),
    "block": "dense",
}
"""Our fields that are fixed in all families."""

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
_LLAMA_BLOCKS = _map_layers(
    "model.layers.{}.",
    ("attention_norm.scale", "L D",       "input_layernorm.weight",          "D"),
    # A model has qkv if n_kv_heads = n_heads, else q and kv.
    ("attention.qkv.weight", "L D f N H", (_Q, _K, _V),                      "NH D"),
    ("attention.q.weight",   "L D N H",   _Q,                                "NH D"),
    ("attention.kv.weight",  "L D f K H", (_K, _V),                          "KH D"),
    ("attention.out.weight", "L D N H",   "self_attn.o_proj.weight",         "D NH"),
    ("mlp_norm.scale",       "L D",       "post_attention_layernorm.weight", "D"),
    ("mlp.up.weight",        "L D f F",   (_GATE, _UP),                      "F D"),
    ("mlp.down.weight",      "L D F",     "mlp.down_proj.weight",            "D F"),
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
        *_LLAMA_BLOCKS,
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

FAMILIES = (GPT2, LLAMA, QWEN3)
