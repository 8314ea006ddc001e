"""Publishers, deleters and collectors of the same bundle as real processes: nothing that is named is ever lost."""

from __future__ import annotations

import subprocess
import sys

import pytest
from torch import nn

from sparkdl.models.bundle import save_bundle
from sparkdl.models.registry import ModelRegistry

PUBLISH = """
import random, sys, time
from sparkdl.models.registry import ModelRegistry
registry, name = ModelRegistry(sys.argv[1]), sys.argv[3]
for _ in range(12):
    made = registry.publish(name, sys.argv[2])
    registry.load(name, made.version)
    registry.delete(name, made.version)
    time.sleep(random.random() / 4)
registry.publish(name, sys.argv[2])
"""
COLLECT = """
import os, sys
from datetime import timedelta
from sparkdl.models.registry import ModelRegistry
registry, removed = ModelRegistry(sys.argv[1]), 0
while not os.path.exists(sys.argv[2]):
    removed += len([each for each in registry.gc(timedelta(0)) if each.kind == "artifact"])
print(removed)
"""


def start(code, *arguments):
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.slow
def test_no_publication_loses_its_artifact_to_a_collection_at_the_same_time(tmp_path, bundle):
    registry = ModelRegistry(str(tmp_path / "registry"))
    registry.publish("first", bundle)
    registry.delete("first", 1)
    save_bundle(nn.Linear(3, 1), str(tmp_path / "other"))
    publishers = [start(PUBLISH, registry.uri, *what) for what in ((bundle, "a"), (tmp_path / "other", "b"))]
    collectors = [start(COLLECT, registry.uri, tmp_path / "stop") for _ in range(2)]
    said = [process.communicate(timeout=240) for process in publishers]
    (tmp_path / "stop").touch()
    counts = [process.communicate(timeout=60) for process in collectors]
    ended = [process.returncode for process in (*publishers, *collectors)]
    assert ended == [0] * 4, "\n".join(error for _, error in (*said, *counts))
    assert sum(int(out) for out, _ in counts) > 0
    for name in "ab":
        assert [each.version for each in registry.list(name)] == [13]
        registry.load(name, 13)


@pytest.mark.parametrize("moment", ["copied", "committed"])
def test_a_publisher_that_is_killed_leaves_what_a_collection_removes_or_a_version(tmp_path, bundle, moment):
    kill = {
        "copied": "from sparkdl.models.registry.log import EventLog; EventLog.commit = lambda *a, **k: os._exit(9)",
        "committed": "from sparkdl.models.registry.log import EventLog; EventLog._maintain = lambda *a: os._exit(9)",
    }[moment]
    code = f"import os, sys\n{kill}\n" + (
        "from sparkdl.models.registry import ModelRegistry\nModelRegistry(sys.argv[1]).publish('m', sys.argv[2])"
    )
    registry = ModelRegistry(str(tmp_path / "registry"))
    process = start(code, registry.uri, bundle)
    process.communicate(timeout=120)
    assert process.returncode == 9
    kinds = sorted(each.kind for each in registry.gc(dry_run=True))
    assert kinds == ["leftover"]  # the lease, at once; the artifact is young
    if moment == "copied":
        assert registry.models() == []
        assert registry.publish("m", bundle).version == 1
    assert [each.version for each in registry.list("m")] == [1]
    registry.gc()
    registry.load("m", 1)
