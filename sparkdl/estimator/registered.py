"""Models of a registry as transformers, and a registry that scores; Spark and torch load with the first model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from sparkdl.errors import ConfigError
from sparkdl.models import registry as base
from sparkdl.models.reference import reference
from sparkdl.models.trust import pickle_allowed

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from sparkdl.estimator.model import TorchModel
    from sparkdl.interchange.mlflow import Mirrored


class ModelRegistry(base.ModelRegistry):
    """A registry of models, by its address, see ``sparkdl.models.registry``; it scores, too."""

    def load_model(self, model: str, *, allow_pickle: bool = False, trusted: Sequence[str] = ()) -> TorchModel:
        """Return a published model as a transformer, see ``sparkdl.load_model``."""
        return load_model(model, self, allow_pickle=allow_pickle, trusted=trusted)

    def transform(
        self, df: DataFrame, model: str, *, allow_pickle: bool = False, trusted: Sequence[str] = ()
    ) -> DataFrame:
        """Add a published model's predictions to a DataFrame; nothing runs before an action does.

        Args:
            df: the rows.
            model: ``"name@alias"`` or ``"name@version"``.
            allow_pickle: as ``sparkdl.load_model`` takes it.
            trusted: as ``sparkdl.load_model`` takes it.

        Raises:
            ConfigError: there is no such model, alias or version.
            BundleError: it cannot be rebuilt here.
            SchemaError: an input column is missing or of another kind, or an output column is there already.
        """
        return self.load_model(model, allow_pickle=allow_pickle, trusted=trusted).transform(df)

    def mirror(self, model: str, uri: str, **there: Any) -> Mirrored:
        """Mirror a version and the aliases that point to it to MLflow; what stands there already is left.

        Args:
            model: ``"churn@champion"``, ``"churn@3"``, or ``"churn"`` for the newest version.
            uri: of MLflow's server or store, such as ``"http://mlflow:5000"``.
            there: ``name`` of the model there, ``experiment``, ``registry_uri``; see ``sparkdl.interchange.mlflow``.

        Raises:
            ConfigError: there is no such model, alias or version; or MLflow is not installed.
            BundleError: the bundle holds a pickle.
            StorageError: MLflow does not answer, or refuses something.
        """
        from sparkdl.interchange.mlflow import mirror

        return mirror(self, model, uri, **there)


def load_model(
    model: str, registry: str | base.ModelRegistry, *, allow_pickle: bool = False, trusted: Sequence[str] = ()
) -> TorchModel:
    """Return a published model: ``transform(df)`` for Spark, ``predict(rows)`` for pandas, ``getModel()`` for torch.

    Args:
        model: ``"churn@champion"``, or ``"churn@3"`` for a version.
        registry: its address, or the registry.
        allow_pickle: accept a bundle that holds a pickle, which can run any code, as inside of ``allow_pickle()``.
        trusted: packages that may be imported to rebuild it, such as your own, besides those of ``allow_imports``.

    Raises:
        ConfigError: there is no such model, alias or version; the message lists those there are.
        IntegrityError: what lies there is not what was published.
        BundleError: it cannot be rebuilt here, or has no signature.

    Example:
        >>> sparkdl.load_model("churn@champion", registry="s3://models").transform(df)
    """
    from sparkdl.estimator.model import TorchModel
    from sparkdl.estimator.summary import training_of
    from sparkdl.models.preprocessing import column_types, features_of

    source = registry if isinstance(registry, base.ModelRegistry) else base.ModelRegistry(registry)
    name, version_or_alias = reference(model)
    if version_or_alias is None:
        examples = [f"{name}@{alias}" for alias in source.aliases(name)] or [f"{name}@champion", f"{name}@3"]
        raise ConfigError(f"{model!r} does not say which version: write {' or '.join(examples[:3])}")
    published = source.get(name, version_or_alias)
    bundle = source.load(name, published.version, allow_pickle=allow_pickle or pickle_allowed(), trusted=trusted)
    signature, training = bundle.signature, training_of(bundle.info)
    if signature is None:
        raise ConfigError(f"{model} was published without a signature, so nobody can feed it: publish it with one")
    features = features_of(bundle.info, trusted)
    history = [{key: math.nan if number is None else number for key, number in row.items()} for row in training.history]
    columns: dict[str, Any] = {str(parameter): value for parameter, value in training.columns.items()}
    origin = {
        "parameters": published.parameters,
        "lineage": {field: value for field, value in published.lineage.items() if field != "parent"},  # of that model
        "metrics": published.metrics,
        "columns": column_types(bundle.info),
    }
    loaded = TorchModel(
        model=bundle.model,
        history=history,
        signature=signature,
        feature_columns=list(signature.columns if features is None else features.columns),
        label_columns=signature.answers,
        **columns,
    )
    return loaded.set_origin(training.meanings, origin).setFeatures(features)
