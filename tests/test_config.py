"""Settings that cannot be are refused where they are made, not by what is made of them hours later."""

from __future__ import annotations

import pytest

from sparkdl.config import CheckpointConfig, LoaderConfig, ScoreConfig, ShardConfig, TrainConfig
from sparkdl.errors import ConfigError


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ShardConfig(block_rows=1.5), r"^block_rows=1\.5 is no whole number"),
        (lambda: ShardConfig(repartition="8"), r"^repartition='8' is no whole number"),
        (lambda: CheckpointConfig(uri="/runs/a", keep_last=1.5), r"^keep_last=1\.5 is no whole number"),
        (lambda: LoaderConfig(lanes=1.5), r"^lanes=1\.5 is no whole number"),
        (lambda: ScoreConfig(batch_rows="3"), r"^batch_rows='3' is no whole number"),
        (lambda: TrainConfig(seed=1.5), r"^seed=1\.5 is no whole number"),
        (lambda: TrainConfig(seed=1 << 64), r"^seed=18446744073709551616 does not lie in -2\*\*63\.\.2\*\*64-1"),
    ],
)
def test_numbers_that_nothing_can_be_made_of_are_refused(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


def test_sizes_in_bytes_may_be_written_as_powers_of_ten():
    assert LoaderConfig(pool_bytes=64e6).pool_bytes == 64_000_000
