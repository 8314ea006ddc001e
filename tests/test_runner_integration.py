"""Functions written for other launchers run unchanged: they join, leave, and join again."""

from __future__ import annotations

import pytest

from sparkdl.errors import ConfigError
from sparkdl.runner import run


def join_twice(number):
    import torch
    import torch.distributed as dist

    totals = []
    for turn in (1, 2):
        dist.init_process_group("gloo")
        total = torch.tensor([float(number * turn)])
        dist.all_reduce(total)
        totals.append(total.item())
        dist.destroy_process_group()
    return totals


def join_horovod_twice(number):
    import horovod.torch as hvd
    import torch

    totals = []
    for turn in (1, 2):
        hvd.init()
        totals.append(hvd.allreduce(torch.tensor([float(number * turn)]), op=hvd.Sum).item())
        hvd.shutdown()
    return totals


def test_torch_code_joins_leaves_and_joins_again(spark):
    assert run(join_twice, args=(1,), num_proc=2, spark=spark) == [[2.0, 4.0]] * 2
    assert run(join_twice, args=(3,), num_proc=2, spark=spark) == [[6.0, 12.0]] * 2


def test_horovod_code_joins_leaves_and_joins_again(spark):
    pytest.importorskip("horovod")
    assert run(join_horovod_twice, args=(1,), num_proc=2, spark=spark) == [[2.0, 4.0]] * 2


def test_an_unknown_keyword_is_refused_with_those_there_are(spark):
    with pytest.raises(ConfigError, match=r"no keyword verbose.*start_timeout"):
        run(join_twice, num_proc=2, spark=spark, verbose=1)
