"""Arrays that turn out equally long are read as the fixed tensor they are, and their neighbours are not disturbed."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from sparkdl.batches.reading.loader import ShardedDataset
from sparkdl.config import ShardConfig
from sparkdl.shards.files import write_table_shards

ROWS = 5000


@pytest.mark.parametrize("dtype", ["float32", "float64", "int16"])
@pytest.mark.parametrize("format", ["ipc", "parquet"])
def test_every_value_of_an_even_array_and_of_its_neighbours_comes_back(tmp_path, dtype, format):
    rng = np.random.default_rng(0)
    arrays = (rng.normal(size=(ROWS, 3)) * 100).astype(dtype)
    table = pa.table(
        {
            "before": np.arange(ROWS, dtype="int8"),
            "even": pa.array(list(arrays), pa.list_(pa.from_numpy_dtype(arrays.dtype))),
            "behind": np.arange(ROWS),
            "label": rng.normal(size=ROWS).astype("float32"),
        }
    )
    write_table_shards(table, str(tmp_path / "set"), labels=["label"], config=ShardConfig(format=format))
    seen = {}
    for batch in ShardedDataset(str(tmp_path / "set")).loader(batch_size=64, seed=1):
        assert batch["even"].shape == (batch.rows, 3)
        for index, row in enumerate(batch["behind"].tolist()):
            seen[row] = batch["even"][index].numpy()
            assert batch["before"][index] == table["before"][row].as_py()
            assert batch["label"][index] == table["label"][row].as_py()
    assert sorted(seen) == list(range(ROWS))
    np.testing.assert_array_equal(np.stack([seen[row] for row in range(ROWS)]), arrays)


def test_files_that_hold_other_columns_than_the_manifest_says_are_refused(tmp_path):
    from dataclasses import replace

    from sparkdl.errors import IntegrityError
    from sparkdl.shards.manifest import Manifest

    table = pa.table({"wide": pa.array([[1.0, 2.0, 3.0]] * 100, pa.list_(pa.float64())), "label": np.arange(100.0)})
    place = str(tmp_path / "set")
    write_table_shards(table, place, labels=["label"])
    manifest = Manifest.load(place)
    lying = tuple(replace(spec, stored_as_list=False) for spec in manifest.tensors)
    replace(manifest, tensors=lying).commit(place, overwrite=True)
    with pytest.raises(IntegrityError, match="2400 are due for 100 rows"):
        next(iter(ShardedDataset(place).loader(batch_size=10)))
