"""A version of our registry in MLflow: a run, a logged model, a registered version, aliases.

Enters: a version, and the address of MLflow. Leaves: the same there, made once however often it is mirrored: each part
is looked for before it is made, the run by the publication's identity, the others by their run. So a mirror that was
cut off is simply made again. Our registry stays the one that decides; nothing is read back from MLflow.

    run               parameters, metrics, curves of the epochs, tags, the table and version it was trained on
    logged model      the bundle, by ``mlflow_model.py``
    registered model  a version with description, tags and the aliases that point to ours now
"""

from __future__ import annotations

import os
import shlex
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparkdl.config import require
from sparkdl.errors import IntegrityError, SparkdlError
from sparkdl.estimator.training import training_of
from sparkdl.interchange.client import check_installed, opened, shown
from sparkdl.interchange.logged import (
    IDENTITY,
    batches,
    curves_of,
    identity_of,
    params_of,
    table_of,
    tags_of,
)
from sparkdl.interchange.mlflow_model import check_servable, write_model
from sparkdl.models.folder import BundleInfo, read_bundle
from sparkdl.models.reference import reference
from sparkdl.models.registry import ModelRegistry, ModelVersion
from sparkdl.observe import logger
from sparkdl.storage import Storage

__all__ = ["Mirrored", "check_mirror", "find_version", "mirror", "mirror_published"]

_LOGGED = "sparkdl.logged"
"""The tag of a run in which everything stands."""


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

    Args:
        registry: of sparkdl, or its address.
        model: ``"churn@champion"``, ``"churn@3"``, or ``"churn"`` for the newest version.
        uri: of MLflow's tracking server or store: ``http://...``, ``sqlite:///...``, ``databricks``.
        name: of the registered model, such as ``"main.ml.churn"``; by default as in our registry.
        experiment: that the run belongs to; by default ``MLFLOW_EXPERIMENT_NAME``, or the model's name.
        registry_uri: of MLflow's model registry, if it is another address; by default ``MLFLOW_REGISTRY_URI``, or what
            MLflow takes for ``uri``.

    Raises:
        ConfigError: there is no such model, version or alias; or MLflow is not installed.
        BundleError: the bundle holds a pickle.
        IntegrityError: the bundle is not the one that was published; or the registry's key has not signed the version.
        StorageError: MLflow does not answer, or refuses something; again later makes what is missing.
    """
    where = registry if isinstance(registry, ModelRegistry) else ModelRegistry(registry)
    version = find_version(where, model)
    info = where.bundle(version.name, version.version)
    check_servable(info)
    with opened(uri, registry_uri) as client:
        wanted = experiment or os.environ.get("MLFLOW_EXPERIMENT_NAME") or version.name
        run = _run(client, _experiment(client, wanted, uri), where.uri, version, info)
        model_id, source = _logged_model(client, run, version, info)
        if not uri.startswith(("http", "databricks")):
            source = client.get_logged_model(model_id).artifact_location  # a store by itself does not know its own ids
        done = _registered(client, name or version.name, run.info.run_id, version, (model_id, source))
        found = Mirrored(
            uri=shown(uri), name=done.name, version=str(done.version), run_id=run.info.run_id, model_id=model_id,
            **_noted(client, done, where, version),
        )  # fmt: skip
    logger.info("%s version %d is mirrored as %s", version.name, version.version, found)
    return found


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
    found = client.get_experiment_by_name(name)
    if found is None:
        # where MLflow itself would put artifacts depends on the folder that this process happens to be in
        beside = Path(uri.removeprefix("sqlite:///").partition("?")[0]).absolute().parent / "mlartifacts"
        try:
            return str(client.create_experiment(name, beside.as_uri() if uri.startswith("sqlite:///") else None))
        except Exception:  # another mirror was faster
            found = client.get_experiment_by_name(name)
            if found is None:
                raise
    require(found.lifecycle_stage == "active", f"MLflow's experiment {name!r} is deleted: restore it, or name another")
    return str(found.experiment_id)


def _run(client: Any, experiment: str, registry: str, version: ModelVersion, info: BundleInfo) -> Any:
    """The run of a publication, with all that it says."""
    identity = identity_of(version)
    known = client.search_runs([experiment], f"tags.`{IDENTITY}` = '{identity}'", max_results=1)
    when = int(version.published.timestamp() * 1000)
    run = known[0] if known else client.create_run(
        experiment, start_time=when, tags={IDENTITY: identity}, run_name=f"{version.name} {version.version}"
    )  # fmt: skip
    if _LOGGED not in run.data.tags:
        _log(client, run, registry, version, info)
    return run


def _log(client: Any, run: Any, registry: str, version: ModelVersion, info: BundleInfo) -> None:
    from mlflow.entities import Dataset, DatasetInput, InputTag, Metric, Param, RunTag

    run_id, when = run.info.run_id, int(version.published.timestamp() * 1000)
    curves = curves_of(version, training_of(info).history)
    if run.data.metrics:  # cut off before: a point that is logged twice stands there twice
        there = {(key, one.step) for key in run.data.metrics for one in client.get_metric_history(run_id, key)}
        curves = [one for one in curves if (one.key, one.step) not in there]
    for points, params, tags in batches(curves, params_of(version), tags_of(registry, version)):
        client.log_batch(
            run_id,
            metrics=[Metric(one.key, one.value, when, one.step) for one in points],
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
    known = client.search_logged_models([experiment], f"source_run_id = '{run_id}'", max_results=1)
    model = known[0] if known else client.create_logged_model(
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


def _registered(client: Any, name: str, run_id: str, version: ModelVersion, model: tuple[str, str]) -> Any:
    """The registered version of a run."""
    from mlflow.exceptions import MlflowException

    model_id, source = model
    try:
        client.create_registered_model(name)
    except MlflowException as refusal:
        if refusal.error_code not in ("RESOURCE_ALREADY_EXISTS", "ALREADY_EXISTS"):
            raise
    page: Any = None
    while page is None or page.token:
        page = client.search_model_versions(f"name = '{name}'", page_token=page and page.token)
        for one in page:
            if one.run_id == run_id or identity_of(version) in (one.description or ""):
                return one
    return client.create_model_version(name, source, run_id, description=_description(version), model_id=model_id)


def _description(version: ModelVersion) -> str:
    """What a person reads of a version, and by what it is found in a registry that keeps neither runs nor tags."""
    metrics = ", ".join(f"{name} {value:.6g}" for name, value in version.metrics.items())
    return (
        f"Version {version.version} of {version.name} in sparkdl's registry, of {version.published:%Y-%m-%d %H:%M} UTC"
        f"{f' with {metrics}' if metrics else ''}; bundle {version.artifact}, publication {identity_of(version)}"
    )


def _noted(client: Any, done: Any, registry: ModelRegistry, version: ModelVersion) -> dict[str, tuple[str, ...]]:
    """Set tags and aliases; tell which are set, and what this registry does not hold."""
    missing, pointing = [], []
    tags = {IDENTITY: identity_of(version), "sparkdl.version": version.version, "sparkdl.artifact": version.artifact}
    if not all(_held(client.set_model_version_tag, done.name, done.version, key, one) for key, one in tags.items()):
        missing.append("tags")
    for alias in _pointing(registry, version):
        if _held(client.set_registered_model_alias, done.name, alias, done.version):
            pointing.append(alias)
        else:
            missing.append(f"the alias {alias}")
    return {"aliases": tuple(pointing), "missing": tuple(missing)}


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
