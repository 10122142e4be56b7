"""An authenticated conversation between two processes of a job: bytes in, messages out. It touches
no socket.

Each end sends a line with a random nonce. The client then proves that it knows the job's secret,
the server proves the same, and only then messages follow, one JSON object per line. Each line
starts with an HMAC over the direction, a sequence number and the line, with a key that both nonces
went into: a line that was recorded in another conversation, repeated, reordered, changed or sent
back is refused. Nothing is encrypted. An end that has not proved itself can make the other one keep
256 bytes, and no more.
"""

from __future__ import annotations

import hmac
import json
import secrets
from typing import Any

from mesh_lm import strict_json
from mesh_lm.network.secret import Secret

_GREETING = b"mesh_lm 1 "
_REFUSED = b"refused"
_NONCE = 32
"""Characters of a nonce, in hexadecimal."""
_TAG = 64
"""Characters of an HMAC, in hexadecimal."""
_BEFORE_PROOF = 256
"""Bytes of a line from an end that has not proved itself."""
_LONGEST = _TAG + 1 + strict_json.MESSAGE
"""Bytes of a line from one that has."""


class Refused(ValueError):
    """The other end does not belong to the job, or does not keep to the protocol.

    The text has no part of what it sent.
    """


class Channel:
    """One end of a conversation.

    Attributes:
      proven: whether the other end has proved that it knows the secret.
      outgoing: bytes to send, to be taken by the owner.
    """

    def __init__(self, secret: Secret, purpose: str, *, serves: bool) -> None:
        """Greets the other end.

        purpose: what the conversation is about; both ends must agree. serves: whether this end
        accepted the connection.
        """
        self._secret = secret
        self._purpose = purpose.encode()
        self._serves = serves
        self._nonce = secrets.token_hex(_NONCE // 2).encode()
        self._key: Secret | None = None  # known when the other end has greeted
        self._n_sent = 0
        self._n_received = 0
        self._incoming = bytearray()  # the beginning of a line
        self._unsent: list[bytes] = []  # messages that wait for the other end's proof
        self.proven = False
        self.outgoing = _GREETING + self._nonce + b"\n"

    def send(self, message: dict[str, Any]) -> None:
        """Adds a message to `outgoing`, once the other end has proved itself.

        Raises ValueError if it is longer than 1 MiB.
        """
        body = json.dumps(message).encode()
        if len(body) > strict_json.MESSAGE:
            raise ValueError(
                f"a message cannot be sent: it has {len(body)} bytes, and may have at most "
                f"{strict_json.MESSAGE}"
            )
        self._unsent.append(body)
        self._flush()

    def feed(self, data: bytes) -> list[dict[str, Any]]:
        """Takes bytes that have arrived, and returns the messages that are complete.

        Raises Refused, after which the connection must be closed.
        """
        messages = []
        # bytes.splitlines also splits at \r, which costs nothing: only \n ends a line.
        pieces = data.splitlines(keepends=True) if b"\n" in data else [data]
        for piece in pieces:
            self._incoming += piece
            limit = _LONGEST if self.proven else _BEFORE_PROOF
            if len(self._incoming) > limit + 1:
                raise Refused(f"it sent more than {limit} bytes without the end of a line")
            if self._incoming.endswith(b"\n"):
                line = bytes(self._incoming[:-1])
                self._incoming = bytearray()
                messages += self._handle(line)
        return messages

    def refuse(self) -> bytes:
        """Returns what to send to an end that was refused before it proved itself.

        It says nothing but that.
        """
        return b"" if self.proven else _REFUSED + b"\n"

    def _handle(self, line: bytes) -> list[dict[str, Any]]:
        if self._key is None:
            self._accept_greeting(line)
            return []
        if not self.proven and not self._serves and line == _REFUSED:
            raise Refused("it does not accept this secret")
        body = self._verified_body(line)
        if not self.proven:
            # This line was the other end's proof. A server proves itself only now, so that a
            # client that does not know the secret learns nothing.
            if self._serves:
                self._seal(b"")
            self.proven = True
            self._flush()
            return []
        try:
            return [strict_json.loads(body)]
        except ValueError as error:
            raise Refused(f"it sent a message that is {error}") from None

    def _accept_greeting(self, line: bytes) -> None:
        """Derives the key from both nonces. A client then proves itself."""
        nonce = line.removeprefix(_GREETING)
        if not line.startswith(_GREETING) or len(nonce) != _NONCE or nonce == self._nonce:
            raise Refused("it is not mesh_lm, or another version of it")
        server = self._nonce if self._serves else nonce
        client = nonce if self._serves else self._nonce
        self._key = Secret(self._secret.tag(_GREETING, self._purpose, server, client))
        if not self._serves:
            self._seal(b"")

    def _verified_body(self, line: bytes) -> bytes:
        tag = line[:_TAG]
        body = line[_TAG + 1 :]
        sender = b"client" if self._serves else b"server"
        if not hmac.compare_digest(tag, self._tag(sender, self._n_received, body)):
            if self.proven:
                raise Refused("it sent a line without a valid signature")
            raise Refused("it has another secret than this end")
        self._n_received += 1
        return body

    def _seal(self, body: bytes) -> None:
        """Adds a signed line to `outgoing`."""
        sender = b"server" if self._serves else b"client"
        self.outgoing += self._tag(sender, self._n_sent, body) + b" " + body + b"\n"
        self._n_sent += 1

    def _tag(self, side: bytes, number: int, body: bytes) -> bytes:
        assert self._key is not None  # both have greeted
        return self._key.tag(side, number.to_bytes(8, "big"), body).hex().encode()

    def _flush(self) -> None:
        if self.proven:
            for body in self._unsent:
                self._seal(body)
            self._unsent.clear()
