"""Training: days of the feature table to shards, to a model trained on several ranks, to a bundle.

Enters: the state that the ETL left. Leaves: a bundle in the run's folder, ``Training`` in the record, and, started on
its own, a version in the registry whose alias ``champion`` moves if it is better on the same held-out days.

Checkpoints lie under an identity of the training, not of the run: a run that was killed is continued by the next one.

Exit codes: 0 done, or nothing new; 1 refused; 2 cluster; 3 training; 4 unexpected error; 130 interrupted (all of them:
jobs/entry.py).
"""

from __future__ import annotations

import functools
import hashlib
import json
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

if __package__ in (None, ""):  # started as a file: the folder above holds the package `jobs`
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import torch

from jobs.entry import Run, open_session, run_job
from jobs.etl import EtlResult, processed_days
from jobs.features import CATEGORICAL, LABEL, NUMERIC, features_frame, id_column
from jobs.model import build_model, model_kwargs
from jobs.record import Training
from jobs.settings import Settings, TrainSettings
from jobs.trained import PREDICTION, Trained
from sparkdl.columns.layout import Layout
from sparkdl.config import CheckpointConfig, LaunchConfig, ShardConfig, TrainConfig
from sparkdl.errors import DataError
from sparkdl.models.bundle import Signature, TensorField, save_bundle
from sparkdl.progress import Progress
from sparkdl.runner import run as run_ranks
from sparkdl.shards.manifest import Manifest, Source
from sparkdl.shards.write import write_shards
from sparkdl.storage import Storage
from sparkdl.train.task import Task
from sparkdl.worker import RankJob, RankReport, run_rank
from sparkdl.world import World

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["check_shards", "train_model", "training_identity"]

NUMERICS, IDS = "numerics", "ids"


def training_identity(settings: Settings, etl: EtlResult) -> str:
    """Return a hash of everything that decides the trained model: the same again means that nothing is new."""
    facts = {
        "features": [etl.features, etl.features_version],
        "split": asdict(etl.split),
        "statistics": etl.statistics.statistics_id,
        "model": asdict(settings.model),
        "train": asdict(settings.train),
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]


def train_model(run: Run, spark: SparkSession, etl: EtlResult) -> Trained:
    """Write shards, train on ``train.ranks`` ranks, save the bundle.

    Raises:
        DataError: the features cannot be trained on.
        ClusterError: ranks could not be started, or one failed.
        TrainingError: the training itself went wrong.
    """
    settings = run.settings
    identity = training_identity(settings, etl)
    with run.stage("shards"):
        training = _shards(spark, settings, etl, "train", etl.split.training)
        validation = _shards(spark, settings, etl, "validation", etl.split.validation)
    for manifest in (training, validation):
        check_shards(manifest, settings.model.embedding_rows)
    checkpoints = f"{settings.paths.of('runs')}/checkpoints/{identity}"
    arguments = model_kwargs(settings.model, etl.statistics)
    job = RankJob(
        task=_task(settings.train, arguments, steps=_steps(settings.train, training.rows)),
        train_uri=training.uri,
        validation_uri=validation.uri,
        batch_size=settings.train.batch_rows,
        validation_batch_size=8 * settings.train.batch_rows,
        seed=settings.train.seed,
        train=TrainConfig(
            epochs=settings.train.epochs,
            seed=settings.train.seed,
            max_grad_norm=settings.train.max_grad_norm or None,
            early_stopping_patience=settings.train.patience_epochs,
        ),
        checkpoints=CheckpointConfig(uri=checkpoints),
        backend=settings.train.backend,
    )
    with run.stage("training"), Progress() as progress:
        reports = run_ranks(
            _rank, args=(job,), num_proc=settings.train.ranks, backend=settings.train.backend, spark=spark,
            on_event=progress, config=LaunchConfig(preload=("torch._dynamo",)),
        )  # fmt: skip
    report: RankReport = reports[0]
    _describe(run, report, training, validation)
    bundle = f"{run.folder}/model"
    with run.stage("bundle"):
        model = build_model(**arguments)
        assert report.weights is not None
        model.load_state_dict(report.weights)
        save_bundle(
            model,
            bundle,
            signature=_signature(),
            factory="jobs.model:build_model",
            arguments=arguments,
            preprocessing={"statistics": etl.statistics.to_dict(), "vocabulary_sizes": etl.vocabulary_sizes},
        )
    Storage.of(checkpoints).delete(recursive=True)
    parameters = {"train": asdict(settings.train), "model": arguments, "split": asdict(etl.split)}
    return Trained(identity=identity, bundle=bundle, manifest=training, report=report, parameters=parameters)


def check_shards(manifest: Manifest, embedding_rows: Mapping[str, int]) -> None:
    """Refuse, from the statistics that writing the shards left, what would spoil the training.

    Raises:
        DataError: numerics or labels that are NaN or infinite, ids outside the embedding tables.
    """
    for name in (*NUMERIC, LABEL):
        stats = manifest.statistics[name]
        bad = stats.nan_count + stats.inf_count
        if bad:
            raise DataError(f"{name} is NaN or infinite in {bad} of {manifest.rows} rows: process the days anew")
    for name in CATEGORICAL:
        stats, size = manifest.statistics[id_column(name)], embedding_rows.get(name, 0)
        low, high = stats.min or 0, stats.max or 0
        if low < 0 or high >= size:
            raise DataError(
                f"{id_column(name)} runs from {low} to {high} and its embedding table has the ids 0 to {size - 1}: "
                f"raise --set.model.embedding_rows.{name} and train anew"
            )


def _shards(spark: SparkSession, settings: Settings, etl: EtlResult, name: str, days: tuple[str, ...]) -> Manifest:
    """Write the shards of some days, or find them: the set is tied to the version of the feature table."""
    frame = features_frame(
        spark, settings, days=days, statistics=etl.statistics, version=etl.features_version, extra=()
    )
    ids = [id_column(each) for each in CATEGORICAL]
    source = Source(
        uri=etl.features,
        version=str(etl.features_version),
        transformation=f"{etl.statistics.statistics_id} {','.join(days)}",
    )
    place = f"{settings.paths.of('shards')}/{name}-v{etl.features_version}-{etl.statistics.statistics_id}"
    return write_shards(
        frame.coalesce(settings.train.ranks),
        place,
        columns=[*NUMERIC, *ids],
        labels=[LABEL],
        layout=Layout(pack={NUMERICS: NUMERIC, IDS: ids}),
        source=source,
        config=ShardConfig(seed=settings.train.seed),
        overwrite=True,
    )


def _steps(train: TrainSettings, rows: int) -> int:
    return train.epochs * -(-rows // (train.batch_rows * train.ranks))


def _task(train: TrainSettings, arguments: Mapping[str, Any], steps: int) -> Task:
    optimizer = functools.partial(torch.optim.AdamW, lr=train.learning_rate, weight_decay=train.weight_decay)
    scheduler = functools.partial(
        torch.optim.lr_scheduler.OneCycleLR,
        max_lr=train.learning_rate,
        total_steps=steps + 1,
        pct_start=min(0.3, train.warmup_steps / steps),
    )
    return Task(
        model=functools.partial(build_model, **arguments),
        optimizer=optimizer,
        loss=torch.nn.MSELoss(),
        inputs=(NUMERICS, IDS),
        labels=(LABEL,),
        scheduler=scheduler,
        scheduler_interval="step",
    )


def _rank(job: RankJob) -> RankReport:
    """What each rank does."""
    return run_rank(World.from_env(), job)


def _signature() -> Signature:
    ids = tuple(id_column(name) for name in CATEGORICAL)
    return Signature(
        inputs=(
            TensorField(name=NUMERICS, dtype="float32", shape=(len(NUMERIC),), columns=NUMERIC),
            TensorField(name=IDS, dtype="int32", shape=(len(ids),), columns=ids),
        ),
        outputs=(TensorField(name=PREDICTION, dtype="float32"),),
        labels=(LABEL,),
    )


def _describe(run: Run, report: RankReport, training: Manifest, validation: Manifest) -> None:
    """Put the training into the run's record."""
    result = report.result
    run.record.training = Training(
        ranks=run.settings.train.ranks,
        backend=report.backend,
        shards=len(training.shards) + len(validation.shards),
        steps=result.steps,
        epochs=result.epochs,
        best_epoch=(result.best_epoch or 0) + 1,
        rows_per_second=result.rows / max(1e-9, sum(row["seconds"] for row in result.history.epochs)),
        stopped_early=result.stopped_early,
    )
    run.record.results["history"] = result.history.epochs
    run.record.results["rank_seconds"] = report.seconds
    run.record.places["shards"] = training.uri


def _job(run: Run) -> None:
    from jobs.publish import already_published, publish_model

    etl = processed_days(run.settings)
    known = already_published(run.settings, training_identity(run.settings, etl))
    if known is not None:
        run.nothing_new(f"version {known.version} was trained on the same data with the same settings")
        return
    with run.stage("spark"):
        spark = open_session(run.settings, "shards", "registry", "runs")
    publish_model(run, spark, etl, train_model(run, spark, etl))


if __name__ == "__main__":
    sys.exit(run_job("train", _job, summary=True))
