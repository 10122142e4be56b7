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
    """Maps their fields to (our field, default of transformers)."""
    fixed: Mapping[str, Any]
    """Our fields that are fixed in this family."""
    only: Mapping[str, tuple[Any, ...]]
    """Their fields of which only these values are supported; the first is the default of
    transformers."""
    mappings: tuple[TensorMapping, ...]
    ignored: tuple[str, ...] = ()
    """Name suffixes of obsolete tensors in old files."""

    def full_name(self, tensor: str) -> str:
        """Returns a tensor's name in the model with its head."""
        return tensor if tensor.startswith((self.base, "lm_head.")) else self.base + tensor

    @property
    def embedding(self) -> str:
        """The name of the token table, which a tied head shares."""
        return next(
            mapping.hf_names[0] for mapping in self.mappings if mapping.param == "embedding"
        )


def _map(param: str, dims: str, layout: str, *hf_names: str) -> TensorMapping:
    return TensorMapping(param, dims.replace(" ", ""), layout, hf_names)


_PLAIN = {
    "softcap": 0.0,
    "head_softcap": 0.0,
    "sinks": False,
    "window": (),
    "segments": (),
    "block": "dense",
}
"""What no family here has."""

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
        **_PLAIN,
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
        _map("embedding", "V D", "V D", "transformer.wte.weight"),
        _map("positions", "S D", "S D", "transformer.wpe.weight"),
        _map("blocks.attention_norm.scale", "L D", "D", "transformer.h.{}.ln_1.weight"),
        _map("blocks.attention_norm.bias", "L D", "D", "transformer.h.{}.ln_1.bias"),
        _map(
            "blocks.attention.qkv.weight",
            "L D f N H",
            "D fNH",
            "transformer.h.{}.attn.c_attn.weight",
        ),
        _map("blocks.attention.qkv.bias", "L f N H", "fNH", "transformer.h.{}.attn.c_attn.bias"),
        _map(
            "blocks.attention.out.weight", "L D N H", "NH D", "transformer.h.{}.attn.c_proj.weight"
        ),
        _map("blocks.attention.out.bias", "L D", "D", "transformer.h.{}.attn.c_proj.bias"),
        _map("blocks.mlp_norm.scale", "L D", "D", "transformer.h.{}.ln_2.weight"),
        _map("blocks.mlp_norm.bias", "L D", "D", "transformer.h.{}.ln_2.bias"),
        _map("blocks.mlp.up.weight", "L D F", "D F", "transformer.h.{}.mlp.c_fc.weight"),
        _map("blocks.mlp.up.bias", "L F", "F", "transformer.h.{}.mlp.c_fc.bias"),
        _map("blocks.mlp.down.weight", "L D F", "F D", "transformer.h.{}.mlp.c_proj.weight"),
        _map("blocks.mlp.down.bias", "L D", "D", "transformer.h.{}.mlp.c_proj.bias"),
        _map("norm.scale", "D", "D", "transformer.ln_f.weight"),
        _map("norm.bias", "D", "D", "transformer.ln_f.bias"),
        _map("head", "V D", "V D", HEAD),
    ),
    ignored=(".attn.bias", ".attn.masked_bias"),  # the causal mask
)

_Q, _K, _V = (f"model.layers.{{}}.self_attn.{x}_proj.weight" for x in "qkv")
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
        **_PLAIN,
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
        _map("embedding", "V D", "V D", "model.embed_tokens.weight"),
        _map("blocks.attention_norm.scale", "L D", "D", "model.layers.{}.input_layernorm.weight"),
        # if n_kv_heads = n_heads
        _map("blocks.attention.qkv.weight", "L D f N H", "NH D", _Q, _K, _V),
        _map("blocks.attention.q.weight", "L D N H", "NH D", _Q),  # grouped queries
        _map("blocks.attention.kv.weight", "L D f K H", "KH D", _K, _V),
        _map(
            "blocks.attention.out.weight",
            "L D N H",
            "D NH",
            "model.layers.{}.self_attn.o_proj.weight",
        ),
        _map(
            "blocks.mlp_norm.scale", "L D", "D", "model.layers.{}.post_attention_layernorm.weight"
        ),
        _map(
            "blocks.mlp.up.weight",
            "L D f F",
            "F D",
            "model.layers.{}.mlp.gate_proj.weight",
            "model.layers.{}.mlp.up_proj.weight",
        ),
        _map("blocks.mlp.down.weight", "L D F", "D F", "model.layers.{}.mlp.down_proj.weight"),
        _map("norm.scale", "D", "D", "model.norm.weight"),
        _map("head", "V D", "V D", HEAD),
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
    mappings=(
        *LLAMA.mappings,
        _map(
            "blocks.attention.q_norm.scale", "L H", "H", "model.layers.{}.self_attn.q_norm.weight"
        ),
        _map(
            "blocks.attention.k_norm.scale", "L H", "H", "model.layers.{}.self_attn.k_norm.weight"
        ),
    ),
)

FAMILIES = (GPT2, LLAMA, QWEN3)
