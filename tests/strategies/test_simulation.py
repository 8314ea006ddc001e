"""Simulated schedules: what formulas say where they hold, and what they do not say."""

from __future__ import annotations

import pytest

from sparkdl.strategies.simulation import backward_with_buckets, mean_of_slowest, one_forward_one_backward


def test_buckets_hide_behind_the_backward_pass_but_for_the_last():
    assert backward_with_buckets([1.0, 2.0, 3.0], [0.5, 0.5, 0.5], 3.0) == pytest.approx(3.5)
    assert backward_with_buckets([1.0, 2.0, 3.0], [2.0, 2.0, 2.0], 3.0) == pytest.approx(1.0 + 3 * 2.0)
    assert backward_with_buckets([], [], 3.0) == 3.0


def test_a_busy_link_slows_what_is_computed_beside_it():
    # The first bucket travels for a second, in which half a second's work is done.
    assert backward_with_buckets([1.0, 3.0], [1.0, 0.0], 3.0, slowed=0.5) == pytest.approx(3.5)
    # The link is busy for longer than there is to compute.
    assert backward_with_buckets([1.0, 2.0], [10.0, 1.0], 2.0, slowed=0.5) == pytest.approx(1.0 + 10.0 + 1.0)


def test_what_is_computed_stretches_the_transfers_beside_it():
    # The first bucket takes two seconds for one; of the second, half a second of two is left at the end of computing.
    seconds = backward_with_buckets([1.0, 2.0], [1.0, 1.0], 4.5, stretched=2.0)
    assert seconds == pytest.approx(1.0 + 2.0 + 1.5 + 0.25)
    assert backward_with_buckets([1.0], [1.0], 2.0, slowed=0.5, stretched=2.0) == pytest.approx(1.0 + 2.0)


@pytest.mark.parametrize(("stages", "micro_batches"), [(2, 8), (4, 16), (4, 2), (3, 1)])
def test_equal_stages_wait_for_as_many_turns_as_there_are_others(stages, micro_batches):
    seconds = one_forward_one_backward([1.0] * stages, [2.0] * stages, [0.0] * (stages - 1), 0.0, micro_batches)
    assert seconds == pytest.approx((micro_batches + stages - 1) * 3.0)


def test_the_slowest_stage_or_a_slow_link_sets_the_pace():
    slow_stage = one_forward_one_backward([1.0, 2.0], [1.0, 2.0], [0.0], 0.0, 100)
    assert slow_stage == pytest.approx(100 * 4.0, rel=0.02)
    slow_link = one_forward_one_backward([1.0, 1.0], [1.0, 1.0], [10.0], 0.0, 100)
    # With two micro-batches under way, activations of one and gradients of another cross at a time.
    assert 100 * 10.0 < slow_link < 100 * 2 * (10.0 + 2.0)
    late = [one_forward_one_backward([1.0] * 2, [1.0] * 2, [0.0], latency, 8) for latency in (0.0, 0.1, 2.0)]
    assert late == sorted(late)
    assert late[0] < late[2]


def test_a_stage_goes_on_once_what_it_sends_has_left():
    # The last stage begins at 1.5; each of its 8 turns but the last waits half a second for the gradients it sends.
    seconds = one_forward_one_backward([1.0, 1.0], [1.0, 1.0], [0.5], 0.0, 8)
    assert seconds == pytest.approx(1.5 + 8 * 2.0 + 7 * 0.5 + 0.5 + 1.0)


def test_more_ranks_have_a_slower_slowest():
    def step(slow):
        return slow

    means = [mean_of_slowest(step, ranks, 0.1) for ranks in (2, 16, 4096)]
    # The expected greatest of 2 and of 16 normal numbers is 0.564 and 1.766 deviations above the mean.
    assert means[0] == pytest.approx(1.0564, abs=0.01)
    assert means[1] == pytest.approx(1.1766, abs=0.01)
    assert means[1] < means[2] < 1.5
    assert mean_of_slowest(step, 4096, 0.0) == 1.0
    assert mean_of_slowest(step, 16, 0.01, straggler=2.0) == pytest.approx(2.0, abs=0.01)
