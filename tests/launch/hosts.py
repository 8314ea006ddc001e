"""Hosts of their own on this machine: network namespaces on one switch, each with a host name; needs root."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SUBNET = "10.77.0"


def ip(*arguments):
    """Run ``ip``; return what it printed."""
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True)
    assert done.returncode == 0, (arguments, done.stderr)
    return done.stdout


def shape(namespace, device, rate, burst):
    """Let a device send ``rate``, such as ``"1gbit"``, but for ``burst``, such as ``"64kb"``, behind a pause.

    What the kernel hands it at once is less than that: of longer pieces ``tbf`` makes packets one by one, which took a
    tenth of two cores, and a third of the rate.
    """
    at_once = min(int(burst.removesuffix("kb")) * 1024 * 3 // 4, 65536)
    ip("-n", namespace, "link", "set", "dev", device, "gso_max_size", str(at_once))
    limits = ("root", "tbf", "rate", rate, "burst", burst, "latency", "50ms")
    done = subprocess.run(["tc", "-n", namespace, "qdisc", "replace", "dev", device, *limits], capture_output=True)
    assert done.returncode == 0, done.stderr


class Host:
    """A namespace whose interface ``cable`` has the address ``SUBNET.number``, and leads to a port of the switch."""

    def __init__(self, number):
        self.name, self.address = f"sdl{os.getpid()}-{number}", f"{SUBNET}.{number}"
        self.switch, self.port = f"sdl{os.getpid()}-sw", f"port{number}"

    def command(self, *arguments):
        # Horovod binds its data connections to what the host's name leads to: let it be the address.
        named = ["unshare", "--uts", "sh", "-c", f'hostname {self.address} && exec "$0" "$@"', *arguments]
        return ["ip", "netns", "exec", self.name, *named]

    def start(self, *arguments, **options):
        env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        command = self.command(sys.executable, *map(str, arguments))
        return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env, **options)

    def shape(self, rate, burst="256kb"):
        """Let the cable carry ``rate``, such as ``"1gbit"``, each way, see the function ``shape``."""
        for namespace, device in ((self.name, "cable"), (self.switch, self.port)):
            shape(namespace, device, rate, burst)

    def listening(self):
        """Addresses and ports of every socket that listens here, by the kernel."""
        found = set()
        for file in ("tcp", "tcp6"):
            table = subprocess.run(
                ["ip", "netns", "exec", self.name, "cat", f"/proc/net/{file}"], capture_output=True, text=True
            ).stdout.splitlines()[1:]
            for row in (line.split() for line in table):
                if row[3] == "0A":
                    address, port = row[1].split(":")
                    octets = [str(int(address[start : start + 2], 16)) for start in range(0, len(address), 2)]
                    found.add((".".join(reversed(octets)), int(port, 16)))
        return found


@contextmanager
def hosts(count):
    """Yield ``count`` hosts that reach each other."""
    if shutil.which("ip") is None or os.geteuid() != 0:
        pytest.skip("network namespaces need ip and the rights of root")
    switch, made = f"sdl{os.getpid()}-sw", [Host(number + 1) for number in range(count)]
    names = [switch, *(host.name for host in made)]
    try:
        for name in names:
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
        ip("-n", switch, "link", "add", "switch", "type", "bridge")
        ip("-n", switch, "link", "set", "switch", "up")
        for host in made:
            ip("link", "add", "cable", "netns", host.name, "type", "veth", "peer", "name", host.port, "netns", switch)
            ip("-n", switch, "link", "set", host.port, "master", "switch", "up")
            ip("-n", host.name, "addr", "add", f"{host.address}/24", "dev", "cable")
            ip("-n", host.name, "link", "set", "cable", "up")
        yield made
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


DRIVER = """
import pickle, resource, sys
from sparkdl.collective.rendezvous.horovod_store import horovod_rendezvous
from sparkdl.config import LaunchConfig
from sparkdl.launch.driver.channel import Channel
from sparkdl.launch.driver.supervisor import Supervisor
from sparkdl.launch.wire import dump_value
from sparkdl.runner import _call
from sparkdl.storage import Configuration

class Nobody:
    def cancel(self): pass
    def post_mortem(self, slot): return ""

address, size, interface, seconds, file, source = sys.argv[1:]
scope = {}
exec(open(source).read(), scope)
work = scope["work"]

def rank(world):
    import functools
    return _call(Configuration(), functools.partial(work, world), (), {}, world)

config = LaunchConfig(start_timeout_seconds=240, timeout_seconds=int(seconds), interface=interface or None)
with Channel(
    address, int(size), services=[horovod_rendezvous], interface=config.interface
) as channel:
    with open(file, "wb") as out:
        out.write(pickle.dumps(channel.connection_info))
    print("listening", flush=True)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    values = Supervisor(channel, Nobody(), config).run(dump_value(rank))
    print("grown", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before, flush=True)
print("values", values, flush=True)
sys.stdin.readline()
"""

RANK = """
import pickle, sys
from sparkdl.launch.rank.rank import Slot, run_rank
file, number, host, *peers = sys.argv[1:]
info = pickle.load(open(file, "rb"))
sys.exit(not run_rank(info, Slot(number=int(number), host=host, found_size=len(peers), peers=tuple(peers))))
"""


class Run:
    """A rank on each of ``hosts``, which may repeat, and a driver, that run ``work(world)`` as ``source`` defines it.

    The driver is on the host of the first rank, or on ``driver``.
    """

    def __init__(self, folder, hosts, source, *, addresses=None, interface="", driver=None, seconds=240):
        self.hosts, self.addresses = hosts, addresses or [host.address for host in hosts]
        reached = driver.address if driver is not None else self.addresses[0]
        self.folder, self.info = folder, folder / "info"
        (folder / "driver.py").write_text(DRIVER)
        (folder / "rank.py").write_text(RANK)
        (folder / "work.py").write_text(source)
        arguments = (reached, len(hosts), interface, seconds, self.info, folder / "work.py")
        self.driver = (driver or hosts[0]).start(folder / "driver.py", *arguments, stdin=subprocess.PIPE)
        self.ranks = []
        assert self.driver.stdout.readline() == "listening\n"

    def start_ranks(self):
        for number, host in enumerate(self.hosts):
            arguments = (self.folder / "rank.py", self.info, number, self.addresses[number], *self.addresses)
            self.ranks.append(host.start(*arguments))

    def result(self):
        """Wait for the ranks; return how much the driver grew, KiB, and what it printed of their values."""
        lines = iter(self.driver.stdout.readline, "")  # what ranks printed stands there, too
        grown, values = (next(line for line in lines if line.startswith(word)) for word in ("grown ", "values "))
        return int(grown.split()[1]), values.removeprefix("values ").strip()

    def end(self):
        for process in (self.driver, *self.ranks):
            if process.stdin is not None:
                process.stdin.close()
            process.kill()
            process.wait()
            process.stdout.close()
