"""The order of rows: a pure function of block counts, seed and epoch, the same global batches at every world size."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparkdl.batches.order.permutations import permutation, permutations
from sparkdl.batches.order.plan import ROW_BITS, ROW_MASK, TAILS, Order, Steps, choose_lanes, segments
from sparkdl.errors import ConfigError, DataError

BLOCKS = st.lists(st.integers(0, 40), min_size=1, max_size=12).filter(lambda rows: sum(rows) > 0)
ORDERS = st.builds(
    lambda blocks, seed, epoch, lanes, window: Order(
        block_rows=np.array(blocks, dtype=np.int64), seed=seed, epoch=epoch, lanes=lanes, window=window
    ),
    BLOCKS,
    st.integers(0, 2**40),
    st.integers(0, 5),
    st.integers(1, 9),
    st.integers(1, 50),
)


def rows_of(order, positions):
    """Every row as one number, by position."""
    block, row = order.locate(positions)
    return (np.concatenate([[0], np.cumsum(order.block_rows)])[block] + row).tolist()


def rank_rows(order, steps, rank, first, last):
    """The rows a rank trains on in steps [first, last), as lists by step, read through windows like the loader does."""
    begins = np.concatenate([[0], np.cumsum(order.block_rows)])
    batches = {step: [] for step in range(first, last)}
    part = segments(steps, order.lanes, rank, first, last)
    for step, lane, start, count in zip(part.step, part.lane, part.start, part.count, strict=True):
        for index in range(start, start + count):
            rows, _ = order.window_rows(range(int(lane), int(lane) + 1), int(index) // order.window)
            row = int(rows[int(index) % order.window])
            batches[int(step)].append(int(begins[row >> ROW_BITS] + (row & ROW_MASK)))
    return [batches[step] for step in range(first, last)]


@given(st.integers(0, 300), st.integers(0, 2**60))
@settings(max_examples=50, deadline=None)
def test_permutation_is_one(size, key):
    assert sorted(permutation(size, key)) == list(range(size))


def test_permutation_is_the_same_on_every_machine():
    assert permutation(10, 7, 1, 2).tolist() == [0, 9, 4, 5, 7, 6, 3, 2, 8, 1]
    assert permutation((1 << 16) + 1, 7)[:5].tolist() == [34816, 30143, 57888, 38453, 20245]


@pytest.mark.parametrize("size", [1, 7, 1000, 1 << 16, (1 << 16) + 1])
def test_permutations_do_not_depend_on_how_many_are_made_at_once(size):
    together = permutations(5, size, 3, 4)
    apart = [permutations(1, size, 3, 4, skip=skip)[0] for skip in range(5)]
    assert together.tolist() == [one.tolist() for one in apart]
    assert (np.sort(together, axis=1) == np.arange(size)).all()
    assert size < 1000 or len({tuple(one[:9]) for one in together.tolist()}) == 5


@pytest.mark.parametrize("size", [1000, 1 << 16, 1 << 17])
def test_permuted_numbers_may_lie_anywhere(size):
    """Each tenth of the numbers is spread over all tenths of the places, about evenly."""
    mixed = permutation(size, 11)
    counts = np.histogram2d(mixed, np.arange(size), bins=10)[0]
    chi2 = ((counts - size / 100) ** 2 / (size / 100)).sum()
    assert 30 < chi2 < 160  # 81 degrees of freedom: 81 +- 13


@given(ORDERS)
@settings(max_examples=40, deadline=None)
def test_windows_of_several_lanes_are_those_of_each(order):
    for window in range(order.windows(0)):
        rows, edges = order.window_rows(range(order.lanes), window)
        for lane in range(order.lanes):
            alone, _ = order.window_rows(range(lane, lane + 1), window)
            assert rows[edges[lane] : edges[lane + 1]].tolist() == alone.tolist()


@given(ORDERS)
@settings(max_examples=80, deadline=None)
def test_an_epoch_holds_every_row_once(order):
    rows = rows_of(order, np.arange(order.rows))
    assert sorted(rows) == list(range(order.rows))


@given(ORDERS)
@settings(max_examples=40, deadline=None)
def test_positions_is_the_inverse_of_locate(order):
    for block, count in enumerate(order.block_rows):
        if count:
            back = order.locate(order.positions(block, np.arange(count)))
            assert back[0].tolist() == [block] * int(count)
            assert back[1].tolist() == list(range(int(count)))


@given(ORDERS)
@settings(max_examples=40, deadline=None)
def test_row_ranges_name_the_blocks_of_a_window_and_nothing_else(order):
    for lane in range(order.lanes):
        sizes = []
        for window in range(order.windows(lane)):
            block, first, count = order.row_ranges(range(lane, lane + 1), window)
            rows = order.window_rows(range(lane, lane + 1), window)[0]
            expected = {
                (int(b), int(f) + i) for b, f, c in zip(block, first, count, strict=True) for i in range(int(c))
            }
            assert {(row >> ROW_BITS, row & ROW_MASK) for row in rows.tolist()} == expected
            sizes.append(rows.size)
        assert sum(sizes) == order.lane_rows(lane)


@given(BLOCKS, st.integers(1, 50))
@settings(max_examples=30, deadline=None)
def test_without_shuffle_the_order_is_file_order(blocks, window):
    order = Order(block_rows=np.array(blocks), window=window, shuffle=False, seed=3, epoch=2)
    assert rows_of(order, np.arange(order.rows)) == list(range(order.rows))


@given(ORDERS, st.integers(1, 60), st.sampled_from(TAILS), st.integers(1, 9))
@settings(max_examples=120, deadline=None)
def test_every_world_size_trains_on_the_same_global_batches(order, global_batch, tail, world_size):
    if tail == "drop":
        global_batch = min(global_batch, order.rows)
    alone = Steps(rows=order.rows, global_batch=global_batch, tail=tail)
    steps = Steps(rows=order.rows, global_batch=global_batch, tail=tail, world_size=world_size)
    assert steps.count == alone.count
    expected = rank_rows(order, alone, 0, 0, alone.count)
    by_rank = [rank_rows(order, steps, rank, 0, steps.count) for rank in range(world_size)]
    seen: list[int] = []
    for step in range(steps.count):
        together = [row for rank in by_rank for row in rank[step]]
        assert together == expected[step]
        sizes = [len(rank[step]) for rank in by_rank]
        assert max(sizes) - min(sizes) <= 1
        assert sum(sizes) == steps.global_rows(step)
        assert set(together) == set(rows_of(order, [p for r in steps.ranges(step) for p in range(*r)]))
        seen += together
    if tail == "exact":
        assert sorted(seen) == list(range(order.rows))
    elif tail == "drop":
        assert len(set(seen)) == len(seen) == order.rows - order.rows % global_batch
    else:
        assert set(seen) == set(range(order.rows))
        assert len(seen) == steps.count * global_batch


@given(ORDERS, st.integers(1, 40), st.sampled_from(("exact", "pad")), st.integers(1, 9), st.data())
@settings(max_examples=40, deadline=None)
def test_every_step_can_be_resumed_on_another_world_size(order, global_batch, tail, world_size, data):
    alone = Steps(rows=order.rows, global_batch=global_batch, tail=tail)
    step = data.draw(st.integers(0, alone.count - 1))
    steps = Steps(rows=order.rows, global_batch=global_batch, tail=tail, world_size=world_size)
    rest = [rank_rows(order, steps, rank, step, steps.count) for rank in range(world_size)]
    together = [[row for rank in rest for row in rank[k]] for k in range(steps.count - step)]
    assert together == rank_rows(order, alone, 0, 0, alone.count)[step:]


@given(st.integers(1, 500), st.integers(1, 9), st.integers(1, 50))
@settings(max_examples=60, deadline=None)
def test_exact_weights_make_the_mean_over_ranks_the_global_mean(rows, world_size, batch):
    steps = Steps(rows=rows, global_batch=batch * world_size, world_size=world_size)
    values = np.random.default_rng(rows).random(rows)
    for step in range(steps.count):
        ((start, stop),) = steps.ranges(step)
        total = 0.0
        for rank in range(world_size):
            low, high = steps.share(step, rank)
            weight = (high - low) * world_size / (stop - start)
            total += values[start + low : start + high].mean() * weight if high > low else 0.0
        assert total / world_size == pytest.approx(values[start:stop].mean())


def test_epochs_and_seeds_have_orders_of_their_own():
    blocks = np.full(20, 50)
    orders = {
        tuple(rows_of(Order(block_rows=blocks, seed=seed, epoch=epoch, lanes=4, window=100), np.arange(1000)))
        for seed in range(3)
        for epoch in range(3)
    }
    assert len(orders) == 9


def test_drop_leaves_out_other_rows_each_epoch():
    blocks = np.full(20, 50)
    tails = [
        frozenset(rows_of(Order(block_rows=blocks, epoch=e, lanes=4, window=100), range(960, 1000))) for e in range(6)
    ]
    assert len(set(tails)) == 6
    assert len(frozenset.intersection(*tails)) == 0


def test_a_rank_reads_only_its_lanes():
    order = Order(block_rows=np.full(64, 100), lanes=8, window=400)
    steps = Steps(rows=order.rows, global_batch=256, world_size=4)
    for rank in range(4):
        assert set(segments(steps, 8, rank, 0, steps.count - 1).lane.tolist()) == {2 * rank, 2 * rank + 1}


def test_choose_lanes_leaves_every_window_blocks_to_mix():
    assert choose_lanes(1, 100) == 1
    assert choose_lanes(122, 100) == 8
    assert choose_lanes(10**6, 10**6) == 64
    for blocks in range(1, 300):
        lanes = choose_lanes(blocks, 200)
        assert lanes == 1 or min(blocks, 200) // lanes >= 8


def test_no_step_is_an_error_that_names_both_counts():
    with pytest.raises(DataError, match=r"4096 rows exceeds the 1200 rows"):
        Steps(rows=1200, global_batch=4096, tail="drop")
    with pytest.raises(DataError, match="0 rows"):
        Steps(rows=0, global_batch=4)


@pytest.mark.parametrize(
    "wrong", [{"tail": "keep"}, {"global_batch": 0}, {"world_size": 0}], ids=["tail", "batch", "world"]
)
def test_steps_refuses_nonsense(wrong):
    with pytest.raises(ConfigError):
        Steps(**{"rows": 10, "global_batch": 2} | wrong)


@pytest.mark.parametrize(
    "wrong", [{"seed": -1}, {"epoch": -1}, {"lanes": 0}, {"window": 0}, {"lanes": 2, "shuffle": False}]
)
def test_order_refuses_nonsense(wrong):
    with pytest.raises(ConfigError):
        Order(**{"block_rows": np.array([4])} | wrong)


def test_a_step_outside_the_epoch_is_refused():
    with pytest.raises(ConfigError, match="step=3"):
        Steps(rows=10, global_batch=4).ranges(3)
