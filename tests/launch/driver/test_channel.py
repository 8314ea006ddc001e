"""The driver's end alone: who gets in, what happens to strangers, that nothing stays open."""

from __future__ import annotations

import socket
import threading

import psutil
import pytest

from sparkdl.errors import ClusterError
from sparkdl.launch.driver.channel import Channel
from sparkdl.launch.rank.link import ConnectionInfo, Link
from sparkdl.launch.wire import Connection


@pytest.fixture
def channel():
    before = set(threading.enumerate())
    with Channel("127.0.0.1", 2) as opened:
        yield opened
    assert {thread for thread in set(threading.enumerate()) - before if "channel" in thread.name} == set()


def client(channel):
    return Connection(
        socket.create_connection(channel.connection_info.address), channel.connection_info.secret, server=False
    )


def test_it_listens_on_the_one_address_it_was_given(channel):
    listening = [c.laddr for c in psutil.Process().net_connections("tcp") if c.status == psutil.CONN_LISTEN]
    mine = [address for address in listening if address.port == channel.connection_info.address[1]]
    assert [address.ip for address in mine] == ["127.0.0.1"]


def test_the_secret_is_not_shown(channel):
    assert channel.connection_info.secret.hex() not in repr(channel.connection_info)
    assert str(channel.connection_info.secret) not in repr(channel.connection_info)


def test_a_stranger_is_not_heard_and_a_rank_still_is(channel):
    with socket.create_connection(channel.connection_info.address) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n" + b"\0" * 200)
        stranger.settimeout(10)
        try:
            while stranger.recv(4096):
                pass
        except ConnectionError:
            pass
    with pytest.raises(ClusterError):
        Link(ConnectionInfo(address=channel.connection_info.address, secret=b"x" * 32, num_proc=2))
    rank = client(channel)
    rank.send({"kind": "registration", "slot": 1})
    report = channel.next(10)
    assert (report.kind, report.slot) == ("registration", 1)
    rank.close()
    assert channel.next(10).kind == "lost"


def test_a_rank_that_says_good_bye_is_not_lost(channel):
    rank = client(channel)
    rank.send({"kind": "registration", "slot": 0})
    rank.send({"kind": "leaving"})
    assert [channel.next(10).kind for _ in range(2)] == ["registration", "left"]
    assert rank.receive()[0] == {"kind": "bye"}
    rank.close()
    assert channel.next(0.2) is None


def test_a_rank_that_takes_nothing_in_does_not_hold_the_driver_up():
    with Channel("127.0.0.1", 1, silence_seconds=0.3) as channel:
        rank = client(channel)
        rank.send({"kind": "registration", "slot": 0})
        assert channel.next(10).kind == "registration"
        channel.send(0, {"kind": "go"}, [memoryview(bytearray(64 << 20))])
        report = channel.next(10)
        assert (report.kind, report.message["why"]) == ("silent", "took in nothing for 0.3 s")
        rank.close()


def test_many_silent_strangers_do_not_keep_a_rank_out_for_ever(channel):
    strangers = [socket.create_connection(channel.connection_info.address) for _ in range(80)]
    for stranger in strangers:
        stranger.close()
    for _ in range(100):
        try:
            rank = client(channel)
            break
        except OSError:
            threading.Event().wait(0.1)
    rank.send({"kind": "registration", "slot": 0})
    assert channel.next(10).kind == "registration"
    rank.close()


def test_an_address_of_another_host_is_refused_with_the_setting():
    with pytest.raises(ClusterError, match=r"cannot listen on 192\.0\.2\.1 .* set driver_host"):
        Channel("192.0.2.1", 1)


def test_a_driver_that_cannot_be_reached_is_named_with_the_setting():
    with socket.create_server(("127.0.0.1", 0)) as closed:
        address = closed.getsockname()
    with pytest.raises(ClusterError, match=r"does not reach the driver at 127\.0\.0\.1:\d+ .* spark\.driver\.host"):
        Link(ConnectionInfo(address=address, secret=b"x" * 32, num_proc=1))
