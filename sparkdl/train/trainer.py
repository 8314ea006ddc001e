"""A training, from its first step to its result: the course, the epoch, the step."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch

from sparkdl.collective.base import Collective
from sparkdl.config import TrainConfig
from sparkdl.errors import ConfigError
from sparkdl.nn.mixture import mixtures, tell_dropped
from sparkdl.nn.modes import mode_of
from sparkdl.observe import emit
from sparkdl.strategies.base import Strategy, TaskView, open_strategy
from sparkdl.train.callbacks import Callback, Hooks, Run
from sparkdl.train.checkpoint import rng
from sparkdl.train.checkpoint.checkpoint import Checkpointer
from sparkdl.train.checkpoint.resume import (
    earlier_cuts,
    facts_of,
    going_on,
    load_newest,
    names_by_group,
    rank_states,
    restore_rank,
)
from sparkdl.train.model_selection import ModelSelection
from sparkdl.train.objective.batch_loss import BatchLoss, autocast_of
from sparkdl.train.objective.loss import Objective
from sparkdl.train.objective.metrics import MetricSet
from sparkdl.train.own_step import OwnStep
from sparkdl.train.result import TrainResult
from sparkdl.train.schedule import LearningRate
from sparkdl.train.source import BatchLike, BatchSource, Placement, end_epoch
from sparkdl.train.task import Task, make_model, make_optimizer, make_scheduler
from sparkdl.train.telemetry.report import Reporter, ScalarWriter
from sparkdl.train.telemetry.window import LossWindow


def fit(
    task: Task,
    train: BatchSource,
    validation: BatchSource | None = None,
    *,
    collective: Collective,
    config: TrainConfig,
    callbacks: Sequence[Callback] = (),
    checkpoints: Checkpointer | None = None,
    strategy: Strategy | None = None,
) -> TrainResult:
    """Train ``task``; every rank calls this with its own part of the batches.

    N ranks compute what one rank computes on the same global batches. Nothing in a step waits for the device or for
    other ranks but the exchange of gradients itself: losses are looked at once a window, metrics are reduced once an
    epoch, checkpoints are written beside training.

    Args:
        task: model, optimizer, loss, and the tensors they take.
        train: batches to train on.
        validation: batches to validate on after each epoch; None skips validation.
        collective: the ranks; stays open.
        config: epochs, precision, stopping and the like.
        callbacks: called in their order.
        checkpoints: where to save, and to continue from; None keeps nothing.
        strategy: how the model is spread over the ranks, not yet built; None is ``"all_reduce"``. ``train`` and
            ``validation`` give the part ``data_rank`` of ``data_size``.

    Returns:
        What came of it; ``model`` is the task's own module where it was given as an instance and each rank holds all
        of it. Of a mesh it is a plain module on the leader's CPU, and the spread one elsewhere; an instance is cut in
        place.

    Raises:
        ConfigError: parts of the task or settings do not fit each other.
        CheckpointError: no checkpoint is whole, it does not fit the model, or one could not be written.
        NonFiniteLossError: the loss became NaN or infinite, on whichever rank; every rank raises.
        IntegrityError: shards changed while an epoch read them.
    """
    device = torch.device(collective.world.device)
    strategy = strategy or open_strategy("all_reduce", collective, config)
    with rng.isolated(device), rng.deterministic(config.deterministic), ExitStack() as at_end:
        trainer = _Trainer(task, train, validation, config, callbacks, checkpoints, strategy, at_end)
        try:
            return trainer.run_all()
        except BaseException as error:
            trainer.hooks.call("on_error", trainer.run, error)
            raise


class _Trainer:
    """The parts of one training, and their course."""

    def __init__(
        self,
        task: Task,
        train: BatchSource,
        validation: BatchSource | None,
        config: TrainConfig,
        callbacks: Sequence[Callback],
        checkpoints: Checkpointer | None,
        strategy: Strategy,
        at_end: ExitStack,
    ) -> None:
        self.started = time.perf_counter()
        self.train, self.validation, self.config = train, validation, config
        self.checkpoints, self.strategy, self.collective = checkpoints, strategy, strategy.collective
        collective, world = self.collective, self.collective.world
        self.device = torch.device(world.device)
        # A source without batches is false, and is refused by its own number.
        self.validation_steps = (
            0 if validation is None else _steps("validation_steps", config.validation_steps, validation)
        )
        self.hooks = Hooks(callbacks, world.is_leader)
        if checkpoints is not None and world.is_leader:
            at_end.callback(checkpoints.close)

        # The model on all ranks, and what the newest checkpoint says of it.
        at_end.callback(strategy.close)
        strategy.build(
            lambda: make_model(task, self.device, seed=config.seed, channels_last=config.channels_last),
            lambda model: make_optimizer(task, model, self.device),
            TaskView(
                inputs=task.inputs,
                input_style=task.input_style,
                by_user=task.forward is not None or task.train_step is not None,
                example=self._first_batch,
                earlier_cuts=partial(earlier_cuts, checkpoints) if checkpoints is not None else None,
                optimizer=task.optimizer if isinstance(task.optimizer, torch.optim.Optimizer) else None,
            ),
        )
        strategy.check_parameters()
        scheduler = make_scheduler(task, strategy.optimizer)
        state = load_newest(checkpoints, strategy, collective, epochs=config.epochs)
        if state is not None:
            with going_on(state["resumed_step"]):
                train.load_state_dict(state["loader"])  # which may change the number of its batches
        steps_per_epoch = _steps("steps_per_epoch", config.steps_per_epoch, train)
        self.run = run = Run(strategy.model, strategy.optimizer, world, config, steps_per_epoch)

        # What an epoch needs.
        self.counts = strategy.counts_rows()
        self.counts_layers = strategy.counts_layers()
        self.mixes_experts = bool(mixtures(strategy.model))
        self.rate = LearningRate(
            strategy.optimizer,
            scheduler,
            interval=task.scheduler_interval,
            warmup_steps=config.warmup_steps,
            scale=strategy.data_size if config.scale_lr else 1,
            reports=world.is_leader,
        )
        self.objective = None
        if task.train_step is None:
            bounds = {"bounds": train.bounds} if hasattr(train, "bounds") else {}
            self.objective = Objective(
                task, self.device, strategy.data_size, self._sum_of_rows, averages=strategy.averages, **bounds
            )
        self.place = Placement(self.device, config.channels_last)
        self.loss = BatchLoss(task, self.objective, config.precision, self.device)
        self.own_step: OwnStep | None = None
        if task.manual_step is not None:
            assert self.objective is not None
            self.own_step = OwnStep(task, strategy, self.objective, self.rate, run)
            at_end.callback(self.own_step.close)
        self.step: Step = self.own_step or GradientStep(strategy, self.loss, self.rate, run)
        self.window = LossWindow(collective, run)
        self.metrics = MetricSet(task.metrics if config.train_metrics else {}, task.labels, self.device)
        self.validation_metrics = MetricSet(task.metrics, task.labels, self.device)
        self.selection = ModelSelection(
            task,
            config,
            self.validation_metrics,
            collective,
            strategy,
            checkpoints,
            validates=validation is not None,
        )
        self.reporter = Reporter(run, self.window)

        # Where the run begins.
        self.resumed_step: int | None = None
        self.resume_at: dict[str, Any] | None = None
        if state is None:
            rng.seed_rank(config.seed, strategy.data_rank)
            self.rate.start()
        else:
            self._go_on(state)
        self.saved_step = run.step
        self.scalars = ScalarWriter(config, run, checkpoints.offset if checkpoints is not None else 0)
        at_end.callback(self.scalars.close)

    # --- the course ---------------------------------------------------------------------------------------------

    def run_all(self) -> TrainResult:
        """All epochs, then the result."""
        run, config, selection = self.run, self.config, self.selection
        if run.world.is_leader:
            emit(
                "fit_start",
                backend=self.strategy.carried_by,
                world_size=run.world.size,
                epochs=config.epochs,
                steps_per_epoch=run.steps_per_epoch,
                parameters=sum(p.numel() for p in run.model.parameters()),
                precision=config.precision,
                resumed_step=self.resumed_step,
            )
        self.hooks.call("on_fit_start", run)
        while run.epoch < config.epochs:
            run.stop_reason = self._reason_to_stop()
            if run.stop_reason is not None and run.batch == 0:
                break
            self._epoch()
            if run.batch:  # a part of the epoch is all that there shall be
                break
        metrics = selection.restore_best(run.history)
        if self.checkpoints is not None and run.world.is_leader:
            self.checkpoints.wait()
        self.hooks.call("on_fit_end", run)
        result = TrainResult(
            model=self.strategy.gather_model(),
            backend=self.strategy.carried_by,
            history=run.history,
            optimizer=run.optimizer,
            metrics=metrics,
            monitor=selection.monitor,
            best_epoch=selection.best_epoch,
            best_value=selection.best_value,
            epochs=run.epoch,
            steps=run.step,
            rows=run.rows,
            seconds=time.perf_counter() - self.started,
            stopped_early=run.epoch < config.epochs,
            stop_reason=run.stop_reason,
            resumed_step=self.resumed_step,
        )
        if run.world.is_leader:
            emit("fit_end", steps=result.steps, rows=result.rows, seconds=result.seconds, reason=result.stop_reason)
        return result

    def _reason_to_stop(self) -> str | None:
        """Why the run ends before its last epoch, the same on all ranks; None while it goes on."""
        run, maximum = self.run, self.config.max_steps
        if run.stop_reason is not None:
            return run.stop_reason
        if self.selection.out_of_patience:
            return f"{self.selection.monitor} did not improve for {self.selection.waited} epochs"
        if maximum is not None and run.step >= maximum:
            return f"max_steps={maximum} is reached"
        return None

    def _epoch(self) -> None:
        """Train what is left of one epoch, validate, compare it with the best, save."""
        run, started = self.run, time.perf_counter()
        self.hooks.call("on_epoch_start", run)
        self.strategy.check_parameters()
        self.reporter.epoch_starts()
        if run.stop_reason is None:  # else this run goes on where the one before was to stop: the rest is missing
            self._train()
        self.strategy.check_parameters()
        end_epoch(self.train)
        self.window.flush()
        self.reporter.epoch_done()
        if self.objective is not None:
            self.objective.tell_without_divisor(run.epoch, tells=run.world.is_leader)
        if self.mixes_experts:
            tell_dropped(run.model, run.epoch, self._sum_of_layers, self.device, tells=run.world.is_leader)
        self.strategy.end_epoch()
        # A source may have less to give than it said, as after resuming with other batches.
        reason = self._reason_to_stop()
        is_complete = run.batch >= run.steps_per_epoch or reason is None
        if not is_complete:
            run.stop_reason = reason
            self._save()  # before this epoch is compared: a run that continues does that when it is whole
        row: dict[str, float] = {"epoch": run.epoch, "step": run.step, "loss": self.window.epoch_loss}
        row |= self.metrics.compute(self.collective, run.world.size)
        if self.validation is not None:
            row |= self._validate(self.validation)
        row |= {"lr": self.rate.current, "seconds": time.perf_counter() - started, "rows": self.window.epoch_rows}
        run.history.add_epoch(row)
        best = self.selection.update(run.epoch, row)
        self.hooks.call("on_epoch_end", run, row)
        self.strategy.check_parameters()
        self.scalars.steps()
        self.scalars.epoch(row)
        if run.world.is_leader:
            finite = {name: value if math.isfinite(value) else None for name, value in row.items()}
            emit("epoch", best=best, epochs=self.config.epochs, metrics=finite)
        if is_complete:
            self.rate.after_epoch(row[self.selection.monitor])
            run.epoch, run.batch = run.epoch + 1, 0
            self.window.start_epoch()
            self.window.flush()  # a request of a callback at the end of the epoch
            if run.epoch < self.config.epochs:
                run.stop_reason = self._reason_to_stop()
            if self._due(best=best).checkpoint:
                self._save(best)

    def _train(self) -> None:
        """Train on what is left of the epoch, until there is a reason to stop."""
        run, step, metrics, record = self.run, self.step, self.metrics, self.window.add
        batches, wants_outputs = run.steps_per_epoch, bool(self.metrics) and self.counts
        self.train.set_epoch(run.epoch)
        if self.resume_at is not None:
            self.train.load_state_dict(self.resume_at)
            self.resume_at = None
        self._set_next_look()
        for batch_of_source in self.train:
            batch = self.place(batch_of_source)
            del batch_of_source  # the source may fill the same memory, still in the cache, with the next batch
            loss, outputs = step.backward(batch)
            record(loss, batch, step.number, step.lr)
            if wants_outputs and outputs is not None:
                metrics.update(outputs, batch)
            rows = batch.global_rows
            del batch, outputs  # likewise: the optimizer may take the memory
            steps_made = step.update(epoch_ends=run.batch + 1 == batches)
            run.local_loss = loss
            run.batch += 1
            run.rows += rows
            if steps_made:
                self._count(steps_made)
                if run.step >= self._next_look:
                    self._look()
                    if self._reason_to_stop() is not None:
                        return
            if run.batch >= batches:
                return
        self._count(step.update(epoch_ends=True))  # the source ended early, perhaps between two steps

    def _count(self, steps_made: int) -> None:
        """Take in that ``steps_made`` optimizer steps were made."""
        run, norm = self.run, self.step.norm
        if steps_made and norm is not None:
            self.window.add_norm(norm, run.step + steps_made)
        for _ in range(steps_made):
            run.step += 1
            for hook in self.hooks.step_end:
                hook(run)

    def _first_batch(self) -> BatchLike:
        """This rank's first batch, by which a strategy may measure; the epoch begins anew afterwards."""
        self.train.set_epoch(0)
        batch = next(iter(self.train), None)
        if batch is None:
            raise ConfigError("the source of training gives 0 batches: write rows, or choose a smaller batch size")
        first = Placement(self.device, self.config.channels_last)(batch)
        end_epoch(self.train)
        return first

    # --- what is due --------------------------------------------------------------------------------------------

    def _due(self, *, best: bool = False) -> Due:
        """What is due where the run stands: behind a step; or, before an epoch's first batch, behind the epoch before.

        Args:
            best: whether the epoch that has just ended is the best so far.
        """
        run, config = self.run, self.config
        saving = self.checkpoints.config if self.checkpoints is not None else None
        enough_steps = saving is not None and self._passed(saving.every_steps, self.saved_step)
        if run.batch == 0:
            checkpoint = saving is not None and (
                (saving.every_epochs is not None and run.epoch % saving.every_epochs == 0)
                or enough_steps
                or (best and saving.keep_best)
                or run.epoch >= config.epochs
                or self._reason_to_stop() is not None
            )
            return Due(checkpoint=checkpoint)
        checkpoint = enough_steps and run.batch < run.steps_per_epoch  # else the epoch's end decides
        return Due(
            progress=self.reporter.look_at is not None and run.step >= self.reporter.look_at,
            losses=checkpoint or self._passed(config.window_steps, self._last_look),
            checkpoint=checkpoint,
        )

    def _passed(self, period: int | None, since: int) -> bool:
        """Whether a multiple of ``period`` steps was made since step ``since``; a user's own step may jump over it."""
        return period is not None and self.run.step // period > since // period

    def _look(self) -> None:
        """Do what is due inside an epoch."""
        due = self._due()
        self.strategy.check_parameters()
        if due.progress:
            self.reporter.look()
        if due.losses:
            self.window.flush()
            self.scalars.steps()
        if due.checkpoint:
            self.strategy.share_buffers()
            self._save()
        self._set_next_look()

    def _set_next_look(self) -> None:
        """Let training run on until the next step behind which anything can be due."""
        step, saving = self.run.step, self.checkpoints.config if self.checkpoints is not None else None
        periods = [self.config.window_steps, saving.every_steps if saving is not None else None]
        moments = [self.config.max_steps, self.reporter.look_at]
        self._last_look = step
        self._next_look = min(
            *((step // period + 1) * period for period in periods if period is not None),
            *(moment for moment in moments if moment is not None),
            math.inf,
        )

    # --- validation ---------------------------------------------------------------------------------------------

    def _validate(self, source: BatchSource) -> dict[str, float]:
        """Return ``val_loss`` and the metrics, exact over all ranks; nothing of the model changes."""
        run, strategy, metrics, steps = self.run, self.strategy, self.validation_metrics, self.validation_steps
        self.hooks.call("on_validation_start", run)
        source.set_epoch(0)  # the same rows in the same order each time
        sums = torch.zeros(self.loss.outputs, 2, dtype=torch.float64, device=self.device)
        with (
            mode_of(strategy.model, training=False),
            torch.inference_mode(),
            autocast_of(self.config.precision, self.device),
        ):
            for batches_done, batch_of_source in enumerate(source, start=1):
                batch = self.place(batch_of_source)
                evaluated = strategy.evaluate(batch, self.loss)
                if evaluated is not None and self.counts:
                    outputs, batch_sums = evaluated
                    sums += batch_sums
                    if metrics and outputs is None:
                        raise ConfigError(
                            "train_step returns no outputs for the metrics: return (loss, outputs), or no metrics"
                        )
                    if metrics:
                        metrics.update(outputs, batch)
                self.reporter.validation_done(batches_done, steps)
                if batches_done == steps:
                    break
        strategy.end_evaluation()
        columns = self.loss.losses(self._sum_of_rows(sums)) | metrics.compute(self.collective, run.world.size)
        columns = {f"val_{name}": value for name, value in columns.items()}
        end_epoch(source)
        self.hooks.call("on_validation_end", run, columns)
        return columns

    def _sum_of_rows(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum over the ranks of what each has of its rows, each row once."""
        return self._sum_where(tensor, self.counts)

    def _sum_of_layers(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum over the ranks of what their layers counted, each layer once for each row."""
        return self._sum_where(tensor, self.counts_layers)

    def _sum_where(self, tensor: torch.Tensor, counts: bool) -> torch.Tensor:
        """The sum of the tensors of the ranks that count."""
        if self.run.world.size == 1:
            return tensor
        return self.collective.all_reduce(tensor if counts else torch.zeros_like(tensor), "sum")

    # --- checkpoints --------------------------------------------------------------------------------------------

    def _save(self, best: bool = False) -> None:
        if self.checkpoints is None:
            return
        run = self.run
        ranks = rank_states(self.collective, self.device, self.metrics.state(), self.strategy.rank_state())
        gathered = self.strategy.state_dict()
        if gathered is not None:
            state = {
                **gathered,
                "loader": self.train.state_dict(),
                "ranks": ranks,
                "callbacks": self.hooks.state_dict(),
                "frozen": [name for name, p in run.model.named_parameters() if not p.requires_grad],
                "groups": names_by_group(self.strategy),
                **{name: None if part is None else part.state_dict() for name, part in self._stateful().items()},
                **facts_of(self.checkpoints, run, gathered["model"], self.strategy),
            }
            self.checkpoints.save(state, step=run.step, epoch=run.epoch, best=best)
        self.saved_step = run.step
        self.hooks.call("on_checkpoint", run)

    def _go_on(self, state: dict[str, Any]) -> None:
        """Take over what is left of a checkpoint's state once the strategy has taken its part."""
        run = self.run
        frozen: list[str] | None = state.get("frozen")  # an earlier version kept none
        if frozen is not None:
            for name, parameter in run.model.named_parameters():
                parameter.requires_grad_(name not in frozen)
        with going_on(state["resumed_step"]):
            for name, part in self._stateful().items():
                if part is not None and state.get(name) is not None:  # of a run without, or of an earlier version
                    part.load_state_dict(state[name])
            self.resumed_step = run.step
            seed = self.config.seed + run.step
            metrics = restore_rank(state["ranks"], run.world, self.strategy, self.device, seed)
            if run.batch:
                self.metrics.load_state(metrics)
                self.resume_at = state["loader"]
        self.hooks.load_state_dict(state["callbacks"])

    def _stateful(self) -> dict[str, Any]:
        """The parts that keep a state of their own, equal on all ranks, by their names in a checkpoint."""
        return {
            "run": self.run,
            "history": self.run.history,
            "rate": self.rate,
            "scaler": self.loss.scaler,
            "manual": self.own_step,
            "window": self.window,
            "model_selection": self.selection,
        }


@dataclass(frozen=True, slots=True)
class Due:
    """What is due at one point of a run: to tell how far it is, to look at all ranks' losses, to save."""

    progress: bool = False
    losses: bool = False
    checkpoint: bool = False


class Step(Protocol):
    """Makes optimizer steps of batches: the trainer's own ``GradientStep``, or ``OwnStep``, a function of the user's.

    Attributes:
        norm: gradient norm of the newest step before clipping; None without clipping.
    """

    norm: torch.Tensor | None

    @property
    def number(self) -> int:
        """The optimizer step, from 1, that the newest batch goes into."""
        ...

    @property
    def lr(self) -> float:
        """The learning rate of that step."""
        ...

    def backward(self, batch: BatchLike) -> tuple[torch.Tensor, Any]:
        """Add the gradient of ``batch``, this rank's part of a global batch; return loss and outputs.

        They are those of ``Strategy.step``.
        """
        ...

    def update(self, *, epoch_ends: bool) -> int:
        """Make the optimizer steps that are due behind the newest batch, all that is left where the epoch ends.

        Returns:
            How many were made since the last call.
        """
        ...


class GradientStep:
    """One optimizer step of the gradients of one global batch, or of ``accumulate_steps`` of them.

    Each batch counts by its rows, a short last group by the rows it has.
    """

    def __init__(self, strategy: Strategy, loss: BatchLoss, rate: LearningRate, run: Run) -> None:
        self._strategy, self._loss, self._rate, self._run = strategy, loss, rate, run
        self._optimizer = strategy.optimizer
        self._batches, self._max_norm = run.config.accumulate_steps, run.config.max_grad_norm
        self._batches_left = self._rows = 0
        self._expected_rows = 1.0
        self.norm: torch.Tensor | None = None

    @property
    def number(self) -> int:
        """The step under way."""
        return self._run.step + 1

    @property
    def lr(self) -> float:
        """Its learning rate."""
        return self._rate.current

    def backward(self, batch: BatchLike) -> tuple[torch.Tensor, Any]:
        """Forward, the loss weighted by this rank's rows, backward; behind a step's last batch, the exchange."""
        if self._rows == 0:
            self._batches_left = min(self._batches, self._run.steps_per_epoch - self._run.batch)
            self._expected_rows = float(batch.global_rows * self._batches_left)
        self._batches_left -= 1
        self._rows += batch.global_rows
        self._loss.share = batch.global_rows / self._expected_rows if self._loss.divides else 1.0
        return self._strategy.step(batch, self._loss, last=self._batches_left == 0)

    def update(self, *, epoch_ends: bool) -> int:
        """Clip and step, once all batches of the step are there."""
        if self._rows == 0 or (self._batches_left and not epoch_ends):
            return 0
        if self._batches_left:
            self._strategy.exchange()  # the source ended early: no batch was the last
        optimizer, scaler = self._optimizer, self._loss.scaler
        has_gradients = scaler is None or any(p.grad is not None for p in self._strategy.parameters())
        if scaler is not None and has_gradients:
            scaler.unscale_(optimizer)
        if self._loss.divides and self._rows != self._expected_rows:
            _multiply_gradients(self._strategy.parameters(), self._expected_rows / self._rows)
        if self._max_norm is not None:
            self.norm = self._strategy.clip(self._max_norm)
        if scaler is None:
            optimizer.step()
        elif has_gradients:
            scaler.step(optimizer)
            scaler.update()
        optimizer.zero_grad(set_to_none=True)
        self._rows = 0
        self._rate.after_step()
        return 1


@torch.no_grad()
def _multiply_gradients(parameters: Sequence[torch.nn.Parameter], factor: float) -> None:
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad.mul_(factor)


def _steps(name: str, wanted: int | None, source: BatchSource) -> int:
    batches = len(source)
    if batches == 0:
        data = "training" if name == "steps_per_epoch" else "validation"
        raise ConfigError(f"the source of {data} gives 0 batches: write rows, or choose a smaller batch size")
    if wanted is not None and wanted > batches:
        raise ConfigError(f"{name}={wanted} exceeds the {batches} batches there are: lower it or leave it out")
    return batches if wanted is None else wanted
