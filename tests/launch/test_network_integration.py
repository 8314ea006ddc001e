"""The interface of the route, shown on two network namespaces joined by a cable of their own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow
A, B = f"sdl-a{os.getpid()}", f"sdl-b{os.getpid()}"


def ip(*arguments):
    return subprocess.run(["ip", *arguments], capture_output=True, text=True)


@pytest.fixture
def two_hosts():
    if shutil.which("ip") is None or ip("netns", "add", A).returncode != 0:
        pytest.skip("network namespaces need ip and the rights of root")
    try:
        for command in (
            ("netns", "add", B),
            ("link", "add", "cable0", "netns", A, "type", "veth", "peer", "name", "cable1", "netns", B),
            ("-n", A, "addr", "add", "10.77.0.1/24", "dev", "cable0"),
            ("-n", B, "addr", "add", "10.77.0.2/24", "dev", "cable1"),
            *((("-n", name, "link", "set", device, "up")) for name, device in ((A, "cable0"), (B, "cable1"))),
            *((("-n", name, "link", "set", "lo", "up")) for name in (A, B)),
        ):
            done = ip(*command)
            assert done.returncode == 0, (command, done.stderr)
        yield
    finally:
        ip("netns", "del", A)
        ip("netns", "del", B)


def inside(name, code):
    command = ["ip", "netns", "exec", name, sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout.strip()


@pytest.mark.usefixtures("two_hosts")
def test_the_cable_to_the_other_host_is_chosen():
    ask = "from sparkdl.launch.addresses import interface_to; print(interface_to('{}'))"
    assert inside(A, ask.format("10.77.0.2")) == "cable0"
    assert inside(B, ask.format("10.77.0.1")) == "cable1"
    assert inside(B, ask.format("127.0.0.1")) == "lo"


@pytest.mark.usefixtures("two_hosts")
def test_ranks_on_two_hosts_find_each_other_over_the_cable(tmp_path):
    driver = tmp_path / "driver.py"
    driver.write_text(
        "import pickle, sys\n"
        "from sparkdl.launch.driver.channel import Channel\n"
        "from sparkdl.launch.driver.supervisor import Supervisor\n"
        "from sparkdl.launch.wire import dump_value\n"
        "from sparkdl.config import LaunchConfig\n"
        "class Nobody:\n"
        "    def cancel(self): pass\n"
        "    def post_mortem(self, slot): return ''\n"
        "def reduce(world):\n"
        "    import os, torch, torch.distributed as dist\n"
        "    from sparkdl.collective.backends.torch_distributed import use_run_store\n"
        "    use_run_store()\n"
        "    dist.init_process_group('gloo')\n"
        "    total = torch.ones(1)\n"
        "    dist.all_reduce(total)\n"
        "    return total.item(), world.num_nodes, os.environ['GLOO_SOCKET_IFNAME']\n"
        "with Channel('10.77.0.1', 2) as channel:\n"
        "    open(sys.argv[1], 'wb').write(pickle.dumps(channel.connection_info))\n"
        "    open(sys.argv[1] + '.done', 'w').close()\n"
        "    print(Supervisor(channel, Nobody(), LaunchConfig()).run(dump_value(reduce)))\n"
    )
    rank = (
        "import pickle, sys, time, os\n"
        "from sparkdl.launch.rank.rank import Slot, run_rank\n"
        "while not os.path.exists(sys.argv[1] + '.done'): time.sleep(0.05)\n"
        "connection_info = pickle.load(open(sys.argv[1], 'rb'))\n"
        "run_rank(connection_info, Slot(number=int(sys.argv[2]), host=sys.argv[3], found_size=2))\n"
    )
    connection_info = str(tmp_path / "connection_info")
    starts = [
        (A, [str(driver), connection_info]),
        (A, ["-c", rank, connection_info, "0", "10.77.0.1"]),
        (B, ["-c", rank, connection_info, "1", "10.77.0.2"]),
    ]
    processes = [
        subprocess.Popen(["ip", "netns", "exec", name, sys.executable, *arguments], stdout=subprocess.PIPE, text=True)
        for name, arguments in starts
    ]
    outputs = [process.communicate(timeout=120)[0] for process in processes]
    assert outputs[0].splitlines()[-1] == "[(2.0, 2, 'cable0'), (2.0, 2, 'cable1')]"
