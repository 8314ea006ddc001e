"""The steps of one epoch.

Enters: a source of batches. Leaves: trained optimizer steps; at those where something is due, the loop gets its turn to
save, record and decide.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from sparkdl.train.objective.metrics import MetricSet
from sparkdl.train.own_step import OwnStep
from sparkdl.train.run import Run
from sparkdl.train.schedule import LearningRate
from sparkdl.train.source import BatchSource
from sparkdl.train.step import Placement, Stepper
from sparkdl.train.telemetry.window import LossWindow

__all__ = ["EpochTrainer"]


class EpochTrainer:
    """Iterating it trains what is left of the run's current epoch, up to the next pause each time.

    Args:
        source: batches to train on.
        place: brings a batch to the device.
        stepper: forward, backward, update; or a function of the user's own that does all of it.
        rate: the learning rate of each step.
        window: takes the losses.
        metrics: metrics over training batches; may be empty.
        run: moves on with each batch.
        step_end: called after each optimizer step.

    Attributes:
        metrics: the metrics over training batches.
        pause_at: the optimizer step after which to yield next; the loop sets it.
        resume_at: position of the source to continue from, once; None starts the epoch.
    """

    def __init__(
        self,
        source: BatchSource,
        place: Placement,
        stepper: Stepper | OwnStep,
        rate: LearningRate,
        window: LossWindow,
        metrics: MetricSet,
        run: Run,
        step_end: Sequence[Callable[[Run], None]],
    ) -> None:
        self._source, self._place, self._stepper, self._rate = source, place, stepper, rate
        self._window, self.metrics, self._run, self._step_end = window, metrics, run, tuple(step_end)
        self.resume_at: dict[str, Any] | None = None
        self.pause_at: float = 0

    def __iter__(self) -> Iterator[None]:
        """Yield after the step ``pause_at``; the epoch may end before."""
        self._source.set_epoch(self._run.epoch)
        if self.resume_at is not None:
            self._source.load_state_dict(self.resume_at)
            self.resume_at = None
        if isinstance(self._stepper, OwnStep):
            return self._by_hand(self._stepper)
        one = self._run.config.accumulate_steps == 1
        return self._single(self._stepper) if one else self._accumulated(self._stepper)

    def _single(self, stepper: Stepper) -> Iterator[None]:
        run, rate, window, metrics = self._run, self._rate, self._window, self.metrics
        place, total, hooks = self._place, run.steps_per_epoch, self._step_end
        add, update, note, after_step = stepper.add, stepper.update, window.add, rate.after_step
        has_metrics, clips = bool(metrics), run.config.max_grad_norm is not None
        for given in self._source:
            batch = place(given)
            del given  # the source may fill the same memory, still in the cache, with the next batch
            loss, outputs = add(batch, 1.0, last=True)
            step = run.step + 1
            note(loss, batch, step, rate.current)
            if has_metrics and outputs is not None:
                metrics.update(outputs, batch)
            rows = batch.global_rows
            del batch, outputs  # likewise: the optimizer may take the memory
            update(1.0)
            if clips and stepper.norm is not None:
                window.add_norm(stepper.norm, step)
            after_step()
            run.local_loss, run.step = loss, step
            run.batch += 1
            run.rows += rows
            for hook in hooks:
                hook(run)
            if step >= self.pause_at:
                yield
            if run.batch >= total:
                return

    def _accumulated(self, stepper: Stepper) -> Iterator[None]:
        """Several batches a step; each counts by its rows, a short last group by the rows it has."""
        run, window = self._run, self._window
        total, group = run.steps_per_epoch, run.config.accumulate_steps
        first = rows = 0
        expected = 1.0
        for given in self._source:
            batch = self._place(given)
            if rows == 0:
                first = min(group, total - run.batch)
                expected = float(batch.global_rows * first)
            first -= 1
            rows += batch.global_rows
            share = batch.global_rows / expected if stepper.divides else 1.0
            loss, outputs = stepper.add(batch, share, last=first == 0)
            window.add(loss, batch, run.step + 1, self._rate.current)
            if self.metrics and outputs is not None:
                self.metrics.update(outputs, batch)
            run.local_loss = loss
            run.batch += 1
            run.rows += batch.global_rows
            if first == 0:
                self._update(stepper, expected / rows if stepper.divides else 1.0)
                rows = 0
                if run.step >= self.pause_at:
                    yield
            if run.batch >= total:
                return
        if rows:  # the source ended early, as after resuming with other batches
            stepper.exchange()
            self._update(stepper, expected / rows if stepper.divides else 1.0)

    def _update(self, stepper: Stepper, correction: float) -> None:
        stepper.update(correction)
        if stepper.norm is not None:
            self._window.add_norm(stepper.norm, self._run.step + 1)
        self._rate.after_step()
        self._stepped(1)

    def _by_hand(self, manual: OwnStep) -> Iterator[None]:
        """A function of the user's own steps when it likes: not at all for one batch, or several times."""
        run, total, whole = self._run, self._run.steps_per_epoch, self._run.batch == 0
        for given in self._source:
            batch = self._place(given)
            before = manual.steps
            loss, outputs = manual.train(batch)
            made = manual.steps - before
            # A batch belongs to the step that its gradient went into, or will go into.
            step = max(1, run.step + made + manual.pending)
            self._window.add(loss, batch, step, manual.lr if made else self._rate.current)
            if self.metrics and outputs is not None:
                self.metrics.update(outputs, batch)
            run.local_loss = loss
            run.batch += 1
            run.rows += batch.global_rows
            if run.batch >= total:
                break
            if self._stepped_by_hand(manual, made):
                yield
        else:
            made = 0  # the source ended early
        before = manual.steps
        manual.finish_epoch(whole=whole)
        if self._stepped_by_hand(manual, made + manual.steps - before):
            yield

    def _stepped_by_hand(self, manual: OwnStep, made: int) -> bool:
        """Note ``made`` steps; return whether something is due."""
        if made and manual.norm is not None:
            self._window.add_norm(manual.norm, self._run.step + made)
        self._stepped(made)
        return made > 0 and self._run.step >= self.pause_at

    def _stepped(self, made: int) -> None:
        for _ in range(made):
            self._run.step += 1
            for hook in self._step_end:
                hook(self._run)
