"""Versions of published models, and the aliases that point to them: a log of events in one Delta table.

Enters: bundles, with their metrics and lineage. Leaves: numbered versions of them, aliases, the history of both.
``registry.py`` is what users call, and says what lies where; ``event_log.py`` has the events and what they add up to,
``promotion.py`` whether a version deserves an alias.
"""

from sparkdl.models.registry.event_log import Event, ModelVersion
from sparkdl.models.registry.promotion import Promotion
from sparkdl.models.registry.registry import Lineage, ModelRegistry

__all__ = ["Event", "Lineage", "ModelRegistry", "ModelVersion", "Promotion"]
