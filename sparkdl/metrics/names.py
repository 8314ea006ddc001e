"""The names of metrics, and which way each is better: for whoever checks a name before anything runs."""

from __future__ import annotations

import difflib
from collections.abc import Collection

from sparkdl.errors import ConfigError

HIGHER_IS_BETTER = {
    **dict.fromkeys(("mse", "rmse", "mae", "mape", "pinball"), False),
    "r2": True,
    **dict.fromkeys(("accuracy", "precision", "recall", "f1", "auc", "average_precision"), True),
    **dict.fromkeys(("log_loss", "brier"), False),
}
METRIC_NAMES = tuple(name for name in HIGHER_IS_BETTER if name not in ("brier", "pinball"))
"""The metrics that a training computes; the loss of quantiles is their pinball."""
OF_VALUES = ("mse", "rmse", "mae", "mape", "r2")
"""The metrics that compare numbers; all others compare classes."""
OF_RANKS = ("auc", "average_precision")
"""The metrics that need every row's probability at once."""


def check_metric_name(name: str, names: Collection[str] = METRIC_NAMES) -> None:
    """Refuse a name that no metric has.

    Args:
        name: as it was given.
        names: those that there are.

    Raises:
        ConfigError: names the nearest, and all.
    """
    if name not in names:
        near = difflib.get_close_matches(name.lower(), names, n=1, cutoff=0.5)
        meant = f"did you mean {near[0]!r}? " if near else ""
        raise ConfigError(f"there is no metric {name!r}: {meant}There are {', '.join(names)}")
