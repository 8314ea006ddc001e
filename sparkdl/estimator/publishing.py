"""A fitted model as a bundle and as a version in a registry, and back.

Enters: what a ``TorchModel`` is made of, and where it comes from. Leaves: a bundle, from which the same columns are
predicted, and a version whose row says metrics, parameters, table, shards and software. The pipeline publishes through
here, too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from torch import nn

from sparkdl.documents.typed import Source, convert
from sparkdl.errors import ConfigError
from sparkdl.estimator.fit.shipping import loose_by_value
from sparkdl.estimator.saving.persistence import example_of
from sparkdl.models.bundle import save_bundle
from sparkdl.models.folder import DOCUMENT, BundleInfo
from sparkdl.models.signature import Signature
from sparkdl.train.objective.labels import Meaning

if TYPE_CHECKING:
    from sparkdl.models.registry import Lineage, ModelRegistry, ModelVersion
    from sparkdl.storage import Storage

__all__ = ["COLUMNS", "TRAINING", "Training", "plain_epochs", "publish_bundle", "training_of", "write_bundle"]

COLUMNS = ("outputCols", "predictionCol", "probabilityCol", "rawPredictionCol")
TRAINING = "training"
"""Under which a bundle's preprocessing holds the following."""

_NO_METRICS = {"epoch", "step", "rows", "lr", "seconds"}


@dataclass(frozen=True, kw_only=True)
class Training:
    """What of a training travels in the model's bundle.

    Attributes:
        history: the epochs, without their seconds: the same training makes the same bundle; None is not finite.
        meanings: by label, what its output means.
        columns: names of the prediction columns, by parameter.
    """

    history: tuple[Mapping[str, float | int | None], ...] = ()
    meanings: Mapping[str, Meaning] | None = None
    columns: Mapping[Literal["outputCols", "predictionCol", "probabilityCol", "rawPredictionCol"], str | list[str]] = (
        field(default_factory=dict)
    )


def plain_epochs(rows: Iterable[Mapping[str, Any]]) -> list[dict[str, float | int | None]]:
    """Epochs as JSON takes them: None for what is not finite."""
    found = []
    for row in rows:
        numbers = {name: one.item() if hasattr(one, "item") else one for name, one in row.items()}
        found.append(
            {
                name: one if not isinstance(one, float) or math.isfinite(one) else None
                for name, one in numbers.items()
                if isinstance(one, float | int | None)
            }
        )
    return found


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
    """
    if signature is None:
        raise ConfigError("this TorchModel has no signature, so nobody could feed what is published: give signature=")
    with loose_by_value(module) if allow_pickle else nullcontext():
        return save_bundle(
            module,
            uri,
            signature=signature,
            factory=factory,
            arguments=arguments,
            preprocessing={**preprocessing, TRAINING: training},
            example=example_of(signature) if factory is None else None,
            allow_pickle=allow_pickle,
        )


def training_of(info: BundleInfo) -> Training:
    """What a bundle says of its training; of one that was saved otherwise, nothing.

    Raises:
        IntegrityError: it holds what no training is.
    """
    source = Source(f"{info.uri}/{DOCUMENT}", "it was altered, or saved by another sparkdl: publish it again")
    return convert(info.preprocessing.get(TRAINING, {}), Training, source, f"$.preprocessing.{TRAINING}")


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

    Raises:
        BundleError: there is no bundle.
        ConfigError: a name, metric or parameter is unusable.
    """
    from sparkdl.models.registry import Lineage, ModelRegistry  # tables, which a fit without publication needs not

    noted, given = dict(origin.get("lineage", {})), asdict(lineage or Lineage())
    software = {**noted.pop("versions", {}), **(given.pop("versions") or {})}
    whole = {**noted, **{field: value for field, value in given.items() if value is not None}}
    known = {field: value for field, value in origin.get("metrics", {}).items() if value is not None}
    known = {field: value for field, value in known.items() if field not in _NO_METRICS}
    where = registry if isinstance(registry, ModelRegistry) else ModelRegistry(registry)
    return where.publish(
        name,
        str(getattr(bundle, "uri", bundle)),
        metrics=known if metrics is None else metrics,
        parameters={**origin.get("parameters", {}), **(parameters or {})},
        lineage=Lineage(**whole, versions=software),
        publication=publication,
    )
