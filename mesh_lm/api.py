"""The Python API, exported by the package itself: `import mesh_lm; run =
mesh_lm.train("gpt_tiny")`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mesh_lm.config import LaunchConfig, ModelConfig, TrainConfig, files
from mesh_lm.training.run import Callback as Callback
from mesh_lm.training.run import Run as Run
from sharding_rules import preset

if TYPE_CHECKING:
    import numpy as np

    from mesh_lm.data.dataset import Dataset
    from mesh_lm.inference.trained import TrainedModel
    from mesh_lm.optim import Rule
    from sharding_rules import MeshConfig, Rules
    from sharding_rules.lab import Report


def train(
    config: TrainConfig | str | Path,
    *,
    optimizer: Rule | None = None,
    data: Dataset | Sequence[int] | np.ndarray | None = None,
    callbacks: Sequence[Callback | object] = (),
) -> Run:
    """Trains a model, from the newest checkpoint of its output directory where there is one, and
    returns the run.

    Args:
      config: a config; or a config file, or the name of one that comes with mesh_lm, such as
        "gpt_tiny".
      optimizer: a rule, such as one of your own (`mesh_lm.optim.Rule`), instead of the config's
        optimizer.rule; None: that one. Clipping, the learning rate and weight decay are as the
        config's section `optimizer` says.
      data: used instead of the data that the config's section `data` names: token ids [n] of which
        the last twentieth is held out, or a dataset (`mesh_lm.data.dataset.Dataset`). The section
        still says how documents are separated, and how far to read ahead.
      callbacks: objects with some of the methods of `Callback`, called in this order.

    Raises:
      ConfigError: the config cannot run; the message has every reason at once.
    """
    from mesh_lm.training import loop

    config = _config(config)
    if data is not None:
        from mesh_lm.data.dataset import dataset_of

        data = dataset_of(data)
        section = dataclasses.replace(
            config.data, path="", blend=(), tokenizer="", tokenizer_vocab=0
        )
        config = dataclasses.replace(config, data=section)
    return loop.train(config, optimizer=optimizer, data=data, callbacks=callbacks)


def plan(
    config: TrainConfig | str | Path, target: str = "h100", devices: int = 0, *, flags: str = "auto"
) -> Report:
    """Compiles the training step for GPUs that you do not have, and returns a report on the
    compiled program; nothing is trained.

    Args:
      config: as for `train`.
      target: the GPU: h100, h200, a100 or b200.
      devices: the number of GPUs; 0: as many as the mesh says, with an axis of -1 the fewest whole
        nodes.
      flags: the set of XLA flags to compile with; auto: the run's own (launch.xla_flags).

    Raises:
      ConfigError: the config cannot run on that number of devices.
      LabError: the compiler for the target is missing (pip install -e '.[aot]'), or fails.
    """
    from mesh_lm.distributed import gpu
    from mesh_lm.planning.program import Program, devices_for, flags_of
    from sharding_rules.lab.flags import options

    config = _config(config)
    gpu.choose_platform()
    if flags == "auto":
        flags = flags_of(config, target)
    program = Program.of(config, target, devices_for(config, devices))
    report = program.compile(options(flags))
    return dataclasses.replace(report, logical=dict(program.layout.axes))


def load(
    path: str | Path,
    *,
    config: TrainConfig | ModelConfig | str | Path | None = None,
    mesh: MeshConfig | None = None,
    rules: Rules | str | None = None,
    tokenizer: str = "",
    dtype: str = "",
    cpu_devices: int = 0,
) -> TrainedModel:
    """Reads a trained model, each device its own part of the weights; it has `generate` and
    `score`.

    Args:
      path: the output directory of a run (its newest checkpoint), one step in its `checkpoints`, or
        a Hugging Face model directory.
      config: needed for a model class of your own, whose code a checkpoint does not hold: its
        config, or the file that makes it.
      mesh: the mesh over which the model is sharded; None: as in training where that fits, else a
        copy on each device.
      rules: the rules that shard it, or the name of a preset; None: likewise.
      tokenizer: as data.tokenizer; empty: the one beside the checkpoint or the weights.
      dtype: type of matmuls and activations; empty: as in training.
      cpu_devices: devices to divide the CPU into, before JAX has used one; 0: as they are.

    Raises:
      ConfigError: there is no such checkpoint, it is of another model, or its tokenizer is missing.
    """
    from mesh_lm import distributed
    from mesh_lm.inference.trained import TrainedModel

    if config is None or isinstance(config, ModelConfig):
        model = config
    else:
        model = _config(config).model
    options = dataclasses.replace(LaunchConfig(), cpu_devices=cpu_devices)
    distributed.start(TrainConfig(model=model or ModelConfig(), output=str(path), launch=options))
    if isinstance(rules, str):
        rules = preset(rules)
    return TrainedModel.load(
        path, mesh=mesh, rules=rules, tokenizer=tokenizer, model=model, dtype=dtype
    )


def _config(config: TrainConfig | str | Path) -> TrainConfig:
    if not isinstance(config, TrainConfig):
        config = files.load(str(config))
    if isinstance(config.rules, str):  # as on the command line
        config = dataclasses.replace(config, rules=preset(config.rules))
    return config
