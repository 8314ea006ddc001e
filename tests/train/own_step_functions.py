"""Training functions as users of Horovod write them, and the plain process that runs one on whole global batches."""

from __future__ import annotations

import functools
import sys

import cloudpickle
import torch
import torch.nn.functional as F
from train_helpers import linear_data

from sparkdl.config import TrainConfig
from sparkdl.estimator.horovod.adapters import MinibatchStep
from sparkdl.estimator.model_call import ModelCall, ModelInput
from sparkdl.train.in_memory import TensorSource
from sparkdl.train.task import Task
from sparkdl.train.trainer import fit
from sparkdl.world import SOLO

cloudpickle.register_pickle_by_value(sys.modules[__name__])


def horovods_own(model, optimizer, transform_outputs, loss_fn, inputs, labels, weights, passes, batch_idx):
    """The default of horovod.spark.torch 0.28.1, word for word: it steps at the beginning of the next batch."""
    if batch_idx % passes == 0:
        if batch_idx != 0:
            optimizer.step()
        optimizer.zero_grad()
    outputs = model(*inputs)
    outputs, labels = transform_outputs(outputs, labels)
    loss = loss_fn(outputs, labels, weights)
    if passes > 1:
        loss.div_(float(passes))
    loss.backward()
    return outputs, loss


def own_loss(model, optimizer, transform_outputs, loss_fn, inputs, labels, weights):
    optimizer.zero_grad()
    outputs = model(*inputs)
    loss = F.mse_loss(outputs[:, 0], labels[0]) + 1e-3 * model[0].weight.square().sum()
    loss.backward()
    optimizer.step()
    return outputs, loss


def clipping(model, optimizer, transform_outputs, loss_fn, inputs, labels, weights):
    optimizer.zero_grad()
    outputs, labels = transform_outputs(model(*inputs), labels)
    loss = loss_fn(outputs, labels, weights)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    return outputs, loss


def clipping_as_horovod_says(model, optimizer, transform_outputs, loss_fn, inputs, labels, weights):
    optimizer.zero_grad()
    outputs, labels = transform_outputs(model(*inputs), labels)
    loss = loss_fn(outputs, labels, weights)
    loss.backward()
    optimizer.synchronize()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    with optimizer.skip_synchronize():
        optimizer.step()
    return outputs, loss


def own_rate(model, optimizer, transform_outputs, loss_fn, inputs, labels, weights, passes, batch_idx):
    for group in optimizer.param_groups:
        group["lr"] = 0.03 / (1 + batch_idx)
    return own_loss(model, optimizer, transform_outputs, loss_fn, inputs, labels, weights)


def two_steps(model, optimizer, transform_outputs, loss_fn, inputs, labels, weights):
    own_loss(model, optimizer, transform_outputs, loss_fn, inputs, labels, weights)
    return clipping(model, optimizer, transform_outputs, loss_fn, inputs, labels, weights)


def two_passes(model, optimizer, transform_outputs, loss_fn, inputs, labels, weights):
    """Two backward passes add to one gradient."""
    optimizer.zero_grad()
    outputs = model(*inputs)
    first = F.mse_loss(outputs[:, 0], labels[0])
    first.backward(retain_graph=True)
    second = F.l1_loss(outputs[:, 0], labels[0])
    second.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.2)
    optimizer.step()
    return outputs, first + second


def gradients_by_hand(model, optimizer, transform_outputs, loss_fn, inputs, labels, weights):
    outputs = model(*inputs)
    loss = F.mse_loss(outputs[:, 0], labels[0])
    parameters = list(model.parameters())
    for parameter, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
        parameter.grad = gradient
    optimizer.step()
    return outputs, loss


def with_closure(model, optimizer, transform_outputs, loss_fn, inputs, labels, weights):
    def closure():
        optimizer.zero_grad()
        loss = F.mse_loss(model(*inputs)[:, 0], labels[0])
        loss.backward()
        return loss

    optimizer.step(closure)
    outputs = model(*inputs)
    return outputs, F.mse_loss(outputs[:, 0], labels[0])


def mlp(outputs=1):
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Linear(5, 8), torch.nn.Tanh(), torch.nn.Linear(8, outputs)).double()


ADAM = functools.partial(torch.optim.Adam, lr=1e-2)
SGD = functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9)
LBFGS = functools.partial(torch.optim.LBFGS, lr=0.5, max_iter=3, line_search_fn="strong_wolfe")
FUNCTIONS = {
    "horovod's own": (horovods_own, {}),
    "horovod's own, two passes": (horovods_own, {"passes": 2}),
    "horovod's own, three passes, sample weights": (horovods_own, {"passes": 3, "weight": "w"}),
    "horovod's own, ignored labels": (horovods_own, {"loss": torch.nn.CrossEntropyLoss(), "label": "k"}),
    "own loss": (own_loss, {}),
    "clipping": (clipping, {"optimizer": SGD}),
    "clipping as horovod says": (clipping_as_horovod_says, {"optimizer": SGD}),
    "own rate": (own_rate, {"optimizer": SGD}),
    "two steps": (two_steps, {}),
    "two passes": (two_passes, {"optimizer": SGD}),
    "gradients by hand": (gradients_by_hand, {"optimizer": SGD}),
    "closure": (with_closure, {"optimizer": LBFGS}),
}


def data():
    linear, generator = linear_data(torch.float64)
    classes = (linear["y"] > 0.5).long() + (linear["y"] > 1.5).long()
    classes[torch.rand(103, generator=generator) < 0.4] = -100
    classes[-5:] = -100
    return linear | {"k": classes, "w": torch.rand(103, generator=generator, dtype=torch.float64)}


def task_of(function, *, optimizer=ADAM, loss=None, label="y", weight=None, passes=1, **more):
    step = MinibatchStep(function, ModelCall((ModelInput("x", "x"),)), (label,), weight, passes)
    model = mlp(3 if label == "k" else 1)
    return Task(
        model=model,
        optimizer=optimizer(model.parameters()),
        loss=loss or torch.nn.MSELoss(),
        inputs=("x",),
        labels=(label,),
        sample_weight=weight,
        manual_step=step,
        forward=step.forward,
        **more,
    )


def trained(name, collective, *, callbacks=(), checkpoints=None, **settings):
    """The model and the result of ``fit``, on the ranks of ``collective``."""
    function, options = FUNCTIONS[name]
    rows = {"global_batch_rows": 17, "world": collective.world}
    held_out = TensorSource({n: t[:50] for n, t in data().items()}, shuffle=False, **rows)
    return fit(
        task_of(function, **options),
        TensorSource(data(), **rows),
        held_out,
        collective=collective,
        config=TrainConfig(**{"epochs": 2} | settings),
        callbacks=callbacks,
        checkpoints=checkpoints,
    )


class Plain:
    """A plain optimizer with the two names that some functions of Horovod's users call."""

    def __init__(self, optimizer):
        optimizer.synchronize = lambda: None
        optimizer.skip_synchronize = lambda: torch.enable_grad()


def by_hand(name, epochs=2):
    """The same function with a plain optimizer on whole global batches, and the loop of Horovod's estimator around."""
    function, options = FUNCTIONS[name]
    options = {"optimizer": ADAM, "loss": None, "label": "y", "weight": None, "passes": 1} | options
    model = mlp(3 if options["label"] == "k" else 1)
    optimizer = options["optimizer"](model.parameters())
    Plain(optimizer)
    source = TensorSource(data(), global_batch_rows=17, world=SOLO)

    def transform_outputs(outputs, labels):
        return [outputs], [y.reshape(outputs.shape) if y.numel() == outputs.numel() else y for y in labels]

    def loss_fn(outputs, labels, weights=None):
        if options["loss"] is not None:
            counted = (labels[0] != -100).sum()
            return F.cross_entropy(outputs[0], labels[0], reduction="sum") / max(counted, 1)
        rows = (outputs[0] - labels[0]).square().reshape(-1)
        return rows.mean() if weights is None else (rows * weights).sum() / weights.double().sum()

    for epoch in range(epochs):
        source.set_epoch(epoch)
        for batch in source:
            weights = batch[options["weight"]].float() if options["weight"] else None
            given = [model, optimizer, transform_outputs, loss_fn, [batch["x"]], [batch[options["label"]]], weights]
            given += [options["passes"], batch.step]
            function(*given[: function.__code__.co_argcount])
        if function is horovods_own:
            optimizer.step()
    return model
