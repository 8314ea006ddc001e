"""The tuner on a clock of its own."""

from __future__ import annotations

import pytest

from sparkdl.collective.backends.solo import SoloCollective
from sparkdl.collective.tune import Tuner, bucket_candidates
from sparkdl.world import SOLO


class Training:
    """Steps whose length depends on the setting."""

    def __init__(self, seconds, **options):
        self.seconds = seconds
        self.now = 0.0
        self.setting, self.applied = 4.0, []
        candidates = [4.0, *[value for value in seconds if value != 4.0]]
        self.tuner = Tuner(SoloCollective(SOLO), "size", candidates, self.apply, clock=lambda: self.now, **options)

    def apply(self, value):
        self.setting = value
        self.applied.append(value)
        self.now += 3.0  # a change takes time, which is not the candidate's

    def run(self, steps):
        for _ in range(steps):
            self.now += self.seconds[self.setting]
            self.tuner.step()


def test_the_fastest_candidate_is_kept():
    training = Training({4.0: 1.0, 1.0: 0.5, 16.0: 2.0})
    training.run(100)
    assert training.tuner.done
    assert training.setting == 1.0
    assert training.tuner.seconds_per_step == pytest.approx(0.5)


def test_a_gain_within_the_noise_changes_nothing():
    training = Training({4.0: 1.0, 1.0: 0.98})
    training.run(100)
    assert training.tuner.done
    assert training.setting == 4.0


def test_the_first_steps_are_not_measured():
    training = Training({4.0: 1.0, 1.0: 0.5}, rest_steps=20)
    training.run(20)
    assert training.applied == []
    training.run(100)
    assert training.applied == [1.0]


def test_costly_settings_wait_for_a_long_training():
    training = Training({4.0: 1.0, 1.0: 0.5}, rest_seconds=250.0)
    training.run(299)
    assert training.applied == []
    training.run(50)
    assert training.setting == 1.0


def test_one_candidate_is_no_choice():
    training = Training({4.0: 1.0})
    assert training.tuner.done


def test_bucket_candidates_start_with_the_present_one_and_end_with_one_bucket():
    assert bucket_candidates(50.0, 4.0) == [4.0, 1.0, 16.0, 50.0]
    assert bucket_candidates(3.0, 4.0) == [3.0, 1.0]
    assert bucket_candidates(0.2, 4.0) == [1.0]
