"""Raw rides to clean, joined rows, each with its outcome: lazily, in one plan.

Enters: raw files of some days, the zones, the weather, the ids of zones. Leaves: a DataFrame with one row a raw row:
``day``, ``outcome`` (``ok``, ``duplicate`` or the reason it is quarantined for), ``raw`` (the row as it came, as JSON,
where it is quarantined) and the features. DataFrame API only, so it runs on Spark Connect too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import reduce
from operator import or_
from typing import TYPE_CHECKING

import pyarrow as pa
from pyspark.sql import Window
from pyspark.sql import functions as F
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import DateType, StringType, StructField, StructType

from jobs.features import LABEL
from jobs.raw import RIDE_COLUMNS, WEATHER_COLUMNS, RideFiles
from jobs.settings import EtlSettings
from jobs.state import Vocabulary
from sparkdl.storage import Storage

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

__all__ = ["DUPLICATE", "OK", "classified", "csv_rides", "read_rides", "weather_frame", "zone_frame"]

OK, DUPLICATE = "ok", "duplicate"

CASTS = {
    "event_id": "bigint",
    "received_at": "timestamp",
    "pickup_at": "timestamp",
    "dropoff_at": "timestamp",
    "passengers": "int",
    "distance_km": "double",
}
"""What the columns of a ride that are not text are cast to."""

WEATHER = tuple(name for name in WEATHER_COLUMNS if name != "hour")
US_PER_DAY, US_PER_HOUR, US_PER_MINUTE = 86_400_000_000, 3_600_000_000, 60_000_000


def read_rides(spark: SparkSession, raw: str, files: RideFiles) -> DataFrame:
    """Read rides of both formats: ``day``, ``format``, each column cast, and as ``text`` what could not be cast."""
    frames = []
    for schema, places in files.parquet.items():
        known = StructType([*from_arrow_schema(schema).fields, StructField("day", DateType())])
        reader = spark.read.schema(known).option("basePath", spark_uri(f"{raw}/events"))
        frames.append(_typed(reader.parquet(*map(spark_uri, places)), "parquet"))
    frames += [_typed(frame, "csv") for frame in _csv_frames(spark, raw, files)]
    return reduce(lambda left, right: left.unionByName(right), frames)


def csv_rides(spark: SparkSession, raw: str, files: RideFiles) -> DataFrame | None:
    """Read the days of rides in CSV alone, to count them; Parquet's footers tell their rows."""
    frames = [frame.select("day") for frame in _csv_frames(spark, raw, files)]
    return reduce(lambda left, right: left.unionByName(right), frames) if frames else None


def zone_frame(spark: SparkSession, zones: pa.Table, vocabulary: Vocabulary) -> DataFrame:
    """Put the zones and their ids into a DataFrame."""
    ids, boroughs = vocabulary.ids["zone"], vocabulary.ids["borough"]
    rows = [
        (row["zone"], ids[row["zone"]], boroughs[row["borough"]], row["x_km"], row["y_km"], float(row["airport"]))
        for row in zones.to_pylist()
    ]
    schema = "zone string, zone_id int, borough_id int, x_km double, y_km double, airport double"
    return spark.createDataFrame(rows, schema)


def weather_frame(spark: SparkSession, weather: pa.Table) -> DataFrame:
    """Put the weather into a DataFrame."""
    schema = "day date, hour int, rain_mm double, temperature_c double, wind_kmh double"
    return spark.createDataFrame([tuple(row.values()) for row in weather.to_pylist()], schema)


def classified(rides: DataFrame, zones: DataFrame, weather: DataFrame, etl: EtlSettings) -> DataFrame:
    """Deduplicate, join, derive and judge the rides, see the module; rows are neither dropped nor added.

    Of the rows with one event id the one received last survives, and of several received at once the one whose
    content hashes lowest: the survivor follows from the rows, not from their order. Rows without an id are no
    duplicates of each other.
    """
    content = F.xxhash64(*RIDE_COLUMNS, "text")
    order = Window.partitionBy("day", F.coalesce("event_id", content)).orderBy(
        F.col("received_at").desc_nulls_last(), content
    )
    rides = _with_time(rides.withColumn("copy", F.row_number().over(order)))
    for side in ("pickup", "dropoff"):
        names = [F.col(name).alias(f"{side}_{name}") for name in zones.columns]
        rides = rides.join(F.broadcast(zones.select(*names)), f"{side}_zone", "left")
    rides = rides.join(F.broadcast(weather), ["day", "hour"], "left")
    is_copy = F.col("event_id").isNotNull() & (F.col("copy") > 1)
    judged = rides.withColumn("outcome", F.when(is_copy, DUPLICATE).otherwise(F.coalesce(_reason(etl), F.lit(OK))))
    texts = {name: F.col(name).cast("string") for name in RIDE_COLUMNS}
    texts |= {name: F.coalesce(F.col("text")[name], texts[name]) for name in CASTS}
    as_it_came = F.struct(*[text.alias(name) for name, text in texts.items()])
    raw = F.when(~F.col("outcome").isin(OK, DUPLICATE), F.to_json(as_it_came)).alias("raw")
    return judged.select("day", "outcome", "format", "event_id", "pickup_at", "vehicle", raw, *_derived())


def spark_uri(place: str) -> str:
    """Return a place as Spark must be told it where its default filesystem is another."""
    return Storage.of(place).spark_uri


def _csv_frames(spark: SparkSession, raw: str, files: RideFiles) -> list[DataFrame]:
    frames = []
    for header, places in files.csv.items():
        schema = StructType([*[StructField(name, StringType()) for name in header], StructField("day", DateType())])
        reader = spark.read.schema(schema).option("header", "true").option("basePath", spark_uri(f"{raw}/late"))
        frames.append(reader.csv([spark_uri(place) for place in places]))
    return frames


def _typed(frame: DataFrame, form: str) -> DataFrame:
    """Cast what can be cast; what cannot becomes null, and stays as text in the map ``text``, which is null else."""
    columns, lost = [], []
    for name in RIDE_COLUMNS:
        if name in CASTS:
            cast = F.col(name).try_cast(CASTS[name])
            columns.append(cast.alias(name))
            lost.append((name, F.col(name).isNotNull() & cast.isNull()))
        else:
            trimmed = F.trim(F.col(name).cast("string"))
            columns.append(F.when(trimmed != "", trimmed).alias(name))
    texts = F.struct(*[F.when(wrong, F.col(name).cast("string")).alias(name) for name, wrong in lost])
    text = F.when(reduce(or_, [wrong for _, wrong in lost]), texts).alias("text")
    return frame.select("day", F.lit(form).alias("format"), *columns, text)


def _with_time(rides: DataFrame) -> DataFrame:
    """Derive times by arithmetic on UTC microseconds, so that the session's time zone changes nothing."""
    pickup, dropoff = F.unix_micros("pickup_at"), F.unix_micros("dropoff_at")
    midnight = F.unix_date("day").cast("bigint") * US_PER_DAY
    timed = rides.withColumns({"since_midnight": pickup - midnight, LABEL: (dropoff - pickup) / float(US_PER_MINUTE)})
    return timed.withColumn("hour", F.floor(F.col("since_midnight") / float(US_PER_HOUR)).cast("int"))


def _reason(etl: EtlSettings) -> Column:
    """Name the first fault of a row, null for a valid one."""

    def lost(name: str, wrong: str) -> list[Column]:
        """A column that is null: was there nothing, or something that could not be cast?"""
        null = F.col(name).isNull()
        text = F.col("text")[name] if name in CASTS else F.lit(None)
        return [F.when(null & text.isNull(), f"{name}: missing"), F.when(null, f"{name}: {wrong}")]

    distance, passengers, minutes, since = (
        F.col(name) for name in ("distance_km", "passengers", LABEL, "since_midnight")
    )
    no_weather = reduce(or_, [F.col(name).isNull() | ~_finite(name) for name in WEATHER])
    return F.coalesce(
        *lost("event_id", "not a number"),
        *lost("pickup_at", "not a timestamp"),
        F.when((since < 0) | (since >= US_PER_DAY), "pickup_at: outside the day"),
        *lost("dropoff_at", "not a timestamp"),
        F.when(minutes <= 0, "dropoff_at: before pickup_at"),
        F.when(minutes > etl.max_duration_minutes, "duration: too long"),
        *lost("distance_km", "not a number"),
        F.when(~_finite("distance_km"), "distance_km: not finite"),
        F.when(distance <= 0, "distance_km: not positive"),
        F.when(distance > etl.max_distance_km, "distance_km: too long"),
        *lost("passengers", "not a number"),
        F.when((passengers < 1) | (passengers > etl.max_passengers), "passengers: out of range"),
        *[F.when(F.col(name).isNull(), f"{name}: missing") for name in ("pickup_zone", "dropoff_zone", "vehicle")],
        F.when(no_weather, "weather: missing or not finite"),
    )


def _finite(name: str) -> Column:
    return ~F.isnan(name) & (F.abs(name) != math.inf)


def _derived() -> list[Column]:
    """The features in their own units; an unknown zone has id 0, lies in the centre and is no airport."""

    def of(name: str) -> Column:
        return F.coalesce(F.col(name), F.lit(0))

    hours = F.col("since_midnight") / float(US_PER_HOUR)
    beeline = F.hypot(F.col("pickup_x_km") - F.col("dropoff_x_km"), F.col("pickup_y_km") - F.col("dropoff_y_km"))
    numeric: Mapping[str, Column] = {
        "distance_km": F.col("distance_km"),
        "log_distance": F.log1p("distance_km"),
        "beeline_km": F.coalesce(beeline, F.col("distance_km") / 1.3),
        "passengers": F.col("passengers"),
        **{name: F.col(name) for name in WEATHER},
        "pickup_centre_km": F.hypot(of("pickup_x_km"), of("pickup_y_km")),
        "dropoff_centre_km": F.hypot(of("dropoff_x_km"), of("dropoff_y_km")),
        "airport": of("pickup_airport") + of("dropoff_airport"),
        "hour_sin": F.sin(hours * (2 * math.pi / 24)),
        "hour_cos": F.cos(hours * (2 * math.pi / 24)),
        "twice_sin": F.sin(hours * (4 * math.pi / 24)),
        "twice_cos": F.cos(hours * (4 * math.pi / 24)),
        "hour_of_day": hours,
    }
    ids: Mapping[str, Column] = {
        **{name: of(f"{name}_id") for name in ("pickup_zone", "dropoff_zone", "pickup_borough", "dropoff_borough")},
        "hour": F.col("hour") + 1,
        "weekday": F.weekday("day") + 1,  # 1 is Monday
    }
    return [
        *[column.cast("double").alias(name) for name, column in numeric.items()],
        *[column.cast("int").alias(f"{name}_id") for name, column in ids.items()],
        F.col(LABEL),
    ]
