"""Connections between the processes of a job: an authenticated channel over TCP. Nothing here
blocks on a slow or silent other end.
"""

from __future__ import annotations

import ipaddress
import socket
import time
from typing import Any

from mesh_lm.network.channel import Channel, Refused
from mesh_lm.network.secret import Secret

_PIECE = 2**16
_PIECES = 16
"""Pieces that one call reads, so that no sender keeps the caller busy."""
_UNSENT = 2**20
"""Bytes that wait for an end that does not keep up."""
_BACKLOG = 1024
"""Connections that wait to be accepted (the system may allow fewer); where there is no room, one
waits a second to try again."""
LOOPBACK = "127.0.0.1"
QUIET = 2.0
"""Seconds after which a node or a process that has no answer says for whom it waits."""


class Peer:
    """The other end of a connection.

    Attributes:
      open: whether it is still connected, as far as the system knows.
      address: its IP address; "unknown" if it had hung up at once.
      refused: why it was refused; empty: it was not.
    """

    def __init__(
        self, connection: socket.socket, secret: Secret, purpose: str, *, serves: bool
    ) -> None:
        """Greets the other end.

        serves: whether this end accepted the connection. secret, purpose: as of `Channel`.
        """
        self._socket = connection
        self._channel = Channel(secret, purpose, serves=serves)
        self._unsent = b""
        self._connected_at = time.monotonic()
        self._last_received = self._connected_at
        self.open = True
        self.refused = ""
        connection.setblocking(False)
        try:
            self.address = str(connection.getpeername()[0]).removeprefix("::ffff:")
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        except OSError:  # it has hung up already
            self.address = "unknown"
            self.open = False
        self._write()

    @property
    def proven(self) -> bool:
        """Whether the other end has proved that it knows the secret."""
        return self._channel.proven

    @property
    def silence(self) -> float:
        """Seconds since its last bytes arrived."""
        return time.monotonic() - self._last_received

    @property
    def age(self) -> float:
        """Seconds since it was connected."""
        return time.monotonic() - self._connected_at

    def send(self, **message: Any) -> None:
        """Sends a message.

        A later call sends it if the other end does not keep up, or has not proved itself.
        """
        self._channel.send(message)
        self._write()

    def receive(self, *, excused: bool = False) -> list[dict[str, Any]]:
        """Returns the messages that have arrived. An end that is refused is closed.

        excused: do not count its silence so far.
        """
        if excused:
            self._last_received = time.monotonic()
        messages = []
        try:
            for _ in range(_PIECES):
                piece = self._socket.recv(_PIECE)
                if not piece:
                    self.open = False
                    break
                self._last_received = time.monotonic()
                messages += self._channel.feed(piece)
        except BlockingIOError:
            pass
        except OSError:
            self.open = False
        except Refused as error:
            self.refused = str(error)
            self._unsent += self._channel.refuse()
            self._write()
            self.close()
            return []
        self._write()
        return messages

    def _write(self) -> None:
        self._unsent += self._channel.outgoing
        self._channel.outgoing = b""
        try:
            while self.open and self._unsent:
                n_sent = self._socket.send(self._unsent)
                self._unsent = self._unsent[n_sent:]
        except BlockingIOError:
            self.open = len(self._unsent) < _UNSENT
        except OSError:
            self.open = False

    def close(self) -> None:
        """Closes the connection."""
        self.open = False
        self._socket.close()


def is_loopback(host: str) -> bool:
    """Whether a host's name or address is this machine seen by itself only.

    Such as 127.0.0.1 or localhost.
    """
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def free_port(host: str = LOOPBACK) -> int:
    """Returns a free port of this machine. host: the address; empty for all of them."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return probe.getsockname()[1]


def listen(port: int, host: str = "", backlog: int = 0) -> socket.socket:
    """Returns a socket that listens on all addresses of this machine, or on `host`.

    port 0: any free one. backlog: at least this many connections wait to be accepted, and never
    fewer than `_BACKLOG`. Raises OSError if the port is taken.
    """
    address = (host, port)
    backlog = max(backlog, _BACKLOG)
    if ":" in host:
        return socket.create_server(address, family=socket.AF_INET6, backlog=backlog)
    if host or not socket.has_dualstack_ipv6():
        return socket.create_server(address, backlog=backlog)
    return socket.create_server(
        address, family=socket.AF_INET6, dualstack_ipv6=True, backlog=backlog
    )
