"""A rank that dies costs one test, at once: the pool's next ranks are others."""

from __future__ import annotations

import os
import signal
import time
from functools import partial

import pytest
from rank_pool import Died, Ranks

from sparkdl.collective import open_collective


@pytest.fixture(scope="module")
def pool():
    pool = Ranks()
    yield pool
    pool.end()


def process(world):
    return os.getpid()


def added_up(world):
    collective = open_collective(world, backend="torch")
    names = collective.all_gather_object(world.rank)
    collective.close()
    return names


def killed(dying, world):
    """One rank dies in the middle; one learns of it and leaves its group open, and one waits for that."""
    collective = open_collective(world, backend="torch")
    if world.rank == dying:
        os.kill(os.getpid(), signal.SIGKILL)
    if world.rank == 0:
        time.sleep(1000)
    collective.barrier()


def failed(failing, world):
    collective = open_collective(world, backend="torch")
    if world.rank == failing:
        raise ValueError("refused")
    collective.close(failed=True)


def sleep(world):
    time.sleep(1000)


@pytest.mark.slow
def test_a_rank_that_dies_ends_the_run_and_the_next_run_has_others(pool, monkeypatch):
    monkeypatch.setattr("rank_pool.SECONDS_WITHOUT_A_RANK", 1.0)
    earlier = pool.run(process, 3)
    begun = time.monotonic()
    with pytest.raises(Died):
        pool.together(partial(killed, 2), 3, "torch")
    assert time.monotonic() - begun < 60  # the first rank sleeps for longer
    assert pool.together(added_up, 3, "torch") == [[0, 1, 2]] * 3
    assert not set(earlier) & set(pool.run(process, 3))


@pytest.mark.slow
def test_a_rank_that_dies_between_two_runs_is_missed_by_nobody(pool):
    earlier = pool.run(process, 2)
    os.kill(earlier[1], signal.SIGKILL)
    assert pool.processes[1].ended(60)
    first, second = pool.run(process, 2)
    assert first == earlier[0]
    assert second not in earlier


@pytest.mark.slow
def test_a_group_that_a_failed_rank_left_open_is_joined_by_nobody(pool):
    with pytest.raises(ValueError, match="refused"):
        pool.together(partial(failed, 0), 2, "torch")
    assert pool.together(added_up, 2, "torch") == [[0, 1]] * 2


@pytest.mark.slow
def test_a_run_that_is_interrupted_leaves_no_rank_busy(pool, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(pool, "_ready", interrupt)
        with pytest.raises(KeyboardInterrupt):
            pool.run(sleep, 2)
    assert len(set(pool.run(process, 2))) == 2
