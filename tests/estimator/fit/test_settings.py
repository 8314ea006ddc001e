"""Each parameter of the estimator arrives where its stage reads it."""

import io

import pytest
import torch

from sparkdl.errors import ConfigError
from sparkdl.estimator import SparkBackend, Store, TorchEstimator
from sparkdl.estimator.fit import settings as s
from sparkdl.estimator.fit.data import sharing_key
from sparkdl.estimator.inputs.views import Views
from sparkdl.estimator.params.spec import SPECS
from sparkdl.shards.manifest import Manifest
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
        ({"early_stopping_patience": 5}, "early_stopping_patience", 5),
        ({"compile": "reduce-overhead"}, "compile", "reduce-overhead"),
    ],
)
def test_how_a_model_is_trained(store, given, field, value):
    before = s.train_config(TorchEstimator(), store, "r")
    after = s.train_config(TorchEstimator(**given), store, "r")
    assert getattr(after, field) == value != getattr(before, field)


@pytest.mark.parametrize(("given", "sent"), [("fp16", "fp16"), ("bf16", "bf16"), ("none", None)])
def test_how_gradients_travel(store, given, sent):
    assert s.train_config(TorchEstimator(gradient_compression=given), store, "r").sync.compression == sent


def test_how_shards_are_written_and_read():
    config = s.shard_config(TorchEstimator(compress_sparse_cols=True, partitions_per_process=3, random_seed=4), 2)
    assert (config.compression, config.repartition, config.seed) == ("zstd", 6, 4)
    given = {"train_reader_num_workers": 3, "val_reader_num_workers": 2, "shuffle_buffer_size": 10}
    training, validation, shuffle = s.loader_configs(TorchEstimator(**given), ROWS)
    assert (training.threads, validation.threads, training.pool_bytes, shuffle) == (3, 2, 400, True)
    assert not s.loader_configs(TorchEstimator(shuffle=False), ROWS)[2]
    assert not s.loader_configs(TorchEstimator(shuffle_buffer_size=0), ROWS)[2]


def test_when_checkpoints_are_written(tmp_path, store):
    temporary = Store(prefix_path=str(tmp_path), save_runs=False)
    assert s.checkpoint_config(TorchEstimator(), temporary, "r") is None
    assert s.checkpoint_config(TorchEstimator(max_failures=1), temporary, "r") is not None
    config = s.checkpoint_config(TorchEstimator(checkpoint_every=5, keep_checkpoints=2), store, "r")
    assert (config.every_steps, config.keep_last) == (5, 2)
    assert config.uri == store.checkpoints("r")


def test_how_ranks_are_launched():
    assert s.ranks_wanted(TorchEstimator()) is None
    assert s.ranks_wanted(TorchEstimator(num_proc=3)) == s.ranks_wanted(TorchEstimator(backend=SparkBackend(3))) == 3
    found = s.launch_settings(TorchEstimator(backend="torch", timeout=5, verbose=2, use_gpu=False))
    assert (found["backend"], found["use_gpu"]) == ("torch", False)
    assert (found["config"].start_timeout_seconds, found["config"].log_to_driver) == (5, True)
    found = s.launch_settings(TorchEstimator(backend=SparkBackend(2, env={"A": "1"}, start_timeout=7)))
    assert (found["config"].env, found["config"].start_timeout_seconds, found["use_gpu"]) == ({"A": "1"}, 7, None)
    assert not found["config"].log_to_driver
    stream = io.StringIO()
    backend = SparkBackend(2, stdout=stream, nics=["eth7"], prefix_output_with_timestamp=True)
    config = s.launch_settings(TorchEstimator(backend=backend))["config"]
    assert (config.stdout, config.interface, config.timestamps) == (stream, "eth7", True)
    with pytest.raises(ConfigError, match="min_num_proc=3 exceeds num_proc=2"):
        s.ranks_wanted(TorchEstimator(num_proc=2, min_num_proc=3))


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
        ({"timeout": 3, "backend": SparkBackend(1, start_timeout=4)}, "timeout=3 and start_timeout=4"),
        ({"timeout": 3, "backend": OwnBackend()}, r"timeout=3.0 has no effect on ranks that OwnBackend.run\(\) starts"),
    ],
)
def test_what_was_set_and_would_have_no_effect_is_refused(tmp_path, given, message):
    temporary = Store(prefix_path=str(tmp_path), save_runs=False)
    s.check_used(TorchEstimator(), temporary)
    with pytest.raises(ConfigError, match=message):
        s.check_used(TorchEstimator(**given), temporary)
    s.check_used(TorchEstimator(min_num_proc=1, max_failures=1, keep_checkpoints=2), temporary)


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
    "num_proc": 7,
    "backend": "torch",
    "gradient_compression": "fp16",
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


def decided(folder, /, **given):
    """All that an estimator's parameters come to before a rank starts."""
    whole = {"model": None, "optimizer": None, "loss": torch.nn.MSELoss()} | given
    whole |= {name: print for name in ("model", "optimizer") if whole[name] is None}
    if "loss_constructors" in given:
        del whole["loss"]
    params = TorchEstimator(**whole)
    roles = s.roles_of(params, "float32")
    found = (
        s.user_parts(params),
        roles,
        s.shard_config(params, 2),
        s.task_plan(params, roles, Views(()), torch.nn.Linear(1, 1)),
    )
    found += (s.rank_job(params, ROWS, ROWS, folder, "r").keywords, s.launch_settings(params), s.ranks_wanted(params))
    return repr((*found, sharing_key(params), params.getOrDefault("run_id") and s.run_id_of(params)))


@pytest.mark.parametrize("spec", [one for one in SPECS if one.name not in REFUSED | OF_THE_MODEL | AFTER_A_FAILURE])
def test_every_parameter_decides_something(store, spec):
    value = VALUES.get(spec.name)
    if value is None:
        value = not spec.default if spec.unit.startswith("boolean") else spec.default + 1
    assert decided(store, **{spec.name: value}) != decided(store)
