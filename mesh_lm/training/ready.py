"""Checks of what a run needs in addition to a config that fits its devices, before the first device
is used.
"""

from __future__ import annotations

import errno
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from mesh_lm.config import TrainConfig
from mesh_lm.data import blend, sources
from mesh_lm.data.epochs import epochs_problems
from mesh_lm.data.indexed import bin_path, idx_path
from mesh_lm.errors import ConfigError, StorageError, listed, storage_failed
from mesh_lm.network.environment import HEARTBEAT
from mesh_lm.network.process_slot import ProcessSlot
from mesh_lm.optim.rules import rule_name
from mesh_lm.output import is_utf_8
from mesh_lm.report.weights_and_biases import require_login

if TYPE_CHECKING:
    from mesh_lm.data.dataset import Dataset

_PROBE = 4096
"""Bytes that are written to find out whether the output's disk takes any."""
_REMEDIES = {
    errno.ENOSPC: "make room on that disk",
    errno.EDQUOT: "make room within your quota of that disk",
    errno.EROFS: "mount that disk writable",
    errno.EACCES: "give this user permission to write there",
    errno.EPERM: "give this user permission to write there",
    errno.EIO: "repair that disk or its mount",
    errno.ESTALE: "mount that disk again",
    errno.ENOTDIR: "move that file away",
    errno.ENAMETOOLONG: "shorten its name",
}
"""Actions, other than another output, that would work after an error in writing there."""
_STATE_BYTES = {"adamw": 12, "adamw8": 6, "muon": 8, "lion": 8}
"""Bytes of a checkpoint per parameter, at least; of other optimizers only the weights are
counted."""


def require_ready(
    config: TrainConfig,
    data: Dataset | None = None,
    *,
    thorough: bool = False,
) -> None:
    """Raises ConfigError that lists what is missing: text to train on, a writable output, a login
    to Weights & Biases.

    Raises StorageError if nothing but a full or failing disk is in the way.

    A command calls it before JAX is imported, and `mesh_lm.training.session.start` calls it again,
    thorough, before the processes are connected. Every process checks the output if it is the only
    one or has a launcher; process 0 alone checks tokenizer, epochs and login.

    Args:
      data: the dataset that the run was given, instead of what the config names.
      thorough: also checks whether the output has room for a checkpoint, whether the model has the
        ids of the tokenizer, for a new run data.max_epochs, if the text was counted before, and
        what `check` says, as far as the devices are known. It imports Flax.
    """
    slot = ProcessSlot.of(config.launch)
    is_first = slot is None or slot.index == 0
    # A problem of one host ends the other processes, too, if a launcher sees it; else it is found
    # when they are connected, and all report it.
    checks_files = slot is None or slot.count == 1 or HEARTBEAT in os.environ
    problems: list[str] = []
    if data is None:
        problems += _data_problems(config, checks_files=checks_files)
    has_data = not problems
    checks: list[Callable[[], None]] = []
    if checks_files:
        checks.append(lambda: _require_output(config, checks_room=thorough))
    if config.wandb and is_first:  # the process that writes the metrics
        checks.append(lambda: require_login(config.wandb))
    disk_failed = False
    for check in checks:
        try:
            check()
        except ConfigError as error:
            problems.append(str(error))
            disk_failed = disk_failed or storage_failed(error)
    if thorough and checks_files and is_first:
        # A blend has its tokenizer with it.
        if data is None and (has_data or not config.data.blend):
            problems += _vocabulary_problems(config)
        # A run that has begun only warns.
        if has_data and not _has_begun(config):
            problems += _epoch_problems(config, data)
    if problems and thorough:  # otherwise `check` reports its own when the devices are there
        problems += _config_problems(config)
    if not problems:
        return
    problems = list(dict.fromkeys(problems))  # several checks need the tokenizer
    message = listed("this run cannot start", problems)
    if disk_failed and len(problems) == 1:
        raise StorageError(message)
    raise ConfigError(message)


def _data_problems(config: TrainConfig, *, checks_files: bool) -> Iterator[str]:
    """Yields why there is nothing to train on, without reading it. checks_files: also whether its
    files are missing.
    """
    data = config.data
    if not (data.path or data.blend):
        yield (
            "it has no data: set data.path to a text (.txt, .jsonl, .parquet, or a directory of "
            "such files), or data.blend to what `mesh-lm prepare` wrote, such as "
            "0.7,data/web,0.3,data/code (docs/data.md; from the Hugging Face Hub: "
            "docs/prepare.md). To try a config, data.path=stdlib gives it 10 MB of Python source "
            "code, enough for a few steps of a large model"
        )
    try:
        prefixes = blend.parse(data.blend)[0] if data.blend else []
        heldout = blend.parse(data.valid_blend, "data.valid_blend")[0] if data.valid_blend else []
    except ConfigError as error:
        yield str(error)
        return
    if not checks_files:
        return
    for field, field_prefixes in (("blend", prefixes), ("valid_blend", heldout)):
        for prefix in field_prefixes:
            files = (bin_path(prefix), idx_path(prefix))
            missing = [str(path) for path in files if not path.expanduser().is_file()]
            if not missing:
                continue
            fix = f"mesh-lm prepare --input=TEXT --output={prefix} writes both"
            if prefix.endswith((".bin", ".idx")):
                fix = "leave out .bin"
            yield f"data.{field}={prefix}: no such file: {' and '.join(missing)}; {fix}"
    if data.path and not prefixes:
        try:
            sources.require_apart(data.path, config.outputs)
            if not Path(data.path).expanduser().is_dir():
                sources.find(data.path, data.text_field)
        except ConfigError as error:
            yield str(error)


def _require_output(config: TrainConfig, *, checks_room: bool) -> None:
    """Raises ConfigError unless the output is, or can become, a directory that can be written.

    checks_room: also if its disk has less room than one checkpoint needs. An error of the disk has
    an OSError as its cause, by which `storage_failed` knows it.
    """
    output = config.output
    if not output or "://" in output:
        raise ConfigError(
            f"output={output} must be a directory; mount a bucket as one (gcsfuse, mountpoint-s3)"
        )
    path = Path(output).expanduser().absolute()
    if not is_utf_8(path):
        raise ConfigError(
            f"output={output}: names of this locale are in {sys.getfilesystemencoding()}, and "
            "checkpoints are written to names in UTF-8; set the environment variable PYTHONUTF8=1, "
            "or name the output in ASCII letters"
        )
    existing = path
    try:
        while not existing.exists():
            existing = existing.parent
        with tempfile.TemporaryFile(dir=existing, prefix=".mesh_lm-") as probe:
            probe.write(bytes(_PROBE))
        disk = shutil.disk_usage(existing)
    except OSError as error:
        location = f" ({existing})" if existing != path else ""
        remedy = _REMEDIES.get(error.errno or 0, "")
        alternative = f", or {remedy}" if remedy else ""
        raise ConfigError(
            f"output={output} cannot be written: {error.strerror}{location}; "
            f"set another output directory{alternative}"
        ) from error
    if not checks_room or not disk.total:  # some network file systems say 0 of 0
        return
    needed = _state_bytes(config)
    if disk.free < needed:
        raise ConfigError(
            f"output={output}: its disk has {_size(disk.free)} left, and one checkpoint of this "
            f"model needs {_size(needed)} or more; make room there, or set another output"
        ) from OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _state_bytes(config: TrainConfig) -> float:
    """Returns the least size of a checkpoint, by the weights of the matmuls; 0 where they are not
    known.

    A model of the user's own may use a weight several times, or count attention among its FLOPs.
    """
    from mesh_lm.model import DecoderConfig  # here, because it imports Flax

    model = config.model
    if type(model) is not DecoderConfig or model.problems():  # which `check` reports
        return 0.0
    n_weights = (model.flops_per_token() - model.attention_flops_per_token()) / 6
    return n_weights * _STATE_BYTES.get(rule_name(config.optimizer.rule), 4)


def _has_begun(config: TrainConfig) -> bool:
    """Returns whether the output has a checkpoint."""
    return any((Path(config.output).expanduser() / "checkpoints").glob("[0-9]*"))


def _epoch_problems(config: TrainConfig, data: Dataset | None) -> list[str]:
    """Returns whether the text would be repeated too often, as far as it was counted before."""
    if not config.data.max_epochs:
        return []
    # Imported here, so that other problems are answered before JAX is imported.
    from mesh_lm.data.corpus import known_sources

    try:
        if data is None:
            sources = known_sources(config.data, config.outputs.values())
        else:
            sources = data.sources()
        return epochs_problems(config, sources)
    except ConfigError as error:
        return [str(error)]


def _vocabulary_problems(config: TrainConfig) -> list[str]:
    """Returns ids of the tokenizer that the model lacks, as a sentence."""
    from mesh_lm.data.corpus import vocabulary_problems

    return vocabulary_problems(config.data, config.model.vocab_size)


def _config_problems(config: TrainConfig) -> list[str]:
    """Returns the problems that `check` reports, as far as the number of devices is known before
    JAX has looked for them.
    """
    from mesh_lm import distributed
    from mesh_lm.training.check import check

    n_devices = distributed.expected_devices(config)
    if n_devices is None:
        return []
    try:
        check(config, n_devices)
    except ConfigError as error:
        return str(error).split("\n  - ")[1:]
    return []


def _size(n_bytes: float) -> str:
    """Returns a number of bytes as 3.1 GiB, or as 0.4 MiB."""
    return f"{n_bytes / 2**30:.1f} GiB" if n_bytes >= 2**30 else f"{n_bytes / 2**20:.1f} MiB"
