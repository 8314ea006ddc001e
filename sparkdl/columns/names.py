"""Names of columns, as Spark's expressions take them.

A name as the user wrote it, with whatever dots, backticks and cases, is quoted, or refused where Spark would find
several columns under it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from sparkdl.errors import SchemaError

__all__ = ["check_names", "quoted"]


def quoted(name: str) -> str:
    """The name in backticks: the column itself, whatever dots and backticks are in it."""
    return "`" + name.replace("`", "``") + "`"


def check_names(names: Sequence[str], used: Iterable[str]) -> None:
    """Refuse columns that Spark finds under one name with others.

    Args:
        names: of all columns of a frame.
        used: those that will be read.

    Raises:
        SchemaError: names them.
    """
    for name in used:
        same = [one for one in names if one.lower() == name.lower()]
        if len(same) > 1:
            raise SchemaError(
                f"the frame has {len(same)} columns of the name {name!r}, {same}, which Spark does not tell apart: "
                "rename or drop all but one"
            )
