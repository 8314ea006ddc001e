"""The city that the rides are drawn from: its zones, its weather, and how long a ride truly takes."""

from __future__ import annotations

from datetime import date
from types import SimpleNamespace
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
NOISE, ZONES = 0.13, 60
BOROUGHS = ("Harbour", "Old Town", "North", "East", "South", "West")
VEHICLES = ("standard", "van", "shared", "premium")
SPEED, STOP_MINUTES = np.array([1.0, 0.93, 0.82, 1.06]), np.array([0.0, 1.0, 4.0, -0.5])


def make_city(seed: int) -> SimpleNamespace:
    """Draw the zones, an array ``(1 + ZONES,)`` each; entry 0 is a zone that nobody knows, without any effect.

    The first is the central station and the second the airport, where most rides begin or end.
    """
    rng, count = np.random.default_rng([seed, 1]), ZONES + 1
    angle, radius = rng.uniform(0, 2 * np.pi, count), 11.0 * np.sqrt(rng.uniform(0.01, 1, count))
    x_km, y_km = np.round(radius * np.cos(angle), 3), np.round(radius * np.sin(angle), 3)
    x_km[:3], y_km[:3] = (0.0, 0.0, 13.0), (0.0, 0.0, 5.0)
    share = np.concatenate([np.zeros(3), 1 / np.sqrt(np.arange(1, ZONES - 1))])
    share *= 0.35 / share.sum()
    share[1:3] = 0.38, 0.27
    leaves, reaches = rng.normal(0, 1.6, (2, count))  # minutes that leaving and reaching a zone add
    leaves[2], reaches[2] = 5.0, 3.5
    pairs = 1.5 * np.tanh(rng.normal(0, 1, (count, 2)) @ rng.normal(0, 1, (2, count)) / 1.5)  # beyond its two zones
    leaves[0] = reaches[0] = pairs[0] = 0.0
    code = np.array(["?"] + [f"Z{zone:03d}" for zone in range(1, count)])
    borough = np.where(radius < 4, 1, rng.integers(0, len(BOROUGHS), count))
    found = {"code": code, "borough": borough, "x_km": x_km, "y_km": y_km, "airport": np.arange(count) == 2}
    return SimpleNamespace(**found, share=share, leaves=leaves, reaches=reaches, pairs=pairs)


def make_weather(seed: int, day: date) -> dict[str, Array]:
    """Draw the weather of a day by hour, each ``(24,)``: mm of rain an hour, degrees Celsius, km/h of wind."""
    rng, hours = np.random.default_rng([seed, 2, day.toordinal()]), np.arange(24)
    wetness = rng.choice([0.0, 1.2, 3.0], p=[0.45, 0.35, 0.2])  # a dry day, showers, a wet day
    rain = wetness * rng.gamma(1.2, 1.0, 24) * (rng.uniform(size=24) < 0.6)
    temperature = rng.normal(11, 5) + 5 * np.sin((hours - 9) / 24 * 2 * np.pi) + rng.normal(0, 0.5, 24)
    wind = rng.gamma(4.0, 4.0, 24)
    return {"rain_mm": np.round(rain, 1), "temperature_c": np.round(temperature, 1), "wind_kmh": np.round(wind, 1)}


def true_minutes(city: SimpleNamespace, weekday: int, ride: SimpleNamespace) -> Array:
    """Return the expected duration of rides on a weekday (0 is Monday), minutes, at least 3, ``(rows,)``.

    ``ride`` holds arrays ``(rows,)``: hour, km, pickup, dropoff, seats, vehicle, rain; zones and vehicles are indices.

    It is the best prediction there is from what the features tell. A ride lasts ``true_minutes * (1 + NOISE * e)`` with
    ``e`` of mean zero, so the error of ``true_minutes`` is the noise floor, which no model can be expected to go below.
    """
    rush = np.exp(-(((ride.hour - 8.3) / 1.8) ** 2)) + 1.1 * np.exp(-(((ride.hour - 17.6) / 2.4) ** 2))
    leisure = np.exp(-(((ride.hour - 14.5) / 3.0) ** 2))
    jam = (0.15 * rush + 0.35 * leisure) if weekday >= 5 else (0.85 * rush + 0.25 * leisure)
    central = np.exp(-np.hypot(city.x_km, city.y_km) / 5.0) * (city.share > 0)
    speed_kmh = 34.0 * SPEED[ride.vehicle] / (1 + jam * (0.8 + 0.3 * central[ride.pickup]))
    speed_kmh /= 1 + 0.07 * np.minimum(ride.rain, 6.0)
    minutes = 5.0 + city.leaves[ride.pickup] + city.reaches[ride.dropoff] + city.pairs[ride.pickup, ride.dropoff]
    minutes += 60.0 * ride.km / speed_kmh + 0.35 * ride.seats + STOP_MINUTES[ride.vehicle]
    return np.asarray(np.maximum(minutes, 3.0))
