"""The options that all commands on a trained model share."""

from __future__ import annotations

import dataclasses
from typing import Literal

from mesh_lm import distributed
from mesh_lm.config import LaunchConfig, ModelConfig, TrainConfig, files
from mesh_lm.errors import ConfigError
from mesh_lm.inference.trained import TrainedModel
from sharding_rules import AXES, MeshConfig, preset


@dataclasses.dataclass(frozen=True)
class ModelArguments:
    """A trained model, and the devices to load it on."""

    checkpoint: str
    """A run's output directory (its newest checkpoint), one step in its `checkpoints`, or a Hugging Face model directory."""
    mesh: str = ""
    """Devices along each mesh axis, such as data=2,tensor=4; empty: as in training if that fits, else all along data."""
    rules: str = ""
    """Name of the sharding rules; empty: those of training."""
    tokenizer: str = ""
    """A tokenizer, as in data.tokenizer; empty: the one stored with the checkpoint."""
    config: str = ""
    """The config file of a custom model class, whose code is not stored in checkpoints."""
    dtype: Literal["trained", "float32", "bfloat16"] = "trained"
    """Dtype of matmuls and activations; trained: as in training."""
    cpu_devices: int = 0
    """Number of virtual CPU devices, to try a mesh on a laptop; 0: one."""
    compile_cache: str = LaunchConfig().compile_cache
    """Directory of JAX's persistent compilation cache; empty: off."""

    def load(self) -> TrainedModel:
        """Sets up JAX and reads the weights, each device its own shard. Raises as `TrainedModel.load` does."""
        mesh = _mesh(self.mesh)
        rules = preset(self.rules) if self.rules else None
        model = files.load(self.config).model if self.config else None
        options = LaunchConfig(cpu_devices=self.cpu_devices, compile_cache=self.compile_cache)
        distributed.start(TrainConfig(model=model or ModelConfig(), output=self.checkpoint, launch=options), dataclasses.asdict(self))
        dtype = "" if self.dtype == "trained" else self.dtype
        return TrainedModel.load(self.checkpoint, mesh=mesh, rules=rules, tokenizer=self.tokenizer, model=model, dtype=dtype)


def _mesh(text: str) -> MeshConfig | None:
    """Parses a mesh such as `data=2,tensor=4`; None for an empty text."""
    if not text:
        return None
    sizes: dict[str, int] = {}
    for word in text.split(","):
        axis, _, size = word.strip().partition("=")
        if axis not in AXES or axis in sizes or not size.removeprefix("-").isdigit():
            raise ConfigError(
                f"--mesh={text}: {word!r} is not a mesh axis and its size; give some of {', '.join(AXES)}, as in data=2,tensor=4"
            )
        sizes[axis] = int(size)
    return MeshConfig.of(sizes)
