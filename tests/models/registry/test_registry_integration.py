"""Publishers and promoters as real processes, and one that is killed in the middle."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections import Counter
from datetime import timedelta

import pytest

from sparkdl.models.registry import ModelRegistry

PUBLISH = """
import sys
from sparkdl.models.registry import ModelRegistry
registry = ModelRegistry(sys.argv[1])
print([registry.publish("m", sys.argv[2], metrics={"mae": 1.0}).version for _ in range(2)])
"""
PROMOTE = """
import sys
from sparkdl.errors import ConflictError
from sparkdl.models.registry import ModelRegistry
registry = ModelRegistry(sys.argv[1])
won = []
for expected in (None, 10, 20, 30):  # the same rounds for everybody: each moves from where all agreed it stands
    me = int(sys.argv[2]) + (expected or 0)
    try:
        won.append(registry.set_alias("m", "champion", me, expected=expected).moved)
    except ConflictError:
        won.append(False)
    import time
    while len([e for e in registry.history("m") if e.kind == "aliased"]) < 2 * len(won) - 1:
        time.sleep(0.1)
    if won[-1]:
        registry.set_alias("m", "champion", 10 * len(won), expected=me)
    while len([e for e in registry.history("m") if e.kind == "aliased"]) < 2 * len(won):
        time.sleep(0.1)
import json
print(json.dumps(won))
"""
KILLED = """
import os, sys
from sparkdl.models.registry import ModelRegistry
from sparkdl.models.registry.log import EventLog
EventLog.commit = lambda *a, **k: os._exit(9)  # the artifact is there, the event is not
ModelRegistry(sys.argv[1]).publish("m", sys.argv[2])
"""


def start(code, *arguments):
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(processes):
    outputs = [process.communicate(timeout=240) for process in processes]
    assert [process.returncode for process in processes] == [0] * len(processes), outputs
    return [out for out, _ in outputs]


@pytest.mark.slow
def test_eight_publishers_take_every_number_once(tmp_path, bundle):
    registry = ModelRegistry(str(tmp_path / "registry"))
    outputs = finish([start(PUBLISH, registry.uri, bundle) for _ in range(8)])
    taken = [version for out in outputs for version in json.loads(out)]
    assert sorted(taken) == list(range(1, 17))
    assert [version.version for version in registry.list("m")] == list(range(1, 17))


@pytest.mark.slow
def test_of_racing_promoters_exactly_one_wins_each_round(tmp_path, bundle):
    registry = ModelRegistry(str(tmp_path / "registry"))
    for _ in range(40):
        registry.publish("m", bundle)
    outputs = finish([start(PROMOTE, registry.uri, rank) for rank in (1, 2, 3)])
    rounds = zip(*(json.loads(out) for out in outputs), strict=True)
    assert [sum(won) for won in rounds] == [1, 1, 1, 1]
    kinds = Counter(event.kind for event in registry.history("m"))
    assert kinds == {"published": 40, "aliased": 8}


def test_a_killed_publisher_leaves_nothing_that_anybody_sees(tmp_path, bundle):
    registry = ModelRegistry(str(tmp_path / "registry"))
    process = start(KILLED, registry.uri, bundle)
    process.communicate(timeout=120)
    assert process.returncode == 9
    assert registry.models() == []
    assert len(list((tmp_path / "registry" / "artifacts").iterdir())) == 1
    time.sleep(0.01)
    assert len(registry.vacuum(timedelta(0))) == 1
    assert registry.publish("m", bundle).version == 1
