"""The parts that hold memory: files mapped side by side, buffers that return only when nobody looks."""

from __future__ import annotations

import gc
import os

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparkdl.batches.memory.address_space import PAGE, AddressSpace
from sparkdl.batches.memory.buffer_pool import BufferRing
from sparkdl.batches.order.plan import Order, Steps
from sparkdl.batches.order.quality import measure, sample
from sparkdl.batches.reading.geometry import Geometry
from sparkdl.config import LoaderConfig
from sparkdl.errors import StorageError


def test_files_lie_side_by_side_in_an_address_space(tmp_path):
    space = AddressSpace(8 * PAGE)
    for number in range(3):
        path = tmp_path / str(number)
        path.write_bytes(bytes([number + 1]) * (PAGE + 5))
        descriptor = os.open(path, os.O_RDONLY)
        space.map(descriptor, PAGE + 5, 2 * PAGE * number)
        os.close(descriptor)
    for number in range(3):
        assert (space.bytes[2 * PAGE * number :][: PAGE + 5] == number + 1).all()
    assert not space.bytes[6 * PAGE :].any()
    space.forget(0, PAGE + 5)
    assert (space.bytes[: PAGE + 5] == 1).all()


def test_parts_are_used_again(tmp_path):
    space = AddressSpace(4 * PAGE)
    first = space.allot(2 * PAGE)
    path = tmp_path / "f"
    path.write_bytes(b"7" * PAGE)
    with path.open("rb") as file:
        space.map(file.fileno(), PAGE, first)
    space.allot(PAGE + 1)
    with pytest.raises(StorageError, match="used up"):
        space.allot(PAGE)
    space.unmap(first, 2 * PAGE)
    assert not space.bytes[first : first + PAGE].any()
    assert space.allot(2 * PAGE) == first


def test_an_address_space_outlives_itself_while_an_array_looks_at_it():
    view = AddressSpace(PAGE).bytes[:10]
    gc.collect()
    assert not view.any()


def test_too_large_an_address_space_is_refused_with_a_remedy():
    with pytest.raises(StorageError, match="ulimit"):
        AddressSpace(1 << 62)


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


@pytest.mark.parametrize("pool", [1 << 20, 32 << 20, 64 << 20, 1 << 30])
@pytest.mark.parametrize("threads", [1, 2, 4, 16])
@pytest.mark.parametrize("row", [4, 164, 516, 20_000])
def test_what_a_rank_allocates_stays_below_its_pool(pool, threads, row):
    config = LoaderConfig(pool_bytes=pool)
    rows = 8 * pool // row
    blocks = np.full(max(1, rows // 1000), 1000)
    lanes = 16
    window = max(1, pool // max(row, 128) // lanes)
    geometry = Geometry(block_rows=blocks, lanes=lanes, window=window, row_bytes=row, read_bytes=row, config=config)
    steps = Steps(rows=blocks.sum(), global_batch=8)
    pipeline = geometry.pipeline(steps, threads)
    fixed = (1 << 20) + 400 * blocks.size
    one_step = 8 * row * (pipeline.depth + 3)
    assert pipeline.private_bytes - fixed <= pool + (one_step if pipeline.chunk_rows < 8 else 0)
    assert pipeline.depth > threads


def test_more_is_prefetched_on_request():
    geometry = {"block_rows": np.full(100, 1000), "lanes": 8, "window": 1000, "row_bytes": 100.0, "read_bytes": 100.0}
    steps = Steps(rows=100_000, global_batch=16)
    plain = Geometry(config=LoaderConfig(), **geometry).pipeline(steps, 2)
    more = Geometry(config=LoaderConfig(prefetch_bytes=256 << 20), **geometry).pipeline(steps, 2)
    assert (plain.depth, more.depth) == (3, 32)
    assert more.private_bytes - plain.private_bytes == pytest.approx(29 * plain.chunk_rows * 100, rel=1e-9)
