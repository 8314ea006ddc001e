"""What tests of the registry share."""

from __future__ import annotations

from datetime import UTC, datetime

import pyarrow as pa
import pytest
from torch import nn

from sparkdl.models.bundle import save_bundle
from sparkdl.models.registry import ModelRegistry
from sparkdl.models.registry.events import EVENTS, Event


@pytest.fixture
def bundle(tmp_path):
    save_bundle(nn.Linear(2, 1), str(tmp_path / "bundle"))
    return str(tmp_path / "bundle")


@pytest.fixture
def registry(tmp_path):
    return ModelRegistry(str(tmp_path / "registry"))


@pytest.fixture
def grown(tmp_path, bundle):
    """Make a registry with so many versions of so many models, whose events came in few commits."""

    def grown(versions, models=1):
        made = ModelRegistry(str(tmp_path / f"registry-{versions}-{models}"))
        artifact = made.publish("m0", bundle, metrics={"mae": 1.0}, publication="m0-1").artifact
        made.set_alias("m0", "champion", 1, expected=None)
        known, now = {"m0": 1}, datetime.now(UTC)
        events = []
        for name in (f"m{number}" for number in range(models)):
            for version in range(known.get(name, 0) + 1, versions):
                facts = {"metrics": {"mae": 1.0 / version}, "publication": f"{name}-{version}"}
                event = Event(kind="published", name=name, version=version, artifact=artifact, **facts)
                events.append(event.stamped(2 + len(events), now).to_row())
        made._log.table.append(pa.Table.from_pylist(events, schema=EVENTS))
        for name in (f"m{number}" for number in range(0, models, 10)):
            made.publish(name, bundle, metrics={"mae": 1.0 / versions}, publication=f"{name}-{versions}")
        made._log.checkpoint()  # so that all begin without commits after it
        return made

    return grown
