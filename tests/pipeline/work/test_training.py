"""What a training is told besides the file: over how many steps the learning rate falls."""

from __future__ import annotations

import subprocess
import sys

import pytest

from sparkdl.pipeline.spec import Train
from sparkdl.pipeline.work.optimizer import Schedule
from sparkdl.pipeline.work.training import _steps


@pytest.mark.parametrize(("more", "steps"), [({}, 12), ({"train_steps_per_epoch": 3}, 9)])
@pytest.mark.parametrize("decay", ["linear", "cosine"])
def test_the_rate_falls_to_nothing_until_the_last_step_however_short_an_epoch_is(more, steps, decay):
    settings = Train(epochs=3, batch_size=50, warmup_steps=2, decay=decay, num_proc=2, **more)
    schedule = Schedule(settings.warmup_steps, settings.decay, _steps(settings, 400))
    rates = [schedule.factor(step) for step in range(steps + 1)]
    assert rates[:3] == [pytest.approx(1 / 3), pytest.approx(2 / 3), 1]
    assert sorted(rates[2:], reverse=True) == rates[2:]
    assert rates[-2] > 0.01
    assert rates[-1] == pytest.approx(0)


def test_ranks_unpickle_optimizer_and_schedule_without_spark():
    program = (
        "import sys, sparkdl.pipeline.work.optimizer\n"
        "assert not {'pyspark', 'pandas'} & sys.modules.keys(), sorted(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
