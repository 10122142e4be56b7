"""Reads one checkpoint: its descriptions, and its arrays, which are verified."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from etils import epath

from mesh_lm import distributed, strict_json
from mesh_lm.config import TrainConfig, as_dict
from mesh_lm.config.moved import migrated
from mesh_lm.errors import ConfigError, listed
from mesh_lm.optim import Optimizer
from mesh_lm.optim.rules import described_name
from mesh_lm.output import is_utf_8
from mesh_lm.parallel.layout import ModelLayout, Params
from mesh_lm.state import FEEDBACK, State, initial_statistics
from mesh_lm.state.digest import combined, digests, leaf_name, mismatches
from mesh_lm.state.diloco import WEIGHTS
from mesh_lm.state.disk_form import from_disk, stored

FORMAT = 3
"""Format 1 had neither digests nor the leaf `recent`; up to format 2 the parts were always params,
mu and nu (AdamW) and not listed."""

_SECTIONS = (
    "train",
    "pipeline",
    "optimizer",
    "diloco",
    "data",
    "checkpoint",
    "health",
    "profile",
    "launch",
)
"""Sections of a config whose class is fixed."""
_TRANSIENT_ERRORS = (
    "RESOURCE_EXHAUSTED",
    "UNAVAILABLE",
    "DEADLINE_EXCEEDED",
    "PERMISSION_DENIED",
    "Input/output error",
    "Stale file handle",
)
"""Words in messages of Orbax and TensorStore about memory, disks and networks, not contents."""

StateShapes = dict[str, dict[str, list[Any]]]
"""part -> name -> [*shape, dtype] for all arrays of a checkpoint but its counters."""


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
    def config(self) -> dict[str, Any]:
        """The config of the run that saved it, described with today's fields (`as_dict`)."""
        return migrated(self.metadata["config"])

    @property
    def digests(self) -> dict[str, str]:
        """The digest (`mesh_lm.state.digest`) of every leaf; empty in format 1."""
        return self.metadata.get("digests", {})

    @property
    def certificate(self) -> str:
        """The digests of state and samples that a run prints when it saves and when it resumes."""
        return certificate(self.metadata, self.data)

    @classmethod
    def read(cls, directory: Path, step: int) -> SavedCheckpoint:
        """Reads the descriptions of a step.

        Raises DamagedCheckpoint if they are missing, not JSON, or were changed.
        """
        path = directory / str(step)
        with distributed.collective_errors(lambda reason: DamagedCheckpoint(path, [reason])):
            return cls(directory, step, **descriptions(path))

    def state(self, abstract: State) -> State:
        """Returns the verified leaves of `abstract`, layers in model order.

        Args:
          abstract: a state of jax.ShapeDtypeStruct, which may be partial, such as {"params": ...}.

        Raises:
          ConfigError: the checkpoint is of another model; raised before any array is read.
          DamagedCheckpoint: arrays cannot be read or differ from those that were saved; the message
            names the leaves.
        """
        state = self._read(abstract)
        problems = mismatches(digests(state), self.digests)
        if problems:
            raise DamagedCheckpoint(self.path, problems)
        return self._require_step(state, abstract)

    def resumed(self, layout: ModelLayout, optimizer: Optimizer) -> State:
        """Returns the verified state for a step of this run, on any mesh, with any stages, flat or
        not.

        The error feedback of sums in int8 belongs to replicas: if the checkpoint has none, or that
        of other replicas, it starts from zero, which loses the rounding of one step, and process 0
        prints that. Raises as `state` does, and ConfigError for a checkpoint of another optimizer.
        """
        self._require_order(layout)
        abstract = stored(layout, optimizer)
        saved_digests = self.digests
        new_feedback: State = {}
        saved_feedback_shapes = parts_of(self.metadata).get(FEEDBACK, {})
        feedback_shapes = state_shapes(abstract).get(FEEDBACK, {})
        if saved_feedback_shapes != feedback_shapes:
            saved_digests = {
                leaf: digest
                for leaf, digest in saved_digests.items()
                if not leaf.startswith(f"{FEEDBACK}/")
            }
            if feedback_shapes:
                new_feedback[FEEDBACK] = {
                    name: jnp.zeros(x.shape, x.dtype, device=x.sharding)
                    for name, x in abstract.pop(FEEDBACK).items()
                }
                cause = (
                    "the checkpoint has that of other replicas"
                    if saved_feedback_shapes
                    else "the checkpoint has none"
                )
                distributed.print_on_process0(
                    f"the error feedback of gradients in int8 starts from zero: {cause}"
                )
        tree = self._read(abstract) | new_feedback
        state, problems = from_disk(layout, optimizer, tree, saved_digests)
        if problems:
            raise DamagedCheckpoint(self.path, problems)
        return self._require_step(state, abstract)

    def params(self, layout: ModelLayout) -> Params:
        """Returns the weights and buffers, layers in model order. Raises as `state` does."""
        self._require_order(layout)
        self.require_model(layout)
        state = self.state(_abstract_weights(layout))
        return {name: x for part in state.values() for name, x in part.items()}

    def require_model(self, layout: ModelLayout) -> None:
        """Raises ConfigError if the checkpoint is of another model."""
        self._require_shapes({"buffers": {}, **_abstract_weights(layout)})

    def changed(self, config: TrainConfig) -> list[str]:
        """Returns the config fields that differ from the run that saved the checkpoint, as
        "train.steps: 10 -> 20".
        """
        # Fields unknown to an older version had today's default.
        defaults = as_dict(TrainConfig(config.model, config.output))
        saved = {name: defaults[name] for name in _SECTIONS}
        for name, section in self.config.items():
            saved[name] = {**defaults[name], **section} if name in _SECTIONS else section
        default_rule = defaults["optimizer"]["rule"]
        saved_rule = saved["optimizer"]["rule"]
        if saved_rule["class"] == default_rule["class"]:
            saved["optimizer"]["rule"] = default_rule | saved_rule
        return differences(saved, as_dict(config))

    def _read(self, abstract: State) -> State:
        """Returns the arrays of `abstract` without comparing digests, and the step if no
        description has it.

        Raises as `state` does.
        """
        self._require_shapes(abstract)
        if "step" not in abstract and "step" not in self.metadata:
            mesh = jax.tree.leaves(abstract)[0].sharding.mesh
            step = jax.ShapeDtypeStruct((), jnp.int32, sharding=jax.NamedSharding(mesh, jax.P()))
            abstract = abstract | {"step": step}
        absent_leaves: State = {}
        if "recent" in abstract and self.metadata["format"] == 1:
            absent_leaves["recent"] = jax.device_put(
                initial_statistics(), abstract["recent"].sharding
            )
            abstract = {name: leaf for name, leaf in abstract.items() if name != "recent"}

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
                    # Out of memory, or a disk that does not respond: a later attempt may succeed.
                    raise
                raise DamagedCheckpoint(
                    self.path, [f"its arrays cannot be read: {_root_cause(error)}"]
                ) from error
            missing = [
                leaf_name(path)
                for path, leaf in jax.tree_util.tree_leaves_with_path(state)
                if not isinstance(leaf, jax.Array)
            ]
            if missing:
                raise DamagedCheckpoint(self.path, [f"{name}: is missing" for name in missing])
        return state | absent_leaves

    def _require_step(self, state: State, abstract: State) -> State:
        """Returns the leaves of `abstract`, that is, without a step that was read for this check.

        Raises DamagedCheckpoint if the state is of another step than the directory is named after.
        """
        if "step" not in self.metadata:
            step = int(state["step"])
            if step != self.step:
                raise DamagedCheckpoint(self.path, [misnamed(step)])
        if "step" in abstract:
            return state
        return {name: part for name, part in state.items() if name != "step"}

    def _require_order(self, layout: ModelLayout) -> None:
        """Raises ConfigError if segments come in another order, which shapes may not reveal."""
        model = self.config["model"]
        saved = [segment["name"] for segment in model.get("segments", ())]
        expected = [segment.name for segment in layout.segments]
        if saved and saved != expected and sorted(saved) == sorted(expected):
            raise ConfigError(
                f"{self.path} is a checkpoint of another model: its segments are "
                f"{', '.join(saved)}, in this order, and those of this config "
                f"{', '.join(expected)}\nuse a new output directory, or that model's config"
            )

    def _require_shapes(self, abstract: State) -> None:
        """Raises ConfigError if names, shapes or dtypes differ from those of `abstract`.

        The checkpoint may have parts that are not in `abstract`, except the slots of another
        optimizer, and any error feedback.
        """
        saved = parts_of(self.metadata)
        expected = state_shapes(abstract)
        is_complete = "step" in abstract  # to resume from; otherwise weights alone
        self._require_parameters(saved, expected, is_complete)
        if is_complete:
            self._require_islands(saved, expected)
            self._require_optimizer(saved, expected)

    def _require_parameters(
        self, saved: StateShapes, expected: StateShapes, is_complete: bool
    ) -> None:
        problems = []
        for part in ("params", "buffers"):
            if part in expected or (part in saved and is_complete):
                problems += _shape_differences(saved.get(part, {}), expected.get(part, {}))
        if not problems:
            return
        saved_segments = _segments(saved["params"])
        expected_segments = _segments(expected["params"])
        only_saved = ", ".join(sorted(saved_segments - expected_segments))
        only_expected = ", ".join(sorted(expected_segments - saved_segments))
        if only_saved and only_expected:
            hint = (
                f"its layers are in {only_saved}; those of this config in {only_expected} "
                "(model.segments)"
            )
            problems.insert(0, hint)
        message = listed(f"{self.path} is a checkpoint of another model", problems)
        raise ConfigError(f"{message}\nuse the config of that model, or a new output directory")

    def _require_islands(self, saved: StateShapes, expected: StateShapes) -> None:
        n_saved = _n_islands(saved)
        n_expected = _n_islands(expected)
        if n_saved == n_expected:
            return
        outer_steps = self.config.get("diloco", {}).get("outer_steps", 0)
        raise ConfigError(
            f"{self.path} is a checkpoint of {_islands_text(n_saved)}, "
            f"and this config belongs to {_islands_text(n_expected)}; "
            f"set diloco.outer_steps={outer_steps} and "
            f"mesh.island={max(1, n_saved)}, or use a new output directory with "
            f"init_from={self.path} to start from its weights"
        )

    def _require_optimizer(self, saved: StateShapes, expected: StateShapes) -> None:
        parts = [part for part in {**saved, **expected} if part != FEEDBACK]
        differing = [part for part in parts if saved.get(part) != expected.get(part)]
        if not differing:
            return
        description = self.config.get("optimizer", {}).get("rule")
        name = described_name(description)
        settings = [f"optimizer.rule={name}"]
        saved_slots = _slots(saved)
        expected_slots = _slots(expected)
        lines = [
            f"{self.path} is a checkpoint of another optimizer: {name}, which keeps "
            f"{saved_slots}; this config's keeps {expected_slots}"
        ]
        if saved_slots == expected_slots:
            part = differing[0]
            leaves = _shape_differences(saved.get(part, {}), expected.get(part, {}))
            lines.append(f"{part}/{leaves[0]}")
            if "block_size" in (description or {}):
                settings.append(f"optimizer.rule.block_size={description['block_size']}")
        lines.append(
            f"set {', '.join(settings)}, or use a new output directory with "
            f"init_from={self.path} to start from its weights"
        )
        raise ConfigError("\n".join(lines))


def find(path: Path | str) -> SavedCheckpoint | None:
    """Returns the checkpoint of a run's output (its newest step), of its `checkpoints`, or of one
    step; None for any other path.

    All processes must call it and get the same result, because a run may be saving at the same
    time.

    Raises ConfigError if a run has no complete checkpoint, and DamagedCheckpoint for a damaged one.
    """
    directory, step = _locate(path)
    if directory is None:
        return None
    if step is None:
        step = distributed.broadcast_from_process0(max(steps_in(directory), default=None))
    if step is None:
        raise ConfigError(f"no complete checkpoint in {directory}")
    return SavedCheckpoint.read(directory, step)


def config_in(path: Path | str) -> dict[str, Any] | None:
    """Returns the config, as JSON, of the checkpoint that `find` would return if no save ends
    meanwhile; None for any other path.

    It needs no JAX backend. Raises as `find`.
    """
    directory, step = _locate(path)
    if directory is None:
        return None
    if step is None:
        step = max(steps_in(directory), default=None)
    if step is None:
        return None
    return migrated(descriptions(directory / str(step))["metadata"]["config"])


def output_of(path: Path | str) -> Path | None:
    """Returns the output of the run that a path names, or is in, as for `find`; None for any other
    path.

    One process may call it alone.
    """
    directory, _ = _locate(path)
    return directory.parent if directory else None


def _locate(path: Path | str) -> tuple[Path | None, int | None]:
    """Returns the directory of checkpoints that a path names or is in, and the step if it names
    one.
    """
    path = Path(path).expanduser().absolute()
    step = None
    if names_a_step(path.name) and path.parent.name == "checkpoints" and path.is_dir():
        directory = path.parent
        step = int(path.name)
    elif (path / "checkpoints").is_dir():
        directory = path / "checkpoints"
    else:
        directory = path
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
    """Returns the steps in a directory of checkpoints, ascending.

    A directory is named after its step when the save is complete.
    """
    return sorted(
        int(path.name) for path in directory.iterdir() if names_a_step(path.name) and path.is_dir()
    )


def names_a_step(name: str) -> bool:
    """Whether a run gives this name to a step.

    It does not give "0004", nor digits of another script, although they are numbers.
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
    unsealed = {key: value for key, value in metadata.items() if key != "seal"}
    content = json.dumps({"data": data, "metadata": unsealed}, sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()


def descriptions(path: Path) -> dict[str, Any]:
    """Returns {"data": ..., "metadata": ...} of the checkpoint in this directory.

    Raises DamagedCheckpoint.
    """
    contents = {}
    reasons = []
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
    if reasons:
        raise DamagedCheckpoint(path, reasons)
    if not _is_sealed(**contents):
        raise DamagedCheckpoint(
            path, ["data/metadata and metadata/metadata are not those that were written (seal)"]
        )
    number = path.name.partition(".")[0]
    if number.isdecimal():
        step = contents["metadata"].get("step", int(number))
        if step != int(number):
            raise DamagedCheckpoint(path, [misnamed(step)])
    return contents


def misnamed(step: int) -> str:
    """Returns the reason why a checkpoint of this step is not used under the name of another."""
    return f"it is step {step} under another name; if it was renamed by hand, rename it to {step}"


def state_shapes(tree: Mapping[str, Any]) -> StateShapes:
    """Returns the shapes of a tree of arrays or of jax.ShapeDtypeStruct."""
    return {
        part: {name: [*x.shape, str(x.dtype)] for name, x in leaves.items()}
        for part, leaves in tree.items()
        if isinstance(leaves, Mapping)
    }


def parts_of(metadata: Mapping[str, Any]) -> StateShapes:
    """Returns the shapes that a checkpoint of any format lists."""
    if "parts" in metadata:
        return metadata["parts"]
    return dict.fromkeys(("params", "mu", "nu"), metadata["parameters"])


def differences(saved: Any, current: Any, path: str = "") -> list[str]:
    """Returns the entries that differ between two nested dicts, as "train.steps: 10 -> 20"."""
    if not isinstance(saved, dict) or not isinstance(current, dict):
        return [] if saved == current else [f"{path}: {saved} -> {current}"]
    lines = []
    for key in dict.fromkeys([*saved, *current]):
        key_path = f"{path}.{key}" if path else key
        lines += differences(saved.get(key), current.get(key), key_path)
    return lines


def _is_sealed(data: Any, metadata: Any) -> bool:
    """Whether both descriptions are as they were written."""
    if not isinstance(data, dict) or not isinstance(metadata, dict):
        return False
    if metadata.get("format") == 1 and not {"seal", "digests"} & metadata.keys():
        return True  # format 1 had no seal
    return metadata.get("seal") == seal(data, metadata)


def _shape_differences(saved: dict[str, list[Any]], expected: dict[str, list[Any]]) -> list[str]:
    """Returns a line for each array of a part that is absent or another in one of both."""
    return [
        f"{name}: {saved.get(name, 'absent')} in the checkpoint, "
        f"{expected.get(name, 'absent')} in this config"
        for name in sorted({*saved, *expected})
        if saved.get(name) != expected.get(name)
    ]


def _segments(params: Mapping[str, Any]) -> set[str]:
    return {name.partition(".")[0] for name in params if "." in name}


def _n_islands(shapes: StateShapes) -> int:
    """Returns the number of islands that have weights of their own; 0: there are none."""
    weights = shapes.get(WEIGHTS, {})
    return next((shape[0] for shape in weights.values()), 0)


def _islands_text(n: int) -> str:
    if n == 0:
        return "a run without an outer step"
    return f"{n} island{'s' * (n > 1)}"


def _slots(shapes: StateShapes) -> str:
    slots = [part for part in shapes if part not in ("params", "buffers", FEEDBACK)]
    return ", ".join(slots) or "nothing"


def _abstract_weights(layout: ModelLayout) -> State:
    """Returns the abstract parameters and buffers of a model in a checkpoint, layers in model
    order.
    """
    shardings = layout.canonical_shardings("params")
    tree: State = {}
    for name, spec in layout.shapes.items():
        part = tree.setdefault("buffers" if name in layout.buffers else "params", {})
        part[name] = jax.ShapeDtypeStruct(spec.shape, spec.dtype, sharding=shardings[name])
    return tree


def _proves_damage(error: BaseException) -> bool:
    """Whether an error is due to the files' contents.

    Orbax and TensorStore have no error classes for that.
    """
    if isinstance(error, MemoryError | PermissionError | TimeoutError):
        return False
    message = f"{error!r} {_root_cause(error)}"
    if any(words in message for words in _TRANSIENT_ERRORS):
        return False
    return not isinstance(error, OSError) or isinstance(error, FileNotFoundError)


def _root_cause(error: BaseException) -> str:
    """Returns the first line of the first error in a chain."""
    while error.__cause__ is not None:
        error = error.__cause__
    return (str(error).strip() or repr(error)).splitlines()[0][:300]
