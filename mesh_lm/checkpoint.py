"""Checkpoints: one Orbax composite {state, data, metadata} per step, written in the background, restored onto any mesh.

The tree on disk is plain dicts keyed by parameter names, layers in model order, so that neither Flax, nor optax, nor the mesh and its
pipeline is part of the format.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import jax
import orbax.checkpoint as ocp
from orbax.checkpoint.checkpoint_managers import preservation_policy

from mesh_lm import launch
from mesh_lm.blueprint import Blueprint, Params
from mesh_lm.config import CheckpointConfig, ConfigError, TrainConfig, as_dict
from mesh_lm.optimizer import AdamW
from mesh_lm.step import State, abstract_state
from sharding_rules.rules import Kind

FORMAT = 1

_KINDS: dict[str, Kind] = {"params": "params", "mu": "optimizer", "nu": "optimizer"}
"""The parts of a state that a pipeline's stages divide, each with its column of the rules."""


@dataclasses.dataclass(frozen=True)
class Saved:
    """A complete checkpoint on disk. Its descriptions are here; its arrays stay there until they are asked for."""

    directory: Path
    """The directory of all checkpoints of its run."""
    step: int
    data: dict[str, Any]
    """The place in the data, as `Batches.state` gave it."""
    metadata: dict[str, Any]
    """config (as `as_dict` gives it), parameters (name -> [*shape, dtype]), format and versions."""
    _manager: ocp.CheckpointManager

    @property
    def path(self) -> Path:
        return self.directory / str(self.step)

    def state(self, abstract: State) -> State:
        """The leaves of `abstract` ({"params": ...} alone will do), layers in model order, with its shapes and shardings.

        Raises ConfigError for a checkpoint of another model, before any array is read.
        """
        self.require(abstract["params"])
        restore_args = ocp.checkpoint_utils.construct_restore_args(abstract)
        args = ocp.args.PyTreeRestore(abstract, restore_args=restore_args, partial_restore=True)  # pyright: ignore[reportCallIssue]
        return self._manager.restore(self.step, args=ocp.args.Composite(state=args))["state"]

    def resumed(self, blueprint: Blueprint, optimizer: AdamW) -> State:
        """The state as a step of this run takes it, on whatever mesh and in whatever stages. Raises as `state` does."""
        abstract = _each(partial(_in_model_order, blueprint), abstract_state(blueprint, optimizer))
        return _each(blueprint.by_stage, self.state(abstract))

    def params(self, blueprint: Blueprint) -> Params:
        """The weights alone, layers in model order. Raises as `state` does."""
        return self.state({"params": _in_model_order(blueprint, blueprint.shapes, "params")})["params"]

    def changed(self, config: TrainConfig) -> list[str]:
        """Config fields that differ from the run that wrote it, as "train.steps: 10 -> 20"."""
        return _differences(self.metadata["config"], as_dict(config))

    def require(self, params: Mapping[str, Any]) -> None:
        """Raises ConfigError where its parameters do not have the names, shapes and dtypes of these (arrays or jax.ShapeDtypeStruct)."""
        saved, wanted = self.metadata["parameters"], {name: [*x.shape, str(x.dtype)] for name, x in params.items()}
        problems = [f"{name}: {saved.get(name, 'absent')} in the checkpoint, {wanted.get(name, 'absent')} in this config"
                    for name in sorted({*saved, *wanted}) if saved.get(name) != wanted.get(name)]  # fmt: skip
        if problems:
            shown = "\n  - ".join(problems[:8]) + (f"\n  - and {len(problems) - 8} more" if len(problems) > 8 else "")
            raise ConfigError(f"{self.path} is a checkpoint of another model\n  - {shown}\nset another output, or that model's config")


def find(path: Path | str) -> Saved | None:
    """The checkpoint that a path names: a run's output (its newest step), the `checkpoints` in it, or one step there; None for any other.

    Raises ConfigError for a run's directory without a complete checkpoint.
    """
    path = Path(path).expanduser().absolute()
    step = int(path.name) if path.name.isdecimal() and (path / "state").is_dir() else None
    directory = path.parent if step is not None else path / "checkpoints" if (path / "checkpoints").is_dir() else path
    if directory.name != "checkpoints" or not directory.is_dir():
        return None
    logging.getLogger("absl").setLevel(logging.ERROR)
    manager = ocp.CheckpointManager(directory, options=ocp.CheckpointManagerOptions(read_only=True), item_handlers=_handlers())
    if step is None and (step := manager.latest_step()) is None:
        raise ConfigError(f"no complete checkpoint in {directory}")
    return _read(manager, directory, step)


class Checkpoints:
    """The checkpoints of one run, in `<output>/checkpoints`. A context manager: leaving it waits for the save in flight."""

    def __init__(self, config: TrainConfig) -> None:
        """Raises ConfigError where the directory cannot be written, or holds other checkpoints than `checkpoint.resume` allows."""
        self.config, self.policy = config, config.checkpoint
        try:
            json.dumps(as_dict(config))
        except TypeError as error:
            raise ConfigError(f"the config is stored with every checkpoint, as JSON, and cannot be: {error}") from error
        self.directory = (Path(config.output).expanduser() / "checkpoints").absolute()
        self._manager = _open(self.directory, self.policy)
        step = self.latest()
        problem = {
            "auto": None,
            "required": None
            if step is not None
            else f"no checkpoint in {self.directory}, and checkpoint.resume=required; set the output of a run",
            "never": None
            if step is None
            else f"{self.directory} already holds step {step}, and checkpoint.resume=never; set another output",
        }[self.policy.resume]
        if problem:
            self.close()
            raise ConfigError(problem)

    def latest(self) -> int | None:
        """Newest complete step."""
        return self._manager.latest_step()

    def newest(self) -> Saved | None:
        """The newest complete checkpoint; None where there is none."""
        return None if (step := self.latest()) is None else _read(self._manager, self.directory, step)

    def due(self, step: int) -> bool:
        """Whether the policy saves after this many steps."""
        return self.policy.every > 0 and step % self.policy.every == 0

    def save(self, step: int, state: State, data: dict[str, Any], blueprint: Blueprint) -> State:
        """Copies the state off the devices and gives it back; the write goes on in the background. A step already saved is left alone.

        It takes the state over: to put the layers of a pipeline's stages into model order it needs the memory of one leaf more, and what
        an error here interrupts, such as a full disk, is lost.

        data: the place in the data after this step, as `Batches.state` gives it.
        """
        if step == self.latest():
            return state
        state = _each(blueprint.in_model_order, state)
        items = ocp.args.Composite(
            state=ocp.args.PyTreeSave(state),  # pyright: ignore[reportCallIssue]
            data=ocp.args.JsonSave(data),  # pyright: ignore[reportCallIssue]
            metadata=ocp.args.JsonSave(self._metadata(state)),  # pyright: ignore[reportCallIssue]
        )
        self._manager.save(step, args=items, force=True)
        return _each(blueprint.by_stage, state)  # Orbax has all of it in the host's memory

    def _metadata(self, state: State) -> dict[str, Any]:
        parameters = {name: [*x.shape, str(x.dtype)] for name, x in state["params"].items()}
        versions = {"jax": jax.__version__, "orbax": ocp.__version__}
        return {"format": FORMAT, "config": as_dict(self.config), "parameters": parameters, "versions": versions}

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Waits for the save in flight. A run that ends without a checkpoint leaves no empty directory behind."""
        self._manager.wait_until_finished()
        self._manager.close()
        with contextlib.suppress(OSError):
            self.directory.rmdir()
            self.directory.parent.rmdir()


def _open(directory: Path, policy: CheckpointConfig) -> ocp.CheckpointManager:
    logging.getLogger("absl").setLevel(logging.ERROR)
    with launch.together():
        try:
            directory.mkdir(parents=True, exist_ok=True)
            (probe := directory / f".probe-{jax.process_index()}").touch()
            probe.unlink(missing_ok=True)
        except OSError as error:
            raise ConfigError(f"cannot write checkpoints to {directory}: {error.strerror}") from error
    launch.require_shared(directory)
    options = ocp.CheckpointManagerOptions(preservation_policy=preservation_policy.LatestN(policy.keep), enable_async_checkpointing=True)
    return ocp.CheckpointManager(directory, options=options, item_handlers=_handlers())


def _handlers() -> dict[str, ocp.CheckpointHandler]:
    return {
        "state": ocp.PyTreeCheckpointHandler(use_ocdbt=True, use_zarr3=True),
        "data": ocp.JsonCheckpointHandler(),
        "metadata": ocp.JsonCheckpointHandler(),
    }


def _read(manager: ocp.CheckpointManager, directory: Path, step: int) -> Saved:
    described = manager.restore(step, args=ocp.args.Composite(metadata=ocp.args.JsonRestore(), data=ocp.args.JsonRestore()))
    return Saved(directory, step, described["data"], described["metadata"], manager)


def _in_model_order(blueprint: Blueprint, tree: Mapping[str, jax.ShapeDtypeStruct], kind: Kind) -> dict[str, jax.ShapeDtypeStruct]:
    """What `Blueprint.in_model_order` would make of arrays like these."""
    where = blueprint.canonical_shardings(kind)
    return {name: jax.ShapeDtypeStruct(blueprint.shapes[name].shape, x.dtype, sharding=where[name]) for name, x in tree.items()}


def _each(move: Callable[[Any, Kind], Any], state: State) -> State:
    return state | {part: move(state[part], kind) for part, kind in _KINDS.items() if part in state}


def _differences(saved: Any, now: Any, path: str = "") -> list[str]:
    if isinstance(saved, dict) and isinstance(now, dict):
        keys = list(dict.fromkeys([*saved, *now]))
        return [d for key in keys for d in _differences(saved.get(key), now.get(key), f"{path}.{key}" if path else key)]
    return [] if saved == now else [f"{path}: {saved} -> {now}"]
