"""Converts config.json to DecoderConfig and back."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from mesh_lm import checksums, strict_json
from mesh_lm.config import ModelConfig
from mesh_lm.errors import ConfigError
from mesh_lm.huggingface import files
from mesh_lm.huggingface.families import FAMILIES, HEAD, REQUIRED, Family
from mesh_lm.model import DecoderConfig

CONFIG = "config.json"
_LARGEST, _WIDEST = {"n_layers": 10_000, "n_heads": 100_000, "n_kv_heads": 100_000}, 2**27
"""Sizes that no model has yet: a damaged or hostile config ends here, and not in lists of a billion
names or in a full memory."""
LOW, HIGH = 1.0, 4.0
"""low_freq_factor and high_freq_factor of Llama 3's rotary scaling; constants in our
`rope_table`."""


def is_huggingface(directory: Path | str) -> bool:
    """Whether a directory holds a model saved by transformers, supported or not."""
    try:
        described = strict_json.read(Path(directory).expanduser() / CONFIG)
    except (OSError, ValueError):
        return False
    return bool(described.keys() & {"architectures", "model_type"})


def config_of(directory: Path | str, **changes: Any) -> DecoderConfig:
    """Returns the model config of a Hugging Face directory from its config.json.

    No weights are needed, nor read, but for one question: whether a head beside the embedding of a
    tied model is a copy of it. If it is another one, config.json is wrong, and the head is not tied
    (`declares_tied`).

    Args:
      changes: fields of DecoderConfig to override, such as seq_len=2048 (the file has the maximum),
      dropout (0 by default, whatever the
        file has), remat or dtype (bfloat16 compute by default; weights are fp32 masters).

    Raises:
      ConfigError: the file is missing, the model class is unknown, or fields cannot be expressed by
      DecoderConfig; lists all of them.
    """
    family, described, where = _read(directory)
    fields, problems = _fields(family, described)
    if fields.get("tied") and _has_own_head(where.parent, family):
        fields["tied"] = False
    fields |= {name: value for name, value in family.fixed.items() if name != "window"}
    known = {field.name for field in dataclasses.fields(DecoderConfig)}
    problems += [
        f"{name}: DecoderConfig has no such field" for name in changes if name not in known
    ]
    limit = fields.get("seq_len", 0)
    if fields.get("positions") == "learned" and changes.get("seq_len", 0) > limit:
        problems.append(
            f"seq_len={changes['seq_len']}: the model has learned {limit} positions; set a seq_len "
            f"of at most {limit}"
        )
    if not problems:
        config = dataclasses.replace(DecoderConfig(**fields), **changes)
        problems = config.problems()
        if not problems:
            return config
    raise ConfigError(
        "\n  - ".join([f"{where} ({family.architecture}) cannot be imported", *problems])
    )


def family_of(directory: Path | str) -> Family:
    """Returns the family of a Hugging Face directory. Raises ConfigError as `config_of`."""
    return _read(directory)[0]


def declares_tied(directory: Path | str) -> bool:
    """Returns whether config.json says that the head is the embedding, whatever the weights say.
    Raises ConfigError as `config_of`.
    """
    family, described, _ = _read(directory)
    return bool(_fields(family, described)[0].get("tied"))


def _has_own_head(directory: Path, family: Family) -> bool:
    """Returns whether the files have both an embedding and a head, and these differ.

    transformers compares them likewise, and ties them or not (`PreTrainedModel.tie_weights`). Files
    that cannot be read are reported by whoever reads the weights.
    """
    stored = {family.full_name(name): tensor for name, tensor in files.scan(directory)[0].items()}
    embedding, head = stored.get(family.embedding), stored.get(HEAD)
    if embedding is None or head is None or embedding.shape is None or head.shape is None:
        return False
    if not {embedding.dtype, head.dtype} <= {*files.FLOATS}:
        return embedding.dtype != head.dtype
    return not files.equal(embedding, head)


def family_for(config: ModelConfig) -> Family:
    """Returns the family that can express a config. Raises ConfigError with the obstacles of the
    closest family.
    """
    if not isinstance(config, DecoderConfig) or type(config).make is not DecoderConfig.make:
        raise ConfigError(
            f"model is a {type(config).__name__}, which makes a model of its own: no supported "
            "class of transformers can express it, only models of DecoderConfig "
            "(docs/huggingface.md)"
        )
    obstacles = {family.architecture: (family, _obstacles(family, config)) for family in FAMILIES}
    nearest, (family, problems) = min(obstacles.items(), key=lambda item: len(item[1][1]))
    if problems:
        raise ConfigError(
            "\n  - ".join(
                [
                    f"no supported class of transformers can express this model; {nearest} needs",
                    *problems,
                ]
            )
        )
    return family


def to_json(
    config: DecoderConfig, dtype: str, token_ids: Mapping[str, Any] = MappingProxyType({})
) -> dict[str, Any]:
    """Returns config.json for weights stored as `dtype`. token_ids: those of special tokens, such
    as {"eos_token_id": 0}.

    Fields of rotary positions are named as in transformers 4, which version 5 reads too. Raises
    ConfigError as `family_for`.
    """
    family = family_for(config)
    explicit = dataclasses.replace(
        config, n_kv_heads=config.kv_heads, head_dim=config.d_head, d_ff=config.d_mlp
    )
    out = {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        "torch_dtype": dtype,
        "bos_token_id": None,
        "eos_token_id": None,
        **token_ids,
        **{key: getattr(explicit, field) for key, (field, _) in family.fields.items()},
        **{key: values[0] for key, values in family.only.items() if values[0] not in (None, 1.0)},
    }
    if config.positions == "rotary":
        out["rope_theta"] = config.rope_theta
        if config.rope_scaling != 1:
            original = config.rope_original_seq_len
            out["rope_scaling"] = {
                "rope_type": "llama3", "factor": config.rope_scaling, "low_freq_factor": LOW,
                "high_freq_factor": HIGH,
                "original_max_position_embeddings": original,
            }  # fmt: skip
            out["max_position_embeddings"] = max(
                config.seq_len, round(original * config.rope_scaling)
            )
    else:
        out |= {"resid_pdrop": config.dropout, "embd_pdrop": config.dropout, "attn_pdrop": 0.0}
    return out


def differences(directory: Path | str, config: DecoderConfig) -> list[str]:
    """Returns a line for each field in which a config differs from the model of a directory.

    Sequence length and rotary scaling may differ, to extend the context.
    """
    imported = config_of(directory)
    names = [name for name, _ in family_of(directory).fields.values()] + list(
        family_of(directory).fixed
    )
    explicit = {"n_kv_heads": "kv_heads", "head_dim": "d_head", "d_ff": "d_mlp"}
    lines = []
    for name in names:
        have, want = (getattr(c, explicit.get(name, name)) for c in (config, imported))
        if have != want and name != "seq_len" and not (name == "window" and not any(have)):
            lines.append(f"model.{name}={have}: {directory} has {want}")
    if imported.positions == "learned" and config.seq_len > imported.seq_len:
        lines.append(
            f"model.seq_len={config.seq_len}: {directory} has learned {imported.seq_len} positions"
        )
    return lines


def _read(directory: Path | str) -> tuple[Family, dict[str, Any], Path]:
    path = Path(directory).expanduser() / CONFIG
    checksums.require(path.parent, CONFIG)
    try:
        described = strict_json.read(path)
        named = (described.get("architectures") or [None])[0]
        model_type = described.get("model_type")
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, AttributeError, LookupError) as error:
        raise ConfigError(f"{path} is not a config of transformers: {error}") from error
    for family in FAMILIES:
        headless = family.architecture.replace("LMHead", "").replace("ForCausalLM", "Model")
        if named in (family.architecture, headless) or (
            named is None and model_type == family.model_type
        ):
            return family, described, path
    known = ", ".join(family.architecture for family in FAMILIES)
    raise ConfigError(f"{path}: the model class is {named or model_type}; mesh_lm supports {known}")


def _fields(family: Family, described: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Returns fields of DecoderConfig, and messages about entries that they cannot express."""
    fields, problems = {}, []
    defaults = {f.name: f.default for f in dataclasses.fields(DecoderConfig)}
    for key, (field, default) in family.fields.items():
        value = described.get(key, default)
        kind = type(defaults[field])
        if value is REQUIRED:
            problems.append(f"{key} is missing")
        elif (
            value is None and default is not None and field != "n_kv_heads"
        ):  # null is as many as n_heads
            problems.append(f"{key}=null should be {kind.__name__}")
        elif value is not None and (
            isinstance(value, bool) is not (kind is bool) or not isinstance(value, (kind, int))
        ):
            problems.append(f"{key}={json.dumps(value)} should be {kind.__name__}")
        elif (
            value is not None
            and kind is int
            and not abs(value) <= (largest := _LARGEST.get(field, _WIDEST))
        ):
            problems.append(f"{key}={value:,} is out of range: at most {largest:,}")
        elif value is not None:
            fields[field] = kind(value)
    for key, known in family.only.items():
        value = described.get(key, known[0])
        if any(each not in known for each in (value if isinstance(value, list) else [value])):
            supported = " or ".join(json.dumps(each) for each in known)
            problems.append(f"{key}={_short(value)}: supported is {supported}")
    if family.fixed["positions"] == "rotary":
        _rope(described, fields, problems)
    return fields, problems


def _rope(described: dict[str, Any], fields: dict[str, Any], problems: list[str]) -> None:
    """Converts rotary positions: `rope_parameters` of transformers 5, or `rope_theta` and
    `rope_scaling` of 4.
    """
    name = "rope_parameters" if described.get("rope_parameters") else "rope_scaling"
    rope = described.get(name) or {}
    theta = rope.get("rope_theta", described.get("rope_theta", 10_000.0))
    if isinstance(theta, int | float):
        fields["rope_theta"] = float(theta)
    else:
        problems.append(f"rope_theta={json.dumps(theta)} should be a number")
    kind = rope.get("rope_type", rope.get("type", "default"))
    only = {"rope_type": ("default", "llama3"), "partial_rotary_factor": (1.0, None)}
    values = {"rope_type": kind, "partial_rotary_factor": rope.get("partial_rotary_factor")}
    if kind == "llama3":
        only |= {"low_freq_factor": (LOW,), "high_freq_factor": (HIGH,)}
        values |= {key: rope.get(key) for key in ("low_freq_factor", "high_freq_factor")}
        original = rope.get(
            "original_max_position_embeddings", described.get("original_max_position_embeddings")
        )
        for key, value in (
            ("factor", rope.get("factor")),
            ("original_max_position_embeddings", original),
        ):
            if not isinstance(value, int | float) or value < 1:
                problems.append(
                    f"{name}.{key}={json.dumps(value)} should be a number of at least 1"
                )
        fields |= {"rope_scaling": rope.get("factor"), "rope_original_seq_len": original}
    for key, known in only.items():
        if values[key] not in known:
            supported = " or ".join(json.dumps(each) for each in known if each is not None)
            problems.append(f"{name}.{key}={json.dumps(values[key])}: supported is {supported}")


def _obstacles(family: Family, config: DecoderConfig) -> list[str]:
    """Returns messages about fields of a config that a family cannot express."""
    lines = [
        f"model.{name}={value!r}, not {getattr(config, name)!r}"
        for name, value in family.fixed.items()
        if getattr(config, name) != value and not (name == "window" and not any(config.window))
    ]
    held = {field for field, _ in family.fields.values()}
    if "n_kv_heads" not in held and config.kv_heads != config.n_heads:
        lines.append(
            f"model.n_kv_heads=0 (as many as n_heads={config.n_heads}), not {config.n_kv_heads}"
        )
    if "head_dim" not in held and config.d_head * config.n_heads != config.d_model:
        lines.append(
            f"model.head_dim={config.d_model / config.n_heads:g} (d_model / n_heads), not "
            f"{config.d_head}"
        )
    return lines


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) < 60 else f"{text[:57]}..."
