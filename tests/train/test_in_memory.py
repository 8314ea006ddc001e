"""Batches of tensors in memory: disjoint, complete, and the same global batches at every world size."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparkdl.errors import ConfigError, DataError
from sparkdl.train.in_memory import TensorSource
from sparkdl.world import World


def ranks(rows, batch, size, seed=0):
    tensors = {"row": torch.arange(rows)}
    return [
        TensorSource(
            tensors,
            global_batch_rows=batch,
            world=World(rank=rank, size=size, local_rank=rank, local_size=size),
            seed=seed,
        )
        for rank in range(size)
    ]


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 60), st.integers(1, 20), st.integers(1, 7), st.integers(0, 3), st.integers(0, 2))
def test_every_row_once_an_epoch_in_the_same_global_batches(rows, batch, size, seed, epoch):
    alone = ranks(rows, batch, 1, seed)[0]
    alone.set_epoch(epoch)
    expected = [b["row"].tolist() for b in alone]
    parts = ranks(rows, batch, size, seed)
    for part in parts:
        part.set_epoch(epoch)
    steps = list(zip(*parts, strict=True))
    assert len(steps) == len(parts[0]) == len(expected)
    for number, (step, wanted) in enumerate(zip(steps, expected, strict=True)):
        assert [row for b in step for row in b["row"].tolist()] == wanted
        assert sum(b.weight for b in step) == pytest.approx(size)
        assert {(b.step, b.epoch, b.global_rows) for b in step} == {(number, epoch, len(wanted))}
        assert all(b.rows == len(b["row"]) for b in step)
    assert sorted(row for batch in expected for row in batch) == list(range(rows))


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 40), st.integers(1, 9), st.data())
def test_it_goes_on_from_every_step(rows, batch, draw):
    source = ranks(rows, batch, 1)[0]
    source.set_epoch(3)
    taken = draw.draw(st.integers(0, len(source) - 1))
    iterator = iter(source)
    for _ in range(taken):
        next(iterator)
    state = source.state_dict()
    rest = [b["row"].tolist() for b in iterator]
    again = ranks(rows, batch, 1)[0]
    again.load_state_dict(state)
    assert [b["row"].tolist() for b in again] == rest


def test_wrong_numbers_are_refused():
    with pytest.raises(DataError, match="differ in length"):
        TensorSource({"a": torch.ones(2), "b": torch.ones(3)}, global_batch_rows=1)
    with pytest.raises(DataError, match="0 rows"):
        TensorSource({"a": torch.ones(0)}, global_batch_rows=1)
    with pytest.raises(ConfigError, match="global_batch_rows=0"):
        TensorSource({"a": torch.ones(2)}, global_batch_rows=0)
    for seed in (1 << 44, -(1 << 43) - 1):
        with pytest.raises(ConfigError, match=f"seed={seed} does not lie in"):
            TensorSource({"a": torch.ones(2)}, global_batch_rows=1, seed=seed)
    for seed in ((1 << 44) - 1, -(1 << 43)):
        assert len(list(TensorSource({"a": torch.ones(2)}, global_batch_rows=1, seed=seed))) == 2
    with pytest.raises(ConfigError, match="the position belongs to"):
        ranks(10, 2, 1)[0].load_state_dict(ranks(10, 3, 1)[0].state_dict())
