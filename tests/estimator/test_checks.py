import functools

import pytest
import torch
import torch.nn.functional as F

from sparkdl.batches.reading.batch import Batch
from sparkdl.columns.spec import TensorSpec
from sparkdl.columns.statistics import ColumnStats
from sparkdl.errors import ConfigError, DataError
from sparkdl.estimator import Store, TorchEstimator
from sparkdl.estimator.checks import (
    check_classes,
    check_loss,
    check_metrics,
    check_rows,
    check_shards,
    check_single_rows,
    check_steps,
    check_values,
)
from sparkdl.estimator.column_plan import Roles
from sparkdl.estimator.fit_spec import resolve
from sparkdl.estimator.horovod.adapters import adapted_metrics
from sparkdl.estimator.model_call import ModelCall, ModelInput, Output, Probe
from sparkdl.estimator.user_code import built, naming_errors
from sparkdl.shards.manifest import Manifest
from sparkdl.train.task import Task

ROLES = Roles(features=("a",), labels=("y",), weight="w")


@pytest.fixture
def spec(tmp_path):
    def make(num_proc=2, **params):
        estimator = TorchEstimator(
            model=torch.nn.Linear(1, 1), optimizer=torch.optim.SGD, loss=torch.nn.MSELoss(), **params
        )
        return resolve(estimator, store=Store.create(str(tmp_path)), num_proc=num_proc)

    return make


def manifest(rows=10, **stats):
    tensors = (TensorSpec(name="y", dtype="int64", columns=("y",)),)
    return Manifest(rows=rows, bytes=1, shards=(), tensors=tensors, statistics=stats)


def test_rows_must_suffice_for_the_ranks_and_for_validation():
    check_rows(manifest(4), manifest(1), num_proc=4, wanted=0.1)
    with pytest.raises(DataError, match="3 training rows cannot be dealt to 4 ranks"):
        check_rows(manifest(3), None, num_proc=4, wanted=None)
    with pytest.raises(DataError, match="has 0 rows"):
        check_rows(manifest(0), None, num_proc=1, wanted=None)
    with pytest.raises(DataError, match=r"validation=0\.1 leaves 0 rows"):
        check_rows(manifest(10), manifest(0), num_proc=1, wanted=0.1)


@pytest.mark.parametrize("column", ["a", "y", "w"])
def test_nan_and_infinity_are_counted_and_refused(column):
    with pytest.raises(DataError, match=f"'{column}' holds 2 NaN and 1 infinite values in 10 rows"):
        check_values(manifest(**{column: ColumnStats(count=7, nan_count=2, inf_count=1)}), ROLES)


@pytest.mark.parametrize(("least", "most"), [(-1, 2), (0, 0)])
def test_weights_below_zero_or_all_zero_are_refused(least, most):
    with pytest.raises(DataError, match="sample weights 'w' lie in"):
        check_values(manifest(w=ColumnStats(count=10, min=least, max=most)), ROLES)


def test_weights_that_float32_takes_for_zero_are_refused():
    check_values(manifest(w=ColumnStats(count=10, min=0, max=1e-37)), ROLES)
    with pytest.raises(DataError, match="sample weights 'w' are 1e-50 at most, which float32 takes for 0"):
        check_values(manifest(w=ColumnStats(count=10, min=0, max=1e-50)), ROLES)


@pytest.mark.parametrize("loss", [torch.nn.CrossEntropyLoss(), F.cross_entropy, torch.nn.NLLLoss()])
@pytest.mark.parametrize(("least", "most"), [(0, 3), (1, 3), (-1, 2)])
def test_classes_beyond_the_outputs_are_refused_with_both_ranges(loss, least, most):
    outputs = [Output("y", (3,), "float32")]
    with pytest.raises(DataError, match=rf"classes {least}\.\.{most}.* over 3 outputs takes 0\.\.2"):
        check_classes(manifest(y=ColumnStats(count=10, min=least, max=most)), outputs, [loss])
    check_classes(manifest(y=ColumnStats(count=10, min=0, max=2)), outputs, [loss])


@pytest.mark.parametrize(
    ("loss", "least", "most"),
    [
        (torch.nn.CrossEntropyLoss(), -100, 2),
        (torch.nn.CrossEntropyLoss(ignore_index=255), 0, 255),
        (torch.nn.NLLLoss(ignore_index=3), 3, 3),
        (functools.partial(F.cross_entropy, ignore_index=-1), -1, 2),
        (functools.partial(F.nll_loss, ignore_index=9), 0, 9),
    ],
)
def test_the_ignored_class_may_lie_below_or_above(loss, least, most):
    stats = ColumnStats(count=10, min=least, max=most)
    check_classes(manifest(y=stats), [Output("y", (3,), "float32")], [loss])


def test_binary_targets_lie_in_0_to_1():
    data = manifest(y=ColumnStats(count=10, min=0, max=2))
    with pytest.raises(DataError, match=r"takes 0\.\.1"):
        check_classes(data, [Output("y", (), "float32")], [torch.nn.BCEWithLogitsLoss()])
    with pytest.raises(DataError, match=r"lies in 0\.\.2, and binary_cross_entropy takes 0\.\.1"):
        check_classes(data, [Output("y", (), "float32")], [functools.partial(F.binary_cross_entropy)])


def test_a_loss_that_cannot_be_computed_is_a_config_error():
    outputs = [Output("y", (3,), "float32")]
    with pytest.raises(ConfigError, match=r"the outputs for 'y' \(-1, 3\) float32 .* by label_shapes"):
        check_loss(lambda: torch.ones(2) @ torch.ones(3), outputs)
    with pytest.raises(ConfigError, match=r"the loss raised AttributeError: .*'nope' at .*test_checks.py:\d+, "):
        check_loss(lambda: torch.ones(2).nope(), outputs)


def check_named(metrics, loss, returned, labels):
    batch = Batch({"y": labels}, epoch=0, step=0, rows=2, global_rows=2, weight=1.0)
    task = Task(
        model=torch.nn.Linear(1, 1),
        optimizer=torch.optim.SGD,
        loss=loss,
        inputs=("x",),
        labels=("y",),
        metrics=adapted_metrics(metrics, ["y"], [loss]),
    )
    check_metrics(task, Probe(ModelCall(()), (Output("y", tuple(returned.shape[1:]), "float32"),), batch, returned))


@pytest.mark.parametrize("name", ["accuracy", "auc", "log_loss", "f1"])
def test_several_answers_a_row_are_refused_under_a_name_of_one_before_a_rank_starts(name):
    loss, labels = torch.nn.BCEWithLogitsLoss(), torch.tensor([[0.0, 1.0, 0.0], [1.0, 1.0, 0.0]])
    with pytest.raises(ConfigError, match=rf"metric '{name}' is of one answer a row, and the output has 3"):
        check_named([name], loss, torch.zeros(2, 3), labels)
    check_named([name], loss, torch.zeros(2, 1), labels[:, :1])


def test_a_metric_object_that_does_not_take_the_outputs_is_refused_and_no_function_is_called():
    from torchmetrics.classification import MultilabelAccuracy

    loss, labels = torch.nn.BCEWithLogitsLoss(), torch.tensor([[0.0, 1.0, 0.0], [1.0, 1.0, 0.0]])
    check_named([MultilabelAccuracy(3), lambda *_: 1 / 0], loss, torch.zeros(2, 3), labels)
    with pytest.raises(ConfigError, match=r"^metrics cannot be computed from the outputs for 'y' \(-1, 2\) float32"):
        check_named([MultilabelAccuracy(3)], loss, torch.zeros(2, 2), labels[:, :2])


def test_a_loss_that_raises_by_itself_is_not_blamed_on_shapes():
    def loss():
        raise RuntimeError("not today")

    with pytest.raises(ConfigError, match=r"^the loss raised RuntimeError: not today at .*test_checks.py:\d+, "):
        check_loss(loss, [Output("y", (3,), "float32")])


def test_a_class_that_wants_arguments_is_told_from_one_that_makes_the_model():
    assert isinstance(built(torch.nn.Identity), torch.nn.Identity)
    with pytest.raises(ConfigError, match=r"^model=Linear cannot be made without arguments .*: give the module itself"):
        built(torch.nn.Linear)
    with pytest.raises(ConfigError, match="model is a int: give a torch"):
        built(lambda: 3)


def test_a_function_that_fails_to_make_its_object_is_named_with_its_line():
    def net():
        return torch.nn.Lineer(2, 1)

    with pytest.raises(ConfigError, match=r"^the function given as model raised AttributeError: .*test_checks.py:\d+"):
        built(net)
    told = r"^the function given as loss raised KeyError: 'x' at .*test_checks.py:\d+: correct it there$"
    with pytest.raises(ConfigError, match=told), naming_errors("loss"):
        {}["x"]


def test_more_steps_than_the_rows_give_are_refused():
    check_steps("train_steps_per_epoch", 3, manifest(10), 4)
    with pytest.raises(ConfigError, match="=4 exceeds the 3 steps of 10 rows"):
        check_steps("train_steps_per_epoch", 4, manifest(10), 4)
    with pytest.raises(ConfigError, match="exceeds the 0 steps of 0 rows"):
        check_steps("validation_steps_per_epoch", 1, None, 4)


@pytest.mark.parametrize(
    ("strategy", "steps"),
    [("all_reduce", 7), ("local_sgd", 7), ("fsdp", 7), ("auto", 7), ("tensor", 13), ("pipeline", 13)],
)
def test_steps_are_counted_by_the_ranks_that_read_rows_of_their_own(spec, strategy, steps):
    rows = manifest(400)
    check_shards(spec(strategy=strategy, train_steps_per_epoch=steps), rows, None)
    with pytest.raises(ConfigError, match=f"={steps + 1} exceeds the {steps} steps of 400 rows"):
        check_shards(spec(strategy=strategy, train_steps_per_epoch=steps + 1), rows, None)


NORM, PIXELS = (3,), (3, 4, 4)
SINGLE = {
    "one rank": ({"num_proc": 1, "batch_size": 32}, 65, NORM, "all ranks together"),
    "two ranks": ({"batch_size": 16}, 65, NORM, "all ranks together"),
    "batches of one row": ({"num_proc": 1, "batch_size": 1}, 65, NORM, "all ranks together"),
    "two ranks, each by itself": ({"batch_size": 16, "sync_batch_norm": False}, 66, NORM, "a rank"),
    "local SGD": ({"batch_size": 16, "strategy": "local_sgd"}, 67, NORM, "a rank"),
    "two rows of two ranks": ({"batch_size": 16}, 66, NORM, ""),
    "the epoch ends before": ({"num_proc": 1, "batch_size": 32, "train_steps_per_epoch": 2}, 65, NORM, ""),
    "several values a row": ({"num_proc": 1, "batch_size": 32}, 65, PIXELS, ""),
    "a step of the user's": ({"num_proc": 1, "batch_size": 32, "train_minibatch_fn": print}, 65, NORM, ""),
}


@pytest.mark.parametrize(("given", "rows", "shape", "holder"), SINGLE.values(), ids=SINGLE)
def test_a_step_of_a_single_row_is_refused_for_a_model_with_batch_norm(spec, given, rows, shape, holder):
    x = torch.zeros(2, *shape)
    model = torch.nn.Sequential(torch.nn.BatchNorm2d(3) if shape is PIXELS else torch.nn.BatchNorm1d(3))
    batch = Batch({"x": x}, epoch=0, step=0, rows=2, global_rows=2, weight=1.0)
    probed = Probe(ModelCall((ModelInput("x", "x"),)), (Output("y", shape, "float32"),), batch, x)

    def check():
        check_single_rows(spec(**given), model, probed, manifest(rows))

    if holder:
        sentence = (
            rf"^layer '0' would get one value .* where {rows} rows at batch_size=\d+ leave {holder} a single row,"
        )
        with pytest.raises(ConfigError, match=sentence):
            check()
        assert model.training
        model[0].eval()  # a layer that is frozen needs no variance of the batch
    check()
    assert not model[0]._forward_pre_hooks
