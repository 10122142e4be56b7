"""The files that transformers keeps beside a tokenizer: special tokens, padding, chat templates,
and settings for generation.

They do not change the ids of a text, and nothing here uses them. They are kept so that an export
has all files of the original directory.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from mesh_lm import strict_json
from mesh_lm.errors import ConfigError

CONFIG = "tokenizer_config.json"
SPECIAL_TOKENS = "special_tokens_map.json"
ADDED_TOKENS = "added_tokens.json"
CHAT_TEMPLATE = "chat_template.jinja"
GENERATION = "generation_config.json"
FILES = (CONFIG, SPECIAL_TOKENS, ADDED_TOKENS, CHAT_TEMPLATE, GENERATION)
_MORE_TEMPLATES = "additional_chat_templates"
TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
"""The special tokens that a model's config.json and its settings for generation name by their
ids."""
_ANY_CLASS = "PreTrainedTokenizerFast"
"""The class that takes everything from tokenizer.json."""
_IMPLIED = {
    "gpt2": ("bos_token", "unk_token"),
    "qwen2": ("pad_token", "unk_token"),
    "qwen3": ("pad_token", "unk_token"),
    "qwen3_moe": ("pad_token", "unk_token"),
}
"""Roles that <|endoftext|> has in transformers where neither file names a class or the token: by
the type of the model beside it."""


@dataclasses.dataclass(frozen=True)
class Companions:
    """Contents of the files; those of a missing file are empty."""

    config: dict[str, Any] = dataclasses.field(default_factory=dict)
    """tokenizer_config.json, with the chat templates of a directory of their own."""
    special_tokens: dict[str, Any] = dataclasses.field(default_factory=dict)
    """special_tokens_map.json, which older versions write."""
    added_tokens: dict[str, Any] = dataclasses.field(default_factory=dict)
    """added_tokens.json, which older versions write: the ids of tokens that the vocabulary itself
    lacks."""
    chat_template: str = ""
    """chat_template.jinja, which precedes the template in tokenizer_config.json."""
    implied: tuple[str, ...] = ()
    """More roles of the end-of-document token."""
    generation: dict[str, Any] = dataclasses.field(default_factory=dict)
    """generation_config.json, or the ids of special tokens in the model's config.json, from which
    transformers makes one."""

    def token(self, role: str) -> str | None:
        """Returns the spelling of the token with a role, such as "eos_token"; None if no file names
        one.
        """
        for content in (self.config, self.special_tokens):
            token = content.get(role)
            spelling = token.get("content") if isinstance(token, dict) else token
            if spelling:
                return str(spelling)
        return None

    def files(self, eos_token: str) -> dict[str, bytes]:
        """Returns the contents of the files to write, by name.

        eos_token: the end-of-document token, for files that name none.
        """
        unnamed_roles = [role for role in ("eos_token", *self.implied) if self.token(role) is None]
        config = {"tokenizer_class": _ANY_CLASS, **self.config}
        config |= dict.fromkeys(unnamed_roles, eos_token)
        files = {CONFIG: _encoded(config)}
        if self.special_tokens:
            files[SPECIAL_TOKENS] = _encoded(self.special_tokens)
        if self.added_tokens:
            files[ADDED_TOKENS] = _encoded(self.added_tokens)
        if self.chat_template:
            files[CHAT_TEMPLATE] = self.chat_template.encode()
        return files | self.generation_file()

    def generation_file(self) -> dict[str, bytes]:
        """Returns generation_config.json with its name, if there is one. It belongs to the model,
        whatever the tokenizer.
        """
        if not self.generation:
            return {}
        return {GENERATION: _encoded(self.generation)}


def read(directory: Path) -> Companions:
    """Returns the files beside a tokenizer in its directory. Raises ConfigError for a file that
    cannot be read.
    """
    config = _read_json(directory / CONFIG)
    model = _model_config(directory)
    class_name = config.get("tokenizer_class") or model.get("tokenizer_class")
    # `auto_map` names classes in Python files of the directory, which are not kept.
    auto_map = json.dumps(config.pop("auto_map", None))
    if class_name:
        is_in_directory = f".{str(class_name).removesuffix('Fast')}" in auto_map
        config["tokenizer_class"] = _ANY_CLASS if is_in_directory else class_name
        implied = ()
    else:
        implied = _IMPLIED.get(str(model.get("model_type")), ())

    chat_template = _read_text(directory / CHAT_TEMPLATE)
    paths = sorted((directory / _MORE_TEMPLATES).glob("*.jinja"))
    templates = {path.stem: _read_text(path) for path in paths}
    if templates:
        if chat_template:
            templates = {"default": chat_template, **templates}
            chat_template = ""
        config["chat_template"] = [
            {"name": name, "template": template} for name, template in templates.items()
        ]
    generation = _read_generation(directory, model)
    return Companions(
        config=config,
        special_tokens=_read_json(directory / SPECIAL_TOKENS),
        added_tokens=_read_json(directory / ADDED_TOKENS),
        chat_template=chat_template,
        implied=implied,
        generation=generation,
    )


def generation_of(directory: Path) -> Companions:
    """Returns the settings for generation alone, for a tokenizer that transformers does not have.
    Raises ConfigError for a file that cannot be read.
    """
    return Companions(generation=_read_generation(directory, _model_config(directory)))


def _read_generation(directory: Path, model: dict[str, Any]) -> dict[str, Any]:
    generation = _read_json(directory / GENERATION)
    if generation:
        return generation
    return {name: model[name] for name in TOKEN_IDS if model.get(name) is not None}


def _model_config(directory: Path) -> dict[str, Any]:
    """Returns the config.json of a model of transformers; {} without one, or for one of another
    program.
    """
    try:
        model = strict_json.read(directory / "config.json")
    except (OSError, ValueError):
        return {}
    return model if "model_type" in model else {}


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return strict_json.read(path)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise _unreadable(path, error) from error


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return ""
    except (OSError, ValueError) as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: Exception) -> ConfigError:
    return ConfigError(f"cannot read {path}, which describes the tokenizer beside it: {error}")


def _encoded(content: dict[str, Any]) -> bytes:
    return json.dumps(content, indent=1, ensure_ascii=False).encode() + b"\n"
