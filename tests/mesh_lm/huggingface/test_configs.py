"""Conversion of config.json in both directions, and errors for fields without an equivalent."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from fixtures.huggingface_golden import FIXTURES, NAMES
from support import GPT, LLAMA

from docs.custom_model import RecurrentConfig as OtherConfig
from mesh_lm import huggingface
from mesh_lm.errors import ConfigError
from mesh_lm.huggingface.configs import to_json
from mesh_lm.model import DecoderConfig

LLAMA_3_2_1B = {
    "architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "bos_token_id": 128000,
    "eos_token_id": 128001, "head_dim": 64, "hidden_act": "silu", "hidden_size": 2048,
    "initializer_range": 0.02, "intermediate_size": 8192,
    "max_position_embeddings": 131072, "mlp_bias": False, "model_type": "llama",
    "num_attention_heads": 32, "num_hidden_layers": 16,
    "num_key_value_heads": 8, "pretraining_tp": 1, "rms_norm_eps": 1e-05,
    "rope_scaling": {"factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8192,
                     "rope_type": "llama3"},
    "rope_theta": 500000.0, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
    "use_cache": True, "vocab_size": 128256,
}  # fmt: skip
"""A config in the format of transformers 4, with the published sizes."""
GPT2 = {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "n_ctx": 1024, "n_embd": 768, "n_head": 12, "n_layer": 12,
        "n_positions": 1024, "vocab_size": 50257, "activation_function": "gelu_new", "layer_norm_epsilon": 1e-05}  # fmt: skip
"""A config as published, before many fields existed."""
QWEN3_0_6B = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 128, "hidden_act": "silu", "hidden_size": 1024,
              "intermediate_size": 3072, "max_position_embeddings": 40960, "max_window_layers": 28,
              "num_attention_heads": 16,
              "num_hidden_layers": 28, "num_key_value_heads": 8, "rms_norm_eps": 1e-06,
              "rope_scaling": None, "rope_theta": 1000000,
              "sliding_window": None, "use_sliding_window": False, "tie_word_embeddings": True, "vocab_size": 151936}  # fmt: skip


def written(directory: Path, described: dict[str, Any]) -> Path:
    (directory / "config.json").write_text(json.dumps(described), encoding="utf-8")
    return directory


def refused(directory: Path, **changes: object) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        huggingface.config_of(directory, **changes)
    return str(caught.value).replace(str(directory), "DIR").split("\n  - ")


@pytest.mark.parametrize(
    ("described", "n_params"),
    [(LLAMA_3_2_1B, 1_235_814_400), (GPT2, 124_439_808), (QWEN3_0_6B, 596_049_920)],
    ids=lambda x: x["model_type"] if isinstance(x, dict) else "",
)
def test_published_models_have_their_published_parameters(
    described: dict[str, Any], n_params: int, tmp_path: Path
) -> None:
    assert huggingface.config_of(written(tmp_path, described)).n_params() == n_params


def test_llama_in_the_form_of_transformers_4(tmp_path: Path) -> None:
    config = huggingface.config_of(written(tmp_path, LLAMA_3_2_1B), seq_len=2048, dropout=0.1)
    assert config == DecoderConfig(
        vocab_size=128_256, seq_len=2048, n_layers=16, d_model=2048, n_heads=32, n_kv_heads=8,
        head_dim=64, d_ff=8192, positions="rotary",
        rope_theta=500_000.0, rope_scaling=32.0, rope_original_seq_len=8192, norm="rmsnorm",
        activation="swiglu", biases=False,
        dropout=0.1, dtype="bfloat16",
    )  # fmt: skip
    later = {key: value for key, value in LLAMA_3_2_1B.items() if not key.startswith("rope_")}
    later["rope_parameters"] = {
        **LLAMA_3_2_1B["rope_scaling"],
        "rope_theta": LLAMA_3_2_1B["rope_theta"],
    }
    assert huggingface.config_of(written(tmp_path, later), seq_len=2048, dropout=0.1) == config


@pytest.mark.parametrize("name", NAMES)
def test_there_and_back(name: str, tmp_path: Path) -> None:
    config = huggingface.config_of(FIXTURES / name)
    assert huggingface.config_of(
        written(tmp_path, to_json(config, "float32"))
    ) == dataclasses.replace(config, n_kv_heads=config.n_kv_heads, d_ff=config.d_mlp)


def test_an_unknown_class(tmp_path: Path) -> None:
    lines = refused(
        written(tmp_path, {"architectures": ["MambaForCausalLM"], "model_type": "mamba"})
    )
    known = "GPT2LMHeadModel, LlamaForCausalLM, Qwen3ForCausalLM"
    assert lines == [
        f"DIR/config.json: the model class is MambaForCausalLM; mesh_lm supports the classes {known}"
    ]
    assert "the model class is bert;" in refused(written(tmp_path, {"model_type": "bert"}))[0]


def test_every_unsupported_field_at_once(tmp_path: Path) -> None:
    rope = {"factor": 0, "low_freq_factor": 2.0, "high_freq_factor": 4.0, "rope_type": "llama3"}
    changes = {
        "attention_bias": True,
        "mlp_bias": True,
        "hidden_act": "gelu",
        "hidden_size": "2048",
        "rope_scaling": rope,
    }
    described = {
        key: value for key, value in (LLAMA_3_2_1B | changes).items() if key != "num_hidden_layers"
    }
    assert refused(written(tmp_path, described), seq_length=5) == [
        "DIR/config.json (LlamaForCausalLM) cannot be imported as a model",
        "num_hidden_layers is missing",
        'hidden_size="2048" should be int',
        'hidden_act="gelu": supported is "silu" or "swish"',
        "attention_bias=true: supported is false",
        "mlp_bias=true: supported is false",
        "rope_scaling.factor=0 should be a number of at least 1",
        "rope_scaling.original_max_position_embeddings=null should be a number of at least 1",
        "rope_scaling.low_freq_factor=2.0: supported is 1.0",
        "seq_length: DecoderConfig has no such field",
    ]


@pytest.mark.parametrize(
    ("base", "changes", "line"),
    [
        (
            LLAMA_3_2_1B,
            {"rope_scaling": {"type": "linear", "factor": 2.0}},
            'rope_scaling.rope_type="linear": supported is "default" or "llama3"',
        ),
        (QWEN3_0_6B, {"rope_theta": None}, "rope_theta=null should be a number"),
        (QWEN3_0_6B, {"use_sliding_window": True}, "use_sliding_window=true: supported is false"),
        (
            QWEN3_0_6B,
            {"layer_types": ["full_attention", "sliding_attention"]},
            (
                'layer_types=["full_attention", "sliding_attention"]: supported is null or '
                '"full_attention"'
            ),
        ),
        (
            QWEN3_0_6B,
            {"quantization_config": {"bits": 4}},
            'quantization_config={"bits": 4}: supported is null',
        ),
        (
            GPT2,
            {"scale_attn_by_inverse_layer_idx": True},
            "scale_attn_by_inverse_layer_idx=true: supported is false",
        ),
        (
            GPT2,
            {"activation_function": "relu"},
            'activation_function="relu": supported is "gelu_new" or "gelu_pytorch_tanh"',
        ),
        (
            GPT2,
            {"n_head": 5},
            (
                "model.d_model=768 is not divisible by model.n_heads=5; set model.head_dim, or "
                "change one"
            ),
        ),
    ],
)
def test_an_unsupported_field(
    base: dict[str, Any], changes: dict[str, Any], line: str, tmp_path: Path
) -> None:
    assert refused(written(tmp_path, base | changes))[1:] == [line]


@pytest.mark.parametrize(
    "field", ["n_layer", "n_embd", "n_head", "vocab_size", "n_positions", "n_inner"]
)
def test_absurd_sizes(field: str, tmp_path: Path) -> None:
    """Which would be lists of a billion names, or more memory than there is."""
    largest = {"n_layer": "10,000", "n_head": "100,000"}.get(field, "134,217,728")
    for size in (10**9, -(10**9), 10**30):
        assert (
            refused(written(tmp_path, GPT2 | {field: size}))[1]
            == f"{field}={size:,} is out of range: at most {largest}"
        )


def test_a_config_file_costs_neither_flax_nor_safetensors() -> None:
    code = (
        "from mesh_lm import huggingface; import sys; print({'flax', 'safetensors', 'tokenizers', "
        "'orbax'} & sys.modules.keys())"
    )
    out = subprocess.run(
        [sys.executable, "-c", code], cwd=Path(__file__).parents[3], capture_output=True, text=True
    )
    assert out.stdout.strip() == "set()", out.stdout + out.stderr


def test_learned_positions_end(tmp_path: Path) -> None:
    line = "seq_len=1025: the model has learned 1024 positions; set a seq_len of at most 1024"
    assert refused(written(tmp_path, GPT2), seq_len=1025)[1:] == [line]


def test_damaged_and_missing(tmp_path: Path) -> None:
    assert refused(tmp_path) == [
        "cannot read the model config DIR/config.json: No such file or directory"
    ]
    (tmp_path / "config.json").write_text("{", encoding="utf-8")
    assert refused(tmp_path)[0].startswith("DIR/config.json is not a config of transformers: ")
    assert not huggingface.is_huggingface(tmp_path)
    written(tmp_path, {"a": 1})
    assert not huggingface.is_huggingface(tmp_path) and not huggingface.is_huggingface(
        tmp_path / "none"
    )
    assert huggingface.is_huggingface(FIXTURES / "gpt2")


def test_a_model_without_a_family() -> None:
    with pytest.raises(ConfigError) as caught:
        to_json(LLAMA, "float32")
    assert str(caught.value).split("\n  - ") == [
        "no supported class of transformers can express this model; LlamaForCausalLM needs",
        "model.softcap=0.0, not 0.5",
        "model.head_softcap=0.0, not 5.0",
        "model.sinks=False, not True",
        "model.window=(), not (4, 0)",
    ]
    with pytest.raises(
        ConfigError,
        match=(
            r"GPT2LMHeadModel needs\n  - model.n_kv_heads=0 \(as many as n_heads=4\), not 2\n  - "
            r"model.head_dim"
        ),
    ):
        to_json(dataclasses.replace(GPT, n_kv_heads=2, head_dim=4), "float32")
    assert to_json(dataclasses.replace(GPT, window=(0,)), "float32")["n_layer"] == 2
    with pytest.raises(
        ConfigError,
        match="model is a RecurrentConfig, which makes a model of its own: no supported class",
    ):
        to_json(OtherConfig(), "float32")  # type: ignore[arg-type]


def test_an_extended_context_is_exported() -> None:
    """transformers refuses texts beyond max_position_embeddings, but a short training sequence does
    not limit the model."""
    config = dataclasses.replace(huggingface.config_of(FIXTURES / "llama3"), seq_len=8)
    assert to_json(config, "float32")["max_position_embeddings"] == 64
