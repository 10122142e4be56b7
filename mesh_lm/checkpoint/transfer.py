"""The transfer of one process's files of a local step between two processes of a job, over an
authenticated connection.

Both ends prove that they know the job's secret, as launchers do (`mesh_lm.network.channel`). Then
one message says how long the files are, the bytes follow as they are, and a last message has their
SHA-256. The files appear in the step's directory in one rename, once that is right. Every wait for
the other end is limited, and neither end holds more than a MiB of the files in memory.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import secrets
import shutil
import socket
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

from mesh_lm.network.channel import Channel, Refused
from mesh_lm.network.protocol import Check, boolean, items, require, text, whole
from mesh_lm.network.secret import Secret

FILES = ("state.raw", "description.json")
"""The files of a step; where the last one is, the step is complete."""
ARRIVING = "arriving-"
"""Beginning of the names of directories of files on their way, beside those of the steps."""
HANDSHAKE = 5.0
"""Seconds within which the other end must have proved itself."""
SILENCE = 30.0
"""Seconds within which the other end must send or take a MiB."""
STORED = 600.0
"""Seconds within which it must have written to its disk what it still holds in memory."""
_SYNCED = 2**28
"""Bytes that the receiver's page cache holds at most before they are written to its disk."""
_PIECE = 2**20
_PURPOSE = "local copies"
_PROBLEM_SIZE = 300
"""Characters of a problem that is reported to the other end."""
_STEP = whole(0)
_PROCESS = whole(0, 2**20)
_SHAPES: Mapping[str, Check] = {
    "put": _STEP,
    "get": _STEP,
    "process": _PROCESS,
    "sizes": items(whole(0), size=len(FILES)),
    "ready": boolean,
    "stored": boolean,
    "sha256": text(64, "[0-9a-f]{64}"),
    "problem": text(_PROBLEM_SIZE),
}


class TransferFailed(ConnectionError):
    """The other end hung up, was silent, or could not do its part; the text says which."""


class Conversation:
    """An authenticated connection to another process of the job.

    Calls wait, at most `SILENCE` seconds for each MiB.
    """

    def __init__(self, connection: socket.socket, secret: Secret, *, serves: bool) -> None:
        """Waits until both ends have proved themselves.

        serves: whether this end accepted the connection.

        Raises Refused if the other end cannot prove itself, and TransferFailed.
        """
        self._socket = connection
        self._channel = Channel(secret, _PURPOSE, serves=serves)
        self._messages: deque[dict[str, Any]] = deque()
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        deadline = time.monotonic() + HANDSHAKE
        try:
            while not self._channel.proven:
                self._flush(deadline - time.monotonic())
                self._read(deadline - time.monotonic())
        except Refused:
            connection.setblocking(False)
            _quietly(lambda: connection.send(self._channel.refuse()))
            raise
        self._flush(SILENCE)

    def send(self, **message: Any) -> None:
        """Sends a message."""
        self._channel.send(message)
        self._flush(SILENCE)

    def receive(self, *required: str, seconds: float | None = None) -> dict[str, Any]:
        """Returns the next message, which has these fields.

        seconds: the time allowed, if not `SILENCE`.

        Raises TransferFailed if the other end reports a problem instead.
        """
        while not self._messages:
            self._read(SILENCE if seconds is None else seconds)
        message = self._messages.popleft()
        require(message, _SHAPES)
        if "problem" in message:
            raise TransferFailed(message["problem"])
        require(message, _SHAPES, *required)
        return message

    def send_bytes(self, data: memoryview) -> None:
        """Sends bytes that are not part of a message.

        If the other end hangs up, raises TransferFailed with the reason that it sent.
        """
        try:
            self._guarded(SILENCE, lambda: self._socket.sendall(data))
        except TransferFailed:
            raise
        except OSError:
            self.receive()  # its last message is still there
            raise

    def receive_bytes(self, buffer: memoryview) -> int:
        """Reads some bytes that are not part of a message, and returns how many, at least one."""
        n = self._guarded(SILENCE, lambda: self._socket.recv_into(buffer))
        if not n:
            raise TransferFailed("the other end hung up in the middle of a file")
        return n

    def hang_up(self) -> None:
        """Ends the conversation, also for a thread that waits in it."""
        _quietly(lambda: self._socket.shutdown(socket.SHUT_RDWR))

    def _read(self, seconds: float) -> None:
        data = self._guarded(seconds, lambda: self._socket.recv(2**16))
        if not data:
            raise TransferFailed("the other end hung up before its next message")
        self._messages += self._channel.feed(data)

    def _flush(self, seconds: float) -> None:
        data = self._channel.outgoing
        self._channel.outgoing = b""
        self._guarded(seconds, lambda: self._socket.sendall(data))

    def _guarded(self, seconds: float, action: Callable[[], Any]) -> Any:
        """Returns what the action does within this time. Raises TransferFailed otherwise."""
        if seconds <= 0:
            raise TransferFailed("the other end was silent until the time was over")
        self._socket.settimeout(seconds)
        try:
            return action()
        except TimeoutError:
            raise TransferFailed("the other end was silent, or too slow") from None


def send_step(receiver: Conversation, directory: Path, fields: dict[str, int]) -> None:
    """Sends the files of a step, and returns when the other end has stored them.

    fields: of the first message. Raises OSError or ValueError.
    """
    buffer = memoryview(bytearray(_PIECE))
    digest = hashlib.sha256()
    arrays, description = (directory / name for name in FILES)
    # Both are opened before anything is sent: the step may be removed meanwhile, and is still read.
    with open(arrays, "rb") as arrays_file, open(description, "rb") as description_file:
        files = (arrays_file, description_file)
        sizes = [os.fstat(file.fileno()).st_size for file in files]
        receiver.send(**fields, sizes=sizes)
        receiver.receive("ready")
        for file, size in zip(files, sizes, strict=True):
            remaining = size
            while remaining:
                n = file.readinto(buffer[: min(remaining, _PIECE)])
                if not n:
                    raise TransferFailed(f"{file.name} became shorter while it was sent")
                digest.update(buffer[:n])
                receiver.send_bytes(buffer[:n])
                remaining -= n
    receiver.send(sha256=digest.hexdigest())
    receiver.receive("stored", seconds=STORED)


def receive_step(sender: Conversation, sizes: list[int], directory: Path) -> None:
    """Stores the files that the other end sends after its first message, in one rename, or not at
    all, and tells it the outcome.

    Raises OSError or ValueError.
    """
    arriving = directory.parent.parent / f"{ARRIVING}{secrets.token_hex(8)}"
    try:
        arriving.mkdir(parents=True)
        free = shutil.disk_usage(arriving).free
        if sum(sizes) > free:
            raise OSError(
                errno.ENOSPC, f"{sum(sizes)} bytes do not fit into the {free} that are free"
            )
        sender.send(ready=True)
        digest = _receive_files(sender, sizes, arriving)
        if sender.receive("sha256")["sha256"] != digest:
            raise TransferFailed("the files arrived with other bytes than were sent")
        clear(directory)
        directory.parent.mkdir(exist_ok=True)
        arriving.rename(directory)
        sync(directory.parent)  # the sender takes the step for stored from here on
        sender.send(stored=True)
    except OSError as error:
        problem = error.strerror or str(error)
        printable = problem.encode("ascii", "replace").decode()[:_PROBLEM_SIZE]
        _quietly(lambda: sender.send(problem=printable))
        raise
    finally:
        shutil.rmtree(arriving, ignore_errors=True)


def _receive_files(sender: Conversation, sizes: list[int], directory: Path) -> str:
    """Writes the files of a step as they arrive, and returns the SHA-256 of all bytes."""
    buffer = memoryview(bytearray(_PIECE))
    digest = hashlib.sha256()
    for name, size in zip(FILES, sizes, strict=True):
        remaining = size
        unsynced = 0
        with open(directory / name, "wb") as file:
            while remaining:
                n = sender.receive_bytes(buffer[: min(remaining, _PIECE)])
                digest.update(buffer[:n])
                file.write(buffer[:n])
                remaining -= n
                unsynced += n
                if unsynced >= _SYNCED:
                    flush(file)
                    unsynced = 0
            flush(file)
    return digest.hexdigest()


def flush(file: IO[Any]) -> None:
    """Makes what was written to a file survive a crash of the machine."""
    file.flush()
    os.fsync(file.fileno())


def clear(directory: Path) -> None:
    """Removes the files of a step.

    First goes the file that makes it complete, so that a half-removed step is not taken for that.
    """
    (directory / FILES[-1]).unlink(missing_ok=True)
    shutil.rmtree(directory, ignore_errors=True)


def sync(directory: Path) -> None:
    """Makes the names in a directory survive a crash of the machine."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _quietly(action: Callable[[], Any]) -> None:
    with contextlib.suppress(OSError, ValueError):
        action()
