"""The lease of a run's output directory, so that at most one run writes there: a file that names
its holder, and is renewed by it.

The file needs exclusive creation and rename, which NFS has; it uses no locks and compares no clocks
of two hosts. A holder that is dead on this machine is stale at once. Any other is stale after it
has not renewed the lease for `STALE` seconds of this process's own clock. The holder reads the
lease before each commit of a checkpoint, so that a run that was suspended and has lost it commits
no more.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

import jax

from mesh_lm import distributed, strict_json
from mesh_lm.errors import ConfigError, ReplacedError, StorageError
from mesh_lm.network.environment import GENERATION

RENEW, STALE = 5.0, 30.0
"""Seconds between renewals, and seconds without one after which a holder on another machine has
lost the lease."""
_PREDECESSORS = 120.0
"""Seconds that a restarted run waits for processes of the earlier start that are alive, perhaps on
a host without a network."""
_POLL = 1.0
_SIZE = 512
"""Bytes of the file: renewing it must not need space on a full disk."""


@dataclasses.dataclass(frozen=True)
class Holder:
    """The content of a lease file."""

    host: str
    pid: int
    machine: str
    """Boot and process namespace: where two of them agree, both see the same process ids."""
    started: int
    """When the process started, in clock ticks since the boot (0: unknown), because process ids are
    used again."""
    since: float
    """Unix time at which it took the lease."""
    life: str
    """Random digits that no other holder has."""
    renewed: int = 0

    @classmethod
    def this_process(cls) -> Holder:
        """Returns a new holder with a life of its own."""
        pid = os.getpid()
        return cls(
            socket.gethostname(),
            pid,
            _machine(),
            (_status(pid) or ("", 0))[1],
            time.time(),
            secrets.token_hex(4),
        )

    @property
    def alive(self) -> bool | None:
        """Whether its process is alive; None if it is on another machine."""
        if self.machine != _machine():
            return None
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        except OSError:
            pass  # it belongs to another user
        status = _status(self.pid)
        return status is None or (status[0] not in "ZX" and status[1] == self.started)

    def __str__(self) -> str:
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.since))
        return f"process {self.pid} on {self.host} since {since}"

    def encoded(self) -> bytes:
        """Returns the content of the file."""
        return json.dumps(dataclasses.asdict(self)).encode().ljust(_SIZE - 1) + b"\n"


class Lease:
    """The lease that this process holds. A thread renews it until `release`."""

    def __init__(self, path: Path, holder: Holder) -> None:
        """Call `acquire` instead."""
        self.path, self._holder = path, holder
        self._lost: ReplacedError | None = None
        self._released, self._renewing = threading.Event(), threading.Lock()
        self._thread = threading.Thread(target=self._keep_renewing, name="lease", daemon=True)
        self._thread.start()

    @property
    def life(self) -> str:
        """Eight hex digits of this holder alone."""
        return self._holder.life

    @classmethod
    def acquire(
        cls, output: Path, patience: float = 0.0, *, wait: Callable[[float], object] = time.sleep
    ) -> Lease:
        """Returns the lease of a directory, which must exist. It waits up to `STALE` seconds for a
        holder of which it is unclear whether it is alive, and prints that.

        Args:
          patience: seconds to wait for a live holder to end, for a restart whose processes are
          perhaps still ending elsewhere. wait: sleeps.

        Raises:
          ConfigError: another run holds it; the message names its host, process and time.
          StorageError after `patience` seconds. OSError: the directory is not writable.
        """
        path, mine = output / ".lease", Holder.this_process()
        seen, quiet, waited = b"", 0.0, 0.0
        while not _created(path, mine.encoded()):
            try:
                content = path.read_bytes()
            except FileNotFoundError:
                content = b""  # it was released just now
            held = _holder(content)
            live = bool(held and held.alive) or (bool(seen) and content not in (b"", seen))
            quiet, seen = quiet if content == seen else 0.0, content
            stale = (held and held.alive is False) or quiet >= STALE
            if stale and _succeeded(path, content, mine.encoded(), abandoned=quiet >= 2 * STALE):
                break
            if live and waited >= patience:
                # a restart may be tried again later
                raise (StorageError if patience else ConfigError)(_refusal(output, path, held))
            if not waited:
                until = (
                    f"at most {patience:g} s for its end"
                    if live
                    else f"up to {max(STALE, patience):g} s to see whether it is alive"
                )
                with contextlib.suppress(OSError):
                    print(
                        f"{output} is in use by {held or 'an unknown process'}; waiting {until}",
                        flush=True,
                    )
            wait(_POLL)
            # Only these seconds count, not those in which a disk did not answer, and in which a
            # holder could not renew the lease either.
            quiet, waited = quiet + _POLL, waited + _POLL
        return cls(path, mine)

    def require(self) -> None:
        """Reads the lease. Raises ReplacedError if another run holds it, and OSError if it cannot
        be read.
        """
        self.require_kept()
        self._renew()
        self.require_kept()

    def require_kept(self) -> None:
        """Raises ReplacedError if the last renewal found that another run holds it. Reads
        nothing.
        """
        if self._lost:
            raise self._lost

    def release(self) -> None:
        """Ends the lease. Calling it again has no effect."""
        self._released.set()
        self._thread.join()
        with contextlib.suppress(OSError):
            held = _holder(self.path.read_bytes())
            if held and held.life == self.life:
                self.path.unlink()

    def _keep_renewing(self) -> None:
        while not self._released.wait(RENEW) and not self._lost:
            # a disk that is away for a while; a thread that ended would lose the lease
            with contextlib.suppress(Exception):
                self._renew()

    def _renew(self) -> None:
        """Writes into the file that it has read: if that was renamed away in between, the lease of
        another run is not touched.
        """
        with self._renewing:
            try:
                with self.path.open("r+b") as file:
                    content = file.read()
                    held = _holder(content)
                    if held and held.life == self.life:
                        file.seek(0)
                        file.write(dataclasses.replace(held, renewed=held.renewed + 1).encoded())
                        return
                if held is None and _succeeded(self.path, content, self._holder.encoded()):
                    return  # it was damaged
            except FileNotFoundError:
                held = None  # it was deleted
            if held is None and _created(self.path, self._holder.encoded()):
                return
            if (held := held or _holder(self.path.read_bytes())) is None:
                raise OSError(f"{self.path} cannot be read")
            self._lost = ReplacedError(
                f"{self.path.parent} was taken over by {held} while this run was suspended; this "
                "run writes no more"
            )


def held_by_process0(output: Path) -> Lease | None:
    """Returns the lease of a run's output, on process 0. Raises ConfigError on all processes if
    another run holds it.
    """
    restarted = (
        int(os.environ.get(GENERATION, 1)) > 1 or int(os.environ.get("SLURM_RESTART_COUNT", 0)) > 0
    )
    # any pod may be a replacement, whose predecessor's node does not answer
    restarted |= "KUBERNETES_SERVICE_HOST" in os.environ
    lease = None
    # connects the processes: a first collective after a long wait would time out
    distributed.gather_from_all(0)
    with distributed.collective_errors():
        if jax.process_index() == 0:
            try:
                output.mkdir(parents=True, exist_ok=True)
                lease = Lease.acquire(output, _PREDECESSORS if restarted else 0.0)
            except OSError as error:
                raise ConfigError(
                    f"cannot write checkpoints to {output}: {error.strerror}"
                ) from error
    return lease


def _created(path: Path, content: bytes) -> bool:
    """Creates the file if it does not exist, and returns whether it did. Raises OSError, and then
    leaves nothing.
    """
    try:
        descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666)
    except FileExistsError:
        return False
    try:
        with open(descriptor, "wb") as file:
            file.write(content)
    except OSError:
        path.unlink(missing_ok=True)
        raise
    return True


def _succeeded(path: Path, seen: bytes, content: bytes, *, abandoned: bool = False) -> bool:
    """Replaces a lease that still is as it was `seen`, and returns whether it did.

    Only one process at a time can create the successor's file, and it then looks again; so a slow
    one cannot replace a lease that is newer than the one it has seen. The file of a successor that
    was killed in between is removed, so that the next call can succeed.

    Args:
      abandoned: whether the successor's file, if there is one, has been there for long enough.
    """
    successor = path.with_name(f"{path.name}.next")
    if not _created(successor, content):
        with contextlib.suppress(FileNotFoundError):
            other = _holder(successor.read_bytes())
            if abandoned or (other and other.alive is False):
                successor.unlink()
        return False
    try:
        if path.read_bytes() == seen:
            os.replace(successor, path)
            return True
    except OSError as error:
        successor.unlink(missing_ok=True)
        if not isinstance(error, FileNotFoundError):  # otherwise it was released just now
            raise
    else:
        successor.unlink(missing_ok=True)
    return False


def _holder(content: bytes) -> Holder | None:
    """Returns what a lease file says; None if it is empty, because it is just being created, or
    damaged.
    """
    try:
        about = strict_json.loads(content)
        holder = Holder(**{field.name: about[field.name] for field in dataclasses.fields(Holder)})
        kinds = {
            "host": str,
            "pid": int,
            "machine": str,
            "started": int,
            "since": float,
            "life": str,
            "renewed": int,
        }
        return (
            holder
            if all(type(getattr(holder, name)) is kind for name, kind in kinds.items())
            else None
        )
    except (ValueError, KeyError):
        return None


def _refusal(output: Path, path: Path, held: Holder | None) -> str:
    if held and held.pid == os.getpid() and held.machine == _machine():
        return (
            f"{output} is in use by an earlier call in this process, which has not ended; end it, "
            "or set output to another directory"
        )
    return (
        f"{output} is in use: {held or 'an unknown process'} writes its checkpoints there; end "
        "that run, or set output to another directory. If you are certain that it no longer runs, "
        f"delete {path}"
    )


def _machine() -> str:
    """Returns what two processes have in common if they see the same process ids."""
    try:
        return (
            f"{Path('/proc/sys/kernel/random/boot_id').read_text(encoding='utf-8').strip()} "
            f"{os.readlink('/proc/self/ns/pid')}"
        )
    except OSError:
        return f"host {socket.gethostname()}"  # not Linux


def _status(pid: int) -> tuple[str, int] | None:
    """Returns the state of a process, such as "S", and when it started, in ticks since the boot;
    None if that cannot be known here.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        return fields[0], int(fields[19])
    except (OSError, ValueError, IndexError):
        return None
