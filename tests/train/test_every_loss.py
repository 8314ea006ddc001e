"""Every loss of torch: N ranks with unequal parts of a batch compute what torch computes on the whole, or refuse it."""

from __future__ import annotations

import copy
import functools
import itertools
import threading

import pytest
import torch
import torch.nn.functional as F
from torch.nn.modules import loss as losses

from sparkdl.batches.reading.batch import Batch
from sparkdl.errors import ConfigError
from sparkdl.train.in_memory import TensorSource
from sparkdl.train.objective.loss import Objective
from sparkdl.train.task import Task

pytestmark = pytest.mark.filterwarnings("ignore:`NLLLoss2d`", "ignore:reduction. 'mean' divides")

ROWS = 11
DOUBLE = {"dtype": torch.float64}
CLASS_WEIGHTS = torch.tensor([1.0, 3.0, 0.5], **DOUBLE)
REFUSED = {
    "GaussianNLLLoss": "takes \\(input, target, var\\)",
    "CosineEmbeddingLoss": "takes \\(input1, input2, target\\)",
    "MarginRankingLoss": "takes \\(input1, input2, target\\)",
    "TripletMarginLoss": "takes \\(anchor, positive, negative\\)",
    "TripletMarginWithDistanceLoss": "takes \\(anchor, positive, negative\\)",
    "CTCLoss": "takes \\(log_probs, targets, input_lengths, target_lengths\\)",
    "LinearCrossEntropyLoss": "has parameters of its own",
}


def log_softmax(outputs):
    return outputs.log_softmax(1)


def drawn(kind):
    """Outputs' shape of one row, what is done to outputs, and labels of all rows."""
    generator = torch.Generator().manual_seed(5)
    classes = torch.randint(0, 3, (ROWS,), generator=generator)
    pixels = torch.randint(0, 3, (ROWS, 4), generator=generator)
    shape = (ROWS, 3)
    return {
        "numbers": ((3,), None, torch.rand(shape, generator=generator, **DOUBLE)),
        "probabilities": ((3,), torch.sigmoid, torch.rand(shape, generator=generator, **DOUBLE)),
        "distributions": (
            (3,),
            log_softmax,
            torch.rand(shape, generator=generator, **DOUBLE).softmax(1),
        ),
        "signs": ((3,), None, torch.randint(0, 2, shape, generator=generator).double() * 2 - 1),
        "bits": ((3,), None, torch.randint(0, 2, shape, generator=generator).double()),
        "label sets": ((3,), None, torch.tensor([[0, -1, -1], [2, 1, -1], [1, -1, 0]])[classes]),
        "classes": ((3,), None, classes),
        "log classes": ((3,), log_softmax, classes),
        "pixels": ((3, 4), None, pixels),
        "log pixels": ((3, 4), log_softmax, pixels),
    }[kind]


def some_ignored(labels, value=-100, all_of=()):
    """Every third label ignored, and all of some rows."""
    labels = labels.clone()
    labels.view(-1)[::3] = value
    for row in all_of:
        labels[row] = value
    return labels


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def exact_cases():
    plain = {
        "L1Loss": "numbers", "MSELoss": "numbers", "SmoothL1Loss": "numbers", "HuberLoss": "numbers",
        "PoissonNLLLoss": "numbers", "BCELoss": "probabilities", "BCEWithLogitsLoss": "bits",
        "HingeEmbeddingLoss": "signs", "SoftMarginLoss": "signs", "MultiLabelSoftMarginLoss": "bits",
        "MultiLabelMarginLoss": "label sets", "MultiMarginLoss": "classes", "CrossEntropyLoss": "classes",
        "NLLLoss": "log classes", "NLLLoss2d": "log pixels", "KLDivLoss": "distributions",
    }  # fmt: skip
    found = {name: (getattr(losses, name)(), kind) for name, kind in plain.items()}
    found |= {f"{name}, sum": (getattr(losses, name)(reduction="sum"), kind) for name, kind in plain.items()}
    weighted = {"weight": CLASS_WEIGHTS}
    found |= {
        "KLDivLoss, batchmean": (losses.KLDivLoss(reduction="batchmean"), "distributions"),
        "BCEWithLogitsLoss, pos_weight": (losses.BCEWithLogitsLoss(**weighted, pos_weight=CLASS_WEIGHTS), "bits"),
        "MultiMarginLoss, weight": (losses.MultiMarginLoss(**weighted), "classes"),
        "MultiLabelSoftMarginLoss, weight": (losses.MultiLabelSoftMarginLoss(**weighted), "bits"),
        "CrossEntropyLoss over distributions": (losses.CrossEntropyLoss(**weighted), "distributions"),
        "F.cross_entropy": (F.cross_entropy, "classes"),
        "F.mse_loss": (F.mse_loss, "numbers"),
    }
    for options in ({}, weighted, {"label_smoothing": 0.1}, weighted | {"label_smoothing": 0.2}):
        for kind in ("classes", "pixels"):
            for ignored in (None, -100, 1):
                chosen = options if ignored is None else options | {"ignore_index": ignored}
                name = f"CrossEntropyLoss of {kind}, {', '.join(options) or 'plain'}, {ignored} ignored"
                found[name] = (losses.CrossEntropyLoss(**chosen), kind, ignored)
    for ignored in (-100, 2):
        found[f"NLLLoss, {ignored} ignored"] = losses.NLLLoss(**weighted, ignore_index=ignored), "log pixels", ignored
        partial = functools.partial(F.cross_entropy, ignore_index=ignored, weight=CLASS_WEIGHTS)
        found[f"F.cross_entropy, {ignored} ignored"] = partial, "classes", ignored
    derived = type("Derived", (losses.CrossEntropyLoss,), {})
    found["derived from CrossEntropyLoss"] = derived(**weighted, ignore_index=1), "classes", 1
    return {name: (*case, None)[:3] for name, case in found.items()}


CASES = exact_cases()


class Sum:
    """Adds up what the threads of all ranks bring, as an all-reduce does."""

    def __init__(self, size):
        self.values, self.barrier = [None] * size, threading.Barrier(size, timeout=20)

    def __call__(self, rank, tensor):
        self.values[rank] = tensor
        self.barrier.wait()
        total = sum(self.values)
        self.barrier.wait()
        return total


def model_for(shape):
    torch.manual_seed(0)
    features = int(torch.tensor(shape).prod())
    return torch.nn.Sequential(torch.nn.Linear(5, features), torch.nn.Unflatten(1, shape)).double()


def of_ranks(model, loss, tensors, shares, change):
    """Loss of the global batch and the mean gradient, each rank in a thread of its own with ``shares`` of the rows."""
    size, reduce = len(shares), Sum(len(shares))
    ends = torch.tensor([0, *shares]).cumsum(0).tolist()
    source = TensorSource(tensors, global_batch_rows=ROWS)
    found, errors = [None] * size, []

    def rank(index):
        own = copy.deepcopy(model)
        task = Task(model=own, optimizer=torch.optim.SGD, loss=copy.deepcopy(loss), inputs=("x",), labels=("y",))
        task = (
            task
            if "w" not in tensors
            else Task(**{f: getattr(task, f) for f in task.__slots__} | {"sample_weight": "w"})
        )
        objective = Objective(task, torch.device("cpu"), size, lambda t: reduce(index, t), source.bounds)
        rows = slice(ends[index], ends[index + 1])
        part = {name: tensor[rows] for name, tensor in tensors.items()}
        batch = Batch(part, step=0, epoch=0, rows=shares[index], global_rows=ROWS, weight=shares[index] * size / ROWS)
        if shares[index]:
            outputs = own(batch["x"])
            value = objective(outputs if change is None else change(outputs), batch)
            value.backward()
        else:
            objective.skip(batch)
            value = torch.zeros(())
        gradients = [p.grad if p.grad is not None else torch.zeros_like(p) for p in own.parameters()]
        found[index] = value.detach().double(), gradients, objective.take_without_divisor()

    def guarded(index):
        try:
            rank(index)
        except BaseException as error:
            errors.append(error)
            reduce.barrier.abort()

    threads = [threading.Thread(target=guarded, args=(index,)) for index in range(size)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    if errors:
        raise errors[0]
    gradients = [sum(parts) / size for parts in zip(*(one[1] for one in found), strict=True)]
    return sum(one[0] for one in found) / size, gradients, {one[2] for one in found}


def of_one(model, loss, tensors, change):
    own = copy.deepcopy(model)
    outputs = own(tensors["x"])
    value = loss(outputs if change is None else change(outputs), tensors["y"])
    value.backward()
    return value.detach(), [p.grad for p in own.parameters()]


def inputs():
    return torch.randn(ROWS, 5, generator=torch.Generator().manual_seed(1), **DOUBLE)


@pytest.mark.parametrize("shares", [(11,), (7, 4), (11, 0), (2, 8, 1)], ids=str)
@pytest.mark.parametrize("case", list(CASES))
def test_ranks_with_unequal_parts_have_torchs_loss_and_gradient(case, shares):
    loss, kind, ignored = CASES[case]
    shape, change, labels = drawn(kind)
    if ignored is not None:
        labels = some_ignored(labels, ignored, all_of=(10,))  # the last of three ranks has nothing that counts
    tensors = {"x": inputs(), "y": labels}
    model = model_for(shape)
    wanted, gradients = of_one(model, loss, tensors, change)
    found, mean, _ = of_ranks(model, loss, tensors, shares, change)
    torch.testing.assert_close(found, wanted.double(), rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(mean, gradients, rtol=1e-11, atol=1e-14)


@pytest.mark.parametrize("shares", [(11,), (7, 4), (11, 0), (2, 8, 1)], ids=str)
def test_the_validation_loss_of_a_sum_is_a_batch_however_its_rows_are_shared(shares):
    model, ends = model_for((1,)), torch.tensor([0, *shares]).cumsum(0).tolist()
    tensors = {"x": inputs(), "y": inputs()[:, 0]}
    sums = torch.zeros(1, 2, **DOUBLE)
    task = Task(model=model, optimizer=torch.optim.SGD, loss=losses.MSELoss(reduction="sum"), labels=("y",))
    objective = Objective(task, torch.device("cpu"), len(shares), lambda t: t)
    for first, end in itertools.pairwise(ends):
        part = {name: tensor[first:end] for name, tensor in tensors.items()}
        if end > first:
            batch = Batch(part, step=0, epoch=0, rows=end - first, global_rows=ROWS)
            sums += objective.sums(model(part["x"]), batch).detach()
    wanted = losses.MSELoss(reduction="sum")(model(tensors["x"])[:, 0], tensors["y"])
    assert objective.losses(sums)["loss"] == pytest.approx(wanted.item(), rel=1e-12)


def test_every_loss_of_torch_is_exact_or_refused():
    named = {case.split(",")[0] for case in CASES} | set(REFUSED)
    assert set(losses.__all__) <= named


@pytest.mark.parametrize("name", list(REFUSED))
def test_a_loss_that_takes_more_than_output_and_label_is_refused_by_name(name):
    options = {"LinearCrossEntropyLoss": {"in_features": 5, "num_classes": 3}}.get(name, {})
    task = Task(model=model_for((3,)), optimizer=torch.optim.SGD, loss=getattr(losses, name)(**options), labels=("y",))
    with pytest.raises(ConfigError, match=f"the loss {name} {REFUSED[name]}"):
        Objective(task, torch.device("cpu"), 1, lambda t: t)


@pytest.mark.parametrize("shares", [(11,), (7, 4), (2, 8, 1)], ids=str)
@pytest.mark.parametrize("options", [{}, {"weight": CLASS_WEIGHTS}, {"label_smoothing": 0.1}], ids=str)
def test_a_batch_of_ignored_labels_has_no_loss_and_no_gradient_and_is_counted(options, shares):
    tensors = {"x": inputs(), "y": torch.full((ROWS,), -100)}
    model = model_for((3,))
    found, gradients, counts = of_ranks(model, losses.CrossEntropyLoss(**options), tensors, shares, None)
    assert found == 0
    assert all(gradient.abs().max() == 0 for gradient in gradients)
    assert counts == {1}


@pytest.mark.parametrize("shares", [(11,), (2, 8, 1)], ids=str)
@pytest.mark.parametrize("class_weights", [None, CLASS_WEIGHTS], ids=["plain", "class weights"])
def test_sample_weights_class_weights_and_ignored_labels_divide_together(shares, class_weights):
    labels = some_ignored(drawn("classes")[2], all_of=(10,))
    weights = torch.rand(ROWS, generator=torch.Generator().manual_seed(2), **DOUBLE)
    tensors = {"x": inputs(), "y": labels, "w": weights}
    model = model_for((3,))
    loss = losses.CrossEntropyLoss(weight=class_weights)
    found, _, _ = of_ranks(model, loss, tensors, shares, None)
    rows = F.cross_entropy(model(tensors["x"]), labels, reduction="none")
    both = weights * (labels != -100) * (1 if class_weights is None else class_weights[labels.clamp(min=0)])
    wanted = (rows * both).sum() / both.sum()
    torch.testing.assert_close(found, wanted.detach(), rtol=1e-12, atol=0)
    equal, _, _ = of_ranks(model, loss, tensors | {"w": torch.full((ROWS,), 0.3, **DOUBLE)}, shares, None)
    torch.testing.assert_close(equal, loss(model(tensors["x"]), labels).detach(), rtol=1e-12, atol=0)
