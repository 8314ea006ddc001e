"""The training loop: epochs of steps, validation, checkpoints, stopping.

Enters: a task, batches, a collective and settings. Leaves: a trained model and a ``TrainResult``, equal on all ranks;
N ranks compute what one rank computes on the same global batches.

Nothing in a step waits for the device or for other ranks but the exchange of gradients itself: losses are looked at
once a window, metrics are reduced once an epoch, checkpoints are written beside training.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any

import torch

from sparkdl.collective.base import Collective
from sparkdl.config import TrainConfig
from sparkdl.errors import ConfigError
from sparkdl.observe import emit
from sparkdl.strategies.base import Strategy, open_strategy
from sparkdl.train.callbacks import Callback, Hooks
from sparkdl.train.checkpoint import rng
from sparkdl.train.checkpoint.checkpoint import Checkpointer
from sparkdl.train.checkpoint.resume import facts_of, going_on, load_newest, rank_states, restore_rank
from sparkdl.train.epoch import EpochTrainer
from sparkdl.train.evaluate import Evaluator
from sparkdl.train.model_selection import ModelSelection
from sparkdl.train.objective.loss import Objective
from sparkdl.train.objective.metrics import MetricSet
from sparkdl.train.own_step import OwnStep
from sparkdl.train.result import TrainResult
from sparkdl.train.run import Run
from sparkdl.train.schedule import LearningRate
from sparkdl.train.source import BatchSource, end_epoch
from sparkdl.train.step import Placement, Stepper
from sparkdl.train.task import Task, make_model, make_optimizer, make_scheduler
from sparkdl.train.telemetry.report import Reporter, ScalarWriter
from sparkdl.train.telemetry.window import LossWindow

__all__ = ["fit"]


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
        What came of it; ``model`` is the task's own module where it was given as an instance.

    Raises:
        ConfigError: parts of the task or settings do not fit each other.
        CheckpointError: no checkpoint is whole, it does not fit the model, or one could not be written.
        NonFiniteLossError: the loss became NaN or infinite, on whichever rank; every rank raises.
        IntegrityError: shards changed while an epoch read them.
    """
    device = torch.device(collective.world.device)
    with rng.isolated(device), rng.deterministic(config.deterministic):
        strategy = strategy or open_strategy("all_reduce", collective, config)
        trainer = _Trainer(task, train, validation, collective, config, callbacks, checkpoints, strategy)
        try:
            return trainer.run_all()
        except BaseException as error:
            trainer.hooks.call("on_error", trainer.run, error)
            raise
        finally:
            trainer.close()


class _Trainer:
    """The parts of one run, and their course."""

    def __init__(
        self,
        task: Task,
        train: BatchSource,
        validation: BatchSource | None,
        collective: Collective,
        config: TrainConfig,
        callbacks: Sequence[Callback],
        checkpoints: Checkpointer | None,
        strategy: Strategy,
    ) -> None:
        self.config, self.collective, self.checkpoints = config, collective, checkpoints
        self.train, self.validation = train, validation
        world = collective.world
        self.started = time.perf_counter()
        self._save_every = checkpoints.config.every_steps if checkpoints is not None else None
        self.device = torch.device(world.device)
        self.validation_steps = _steps("validation_steps", config.validation_steps, validation) if validation else 0
        self.hooks = Hooks(callbacks, world.is_leader)
        self.resumed_step: int | None = None
        self.manual: OwnStep | None = None
        self.strategy = strategy
        try:
            strategy.build(
                lambda: make_model(task, self.device, seed=config.seed, channels_last=config.channels_last),
                lambda model: make_optimizer(task, model, self.device),
            )
            scheduler = make_scheduler(task, strategy.optimizer)
            state = load_newest(checkpoints, strategy, collective, epochs=config.epochs)
            if state is not None:
                with going_on(state["resumed_step"]):
                    train.load_state_dict(state["loader"])  # which may change the number of its batches
            self.steps_per_epoch = _steps("steps_per_epoch", config.steps_per_epoch, train)
            self.run = Run(strategy.model, strategy.optimizer, world, config, self.steps_per_epoch)
            self._assemble(task, scheduler)
            self._start(state)
            self.scalars = ScalarWriter(config, self.run, checkpoints.offset if checkpoints is not None else 0)
        except BaseException:
            self._release()
            raise

    def _assemble(self, task: Task, scheduler: Any) -> None:
        """Make everything that the steps of an epoch need."""
        config, collective, strategy = self.config, self.collective, self.strategy
        self.rate = LearningRate(
            strategy.optimizer,
            scheduler,
            interval=task.scheduler_interval,
            warmup_steps=config.warmup_steps,
            scale=config.scale_lr,
            world=collective.world,
        )
        size = collective.world.size
        objective = None
        if task.train_step is None:
            known = {"bounds": self.train.bounds} if hasattr(self.train, "bounds") else {}
            objective = Objective(task, self.device, size, lambda t: collective.all_reduce(t, "sum"), **known)
        self.objective = objective
        place = Placement(self.device, config.channels_last)
        stepper: Stepper | OwnStep
        stepper = self.stepper = Stepper(task, strategy, objective, config, self.device)
        if task.manual_step is not None:
            assert objective is not None
            stepper = self.manual = OwnStep(task, strategy, objective, self.rate, collective, config)
        self.window = LossWindow(collective, self.run)
        self.evaluate = Evaluator(task, strategy.model, objective, place, collective, config.precision)
        metrics, validates = self.evaluate.metrics, self.validation is not None
        self.selection = ModelSelection(
            task, config, metrics, collective, strategy, self.checkpoints, validates=validates
        )
        self.reporter = Reporter(self.run, self.window)
        metrics = MetricSet(task.metrics if config.train_metrics else {}, task.labels, self.device)
        self.epoch_trainer = EpochTrainer(
            self.train, place, stepper, self.rate, self.window, metrics, self.run, self.hooks.step_end
        )

    # --- the course ---------------------------------------------------------------------------------------------

    def run_all(self) -> TrainResult:
        """All epochs, then the result."""
        run = self.run
        if run.world.is_leader:
            emit(
                "fit_start",
                backend=self.strategy.carried_by,
                world_size=run.world.size,
                epochs=self.config.epochs,
                steps_per_epoch=self.steps_per_epoch,
                parameters=sum(p.numel() for p in run.model.parameters()),
                precision=self.config.precision,
                resumed_step=self.resumed_step,
            )
        self.hooks.call("on_fit_start", run)
        while run.epoch < self.config.epochs and not self._finished():
            self._epoch()
        metrics = self.selection.restore_best(run.history)
        if self.checkpoints is not None and run.world.is_leader:
            self.checkpoints.wait()
        self.hooks.call("on_fit_end", run)
        result = self._result(metrics)
        if run.world.is_leader:
            emit("fit_end", steps=result.steps, rows=result.rows, seconds=result.seconds, reason=result.stop_reason)
        return result

    def _finished(self) -> bool:
        """Whether the run ends before its last epoch; the same on all ranks."""
        run = self.run
        if run.stop_reason is None and self.selection.out_of_patience:
            run.stop_reason = f"{self.selection.monitor} did not improve for {self.selection.waited} epochs"
        if run.stop_reason is None and self.config.max_steps is not None and run.step >= self.config.max_steps:
            run.stop_reason = f"max_steps={self.config.max_steps} is reached"
        return run.stop_reason is not None

    def _epoch(self) -> None:
        """Train what is left of one epoch, validate, compare it with the best, save."""
        run, started = self.run, time.perf_counter()
        self.hooks.call("on_epoch_start", run)
        self.reporter.epoch_starts()
        self._set_pause()
        for _ in self.epoch_trainer:
            self._pause()
            if self._stops_here():
                break
            self._set_pause()
        end_epoch(self.train)
        self.window.flush()
        self.reporter.epoch_done()
        if self.objective is not None:
            self.objective.tell_without_divisor(run.epoch, tells=run.world.is_leader)
        self.strategy.share_buffers()
        # A source may have less to give than it said, as after resuming with other batches.
        whole = run.batch >= self.steps_per_epoch or not self._finished()
        if not whole:
            self._save()  # before this epoch is compared: a run that continues does that when it is whole
        row: dict[str, float] = {"epoch": run.epoch, "step": run.step, "loss": self.window.epoch_loss}
        row |= self.epoch_trainer.metrics.compute(self.collective, run.world.size)
        if self.validation is not None:
            row |= self._validate(self.validation)
        row |= {"lr": self.rate.current, "seconds": time.perf_counter() - started, "rows": self.window.epoch_rows}
        run.history.add_epoch(row)
        best = self.selection.update(run.epoch, row)
        self.hooks.call("on_epoch_end", run, row)
        self.scalars.steps()
        self.scalars.epoch(row)
        if run.world.is_leader:
            finite = {name: value if math.isfinite(value) else None for name, value in row.items()}
            emit("epoch", best=best, epochs=self.config.epochs, metrics=finite)
        if whole:
            self.rate.after_epoch(row[self.selection.monitor])
            run.epoch, run.batch = run.epoch + 1, 0
            self.window.start_epoch()
            self.window.flush()  # a request of a callback at the end of the epoch
            self._save_epoch(best)

    def _set_pause(self) -> None:
        """Let training run on until the next step at which something is due."""
        step, maximum = self.run.step, self.config.max_steps
        self._look_at = _next_multiple(step, self.config.window_steps)
        self._save_at = _next_multiple(step, self._save_every) if self._save_every is not None else math.inf
        pauses = [self._look_at, self._save_at]
        if maximum is not None:
            pauses.append(maximum)
        if self.reporter.look_at is not None:
            pauses.append(self.reporter.look_at)
        self.epoch_trainer.pause_at = min(pauses)

    def _pause(self) -> None:
        """Look at the losses of all ranks and save, as far as it is time."""
        run = self.run
        if self.reporter.look_at is not None and run.step >= self.reporter.look_at:
            self.reporter.look()
        due = run.step >= self._save_at and run.batch < self.steps_per_epoch
        if due or run.step >= self._look_at:
            self.window.flush()
            self.scalars.steps()
        if due:
            self.strategy.share_buffers()
            self._save()

    def _stops_here(self) -> bool:
        """Whether to leave the epoch after this step."""
        maximum = self.config.max_steps
        return self.run.stop_reason is not None or (maximum is not None and self.run.step >= maximum)

    def _validate(self, source: BatchSource) -> dict[str, float]:
        self.hooks.call("on_validation_start", self.run)
        source.set_epoch(0)  # the same rows in the same order each time
        steps = self.validation_steps
        found = self.evaluate(source, steps, lambda done: self.reporter.validation_done(done, steps))
        end_epoch(source)
        self.hooks.call("on_validation_end", self.run, found)
        return found

    # --- checkpoints --------------------------------------------------------------------------------------------

    def _save_epoch(self, best: bool) -> None:
        """Save at the end of an epoch if it is time, or it was the best, or the last one."""
        if self.checkpoints is None:
            return
        config, run = self.checkpoints.config, self.run
        due = config.every_epochs is not None and run.epoch % config.every_epochs == 0
        due |= config.every_steps is not None and run.step % config.every_steps == 0
        ends = run.epoch >= self.config.epochs or self._finished()
        if due or ends or (best and config.keep_best):
            self._save(best)

    def _save(self, best: bool = False) -> None:
        if self.checkpoints is None:
            return
        run = self.run
        ranks = rank_states(self.collective, self.device, self.epoch_trainer.metrics.state())
        gathered = self.strategy.state_dict()
        if gathered is not None:
            state = {
                **gathered,
                "loader": self.train.state_dict(),
                "ranks": ranks,
                "callbacks": self.hooks.state_dict(),
                **{name: None if part is None else part.state_dict() for name, part in self._stateful().items()},
                **facts_of(self.checkpoints, run, gathered["model"]),
            }
            self.checkpoints.save(state, step=run.step, epoch=run.epoch, best=best)
        self.hooks.call("on_checkpoint", run)

    def _stateful(self) -> dict[str, Any]:
        """The parts that keep a state of their own, equal on all ranks, by their names in a checkpoint."""
        return {
            "run": self.run,
            "history": self.run.history,
            "rate": self.rate,
            "scaler": self.stepper.scaler,
            "manual": self.manual,
            "window": self.window,
            "model_selection": self.selection,
        }

    def _start(self, state: dict[str, Any] | None) -> None:
        """Begin afresh, or go on from the rest of a checkpoint's state."""
        run, world = self.run, self.run.world
        if state is None:
            rng.seed_rank(self.config.seed, world.rank)
            self.rate.start()
            return
        with going_on(state["resumed_step"]):
            for name, part in self._stateful().items():
                if part is not None and state.get(name) is not None:  # of a run without, or of an earlier version
                    part.load_state_dict(state[name])
            self.resumed_step = run.step
            metrics = restore_rank(state["ranks"], world.rank, world.size, self.device, self.config.seed + run.step)
            if run.batch:
                self.epoch_trainer.metrics.load_state(metrics)
                self.epoch_trainer.resume_at = state["loader"]
        self.hooks.load_state_dict(state["callbacks"])

    # --- the end ------------------------------------------------------------------------------------------------

    def _result(self, metrics: dict[str, float]) -> TrainResult:
        run, selection = self.run, self.selection
        return TrainResult(
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
            stopped_early=run.epoch < self.config.epochs,
            stop_reason=run.stop_reason,
            resumed_step=self.resumed_step,
        )

    def close(self) -> None:
        """Release what outlives the run; an error that is under way goes first."""
        self._release()
        self.scalars.close()
        if self.checkpoints is not None and self.run.world.is_leader:
            self.checkpoints.close()

    def _release(self) -> None:
        """Take the hooks off model and optimizer."""
        if self.manual is not None:
            self.manual.close()
        self.strategy.close()


def _steps(name: str, wanted: int | None, source: BatchSource) -> int:
    there = len(source)
    if there == 0:
        raise ConfigError(f"the source of {name} gives 0 batches: write rows, or choose a smaller batch size")
    if wanted is not None and wanted > there:
        raise ConfigError(f"{name}={wanted} exceeds the {there} batches there are: lower it or leave it out")
    return there if wanted is None else wanted


def _next_multiple(step: int, period: int) -> int:
    """The first multiple of ``period`` after ``step``."""
    return (step // period + 1) * period
