"""A registry whose checkpoint is made of pages, as sparkdl once wrote it, is read, goes on, and is cleaned up.

``files/registry.zip`` was written by that sparkdl: versions, a rollback, a deletion, then signatures, then a fence.
"""

from __future__ import annotations

import math
import os
import time
import zipfile
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
from torch import nn

from sparkdl.errors import FencedError, IntegrityError
from sparkdl.models.registry import ModelRegistry, SigningKey
from sparkdl.tables.table import Fence

SECRET = "5d41402abc4b2a76b9719d911017c592"


@pytest.fixture
def earlier(tmp_path):
    with zipfile.ZipFile(Path(__file__).with_name("files") / "registry.zip") as archive:
        archive.extractall(tmp_path / "registry")
    return ModelRegistry(str(tmp_path / "registry"), key=())


def test_all_of_it_is_read(earlier):
    assert earlier.models() == ["other", "rides"]
    assert [version.version for version in earlier.list("rides")] == [1, 2, 4]
    assert earlier.aliases("rides") == {"champion": 2}
    assert [event.kind for event in earlier.history("rides")] == [
        *("published", "aliased", "published", "published", "published", "aliased", "aliased", "rolled_back", "deleted")
    ]
    assert [earlier.get("rides", number).metrics["mae"] for number in (1, 2, 4)] == [3.0, 2.0, 1.0]
    assert math.isnan(earlier.history("rides")[3].metrics["mae"])
    assert [version.version for version in earlier.models_of("main.sales.rides", 2).versions] == [4]
    assert isinstance(earlier.load("rides", "champion").model, nn.Linear)
    signed = replace(earlier, key=SigningKey.of(SECRET))
    assert signed.get("rides", "champion").version == 2
    with pytest.raises(IntegrityError, match="version 1 of 'rides' is not signed"):
        signed.get("rides", 1)


def test_it_goes_on_where_it_was(earlier, bundle):
    signed = replace(earlier, key=SigningKey.of(SECRET))
    assert signed.publish("rides", bundle, publication="signed-0").version == 2
    assert signed.publish("rides", bundle).version == 5
    with pytest.raises(FencedError, match=r"shop \(epoch 7\)"):
        replace(signed, fence=Fence("shop", 6)).publish("rides", bundle)
    assert replace(signed, fence=Fence("shop", 8)).publish("rides", bundle).version == 6
    assert earlier.rollback("rides", "champion").version == 1
    assert [event.sequence for event in earlier.history("rides")][-3:] == [11, 12, 13]


def test_its_pages_go(earlier, tmp_path):
    state = tmp_path / "registry" / "state"
    then = time.time() - 2 * 86400
    for file in [state, *state.rglob("*")]:
        os.utime(file, (then, then))
    removed = earlier.gc(timedelta(0))
    assert {"checkpoint.json", "pages"} == {each.what.rpartition("/")[2] for each in removed}
    assert sorted(entry.name for entry in state.iterdir()) == ["checkpoint"]
    assert earlier.get("rides", "champion").version == 2
