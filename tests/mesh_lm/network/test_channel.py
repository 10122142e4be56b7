"""The authenticated channel, and connections that use it: strangers, wrong secrets, replays, floods
and nesting, without processes."""

import contextlib
import json
import socket
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mesh_lm import strict_json
from mesh_lm.errors import ConfigError
from mesh_lm.network import protocol, secret
from mesh_lm.network.channel import Channel, Refused
from mesh_lm.network.secret import Secret
from mesh_lm.network.wire import LOOPBACK, Peer, is_loopback, listen

SECRET = Secret.new()


def taken(channel: Channel) -> bytes:
    """Returns what a channel wants to send."""
    data = channel.outgoing
    channel.outgoing = b""
    return data


def pair(
    server: Secret = SECRET, client: Secret = SECRET, purposes: tuple[str, str] = ("test", "test")
) -> tuple[Channel, Channel]:
    """Returns a server and a client after as much of the handshake as they agree to."""
    server_end = Channel(server, purposes[0], serves=True)
    client_end = Channel(client, purposes[1], serves=False)
    for _ in range(3):
        server_end.feed(taken(client_end))
        client_end.feed(taken(server_end))
    return server_end, client_end


def test_messages_arrive_in_pieces_of_any_size() -> None:
    server, client = pair()
    sent = [{"n": n, "text": "\n\r\u2028" * n} for n in range(5)]
    for message in sent:
        client.send(message)
    data = taken(client)
    assert [message for i in range(len(data)) for message in server.feed(data[i : i + 1])] == sent
    server.send({"answer": 1})
    assert client.feed(taken(server)) == [{"answer": 1}]


def test_nothing_is_said_before_the_other_end_has_proved_itself() -> None:
    client = Channel(SECRET, "test", serves=False)
    client.send({"config": "private"})
    assert taken(client).startswith(b"mesh_lm 1 ")
    assert not client.proven
    client.feed(b"mesh_lm 1 " + b"0" * 32 + b"\n")
    client.send({"config": "private"})
    with pytest.raises(Refused, match="another secret"):
        client.feed(b"0" * 64 + b" {}\n")
    assert b"private" not in taken(client)


@pytest.mark.parametrize(
    ("other", "purposes"), [(Secret.new(), ("test", "test")), (SECRET, ("launcher", "rendezvous"))]
)
def test_another_secret_or_purpose(other: Secret, purposes: tuple[str, str]) -> None:
    with pytest.raises(Refused, match="another secret"):
        pair(client=other, purposes=purposes)


def test_lines_of_another_connection_repeated_reordered_or_sent_back_are_refused() -> None:
    server, client = pair()
    client.send({"stop": "SIGTERM"})
    recorded = taken(client)
    assert server.feed(recorded) == [{"stop": "SIGTERM"}]
    with pytest.raises(Refused, match="valid signature"):
        server.feed(recorded)
    with pytest.raises(Refused, match="valid signature"):
        pair()[0].feed(recorded)
    server, client = pair()
    client.send({"n": 1})
    client.send({"n": 2})
    first, second = taken(client).splitlines(keepends=True)
    with pytest.raises(Refused, match="valid signature"):
        server.feed(second + first)
    with pytest.raises(Refused, match="valid signature"):
        client.feed(first)
    stranger = Channel(SECRET, "test", serves=True)
    with pytest.raises(Refused, match="not mesh_lm"):  # its own nonce, sent back
        stranger.feed(taken(stranger))


@pytest.mark.parametrize("end", ["server", "client"])
def test_a_whole_conversation_that_was_recorded_is_refused(end: str) -> None:
    """Either end refuses it, because its own nonce is a new one."""
    server = Channel(SECRET, "test", serves=True)
    client = Channel(SECRET, "test", serves=False)
    recorded = {"server": b"", "client": b""}
    for _ in range(3):
        for name, sender, receiver in (("client", client, server), ("server", server, client)):
            data = taken(sender)
            recorded[name] += data
            receiver.feed(data)
    assert server.proven
    assert client.proven
    other_end = {"server": "client", "client": "server"}[end]
    with pytest.raises(Refused, match="another secret"):
        Channel(SECRET, "test", serves=end == "server").feed(recorded[other_end])


def test_a_line_that_was_changed_is_refused() -> None:
    server, client = pair()
    client.send({"exit": 0})
    with pytest.raises(Refused, match="valid signature"):
        server.feed(taken(client).replace(b"0}", b"1}"))


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"[" * 200_000 + b"\n", "more than 256 bytes"),
        (b"\0" * 300, "more than 256 bytes"),
        (b"GET / HTTP/1.1\r\n", "not mesh_lm"),
        (b"mesh_lm 2 " + b"0" * 32 + b"\n", "not mesh_lm"),
        (b"\n", "not mesh_lm"),
        (b"mesh_lm 1 " + b"0" * 32 + b"\nrefused\n", "another secret"),
    ],
)
def test_strangers(data: bytes, reason: str) -> None:
    server = Channel(SECRET, "test", serves=True)
    with pytest.raises(Refused, match=reason):
        server.feed(data)
    assert not server.proven
    assert len(server._incoming) <= 300_000


@pytest.mark.parametrize(
    "body",
    [b"[" * 500_000, b"[]", b"{", b'{"a":' * 100 + b"1" + b"}" * 100, b"\xff", b"1" * 5000, b""],
)
def test_a_signed_message_that_is_none(body: bytes) -> None:
    server, client = pair()
    client._seal(body)
    with pytest.raises(Refused, match="it sent a message that is"):
        server.feed(taken(client))


def test_a_message_that_is_too_long() -> None:
    server, client = pair()
    with pytest.raises(ValueError, match="at most 1048576"):
        client.send({"text": "x" * 2**20})
    with pytest.raises(Refused, match="without the end of a line"):
        for _ in range(20):
            server.feed(b"x" * 2**16)


@settings(max_examples=200)
@given(
    st.lists(
        st.one_of(
            st.binary(max_size=300),
            st.sampled_from([b"mesh_lm 1 ", b"0" * 32, b"\n", b"refused\n", b"{}"]),
        ),
        max_size=8,
    )
)
def test_no_bytes_of_a_stranger_prove_anything(pieces: list[bytes]) -> None:
    server = Channel(SECRET, "test", serves=True)
    with contextlib.suppress(Refused):
        assert not [message for piece in pieces for message in server.feed(piece)]
    assert not server.proven


ANY = st.recursive(
    st.one_of(
        st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8), st.just(10**400)
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=6,
)
TABLES = [
    protocol.HELLO,
    protocol.REPORT,
    protocol.ORDER,
    protocol.BEAT,
    protocol.PRESENTED,
    protocol.OUTCOME,
]


@settings(max_examples=300)
@given(st.sampled_from(TABLES), st.data())
def test_no_field_of_another_type_is_accepted(table: dict, data: st.DataObject) -> None:
    """A table accepts a message or raises ValueError, whatever is in it; the error does not repeat
    a value."""
    message = data.draw(st.dictionaries(st.sampled_from(sorted(table)), ANY))
    try:
        protocol.require(message, table)
    except ValueError as error:
        fields = str(error).partition(": ")[2].split(", ")
        assert {*fields} <= {*message}


@settings(max_examples=300)
@given(st.one_of(ANY, st.binary(max_size=200), st.text(max_size=200)), st.integers(1, 8))
@example(b'{"a": "' + b'\\"' * 50_000, 4)
def test_the_reader_raises_nothing_but_value_errors(value: object, depth: int) -> None:
    text = value if isinstance(value, bytes | str) else json.dumps(value)
    with contextlib.suppress(ValueError):
        strict_json.loads(text, depth=depth)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (protocol.BEAT, {"step": True}),
        (protocol.BEAT, {"since": False}),
        (protocol.REPORT, {"stop": "SIGTERMS"}),
        (protocol.HELLO, {"hello": "mesh_lm 2"}),
        (protocol.REPORT, {"beats": {"0 ": {}}}),
        (protocol.ORDER, {"exit": 256}),
    ],
)
def test_values_that_are_almost_right(table: dict, message: dict) -> None:
    (name,) = message
    with pytest.raises(ValueError, match=f"not as expected: {name}$"):
        protocol.require(message, table)


def test_brackets_in_strings_do_not_nest() -> None:
    text = '{"a": [{"b": "[[[[[[[[[[\\"{{{{{"}]}'
    assert strict_json.loads(text, depth=3) == json.loads(text)
    with pytest.raises(ValueError, match="nested deeper than 2 levels"):
        strict_json.loads(text, depth=2)


def test_a_file_is_read_no_further_than_its_limit(tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    path.write_text('\ufeff{"a": 1}', encoding="utf-8")
    assert strict_json.read(path) == {"a": 1}
    with pytest.raises(ValueError, match="longer than 1000 bytes"):
        strict_json.read(Path("/dev/zero"), size=1000)
    with pytest.raises(ValueError, match="expected a list, got dict"):
        strict_json.read(path, list)


def test_a_peer_that_floods_is_closed_and_one_call_ends() -> None:
    with (
        listen(0, LOOPBACK) as listener,
        socket.create_connection(listener.getsockname()) as theirs,
    ):
        peer = Peer(listener.accept()[0], SECRET, "test", serves=True)
        theirs.setblocking(False)
        for _ in range(100):
            try:
                theirs.send(b"x" * 2**16)
            except (BlockingIOError, BrokenPipeError):
                break
        assert peer.receive() == []
        assert not peer.open
        assert "256 bytes" in peer.refused


def test_a_peer_that_reads_nothing_is_given_up() -> None:
    """The bytes that wait for it have a limit."""
    with (
        listen(0, LOOPBACK) as listener,
        socket.create_connection(listener.getsockname()) as theirs,
    ):
        peer = Peer(listener.accept()[0], SECRET, "test", serves=True)
        client = Channel(SECRET, "test", serves=False)
        while not peer.proven:
            theirs.sendall(taken(client))
            client.feed(theirs.recv(2**16))
            theirs.sendall(taken(client))
            peer.receive()
        for _ in range(80):
            if peer.open:
                peer.send(text="x" * 2**18)
        assert not peer.open
        assert len(peer._unsent) < 2**21
        peer.close()


def test_where_a_secret_comes_from(tmp_path: Path) -> None:
    home = {"HOME": str(tmp_path)}
    made = Secret.shared(home)
    path = Path(secret.OWN_FILE.replace("~", str(tmp_path)))
    assert path.stat().st_mode & 0o777 == 0o600
    assert [*path.parent.iterdir()] == [path]
    assert (
        Secret.shared(home).text()
        == made.text()
        == path.read_text(encoding="utf-8").strip()
        != Secret.new().text()
    )
    assert "Secret(...)" == repr(made) == f"{made}"
    assert Secret.shared(home | {"MESH_LM_SECRET": made.text()}).text() == made.text()
    assert Secret.shared({"MESH_LM_SECRET_FILE": str(path)}).text() == made.text(), (
        "what a variable names comes first"
    )
    assert made.derived("workers", "1").text() not in (
        made.text(),
        made.derived("workers", "2").text(),
    )
    path.chmod(0o640)
    with pytest.raises(ConfigError, match=r"others can read or change the secret in .*chmod 600"):
        Secret.shared(home)
    with pytest.raises(ConfigError, match="MESH_LM_SECRET must have 16 to 4096 characters"):
        Secret.shared({"MESH_LM_SECRET": "short"})
    with pytest.raises(ConfigError, match="cannot read the secret in /nowhere"):
        Secret.shared({"MESH_LM_SECRET_FILE": "/nowhere"})
    with pytest.raises(
        ConfigError,
        match=r"cannot be made: .*; set MESH_LM_SECRET to the same random text on every host",
    ):
        Secret.shared({"HOME": "/dev/null"})


def test_loopback() -> None:
    assert all(map(is_loopback, ("127.0.0.1", "127.0.0.2", "::1", "localhost")))
    assert not any(map(is_loopback, ("0.0.0.0", "::", "10.0.0.1", "node1", "")))
