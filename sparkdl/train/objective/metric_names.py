"""The names of metrics, and what each says: a table without torch, for whoever checks a name before anything runs.

Enters: nothing. Leaves: which names there are, of values or of classes, and which way is better.
"""

from __future__ import annotations

import difflib

from sparkdl.errors import ConfigError

__all__ = ["HIGHER_IS_BETTER", "METRIC_NAMES", "OF_RANKS", "OF_VALUES", "check_metric_name"]

HIGHER_IS_BETTER = {
    **dict.fromkeys(("mse", "rmse", "mae", "mape"), False),
    "r2": True,
    **dict.fromkeys(("accuracy", "precision", "recall", "f1", "auc", "average_precision"), True),
    "log_loss": False,
}
METRIC_NAMES = tuple(HIGHER_IS_BETTER)
OF_VALUES = ("mse", "rmse", "mae", "mape", "r2")
"""Those that compare numbers; all others compare classes."""
OF_RANKS = ("auc", "average_precision")
"""Those that need every row's probability at once."""


def check_metric_name(name: str) -> None:
    """Refuse a name that no metric has.

    Raises:
        ConfigError: names the nearest, and all.
    """
    if name not in METRIC_NAMES:
        near = difflib.get_close_matches(name.lower(), METRIC_NAMES, n=1, cutoff=0.5)
        meant = f"did you mean {near[0]!r}? " if near else ""
        raise ConfigError(f"metrics has no name {name!r}: {meant}There are {', '.join(METRIC_NAMES)}")
