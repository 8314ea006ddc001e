"""Objects between ranks: opened where a rank of the run signed them for this place, and nowhere else."""

from __future__ import annotations

import cloudpickle
import pytest
import torch
from run_store import held_store

from sparkdl.collective.signed import SECRET, SignedObjects
from sparkdl.errors import ClusterError, ConfigError
from sparkdl.launch.store import offered
from sparkdl.world import SOLO, World

RANKS = [World(rank=rank, size=2, local_rank=rank, local_size=2) for rank in range(2)]


class Bomb:
    def __reduce__(self):
        return pytest.fail, ("it was opened",)


@pytest.fixture
def objects():
    with held_store() as store, offered(store):
        yield [SignedObjects(world) for world in RANKS]


def test_a_value_arrives_at_the_other_rank(objects):
    for value in ({"a": [1, None]}, "x" * 100_000, lambda: 3):
        arrived = objects[1].unpack(objects[0].pack(value), 0)
        assert arrived() == 3 if callable(value) else arrived == value
        for one in objects:
            one.next_operation()


def test_nothing_is_opened_that_no_rank_has_signed(objects):
    plain = torch.frombuffer(bytearray(cloudpickle.dumps(Bomb())), dtype=torch.uint8)
    with held_store() as other, offered(other):
        foreign = SignedObjects(RANKS[0]).pack(Bomb())
    altered = objects[0].pack(1).clone()
    altered[-2] ^= 1
    for flat in (plain, torch.cat([torch.zeros(32, dtype=torch.uint8), plain]), foreign, altered, plain[:3]):
        with pytest.raises(ClusterError, match="in the place of rank 0's value does not carry the signature"):
            objects[1].unpack(flat, 0)


def test_what_was_signed_opens_nothing_elsewhere(objects):
    noted = objects[0].pack("wait")
    with pytest.raises(ClusterError, match="rank 1's value"):
        objects[1].unpack(noted, 1)
    objects[1].next_operation()
    with pytest.raises(ClusterError, match="rank 0's value"):
        objects[1].unpack(noted, 0)


def test_a_second_collective_of_the_run_has_a_key_of_its_own(objects):
    again = [SignedObjects(world) for world in RANKS]
    assert again[1].unpack(again[0].pack("x"), 0) == "x"
    with pytest.raises(ClusterError):
        again[1].unpack(objects[0].pack("x"), 0)


def test_ranks_of_another_launcher_share_a_secret_or_send_no_objects(monkeypatch):
    with pytest.raises(ConfigError, match=f"{SECRET} has 0 characters"):
        SignedObjects(RANKS[0])
    monkeypatch.setenv(SECRET, "a long random text")
    assert SignedObjects(RANKS[1]).unpack(SignedObjects(RANKS[0]).pack("x"), 0) == "x"
    assert SignedObjects(SOLO).pack("alone") is not None
