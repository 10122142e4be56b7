"""Node-local checkpoints: each process saves its devices' shards to a local disk, more often than
checkpoints go to shared storage.

The files below `checkpoint.local` are `<run>/<step>/<process>-of-<count>/state.raw`, the distinct
shards of all leaves, and `description.json`, which lists them and is renamed into place last: if it
exists, the step is complete. Processes do not wait for each other in a save. A restore uses a step
only if it is complete on every process.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import re
import secrets
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mesh_lm import distributed, strict_json
from mesh_lm.checkpoint.copies import Copies
from mesh_lm.checkpoint.reader import SavedCheckpoint, certificate, names_a_step, seal
from mesh_lm.checkpoint.transfer import FILES, clear, flush, sync
from mesh_lm.config import CheckpointConfig, LaunchConfig
from mesh_lm.errors import number_ranges
from mesh_lm.optim import Optimizer
from mesh_lm.parallel.layout import ModelLayout
from mesh_lm.state import State, abstract_state
from mesh_lm.state.digest import digests, host_digest, leaf_name
from mesh_lm.state.disk_form import with_used, without_used
from mesh_lm.state.host_copy import Shards, assembled, copied

_KEEP = 2
"""Steps to keep: at a crash, processes may be one save apart, and then have only the previous one
in common."""
_PATIENCE = 60.0
"""Seconds to wait for the previous save before a new one is skipped."""
_LIFE = re.compile(r"[0-9a-f]{8}")
_MARK = ".local"
_ARRAYS, _DESCRIPTION = FILES


class _Unusable(ValueError):
    """A local step cannot be used."""


class _Damaged(_Unusable):
    """Its files have other bytes than were written."""


Listing = list[list[Any]]
"""[[step, [process, ...]], ...]: whose complete files a process sees, as JSON."""


class _RestoreContext(NamedTuple):
    """What the steps that one restore tries have in common."""

    layout: ModelLayout
    abstract: State
    """The state without params that are computed from the master."""
    newest: int
    """The newest durable step; -1: there is none."""
    listings: list[Listing]
    """By process."""


class NodeLocalCheckpoints:
    """The node-local checkpoints of one run; without `checkpoint.local` it does nothing.

    Disk errors only give a warning.
    """

    def __init__(self, policy: CheckpointConfig, directory: Path, launch: LaunchConfig) -> None:
        """directory: the run's durable checkpoints. All processes must call it."""
        self._every = policy.local_every if policy.local else 0
        self._starts_fresh = policy.resume == "never"
        self._writer: threading.Thread | None = None
        self._warned = False  # since a save has succeeded
        self._copies: Copies | None = None
        if not self._every:
            return
        output = hashlib.sha256(str(directory).encode()).hexdigest()[:16]
        output, life = distributed.broadcast_from_process0([output, _life(directory)])
        self.directory = Path(policy.local).expanduser().absolute() / f"{output}-{life}"
        self._index = jax.process_index()
        self._suffix = f"-of-{jax.process_count()}"
        self._remove_earlier_runs(output, directory / _MARK)
        if policy.local_copies:
            self._copies = Copies(
                policy.local_copies, self.directory, launch, self._step_directory, self._prune
            )

    def due(self, step: int) -> bool:
        """Whether to save after this step."""
        return self._every > 0 and step % self._every == 0

    def save(
        self,
        step: int,
        state: State,
        data: dict[str, Any],
        layout: ModelLayout,
        metadata: Callable[[State], dict[str, Any]],
    ) -> None:
        """Copies this process's shards to host memory; a thread writes them.

        All processes must call it.

        Args:
          state: the training state; params that are computed from the master are not saved.
          metadata: returns the metadata that a durable checkpoint of a tree would have; may wait
            for other processes.
        """
        # Comes before metadata, which synchronizes processes: so none is more than one save ahead
        # of a slow disk.
        is_idle = self._finish()
        state = without_used(layout, state)
        unsealed = metadata(state)
        if not is_idle:
            return
        description = {
            "step": step,
            "layout": _layout(state, layout),
            "data": data,
            "metadata": unsealed | {"seal": seal(data, unsealed)},
        }
        self._writer = threading.Thread(
            target=self._write, args=(step, copied(state), description), daemon=True
        )
        self._writer.start()

    def restore(
        self, newest: int, layout: ModelLayout, optimizer: Optimizer
    ) -> tuple[SavedCheckpoint, State] | None:
        """Returns the newest step that is complete on all processes, if it is newer than `newest`
        (a durable step, or -1), else None.

        Its layout must be the same, and its bits are verified. Unusable local steps are removed,
        and one line gives the reason. All processes must call it and get the same result.
        """
        if not self._every:
            return None
        listing: Listing = []
        if not self._starts_fresh:
            listing = [[step, files] for step, files in self._complete().items() if step > newest]
        listings = distributed.gather_from_all(listing)
        holders_by_step = _holders(listings)
        candidates = sorted(holders_by_step, reverse=True)

        incomplete = self._reason_incomplete(listings, candidates, newest)
        reasons = [incomplete] if incomplete else []
        self._remove_unusable(candidates)

        abstract = without_used(layout, abstract_state(layout, optimizer))
        context = _RestoreContext(layout, abstract, newest, listings)
        for step in candidates:
            holders = holders_by_step[step]
            try:
                saved, state = self._restore_step(step, holders, context)
            except _Unusable as error:
                reasons.append(str(error))
                continue
            fetched = [process for process, holder in enumerate(holders) if holder != process]
            source = f"; fetched from other nodes: {number_ranges(fetched)}" if fetched else ""
            distributed.print_on_process0(
                f"step {step} is on the local disks of all processes ({self.directory}), "
                f"newer than the output's checkpoints{source}"
            )
            if reasons:
                distributed.print_on_process0(
                    f"newer local checkpoints are not used: {'; '.join(reasons)}"
                )
            return saved, with_used(layout, state)
        if reasons:
            distributed.print_on_process0(f"local checkpoints are not used: {'; '.join(reasons)}")
        self.forget(newest)
        return None

    def forget(self, last: int) -> None:
        """Removes the steps after `last` from this node, because the run was rolled back."""
        if not self._every:
            return
        self._finish()
        if self._copies:
            self._copies.cancel()
        for step, processes in self._steps().items():
            if step > last:
                for process in processes:
                    self._remove(step, process)

    def close(self) -> None:
        """Waits for the current save. A copy that is being sent is given up."""
        self._finish()
        if self._copies:
            self._copies.close()

    def _remove_earlier_runs(self, output: str, mark: Path) -> None:
        """Removes the steps of runs whose output was deleted. output: its digest."""
        with contextlib.suppress(OSError):
            for directory in self.directory.parent.glob(f"{output}-*"):
                if directory == self.directory:
                    continue
                shutil.rmtree(directory, ignore_errors=True)
                print(
                    f"{distributed.log_prefix()}warning: {directory} is removed: its local "
                    f"checkpoints are of an earlier run with this output, or {mark} was deleted",
                    flush=True,
                )

    def _finish(self) -> bool:
        """Waits for the current write. Returns whether it ended in time."""
        if self._writer:
            self._writer.join(_PATIENCE)
            if self._writer.is_alive():
                self._warn(f"the disk has not written the previous one in {_PATIENCE:g} s")
                return False
            self._writer = None
        return True

    def _write(self, step: int, shards: Shards, description: dict[str, Any]) -> None:
        """Writes the files of a step, and then sends them to other nodes."""
        directory = self._step_directory(step, self._index)
        try:
            shutil.rmtree(directory, ignore_errors=True)  # from before a restart
            directory.mkdir(parents=True)
            with (directory / _ARRAYS).open("wb") as file:
                description["parts"] = _write_arrays(file, shards)
                flush(file)
            # In this order, for a crash of the machine: the arrays are on the disk before the
            # description has its name, which makes the step complete, and the name is on the disk
            # before older steps are removed.
            partial = directory / f"{_DESCRIPTION}.writing"
            with partial.open("w", encoding="utf-8") as file:
                json.dump(description | {"sha256": _sha256(description)}, file)
                flush(file)
            partial.rename(directory / _DESCRIPTION)
            sync(directory)
            self._warned = False
            self._prune(self._index)
            if self._copies:
                self._copies.send(step)
        except OSError as error:
            self._remove(step, self._index)
            self._warn(f"{error.strerror or error}")

    def _warn(self, reason: str) -> None:
        """Prints a warning, once until a save succeeds again."""
        if not self._warned:
            with contextlib.suppress(OSError):  # the log may be on the same disk
                print(
                    f"{distributed.log_prefix()}warning: no local checkpoint in {self.directory}: "
                    f"{reason}; training continues, and a crash now rolls back to the newest "
                    "checkpoint in the output",
                    flush=True,
                )
        self._warned = True

    def _reason_incomplete(
        self, listings: list[Listing], candidates: list[int], newest: int
    ) -> str:
        """Returns the reason why steps newer than all candidates are not used; "": there are none.

        It is as process 0, which prints it, sees the disks.
        """
        if not candidates and any(listings):
            elsewhere = " or on those of other nodes" if self._copies else ""
            return f"no step is on the local disks of all processes{elsewhere}"
        if not self._starts_fresh:
            newest_usable = max(candidates, default=newest)
            newer = [str(step) for step in self._steps() if step > newest_usable]
            if newer:
                return f"step {', '.join(newer)} is not complete on all processes"
        directories = self._directories_of_other_sizes()
        if directories:
            n_processes = directories[0].name.rpartition("-")[2]
            return f"step {directories[0].parent.name} was saved by {n_processes} processes"
        return ""

    def _directories_of_other_sizes(self) -> list[Path]:
        """Returns the directories of steps that another number of processes has saved."""
        directories = []
        with contextlib.suppress(OSError):
            for directory in self.directory.glob("*/*-of-*"):
                if not directory.name.endswith(self._suffix):
                    directories.append(directory)
        return directories

    def _remove_unusable(self, candidates: list[int]) -> None:
        """Removes all steps but the candidates.

        So a node that was another one before keeps nothing from that time that no process can use.
        """
        for directory in self._directories_of_other_sizes():
            shutil.rmtree(directory, ignore_errors=True)
        for step, processes in self._steps().items():
            if step not in candidates:
                for process in processes:
                    self._remove(step, process)

    def _restore_step(
        self, step: int, holders: list[int], context: _RestoreContext
    ) -> tuple[SavedCheckpoint, State]:
        """Returns a step and its verified state.

        Raises _Unusable, on all processes and with the same reason. holders: of `_holders`.
        """
        restored = None
        try:
            if self._copies and holders[self._index] != self._index:
                self._copies.fetch(step, holders[self._index])
            restored = self._read_or_fetch(step, context)
            saved, _ = restored
            outcome = ["", certificate(saved.metadata, saved.data)]
        except (OSError, ValueError, KeyError, TypeError) as error:
            text = str(error) if isinstance(error, _Unusable) else repr(error)
            outcome = [f"step {step} on process {self._index}: {text}", ""]
        outcomes = distributed.gather_from_all(outcome)
        for problem, _ in outcomes:
            if problem:
                raise _Unusable(problem)
        if len({proof for _, proof in outcomes}) > 1:
            raise _Unusable(f"step {step} is not of the same run on all processes")

        assert restored is not None  # otherwise this process has a problem
        saved, state = restored
        leaf = _first_difference(digests(state), saved.digests)
        if leaf:
            raise _Unusable(f"step {step}: {leaf} is not as it was when it was saved")
        return restored

    def _read_or_fetch(self, step: int, context: _RestoreContext) -> tuple[SavedCheckpoint, State]:
        """Reads a step as `_read` does.

        Files that existed at the start, and are damaged, are replaced by a copy of another node, if
        there is one.
        """
        try:
            return self._read(step, context)
        except (OSError, ValueError) as error:
            is_intact = isinstance(error, _Unusable) and not isinstance(error, _Damaged)
            if self._copies is None or is_intact:
                raise
            holders = {
                holder
                for holder, listing in enumerate(context.listings)
                if _lists(listing, step, self._index)
            }
            if self._index not in holders:
                raise  # they were fetched just now
            other_nodes = holders - self._copies.node
            if not other_nodes:
                raise
            self._copies.fetch(step, min(other_nodes))
            print(
                f"{distributed.log_prefix()}warning: step {step} in {self.directory}: {error}; "
                "fetched from another node",
                flush=True,
            )
        # Not within the handler, which keeps the arrays that were read so far.
        return self._read(step, context)

    def _read(self, step: int, context: _RestoreContext) -> tuple[SavedCheckpoint, State]:
        """Reads and verifies a step.

        Raises _Unusable, or any error that a description of another version causes.
        """
        directory = self._step_directory(step, self._index)
        description = strict_json.read(directory / _DESCRIPTION)
        digest = description.pop("sha256", None)
        if digest != _sha256(description) or description["step"] != step:
            raise _Damaged(f"{_DESCRIPTION} was changed after it was written")
        expected = _layout(context.abstract, context.layout)
        if description["layout"] != expected:
            key = _first_difference(expected, description["layout"])
            raise _Unusable(f"it was saved by a run with different {key}")
        durable = description["metadata"].get("durable")
        if durable is not None and durable > context.newest:
            raise _Unusable(
                f"it was saved when the output had step {durable}, which is missing now"
            )

        leaves, tree = jax.tree_util.tree_flatten_with_path(context.abstract)
        arrays = []
        with (directory / _ARRAYS).open("rb") as file:
            for path, leaf in leaves:
                name = leaf_name(path)
                arrays.append(_read_leaf(file, description["parts"][name], name, leaf))
        saved = SavedCheckpoint(self.directory, step, description["data"], description["metadata"])
        return saved, jax.tree.unflatten(tree, arrays)

    def _step_directory(self, step: int, process: int) -> Path:
        return self.directory / str(step) / f"{process}{self._suffix}"

    def _steps(self) -> dict[int, list[int]]:
        """Returns {step: processes whose files are here, complete or not}, ascending.

        This process's files; with copies those of all others, too.
        """
        pattern = f"*/*{self._suffix}" if self._copies else f"*/{self._index}{self._suffix}"
        steps: dict[int, list[int]] = {}
        with contextlib.suppress(OSError):
            for path in self.directory.glob(pattern):
                process = path.name.removesuffix(self._suffix)
                if names_a_step(path.parent.name) and process.isdecimal():
                    steps.setdefault(int(path.parent.name), []).append(int(process))
        return {step: sorted(steps[step]) for step in sorted(steps)}

    def _complete(self) -> dict[int, list[int]]:
        """Returns `_steps` without files that are not complete."""
        complete: dict[int, list[int]] = {}
        for step, processes in self._steps().items():
            for process in processes:
                if (self._step_directory(step, process) / _DESCRIPTION).exists():
                    complete.setdefault(step, []).append(process)
        return complete

    def _prune(self, process: int) -> None:
        """Removes the older steps of a process from this node.

        If it is this process, also those of processes that do not send their steps here any more.
        """
        complete = self._complete()
        steps = [step for step, processes in complete.items() if process in processes]
        for step in steps[:-_KEEP]:
            self._remove(step, process)
        if not self._copies or process != self._index or not steps:
            return
        oldest = steps[-_KEEP:][0]
        for step, processes in complete.items():
            if step < oldest:
                for other in processes:
                    if other not in self._copies.stored_processes:
                        self._remove(step, other)

    def _remove(self, step: int, process: int) -> None:
        directory = self._step_directory(step, process)
        with contextlib.suppress(OSError):
            clear(directory)
            directory.parent.rmdir()


def _holders(listings: list[Listing]) -> dict[int, list[int]]:
    """Returns {step: for each process the one that has its files, itself if possible}.

    It has the steps of which nothing is missing. listings: by process.
    """
    holders: dict[int, dict[int, int]] = {}  # step -> process -> holder
    for holder, listing in enumerate(listings):
        for step, processes in listing:
            step_holders = holders.setdefault(step, {})
            for process in processes:
                if process == holder or process not in step_holders:
                    step_holders[process] = holder
    complete = {}
    for step, step_holders in holders.items():
        if all(process in step_holders for process in range(len(listings))):
            complete[step] = [step_holders[process] for process in range(len(listings))]
    return complete


def _lists(listing: Listing, step: int, process: int) -> bool:
    """Whether a process sees the files that another one has written for a step."""
    return any(listed == step and process in processes for listed, processes in listing)


def _write_arrays(file: IO[bytes], shards: Shards) -> dict[str, dict[str, list[Any]]]:
    """Writes shards, and returns {leaf: {index: [offset, *shape, digest]}}."""
    parts: dict[str, dict[str, list[Any]]] = {}
    for leaf, shards_by_index in shards.items():
        parts[leaf] = {}
        for index, x in shards_by_index.items():
            parts[leaf][index] = [file.tell(), *x.shape, host_digest(x)]
            file.write(np.atleast_1d(x).reshape(-1).view(np.uint8).data)
    return parts


def _read_leaf(
    file: IO[bytes], parts: dict[str, list[Any]], name: str, abstract: jax.ShapeDtypeStruct
) -> jax.Array:
    """Returns an array from the shards of this process's devices.

    parts: as `_write_arrays` returns for a leaf. Raises _Unusable.
    """

    def shard(index: str) -> np.ndarray:
        if index not in parts:
            raise _Unusable(f"{name} was sharded differently when it was saved")
        offset, *shape, digest = parts[index]
        size = math.prod(shape)
        file.seek(offset)
        x = np.fromfile(file, jnp.dtype(abstract.dtype), size)
        if x.size != size or host_digest(x.reshape(shape)) != digest:
            raise _Damaged(f"{name} is damaged in {_ARRAYS}: its digest is not the saved one")
        return x.reshape(shape)

    return assembled(abstract, shard)


def _layout(state: State, layout: ModelLayout) -> dict[str, Any]:
    """Returns what must be equal at a restore, as JSON, for arrays or jax.ShapeDtypeStruct.

    Shardings show in the parts' indices.
    """
    leaves = {}
    for path, x in jax.tree_util.tree_flatten_with_path(state)[0]:
        leaves[leaf_name(path)] = [str(x.dtype), *x.shape]
    vectors = []
    for vector in layout.flat.vectors:
        matrices = [
            [matrix.name, matrix.offset, *matrix.local, str(layout.flat.specs[matrix.name])]
            for matrix in vector.matrices
        ]
        vectors.append([vector.name, vector.replica_axes, vector.shard_axes, matrices])
    content = {
        "mesh sizes": dict(layout.shard.mesh.shape),
        "processes": jax.process_count(),
        "stages": [
            [name, stack.stages, *stack.layer_counts] for name, stack in layout.stacks.items()
        ],
        "leaves": leaves,
        "flat vectors": vectors,
    }
    return json.loads(json.dumps(content))


def _first_difference(a: dict[str, Any], b: dict[str, Any]) -> str:
    """Returns the first key whose values differ; "": there is none."""
    return next((key for key in [*a, *b] if a.get(key) != b.get(key)), "")


def _sha256(description: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(description, sort_keys=True).encode()).hexdigest()


def _life(directory: Path) -> str:
    """Returns eight hex digits stored with the durable checkpoints, so that a run that starts from
    scratch ignores older local steps.
    """
    mark = directory / _MARK
    new_life = secrets.token_hex(4)
    try:
        if jax.process_index() == 0 and not mark.exists():
            mark.write_text(f"{new_life} {_check(new_life)}", encoding="utf-8")
        life, _, check = mark.read_text(errors="replace", encoding="utf-8").partition(" ")
        if _LIFE.fullmatch(life) and check in ("", _check(life)):  # older versions wrote no check
            return life
        if jax.process_index() == 0:
            print(
                f"warning: {mark} is damaged: nothing says whose the local checkpoints are, and "
                "none is used"
            )
            mark.write_text(f"{new_life} {_check(new_life)}", encoding="utf-8")
    except OSError:
        pass
    return new_life


def _check(life: str) -> str:
    return hashlib.sha256(life.encode()).hexdigest()[:8]
