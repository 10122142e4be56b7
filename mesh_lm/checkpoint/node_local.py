"""The fast tier of a run's checkpoints: each process keeps what its devices hold on its node's own disk, between saves to the shared one.

Below `checkpoint.local`: `<run>/<step>/<process>-of-<count>/state.raw`, the distinct parts of all leaves one after the other, and
`description.json`, which says what they are and is written last, under another name first: where it is, the step is whole. No process
waits for another in a save. A restore takes a step only if every process has it whole, and the same one.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mesh_lm import distributed
from mesh_lm.checkpoint.reader import SavedCheckpoint, certificate, seal
from mesh_lm.config import CheckpointConfig
from mesh_lm.optim import Optimizer
from mesh_lm.parallel.layout import ModelLayout
from mesh_lm.state import State, abstract_state
from mesh_lm.state.digest import digests, host_digest, leaf_name
from mesh_lm.state.disk_form import with_used, without_used

_KEEP = 2
"""Steps kept: when a run ends, processes may be a save apart, and then have the one before in common."""
_PATIENCE = 60.0
"""Seconds after which a disk that still writes the save before is left alone."""
_ARRAYS, _DESCRIPTION = "state.raw", "description.json"


class NodeLocalCheckpoints:
    """The local tier of one run; without `checkpoint.local` it does nothing. A disk that fails is a warning and no more."""

    def __init__(self, policy: CheckpointConfig, directory: Path) -> None:
        """directory: of the run's durable checkpoints. All processes must call it."""
        self._every = policy.local_every if policy.local else 0
        self._fresh = policy.resume == "never"
        self._thread: threading.Thread | None = None
        self._failed = False
        if not self._every:
            return
        output, life = hashlib.sha256(str(directory).encode()).hexdigest()[:16], _identity(directory)
        output, life = distributed.broadcast_from_process0([output, life])
        self.directory = Path(policy.local).expanduser().absolute() / f"{output}-{life}"
        self._place = f"{jax.process_index()}-of-{jax.process_count()}"
        with contextlib.suppress(OSError):  # of runs whose output was deleted
            for old in self.directory.parent.glob(f"{output}-*"):
                if old != self.directory:
                    shutil.rmtree(old, ignore_errors=True)

    def due(self, step: int) -> bool:
        """Whether to save after this many steps."""
        return self._every > 0 and step % self._every == 0

    def save(
        self, step: int, state: State, data: dict[str, Any], layout: ModelLayout, metadata: Callable[[State], dict[str, Any]]
    ) -> None:  # fmt: skip
        """Copies what this process's devices hold into the host's memory; a thread writes it. All processes must call it.

        state: as the step has it; of what follows from the rest there is no copy. metadata: makes of what is kept what a durable checkpoint
        says of itself; it may wait for the other processes.
        """
        # Before metadata, in which processes meet: none can be more than one save ahead of a slow disk.
        ready, state = self._finish(), without_used(layout, state)
        described = metadata(state)
        parts = _held(state)
        if ready:
            sealed = described | {"seal": seal(data, described)}
            about = {"step": step, "layout": _layout(state, layout), "data": data, "metadata": sealed}
            self._thread = threading.Thread(target=self._write, args=(step, parts, about), daemon=True)
            self._thread.start()

    def restore(self, newest: int, layout: ModelLayout, optimizer: Optimizer) -> tuple[SavedCheckpoint, State] | None:
        """The newest step that all processes have whole, if it is newer than `newest` (a durable step, or -1) and of this very layout.

        It is bitwise what was saved. None otherwise; local steps that are not taken are removed, and one line says why. All processes must
        call it, and get the same.
        """
        if not self._every:
            return None
        here = [] if self._fresh else self._whole()
        everywhere = distributed.gather_from_all([step for step in here if step > newest])
        found = sorted(set.intersection(*map(set, everywhere)), reverse=True)
        reasons = [] if found or not any(everywhere) else ["no step is on the disks of all processes"]
        with contextlib.suppress(OSError):
            for stranger in self.directory.glob("*/*-of-*"):
                if not stranger.name.endswith(f"-of-{jax.process_count()}"):
                    reasons = reasons or [f"step {stranger.parent.name} was saved by {stranger.name.rpartition('-')[2]} processes"]
                    shutil.rmtree(stranger, ignore_errors=True)
        for step in found:
            saved = state = None
            try:
                saved, state = self._read(step, newest, without_used(layout, abstract_state(layout, optimizer)), layout)
                mine = ["", certificate(saved.metadata, saved.data)]
            except (OSError, ValueError, KeyError, TypeError) as error:
                mine = [f"step {step} on process {jax.process_index()}: {error if isinstance(error, _Unusable) else repr(error)}", ""]
            problems, proofs = zip(*distributed.gather_from_all(mine), strict=True)
            reason = next(filter(None, problems), "")
            if not reason and len(set(proofs)) > 1:
                reason = f"step {step} is not of the same run on all processes"
            if not reason and saved and state and (wrong := _differ(digests(state), saved.digests)):
                reason = f"step {step}: {wrong} is not what was saved"
            if not reason and saved and state:
                distributed.print_on_process0(
                    f"step {step} is on the disks of all processes ({self.directory}), newer than what is in the output"
                )
                return saved, with_used(layout, state)
            reasons.append(reason)
        if reasons:
            distributed.print_on_process0(f"local checkpoints are not used: {'; '.join(reasons)}")
        self.forget(newest)
        return None

    def forget(self, after: int) -> None:
        """Removes this process's steps after this one: the run is not what it was then."""
        if self._every:
            self._finish()
            for step in self._steps():
                if step > after:
                    self._remove(step)

    def close(self) -> None:
        """Waits for the save in flight."""
        self._finish()

    def _finish(self) -> bool:
        """Whether no write is under way, once it had time enough."""
        if self._thread:
            self._thread.join(_PATIENCE)
            if self._thread.is_alive():
                self._warn(f"its disk has not written the one before in {_PATIENCE:g} s")
                return False
            self._thread = None
        return True

    def _write(self, step: int, parts: dict[str, dict[str, np.ndarray]], about: dict[str, Any]) -> None:
        place = self.directory / str(step) / self._place
        try:
            shutil.rmtree(place, ignore_errors=True)  # of a former life of the run
            place.mkdir(parents=True)
            about["parts"] = {}
            with (place / _ARRAYS).open("wb") as file:
                for leaf, distinct in parts.items():
                    about["parts"][leaf] = {}
                    for index, x in distinct.items():
                        about["parts"][leaf][index] = [file.tell(), *x.shape, host_digest(x)]
                        file.write(np.atleast_1d(x).reshape(-1).view(np.uint8).data)
                _flush(file)
            with (place / f"{_DESCRIPTION}.writing").open("w") as file:
                json.dump(about | {"sha256": _sha256(about)}, file)
                _flush(file)
            (place / f"{_DESCRIPTION}.writing").rename(place / _DESCRIPTION)
            descriptor = os.open(place, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
            self._failed = False
            for old in self._whole()[:-_KEEP]:
                self._remove(old)
        except OSError as error:
            self._remove(step)
            self._warn(f"{error.strerror or error}")

    def _warn(self, reason: str) -> None:
        """Once, until a save succeeds again."""
        if not self._failed:
            with contextlib.suppress(OSError):  # its log may be on the same disk
                print(
                    f"{distributed.log_prefix()}warning: no local checkpoint in {self.directory}: {reason}; training continues, "
                    "and a crash now goes back to the newest one in the output", flush=True,
                )  # fmt: skip
        self._failed = True

    def _steps(self) -> list[int]:
        """Ascending; those that are not whole as well."""
        try:
            return sorted(int(path.parent.name) for path in self.directory.glob(f"*/{self._place}") if path.parent.name.isdecimal())
        except OSError:
            return []

    def _whole(self) -> list[int]:
        return [step for step in self._steps() if (self.directory / str(step) / self._place / _DESCRIPTION).exists()]

    def _remove(self, step: int) -> None:
        place = self.directory / str(step) / self._place
        with contextlib.suppress(OSError):
            (place / _DESCRIPTION).unlink(missing_ok=True)  # first, so that no half of it counts as whole
            shutil.rmtree(place, ignore_errors=True)
            place.parent.rmdir()

    def _read(self, step: int, newest: int, abstract: State, layout: ModelLayout) -> tuple[SavedCheckpoint, State]:
        """Verified part by part. Raises _Unusable, or what a description that is not ours leads to."""
        place = self.directory / str(step) / self._place
        about = json.loads((place / _DESCRIPTION).read_text())
        if about.pop("sha256", None) != _sha256(about) or about["step"] != step:
            raise _Unusable(f"{_DESCRIPTION} is not what was written")
        if about["layout"] != (here := _layout(abstract, layout)):
            raise _Unusable(f"it has other {_differ(here, about['layout'])}")
        if (durable := about["metadata"].get("durable")) is not None and durable > newest:
            raise _Unusable(f"saved when the output had step {durable}, which is gone")
        with (place / _ARRAYS).open("rb") as file:
            leaves, tree = jax.tree_util.tree_flatten_with_path(abstract)
            state = jax.tree.unflatten(tree, [_leaf(file, about["parts"][leaf_name(path)], leaf_name(path), leaf) for path, leaf in leaves])
        return SavedCheckpoint(self.directory, step, about["data"], about["metadata"]), state


class _Unusable(ValueError):
    """A local step that cannot be taken."""


def _held(state: State) -> dict[str, dict[str, np.ndarray]]:
    """{leaf: {index: this process's part}} in the host's memory, a part that several devices hold once."""
    found: dict[str, dict[str, jax.Array]] = {}
    for path, x in jax.tree_util.tree_flatten_with_path(state)[0]:
        parts = found[leaf_name(path)] = {}
        for shard in x.addressable_shards:
            if (index := _index(shard.index, x.shape)) not in parts:
                shard.data.copy_to_host_async()
                parts[index] = shard.data

    # A copy, because on a CPU NumPy would show the array itself, which the next step takes over.
    def copied(x: jax.Array) -> np.ndarray:
        return np.array(x) if next(iter(x.devices())).platform == "cpu" else np.asarray(x)

    return {leaf: {index: copied(x) for index, x in parts.items()} for leaf, parts in found.items()}


def _leaf(file: Any, parts: dict[str, list[Any]], name: str, abstract: jax.ShapeDtypeStruct) -> jax.Array:
    where: Any = abstract.sharding
    read: dict[str, np.ndarray] = {}
    arrays = []
    for device, slices in where.addressable_devices_indices_map(abstract.shape).items():
        if (index := _index(slices, abstract.shape)) not in read:
            if index not in parts:
                raise _Unusable(f"{name} is cut in another way")
            offset, *shape, proof = parts[index]
            file.seek(offset)
            raw = np.fromfile(file, jnp.dtype(abstract.dtype), int(np.prod(shape)))
            if raw.size != np.prod(shape) or host_digest(part := raw.reshape(shape)) != proof:
                raise _Unusable(f"{name} is damaged in {_ARRAYS}")
            read[index] = part
        arrays.append(jax.device_put(read[index], device, may_alias=False))
    return jax.make_array_from_single_device_arrays(abstract.shape, where, arrays)


def _layout(state: State, layout: ModelLayout) -> dict[str, Any]:
    """What must be the same at a restore, as JSON; of arrays or of jax.ShapeDtypeStruct. How they are cut is seen in the parts."""
    leaves = {}
    for path, x in jax.tree_util.tree_flatten_with_path(state)[0]:
        leaves[leaf_name(path)] = [str(x.dtype), *x.shape]
    stages = [[name, stack.stages, *stack.layer_counts] for name, stack in layout.stacks.items()]
    sizes = dict(layout.shard.mesh.shape)
    flat = [
        [v.name, v.replica_axes, v.shard_axes, [[m.name, m.offset, *m.local, str(layout.flat.specs[m.name])] for m in v.matrices]]
        for v in layout.flat.vectors
    ]
    about = {"mesh sizes": sizes, "processes": jax.process_count(), "stages": stages, "leaves": leaves, "flat vectors": flat}
    return json.loads(json.dumps(about))


def _differ(one: dict[str, Any], other: dict[str, Any]) -> str:
    """The first key whose values differ; empty: none."""
    return next((key for key in [*one, *other] if one.get(key) != other.get(key)), "")


def _index(slices: tuple[slice, ...], shape: tuple[int, ...]) -> str:
    return ",".join("{}:{}".format(*s.indices(size)[:2]) for s, size in zip(slices, shape, strict=True))


def _sha256(about: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()


def _flush(file: Any) -> None:
    file.flush()
    os.fsync(file.fileno())


def _identity(directory: Path) -> str:
    """Eight hex digits that stay with the run's durable checkpoints, so that a run that begins anew finds nothing of the one before."""
    mark, new = directory / ".local", secrets.token_hex(4)
    try:
        if jax.process_index() == 0 and not mark.exists():
            mark.write_text(new)
        return mark.read_text()
    except OSError:
        return new
