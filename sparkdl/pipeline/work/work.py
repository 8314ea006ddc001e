"""The work of one run, top to bottom: ingest, drift, features, shards, train, evaluate, publish, score.

Enters: the context of a run, a Spark session. Leaves: tables, a model in the registry, predictions, and the story of it
in the record. Each step is found again by everything that decides it (``state/steps.py``), so that what has not
changed is not done again, also after a kill.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from sparkdl.errors import ConflictError, DataError, FencedError
from sparkdl.estimator.publishing import publish_bundle
from sparkdl.interchange.mirror import mirror_published
from sparkdl.models.registry import ModelVersion
from sparkdl.observe import logger
from sparkdl.pipeline.judging.gate import Decision
from sparkdl.pipeline.rows.parts import PARTS, Parts, parts_of, parts_to_do, rows_of, untaught
from sparkdl.pipeline.session import torch_for_workers
from sparkdl.pipeline.sources.base import WINDOW
from sparkdl.pipeline.state.context import Context
from sparkdl.pipeline.state.keys import (
    bundle_is_whole,
    evaluate_inputs,
    judged_against,
    publish_inputs,
    published_is_there,
    train_inputs,
    trained_of,
    windows_to_score,
)
from sparkdl.pipeline.state.record import Finished, Outcome
from sparkdl.pipeline.state.results import Drifted, Evaluated, Published, Trained
from sparkdl.pipeline.state.steps import content_key
from sparkdl.pipeline.trials import chosen_settings
from sparkdl.pipeline.work.drift import look_for_drift
from sparkdl.pipeline.work.evaluate import evaluate, label_summaries, with_last_values
from sparkdl.pipeline.work.ingest import Ingested, ingest
from sparkdl.pipeline.work.labels import NoLabelsError, check_labels, check_weight, labelled
from sparkdl.pipeline.work.live import live_errors
from sparkdl.pipeline.work.predict import score_windows
from sparkdl.pipeline.work.prepare import Prepared, cut_shards, fit_features
from sparkdl.pipeline.work.search import search
from sparkdl.pipeline.work.training import network_of, train
from sparkdl.tables.table import Table

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

__all__ = ["work"]


def work(context: Context, spark: SparkSession) -> None:
    """Do every step that is due, in order, as far as was asked.

    Raises:
        SparkdlError: what was refused, or failed.
    """
    _Work(context, spark).all()


class _Work:
    def __init__(self, context: Context, spark: SparkSession) -> None:
        self.context, self.spark = context, spark
        self.spec, self.record = context.spec, context.record
        self.published: Published | None = None
        self.waits = ""
        self.ahead: tuple[str, ...] = ()

    def all(self) -> None:
        """Do every step that is due, in order, as far as was asked."""
        context = self.context
        before = context.champion()
        self.record.model["before"] = before.version if before else None
        for step in self._steps():
            if step == context.until:
                break
        champion = context.champion()
        self.record.model |= {"champion": champion.version if champion else None}
        self._end()
        inputs = context.whole()
        if inputs is not None:
            key = content_key("run", inputs)
            done = Finished(inputs=key, run_id=self.record.run_id, outcome=self.record.outcome, ahead=self.ahead)
            context.steps.put("run", context.asked, done, 0.0)  # the last alone: what others left may be overwritten

    def _steps(self) -> Iterator[str]:
        """Do one step after the other, and tell the name of each once it is done: a run may end there."""
        spec, record, context = self.spec, self.record, self.context
        started = time.perf_counter()
        ingested = ingest(self.spark, context)
        self.ahead = ingested.ahead
        context.steps.timed("ingest", not ingested.done, time.perf_counter() - started)
        self._describe(ingested)
        yield "ingest"
        known = context.tables.ledger.windows()
        parts, waits = parts_to_do(spec, known, train=context.train, champion=context.champion() is not None)
        if waits:
            self._wait(waits)
        content = {name: books.content for name, books in known.items()}
        unlabelled = {name: books.unlabelled for name, books in known.items()}
        clean = context.tables.table("clean").read(self.spark)
        record.live = live_errors(context, clean, content)
        drifted = self._drift(clean, parts, content)
        yield "drift"
        record.windows["score"] = list(windows_to_score(context, parts, unlabelled))
        choices = [parts] if context.train and not waits else []
        if drifted.action == "retrain" and context.train and not waits:
            choices.insert(0, parts_of(spec, known, hold_back=False))
        for number, chosen in enumerate(choices, 1):
            try:
                yield from self._prepare_and_learn(clean, chosen, content)
                break
            except NoLabelsError as error:  # the champion predicts all the same
                if number == len(choices) and context.champion() is None:
                    raise
                self._wait(f"learning waits: {error}")
        self._score(clean, parts, unlabelled)
        yield "score"

    def _wait(self, why: str) -> None:
        self.waits = why
        logger.warning("%s", self.waits)

    def _prepare_and_learn(self, clean: DataFrame, parts: Parts, content: Mapping[str, str]) -> Iterator[str]:
        record, context = self.record, self.context
        learnt = [part for part in PARTS if part != "score" and parts.windows(part)]
        record.windows |= {part: list(parts.windows(part)) for part in learnt}
        fitted = fit_features(context, clean, (parts, content))
        yield "features"
        prepared = cut_shards(context, clean, (parts, content), fitted)
        record.rows |= {"train": prepared.train_rows, "validate": prepared.validate_rows}
        record.rows |= {"train unlabelled": prepared.train_unlabelled}
        record.rows |= {"validate unlabelled": prepared.validate_unlabelled}
        yield "shards"
        yield from self._learn(clean, parts, content, prepared)
        self.waits = ""

    def _end(self) -> None:
        """Say what came of it: the last that this run itself has done tells."""
        record, until = self.record, self.context.until
        done = list(dict.fromkeys(note.name for note in self.context.steps.notes if not note.kept))
        made = [name for name in done if name not in ("live", "drift")]  # these only look
        scored = sum(record.predictions.values())
        asked = "" if until is None else f"stopped after {until}, as asked"
        if "publish" in done and self.published is not None:
            outcome: Outcome = "promoted" if self.published.promoted else "not promoted"
            record.end(outcome, "; ".join(filter(None, [self.published.reason, asked])))
        elif record.predictions:
            said = f"version {record.model['champion']} scored {scored} rows"
            record.end("scored", "; ".join(filter(None, [said, self.waits])))
        elif made or (asked and done):
            said = f"did {', '.join(made)}, from which neither a model nor predictions followed"
            record.end("stopped", asked or "; ".join(filter(None, [said, self.waits])))
        else:
            upto = "" if until is None else f" up to {until}"
            record.end("nothing new", self.waits or f"every step{upto} had been done before")

    def _describe(self, ingested: Ingested) -> None:
        record = self.record
        record.windows["ingested"] = [books.window for books in ingested.done]
        record.windows |= {"ahead": list(ingested.ahead)} if ingested.ahead else {}
        record.source_state = self.context.snapshot.state
        record.books = list(ingested.done)
        for name in ("read", "kept", "quarantined", "duplicates"):
            record.rows[name] = sum(getattr(books, name) for books in ingested.done)
        record.rows |= {f"warning: {name}": count for name, count in ingested.warned.items()}
        record.places |= {name: self.context.tables.table(name).uri for name in ("clean", "quarantine", "ledger")}

    def _drift(self, clean: DataFrame, parts: Parts, content: Mapping[str, str]) -> Drifted:
        """Compare new windows with the champion's training rows; end the run where the file asks for that."""
        self.record.drift = drifted = look_for_drift(self.context, clean, parts, content)
        if drifted.action == "fail":
            raise DataError(
                f"drift from version {drifted.against}, {drifted.reason}: nothing was trained or scored; mend the "
                "source, or go on with drift.action=warn"
            )
        return drifted

    def _say_retrained(self, parts: Parts) -> None:
        """Say what became of the training that drift asked for."""
        drifted = self.record.drift
        if drifted is None or drifted.action != "retrain":
            return
        newest = (parts.test or parts.validate)[-1]
        if self.context.steps.notes[-1].kept:
            what = f"nothing can change, since a model was trained on all rows up to {newest} already"
        else:
            what = f"trained again, with all rows up to {newest}"
        self.record.drift = replace(drifted, reason=f"{drifted.reason}; {what}")

    def _learn(self, clean: DataFrame, parts: Parts, content: Mapping[str, str], prepared: Prepared) -> Iterator[str]:
        """Train, evaluate, publish; promote where the gate says so. Tells the name of each step once it is done."""
        spec, record = self.spec, self.record
        inputs = train_inputs(self.context, prepared.key)
        key = content_key("train", inputs)
        champion = self.context.champion()
        training = labelled(rows_of(clean, spec, "train", parts.train), prepared.labels.names)

        def learned() -> Trained:
            torch_for_workers(self.spark)
            windows = {name: content[name] for name in parts.train}
            if spec.search is not None:
                trained = search(self.context, self.spark, prepared)
            else:
                trained = train(self.spark, spec, prepared, key, network_of(spec, prepared))
            origin, split = self._with_parent(trained.origin, prepared.start), self.context.settings["split"]
            summaries = label_summaries(training, spec, prepared.labels, prepared.train_rows)
            return replace(trained, windows=windows, split=split, origin=origin, labels=summaries)

        trained = self.context.steps.do("train", inputs, Trained, learned, lambda done: bundle_is_whole(done.bundle))
        record.trained = trained
        self._say_retrained(parts)
        yield "train"
        judged = publish_inputs(self.context, parts, content, key)
        against = judged_against(self.context, judged)

        def measured() -> Evaluated:
            torch_for_workers(self.spark)
            versions = self.context.registry.list(str(spec.publish.name))
            rival = next((each for each in versions if each.version == against), None)  # or it was removed since
            rows, count, seen = self._judging(clean, parts, prepared, rival)
            theirs = None if rival is None else rival.uri
            rows = with_last_values(rows, training, spec, prepared.labels)
            found = evaluate(rows, spec, prepared.labels, trained, theirs, self.context.trusted, count, seen)
            return replace(found, part=parts.judging, windows=parts.windows(parts.judging))

        measuring = evaluate_inputs(self.context, judged, against)
        evaluated = self.context.steps.do("evaluate", measuring, Evaluated, measured)
        record.evaluated = evaluated
        _tell_of_baseline(evaluated.decision)
        yield "evaluate"
        published = self.context.steps.do(
            "publish",
            judged,
            Published,
            lambda: self._publish(evaluated, trained, champion, key, against),
            lambda _: published_is_there(self.context),
        )
        record.model |= {"name": spec.publish.name, "version": published.version, "promoted": published.reason}
        self.published = published
        yield "publish"

    def _with_parent(self, origin: Mapping[str, Any], start: str | None) -> dict[str, Any]:
        """What a fit has noted of itself, and the version whose weights it began with."""
        if start is None:
            return dict(origin)
        versions = self.context.registry.list(str(self.spec.publish.name))
        parent = next((each.version for each in reversed(versions) if each.uri == start), None)
        return {**origin, "lineage": {**origin.get("lineage", {}), "parent": parent}}

    def _judging(
        self, clean: DataFrame, parts: Parts, prepared: Prepared, rival: ModelVersion | None
    ) -> tuple[DataFrame, int, str]:
        """The rows that judge, checked as those of shards are, their number, and why they cannot judge the champion.

        Rows that the champion was trained on, as after a training that drift asked for, tell nothing of it.
        """
        part = parts.judging
        windows = parts.windows(part)
        rows = rows_of(clean, self.spec, part, windows)
        known, count = labelled(rows, prepared.labels.names), prepared.validate_rows
        if part == "test":
            self.record.rows["test unlabelled"] = check_labels(rows, prepared.labels, "test")
            if self.spec.weight is not None:
                check_weight(known, self.spec.weight, "test")
            self.record.rows["test"] = count = known.count()
        trained = trained_of(self.context, rival)
        taught = [name for name in windows if trained is not None and name in trained.windows]
        new = None if trained is None else untaught(known, self.spec, taught, trained.split)
        if rival is None or new is None:
            return known, count, ""
        fewer = known.where(new)
        if left := fewer.count():
            logger.info("%d of %d rows judge: version %d was trained on the others", left, count, rival.version)
            return fewer, left, ""
        seen = windows[0] if len(windows) == 1 else f"all of {windows[0]} to {windows[-1]}"
        return (
            known,
            count,
            f"version {rival.version} was trained on {seen}: no row judges both, and it stays the champion",
        )

    def _publish(
        self, evaluated: Evaluated, trained: Trained, champion: ModelVersion | None, key: str, against: int | None
    ) -> Published:
        published = self._promoted(evaluated, trained, champion, key, against)
        spec, registry = self.spec.publish, self.context.registry
        if spec.mlflow is not None:  # with the alias where it points now
            mirror_published(registry, registry.get(str(spec.name), published.version), spec.mlflow)
        return published

    def _promoted(
        self, evaluated: Evaluated, trained: Trained, champion: ModelVersion | None, key: str, against: int | None
    ) -> Published:
        """Publish the model of a training, and promote it if the gate, which compared it with ``against``, says so."""
        spec, name, decision = self.spec, str(self.spec.publish.name), evaluated.decision
        self.context.check_lease()  # before files are copied that nobody would need
        version = publish_bundle(
            self.context.registry,
            name,
            trained.bundle,
            trained.origin,
            metrics={**decision.challenger.values, **_baseline_metric(decision)},
            parameters=chosen_settings(self.context.file.resolved(), trained.settings),
            publication=key,
        ).version
        now = champion.version if champion is not None else None
        if now == version:
            reason = decision.reason if decision.promote else "it is the champion already"
            return Published(version=version, promoted=True, reason=reason, against=against)
        if not decision.promote:
            return Published(version=version, promoted=False, reason=decision.reason, against=against)
        alias = spec.publish.alias
        try:
            self.context.registry.set_alias(name, alias, version, expected=now, reason=decision.reason)
        except FencedError:
            raise
        except ConflictError as error:
            raise ConflictError(f"another run moved {alias} of {name} meanwhile: run again") from error
        return Published(version=version, promoted=True, reason=decision.reason, against=against)

    def _score(self, clean: DataFrame, parts: Parts, content: Mapping[str, str]) -> None:
        """Let the champion predict the windows that it has not predicted yet."""
        spec, champion = self.spec, self.context.champion()
        if champion is None:
            return
        windows, part = windows_to_score(self.context, parts, content), spec.score.window
        rows = clean.where(clean[WINDOW].isin(*windows)) if part == "all" else rows_of(clean, spec, part, windows)
        chosen = {name: content[name] for name in windows}
        torch_for_workers(self.spark)
        self.record.predictions = score_windows(self.context, rows, champion, chosen)
        if self.record.predictions:
            self.record.places["predictions"] = Table(str(spec.score.target)).uri


def _tell_of_baseline(decision: Decision) -> None:
    """A line in the log for a model that is no better than a guess without one, or by no more than chance gives."""
    metric = decision.gate.metric
    if decision.beats_baseline is False or decision.baseline_by_chance:
        logger.warning(
            "%s, and the model %.4g on the same %d rows: it has learned nothing that helps, or its training went wrong",
            decision.baseline_text(),
            decision.challenger.values[metric],
            decision.rows,
        )


def _baseline_metric(decision: Decision) -> dict[str, float]:
    """The best guess's value of the metric that judges, beside the model's own in the registry."""
    metric, baseline = decision.gate.metric, decision.baseline
    known = baseline is not None and metric in baseline.values
    return {f"baseline_{metric}": baseline.values[metric]} if baseline is not None and known else {}
