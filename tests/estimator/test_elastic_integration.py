"""Horovod's ``run_elastic``: functions that fail now and then, on real ranks."""

from pathlib import Path

import pytest

from sparkdl.errors import ConfigError, RankFailedError
from sparkdl.estimator.elastic import run_elastic


def fails_at_first(folder):
    import horovod.torch as hvd
    import torch

    hvd.init()
    model = torch.nn.Linear(2, 1)
    state = hvd.elastic.TorchState(model, torch.optim.SGD(model.parameters(), lr=0.1), epoch=0)

    @hvd.elastic.run
    def train(state):
        for epoch in range(state.epoch, 3):
            state.epoch = epoch
            failing = Path(folder) / f"rank{hvd.rank()}_epoch{epoch}"
            if failing.exists():
                failing.unlink()
                raise Exception("training failed, restart the task")
            state.commit()
        return hvd.rank(), hvd.size(), state.epoch

    return train(state)


@pytest.mark.slow
def test_an_elastic_function_is_run_again_until_it_ends_or_has_failed_too_often(spark, tmp_path, caplog):
    pytest.importorskip("horovod.torch")
    for name in ("rank1_epoch1", "rank0_epoch2"):
        (tmp_path / name).touch()
    with caplog.at_level("WARNING", logger="sparkdl"):
        values = run_elastic(fails_at_first, (str(tmp_path),), num_proc=2, min_np=1, max_np=2, verbose=0)
    assert values == [(0, 2, 2), (1, 2, 2)]
    assert caplog.text.count("fn begins anew") == 2
    (tmp_path / "rank1_epoch1").touch()
    with pytest.raises(RankFailedError, match="restart the task"):
        run_elastic(fails_at_first, (str(tmp_path),), num_proc=2, reset_limit=0)


def test_numbers_of_ranks_that_contradict_each_other_are_refused(spark):
    with pytest.raises(ConfigError, match="min_num_proc=2 is above num_proc=1: lower it"):
        run_elastic(print, num_proc=1, min_num_proc=2)
    with pytest.raises(ConfigError, match="reset_limit=-1 is no number of attempts"):
        run_elastic(print, num_proc=1, reset_limit=-1)


def test_fewer_ranks_than_slots_are_asked_for_by_their_greatest_number_alone(spark):
    assert run_elastic(lambda: "one", max_num_proc=1, verbose=0) == ["one"]
