"""Reads one checkpoint: its descriptions, and its arrays, which are verified."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from etils import epath

from mesh_lm import distributed, strict_json
from mesh_lm.config import TrainConfig, as_dict
from mesh_lm.errors import ConfigError, listed
from mesh_lm.optim import Optimizer
from mesh_lm.output import is_utf_8
from mesh_lm.parallel.layout import ModelLayout, Params
from mesh_lm.state import FEEDBACK, State, initial_statistics
from mesh_lm.state.digest import combined, digests, leaf_name
from mesh_lm.state.diloco import WEIGHTS
from mesh_lm.state.disk_form import from_disk, stored

FORMAT = 3
"""Format 1 had neither digests nor the leaf `recent`; up to format 2 the parts were always params,
mu and nu (AdamW) and not listed."""

_SECTIONS = ("train", "pipeline", "optimizer", "data", "checkpoint", "health", "profile", "launch")
"""Sections of a config whose class is fixed."""


class DamagedCheckpoint(ConfigError):
    """The checkpoint differs from what was saved. `reasons` names files or leaves."""

    def __init__(self, path: Path, reasons: list[str]) -> None:
        super().__init__(listed(f"{path} is damaged", reasons))
        self.reasons = reasons


@dataclasses.dataclass(frozen=True)
class SavedCheckpoint:
    """A complete checkpoint on disk. Holds its descriptions; arrays are read on request."""

    directory: Path
    """The directory with all checkpoints of the run."""
    step: int
    data: dict[str, Any]
    """The data position, from `Batches.state`."""
    metadata: dict[str, Any]
    """step, config (from `as_dict`), parts (see `StateShapes`), digests (leaf -> 16 hex digits),
    format and versions. Checkpoints of earlier versions have no step there."""

    @property
    def path(self) -> Path:
        """The directory of this checkpoint."""
        return self.directory / str(self.step)

    @property
    def digests(self) -> dict[str, str]:
        """The digest (`mesh_lm.state.digest`) of every leaf; empty in format 1."""
        return self.metadata.get("digests", {})

    @classmethod
    def read(cls, directory: Path, step: int) -> SavedCheckpoint:
        """Reads the descriptions of a step. Raises DamagedCheckpoint if they are missing, not JSON,
        or were changed.
        """
        path = directory / str(step)
        with distributed.collective_errors(lambda reason: DamagedCheckpoint(path, [reason])):
            return cls(directory, step, **descriptions(path))

    def state(self, abstract: State) -> State:
        """Returns the verified leaves of `abstract` (which may be partial, such as {"params":
        ...}), layers in model order.

        Raises:
          ConfigError: the checkpoint is of another model; raised before any array is read.
          DamagedCheckpoint: arrays cannot be read or differ from those that were saved; the message
          names the leaves.
        """
        state = self._read(abstract)
        actual, saved = digests(state), self.digests.items()
        if mismatches := [
            f"{leaf}: digest {actual[leaf]}, saved as {was}"
            for leaf, was in saved
            if actual.get(leaf, was) != was
        ]:
            raise DamagedCheckpoint(self.path, mismatches)
        return self._of_this_step(state, abstract)

    def resumed(self, layout: ModelLayout, optimizer: Optimizer) -> State:
        """Returns the verified state for a step of this run, on any mesh, with any stages, flat or
        not.

        The error feedback of sums in int8 belongs to replicas: if the checkpoint has none, or that
        of other replicas, it starts from zero, which loses the rounding of one step, and process 0
        prints that. Raises as `state` does, and ConfigError for a checkpoint of another optimizer.
        """
        self._require_order(layout)
        wanted, saved = stored(layout, optimizer), self.digests
        kept, now = (
            tree.get(FEEDBACK, {}) for tree in (parts_of(self.metadata), described(wanted))
        )
        fresh: State = {}
        if kept != now:
            saved = {
                leaf: digest
                for leaf, digest in saved.items()
                if not leaf.startswith(f"{FEEDBACK}/")
            }
            if now:
                like = wanted.pop(FEEDBACK)
                fresh[FEEDBACK] = {
                    name: jnp.zeros(x.shape, x.dtype, device=x.sharding) for name, x in like.items()
                }
                why = (
                    "the checkpoint has that of other replicas"
                    if kept
                    else "the checkpoint has none"
                )
                distributed.print_on_process0(
                    f"the error feedback of gradients in int8 starts from zero: {why}"
                )
        state, mismatches = from_disk(layout, optimizer, self._read(wanted) | fresh, saved)
        if mismatches:
            raise DamagedCheckpoint(self.path, mismatches)
        return self._of_this_step(state, wanted)

    def params(self, layout: ModelLayout) -> Params:
        """Returns the weights and buffers, layers in model order. Raises as `state` does."""
        self._require_order(layout)
        self.require_model(layout)
        return {
            name: x for part in self.state(_weights(layout)).values() for name, x in part.items()
        }

    def _of_this_step(self, state: State, wanted: State) -> State:
        """Returns what is `wanted` of a state. Raises DamagedCheckpoint if it is of another step
        than the directory is named after.
        """
        if "step" not in self.metadata and (step := int(state["step"])) != self.step:
            raise DamagedCheckpoint(self.path, [misnamed(step)])
        return (
            state
            if "step" in wanted
            else {name: part for name, part in state.items() if name != "step"}
        )

    def _read(self, abstract: State) -> State:
        """Reads the arrays of `abstract` without comparing digests, and the step if no description
        has it. Raises as `state` does.
        """
        self.require(abstract)
        if "step" not in {**abstract, **self.metadata}:
            where = jax.tree.leaves(abstract)[0].sharding
            abstract = abstract | {
                "step": jax.ShapeDtypeStruct(
                    (), jnp.int32, sharding=jax.NamedSharding(where.mesh, jax.P())
                )
            }
        if "recent" in abstract and self.metadata["format"] == 1:
            recent = jax.device_put(initial_statistics(), abstract["recent"].sharding)
            return self._read(
                {name: leaf for name, leaf in abstract.items() if name != "recent"}
            ) | {"recent": recent}
        args = ocp.args.PyTreeRestore(
            abstract,
            restore_args=ocp.checkpoint_utils.construct_restore_args(abstract),
            partial_restore=True,
        )  # pyright: ignore[reportCallIssue]
        with distributed.collective_errors(lambda reason: DamagedCheckpoint(self.path, [reason])):
            try:
                state = array_handler().restore(epath.Path(self.path / "state"), args=args)
            except Exception as error:
                if not _proves_damage(error):
                    # out of memory, or a disk that does not respond: a later attempt may succeed
                    raise
                raise DamagedCheckpoint(
                    self.path, [f"its arrays cannot be read: {_root(error)}"]
                ) from error
            if absent := [
                leaf_name(path)
                for path, leaf in jax.tree_util.tree_leaves_with_path(state)
                if not isinstance(leaf, jax.Array)
            ]:
                raise DamagedCheckpoint(self.path, [f"{name}: is missing" for name in absent])
        return state

    @property
    def certificate(self) -> str:
        """The certificate of state and samples that a run prints when it saves and when it
        resumes.
        """
        return certificate(self.metadata, self.data)

    def changed(self, config: TrainConfig) -> list[str]:
        """Returns the config fields that differ from the run that saved the checkpoint, as
        "train.steps: 10 -> 20".
        """
        now = as_dict(config)
        # fields unknown to an older version had today's default
        known = as_dict(TrainConfig(config.model, config.output))
        before = {
            name: {**known[name], **each} if name in _SECTIONS else each
            for name, each in self.metadata["config"].items()
        }
        return differences(before, now)

    def _require_order(self, layout: ModelLayout) -> None:
        """Raises ConfigError if segments come in another order, which shapes may not reveal."""
        model = self.metadata["config"]["model"]
        saved, expected = (
            [each["name"] for each in model.get("segments", ())],
            [segment.name for segment in layout.segments],
        )
        if saved and saved != expected and sorted(saved) == sorted(expected):
            raise ConfigError(
                f"{self.path} is a checkpoint of another model: its segments are "
                f"{', '.join(saved)}, in this order, and those of this config "
                f"{', '.join(expected)}\nuse a new output directory, or that model's config"
            )

    def require_model(self, layout: ModelLayout) -> None:
        """Raises ConfigError if the checkpoint is of another model."""
        self.require({"buffers": {}, **_weights(layout)})

    def require(self, wanted: State) -> None:
        """Raises ConfigError if names, shapes or dtypes differ from `wanted` (arrays or
        jax.ShapeDtypeStruct).

        The checkpoint may have parts that are not in `wanted`, except the slots of another
        optimizer, and any error feedback.
        """
        on_disk, expected = parts_of(self.metadata), described(wanted)
        problems = []
        for part in ("params", "buffers"):
            if part in expected or (part in on_disk and "step" in wanted):
                before, now = on_disk.get(part, {}), expected.get(part, {})
                problems += [
                    (
                        f"{name}: {before.get(name, 'absent')} in the checkpoint, "
                        f"{now.get(name, 'absent')} in this config"
                    )
                    for name in sorted({*before, *now})
                    if before.get(name) != now.get(name)
                ]
        if problems:
            each = [
                {name.partition(".")[0] for name in tree["params"] if "." in name}
                for tree in (on_disk, expected)
            ]
            saved_in, expected_in = (
                ", ".join(sorted(some - other)) for some, other in (each, each[::-1])
            )
            if saved_in and expected_in:
                problems.insert(
                    0,
                    (
                        f"its layers are in {saved_in}; those of this config in {expected_in} "
                        "(model.segments)"
                    ),
                )
            message = listed(f"{self.path} is a checkpoint of another model", problems)
            raise ConfigError(f"{message}\nuse a new output directory, or that model's config")
        before, now = (_islands(tree) for tree in (on_disk, expected))
        if "step" in wanted and before != now:
            has, have = (
                f"{n} island{'s' * (n > 1)}" if n else "a run without an outer step"
                for n in (before, now)
            )
            every = self.metadata["config"].get("optimizer", {}).get("outer_steps", 0)
            fix = f"set optimizer.outer_steps={every} and mesh.island={max(1, before)}"
            fix += (
                f", or use a new output directory with init_from={self.path} to start from its "
                "weights"
            )
            raise ConfigError(
                f"{self.path} is a checkpoint of {has}, and this config is of {have}; {fix}"
            )
        kept = [part for part in {**on_disk, **expected} if part != FEEDBACK]
        if "step" in wanted and (
            different := [part for part in kept if on_disk.get(part) != expected.get(part)]
        ):
            raise ConfigError(self._other_optimizer(different, on_disk, expected))

    def _other_optimizer(
        self, different: Sequence[str], on_disk: StateShapes, expected: StateShapes
    ) -> str:
        name = self.metadata["config"].get("optimizer", {}).get("name", "adamw")

        def slots(tree: StateShapes) -> str:
            return (
                ", ".join(part for part in tree if part not in ("params", "buffers", FEEDBACK))
                or "nothing"
            )

        lines = [
            (
                f"{self.path} is a checkpoint of another optimizer: {name}, which keeps "
                f"{slots(on_disk)}; this config's keeps {slots(expected)}"
            )
        ]
        if slots(on_disk) == slots(expected):
            part = different[0]
            before, now = on_disk.get(part, {}), expected.get(part, {})
            leaf = next(n for n in sorted({*now, *before}) if now.get(n) != before.get(n))
            lines.append(
                f"{part}/{leaf}: {before.get(leaf, 'absent')} in the checkpoint, "
                f"{now.get(leaf, 'absent')} in this config"
            )
        return "\n".join(
            [
                *lines,
                (
                    f"set optimizer.name={name}, or use a new output directory with "
                    f"init_from={self.path} to start from its weights"
                ),
            ]
        )


def find(path: Path | str) -> SavedCheckpoint | None:
    """Returns the checkpoint of a run's output (its newest step), of its `checkpoints`, or of one
    step; None for any other path.

    All processes must call it and get the same result, because a run may be saving at the same
    time.

    Raises ConfigError if a run has no complete checkpoint, and DamagedCheckpoint for a damaged one.
    """
    directory, step = _located(path)
    if directory is None:
        return None
    if (
        step is None
        and (step := distributed.broadcast_from_process0(max(steps_in(directory), default=None)))
        is None
    ):
        raise ConfigError(f"no complete checkpoint in {directory}")
    return SavedCheckpoint.read(directory, step)


def config_in(path: Path | str) -> dict[str, Any] | None:
    """Returns the config, as JSON, of the checkpoint that `find` would return if no save ends
    meanwhile; None for any other path.

    It needs no JAX backend. Raises as `find`.
    """
    directory, step = _located(path)
    if directory is None or (
        step is None and (step := max(steps_in(directory), default=None)) is None
    ):
        return None
    return descriptions(directory / str(step))["metadata"]["config"]


def output_of(path: Path | str) -> Path | None:
    """Returns the output of the run that a path names, or is in, as for `find`; None for any other
    path. One process may call it alone.
    """
    directory, _ = _located(path)
    return directory.parent if directory else None


def _located(path: Path | str) -> tuple[Path | None, int | None]:
    """Returns the directory of checkpoints that a path names or is in, and the step if it names
    one.
    """
    path = Path(path).expanduser().absolute()
    step = (
        int(path.name)
        if names_a_step(path.name) and path.parent.name == "checkpoints" and path.is_dir()
        else None
    )
    directory = (
        path.parent
        if step is not None
        else path / "checkpoints"
        if (path / "checkpoints").is_dir()
        else path
    )
    if directory.name != "checkpoints" or not directory.is_dir():
        return None, None
    if not is_utf_8(directory):
        raise ConfigError(
            f"{directory}: names of this locale are in {sys.getfilesystemencoding()}, and "
            "checkpoints are read from names in UTF-8; set the environment variable PYTHONUTF8=1, "
            "or rename it to ASCII letters"
        )
    return directory, step


def steps_in(directory: Path) -> list[int]:
    """Returns the steps in a directory of checkpoints, ascending. A directory is named after its
    step when the save is complete.
    """
    return sorted(
        int(path.name) for path in directory.iterdir() if names_a_step(path.name) and path.is_dir()
    )


def names_a_step(name: str) -> bool:
    """Whether a run gives this name to a step; not to "0004", nor to digits of another script,
    although they are numbers.
    """
    return name.isdecimal() and name == str(int(name))


def misnamed_in(directory: Path) -> list[str]:
    """Returns the names of directories that are numbers, but not a step's name."""
    return sorted(
        path.name
        for path in directory.iterdir()
        if path.name.isdecimal() and not names_a_step(path.name) and path.is_dir()
    )


def array_handler() -> ocp.PyTreeCheckpointHandler:
    """Returns the handler that reads and writes the arrays of a checkpoint."""
    return ocp.PyTreeCheckpointHandler(use_ocdbt=True, use_zarr3=True)


def certificate(metadata: Mapping[str, Any], data: Mapping[str, Any]) -> str:
    """Returns the digest of all leaves and that of all samples read (`mesh_lm.data.loader`), for
    printing; independent of the mesh.
    """
    state = combined(metadata["digests"]) if metadata.get("digests") else "not recorded"
    return f"state {state}, samples {data.get('samples', 'not recorded')}"


def seal(data: Any, metadata: Mapping[str, Any]) -> str:
    """Returns the SHA-256 of both descriptions of a checkpoint without the field `seal`."""
    plain = {
        "data": data,
        "metadata": {key: value for key, value in metadata.items() if key != "seal"},
    }
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()


def descriptions(path: Path) -> dict[str, Any]:
    """Returns {"data": ..., "metadata": ...} of the checkpoint in this directory. Raises
    DamagedCheckpoint.
    """
    contents, reasons = {}, []
    for item in ("data", "metadata"):
        try:
            contents[item] = strict_json.read(path / item / "metadata")
        except FileNotFoundError:
            reasons.append(
                f"{item}/metadata is missing: the save, or a copy of it, is not complete"
            )
        except (IsADirectoryError, NotADirectoryError) as error:
            reasons.append(f"{item}/metadata is not a file: {error.strerror}")
        except ValueError as error:
            reasons.append(f"{item}/metadata cannot be read: {error}")
    if not reasons and not _sealed(**contents):
        reasons.append("data/metadata and metadata/metadata are not those that were written (seal)")
    number = path.name.partition(".")[0]
    if (
        not reasons
        and number.isdecimal()
        and contents["metadata"].get("step", int(number)) != int(number)
    ):
        reasons.append(misnamed(contents["metadata"]["step"]))
    if reasons:
        raise DamagedCheckpoint(path, reasons)
    return contents


def misnamed(step: int) -> str:
    """Returns the reason for which a checkpoint of this step is not used under the name of
    another.
    """
    return f"it is step {step} under another name; if it was renamed by hand, rename it to {step}"


def _sealed(data: Any, metadata: Any) -> bool:
    if not isinstance(data, dict) or not isinstance(metadata, dict):
        return False
    if metadata.get("format") == 1 and not {"seal", "digests"} & metadata.keys():
        return True  # format 1 had no seal
    return metadata.get("seal") == seal(data, metadata)


StateShapes = dict[str, dict[str, list[Any]]]
"""part -> name -> [*shape, dtype] for all arrays of a checkpoint but its counters."""


def described(tree: Mapping[str, Any]) -> StateShapes:
    """Returns the shapes of a tree of arrays or of jax.ShapeDtypeStruct."""
    return {
        part: {name: [*x.shape, str(x.dtype)] for name, x in leaves.items()}
        for part, leaves in tree.items()
        if isinstance(leaves, Mapping)
    }


def _islands(tree: StateShapes) -> int:
    """Returns the number of islands that have weights of their own; 0: there are none."""
    return next((shape[0] for shape in tree.get(WEIGHTS, {}).values()), 0)


def parts_of(metadata: Mapping[str, Any]) -> StateShapes:
    """Returns the shapes that a checkpoint of any format lists."""
    if "parts" in metadata:
        return metadata["parts"]
    return dict.fromkeys(("params", "mu", "nu"), metadata["parameters"])


def differences(saved: Any, now: Any, path: str = "") -> list[str]:
    """Returns the entries that differ between two nested dicts, as "train.steps: 10 -> 20"."""
    if isinstance(saved, dict) and isinstance(now, dict):
        keys = list(dict.fromkeys([*saved, *now]))
        return [
            d
            for key in keys
            for d in differences(saved.get(key), now.get(key), f"{path}.{key}" if path else key)
        ]
    return [] if saved == now else [f"{path}: {saved} -> {now}"]


def _weights(layout: ModelLayout) -> State:
    """Returns the abstract parameters and buffers of a model in a checkpoint, layers in model
    order.
    """
    where, tree = layout.canonical_shardings("params"), {}
    for name, s in layout.shapes.items():
        part = tree.setdefault("buffers" if name in layout.buffers else "params", {})
        part[name] = jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=where[name])
    return tree


def _proves_damage(error: BaseException) -> bool:
    """Whether an error is due to the files' contents. Orbax and TensorStore have no error classes
    for that.
    """
    message = f"{error!r} {_root(error)}"
    elsewhere = (
        "RESOURCE_EXHAUSTED",
        "UNAVAILABLE",
        "DEADLINE_EXCEEDED",
        "PERMISSION_DENIED",
        "Input/output error",
        "Stale file handle",
    )
    if isinstance(error, MemoryError | PermissionError | TimeoutError) or any(
        word in message for word in elsewhere
    ):
        return False
    return not isinstance(error, OSError) or isinstance(error, FileNotFoundError)


def _root(error: BaseException) -> str:
    """Returns the first line of the first error in a chain."""
    while error.__cause__ is not None:
        error = error.__cause__
    return (str(error).strip() or repr(error)).splitlines()[0][:300]
