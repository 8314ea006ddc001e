"""The store that Horovod's ranks meet at, over real HTTP."""

from __future__ import annotations

import threading
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

from sparkdl.collective.rendezvous.http_store import HttpStore, call_roll
from sparkdl.errors import ClusterError


@pytest.fixture
def store():
    store = HttpStore("127.0.0.1")
    yield store
    store.close()


def ask(store, method, path, body=None):
    url = f"http://127.0.0.1:{store.port}{path}"
    try:
        with urllib.request.urlopen(urllib.request.Request(url, data=body, method=method), timeout=10) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


def test_values_come_back(store):
    assert ask(store, "PUT", "/global/0", b"\x00address") == (200, b"")
    assert ask(store, "GET", "/global/0") == (200, b"\x00address")
    assert ask(store, "GET", "/local/0")[0] == 404


def test_a_rank_takes_back_its_own_entries_alone(store):
    for key in ("0", "rank_0", "1"):
        ask(store, "PUT", f"/global/{key}", b"x")
    ask(store, "DELETE", "/global/0")
    assert [ask(store, "GET", f"/global/{key}")[0] for key in ("0", "rank_0", "1")] == [404, 404, 200]


def test_a_get_waits_for_the_put(store):
    answers = []
    reader = threading.Thread(target=lambda: answers.append(ask(store, "GET", "/global/late")))
    reader.start()
    ask(store, "PUT", "/global/late", b"here")
    reader.join()
    assert answers == [(200, b"here")]


@pytest.mark.parametrize("path", ["/", "/scope", "/a/b/c"])
def test_other_paths_are_refused(store, path):
    assert ask(store, "PUT", path, b"")[0] == 400


def test_it_listens_on_one_interface(store):
    listening = [c for c in psutil.Process().net_connections("inet") if c.status == psutil.CONN_LISTEN]
    assert [c.laddr.ip for c in listening if c.laddr.port == store.port] == ["127.0.0.1"]


def test_an_address_of_another_host_is_refused():
    with pytest.raises(ClusterError, match=r"192\.0\.2\.1"):
        HttpStore("192.0.2.1")


def call(store, rank, seconds=0.1, objection=""):
    return call_roll("127.0.0.1", store.port, rank, 3, seconds, objection)


def test_missing_ranks_are_named_round_by_round(store):
    assert call(store, 1).missing == [0, 2]
    with ThreadPoolExecutor(2) as threads:
        assert [called.missing for called in threads.map(lambda rank: call(store, rank, 10.0), (0, 2))] == [[], []]
    assert call(store, 1).missing == [0, 2], "the second round of rank 1"


def test_every_rank_hears_the_objection_of_one(store):
    with ThreadPoolExecutor(3) as threads:
        called = list(threads.map(lambda rank: call(store, rank, 10.0, "no name" if rank == 2 else ""), range(3)))
    assert called == [([], {2: "no name"})] * 3


def test_a_closed_store_is_unreachable(store):
    other = HttpStore("127.0.0.1")
    other.close()
    with pytest.raises(OSError, match="refused"):
        call_roll("127.0.0.1", other.port, 0, 2, 1.0)
