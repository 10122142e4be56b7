"""The options that all commands on a trained model have. Needs no JAX."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, ClassVar, Literal

if TYPE_CHECKING:
    from mesh_lm.inference.trained import TrainedModel


@dataclasses.dataclass(frozen=True)
class ModelArguments:
    """Which model, and on what devices."""

    POSITIONAL: ClassVar[tuple[str, ...]] = ("checkpoint",)

    checkpoint: str
    """A run's output directory (its newest checkpoint), one step in its `checkpoints`, or a Hugging
    Face model directory."""
    mesh: str = ""
    """Devices along each mesh axis, as in data=2,tensor=4; empty: as in training where that fits,
    else all along data."""
    rules: str = ""
    """Sharding rules, as in training; empty: those of training."""
    tokenizer: str = ""
    """A tokenizer as data.tokenizer names it; empty: the one kept beside the checkpoint."""
    config: str = ""
    """The config file that defines your own model class; a checkpoint does not contain its code."""
    dtype: Literal["trained", "float32", "bfloat16"] = "trained"
    """Type of matmuls and activations; trained: as in training."""
    cpu_devices: int = 0
    """Number of devices that JAX makes of the CPU, to try a mesh on a laptop; 0: one."""
    compile_cache: str = "~/.cache/mesh_lm/xla"
    """Directory of JAX's persistent compilation cache; empty: off."""

    def load(self) -> TrainedModel:
        """Sets up JAX and reads the weights (`mesh_lm.inference.model_arguments.load`)."""
        from mesh_lm.inference.model_arguments import load  # here, so that --help needs no JAX

        # Without the options of a subclass, which are the command's.
        names = [field.name for field in dataclasses.fields(ModelArguments)]
        arguments = {name: getattr(self, name) for name in names}
        return load(**arguments, command=dataclasses.asdict(self))
