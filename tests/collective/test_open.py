"""Which collective ``auto`` takes, and that it says so when torch.distributed stands in for Horovod."""

from __future__ import annotations

import logging
import subprocess
import sys
from types import SimpleNamespace

import pytest

from sparkdl.collective import open as opening
from sparkdl.collective import open_collective
from sparkdl.config import BACKENDS
from sparkdl.errors import ConfigError
from sparkdl.world import World

WITHOUT_HOROVOD = """
import sys
sys.modules["horovod"] = None  # what an environment without it looks like to an import
import importlib.util
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name.split(".")[0] == "horovod" else find(name, *rest)
from sparkdl.runner import run


def total(number):
    import torch
    from sparkdl.collective import open_collective
    from sparkdl.world import World

    collective = open_collective(World.from_env())
    try:
        return collective.name, collective.all_reduce(torch.tensor([float(number)])).item()
    finally:
        collective.close()


def without(number):
    sys.modules["horovod"] = None
    importlib.util.find_spec = lambda name, *rest: None if name.split(".")[0] == "horovod" else find(name, *rest)
    return total(number)


if __name__ == "__main__":
    print(run(without, args=(2,), num_proc=-2))
"""


def test_one_rank_needs_no_backend():
    collective = open_collective(World())
    assert collective.name == "solo"
    collective.close()


def test_an_unknown_backend_is_refused_with_those_there_are():
    with pytest.raises(ConfigError, match=f"'mpi' is not one of {', '.join(BACKENDS)}, solo"):
        open_collective(World(), backend="mpi")


@pytest.mark.parametrize(("installed", "level"), [(False, logging.WARNING), (True, logging.INFO)])
def test_torch_standing_in_for_horovod_is_worth_a_warning(monkeypatch, caplog, installed, level):
    class Group:
        name = "torch"

    monkeypatch.setattr(opening, "_open", lambda *given: Group())
    monkeypatch.setattr(opening, "is_installed", lambda: installed)
    monkeypatch.setattr(opening, "built_with", lambda: {"nccl": False})
    monkeypatch.setenv("HOROVOD_GLOO_RENDEZVOUS_ADDR", "127.0.0.1")
    with caplog.at_level(logging.INFO, logger="sparkdl"):
        open_collective(World(size=2, num_nodes=2))
    (record,) = caplog.records
    assert record.levelno == level
    assert ("Horovod is not installed" in record.getMessage()) == (not installed)


def test_ranks_on_the_cpus_of_one_host_meet_through_torch_without_a_warning(monkeypatch, caplog):
    monkeypatch.setattr(opening, "_open", lambda world, backend, *given: SimpleNamespace(name=backend))
    monkeypatch.setattr(opening, "is_installed", lambda: True)
    monkeypatch.setattr(opening, "built_with", lambda: {"nccl": True})
    monkeypatch.setenv("HOROVOD_GLOO_RENDEZVOUS_ADDR", "127.0.0.1")
    with caplog.at_level(logging.INFO, logger="sparkdl"):
        assert open_collective(World(size=2, local_size=2)).name == "horovod"  # whose launcher started them
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        assert open_collective(World(size=2, local_size=2)).name == "torch"
        assert open_collective(World(size=2, local_size=2, device="cuda:0")).name == "horovod"
        assert open_collective(World(size=4, local_size=2, num_nodes=2)).name == "horovod"
    assert {record.levelno for record in caplog.records} == {logging.INFO}


@pytest.mark.slow
def test_without_horovod_two_ranks_meet_through_torch(tmp_path):
    script = tmp_path / "job.py"
    script.write_text(WITHOUT_HOROVOD)
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "[('torch', 4.0), ('torch', 4.0)]" in done.stdout
