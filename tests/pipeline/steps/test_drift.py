"""Every setting of drift acts: thresholds on what alarms, the rule on what follows."""

from __future__ import annotations

import pytest

from sparkdl.pipeline.file import loads
from sparkdl.pipeline.judging.counts import Categories, Histogram
from sparkdl.pipeline.judging.drift import compare, decide
from sparkdl.pipeline.state.evaluator import stale_of
from sparkdl.pipeline.state.project import Project
from sparkdl.pipeline.state.run import Run
from sparkdl.pipeline.steps.drift import DriftStep, decided

TEXT = """
name: shop
root: /nowhere
source: {kind: parquet, path: /nowhere/rows, key: id, time: at}
features: {x: number, city: category}
label: {y: regression}
"""
OLD = {
    "x": Histogram(counts=(1000, 1000, 1000)),
    "city": Categories(counts={"Bonn": 2000, "Trier": 1000}),
}
MOVED = OLD | {"x": Histogram(counts=(1600, 1000, 400))}
LOST = OLD | {"x": Histogram(counts=(900, 900, 900), missing=300)}
STRANGE = OLD | {"city": Categories(counts={"Bonn": 1800, "Trier": 900}, other=300)}
NOTHING = ["drift.psi=null", "drift.missing=null", "drift.unseen=null"]


def drift_of(*overrides):
    return loads(TEXT, overrides).spec.drift


@pytest.mark.parametrize(
    ("setting", "window"),
    [
        ("drift.psi=0.1", MOVED),
        ("drift.js=0.1", MOVED),
        ("drift.ks=0.1", MOVED),
        ("drift.missing=0.05", LOST),
        ("drift.unseen=0.05", STRANGE),
    ],
)
def test_each_threshold_alarms_by_itself(setting, window):
    name = setting.partition("=")[0]
    for overrides, alarm in ((NOTHING, False), ([*NOTHING, setting], True), ([*NOTHING, f"{name}=0.9"], False)):
        assert compare(OLD, window, drift_of(*overrides)).alarm == alarm, overrides


@pytest.mark.parametrize("action", ["warn", "retrain", "fail"])
def test_the_action_waits_for_after_of_windows(action):
    quiet, loud = compare(OLD, OLD, drift_of()), compare(OLD, LOST, drift_of())
    once = drift_of(f"drift.action={action}")
    twice = drift_of(f"drift={{action: {action}, after: 2, of: 3}}")
    assert [decide(once, {"a": loud})[0], decide(twice, {"a": loud})[0]] == [action, "none"]
    assert [decide(rule, {"a": loud, "b": quiet, "c": loud})[0] for rule in (once, twice)] == [action, action]


def test_without_a_champion_there_is_nothing_to_compare_with(tmp_path):
    run = Run(Project(loads(TEXT.replace("/nowhere", str(tmp_path)))))
    assert not stale_of(DriftStep(), run)
    found = decided(run)
    assert (found.against, found.action, found.windows) == (None, "none", {})
    assert found.reason == "there is no champion yet to compare with"
