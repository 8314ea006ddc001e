"""A version of our registry in MLflow: a run, a logged model, a registered version, aliases."""

from __future__ import annotations

import datetime
import importlib.metadata
import importlib.util
import json
import math
import os
import re
import shlex
import shutil
import sqlite3
import struct
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from sparkdl.config import require
from sparkdl.documents.typed import encode
from sparkdl.errors import BundleError, IntegrityError, SparkdlError, StorageError
from sparkdl.features.fitted import Features, Fitted
from sparkdl.features.spec import Category, DateParts, Ids, Image, Number, Text, Vector
from sparkdl.features.statistics import PROBABILITIES
from sparkdl.models.copies import copy_bundle
from sparkdl.models.folder import BundleInfo, read_bundle
from sparkdl.models.reference import reference
from sparkdl.models.registry import ModelRegistry, ModelVersion
from sparkdl.models.signature import Signature, TensorField
from sparkdl.observe import logger
from sparkdl.storage import Storage, sha256_hex

T = TypeVar("T")

IDENTITY = "sparkdl.publication"
"""The tag by which a version is found again."""
_LOGGED = "sparkdl.logged"
"""The tag of a run in which everything stands."""
MOST_METRICS, MOST_OTHERS = 1000, 100
"""The most items in one request of MLflow's ``log_batch``; the most parameters, and tags, each."""
MOST_BYTES = 400_000
"""The most bytes of parameters, and of tags, in one request, which MLflow bounds by a million in all."""
_KEY_LETTERS, _VALUE_LETTERS = 250, 6000
_NOT_CURVES = ("epoch", "step", "rows", "seconds")

_CODE = '''"""What MLflow runs to load a sparkdl model: the installed sparkdl reads the bundle that lies beside it."""

from mlflow.models import set_model
from mlflow.pyfunc import PythonModel
from pandas import DataFrame

from sparkdl.interchange.served import Served


class Bundle(PythonModel):
    def load_context(self, context):
        self.served = Served.load(context.artifacts["bundle"])

    def predict(self, context, model_input: DataFrame, params=None) -> DataFrame:
        return self.served.predict(model_input)


set_model(Bundle())
'''

_CLOSED = {"float": "double", "double": "double", "string": "string", "boolean": "boolean", "binary": "binary"}
"""Spark's types that are told to MLflow, by its own names; it would not take a double for a float."""
_TIMES = dict.fromkeys(("date", "timestamp_ntz"), "datetime")
"""The same for parts of dates, which are taken as they are written."""

_OUTPUTS = {
    **dict.fromkeys(("float64",), "double"),
    **dict.fromkeys(("float32", "float16", "bfloat16"), "float"),
    **dict.fromkeys(("int64",), "long"),
    **dict.fromkeys(("int32", "int16", "int8", "uint8"), "integer"),
    "bool": "boolean",
}
_MEDIAN = PROBABILITIES.index(0.5)
_GREY_POINT = (
    struct.pack("<2sIHHI", b"BM", 58, 0, 0, 54)
    + struct.pack("<IiiHHIIiiII", 40, 1, 1, 1, 24, 0, 4, 2835, 2835, 0, 0)
    + bytes([127, 127, 127, 0])
)
"""A picture (BMP)."""

_SETTINGS = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",  # its own 7 keep a publication waiting for four minutes
}
_MOST_LETTERS = 200
"""The letters kept of what MLflow says of a failure; pages of a proxy are longer."""


@dataclass(frozen=True, kw_only=True)
class Mirrored:
    """What stands in MLflow for a version.

    Attributes:
        uri: of MLflow, without a password.
        name: of the registered model.
        version: of it, as MLflow counts.
        run_id: of the run.
        model_id: of the logged model.
        aliases: that were set.
        missing: what this registry does not hold: tags, or aliases by name.
    """

    uri: str
    name: str
    version: str
    run_id: str
    model_id: str
    aliases: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()

    def __str__(self) -> str:
        text = f"{self.name} version {self.version} of {self.uri}, run {self.run_id}"
        text += f", {', '.join(self.aliases)}" if self.aliases else ""
        return f"{text}; that registry does not hold {' and '.join(self.missing)}" if self.missing else text


def mirror(
    registry: str | ModelRegistry,
    model: str,
    uri: str,
    *,
    name: str | None = None,
    experiment: str | None = None,
    registry_uri: str | None = None,
) -> Mirrored:
    """Mirror a version to MLflow, unless that was done; its aliases follow ours in any case.

    Each part is looked for before it is made, the run by the publication's identity, the others by their run: a mirror
    that was cut off is simply made again. Our registry stays the one that decides; nothing is read back from MLflow.

        run               parameters, metrics, curves of the epochs, tags, the table and version it was trained on
        logged model      the bundle in a folder of MLflow's, without a pickle; ``served.py`` is what that loads
        registered model  a version with description, tags and the aliases that point to ours now

    Args:
        registry: of sparkdl, or its address.
        model: ``"churn@champion"``, ``"churn@3"``, or ``"churn"`` for the newest version.
        uri: of MLflow's tracking server or store: ``http://...``, ``sqlite:///...``, ``databricks``.
        name: of the registered model, such as ``"main.ml.churn"``; by default as in our registry.
        experiment: that the run belongs to; by default ``MLFLOW_EXPERIMENT_NAME``, or the model's name.
        registry_uri: of MLflow's model registry, if it is another address; by default ``MLFLOW_REGISTRY_URI``, or what
            MLflow takes for ``uri``.

    Raises:
        ConfigError: there is no such model, version or alias; MLflow is not installed; or its address is empty, or of a
            store that is gone with this process.
        BundleError: the bundle holds a pickle.
        IntegrityError: the bundle is not the one that was published; or the registry's key has not signed the version.
        StorageError: MLflow does not answer, or refuses something; again later makes what is missing.
    """
    registry = registry if isinstance(registry, ModelRegistry) else ModelRegistry(registry)
    version = find_version(registry, model)
    info = registry.bundle(version.name, version.version)
    check_servable(info)
    with opened(uri, registry_uri) as client:
        experiment_name = experiment or os.environ.get("MLFLOW_EXPERIMENT_NAME") or version.name
        run = _run(client, _experiment(client, experiment_name, uri), registry.uri, version, info)
        model_id, source = _logged_model(client, run, version, info)
        if not uri.startswith(("http", "databricks")):
            source = client.get_logged_model(model_id).artifact_location  # a store by itself does not know its own ids
        registered = _registered(client, name or version.name, run.info.run_id, version, model_id, source)
        aliases, missing = _noted(client, registered, registry, version)
    mirrored = Mirrored(
        uri=shown(uri),
        name=registered.name,
        version=str(registered.version),
        run_id=run.info.run_id,
        model_id=model_id,
        aliases=aliases,
        missing=missing,
    )
    logger.info("%s version %d is mirrored as %s", version.name, version.version, mirrored)
    return mirrored


def check_mirror(bundle: str | Storage) -> None:
    """Refuse, before a bundle is published, what could not be mirrored then.

    Raises:
        ConfigError: MLflow is not installed.
        BundleError: the bundle holds a pickle.
    """
    check_installed()
    check_servable(read_bundle(bundle))


def mirror_published(registry: ModelRegistry, version: ModelVersion, uri: str) -> Mirrored | None:
    """Mirror what was just published; if that fails, say in the log by which command it is made again, return None."""
    model = f"{version.name}:{version.version}"
    try:
        return mirror(registry, model, uri)
    except SparkdlError as refusal:
        words = ("sparkdl", "models", "mirror", registry.uri, model, "--to", shown(uri))
        logger.warning("%s stays published in %s: %s, by %s", model, registry.uri, refusal, shlex.join(words))
        return None


def find_version(registry: ModelRegistry, model: str) -> ModelVersion:
    """The version that ``name@alias``, ``name@3``, ``name:3`` or ``name`` (the newest) means, as ``get`` gives it.

    Raises:
        ConfigError: there is none; the message lists those there are.
        IntegrityError: the registry was opened with a key that has not signed it.
    """
    name, which = reference(model)
    if which is not None:
        return registry.get(name, which)
    versions = registry.list(name)
    return registry.get(name, versions[-1].version if versions else 1)  # which says what models there are


def _experiment(client: Any, name: str, uri: str) -> str:
    experiment = client.get_experiment_by_name(name)
    if experiment is None:
        # where MLflow itself would put artifacts depends on the folder that this process happens to be in
        beside = Path(uri.removeprefix("sqlite:///").partition("?")[0]).absolute().parent / "mlartifacts"
        try:
            return str(client.create_experiment(name, beside.as_uri() if uri.startswith("sqlite:///") else None))
        except Exception:  # another mirror was faster
            experiment = client.get_experiment_by_name(name)
            if experiment is None:
                raise
    is_active = experiment.lifecycle_stage == "active"
    require(is_active, f"MLflow's experiment {name!r} is deleted: restore it, or name another")
    return str(experiment.experiment_id)


def _run(client: Any, experiment: str, registry: str, version: ModelVersion, info: BundleInfo) -> Any:
    """The run of a publication, with all that it says."""
    identity = identity_of(version)
    runs = client.search_runs([experiment], f"tags.`{IDENTITY}` = '{identity}'", max_results=1)
    when = int(version.published.timestamp() * 1000)
    run = runs[0] if runs else client.create_run(
        experiment, start_time=when, tags={IDENTITY: identity}, run_name=f"{version.name} {version.version}"
    )  # fmt: skip
    if _LOGGED not in run.data.tags:
        _log(client, run, registry, version, info)
    return run


def _log(client: Any, run: Any, registry: str, version: ModelVersion, info: BundleInfo) -> None:
    from mlflow.entities import Dataset, DatasetInput, InputTag, Metric, Param, RunTag

    from sparkdl.estimator.summary import training_of  # torch, which a plan of a pipeline needs not

    run_id, when = run.info.run_id, int(version.published.timestamp() * 1000)
    curves = curves_of(version, training_of(info).history)
    if run.data.metrics:  # cut off before: a point that is logged twice stands there twice
        logged = {(key, point.step) for key in run.data.metrics for point in client.get_metric_history(run_id, key)}
        curves = [point for point in curves if (point.key, point.step) not in logged]
    for points, params, tags in batches(curves, params_of(version), tags_of(registry, version)):
        client.log_batch(
            run_id,
            metrics=[Metric(point.key, point.value, when, point.step) for point in points],
            params=[Param(key, value) for key, value in params.items()],
            tags=[RunTag(key, value) for key, value in tags.items()],
        )
    table = table_of(version)
    if table is not None:
        dataset = Dataset(name=table.name, digest=table.digest, source_type="delta_table", source=table.source)
        client.log_inputs(run_id, [DatasetInput(dataset, [InputTag("mlflow.data.context", "training")])])
    client.set_terminated(run_id, end_time=when)
    client.set_tag(run_id, _LOGGED, "true")


def _logged_model(client: Any, run: Any, version: ModelVersion, info: BundleInfo) -> tuple[str, str]:
    """The id and the address of the model of a run, with its files."""
    from mlflow.entities import LoggedModelOutput

    run_id, experiment = run.info.run_id, run.info.experiment_id
    models = client.search_logged_models([experiment], f"source_run_id = '{run_id}'", max_results=1)
    model = models[0] if models else client.create_logged_model(
        experiment, name=version.name.replace(".", "-"), source_run_id=run_id, tags={IDENTITY: identity_of(version)}
    )  # fmt: skip
    if not str(model.status).endswith("READY"):
        with tempfile.TemporaryDirectory(prefix="sparkdl-mirror-") as folder:
            work = Path(folder) / "model"
            write_model(work, info, run_id=run_id, model_id=model.model_id)
            client.log_model_artifacts(model.model_id, str(work))
        client.log_outputs(run_id, [LoggedModelOutput(model.model_id, step=0)])
        client.finalize_logged_model(model.model_id, "READY")
    return model.model_id, model.model_uri


def _registered(client: Any, name: str, run_id: str, version: ModelVersion, model_id: str, source: str) -> Any:
    """The registered version of a run."""
    from mlflow.exceptions import MlflowException

    try:
        client.create_registered_model(name)
    except MlflowException as refusal:
        if refusal.error_code not in ("RESOURCE_ALREADY_EXISTS", "ALREADY_EXISTS"):
            raise
    page: Any = None
    while page is None or page.token:
        page = client.search_model_versions(f"name = '{name}'", page_token=page and page.token)
        for registered in page:
            if registered.run_id == run_id or identity_of(version) in (registered.description or ""):
                return registered
    return client.create_model_version(name, source, run_id, description=_description(version), model_id=model_id)


def _description(version: ModelVersion) -> str:
    """What a person reads of a version, and by what it is found in a registry that keeps neither runs nor tags."""
    metrics = ", ".join(f"{name} {value:.6g}" for name, value in version.metrics.items())
    return (
        f"Version {version.version} of {version.name} in sparkdl's registry, of {version.published:%Y-%m-%d %H:%M} UTC"
        f"{f' with {metrics}' if metrics else ''}; bundle {version.artifact}, publication {identity_of(version)}"
    )


def _noted(
    client: Any, registered: Any, registry: ModelRegistry, version: ModelVersion
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Set tags and aliases; return the aliases that are set, and what this registry does not hold."""
    aliases, missing = [], []
    tags = {IDENTITY: identity_of(version), "sparkdl.version": version.version, "sparkdl.artifact": version.artifact}
    for key, value in tags.items():
        if not _held(client.set_model_version_tag, registered.name, registered.version, key, value):
            missing = ["tags"]
            break
    for alias in _pointing(registry, version):
        if _held(client.set_registered_model_alias, registered.name, alias, registered.version):
            aliases.append(alias)
        else:
            missing.append(f"the alias {alias}")
    return tuple(aliases), tuple(missing)


def _pointing(registry: ModelRegistry, version: ModelVersion) -> Iterator[str]:
    """The aliases that point to a version now, after the upload; with a key, those whose move it has signed."""
    for alias, number in registry.aliases(version.name).items():
        try:
            if number == version.version == registry.get(version.name, alias).version:
                yield alias
        except IntegrityError as refusal:
            logger.warning("MLflow is not given the alias %s: %s", alias, refusal)


def _held(call: Callable[..., Any], *given: Any) -> bool:
    """Whether a registry takes what not every registry holds."""
    from mlflow.exceptions import MlflowException

    try:
        call(*given)
    except NotImplementedError:
        return False
    except MlflowException as refusal:
        if refusal.error_code not in ("NOT_IMPLEMENTED", "ENDPOINT_NOT_FOUND", "INVALID_PARAMETER_VALUE"):
            raise
        return False
    return True


@dataclass(frozen=True, slots=True)
class Curve:
    """One point of a metric.

    Attributes:
        key: of the metric.
        value: of it; NaN where it was not finite.
        step: the epoch, 0 for a figure of the whole version.
    """

    key: str
    value: float
    step: int = 0


@dataclass(frozen=True, slots=True)
class TrainingTable:
    """The table that a version was trained on, as MLflow notes a dataset.

    Attributes:
        name: at most 500 letters.
        digest: at most 36 letters, equal for equal rows: of the shards, or else of address and version.
        source: MLflow's JSON of a Delta table.
    """

    name: str
    digest: str
    source: str


def identity_of(version: ModelVersion) -> str:
    """64 digits, equal for the same version of the same registry, whatever the address it is reached by."""
    return sha256_hex(f"{version.name}/{version.version}/{version.publication}".encode())


def params_of(version: ModelVersion) -> dict[str, str]:
    """Parameters, nested ones by dotted names."""
    return _named((name, _text(value)) for name, value in _flat(version.parameters))


def curves_of(version: ModelVersion, history: Sequence[Mapping[str, float | int | None]]) -> list[Curve]:
    """The metrics of a version, and those of its epochs."""
    keys = _named((name, name) for name in version.metrics)
    curves = [Curve(key, version.metrics[name]) for key, name in keys.items()]
    names = list(dict.fromkeys(name for row in history for name in row if name not in _NOT_CURVES))
    for key, name in _named((f"epoch.{name}", name) for name in names).items():
        for position, row in enumerate(history):
            if name in row:
                value = row[name]
                curves.append(
                    Curve(key, math.nan if value is None else float(value), int(row.get("epoch") or position))
                )
    return curves


def tags_of(registry: str, version: ModelVersion) -> dict[str, str]:
    """The tags of a version: where it lies, and what it was made with."""
    lineage = version.lineage
    software = {f"sparkdl.software.{name}": number for name, number in (lineage.get("versions") or {}).items()}
    facts = {
        IDENTITY: identity_of(version),
        "sparkdl.registry": registry,
        "sparkdl.model": version.name,
        "sparkdl.version": str(version.version),
        "sparkdl.artifact": version.artifact,
        "sparkdl.shard_key": lineage.get("shard_key"),
        "mlflow.source.git.commit": lineage.get("code_version"),
    }
    return _named((name, _text(value)) for name, value in {**software, **facts}.items() if value)


def table_of(version: ModelVersion) -> TrainingTable | None:
    """The table that it was trained on; None if nobody knows."""
    address, number = version.lineage.get("source_table"), version.lineage.get("source_version")
    if not address:
        return None
    named = "/" not in address and address.count(".") == 2
    # MLflow's own class leaves out version 0, and asks Databricks about names of three parts
    source = {"delta_table_name" if named else "path": address, "delta_table_version": number}
    digest = version.lineage.get("shard_key") or sha256_hex(f"{address}@{number}".encode())
    facts = {name: value for name, value in source.items() if value is not None}
    return TrainingTable(str(address)[-500:], str(digest)[:36], json.dumps(facts))


def batches(
    metrics: Sequence[Curve], params: Mapping[str, str], tags: Mapping[str, str]
) -> Iterator[tuple[list[Curve], dict[str, str], dict[str, str]]]:
    """Cut what is logged into requests: at most 1,000 items, 100 parameters and 100 tags each, and a million bytes."""
    parts = [_chunks(list(part.items()), MOST_OTHERS) for part in (params, tags)]
    few = MOST_METRICS - 2 * MOST_OTHERS
    points = [list(metrics[start : start + few]) for start in range(0, len(metrics), few)]
    for position in range(max(len(points), *map(len, parts))):
        first, second = (dict(part[position]) if position < len(part) else {} for part in parts)
        yield points[position] if position < len(points) else [], first, second


def _chunks(items: list[tuple[str, str]], most: int) -> list[list[tuple[str, str]]]:
    chunks: list[list[tuple[str, str]]] = []
    room = 0
    for key, value in items:
        size = len(json.dumps([key, value]))
        if not chunks or len(chunks[-1]) == most or size > room:
            chunks.append([])
            room = MOST_BYTES
        chunks[-1].append((key, value))
        room -= size
    return chunks


def _flat(values: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{above}{name}.")
        else:
            yield f"{above}{name}", value


def _text(value: Any) -> str:
    text = value if isinstance(value, str) else encode(value, nan=True).decode()
    return text if len(text) <= _VALUE_LETTERS else f"{text[: _VALUE_LETTERS - 3]}..."


def _named(items: Iterable[tuple[str, T]]) -> dict[str, T]:
    """The values under keys that MLflow takes, letters, digits and ``_-.: ``; two that became one get a number each."""
    named: dict[str, T] = {}
    for name, value in items:
        plain = re.sub(r"[^\w.\- :]", "_", name)[: _KEY_LETTERS - 10]
        plain = f"_{plain}" if not plain.strip(".") or plain.startswith("..") else plain
        key, number = plain, 2
        while key in named:
            key, number = f"{plain} {number}", number + 1
        named[key] = value
    return named


def check_servable(info: BundleInfo) -> None:
    """Refuse a bundle that MLflow is not given.

    Raises:
        BundleError: it holds a pickle.
        ConfigError: it has no signature.
    """
    from sparkdl.interchange.served import signature_of  # torch, too

    if info.recipe.kind == "pickle":
        raise BundleError(
            f"the bundle {info.uri} holds a pickle, and none goes to MLflow: publish the model with factory= and "
            "arguments= instead of allow_pickle=True"
        )
    signature_of(info)


def write_model(folder: Path, info: BundleInfo, *, run_id: str, model_id: str) -> None:
    """Write a bundle as an MLflow model.

    Args:
        folder: that does not exist yet; its parent has room for a second copy of the weights.
        info: of the bundle.
        run_id: of the run that the model belongs to.
        model_id: of the logged model that it becomes.
    """
    from mlflow import pyfunc
    from mlflow.models import Model, ModelSignature

    from sparkdl.estimator.outputs import output_field
    from sparkdl.interchange.served import predicted, signature_of
    from sparkdl.models.preprocessing import column_types, features_of

    signature, prediction_columns, types = signature_of(info), predicted(info), column_types(info)
    features = features_of(info, functions=False)
    fields = [output_field(signature, column.output) for column in prediction_columns]
    script, bundle = folder.with_name("sparkdl_bundle.py"), folder.with_name("bundle")
    script.write_text(_CODE, encoding="utf-8")
    copy_bundle(info, Storage.of(bundle))
    packages = ["mlflow-skinny", "sparkdl", "torch"]
    if features is not None and any(isinstance(feature.options, Image) for feature in features.fitted):
        packages.append("pillow")
    requirements = []
    for package in packages:
        try:
            requirements.append(f"{package}=={importlib.metadata.version(package).partition('+')[0]}")
        except importlib.metadata.PackageNotFoundError:  # used from its sources
            requirements.append(package)
    pyfunc.save_model(
        path=str(folder),
        python_model=str(script),
        artifacts={"bundle": str(bundle)},
        signature=ModelSignature(
            inputs=input_schema(signature, features, types),
            outputs=output_schema(fields, [column.column for column in prediction_columns]),
        ),
        input_example=example_row(signature, features, types),
        pip_requirements=requirements,
        mlflow_model=Model(run_id=run_id, model_id=model_id),
    )
    for compiled in folder.rglob("__pycache__"):  # MLflow has run the script once, to look at it
        shutil.rmtree(compiled)


def input_schema(signature: Signature, features: Features | None, types: Mapping[str, str]) -> Any:
    """MLflow's schema of the columns that a model reads: a type is told where the check of it refuses nothing right.

    Integers, decimals and instants stay open: MLflow refuses integers where a column has gaps, and times that have a
    zone.

    Args:
        signature: of the model.
        features: that make its inputs of raw columns; None if it takes columns as they are.
        types: by column, Spark's name of its type in training; of others what the features say.
    """
    from mlflow.types.schema import AnyType, ColSpec, DataType, Schema

    unknown: Any = AnyType
    names = list(signature.columns if features is None else features.columns)
    kinds = {name: _CLOSED.get(types.get(name, ""), "") for name in names}
    for feature in () if features is None else features.fitted:
        source = feature.options.source(feature.name)
        if isinstance(feature.options, DateParts):
            kinds[source] = kinds[source] or _TIMES.get(types.get(source, ""), "")
        elif isinstance(feature.options, Text):
            kinds[source] = kinds[source] or "string"
        elif isinstance(feature.options, Image):
            kinds[source] = kinds[source] or "binary"
    return Schema([ColSpec(DataType[kind] if kind else unknown(), name) for name, kind in kinds.items()])


def output_schema(fields: Sequence[TensorField], columns: Sequence[str]) -> Any:
    """MLflow's schema of the prediction columns.

    Args:
        fields: of the outputs, one a column.
        columns: their names.
    """
    from mlflow.types.schema import Array, ColSpec, DataType, Object, Property, Schema

    def kind(field: TensorField) -> Any:
        data_type: Any = DataType[_OUTPUTS[field.dtype]]
        for _ in field.shape:
            data_type = Array(data_type)
        return data_type

    kinds = {name: kind(field) for name, field in zip(columns, fields, strict=True)}
    if len(kinds) == 1 and fields[0].shape:  # whose arrays spark_udf finds only in a struct
        return Schema([ColSpec(Object([Property(name, data_type) for name, data_type in kinds.items()]))])
    return Schema([ColSpec(data_type, name) for name, data_type in kinds.items()])


def example_row(signature: Signature, features: Features | None, types: Mapping[str, str]) -> Any:
    """A row that the model takes, as a pandas frame: typical values where training has counted some, else zeros."""
    import pandas as pd

    if features is not None:
        row = {feature.options.source(feature.name): _typical(feature, types) for feature in features.fitted}
        return pd.DataFrame([{name: row[name] for name in features.columns}])
    owners = {column: field for field in signature.inputs for column in field.columns}
    return pd.DataFrame([{name: _zero(owners[name], types.get(name, "")) for name in signature.columns}])


def _typical(feature: Fitted, types: Mapping[str, str]) -> Any:
    """The median of a number, the most frequent value of a category."""
    options, statistics = feature.options, feature.statistics
    words = list(statistics.values[:2]) or ["value"]
    if isinstance(options, Number):
        median = statistics.quantiles[_MEDIAN]
        is_integer = types.get(options.source(feature.name), "") in ("tinyint", "smallint", "int", "bigint")
        return int(median) if is_integer else median
    if isinstance(options, Category):
        return words[0]
    if isinstance(options, Ids):
        return words
    if isinstance(options, Text):
        return " ".join(words)
    if isinstance(options, Vector):
        return [statistics.mean or 0.0] * (options.size or 1)
    if isinstance(options, Image):
        return _GREY_POINT
    assert isinstance(options, DateParts)
    zone = datetime.UTC if types.get(options.source(feature.name)) == "timestamp" else None
    return datetime.datetime(min(9999, max(1, int(statistics.maximum or 2000))), 1, 1, tzinfo=zone)


def _zero(field: TensorField, kind: str) -> Any:
    """Zeros as a column of a model without features has them."""
    if kind == "binary":
        return bytes(max(1, _length(field)))
    if kind == "boolean":
        return False
    if field.logical in ("date", "timestamp", "timestamp_ntz"):
        epoch = datetime.datetime(1970, 1, 1)
        return epoch.date() if field.logical == "date" else epoch
    number: Any = 0.0 if kind in ("float", "double") or field.dtype.startswith(("float", "bfloat")) else 0
    if len(field.columns) > 1 or not field.shape:
        return number
    return [number] * _length(field)


def _length(field: TensorField) -> int:
    """Numbers of a row; one of an element whose length varies."""
    total = 1
    for size in field.shape:
        total *= size or 1
    return total


def check_installed() -> None:
    """Refuse what needs MLflow where it is not installed.

    Raises:
        ConfigError: names the extra.
    """
    require(importlib.util.find_spec("mlflow") is not None, "MLflow is not installed: pip install 'sparkdl[mlflow]'")


def shown(uri: str) -> str:
    """The address without what stands before its host or in its query; a password may hold any character."""
    scheme, host = re.match(r"(?s)((?:[\w+.-]+:)?/*)(.*)", uri).groups()  # type: ignore[union-attr]
    who, at, host = host.rpartition("@") if "///" not in scheme else ("", "", host)
    if "?" in who:  # of a password, or of a query with an @ in it
        return f"{scheme}***"
    host, separator, _ = host.partition("?")
    return f"{scheme}{'***@' if at else ''}{host}{'?***' if separator else ''}"


@contextmanager
def opened(uri: str, registry_uri: str | None) -> Iterator[Any]:
    """MLflow's client, once it has answered.

    Args:
        uri: of the tracking server or store, as MLflow takes it.
        registry_uri: of the model registry; None is what MLflow takes for ``uri``.

    Raises:
        StorageError: it does not answer, or refuses something.
        ConfigError: MLflow is not installed, or ``uri`` is empty or names memory.
    """
    check_installed()
    # of no address MLflow makes a file in the folder that this process happens to be in
    require(bool(uri.strip()), f"the address {uri!r} of MLflow is empty: give one, such as http://host:5000")
    file = uri.removeprefix("sqlite://").partition("?")[0]
    in_memory = uri.startswith("sqlite://") and file in ("", "/", "/:memory:")
    require(not in_memory, f"{uri} names no file, and is gone with this process: write sqlite:////data/mlflow.db")
    with _set(_SETTINGS):
        try:
            if uri.startswith("sqlite:///"):  # MLflow would try ten times to open the file, for more than a minute
                path = Path(uri.removeprefix("sqlite:///").partition("?")[0])
                path.parent.mkdir(parents=True, exist_ok=True)
                with closing(sqlite3.connect(path)) as database:
                    database.execute("PRAGMA schema_version").fetchone()
            from mlflow import MlflowClient

            with _set({"MLFLOW_HTTP_REQUEST_TIMEOUT": "10"}):
                client = MlflowClient(tracking_uri=uri, registry_uri=registry_uri)
                client.search_experiments(max_results=1)
            yield client
        except SparkdlError:
            raise
        except Exception as cause:  # its own, and those of requests, SQLAlchemy and the artifact stores, unwrapped
            raise StorageError(
                f"MLflow at {shown(uri)} did not take the model, {_said(cause, uri, registry_uri)}: start the server "
                "or correct its address, then mirror again"
            ) from cause


def _said(cause: Exception, *addresses: str | None) -> str:
    text = " ".join(str(cause).split())
    for uri in filter(None, addresses):
        _, separator, query = uri.partition("?")
        text = text.replace(uri, shown(uri)).replace(f"?{query}", "?***" if separator else "?")
    return f"{type(cause).__name__}: {text[:_MOST_LETTERS]}{'...' if len(text) > _MOST_LETTERS else ''}".rstrip(": ")


@contextmanager
def _set(values: dict[str, str]) -> Iterator[None]:
    """Variables of the environment, from which MLflow reads its settings, for a block; the user's own win."""
    new_variables = {name: value for name, value in values.items() if name not in os.environ}
    os.environ.update(new_variables)
    try:
        yield
    finally:
        for name in new_variables:
            os.environ.pop(name, None)
