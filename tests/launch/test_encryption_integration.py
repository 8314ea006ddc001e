"""The recipe of docs/threat-model.md for links that others can read: ranks over WireGuard, and what the cable shows."""

from __future__ import annotations

import shutil
import subprocess
from contextlib import contextmanager

import pytest
from hosts import Run, hosts, ip

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

MARKER = b"ZZZZZZZZZZZZ"

WORK = """
def work(world):
    import os
    import torch
    import torch.distributed as dist
    dist.init_process_group("gloo")
    numbers = torch.full((1 << 16,), 0x5A5A5A5A, dtype=torch.int32)
    for _ in range(5):
        dist.broadcast(numbers, 0)
    return os.environ["GLOO_SOCKET_IFNAME"]
"""

# Looks at every packet of an interface until its input ends; prints whether the marker was among them.
WATCH = """
import select, socket, sys
sniffer = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3))
sniffer.bind(("cable", 0))
print("watching", flush=True)
seen = packets = 0
while True:
    ready, _, _ = select.select([sniffer, sys.stdin], [], [])
    if sniffer in ready:
        packet = sniffer.recv(1 << 17)
        packets += 1
        seen += sys.argv[1].encode() in packet
    elif sys.stdin in ready:
        break
print(packets > 0, seen > 0, flush=True)
"""


def shown_by_the_cable(host, run):
    watch = host.start("-c", WATCH, MARKER.decode(), stdin=subprocess.PIPE)
    try:
        assert watch.stdout.readline() == "watching\n"
        run.start_ranks()
        values = run.result()[1]
        watch.stdin.close()
        packets, seen = watch.stdout.readline().split()
        assert packets == "True"
        return values, seen == "True"
    finally:
        watch.kill()
        watch.wait()
        watch.stdout.close()
        run.end()


def wireguard(host, number):
    """Give ``host`` an interface with the address 10.88.0.``number``; return its process and its public key."""
    name = f"wg{number}"  # its control socket lies in a folder that all namespaces share
    start = host.command("env", "WG_PROCESS_FOREGROUND=1", "LOG_LEVEL=error", "wireguard-go", "--foreground", name)
    process = subprocess.Popen(start)
    private = subprocess.run(["wg", "genkey"], capture_output=True, text=True, check=True).stdout.strip()
    public = subprocess.run(["wg", "pubkey"], input=private, capture_output=True, text=True, check=True).stdout.strip()
    configure = (
        f"until wg show {name} >/dev/null 2>&1; do sleep 0.05; done; "
        f"wg set {name} listen-port 51820 private-key /dev/stdin; "
        f"ip addr add 10.88.0.{number}/24 dev {name}; ip link set {name} up"
    )
    subprocess.run(host.command("sh", "-c", configure), input=private, text=True, check=True, timeout=30)
    return process, public


@contextmanager
def tunnel(pair):
    """Join two hosts by WireGuard for the block; they have the addresses 10.88.0.1 and 10.88.0.2 in it."""
    ends = [wireguard(host, number + 1) for number, host in enumerate(pair)]
    try:
        for number, host in enumerate(pair):
            other = 1 - number
            ip(
                "netns", "exec", host.name, "wg", "set", f"wg{number + 1}", "peer", ends[other][1],
                "endpoint", f"{pair[other].address}:51820", "allowed-ips", f"10.88.0.{other + 1}/32",
            )  # fmt: skip
        yield ["10.88.0.1", "10.88.0.2"]
    finally:
        for process, _ in ends:
            process.terminate()
            process.wait()


def test_what_ranks_exchange_over_wireguard_cannot_be_read_on_the_cable(tmp_path):
    if not shutil.which("wireguard-go") or not shutil.which("wg"):
        pytest.skip("needs wireguard-go and wg")
    with hosts(2) as pair:
        (tmp_path / "plain").mkdir()
        plain = Run(tmp_path / "plain", pair, WORK)
        assert shown_by_the_cable(pair[0], plain) == ("['cable', 'cable']", True), (
            "the watch sees what is not encrypted"
        )
        with tunnel(pair) as addresses:
            run = Run(tmp_path, pair, WORK, addresses=addresses)
            assert shown_by_the_cable(pair[0], run) == ("['wg1', 'wg2']", False)
