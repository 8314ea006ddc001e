"""What becomes of each row: kept, quarantined for a reason, or dropped as a duplicate.

Enters: rows with their windows, the expectations of a pipeline file, the key. Leaves: the same rows, none fewer and
none more, with the column ``_outcome``. Their books are made where they are written, see ``sift.py``.

Every condition is evaluated once, and what is not true is broken, NULL included: so a row is never in both tables and
never in neither. Of rows with one key in one window one stays: a sound one before a broken one, the newest by the
source's time, and of several the one whose content hashes lowest; it follows from the rows, not from their order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from sparkdl.columns.names import quoted
from sparkdl.errors import ConfigError, DataError, SchemaError
from sparkdl.observe import logger
from sparkdl.pipeline.rows.source import MALFORMED, WINDOW
from sparkdl.pipeline.rows.windows import NO_TIME
from sparkdl.pipeline.spec import Expectation

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

__all__ = [
    "DUPLICATE",
    "KEPT",
    "OUTCOME",
    "OWN",
    "SALT",
    "WARNED",
    "Outcomes",
    "check_shares",
    "content_hash",
    "judged",
]

OUTCOME, WARNED, SALT = "_outcome", "_warned", "_salt"
KEPT, DUPLICATE = "", "duplicate"
"""Outcomes of rows that are sound, and of rows whose key another row has; every other outcome is a reason."""
OWN = frozenset({WINDOW, MALFORMED, OUTCOME, WARNED, SALT})
"""The columns that the pipeline adds."""
NOT_DATED, NOT_WHOLE = "no time that can be read", "malformed in its file"


def judged(
    frame: DataFrame, expectations: Mapping[str, Expectation], key: Sequence[str] = (), newest: str | None = None
) -> DataFrame:
    """Add ``_outcome`` and ``_warned`` (the names of warnings that a row broke) to every row.

    Args:
        frame: rows with ``_window``; with ``_salt``, too, which then follows from the key, where those of a window are
            gathered in several parts.
        expectations: by name.
        key: columns that tell rows apart; without, no row is a duplicate.
        newest: the column by which the newest of rows with one key stays.

    Raises:
        ConfigError: a condition is no SQL over these columns.
        SchemaError: a column of the key is missing.
    """
    from pyspark.sql import Window
    from pyspark.sql import functions as F

    missing = [name for name in key if name not in frame.columns]
    if missing:
        raise SchemaError(f"source.key names {missing[0]!r}, the rows have {frame.columns}: name one of these")
    broken = {name: ~F.coalesce(_condition(frame, name, each), F.lit(False)) for name, each in expectations.items()}
    reasons = [F.when(F.col(WINDOW) == NO_TIME, F.lit(NOT_DATED))]
    if MALFORMED in frame.columns:
        reasons.append(F.when(F.col(MALFORMED).isNotNull(), F.lit(NOT_WHOLE)))
    reasons += [F.when(no, F.lit(name)) for name, no in broken.items() if expectations[name].action != "warn"]
    warnings = [F.when(no, F.lit(name)) for name, no in broken.items() if expectations[name].action == "warn"]
    warned = F.array_compact(F.array(*warnings)) if warnings else F.array().cast("array<string>")
    rows = frame.withColumns({OUTCOME: F.coalesce(*reasons, F.lit(KEPT)), WARNED: warned})
    if not key:
        return rows
    order = [F.col(OUTCOME) != KEPT, content_hash(frame)]
    if newest is not None:
        order.insert(1, F.col(quoted(newest)).desc_nulls_last())
    gathered = [name for name in (WINDOW, SALT) if name in frame.columns]  # so that rows are not moved once more
    same = Window.partitionBy(*gathered, *[F.col(quoted(name)) for name in key]).orderBy(*order)
    keyed = ~F.greatest(F.lit(False), *[F.col(quoted(name)).isNull() for name in key])
    copy = keyed & (F.row_number().over(same) > 1)
    return rows.withColumn(OUTCOME, F.when(copy, F.lit(DUPLICATE)).otherwise(F.col(OUTCOME)))


def content_hash(frame: DataFrame) -> Column:
    """A hash of a row's values, bigint; the columns that the pipeline adds do not count."""
    from pyspark.sql import functions as F
    from pyspark.sql.types import MapType, VariantType

    columns = []
    for each in frame.schema.fields:
        if each.name not in OWN:
            column = F.col(quoted(each.name))  # Spark hashes neither maps nor variants: their text stands for them
            textual = isinstance(each.dataType, MapType | VariantType)
            columns.append(F.to_json(column) if textual else column)
    return F.xxhash64(*columns)


@dataclass(kw_only=True)
class Outcomes:
    """What became of the rows of one window.

    Attributes:
        rows: by outcome.
        warned: rows by the warning that they broke.
        content: a hash of the rows kept that their order does not change.
    """

    rows: dict[str, int] = field(default_factory=dict)
    warned: dict[str, int] = field(default_factory=dict)
    content: str = ""

    @property
    def total(self) -> int:
        """All rows of the window."""
        return sum(self.rows.values())

    @property
    def quarantined(self) -> dict[str, int]:
        """Rows by the reason that they were refused for."""
        return {reason: rows for reason, rows in self.rows.items() if reason not in (KEPT, DUPLICATE)}


def check_shares(found: Mapping[str, Outcomes], expectations: Mapping[str, Expectation]) -> None:
    """Compare what was broken with what each expectation bears, window by window; a warning is logged.

    Raises:
        DataError: an expectation with the action ``fail`` is broken by a greater share of rows than it bears; names
            all windows and expectations.
    """
    failed = []
    for window, outcomes in sorted(found.items()):
        for name, each in expectations.items():
            broken = outcomes.rows.get(name, 0) + outcomes.warned.get(name, 0)
            if not broken or broken <= each.above * outcomes.total or each.action == "quarantine":
                continue
            text = (
                f"{name!r} ({each.check}) is broken by {broken} of the {outcomes.total} rows of window {window}, "
                f"above its {each.above:.2%}"
            )
            if each.action == "warn":
                logger.warning("expectation %s", text)
            else:
                failed.append(text)
    if failed:
        raise DataError(
            f"expectation {'; '.join(failed)}: nothing of this run was written; mend the source, or allow more with "
            "above in expect"
        )


def _condition(frame: DataFrame, name: str, each: Expectation) -> Column:
    """The condition as a column, analysed against the rows at once, so that what is wrong with it is said by name."""
    from pyspark.errors import AnalysisException, ParseException
    from pyspark.sql import functions as F

    try:
        condition = F.expr(each.check)
        kind = frame.select(condition.alias("condition")).schema["condition"].dataType.typeName()
    except (AnalysisException, ParseException) as error:
        reason = str(error).partition("\n")[0]
        raise ConfigError(f"expect.{name}: {each.check!r} cannot be asked of the rows: {reason}") from error
    if kind != "boolean":
        raise ConfigError(f"expect.{name}: {each.check!r} is a {kind}: write a condition that is true or false")
    return condition
