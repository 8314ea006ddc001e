"""Drift: windows that the champion was not trained on, compared with the rows that it was trained on.

Enters: clean rows, the champion's bundle with the statistics of its training rows. Leaves: ``Drifted``, which says what
was found and what to do about it. Each window is looked at once for each champion and each set of thresholds; a rule
then decides over the last of them, so that a run with nothing new to look at decides as the run before it did. The
champion is the one that a run begins with; another that it promotes is compared with from the next run on.

Numbers, categories, ids and texts are compared by their values, lists and texts by their lengths as well; of vectors,
images and date parts, and of lists and texts whose values are hashed, only whether they are missing or how long they
are. Where training goes on from the champion, its statistics stay those of the rows that first fitted its features.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from sparkdl.errors import BundleError, ConfigError, DataError, IntegrityError, SchemaError
from sparkdl.features.fitted import Features
from sparkdl.models.folder import read_bundle
from sparkdl.models.registry import ModelVersion
from sparkdl.observe import logger
from sparkdl.pipeline.judging.counts import counts_of
from sparkdl.pipeline.judging.drift import Drift, Limits, Rule, compare
from sparkdl.pipeline.rows.parts import Parts
from sparkdl.pipeline.sources.base import WINDOW
from sparkdl.pipeline.spec import Drift as DriftSpec
from sparkdl.pipeline.state.context import Context
from sparkdl.pipeline.state.keys import drift_inputs
from sparkdl.pipeline.state.results import Drifted
from sparkdl.pipeline.state.steps import Steps

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

__all__ = ["kept_drift", "look_for_drift", "rule_of"]

_VALUES_AT_ONCE = 2_000_000
"""Counts of a vocabulary's values that the driver holds; of large vocabularies fewer windows are counted at once."""


def rule_of(given: DriftSpec) -> Rule:
    """What the file asks for once windows drift."""
    return Rule(action=given.action, after=given.after, of=given.of)


def limits_of(given: DriftSpec) -> Limits:
    """The thresholds of the file."""
    return Limits(
        missing=given.missing, new_categories=given.unseen, psi=given.psi, jensen_shannon=given.js, ks=given.ks
    )


def kept_drift(steps: Steps, inputs: Mapping[str, Mapping[str, object]]) -> tuple[dict[str, Drift], list[str]]:
    """What earlier runs found about windows, and which were not looked at yet."""
    found = {name: steps.find("drift", each, Drift) for name, each in inputs.items()}
    return {name: one for name, one in found.items() if one is not None}, [
        name for name, one in found.items() if one is None
    ]


def look_for_drift(context: Context, clean: DataFrame, parts: Parts, content: Mapping[str, str]) -> Drifted:
    """Compare the windows that nobody has compared with this champion yet, and decide.

    Args:
        context: of the run.
        clean: the clean rows.
        parts: the windows of each part.
        content: a hash of the rows of each window.

    Raises:
        DataError: windows drift, and ``drift.action`` is ``fail``; names features, measures, values and thresholds.
        ClusterError: Spark failed.
    """
    champion = context.champion()
    if champion is None:
        return Drifted(against=None, action="none", reason="there is no champion yet to compare with")
    inputs = drift_inputs(context, champion, parts, content)
    if not inputs:
        reason = f"version {champion.version} was trained on all windows that there are"
        return Drifted(against=champion.version, action="none", reason=reason)
    found, todo = kept_drift(context.steps, inputs)
    problem = ""
    if todo:
        try:
            found |= _compared(context, clean, champion, {name: inputs[name] for name in todo})
        except (SchemaError, DataError, BundleError, IntegrityError, ConfigError) as error:
            problem = f"the windows cannot be compared with version {champion.version}: {error}"
            logger.warning("drift: %s", problem)
            todo = []
    windows = {name: found[name] for name in inputs if name in found}
    action, reason = rule_of(context.spec.drift).decide(windows)
    said = "; ".join(filter(None, [problem, reason if windows or not problem else ""]))
    if action != "none":
        logger.warning("drift from version %d: %s", champion.version, reason)
    return Drifted(against=champion.version, action=action, reason=said, windows=windows, looked_at=tuple(todo))


def _compared(
    context: Context, clean: DataFrame, champion: ModelVersion, todo: Mapping[str, Mapping[str, object]]
) -> dict[str, Drift]:
    """Count windows as the champion's training rows were counted, compare, and keep what was found."""
    from pyspark.sql import functions as F

    from sparkdl.pipeline.work.statistics import window_statistics

    features = _features_of(context, champion, clean.columns)
    options = {one.name: one.options for one in features.fitted}
    reference = {one.name: one.statistics for one in features.fitted}
    expected, limits = counts_of(options, reference), limits_of(context.spec.drift)
    named = sum(len(one.values) for one in reference.values())
    at_once, names = max(1, _VALUES_AT_ONCE // max(1, named)), list(todo)
    both = {name: (options[name], reference[name]) for name in options}
    found: dict[str, Drift] = {}
    for first in range(0, len(names), at_once):
        started, chunk = time.perf_counter(), names[first : first + at_once]
        rows = clean.where(F.col(WINDOW).isin(*chunk))
        counted = window_statistics(rows, WINDOW, both, features.functions)
        for name in chunk:
            if name in counted:
                found[name] = compare(expected, counts_of(options, counted[name]), limits)
                context.steps.put("drift", todo[name], found[name], time.perf_counter() - started)
    return found


def _features_of(context: Context, champion: ModelVersion, columns: Sequence[str]) -> Features:
    """The champion's features that are to be compared, and whose columns are still there."""
    from sparkdl.models.preprocessing import features_of

    features = features_of(read_bundle(champion.uri), context.trusted)
    if features is None:
        raise BundleError("it carries no statistics of its training rows, so no pipeline has trained it")
    asked = [one for one in features.fitted if one.name not in context.spec.drift.ignore]
    there = tuple(one for one in asked if one.options.source(one.name) in columns)
    gone = [one.name for one in asked if one not in there]
    if not there:
        raise SchemaError(
            f"its features {', '.join(gone[:5])} read columns that are gone, the rows have {list(columns)}"
            if gone
            else "drift.ignore names all of its features"
        )
    if gone:
        logger.warning("drift: the columns of %s, which version %d reads, are gone", ", ".join(gone), champion.version)
    return Features(there, features.functions)
