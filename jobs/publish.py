"""Publication: a trained model to a version in the registry, and to champion if it is better.

Enters: a bundle and the ETL's state. Leaves: a version with its metrics, parameters and lineage; the alias ``champion``
on the better of two models, both measured on the same held-out days, each with the statistics it was trained with.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING

from jobs.entry import Run
from jobs.etl import EtlResult
from jobs.features import LABEL, Statistics, features_frame
from jobs.make_events import noise_floor
from jobs.record import Publication, Quality
from jobs.settings import Settings
from jobs.trained import PREDICTION, Trained
from sparkdl.errors import BundleError, ConflictError, DataError
from sparkdl.models.bundle import read_bundle
from sparkdl.models.registry import Lineage, ModelRegistry, ModelVersion
from sparkdl.scoring.score import score

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

__all__ = ["CHAMPION", "Evaluation", "already_published", "champion_of", "evaluate", "publish_model", "scored_days"]

CHAMPION = "champion"
SAMPLE_ROWS = 2000


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """How a model does on held-out days, errors in minutes.

    Attributes:
        rows: rows that were scored.
        rmse, mae: of the model.
        mean_rmse: of the training days' plain mean.
        by_hour, by_zone: per hour of day or pick-up zone: key, rows, bias (mean of predicted minus true), rmse.
        sample: pairs of true and predicted minutes, a hash-ordered sample.
    """

    rows: int
    rmse: float
    mae: float
    mean_rmse: float
    by_hour: list[dict[str, float]] = field(default_factory=list)
    by_zone: list[dict[str, float]] = field(default_factory=list)
    sample: list[list[float]] = field(default_factory=list)


def champion_of(settings: Settings) -> ModelVersion | None:
    """Return the version that ``champion`` points to; None before the first one."""
    registry = ModelRegistry(settings.paths.of("registry"))
    if CHAMPION not in registry.aliases(settings.name):
        return None
    return registry.get(settings.name, CHAMPION)


def already_published(settings: Settings, identity: str) -> ModelVersion | None:
    """Return the version that came of the same training before."""
    versions = ModelRegistry(settings.paths.of("registry")).list(settings.name)
    return next((each for each in versions if each.publication == identity), None)


def scored_days(
    spark: SparkSession, settings: Settings, etl: EtlResult, bundle: str, days: Sequence[str], extra: Sequence[str] = ()
) -> DataFrame:
    """Score days of the feature table with a bundle and the statistics it was trained with."""
    statistics = Statistics.from_dict(read_bundle(bundle).preprocessing["statistics"])
    frame = features_frame(spark, settings, days=days, statistics=statistics, version=etl.features_version, extra=extra)
    return score(frame, bundle, trusted=["jobs.model"])


def evaluate(spark: SparkSession, settings: Settings, etl: EtlResult, bundle: str, *, details: bool) -> Evaluation:
    """Measure a bundle on the validation days.

    Args:
        spark: the session.
        settings: where the tables lie.
        etl: which days validate, and the mean of the training days.
        bundle: the model's folder.
        details: also by hour and zone, and a sample.
    """
    from pyspark.sql import functions as F

    frame = scored_days(spark, settings, etl, bundle, etl.split.validation)
    error = (F.col(PREDICTION) - F.col(LABEL)).alias("error")
    rows = frame.select("hour_id", "pickup_zone_id", LABEL, PREDICTION, error).persist()
    try:
        plain = F.col(LABEL) - F.lit(etl.statistics.mean(LABEL))
        squared = F.avg(F.col("error") * F.col("error"))
        total = rows.agg(
            F.count("*").alias("rows"),
            F.sqrt(squared).alias("rmse"),
            F.avg(F.abs("error")).alias("mae"),
            F.sqrt(F.avg(plain * plain)).alias("mean_rmse"),
        ).first()
        groups: dict[str, list[dict[str, float]]] = {}
        sample: list[list[float]] = []
        if details:
            for name, column in (("by_hour", "hour_id"), ("by_zone", "pickup_zone_id")):
                sums = rows.groupBy(F.col(column).alias("key")).agg(
                    F.count("*").alias("rows"), F.avg("error").alias("bias"), F.sqrt(squared).alias("rmse")
                )
                groups[name] = [row.asDict() for row in sums.orderBy("key").collect()]
            chosen = rows.orderBy(F.xxhash64(LABEL, PREDICTION)).limit(SAMPLE_ROWS)
            sample = [[row[LABEL], row[PREDICTION]] for row in chosen.select(LABEL, PREDICTION).collect()]
    finally:
        rows.unpersist()
    assert total is not None
    return Evaluation(**total.asDict(), **groups, sample=sample)


def publish_model(run: Run, spark: SparkSession, etl: EtlResult, trained: Trained) -> ModelVersion:
    """Measure, publish, and promote if better; fills ``quality`` and ``publication`` of the record."""
    settings, registry = run.settings, ModelRegistry(run.settings.paths.of("registry"))
    champion = champion_of(settings)
    with run.stage("evaluation"):
        found = evaluate(spark, settings, etl, trained.bundle, details=True)
        before = _champion_error(run, spark, etl, champion)
    floor = None
    with contextlib.suppress(DataError):  # data that was not generated has no known floor
        floor = noise_floor(settings.paths.of("raw"), etl.split.validation).rmse_minutes
    with run.stage("publication"):
        metrics = {"rmse": found.rmse, "mae": found.mae, "mean_rmse": found.mean_rmse}
        version = registry.publish(
            settings.name,
            trained.bundle,
            metrics=metrics if floor is None else {**metrics, "floor_rmse": floor},
            parameters=trained.parameters,
            lineage=Lineage(
                source_table=etl.features,
                source_version=etl.features_version,
                code_version=run.record.versions.get("code"),
                shard_key=trained.manifest.content_key,
                versions=run.record.versions,
            ),
            publication=trained.identity,
        )
        moved, reason = _promote(registry, settings.name, version, champion, found.rmse, before)
    now = champion_of(settings)
    run.record.quality = Quality(
        days=list(etl.split.validation),
        rmse=found.rmse,
        mae=found.mae,
        floor_rmse=floor,
        mean_rmse=found.mean_rmse,
        champion_rmse=before,
    )
    run.record.publication = Publication(
        model=settings.name,
        version=version.version,
        alias_moved=moved,
        champion=now.version if now else None,
        reason=reason,
    )
    run.record.results["evaluation"] = asdict(found)
    run.record.places["model"] = version.uri
    return version


def _champion_error(run: Run, spark: SparkSession, etl: EtlResult, champion: ModelVersion | None) -> float | None:
    """The champion's error on today's held-out days; a champion that cannot be rebuilt any more has none."""
    if champion is None:
        return None
    try:
        return evaluate(spark, run.settings, etl, champion.uri, details=False).rmse
    except BundleError as error:
        run.say(f"champion version {champion.version} could not be measured: {error}")
        return None


def _promote(
    registry: ModelRegistry,
    name: str,
    new: ModelVersion,
    champion: ModelVersion | None,
    rmse: float,
    before: float | None,
) -> tuple[bool, str]:
    """Move the alias if the new model is better; nobody who moved it meanwhile is overruled."""
    if champion is not None and before is not None and rmse >= before:
        return False, f"RMSE {rmse:.3f} is not below its {before:.3f} on the same days"
    reason = "the first one" if before is None else f"RMSE {rmse:.3f} against {before:.3f} on the same days"
    expected = champion.version if champion else None
    try:
        registry.set_alias(name, CHAMPION, new.version, expected=expected, reason=reason)
    except ConflictError:
        return False, "another run moved it meanwhile"
    return True, reason
