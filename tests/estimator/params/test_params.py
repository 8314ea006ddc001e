import inspect

import pytest
import torch

from sparkdl.errors import ConfigError
from sparkdl.estimator import SparkBackend, TorchEstimator, TorchModel
from sparkdl.estimator.params import params as advice
from sparkdl.estimator.params.spec import ALIASES, SPECS

HOROVOD = """
num_proc backend store model optimizer loss loss_constructors loss_weights sample_weight_col metrics feature_cols
label_cols input_shapes label_shapes continuous_cols categorical_cols validation callbacks batch_size val_batch_size
epochs train_steps_per_epoch validation_steps_per_epoch random_seed shuffle verbose partitions_per_process run_id
transformation_fn transformation_edit_fields transformation_removed_fields train_reader_num_workers
val_reader_num_workers reader_pool_type gradient_compression inmemory_cache_all use_gpu mp_start_method
backward_passes_per_step train_minibatch_fn shuffle_buffer_size compress_sparse_cols data_module
"""
OURS = """
lr_scheduler scale_lr precision max_grad_norm early_stopping_patience monitor checkpoint_every keep_checkpoints
monitor_mode max_failures min_num_proc timeout feature_dtypes transform_batch_size compile strategy
"""
SPARK = "featuresCol labelCol weightCol predictionCol validationIndicatorCol"


@pytest.mark.parametrize("name", f"{HOROVOD} {OURS} {SPARK}".split())
def test_every_name_a_user_brings_along_is_a_param_with_accessors(name):
    estimator = TorchEstimator()
    assert estimator.hasParam(name)
    spec = next(spec for spec in SPECS if spec.name == name)
    assert callable(getattr(estimator, f"get{spec.suffix}"))
    assert callable(getattr(estimator, f"set{spec.suffix}"))
    assert name in estimator.explainParams()


def test_the_accessors_that_horovod_names_irregularly_are_there():
    estimator = TorchEstimator()
    estimator.setTrainReaderNumWorker(3).setValReaderNumWorker(2).setInMemoryCacheAll(False).setShufflingBufferSize(10)
    assert (estimator.getTrainReaderNumWorker(), estimator.getValReaderNumWorker()) == (3, 2)
    assert (estimator.getInMemoryCacheAll(), estimator.getShufflingBufferSize()) == (False, 10)


def test_the_signature_shows_every_parameter_with_its_default():
    parameters = inspect.signature(TorchEstimator).parameters
    assert [spec.name for spec in SPECS] == list(parameters)
    assert parameters["batch_size"].default == 32


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("epoch", r"did you mean epochs\?"),
        ("num_epochs", "use epochs"),
        ("maxIter", "use epochs"),
        ("batchSize", "it is spelt batch_size"),
        ("feature_Cols", "it is spelt feature_cols"),
        ("loader_num_epochs", "leave it out: rows are read as often as epochs says"),
        ("num_gpus", "use use_gpu"),
        ("trainer_args", "use num_proc, epochs and the others"),
        ("learning_rate", "use optimizer"),
        ("colour", "see explainParams"),
    ],
)
def test_an_unknown_name_is_refused_with_what_to_write_instead(name, hint):
    with pytest.raises(ConfigError, match=f"TorchEstimator has no parameter '{name}': {hint}"):
        TorchEstimator(**{name: 3})


def test_the_table_of_other_names_leads_to_parameters_there_are():
    known = {spec.name for spec in SPECS}
    others = [name for names in advice._RENAMED.values() for name in names]
    assert {here for here in advice._RENAMED if "," not in here} <= known
    assert not known & {*others, *advice._WITHOUT}
    assert len(set(others)) == len(others)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"epochs": 0}, "epochs=0 is below 1"),
        ({"epochs": "many"}, "a whole number"),
        ({"epochs": 10**400}, "is above 2147483647"),
        ({"epochs": float("inf")}, "a whole number"),
        ({"epochs": 2.5}, "a whole number"),
        ({"partitions_per_process": 2**31}, "partitions_per_process=2147483648 is above 2147483647"),
        ({"timeout": 10**400}, "a finite number"),
        ({"batch_size": True}, "a whole number"),
        ({"validation": 1.0}, r"does not lie in \[0, 1\)"),
        ({"validation": []}, "a fraction of the rows"),
        ({"backend": "mpi"}, "not one of"),
        ({"backend": "solo"}, "not one of"),
        ({"backend": 3}, "SparkBackend"),
        ({"precision": "fp8"}, "not one of"),
        ({"feature_cols": ["a", "a"]}, "more than once"),
        ({"feature_cols": ["", "a"]}, r"feature_cols=\['', 'a'\] holds an empty name: give names of columns"),
        ({"label_cols": []}, r"label_cols=\[\] holds no name"),
        ({"predictionCol": ""}, "predictionCol='' is an empty name"),
        ({"input_shapes": [[1, 4]]}, r"\[1, 4\], whose 1 may be the batch .*: write \[-1, 4\] or \[-1, 1, 4\]"),
        ({"input_shapes": [[-1, -1, 3]]}, "only the batch may be -1"),
        ({"loss_weights": [0.0]}, "nothing to learn"),
        ({"loss_weights": [-1.0, 0.0]}, "at least one number above 0"),
        ({"loss_weights": [float("nan")]}, "a list of finite numbers"),
        ({"loss": 3}, "a function"),
        ({"model": "net"}, "model='net' is a str: give a torch.nn.Module"),
        ({"optimizer": "adam"}, "optimizer='adam' is a str: give a torch.optim.Optimizer"),
        ({"feature_dtypes": {"a": "complex64"}}, "not one of"),
        ({"gradient_compression": "int8"}, "not one of"),
        ({"max_grad_norm": 0}, "above 0"),
        ({"store": 3}, "Store.create"),
        ({"callbacks": [object()]}, "sparkdl.train.callbacks.Callback"),
        ({"mp_start_method": "spawn"}, "ranks run inside Spark's Python workers"),
        ({"data_module": object}, "fit_on_shards"),
        ({"reader_pool_type": "process"}, "train_reader_num_workers"),
        ({"inmemory_cache_all": True}, "mapped into memory"),
        ({"shuffle": 1}, "True or False"),
        ({"transformation_edit_fields": ["z"]}, "transformation_edit_fields='z' is a str: give a list of"),
        ({"transformation_edit_fields": [("z", "float32", 1, True)]}, "is a tuple: give a list of"),
        ({"transformation_edit_fields": [(None, "float32", (), True)]}, "is a tuple: give a list of"),
    ],
)
def test_a_value_that_does_nothing_or_cannot_be_meant_is_refused(given, message):
    with pytest.raises(ConfigError, match=message):
        TorchEstimator(**given)


def test_a_shape_without_the_batch_is_that_of_a_row():
    estimator = TorchEstimator(input_shapes=[[2], [-1, 3, 4], [3, 4], [1]], label_shapes=[[1], [2, 2]])
    assert estimator.getInputShapes() == [[-1, 2], [-1, 3, 4], [-1, 3, 4], [-1, 1]]
    assert estimator.getLabelShapes() == [[-1, 1], [-1, 2, 2]]


def test_refusals_hold_on_every_way_to_set_a_value():
    estimator = TorchEstimator()
    for attempt in (
        lambda: estimator.setEpochs(0),
        lambda: estimator.setParams(epochs=0),
        lambda: estimator.set(estimator.epochs, 0),
        lambda: estimator.copy({estimator.epochs: 0}),
    ):
        with pytest.raises(ConfigError, match="below 1"):
            attempt()
    with pytest.raises(ConfigError, match="the key 'epochs', a str: give the Param"):
        estimator.copy({"epochs": 2})


@pytest.mark.parametrize(("ours", "alias"), ALIASES.items())
def test_two_names_for_one_thing_conflict_and_either_alone_serves(ours, alias):
    value = ["x"] if ours in ("feature_cols", "label_cols") else "x"
    accessor = next(spec.suffix for spec in SPECS if spec.name == ours)
    assert getattr(TorchEstimator(**{alias: "x"}), f"get{accessor}")() == value
    assert getattr(TorchEstimator(**{ours: value}), f"get{accessor}")() == value
    with pytest.raises(ConfigError, match="name the same thing"):
        TorchEstimator(**{ours: value, alias: "x"})


def test_other_pairs_that_exclude_each_other_are_refused():
    with pytest.raises(ConfigError, match="drop one"):
        TorchEstimator(loss=torch.nn.MSELoss(), loss_constructors=[torch.nn.MSELoss])
    with pytest.raises(ConfigError, match="both name the output"):
        TorchEstimator(outputCols=["a"], predictionCol="b")


def test_none_is_the_default_and_a_copy_is_independent():
    estimator = TorchEstimator(epochs=5, num_proc=None)
    assert not estimator.isSet("num_proc")
    other = estimator.copy({estimator.epochs: 7})
    assert (estimator.getEpochs(), other.getEpochs(), other.uid) == (5, 7, estimator.uid)
    assert estimator.setEpochs(None).getEpochs() == 1


def test_horovods_compression_objects_are_understood():
    class FP16Compressor:
        pass

    assert TorchEstimator(gradient_compression=FP16Compressor).getGradientCompression() == "fp16"


def test_a_spark_backend_refuses_what_has_no_counterpart():
    assert SparkBackend(2, env={"A": "1"}, use_mpi=False).num_processes() == 2
    assert SparkBackend(2, env={"A": "1", "CUDA_VISIBLE_DEVICES": "0"}).env == {"A": "1"}, "as Horovod's does"
    inert = {"stdout": None, "stderr": None, "prefix_output_with_timestamp": False, "executable": None, "verbose": 1}
    assert SparkBackend(2, **inert, nics=["eth0"], extra_mpi_args=None, use_gloo=True).num_processes() == 2
    for wrong, words in (
        ({"use_mpi": True}, "nobody starts mpirun"),
        ({"stdout": "out.log"}, "takes no text"),
        ({"colour": 1}, "SparkBackend takes no colour: it takes num_proc, env, start_timeout, "),
    ):
        with pytest.raises(ConfigError, match=words):
            SparkBackend(2, **wrong)


class Told:
    """As much of a backend as an estimator asks for."""

    env = {"A": "1"}  # noqa: RUF012

    def num_processes(self):
        return 3


class Runs(Told):
    def run(self, fn, args=(), kwargs=None, env=None):
        raise NotImplementedError


class RunsNone(Runs):
    def num_processes(self):
        return 0


def test_backends_of_others_are_taken_at_their_word_or_refused():
    taken = TorchEstimator(backend=Told()).getBackend()
    assert (taken.num_processes(), taken.env, taken.start_timeout) == (3, {"A": "1"}, None)
    own = Runs()
    assert TorchEstimator(backend=own).getBackend() is own
    with pytest.raises(
        ConfigError, match=r"num_processes\(\) of backend, a RunsNone, is 0: return the number of ranks"
    ):
        TorchEstimator(backend=RunsNone())
    theirs = type("SparkBackend", (Runs,), {"__module__": "horovod.spark.common.backend"})()
    theirs._env, theirs._kwargs = {"B": "2"}, {"use_gloo": True, "start_timeout": 5}
    taken = TorchEstimator(backend=theirs).getBackend()
    assert (taken.num_processes(), taken.env, taken.start_timeout) == (3, {"B": "2"}, 5)
    theirs._kwargs = {"extra_mpi_args": "-x A"}
    with pytest.raises(ConfigError, match="are for mpirun"):
        TorchEstimator(backend=theirs)
    with pytest.raises(ConfigError, match=r"num_proc='2': give a whole number"):
        SparkBackend("2")
    with pytest.raises(ConfigError, match="env of a SparkBackend is a list: give a dict"):
        SparkBackend(2, ["A"])


def test_the_model_has_horovods_accessors():
    net = torch.nn.Linear(2, 1)
    model = TorchModel(model=net, feature_columns=["a", "b"], label_columns=["y"], input_shapes=[[-1, 2]])
    assert model.getModel() is net
    assert model.setOutputCols(["out"]).getOutputCols() == ["out"]
    assert model.getFeatureColumns() == ["a", "b"]
    assert model.setLabelColoumns(["z"]).getLabelColumns() == ["z"]
    with pytest.raises(ConfigError, match="holds no model"):
        TorchModel().getModel()


def test_a_model_is_a_module_and_its_history_may_be_left_out():
    columns = {"feature_columns": ["a"], "label_columns": ["y"]}
    assert TorchModel(model=torch.nn.Linear(1, 1), history=None, **columns).getHistory() == []
    for attempt in (
        lambda: TorchModel(model=torch.nn.Linear, **columns),
        lambda: TorchModel().setModel(torch.nn.Linear),
    ):
        with pytest.raises(ConfigError, match=r"^model=Linear is no torch.nn.Module: give the module itself"):
            attempt()
