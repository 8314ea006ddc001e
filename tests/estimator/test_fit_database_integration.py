"""fit(df) of rows that come through JDBC from a real PostgreSQL: the weights that the same rows of a file give."""

from __future__ import annotations

import io

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
import torch
from torch import nn

from sparkdl.estimator import TorchEstimator
from sparkdl.shards.write import write_shards

ROWS = 3000
COLUMNS = {
    "id": "bigint", "small": "smallint", "whole": "int", "x": "float8", "f": "real", "price": "numeric(9,3)",
    "flag": "boolean", "day": "date", "at": "timestamptz", "local_at": "timestamp", "name": "text", "y": "float8",
}  # fmt: skip


@pytest.fixture(scope="module")
def tables(spark, postgres, tmp_path_factory):
    """The same rows as a DataFrame of a Parquet file, and as one of a table of a database, which three tasks read."""
    random = np.random.default_rng(0)
    x, number = random.normal(size=ROWS), np.arange(ROWS)
    moments = pa.array(number * 61_000_000 + 1_700_000_000_123_456, pa.timestamp("us"))
    rows = pa.table({
        "id": number, "small": pa.array(number % 100, pa.int16()), "whole": pa.array(number * 3, pa.int32()), "x": x,
        "f": pa.array(x, pa.float32()), "price": pa.array(np.round(x, 3)).cast(pa.decimal128(9, 3), safe=False),
        "flag": x > 0, "day": pa.array(number % 9999, pa.int32()).cast(pa.date32()),
        "at": moments.cast(pa.timestamp("us", "UTC")), "local_at": moments,
        "name": [f"n{one % 7}" for one in number], "y": 3 * x + 1,
    })  # fmt: skip
    path = str(tmp_path_factory.mktemp("rows") / "rows.parquet")
    pq.write_table(rows, path)
    text = io.BytesIO()
    pa.csv.write_csv(rows, text)
    postgres.run(f"CREATE TABLE rows ({', '.join(f'{name} {kind}' for name, kind in COLUMNS.items())})")
    postgres.run("ALTER TABLE rows OWNER TO reader")
    postgres.run("SET TIME ZONE 'UTC'; COPY rows FROM STDIN (FORMAT csv, HEADER true)", rows=text.getvalue().decode())
    reader = spark.read.format("jdbc").options(
        url=postgres.url, dbtable="rows", user="reader", password=postgres.password
    )
    reader = reader.options(driver="org.postgresql.Driver", preferTimestampNTZ=True)
    read = reader.options(partitionColumn="id", lowerBound=0, upperBound=ROWS, numPartitions=3).load()
    yield spark.read.parquet(path), read
    postgres.run("DROP TABLE rows")


def in_order(frame):
    return frame.coalesce(1).sortWithinPartitions("id")


@pytest.mark.slow
def test_shards_are_the_same_to_the_bit(tables, tmp_path):
    file, database = tables
    assert database.rdd.getNumPartitions() == 3
    assert database.columns == file.columns == list(COLUMNS)
    sets = [write_shards(in_order(frame), tmp_path / name) for name, frame in (("f", file), ("d", database))]
    assert [one.rows for one in sets] == [ROWS, ROWS]
    assert sets[0].content_hash == sets[1].content_hash


@pytest.mark.slow
def test_weights_are_the_same_to_the_bit(tables):
    def weights(frame):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
        estimator = TorchEstimator(
            model=net, optimizer=torch.optim.Adam(net.parameters(), lr=0.01), loss=nn.MSELoss(), num_proc=2,
            feature_cols=["x", "f", "small", "price"], label_cols=["y"], batch_size=64, epochs=2, validation=0.2,
            verbose=0,
        )  # fmt: skip
        fitted = estimator.fit(in_order(frame))
        assert fitted.history["val_loss"].iloc[-1] < 9
        return fitted.getModel().state_dict()

    file, database = (weights(frame) for frame in tables)
    assert all(torch.equal(file[name], database[name]) for name in file)
