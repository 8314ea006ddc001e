"""A fitted model as a bundle, and as a version in a registry; the pipeline publishes through here, too."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from torch import nn

from sparkdl.errors import ConfigError, ConflictError
from sparkdl.estimator.saving.persistence import example_of
from sparkdl.estimator.summary import TRAINING
from sparkdl.estimator.user_code import loose_by_value
from sparkdl.models.adjusted import adjusted
from sparkdl.models.bundle import save_bundle
from sparkdl.models.folder import Adjustment, BundleInfo
from sparkdl.models.recipe import repeats
from sparkdl.models.signature import Signature
from sparkdl.observe import logger

if TYPE_CHECKING:
    from sparkdl.models.registry import Lineage, ModelRegistry, ModelVersion
    from sparkdl.storage import Storage


_NO_METRICS = {"epoch", "step", "rows", "lr", "seconds"}


def write_bundle(
    module: nn.Module,
    uri: str | Storage,
    *,
    signature: Signature | None,
    training: Mapping[str, Any],
    preprocessing: Mapping[str, Any],
    factory: str | Callable[..., nn.Module] | None = None,
    arguments: Mapping[str, Any] | None = None,
    allow_pickle: bool = False,
    adjustments: Sequence[Adjustment] = (),
) -> BundleInfo:
    """Write a fitted model as a bundle, see ``TorchModel.save_bundle``.

    Args:
        module: in evaluation mode.
        uri: a folder that does not exist yet.
        signature: of it.
        training: the fields of a ``Training``.
        preprocessing: JSON values that travel with it.
        factory: as ``sparkdl.models.bundle.save_bundle`` takes it.
        arguments: of the factory.
        allow_pickle: fall back on a pickle.
        adjustments: of the outputs, one each, in place of those that the module has.
    """
    if adjustments:
        module = adjusted(module, adjustments)
    if signature is None:
        raise ConfigError("this TorchModel has no signature, so nobody could feed what is published: give signature=")
    with loose_by_value(module) if allow_pickle else contextlib.nullcontext():
        return save_bundle(
            module,
            uri,
            signature=signature,
            factory=factory,
            arguments=arguments,
            preprocessing={**preprocessing, TRAINING: training},
            example=_example(module, signature, factory),
            allow_pickle=allow_pickle,
        )


def _example(module: nn.Module, signature: Signature, factory: Any) -> Any:
    """Made-up rows, by which the rebuilt model is compared; None where what a factory makes can be compared by none."""
    rows = example_of(signature)
    if factory is None or repeats(module, rows):
        return rows
    logger.warning(
        "what factory=%s makes is published without comparing its answers with the model's, which cannot be called "
        "with made-up rows, or answers the same rows differently each time: make sure that arguments= are those it was "
        "made with",
        getattr(factory, "__qualname__", factory),
    )
    return None


def publish_bundle(
    registry: str | ModelRegistry,
    name: str,
    bundle: str | Storage,
    origin: Mapping[str, Any],
    *,
    metrics: Mapping[str, float] | None = None,
    parameters: Mapping[str, Any] | None = None,
    lineage: Lineage | None = None,
    publication: str | None = None,
    first_alias: str | None = None,
    mlflow: str | None = None,
) -> ModelVersion:
    """Publish a bundle with what its fit has noted, and what the caller says besides.

    Args:
        registry: or its address.
        name: of the model.
        bundle: its folder.
        origin: of the model, as ``TorchModel.origin`` gives it.
        metrics: by name; by default those of the epoch that the weights belong to.
        parameters: more of them; what is named alike wins over what was noted.
        lineage: what is set here wins over what was noted.
        publication: as ``ModelRegistry.publish`` takes it.
        first_alias: that the first version of the name gets; whoever judges versions, as a pipeline does, gives none.
        mlflow: address of an MLflow server or store that the version is mirrored to.

    Raises:
        BundleError: there is no bundle.
        ConfigError: a name, metric or parameter is unusable; or MLflow is asked for and not installed.
    """
    from sparkdl.interchange.mlflow import check_mirror, mirror_published
    from sparkdl.models.registry import Lineage, ModelRegistry  # tables, which a fit without publication needs not

    noted, stated = dict(origin.get("lineage", {})), asdict(lineage or Lineage())
    software = {**noted.pop("versions", {}), **(stated.pop("versions") or {})}
    merged = {**noted, **{field: value for field, value in stated.items() if value is not None}}
    noted_metrics = {field: value for field, value in origin.get("metrics", {}).items() if value is not None}
    noted_metrics = {field: value for field, value in noted_metrics.items() if field not in _NO_METRICS}
    target = registry if isinstance(registry, ModelRegistry) else ModelRegistry(registry)
    if mlflow is not None:
        check_mirror(bundle)
    version = target.publish(
        name,
        str(getattr(bundle, "uri", bundle)),
        metrics=noted_metrics if metrics is None else metrics,
        parameters={**origin.get("parameters", {}), **(parameters or {})},
        lineage=Lineage(**merged, versions=software),
        publication=publication,
    )
    if first_alias is not None and version.version == 1:
        with contextlib.suppress(ConflictError):  # somebody has decided already where it points
            target.set_alias(name, first_alias, 1, expected=None, reason=f"version 1 is the first {first_alias}")
        version = target.get(name, 1)
    if mlflow is not None:
        mirror_published(target, version, mlflow)
    return version
