"""A host that is not part of a run, at every port that listens on those which are: before, during and after it.

It reads nothing, changes nothing and stops nothing, and the driver grows by less than 64 MiB.
"""

from __future__ import annotations

import json
import subprocess
import time

import pytest
from hosts import SUBNET, Run, hosts

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

MARKER = b"ZZZZZZZZZZZZ"
GROWTH_KIB = 64 << 10

# Ones of a pattern that a stranger could recognise, for some seconds, over both backends.
WORK = """
def work(world):
    import time
    import torch
    from sparkdl.collective import open_collective
    rounds = []
    for backend in BACKENDS:
        collective = open_collective(world, backend=backend)
        mine = torch.full((4096,), 0x5A5A5A5A, dtype=torch.int32)
        begun, count = time.monotonic(), 0
        while collective.broadcast_object(time.monotonic() - begun < 8):
            assert torch.equal(collective.broadcast_object(mine, root=1), mine)
            assert collective.all_reduce(torch.ones(3)).tolist() == [2.0] * 3
            count += 1
            time.sleep(0.02)
        collective.close()
        rounds.append(count > 10)
    return rounds
"""

STRANGER = r"""
import json, socket, struct, sys
kept = []

def attack(target, name, data, read=True):
    try:
        with socket.create_connection(target, timeout=0.3) as sock:
            sock.settimeout(0.3)
            got = b""
            if read and name == "forged":
                got += sock.recv(32)
            for start in range(0, len(data), 1 << 16):
                sock.sendall(data[start:start + (1 << 16)])
            while read and len(got) < 1 << 20:
                part = sock.recv(1 << 16)
                if not part:
                    break
                got += part
    except OSError:
        pass
    return got.hex() if "got" in locals() else ""

registration = json.dumps({"kind": "registration", "slot": 0, "found_size": 2, "host": "x", "pid": 1}).encode()
attacks = {
    "silent": b"",
    "garbage": bytes(range(256)) * 64,
    "put": b"PUT /global/0 HTTP/1.1\r\nContent-Length: 1048576\r\n\r\n" + bytes(1 << 20),
    "get": b"GET /global/0 HTTP/1.1\r\n\r\n",
    "torch set": b"\x09\x18\x7d\xc3\x3c" + b"\x00" + struct.pack("<Q", 4) + b"init" + struct.pack("<Q", 1 << 40),
    "torch get": b"\x01" + struct.pack("<Q", 8) + b"init/key",
    "huge frame": b"\xff" * 64 + struct.pack("!BI", 2, 0xFFFFFFFF) + bytes(1 << 20),
    "forged": bytes(64) + struct.pack("!BI", 1, len(registration)) + registration + bytes(16),
    "gloo": struct.pack("<q", 1) + bytes(4096),
}
for line in sys.stdin:
    read = []
    for host, port in json.loads(line):
        for name, data in attacks.items():
            read.append([host, port, name, attack((host, port), name, data)])
        for _ in range(100):  # slow ones, that stay
            try:
                sock = socket.create_connection((host, port), timeout=0.3)
                sock.send(b"x")
                kept.append(sock)
            except OSError:
                break
        del kept[:-400]
    print(json.dumps(read), flush=True)
"""


class Stranger:
    def __init__(self, host):
        self.process = host.start("-c", STRANGER, stdin=subprocess.PIPE)

    def visit(self, targets):
        """Try everything at ``targets``; return what was read: host, port, attack, bytes."""
        self.process.stdin.write(json.dumps(sorted(targets)) + "\n")
        self.process.stdin.flush()
        return [(host, port, name, bytes.fromhex(data)) for host, port, name, data in json.loads(self.reply())]

    def reply(self):
        return self.process.stdout.readline()

    def end(self):
        self.process.stdin.close()
        self.process.kill()
        self.process.wait()
        self.process.stdout.close()


@pytest.mark.parametrize("backend", ["torch", "horovod"])
def test_a_stranger_reads_nothing_changes_nothing_and_stops_nothing(tmp_path, backend):
    if backend == "horovod":
        pytest.importorskip("horovod.torch")
    with hosts(3) as (here, there, elsewhere):
        run = Run(tmp_path, (here, there), WORK.replace("BACKENDS", repr((backend,))))
        stranger = Stranger(elsewhere)
        try:
            (port,) = here.listening()
            assert port[0] == here.address, "the driver listens on one address, and on one port"
            channel = stranger.visit([port])
            run.start_ranks()
            read, seen, rounds = [], set(), 0
            while any(rank.poll() is None for rank in run.ranks):
                listening = here.listening() | there.listening()
                seen |= listening
                open_to_others = {one for one in listening if not one[0].startswith("127.")}
                read += stranger.visit(open_to_others)
                rounds += 1
                time.sleep(0.2)
            grown, values = run.result()
            assert values == "[[True], [True]]"
            assert rounds > 2
            assert [rank.wait() for rank in run.ranks] == [0, 0]
            assert not here.listening() | there.listening(), "nothing listens after the run"
            assert not any(data for *_, data in stranger.visit([port]))
        finally:
            stranger.end()
            run.end()
    assert len(seen) > 1, "the ranks' own ports were visited, too"
    assert {host for host, _ in seen} <= {"127.0.0.1", f"{SUBNET}.1", f"{SUBNET}.2"}, "one interface, never all"
    channel += [one for one in read if one[:2] == port]
    for *_, name, data in channel:
        # A random challenge, and at most the refusal of who failed it.
        assert len(data) <= 64, name
        assert not data[32:].strip(b"\0"), name
    assert not any(MARKER in data for *_, data in read)
    assert grown < GROWTH_KIB
