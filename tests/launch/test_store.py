"""The store of a run: what its ranks read and write, what nobody else does, and how much it holds."""

from __future__ import annotations

import pickle
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from sparkdl.errors import ClusterError, UnreachableError
from sparkdl.launch import store as store_module
from sparkdl.launch.store import KeyValueStore, StoreClient, offered, store_of_this_run
from sparkdl.launch.wire import Listener, WireError, authenticated, connect

SECRET = b"s" * 32


@pytest.fixture
def held():
    before = set(threading.enumerate())
    store = KeyValueStore()
    listener = Listener("127.0.0.1", authenticated(SECRET), store.serve)
    yield listener
    store.close()
    listener.close()
    assert set(threading.enumerate()) <= before


@pytest.fixture
def store(held):
    client = StoreClient(held.address, SECRET)
    yield client
    client.close()


def test_what_one_rank_sets_another_reads(held, store):
    other = pickle.loads(pickle.dumps(store))
    store.set("a/ä", b"\0\xff")
    assert other.get("a/ä", 5) == b"\0\xff"
    assert [other.add("n", step) for step in (2, -5, 0)] == [2, -3, -3]
    other.append("a/ä", b"!")
    assert store.get("a/ä", 5) == b"\0\xff!"
    assert (store.wait(["a/ä", "n"], 0), store.wait(["a/ä", "m"], 0), store.count()) == (True, False, 2)
    assert (store.delete("n"), store.delete("n"), store.count()) == (True, False, 1)
    other.close()


def test_a_value_is_replaced_where_it_is_as_expected(store):
    assert store.compare_set("k", b"x", b"y") == b"x"
    assert not store.wait(["k"], 0)
    assert store.compare_set("k", b"", b"first") == b"first"
    assert store.compare_set("k", b"other", b"second") == b"first"
    assert store.compare_set("k", b"first", b"second") == b"second"


def test_one_thread_waits_while_another_sets(store):
    with ThreadPoolExecutor(3) as threads:
        waiting = [threads.submit(store.wait, ["a", "b"], 30), threads.submit(store.get, "b", 30)]
        store.set("a", b"1")
        store.set("b", b"2")
        assert [future.result() for future in waiting] == [True, b"2"]


def test_a_key_that_nobody_sets_is_named_when_the_time_is_up(store):
    assert store.wait(["never"], 0.05) is False
    with pytest.raises(TimeoutError, match=r"'never' within 0\.05 s"):
        store.get("never", 0.05)


def test_it_is_bounded_in_keys_and_bytes(store, monkeypatch):
    monkeypatch.setattr(store_module, "MAX_KEYS", 3)
    monkeypatch.setattr(store_module, "MAX_BYTES", 1000)
    for number in range(3):
        store.set(f"k{number}", b"")
    with pytest.raises(ClusterError, match=r"has 3 keys and .* bytes and does not take 0 more: it holds 3 keys"):
        store.set("k3", b"")
    store.delete("k0")
    with pytest.raises(ClusterError, match="does not take 800 more"):
        store.set("k1", bytes(800))
    store.set("k1", bytes(100))
    store.set("k1", bytes(600))
    store.delete("k2")
    store.delete("k1")
    store.set("k1", bytes(700))
    with pytest.raises(ClusterError, match="exceeds the 2,097,152"):
        store.set("k1", bytes((2 << 20) + 1))


def test_who_does_not_hold_the_secret_is_turned_away(held, store):
    store.set("k", b"v")
    with pytest.raises(WireError, match="does not hold this run's secret"):
        connect(held.address, b"x" * 32)
    with pytest.raises(UnreachableError):
        StoreClient(held.address, b"x" * 32).set("k", b"w")
    assert store.get("k", 1) == b"v"


def test_nobody_waits_for_a_store_that_is_closed():
    store = KeyValueStore()
    listener = Listener("127.0.0.1", authenticated(SECRET), store.serve)
    client = StoreClient(listener.address, SECRET)
    client.set("k", b"v")
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(client.wait, ["never"], 60)
        store.close()
        with pytest.raises(ClusterError, match="the run is over"):
            waiting.result()
    with pytest.raises(ClusterError, match="the run is over"):
        client.set("k", b"v")
    client.close()
    listener.close()


def test_each_purpose_has_a_key_of_its_own(store):
    keys = [store.derive_key("objects"), store.derive_key("files"), StoreClient(("h", 1), b"x").derive_key("objects")]
    assert len({*keys, SECRET}) == 4
    assert store.derive_key("objects") == keys[0]


def test_a_forked_process_does_not_speak_into_its_parents_connection(store):
    import os

    store.set("k", b"v")
    child = os.fork()
    if child == 0:
        try:
            store.set("child", store.get("k", 5))
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    assert store.get("child", 5) == b"v"


def test_a_store_is_offered_for_the_block(store):
    assert store_of_this_run() is None
    with offered(store):
        assert store_of_this_run() is store
    assert store_of_this_run() is None
