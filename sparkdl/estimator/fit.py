"""One fit, top to bottom: resolve the parameters, prepare the shards, check, launch the ranks, collect the model."""

from __future__ import annotations

import functools
import importlib.metadata
import inspect
import secrets
import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from sparkdl import observe
from sparkdl.compat.torch_compiler import eager
from sparkdl.documents.payload import Payload
from sparkdl.documents.typed import as_json
from sparkdl.errors import ConfigError, StorageError
from sparkdl.estimator import checks
from sparkdl.estimator.data import Prepared, prepare, prepare_existing
from sparkdl.estimator.elastic import repeated, slots_left
from sparkdl.estimator.fit_spec import FitSpec, ranks_wanted, resolve
from sparkdl.estimator.horovod.adapters import inputs_by_position
from sparkdl.estimator.model import TorchModel
from sparkdl.estimator.model_call import Probe, probe, signature_of
from sparkdl.estimator.outputs import wanted_columns
from sparkdl.estimator.params.backend import Backend
from sparkdl.estimator.params.params import CheckedParams
from sparkdl.estimator.rank import FitMessage, UserObjects, made_losses, train_in_backend, train_on_rank
from sparkdl.estimator.store import open_store
from sparkdl.estimator.summary import COLUMNS, TrainingSummary, loss_warnings, plain_epochs
from sparkdl.estimator.user_code import built, check_importable, pack
from sparkdl.launch.driver.slots import hold_slots, slots_of
from sparkdl.observe import logger, span
from sparkdl.progress import Progress
from sparkdl.runner import run
from sparkdl.shards.manifest import Manifest, Source
from sparkdl.storage.executors import on_one_machine
from sparkdl.worker import RankReport

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_PASSED_ON = (*COLUMNS, "input_shapes", "transform_batch_size")
_SOFTWARE = ("sparkdl", "pyspark", "pyarrow", "numpy")
_UNWORTHY = {"model", "store", "run_id", "callbacks", "verbose", "timeout"}
"""Parameters that say nothing of the weights; the module itself is in the bundle."""


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
        self.params, self.spark = params, spark
        self._written: Prepared | None = None
        checks.check_parameters(params)
        num_proc = ranks_wanted(params) or slots_of(spark)
        self.store = open_store(params.getOrDefault("store"), shared_disk=on_one_machine(spark))
        try:
            self.spec = resolve(params, store=self.store, num_proc=num_proc)
            checks.check_checkpoints_used(params, self.spec)
            self.objects = pack(self.spec.objects)
            checks.check_strategy(self.spec, self.spec.objects)
            checks.check_cluster(self.spec, spark)
        except BaseException:
            self.close()
            raise

    def write(self, rows: DataFrame, held_out: DataFrame | None = None, source: Source | None = None) -> Prepared:
        """Write shards of a DataFrame, see ``data.prepare``."""
        self._written = prepare(self.spec, rows, held_out=held_out, source=source)
        return self._written

    def take(self, train: Manifest, validation: Manifest | None) -> Prepared:
        """Take shard sets that exist, see ``data.prepare_existing``."""
        checks.check_nothing_to_write(self.params)
        return prepare_existing(self.spec, train, validation)

    def train(self, prepared: Prepared) -> TorchModel:
        """Check, launch and collect.

        Raises:
            ConfigError: model, inputs, loss and settings do not fit each other.
            DataError: the rows do not fit them.
            RankFailedError: a rank failed more often than max_failures allows.
            SparkdlError: what a rank refused, as what it is: a loss that is not finite, a damaged shard.
        """
        spec, seconds = self.spec, dict(prepared.seconds)
        train, validation, roles = prepared.train, prepared.validation, spec.roles
        with span("check", seconds):
            checks.check_shards(spec, train, validation)
            objects: UserObjects = self.objects.open()  # a copy: the user's own are never called
            model = built(objects.model)
            inputs, by_column = prepared.plan.inputs(train), prepared.plan.inputs(train, by_column=True)
            manifests = [train, *([validation] if validation else [])]
            probed = probe(model, inputs, by_column, manifests, roles.labels, written=prepared.ours)
            checks.check_single_rows(spec, model, probed, train)
            wanted_columns(self.params, signature_of(probed, train), spec.meanings)  # which refuses what cannot be
            checks.warn_of_own_loss(self.params, probed, spec.meanings, train)
            if spec.own_backend is None:
                check_importable(self.objects, self.spark)
            loader, validation_loader = spec.loaders(train)
            message = FitMessage(
                objects=self.objects,
                call=probed.call,
                input_order=inputs_by_position(model, probed.call) if objects.step else (),
                labels=roles.labels,
                loss_weights=spec.loss_weights,
                sample_weight=roles.weight,
                backward_passes=spec.backward_passes,
                train_uri=train.folder or "",
                validation_uri=validation.folder if validation else None,
                batch_size=spec.batch_size,
                validation_batch_size=spec.validation_batch_size,
                shuffle=spec.shuffle,
                seed=spec.seed,
                loader=loader,
                validation_loader=validation_loader,
                train=spec.train,
                checkpoints=spec.checkpoints,
                backend=spec.backend,
                strategy=spec.strategy,
            )
            task = message.task(objects)
            checks.check_task(message, task, model, spec.num_proc)
            checks.check_losses(task, objects.losses, probed, train, validation, written=prepared.ours)
            checks.check_metrics(task, probed)
            checks.check_resume(message, model, train, validation)
        with span("launch", seconds):
            reports, num_proc = run_ranks(spec, message, self.spark)
        leader = reports[0]
        model.load_state_dict(leader.weights or {})
        model.eval()
        optimizer = _optimizer_after(objects.optimizer, model, leader)
        summary = self._summary(prepared, leader, num_proc, seconds | leader.seconds)
        return self._fitted(prepared, probed, model, optimizer, leader, summary)

    def _summary(
        self, prepared: Prepared, leader: RankReport, num_proc: int, seconds: Mapping[str, float]
    ) -> TrainingSummary:
        """The course of the fit; what looks wrong with its losses is logged, too."""
        spec, result = self.spec, leader.result
        warnings: list[str] = []
        partial = spec.train.steps_per_epoch or spec.train.validation_steps
        if spec.objects.step is None and not partial:  # else the user's step, or a part of the rows, makes the losses
            warnings = loss_warnings(
                result.history.epochs,
                result.metrics,
                dict(zip(spec.roles.labels, made_losses(spec.objects.losses), strict=True)),
                prepared.train,
                prepared.validation,
                weighted=spec.roles.weight is not None,
            )
        for sentence in warnings:
            logger.warning("%s", sentence)
        return TrainingSummary(
            run_id=spec.run_id,
            num_proc=num_proc,
            backend=leader.backend,
            epochs=result.epochs,
            steps=result.steps,
            rows=result.rows,
            training_rows=prepared.train.rows,
            validation_rows=prepared.validation.rows if prepared.validation else 0,
            best_epoch=result.best_epoch,
            metrics=dict(result.metrics),
            stopped_early=result.stop_reason if result.stopped_early else None,
            seconds=seconds,
            warnings=tuple(warnings),
        )

    def _fitted(
        self,
        prepared: Prepared,
        probed: Probe,
        module: torch.nn.Module,
        optimizer: torch.optim.Optimizer | None,
        leader: RankReport,
        summary: TrainingSummary,
    ) -> TorchModel:
        """The transformer, with where it comes from, so that whoever publishes it need not say it."""
        get, spec, result = self.params.getOrDefault, self.spec, leader.result
        model = TorchModel(
            model=module,
            history=result.history.epochs,
            optimizer=optimizer,
            loss=get("loss"),
            loss_constructors=get("loss_constructors"),
            summary=summary,
            signature=signature_of(probed, prepared.train),
            feature_columns=list(spec.roles.features),
            label_columns=list(spec.roles.labels),
            run_id=spec.run_id,
            **{name: get(name) for name in _PASSED_ON if self.params.isSet(name)},
        )
        origin = {
            "parameters": _parameters(self.params, summary, optimizer),
            "lineage": _lineage(prepared),
            "metrics": plain_epochs([result.metrics])[0],
            "columns": dict(prepared.plan.types),
        }
        model.set_origin(spec.meanings, origin)
        model._home = None if prepared.store.temporary else prepared.store.root
        return model

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


def run_ranks(spec: FitSpec, message: FitMessage, spark: SparkSession) -> tuple[list[RankReport], int]:
    """Run the ranks, and after a failure run them again from the last checkpoint, on fewer ranks if slots are gone.

    Returns:
        their reports, and how many they were in the last attempt.

    Raises:
        SparkdlError: of the last attempt that max_failures allows, or of the first that would fail again.
    """
    timeout = spec.launch.start_timeout_seconds
    # "torch" is the cheapest meeting place where there is nobody to meet
    backend = "torch" if spec.backend == "auto" and spec.num_proc == 1 else spec.backend

    def attempt(num_proc: int) -> Sequence[Payload]:
        with _progress(spec) as progress:
            if spec.own_backend is not None:
                return _run_in(spec.own_backend, message, num_proc, progress)
            with hold_slots(spark, num_proc, timeout):
                return run(
                    train_on_rank,
                    (message,),
                    num_proc=num_proc,
                    verbose=spec.launch_verbose,
                    backend=backend,
                    use_gpu=spec.use_gpu,
                    config=spec.launch,
                    spark=spark,
                    on_event=progress,
                )

    def ranks_left() -> int:
        if spec.own_backend is not None:
            return spec.num_proc
        return slots_left(spark, spec.num_proc, spec.min_num_proc, timeout)

    reports, num_proc = repeated(attempt, spec.num_proc, spec.max_failures, ranks_left)
    return [report.open(share=True) for report in reports], num_proc


def _run_in(backend: Backend, message: FitMessage, num_proc: int, progress: Progress) -> Sequence[Payload]:
    """Run the ranks where a user's own backend runs them; the events of those in this process are shown.

    Raises:
        ConfigError: it returned something else than the ranks' values.
    """
    sink = observe.set_sink(lambda event: progress({"rank": 0, **event}))
    try:
        reports = backend.run(train_in_backend, args=(message, num_proc, secrets.token_hex(16)), kwargs={}, env={})
    finally:
        observe.set_sink(sink)
    is_list = isinstance(reports, Sequence) and len(reports) == num_proc
    if not is_list or not all(isinstance(report, Payload) for report in reports):
        raise ConfigError(
            f"run() of the backend, a {type(backend).__name__} of {num_proc} processes, returned {str(reports)[:200]}: "
            "return what fn returned on each of them, in rank order"
        )
    return reports


def _progress(spec: FitSpec) -> Progress:
    if not spec.verbose:
        return Progress("off")
    if threading.current_thread() is threading.main_thread():
        return Progress()
    return Progress("lines", name=spec.run_id)  # fits side by side, as of a search, would draw over each other's bar


def _optimizer_after(given: Any, model: torch.nn.Module, leader: RankReport) -> torch.optim.Optimizer | None:
    """The optimizer as the leader's last step left it, bound to ``model``."""
    try:
        with eager():
            maker = given.func if isinstance(given, functools.partial) else given
            is_class = inspect.isclass(maker) and issubclass(maker, torch.optim.Optimizer)
            of = model.parameters() if is_class else model
            optimizer = given if isinstance(given, torch.optim.Optimizer) else given(of)
            optimizer.load_state_dict(leader.optimizer or {})
    except Exception as error:  # a function that needs what only ranks have; the fit itself is whole
        logger.warning("getOptimizer() of the fitted model is None: the optimizer cannot be made here (%s)", error)
        return None
    return optimizer


def _parameters(estimator: CheckedParams, summary: TrainingSummary, optimizer: Any) -> dict[str, Any]:
    """What the fit was given, as JSON values; what is no such value by its name."""
    values = {param.name: value for param, value in estimator._paramMap.items() if param.name not in _UNWORTHY}
    parameters = {name: _plain(value) for name, value in sorted(values.items())}
    if isinstance(optimizer, torch.optim.Optimizer):
        plain = {name: value for name, value in optimizer.defaults.items() if isinstance(value, int | float | str)}
        parameters["optimizer"] = {"name": type(optimizer).__name__, **plain}
    return {**parameters, "num_proc": summary.num_proc, "backend": summary.backend, "epochs_trained": summary.epochs}


def _plain(value: Any) -> Any:
    if isinstance(value, str):  # of a file's name that is no UTF-8 Python keeps the bytes as halves of characters
        return value.encode(errors="backslashreplace").decode()
    try:
        return as_json("", {"value": value}, ConfigError)["value"]
    except ConfigError:
        if isinstance(value, list | tuple):
            return [_plain(item) for item in value]
        if isinstance(value, Mapping):
            return {_plain(str(name)): _plain(item) for name, item in value.items()}
        return getattr(value, "__qualname__", None) or (
            str(value) if isinstance(value, torch.dtype) else type(value).__name__
        )


def _lineage(prepared: Prepared) -> dict[str, Any]:
    """Which table at which version, if it is known, the key of the shards, and the software."""
    source = prepared.train.source
    version = None if source is None or not source.version.isdigit() else int(source.version)
    software = {}
    for name in _SOFTWARE:
        try:
            software[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:  # used from its sources
            continue
    return {
        "source_table": None if source is None else source.uri,
        "source_version": version,
        "shard_key": prepared.train.content_key or None,
        "versions": software,
    }
