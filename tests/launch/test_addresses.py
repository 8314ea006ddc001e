"""Topology, environment, interfaces and services, without ranks."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparkdl.errors import ClusterError, ConfigError
from sparkdl.launch import addresses

HOSTS = st.lists(st.sampled_from("abcd"), min_size=1, max_size=12)


@given(HOSTS)
def test_ranks_of_a_host_are_neighbours_and_every_number_occurs_once(hosts):
    everybody = addresses.worlds(hosts)
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
    everybody = addresses.worlds(hosts)
    groups = {}
    for world, host in zip(everybody, hosts, strict=True):
        variables = addresses.variables(world, everybody, host)
        groups.setdefault(world.local_rank, []).append(
            (int(variables["HOROVOD_CROSS_RANK"]), int(variables["HOROVOD_CROSS_SIZE"]))
        )
    for group in groups.values():
        assert sorted(group) == [(position, len(group)) for position in range(len(group))]


def test_the_interface_is_the_one_of_the_route_and_the_users_choice_wins():
    assert addresses.interface_to("127.0.0.1") == "lo"
    variables = addresses.interface_variables("lo", {"NCCL_SOCKET_IFNAME": "ib0"})
    assert variables == {"GLOO_SOCKET_IFNAME": "lo", "HOROVOD_GLOO_IFACE": "lo"}
    with pytest.raises(ConfigError, match=r"interface='nope0' is not one of this host's \(.*lo"):
        addresses.interface_variables("nope0", {})


def test_a_name_that_does_not_resolve_is_refused_with_the_setting():
    with pytest.raises(ClusterError, match=r"'no\.such\.host\.invalid' cannot be resolved .* spark\.driver\.host"):
        addresses.address_of("no.such.host.invalid")


def test_ranks_meet_on_the_route_to_another_host_or_on_the_loopback_interface():
    assert addresses.meeting_address("a", ("a", "a"), None) == "127.0.0.1"
    assert addresses.meeting_address("a", ("a", "127.0.0.1"), None) == "127.0.0.1"
    assert addresses.meeting_address("a", ("a", "a"), "lo") == "127.0.0.1"
    with pytest.raises(ConfigError, match=r"interface='nope0' is not one of this host's"):
        addresses.meeting_address("a", ("a", "b"), "nope0")
