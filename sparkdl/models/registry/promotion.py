"""Whether a new version deserves an alias.

Enters: the registry's state and a metric. Leaves: a decision with its reason. Pure values.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from sparkdl.errors import ConfigError
from sparkdl.models.registry.event_log import ModelVersion
from sparkdl.models.registry.state import State

__all__ = ["Promotion", "decide_promotion"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Promotion:
    """What became of an attempt to promote.

    Attributes:
        moved: whether the alias points to another version now, or its move to the same one was signed.
        reason: one sentence with both values.
        version: the version that the alias points to now.
        previous: the one before; None if the alias did not exist.
    """

    moved: bool
    reason: str
    version: int | None
    previous: int | None


def decide_promotion(
    state: State, name: str, alias: str, version: int, metric: str, mode: str, min_delta: float
) -> Promotion:
    """Compare ``version`` with the version that ``alias`` points to.

    Raises:
        ConfigError: there is no such version, or one of the two has no such metric.
    """
    challenger = state.get(name, version)
    new = _metric(challenger, metric)
    current = state.aliases(name).get(alias)
    if current is None:
        if math.isnan(new):
            return Promotion(moved=False, reason=f"{metric} of version {version} is NaN", version=None, previous=None)
        reason = f"version {version} is the first {alias} ({metric} {new:g})"
        return Promotion(moved=True, reason=reason, version=version, previous=None)
    old = _metric(state.get(name, current), metric)
    if current == version:
        return Promotion(
            moved=False, reason=f"version {version} is the {alias} already", version=version, previous=version
        )
    gain = (old - new) if mode == "min" else (new - old)
    better = gain > min_delta if min_delta == 0 else gain >= min_delta
    better = better or (math.isnan(old) and not math.isnan(new))
    what = f"{metric} {new:g} of version {version} against {old:g} of {alias} {current}"
    needed = f", better by {gain:g} where {min_delta:g} was asked for" if min_delta else ""
    outcome = "is better" if better else "is not better"
    return Promotion(
        moved=better, reason=f"{what} {outcome}{needed}", version=version if better else current, previous=current
    )


def _metric(found: ModelVersion, metric: str) -> float:
    if metric not in found.metrics:
        raise ConfigError(
            f"version {found.version} of {found.name!r} has no metric {metric!r}, only {sorted(found.metrics)}: "
            "name one of these"
        )
    return found.metrics[metric]
