"""Every name that a user of Horovod or of Spark's TorchDistributor brings along is here, and means what it meant."""

from __future__ import annotations

import inspect

import pytest

import sparkdl
from sparkdl import estimator

HOROVOD_RUN = """
fn args kwargs num_proc start_timeout use_mpi use_gloo extra_mpi_args env stdout stderr verbose nics
prefix_output_with_timestamp executable
"""
HOROVOD_RUN_ELASTIC = """
fn args kwargs num_proc min_num_proc max_num_proc start_timeout elastic_timeout reset_limit env stdout stderr verbose
nics prefix_output_with_timestamp min_np max_np
"""
PREPARE_DATA = """
num_processes store df label_columns feature_columns validation sample_weight_col compress_sparse
partitions_per_process verbose
"""
HDFS_STORE = "prefix_path host port user kerb_ticket driver extra_conf"
STORE = """
create exists read write_text get_train_data_path get_val_data_path get_test_data_path get_runs_path get_run_path
get_checkpoint_path get_checkpoints get_checkpoint_filename get_logs_path get_logs_subdir get_full_path get_full_path_fn
get_localized_path get_local_output_dir_fn sync_fn is_parquet_dataset get_parquet_dataset saving_runs fs
"""
STORES = "Store LocalStore HDFSStore DBFSLocalStore FilesystemStore"
MODEL = "getModel setModel getHistory setHistory getOptimizer setOptimizer getLoss setLoss getLossConstructors"
SPARK_ML = "copy explainParams write save fit fit_on_parquet fitMultiple params"
TORCH_DISTRIBUTOR = "num_processes local_mode use_gpu _ssl_conf"


def positional(function):
    return [p.name for p in inspect.signature(function).parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]


def with_defaults(function):
    """Parameters that go by position, with their defaults: an empty dict is what None stands for here."""
    found = inspect.signature(function).parameters.values()
    return {p.name: p.default or None for p in found if p.kind is p.POSITIONAL_OR_KEYWORD}


@pytest.mark.parametrize(
    ("function", "names"),
    [
        (sparkdl.run, HOROVOD_RUN),
        (sparkdl.run_elastic, HOROVOD_RUN_ELASTIC),
        (estimator.prepare_data, PREPARE_DATA),
        (estimator.HDFSStore, HDFS_STORE),
        (sparkdl.TorchDistributor, TORCH_DISTRIBUTOR),
    ],
)
def test_functions_take_the_peers_arguments_in_their_order(function, names):
    assert positional(function) == names.split()


@pytest.mark.parametrize("name", STORE.split())
def test_a_store_has_the_methods_of_horovods(name):
    assert hasattr(estimator.Store, name)


@pytest.mark.parametrize("name", [*STORES.split(), "SparkBackend", "prepare_data", "TorchEstimator", "TorchModel"])
def test_horovods_other_names_are_in_one_place(name):
    assert callable(getattr(estimator, name))


@pytest.mark.parametrize("name", ["run", "run_elastic", "HorovodRunner", "TorchDistributor", "log_to_driver", "Store"])
def test_names_of_functions_are_at_the_top(name):
    assert callable(getattr(sparkdl, name))


def test_estimator_and_model_have_the_methods_that_are_no_parameters():
    assert [name for name in MODEL.split() if not hasattr(sparkdl.TorchModel, name)] == []
    assert [name for name in SPARK_ML.split() if not hasattr(sparkdl.TorchEstimator, name)] == []


def test_horovods_own_signatures_are_the_ones_that_were_written_down():
    spark = pytest.importorskip("horovod.spark")
    from horovod.spark.common.store import HDFSStore, Store
    from horovod.spark.common.util import prepare_data

    assert with_defaults(spark.run) == with_defaults(sparkdl.run)
    assert with_defaults(spark.run_elastic) == with_defaults(sparkdl.run_elastic)
    assert with_defaults(prepare_data) == with_defaults(estimator.prepare_data)
    assert positional(HDFSStore) == HDFS_STORE.split()
    theirs = {name for name in dir(Store) if not name.startswith("_")}
    assert theirs - {"to_remote"} <= set(STORE.split()), "which only Horovod's own ranks call"


def test_pysparks_own_signature_is_the_one_that_was_written_down():
    from pyspark.ml.torch.distributor import TorchDistributor

    assert with_defaults(TorchDistributor) == with_defaults(sparkdl.TorchDistributor)
