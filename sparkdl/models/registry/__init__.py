"""Versions of published models, and the aliases that point to them: a log of events in one Delta table.

Enters: bundles, with their metrics and lineage. Leaves: numbered versions of them, aliases, the history of both.
``registry.py`` is what users call. ``events.py`` says what an event is and what all of them add up to, ``log.py`` reads
and commits them; ``signing.py`` decides who is believed, ``garbage.py`` what may go; ``lineage.py`` leads to tables
and back.
"""

from sparkdl.models.registry.events import Event, ModelSummary, ModelVersion
from sparkdl.models.registry.garbage import Removed
from sparkdl.models.registry.lineage import Lineage, ModelLineage, TrainedOn
from sparkdl.models.registry.registry import ModelRegistry, Promotion, bundle_of
from sparkdl.models.registry.signing import SigningKey

__all__ = [
    "Event",
    "Lineage",
    "ModelLineage",
    "ModelRegistry",
    "ModelSummary",
    "ModelVersion",
    "Promotion",
    "Removed",
    "SigningKey",
    "TrainedOn",
    "bundle_of",
]
