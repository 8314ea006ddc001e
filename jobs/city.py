"""The city that the ride events come from: its zones, its weather, and how long a ride truly takes.

Enters: a seed, a day. Leaves: the zones table, the weather of a day, and ``true_minutes``: the expected duration of a
ride given everything the features tell. A ride lasts ``true_minutes * (1 + NOISE * e)`` with ``e`` of mean zero, so
that ``true_minutes`` is the best predictor there is, and its error is the noise floor.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import date

import numpy as np
import numpy.typing as npt

__all__ = ["NOISE", "VEHICLES", "City", "Rides", "Weather", "make_city", "make_weather", "true_minutes"]

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

NOISE = 0.13
"""Standard deviation of a ride's duration, as a part of its expected duration (before truncation at 3 sigma)."""

ZONES = 60
"""Zones of the city; codes Z001 to Z060. Index 0 stands for a zone that the zones table does not know."""

BOROUGHS = ("Harbour", "Old Town", "North", "East", "South", "West")

VEHICLES = ("standard", "van", "shared", "premium")
VEHICLE_SPEED = np.array([1.0, 0.93, 0.82, 1.06])
VEHICLE_STOP_MINUTES = np.array([0.0, 1.0, 4.0, -0.5])


@dataclass(frozen=True, kw_only=True)
class City:
    """Zones of the city, each array ``(1 + zones,)``; entry 0 is the unknown zone, whose effects are all zero.

    Attributes:
        code: zone code as it stands in the events.
        borough: index into ``BOROUGHS``.
        x_km, y_km: centre of the zone, from the centre of the city.
        airport: 1 for an airport.
        share: part of the rides that start (or end) there; entry 0 has none.
        pickup_minutes, dropoff_minutes: minutes that leaving or reaching the zone adds.
        leaving, reaching: ``(1 + zones, 2)``; their product is what a pair of zones adds beyond its two zones.
    """

    code: npt.NDArray[np.str_]
    borough: IntArray
    x_km: FloatArray
    y_km: FloatArray
    airport: IntArray
    share: FloatArray
    pickup_minutes: FloatArray
    dropoff_minutes: FloatArray
    leaving: FloatArray
    reaching: FloatArray


@dataclass(frozen=True, kw_only=True)
class Weather:
    """Weather of one day by hour, each array ``(24,)``: mm of rain an hour, degrees Celsius, km/h of wind."""

    rain_mm: FloatArray
    temperature_c: FloatArray
    wind_kmh: FloatArray


@dataclass(frozen=True, kw_only=True)
class Rides:
    """What is known of rides when they start, each array ``(rows,)``.

    Attributes:
        hour: time of day of the pick-up, hours with fraction.
        distance_km: length of the route, as the event says it.
        pickup, dropoff: zone indices, 0 for an unknown zone.
        passengers: 1 to 6.
        vehicle: index into ``VEHICLES``.
        rain_mm: rain in the hour of the pick-up.
    """

    hour: FloatArray
    distance_km: FloatArray
    pickup: IntArray
    dropoff: IntArray
    passengers: IntArray
    vehicle: IntArray
    rain_mm: FloatArray


def make_city(seed: int) -> City:
    """Build the zones; the first is the central station and the second the airport, which have most of the rides."""
    rng = np.random.default_rng([seed, 1])
    count = ZONES + 1
    angle = rng.uniform(0, 2 * np.pi, count)
    radius = 11.0 * np.sqrt(rng.uniform(0.01, 1, count))
    x_km, y_km = radius * np.cos(angle), radius * np.sin(angle)
    x_km[1], y_km[1] = 0.0, 0.0
    x_km[2], y_km[2] = 13.0, 5.0
    airport = np.zeros(count, dtype=np.int64)
    airport[2] = 1
    share = np.zeros(count)
    share[3:] = 1 / np.sqrt(np.arange(1, ZONES - 1))
    share[3:] *= 0.35 / share[3:].sum()
    share[1], share[2] = 0.38, 0.27
    pickup, dropoff = rng.normal(0, 1.6, count), rng.normal(0, 1.6, count)
    pickup[2], dropoff[2] = 5.0, 3.5
    leaving, reaching = rng.normal(0, 1, (count, 2)), rng.normal(0, 1, (count, 2))
    for effect in (x_km, y_km, pickup, dropoff, leaving, reaching):
        effect[0] = 0.0
    return City(
        code=np.array(["?"] + [f"Z{zone:03d}" for zone in range(1, count)]),
        borough=np.where(radius < 4, 1, rng.integers(0, len(BOROUGHS), count)),
        x_km=np.round(x_km, 3),
        y_km=np.round(y_km, 3),
        airport=airport,
        share=share,
        pickup_minutes=pickup,
        dropoff_minutes=dropoff,
        leaving=leaving,
        reaching=reaching,
    )


def make_weather(seed: int, day: date) -> Weather:
    """Draw the weather of a day: dry, showers or a wet day, each value rounded as the weather table holds it."""
    rng = np.random.default_rng([seed, 2, day.toordinal()])
    hours = np.arange(24)
    wetness = rng.choice([0.0, 1.2, 3.0], p=[0.45, 0.35, 0.2])
    rain = wetness * rng.gamma(1.2, 1.0, 24) * (rng.uniform(size=24) < 0.6)
    temperature = rng.normal(11, 5) + 5 * np.sin((hours - 9) / 24 * 2 * np.pi) + rng.normal(0, 0.5, 24)
    return Weather(
        rain_mm=np.round(rain, 1),
        temperature_c=np.round(temperature, 1),
        wind_kmh=np.round(rng.gamma(4.0, 4.0, 24), 1),
    )


def true_minutes(city: City, weekday: int, rides: Rides) -> FloatArray:
    """Return the expected duration of rides on a weekday (0 is Monday), minutes, at least 3, ``(rows,)``."""
    hour, pickup, dropoff = rides.hour, rides.pickup, rides.dropoff
    rush = np.exp(-(((hour - 8.3) / 1.8) ** 2)) + 1.1 * np.exp(-(((hour - 17.6) / 2.4) ** 2))
    leisure = np.exp(-(((hour - 14.5) / 3.0) ** 2))
    jam = (0.15 * rush + 0.35 * leisure) if weekday >= 5 else (0.85 * rush + 0.25 * leisure)
    central = np.exp(-np.hypot(city.x_km, city.y_km) / 5.0) * (city.share > 0)
    speed_kmh = 34.0 * VEHICLE_SPEED[rides.vehicle] / (1 + jam * (0.8 + 0.3 * central[pickup]))
    speed_kmh /= 1 + 0.07 * np.minimum(rides.rain_mm, 6.0)
    pair = 1.5 * np.tanh((city.leaving[pickup] * city.reaching[dropoff]).sum(axis=1) / 1.5)
    minutes = 5.0 + city.pickup_minutes[pickup] + city.dropoff_minutes[dropoff] + pair
    minutes += 60.0 * rides.distance_km / speed_kmh + 0.35 * rides.passengers + VEHICLE_STOP_MINUTES[rides.vehicle]
    return np.asarray(np.maximum(minutes, 3.0))
