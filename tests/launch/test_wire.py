"""The wire: values of any shape arrive whole; strangers, replays and altered frames do not."""

from __future__ import annotations

import socket
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparkdl.launch.wire import Connection, WireError, dump_value, load_value

SECRET = b"s" * 32


def pair(secret_of_client=SECRET):
    """Return a connected server and client end; the exception of an end that refused, in its place."""
    ends = socket.socketpair()
    made = [None, None]

    def make(which, secret):
        try:
            made[which] = Connection(ends[which], secret, server=which == 0)
        except Exception as error:
            made[which] = error
            ends[which].close()

    threads = [threading.Thread(target=make, args=args) for args in ((0, SECRET), (1, secret_of_client))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return made


# A socket pair has no TCP options, so the tests talk over loopback.
@pytest.fixture(autouse=True)
def _tcp_pairs(monkeypatch):
    def tcp_pair():
        with socket.create_server(("127.0.0.1", 0)) as listener:
            client = socket.create_connection(listener.getsockname())
            server, _ = listener.accept()
        return server, client

    monkeypatch.setattr(socket, "socketpair", tcp_pair)


def send_and_receive(value):
    server, client = pair()
    parts = dump_value(value)
    thread = threading.Thread(target=client.send_value, args=({"kind": "result"}, parts))
    thread.start()
    message, received = server.receive()
    thread.join()
    client.close()
    server.close()
    assert message == {"kind": "result"}
    return load_value(received)


def test_small_arrays_travel_in_the_pickle_and_stay_writable():
    parts = dump_value([np.arange(number) for number in range(1000)])
    assert len(parts) == 1
    rebuilt = load_value([bytearray(part) for part in parts])
    rebuilt[9][0] = 7
    assert rebuilt[9].tolist() == [7, *range(1, 9)]
    assert len(dump_value(np.zeros(1 << 14, np.uint8))) == 2


@settings(max_examples=15, deadline=None)
@given(st.recursive(st.none() | st.integers() | st.text() | st.binary(), lambda inner: st.lists(inner)))
def test_plain_values_arrive(value):
    assert send_and_receive(value) == value


@pytest.mark.parametrize("count", [0, 1, 4 << 20, (4 << 20) + 1, 9_000_001])
def test_arrays_arrive_and_can_be_written(count):
    array = np.arange(count, dtype=np.uint8)
    arrived = send_and_receive({"a": array, "b": array[::-1].copy()})
    np.testing.assert_array_equal(arrived["a"], array)
    np.testing.assert_array_equal(arrived["b"], array[::-1])
    arrived["a"][:1] = 7


def test_a_closure_arrives():
    three = 3
    assert send_and_receive(lambda x: x + three)(4) == 7


def test_messages_pass_between_the_pieces_of_a_value():
    server, client = pair()
    parts = dump_value(np.zeros(60_000_000, np.uint8))
    sender = threading.Thread(target=client.send_value, args=({"kind": "result"}, parts))
    talker = threading.Thread(target=lambda: [client.send({"kind": "log", "n": n}) for n in range(100)])
    sender.start()
    talker.start()
    kinds = [server.receive()[0]["kind"] for _ in range(101)]
    sender.join()
    talker.join()
    assert sorted(set(kinds)) == ["log", "result"]
    client.close()
    server.close()


def test_a_stranger_without_the_secret_is_turned_away():
    server, client = pair(secret_of_client=b"x" * 32)
    assert isinstance(server, WireError)
    assert isinstance(client, OSError | WireError)


def test_an_altered_frame_is_refused():
    server, client = pair()
    real = client._sock

    class Altering:
        def sendall(self, data):
            real.sendall(bytes(data).replace(b"true", b"fals"))

    client._sock = Altering()
    client.send({"kind": "x", "allowed": True})
    with pytest.raises(WireError, match="tag"):
        server.receive()
    real.close()
    server.close()


def test_a_replayed_frame_is_refused():
    server, client = pair()
    real, sent = client._sock, []

    class Recording:
        def sendall(self, data):
            sent.append(bytes(data))
            real.sendall(data)

    client._sock = Recording()
    client.send({"kind": "x"})
    assert server.receive()[0] == {"kind": "x"}
    real.sendall(sent[0])
    with pytest.raises(WireError, match="tag"):
        server.receive()
    real.close()
    server.close()


def test_a_message_beyond_its_bound_is_refused_before_it_is_sent():
    server, client = pair()
    with pytest.raises(WireError, match="exceeds"):
        client.send({"kind": "x", "text": "y" * (5 << 20)})
    client.close()
    with pytest.raises(ConnectionError):
        server.receive()
    server.close()
