"""TorchModel: a fitted PyTorch model as a Spark ML transformer, whose schema is known before any job runs."""

from __future__ import annotations

import math
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch
from pyspark.ml import Model
from pyspark.ml.util import MLReadable, MLReader, MLWritable, MLWriter
from pyspark.sql import DataFrame

from sparkdl.columns.layout import plan_tensors
from sparkdl.columns.names import tells_cases_apart
from sparkdl.errors import ConfigError
from sparkdl.estimator.checks import check_frame
from sparkdl.estimator.column_plan import Roles, plan_columns
from sparkdl.estimator.model_call import check_forms, floating_dtype, probe, signature_of
from sparkdl.estimator.outputs import OutputSpec, Wanted, meanings_of, wanted_columns
from sparkdl.estimator.params.params import CheckedParams, check_conflicts, declare, set_defaults
from sparkdl.estimator.params.spec import MODEL_SPECS
from sparkdl.estimator.publishing import publish_bundle, write_bundle
from sparkdl.estimator.rank import made_losses
from sparkdl.estimator.saving.artifacts import Withheld
from sparkdl.estimator.saving.persistence import ModelReader, ModelWriter
from sparkdl.estimator.summary import COLUMNS, TrainingSummary, epoch_rows, horovod_history, plain_epochs, plot_epochs
from sparkdl.estimator.transform import Published, Weights, predict_rows, publish, score_frame
from sparkdl.features.fitted import Features
from sparkdl.models.calling import check_batch_norm
from sparkdl.models.preprocessing import preprocessing_of
from sparkdl.models.signature import Signature
from sparkdl.observe import facts_table, metrics_text, shortened
from sparkdl.shards.manifest import Manifest
from sparkdl.shards.write import spark_arrow_schema
from sparkdl.storage import Storage
from sparkdl.train.objective.labels import Meaning

if TYPE_CHECKING:
    from sparkdl.models.folder import Adjustment, BundleInfo
    from sparkdl.models.registry import Lineage, ModelRegistry, ModelVersion


@declare(MODEL_SPECS)
class TorchModel(CheckedParams, Model, MLReadable["TorchModel"], MLWritable):
    """A transformer that adds a model's predictions.

    Fitted by ``TorchEstimator``; or made around a model that was trained elsewhere, with ``feature_columns``,
    ``label_columns`` and, for anything but number columns, ``input_shapes``.

    Args:
        model: the module.
        history: epochs as ``getHistory()`` returns them, or rows of the epoch table.
        optimizer: the optimizer that trained it, bound to its parameters.
        loss: the loss that it was trained with.
        loss_constructors: functions that made the loss.
        summary: the course of the fit.
        signature: how the model is fed; found out from the columns if it is not given.
        params: plain parameters; see ``explainParams()``.
    """

    def __init__(
        self,
        *,
        model: torch.nn.Module | None = None,
        history: Sequence[Any] | None = None,
        optimizer: Any = None,
        loss: Any = None,
        loss_constructors: Any = None,
        summary: TrainingSummary | None = None,
        signature: Signature | None = None,
        **params: Any,
    ) -> None:
        super().__init__()
        set_defaults(self)
        self._model = checked_module(model)
        self._features: Features | None = None
        self._meanings: Mapping[str, Meaning] | None = None
        self._origin: dict[str, Any] = {}
        self._history, self._summary = epoch_rows(history), summary
        self._optimizer, self._loss, self._loss_constructors = optimizer, loss, loss_constructors
        self._published: dict[tuple[Signature, tuple[OutputSpec, ...]], tuple[Weights, Published]] = {}
        self._home: Storage | None = None
        self._lock = threading.Lock()
        self.setParams(**params).set_signature(signature)

    def __repr__(self) -> str:
        return f"{self.uid}: {'; '.join(self._facts().values())}"

    def _repr_html_(self) -> str:
        return facts_table(self.uid, self._facts())

    def _facts(self) -> dict[str, str]:
        """What is worth seeing at a glance."""
        if self._model is None:
            return {"model": "no model"}
        size = sum(parameter.numel() for parameter in self._model.parameters())
        columns = [shortened(self.getOrDefault(name) or ["?"]) for name in ("feature_columns", "label_columns")]
        facts = {
            "model": f"{type(self._model).__name__} of {size:,} parameters",
            "columns": " -> ".join(columns),
            "training": f"{len(self._history)} epochs" if self._history else "",
            "metrics": metrics_text(self._origin.get("metrics") or (self._history[-1] if self._history else {})),
        }
        return {name: text for name, text in facts.items() if text}

    def __getstate__(self) -> dict[str, Any]:
        state = {name: value for name, value in self.__dict__.items() if name not in ("_lock", "_published")}
        return {**state, "_home": self._home and self._home.spark_uri}  # without what opens it

    def __setstate__(self, state: dict[str, Any]) -> None:
        home = state["_home"]
        self.__dict__.update(state, _home=home and Storage.of(home), _lock=threading.Lock(), _published={})

    def transform(self, dataset: DataFrame, params: Any = None) -> DataFrame:
        """Return the rows with the prediction columns behind them; nothing runs before an action does.

        Raises:
            ConfigError: the model or the names of its columns are not set.
            SchemaError: an input column is missing or of another kind, or an output column is there already.
        """
        check_frame("transform", dataset)
        return super().transform(dataset, params)

    def predict(self, rows: Any) -> Any:
        """Return pandas rows with the prediction columns behind them, in this process: small data, same numbers.

        Args:
            rows: a pandas DataFrame with the columns that ``transform`` reads. NaN is a missing value, as everywhere in
                pandas; to Spark it is a number, which ``transform`` gives to a model as it is.

        Returns:
            a new frame; several numbers a row are a numpy array.

        Raises:
            ConfigError: nobody knows yet how the model is fed.
            SchemaError: an input column is missing or of another kind, or an output column is there already.
            DataError: a value is missing where the model takes none.
        """
        check_conflicts(self)
        signature = self.signature
        if signature is None:
            raise ConfigError("this TorchModel has no signature, so nobody can feed it pandas rows: give signature=")
        prediction_columns = wanted_columns(self, signature, self._known_meanings(signature))
        batch_rows = self.getOrDefault("transform_batch_size")
        return predict_rows(rows, self.getModel(), signature, prediction_columns, batch_rows, self._features)

    def save_bundle(
        self,
        uri: str | Storage,
        *,
        factory: str | Callable[..., torch.nn.Module] | None = None,
        arguments: Mapping[str, Any] | None = None,
        preprocessing: Mapping[str, Any] | None = None,
        allow_pickle: bool = False,
        adjustments: Sequence[Adjustment] = (),
    ) -> BundleInfo:
        """Write the model as a bundle, with its signature, features, history and the meaning of its outputs.

        Args:
            uri: a folder that does not exist yet.
            factory: as ``sparkdl.models.bundle.save_bundle`` takes it; needed for a class whose arguments cannot be
                told from its attributes.
            arguments: of the factory.
            preprocessing: more JSON values that travel with the model.
            allow_pickle: fall back on a pickle; loading it then needs the same word.
            adjustments: what whoever loads it gets in place of the network's outputs, one each.

        Raises:
            BundleError: the model cannot be rebuilt from it.
            ConflictError: something is at ``uri`` already.
            StorageError: it cannot be written there.
        """
        return write_bundle(
            self.getModel(), uri, signature=self.signature, training=self._training(),
            preprocessing=preprocessing_of(self._features, self.origin.get("columns"), **(preprocessing or {})),
            factory=factory, arguments=arguments, allow_pickle=allow_pickle, adjustments=adjustments,
        )  # fmt: skip

    def publish(
        self,
        registry: str | ModelRegistry,
        name: str,
        *,
        metrics: Mapping[str, float] | None = None,
        parameters: Mapping[str, Any] | None = None,
        lineage: Lineage | None = None,
        publication: str | None = None,
        first_alias: str | None = "champion",
        mlflow: str | None = None,
        factory: str | Callable[..., torch.nn.Module] | None = None,
        arguments: Mapping[str, Any] | None = None,
        preprocessing: Mapping[str, Any] | None = None,
        allow_pickle: bool = False,
    ) -> ModelVersion:
        """Publish as the next version of ``name``; ``sparkdl.load_model`` gives it back.

        Parameters of the fit, table and version of ``fit_on_table``, the key of its shards, history and software are
        recorded without being asked.

        Args:
            registry: or its address.
            name: of the model: letters, digits, ``_``, ``-`` and ``.``.
            metrics: what it achieved; by default losses and metrics of the epoch that the weights belong to.
            parameters: more of them, JSON values.
            lineage: what is set here wins over what was recorded.
            publication: with the same one again nothing is published, and the version that it made is returned.
            first_alias: that the first version of ``name`` gets, so that ``load_model("name@champion")`` finds it; None
                for none. Later versions get it by ``ModelRegistry.promote_if_better`` or ``set_alias``.
            mlflow: address of an MLflow server or store to mirror the version to; if it is away, the log says how to do
                that later.
            factory: as ``save_bundle`` takes it.
            arguments: of the factory.
            preprocessing: more JSON values that travel with the model.
            allow_pickle: fall back on a pickle; loading it then needs the same word.

        Raises:
            BundleError: the model cannot be rebuilt from a bundle; the message says what to give.
            ConfigError: a name, metric or parameter is unusable.
            StorageError: the registry cannot be written.
        """
        with tempfile.TemporaryDirectory(prefix="sparkdl-publish-") as folder:
            bundle_folder = Storage.of(Path(folder)).child("bundle")
            self.save_bundle(
                bundle_folder,
                factory=factory,
                arguments=arguments,
                preprocessing=preprocessing,
                allow_pickle=allow_pickle,
            )
            return publish_bundle(
                registry, name, bundle_folder, self._origin,
                metrics=metrics, parameters=parameters, lineage=lineage, publication=publication,
                first_alias=first_alias, mlflow=mlflow,
            )  # fmt: skip

    @property
    def origin(self) -> dict[str, Any]:
        """The origin of the model: ``parameters``, ``lineage``, ``metrics`` and types of ``columns`` of its fit."""
        if self._signature is None or "columns" not in self._origin:
            return dict(self._origin)
        names = renaming(self, self._signature, self._order, self._features)
        return {
            **self._origin,
            "columns": {names.get(column, column): kind for column, kind in self._origin["columns"].items()},
        }

    def _transform(self, dataset: DataFrame) -> DataFrame:
        return score_frame(dataset, *self._asked(dataset))

    def _asked(self, dataset: DataFrame) -> tuple[Published, list[Wanted], int, Features | None]:
        """The place where workers find the model, the columns that it gives, rows of a batch, and its features."""
        check_conflicts(self)
        if self._features is not None and self._signature is None:
            raise ConfigError(
                "this TorchModel has features and no signature: give signature=, which names their inputs"
            )
        with self._lock:
            signature = self.signature or signature_for(self, self.getModel(), dataset)
            prediction_columns = wanted_columns(self, signature, self._known_meanings(signature))
            outputs = tuple(column.output for column in prediction_columns)
            # The copies that a param map makes share this dict: each combination of inputs and outputs is written once.
            key, model = (signature, outputs), self.getModel()
            weights, published = self._published.get(key, (None, None))
            if weights is None or published is None or not weights.are_those_of(model):
                weights = Weights(model)
                published = publish(model, signature, outputs, dataset.sparkSession, self._home)
                self._published[key] = weights, published
            return published, prediction_columns, self.getOrDefault("transform_batch_size"), self._features

    def _known_meanings(self, signature: Signature) -> Mapping[str, Meaning] | None:
        losses_given = self._loss_constructors or self._loss
        if self._meanings is not None or losses_given is None or isinstance(losses_given, Withheld):
            return self._meanings
        labels = [field.name for field in signature.outputs]
        losses = list(losses_given) if isinstance(losses_given, Sequence) else [losses_given] * len(labels)
        return meanings_of(labels, made_losses(losses * len(labels) if len(losses) == 1 else losses))

    def _training(self) -> dict[str, Any]:
        """What of the training travels in a bundle, as ``estimator.summary`` has it."""
        return {
            "history": plain_epochs(self.history.drop(columns="seconds", errors="ignore").to_dict("records")),
            "meanings": None if self._signature is None else self._known_meanings(self._signature),
            "columns": {name: self.getOrDefault(name) for name in COLUMNS if self.isSet(name)},
        }

    def _objects(self) -> dict[str, Any]:
        """What is saved beside the model."""
        return {
            "history": self._history,
            "optimizer": self._optimizer,
            "loss": self._loss,
            "loss_constructors": self._loss_constructors,
            "summary": self._summary,
            "meanings": self._meanings,
            "origin": self.origin,
        }

    def copy(self, extra: Any = None) -> TorchModel:
        """Return a copy that shares the module, with other parameters."""
        that: TorchModel = super().copy(extra)
        that._published, that._lock, that._home = self._published, self._lock, self._home
        return that

    def write(self) -> MLWriter:
        """Return a writer: ``write().overwrite().save(path)``."""
        return ModelWriter(self)

    @classmethod
    def read(cls) -> MLReader[TorchModel]:
        """Return a reader: ``read().load(path)``."""
        return ModelReader(cls)

    @property
    def signature(self) -> Signature | None:
        """How the model is fed and what it answers, its columns called as feature_columns and label_columns say.

        None if it was made around a module without one.

        Raises:
            ConfigError: feature_columns, input_shapes or label_columns do not fit the model.
        """
        if self._signature is None:
            return None
        return renamed(self, self._signature, renaming(self, self._signature, self._order, self._features))

    def set_signature(self, value: Signature | None) -> TorchModel:
        """Set how the model is fed: feature_columns, as they are now, are its columns in their order."""
        self._signature, self._order = value, self.getOrDefault("feature_columns")
        return self

    def setModel(self, value: torch.nn.Module) -> TorchModel:
        """Put another module in its place, with the same inputs and outputs; what was noted of its training goes."""
        self._model, self._published, self._summary = checked_module(value), {}, None
        return self.set_origin(self._meanings, {"columns": self._origin.get("columns", {})}).setHistory(())

    @property
    def history(self) -> Any:
        """The epochs as a pandas DataFrame: losses, metrics, learning rate, seconds and rows."""
        import pandas as pd

        return pd.DataFrame(self._history)

    @property
    def summary(self) -> TrainingSummary:
        """The course of the fit.

        Raises:
            ConfigError: this model was not fitted by sparkdl.
        """
        if self._summary is None:
            raise ConfigError("this model has no summary: it was made around a module, not fitted")
        return self._summary

    @property
    def hasSummary(self) -> bool:
        """Whether there is a summary."""
        return self._summary is not None

    def plot_history(self) -> Any:
        """Draw losses and metrics over epochs; return the matplotlib figure."""
        return plot_epochs(self._history)

    def getModel(self) -> torch.nn.Module:
        """Return the module, on the CPU, in evaluation mode.

        Raises:
            ConfigError: there is none.
        """
        if self._model is None:
            raise ConfigError("this TorchModel holds no model: give model=, or use TorchModel.load(path)")
        return self._model

    def getHistory(self) -> list[dict[str, Any]]:
        """Return the epochs in Horovod's form: ``{"epoch", "train": {...}, "validation": {...}}``."""
        return horovod_history(self._history)

    def setHistory(self, value: Sequence[Any]) -> Self:
        """Set the epochs: rows of the epoch table, or as ``getHistory()`` returns them."""
        self._history = epoch_rows(value)
        return self

    def getOptimizer(self) -> Any:
        """Return the optimizer with its state after the last step, bound to the parameters of ``getModel()``.

        None where it was given as a function that only works on a rank.

        Raises:
            BundleError: it is saved as a pickle, and whoever loaded this model has not allowed any.
        """
        return _given(self._optimizer)

    def setOptimizer(self, value: Any) -> Self:
        """Set the optimizer."""
        self._optimizer = value
        return self

    def getLoss(self) -> Any:
        """Return the loss that the model was trained with.

        Raises:
            BundleError: it is saved as a pickle, and whoever loaded this model has not allowed any.
        """
        return _given(self._loss)

    def setLoss(self, value: Any) -> Self:
        """Set the loss."""
        self._loss = value
        return self

    def getLossConstructors(self) -> Any:
        """Return the functions that made the loss.

        Raises:
            BundleError: they are saved as a pickle, and whoever loaded this model has not allowed any.
        """
        return _given(self._loss_constructors)

    def setLossConstructors(self, value: Any) -> Self:
        """Set the functions that made the loss."""
        self._loss_constructors = value
        return self

    def setLabelColoumns(self, value: list[str]) -> Self:
        """Set label_columns, under the name that Horovod misspells."""
        return self.setParams(label_columns=value)  # type: ignore[no-any-return]

    def getFeatures(self) -> Features | None:
        """Return the features that make the model's inputs of raw columns; None if it takes columns as they are."""
        return self._features

    def set_origin(self, meanings: Mapping[str, Meaning] | None, origin: Mapping[str, Any] | None) -> TorchModel:
        """Set what only the fit knew: by label what its output means (None: the loss tells), and ``origin``."""
        self._meanings, self._origin = meanings, dict(origin or {})
        return self

    def setFeatures(self, value: Features | None) -> TorchModel:
        """Set the features that the model was trained with: ``transform`` reads their raw columns from now on."""
        self._features = value
        return self


def checked_module(given: Any) -> torch.nn.Module | None:
    """Return the module, which is one, and says of a row the same whatever lies beside it.

    Raises:
        ConfigError: it is something else, or has batch norm without running statistics.
    """
    if given is None:
        return None
    if isinstance(given, torch.nn.Module):
        check_batch_norm(given)
        return given
    name = getattr(given, "__name__", type(given).__name__)
    raise ConfigError(
        f"model={name} is no torch.nn.Module: give the module itself, such as {name}(...), with its weights"
    )


def _given(value: Any) -> Any:
    if isinstance(value, Withheld):
        raise value.refusal()
    return value


def signature_for(params: CheckedParams, model: torch.nn.Module, df: DataFrame) -> Signature:
    """Find out how a model that sparkdl did not fit is fed, from the frame's schema and two rows of zeros.

    Raises:
        ConfigError: feature_columns or label_columns are not set, or a column's size needs input_shapes.
    """
    features, labels = params.getOrDefault("feature_columns"), params.getOrDefault("label_columns")
    if not features or not labels:
        raise ConfigError("feature_columns and label_columns are not set: name the model's inputs and outputs")
    shapes = params.getOrDefault("input_shapes")
    roles = Roles(
        features=tuple(features),
        labels=(),
        shapes=tuple(tuple(shape) for shape in shapes) if shapes else None,
        float_dtype=floating_dtype(model),
    )
    plan = plan_columns(df.schema, roles, cases=tells_cases_apart(df))
    check_forms(model, plan.varying)
    schema = spark_arrow_schema(plan.select(df), plan.columns)
    sizes = dict(zip(features, shapes or (), strict=False))
    tensors = []
    for spec in plan_tensors(schema, columns=plan.columns, layout=plan.layout):
        if -1 in spec.shape:
            if spec.columns[0] not in sizes or spec.ragged:
                raise ConfigError(f"the size of {spec.columns[0]!r} is not known without input_shapes: set it")
            spec = replace(spec, shape=(math.prod(sizes[spec.columns[0]][1:]),))
        tensors.append(spec)
    manifest = Manifest(rows=2, bytes=0, shards=(), tensors=tuple(tensors))
    inputs, by_column = plan.inputs(manifest), plan.inputs(manifest, by_column=True)
    return signature_of(probe(model, inputs, by_column, [manifest], labels), manifest)


def renaming(
    params: CheckedParams, signature: Signature, order: Sequence[str] | None, features: Features | None
) -> dict[str, str]:
    """Which columns feature_columns names in the place of those that a model was made for, by position.

    Args:
        params: of the model.
        signature: as it was made.
        order: feature_columns when it was made; if these are no columns of the signature, its own order counts.
        features: that make the model's inputs of raw columns, which they know by name.

    Returns:
        by column of the signature, its other name; of those that keep theirs, nothing.

    Raises:
        ConfigError: feature_columns or input_shapes do not fit the signature.
    """
    signature_columns = signature.columns
    default_order = list(order) if order and sorted(order) == sorted(signature_columns) else signature_columns
    now = params.getOrDefault("feature_columns") or default_order
    _check_shapes(signature, default_order, params.getOrDefault("input_shapes"))
    if features is not None:
        raw = list(features.columns)
        if now not in (default_order, raw):
            raise ConfigError(
                f"feature_columns={now} cannot rename {raw}, which the model's features know by name: rename the "
                "columns of the rows instead"
            )
        return {}
    if len(now) != len(default_order):
        raise ConfigError(
            f"feature_columns={now} are {len(now)} names for the {len(default_order)} columns {default_order} that the "
            "model takes: name one for each, in this order"
        )
    return {old: new for old, new in zip(default_order, now, strict=True) if old != new}


def _check_shapes(signature: Signature, columns: Sequence[str], shapes: Sequence[Sequence[int]] | None) -> None:
    if shapes and len(shapes) != len(columns):
        raise ConfigError(
            f"input_shapes gives {len(shapes)} shapes for the {len(columns)} columns {list(columns)}: give one for each"
        )
    for column, shape in zip(columns, shapes or (), strict=False):
        field = next(tensor_input for tensor_input in signature.inputs if column in tensor_input.columns)
        expected = [-1, -1] if None in field.shape else [-1, *field.shape]
        if list(shape) != expected or len(field.columns) > 1:
            raise ConfigError(
                f"input_shapes gives {list(shape)} for {column!r}, and the model was made to take {expected} of "
                f"{list(field.columns)}: leave it as it was, or fit again"
            )


def renamed(params: CheckedParams, signature: Signature, columns: Mapping[str, str]) -> Signature:
    """The same model, fed from other columns, its outputs called as label_columns says.

    What the model itself calls its inputs and outputs stays.

    Args:
        params: of the model.
        signature: as it was made.
        columns: by column, its other name.

    Raises:
        ConfigError: label_columns are not as many as the outputs.
    """
    labels = params.getOrDefault("label_columns") or signature.answers
    if len(labels) != len(signature.outputs):
        raise ConfigError(
            f"label_columns={labels} are {len(labels)} names for the {len(signature.outputs)} outputs "
            f"{signature.answers} of the model: name one for each, in this order"
        )
    inputs = tuple(
        replace(field, columns=tuple(columns.get(name, name) for name in field.columns)) for field in signature.inputs
    )
    return replace(signature, inputs=inputs, labels=tuple(labels))
