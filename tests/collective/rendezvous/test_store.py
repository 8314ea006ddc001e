"""Ranks that meet at the store of their run: who is missing, what each of them objects to."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from run_store import held_store

from sparkdl.collective.rendezvous.store import TorchRendezvous, call_roll, store_of_this_run
from sparkdl.errors import UnreachableError


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


def test_a_store_is_offered_for_the_block(store):
    assert store_of_this_run() is None
    with TorchRendezvous().join(store) as variables:
        assert store_of_this_run() is store
        assert variables == {}
    assert store_of_this_run() is None
