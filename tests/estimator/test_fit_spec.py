"""Each parameter of the estimator arrives where its stage reads it."""

import io
from dataclasses import replace

import pytest
import torch

from sparkdl.errors import ConfigError
from sparkdl.estimator import SparkBackend, Store, TorchEstimator
from sparkdl.estimator.checks import check_checkpoints_used, check_parameters
from sparkdl.estimator.fit_spec import ranks_wanted, resolve, sharing_key
from sparkdl.estimator.params.spec import SPECS
from sparkdl.shards.manifest import Manifest
from sparkdl.strategies import STRATEGIES
from sparkdl.train.callbacks import Callback


class OwnBackend:
    def num_processes(self):
        return 1

    def run(self, fn, args=(), kwargs=None, env=None):
        return [fn(*args, **(kwargs or {}))]


ROWS = Manifest(rows=100, bytes=4000, shards=(), tensors=())


@pytest.fixture
def store(tmp_path):
    return Store.create(str(tmp_path))


def estimator(**given):
    whole = {"model": print, "optimizer": print} | given
    return TorchEstimator(**whole if "loss_constructors" in given else {"loss": torch.nn.MSELoss(), **whole})


def resolved(store, /, *, num_proc=2, **given):
    return resolve(estimator(**given), store=store, num_proc=num_proc)


@pytest.mark.parametrize(
    ("given", "field", "value"),
    [
        ({"epochs": 7}, "epochs", 7),
        ({"train_steps_per_epoch": 3}, "steps_per_epoch", 3),
        ({"validation_steps_per_epoch": 4}, "validation_steps", 4),
        ({"random_seed": 9}, "seed", 9),
        ({"precision": "bf16"}, "precision", "bf16"),
        ({"max_grad_norm": 0.5}, "max_grad_norm", 0.5),
        ({"backward_passes_per_step": 2}, "accumulate_steps", 2),
        ({"scale_lr": True}, "scale_lr", True),
        ({"monitor": "val_mae"}, "monitor", "val_mae"),
        ({"monitor_mode": "max"}, "monitor_mode", "max"),
        ({"early_stopping_patience": 5}, "early_stopping_patience", 5),
        ({"compile": "reduce-overhead"}, "compile", "reduce-overhead"),
    ],
)
def test_how_a_model_is_trained(store, given, field, value):
    before, after = resolved(store).train, resolved(store, **given).train
    assert getattr(after, field) == value != getattr(before, field)


@pytest.mark.parametrize(("given", "sent"), [("fp16", "fp16"), ("bf16", "bf16"), ("none", None)])
def test_how_gradients_travel(store, given, sent):
    assert resolved(store, gradient_compression=given).train.sync.compression == sent


def test_how_shards_are_written_and_read(store):
    config = resolved(store, compress_sparse_cols=True, partitions_per_process=3, random_seed=4).shards
    assert (config.compression, config.repartition, config.seed) == ("zstd", 6, 4)
    spec = resolved(store, train_reader_num_workers=3, val_reader_num_workers=2, shuffle_buffer_size=10)
    training, validation = spec.loaders(ROWS)
    assert (training.threads, validation.threads, spec.shuffle) == (3, 2, True)
    assert (training.pool_bytes, validation.pool_bytes) == (400, 400)
    assert not resolved(store, shuffle=False).shuffle
    assert not resolved(store, shuffle_buffer_size=0).shuffle


def test_when_checkpoints_are_written(tmp_path, store):
    temporary = Store(prefix_path=str(tmp_path), save_runs=False)
    assert resolved(temporary).checkpoints is None
    assert resolved(temporary, max_failures=1).checkpoints is not None
    spec = resolved(store, checkpoint_every=5, keep_checkpoints=2, run_id="r")
    assert (spec.checkpoints.every_steps, spec.checkpoints.keep_last) == (5, 2)
    assert spec.checkpoints.uri == spec.places()["checkpoints"] == store.checkpoints("r")


def test_how_ranks_are_launched(store):
    assert ranks_wanted(TorchEstimator()) is None
    assert ranks_wanted(TorchEstimator(num_proc=3)) == ranks_wanted(TorchEstimator(backend=SparkBackend(3))) == 3
    spec = resolved(store, backend="torch", timeout=5, verbose=2, use_gpu=False)
    assert (spec.backend, spec.use_gpu) == ("torch", False)
    assert (spec.launch.start_timeout_seconds, spec.launch.log_to_driver) == (5, True)
    spec = resolved(store, backend=SparkBackend(2, env={"A": "1"}, start_timeout=7))
    assert (spec.launch.env, spec.launch.start_timeout_seconds, spec.use_gpu) == ({"A": "1"}, 7, None)
    assert not spec.launch.log_to_driver
    stream = io.StringIO()
    backend = SparkBackend(2, stdout=stream, nics=["eth7"], prefix_output_with_timestamp=True)
    launch = resolved(store, backend=backend).launch
    assert (launch.stdout, launch.interface, launch.timestamps) == (stream, "eth7", True)
    assert (resolved(store, strategy="zero1").backend, resolved(store, strategy="zero1", num_proc=1).backend) == (
        "torch",
        "auto",
    )
    own = OwnBackend()
    assert (resolved(store, backend=own).own_backend, resolved(store).own_backend) == (own, None)
    with pytest.raises(ConfigError, match="min_num_proc=3 exceeds num_proc=2"):
        check_parameters(estimator(num_proc=2, min_num_proc=3, max_failures=1))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"min_num_proc": 1}, "min_num_proc=1 counts after a failure, and max_failures=0 allows none"),
        ({"keep_checkpoints": 2}, "keep_checkpoints=2, and none are written"),
        (
            {"resume": "warm", "max_failures": 1},
            "resume='warm' is about the checkpoints of an earlier fit, which run_id",
        ),
        ({"resume": "exact", "run_id": "r"}, "resume='exact' is about the checkpoints of an earlier fit"),
        (
            {"shuffle": False, "partitions_per_process": 3},
            "partitions_per_process=3 deals the rows out anew, and shuffle",
        ),
        ({"shuffle": False, "shuffle_buffer_size": 9}, "shuffle_buffer_size=9 and shuffle=False contradict"),
        ({"shuffle": False, "spread_rows": True}, "spread_rows=True and shuffle=False contradict each other"),
        ({"timeout": 3, "backend": SparkBackend(1, start_timeout=4)}, "timeout=3 and start_timeout=4"),
        ({"timeout": 3, "backend": OwnBackend()}, r"timeout=3.0 has no effect on ranks that OwnBackend.run\(\) starts"),
        ({"num_proc": 3, "backend": OwnBackend()}, "num_proc=3 and a backend of 1 processes: give one of them"),
        ({"strategy": "zero1", "backend": "horovod"}, "strategy='zero1' spreads the model by torch.distributed"),
        ({"loss_weights": [1.0, 2.0]}, "loss_weights has 2 entries for 1 labels"),
        ({"transformation_removed_fields": ["z"]}, "_removed_fields describe a transformation_fn: give one"),
    ],
)
def test_what_was_set_and_would_have_no_effect_is_refused(tmp_path, given, message):
    temporary = Store(prefix_path=str(tmp_path), save_runs=False)

    def check(**given):
        params = estimator(**given)
        check_parameters(params)
        check_checkpoints_used(params, resolve(params, store=temporary, num_proc=2))

    check()
    check(min_num_proc=1, max_failures=1, keep_checkpoints=2)
    with pytest.raises(ConfigError, match=message):
        check(**given)


VALUES = {
    "model": torch.nn.Linear(1, 1),
    "optimizer": torch.optim.SGD,
    "loss": torch.nn.L1Loss(),
    "loss_constructors": [torch.nn.L1Loss],
    "loss_weights": [0.5],
    "metrics": [torch.nn.L1Loss()],
    "callbacks": [Callback()],
    "train_minibatch_fn": print,
    "lr_scheduler": print,
    "feature_cols": ["x"],
    "label_cols": ["y"],
    "sample_weight_col": "w",
    "continuous_cols": ["c"],
    "categorical_cols": ["k"],
    "input_shapes": [[-1, 2]],
    "label_shapes": [[-1, 2]],
    "validation": 0.2,
    "feature_dtypes": {"features": "int64"},
    "transformation_fn": print,
    "transformation_edit_fields": [("z", "float32", (), False)],
    "transformation_removed_fields": ["z"],
    "featuresCol": "x",
    "labelCol": "y",
    "weightCol": "w",
    "validationIndicatorCol": "v",
    "val_batch_size": 7,
    "train_steps_per_epoch": 7,
    "validation_steps_per_epoch": 7,
    "random_seed": 7,
    "precision": "bf16",
    "max_grad_norm": 0.5,
    "early_stopping_patience": 2,
    "monitor": "val_mae",
    "monitor_mode": "max",
    "num_proc": 7,
    "backend": "torch",
    "gradient_compression": "fp16",
    "strategy": "zero1",
    "store": "/tmp/somewhere",
    "run_id": "mine",
    "resume": "warm",
    "checkpoint_every": 7,
    "timeout": 7.0,
    "partitions_per_process": 7,
    "train_reader_num_workers": 7,
    "val_reader_num_workers": 7,
    "shuffle_buffer_size": 7,
}
"""A value of each parameter that is not its default; numbers and booleans may be left out."""

REFUSED = {"mp_start_method", "data_module", "reader_pool_type", "inmemory_cache_all"}
OF_THE_MODEL = {"outputCols", "predictionCol", "probabilityCol", "rawPredictionCol", "transform_batch_size"}
AFTER_A_FAILURE = {"max_failures", "min_num_proc"}  # test_lost_slots_integration.py


def decided(store, /, **given):
    """All that an estimator's parameters come to before a rank starts."""
    spec = resolved(store, **given)
    fields = {name: value for name, value in vars(spec).items() if name not in ("checkpoints", "run_id", "train")}
    if spec.checkpoints is not None:  # each fit and run has a name of its own
        fields["checkpoints"] = replace(spec.checkpoints, uri="", fit_id="")
    fields["train"] = replace(spec.train, tensorboard_dir=None)
    named = spec.run_id if "run_id" in given else ""
    params = estimator(**given)
    wanted = ranks_wanted(params), sharing_key(params), params.getOrDefault("store")
    return repr((named, wanted, spec.loaders(ROWS), fields))


@pytest.mark.parametrize("spec", [one for one in SPECS if one.name not in REFUSED | OF_THE_MODEL | AFTER_A_FAILURE])
def test_every_parameter_decides_something(store, spec):
    value = VALUES.get(spec.name)
    if value is None:
        value = not spec.default if spec.unit.startswith("boolean") else spec.default + 1
    assert decided(store, **{spec.name: value}) != decided(store)
    assert decided(store) == decided(store)


def test_every_strategy_there_is_can_be_chosen():
    for name in STRATEGIES:
        assert TorchEstimator(strategy=name).getStrategy() == name
    with pytest.raises(ConfigError, match="strategy='fsdp9' is unknown: choose one of"):
        TorchEstimator(strategy="fsdp9")
