"""A model spread over the ranks of a run, for a training loop of one's own; it knows nothing of Spark."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any, Literal

import torch

from sparkdl.batches.reading.batch import Batch
from sparkdl.collective import open_collective
from sparkdl.config import TrainConfig
from sparkdl.errors import ConfigError
from sparkdl.strategies.base import TaskView, open_strategy
from sparkdl.strategies.choice import Choice, needs_torch_groups
from sparkdl.train.checkpoint import rng
from sparkdl.train.objective.batch_loss import BatchLoss, autocast_of
from sparkdl.train.objective.loss import Objective
from sparkdl.train.source import BatchLike, Placement
from sparkdl.train.task import Task, make_model, make_optimizer
from sparkdl.world import World


class SpreadModel:
    """A model spread over the ranks of a run, for a training loop of your own.

    Every rank makes one and calls the same methods in the same order, with its own part of each global batch; the
    weights are those that one rank would train. ``run_on_dataframe(fn, df, strategy=...)`` calls
    ``fn(loader, model, ...)`` with one that is open, and with a loader of the right rows. Within ``sparkdl.run``, under
    torchrun or in a process alone one makes it oneself, and closes it, or uses it in a ``with`` block.

    Args:
        strategy: as of ``TorchEstimator``: ``"all_reduce"``, ``"fsdp"``, ``"mesh(data=2, pipeline=2)"``, a ``Mesh``.
        backend: ``"auto"``, ``"torch"`` or, with ``"all_reduce"``, ``"horovod"``. A group that is open is joined.
        precision: ``"fp32"``, or ``"bf16"`` autocast.
        seed: of the initial weights, where a callable makes the model, and of dropout.

    Attributes:
        reader: a ``World`` that says which rows this rank reads: give it to ``ShardedDataset.loader(world=...)``, or
            deal rows by its ``rank`` and ``size``. Ranks of one tensor group or pipeline read the same.
        optimizer: the one that ``step`` steps, once it is built; a scheduler may be made of it.
        module: what this rank holds of the model, once it is built. With ``tensor`` the optimizer steps plain tensors,
            the parts of its parameters, which have the gradients behind ``backward``: a parameter's own ``grad`` is
            None then.

    Raises:
        ConfigError: the strategy is unknown, the ranks do not fill it, or the backend does not carry it.

    Example:
        >>> def train(loader, model):
        ...     model.build(lambda: torch.nn.Linear(4, 1), torch.optim.Adam, torch.nn.MSELoss())
        ...     for _ in range(3):
        ...         for batch in loader:
        ...             loss = model.step(batch)
        ...     return loss.item(), model.state_dict()
        >>> run_on_dataframe(train, df, labels=["label"], strategy="fsdp")
    """

    optimizer: torch.optim.Optimizer
    module: torch.nn.Module

    def __init__(
        self,
        strategy: str | Choice = "all_reduce",
        *,
        backend: str = "auto",
        precision: str = "fp32",
        seed: int = 0,
    ) -> None:
        if precision == "fp16":
            raise ConfigError("precision='fp16' needs a scaler around each step: choose 'bf16', or TorchEstimator")
        world = World.from_env()
        if backend == "auto" and world.size > 1 and needs_torch_groups(str(strategy)):
            backend = "torch"
        self._config = TrainConfig(precision=precision, seed=seed)
        self._device = torch.device(world.device)
        self._collective = open_collective(world, backend=backend)
        self._is_open = True
        try:
            self._strategy = open_strategy(strategy, self._collective, self._config)
        except BaseException:
            self._collective.close(failed=True)
            raise
        self.reader = replace(world, rank=self._strategy.data_rank, size=self._strategy.data_size)

    def build(
        self,
        model: torch.nn.Module | Callable[[], torch.nn.Module],
        optimizer: Any,
        loss: Any,
        *,
        inputs: Sequence[str] = ("features",),
        labels: Sequence[str] = ("label",),
        input_style: Literal["positional", "keyword", "dict"] = "positional",
        sample_weight: str | None = None,
        example: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        """Make the model, cut it, and make the optimizer of this rank's part.

        Args:
            model: what makes it, the same on every rank. A module itself is cut in place, and cannot be built again.
            optimizer: an optimizer class, a ``functools.partial`` of one, any callable that is given the model, or an
                optimizer over the parameters of ``model``.
            loss: ``loss(output, label)``, the mean over the rows, or one value a row; one a label.
            inputs: names of the tensors that the model is called with.
            labels: names of the tensors that its outputs are compared with.
            input_style: how the model is called, as in ``train.task.Task``.
            sample_weight: name of a tensor of shape ``(rows,)``; the loss is the weighted mean then.
            example: a batch, by which a pipeline without ``cuts`` times its layers on rank 0; None counts parameters.

        Raises:
            ConfigError: the model cannot be spread so, or its parts do not fit each other.
            CheckpointError: the ranks made different models.
        """
        task = Task(
            model=model,
            optimizer=optimizer,
            loss=loss,
            inputs=inputs,
            labels=labels,
            input_style=input_style,
            sample_weight=sample_weight,
        )
        self._strategy.build(
            lambda: make_model(task, self._device, seed=self._config.seed),
            lambda made: make_optimizer(task, made, self._device),
            TaskView(
                inputs=inputs,
                input_style=input_style,
                example=None if example is None else lambda: example,
                optimizer=optimizer if isinstance(optimizer, torch.optim.Optimizer) else None,
            ),
        )
        self.module, self.optimizer = self._strategy.model, self._strategy.optimizer
        self._counts = self._strategy.counts_rows()
        self._names = (*inputs, *labels, *([] if sample_weight is None else [sample_weight]))
        self._place = Placement(self._device, channels_last=False)
        objective = Objective(task, self._device, self._strategy.data_size, self._sum_of_rows)
        self._loss = BatchLoss(task, objective, self._config.precision, self._device)
        rng.seed_rank(self._config.seed, self._strategy.data_rank)

    def step(self, batch: BatchLike | Mapping[str, torch.Tensor], *, max_norm: float | None = None) -> torch.Tensor:
        """Train on one global batch: forward, backward, exchange, clip, ``optimizer.step()``.

        Args:
            batch: this rank's rows, as a ``ShardLoader`` gives them; or tensors by name, with perhaps another number of
                rows on each reader, which the ranks then count. ``local_sgd``, ``diloco`` and a ``parameter_server``
                with staleness, whose ranks do not wait for each other, weigh such parts alike.
            max_norm: clip the gradient of the whole model to that 2-norm; None does not.

        Returns:
            The loss of the global batch, a scalar in float64, equal on all ranks. Where ranks do not wait for each
            other it is this rank's part of it, of which the mean over the ranks is the loss.
        """
        loss = self.backward(batch)
        if max_norm is not None:
            self.clip(max_norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss

    def backward(
        self, batch: BatchLike | Mapping[str, torch.Tensor], *, share: float = 1.0, last: bool = True
    ) -> torch.Tensor:
        """Add the gradient of one global batch, as ``step`` begins; ``clip`` and ``optimizer`` do the rest.

        Args:
            batch: as in ``step``.
            share: the batch's part of the optimizer step, by its rows, where gradients of several add up.
            last: whether the optimizer steps next: gradients are exchanged then. Each step has a last batch.

        Returns:
            The loss of the global batch, as in ``step``, whatever its share.
        """
        self._loss.share = share if self._loss.divides else 1.0
        loss, _ = self._strategy.step(self._placed(batch, training=True), self._loss, last=last)
        loss = loss.double()  # which ranks without rows, and stages before the last, have in float32
        if self._collective.world.size == 1 or not self._strategy.steps_together:
            return loss
        return self._collective.all_reduce(loss, "mean")

    def clip(self, max_norm: float) -> torch.Tensor:
        """Scale the gradient of the whole model to a 2-norm of at most ``max_norm``; return the norm before."""
        return self._strategy.clip(max_norm)

    def evaluate(self, batches: Iterable[BatchLike | Mapping[str, torch.Tensor]]) -> float:
        """Return the loss over all rows of ``batches``, as many on every rank, of one model.

        Buffers are rank 0's then, and ranks that step by themselves go on from the mean of their models.
        """
        self._strategy.end_epoch()
        sums = torch.zeros(self._loss.outputs, 2, dtype=torch.float64, device=self._device)
        training = [module for module in self.module.modules() if module.training]
        self.module.eval()
        try:
            with torch.inference_mode(), autocast_of(self._config.precision, self._device):
                for batch in batches:
                    evaluated = self._strategy.evaluate(self._placed(batch), self._loss)
                    if evaluated is not None:
                        sums += evaluated[1]
            self._strategy.end_evaluation()
        finally:
            for module in training:
                module.training = True
        return self._loss.losses(self._sum_of_rows(sums))["loss"]

    def state_dict(self) -> dict[str, Any] | None:
        """Gather ``model`` and ``optimizer``, as one plain module and optimizer have them, on rank 0; else None.

        Ranks that step by themselves go on from the mean of their models first, as in ``evaluate``.
        """
        self._strategy.end_epoch()
        return self._strategy.state_dict()

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Take over what ``state_dict`` gave, under whatever strategy and on however many ranks.

        Args:
            state: on rank 0; the other ranks' is not looked at. Without ``optimizer`` the weights alone are loaded.

        Raises:
            CheckpointError: it does not fit the model or the optimizer.
        """
        self._strategy.load_state_dict(state if self._collective.world.is_leader else None)

    def gather_model(self) -> torch.nn.Module | None:
        """Return one plain module with the current weights on rank 0, None on the others; see ``state_dict``."""
        self._strategy.end_epoch()
        plain = self._strategy.gather_model()
        return plain if self._collective.world.is_leader else None

    def close(self) -> None:
        """Leave the other ranks; idempotent. A group that was open before stays so."""
        self._close(failed=False)

    def __enter__(self) -> SpreadModel:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close(failed=error is not None)

    def _close(self, *, failed: bool) -> None:
        if self._is_open:
            self._is_open = False
            self._strategy.close()
            self._collective.close(failed=failed)

    def _sum_of_rows(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum over the ranks of what each has of its rows, each row once."""
        if self._collective.world.size == 1:
            return tensor
        return self._collective.all_reduce(tensor if self._counts else torch.zeros_like(tensor), "sum")

    def _placed(self, batch: BatchLike | Mapping[str, torch.Tensor], *, training: bool = False) -> BatchLike:
        names = [name for name, _ in batch.items()]
        missing = [name for name in self._names if name not in names]
        if missing:
            raise ConfigError(
                f"a batch has the tensors {sorted(names)}, and the model was built for {missing} besides: name those "
                "that are there by inputs=, labels= and sample_weight= of build"
            )
        if isinstance(batch, Mapping) and not hasattr(batch, "global_rows"):
            own_rows = len(next(iter(batch.values())))
            if training and not self._strategy.steps_together:
                total = max(own_rows, 1) * self._strategy.data_size
                return self._place(Batch(batch, rows=own_rows, global_rows=total, weight=float(own_rows > 0)))
            total = int(self._sum_of_rows(torch.tensor(float(own_rows), dtype=torch.float64, device=self._device)))
            if not total:
                raise ConfigError("a batch has 0 rows on all ranks: leave it out on all of them")
            weight = own_rows * self._strategy.data_size / total
            batch = Batch(batch, rows=own_rows, global_rows=total, weight=weight)
        return self._place(batch)  # type: ignore[arg-type]
