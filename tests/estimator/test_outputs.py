"""Classes, probabilities and raw predictions, as Spark ML's classifiers define them."""

import functools
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from sparkdl.columns.spec import TensorSpec
from sparkdl.errors import ConfigError
from sparkdl.estimator import TorchModel
from sparkdl.estimator.checks import warn_of_own_loss
from sparkdl.estimator.model_call import Output
from sparkdl.estimator.outputs import OutputModule, OutputSpec, check_columns, wanted_columns
from sparkdl.models.signature import Signature, TensorField
from sparkdl.shards.manifest import Manifest
from sparkdl.train.objective.labels import meaning_of


class Focal(nn.BCEWithLogitsLoss):
    pass


@pytest.mark.parametrize(
    ("loss", "meaning"),
    [
        (nn.CrossEntropyLoss(), "classes"),
        (nn.NLLLoss, "classes"),
        (F.cross_entropy, "classes"),
        (nn.BCEWithLogitsLoss(pos_weight=torch.tensor(2.0)), "logit"),
        (functools.partial(F.binary_cross_entropy_with_logits, reduction="sum"), "logit"),
        (Focal(), "logit"),
        (nn.BCELoss(), "probability"),
        (F.binary_cross_entropy, "probability"),
        (nn.MSELoss(), "value"),
        (lambda output, label: F.cross_entropy(output, label), "value"),
    ],
)
def test_the_loss_says_what_an_output_means(loss, meaning):
    assert meaning_of(loss) == meaning


KINDS = ("class", "probability", "raw")


def made(output, meaning):
    module = OutputModule(nn.Identity(), ["y"], [OutputSpec("y", kind, meaning) for kind in KINDS])
    return [one.tolist() for one in module(output)]


@pytest.mark.parametrize("shape", [(3,), (3, 1)])
def test_one_logit_gives_two_classes(shape):
    x = torch.tensor([-2.0, 0.0, 3.0])
    classes, probability, raw = made(x.reshape(shape), "logit")
    p = torch.sigmoid(x.double())
    assert classes == [0.0, 0.0, 1.0]
    assert probability == [pytest.approx([1 - one, one]) for one in p.tolist()]
    assert raw == [[2.0, -2.0], [0.0, 0.0], [-3.0, 3.0]]


def test_one_probability_gives_two_classes_and_finite_log_odds():
    classes, probability, raw = made(torch.tensor([0.0, 0.25, 1.0]), "probability")
    assert classes == [0.0, 0.0, 1.0]
    assert probability == [[1.0, 0.0], [0.75, 0.25], [0.0, 1.0]]
    assert raw[1][1] == pytest.approx(torch.logit(torch.tensor(0.25)).item())
    assert raw[0][1] == -750.0
    assert raw[2][1] == 750.0


def test_logits_and_log_probabilities_give_the_same_probabilities():
    logits = torch.tensor([[1.0, 2.0, 0.5], [0.0, -1.0, 4.0]])
    classes, probability, raw = made(logits, "classes")
    assert classes == [1.0, 2.0]
    assert raw == logits.tolist()
    assert made(F.log_softmax(logits, 1), "classes")[1] == [pytest.approx(row, rel=1e-5) for row in probability]


def params(**named):
    return TorchModel(model=nn.Identity(), **named)


def signature(*shapes):
    inputs = (TensorField(name="x", columns=("x",)),)
    return Signature(inputs=inputs, outputs=tuple(TensorField(name=f"y{i}", shape=s) for i, s in enumerate(shapes)))


def test_columns_that_the_loss_forbids_are_refused_by_the_loss_alone():
    with pytest.raises(ConfigError, match="probabilityCol wants a vector of classes, and the loss does not say"):
        check_columns(params(probabilityCol="p"), {"y0": "value"})
    with pytest.raises(ConfigError, match=r"predictionCol names one output of 2"):
        check_columns(params(predictionCol="p"), {"y0": "value", "y1": "logit"})
    check_columns(params(predictionCol="p"), {"y0": "value"})


def test_columns_that_the_outputs_shape_forbids_are_refused():
    with pytest.raises(ConfigError, match=r"rawPredictionCol wants a vector .*, 'y0' gives \(4,\)"):
        wanted_columns(params(rawPredictionCol="r"), signature((4,)), {"y0": "logit"})
    found = wanted_columns(params(predictionCol="p"), signature((4,)), {"y0": "logit"})
    assert found[0].output == OutputSpec("y0")
    found = wanted_columns(params(predictionCol="p"), signature((4,)), {"y0": "value"})
    assert found[0].output.kind == "output"


@pytest.mark.parametrize(
    ("shape", "dtype", "meaning", "told"),
    [
        ((3,), "int64", "value", True),
        ((3,), "int64", "classes", False),
        ((3,), "float32", "value", False),
        ((1,), "int64", "value", False),
    ],
)
def test_the_log_says_that_a_loss_of_ones_own_gives_no_class(shape, dtype, meaning, told, caplog):
    train = Manifest(rows=1, bytes=0, shards=(), tensors=(TensorSpec(name="y", dtype=dtype, columns=("y",)),))
    found = SimpleNamespace(outputs=(Output("y", shape, "float32"),))
    with caplog.at_level("WARNING", logger="sparkdl"):
        warn_of_own_loss(params(predictionCol="p"), found, {"y": meaning}, train)
        warn_of_own_loss(params(), found, {"y": meaning}, train)
    assert len(caplog.records) == told
    assert ("predictionCol='p' will hold the 3 numbers of the output, no class" in caplog.text) == told
