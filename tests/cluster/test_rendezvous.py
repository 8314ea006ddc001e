"""Topology, environment, interfaces and services, without ranks."""

from __future__ import annotations

import itertools
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparkdl.cluster import rendezvous
from sparkdl.errors import ClusterError, ConfigError

HOSTS = st.lists(st.sampled_from("abcd"), min_size=1, max_size=12)


@given(HOSTS)
def test_ranks_of_a_host_are_neighbours_and_every_number_occurs_once(hosts):
    everybody = rendezvous.worlds(hosts)
    assert sorted(world.rank for world in everybody) == list(range(len(hosts)))
    by_rank = sorted(zip(everybody, hosts, strict=True), key=lambda pair: pair[0].rank)
    for (one, host), (other, next_host) in itertools.pairwise(by_rank):
        assert (other.node_rank, other.local_rank) == (
            (one.node_rank, one.local_rank + 1) if host == next_host else (one.node_rank + 1, 0)
        )
    for world, host in zip(everybody, hosts, strict=True):
        assert world.local_size == hosts.count(host)
        assert world.num_nodes == len(set(hosts))


@given(HOSTS)
def test_horovods_cross_communicators_join_the_equal_local_ranks(hosts):
    everybody = rendezvous.worlds(hosts)
    groups = {}
    for world, host in zip(everybody, hosts, strict=True):
        variables = rendezvous.environment(world, everybody, host)
        groups.setdefault(world.local_rank, []).append(
            (int(variables["HOROVOD_CROSS_RANK"]), int(variables["HOROVOD_CROSS_SIZE"]))
        )
    for group in groups.values():
        assert sorted(group) == [(position, len(group)) for position in range(len(group))]


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
    with rendezvous.hosted([Recorder("A", log), Recorder("B", log)], "h", 2) as variables:
        assert variables == {"A": "h 2", "B": "h 2"}
        assert log == ["start A", "start B"]
    assert log[2:] == ["stop B", "stop A"]


def test_a_service_that_does_not_start_takes_the_others_with_it():
    log = []
    with pytest.raises(ClusterError), rendezvous.hosted([Recorder("A", log), Recorder("B", log, fail=True)], "h", 2):
        pytest.fail("the block was entered")
    assert log == ["start A", "start B", "stop B", "stop A"]


def test_the_interface_is_the_one_of_the_route_and_the_users_choice_wins():
    assert rendezvous.interface_to("127.0.0.1") == "lo"
    variables = rendezvous.interface_variables("lo", {"NCCL_SOCKET_IFNAME": "ib0"})
    assert variables == {"GLOO_SOCKET_IFNAME": "lo", "HOROVOD_GLOO_IFACE": "lo"}
    with pytest.raises(ConfigError, match=r"interface='nope0' is not one of this host's \(.*lo"):
        rendezvous.interface_variables("nope0", {})


def test_a_name_that_does_not_resolve_is_refused_with_the_setting():
    with pytest.raises(ClusterError, match=r"'no\.such\.host\.invalid' cannot be resolved .* spark\.driver\.host"):
        rendezvous.address_of("no.such.host.invalid")


def test_a_late_service_is_imported_when_it_starts_and_says_what_ranks_may_load(tmp_path, monkeypatch):
    (tmp_path / "late_home.py").write_text(
        "class Home:\n"
        "    def start(self, bind_host, world_size): return {'HOME_OF': f'{bind_host} {world_size}'}\n"
        "    def stop(self): Home.stopped = True\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    late = rendezvous.LateService(module="late_home", name="Home", preload=("json", "late_home"))
    assert "late_home" not in sys.modules
    with rendezvous.hosted([late], "h", 3) as variables:
        assert variables == {"HOME_OF": "h 3"}
        home = sys.modules.pop("late_home").Home
        assert not hasattr(home, "stopped")
    assert home.stopped
    assert rendezvous.preloads([late, Recorder("A", []), late]) == ("json", "late_home")
