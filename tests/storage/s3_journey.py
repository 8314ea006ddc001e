"""From rows to predictions in a bucket that only the session's settings open; a test starts it in a process of its own.

``python s3_journey.py s3://BUCKET`` prints what it found as JSON in its last line. The settings lie in the folder
``SPARK_CONF_DIR``; nothing is said to fsspec, delta-rs or in the environment.
"""

from __future__ import annotations

import json
import logging
import sys

import fsspec.config
import pytest
import torch
from pyspark.sql import SparkSession

from sparkdl import ModelRegistry, TorchEstimator, load_model, run, write_shards
from sparkdl.batches.reading.loader import ShardedDataset
from sparkdl.errors import StorageError
from sparkdl.storage import Storage
from sparkdl.tables.table import Table


def names_below(place):
    """Asked on a rank, where no session is."""
    return sorted(entry.name for entry in Storage.of(place).list())


def sentence_of(action):
    with pytest.raises(StorageError) as refused:
        action()
    return str(refused.value)


def tables(spark, root, frame):
    """Each engine writes a table and reads the other's."""
    ours, sparks = Table(f"{root}/ours", engine="delta-rs"), Table(f"{root}/sparks", engine="spark")
    ours.write(frame)
    sparks.write(frame)
    assert Table(f"{root}/sparks", engine="delta-rs").rows().num_rows == 64
    assert Table(f"{root.replace('s3:', 's3a:')}/ours", engine="spark").read(spark).count() == 64
    assert Table(f"{root}/sparks", engine="delta-rs").read(spark).count() == 64
    assert sparks.transaction_version("nobody") is None
    sparks.append(frame.limit(1).toArrow())
    return [ours.version(), sparks.version(), sparks.read(spark).count()]


def main(root):
    spark = SparkSession.builder.getOrCreate()
    logging.basicConfig(level=logging.DEBUG)  # only now: at DEBUG pyspark's own start shows every setting
    assert not fsspec.config.conf.get("s3")
    frame = spark.range(64).selectExpr("CAST(id AS FLOAT) / 64 AS x", "CAST(id AS FLOAT) AS y")
    found = {"tables": tables(spark, f"{root}/tables", frame)}
    rows = Table(f"{root}/tables/ours").read(spark)
    found["shards"] = write_shards(rows, f"{root}/set", columns=["x"], labels=["y"]).rows
    found["batches"] = sum(batch.rows for batch in ShardedDataset(f"{root}/set").loader(batch_size=8))
    net = torch.nn.Linear(1, 1)
    estimator = TorchEstimator(
        model=net,
        optimizer=torch.optim.SGD(net.parameters(), lr=0.1),
        loss=torch.nn.MSELoss(),
        feature_cols=["x"],
        label_cols=["y"],
        epochs=2,
        batch_size=8,
        num_proc=2,
        run_id="first",
        store=f"{root}/store",
        verbose=0,
    )
    fitted = estimator.fit(rows)
    found["checkpoints"] = len(Storage.of(f"{root}/store/runs/first/checkpoints").list())
    fitted.save(f"{root}/saved")
    fitted.publish(f"{root}/registry", "net")
    model = load_model("net@champion", registry=f"{root}/registry")
    scored = model.transform(rows)
    scored.explain(True)
    Table(f"{root}/predictions").write(scored.select("x", "y__output"))
    found["predictions"] = Table(f"{root}/predictions", engine="delta-rs").rows().num_rows
    found["versions"] = [one.version for one in ModelRegistry(f"{root}/registry").list("net")]
    found["ranks"] = run(names_below, args=(root,), num_proc=2, spark=spark)
    print(spark.conf.get("spark.app.id"), fitted, model, estimator.getStore(), found)
    bad = root.replace("s3://", "s3://wrong-")  # whose own settings are wrong
    for name, place in {"keys": f"{bad}/t", "bucket": "s3://no-such-bucket/t", "endpoint": "s3://off/t"}.items():
        table = Table(place, engine="spark")
        reads, writes = sentence_of(table.version), sentence_of(lambda table=table: table.write(frame))
        found[name] = [reads, writes]
    spark.stop()
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
