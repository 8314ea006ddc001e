"""Rows of every type of feature, dirty ones among them, and the features made of them."""

from __future__ import annotations

import datetime as dt
import io
from decimal import Decimal

import numpy as np
import pyarrow as pa
import pytest

from sparkdl.features.fitted import fit
from sparkdl.features.spec import Category, DateParts, Ids, Image, Number, Text, Vector
from sparkdl.features.statistics import statistics_of

NAN, INF = float("nan"), float("inf")
START = dt.datetime(2023, 12, 31, 23, 30)


def by_vowel(text):
    """A user's own way to cut texts."""
    return [part for part in text.replace("e", "a").split("a") if part]


VOWELS = {"tests.features.conftest:by_vowel": by_vowel}

FEATURES = {
    "plain": Number(),
    "raw": Number(column="plain", standardise=False, fill=-1.0),
    "median": Number(column="money", fill="median", missing_indicator=True, clip="quantiles"),
    "logged": Number(column="money", log=True, fill=0),
    "clipped": Number(column="money", clip=(-2.0, 50.0), log=True),
    "price": Number(missing_indicator=True),
    "flag": Number(standardise=False),
    "big": Number(standardise=False),
    "strict": Number(fill="none"),
    "constant": Number(),
    "city": Category(min_count=1),
    "rare": Category(column="city", min_count=3, max_size=2),
    "hashed": Category(column="city", buckets=7),
    "code": Category(min_count=1),
    "day": Category(min_count=1),
    "history": Ids(min_count=1, max_length=3),
    "latest": Ids(column="history", buckets=5, max_length=2, keep="last"),
    "tags": Ids(min_count=1, max_size=1),
    "note": Text(min_count=1),
    "letters": Text(column="note", tokens="characters", lowercase=False, max_length=4, keep="last", max_size=3),
    "vowels": Text(column="note", tokens="tests.features.conftest:by_vowel", buckets=11),
    "embedding": Vector(),
    "filled": Vector(column="holes", fill=0.5, size=2),
    "photo": Image(height=4, width=3),
    "grey": Image(column="photo_or_none", height=2, width=2, channels=1, scale="none", invalid="zeros"),
    "at": DateParts(parts=("year", "quarter", "month", "day", "weekday", "hour", "minute")),
    "there": DateParts(column="instant", parts=("day", "hour"), timezone="America/New_York"),
    "born": DateParts(parts=("year", "weekday")),
}


def picture(seed):
    """The bytes of a small PNG."""
    from PIL import Image as pillow

    sink = io.BytesIO()
    pixels = np.random.default_rng(seed).integers(0, 255, (5, 6, 3), np.uint8)
    pillow.fromarray(pixels).save(sink, "PNG")
    return sink.getvalue()


def rows_of(n, seed=0, unseen=False):
    """``n`` rows; ``unseen`` ones hold values that other seeds have not."""
    generator = np.random.default_rng(seed)
    pick = generator.integers

    def some(values):
        return [values[i] for i in pick(0, len(values), n)]

    cities = ["Köln", "Ko\u0308ln", "Rio", "", None, "Oslo"] + (["Atlantis"] if unseen else [])
    histories = [[1, 2, 3, 4, 5], [], None, [2, None], [9] if unseen else [1]]
    instants = [START + dt.timedelta(minutes=int(m)) for m in pick(0, 10**6, n)]
    return pa.table(
        {
            "plain": pa.array(generator.normal(5, 3, n)),
            "money": pa.array(some([0.0, 1.5, -3.25, 1e6, None, NAN, INF, -INF, 20.0])),
            "price": pa.array(some([Decimal("1.10"), None, Decimal("-0.07")]), pa.decimal128(10, 2)),
            "flag": pa.array(some([True, False, None])),
            "big": pa.array(some([2**62 + 1, -(2**53) - 1, 7]), pa.int64()),
            "strict": pa.array(pick(0, 9, n), pa.int32()),
            "constant": pa.array(np.full(n, 0.1)),
            "city": pa.array(some(cities), pa.string()),
            "code": pa.array(some([2**60, 2**60 + 1, None]), pa.int64()),
            "day": pa.array(some([dt.date(2024, 2, 29), None])),
            "history": pa.array(some(histories), pa.list_(pa.int64())),
            "tags": pa.array(some([["a", "b"], ["a"], [""], None]), pa.list_(pa.string())),
            "note": pa.array(some(["Hello  world ", "", None, "ÄRGER\tHello", "new" if unseen else "a"]), pa.string()),
            "embedding": pa.array(generator.normal(0, 1, (n, 3)).tolist(), pa.list_(pa.float32())),
            "holes": pa.array(some([[1.0, None], None, [NAN, 2.0], [3.0, 4.0]]), pa.list_(pa.float64())),
            "photo": pa.array(some([picture(1), picture(2)]), pa.binary()),
            "photo_or_none": pa.array(some([picture(3), None, b"no picture"]), pa.binary()),
            "at": pa.array(instants, pa.timestamp("us")),
            "instant": pa.array(instants, pa.timestamp("us", "UTC")),
            "born": pa.array(some([dt.date(1969, 7, 20), dt.date(1999, 12, 31), None])),
        }
    )  # fmt: skip


@pytest.fixture(scope="session")
def features():
    """All of them, fitted to 200 rows."""
    return fit(FEATURES, statistics_of(rows_of(200), FEATURES, VOWELS), VOWELS)
