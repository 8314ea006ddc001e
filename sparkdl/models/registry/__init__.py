"""Versions of published models, and the aliases that point to them: a log of events in one Delta table.

Enters: bundles, with their metrics and lineage. Leaves: numbered versions of them, aliases, the history of both.
``registry.py`` is what users call, ``reader.py`` the questions of it; ``log.py`` answers them, and commits events.
``event_log.py`` says what an event is, ``state.py`` and, for one model, ``model.py`` what they add up to;
``checkpoint.py`` keeps that, so that only the newest are read. ``promotion.py`` decides on an alias, ``signing.py`` on
who is believed, ``garbage.py`` and ``leases.py`` on what may go; ``lineage.py`` leads to tables and back.
"""

from sparkdl.models.registry.event_log import Event, ModelVersion
from sparkdl.models.registry.garbage import Removed
from sparkdl.models.registry.lineage import Lineage, ModelLineage, TrainedOn
from sparkdl.models.registry.promotion import Promotion
from sparkdl.models.registry.registry import ModelRegistry
from sparkdl.models.registry.signing import SigningKey
from sparkdl.models.registry.state import ModelSummary

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
]
