"""The side of one process: starting JAX, exchanging values and errors with the other processes, and
stopping.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import secrets
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

from mesh_lm import output, strict_json
from mesh_lm.config import TrainConfig, as_dict
from mesh_lm.distributed import compile_cache, cpu, gpu, host_memory
from mesh_lm.distributed.description import describe
from mesh_lm.distributed.heartbeat import Heartbeat
from mesh_lm.distributed.phases import Phases
from mesh_lm.distributed.prefix import log_prefix
from mesh_lm.errors import ConfigError, ReplacedError, StorageError, storage_failed
from mesh_lm.network.environment import ELASTIC
from mesh_lm.network.exit_status import (
    EXIT_CANNOT,
    EXIT_FEWER,
    EXIT_INTERRUPTED,
    EXIT_REPLACED,
    EXIT_STALLED,
    EXIT_UNEXPECTED,
)
from mesh_lm.network.process_slot import ProcessSlot
from mesh_lm.network.rendezvous import Description, RendezvousFailed, meet
from mesh_lm.network.secret import Secret
from mesh_lm.network.wire import is_loopback
from sharding_rules import ShardingRuleError

T = TypeVar("T")
_FAREWELL = 5.0
"""Seconds that a failed process waits for the others to disconnect."""
_TEXT = 4096
"""Characters of an error that are sent to the other processes."""
_SHOWN = 200
"""Characters of a value in a message; longer ones are truncated."""


class FewerNodes(Exception):
    """This process's mesh needs fewer nodes than there are. The launcher has been informed."""


def run(main: Callable[[T], int], argv: T) -> int:
    """Runs a command and returns its exit status.

    A user's mistake prints one message; no process waits for one that has failed.
    """
    try:
        status = main(argv)
        _drop_unwritable_output()
        return status
    except (ConfigError, ShardingRuleError) as error:
        with contextlib.suppress(OSError):
            print(f"{log_prefix()}error: {error}", file=sys.stderr, flush=True)
        status = _status_of_mistake(error)
    except FewerNodes:
        status = EXIT_FEWER
    except KeyboardInterrupt:
        with contextlib.suppress(OSError):
            print(f"{log_prefix()}stopped by Ctrl-C", file=sys.stderr, flush=True)
        status = EXIT_INTERRUPTED
    except Exception as error:
        with contextlib.suppress(OSError):
            traceback.print_exc()
        status = EXIT_STALLED if storage_failed(error) else EXIT_UNEXPECTED

    if jax.distributed.is_initialized():
        # JAX's own exit waits minutes for processes that may themselves wait for this one.
        farewell = threading.Thread(target=jax.distributed.shutdown, daemon=True)
        farewell.start()
        farewell.join(_FAREWELL)
        _drop_unwritable_output()
        os._exit(status)
    _drop_unwritable_output()
    return status


def _status_of_mistake(error: Exception) -> int:
    if isinstance(error, ReplacedError):
        return EXIT_REPLACED
    if storage_failed(error):
        return EXIT_STALLED
    if isinstance(error, RendezvousFailed):
        return EXIT_UNEXPECTED  # another attempt may succeed
    return EXIT_CANNOT


def _drop_unwritable_output() -> None:
    """Discards output that a full disk or a pipe without a reader does not accept.

    Python would exit with status 120.
    """
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def start(
    config: TrainConfig, command: Mapping[str, Any] | None = None, phases: Phases | None = None
) -> None:
    """Sets up JAX and, if the run has several processes, connects them. Must run before the first
    use of a device; repeating it later with the same config has no effect.

    command: further values that must be equal on all processes. phases: this process's progress,
    for the launcher.

    Raises ConfigError if a device has been used already, a process does not connect, or two differ
    in config, code or versions.
    """
    output.accept_any_text()
    Heartbeat(phases or Phases()).start()
    launch = config.launch
    _set_cpu_devices(launch.cpu_devices)
    if launch.compile_cache:
        compile_cache.use(launch.compile_cache)
    slot = ProcessSlot.of(launch)

    flags = _set_gpu_flags(config)
    gpu.set_memory()
    if config.optimizer.offload:
        host_memory.raise_limit()
    gpu.choose_platform()
    cpu.set_threads(slot.count if slot else 1)
    if flags and (slot is None or slot.index == 0):
        print(flags, flush=True)
    if slot and not jax.distributed.is_initialized():
        description = describe(_shared(config), command or {})
        join(slot, launch.timeout, config.health.heartbeat, description)


def _set_cpu_devices(n_devices: int) -> None:
    """n_devices: 0 leaves JAX's choice as it is."""
    if n_devices in (0, jax.config.values["jax_num_cpu_devices"]):
        return
    try:
        jax.config.update("jax_num_cpu_devices", n_devices)
    except RuntimeError as error:
        raise ConfigError(
            f"launch.cpu_devices={n_devices} must be set before JAX uses a device, "
            "and this program has used one, perhaps for an earlier run: set it for the first "
            "run, or start another process (in a notebook: restart the kernel)"
        ) from error


def _set_gpu_flags(config: TrainConfig) -> str:
    """Sets XLA's flags for GPUs, and returns the lines to print."""
    autotuning = None
    if config.launch.deterministic:
        autotuning = Path(config.output).expanduser().absolute() / "autotuning"
    flags = gpu.set_flags(
        config.launch.xla_flags,
        pipeline=config.mesh.pipeline != 1,
        pairs=config.pipeline.pair_layers,
        deterministic=autotuning,
    )
    if autotuning:  # otherwise JAX would use the cache that all runs share
        jax.config.update("jax_persistent_cache_enable_xla_caches", "none")
    return flags


def _shared(config: TrainConfig) -> dict[str, Any]:
    """Returns the config without the one field that differs between processes."""
    plain = as_dict(config)
    plain["launch"].pop("index")
    return plain


def join(slot: ProcessSlot, timeout: float, heartbeat: float, description: Description) -> None:
    """Connects this process to the others.

    heartbeat: seconds of silence after which JAX ends the others. Raises as `start`.
    """
    meet(slot, timeout, description, Secret.shared())
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    host, _port = slot.address
    jax.distributed.initialize(
        coordinator_address=slot.coordinator,
        num_processes=slot.count,
        process_id=slot.index,
        local_device_ids=slot.local_devices,
        cluster_detection_method="deactivate",  # with Slurm it would use one GPU per task
        initialization_timeout=int(timeout),
        heartbeat_timeout_seconds=int(heartbeat),
        # None: all addresses of this host
        coordinator_bind_address=slot.coordinator if is_loopback(host) else None,
    )


def expected_devices(config: TrainConfig) -> int | None:
    """Returns the number of devices that the run will have, without starting JAX; None if only JAX
    can tell.
    """
    if os.environ.get(ELASTIC):  # fewer nodes may have come
        return None
    if gpu.visible(os.environ):
        sizes = config.mesh.sizes().values()
        return None if -1 in sizes else math.prod(sizes)
    slot = ProcessSlot.of(config.launch)
    n_processes = slot.count if slot else 1
    return n_processes * (config.launch.cpu_devices or cpu.local_devices())


def print_on_process0(text: str) -> None:
    """Prints on process 0 only. A log that cannot be written (full disk, no reader) is ignored."""
    if jax.process_index() == 0:
        with contextlib.suppress(OSError):
            print(text, flush=True)


@contextlib.contextmanager
def process0_first(name: str) -> Iterator[None]:
    """Runs the block on process 0 first, then on the others.

    They find its files on a shared disk, or make their own. name: the same on all processes.
    """
    if jax.process_index() > 0:
        multihost_utils.sync_global_devices(name)
    try:
        yield
    finally:  # after an error on process 0 the others fail, too, and report it
        if jax.process_index() == 0 and jax.process_count() > 1:
            multihost_utils.sync_global_devices(name)


@contextlib.contextmanager
def collective_errors(mistake: Callable[[str], Exception] = ConfigError) -> Iterator[None]:
    """Raises on every process if the block raises on any, so that none waits for one that failed.

    mistake: the other processes raise mistake("process 1: its message") for a ConfigError,
    StorageError if a disk failed, and RuntimeError for any other error.
    """
    error = None
    try:
        yield
    except Exception as caught:
        error = caught
    report = None
    if error:
        report = [_kind(error), (str(error) or repr(error))[:_TEXT]]
    reports = gather_from_all(report)
    if error:
        raise error
    exceptions = {"mistake": mistake, "storage": StorageError, "other": RuntimeError}
    for process, report in enumerate(reports):
        if report:
            kind, text = report
            raise exceptions[kind](f"process {process}: {text}")


def _kind(error: Exception) -> str:
    if storage_failed(error):
        return "storage"
    return "mistake" if isinstance(error, ConfigError) else "other"


def require_shared(directory: Path) -> None:
    """Raises ConfigError on every process unless all of them see the same existing `directory`."""
    if jax.process_count() == 1:
        return
    number = int(multihost_utils.broadcast_one_to_all(np.int32(secrets.randbits(31))))
    mark = directory / f".shared-{number}"
    with collective_errors():
        if jax.process_index() == 0:
            mark.touch()
    with collective_errors():
        if not mark.exists():
            raise ConfigError(
                f"{directory} is not the directory that process 0 sees; set output to a directory "
                "that all hosts share"
            )
    if jax.process_index() == 0:
        mark.unlink(missing_ok=True)


def assert_equal_across_processes(name: str, value: str, fix: str) -> None:
    """Raises ConfigError on every process unless all of them have the same `value`.

    name, fix: the value's name, and advice, for the message. That has the values of process 0 and
    of the first process with another, and the names of their hosts.
    """
    if jax.process_count() == 1:
        return
    answers = gather_from_all([_shortened(value), socket.gethostname()])
    value0, host0 = answers[0]
    for process, (other, host) in enumerate(answers):
        if other != value0:
            raise ConfigError(
                f"the processes do not agree on {name}: {value0} on process 0 on {host0}, {other} "
                f"on process {process} on {host}; {fix}"
            )


def _shortened(value: str) -> str:
    """Returns a value for a message. Long ones that differ do so in their digests."""
    if len(value) < _SHOWN:
        return value
    digest = hashlib.sha256(value.encode()).hexdigest()[:12]
    return f"{value[:180]}... (digest {digest})"


def broadcast_from_process0(value: Any) -> Any:
    """Returns process 0's value (JSON) on every process."""
    if jax.process_count() == 1:
        return value
    return gather_from_all(value if jax.process_index() == 0 else None)[0]


def gather_from_all(value: Any) -> list[Any]:
    """Returns the values (JSON) of all processes, by process index.

    A collective: every process must call it.
    """
    if jax.process_count() == 1:
        return [value]
    encoded = json.dumps([value]).encode()
    # Arrays of a collective have one shape: first the sizes, then rows of the largest size.
    sizes = np.asarray(multihost_utils.process_allgather(np.int32(len(encoded)))).reshape(-1)
    row = np.frombuffer(encoded.ljust(int(sizes.max())), np.uint8)
    rows = np.asarray(multihost_utils.process_allgather(row))
    values = []
    for row, size in zip(rows, sizes, strict=True):
        (value,) = strict_json.loads(bytes(row[:size]), list, size=len(row))
        values.append(value)
    return values
