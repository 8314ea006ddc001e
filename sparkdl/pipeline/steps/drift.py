"""The step ``drift``: windows that the champion was not trained on, compared with the rows that it was trained on.

Numbers, categories, ids and texts are compared by their values, lists and texts by their lengths as well; of vectors,
images and date parts, and of lists and texts whose values are hashed, only whether they are missing or how long they
are. Where training goes on from the champion, its statistics stay those of the rows that first fitted its features.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from sparkdl.errors import BundleError, ConfigError, DataError, IntegrityError, SchemaError
from sparkdl.features.fitted import Features, token_functions
from sparkdl.models.registry import ModelVersion, bundle_of
from sparkdl.observe import logger
from sparkdl.pipeline.judging.counts import counts_of
from sparkdl.pipeline.judging.drift import Drift, compare, decide
from sparkdl.pipeline.state.evaluator import Stale, Step, StepState, stale_of
from sparkdl.pipeline.state.project import Project
from sparkdl.pipeline.state.receipts import Receipt, ReceiptTable, content_key, replacing
from sparkdl.pipeline.state.results import Drifted, Trained
from sparkdl.pipeline.state.run import Run
from sparkdl.pipeline.steps.learning import learn_from_all, learns_from_all, parts_to_do
from sparkdl.pipeline.windows import NO_TIME, WINDOW

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

VERSION = 1
"""The version of how windows are compared; raise it when that changes."""
_MOST_WINDOWS = 48
"""The newest windows that are compared with a champion, two days of hours; more where the file looks back upon more."""
_VALUES_AT_ONCE = 2_000_000
"""Counts of a vocabulary's values that the driver holds; of large vocabularies fewer windows are counted at once."""


@dataclass(frozen=True, kw_only=True)
class Looked:
    """What comparing one window came to.

    Attributes:
        drift: what was found; None where it could not be compared.
        problem: why not.
        artifact: of the champion that it was compared with; empty in results of versions that did not note it.
        thresholds: a hash of those that it was compared by; likewise.
    """

    drift: Drift | None
    problem: str = ""
    artifact: str = ""
    thresholds: str = ""


class DriftStep(Step):
    """Windows that the champion was not trained on, one receipt each for the newest champion that they met.

    A rule decides over the last of them, so that a run with nothing new to look at decides as the run before it did.
    The champion is the one that a run begins with; one that it promotes is compared with from the next run on.
    """

    name = "drift"
    looks = True

    def wanted(self, run: Run) -> Mapping[str, str | None]:
        """A key by window; none without a champion."""
        project, champion, content = run.project, run.champion(), run.content()
        if champion is None:
            return {}
        code = {name: project.code[name] for name in token_functions(run.spec.features)}
        inputs = {"version": VERSION, "artifact": champion.artifact, "settings": _thresholds(project), "code": code}
        return {
            name: None if content[name] is None else content_key("drift", {**inputs, "rows": content[name]})
            for name in _windows(run, champion, content)
        }

    def exists(self, run: Run, receipt: Receipt) -> bool:
        """Whether it could be compared: a bundle that was damaged may be whole again."""
        return not receipt.read(Looked).problem

    def asks_for_a_run(self, run: Run) -> bool:
        """Whether the file asks, of drift that is known, for a refusal, or for a training that no run has begun.

        Or its thresholds are others than those by which windows were compared with this champion.
        """
        action = decided(run).action
        retrains = action == "retrain" and run.request.train and not learns_from_all(run)
        return action == "fail" or retrains or self._has_other_thresholds(run)

    def _has_other_thresholds(self, run: Run) -> bool:
        champion, receipts, now = run.champion(), run.receipts.of(self.name), thresholds_key(run.project)
        looks = [receipts[name].read(Looked) for name in self.wanted(run) if name in receipts and receipts[name].key]
        return champion is not None and any(
            look.artifact == champion.artifact and look.thresholds != now for look in looks
        )

    def planned(self, run: Run) -> tuple[StepState, str]:
        """What is known of drift, and what a run would do about it as far as that follows from earlier ones."""
        champion, action = run.champion(), run.spec.drift.action
        if champion is None:
            return "open", "there is no champion yet to compare with"
        if stale := stale_of(self, run):
            action_text = "" if action == "warn" else f", and {action} may follow"
            count = f"{len(stale.keys)} windows are" if len(stale.keys) > 1 else "1 window is"
            return "done again", f"{count} not compared with version {champion.version} yet{action_text}"
        drifted = decided(run)
        action_text = "" if drifted.action in ("none", "warn") else f"{drifted.action}: "
        return "kept", f"{action_text}{drifted.reason}"

    def make(self, run: Run, spark: SparkSession, stale: Stale) -> bool:
        """Compare the windows that nobody has compared with this champion yet."""
        champion = run.champion()
        assert champion is not None
        run.compares_anew = self._has_other_thresholds(run)
        drift_by_window: Mapping[str, Drift] = {}
        problem = ""
        try:
            drift_by_window = _compared(run.project, run.clean(spark), champion, list(stale.keys))
        except (SchemaError, DataError, BundleError, IntegrityError, ConfigError) as error:
            problem = f"the windows cannot be compared with version {champion.version}: {error}"
            logger.warning("drift: %s", problem)
        looked_at = () if problem else tuple(stale.keys)
        run.record.drift = Drifted(against=champion.version, action="none", reason=problem, looked_at=looked_at)
        receipts, shown = run.receipts, {*stale.keys, *stale.fresh}
        past_windows = [name for name, receipt in receipts.of(self.name).items() if receipt.key and name not in shown]
        if past_windows:  # nobody reads what they came to any more, and it would fill the table
            receipts.write([Receipt(step=self.name, partition=name, key="") for name in past_windows])
        with replacing(receipts, self.name, stale.keys) as new_receipts:
            for name, key in stale.keys.items():
                look = Looked(
                    drift=drift_by_window.get(name),
                    problem=problem,
                    artifact=champion.artifact,
                    thresholds=thresholds_key(run.project),
                )
                new_receipts[name] = (str(key), look)
        return True

    def tell(self, run: Run) -> None:
        """What was found, and what is done about it; the run ends where the file asks for that."""
        looked_at = () if run.record.drift is None else run.record.drift.looked_at
        run.record.drift = drifted = replace(decided(run), looked_at=looked_at)
        if drifted.action == "retrain" and run.request.train:
            learn_from_all(run)
        if drifted.action != "none":
            logger.warning("drift from version %s: %s", drifted.against, drifted.reason)
        if drifted.action == "fail":
            raise DataError(
                f"drift from version {drifted.against}, {drifted.reason}: nothing was trained or scored; mend the "
                "source, or go on with drift.action=warn"
            )


def decided(run: Run) -> Drifted:
    """What the receipts of the windows say together, and what is to be done about it."""
    champion = run.champion()
    if champion is None:
        return Drifted(against=None, action="none", reason="there is no champion yet to compare with")
    keys, receipts = DriftStep().wanted(run), run.receipts.of("drift")
    if not keys:
        reason = f"version {champion.version} was trained on all windows that there are"
        return Drifted(against=champion.version, action="none", reason=reason)
    looks = {
        name: receipts[name].read(Looked)
        for name, key in keys.items()
        if name in receipts and receipts[name].key == key
    }
    windows = {name: result.drift for name, result in looks.items() if result.drift is not None}
    problem = next((result.problem for result in looks.values() if result.problem), "")
    action, reason = decide(run.spec.drift, windows)
    text = "; ".join(filter(None, [problem, reason if windows or not problem else ""]))
    return Drifted(against=champion.version, action=action, reason=text, windows=windows)


def _windows(run: Run, champion: ModelVersion, content: Mapping[str, str | None]) -> list[str]:
    """The newest windows that are not older than the champion's training rows, and whose rows it was not trained on.

    Where those are not known any more, the windows of the split that are held back from training.
    """
    trained, receipts = trained_of(run.receipts, champion), run.windows()
    trained_on: Mapping[str, str | None] = {} if trained is None else trained.windows
    if not trained_on:
        parts, _ = parts_to_do(run)
        trained_on = {name: content[name] for name in parts.train if name in content}
    first = min(trained_on, default="")
    names = sorted(
        name
        for name, rows in content.items()
        if receipts[name].kept and name != NO_TIME and name >= first and (rows is None or trained_on.get(name) != rows)
    )
    return names[-max(run.spec.drift.of, _MOST_WINDOWS) :]


def trained_of(receipts: ReceiptTable, version: ModelVersion | None) -> Trained | None:
    """What is kept of a version's training; None where that is not known any more."""
    if version is None or not version.publication:
        return None
    return receipts.result("train", version.publication, Trained)


def _thresholds(project: Project) -> dict[str, Any]:
    """The settings that windows are compared by."""
    return {name: value for name, value in project.settings["drift"].items() if name not in ("action", "after", "of")}


def thresholds_key(project: Project) -> str:
    """A hash of the settings that windows are compared by."""
    return content_key("thresholds", _thresholds(project))


def _compared(project: Project, clean: DataFrame, champion: ModelVersion, names: Sequence[str]) -> dict[str, Drift]:
    """Count windows as the champion's training rows were counted, and compare."""
    from pyspark.sql import functions as F

    from sparkdl.pipeline.work.statistics import window_statistics

    features = _features_of(project, champion, clean.columns)
    options = {feature.name: feature.options for feature in features.fitted}
    expected = counts_of(options, {feature.name: feature.statistics for feature in features.fitted})
    named = sum(len(feature.statistics.values) for feature in features.fitted)
    at_once = max(1, _VALUES_AT_ONCE // max(1, named))
    drift_by_window: dict[str, Drift] = {}
    for first in range(0, len(names), at_once):
        chunk = names[first : first + at_once]
        rows = clean.where(F.col(WINDOW).isin(*chunk))
        by_window = window_statistics(rows, features)
        drift_by_window |= {
            name: compare(expected, counts_of(options, by_window[name]), project.spec.drift)
            for name in chunk
            if name in by_window
        }
    return drift_by_window


def _features_of(project: Project, champion: ModelVersion, columns: Sequence[str]) -> Features:
    """The champion's features that are to be compared, and whose columns are still there."""
    from sparkdl.models.preprocessing import features_of

    features = features_of(bundle_of(champion), project.trusted)
    if features is None:
        raise BundleError("it carries no statistics of its training rows, so no pipeline has trained it")
    compared_features = [feature for feature in features.fitted if feature.name not in project.spec.drift.ignore]
    readable = tuple(feature for feature in compared_features if feature.options.source(feature.name) in columns)
    gone = [feature.name for feature in compared_features if feature not in readable]
    if not readable:
        raise SchemaError(
            f"its features {', '.join(gone[:5])} read columns that are gone, the rows have {list(columns)}"
            if gone
            else "drift.ignore names all of its features"
        )
    if gone:
        logger.warning("drift: the columns of %s, which version %d reads, are gone", ", ".join(gone), champion.version)
    return Features(readable, features.functions)
