"""The store of a run as Horovod's ranks see it, over real HTTP from a process to itself; the roll call before that."""

from __future__ import annotations

import socket
import threading
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
from run_store import held_store

from sparkdl.collective.rendezvous.horovod_store import call_roll, horovod_rendezvous
from sparkdl.errors import UnreachableError


@pytest.fixture
def served():
    with held_store() as store, horovod_rendezvous(store) as variables:
        yield variables


def ask(variables, method, path, body=None):
    # As Horovod 0.28.1 puts its addresses together.
    url = f"http://{variables['HOROVOD_GLOO_RENDEZVOUS_ADDR']}:{variables['HOROVOD_GLOO_RENDEZVOUS_PORT']}{path}"
    return ask_at(url, method, body)


def ask_at(url, method, body=None):
    try:
        with urllib.request.urlopen(urllib.request.Request(url, data=body, method=method), timeout=10) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


def port_of(variables):
    return int(variables["HOROVOD_GLOO_RENDEZVOUS_ADDR"].partition("/")[0].rpartition(":")[2])


def test_values_come_back(served):
    assert ask(served, "PUT", "/global/0", b"\x00address") == (200, b"")
    assert ask(served, "GET", "/global/0") == (200, b"\x00address")
    assert ask(served, "GET", "/local/0")[0] == 404


def test_a_rank_takes_back_its_own_entries_alone(served):
    for key in ("0", "rank_0", "1"):
        ask(served, "PUT", f"/global/{key}", b"x")
    ask(served, "DELETE", "/global/0")
    assert [ask(served, "GET", f"/global/{key}")[0] for key in ("0", "rank_0", "1")] == [404, 404, 200]


def test_a_get_waits_for_the_put(served):
    answers = []
    reader = threading.Thread(target=lambda: answers.append(ask(served, "GET", "/global/late")))
    reader.start()
    ask(served, "PUT", "/global/late", b"here")
    reader.join()
    assert answers == [(200, b"here")]


@pytest.mark.parametrize("path", ["/", "/scope", "/a/b/c"])
def test_other_paths_are_refused(served, path):
    assert ask(served, "PUT", path, b"")[0] == 400


def test_who_does_not_know_the_path_reads_and_writes_nothing(served):
    ask(served, "PUT", "/global/0", b"address")
    port = port_of(served)
    for prefix in ("", "/0", "/guess", "/guess:0"):
        assert ask_at(f"http://127.0.0.1:{port}{prefix}/global/0", "GET")[0] == 400
        assert ask_at(f"http://127.0.0.1:{port}{prefix}/global/0", "PUT", b"other")[0] == 400
        assert ask_at(f"http://127.0.0.1:{port}{prefix}/global/0", "DELETE")[0] == 400
    assert ask(served, "GET", "/global/0") == (200, b"address")


def test_silent_connections_keep_nobody_out(served):
    silent = [socket.create_connection(("127.0.0.1", port_of(served))) for _ in range(100)]
    try:
        assert ask(served, "PUT", "/global/0", b"address") == (200, b"")
        assert ask(served, "GET", "/global/0") == (200, b"address")
    finally:
        for connection in silent:
            connection.close()


def test_it_listens_on_the_loopback_interface_until_the_block_ends():
    with held_store() as store:
        with horovod_rendezvous(store) as variables:
            port = port_of(variables)
            listening = [c for c in psutil.Process().net_connections("inet") if c.status == psutil.CONN_LISTEN]
            assert [c.laddr.ip for c in listening if c.laddr.port == port] == ["127.0.0.1"]
        with pytest.raises(OSError, match="refused"):
            socket.create_connection(("127.0.0.1", port))


@pytest.fixture
def store():
    with held_store() as client:
        yield client


def call(store, rank, seconds=0.1, refusal=""):
    return call_roll(store, "here", rank, 3, seconds, refusal)


def test_missing_ranks_are_named_round_by_round(store):
    assert call(store, 1).missing == [0, 2]
    with ThreadPoolExecutor(2) as threads:
        assert [called.missing for called in threads.map(lambda rank: call(store, rank, 10.0), (0, 2))] == [[], []]
    assert call(store, 1).missing == [0, 2], "the second round of rank 1"


def test_every_rank_hears_the_refusal_of_one(store):
    with ThreadPoolExecutor(3) as threads:
        called = list(threads.map(lambda rank: call(store, rank, 10.0, "no name" if rank == 2 else ""), range(3)))
    assert called == [([], {2: "no name"})] * 3


def test_a_store_that_is_gone_is_told_apart():
    with held_store() as store:
        pass
    with pytest.raises(UnreachableError, match="does not answer"):
        call(store, 0)
