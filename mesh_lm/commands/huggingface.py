"""Conversion to and from Hugging Face's format.

mesh-lm export RUN --output=DIRECTORY
mesh-lm import DIRECTORY --output=RUN
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from mesh_lm.commands.model_arguments import ModelArguments
from mesh_lm.commands.options import command
from mesh_lm.errors import ConfigError, hub_hint

if TYPE_CHECKING:
    from mesh_lm.inference.trained import TrainedModel


@dataclasses.dataclass(frozen=True)
class Export:
    """The options of `export`."""

    POSITIONAL: ClassVar[tuple[str, ...]] = ("checkpoint",)

    checkpoint: str
    """A run's output directory (its newest checkpoint), or one step in its `checkpoints`."""
    output: str
    """Directory to write, for transformers to load. It must not exist, or be empty."""
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    """Type of the weights in the files."""
    tokenizer: str = ""
    """A tokenizer as data.tokenizer names it; empty: the one kept beside the checkpoint."""
    mesh: str = ""
    """Devices along each mesh axis, as in fsdp=8; empty: as in training where that fits, else all
    along data."""
    rules: str = ""
    """Sharding rules, as in training; empty: those of training."""
    config: str = ""
    """The config file that defines your own model class; a checkpoint does not contain its code."""


@dataclasses.dataclass(frozen=True)
class Import:
    """The options of `import`."""

    POSITIONAL: ClassVar[tuple[str, ...]] = ("input",)

    input: str
    """A Hugging Face model directory: config.json, .safetensors and a tokenizer."""
    output: str
    """Output directory of the new run, which must not have checkpoints."""
    tokenizer: str = ""
    """A tokenizer as data.tokenizer names it; empty: the one in the input directory."""
    mesh: str = "fsdp=-1"
    """Devices along each mesh axis. The checkpoint does not depend on it."""
    rules: str = "fsdp"
    """Sharding rules, as in training."""


def parse_export(argv: Sequence[str], prog: str = "") -> Export:
    """Returns the options of `mesh-lm export`. Raises ConfigError."""
    return command(Export, argv, "Writes a run's weights as a Hugging Face directory.", prog)


def parse_import(argv: Sequence[str], prog: str = "") -> Import:
    """Returns the options of `mesh-lm import`. Raises ConfigError."""
    return command(
        Import, argv, "Writes the weights of a Hugging Face directory as step 0 of a run.", prog
    )


def main(argv: Sequence[str]) -> int:
    """Runs `python -m mesh_lm.huggingface import|export ...`.

    Raises ConfigError and ShardingRuleError.
    """
    name = argv[0] if argv else ""
    if name in ("-h", "--help"):
        print(f"{__doc__}\n\n--help after either lists its options.")
        return 0
    if name == "export":
        return run_export(parse_export(argv[1:]))
    if name == "import":
        return run_import(parse_import(argv[1:]))
    raise ConfigError(f"{name or 'nothing'} given; expected export or import, as in\n{__doc__}")


def run_export(options: Export) -> int:
    """Writes the directory and returns 0. Raises ConfigError and ShardingRuleError."""
    from mesh_lm import distributed  # here, so that --help needs no JAX
    from mesh_lm.huggingface import save

    _require_exportable(options)
    trained = _load(options.checkpoint, options, options.config)
    save(
        options.output,
        trained.layout,
        trained.params,
        dtype=options.dtype,
        tokenizer=trained.tokenizer,
    )
    distributed.print_on_process0(
        f"wrote step {trained.step} of {options.checkpoint} to {options.output} as {options.dtype}"
    )
    return 0


def run_import(options: Import) -> int:
    """Writes the run and returns 0. Raises ConfigError and ShardingRuleError."""
    from mesh_lm import distributed
    from mesh_lm.checkpoint import Checkpoints, config_in
    from mesh_lm.config import CheckpointConfig
    from mesh_lm.huggingface import is_huggingface
    from mesh_lm.inference.trained import TOKENIZER
    from mesh_lm.optim import Optimizer
    from mesh_lm.state.initial import fresh_state

    if not is_huggingface(options.input):
        if config_in(options.input):
            hint = "; it is a run's own, which needs no import: --init_from takes it"
        else:
            hint = hub_hint(options.input)
        raise ConfigError(
            f"--input={options.input} is not a Hugging Face model directory (config.json and "
            f".safetensors){hint}"
        )
    trained = _load(options.input, options)
    config = dataclasses.replace(
        trained.config, output=options.output, checkpoint=CheckpointConfig(resume="never")
    )
    with Checkpoints(config) as checkpoints:
        tokenizer_directory = Path(options.output).expanduser() / TOKENIZER
        tokenizer_directory.mkdir(parents=True, exist_ok=True)
        trained.tokenizer.save(tokenizer_directory)
        optimizer = Optimizer(config.optimizer, config.train.steps, config.diloco)
        state = fresh_state(trained.layout, optimizer, trained.params)
        data = {
            "position": 0,
            "corpus": f"none: weights of {options.input}",
            "tokenizer": trained.tokenizer.fingerprint,
        }
        checkpoints.save(0, state, data, trained.layout, optimizer, last=True)
    distributed.print_on_process0(
        f"wrote the weights of {options.input} to {options.output} as step 0"
    )
    return 0


def _require_exportable(options: Export) -> None:
    """Raises ConfigError if an export is impossible, before it reads weights or uses a device."""
    from mesh_lm.checkpoint import config_in
    from mesh_lm.config import load
    from mesh_lm.huggingface.configs import family_for
    from mesh_lm.inference.trained import config_from
    from mesh_lm.model import DecoderConfig

    saved = config_in(options.checkpoint)
    output = Path(options.output).expanduser()
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ConfigError(
            f"--output={options.output} exists and is not empty; name another directory"
        )
    if saved is None:
        return
    if options.config:
        family_for(load(options.config).model)
        return
    name = saved["model"]["class"]
    if name != DecoderConfig.__name__:
        raise ConfigError(
            f"{options.checkpoint} is a {name}, a model of your own: no supported class of "
            f"transformers can express it, unless {name} is a DecoderConfig that only has other "
            "defaults; then name the config file that creates it: --config=FILE.py"
        )
    family_for(config_from(saved, None, options.checkpoint).model)


def _load(path: str, options: Export | Import, config: str = "") -> TrainedModel:
    arguments = ModelArguments(
        path,
        mesh=options.mesh,
        rules=options.rules,
        tokenizer=options.tokenizer,
        config=config,
        compile_cache="",
    )
    return arguments.load()
