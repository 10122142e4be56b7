"""Converts config.json to DecoderConfig and back."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from mesh_lm import checksums, strict_json
from mesh_lm.config import ModelConfig
from mesh_lm.errors import ConfigError
from mesh_lm.huggingface import files
from mesh_lm.huggingface.families import FAMILIES, HEAD, REQUIRED, Family
from mesh_lm.model import DecoderConfig, SegmentConfig
from mesh_lm.model.experts_config import ExpertsConfig

CONFIG = "config.json"
_LARGEST = {
    "n_layers": 10_000,
    "n_heads": 100_000,
    "n_kv_heads": 100_000,
    "experts.number": 10_000,
}
_LARGEST_OTHERS = 2**27
"""Sizes that no model has yet: a damaged or hostile config ends here, and not in lists of a billion
names or in a full memory."""
LOW = 1.0
HIGH = 4.0
"""low_freq_factor and high_freq_factor of Llama 3's rotary scaling; constants in our
`rope_table`."""
_PROPERTIES = {
    "n_kv_heads": "kv_heads",
    "head_dim": "d_head",
    "d_ff": "d_mlp",
    "experts.d_ff": "d_expert",
}
"""Fields of DecoderConfig whose default stands for another value, and the properties that have
it."""
_EXPERTS = "experts."
"""The prefix of the names of fields of ExpertsConfig."""
_DENSE_LAYERS = "mlp_only_layers"
_SPARSE_STEP = "decoder_sparse_step"
"""Fields of the families with layers of two kinds: layers without experts, by their numbers from 0;
and n: of the others, every n-th has experts, from the n-th on."""


def is_huggingface(directory: Path | str) -> bool:
    """Whether a directory holds a model saved by transformers, supported or not."""
    try:
        hf_config = strict_json.read(Path(directory).expanduser() / CONFIG)
    except (OSError, ValueError):
        return False
    return bool(hf_config.keys() & {"architectures", "model_type"})


def config_of(directory: Path | str, **changes: Any) -> DecoderConfig:
    """Returns the model config of a Hugging Face directory from its config.json.

    No weights are needed, nor read, but for one question: whether a head beside the embedding of a
    tied model is a copy of it. If it is not, config.json is wrong, and the head is not tied
    (`declares_tied`).

    Args:
      changes: fields of DecoderConfig to override, such as seq_len=2048 (the file has the maximum),
        dropout (0 by default, whatever the file has), remat or dtype (bfloat16 compute by default;
        weights are fp32 masters).

    Raises:
      ConfigError: the file is missing, the model class is unknown, or fields cannot be expressed by
        DecoderConfig; lists all of them.
    """
    family, hf_config, path = _read(directory)
    fields, problems = _fields(family, hf_config)
    if fields.get("tied") and _has_separate_head(path.parent, family):
        fields["tied"] = False
    fields |= family.fixed

    names = {field.name for field in dataclasses.fields(DecoderConfig)}
    problems += [
        f"{name}: DecoderConfig has no such field" for name in changes if name not in names
    ]
    limit = fields.get("seq_len", 0)
    if fields.get("positions") == "learned" and changes.get("seq_len", 0) > limit:
        problems.append(
            f"seq_len={changes['seq_len']}: the model has learned {limit} positions; set a seq_len "
            f"of at most {limit}"
        )
    if not problems:
        config = dataclasses.replace(_config(fields), **changes)
        problems = config.problems()
        if not problems:
            return config
    raise ConfigError(
        "\n  - ".join([f"{path} ({family.architecture}) cannot be imported as a model", *problems])
    )


def family_of(directory: Path | str) -> Family:
    """Returns the family of a Hugging Face directory. Raises ConfigError as `config_of`."""
    family, _, _ = _read(directory)
    return family


def declares_tied(directory: Path | str) -> bool:
    """Returns whether config.json says that the head is the embedding, whatever the weights say.
    Raises ConfigError as `config_of`.
    """
    family, hf_config, _ = _read(directory)
    fields, _ = _fields(family, hf_config)
    return bool(fields.get("tied"))


def _has_separate_head(directory: Path, family: Family) -> bool:
    """Returns whether the files have both an embedding and a head, and these differ.

    transformers compares them likewise, and ties them or not (`PreTrainedModel.tie_weights`). Files
    that cannot be read are reported by whoever reads the weights.
    """
    tensors, _ = files.scan(directory)
    stored = {family.full_name(name): tensor for name, tensor in tensors.items()}
    embedding = stored.get(family.embedding)
    head = stored.get(HEAD)
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
    # The kinds of layers say more about what a model is than any number of fields.
    closest = min(
        FAMILIES,
        key=lambda family: (
            bool(_other_kinds(family, config)),
            len(_obstacles(family, config)),
        ),
    )
    obstacles = _obstacles(closest, config)
    if obstacles:
        head = (
            "no supported class of transformers can express this model; "
            f"{closest.architecture} needs"
        )
        raise ConfigError("\n  - ".join([head, *obstacles]))
    return closest


def to_json(
    config: DecoderConfig, dtype: str, token_ids: Mapping[str, Any] = MappingProxyType({})
) -> dict[str, Any]:
    """Returns config.json for weights stored as `dtype`.

    Fields of rotary positions are named as in transformers 4, which version 5 reads too. Raises
    ConfigError as `family_for`.

    token_ids: ids of special tokens, such as {"eos_token_id": 0}.
    """
    family = family_for(config)
    out = {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        "torch_dtype": dtype,
        "bos_token_id": None,
        "eos_token_id": None,
        **token_ids,
    }
    for key, (field, _) in family.fields.items():
        value = _value(config, field)
        if field == "window":
            value = value[0] if value else None
        out[key] = value
    for key, supported in family.only.items():
        if supported[0] not in (None, 1.0):
            out[key] = supported[0]
    if len(family.kinds) > 1:
        kinds = _kinds(config)
        out[_SPARSE_STEP] = 1
        out[_DENSE_LAYERS] = [layer for layer, kind in enumerate(kinds) if kind == "dense"]
    if config.positions != "rotary":
        out |= {"resid_pdrop": config.dropout, "embd_pdrop": config.dropout, "attn_pdrop": 0.0}
        return out

    out["rope_theta"] = config.rope_theta
    if config.rope_scaling != 1:
        original = config.rope_original_seq_len
        out["rope_scaling"] = {
            "rope_type": "llama3",
            "factor": config.rope_scaling,
            "low_freq_factor": LOW,
            "high_freq_factor": HIGH,
            "original_max_position_embeddings": original,
        }
        out["max_position_embeddings"] = max(config.seq_len, round(original * config.rope_scaling))
    return out


def differences(directory: Path | str, config: DecoderConfig) -> list[str]:
    """Returns a line for each field in which a config differs from the model of a directory.

    Sequence length and rotary scaling may differ, to extend the context.
    """
    imported = config_of(directory)
    family = family_of(directory)
    lines = []
    for name in [*(field for field, _ in family.fields.values()), *family.fixed]:
        value = _value(config, name)
        imported_value = _value(imported, name)
        if name == "seq_len" or value == imported_value:
            continue
        lines.append(f"model.{name}={value}: {directory} has {imported_value}")
    lines += _kind_differences(directory, imported, config)
    if imported.positions == "learned" and config.seq_len > imported.seq_len:
        lines.append(
            f"model.seq_len={config.seq_len}: {directory} has learned {imported.seq_len} positions"
        )
    return lines


def _kind_differences(
    directory: Path | str, imported: DecoderConfig, config: DecoderConfig
) -> list[str]:
    """Returns a line if layers are of other kinds than those of a directory. Segments may differ
    otherwise.
    """
    if config.n_layers != imported.n_layers:
        return []  # which is a difference of its own
    if not config.segments and not imported.segments:
        if config.block == imported.block:
            return []
        return [f"model.block={config.block!r}: {directory} has {imported.block!r}"]
    for layer, (kind, imported_kind) in enumerate(
        zip(_kinds(config), _kinds(imported), strict=True)
    ):
        if kind != imported_kind:
            return [
                f"model.segments: layer {layer} is of kind {kind!r}: {directory} has "
                f"{imported_kind!r}"
            ]
    return []


def _kinds(config: DecoderConfig) -> list[str]:
    """Returns the kind of each layer."""
    return [segment.kind for segment in config.segment_configs() for _ in range(segment.n_layers)]


def _config(fields: Mapping[str, Any]) -> DecoderConfig:
    """Returns the config with fields by their names, such as n_layers and experts.number."""
    of_experts = {
        name.removeprefix(_EXPERTS): value
        for name, value in fields.items()
        if name.startswith(_EXPERTS)
    }
    others = {name: value for name, value in fields.items() if not name.startswith(_EXPERTS)}
    config = DecoderConfig(**others, experts=ExpertsConfig(**of_experts))
    if not config.has_experts:  # of a class with experts, without a layer that has them
        config = dataclasses.replace(config, experts=ExpertsConfig())
    return config


def _types() -> dict[str, type]:
    """Returns the types that numbers of config.json have, by the names of our fields."""
    types = {field.name: type(field.default) for field in dataclasses.fields(DecoderConfig)}
    for field in dataclasses.fields(ExpertsConfig):
        types[_EXPERTS + field.name] = type(field.default)
    types["window"] = int  # one width, of all layers
    return types


def _value(config: DecoderConfig, name: str) -> Any:
    """Returns the value of a field, or the one that its default stands for; of `window` the
    shortest tuple that means the same.
    """
    if name == "window":
        widths = {width or 0 for width in config.windows()}
        if len(widths) > 1:
            return config.window
        return tuple(width for width in widths if width)
    value: Any = config
    for attribute in _PROPERTIES.get(name, name).split("."):
        value = getattr(value, attribute)
    return value


def _read(directory: Path | str) -> tuple[Family, dict[str, Any], Path]:
    """Returns the family, the contents and the path of a directory's config.json."""
    path = Path(directory).expanduser() / CONFIG
    checksums.require(path.parent, CONFIG)
    try:
        hf_config = strict_json.read(path)
        architecture = (hf_config.get("architectures") or [None])[0]
        model_type = hf_config.get("model_type")
    except OSError as error:
        raise ConfigError(f"cannot read the model config {path}: {error.strerror}") from error
    except (ValueError, AttributeError, LookupError) as error:
        raise ConfigError(f"{path} is not a config of transformers: {error}") from error
    for family in FAMILIES:
        if architecture is None:
            matches = model_type == family.model_type
        else:
            headless = family.architecture.replace("LMHead", "").replace("ForCausalLM", "Model")
            matches = architecture in (family.architecture, headless)
        if matches:
            return family, hf_config, path
    names = ", ".join(family.architecture for family in FAMILIES)
    raise ConfigError(
        f"{path}: the model class is {architecture or model_type}; "
        f"mesh_lm supports the classes {names}"
    )


def _fields(family: Family, hf_config: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Returns fields of DecoderConfig, and messages about entries that they cannot express."""
    fields = {}
    problems = []
    types = _types()
    for key, (field, default) in family.fields.items():
        alias = family.aliases.get(key, key)
        value = hf_config.get(key, hf_config.get(alias, default))
        if value is None and (default is None or field == "n_kv_heads"):
            continue  # for n_kv_heads, null is as many as n_heads
        problem = _problem(key, value, types[field], _LARGEST.get(field, _LARGEST_OTHERS))
        if problem:
            problems.append(problem)
        elif field == "window":
            fields[field] = (value,)
        else:
            fields[field] = types[field](value)
    for key, supported in family.only.items():
        value = hf_config.get(key, supported[0])
        values = value if isinstance(value, list) else [value]
        if any(item not in supported for item in values):
            problems.append(f"{key}={_short(value)}: supported is {_alternatives(supported)}")
    if family.fixed["positions"] == "rotary":
        rope_fields, rope_problems = _rope_fields(hf_config, family.rope_theta)
        fields |= rope_fields
        problems += rope_problems
    if len(family.kinds) == 1:
        fields["block"] = family.kinds[0]
    elif "n_layers" in fields:
        kind_fields, kind_problems = _kind_fields(hf_config, fields["n_layers"])
        fields |= kind_fields
        problems += kind_problems
    return fields, problems


def _kind_fields(hf_config: dict[str, Any], n_layers: int) -> tuple[dict[str, Any], list[str]]:
    """Returns the fields about kinds of layers, and messages about wrong entries. Consecutive
    layers of one kind are a segment, such as "dense_0", which is named after its first layer.
    """
    dense_layers = hf_config.get(_DENSE_LAYERS)
    if dense_layers is None:
        dense_layers = []
    step = hf_config.get(_SPARSE_STEP, 1)
    problems = []
    if not isinstance(dense_layers, list) or any(type(layer) is not int for layer in dense_layers):
        problems.append(f"{_DENSE_LAYERS}={_short(dense_layers)} should be a list of layer numbers")
    if type(step) is not int or step < 1:
        problems.append(f"{_SPARSE_STEP}={json.dumps(step)} should be an int of at least 1")
    if problems:
        return {}, problems

    kinds = []
    for layer in range(n_layers):
        is_sparse = layer not in dense_layers and (layer + 1) % step == 0
        kinds.append("moe" if is_sparse else "dense")
    segments = []
    first_layer = 0
    for kind, layers in itertools.groupby(kinds):
        segment_layers = len(list(layers))
        segments.append(SegmentConfig(f"{kind}_{first_layer}", segment_layers, kind))
        first_layer += segment_layers
    if len(segments) == 1:
        return {"block": segments[0].kind}, []
    return {"segments": tuple(segments)}, []


def _problem(key: str, value: Any, expected: type, largest: int) -> str:
    """Returns a message about a value of another type, or out of range; "" if it is neither."""
    if value is REQUIRED:
        return f"{key} is missing"
    if isinstance(value, bool) is not (expected is bool) or not isinstance(value, (expected, int)):
        return f"{key}={json.dumps(value)} should be {expected.__name__}"
    if expected is int and not abs(value) <= largest:
        return f"{key}={value:,} is out of range: at most {largest:,}"
    return ""


def _rope_fields(
    hf_config: dict[str, Any], default_theta: float
) -> tuple[dict[str, Any], list[str]]:
    """Returns the fields of rotary positions, and messages about unsupported entries.

    They come from `rope_parameters` of transformers 5, or `rope_theta` and `rope_scaling` of 4.
    """
    fields = {}
    problems = []
    name = "rope_parameters" if hf_config.get("rope_parameters") else "rope_scaling"
    rope = hf_config.get(name) or {}
    theta = rope.get("rope_theta", hf_config.get("rope_theta", default_theta))
    if isinstance(theta, int | float):
        fields["rope_theta"] = float(theta)
    else:
        problems.append(f"rope_theta={json.dumps(theta)} should be a number")

    rope_type = rope.get("rope_type", rope.get("type", "default"))
    only: dict[str, tuple[Any, ...]] = {
        "rope_type": ("default", "llama3"),
        "partial_rotary_factor": (1.0, None),
    }
    values = {**rope, "rope_type": rope_type}
    if rope_type == "llama3":
        only |= {"low_freq_factor": (LOW,), "high_freq_factor": (HIGH,)}
        factor = rope.get("factor")
        original = rope.get(
            "original_max_position_embeddings", hf_config.get("original_max_position_embeddings")
        )
        for key, value in (("factor", factor), ("original_max_position_embeddings", original)):
            if not isinstance(value, int | float) or value < 1:
                problems.append(
                    f"{name}.{key}={json.dumps(value)} should be a number of at least 1"
                )
        fields["rope_scaling"] = factor
        fields["rope_original_seq_len"] = original
    for key, supported in only.items():
        if values.get(key) not in supported:
            alternatives = _alternatives(value for value in supported if value is not None)
            problems.append(
                f"{name}.{key}={json.dumps(values.get(key))}: supported is {alternatives}"
            )
    return fields, problems


def _obstacles(family: Family, config: DecoderConfig) -> list[str]:
    """Returns messages about fields of a config that a family cannot express."""
    lines = []
    for name, required in family.fixed.items():
        value = _value(config, name)
        if value != required:
            lines.append(f"model.{name}={required!r}, not {value!r}")
    other_kinds = _other_kinds(family, config)
    if other_kinds and config.segments:
        lines.append(
            f"model.segments of kind {' or '.join(family.kinds)}, not {', '.join(other_kinds)}"
        )
    elif other_kinds:
        lines.append(f"model.block={family.kinds[0]!r}, not {config.block!r}")
    expressible = {field for field, _ in family.fields.values()}
    if "window" in expressible and len(_value(config, "window")) > 1:
        lines.append(f"model.window of one width, not {config.window!r}")
    if "n_kv_heads" not in expressible and config.kv_heads != config.n_heads:
        lines.append(
            f"model.n_kv_heads=0 (as many as n_heads={config.n_heads}), not {config.n_kv_heads}"
        )
    if "head_dim" not in expressible and config.d_head * config.n_heads != config.d_model:
        lines.append(
            f"model.head_dim={config.d_model / config.n_heads:g} (d_model / n_heads), not "
            f"{config.d_head}"
        )
    return lines


def _other_kinds(family: Family, config: DecoderConfig) -> list[str]:
    """Returns the kinds of a config's layers that a family cannot have."""
    return sorted({*_kinds(config)} - {*family.kinds})


def _alternatives(values: Iterable[Any]) -> str:
    return " or ".join(json.dumps(value) for value in values)


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) < 60 else f"{text[:57]}..."
