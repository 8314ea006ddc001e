"""HorovodRunner and TorchDistributor: functions as they were written for them, run here."""

import json
import os
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch

from sparkdl.errors import ConfigError, PreflightError, RankFailedError
from sparkdl.estimator.horovod.runners import (
    LOG_LIMIT,
    HorovodRunner,
    TorchDistributor,
    _script_here,
    log_to_driver,
)


def train_with_horovod(rows, epochs=2):
    """A training function written for HorovodRunner: it initialises Horovod and shards its data itself."""
    import horovod.torch as hvd
    import torch

    hvd.init()
    torch.manual_seed(1 + hvd.rank())
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, 3, generator=generator)
    y = x @ torch.tensor([1.0, 2.0, 3.0])
    x, y = x[hvd.rank() :: hvd.size()], y[hvd.rank() :: hvd.size()]
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * hvd.size())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    for _ in range(epochs * 10):
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(x)[:, 0], y)
        loss.backward()
        optimizer.step()
    mean = hvd.allreduce(loss.detach(), name="loss")
    return {"size": hvd.size(), "rank": hvd.rank(), "loss": mean.item(), "weight": model.weight.detach().numpy()}


def train_with_torch(steps, scale=1.0):
    """A training function written for TorchDistributor: it opens the process group itself."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("gloo")
    model = DistributedDataParallel(torch.nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(steps):
        x = torch.randn(64, 2, generator=generator)
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(x)[:, 0], scale * x.sum(1)).backward()
        optimizer.step()
    size = dist.get_world_size()
    dist.destroy_process_group()
    return size, model.module.weight.detach()


@pytest.mark.slow
@pytest.mark.parametrize("np_", [2, -2])
def test_a_function_written_for_horovod_runner_runs_unchanged_on_tasks_and_on_local_processes(spark, np_):
    pytest.importorskip("horovod.torch")
    result = HorovodRunner(np=np_).run(train_with_horovod, rows=200, epochs=3)
    assert (result["size"], result["rank"]) == (2, 0)
    assert result["loss"] < 0.1
    assert np.allclose(result["weight"], [[1, 2, 3]], atol=0.5)


@pytest.mark.slow
def test_zero_takes_every_slot_and_says_that_it_is_deprecated(spark, caplog):
    with caplog.at_level("WARNING", logger="sparkdl"):
        assert HorovodRunner(np=0).run(lambda: int(os.environ["WORLD_SIZE"])) == 2
    assert "deprecated" in caplog.text


@pytest.mark.slow
def test_a_number_below_zero_takes_local_processes(spark):
    def place():
        return os.environ["WORLD_SIZE"], os.getsid(0) == os.getpid()  # a local rank has a session of its own

    assert HorovodRunner(np=-2).run(place) == ("2", True)
    assert HorovodRunner(np=1).run(place) == ("1", False)


def test_more_ranks_than_slots_are_refused(spark):
    with pytest.raises(PreflightError, match="3"):
        HorovodRunner(np=3).run(lambda: 1)


def test_only_log_to_driver_is_printed_unless_all_is_asked_for(spark, capfd):
    def main():
        print("plain words")
        log_to_driver("a" * (LOG_LIMIT + 100))

    HorovodRunner(np=1).run(main)
    quiet = capfd.readouterr()
    assert "plain words" not in quiet.out + quiet.err
    assert "a" * LOG_LIMIT in quiet.out
    assert "a" * (LOG_LIMIT + 1) not in quiet.out
    HorovodRunner(np=1, driver_log_verbosity="all").run(main)
    loud = capfd.readouterr()
    assert "plain words" in loud.out + loud.err


def test_a_rank_that_fails_is_named(spark):
    def main():
        raise ValueError("no such thing")

    with pytest.raises(RankFailedError, match="no such thing"):
        HorovodRunner(np=1).run(main)


def test_values_that_cannot_be_meant_are_refused():
    for arguments in ({"np": 1.5}, {"np": True}, {"np": 1, "driver_log_verbosity": "some"}):
        with pytest.raises(ConfigError):
            HorovodRunner(**arguments)
    with pytest.raises(ConfigError, match="training function"):
        HorovodRunner(np=1).run("main")
    with pytest.raises(ConfigError, match="at least 1"):
        TorchDistributor(num_processes=0)


@pytest.mark.parametrize("local", [pytest.param(True, marks=pytest.mark.slow), False])
def test_a_function_written_for_torch_distributor_runs_unchanged(spark, local):
    size, weight = TorchDistributor(num_processes=2, local_mode=local, use_gpu=False).run(
        train_with_torch, 60, scale=2.0
    )
    assert size == 2
    assert torch.allclose(weight, torch.full((1, 2), 2.0), atol=0.3)


@pytest.fixture
def project(tmp_path):
    """A folder with a script, a module and a file beside it; where a rank's notes go."""
    (tmp_path / "beside.py").write_text("VALUE = 'first'\n")
    (tmp_path / "beside.txt").write_text("text")
    (tmp_path / "train.py").write_text(
        "import json, os, sys\n"
        "import torch.distributed as dist\n"
        "import beside\n"
        "def main():\n"
        "    dist.init_process_group('gloo')\n"
        "    here = os.path.dirname(__file__)\n"
        "    said = [__name__, __file__, beside.VALUE, open(os.path.join(here, 'beside.txt')).read(), sys.argv]\n"
        "    notes = os.path.join(here, 'out' + os.environ['RANK'])\n"
        "    open(notes, 'w').write(json.dumps([*said, dist.get_world_size()]))\n"
        "    os.chdir('/')\n"
        "    return eval(sys.argv[1])\n"
        "if __name__ == '__main__':\n"
        "    sys.exit(main())\n"
    )
    return tmp_path


def notes(project):
    return [json.loads((project / f"out{rank}").read_text()) for rank in (0, 1)]


@pytest.mark.parametrize("local", [pytest.param(True, marks=pytest.mark.slow), False])
def test_a_training_file_runs_where_it_lies(spark, project, local):
    script = str(project / "train.py")
    distributor = TorchDistributor(2, local_mode=local, use_gpu=False)
    assert distributor.run(script, "None", 7) is None
    assert notes(project) == [["__main__", script, "first", "text", [script, "None", "7"], 2]] * 2
    if local:
        return  # each run has processes of its own, unlike Spark's workers
    (project / "beside.py").write_text("VALUE = 'edited since'\n")
    assert distributor.run(script, "0") is None
    assert [note[2] for note in notes(project)] == ["edited since"] * 2


def test_a_training_file_may_be_named_from_here_and_leaves_no_traces_in_workers(spark, project, monkeypatch):
    monkeypatch.chdir(project)
    Path("spawns.py").write_text("import multiprocessing\nmultiprocessing.set_start_method('spawn')\n")
    distributor = TorchDistributor(1, local_mode=False, use_gpu=False)
    for _ in range(2):  # a second call of set_start_method in one process raises
        distributor.run(Path("spawns.py"))


def test_the_exit_code_of_a_training_file_is_told(spark, project):
    distributor = TorchDistributor(2, local_mode=False, use_gpu=False)
    with pytest.raises(RankFailedError, match=r"train.py ended with exit code 3"):
        distributor.run(str(project / "train.py"), "3")
    with pytest.raises(RankFailedError, match=r"train.py ended with exit code 1 \(no rows\)"):
        distributor.run(str(project / "train.py"), "'no rows'")


def test_a_script_is_looked_for_on_each_host(tmp_path, monkeypatch, capsys):
    folder, cwd = tmp_path / "copies", tmp_path / "container"
    folder.mkdir(), cwd.mkdir()
    monkeypatch.chdir(cwd)
    path = str(tmp_path / "train.py")
    copy = _script_here(path, b"pass", str(folder))
    assert (copy, Path(copy).read_bytes()) == (str(folder / "train.py"), b"pass")
    assert f"has no {path}: a copy runs, with nothing beside it" in capsys.readouterr().err
    (cwd / "train.py").write_bytes(b"pass")
    assert _script_here(path, b"pass", str(folder)) == str(cwd / "train.py")
    Path(path).write_bytes(b"pass")
    assert _script_here(path, b"pass", str(folder)) == path
    with pytest.raises(ConfigError, match=r"train.py on .* is another file than the driver's"):
        _script_here(path, b"raise SystemExit", str(folder))


def test_what_torch_distributor_cannot_do_is_said(spark, tmp_path):
    distributor = TorchDistributor(2, local_mode=False, use_gpu=False)
    wanted = {"num_processes": 2, "local_mode": False, "use_gpu": False, "num_tasks": 2}
    assert distributor.input_params == wanted, "as PySpark's own tests ask"
    with pytest.raises(ConfigError, match="does not exist"):
        distributor.run(str(tmp_path / "none.py"))
    (tmp_path / "train.py").write_text("")
    with pytest.raises(ConfigError, match=r"takes no keyword arguments, \['epochs'\] were given: pass them in args"):
        distributor.run(str(tmp_path / "train.py"), epochs=3)
    with pytest.raises(ConfigError, match=r"use sparkdl\.run_on_dataframe"):
        distributor._train_on_dataframe(print, None)


def test_a_cluster_that_asks_for_encryption_is_taken_only_by_word():
    from pyspark.sql import SparkSession

    distributor = TorchDistributor(2, local_mode=False, use_gpu=False, _ssl_conf="mine.ignoreSsl")
    settings = {"spark.ssl.enabled": "true"}
    with mock.patch.object(SparkSession, "getActiveSession", return_value=mock.Mock(conf=settings)):
        with pytest.raises(ConfigError, match=r"spark.ssl.enabled=true asks for encryption.*set mine.ignoreSsl=true"):
            distributor.run(print)
        settings["mine.ignoreSsl"] = "true"
        distributor._check_encryption()
