"""config.json to DecoderConfig and back."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from mesh_lm.config import ModelConfig
from mesh_lm.errors import ConfigError
from mesh_lm.huggingface.families import FAMILIES, REQUIRED, Family
from mesh_lm.model import DecoderConfig

CONFIG = "config.json"
LOW, HIGH = 1.0, 4.0
"""Where Llama 3's scaling begins and ends, in turns over the original context: constants of ours (`rope_table`), fields of theirs."""


def is_huggingface(directory: Path | str) -> bool:
    """Whether a directory holds a model as transformers saves it; says nothing of whether it is one that we can read."""
    try:
        described = json.loads((Path(directory).expanduser() / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(described, dict) and bool(described.keys() & {"architectures", "model_type"})


def config_of(directory: Path | str, **changes: Any) -> DecoderConfig:
    """The model of a Hugging Face directory, as its config.json describes it; reads no weights.

    Args:
      changes: fields of DecoderConfig to set differently, such as seq_len=2048 (the file says how long a sequence may be, not how long
        yours are), dropout (0 here, whatever the file says), remat or dtype (bfloat16 compute; weights are fp32 masters).

    Raises ConfigError for a file that is missing, a class of model that is unknown, and all fields that DecoderConfig cannot express.
    """
    family, described, where = _read(directory)
    fields, problems = _fields(family, described)
    fields |= {name: value for name, value in family.fixed.items() if name != "window"}
    known = {field.name for field in dataclasses.fields(DecoderConfig)}
    problems += [f"{name}: DecoderConfig has no such field" for name in changes if name not in known]
    limit = fields.get("seq_len", 0)
    if fields.get("positions") == "learned" and changes.get("seq_len", 0) > limit:
        problems.append(f"seq_len={changes['seq_len']}: the model has learned {limit} positions; set a seq_len of at most {limit}")
    if not problems:
        config = dataclasses.replace(DecoderConfig(**fields), **changes)
        problems = config.problems()
        if not problems:
            return config
    raise ConfigError("\n  - ".join([f"{where} ({family.architecture}) is not a model that mesh_lm can hold", *problems]))


def family_of(directory: Path | str) -> Family:
    """Raises ConfigError as `config_of`."""
    return _read(directory)[0]


def family_for(config: ModelConfig) -> Family:
    """The family that can express a config. Raises ConfigError, naming the fields that stand in the way of the nearest one."""
    if not isinstance(config, DecoderConfig):
        raise ConfigError(f"a {type(config).__name__} cannot be written for Hugging Face; only a DecoderConfig has a class there")
    obstacles = {family.architecture: (family, _obstacles(family, config)) for family in FAMILIES}
    nearest, (family, problems) = min(obstacles.items(), key=lambda item: len(item[1][1]))
    if problems:
        raise ConfigError("\n  - ".join([f"no class of transformers that mesh_lm knows can hold this model; {nearest} needs", *problems]))
    return family


def to_json(config: DecoderConfig, dtype: str, eod: int | None = None) -> dict[str, Any]:
    """config.json for weights stored as `dtype`. eod: id at which generated text ends; null where unknown, and so not another tokenizer's.

    The fields of rotary positions are named as in transformers 4, which 5 reads too. Raises ConfigError as `family_for`.
    """
    family = family_for(config)
    explicit = dataclasses.replace(config, n_kv_heads=config.kv_heads, head_dim=config.d_head, d_ff=config.d_mlp)
    out = {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        "torch_dtype": dtype,
        "bos_token_id": None,
        "eos_token_id": eod,
        **{theirs: getattr(explicit, ours) for theirs, (ours, _) in family.fields.items()},
        **{theirs: values[0] for theirs, values in family.only.items() if values[0] not in (None, 1.0)},
    }
    if config.positions == "rotary":
        out["rope_theta"] = config.rope_theta
        if config.rope_scaling != 1:
            original = config.rope_original_seq_len
            out["rope_scaling"] = {
                "rope_type": "llama3", "factor": config.rope_scaling, "low_freq_factor": LOW, "high_freq_factor": HIGH,
                "original_max_position_embeddings": original,
            }  # fmt: skip
            out["max_position_embeddings"] = max(config.seq_len, round(original * config.rope_scaling))
    else:
        out |= {"resid_pdrop": config.dropout, "embd_pdrop": config.dropout, "attn_pdrop": 0.0}
    return out


def differences(directory: Path | str, config: DecoderConfig) -> list[str]:
    """Fields in which a config is not the model of a directory, a line each.

    How long a sequence is and how its rotary positions are scaled may differ: that is how a context is extended.
    """
    theirs = config_of(directory)
    names = [name for name, _ in family_of(directory).fields.values()] + list(family_of(directory).fixed)
    explicit = {"n_kv_heads": "kv_heads", "head_dim": "d_head", "d_ff": "d_mlp"}
    lines = []
    for name in names:
        have, want = (getattr(c, explicit.get(name, name)) for c in (config, theirs))
        if have != want and name != "seq_len" and not (name == "window" and not any(have)):
            lines.append(f"model.{name}={have}: it is {want} in {directory}")
    if theirs.positions == "learned" and config.seq_len > theirs.seq_len:
        lines.append(f"model.seq_len={config.seq_len}: {directory} has learned {theirs.seq_len} positions")
    return lines


def _read(directory: Path | str) -> tuple[Family, dict[str, Any], Path]:
    path = Path(directory).expanduser() / CONFIG
    try:
        described = json.loads(path.read_text(encoding="utf-8"))
        named = (described.get("architectures") or [None])[0]
        model_type = described.get("model_type")
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, AttributeError, LookupError) as error:
        raise ConfigError(f"{path} is not a config of transformers: {error}") from error
    for family in FAMILIES:
        headless = family.architecture.replace("LMHead", "").replace("ForCausalLM", "Model")
        if named in (family.architecture, headless) or (named is None and model_type == family.model_type):
            return family, described, path
    known = ", ".join(family.architecture for family in FAMILIES)
    raise ConfigError(f"{path}: the class of the model is {named or model_type}; mesh_lm knows {known}")


def _fields(family: Family, described: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Fields of DecoderConfig, and what of the description they cannot express."""
    fields, problems = {}, []
    defaults = {field.name: field.default for field in dataclasses.fields(DecoderConfig)}
    for theirs, (ours, default) in family.fields.items():
        value = described.get(theirs, default)
        kind = type(defaults[ours])
        if value is REQUIRED:
            problems.append(f"{theirs} is missing")
        elif value is not None and (isinstance(value, bool) is not (kind is bool) or not isinstance(value, (kind, int))):
            problems.append(f"{theirs}={json.dumps(value)} should be {kind.__name__}")
        elif value is not None:
            fields[ours] = kind(value)
    for theirs, known in family.only.items():
        value = described.get(theirs, known[0])
        if any(one not in known for one in (value if isinstance(value, list) else [value])):
            supported = " or ".join(json.dumps(one) for one in known)
            problems.append(f"{theirs}={_short(value)}: supported is {supported}")
    if family.fixed["positions"] == "rotary":
        _rope(described, fields, problems)
    return fields, problems


def _rope(described: dict[str, Any], fields: dict[str, Any], problems: list[str]) -> None:
    """Rotary positions: `rope_parameters` of transformers 5, or `rope_theta` and `rope_scaling` of 4."""
    name = "rope_parameters" if described.get("rope_parameters") else "rope_scaling"
    rope = described.get(name) or {}
    theta = rope.get("rope_theta", described.get("rope_theta", 10_000.0))
    if isinstance(theta, int | float):
        fields["rope_theta"] = float(theta)
    else:
        problems.append(f"rope_theta={json.dumps(theta)} should be a number")
    kind = rope.get("rope_type", rope.get("type", "default"))
    only = {"rope_type": ("default", "llama3"), "partial_rotary_factor": (1.0, None)}
    found = {"rope_type": kind, "partial_rotary_factor": rope.get("partial_rotary_factor")}
    if kind == "llama3":
        only |= {"low_freq_factor": (LOW,), "high_freq_factor": (HIGH,)}
        found |= {key: rope.get(key) for key in ("low_freq_factor", "high_freq_factor")}
        original = rope.get("original_max_position_embeddings", described.get("original_max_position_embeddings"))
        for key, value in (("factor", rope.get("factor")), ("original_max_position_embeddings", original)):
            if not isinstance(value, int | float) or value < 1:
                problems.append(f"{name}.{key}={json.dumps(value)} should be a number of at least 1")
        fields |= {"rope_scaling": rope.get("factor"), "rope_original_seq_len": original}
    for key, known in only.items():
        if found[key] not in known:
            supported = " or ".join(json.dumps(one) for one in known if one is not None)
            problems.append(f"{name}.{key}={json.dumps(found[key])}: supported is {supported}")


def _obstacles(family: Family, config: DecoderConfig) -> list[str]:
    """Fields of a config that a family has no room for."""
    lines = [
        f"model.{name}={value!r}, not {getattr(config, name)!r}"
        for name, value in family.fixed.items()
        if getattr(config, name) != value and not (name == "window" and not any(config.window))
    ]
    held = {ours for ours, _ in family.fields.values()}
    if "n_kv_heads" not in held and config.kv_heads != config.n_heads:
        lines.append(f"model.n_kv_heads=0 (as many as n_heads={config.n_heads}), not {config.n_kv_heads}")
    if "head_dim" not in held and config.d_head * config.n_heads != config.d_model:
        lines.append(f"model.head_dim={config.d_model / config.n_heads:g} (d_model / n_heads), not {config.d_head}")
    return lines


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) < 60 else f"{text[:57]}..."
