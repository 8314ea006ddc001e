"""Functions written for other launchers run unchanged: they join, leave, and join again."""

from __future__ import annotations

import io
import re

import pytest

from sparkdl.errors import ConfigError
from sparkdl.estimator.horovod.runners import log_to_driver
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


def change_torch():
    import torch

    torch.set_default_dtype(torch.float64)
    torch.set_grad_enabled(False)


def new_weight():
    import torch

    return str(torch.nn.Linear(1, 1).weight.dtype), torch.is_grad_enabled()


def test_what_one_function_sets_of_torch_the_next_one_does_not_find(spark):
    run(change_torch, num_proc=2, spark=spark)
    assert run(new_weight, num_proc=2, spark=spark) == [("torch.float32", True)] * 2


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


def say_who(greeting):
    import sys

    import horovod.torch as hvd
    import torch

    hvd.init()
    print(f"{greeting} {hvd.size()}")
    print("error line", file=sys.stderr)
    return hvd.allgather(torch.tensor([hvd.rank()])).tolist(), hvd.rank()


def test_a_call_of_horovod_spark_run_with_all_its_keywords_does_what_it_did_there(spark):
    pytest.importorskip("horovod")
    stdout, stderr = io.StringIO(), io.StringIO()
    values = run(
        say_who,
        ("hello",),
        {},
        2,
        60,
        use_mpi=False,
        use_gloo=True,
        extra_mpi_args=None,
        env={"HOROVOD_LOG_LEVEL": "WARNING"},
        stdout=stdout,
        stderr=stderr,
        verbose=2,
        nics=None,
        prefix_output_with_timestamp=False,
        executable=None,
    )
    assert values == [([0, 1], 0), ([0, 1], 1)]
    assert sorted(stdout.getvalue().splitlines()) == ["[0]<stdout>:hello 2", "[1]<stdout>:hello 2"]
    assert sorted(stderr.getvalue().splitlines()) == ["[0]<stderr>:error line", "[1]<stderr>:error line"]


def test_lines_begin_with_the_time_where_that_is_asked_for(spark, capsys):
    def say():
        import sys

        print("hello")
        print("error line", file=sys.stderr)

    stdout = io.StringIO()
    run(say, num_proc=1, spark=spark, stdout=stdout, prefix_output_with_timestamp=True, nics="lo")
    when = r"\w{3} \w{3} [ \d]\d \d\d:\d\d:\d\d \d{4}"
    assert re.fullmatch(rf"{when}\[0\]<stdout>:hello\n", stdout.getvalue())
    assert re.search(rf"^{when} \[rank 0\] error line$", capsys.readouterr().out, re.MULTILINE)


def test_what_a_rank_sends_by_log_to_driver_is_printed_whoever_started_it(capsys):
    events = []

    def main():
        log_to_driver("a word")

    run(main, num_proc=-1, log_to_driver=False, on_event=events.append)
    assert capsys.readouterr().out == "a word\n"
    assert "driver_log" in {event["kind"] for event in events}


def test_an_unknown_keyword_is_refused_with_those_there_are(spark):
    with pytest.raises(ConfigError, match=r"no keyword colour: it has args.*prefix_output_with_timestamp.*on_event"):
        run(join_twice, num_proc=2, spark=spark, colour=1)
