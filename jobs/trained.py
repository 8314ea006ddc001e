"""What training hands to publication.

Enters: the report of rank 0 and where the model lies. Leaves: a value that both sides know.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sparkdl.shards.manifest import Manifest
from sparkdl.worker import RankReport

__all__ = ["PREDICTION", "Trained"]

PREDICTION = "predicted_minutes"


@dataclass(frozen=True, kw_only=True)
class Trained:
    """A trained model that is not published yet.

    Attributes:
        identity: of the training: equal for equal data, split, network and settings.
        bundle: where the model lies.
        manifest: of the training shards.
        report: of rank 0.
        parameters: what the registry keeps of the settings, JSON values.
    """

    identity: str
    bundle: str
    manifest: Manifest
    report: RankReport
    parameters: dict[str, Any]
