"""The port of a run: connections that prove nothing keep nobody out, and cost little."""

from __future__ import annotations

import os
import socket
import threading
import time

import psutil
import pytest

from sparkdl.launch import wire
from sparkdl.launch.wire import MAX_UNPROVEN, Listener, WireError, authenticated, connect

SECRET = b"s" * 32


@pytest.fixture
def listener():
    def echo(connection):
        try:
            while True:
                connection.send(connection.receive()[0])
        except OSError:
            pass

    before = set(threading.enumerate())
    opened = Listener("127.0.0.1", authenticated(SECRET), echo)
    yield opened
    opened.close()
    assert set(threading.enumerate()) <= before


def answers(connection):
    connection.send({"n": 1})
    return connection.receive()[0] == {"n": 1}


def test_more_silent_connections_than_are_held_keep_nobody_out(listener):
    early = connect(listener.address, SECRET)
    silent = [socket.create_connection(listener.address) for _ in range(4 * MAX_UNPROVEN)]
    late = connect(listener.address, SECRET)
    assert answers(early)
    assert answers(late)
    for connection in (*silent, early, late):
        connection.close()


def test_who_was_dropped_in_a_crowd_comes_again(listener, monkeypatch):
    """The first two tries of an honest end are dropped before it has proved anything."""
    tries = []
    honest = socket.create_connection

    def crowded(address, timeout):
        sock = honest(address, timeout=timeout)
        tries.append(sock)
        if len(tries) <= 2:
            sock.shutdown(socket.SHUT_RDWR)
        return sock

    monkeypatch.setattr(socket, "create_connection", crowded)
    connection = connect(listener.address, SECRET)
    assert answers(connection)
    assert len(tries) == 3
    connection.close()


def test_a_byte_now_and_then_does_not_move_the_deadline(listener, monkeypatch):
    monkeypatch.setattr(wire, "_HANDSHAKE_SECONDS", 0.5)
    with socket.create_connection(listener.address) as slow:
        slow.settimeout(10)
        slow.recv(32)
        dropped = threading.Event()

        def drip():
            try:
                while not dropped.is_set():
                    slow.send(b"x")
                    time.sleep(0.05)
            except OSError:
                pass

        dripping = threading.Thread(target=drip)
        dripping.start()
        try:
            assert slow.recv(1) == b""
        except ConnectionError:
            pass
        finally:
            dropped.set()
            dripping.join()


def test_a_flood_of_bytes_before_the_proof_is_not_kept(listener):
    process = psutil.Process()
    before = process.memory_info().rss
    for _ in range(50):
        with socket.create_connection(listener.address) as stranger:
            try:
                for _ in range(64):
                    stranger.sendall(os.urandom(1 << 16))
            except OSError:
                pass
    assert process.memory_info().rss - before < 16 << 20
    connection = connect(listener.address, SECRET)
    assert answers(connection)
    connection.close()


def test_a_recorded_handshake_opens_nothing(listener):
    """A relay notes what an honest end sends, and sends it again."""
    with socket.create_server(("127.0.0.1", 0)) as relay:
        honest = threading.Thread(target=lambda: connect(relay.getsockname(), SECRET).close())
        honest.start()
        client, _ = relay.accept()
        with socket.create_connection(listener.address) as server:
            server.sendall(nonce := client.recv(32, socket.MSG_WAITALL))
            client.sendall(server.recv(32, socket.MSG_WAITALL))
            server.sendall(proof := client.recv(32, socket.MSG_WAITALL))
            client.sendall(server.recv(32, socket.MSG_WAITALL))
        honest.join()
        client.close()
    with socket.create_connection(listener.address) as replay:
        replay.settimeout(10)
        replay.sendall(nonce + proof)
        replay.recv(32, socket.MSG_WAITALL)
        assert replay.recv(32, socket.MSG_WAITALL) == bytes(32), "the refusal, and no proof"
        assert replay.recv(1) == b""


def test_the_listener_proves_itself_too():
    with socket.create_server(("127.0.0.1", 0)) as impostor:

        def pretend():
            sock, _ = impostor.accept()
            sock.sendall(os.urandom(32))
            sock.recv(64, socket.MSG_WAITALL)
            sock.sendall(os.urandom(32))
            sock.close()

        thread = threading.Thread(target=pretend)
        thread.start()
        with pytest.raises(WireError, match="does not hold this run's secret"):
            connect(impostor.getsockname(), SECRET)
        thread.join()
