"""The transform of the pipeline: rides with what zones and weather add to them."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow.parquet as pq
from pyspark.sql import functions as F

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


def joined(rides: DataFrame, raw: str) -> DataFrame:
    """Join zones and weather, and derive what is known when a ride starts; ``raw`` is relative to this file.

    Rows become neither fewer nor more. Raw text stays as it came, so that the quarantine shows what was sent.
    """
    folder, spark = Path(__file__).parent / raw, rides.sparkSession
    zones, weather = (spark.createDataFrame(pq.read_table(folder / f"{name}.parquet")) for name in ("zones", "weather"))
    pickup, midnight = F.unix_micros("pickup_at"), F.unix_date("day").cast("bigint") * 86_400_000_000
    hour = (pickup - midnight) / 3.6e9  # by arithmetic in UTC: the session's time zone changes nothing
    told = {
        "hour_of_day": hour,
        "hour": F.floor(hour).cast("int"),
        "minutes": (F.unix_micros("dropoff_at") - pickup) / 6e7,
        "km": F.col("distance_km").try_cast("double"),
        "seats": F.col("passengers").try_cast("int"),
    }
    turns = [("hour", 1), ("twice", 2)]  # rush hours come twice a day
    told |= {f"{name}_sin": F.sin(hour * (times * math.pi / 12)) for name, times in turns}
    told |= {f"{name}_cos": F.cos(hour * (times * math.pi / 12)) for name, times in turns}
    rides = rides.withColumns(told).join(F.broadcast(weather), ["day", "hour"], "left")
    for side in ("pickup", "dropoff"):
        x, y, airport = (F.col(name).cast("double") for name in ("x_km", "y_km", "airport"))
        place = {f"{side}_zone": F.col("zone"), f"{side}_borough": F.col("borough"), f"{side}_x": x, f"{side}_y": y}
        named = zones.select(*[each.alias(name) for name, each in place.items()], airport.alias(f"{side}_airport"))
        rides = rides.join(F.broadcast(named), f"{side}_zone", "left")
        known = {f"{side}_{name}": F.coalesce(f"{side}_{name}", F.lit(0.0)) for name in ("x", "y", "airport")}
        rides = rides.withColumns(known)  # a zone that nobody knows lies in the centre and is no airport
        rides = rides.withColumn(f"{side}_centre_km", F.hypot(f"{side}_x", f"{side}_y"))
    beeline = F.hypot(F.col("pickup_x") - F.col("dropoff_x"), F.col("pickup_y") - F.col("dropoff_y"))
    return rides.withColumns({"beeline_km": beeline, "airport": F.col("pickup_airport") + F.col("dropoff_airport")})
