"""Versions of published models, and the aliases that point to them: a log of events in one Delta table.

Enters: bundles, with their metrics and lineage. Leaves: numbered versions of them, aliases, the history of both.
``registry.py`` is what users call, and says what lies where; ``log.py`` answers their questions and commits events.
``event_log.py`` says what an event is, ``state.py`` and, for one model, ``model.py`` what they add up to;
``checkpoint.py`` keeps that, so that only the newest are read. ``promotion.py`` decides on an alias.
"""

from sparkdl.models.registry.event_log import Event, ModelVersion
from sparkdl.models.registry.promotion import Promotion
from sparkdl.models.registry.registry import Lineage, ModelRegistry
from sparkdl.models.registry.state import ModelSummary

__all__ = ["Event", "Lineage", "ModelRegistry", "ModelSummary", "ModelVersion", "Promotion"]
