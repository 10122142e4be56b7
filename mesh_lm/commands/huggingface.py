"""python -m mesh_lm.huggingface export --checkpoint=RUN --output=DIRECTORY
python -m mesh_lm.huggingface import --input=DIRECTORY --output=RUN"""

from __future__ import annotations

import dataclasses
from pathlib import Path

from mesh_lm import distributed
from mesh_lm.checkpoint import Checkpoints
from mesh_lm.commands.command_line import command
from mesh_lm.config import CheckpointConfig
from mesh_lm.errors import ConfigError
from mesh_lm.huggingface import save
from mesh_lm.huggingface.export_weights import DType
from mesh_lm.inference.model_arguments import ModelArguments
from mesh_lm.inference.trained import TOKENIZER, Trained
from mesh_lm.optim import Optimizer
from mesh_lm.state.initial import fresh_state


@dataclasses.dataclass(frozen=True)
class Export:
    """The options of `export`."""

    checkpoint: str
    """A run's output directory (its newest checkpoint), or one step in its `checkpoints`."""
    output: str
    """Directory to write, which transformers can load; must not exist, or be empty."""
    dtype: DType = "bfloat16"
    """Type of the weights written."""
    tokenizer: str = ""
    """A tokenizer as data.tokenizer names it; empty: the one kept beside the checkpoint."""
    mesh: str = ""
    """Devices along each mesh axis, as in fsdp=8; empty: as in training where that fits, else all along data."""
    rules: str = ""
    """Sharding rules, as in training; empty: those of training."""


@dataclasses.dataclass(frozen=True)
class Import:
    """The options of `import`."""

    input: str
    """A Hugging Face model directory: config.json, .safetensors and a tokenizer."""
    output: str
    """Output directory of a run that has made no step yet."""
    tokenizer: str = ""
    """A tokenizer as data.tokenizer names it; empty: the one in the input directory."""
    mesh: str = "fsdp=-1"
    """Devices along each mesh axis. The checkpoint does not depend on it."""
    rules: str = "fsdp"
    """Sharding rules, as in training."""


def main(argv: list[str]) -> int:
    """Raises ConfigError and ShardingRuleError."""
    name, rest = (argv[0], argv[1:]) if argv else ("", [])
    if name == "export":
        _export(command(Export, rest, "Writes a run's weights as a Hugging Face directory."))
    elif name == "import":
        _import(command(Import, rest, "Writes the weights of a Hugging Face directory as step 0 of a run."))
    elif name in ("-h", "--help"):
        print(f"{__doc__}\n\n--help after either lists its options.")
    else:
        raise ConfigError(f"{name or 'nothing'} given; expected export or import, as in\n{__doc__}")
    return 0


def _export(options: Export) -> None:
    trained = _load(options.checkpoint, options)
    save(options.output, trained.layout, trained.params, dtype=options.dtype, tokenizer=trained.tokenizer)
    distributed.print_on_process0(f"wrote step {trained.step} of {options.checkpoint} to {options.output} as {options.dtype}")


def _import(options: Import) -> None:
    trained = _load(options.input, options)
    config = dataclasses.replace(trained.config, output=options.output, checkpoint=CheckpointConfig(resume="never"))
    with Checkpoints(config) as checkpoints:
        (kept := Path(options.output).expanduser() / TOKENIZER).mkdir(parents=True, exist_ok=True)
        trained.tokenizer.save(kept)
        optimizer = Optimizer(config.optimizer, config.train.steps)
        state = fresh_state(trained.layout, optimizer, trained.params)
        data = {"position": 0, "corpus": f"none: weights of {options.input}", "tokenizer": trained.tokenizer.fingerprint}
        checkpoints.save(0, state, data, trained.layout, optimizer, last=True)
    distributed.print_on_process0(f"wrote the weights of {options.input} to {options.output} as step 0")


def _load(path: str, options: Export | Import) -> Trained:
    return ModelArguments(path, mesh=options.mesh, rules=options.rules, tokenizer=options.tokenizer, compile_cache="").load()
