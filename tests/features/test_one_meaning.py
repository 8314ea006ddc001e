"""The tensor that training saw is the tensor that scoring gives the model, for every type of feature and its options.

The same raw rows go both ways: through a shard set and a loader, and through a bundle and the function of a scoring
task. The model returns what it was given, as numbers, so that nothing between is left out.
"""

from __future__ import annotations

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch

from sparkdl.batches.reading.loader import ShardedDataset
from sparkdl.columns.layout import Layout
from sparkdl.config import LoaderConfig, ScoreConfig
from sparkdl.errors import BundleError, ConfigError, DataError, SchemaError
from sparkdl.features.fitted import Features
from sparkdl.models.bundle import save_bundle
from sparkdl.models.preprocessing import preprocessing_of
from sparkdl.models.signature import Signature, TensorField
from sparkdl.scoring.rows import score_rows
from sparkdl.shards.files import write_table_shards
from sparkdl.shards.manifest import Source
from tests.features.conftest import FEATURES, rows_of
from tests.features.echo import Echo

LONGEST = 4


def trained_on(features, rows, folder):
    """By input, what a loader gives of the shards of ``rows``, in the order of the rows; lists padded with -1."""
    rows = rows.append_column("label", pa.array(np.arange(rows.num_rows)))
    write_table_shards(rows, str(folder), labels=["label"], layout=Layout(prepare=features))
    dataset = ShardedDataset(str(folder), config=LoaderConfig(pad_value=-1))
    [batch] = list(dataset.loader(batch_size=rows.num_rows, shuffle=False))
    order = torch.argsort(batch["label"])
    return {one.name: batch[one.name][order] for one in features.inputs}


def signature_of(features):
    """Of ``Echo``, which returns its inputs."""
    inputs, outputs = [], []
    for one in features.inputs:
        if one.shape:
            inputs.append(TensorField(name=one.name, dtype=one.dtype, shape=one.shape, columns=(one.name,)))
            outputs.append(TensorField(name=f"{one.name}_seen", dtype=one.dtype, shape=one.shape))
        else:
            shape = (None,)
            inputs.append(TensorField(name=one.name, dtype="int64", shape=shape, columns=(one.name,), form="padded"))
            inputs.append(TensorField(name=f"{one.name}_mask", dtype="bool", shape=shape, form="mask", of=one.name))
            outputs.append(TensorField(name=f"{one.name}_seen", dtype="int64", shape=(LONGEST,)))
    return Signature(inputs=tuple(inputs), outputs=tuple(outputs), call="dict")


@pytest.fixture(scope="module")
def bundle(features, tmp_path_factory):
    """A bundle whose model returns its inputs."""
    uri = str(tmp_path_factory.mktemp("echo") / "bundle")
    arguments = {"names": [one.name for one in features.inputs], "longest": LONGEST}
    save_bundle(
        Echo(**arguments),
        uri,
        signature=signature_of(features),
        factory=Echo,
        arguments=arguments,
        preprocessing=preprocessing_of(features),
    )
    return uri


def assert_same(trained, scored, features):
    """Bit for bit."""
    for one in features.inputs:
        column = scored.column(f"{one.name}_seen").combine_chunks()
        flat = column
        while pa.types.is_nested(flat.type):
            flat = flat.flatten()
        expected = trained[one.name]
        if not one.shape:
            wide = torch.full((len(expected), LONGEST), -1)
            wide[:, : expected.shape[1]] = expected
            expected = wide
        seen = np.asarray(flat).reshape(expected.shape)
        np.testing.assert_array_equal(
            seen.astype(expected.numpy().dtype).view(np.uint8), expected.numpy().view(np.uint8)
        )


@pytest.mark.parametrize("rows", [1, 2, 50])
@pytest.mark.parametrize("batch_rows", [1, 7, 4096])
def test_training_and_scoring_see_one_tensor(features, bundle, tmp_path, rows, batch_rows):
    table = rows_of(rows, seed=11, unseen=True)
    trained = trained_on(features, table, tmp_path / "set")
    scored = score_rows(bundle, table, config=ScoreConfig(batch_rows=batch_rows), trusted=["tests"])
    assert_same(trained, scored, features)


def test_rows_of_pandas_are_scored_like_those_of_arrow(bundle):
    table = rows_of(20, seed=12, unseen=True)
    frame = table.to_pandas()
    frame["code"] = pd.Series(table["code"].to_pylist(), dtype=object)  # of integers with gaps pandas makes floats
    expected = score_rows(bundle, table, trusted=["tests"])
    found = score_rows(bundle, frame, trusted=["tests"])
    for name in expected.schema.names:
        assert found[name].to_pylist() == expected[name].to_pylist(), name
    nothing = score_rows(bundle, frame.head(0), trusted=["tests"])
    assert (nothing.num_rows, len(nothing.schema)) == (0, len(expected.schema))


def test_every_type_and_every_option_is_among_these_features():
    from sparkdl.features import spec

    for kind in (spec.Number, spec.Category, spec.Ids, spec.Text, spec.Vector, spec.Image, spec.DateParts):
        chosen = [options for options in FEATURES.values() if isinstance(options, kind)]
        for option in kind.__struct_fields__:
            assert len({repr(getattr(one, option)) for one in chosen}) > 1, (kind, option)


def test_a_bundle_imports_no_function_that_its_reader_has_not_allowed(bundle):
    with pytest.raises(BundleError, match=r"tests\.features.*runs its code"):
        score_rows(bundle, rows_of(2))


def test_rows_without_a_column_of_the_features_are_refused(bundle):
    with pytest.raises(SchemaError, match=r"needs the columns \['money'\]"):
        score_rows(bundle, rows_of(2).drop_columns(["money"]), trusted=["tests"])


def test_what_a_feature_refuses_training_and_scoring_refuse(bundle, features, tmp_path):
    rows = rows_of(4)
    place = rows.schema.get_field_index("strict")
    rows = rows.set_column(place, "strict", pa.array([1, None, 2, 3], pa.int32()))
    for refused in (
        lambda: trained_on(features, rows, tmp_path / "set"),
        lambda: score_rows(bundle, rows, trusted=["tests"]),
    ):
        with pytest.raises(DataError, match="'strict' has no finite number in 1 of 4 rows"):
            refused()


def test_shards_of_other_features_are_other_shards(features, tmp_path):
    rows = rows_of(20).append_column("label", pa.array(np.arange(20)))
    source = Source(uri="table", version="1", transformation="none")
    fewer = Features(features.fitted[:3], features.functions)

    def written(folder, prepare):
        layout = Layout(prepare=prepare)
        return write_table_shards(rows, str(tmp_path / folder), labels=["label"], layout=layout, source=source)

    first = written("a", features)
    assert written("a", features).content_key == first.content_key
    assert written("b", fewer).content_key != first.content_key
    with pytest.raises(ConfigError, match=r"columns=.* and prepare both name the columns"):
        write_table_shards(rows, str(tmp_path / "c"), columns=["plain"], layout=Layout(prepare=features))
    with pytest.raises(SchemaError, match="column 'plain' is missing"):
        write_table_shards(rows.drop_columns(["plain"]), str(tmp_path / "c"), layout=Layout(prepare=features))
