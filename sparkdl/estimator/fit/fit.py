"""One fit on the driver, top to bottom: prepare -> check -> launch -> collect.

Enters: an estimator's parameters, and rows: a DataFrame, a pinned table version, or shard sets. Leaves: ``Trained``.
What can be refused is refused before a rank starts: the model is called on two made-up rows here, and the shards'
statistics tell the rest.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from sparkdl.compat.torch_compiler import eager
from sparkdl.errors import StorageError
from sparkdl.estimator.fit import checks, settings
from sparkdl.estimator.fit.attempts import run_ranks
from sparkdl.estimator.fit.data import Prepared, prepare, prepare_existing
from sparkdl.estimator.fit.losses import loss_warnings
from sparkdl.estimator.fit.rank import FitJob, UserParts, made_losses, task_of
from sparkdl.estimator.fit.shipping import check_importable, pack
from sparkdl.estimator.horovod.adapters import adapted_metrics
from sparkdl.estimator.inputs.faults import making
from sparkdl.estimator.inputs.probe import Probe
from sparkdl.estimator.inputs.signature import signature_of
from sparkdl.estimator.params.backend import is_own
from sparkdl.estimator.params.params import CheckedParams, check_conflicts, value_of
from sparkdl.estimator.prediction_columns import check_columns, meanings_of, tell_of_own_loss, wanted_columns
from sparkdl.estimator.store import open_store
from sparkdl.launch.driver import barrier
from sparkdl.launch.driver.slots import slots_of
from sparkdl.observe import logger, span
from sparkdl.shards.manifest import Manifest, Source
from sparkdl.storage import check_places
from sparkdl.train.objective.labels import Meaning
from sparkdl.worker import RankReport

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

__all__ = ["Fit", "Trained"]


@dataclass
class Trained:
    """What a fit made.

    Attributes:
        model: a copy of the user's, with the trained weights, in evaluation mode.
        optimizer: bound to it, with its state after the last step; None where its function fails on the driver.
        probe: how it is called and what it returns.
        report: of rank 0.
        num_proc: ranks of the last attempt.
        run_id: name of the run.
        meanings: what each label's output means, by its loss.
        seconds: wall-clock seconds by span, of driver and rank 0.
        warnings: what looks wrong with its losses, a sentence each.
    """

    model: torch.nn.Module
    optimizer: Any
    probe: Probe
    report: RankReport
    num_proc: int
    run_id: str
    meanings: dict[str, Meaning]
    seconds: dict[str, float]
    warnings: tuple[str, ...] = ()


class Fit:
    """One fit: ``write`` or ``take`` shards, then ``train``; at its end it deletes the shards that nobody keeps.

    Args:
        params: the estimator's parameters.
        spark: the session that runs the ranks.

    Raises:
        ConfigError: parameters are missing, or do not fit each other.
        PreflightError: the cluster cannot run so many ranks.
        StorageError: store, checkpoints or logs cannot be reached or written.
    """

    def __init__(self, params: CheckedParams, spark: SparkSession) -> None:
        check_conflicts(params)
        self.params, self.spark = params, spark
        parts = settings.user_parts(params)
        labels = value_of(params, "label_cols")
        with making("loss_constructors" if params.isSet("loss_constructors") else "loss"):
            losses = made_losses(parts.losses)
        self.meanings = meanings_of(labels, losses)
        adapted_metrics(parts.metrics, labels, losses)  # which refuses names that do not fit
        check_columns(params, self.meanings)
        self.parts = pack(parts)
        self.num_proc = settings.ranks_wanted(params) or slots_of(spark)
        if not is_own(params.getOrDefault("backend")):
            barrier.check(spark, self.num_proc, settings.launch_settings(params)["config"])
        master = str(spark.conf.get("spark.master", ""))
        self.store = open_store(params.getOrDefault("store"), shared_disk=master.startswith("local"))
        settings.check_used(params, self.store)
        check_places(settings.places(params, self.store), spark)
        self._written: Prepared | None = None

    def write(self, rows: DataFrame, held_out: DataFrame | None = None, source: Source | None = None) -> Prepared:
        """Write shards of a DataFrame, see ``data.prepare``."""
        self._written = prepare(self.params, rows, self.store, num_proc=self.num_proc, held_out=held_out, source=source)
        return self._written

    def take(self, train: Manifest, validation: Manifest | None) -> Prepared:
        """Take shard sets that exist, see ``data.prepare_existing``."""
        return prepare_existing(self.params, train, validation, self.store)

    def train(self, prepared: Prepared) -> Trained:
        """Check, launch and collect.

        Raises:
            ConfigError: model, inputs, loss and settings do not fit each other.
            DataError: the rows do not fit them.
            RankFailedError: a rank failed more often than max_failures allows.
            SparkdlError: what a rank refused, as what it is: a loss that is not finite, a damaged shard.
        """
        params, seconds = self.params, dict(prepared.seconds)
        with span("check", seconds):
            checks.check_shards(params, prepared.train, prepared.validation, prepared.plan.roles, self.num_proc)
            parts: UserParts = self.parts.open()
            model = checks.built(parts.model)
            probed = prepared.probe(params.getOrDefault("model"), model)
            wanted_columns(params, signature_of(probed, prepared.train), self.meanings)  # which refuses what cannot be
            tell_of_own_loss(params, probed, self.meanings, prepared.train)
            if not is_own(params.getOrDefault("backend")):
                check_importable(self.parts, self.spark)
            run_id, fit_id = settings.run_id_of(params), uuid.uuid4().hex
            plan = settings.task_plan(params, prepared.plan.roles, probed.views, model)
            job = settings.rank_job(params, prepared.train, prepared.validation, prepared.store, run_id, fit_id)
            task = task_of(parts, plan)
            checks.check_task(task, model, job)
            sets = prepared.train, prepared.validation
            checks.check_losses(task, parts.losses, probed, *sets, written=prepared.ours)
            checks.check_metrics(task, probed)
            ranks_job = FitJob(parts=self.parts, plan=plan, job=job)
            checks.check_resume(ranks_job, job(task=task), model, prepared.train, prepared.validation)
        with span("launch", seconds):
            reports, ranks = run_ranks(params, ranks_job, self.spark, self.num_proc, run_id)
        leader = reports[0]
        model.load_state_dict(leader.weights or {})
        model.eval()
        optimizer = _optimizer_after(parts.optimizer, model, leader)
        warnings = self._warnings(parts, prepared, leader)
        return Trained(
            model, optimizer, probed, leader, ranks, run_id, self.meanings, seconds | leader.seconds, warnings
        )

    def _warnings(self, parts: UserParts, prepared: Prepared, leader: RankReport) -> tuple[str, ...]:
        """Log what looks wrong with the losses; nothing where the user's own step or a part of the rows makes them."""
        get, labels = self.params.getOrDefault, prepared.plan.roles.labels
        if parts.step is not None or get("train_steps_per_epoch") or get("validation_steps_per_epoch"):
            return ()
        losses = made_losses(parts.losses)
        losses = losses * len(labels) if len(losses) == 1 else losses
        warnings = loss_warnings(
            leader.result.history.epochs,
            leader.result.metrics,
            dict(zip(labels, losses, strict=False)),
            prepared.train,
            prepared.validation,
            weighted=prepared.plan.roles.weight is not None,
        )
        for sentence in warnings:
            logger.warning("%s", sentence)
        return tuple(warnings)

    def __enter__(self) -> Fit:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Delete what was written, as the store's policy says; idempotent."""
        try:
            if self._written is not None:
                self._written.discard()
            self.store.close()
        except StorageError as error:  # the fit is done, or has an error of its own that matters more
            logger.warning("intermediate shards were not removed: %s", error)


def _optimizer_after(given: Any, model: torch.nn.Module, leader: RankReport) -> torch.optim.Optimizer | None:
    """The optimizer as the leader's last step left it, bound to ``model``."""
    try:
        with eager():
            optimizer = given if isinstance(given, torch.optim.Optimizer) else given(model)
            optimizer.load_state_dict(leader.optimizer or {})
    except Exception as error:  # a function that needs what only ranks have; the fit itself is whole
        logger.warning("getOptimizer() of the fitted model is None: the optimizer cannot be made here (%s)", error)
        return None
    return optimizer
