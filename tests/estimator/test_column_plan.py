import pytest
from pyspark.ml.linalg import VectorUDT
from pyspark.sql import types as T

from sparkdl.columns.spec import TensorSpec
from sparkdl.errors import ConfigError, SchemaError
from sparkdl.estimator.column_plan import Roles, plan_columns
from sparkdl.shards.manifest import Manifest

SCHEMA = (
    T.StructType()
    .add("f", T.FloatType())
    .add("d", T.DoubleType())
    .add("i", T.IntegerType())
    .add("j", T.LongType())
    .add("b", T.BooleanType())
    .add("m", T.DecimalType(10, 2))
    .add("v", VectorUDT())
    .add("a", T.ArrayType(T.DoubleType()))
    .add("ids", T.ArrayType(T.LongType()))
    .add("img", T.BinaryType())
    .add("s", T.StringType())
    .add("t", T.TimestampType())
    .add("y", T.DoubleType())
)


def plan(*features, **more):
    return plan_columns(SCHEMA, Roles(features=features, labels=("y",), **more))


def test_numbers_pack_into_one_floating_tensor_by_default():
    found = plan("f", "d", "i", "b", "m")
    assert found.layout.pack == {"features": ["f", "d", "i", "b", "m"]}
    assert set(found.layout.dtypes.values()) == {"float32"}
    assert found.casts == {"b": "double", "m": "double"}


def test_integers_alone_stay_integers_and_floats_take_the_models_dtype():
    assert plan("i", "j").layout.dtypes == {"i": "int64", "j": "int64"}
    assert plan("f", "d", float_dtype="float64").layout.dtypes == {"f": "float64", "d": "float64"}


def test_named_kinds_get_tensors_of_their_own():
    found = plan("f", "i", "d", "j", continuous=("f", "d"), categorical=("i", "j"))
    assert found.layout.pack == {"continuous": ["f", "d"], "categorical": ["i", "j"]}
    assert found.layout.dtypes == {"f": "float32", "d": "float32", "i": "int64", "j": "int64"}
    found = plan("f", "i", "j", dtypes={"i": "int64"})
    assert found.layout.pack == {"features_float32": ["f", "j"], "features_int64": ["i"]}


def test_with_shapes_integers_stay_integers_beside_floats():
    found = plan("f", "i", shapes=((-1, 1), (-1,)))
    assert found.layout.pack == {"features_float32": ["f"], "features_int64": ["i"]}


def test_vectors_arrays_and_images_keep_a_tensor_of_their_own():
    found = plan("v", "a", "ids", "img")
    assert found.layout.pack == {}
    assert found.layout.dtypes == {"v": "float32", "a": "float32"}


@pytest.mark.parametrize(("name", "remedy"), [("s", "StringIndexer"), ("t", "cast it to numbers")])
def test_what_cannot_be_trained_on_is_named_with_the_remedy(name, remedy):
    with pytest.raises(SchemaError, match=f"'{name}' is of type .* {remedy}"):
        plan(name)


def test_a_missing_column_names_the_nearest():
    with pytest.raises(SchemaError, match="'imgs' is missing, the frame has img"):
        plan("imgs")


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"shapes": ((-1, 1),)}, "1 shapes for 2 columns"),
        ({"categorical": ("z",)}, "which feature_cols does not"),
        ({"categorical": ("i",), "continuous": ("i",)}, "both name"),
        ({"categorical": ("i",), "shapes": ((-1,), (-1,))}, "drop one of the two"),
        ({"dtypes": {"z": "int64"}}, "no feature columns"),
    ],
)
def test_roles_that_do_not_fit_each_other_are_refused(more, message):
    with pytest.raises(ConfigError, match=message):
        plan("f", "i", **more)


def test_wrong_input_shapes_name_both_shapes():
    tensors = (
        TensorSpec(name="v", dtype="float32", shape=(784,), columns=("v",)),
        TensorSpec(name="features", dtype="float32", shape=(1,), columns=("f",)),
    )
    manifest = Manifest(rows=1, bytes=1, shards=(), tensors=tensors)
    good = plan("v", "f", shapes=((-1, 1, 28, 28), (-1, 1))).inputs(manifest)
    assert [(view.tensor, view.index, view.shape) for view in good] == [
        ("v", None, (-1, 1, 28, 28)),
        ("features", 0, (-1, 1)),
    ]
    with pytest.raises(ConfigError, match=r"\[-1, 1, 28, 27\] for 'v', whose rows have shape \[784\]"):
        plan("v", "f", shapes=((-1, 1, 28, 27), (-1, 1))).inputs(manifest)


def test_a_feature_that_is_a_label_or_the_weight_as_well_is_packed_like_the_others():
    found = plan_columns(SCHEMA, Roles(features=("f", "y", "j"), labels=("y",), weight="j"))
    assert found.layout.pack == {"features": ["f", "y__feature", "j__feature"]}
    assert found.columns == ["f", "y__feature", "j__feature", "y", "j"]
    assert found.layout.dtypes == {"f": "float32", "y__feature": "float32", "j__feature": "float32", "j": "float32"}
    packed = TensorSpec(name="features", dtype="float32", shape=(3,), columns=("f", "y__feature", "j__feature"))
    manifest = Manifest(rows=1, bytes=1, shards=(), tensors=(packed,))
    assert [view.tensor for view in found.inputs(manifest)] == ["features"]
    assert [(view.name, view.index) for view in found.inputs(manifest, by_column=True)] == [
        ("f", 0),
        ("y", 1),
        ("j", 2),
    ]
    assert found.sources == ["f", "y", "j"]


def test_a_feature_called_as_a_copy_would_be_is_refused_and_elsewhere_is_one_like_any_other():
    schema = T.StructType().add("x", T.FloatType()).add("x__feature", T.FloatType()).add("y", T.DoubleType())
    found = plan_columns(schema, Roles(features=("x", "x__feature"), labels=("y",)))
    assert found.sources == found.columns == ["x", "x__feature", "y"]
    with pytest.raises(SchemaError, match="column 'x__feature' is called as the copy of 'x', a label or weight, would"):
        plan_columns(schema, Roles(features=("x__feature",), labels=("x",)))


@pytest.mark.parametrize("other", ["F", "f"])
def test_columns_that_spark_does_not_tell_apart_are_refused_where_they_are_used(other):
    schema = T.StructType([*SCHEMA.fields]).add(other, T.FloatType())
    assert plan_columns(schema, Roles(features=("d",), labels=("y",))).columns == ["d", "y"]
    with pytest.raises(SchemaError, match=rf"2 columns of the name 'f', \['f', '{other}'\], which Spark does not tell"):
        plan_columns(schema, Roles(features=("f",), labels=("y",)))
