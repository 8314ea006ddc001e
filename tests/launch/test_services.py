"""Servers for the ranks: started, found, stopped; nothing imported for those that nobody comes to."""

from __future__ import annotations

import pickle
import socket
import sys
import threading

import cloudpickle
import psutil
import pytest

from sparkdl.errors import ClusterError
from sparkdl.launch.services import LateService, hosted, likely


class Recorder:
    def __init__(self, name, log, fail=False):
        self.name, self.log, self.fail = name, log, fail

    def start(self, bind_host, world_size):
        self.log.append(f"start {self.name}")
        if self.fail:
            raise ClusterError("no")
        return {self.name: f"{bind_host} {world_size}"}

    def stop(self):
        self.log.append(f"stop {self.name}")


def test_services_run_for_the_block_and_stop_in_reverse():
    log = []
    with hosted([Recorder("A", log), Recorder("B", log)], "h", 2) as variables:
        assert variables == {"A": "h 2", "B": "h 2"}
        assert log == ["start A", "start B"]
    assert log[2:] == ["stop B", "stop A"]


def test_a_service_that_does_not_start_takes_the_others_with_it():
    log = []
    with pytest.raises(ClusterError), hosted([Recorder("A", log), Recorder("B", log, fail=True)], "h", 2):
        pytest.fail("the block was entered")
    assert log == ["start A", "start B", "stop B", "stop A"]


LATE = """
class Home:
    def adopt(self, listener):
        self.listener = listener
        connection, _ = listener.accept()
        connection.sendall(b"at home")
        connection.close()

    def stop(self):
        Home.stopped = True
"""


@pytest.fixture
def late(tmp_path, monkeypatch):
    (tmp_path / "late_home.py").write_text(LATE)
    monkeypatch.syspath_prepend(tmp_path)
    before = set(threading.enumerate())
    service = LateService(module="late_home", name="Home", address="AT", port="PORT", variables={"MORE": "1"})
    yield pickle.loads(pickle.dumps(service))  # as it travels to slot 0
    sys.modules.pop("late_home", None)
    assert set(threading.enumerate()) <= before


def listening():
    return {c.laddr for c in psutil.Process().net_connections("tcp") if c.status == psutil.CONN_LISTEN}


def test_a_late_service_is_imported_when_somebody_connects(late):
    before = listening()
    with hosted([late], "127.0.0.1", 3) as variables:
        assert (variables["AT"], variables["MORE"]) == ("127.0.0.1", "1")
        address = (variables["AT"], int(variables["PORT"]))
        assert listening() - before == {address}
        assert "late_home" not in sys.modules
        with socket.create_connection(address) as client:
            client.settimeout(20)
            assert client.recv(100) == b"at home"
        home = sys.modules["late_home"].Home
        assert not hasattr(home, "stopped")
    assert home.stopped
    assert listening() == before


def test_a_late_service_waits_for_what_it_needs_to_be_loaded_by_others(late, tmp_path):
    (tmp_path / "late_need.py").write_text("import time\ntime.sleep(0.3)\n")
    late.needs = ("late_need",)
    with hosted([late], "127.0.0.1", 3) as variables:
        address = (variables["AT"], int(variables["PORT"]))
        with socket.create_connection(address) as client:
            client.settimeout(0.2)
            with pytest.raises(TimeoutError):
                client.recv(100)
            assert "late_home" not in sys.modules
            import late_need  # noqa: F401

            client.settimeout(20)
            assert client.recv(100) == b"at home"
    del sys.modules["late_need"]


def test_a_late_service_that_nobody_comes_to_leaves_nothing(late):
    before = listening()
    for _ in range(2):
        with hosted([late], "127.0.0.1", 3):
            pass
    assert "late_home" not in sys.modules
    assert listening() == before


def test_an_address_of_another_host_is_refused(late):
    with pytest.raises(ClusterError, match=r"no service can listen on 192\.0\.2\.1"):
        late.start("192.0.2.1", 2)


def pickled(function):
    return memoryview(cloudpickle.dumps(function))


NAMES = ("torch", "torch.distributed", "horovod.torch")


def test_what_a_function_names_is_likely_and_nothing_else():
    def with_torch():
        import torch.distributed as dist

        return dist

    def with_horovod():
        import horovod.torch as hvd

        return hvd

    assert likely(NAMES, pickled(lambda: 1)) == ()
    assert likely(NAMES, pickled(with_torch)) == ("torch", "torch.distributed")
    assert likely(NAMES, pickled(with_horovod)) == NAMES
    assert likely(NAMES, memoryview(bytes(2 << 20))) == NAMES, "too large to look at"


def test_what_the_home_of_a_function_has_loaded_is_likely(tmp_path, monkeypatch):
    (tmp_path / "late_home.py").write_text("from math import floor\nfrom decimal import Decimal\ndef f(): pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    import late_home

    assert likely(("decimal", "fractions"), pickled(late_home.f)) == ("decimal",)
    del sys.modules["late_home"]
