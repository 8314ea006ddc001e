"""A bundle as MLflow serves it: a pandas frame in, the prediction columns out; no Spark, and no MLflow."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparkdl.config import ScoreConfig
from sparkdl.errors import ConfigError, SchemaError
from sparkdl.estimator.outputs import Wanted, wanted_columns, with_outputs
from sparkdl.estimator.summary import Training, training_of
from sparkdl.features.spec import DateParts
from sparkdl.models.bundle import load_bundle
from sparkdl.models.folder import BundleInfo, read_bundle
from sparkdl.models.preprocessing import column_types, features_of
from sparkdl.models.signature import Signature
from sparkdl.scoring.models import WithFeatures
from sparkdl.scoring.rows import score_rows
from sparkdl.storage import Storage


@dataclass(frozen=True)
class Served:
    """A model that predicts in this process.

    It adds what ``sparkdl.load_model(...).predict(rows)`` adds, by the same functions. The file that MLflow runs
    (``mlflow.py`` writes it) calls this.

    Attributes:
        model: that gives the wanted outputs, alone or with its features.
        signature: of these outputs.
        columns: their names, in order.
        instants: columns of instants, of which the features take parts in a zone of theirs.
    """

    model: Any
    signature: Signature
    columns: tuple[str, ...]
    instants: frozenset[str] = frozenset()

    @staticmethod
    def load(folder: str) -> Served:
        """Load the bundle in a folder of this machine.

        A bundle of a class of yours is loaded inside ``sparkdl.allow_imports("package")``, or where the environment
        variable ``SPARKDL_ALLOW_IMPORTS`` names the package, as everywhere.

        Raises:
            IntegrityError: a file differs from its hash.
            BundleError: it cannot be rebuilt here.
        """
        info = read_bundle(Storage.of(Path(folder)))
        prediction_columns = predicted(info)
        bundle, features = load_bundle(info.folder, expected_hash=info.content_hash), features_of(info)
        model, signature = with_outputs(
            bundle.model, signature_of(info), [entry.output for entry in prediction_columns]
        )
        scored_model = model if features is None else WithFeatures(model, features)
        types = column_types(info)
        times = [entry for entry in (features.fitted if features else ()) if isinstance(entry.options, DateParts)]
        sources = [entry.options.source(entry.name) for entry in times]
        instants = frozenset(name for name in sources if types.get(name) == "timestamp")
        return Served(scored_model, signature, tuple(entry.column for entry in prediction_columns), instants)

    def predict(self, rows: Any) -> Any:
        """The prediction columns of rows.

        Args:
            rows: a pandas DataFrame with the columns that the model reads.

        Returns:
            a frame with the index of ``rows``; several numbers a row are a numpy array.

        Raises:
            SchemaError: a column is missing, or of a type that the model cannot take; or instants come without their
                zone, as Spark hands them to a pandas function.
            DataError: a value is missing or wrong where the model or a feature refuses that.
        """
        import pandas as pd

        for name in sorted(self.instants & set(rows.columns)):
            if getattr(rows[name].dtype, "kind", "") == "M" and getattr(rows[name].dtype, "tz", None) is None:
                raise SchemaError(
                    f"column {name!r} held instants in training and comes without a time zone: give it one by "
                    "dt.tz_localize, or instead of spark_udf use sparkdl.load_model(...).transform"
                )
        table = score_rows(self.model, rows, signature=self.signature, config=ScoreConfig(device="cpu"))
        predictions = {
            name: table.column(position).to_pandas().to_numpy() for position, name in enumerate(self.columns)
        }
        return pd.DataFrame(predictions, index=rows.index)


def signature_of(info: BundleInfo) -> Signature:
    """How a bundle's model is fed.

    Raises:
        ConfigError: it was saved without.
    """
    if info.signature is None:
        raise ConfigError(f"the bundle {info.uri} has no signature, so nobody can feed it: save it with signature=")
    return info.signature


def predicted(info: BundleInfo) -> list[Wanted]:
    """The prediction columns of a bundle's model, as its training named them."""
    training = training_of(info)
    return wanted_columns(_Asked(training), signature_of(info), training.meanings)


@dataclass(frozen=True)
class _Asked:
    """What a bundle says of its prediction columns, as an estimator's parameters do."""

    training: Training

    def getOrDefault(self, param: str) -> Any:
        return {str(name): value for name, value in self.training.columns.items()}.get(param)
