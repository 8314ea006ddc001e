import functools

import pytest
import torch
import torch.nn.functional as F

from sparkdl.batches.reading.batch import Batch
from sparkdl.collective import open_collective
from sparkdl.config import TrainConfig
from sparkdl.errors import ConfigError
from sparkdl.estimator.horovod.adapters import (
    LikeOutput,
    MinibatchStep,
    adapted_loss,
    adapted_metrics,
    inputs_by_position,
)
from sparkdl.estimator.model_call import ModelCall, ModelInput
from sparkdl.train.in_memory import TensorSource
from sparkdl.train.objective.loss import Objective
from sparkdl.train.objective.metrics import MetricSet
from sparkdl.train.objective.named_metrics import NamedMetric
from sparkdl.train.task import Task
from sparkdl.train.trainer import fit
from sparkdl.world import SOLO


def data(rows=60):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(rows, 3, generator=generator)
    return {"x": x, "y": x.sum(1), "w": torch.rand(rows, generator=generator)}


def trained(task_of, **config):
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1)
    task = task_of(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    source = TensorSource(data(), global_batch_rows=16)
    fit(task, source, collective=open_collective(SOLO), config=TrainConfig(epochs=2, **config))
    return model.weight.detach().clone()


def horovods_minibatch(model, optimizer, transform_outputs, loss_fn, inputs, labels, sample_weights):
    optimizer.zero_grad()
    outputs = model(*inputs)
    outputs, labels = transform_outputs(outputs, labels)
    loss = loss_fn(outputs, labels, sample_weights)
    loss.backward()
    optimizer.step()
    return outputs, loss


def step_task(model, optimizer, function=horovods_minibatch, weight=None):
    call = ModelCall((ModelInput("x", "x"),))
    step = MinibatchStep(function, call, ("y",), weight)
    return Task(
        model=model,
        optimizer=optimizer,
        loss=F.mse_loss,
        inputs=("x",),
        labels=("y",),
        sample_weight=weight,
        manual_step=step,
        forward=step.forward,
    )


@pytest.mark.parametrize("config", [{}, {"max_grad_norm": 0.5}])
def test_horovods_minibatch_function_trains_as_the_loop_does(config):
    plain = trained(
        lambda m, o: Task(model=m, optimizer=o, loss=torch.nn.MSELoss(), inputs=("x",), labels=("y",)), **config
    )
    assert torch.allclose(trained(step_task, **config), plain, atol=1e-7)


def test_sample_weights_reach_the_function_and_change_the_model():
    assert not torch.allclose(trained(lambda m, o: step_task(m, o, weight="w")), trained(step_task))


def test_a_function_that_returns_no_pair_is_refused():
    with pytest.raises(ConfigError, match="must return \\(outputs, loss\\)"):
        trained(lambda m, o: step_task(m, o, function=lambda *a: None))


def test_a_label_column_meets_a_users_loss_in_the_shape_of_the_output():
    output, label = torch.zeros(4, 1), torch.arange(4.0)
    seen = []
    adapted_loss(lambda o, y: seen.append((o.shape, y.shape)))(output, label)
    assert seen == [((4, 1), (4, 1))]
    classes = torch.tensor([0, 1])
    loss = adapted_loss(lambda o, y: F.nll_loss(o, y.long()))
    assert loss(torch.log(torch.tensor([[0.5, 0.5], [0.5, 0.5]])), classes).item() == pytest.approx(0.6931, abs=1e-4)


def test_torchs_own_losses_and_classes_are_left_to_the_loop():
    module = torch.nn.CrossEntropyLoss()
    assert adapted_loss(module) is module
    assert adapted_loss(F.mse_loss) is F.mse_loss
    assert adapted_loss(torch.nn.MSELoss) is torch.nn.MSELoss


def test_a_class_derived_from_one_of_torchs_takes_its_labels_as_that_one_does():
    """Class numbers come as doubles from Spark."""
    loss = type("Derived", (torch.nn.CrossEntropyLoss,), {})()
    batch = Batch({"y": torch.tensor([0.0, 1.0])}, step=0, epoch=0, rows=2, global_rows=2)
    assert objective_of(loss)(torch.zeros(2, 2), batch).item() == pytest.approx(0.6931, abs=1e-4)
    own = type("Own", (torch.nn.CrossEntropyLoss,), {"forward": lambda self, output, label: output.sum() + label.sum()})
    assert isinstance(adapted_loss(own()), LikeOutput)


class Squares(torch.nn.Module):
    """A loss of a user's own, with a number to compare with."""

    def __init__(self, scale=1.0, trained=False):
        super().__init__()
        self.register_buffer("origin", torch.zeros(1))
        self.scale = torch.nn.Parameter(torch.tensor(scale), requires_grad=trained)

    def forward(self, output, label):
        return (self.scale * (output - label + self.origin) ** 2).mean()


def objective_of(loss, parts=1, **settings):
    task = Task(
        model=torch.nn.Linear(3, 1),
        optimizer=torch.optim.SGD,
        loss=adapted_loss(loss),
        inputs=("x",),
        labels=("y",),
        **settings,
    )
    return Objective(task, torch.device("cpu"), parts, lambda total: total)


@pytest.mark.parametrize(
    "loss",
    [Squares(), Squares, functools.partial(Squares, scale=1.0), lambda: Squares(), lambda: torch.nn.MSELoss()],
    ids=["module", "class", "partial of a class", "function that makes it", "function that makes one of torch's"],
)
def test_a_label_column_meets_the_loss_that_a_class_or_a_function_makes(loss):
    """Against (rows, 1) a label of (rows,) would be broadcast: the loss would be 2.5 here."""
    batch = Batch({"y": torch.arange(4.0)}, step=0, epoch=0, rows=4, global_rows=4)
    assert objective_of(loss)(torch.arange(4.0)[:, None], batch).item() == 0


@pytest.mark.parametrize(
    "loss",
    [
        torch.nn.KLDivLoss(reduction="sum"),
        torch.nn.SoftMarginLoss(reduction="sum"),
        functools.partial(F.kl_div, reduction="sum"),
        type("Derived", (torch.nn.MSELoss,), {})(reduction="sum"),
    ],
)
def test_a_sum_over_rows_is_the_same_on_two_ranks_as_on_one(loss):
    generator = torch.Generator().manual_seed(2)
    output, label = (torch.rand(6, 3, generator=generator) for _ in range(2))
    shares = []
    for rows in (slice(0, 2), slice(2, 6)):
        count = rows.stop - rows.start
        batch = Batch({"y": label[rows]}, step=0, epoch=0, rows=count, global_rows=6, weight=count * 2 / 6)
        shares.append(objective_of(loss, parts=2)(output[rows], batch))
    assert torch.stack(shares).mean().item() == pytest.approx(loss(output, label).item(), rel=1e-5)


@pytest.mark.parametrize("loss", [torch.nn.SoftMarginLoss, type("Derived", (torch.nn.MSELoss,), {})])
def test_sample_weights_go_with_losses_of_torch_that_meet_the_label_in_the_shape_of_the_output(loss):
    output, label, weights = torch.rand(4, 1), torch.ones(4), torch.tensor([0.0, 1.0, 2.0, 3.0])
    batch = Batch({"y": label, "w": weights}, step=0, epoch=0, rows=4, global_rows=4)
    expected = (weights * loss(reduction="none")(output[:, 0], label)).sum() / weights.sum()
    assert objective_of(loss(), sample_weight="w")(output, batch).item() == pytest.approx(expected.item(), rel=1e-5)


def test_what_is_refused_of_a_loss_is_refused_inside_of_it_and_its_tensors_go_to_the_device():
    with pytest.raises(ConfigError, match="the loss Squares has parameters of its own"):
        objective_of(Squares(trained=True))
    with pytest.raises(ConfigError, match="GaussianNLLLoss takes"):
        objective_of(torch.nn.GaussianNLLLoss())
    loss = Squares()
    task = Task(
        model=torch.nn.Linear(3, 1), optimizer=torch.optim.SGD, loss=adapted_loss(loss), inputs=("x",), labels=("y",)
    )
    Objective(task, torch.device("meta"), 1, lambda total: total)
    assert loss.origin.device.type == "meta"


def test_a_users_loss_keeps_its_reduction_for_sample_weights():
    def loss(output, label, reduction="mean"):
        return F.l1_loss(output, label, reduction=reduction)

    model = torch.nn.Linear(3, 1)
    task = Task(
        model=model, optimizer=torch.optim.SGD, loss=adapted_loss(loss), inputs=("x",), labels=("y",), sample_weight="w"
    )
    batch = next(iter(TensorSource(data(), global_batch_rows=60)))
    objective = Objective(task, torch.device("cpu"), 1, lambda t: t)
    output = model(batch["x"])
    expected = ((output[:, 0] - batch["y"]).abs() * batch["w"]).sum() / batch["w"].sum()
    assert objective(output, batch).item() == pytest.approx(expected.item(), rel=1e-5)


def test_a_function_that_makes_a_metric_is_called_in_a_list_as_in_a_dict():
    torchmetrics = pytest.importorskip("torchmetrics")
    made = adapted_metrics([lambda: torchmetrics.R2Score()], ["y"], [torch.nn.MSELoss()])["metric"]
    assert isinstance(made, torchmetrics.R2Score)


@pytest.mark.parametrize("form", [lambda mae: [mae], lambda mae: {"mae": mae}, lambda mae: {"y": {"mae": mae}}])
def test_a_label_meets_a_metric_in_the_shape_of_the_output_in_a_list_as_in_a_dict(form):
    def mae(output, label):
        return (output - label).abs().mean()

    output, label = torch.rand(6, 1, 2), torch.rand(6, 2)
    metrics = MetricSet(adapted_metrics(form(mae), ["y"], [F.l1_loss]), ["y"], torch.device("cpu"))
    metrics.update(output, Batch({"y": label}, step=0, epoch=0, rows=6, global_rows=6))
    assert metrics.compute(None, 1) == {"mae": pytest.approx(F.l1_loss(output[:, 0], label).item())}


def test_horovods_groups_of_metrics_become_named_ones():
    def mae(output, label):
        return (output - label).abs().mean()

    assert list(adapted_metrics([mae], ["y"], [F.mse_loss])) == ["mae"]
    by_label = adapted_metrics([[mae], [mae, F.mse_loss]], ["a", "b"], [F.mse_loss] * 2)
    assert list(by_label["a"]) == ["mae", "mae_2"]
    assert list(by_label["b"]) == ["mae", "mse_loss"]
    assert isinstance(by_label["a"]["mae"], LikeOutput)
    assert adapted_metrics(None, ["y"], [F.mse_loss]) == {}
    with pytest.raises(ConfigError, match="one, or one a label"):
        adapted_metrics([[mae, mae]], ["a", "b", "c"], [F.mse_loss] * 3)
    with pytest.raises(ConfigError, match="metrics holds 5, a int: give names, torchmetrics objects"):
        adapted_metrics([5], ["y"], [F.mse_loss])


def test_names_become_metrics_that_fit_each_labels_loss():
    losses = [torch.nn.MSELoss(), torch.nn.BCEWithLogitsLoss()]
    found = adapted_metrics([["rmse", "auc"], [F.l1_loss, "f1"]], ["a", "b"], losses)
    assert {label: list(group) for label, group in found.items()} == {"a": ["rmse", "l1_loss"], "b": ["auc", "f1"]}
    assert found["b"]["auc"] == NamedMetric("auc", "logit", "sigmoid")
    assert list(adapted_metrics("rmse", ["a"], losses[:1])) == ["rmse"]
    assert adapted_metrics({"error": "rmse"}, ["a"], losses[:1]) == {"error": found["a"]["rmse"]}
    assert adapted_metrics({"b": {"area": "auc"}}, ["a", "b"], losses) == {"b": {"area": found["b"]["auc"]}}
    with pytest.raises(ConfigError, match="'auc' of 'a' does not fit outputs of MSELoss, which are values: choose one"):
        adapted_metrics(["auc"], ["a", "b"], losses)


class Named(torch.nn.Module):
    def forward(self, b, a, ids_mask=None):
        return a - 2 * b if ids_mask is None else a - 2 * b * ids_mask


class KeywordOnly(torch.nn.Module):
    def forward(self, b, *, a):
        return a - 2 * b


def test_a_minibatch_function_gets_inputs_that_go_by_name_in_the_order_of_forward():
    call = ModelCall((ModelInput("a", "a"), ModelInput("b", "b")), "keywords")
    step = MinibatchStep(horovods_minibatch, call, ("y",), order=inputs_by_position(Named(), call))
    batch = {"a": torch.tensor([5.0]), "b": torch.tensor([1.0])}
    assert step.forward(Named(), batch).tolist() == Named()(**batch).tolist() == [3.0]


def test_a_minibatch_function_gets_the_mask_that_stands_beside_an_input():
    call = ModelCall(
        (ModelInput("b", "b"), ModelInput("a", "a"), ModelInput("ids_mask", "m", form="mask", valid="m")), "keywords"
    )
    step = MinibatchStep(horovods_minibatch, call, ("y",), order=inputs_by_position(Named(), call))
    batch = {"a": torch.tensor([[5.0]]), "b": torch.tensor([[1.0]]), "m": torch.tensor([[False]])}
    assert step.forward(Named(), batch).tolist() == [[5.0]]


def test_a_model_that_takes_one_dict_gets_it_as_the_only_input_of_a_minibatch_function():
    class Sum(torch.nn.Module):
        def forward(self, row):
            return row["a"] + row["b"]

    call = ModelCall((ModelInput("a", "a"), ModelInput("b", "b")), "dict")
    step = MinibatchStep(horovods_minibatch, call, ("y",), order=inputs_by_position(Sum(), call))
    assert step.forward(Sum(), {"a": torch.tensor([5.0]), "b": torch.tensor([1.0])}).tolist() == [6.0]


def test_what_a_minibatch_function_could_not_hand_over_by_position_is_refused_by_name():
    class Any(torch.nn.Module):
        def forward(self, *args, x_mask=None):
            return args[0]

    call = ModelCall((ModelInput("a", "a"), ModelInput("b", "b")), "keywords")
    with pytest.raises(ConfigError, match=r"forward of KeywordOnly takes \['a'\] by keyword, not among its first 2"):
        inputs_by_position(KeywordOnly(), call)
    masked = ModelCall((ModelInput("x", "x"), ModelInput("x_mask", "x", form="mask", valid="v")))
    with pytest.raises(ConfigError, match="x_mask"):  # which would otherwise be left out without a word
        inputs_by_position(Any(), masked)
