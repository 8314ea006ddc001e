"""The parts that hold memory: the arena gives what files hold and forgets it, buffers return only when nobody looks."""

from __future__ import annotations

import gc
import os

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparkdl.batches.arena import PAGE, Arena
from sparkdl.batches.buffers import BufferRing
from sparkdl.batches.plan import Order
from sparkdl.batches.quality import measure, sample
from sparkdl.errors import StorageError


def test_files_lie_side_by_side_in_an_arena(tmp_path):
    arena = Arena(8 * PAGE)
    for number in range(3):
        path = tmp_path / str(number)
        path.write_bytes(bytes([number + 1]) * (PAGE + 5))
        descriptor = os.open(path, os.O_RDONLY)
        arena.map(descriptor, PAGE + 5, 2 * PAGE * number)
        os.close(descriptor)
    for number in range(3):
        assert (arena.bytes[2 * PAGE * number :][: PAGE + 5] == number + 1).all()
    assert not arena.bytes[6 * PAGE :].any()
    arena.forget(0, PAGE + 5)
    assert (arena.bytes[: PAGE + 5] == 1).all()


def test_parts_are_used_again(tmp_path):
    arena = Arena(4 * PAGE)
    first = arena.allot(2 * PAGE)
    path = tmp_path / "f"
    path.write_bytes(b"7" * PAGE)
    with path.open("rb") as file:
        arena.map(file.fileno(), PAGE, first)
    arena.allot(PAGE + 1)
    with pytest.raises(StorageError, match="used up"):
        arena.allot(PAGE)
    arena.unmap(first, 2 * PAGE)
    assert not arena.bytes[first : first + PAGE].any()
    assert arena.allot(2 * PAGE) == first


def test_an_arena_outlives_itself_while_an_array_looks_at_it():
    view = Arena(PAGE).bytes[:10]
    gc.collect()
    assert not view.any()


def test_too_large_an_arena_is_refused_with_a_remedy():
    with pytest.raises(StorageError, match="ulimit"):
        Arena(1 << 62)


@pytest.mark.parametrize(
    "hold", [lambda t: t[3:4], lambda t: t.numpy(), lambda t: t.view(torch.float32).detach(), memoryview]
)
def test_a_buffer_returns_only_when_nobody_looks(hold):
    ring = BufferRing(1 << 20)
    tensor = ring.take(4096)
    place = tensor.data_ptr()
    held = hold(tensor.numpy()) if hold is memoryview else hold(tensor)
    del tensor
    assert ring.take(4096).data_ptr() != place
    del held
    assert place in {ring.take(4096).data_ptr() for _ in range(2)}


def test_kept_buffers_are_bounded():
    ring = BufferRing(3 * 4096)
    taken = [ring.take(100) for _ in range(10)]
    places = {tensor.data_ptr() for tensor in taken}
    assert len(places) == 10
    assert ring._kept_bytes == 3 * 4096


@given(st.integers(2, 400), st.integers(1, 50), st.integers(0, 100))
@settings(max_examples=40, deadline=None)
def test_quality_of_file_order_and_of_a_whole_shuffle(rows, batch, seed):
    still = measure(np.arange(rows), batch)
    assert still.distance == 0
    assert still.neighbours == pytest.approx((rows - 1 - (rows - 1) // batch) / (rows - 1))
    assert 0 <= measure(np.random.default_rng(seed).permutation(rows), batch).distance <= 0.5


def test_a_sample_tells_what_a_whole_epoch_shows():
    order = Order(block_rows=np.full(30, 100), seed=3, lanes=4, window=200)
    block, row = order.locate(np.arange(order.rows))
    whole, sampled = measure(block * 100 + row, 64), sample(order, 64)
    assert sampled.distance == pytest.approx(whole.distance, rel=1e-9)
    assert sampled.neighbours == pytest.approx(whole.neighbours, abs=0.01)
    assert whole.excess < 6
    assert 0.25 < whole.distance < 0.4
