"""The launchers' protocol: one JSON object per line over TCP. Sending never blocks on a slow reader."""

from __future__ import annotations

import json
import socket
import time
from typing import Any

_LONGEST = 2**20
"""Bytes of a line; a peer that sends more is not a launcher."""


class Peer:
    """The other end of a connection.

    Attributes:
      open: whether it is still connected, as far as the system knows.
      heard: when its last bytes arrived (time.monotonic).
    """

    def __init__(self, connection: socket.socket) -> None:
        self._socket, self._incoming, self._outgoing = connection, b"", b""
        self.open, self.heard = True, time.monotonic()
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    @property
    def silence(self) -> float:
        """Seconds since its last bytes arrived."""
        return time.monotonic() - self.heard

    def send(self, **message: Any) -> None:
        """Sends a message now, or with a later call if the other end does not keep up."""
        self._outgoing += json.dumps(message).encode() + b"\n"
        try:
            while self.open and self._outgoing:
                self._outgoing = self._outgoing[self._socket.send(self._outgoing) :]
        except BlockingIOError:
            self.open = len(self._outgoing) < _LONGEST
        except OSError:
            self.open = False

    def receive(self, *, excused: bool = False) -> list[dict[str, Any]]:
        """Returns all messages since the last call. Invalid data closes the connection. excused: do not count its silence until now."""
        if excused:
            self.heard = time.monotonic()
        try:
            while piece := self._socket.recv(2**16):
                self._incoming, self.heard = self._incoming + piece, time.monotonic()
            self.open = False
        except BlockingIOError:
            pass
        except OSError:
            self.open = False
        *lines, self._incoming = self._incoming.split(b"\n")
        try:
            messages: list[Any] = [json.loads(line) for line in lines]
        except ValueError:
            messages = [None]
        if len(self._incoming) <= _LONGEST and all(isinstance(message, dict) for message in messages):
            return messages
        self.open = False
        return []

    def close(self) -> None:
        """Closes the connection."""
        self.open = False
        self._socket.close()


def free_port(host: str = "127.0.0.1") -> int:
    """Returns a free port of this machine. host: the address; empty for all of them."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return probe.getsockname()[1]


def listen(port: int, host: str = "", backlog: int | None = None) -> socket.socket:
    """Returns a socket that listens on all addresses of this machine, or on `host`. port 0: any free one. Raises OSError if it is taken."""
    if host or not socket.has_dualstack_ipv6():
        return socket.create_server((host, port), backlog=backlog)
    return socket.create_server((host, port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=backlog)
