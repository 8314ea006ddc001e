"""The tensor that training saw is the one that Spark's workers give the model, and hashing is Spark's own."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
import torch
from pyspark.sql import functions as F

import sparkdl
from sparkdl.batches.reading.loader import ShardedDataset
from sparkdl.columns.layout import Layout
from sparkdl.config import LoaderConfig, ScoreConfig
from sparkdl.errors import ConfigError
from sparkdl.estimator import TorchModel
from sparkdl.features.hashing import hashes
from sparkdl.models.signature import Signature, TensorField
from sparkdl.scoring.score import score
from sparkdl.shards.write import write_shards
from tests.features.conftest import rows_of
from tests.features.test_one_meaning import assert_same, bundle  # noqa: F401


def test_shards_by_spark_and_scores_by_spark_see_one_tensor(spark, features, bundle, tmp_path):  # noqa: F811
    rows = rows_of(60, seed=21, unseen=True).append_column("label", pa.array(np.arange(60)))
    frame = spark.createDataFrame(rows).repartition(2)
    write_shards(frame, str(tmp_path / "set"), labels=["label"], layout=Layout(prepare=features))
    dataset = ShardedDataset(str(tmp_path / "set"), config=LoaderConfig(pad_value=-1))
    [batch] = list(dataset.loader(batch_size=60, shuffle=False))
    order = batch["label"].argsort()
    trained = {one.name: batch[one.name][order] for one in features.inputs}
    scored = score(frame, bundle, keep=["label", "city"], config=ScoreConfig(batch_rows=7), trusted=["tests"])
    table = scored.orderBy("label").toArrow()
    assert table["city"].to_pylist() == rows["city"].to_pylist()
    assert_same(trained, table, features)


def test_hashes_are_those_of_spark_sql(spark):
    texts = ["", "a", "Köln", "42", "x" * 100]
    rows = spark.createDataFrame([(text,) for text in texts], "t string").select(F.xxhash64("t").alias("h")).collect()
    assert [row["h"] & (2**64 - 1) for row in rows] == hashes(texts).tolist()


def test_a_fitted_model_reads_raw_columns_also_when_it_is_loaded_again(spark, features, tmp_path):
    rows = rows_of(20, seed=3, unseen=True).append_column("label", pa.array(np.arange(20)))
    size = next(one.shape[0] for one in features.inputs if one.name == "numbers")
    module = torch.nn.Linear(size, 1)
    signature = Signature(
        inputs=(TensorField(name="numbers", shape=(size,), columns=("numbers",)),),
        outputs=(TensorField(name="label"),),
    )
    columns = {"feature_columns": ["numbers"], "label_columns": ["label"], "input_shapes": [[-1, size]]}
    model = TorchModel(model=module, signature=signature, **columns).setFeatures(features)
    made = features.apply(rows.combine_chunks().to_batches()[0]).column("numbers").flatten()
    expected = module(torch.tensor(made.to_numpy()).reshape(-1, size)).detach().reshape(-1)
    model.save(str(tmp_path / "model"))
    with sparkdl.allow_imports("tests"):
        loaded = TorchModel.load(str(tmp_path / "model"))
    assert loaded.getFeatures() == features
    frame = spark.createDataFrame(
        rows.drop_columns(["label"]).append_column("row", pa.array(np.arange(20)))
    ).repartition(2)
    for one in (model, loaded):
        scored = one.transform(frame).orderBy("row").toArrow()
        column = next(name for name in scored.schema.names if name not in (*rows.schema.names, "row"))
        np.testing.assert_allclose(np.array(scored[column].to_pylist()).reshape(-1), expected, rtol=1e-5)
    with pytest.raises(ConfigError, match="features and no signature"):
        TorchModel(model=module, **columns).setFeatures(features).transform(frame)
