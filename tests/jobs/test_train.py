"""What training refuses from the shards' statistics alone, and what makes two trainings the same."""

from __future__ import annotations

from dataclasses import replace

import pytest

from jobs.features import CATEGORICAL, LABEL, NUMERIC, id_column
from jobs.settings import ModelSettings
from jobs.train import check_shards
from sparkdl.columns.statistics import ColumnStats
from sparkdl.errors import DataError
from sparkdl.shards.manifest import Manifest

ROWS = ModelSettings().embedding_rows


def manifest(**changed):
    fine = ColumnStats(count=10, min=0, max=3, mean=1.0, variance=1.0)
    statistics = dict.fromkeys([*NUMERIC, LABEL, *map(id_column, CATEGORICAL)], fine)
    for name, facts in changed.items():
        statistics[name] = replace(fine, **facts)
    return Manifest(rows=10, bytes=1, shards=(), tensors=(), statistics=statistics)


def test_clean_shards_pass():
    check_shards(manifest(), ROWS)


@pytest.mark.parametrize("fault", ["nan_count", "inf_count"])
@pytest.mark.parametrize("name", ["distance_km", LABEL])
def test_numbers_that_are_not_finite_are_refused_with_their_count(name, fault):
    with pytest.raises(DataError, match=rf"{name} is NaN or infinite in 4 of 10 rows"):
        check_shards(manifest(**{name: {fault: 4}}), ROWS)


@pytest.mark.parametrize(("low", "high"), [(-1, 3), (0, 128)])
def test_an_id_outside_its_embedding_table_is_refused_with_both_ranges(low, high):
    with pytest.raises(DataError, match=rf"runs from {low} to {high} and its embedding table has the ids 0 to 127"):
        check_shards(manifest(pickup_zone_id={"min": low, "max": high}), ROWS)
