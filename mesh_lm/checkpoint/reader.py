"""One checkpoint on disk: what it says of itself, and its arrays, verified as they are read."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from etils import epath

from mesh_lm import distributed
from mesh_lm.config import TrainConfig, as_dict
from mesh_lm.errors import ConfigError, listed
from mesh_lm.optim import Optimizer
from mesh_lm.parallel.layout import ModelLayout, Params
from mesh_lm.state import State, initial_statistics
from mesh_lm.state.digest import combined, digests, leaf_name
from mesh_lm.state.disk_form import from_disk, stored

FORMAT = 3
"""1 had neither digests nor the leaf `recent`; up to 2 the parts were params and the moments mu and nu of AdamW, and not declared."""

_SECTIONS = ("train", "pipeline", "optimizer", "data", "checkpoint", "health", "profile", "launch")
"""Sections of a config whose classes are always the same."""


class DamagedCheckpoint(ConfigError):
    """A checkpoint that is not what was saved. `reasons` names files or leaves."""

    def __init__(self, path: Path, reasons: list[str]) -> None:
        super().__init__(listed(f"{path} is damaged", reasons))
        self.reasons = reasons


@dataclasses.dataclass(frozen=True)
class SavedCheckpoint:
    """A complete checkpoint on disk. Its descriptions are here; its arrays stay there until they are asked for."""

    directory: Path
    """The directory of all checkpoints of its run."""
    step: int
    data: dict[str, Any]
    """The place in the data, as `Batches.state` gave it."""
    metadata: dict[str, Any]
    """config (as `as_dict` gives it), parts (see `StateShapes`), digests (leaf -> 16 hex digits), format and versions."""

    @property
    def path(self) -> Path:
        return self.directory / str(self.step)

    @property
    def digests(self) -> dict[str, str]:
        """Of every leaf, as `mesh_lm.state.digest` makes them; none in a checkpoint of format 1."""
        return self.metadata.get("digests", {})

    @classmethod
    def read(cls, directory: Path, step: int) -> SavedCheckpoint:
        """Its descriptions. Raises DamagedCheckpoint where they are missing, no JSON, or not those that were written."""
        path = directory / str(step)
        with distributed.collective_errors(lambda said: DamagedCheckpoint(path, [said])):
            return cls(directory, step, **descriptions(path))

    def state(self, abstract: State) -> State:
        """The leaves of `abstract` ({"params": ...} alone will do), layers in model order, with its shapes and shardings; verified.

        Raises:
          ConfigError: the checkpoint is of another model; raised before any array is read.
          DamagedCheckpoint: arrays cannot be read or differ from those that were saved; the message names the leaves.
        """
        state = self._read(abstract)
        found = digests(state)
        if wrong := [f"{leaf}: digest {found[leaf]}, saved as {was}" for leaf, was in self.digests.items() if found.get(leaf, was) != was]:
            raise DamagedCheckpoint(self.path, wrong)
        return state

    def resumed(self, layout: ModelLayout, optimizer: Optimizer) -> State:
        """The state as a step of this run takes it, on whatever mesh, in whatever stages and flat or not; verified.

        Raises as `state` does, and ConfigError for a checkpoint of another optimizer.
        """
        self._require_order(layout)
        state, wrong = from_disk(layout, optimizer, self._read(stored(layout, optimizer)), self.digests)
        if wrong:
            raise DamagedCheckpoint(self.path, wrong)
        return state

    def params(self, layout: ModelLayout) -> Params:
        """The weights and buffers alone, layers in model order. Raises as `state` does."""
        self._require_order(layout)
        self.require_model(layout)
        return {name: x for part in self.state(_weights(layout)).values() for name, x in part.items()}

    def _read(self, abstract: State) -> State:
        """The arrays of `abstract`, whose digests are not compared. Raises as `state` does."""
        self.require(abstract)
        if "recent" in abstract and self.metadata["format"] == 1:
            recent = jax.device_put(initial_statistics(), abstract["recent"].sharding)
            return self._read({name: leaf for name, leaf in abstract.items() if name != "recent"}) | {"recent": recent}
        args = ocp.args.PyTreeRestore(abstract, restore_args=ocp.checkpoint_utils.construct_restore_args(abstract), partial_restore=True)  # pyright: ignore[reportCallIssue]
        with distributed.collective_errors(lambda said: DamagedCheckpoint(self.path, [said])):
            try:
                state = array_handler().restore(epath.Path(self.path / "state"), args=args)
            except Exception as error:
                if not _proves_damage(error):
                    raise  # no memory, or a disk that does not answer: another time it may be read
                raise DamagedCheckpoint(self.path, [f"its arrays cannot be read: {_root(error)}"]) from error
            if absent := [leaf_name(path) for path, leaf in jax.tree_util.tree_leaves_with_path(state) if not isinstance(leaf, jax.Array)]:
                raise DamagedCheckpoint(self.path, [f"{name}: is missing" for name in absent])
        return state

    @property
    def certificate(self) -> str:
        """What a run prints when it saves and when it is resumed: with these weights, from this place in these data."""
        return certificate(self.metadata, self.data)

    def changed(self, config: TrainConfig) -> list[str]:
        """Config fields that differ from the run that wrote it, as "train.steps: 10 -> 20"."""
        now = as_dict(config)
        known = as_dict(TrainConfig(config.model, config.output))  # what an older version did not have, it did as is the default now
        before = {name: {**known[name], **each} if name in _SECTIONS else each for name, each in self.metadata["config"].items()}
        return differences(before, now)

    def _require_order(self, layout: ModelLayout) -> None:
        """Raises ConfigError where segments follow one another in another order: no shape would tell."""
        model = self.metadata["config"]["model"]
        theirs, ours = [each["name"] for each in model.get("segments", ())], [segment.name for segment in layout.segments]
        if theirs and theirs != ours and sorted(theirs) == sorted(ours):
            raise ConfigError(
                f"{self.path} is a checkpoint of another model: its segments are {', '.join(theirs)}, in this order, and those of this "
                f"config {', '.join(ours)}\nset another output, or that model's config"
            )

    def require_model(self, layout: ModelLayout) -> None:
        """Raises ConfigError for a checkpoint of another model."""
        self.require({"buffers": {}, **_weights(layout)})

    def require(self, wanted: State) -> None:
        """Raises ConfigError where its parts do not have the names, shapes and dtypes of these (arrays or jax.ShapeDtypeStruct).

        A part that is not asked for may be there, but for the slots of another optimizer.
        """
        has, asked = parts_of(self.metadata), described(wanted)
        problems = [
            f"{name}: {has.get(part, {}).get(name, 'absent')} in the checkpoint, {asked.get(part, {}).get(name, 'absent')} in this config"
            for part in ("params", "buffers") if part in asked or (part in has and "step" in wanted)
            for name in sorted({*has.get(part, {}), *asked.get(part, {})}) if has.get(part, {}).get(name) != asked.get(part, {}).get(name)
        ]  # fmt: skip
        if problems:
            each = [{name.partition(".")[0] for name in tree["params"] if "." in name} for tree in (has, asked)]
            theirs, ours = (", ".join(sorted(some - other)) for some, other in (each, each[::-1]))
            if theirs and ours:
                problems.insert(0, f"its layers are in {theirs}; those of this config in {ours} (model.segments)")
            told = listed(f"{self.path} is a checkpoint of another model", problems)
            raise ConfigError(f"{told}\nset another output, or that model's config")
        if "step" in wanted and (different := [part for part in {**has, **asked} if has.get(part) != asked.get(part)]):
            raise ConfigError(self._other_optimizer(different, has, asked))

    def _other_optimizer(self, different: Sequence[str], has: StateShapes, asked: StateShapes) -> str:
        name = self.metadata["config"].get("optimizer", {}).get("name", "adamw")

        def slots(tree: StateShapes) -> str:
            return ", ".join(part for part in tree if part not in ("params", "buffers")) or "nothing"

        lines = [f"{self.path} is a checkpoint of another optimizer: {name}, which keeps {slots(has)}; this config's keeps {slots(asked)}"]
        if slots(has) == slots(asked):
            part = different[0]
            ours, theirs = asked.get(part, {}), has.get(part, {})
            leaf = next(n for n in sorted({*ours, *theirs}) if ours.get(n) != theirs.get(n))
            lines.append(f"{part}/{leaf}: {theirs.get(leaf, 'absent')} in the checkpoint, {ours.get(leaf, 'absent')} in this config")
        return "\n".join([*lines, f"set optimizer.name={name}, or another output with init_from={self.path} to take its weights alone"])


def find(path: Path | str) -> SavedCheckpoint | None:
    """The checkpoint that a path names: a run's output (its newest step), the `checkpoints` in it, or one step there; None for any other.

    All processes must call it, and get the same: a run may be saving meanwhile.

    Raises ConfigError for a run's directory without a complete checkpoint, and DamagedCheckpoint for a damaged one.
    """
    path = Path(path).expanduser().absolute()
    step = int(path.name) if path.name.isdecimal() and path.parent.name == "checkpoints" and path.is_dir() else None
    directory = path.parent if step is not None else path / "checkpoints" if (path / "checkpoints").is_dir() else path
    if directory.name != "checkpoints" or not directory.is_dir():
        return None
    if step is None and (step := distributed.broadcast_from_process0(max(steps_in(directory), default=None))) is None:
        raise ConfigError(f"no complete checkpoint in {directory}")
    return SavedCheckpoint.read(directory, step)


def steps_in(directory: Path) -> list[int]:
    """The steps that a directory of checkpoints has, ascending: Orbax gives a directory its step's name when it is complete."""
    return sorted(int(path.name) for path in directory.iterdir() if path.name.isdecimal() and path.is_dir())


def array_handler() -> ocp.PyTreeCheckpointHandler:
    """Reads and writes the arrays of a checkpoint."""
    return ocp.PyTreeCheckpointHandler(use_ocdbt=True, use_zarr3=True)


def certificate(metadata: Mapping[str, Any], data: Mapping[str, Any]) -> str:
    """In words: the digest of all leaves, which does not depend on the mesh, and that of all samples read (`mesh_lm.data.loader`)."""
    state = combined(metadata["digests"]) if metadata.get("digests") else "not recorded"
    return f"state {state}, samples {data.get('samples', 'not recorded')}"


def seal(data: Any, metadata: Mapping[str, Any]) -> str:
    """SHA-256 of both descriptions of a checkpoint, its own field `seal` left out."""
    plain = {"data": data, "metadata": {key: value for key, value in metadata.items() if key != "seal"}}
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()


def descriptions(path: Path) -> dict[str, Any]:
    """{"data": ..., "metadata": ...} of the checkpoint in this directory. Raises DamagedCheckpoint."""
    found, reasons = {}, []
    for item in ("data", "metadata"):
        try:
            found[item] = json.loads((path / item / "metadata").read_text())
        except FileNotFoundError:
            reasons.append(f"{item}/metadata is missing: the save, or a copy of it, is not complete")
        except ValueError as error:
            reasons.append(f"{item}/metadata cannot be read: {error}")
    if not reasons and not _sealed(**found):
        reasons.append("data/metadata and metadata/metadata are not those that were written (seal)")
    if reasons:
        raise DamagedCheckpoint(path, reasons)
    return found


def _sealed(data: Any, metadata: Any) -> bool:
    if not isinstance(data, dict) or not isinstance(metadata, dict):
        return False
    if metadata.get("format") == 1 and not {"seal", "digests"} & metadata.keys():
        return True  # written before there was one
    return metadata.get("seal") == seal(data, metadata)


StateShapes = dict[str, dict[str, list[Any]]]
"""part -> name -> [*shape, dtype], of what a checkpoint holds but its counters."""


def described(tree: Mapping[str, Any]) -> StateShapes:
    """Of arrays or of jax.ShapeDtypeStruct."""
    return {
        part: {name: [*x.shape, str(x.dtype)] for name, x in leaves.items()} for part, leaves in tree.items() if isinstance(leaves, Mapping)
    }


def parts_of(metadata: Mapping[str, Any]) -> StateShapes:
    """What a checkpoint says that it holds, of any format."""
    if "parts" in metadata:
        return metadata["parts"]
    return dict.fromkeys(("params", "mu", "nu"), metadata["parameters"])


def differences(saved: Any, now: Any, path: str = "") -> list[str]:
    """Entries that differ between two nested dicts, as "train.steps: 10 -> 20"."""
    if isinstance(saved, dict) and isinstance(now, dict):
        keys = list(dict.fromkeys([*saved, *now]))
        return [d for key in keys for d in differences(saved.get(key), now.get(key), f"{path}.{key}" if path else key)]
    return [] if saved == now else [f"{path}: {saved} -> {now}"]


def _weights(layout: ModelLayout) -> State:
    """What a checkpoint holds of a model: its parameters and buffers, layers in model order."""
    where, tree = layout.canonical_shardings("params"), {}
    for name, s in layout.shapes.items():
        part = tree.setdefault("buffers" if name in layout.buffers else "params", {})
        part[name] = jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=where[name])
    return tree


def _proves_damage(error: BaseException) -> bool:
    """Whether it is what is on the disk that cannot be read. Orbax and TensorStore have no class of errors of their own for it."""
    said = f"{error!r} {_root(error)}"
    elsewhere = "RESOURCE_EXHAUSTED", "UNAVAILABLE", "DEADLINE_EXCEEDED", "PERMISSION_DENIED", "Input/output error", "Stale file handle"
    if isinstance(error, MemoryError | PermissionError | TimeoutError) or any(word in said for word in elsewhere):
        return False
    return not isinstance(error, OSError) or isinstance(error, FileNotFoundError)


def _root(error: BaseException) -> str:
    """The first line of what began a chain of errors."""
    while error.__cause__ is not None:
        error = error.__cause__
    return (str(error).strip() or repr(error)).splitlines()[0][:300]
