"""Checks of what a run needs in addition to a config that fits its devices, before the first device is used."""

from __future__ import annotations

from collections.abc import Iterator

from mesh_lm.config import TrainConfig
from mesh_lm.errors import ConfigError, listed
from mesh_lm.launch.process_slot import ProcessSlot
from mesh_lm.report.weights_and_biases import require_login


def require_ready(config: TrainConfig, *, has_data: bool = False) -> None:
    """Raises ConfigError that lists what is missing: data, unless the run was given some; a login to Weights & Biases."""
    if problems := list(_problems(config, has_data)):
        raise ConfigError(listed("this run cannot start", problems))


def _problems(config: TrainConfig, has_data: bool) -> Iterator[str]:
    if not (config.data.path or config.data.blend or has_data):
        yield (
            "it has no data: set data.path to a text, such as my_text.jsonl, or data.blend to tokenized files. To try a config, "
            "data.path=stdlib gives it 10 MB of Python source code, which a large model would soon know by heart"
        )
    slot = ProcessSlot.of(config.launch)
    if config.wandb and (slot is None or slot.index == 0):  # the process that writes the metrics
        try:
            require_login(config.wandb)
        except ConfigError as error:
            yield str(error)
