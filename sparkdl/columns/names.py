"""Names of columns in Spark's expressions: quoted as the user wrote them, or refused as ambiguous."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from sparkdl.errors import ConfigError, SchemaError


def quoted(name: str) -> str:
    """The name in backticks: the column itself, whatever dots and backticks are in it."""
    return "`" + name.replace("`", "``") + "`"


def stands_in_sql(name: str) -> bool:
    """Whether a text of SQL may name it: Spark puts variables in the place of ``${...}``, within backticks, too."""
    return "${" not in name


def tells_cases_apart(frame: Any) -> bool:
    """Whether the session of a DataFrame tells ``a`` from ``A``."""
    return str(frame.sparkSession.conf.get("spark.sql.caseSensitive", "false")).lower() == "true"


def folded(name: str, *, cases: bool) -> str:
    """What of a name tells it from others; ``cases`` tells ``a`` from ``A``."""
    return name if cases else name.lower()


def check_listed(parameter: str, names: Any) -> None:
    """Refuse one text where a list of names is wanted, whose letters would be taken for names.

    Raises:
        ConfigError: says how a list of one is written.
    """
    if isinstance(names, str):
        raise ConfigError(f"{parameter}={names!r} is one string: give a list of names, as in [{names!r}]")


def check_names(names: Sequence[str], used: Iterable[str], *, cases: bool = False) -> None:
    """Refuse columns that Spark finds under one name with others.

    Args:
        names: of all columns of a frame.
        used: those that will be read.
        cases: whether Spark tells ``a`` from ``A``.

    Raises:
        SchemaError: names them.
    """
    for name in used:
        alike = [candidate for candidate in names if folded(candidate, cases=cases) == folded(name, cases=cases)]
        if len(alike) > 1:
            raise SchemaError(
                f"the frame has {len(alike)} columns of the name {name!r}, {alike}, which Spark does not tell apart: "
                "rename or drop all but one"
            )
