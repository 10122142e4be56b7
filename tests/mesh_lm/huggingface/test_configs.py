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
from mesh_lm.model import DecoderConfig, SegmentConfig
from mesh_lm.model.experts_config import ExpertsConfig

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

MIXTRAL_8X7B = {"architectures": ["MixtralForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": 2,
                "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 14336,
                "max_position_embeddings": 32768, "model_type": "mixtral", "num_attention_heads": 32, "num_experts_per_tok": 2,
                "num_hidden_layers": 32, "num_key_value_heads": 8, "num_local_experts": 8, "output_router_logits": False,
                "rms_norm_eps": 1e-05, "rope_theta": 1000000.0, "router_aux_loss_coef": 0.02, "sliding_window": None,
                "tie_word_embeddings": False, "torch_dtype": "bfloat16", "use_cache": True, "vocab_size": 32000}  # fmt: skip
QWEN3_30B_A3B = {"architectures": ["Qwen3MoeForCausalLM"], "attention_bias": False, "decoder_sparse_step": 1, "head_dim": 128,
                 "hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 6144, "max_position_embeddings": 40960,
                 "max_window_layers": 48, "mlp_only_layers": [], "model_type": "qwen3_moe", "moe_intermediate_size": 768,
                 "norm_topk_prob": True, "num_attention_heads": 32, "num_experts": 128, "num_experts_per_tok": 8,
                 "num_hidden_layers": 48, "num_key_value_heads": 4, "output_router_logits": False, "rms_norm_eps": 1e-06,
                 "rope_scaling": None, "rope_theta": 1000000.0, "router_aux_loss_coef": 0.001, "sliding_window": None,
                 "tie_word_embeddings": False, "use_sliding_window": False, "vocab_size": 151936}  # fmt: skip


def written(directory: Path, described: dict[str, Any]) -> Path:
    (directory / "config.json").write_text(json.dumps(described), encoding="utf-8")
    return directory


def refused(directory: Path, **changes: object) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        huggingface.config_of(directory, **changes)
    return str(caught.value).replace(str(directory), "DIR").split("\n  - ")


@pytest.mark.parametrize(
    ("described", "n_params"),
    [
        (LLAMA_3_2_1B, 1_235_814_400),
        (GPT2, 124_439_808),
        (QWEN3_0_6B, 596_049_920),
        (MIXTRAL_8X7B, 46_702_792_704),
        (QWEN3_30B_A3B, 30_532_122_624),
    ],
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
    """Widths that are defaults come back as numbers, if the class has a field for them."""
    config = huggingface.config_of(FIXTURES / name)
    expected = dataclasses.replace(
        config,
        d_ff=0 if name == "mixtral" else config.d_mlp,
        head_dim=0 if name == "gpt2" else config.d_head,
    )
    assert huggingface.config_of(written(tmp_path, to_json(config, "float32"))) == expected


def test_an_unknown_class(tmp_path: Path) -> None:
    lines = refused(
        written(tmp_path, {"architectures": ["MambaForCausalLM"], "model_type": "mamba"})
    )
    known = (
        "GPT2LMHeadModel, LlamaForCausalLM, MixtralForCausalLM, Qwen3ForCausalLM, "
        "Qwen3MoeForCausalLM"
    )
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
            QWEN3_30B_A3B,
            {"mlp_only_layers": [0, "a"]},
            'mlp_only_layers=[0, "a"] should be a list of layer numbers',
        ),
        (
            QWEN3_30B_A3B,
            {"decoder_sparse_step": 0},
            "decoder_sparse_step=0 should be an int of at least 1",
        ),
        (QWEN3_30B_A3B, {"attention_bias": True}, "attention_bias=true: supported is false"),
        (
            QWEN3_30B_A3B,
            {"num_experts": 10**6},
            "num_experts=1,000,000 is out of range: at most 10,000",
        ),
        (
            MIXTRAL_8X7B,
            {"num_experts_per_tok": 9},
            (
                "model.experts.active=9 is more than model.experts.number=8, the experts that "
                "there are"
            ),
        ),
        (MIXTRAL_8X7B, {"sliding_window": "8"}, 'sliding_window="8" should be int'),
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


def test_layers_without_experts_are_segments(tmp_path: Path) -> None:
    def segments(**changes: object) -> list[str]:
        config = huggingface.config_of(
            written(tmp_path, QWEN3_30B_A3B | {"num_hidden_layers": 5} | changes)
        )
        again = huggingface.config_of(written(tmp_path, to_json(config, "float32")))
        assert again == config or not config.has_experts
        return [str(segment) for segment in config.segment_configs()]

    assert segments() == ["blocks:5:moe"]
    assert segments(mlp_only_layers=[0, 1]) == ["dense_0:2:dense", "moe_2:3:moe"]
    assert segments(mlp_only_layers=[1, 2, 4]) == [
        "moe_0:1:moe",
        "dense_1:2:dense",
        "moe_3:1:moe",
        "dense_4:1:dense",
    ]
    assert segments(decoder_sparse_step=3) == ["dense_0:2:dense", "moe_2:1:moe", "dense_3:2:dense"]
    assert segments(mlp_only_layers=[0, 1, 2, 3, 4]) == ["blocks:5:dense"]


def test_experts_as_they_are_named_in_either_version(tmp_path: Path) -> None:
    """transformers 4 writes num_experts, and 5 num_local_experts."""
    later = {key: value for key, value in QWEN3_30B_A3B.items() if key != "num_experts"}
    config = huggingface.config_of(written(tmp_path, QWEN3_30B_A3B))
    assert huggingface.config_of(written(tmp_path, later | {"num_local_experts": 128})) == config
    assert config.experts == ExpertsConfig(number=128, active=8, d_ff=768, balance_loss=0.0)
    assert refused(written(tmp_path, later))[1:] == ["num_experts is missing"]


def test_a_window_is_that_of_all_layers(tmp_path: Path) -> None:
    config = huggingface.config_of(written(tmp_path, MIXTRAL_8X7B | {"sliding_window": 4096}))
    assert config.window == (4096,)
    assert to_json(config, "float32")["sliding_window"] == 4096
    for window, width in (((8, 8), 8), ((0, 0), None), ((), None)):
        same = dataclasses.replace(config, window=window)
        assert to_json(same, "float32")["sliding_window"] == width
    with pytest.raises(ConfigError, match=r"MixtralForCausalLM needs\n  - model.window of one"):
        to_json(dataclasses.replace(config, window=(8, 0)), "float32")


def test_experts_without_a_family(tmp_path: Path) -> None:
    config = huggingface.config_of(written(tmp_path, MIXTRAL_8X7B))
    experts = dataclasses.replace(
        config.experts, score="sigmoid", groups=2, shared=64, bias=True, normalised=False
    )
    with pytest.raises(ConfigError) as caught:
        to_json(dataclasses.replace(config, experts=experts), "float32")
    assert str(caught.value).split("\n  - ") == [
        "no supported class of transformers can express this model; MixtralForCausalLM needs",
        "model.experts.score='softmax', not 'sigmoid'",
        "model.experts.groups=1, not 2",
        "model.experts.shared=0, not 64",
        "model.experts.bias=False, not True",
        "model.experts.normalised=True, not False",
    ]
    segments = (SegmentConfig("first", 1), SegmentConfig("rest", 31, "moe"))
    with pytest.raises(ConfigError, match=r"Qwen3MoeForCausalLM needs\n  - model.qk_norm=True"):
        to_json(dataclasses.replace(config, segments=segments), "float32")


def test_an_extended_context_is_exported() -> None:
    """transformers refuses texts beyond max_position_embeddings, but a short training sequence does
    not limit the model."""
    config = dataclasses.replace(huggingface.config_of(FIXTURES / "llama3"), seq_len=8)
    assert to_json(config, "float32")["max_position_embeddings"] == 64
